"""The page about choosing a rule, `phocas advise` and the stored results have the same numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from phocas import parse_rule
from phocas.experiments.recommendations import RECOMMENDATIONS, Recommendation, page_lines

ROOT = Path(__file__).parents[2]
STUDIED = [each for each in RECOMMENDATIONS if each.repeat.startswith("choosing")]
MONITOR = "monitor:rule="


def accuracies(study: str, rule: str) -> list[str]:
    """Return the accuracies of a rule at the end, without failures first, as the study has them."""
    page = (ROOT / f"docs/reproduction/{study}/claims.md").read_text("utf-8")
    _, _, tables = page.partition("## Accuracies")
    cell = "| `" + rule.replace("|", r"\|") + "` |"
    found = [line.partition(cell)[2].split("|") for line in tables.splitlines() if cell in line]
    return [each[2].split()[0] for each in found]


def test_page_has_the_table() -> None:
    page = (ROOT / "docs/choosing.md").read_text("utf-8")
    table = "\n".join(page_lines())
    assert f"\n{table}\n\n" in page, f"docs/choosing.md needs these lines:\n{table}"


@pytest.mark.parametrize("line", STUDIED, ids=lambda line: f"{line.rule} {line.repeat}")
def test_numbers_are_those_of_the_study(line: Recommendation) -> None:
    rule = line.rule_with(line.b)
    measured = "mean" if rule.startswith(MONITOR) else rule
    clean, *attacked = accuracies(line.repeat, measured)
    assert line.clean.startswith(clean)
    if measured != "mean":
        assert len(attacked) == 8
        assert min(attacked) in line.lowest


def test_every_rule_is_one_and_every_script_exists() -> None:
    for line in RECOMMENDATIONS:
        tolerated = parse_rule(line.rule_with(3)).tolerates(20).rows
        assert tolerated == (0 if MONITOR in line.rule else 3)
        if line not in STUDIED:
            assert (ROOT / line.repeat).is_file()
