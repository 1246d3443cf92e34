"""The Triton kernels, run by Triton's interpreter on the CPU, have the bits of the CPU kernels."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers import (
    DTYPES,
    averages,
    bits,
    doubles,
    examples,
    hostile_values,
    pipelines,
    stored,
    strongest,
)

pytest.importorskip("triton")

import phocas
from phocas import Pipeline, Rule, kernels
from phocas.experiments import doctor
from phocas.kernels import PLAIN_MEAN, Window
from phocas.kernels.emit import ELEMENTS
from phocas.kernels.triton import KernelError, calls
from phocas.kernels.triton.loader import interpreted, load
from phocas.kernels.triton.windows import window_source
from phocas.rules import device
from phocas.rules.algebra import Distances, Norms
from phocas.rules.base import plan_of
from phocas.rules.measures import rows_of

pytestmark = [
    pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1"),
    # NumPy's warnings about NaN and infinity, which devices do not give.
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]
M = 11
Aggregate = Callable[..., Any]


@pytest.fixture(autouse=True)
def insist(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the fallback, which would compare torch with the CPU kernels and pass."""
    monkeypatch.setenv(device.VARIABLE, "triton")


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Aggregate:
    """Return a function that explains tensors as if they were on a device."""

    def explain(rule: Rule, rows: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr("phocas.rules.inputs._on_accelerator", lambda _: True)
            return rule.explain(rows)

    return explain


def tensor_of(values: np.ndarray, dtype: str) -> torch.Tensor:
    rows = stored(values, dtype)
    return rows if isinstance(rows, torch.Tensor) else torch.from_numpy(rows)


def with_byzantine_rows(rule: Rule, dtype: str, d: int = 37) -> torch.Tensor:
    """Return rows of which one is Byzantine, if the rule tolerates that."""
    rng = np.random.default_rng(len(str(rule)))
    values = rng.normal(size=(M, d))
    last = rule.rule if isinstance(rule, Pipeline) else rule
    if getattr(last, "b", 1) and not averages(rule):
        values[4] = rng.choice(hostile_values(dtype)[:7], d)
    return tensor_of(values, dtype)


def honest(dtype: str) -> torch.Tensor:
    return tensor_of(np.random.default_rng(0).normal(size=(M, 37)), dtype)


def known(rule: Rule) -> bool:
    """Return whether the kernels support a rule; filtered rows are computed by torch."""
    return plan_of(rule, M).filtering is None


EVERY_RULE = list(filter(known, examples(M) + pipelines(M)))
STRONGEST = list(filter(known, strongest(M)))
CELL_FILTERS = [rule for rule in pipelines(M) if not known(rule)]


def same(there: Any, here: Any) -> None:
    assert there.value.dtype == here.value.dtype
    assert bits(there.value) == bits(here.value)
    np.testing.assert_array_equal(there.dropped, here.dropped)
    assert there.expected == here.expected


@pytest.mark.parametrize("rule", EVERY_RULE, ids=str)
def test_every_rule_gives_the_bits_of_the_cpu(there: Aggregate, rule: Rule) -> None:
    if isinstance(rule, phocas.Heraclius):
        rule = replace(rule, tail=0.0)  # torch operations add the tail, in another order
    rows = with_byzantine_rows(rule, "float32")
    before = bits(rows)
    same(there(rule, rows), rule.explain(rows))
    assert bits(rows) == before


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("rule", [*STRONGEST, phocas.NNM(3) | phocas.Phocas(3)], ids=str)
def test_every_dtype_gives_the_bits_of_the_cpu(there: Aggregate, rule: Rule, dtype: str) -> None:
    rows = with_byzantine_rows(rule, dtype)
    same(there(rule, rows), rule.explain(rows))


@pytest.mark.parametrize("rule", CELL_FILTERS, ids=str)
def test_filtered_rows_are_computed_by_torch(
    there: Aggregate, rule: Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = honest("float32")
    with pytest.raises(KernelError, match="do not filter cells"):
        there(rule, rows)
    monkeypatch.setenv(device.VARIABLE, "torch")
    wanted = there(rule, rows)
    monkeypatch.delenv(device.VARIABLE)
    monkeypatch.setattr(device, "path", lambda _: ("triton", ""))
    monkeypatch.setattr(device, "_said", set())
    with pytest.warns(RuntimeWarning, match=r"filter cells.*torch's operations are used"):
        got = there(rule, rows)
    np.testing.assert_allclose(got.value, wanted.value, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got.dropped, wanted.dropped, rtol=1e-9)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 2, 3, 7, 16, 23])
