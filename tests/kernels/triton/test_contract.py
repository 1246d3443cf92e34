"""The contract of the rules table, by the kernels in Triton, run by its interpreter on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.rules import test_contract as contract

pytest.importorskip("triton")

from phocas.kernels.triton.loader import interpreted
from phocas.rules import base, device

pytestmark = [
    pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1"),
    # What NumPy says of NaN and infinity, in whose stead devices say nothing.
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]

globals().update({name: each for name, each in vars(contract).items() if name.startswith("test_")})


@pytest.fixture(autouse=True)
def known(request: pytest.FixtureRequest) -> None:
    """Leave out rules that clean: on a device that is left to torch's operations."""
    called = getattr(request.node, "callspec", None)
    if called is not None and "cleaning" in str(called.params.get("rule")):
        pytest.skip("Triton's kernels know nothing of cleaned rows")


@pytest.fixture(autouse=True, scope="module")
def kernels() -> Iterator[None]:
    """Open arrays as tensors on a device would be, and never fall back on torch."""

    def open_there(rows: Any) -> device.KernelMatrix:
        return device.KernelMatrix([torch.from_numpy(rows)], lambda answers: answers[0].numpy())

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(device.VARIABLE, "triton")
        patch.setattr(base, "open_rows", open_there)
        yield
