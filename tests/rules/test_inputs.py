"""Whatever holds the rows, the result has its form and the same bits; the rows are untouched."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers import DTYPES, averages, bits, doubles, examples, pipelines, stored, strongest

import phocas
from phocas import Rule

M = 9
EVERY = strongest(M) + pipelines(M)


def hostile_rows(d: int = 4200) -> np.ndarray:
    rows = np.random.default_rng(0).normal(size=(M, d)).astype(np.float32)
    rows[3] = np.nan
    rows[5, ::7] = 1e20
    return rows


def strided(rows: np.ndarray) -> dict[str, np.ndarray]:
    """Return the same values in memory in every way that NumPy knows."""
    m, d = rows.shape
    wide = np.zeros((2 * m, 3 * d), rows.dtype)
    wide[::2, 1::3] = rows
    raw = np.zeros(rows.nbytes + 1, np.uint8)
    unaligned = raw[1:].view(rows.dtype).reshape(m, d)
    unaligned[:] = rows
    padded = np.zeros((m, d + 5), rows.dtype)
    padded[:, 2 : d + 2] = rows
    frozen = rows.copy()
    frozen.flags.writeable = False
    return {
        "transposed": np.ascontiguousarray(rows.T).T,
        "steps": wide[::2, 1::3],
        "backwards": np.ascontiguousarray(rows[::-1, ::-1])[::-1, ::-1],
        "rows backwards": np.ascontiguousarray(rows[::-1])[::-1],
        "foreign bytes": rows.astype(rows.dtype.newbyteorder()),
        "unaligned": unaligned,
        "padded": padded[:, 2 : d + 2],
        "read only": frozen,
    }


@pytest.mark.parametrize("rule", EVERY, ids=str)
def test_strides_change_no_bit(rule: Rule) -> None:
    rows = hostile_rows()
    wanted = rule(rows)
    for name, same in strided(rows).items():
        before = same.copy()
        got = rule(same)
        assert bits(got) == bits(wanted), name
        assert got.dtype == np.float32  # in this machine's order of bytes
        assert bits(before) == bits(same.copy()), name
        told = rule.explain(same)
        assert bits(told.value) == bits(wanted), name
        np.testing.assert_array_equal(told.dropped, rule.explain(rows).dropped)


def test_long_rows_that_are_copied_in_blocks() -> None:
    """More than one block of copied columns, and a granule that two blocks share."""
    rows = np.random.default_rng(1).normal(size=(70, 40_000)).astype(np.float32)
    for rule in (phocas.Phocas(b=20), phocas.Krum(b=20), phocas.GeometricMedian()):
        assert bits(rule(np.asfortranarray(rows))) == bits(rule(rows))


def test_one_row_many_times() -> None:
    row = np.random.default_rng(2).normal(size=1000).astype(np.float32)
    repeated = np.broadcast_to(row, (M, 1000))
    assert repeated.strides[0] == 0
    for rule in EVERY:
        if "clipping" not in str(rule) and not averages(rule):
            np.testing.assert_array_equal(rule(repeated), row)


@pytest.mark.parametrize("rule", EVERY, ids=str)
def test_every_container_gives_the_same_bits(rule: Rule) -> None:
    rows = hostile_rows()
    wanted = bits(rule(rows))
    tensor = torch.from_numpy(rows)
    shapes = {"w": (20, 100), "bias": (2199,), "empty": (0, 4), "scalar": ()}
    parts = {"w": slice(0, 2000), "bias": slice(2000, 4199), "scalar": slice(4199, 4200)}
    named = [
        {key: row[parts.get(key, slice(0, 0))].reshape(shape) for key, shape in shapes.items()}
        for row in rows
    ]
    forms: dict[str, Any] = {
        "list": list(rows),
        "tuple": tuple(rows),
        "deque": collections.deque(rows),
        "separate": [row.copy() for row in rows],
        "some strided": [row if i % 2 else np.repeat(row, 2)[::2] for i, row in enumerate(rows)],
        "tensor": tensor,
        "tensors": list(tensor),
        "parameters": [torch.nn.Parameter(row.clone()) for row in tensor],
        "transposed tensor": tensor.T.contiguous().T,
        "tensor that wants gradients": tensor.clone().requires_grad_(),
    }
    for name, form in forms.items():
        got = rule(form)
        assert bits(got) == wanted, name
        kind = torch.Tensor if "tensor" in name or "param" in name else np.ndarray
        assert isinstance(got, kind), name
        if isinstance(got, torch.Tensor):
            assert not got.requires_grad
    answer = rule(named)
    assert list(answer) == list(shapes)
    assert {key: value.shape for key, value in answer.items()} == shapes
    together = np.concatenate([answer[key].reshape(-1) for key in ("w", "bias", "scalar")])
    assert bits(together) == wanted
    tensors = [
        collections.OrderedDict((k, torch.from_numpy(v)) for k, v in w.items()) for w in named
    ]
    answer = rule(tensors)
    assert all(isinstance(value, torch.Tensor) for value in answer.values())
    assert bits(torch.cat([answer[k].reshape(-1) for k in ("w", "bias", "scalar")])) == wanted
    # Another worker may list its parameters in another order.
    shuffled = [dict(reversed(list(w.items()))) if i % 2 else w for i, w in enumerate(named)]
    answer = rule(shuffled)
    assert bits(np.concatenate([answer[k].reshape(-1) for k in ("w", "bias", "scalar")])) == wanted


WHOLE = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "bool"]


@pytest.mark.parametrize("dtype", WHOLE)
@pytest.mark.parametrize("m", [1, 2, 5, 6])
def test_whole_numbers_become_their_lower_median(dtype: str, m: int) -> None:
    rng = np.random.default_rng(m)
    numbers = rng.integers(0, 2, size=(m, 2, 3)).astype(bool)
    if dtype != "bool":
        limits = np.iinfo(dtype)
        numbers = rng.integers(limits.min, limits.max, (m, 2, 3), dtype, endpoint=True)
    wanted = np.sort(numbers, axis=0)[(m - 1) // 2]
    values = rng.normal(size=(m, 4))
    states = [{"w": row, "n": number} for row, number in zip(values, numbers, strict=True)]
    got = phocas.Median()(states)
    assert list(got) == ["w", "n"]
    assert got["n"].dtype == wanted.dtype
    np.testing.assert_array_equal(got["n"], wanted)
    np.testing.assert_array_equal(got["w"], phocas.Median()(values))
    tensors = [{key: torch.from_numpy(value) for key, value in state.items()} for state in states]
    found = phocas.Median()(tensors)["n"]
    assert found.dtype == tensors[0]["n"].dtype
    np.testing.assert_array_equal(found.numpy(), wanted)


def test_counters_and_flags_survive_fewer_wrong_rows_than_half() -> None:
    states = [
        {"w": np.ones(3), "batches": np.array(1000 + i), "on": np.array(True)} for i in range(M)
    ]
    for i in range((M - 1) // 2):
        states[i] |= {"batches": np.array(2**62 * (-1) ** i), "on": np.array(False)}
    got = phocas.Median()(states)
    assert 1000 <= got["batches"] < 1000 + M
    assert got["on"]
    assert not phocas.Median()(states[: M - 1])["on"]  # a tie is no majority


@pytest.mark.parametrize("rule", EVERY, ids=str)
def test_dropped_shares_leave_whole_numbers_out(rule: Rule) -> None:
    rows = hostile_rows(200)
    told = rule.explain([{"n": np.full(1000, i), "w": row} for i, row in enumerate(rows)])
    wanted = rule.explain(rows)
    assert bits(told.value["w"]) == bits(wanted.value)
    np.testing.assert_array_equal(told.dropped, wanted.dropped)


def test_the_states_of_a_model_with_batch_norm() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2))
    states = []
    for i in range(5):
        model(torch.full((3, 1, 4, 4), float(i)))
        states.append({key: value.clone() for key, value in model.state_dict().items()})
    states[4] = {key: torch.full_like(value, 10**6) for key, value in states[4].items()}
    merged = phocas.Phocas(b=1)(states)
    model.load_state_dict(merged)
    assert merged["1.num_batches_tracked"] == 3
    assert merged["1.running_mean"].abs().max() < 10


@pytest.mark.parametrize("rule", EVERY, ids=str)
def test_lists_of_arrays_give_the_bits_of_the_matrix(rule: Rule) -> None:
    rows = hostile_rows()
    wanted = bits(rule(rows))
    shapes = ((20, 100), (0, 4), (2199,), ())
    cuts = np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1]
    layers = [
        [part.reshape(shape) for part, shape in zip(np.split(row, cuts), shapes, strict=True)]
        for row in rows
    ]
    for form in (list, tuple):
        got = rule([form(worker) for worker in layers])
        assert type(got) is form
        assert [part.shape for part in got] == list(shapes)
        assert bits(np.concatenate([part.reshape(-1) for part in got])) == wanted
    tensors = rule([[torch.from_numpy(part) for part in worker] for worker in layers])
    assert bits(torch.cat([part.reshape(-1) for part in tensors])) == wanted
    np.testing.assert_array_equal(rule.explain(layers).dropped, rule.explain(rows).dropped)


@pytest.mark.parametrize(
    ("strange", "error", "words"),
    [
        ([np.ones(2)], ValueError, "worker 3 has 1, worker 0 has 2"),
        ([np.ones(2), np.ones((2, 2)), np.ones(1)], ValueError, "worker 3 has 3, worker 0 has 2"),
        ([np.ones(3), np.ones((2, 2))], ValueError, r"worker 3, index 0 has \(3,\)"),
        ([np.ones(2), np.ones((2, 2), "f4")], TypeError, "worker 3, index 1 is float32"),
        ([np.ones(2), torch.ones(2, 2)], TypeError, "worker 3, index 1 is Tensor"),
        ([np.ones(2), [[1.0, 1.0]] * 2], TypeError, "worker 3, index 1 must be .* got list"),
        (np.ones(2), TypeError, "worker 3 must be a list of arrays .* got ndarray"),
        ({"w": np.ones(2)}, TypeError, "worker 3 must be a list of arrays .* got dict"),
    ],
)
def test_lists_that_differ_are_rejected(strange: Any, error: type[Exception], words: str) -> None:
    workers: list[Any] = [[np.ones(2), np.ones((2, 2))] for _ in range(5)]
    workers[3] = strange
    with pytest.raises(error, match=words):
        phocas.Median()(workers)


def test_vectors_may_have_any_shape() -> None:
    rows = np.random.default_rng(3).normal(size=(5, 2, 3, 4))
    got = phocas.Median()(list(rows))
    np.testing.assert_array_equal(got, np.median(rows, axis=0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", examples(M), ids=str)
def test_type_kind_and_input_are_kept(rule: Rule, dtype: str) -> None:
    values = np.random.default_rng(4).normal(size=(M, 100))
    values[0, :5] = [np.nan, np.inf, -0.0, 1e-7, -np.inf]
    for rows in (stored(values, dtype), torch.from_numpy(values).to(getattr(torch, dtype))):
        before = bits(rows)
        got = rule(rows)
        assert type(got) is type(rows)
        assert got.dtype == rows.dtype
        assert tuple(got.shape) == (100,)
        told = rule.explain(rows)
        assert bits(told.value) == bits(got)
        assert bits(rows) == before
        got[:] = 7  # the result is the caller's own
        assert bits(rows) == before


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", EVERY, ids=str)
def test_tensors_and_arrays_agree(rule: Rule, dtype: str) -> None:
    values = np.random.default_rng(5).normal(size=(M, 1100))
    if dtype == "bfloat16":
        # NumPy has no such type: the same values in single precision, rounded at the end.
        tensor = torch.from_numpy(values).to(torch.bfloat16)
        assert bits(rule(tensor)) == bits(rule(tensor.float()).to(torch.bfloat16))
        return
    rows = stored(values, dtype)
    assert bits(rule(torch.from_numpy(rows))) == bits(rule(rows))


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_columns_at_all(dtype: str) -> None:
    rows = stored(np.empty((M, 0)), dtype)
    for rule in EVERY:
        got = rule(rows)
        assert tuple(got.shape) == (0,)
        assert got.dtype == rows.dtype
        assert rule.explain(rows).dropped.shape == (M,)
    assert phocas.Krum(b=1)([{"a": rows[0]}] * M)["a"].shape == (0,)


@pytest.mark.parametrize("rule", EVERY, ids=str)
def test_hosts_that_cannot_convert_half_precision(
    rule: Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There it is converted a block at a time; the bits are the same."""
    rows = stored(np.random.default_rng(9).normal(size=(M, 1100)), "float16")
    rows[3] = np.nan
    wanted = rule.explain(rows)
    monkeypatch.setattr("phocas.kernels.half_supported", lambda element: element != "float16")
    told = rule.explain(rows)
    assert told.value.dtype == np.float16
    assert bits(told.value) == bits(wanted.value)
    np.testing.assert_array_equal(told.dropped, wanted.dropped)


