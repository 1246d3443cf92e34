"""How hypothesis runs here: the same examples every time, and no clock."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "phocas",
    derandomize=True,
    deadline=None,  # a first use compiles
    max_examples=2 if os.environ.get("TRITON_INTERPRET") else 40,  # interpreted, each takes long
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("phocas")
