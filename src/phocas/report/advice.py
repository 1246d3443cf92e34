"""The advice on the b and the cutoff of a run, as text."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from phocas.detection.comparison import GROSS
from phocas.report.tables import WIDTH, comparison, listing, print_table

if TYPE_CHECKING:
    from phocas.experiments.advice import Advice, Cost


def print_advice(advice: Advice) -> None:
    """Print the implausible values of a run, the b it needed, and bounds of other choices."""
    record = advice.record
    m = record.config["workers"]
    attack = record.attack or "no attack"
    done = f"{advice.status}, {record.rounds_done} of {record.rounds} rounds"
    _say(f"run {record.id}: {record.rule}, {attack}, {m} workers; {done}")
    print()
    _say(f"values far from the others, in a thousand columns of {advice.counted} rounds:")
    print_table(
        {
            "beyond": [f"{one.cutoff:g} deviations" for one in advice.seen],
            "most in a column": [f"{one.most} of {m}" for one in advice.seen],
            "most workers": [f"{one.rows} of {m}" for one in advice.seen],
            "rounds": [str(one.rounds) for one in advice.seen],
            "share of values": [f"{one.share:.2%}" for one in advice.seen],
        },
        right=("beyond", "most in a column", "most workers", "rounds", "share of values"),
    )
    print()
    for line in _verdict(advice):
        _say(line)
    if advice.costs:
        print()
        _say(f"error bounds with {advice.needed} wrong values, in units of V (none: no guarantee):")
        _print_costs(advice.costs)
    print()
    _print_rules(advice)
    print()
    _say(
        "Only values far from the others were counted, in some columns of some rounds. Attacks that"
        " stay within the honest distribution were not, and later faults may be worse: choose b for"
        " the faults that you expect, not for those of one run."
    )


def _verdict(advice: Advice) -> list[str]:
    record, needed, told = advice.record, advice.needed, advice.tolerated
    seen = " and for ".join(advice.grounds)
    why = f"for {seen}" if seen else f"nothing was beyond {GROSS:g} deviations"
    need = f"b >= {needed}, {why}"
    if advice.hopeless:
        m = record.config["workers"]
        need = f"no b is enough, {why}: {needed} of {m} were wrong, and most must be honest"
    lines = [f"needed: {need}"]
    if advice.watched is not None:
        lines.append(
            "NO PROTECTION: monitor returns the mean, which tolerates nothing; "
            f"{advice.watched}, which it observes, would tolerate {advice.would}"
        )
    elif told is None:
        lines.append(f"{record.rule} is your own: its guarantee is not known here")
    elif told < needed:
        lines.append(f"NOT ENOUGH: {record.rule} tolerates {told}, so that its error has no bound")
    elif advice.unused and advice.unknown is not None:
        more = listing(tuple(advice.unused))
        lines.append(f"not known: whether b = {more} was needed too, because {advice.unknown}")
    elif advice.unused:
        lines.append(f"never used: b = {listing(tuple(advice.unused))}")
    else:
        lines.append(f"all used: {record.rule} tolerates {told}, and no more")
    if record.suspects:
        why = "wrong beyond chance"
        if comparison(record.config) == "past":
            why = "no longer as in their own past"
        lines.append(f"flagged: {listing(record.suspects)} ({why})")
    if record.suspect_servers:
        lines.append(f"servers that get wrong values: {listing(record.suspect_servers)}")
    if record.skipped_rounds:
        lines.append(
            f"{record.skipped_rounds} rounds were skipped: more was wrong or missing than tolerated"
        )
    return lines


def _print_costs(costs: tuple[Cost, ...]) -> None:
    cutoffs = list(dict.fromkeys(cost.cutoff for cost in costs))
    choices = list(dict.fromkeys(cost.b for cost in costs))
    found = {(cost.b, cost.cutoff): cost.bound for cost in costs}
    columns = {"b": [str(b) for b in choices]}
    for cutoff in cutoffs:
        heading = "bound" if cutoff is None else f"cutoff {cutoff:g}"
        columns[heading] = [_bound(found[b, cutoff]) for b in choices]
    print_table(columns, right=tuple(columns))


def _print_rules(advice: Advice) -> None:
    """Print the rules that were measured for such runs."""
    first = advice.rules[0]
    momentum = "with" if advice.record.config.get("worker_momentum") else "without"
    _say(
        f"rules for workers whose data {'are alike' if first.data == 'alike' else 'differ'},"
        f" {momentum} momentum, by possible failures (docs/choosing.md has the studies):"
    )
    for each in advice.rules:
        print(f"  {each.failures}: {each.rule}")
        numbers = f"without failures: {each.clean}; lowest: {each.lowest}; cost: {each.cost}"
        text = f"{numbers}; {each.command}".replace("*", "").replace("`", "")
        print(textwrap.fill(text, WIDTH, initial_indent="    ", subsequent_indent="    "))


def _bound(value: float | None) -> str:
    return "none" if value is None else f"{value:.3g}"


def _say(text: str) -> None:
    print(textwrap.fill(text, WIDTH, break_on_hyphens=False))
