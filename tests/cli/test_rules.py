"""``phocas rules`` lists, and says of one rule, what the rules themselves promise."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from phocas import PRE_AGGREGATORS, RULES, parse_rule
from phocas.experiments.benchmark import cost_cases, published_costs

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import Phocas

OWN = '''
from dataclasses import dataclass
from phocas import Median

@dataclass(frozen=True)
class Mine(Median):
    """Do as the median does.

    u_((m+1)/2), as ever.

    Reference: this test.
    """
'''


@pytest.mark.parametrize("m", [1, 2, 5, 20, 128])
def test_all_are_listed_with_what_they_survive(phocas: Phocas, m: int) -> None:
    listed = json.loads(phocas("rules", "--json", "--num-workers", str(m)))
    assert [entry["name"] for entry in listed] == [*RULES, *PRE_AGGREGATORS]
    for entry in listed:
        if entry["told"] is not None:
            tolerance = parse_rule(entry["told"]).tolerates(m)
            assert entry["survives"] == {"rows": tolerance.rows, "values": tolerance.values}
    text = phocas("rules", "--num-workers", str(m))
    assert max(map(len, text.splitlines())) <= 80
    for entry in listed:
        (line,) = [line for line in text.splitlines() if line.startswith(f"{entry['name']} ")]
        survived = entry["survives"]
        if survived is not None and survived["values"]:
            assert f"{survived['values']} values" in line
        if entry["cost"] is not None:
            assert f"{entry['cost']:.1f}" == line.split()[-1]
    if m == 20:
        assert all(entry["survives"] is not None for entry in listed if entry["cost"] is not None)


def test_costs_are_of_what_is_measured_today() -> None:
    """A rule that is new has none until ``phocas bench --costs`` is run on a quiet machine."""
    costs = published_costs()
    cases = cost_cases()
    assert set(costs.ratios) <= set(cases)
    assert costs.rules == {name: cases[name].rule for name in costs.ratios}
    assert all(0 < ratio < 100 for ratio in costs.ratios.values())


@pytest.mark.parametrize("name", [*RULES, *PRE_AGGREGATORS])
def test_each_is_described_in_80_columns(phocas: Phocas, name: str) -> None:
    text = phocas("rules", name)
    assert max(map(len, text.splitlines())) <= 80
    known = json.loads(phocas("rules", name, "--json"))
    (step,) = known["steps"]
    assert step["summary"].split()[0] in text
    for key in ("reference", "breakdown"):
        if step[key]:
            assert " ".join(step[key].split()[:2]) in text


def test_a_pipeline_has_its_own_guarantee(phocas: Phocas) -> None:
    known = json.loads(phocas("rules", "nnm:b=2|phocas:b=2", "--num-workers", "11", "--json"))
    assert [step["name"] for step in known["steps"]] == ["nnm", "phocas"]
    rule = parse_rule("nnm:b=2|phocas:b=2")
    assert known["promise"]["survives"] == {"rows": 2, "values": 0}
    assert known["promise"]["distances"] == [
        {"wrong": q, "spreads": rule.error_bound(11, q)} for q in (0, 2)
    ]
    assert "nnm:b=2|phocas:b=2 with 11 workers" in phocas(
        "rules", "nnm|phocas", "--b", "2", "--num-workers", "11"
    )


def test_b_is_the_largest_that_all_steps_hold_with(phocas: Phocas) -> None:
    for text, told in {
        "krum": "krum:b=8",
        "nnm|krum": "nnm:b=8|krum:b=8",
        "bucketing:size=2|krum": "bucketing:size=2|krum:b=3",
        "cell-filter": "cell-filter:b=9|median",
        "heraclius:cutoff=2": "heraclius:b=9,cutoff=2.0",
        "trmean": "trimmed-mean:b=9",
    }.items():
        assert json.loads(phocas("rules", text, "--json"))["rule"] == told


def test_a_rule_of_the_users_own(phocas: Phocas, tmp_path: Path) -> None:
    (tmp_path / "listed_rules.py").write_text(OWN)
    text = phocas("rules", "listed_rules:Mine", "--num-workers", "5")
    assert "Do as the median does." in text
    assert "this test." in text
    assert "2 Byzantine values" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("phoca",), "did you mean 'phocas'?"),
        (("krum", "--b", "9"), "the largest b is 8"),
        (("phocas:b=4", "--b", "3"), "--b is for a rule without b"),
        (("mean", "--b", "1"), "--b is for a rule without b"),
        (("--b", "1"), "give its name too"),
        (("krum", "--num-workers", "2"), "no b is small enough"),
        (("--num-workers", "0"), "needs --num-workers >= 1"),
        (("phocas|nnm",), "phocas"),
        (("nowhere.at:All",), "there is no module 'nowhere'"),
        (("",), "unknown rule ''"),
    ],
)
def test_what_cannot_be_described(phocas: Phocas, words: tuple[str, ...], message: str) -> None:
    line = phocas("rules", *words, status=2)
    assert message in line
    assert len(line.splitlines()) == 1
