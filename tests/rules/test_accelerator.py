"""The path of accelerators, run by torch on the CPU, against the kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers import (
    DTYPES,
    ROUNDING,
    averages,
    bits,
    doubles,
    examples,
    hostile_values,
    pipelines,
    stored,
    strongest,
)

import phocas
from phocas import Rule
from phocas.rules import accelerator, execution, inputs
from phocas.rules.accelerator import DeviceMatrix, window_mean
from phocas.rules.base import plan_of

M = 11


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that aggregates tensors as if they were elsewhere."""

    def aggregate(rule: Rule, tensor: torch.Tensor, *, explain: bool = False) -> Any:
        with monkeypatch.context() as patch:

            def open_there(rows: Any) -> DeviceMatrix:
                return DeviceMatrix([rows], lambda answers: answers[0])

            patch.setattr("phocas.rules.base.open_rows", open_there)
            return rule.explain(tensor) if explain else rule(tensor)

    return aggregate


def tensor_of(values: np.ndarray, dtype: str) -> torch.Tensor:
    rows = stored(values, dtype)
    return rows if isinstance(rows, torch.Tensor) else torch.from_numpy(rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", examples(M) + pipelines(M), ids=str)
def test_same_semantics_as_the_kernels(forced: Any, rule: Rule, dtype: str) -> None:
    rng = np.random.default_rng(0)
    for wrong in (0, 1):
        values = rng.normal(size=(M, 60))
        last = rule.rule if isinstance(rule, phocas.Pipeline) else rule
        if wrong and getattr(last, "b", 1) and not averages(rule):
            values[4] = rng.choice(hostile_values(dtype)[:3], 60)
        rows = tensor_of(values, dtype)
        before = bits(rows)
        here, there = rule.explain(rows), forced(rule, rows, explain=True)
        assert there.value.dtype == rows.dtype
        assert bits(rows) == before
        computed = ROUNDING["float64" if dtype == "float64" else "float32"]
        slack = 2 * ROUNDING[dtype] + 3000 * computed
        # Weiszfeld stops when steps are small, perhaps one earlier.
        slack += 1e-5 if "geometric" in str(rule) else 0
        got, wanted = doubles(there.value), doubles(here.value)
        np.testing.assert_array_equal(np.isfinite(got), np.isfinite(wanted))
        scale = np.abs(wanted[np.isfinite(wanted)]).max(initial=1.0)
        np.testing.assert_allclose(got, wanted, rtol=0, atol=slack * scale)
        assert there.expected == here.expected
        # A value may be within rounding of the edge of the window.
        np.testing.assert_allclose(there.dropped, here.dropped, rtol=0, atol=2 / 60)
        assert np.abs(there.dropped - here.dropped).mean() < 0.01


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", [r for r in examples(M) if r.columnwise], ids=str)
def test_windows_with_byzantine_values_in_any_cells(forced: Any, rule: Rule, dtype: str) -> None:
    rng = np.random.default_rng(1)
    values = rng.normal(size=(M, 200))
    b = int(getattr(rule, "b", (M - 1) // 2 if not averages(rule) else 0))
    for column in values.T:
        column[rng.permutation(M)[:b]] = rng.choice(hostile_values(dtype), b)
    rows = tensor_of(values, dtype)
    got, wanted = doubles(forced(rule, rows)), doubles(rule(rows))
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, wanted, rtol=4 * ROUNDING[dtype], atol=20 * ROUNDING[dtype])


@pytest.mark.parametrize("rule", [r for r in strongest(9) if r.columnwise], ids=str)
def test_subnormal_and_huge_values_stay_within(forced: Any, rule: Rule) -> None:
    if averages(rule):
        return
    rng = np.random.default_rng(2)
    small = torch.from_numpy((rng.integers(-9, 10, size=(9, 500)) * 1.4e-45).astype(np.float32))
    huge = torch.from_numpy((np.clip(rng.normal(size=(9, 500)), -3, 3) * 1e38).astype(np.float32))
    for rows in (small, huge):
        got = forced(rule, rows)
        assert bool(((got >= rows.amin(dim=0)) & (got <= rows.amax(dim=0))).all())


@pytest.mark.parametrize("m", [2, 3, 6, 7])
def test_windows_that_drop_more_than_half(m: int) -> None:
    rng = np.random.default_rng(m)
    rows = torch.from_numpy(rng.integers(-9, 10, size=(m, 60)) / 8)
    for drop in range(1, m):
        trim = (m - 1) // 2
        if trim < drop and 2 * trim + 2 < m:
            continue
        value, _ = window_mean(rows, phocas.kernels.Window(trim, drop))
        from phocas.rules.reference import nearest, trimmed

        columns = rows.numpy().T
        wanted = [nearest(c, trimmed(c, trim), m - drop) for c in columns]
        np.testing.assert_allclose(value.numpy(), wanted, atol=1e-14)


def test_blocks_change_nothing(forced: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.from_numpy(np.random.default_rng(3).normal(size=(M, 500)))
    for rule in strongest(M):
        whole = forced(rule, rows, explain=True)
        monkeypatch.setattr(accelerator, "BLOCK_VALUES", M * 64)
        cut = forced(rule, rows, explain=True)
        monkeypatch.undo()
        torch.testing.assert_close(cut.value, whole.value, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(cut.dropped, whole.dropped, atol=1e-9)


def test_no_columns(forced: Any) -> None:
    for rule in strongest(M):
        assert forced(rule, torch.empty(M, 0)).shape == (0,)


def test_containers_of_tensors_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors and mappings on a device are stacked there; answers get their shapes back."""

    class Elsewhere:
        type = "elsewhere"

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Elsewhere)

        __hash__ = None  # type: ignore[assignment]

    values = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    wanted = values.median(dim=0).values
    monkeypatch.setattr(torch.Tensor, "device", property(lambda _: Elsewhere()))
    opened = [
        inputs.open_rows(values),
        inputs.open_rows(list(values)),
        inputs.open_rows([{"a": row[:4].reshape(2, 2), "b": row[4:]} for row in values]),
        inputs.open_rows([[row, torch.tensor(i)] for i, row in enumerate(values)]),
    ]
    monkeypatch.undo()
    assert all(isinstance(matrix, DeviceMatrix) for matrix in opened)
    plan = plan_of(phocas.Median(), 5)
    answers = [execution.aggregate(plan, matrix) for matrix in opened]
    torch.testing.assert_close(answers[0], wanted)
    torch.testing.assert_close(answers[1], wanted)
    assert answers[2]["a"].shape == (2, 2)
    torch.testing.assert_close(torch.cat([answers[2]["a"].reshape(-1), answers[2]["b"]]), wanted)
    torch.testing.assert_close(answers[3], [wanted, torch.tensor(2)])
