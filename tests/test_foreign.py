"""Rules and attacks of the user's own, by their place: imported when a run begins, not before."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import phocas
from phocas import (
    PRE_AGGREGATORS,
    RULES,
    FunctionRule,
    Mix,
    Rule,
    ShardedAggregation,
    Tolerance,
    aggregate,
)
from phocas.attacks import ATTACKS, RowAttack, Scene, parse_attack
from phocas.attacks.audit import audit
from phocas.cli import application
from phocas.provenance import describe_error
from phocas.specs import Foreign, Table

SOURCE = """
from dataclasses import dataclass

import numpy as np
from phocas import NNM, Phocas, Rule, Window
from phocas.attacks import RowAttack
from phocas.rules import TrimmingRule

READY = NNM(b=1) | Phocas(b=1)
number = 5


@dataclass(frozen=True)
class Inner(TrimmingRule):
    def window(self, m):
        return Window(trim=self.b)


@dataclass(frozen=True)
class Titled(TrimmingRule):
    name = "phocas"

    def window(self, m):
        return Window(trim=self.b)


@dataclass(frozen=True)
class Signed(Rule):
    name: str
    columnwise = True

    def window(self, m):
        return Window(trim=(m - 1) // 2)


@dataclass(frozen=True)
class Known(RowAttack):
    q: int
    who: str = "fixed"
    name: str = "somebody"

    def fill(self, scene, rows):
        scene.matrix.write(rows, np.array(7.0))


class Bare(Rule):
    pass


@dataclass(frozen=True)
class Nearest(NNM):
    pass


@dataclass(frozen=True)
class Sevens(RowAttack):
    q: int
    who: str = "fixed"

    def fill(self, scene, rows):
        scene.matrix.write(rows, np.array(7.0))


def largest(rows):
    rows = rows * 1
    return rows.max(axis=0)


def spoiling(rows):
    rows[:] = 0
    return rows[0]


def short(rows):
    return rows[0, 1:]


def drawn(rows, b, size: int = 1, rng=None):
    return rows[rng.choice(len(rows), size, replace=False)].mean(axis=0) + b


def shifted(honest, own, q, rng, round, rule, step=1.0):
    assert len(own) == q
    return np.full_like(own, rule(honest)[0] + step + round + 0 * rng.normal())


def wrong_shape(honest):
    return honest


def writes(honest):
    honest[:] = 0
    return honest[0]


def raising(honest):
    raise KeyError("oh")
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    name = "mine_" + re.sub(r"\W", "_", tmp_path.name)
    (tmp_path / f"{name}.py").write_text(SOURCE)
    (tmp_path / "broken_inside.py").write_text("1 / 0\n")
    (tmp_path / "needs_more.py").write_text("import no_such_module_at_all\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield name
    sys.modules.pop(name, None)


ROWS = np.random.default_rng(0).normal(size=(9, 40))


def test_text_is_looked_at_without_importing(mine: str) -> None:
    cases: list[tuple[Table[Any], str]] = [
        (RULES, f"{mine}:Inner:b=2"),
        (RULES, f"nnm:b=1|{mine}:Inner:b=2"),
        (RULES, f"{mine}:Nearest:b=1|median"),
        (RULES, "no_such_module:Name"),
        (ATTACKS, f"{mine}:Sevens:q=2"),
        (ATTACKS, f"worst-case:rule=({mine}:Inner:b=2),q=2"),
    ]
    for table, text in cases:
        found = table.read(text)
        assert isinstance(found, Foreign)
        assert str(found) == text
        assert found == table.read(text)
    assert mine not in sys.modules
    assert RULES.read("nnm:b=1|median") == phocas.NNM(1) | phocas.Median()
    for text in (f"{mine}:Inner:b", f"{mine}:Inner:b=1,b=2", f"nnm:b=x|{mine}:Inner:b=1"):
        with pytest.raises(ValueError, match=r"without '='|given twice|must be an integer"):
            RULES.read(text)
    assert mine not in sys.modules


def test_classes_functions_and_values(mine: str) -> None:
    inner = RULES.parse(f"{mine}:Inner:b=2")
    assert str(inner) == f"{mine}:Inner:b=2"
    assert RULES.parse(str(inner)) == inner
    assert inner.tolerates(9) == Tolerance(2, 2)
    np.testing.assert_array_equal(inner(ROWS), phocas.TrimmedMean(2)(ROWS))
    whole = f"nnm:b=1|{mine}:Inner:b=2"
    assert str(RULES.parse(whole)) == whole
    np.testing.assert_array_equal(
        aggregate(ROWS, f"{mine}:Nearest:b=1|median"), aggregate(ROWS, "nnm:b=1|median")
    )
    assert RULES.parse(f"{mine}:READY") == phocas.NNM(1) | phocas.Phocas(1)
    assert RULES.parse(f"bucketing:size=2|{mine}:READY") == (
        phocas.Bucketing(2) | (phocas.NNM(1) | phocas.Phocas(1))
    )
    function = RULES.parse(f"{mine}:largest:b=3,columnwise=true")
    assert function.tolerates(9) == Tolerance(3, 3)
    assert RULES.parse(str(function)) == function
    np.testing.assert_array_equal(function(ROWS), ROWS.max(axis=0))
    attack = parse_attack(f"{mine}:Sevens:q=2")
    rows = ROWS.copy()
    assert attack.corrupt(rows, rng=np.random.default_rng(0)).rows.tolist() == [0, 1]
    assert (rows[:2] == 7).all()
    worst = parse_attack(f"worst-case:rule=({mine}:Inner:b=2),q=2")
    assert str(worst) == f"worst-case:rule=({mine}:Inner:b=2),q=2"
    assert parse_attack(str(worst)) == worst


@pytest.mark.parametrize(
    ("table", "text"),
    [
        (RULES, "{}:Titled:b=2"),
        (RULES, "nnm:b=1|{}:Titled:b=2"),
        (RULES, "{}:Signed:name=mine"),
        (RULES, "monitor:rule=({}:Signed:name=mine)"),
        (ATTACKS, "{}:Known:q=2"),
        (ATTACKS, "{}:Known:q=2,name=me"),
    ],
)
def test_names_of_their_own_change_no_spelling(mine: str, table: Table[Any], text: str) -> None:
    value = table.parse(text.format(mine))
    assert str(value) == text.format(mine)
    assert table.parse(str(value)) == value
    if isinstance(value, Rule):
        aggregate(ROWS, str(value))
    else:
        value.corrupt(ROWS.copy(), rng=np.random.default_rng(0))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}:Signed", ["Signed needs name: write", "Signed:name=..."]),
        ("no_such_module:Name", ["unknown rule 'no_such_module'", "no module 'no_such_module'"]),
        ("phoca:b", ["did you mean 'phocas'?", "no module 'phoca'"]),
        ("{}:Outer", ["unknown name in", "'Outer'", "names: Bare, Inner"]),
        ("{}:Sevens:q=1", ["must be a subclass of Rule or a function", "Sevens"]),
        ("{}:number", ["must be a subclass of Rule or a function", "got 5"]),
        ("{}:Bare", ["must be a frozen dataclass"]),
        ("{}:Inner", ["needs b"]),
        ("{}:Inner:b=1,c=2", ["unknown parameter", "'c'"]),
        ("{}:largest:c=2", ["unknown parameter of", "largest 'c'", "parameters: none"]),
        ("{}:drawn:b=1,size=x", ["drawn: size must be an integer, got 'x'"]),
        ("{}:drawn:size=2", ["drawn needs b: write"]),
        ("__main__:nothing", ["not defined in this process", "put it into a file"]),
        ("broken_inside:x", ["broken_inside cannot be imported: ZeroDivisionError"]),
        ("needs_more:x", ["needs_more cannot be imported", "no_such_module_at_all"]),
    ],
)
def test_mistakes_are_one_line(mine: str, text: str, words: list[str]) -> None:
    with pytest.raises(ValueError, match=".*".join(re.escape(word) for word in words)) as caught:
        RULES.parse(text.format(mine))
    assert "\n" not in str(caught.value)


