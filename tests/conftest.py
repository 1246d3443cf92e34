"""How hypothesis runs here: the same examples every time, and no clock."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "phocas",
    derandomize=True,
    deadline=None,  # a first use compiles
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("phocas")
