"""Rules with a reference vector: the previous aggregate, or a gradient on trusted samples."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.helpers import stored

import phocas
from phocas import (
    CenteredClipping,
    FLTrust,
    Referenced,
    Relative,
    Rule,
    ShardedAggregation,
    parse_rule,
)
from phocas.rules.algebra import Distances, Norms
from phocas.rules.execution import Measurement
from phocas.rules.inputs import open_rows
from phocas.rules.reference import reference

RULES = [
    "centered-clipping:radius=30,start=previous",
    "centered-clipping:radius=10,iterations=3,start=previous",
    "centered-clipping:radius=median,start=previous",
    "centered-clipping:radius=median,iterations=3,start=previous",
    "bucketing:size=2|centered-clipping:radius=median,iterations=2,start=previous",
    "nnm:b=2|centered-clipping:radius=20,iterations=3,start=previous",
    "clipping:radius=40|centered-clipping:radius=20,iterations=2,start=previous",
    "cell-filter:b=2|nnm:b=2|centered-clipping:radius=median,start=previous",
    "fl-trust",
    "nnm:b=2|fl-trust",
    "cell-filter:b=2|fl-trust",
]
M, D = 9, 2300


def some_rows(wrong: str = "none", scale: float = 1.0) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return nine rows, of which two may be wrong, and a vector near to the others."""
    rng = np.random.default_rng(3)
    vector = rng.normal(size=D)
    rows = vector + rng.normal(size=(M, D)) * 0.7
    if wrong == "missing":
        rows[4] = np.nan
        rows[7, 8] = np.inf
    elif wrong == "far":
        rows[4] = -1e3 * vector
        rows[7] = 1e9
    elif wrong == "opposite":
        rows[[4, 7]] = -vector
    return rows * scale, vector * scale


@pytest.mark.parametrize("wrong", ["none", "missing", "far", "opposite"])
@pytest.mark.parametrize("text", RULES)
def test_rule_with_reference_is_its_definition(text: str, wrong: str) -> None:
    rule = parse_rule(text)
    rows, vector = some_rows(wrong)
    if "bucketing" in text and wrong == "missing":
        rows[4] = 0.0  # NaN in two of five buckets
    wanted = reference(Referenced(rule), np.vstack([rows, vector]))
    why = rule.explain(rows, reference=vector)
    np.testing.assert_allclose(why.value, wanted, rtol=1e-9, atol=1e-8)
    assert np.isfinite(why.value).all()
    assert why.dropped.shape == (M,)
    assert rule(rows, reference=vector).tobytes() == why.value.tobytes()


