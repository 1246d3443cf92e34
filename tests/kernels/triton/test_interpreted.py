"""The kernels in Triton, run by its interpreter on the CPU, against the processor's: same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers import (
    DTYPES,
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
from phocas.kernels.triton import KernelError, calls
from phocas.kernels.triton.loader import interpreted
from phocas.rules import device
from phocas.rules.algebra import Distances, Norms
from phocas.rules.measures import rows_of

pytestmark = [
    pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1"),
    # What NumPy says of NaN and infinity, in whose stead devices say nothing.
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]
M = 11
Aggregate = Callable[..., Any]


@pytest.fixture(autouse=True)
def insist(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fallback would compare torch with the processor and pass."""
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


def with_lies(rule: Rule, dtype: str, d: int = 37) -> torch.Tensor:
    """Return rows of which one lies, if the rule survives that."""
    rng = np.random.default_rng(len(str(rule)))
    values = rng.normal(size=(M, d))
    last = rule.rule if isinstance(rule, Pipeline) else rule
    if getattr(last, "b", 1) and last != phocas.Mean():
        values[4] = rng.choice(hostile_values(dtype)[:7], d)
    return tensor_of(values, dtype)


def honest(dtype: str) -> torch.Tensor:
    return tensor_of(np.random.default_rng(0).normal(size=(M, 37)), dtype)


def beyond(rule: Rule) -> bool:
    """Tell whether a rule cleans, or has a window, as only torch and the processor do."""
    last = rule.rule if isinstance(rule, Pipeline) else rule
    reaching = isinstance(last, phocas.Heraclius) and last.b > 0
    return reaching or isinstance(last, phocas.Watch) or rule.cleanup(M) is not None


EVERY_RULE = examples(M) + pipelines(M)
STRONGEST = [rule for rule in strongest(M) if not beyond(rule)]


def same(there: Any, here: Any) -> None:
    assert there.value.dtype == here.value.dtype
    assert bits(there.value) == bits(here.value)
    np.testing.assert_array_equal(there.dropped, here.dropped)
    assert there.expected == here.expected


@pytest.mark.parametrize("rule", [rule for rule in EVERY_RULE if not beyond(rule)], ids=str)
def test_every_rule_has_the_bits_of_the_processor(there: Aggregate, rule: Rule) -> None:
    rows = with_lies(rule, "float32")
    before = bits(rows)
    same(there(rule, rows), rule.explain(rows))
    assert bits(rows) == before


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("rule", [*STRONGEST, phocas.NNM(3) | phocas.Phocas(3)], ids=str)
def test_every_type_has_the_bits_of_the_processor(there: Aggregate, rule: Rule, dtype: str) -> None:
    rows = with_lies(rule, dtype)
    same(there(rule, rows), rule.explain(rows))


@pytest.mark.parametrize("rule", [rule for rule in EVERY_RULE if beyond(rule)], ids=str)
def test_windows_that_the_kernels_lack_are_left_to_torch(
    there: Aggregate, rule: Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = honest("float32")
    lacking = r"(have no Window\(|nothing of cleaned rows)"
    with pytest.raises(KernelError, match=lacking):
        there(rule, rows)
    monkeypatch.setenv(device.VARIABLE, "torch")
    wanted = there(rule, rows)
    monkeypatch.delenv(device.VARIABLE)
    monkeypatch.setattr(device, "path", lambda _: ("triton", ""))
    monkeypatch.setattr(device, "_said", set())
    with pytest.warns(RuntimeWarning, match=f"{lacking}.*torch's operations are used"):
        got = there(rule, rows)
    # Rows are still measured by kernels, whose sums round otherwise than torch's.
    np.testing.assert_allclose(got.value, wanted.value, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got.dropped, wanted.dropped, rtol=1e-9)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 2, 3, 7, 16, 23])
def test_windows_with_lies_in_any_cells(m: int, dtype: str) -> None:
    """Rows of all sizes, a block of columns and a few more, and what nobody should send."""
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
        calls.reduce(calls.Rows.of(rows), window, out, counts)
        wanted, lost = torch.empty_like(rows[0]), np.zeros(m, np.int64)
        here = rows.view(torch.uint16) if dtype == "bfloat16" else rows
        kernels.reduce(rows_of(here.numpy(), dtype), window, wanted.data_ptr(), lost)
        # A minimum of -0.0 and 0.0 is either, and either is added: zeros have any sign.
        np.testing.assert_array_equal(doubles(out), doubles(wanted))
        np.testing.assert_array_equal(counts, lost)


