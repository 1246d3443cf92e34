"""The table of claims: on the terminal, and as Markdown for the documentation."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from phocas.experiments.reproduction.outcomes import MissingError
from phocas.experiments.reproduction.verdicts import interval

if TYPE_CHECKING:
    from collections.abc import Sequence

    from phocas.experiments.reproduction.outcomes import Outcomes
    from phocas.experiments.reproduction.tasks import Figure, Reproduction
    from phocas.experiments.reproduction.verdicts import Check, ClaimResult, Interval


def claims_table(findings: Sequence[ClaimResult]) -> Table:
    """Lay out the claims for a terminal."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("claim", "verdict", "repeats", "numbers"):
        table.add_column(heading, overflow="fold", justify="left")
    for finding in findings:
        table.add_row(
            f"{finding.claim.name}: {finding.claim.text}",
            _verdict(finding),
            str(finding.repeats),
            escape("\n".join([*map(describe, worst(finding)), *filter(None, [finding.note])])),
        )
    return table


def worst(finding: ClaimResult, most: int = 4) -> list[Check]:
    """Return at most ``most`` checks of a claim, those that fail first."""
    order = {"does not hold": 0, "not decided": 1, "holds": 2}
    return sorted(finding.checks, key=lambda check: order[check.verdict])[:most]


def describe(check: Check) -> str:
    """Write a check in one line.

    >>> from phocas.experiments.reproduction.verdicts import Check, interval
    >>> describe(Check("Phocas - Mean", interval([0.01, 0.02]), at_least=-0.01))
    'Phocas - Mean: +0.015 [-0.049, +0.079], wanted at least -0.01'
    >>> describe(Check("Phocas - Mean", interval([0.0001, 0.0001]), at_most=0.0))
    'Phocas - Mean: +1.0e-04 [+1.0e-04, +1.0e-04], wanted at most 0'
    """
    return f"{check.what}: {_interval(check.found, check.unit)}, wanted {_wanted(check)}"


def markdown(
    reproduction: Reproduction,
    outcomes: Outcomes,
    findings: Sequence[ClaimResult],
    *,
    command: str,
    facts: Sequence[str],
) -> str:
    """Write the report: how it was made, the claims with all their numbers, and the accuracies."""
    lines = [
        f"# {reproduction.title}: the claims",
        "",
        f"Made by `{command}`.",
        "",
        *(f"- {fact}" for fact in facts),
        "",
        *claim_lines(findings),
    ]
    lines += ["", "## Accuracies", ""]
    for figure in reproduction.figures:
        lines += _accuracies(figure, outcomes)
    return "\n".join(lines) + "\n"


def claim_lines(findings: Sequence[ClaimResult]) -> list[str]:
    """Return the number of claims with each verdict, and the claims with all their numbers."""
    counts = {
        verdict: sum(finding.verdict == verdict for finding in findings)
        for verdict in ("holds", "does not hold", "not decided")
    }
    lines = [
        ", ".join(f"{verdict}: {number}" for verdict, number in counts.items()) + ".",
        "",
        "Numbers are means over the repeats, with their 95% confidence intervals.",
        "",
        "| claim | where | verdict | repeats | numbers |",
        "|---|---|---|---|---|",
    ]
    for finding in findings:
        numbers = "<br>".join(map(describe, worst(finding, most=20)))
        note = f"<br>*{finding.note}*" if finding.note else ""
        lines.append(
            f"| {finding.claim.text} | {finding.claim.section} | **{finding.verdict}** |"
            f" {finding.repeats} | {numbers}{note} |"
        )
    return lines


def _accuracies(figure: Figure, outcomes: Outcomes) -> list[str]:
    lines = [
        f"### {figure.title}",
        "",
        f"![{figure.title}]({figure.name}.png)",
        "",
        "| case | rule | batch | repeats | at the end | best | lowest, highest end | bad rounds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    try:
        cases = outcomes.figure(figure.name)
    except MissingError as error:
        return [f"### {figure.title}", "", str(error), ""]
    for case in cases:
        config = case.case.config
        rule = config.rule.replace("|", "\\|")
        lines.append(
            f"| {case.case.label} | `{rule}` | {config.batch_size} |"
            f" {len(case.seeds)} of {case.wanted} | {_plain(interval(case.final))} |"
            f" {_plain(interval(case.best))} | {case.final.min():.3f}, {case.final.max():.3f} |"
            f" {case.nonfinite.mean():.1f} |"
        )
    return [*lines, ""]


def _verdict(finding: ClaimResult) -> str:
    style = {"holds": "green", "does not hold": "red", "not decided": "yellow"}
    return f"[{style[finding.verdict]}]{finding.verdict}[/]"


def _plain(found: Interval) -> str:
    if found.repeats == 1:
        return f"{found.mean:.3f}"
    return f"{found.mean:.3f} ± {found.high - found.mean:.3f}"


def _interval(found: Interval, unit: str) -> str:
    unit = f" {unit}" if unit else ""
    bounds = [value for value in (found.low, found.high) if math.isfinite(value)]
    largest = max(map(abs, [found.mean, *bounds]))
    form = "+.3g" if largest >= 10 else "+.1e" if 0 < largest < 0.001 else "+.3f"
    mean = f"{found.mean:{form}}{unit}"
    return f"{mean} [{found.low:{form}}, {found.high:{form}}]" if bounds else mean


def _wanted(check: Check) -> str:
    low, high = check.at_least, check.at_most
    if abs(low) < 1e-300:  # "more than nothing" is written as the least number above it
        low = 0.0
    if math.isinf(high):
        return f"at least {low:g}"
    if math.isinf(low):
        return f"at most {high:g}"
    return f"from {low:g} to {high:g}"
