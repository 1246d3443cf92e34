"""The contract of all rules for the Triton kernels, run by Triton's interpreter on the CPU."""

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
    # NumPy's warnings about NaN and infinity, which devices do not give.
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]

globals().update({name: each for name, each in vars(contract).items() if name.startswith("test_")})


@pytest.fixture(autouse=True)
def known(request: pytest.FixtureRequest) -> None:
    """Skip rules with a cell filter, which torch's operations compute on a device."""
    called = getattr(request.node, "callspec", None)
    if called is not None and "cell-filter" in str(called.params.get("rule")):
        pytest.skip("Triton's kernels do not filter cells")


@pytest.fixture(autouse=True, scope="module")
def kernels() -> Iterator[None]:
    """Open arrays as tensors on a device, and never fall back to torch."""

    def open_there(rows: Any) -> device.KernelMatrix:
        return device.KernelMatrix([torch.from_numpy(rows)], lambda answers: answers[0].numpy())

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(device.VARIABLE, "triton")
        patch.setattr(base, "open_rows", open_there)
        yield