def test_tiny_and_huge_values_stay_within() -> None:
    rng = np.random.default_rng(2)
    small = torch.from_numpy((rng.integers(-9, 10, size=(9, 60)) * 1.4e-45).astype(np.float32))
    huge = torch.from_numpy((np.clip(rng.normal(size=(9, 60)), -3, 3) * 1e38).astype(np.float32))
    for rows in (small, huge, rows_with_one_tiny_column()):
        for window in (Window(4), Window(3), Window(4, 4), Window(4, 7)):
            out = torch.empty_like(rows[0])
            calls.reduce(calls.Rows.of(rows), window, out)
            assert bool(((out >= rows.amin(dim=0)) & (out <= rows.amax(dim=0))).all())


def rows_with_one_tiny_column() -> torch.Tensor:
    rows = torch.from_numpy(np.random.default_rng(0).normal(size=(9, 60)).astype(np.float32))
    rows[:, 7] = 3 * 1.4e-45
    return rows


def test_the_mean_of_nan_is_nan() -> None:
    rows = torch.tensor([[1.0, torch.nan], [2.0, 3.0]])
    out = torch.empty(2)
    calls.reduce(calls.Rows.of(rows), PLAIN_MEAN, out)
    assert out[0] == 1.5
    assert out[1].isnan()


REQUESTS = [
    Distances(),
    Distances(wide=True),
    Distances(scale=2.0**-300),
    Distances(np.full((3, 5), 0.2) + np.eye(3, 5), scale=2.0**400),
    Norms(),
    Norms(scale=2.0**-600),
]


@pytest.mark.parametrize("request_", REQUESTS)
def test_granules_are_those_of_the_whole_matrix(
    request_: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the columns are cut into tensors, and however many sums wait, the bits are equal."""
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


@pytest.mark.parametrize("size", [1e-170, 1e170])
@pytest.mark.parametrize("rule", [phocas.Krum(3), phocas.NNM(3) | phocas.Phocas(3)], ids=str)
def test_squares_that_double_precision_cannot_hold(
    there: Aggregate, rule: Rule, size: float
) -> None:
    rows = honest("float64") * size
    rows[4] *= 1000
    same(there(rule, rows), rule.explain(rows))


def test_distances_between_many_rows_agree_up_to_rounding() -> None:
    """The processor takes those of more than 64 rows from products."""
    rows = torch.from_numpy(np.random.default_rng(0).normal(size=(66, 20)).astype(np.float32))
    wanted = phocas.rules.inputs.open_rows(rows).measure(Distances())
    got = device.open_device([rows], list).measure(Distances())
    np.testing.assert_allclose(got, wanted, rtol=1e-5)


def test_an_offset_does_not_cancel_and_far_is_not_nan() -> None:
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
def test_rows_however_they_are_held(there: Aggregate, rule: Rule) -> None:
    rows = with_lies(rule, "float32", 24)
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


def test_blocks_change_nothing(there: Aggregate, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = phocas.NNM(3) | phocas.Phocas(3)
    rows = with_lies(rule, "float32", 50)[:, ::2]
    wanted = there(rule, rows)
    monkeypatch.setattr(device, "BLOCK_VALUES", M * 7)
    same(there(rule, rows), wanted)


def test_weights_too_small_for_single_precision(there: Aggregate) -> None:
    """A row of 3e38 in every column is clipped by a weight that float32 has few digits for."""
    rows = torch.randn(M, 9, generator=torch.Generator().manual_seed(0)) / 100
    rows[4] = 3e38
    rule = phocas.Clipping(radius=2.5e-7) | phocas.Mean()
    value = there(rule, rows).value.double()
    others = rows.double()
    others *= (2.5e-7 / others.norm(dim=1, keepdim=True)).clamp(max=1)
    torch.testing.assert_close(value, others.mean(dim=0), rtol=1e-5, atol=0)


def test_the_doctor_finds_it_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phocas.rules.inputs._on_accelerator", lambda _: True)
    monkeypatch.setattr(doctor, "COLUMNS", 40)
    checks = list(doctor.checks(torch.device("cpu")))
    assert [check for check in checks if not check.passed] == []


def test_more_rows_than_registers(there: Aggregate, monkeypatch: pytest.MonkeyPatch) -> None:
    """An explicit choice raises; an automatic one says so, once, and is computed by torch."""
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