def test_numpy_bfloat16_where_there_is_one() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    rows = np.random.default_rng(6).normal(size=(M, 100)).astype(ml_dtypes.bfloat16)
    tensor = torch.from_numpy(rows.view(np.uint16)).view(torch.bfloat16)
    for rule in EVERY:
        got = rule(rows)
        assert got.dtype == rows.dtype
        assert bits(got) == bits(rule(tensor))


def test_a_view_of_an_imaginary_part_is_negated() -> None:
    numbers = torch.complex(torch.zeros(3, 4), torch.randn(3, 4))
    rows = numbers.conj().imag
    assert rows.is_neg()
    assert bits(phocas.Median()(rows)) == bits(phocas.Median()(rows.clone()))


def test_a_matrix_subclass_is_read_as_its_values() -> None:
    class Tagged(np.ndarray):
        pass

    rows = np.random.default_rng(7).normal(size=(M, 10))
    np.testing.assert_array_equal(phocas.Median()(rows.view(Tagged)), np.median(rows, axis=0))


def test_bfloat16_rounds_to_nearest_even() -> None:
    rng = np.random.default_rng(8)
    words = rng.integers(0, 2**16, size=(1, 60_000), dtype=np.uint16)
    rows = torch.from_numpy(words).view(torch.bfloat16).repeat(2, 1)
    rows[1] = torch.from_numpy(rng.integers(0, 2**16, size=60_000, dtype=np.uint16)).view(
        torch.bfloat16
    )
    mean = phocas.Mean()(rows)
    exact = doubles(rows).astype(np.float64)
    with np.errstate(all="ignore"):
        wanted = torch.from_numpy((exact[0] + exact[1]) / 2).float().to(torch.bfloat16)
    same = (mean == wanted) | (mean.isnan() & wanted.isnan())
    # Means that are subnormal in single precision are rounded twice.
    assert bool((same | (wanted.abs() < 1e-37)).all())