def test_only_the_right_base_is_taken(mine: str) -> None:
    with pytest.raises(ValueError, match="must be a subclass of Attack or a function: got"):
        parse_attack(f"{mine}:Inner:b=1")
    with pytest.raises(ValueError, match="must be a subclass of PreAggregator: got"):
        PRE_AGGREGATORS.parse(f"{mine}:largest")
    for wrong in (5, None, phocas.Median):
        with pytest.raises(
            TypeError, match="ShardedAggregation needs a rule, as a value or as text: got"
        ):
            ShardedAggregation(wrong, m=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"a rule after it, NNM\(b=1\) \| Median\(\)"):
        ShardedAggregation(phocas.NNM(1), m=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_functions_in_every_form(dtype: str) -> None:
    rule = FunctionRule(lambda rows: np.median(rows, axis=0), b=2)
    rows = ROWS.astype(dtype)
    wanted = phocas.Median()(rows)
    np.testing.assert_array_equal(rule(rows), wanted)
    assert rule(rows).dtype == rows.dtype
    named = [{"w": row[:30].reshape(5, 6), "b": row[30:]} for row in rows]
    got = rule(named)
    np.testing.assert_array_equal(got["w"].ravel(), wanted[:30])
    np.testing.assert_array_equal(got["b"], wanted[30:])
    told = rule.explain(rows)
    assert (told.dropped == 0).all()
    assert told.expected == 0
    mixed = phocas.NNM(2) | rule
    np.testing.assert_allclose(mixed(rows), (phocas.NNM(2) | phocas.Median())(rows), rtol=1e-3)
    assert mixed.tolerates(9) == Tolerance(2, 0)


def test_a_function_neither_changes_its_rows_nor_returns_what_it_likes(mine: str) -> None:
    rows = ROWS.copy()
    assert (aggregate(rows, f"{mine}:spoiling") == 0).all()
    np.testing.assert_array_equal(rows, ROWS)
    with pytest.raises(ValueError, match=r"a number for each of 40 columns: got .* \(39,\)"):
        aggregate(rows, f"{mine}:short")
    with pytest.raises(ValueError, match="2b < m: got b=5 with m=9 workers, the largest b is 4"):
        FunctionRule(np.median, b=5)(rows)
    with pytest.raises(TypeError, match="needs a function"):
        FunctionRule(5)  # type: ignore[arg-type]


def finished(rule: Rule, shards: list[tuple[int, int]]) -> np.ndarray:
    evaluation = ShardedAggregation(rule, m=9, d=40)
    while evaluation.request is not None:
        evaluation.answer([evaluation.partial(ROWS[:, a:b], start=a) for a, b in shards])
    return np.concatenate([evaluation.finish(ROWS[:, a:b]) for a, b in shards])


def test_only_column_functions_are_sharded() -> None:
    shards = [(0, 13), (13, 40)]
    middle = FunctionRule(lambda rows: np.median(rows, axis=0), columnwise=True)
    np.testing.assert_array_equal(finished(middle, shards), phocas.Median()(ROWS))
    mixed = phocas.NNM(1) | middle
    np.testing.assert_array_equal(finished(mixed, shards), mixed(ROWS))
    first = FunctionRule(lambda rows: rows[np.square(rows).sum(axis=1).argmin()])
    np.testing.assert_array_equal(finished(first, [(0, 40)]), first(ROWS))
    for rule in (first, phocas.NNM(1) | first):
        with pytest.raises(ValueError, match=r"needs all columns in one place.*got 13 of 40"):
            finished(rule, shards)
        with pytest.raises(ValueError, match="needs all columns in one place"):
            ShardedAggregation(rule, m=9)


def test_functions_have_parameters_and_an_rng(mine: str) -> None:
    rule = RULES.parse(f"{mine}:drawn:b=2,size=9")
    np.testing.assert_allclose(rule(ROWS, rng=1), ROWS.mean(axis=0) + 2)
    assert str(rule) == f"{mine}:drawn:b=2,size=9"
    assert RULES.parse(str(rule)) == rule
    assert len({rule, RULES.parse(str(rule))}) == 1
    one = RULES.parse(f"{mine}:drawn:b=0")
    np.testing.assert_array_equal(one(ROWS, rng=3), one(ROWS, rng=3))
    assert any((one(ROWS, rng=seed) != one(ROWS, rng=3)).any() for seed in range(4))
    np.testing.assert_array_equal(one(ROWS), one(ROWS, rng=0))
    chain = RULES.parse(f"nnm:b=1|{mine}:drawn:b=1,size=9")
    np.testing.assert_allclose(chain(ROWS), (phocas.NNM(1) | phocas.Mean())(ROWS) + 1)
    assert rule.tolerates(9) == Tolerance(2, 0)
    assert not rule.proven
    assert not chain.proven
    assert (phocas.NNM(1) | phocas.Median()).proven
    with pytest.raises(ValueError, match=r"unknown parameter of .*'c'"):
        FunctionRule(lambda rows: rows[0], options={"c": 1})


def test_functions_are_attacks(mine: str) -> None:
    attack = parse_attack(f"{mine}:shifted:q=2,step=3,who=resampled").aimed_at(phocas.Median())
    assert parse_attack(str(attack)) == attack
    rows = ROWS.copy()
    touched = attack.corrupt(rows, rng=np.random.default_rng(0), round=4)
    others = np.setdiff1d(np.arange(9), touched.rows)
    np.testing.assert_allclose(rows[touched.rows], np.median(rows[others, 0]) + 7)
    np.testing.assert_array_equal(rows[others], ROWS[others])
    with pytest.raises(ValueError, match="rule=self: outside of training and audit"):
        parse_attack(f"{mine}:shifted:q=2").corrupt(rows, rng=np.random.default_rng(0))
    for text, words in {
        f"{mine}:shifted": "shifted needs q: write",
        f"{mine}:shifted:q=2,stop=1": "did you mean 'step'",
        f"{mine}:writes:q=1,rule=median": "has no parameter rule",
    }.items():
        with pytest.raises(ValueError, match=words):
            parse_attack(text)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("wrong_shape", r"\d+: mine_.*:wrong_shape must return numbers of shape \(40,\) or"),
        ("writes", r"\d+: ValueError: assignment destination is read-only"),
        ("raising", r"\d+: KeyError: 'oh'"),
    ],
)
def test_errors_of_functions_name_file_and_line(mine: str, name: str, words: str) -> None:
    with pytest.raises((ValueError, KeyError)) as caught:
        parse_attack(f"{mine}:{name}:q=2").corrupt(ROWS.copy(), rng=np.random.default_rng(0))
    assert re.search(rf"{mine}\.py:{words}", describe_error(caught.value))


