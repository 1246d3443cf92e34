"""Bad input is rejected: errors say what must hold, what was got and the limit."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers import examples

import phocas
from phocas import (
    CGE,
    MDA,
    NNM,
    AdaptiveClipping,
    Bucketing,
    Bulyan,
    CenteredClipping,
    Clipping,
    GeometricMedian,
    Krum,
    MeaMed,
    Median,
    MultiKrum,
    Phocas,
    TrimmedMean,
)

COUNTED = (TrimmedMean, Phocas, MeaMed, Krum, MultiKrum, Bulyan, MDA, CGE, NNM, AdaptiveClipping)
ROWS = np.ones((9, 4), np.float32)


def says(*words: str) -> str:
    return ".*".join(re.escape(word) for word in words)


@pytest.mark.parametrize("cls", COUNTED)
def test_b_is_a_count(cls: Any) -> None:
    with pytest.raises(ValueError, match=says(cls.__name__, "b >= 0", "got b=-1")):
        cls(b=-1)
    for wrong in (0.3, 2.0, True, np.True_, "2", None, np.float64(2), [2], 2 + 0j):
        with pytest.raises(TypeError, match=says(cls.__name__, "integer b", "got", repr(wrong))):
            cls(b=wrong)
    for fine in (np.int64(2), np.uint8(2), np.int16(2)):
        assert cls(b=fine) == cls(b=2)
        assert type(cls(b=fine).b) is int
        assert hash(cls(b=fine)) == hash(cls(b=2))


@pytest.mark.parametrize("cls", [TrimmedMean, Phocas, MeaMed, MDA, CGE, NNM, AdaptiveClipping])
def test_half_of_the_workers_cannot_be_wrong(cls: Any) -> None:
    for m, b, largest in ((8, 4, 3), (9, 5, 4), (1, 1, 0), (2, 1, 0)):
        message = says(cls.__name__, "2b < m", f"b={b}", f"m={m}", f"largest b is {largest}")
        with pytest.raises(ValueError, match=message):
            cls(b).check(m)
        cls(largest).check(m)


@pytest.mark.parametrize("cls", [Krum, MultiKrum])
def test_krum_needs_two_more(cls: Any) -> None:
    for m, b, largest in ((8, 3, 2), (9, 4, 3), (4, 1, 0)):
        message = says(cls.__name__, "2b + 2 < m", f"b={b}", f"m={m}", f"largest b is {largest}")
        with pytest.raises(ValueError, match=message):
            cls(b)(np.ones((m, 2)))
        cls(largest)(np.ones((m, 2)))
    with pytest.raises(ValueError, match="no b is small enough"):
        cls(0).check(2)


def test_bulyan_needs_four_times_as_many() -> None:
    for m, b, largest in ((10, 2, 1), (11, 3, 2), (6, 1, 0)):
        message = says("Bulyan", "4b + 3 <= m", f"b={b}", f"m={m}", f"largest b is {largest}")
        with pytest.raises(ValueError, match=message):
            Bulyan(b)(np.ones((m, 2)))
        Bulyan(largest)(np.ones((m, 2)))


def test_multi_krum_selects_no_byzantine_rows() -> None:
    message = says("select <= m - b", "select=8", "b=2", "m=9", "largest select is 7")
    with pytest.raises(ValueError, match=message):
        MultiKrum(b=2, select=8)(ROWS)
    with pytest.raises(ValueError, match="select >= 1"):
        MultiKrum(b=2, select=0)
    with pytest.raises(TypeError, match="integer select"):
        MultiKrum(b=2, select=0.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [Clipping, CenteredClipping])
def test_radii_are_positive(make: Any) -> None:
    for wrong in (0, -1.0, np.nan, np.inf, -np.inf):
        with pytest.raises(ValueError, match=says("radius > 0", "got radius=")):
            make(wrong)
    for strange in ("1", None, True, 1j):
        with pytest.raises(TypeError, match=says("number radius", "got", repr(strange))):
            make(strange)
    assert make(np.float32(2)) == make(2.0) == make(2)


def test_iterations_and_sizes_are_counts() -> None:
    for make in (
        lambda n: CenteredClipping(1.0, iterations=n),
        lambda n: GeometricMedian(iterations=n),
        lambda n: Bucketing(size=n),
    ):
        with pytest.raises(ValueError, match=">= 1"):
            make(0)
        with pytest.raises(TypeError, match="integer"):
            make(1.5)
    with pytest.raises(ValueError, match="tolerance > 0"):
        GeometricMedian(tolerance=0.0)
    with pytest.raises(ValueError, match=says("size <= m", "size=10", "m=9", "largest size is 9")):
        (Bucketing(size=10) | Median())(ROWS)


def test_a_pipeline_checks_what_reaches_each_step() -> None:
    message = says("to 5 rows", "Phocas needs 2b < m", "b=3", "m=5", "largest b is 2")
    with pytest.raises(ValueError, match=message):
        phocas.aggregate(ROWS, "bucketing:size=2|phocas:b=3")
    with pytest.raises(ValueError, match=says("NNM needs 2b < m", "m=5")):
        phocas.aggregate(ROWS, "bucketing:size=2|nnm:b=3|median")


# -- rows ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", examples(9), ids=str)
def test_no_rows(rule: phocas.Rule) -> None:
    empty: list[Any] = [np.empty((0, 4)), [], (), torch.empty(0, 3)]
    for nothing in empty:
        with pytest.raises(ValueError, match=says("at least one row", "got none")):
            rule(nothing)
        with pytest.raises(ValueError, match="at least one row"):
            rule.explain(nothing)


@pytest.mark.parametrize(
    ("rows", "error", "words"),
    [
        (np.ones(4), ValueError, ["(m, d)", "got shape (4,)"]),
        (np.ones((2, 3, 4)), ValueError, ["(m, d)", "got shape (2, 3, 4)"]),
        (torch.ones(()), ValueError, ["(m, d)", "got shape ()"]),
        ([np.ones(3), np.ones(3), np.ones(4)], ValueError, ["row 2", "(4,)", "row 0", "(3,)"]),
        ([np.ones((1, 3)), np.ones((3, 1))], ValueError, ["row 1", "(3, 1)"]),
        ([np.ones(3), np.ones(3, "f4")], TypeError, ["row 1", "float32", "row 0", "float64"]),
        ([torch.ones(3), torch.ones(3).half()], TypeError, ["row 1", "float16", "float32"]),
        ([np.ones(3), torch.ones(3)], TypeError, ["row 1", "Tensor", "row 0", "ndarray"]),
        (
            [torch.ones(3), torch.ones(3, device="meta")],
            ValueError,
            ["same device", "row 1", "meta", "cpu"],
        ),
        (np.ones((3, 2), int), TypeError, ["float16, bfloat16, float32, float64", "int64"]),
        (np.ones((3, 2), bool), TypeError, ["float32", "bool"]),
        (np.ones((3, 2), complex), TypeError, ["float32", "complex128"]),
        (np.ones((3, 2), np.longdouble), TypeError, ["float32", np.dtype(np.longdouble).name]),
        (np.ones((3, 2), object), TypeError, ["float32", "object"]),
        (np.full((3, 2), "1.0"), TypeError, ["float32", "str"]),
        (torch.ones(3, 2, dtype=torch.int32), TypeError, ["float32", "int32"]),
        (torch.ones(3, 2, dtype=torch.cfloat), TypeError, ["float32", "complex64"]),
        ([torch.ones(3).int()] * 3, TypeError, ["float32", "int32"]),
        (torch.ones(3, 2).to_sparse(), TypeError, ["dense", "sparse"]),
        (np.ma.masked_array(np.ones((3, 2))), TypeError, ["not be masked", "NaN"]),
        ([np.ones(2), np.ma.masked_array(np.ones(2))], TypeError, ["row 1", "not be masked"]),
        ([[1.0, 2.0], [3.0, 4.0]], TypeError, ["row 0", "array", "got list"]),
        ([1.0, 2.0], TypeError, ["row 0", "got float"]),
        ([np.ones(3), None], TypeError, ["row 1", "got NoneType"]),
        ("rows", TypeError, ["(m, d)", "got str"]),
        (None, TypeError, ["(m, d)", "got NoneType"]),
        ({"w": np.ones(3)}, TypeError, ["sequence of m mappings", "got dict"]),
        ((np.ones(3) for _ in range(3)), TypeError, ["sequence", "got generator"]),
        ({1, 2}, TypeError, ["sequence", "got set"]),
    ],
    ids=lambda given: type(given).__name__,
)
def test_what_is_not_a_matrix(rows: Any, error: type[Exception], words: list[str]) -> None:
    for call in (Median(), Median().explain):
        with pytest.raises(error, match=says(*words)):
            call(rows)


def named(**changes: Any) -> list[dict[Any, Any]]:
    """Return five workers, of which worker 3 differs."""
    workers = [{"w": np.ones((2, 2)), "b": np.ones(3)} for _ in range(5)]
    workers[3] = {**workers[3], **changes}
    return workers


def test_mappings_that_differ() -> None:
    lacking = named()
    del lacking[3]["b"]
    for workers, error, words in [
        (lacking, ValueError, ["same keys", "worker 3", "lacks 'b'"]),
        (named(extra=np.ones(1)), ValueError, ["same keys", "worker 3", "has 'extra' too"]),
        (named(w=np.ones((4,))), ValueError, ["worker 3", "'w'", "(4,)", "worker 0", "(2, 2)"]),
        (named(b=np.ones(3, "f4")), TypeError, ["worker 3", "'b'", "float32", "float64"]),
        (named(b=torch.ones(3)), TypeError, ["worker 3", "'b'", "Tensor"]),
        (named(b=[1, 2, 3]), TypeError, ["worker 3", "'b'", "got list"]),
        ([*named(), np.ones(3)], TypeError, ["worker 5", "mapping", "got ndarray"]),
        ([{}, {}, {}], ValueError, ["at least one array", "worker 0 has none"]),
        ([{"n": np.ones(2, int)}] * 3, ValueError, ["floating-point", "none among 1"]),
        ([{"n": np.ones(2, complex)}] * 3, TypeError, ["'n'", "complex128", "leave it out"]),
        (named(b=np.ones(3, int)), TypeError, ["worker 3", "'b'", "int64", "float64"]),
    ]:
        with pytest.raises(error, match=says(*words)):
            Median()(workers)
    with pytest.raises(TypeError, match=says("one dtype", "'w'", "float64", "'b'", "float32")):
        Median()([{"w": np.ones(2), "b": np.ones(2, "f4")}] * 3)
    strange: list[dict[Any, Any]] = [{1: np.ones(2)}, {1: np.ones(2), 2: 0, "b": 0}]
    with pytest.raises(ValueError, match=says("worker 1", "has", "too")):
        Median()(strange)
    mixed: list[dict[str, Any]] = [{"a": torch.ones(1), "b": torch.ones(1, device="meta")}] * 3
    with pytest.raises(ValueError, match=says("one device", "'b'", "'a'")):
        Median()(mixed)


def test_aggregate_needs_a_rule() -> None:
    for wrong in (None, 5, NNM(b=1), NNM(b=1) | NNM(b=1), Median):
        with pytest.raises(TypeError, match="needs a rule"):
            phocas.aggregate(ROWS, wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        NNM(b=1) | 5  # type: ignore[operator]
    with pytest.raises(TypeError):
        Median() | Median()  # type: ignore[operator]