@pytest.mark.parametrize("wrong", ["none", "missing", "far", "opposite"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("text", RULES[:4] + RULES[8:9])
def test_short_types_have_the_result_up_to_rounding(text: str, dtype: str, wrong: str) -> None:
    rows, vector = some_rows(wrong)
    if wrong == "far":
        rows = np.clip(rows, -6e4, 6e4)
    everything = stored(np.vstack([rows, vector]), dtype)
    exact = np.asarray(torch.as_tensor(everything).to(torch.float64))
    rule = parse_rule(text)
    wanted = reference(Referenced(rule), exact)
    got = rule(everything[:M], reference=everything[M])
    error = np.abs(torch.as_tensor(got).to(torch.float64).numpy() - wanted).max()
    assert error <= {"float32": 3e-6, "bfloat16": 2e-2, "float16": 3e-3}[dtype]


@pytest.mark.parametrize("text", RULES)
def test_shards_have_the_same_bits(text: str) -> None:
    rule = Referenced(parse_rule(text))
    everything = np.vstack(some_rows("opposite")).astype(np.float32)
    evaluation = ShardedAggregation(rule, M + 1)
    shards = list(itertools.pairwise([0, 300, 1024, 1800, D]))
    while evaluation.request is not None:
        evaluation.answer([evaluation.partial(everything[:, a:b], start=a) for a, b in shards])
    parts = [evaluation.finish(everything[:, a:b], start=a) for a, b in shards]
    whole = rule.rule(everything[:M], reference=everything[M])
    assert np.concatenate(parts).tobytes() == whole.tobytes()


def requests_of(rule: Rule, rows: NDArray[Any], vector: NDArray[Any]) -> list[Measurement]:
    """Return all measurements that a rule requests."""
    everything = np.vstack([rows, vector])
    evaluation = ShardedAggregation(Referenced(rule), M + 1)
    found = []
    while evaluation.request is not None:
        found.append(evaluation.request)
        evaluation.answer([evaluation.partial(everything, start=0)])
    return found


@pytest.mark.parametrize("radius", [30.0, "median"])
def test_one_iteration_of_clipping_requests_no_pairs(radius: Any) -> None:
    rule = CenteredClipping(radius, 1, "previous")
    rows, vector = some_rows("opposite")
    assert requests_of(rule, rows, vector) == [Distances(origin=M)]
    rows, vector = some_rows("missing")
    assert requests_of(rule, rows, vector) == [Distances(origin=M), Norms()]


def test_fl_trust_scales_rows_before_measuring_only_if_lengths_differ_much() -> None:
    rows, vector = some_rows("opposite")
    assert requests_of(FLTrust(), rows, vector) == [Norms(), Distances(wide=True, origin=M)]
    rows[4] *= 1e9
    second = requests_of(FLTrust(), rows, vector)[1]
    assert isinstance(second, Norms)
    assert second.weights is not None


def test_rows_that_are_all_far_from_the_start_are_measured_once() -> None:
    """The published radius of 10 is much less than the distances of a large model's rows."""
    rows, vector = some_rows()
    rule = CenteredClipping(1e-3, 3, "previous")
    assert requests_of(rule, rows, vector) == [Distances()]
    rows[2] = vector  # distances from far rows would hide this one
    assert len(requests_of(rule, rows, vector)) == 2


@pytest.mark.parametrize("size", [1.0, 1e14, 1e17, 3e18])
@pytest.mark.parametrize("start", ["zero", "previous"])
def test_rows_far_beyond_the_radius_have_the_exact_result(start: Any, size: float) -> None:
    rows, vector = some_rows("opposite", size)
    single = np.vstack([rows, vector]).astype(np.float32)
    rule = CenteredClipping(1e-2 * size, 3, start)
    exact = single.astype(np.float64)
    if start == "zero":
        got, wanted = rule(single[:M]), reference(rule, exact[:M])
    else:
        got = rule(single[:M], reference=single[M])
        wanted = reference(Referenced(rule), exact)
    np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6 * size)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("wide", [False, True])
def test_distances_from_one_row_have_the_bits_of_all_pairs(dtype: str, wide: bool) -> None:
    rows = stored(np.vstack(some_rows("missing")), dtype)
    matrix = open_rows(rows)
    weights = np.eye(M + 1)[::-1] * 0.5
    for origin in (0, 4, M):
        for request in (
            Distances(wide=wide),
            Distances(scale=2.0**-300),
            Distances(weights[:5], wide=wide),
        ):
            if request.weights is not None and origin >= len(request.weights):
                continue
            pairs = matrix.measure(request)[origin]
            found = matrix.measure(replace(request, origin=origin))
            others = np.arange(len(found)) != origin
            assert found[others].tobytes() == pairs[others].tobytes()
            assert found[origin] in (0.0, np.inf)


@pytest.mark.parametrize("text", RULES)
def test_reference_and_base_are_combined(text: str) -> None:
    """Federated clients send models: rows, then base plus reference, then the base."""
    rule = parse_rule(text)
    rows, vector = some_rows("opposite")
    base = np.linspace(-50, 50, D)
    got = Relative(Referenced(rule))(np.vstack([rows + base, vector + base, base]))
    np.testing.assert_allclose(got, base + rule(rows, reference=vector), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("exponent", [-900, -300, 300, 480])
@pytest.mark.parametrize("text", [RULES[3], RULES[8]])
def test_results_scale_with_the_rows(text: str, exponent: int) -> None:
    rule = parse_rule(text)
    rows, vector = some_rows("opposite")
    wanted = rule(rows, reference=vector)
    got = rule(np.ldexp(rows, exponent), reference=np.ldexp(vector, exponent))
    np.testing.assert_allclose(got, np.ldexp(wanted, exponent), rtol=1e-6)


@pytest.mark.parametrize("exponent", [-900, -60, 60, 480])
def test_clipping_scales_with_its_radius(exponent: int) -> None:
    rows, vector = some_rows("far")
    wanted = CenteredClipping(30.0, 3, "previous")(rows, reference=vector)
    rule = CenteredClipping(float(np.ldexp(30.0, exponent)), 3, "previous")
    got = rule(np.ldexp(rows, exponent), reference=np.ldexp(vector, exponent))
    np.testing.assert_allclose(got, np.ldexp(wanted, exponent), rtol=1e-6)


def test_first_round_starts_from_zero() -> None:
    rows, _ = some_rows("opposite")
    for radius in (10.0, "median"):
        rule = CenteredClipping(radius, 3, "previous")
        zero = rule(rows, reference=np.zeros(D))
        np.testing.assert_allclose(rule(rows), zero, rtol=1e-9)
        np.testing.assert_allclose(reference(rule, rows), zero, rtol=1e-9)


def test_median_radius_is_between_honest_distances_for_any_minority() -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(9, 40))
    honest = np.linalg.norm(rows[4:], axis=1)
    for value in (np.nan, 0.0, 1e30):
        rows[:4] = value
        moved = CenteredClipping("median", 1, "previous")(rows, reference=np.zeros(40))
        assert np.linalg.norm(moved) <= honest.max()
        assert np.linalg.norm(moved) > 0


def test_all_forms_of_rows_take_a_reference() -> None:
    rows, vector = some_rows()
    wanted = FLTrust()(rows, reference=vector)
    tensors = torch.from_numpy(rows)
    assert FLTrust()(tensors, reference=torch.from_numpy(vector)).numpy().tolist() == list(wanted)
    assert list(FLTrust()(list(rows), reference=vector)) == list(wanted)

    def cut(row: NDArray[Any]) -> dict[str, NDArray[Any]]:
        return {"a": row[:100].reshape(10, 10), "n": np.array([7]), "b": row[100:]}

    parts = FLTrust()([cut(row) for row in rows], reference=cut(vector))
    assert list(parts["a"].ravel()) + list(parts["b"]) == list(wanted)
    assert parts["n"].tolist() == [7]
    lists = FLTrust()([list(cut(r).values()) for r in rows], reference=list(cut(vector).values()))
    assert list(lists[2]) == list(wanted[100:])
    assert list(phocas.aggregate(rows, "fl-trust", reference=vector)) == list(wanted)


@pytest.mark.parametrize("q", [1, 5, 9])
def test_fl_trust_stays_near_the_reference_whatever_rows_are(q: int) -> None:
    rows, vector = some_rows()
    rng = np.random.default_rng(q)
    for factor in (-1e30, -1.0, 1e-30, 1e200):
        rows[:q] = factor * rng.normal(size=(q, D))
        got = FLTrust()(rows, reference=vector)
        assert np.linalg.norm(got) <= np.linalg.norm(vector) * (1 + 1e-9)
        assert got @ vector >= 0


def test_fl_trust_without_agreement_is_zero() -> None:
    rows, vector = some_rows()
    assert not FLTrust()(-rows, reference=vector).any()
    assert not FLTrust()(np.full_like(rows, np.nan), reference=vector).any()
    assert not FLTrust()(rows, reference=np.zeros(D)).any()


def test_monitor_takes_the_reference_of_its_rule() -> None:
    rows, vector = some_rows("opposite")
    rule = phocas.Monitor(FLTrust())
    why = rule.explain(rows, reference=vector)
    np.testing.assert_allclose(why.value, rows.mean(axis=0), rtol=1e-12)
    assert set(np.flatnonzero(why.dropped == 1)) == {4, 7}


@pytest.mark.parametrize("text", RULES)
def test_text_and_guarantee(text: str) -> None:
    rule = parse_rule(text)
    assert parse_rule(str(rule)) == rule
    assert rule.needs_reference == ("trusted" if "trust" in text else "previous")
    assert rule.tolerates(M).rows == 0
    assert rule.error_bound(M, 1) is None
    assert Referenced(rule).tolerates(M + 1) == rule.tolerates(M)


def bad(vector: NDArray[Any], change: str) -> Any:
    if change == "length":
        return vector[:-1]
    if change == "nan":
        return np.where(np.arange(D) == 7, np.nan, vector)
    if change == "inf":
        return np.where(np.arange(D) == 7, -np.inf, vector)
    if change == "dtype":
        return vector.astype(np.float32)
    if change == "tensor":
        return torch.from_numpy(vector)
    return {"a": vector}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("length", r"the reference has \(2299,\), row 0 has \(2300,\)"),
        ("nan", "the reference must be finite: it has NaN or inf"),
        ("inf", "the reference must be finite: it has NaN or inf"),
        ("dtype", "the reference is float32, row 0 is float64"),
        ("tensor", "the reference is Tensor, row 0 is ndarray"),
        ("mapping", "the reference must have the form of a row"),
    ],
)
def test_bad_reference_is_rejected(change: str, words: str) -> None:
    rows, vector = some_rows()
    for rule in (FLTrust(), CenteredClipping(1.0, start="previous")):
        with pytest.raises((TypeError, ValueError), match=words):
            rule(rows, reference=bad(vector, change))


def test_reference_that_overflows_its_square_is_finite() -> None:
    rows, vector = some_rows(scale=1e200)
    assert np.isfinite(FLTrust()(rows, reference=vector)).all()


def test_misuse_is_rejected() -> None:
    rows, vector = some_rows()
    with pytest.raises(ValueError, match="fl-trust needs a reference, the gradient on trusted"):
        FLTrust()(rows)
    with pytest.raises(ValueError, match="fl-trust needs a reference"):
        ShardedAggregation("fl-trust", M)
    with pytest.raises(TypeError, match="median needs no reference: leave the reference out"):
        phocas.Median()(rows, reference=vector)
    with pytest.raises(ValueError, match=r"unknown start of CenteredClipping 'last'"):
        CenteredClipping(1.0, start="last")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"CenteredClipping needs a number radius"):
        CenteredClipping("mean")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cannot be weighted"):
        FLTrust()(rows, weights=[1] * M, reference=vector)


def test_rules_that_need_nothing_have_no_reference() -> None:
    def needed(rule: Rule) -> str | None:
        return rule.needs_reference

    assert needed(phocas.Phocas(1)) is None
    assert needed(CenteredClipping(1.0)) is None
    assert needed(phocas.NNM(1) | phocas.Median()) is None