def test_rule_of_the_run_is_attacked() -> None:
    for text in ("worst-case:rule=self,q=2", "alie:q=2,against=self"):
        attack = parse_attack(text)
        assert "self" in str(attack)
        attack.check(9, 40)
        aimed = attack.aimed_at(phocas.Median())
        assert "median" in str(aimed)
        assert aimed.aimed_at(phocas.Mean()) == aimed
        (trial,) = audit("median", num_workers=9, byzantine=2, dims=40, attacks=[text], rounds=1)
        assert trial.attack == str(aimed)


def test_subclasses_of_row_attacks_inherit_q_and_who() -> None:
    @dataclass(frozen=True)
    class Boost(RowAttack):
        factor: float = 10.0

        def fill(self, scene: Scene, rows: np.ndarray) -> None:
            scene.matrix.write(rows, np.full(scene.d, self.factor))

    made: Any = Boost
    assert [field.name for field in fields(made)] == ["q", "factor", "who"]
    rows = ROWS.copy()
    made(2, 3.0).corrupt(rows, rng=np.random.default_rng(0))
    assert (rows[:2] == 3).all()
    assert made(q=1).byzantine() == (0,)
    with pytest.raises(ValueError, match="q >= 0"):
        made(q=-1)


def test_a_mix_of_an_author_has_the_expected_dropped_share() -> None:
    assert Mix.average(np.ones(4)).fair == 0.25
    for wrong in (np.zeros(3), np.array([1.0, -1.0]), np.array([np.inf])):
        with pytest.raises(ValueError, match="one weight >= 0 for each row"):
            Mix.average(wrong)