def test_windows_with_byzantine_values_in_any_cells(m: int, dtype: str) -> None:
    """Rows of all sizes, a block of columns and a few more, and hostile values."""
    rng = np.random.default_rng(m)
    values = rng.normal(size=(m, calls.BLOCK + 3))
    b = (m - 1) // 2
    for column in values.T:
        column[rng.permutation(m)[:b]] = rng.choice(hostile_values(dtype), b)
    rows = tensor_of(values, dtype)
    windows = {Window(), Window(b), Window(b // 2)}
    windows |= {Window(b, b), Window(b, b // 2 + 1)} if b else set()
    windows |= {Window(b, m - 1)} if m % 2 and b else set()
    for window in windows:
        out, counts = torch.empty_like(rows[0]), np.zeros(m, np.int64)
        calls.reduce(calls.DeviceRows.of(rows), window, out, counts)
        wanted, lost = torch.empty_like(rows[0]), np.zeros(m, np.int64)
        here = rows.view(torch.uint16) if dtype == "bfloat16" else rows
        kernels.reduce(rows_of(here.numpy(), dtype), window, wanted.data_ptr(), lost)
        # A minimum of -0.0 and 0.0 may be either, so zeros may have any sign.
        np.testing.assert_array_equal(doubles(out), doubles(wanted))
        np.testing.assert_array_equal(counts, lost)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_deviations_of_blocks_have_the_bits_of_the_cpu(dtype: str) -> None:
    rng = np.random.default_rng(0)
    block = kernels.BLOCK_COLUMNS
    drawn = np.abs(rng.normal(size=9 * block + 5)) * 10.0 ** rng.integers(-3, 3, 9 * block + 5)
    info = np.finfo(dtype)
    extremes = [np.nan, np.inf, float(info.max), float(info.smallest_subnormal), float(info.tiny)]
    for number, value in enumerate(extremes):
        drawn[number * block : (number + 1) * block] = rng.choice([value, 0.0], block)
    for d in (1, 17, block, len(drawn)):
        radii = drawn[-d:].astype(dtype)
        found = calls.Spreads.of(torch.from_numpy(radii), 4.0).values.numpy()
        wanted = [kernels.spread(radii[start : start + block]) for start in range(0, d, block)]
        assert bits(found) == bits(np.array(wanted, dtype))


WITH_CUTOFF = [
    phocas.Heraclius(3, tail=0),
    phocas.Heraclius(3, 0.5, tail=0),
    phocas.Monitor(phocas.Heraclius(2, tail=0)),
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_tail_is_that_of_the_cpu(there: Aggregate, dtype: str) -> None:
    values = np.random.default_rng(3).normal(size=(7, kernels.BLOCK_COLUMNS + 40))
    values[:, 100:] *= np.random.default_rng(4).random((7, kernels.BLOCK_COLUMNS - 60)) < 0.05
    values[2, 7], values[3] = np.nan, -np.inf
    rows = tensor_of(values, dtype)
    rule = phocas.Heraclius(2)
    found, wanted = there(rule, rows), rule.explain(rows)
    slack = {"float64": 1e-12, "float32": 1e-6, "float16": 4e-3, "bfloat16": 3e-2}[dtype]
    np.testing.assert_allclose(doubles(found.value), doubles(wanted.value), atol=slack)
    assert np.abs(doubles(wanted.value) - doubles(phocas.Heraclius(2, tail=0)(rows))).max() > 0.1
    np.testing.assert_allclose(found.dropped, wanted.dropped, atol=2 / values.shape[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", WITH_CUTOFF, ids=str)
def test_blocks_are_those_of_the_whole_matrix(
    there: Aggregate, rule: Rule, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of columns may lie in several tensors, and in several parts of one."""
    m, block = 7, kernels.BLOCK_COLUMNS
    rng = np.random.default_rng(3)
    values = rng.standard_t(3, size=(m, block + 40)) * 10.0 ** rng.integers(-3, 1, block + 40)
    values[rng.random(values.shape) < 0.3] = 0
    for column in values.T[:, : block // 8 if averages(rule) else None]:
        column[rng.permutation(m)[:2]] = rng.choice(hostile_values(dtype), 2)
    rows = tensor_of(values, dtype)
    same(there(rule, rows), rule.explain(rows))
    cuts = [0, 9, block - 3, block - 2, block + 7, block + 40]
    named = [{str(start): row[start:stop] for start, stop in pairwise(cuts)} for row in rows]
    monkeypatch.setattr(device, "BLOCK_VALUES", m * 300)
    found, wanted = there(rule, named), rule.explain(named)
    assert bits(found.value) == bits(wanted.value)
    np.testing.assert_array_equal(found.dropped, wanted.dropped)


@pytest.mark.parametrize("rule", [phocas.NNM(2) | phocas.Heraclius(2), WITH_CUTOFF[0]], ids=str)
def test_column_without_enough_finite_values_is_not_finite(there: Aggregate, rule: Rule) -> None:
    rows = honest("float32")
    rows[:6, 3], rows[:7, 5], rows[2:8, 9] = torch.nan, torch.inf, -torch.inf
    found, wanted = there(rule, rows), rule.explain(rows)
    np.testing.assert_array_equal(found.value.isfinite(), wanted.value.isfinite())
    if rule in WITH_CUTOFF:
        finite = wanted.value.isfinite()
        assert not finite[[3, 5, 9]].any()
        assert bits(found.value[finite]) == bits(wanted.value[finite])


def test_means_of_tiny_and_huge_values_stay_within_their_range() -> None:
    rng = np.random.default_rng(2)
    small = torch.from_numpy((rng.integers(-9, 10, size=(9, 60)) * 1.4e-45).astype(np.float32))
    huge = torch.from_numpy((np.clip(rng.normal(size=(9, 60)), -3, 3) * 1e38).astype(np.float32))
    for rows in (small, huge, rows_with_one_tiny_column()):
        for window in (Window(4), Window(3), Window(4, 4), Window(4, 7), Window(4, 4, cutoff=2.0)):
            out, radii = torch.empty_like(rows[0]), torch.empty_like(rows[0])
            calls.radii(calls.DeviceRows.of(rows), window, radii)
            calls.reduce(calls.DeviceRows.of(rows), window, out, None, calls.Spreads.of(radii, 2.0))
            assert bool(((out >= rows.amin(dim=0)) & (out <= rows.amax(dim=0))).all())


def rows_with_one_tiny_column() -> torch.Tensor:
    rows = torch.from_numpy(np.random.default_rng(0).normal(size=(9, 60)).astype(np.float32))
    rows[:, 7] = 3 * 1.4e-45
    return rows


def test_the_mean_of_nan_is_nan() -> None:
    rows = torch.tensor([[1.0, torch.nan], [2.0, 3.0]])
    out = torch.empty(2)
    calls.reduce(calls.DeviceRows.of(rows), PLAIN_MEAN, out)
    assert out[0] == 1.5
    assert out[1].isnan()


REQUESTS = [
    Distances(),
    Distances(wide=True),
    Distances(origin=3),
    Distances(np.full((3, 5), 0.2) + np.eye(3, 5), wide=True, origin=1),
    Distances(scale=2.0**-300),
    Distances(np.full((3, 5), 0.2) + np.eye(3, 5), scale=2.0**400),
    Norms(),
    Norms(scale=2.0**-600),
]


@pytest.mark.parametrize("request_", REQUESTS)
def test_granules_are_those_of_the_whole_matrix(
    request_: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits do not depend on how columns are divided into tensors and sums into batches."""
    granule = kernels.granule_columns(5)
    drawn = np.random.default_rng(0).normal(size=(5, 2 * granule + 9))
    rows = torch.from_numpy(drawn.astype(np.float32))
    rows += 1000
    rows[3] = 1e20
    wanted = phocas.rules.inputs.open_rows(rows).measure(request_)

    def measured(cuts: list[int]) -> Any:
        pieces: list[Any] = list(rows.tensor_split(cuts, dim=1))
        pieces[0] = list(pieces[0])
        return device.open_device(pieces, lambda answers: answers).measure(request_)

    for cuts in ([], [5, granule, granule + 6, granule + 7, 2 * granule + 1], [2 * granule + 8]):
        np.testing.assert_array_equal(measured(cuts), wanted)
    monkeypatch.setattr(calls, "SUMS_BYTES", 1)
    np.testing.assert_array_equal(measured([granule + 100]), wanted)


@pytest.mark.parametrize(
    "rule",
    [phocas.Krum(2), phocas.NNM(2) | phocas.Phocas(2), phocas.CGE(2), phocas.GeometricMedian()],
    ids=str,
)
def test_shards_on_a_device_have_the_bits_of_the_whole(
    rule: Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each owner of columns measures its own, and all get the CPU's result."""
    m, granule = 7, kernels.granule_columns(7)
    drawn = np.random.default_rng(1).normal(size=(m, 2 * granule + 50)).astype(np.float32)
    drawn[2] = 1e20
    rows = torch.from_numpy(drawn)
    wanted = rule.explain(rows)
    cuts = list(pairwise([0, 30, granule + 1, 2 * granule + 50]))
    monkeypatch.setattr("phocas.rules.inputs._on_accelerator", lambda _: True)
    evaluation = phocas.ShardedAggregation(rule, m)
    while evaluation.request is not None:
        evaluation.answer([evaluation.partial(rows[:, a:b], a) for a, b in cuts])
    found = [evaluation.explain(rows[:, a:b], a) for a, b in cuts]
    assert bits(torch.cat([part.value for part in found])) == bits(wanted.value)
    widths = np.array([b - a for a, b in cuts])
    lost = widths @ np.stack([part.dropped for part in found]) / widths.sum()
    np.testing.assert_allclose(lost, wanted.dropped, atol=1e-12)


def test_cut_blocks_are_not_measured_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phocas.rules.inputs._on_accelerator", lambda _: True)
    evaluation = phocas.ShardedAggregation(phocas.Heraclius(2), 7)
    with pytest.raises(TypeError, match="must be in host memory: move the tensor to the CPU"):
        evaluation.partial(torch.ones(7, 9), 0)


@pytest.mark.parametrize("size", [1e-170, 1e170])
@pytest.mark.parametrize("rule", [phocas.Krum(3), phocas.NNM(3) | phocas.Phocas(3)], ids=str)
def test_squares_that_overflow_double_precision_are_infinite(
    there: Aggregate, rule: Rule, size: float
) -> None:
    rows = honest("float64") * size
    rows[4] *= 1000
    same(there(rule, rows), rule.explain(rows))


def test_distances_between_many_rows_agree_up_to_rounding() -> None:
    """The CPU computes those of more than 64 rows by products."""
    rows = torch.from_numpy(np.random.default_rng(0).normal(size=(66, 20)).astype(np.float32))
    wanted = phocas.rules.inputs.open_rows(rows).measure(Distances())
    got = device.open_device([rows], list).measure(Distances())
    np.testing.assert_allclose(got, wanted, rtol=1e-5)


def test_distances_survive_offsets_and_overflow() -> None:
    rng = np.random.default_rng(0)
    values = (1000 + rng.normal(size=(5, 40)) / 100).astype(np.float32)
    values[4] = 1e30
    got = device.open_device([torch.from_numpy(values)], list).measure(Distances())
    exact = ((values[:4, None].astype(np.float64) - values[None, :4]) ** 2).sum(axis=2)
    np.testing.assert_allclose(got[:4, :4], exact, rtol=1e-6)
    assert np.isposinf(got[4, :4]).all()
    assert not got.diagonal().any()


@pytest.mark.parametrize(
    "rule", [phocas.Phocas(3), phocas.MultiKrum(3), phocas.NNM(3) | phocas.Median()], ids=str
)
def test_rows_may_be_a_matrix_or_vectors_of_any_stride(there: Aggregate, rule: Rule) -> None:
    rows = with_byzantine_rows(rule, "float32", 24)
    wanted = rule.explain(rows)
    spread = torch.zeros(M, 60)[:, :24]
    spread[:] = rows
    gaps = torch.zeros(M, 24, 2)[:, :, 1]
    gaps[:] = rows
    backwards = rows.flip(1).flip(1).requires_grad_()
    for held in (spread, gaps, backwards, list(rows), list(gaps)):
        answer = there(rule, held)
        assert not answer.value.requires_grad
        same(answer, wanted)
    named = [{"a": row[:20].reshape(4, 5), "b": row[20:]} for row in rows]
    answer = there(rule, named)
    assert answer.value["a"].shape == (4, 5)
    assert bits(answer.value) == bits(wanted.value)
    np.testing.assert_array_equal(answer.dropped, wanted.dropped)


def test_no_columns(there: Aggregate) -> None:
    for rule in STRONGEST:
        assert there(rule, torch.empty(M, 0)).value.shape == (0,)


def test_size_of_blocks_changes_no_bit(there: Aggregate, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = phocas.NNM(3) | phocas.Phocas(3)
    rows = with_byzantine_rows(rule, "float32", 50)[:, ::2]
    wanted = there(rule, rows)
    monkeypatch.setattr(device, "BLOCK_VALUES", M * 7)
    same(there(rule, rows), wanted)


def test_weights_too_small_for_single_precision(there: Aggregate) -> None:
    """A row of 3e38 in every column is clipped by a weight with few digits in float32."""
    rows = torch.randn(M, 9, generator=torch.Generator().manual_seed(0)) / 100
    rows[4] = 3e38
    rule = phocas.Clipping(radius=2.5e-7) | phocas.Mean()
    value = there(rule, rows).value.double()
    others = rows.double()
    others *= (2.5e-7 / others.norm(dim=1, keepdim=True)).clamp(max=1)
    torch.testing.assert_close(value, others.mean(dim=0), rtol=1e-5, atol=0)


def test_source_is_written_to_the_cache_and_never_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = window_source(ELEMENTS["float32"], 3, Window(1), interpreted=True)
    monkeypatch.setenv("PHOCAS_CACHE", str(tmp_path))

    def median() -> list[float]:
        load.cache_clear()
        rows, out = calls.DeviceRows.of(torch.tensor([[1.0], [5.0], [2.0]])), torch.empty(1)
        load(text)["kernel"]((1,), rows.table, out, torch.empty(1, 3), 1, BLOCK=128)
        return list(out.tolist())

    assert median() == [2.0]
    (file,) = (tmp_path / "triton").iterdir()
    assert file.read_text() == text
    assert file.stem == hashlib.sha256(text.encode()).hexdigest()[:32]
    assert file.parent.stat().st_mode & 0o077 == 0
    file.write_text("raise SystemExit")
    assert median() == [2.0]
    for place in (file, "/proc/nowhere"):  # folders that cannot be created
        monkeypatch.setenv("PHOCAS_CACHE", str(place))
        assert median() == [2.0]
    assert list((tmp_path / "triton").iterdir()) == [file]


def test_doctor_finds_the_interpreted_kernels_correct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phocas.rules.inputs._on_accelerator", lambda _: True)
    monkeypatch.setattr(doctor, "COLUMNS", 40)
    checks = list(doctor.checks(torch.device("cpu")))
    assert [check for check in checks if not check.passed] == []


def test_rows_beyond_the_registers_are_rejected_or_computed_by_torch(
    there: Aggregate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An explicit choice raises; an automatic one warns once and uses torch."""
    rows = torch.from_numpy(np.random.default_rng(0).normal(size=(70, 5)))
    with pytest.raises(KernelError, match="at most 64 rows of float64: got 70"):
        there(phocas.Median(), rows)
    monkeypatch.setattr(device, "path", lambda _: ("triton", ""))
    monkeypatch.delenv(device.VARIABLE)
    device._said.clear()
    with pytest.warns(RuntimeWarning, match=r"got 70; torch's operations are used") as said:
        values = [there(phocas.Median(), rows).value for _ in range(2)]
    assert len(said) == 1
    for value in values:
        np.testing.assert_array_equal(value, np.median(rows, axis=0))
