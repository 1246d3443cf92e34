"""How tests run here: hypothesis without chance or clock, and long files first on every core."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

if "PYTEST_XDIST_WORKER" in os.environ:
    # There is a process of tests for each core: torch's threads would only wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile(
    "phocas",
    derandomize=True,
    deadline=None,  # a first use compiles
    max_examples=2 if os.environ.get("TRITON_INTERPRET") else 20,  # interpreted, each takes long
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("phocas")

# Files that take 15 s or more, the longest first. A file runs on one core, so that a long one at
# the end would leave the others idle.
LONG = (
    "integrations/test_fsdp.py",
    "experiments/reproduction/test_tasks.py",
    "integrations/test_ddp.py",
    "training/test_mnist.py",
    "integrations/test_meshes.py",
    "rules/test_contract.py",
    "experiments/reproduction/test_rare_study.py",
    "experiments/reproduction/test_curves.py",
    "rules/test_tolerance.py",
    "integrations/test_faults.py",
    "experiments/test_sweep.py",
    "cli/test_bad_input.py",
    "integrations/test_replay.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of long files first, where several processes run tests."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=_place)


def _place(item: pytest.Item) -> int:
    """Return the place of a test's file among the long ones, or the place after them."""
    file = item.path.as_posix()
    return next((place for place, name in enumerate(LONG) if file.endswith(name)), len(LONG))