def test_commands_describe_what_a_user_wrote(mine: str) -> None:
    def said(*words: str) -> Any:
        result = CliRunner().invoke(application(), [*words, "--json"], catch_exceptions=False)
        return json.loads(result.output)

    known = said("attacks", f"{mine}:shifted")
    assert [each["name"] for each in known["parameters"]] == ["q", "rule", "step", "who"]
    assert said("attacks", "alie")["name"] == "a-little-is-enough"
    rule = said("rules", f"{mine}:drawn")
    assert rule["rule"] == f"{mine}:drawn:b=9"
    assert rule["promise"]["proven"] is False
    assert said("rules", f"nnm:b=1|{mine}:Inner")["steps"][1]["name"] == f"{mine}:Inner"
    result = CliRunner().invoke(application(), ["attacks", f"{mine}:shifted"])
    assert "--attack" in result.output


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return None", r"got object of shape \(\)"),
        ("return rows", r"a number for each of 40 columns: got float64 of shape \(9, 40\)"),
        ("return rows[0] + 1j", "got complex128"),
        ("return rows[0].astype(str)", "got <U"),
        ("return torch.from_numpy(rows).to('cuda')", r"\w+Error: "),
        ("return rows.nothing", "AttributeError: .*no attribute 'nothing'"),
    ],
)
def test_wrong_functions_are_one_line_with_file_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, words: str
) -> None:
    if "cuda" in body and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    name = "wrong_" + re.sub(r"\W", "_", tmp_path.name)
    (tmp_path / f"{name}.py").write_text(f"import torch\n\ndef rule(rows):\n    {body}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(Exception) as caught:  # noqa: PT011  # of the user's code
        aggregate(ROWS, f"{name}:rule")
    line = describe_error(caught.value)
    assert re.search(rf"{name}\.py:[34]: .*{words}", line), line
    assert "\n" not in line
