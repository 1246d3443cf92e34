"""Which kernels rows on a device take, and what is said when the better ones cannot be had."""

from __future__ import annotations

import builtins
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import phocas
from phocas.kernels import Window
from phocas.kernels.triton import KernelError, calls, loader
from phocas.kernels.triton.loader import Kernel
from phocas.rules import device, execution, inputs
from phocas.rules.accelerator import DeviceMatrix
from phocas.rules.algebra import UNMIXED, OutlierShares
from phocas.rules.base import plan_of
from phocas.rules.execution import Matrix

CUDA = torch.device("cuda", 0)


def median(matrix: Matrix) -> Any:
    return execution.aggregate(plan_of(phocas.Median(), matrix.m), matrix)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(device.VARIABLE, raising=False)
    monkeypatch.setattr(device, "_said", set())
    loader.obstacle.cache_clear()
    yield
    loader.obstacle.cache_clear()


def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)


def with_triton(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    module = types.ModuleType("triton")
    module.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton", module)


@pytest.mark.parametrize("version", ["3.9.0", "3.10rc1", "3.5.0+git5b2"])
def test_devices_of_triton_take_its_kernels(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_triton(monkeypatch, version)
    assert device.path(CUDA)[0] == "triton"
    for other in ("cpu", "mps", "xpu"):
        choice, why = device.path(torch.device(other))
        assert choice == "torch"
        assert other in why


@pytest.mark.parametrize("choice", device.CHOICES)
def test_a_choice_is_heard(choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(device.VARIABLE, choice)
    assert device.path(CUDA)[0] == choice
    assert device.path(torch.device("cpu"))[0] == choice


def test_unknown_choice_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(device.VARIABLE, "cuda")
    message = "PHOCAS_DEVICE_KERNELS must be triton or torch: got 'cuda'"
    with pytest.raises(ValueError, match=message):
        device.path(CUDA)


def test_without_triton_torch_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    without_triton(monkeypatch)
    choice, why = device.path(CUDA)
    assert choice == "torch"
    assert why.endswith("pip install 'phocas[gpu]'")


def test_an_old_triton_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    with_triton(monkeypatch, "3.4.1")
    assert device.path(CUDA) == ("torch", "Triton must be 3.5 or newer: got 3.4.1")


def test_to_insist_without_triton_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    without_triton(monkeypatch)
    monkeypatch.setenv(device.VARIABLE, "triton")
    matrix = device.open_device([torch.ones(3, 4)], lambda answers: answers[0])
    with pytest.raises(KernelError, match="cannot be imported"):
        median(matrix)


def test_a_kernel_that_cannot_be_compiled_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In words, without another try; everything is then computed by torch."""
    tried = []

    class Broken:
        def __getitem__(self, grid: Any) -> Any:
            tried.append(grid)
            raise RuntimeError("Failed to find C compiler.\nPlease specify one")

    kernel = Kernel(Broken())
    monkeypatch.setattr("phocas.kernels.triton.calls._window_kernel", lambda *_, **__: kernel)
    monkeypatch.setattr(device, "path", lambda _: ("triton", ""))
    rows = torch.tensor([[1.0, 5.0], [2.0, 6.0], [900.0, 7.0]])
    matrix = device.open_device([list(rows)], lambda answers: answers[0])
    with pytest.warns(RuntimeWarning, match="could not make a kernel for cpu: Please specify one"):
        first = median(matrix)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = median(matrix)
    assert len(tried) == 1
    for value in (first, second):
        torch.testing.assert_close(value, torch.tensor([2.0, 6.0]))


def test_counts_of_a_failed_try_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def half(self: Any, reduction: Any, start: int, rows: Any, out: Any, counts: Any) -> Any:
        counts += 5
        raise KernelError("no")

    monkeypatch.setattr(device.KernelMatrix, "reduce_block", half)
    monkeypatch.setattr(device, "path", lambda _: ("triton", ""))
    rows = torch.tensor([[1.0], [2.0], [900.0]])
    monkeypatch.setattr(inputs, "_on_accelerator", lambda _: True)
    with pytest.warns(RuntimeWarning, match="no; torch's operations"):
        assert phocas.TrimmedMean(1).explain(rows).dropped.tolist() == [1.0, 0.0, 1.0]


def test_what_the_kernels_do_not_know_is_not_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(device.VARIABLE, "triton")
    matrix = device.open_device([torch.ones(3, 4)], lambda answers: answers[0])
    with pytest.raises(KernelError, match="do not run a function"):
        matrix.apply(max, UNMIXED)
    with pytest.raises(KernelError, match="do not filter cells"):
        matrix.outliers(OutlierShares(Window(1, 1, cutoff=4.0)))


def test_rows_may_be_farther_apart_than_32_bits_reach() -> None:
    """Addresses only: nobody reads these rows, of which there is one value."""
    step = 1 << 35
    far = np.lib.stride_tricks.as_strided(np.zeros(1), (5, 3), (step, 8))
    rows = calls.DeviceRows.of(torch.from_numpy(far))
    assert rows.table.diff().tolist() == [step] * 4
    assert (rows.shifted(step, step + 1).table - rows.table).tolist() == [8 * step] * 5


def test_nothing_of_triton_is_loaded_for_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(device.VARIABLE, "torch")
    real = builtins.__import__

    def guarded(name: str, *args: Any, **kwargs: Any) -> Any:
        assert name.partition(".")[0] != "triton"
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", guarded)
    matrix = device.open_device([torch.ones(3, 4)], lambda answers: answers[0])
    assert isinstance(matrix, DeviceMatrix)
    assert median(matrix).tolist() == [1.0] * 4


def test_bad_rows_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "_on_accelerator", lambda _: True)
    with pytest.raises(TypeError, match=r"values must be float16, .* got int32"):
        phocas.Median()(torch.ones(3, 4, dtype=torch.int32))
    with pytest.raises(TypeError, match=r"tensors must be dense: the matrix is torch\.sparse_coo"):
        phocas.Median()(torch.ones(3, 4).to_sparse())
    with pytest.raises(TypeError, match="tensors must be dense: a row is"):
        phocas.Median()([torch.ones(4).to_sparse()] * 3)
    rows = [{"a": torch.ones(2), "b": torch.ones(2, dtype=torch.float64)}] * 3
    with pytest.raises(TypeError, match="one dtype: got float32, float64"):
        phocas.Median()(rows)
    with pytest.raises(ValueError, match="row 1 is on meta, row 0 on cpu"):
        phocas.Median()([torch.ones(2), torch.ones(2, device="meta")])
    named = [{"a": torch.ones(2), "b": torch.ones(2, device="meta")}] * 3
    with pytest.raises(ValueError, match="on one device: got cpu, meta"):
        phocas.Median()(named)
