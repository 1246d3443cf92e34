"""Rules as text, there and back, and what is said about text that is no rule."""

from __future__ import annotations

import dataclasses
import pickle
import re
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers import examples, examples_of, pipelines

import phocas
from phocas import PRE_AGGREGATORS, RULES, Phocas, Rule, parse_rule
from phocas.specs import Spec, Table, build, unknown


@pytest.mark.parametrize("rule", examples(11) + pipelines(11), ids=str)
def test_rules_are_values(rule: Rule) -> None:
    assert parse_rule(str(rule)) == rule
    assert hash(parse_rule(str(rule))) == hash(rule)
    assert pickle.loads(pickle.dumps(rule)) == rule
    assert eval(repr(rule), vars(phocas)) == rule
    with pytest.raises(dataclasses.FrozenInstanceError):
        rule.b = 3  # type: ignore[attr-defined]
    assert rule != object()


@given(radius=st.floats(1e-300, 1e300), iterations=st.integers(1, 10**9))
def test_numbers_survive_being_written(radius: float, iterations: int) -> None:
    rule = phocas.CenteredClipping(radius, iterations)
    assert parse_rule(str(rule)) == rule


def test_defaults_are_not_written() -> None:
    assert str(phocas.MultiKrum(b=2)) == "multi-krum:b=2"
    assert str(phocas.MultiKrum(b=2, select=3)) == "multi-krum:b=2,select=3"
    assert str(phocas.GeometricMedian()) == "geometric-median"
    assert parse_rule("multi-krum:b=2,select=none") == phocas.MultiKrum(b=2)
    assert str(phocas.NNM(b=6) | Phocas(b=6)) == "nnm:b=6|phocas:b=6"


@pytest.mark.parametrize(
    "text",
    ["Phocas:b=6", "PHOCAS:b=6", " phocas : b = 6 ", "pho-cas:b=6", "p_h_ocas:b=6,"],
)
def test_spelling_is_forgiven(text: str) -> None:
    assert parse_rule(text) == Phocas(b=6)


def test_aliases_and_names_are_one_table() -> None:
    assert parse_rule("trmean:b=1") == phocas.TrimmedMean(b=1)
    assert parse_rule("arc:b=1|geomed") == phocas.AdaptiveClipping(1) | phocas.GeometricMedian()
    assert "TrimmedMean" in RULES
    assert 5 not in RULES  # type: ignore[comparison-overlap]
    assert len(RULES) == len(list(RULES))
    for table in (RULES, PRE_AGGREGATORS):
        for name, cls in table.items():
            assert cls.name == name
            assert table[name.upper()] is cls
            assert cls.summary().endswith(".")
    with pytest.raises(KeyError, match="did you mean 'krum'"):
        RULES["krumm"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("phoca:b=6", ["unknown rule 'phoca'", "did you mean 'phocas'?", "rules: mean, median"]),
        ("PHOCA:b=6", ["unknown rule 'PHOCA'", "did you mean 'phocas'?"]),
        ("xyzzy", ["unknown rule 'xyzzy'; rules: mean"]),
        ("", ["unknown rule ''"]),
        ("phocas:c=6", ["unknown parameter of phocas 'c'", "parameters: b"]),
        ("multi-krum:b=1,selekt=2", ["'selekt'", "did you mean 'select'?", "b, select"]),
        ("median:b=1", ["unknown parameter of median 'b'; parameters: none"]),
        ("phocas", ["phocas needs b", "phocas:b=..."]),
        ("phocas:", ["phocas needs b"]),
        ("phocas:6", ["'6'", "without '='"]),
        ("phocas:b=6,b=7", ["b is given twice"]),
        ("phocas:b=", ["b must be an integer", "got ''"]),
        ("phocas:b=0.3", ["phocas", "b must be an integer", "got '0.3'"]),
        ("phocas:b=True", ["b must be an integer"]),
        ("phocas:b=-1", ["b >= 0", "got b=-1"]),
        ("centered-clipping:radius=x", ["radius must be a number", "got 'x'"]),
        ("centered-clipping:radius=nan", ["radius > 0", "got radius=nan"]),
        ("multi-krum:b=1,select=x", ["select must be an integer", "got 'x'"]),
        ("nn:b=6|phocas:b=6", ["unknown pre-aggregator 'nn'", "did you mean 'nnm'?"]),
        ("krum:b=1|phocas:b=6", ["krum is a rule, which must come last"]),
        ("nnm:b=6", ["nnm is a pre-aggregator", "write nnm:b=6|median"]),
        ("nnm:b=6|", ["both sides of every |", "nnm:b=6|"]),
        ("|median", ["both sides of every |"]),
    ],
)
def test_text_that_is_no_rule(text: str, words: list[str]) -> None:
    with pytest.raises(ValueError, match=".*".join(re.escape(word) for word in words)):
        parse_rule(text)


def test_the_nearest_name_and_all_names_are_shown() -> None:
    assert unknown("rule", "Trimed_Mean", RULES).startswith(
        "unknown rule 'Trimed_Mean'; did you mean 'trimmed-mean'? rules: mean, "
    )
    assert unknown("thing", "x", []) == "unknown thing 'x'; things: none"


def test_pipelines_flatten() -> None:
    a, b, rule = phocas.NNM(1), phocas.Bucketing(2), phocas.Median()
    assert (a | (b | rule)) == ((a | b) | rule) == phocas.Pipeline((a, b), rule)
    assert (a | (b | a)) | rule == phocas.Pipeline((a, b, a), rule)
    assert (a | b) | (a | rule) == phocas.Pipeline((a, b, a), rule)
    rows = np.random.default_rng(0).normal(size=(8, 5))
    np.testing.assert_array_equal(
        (a | b | rule)(rows),
        phocas.aggregate(rows, "nnm:b=1|bucketing:size=2|median"),
    )


def test_stages_are_values() -> None:
    for cls in PRE_AGGREGATORS.values():
        for stage in examples_of(cls, 9):
            assert PRE_AGGREGATORS.parse(str(stage)) == stage


DEFAULT = Phocas(b=1)


@dataclass(frozen=True)
class Everything(Spec):
    """Have a field of every kind that can be written."""

    colour: Literal["red", "green"]
    sizes: tuple[int, ...] = ()
    rule: Rule = DEFAULT
    deep: bool = False
    share: float | None = None
    title: str = "none"
    name: ClassVar[str] = "everything"


EVERYTHING = Table("thing", [Everything])


@pytest.mark.parametrize(
    "value",
    [
        Everything("red"),
        Everything("green", (1, 2, 3), phocas.Krum(b=4), deep=True, share=0.25, title="a b"),
        Everything("red", rule=phocas.MultiKrum(b=1, select=2)),
        Everything("red", rule=phocas.NNM(b=2) | phocas.CenteredClipping(1.5, 3)),
    ],
)
def test_fields_of_every_kind(value: Everything) -> None:
    assert EVERYTHING.parse(str(value)) == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("everything:colour=blue", "colour must be one of 'red', 'green', got 'blue'"),
        ("everything:colour=red,deep=1", "deep must be true or false, got '1'"),
        ("everything:colour=red,share=x", "share must be a number, got 'x'"),
        ("everything:colour=red,sizes=1/x", "sizes must be an integer, got '1/x'"),
    ],
)
def test_fields_that_do_not_fit(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        EVERYTHING.parse(text)


def test_build_takes_the_text_of_arguments() -> None:
    assert build(Phocas, {"b": "3"}) == Phocas(b=3)
    assert Phocas.parameters() == "b"
    assert phocas.MultiKrum.parameters() == "b, select=None"
