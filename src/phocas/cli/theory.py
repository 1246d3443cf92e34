"""``phocas bounds`` and ``phocas plan``: what the theory promises, and what will survive."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from phocas.theory import Bound, Exposure, Survival


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(bounds)
    app.command()(plan)


def bounds(
    workers: Annotated[int, typer.Option(help="Workers, m.")],
    byzantine: Annotated[int, typer.Option(help="Bad values in each column, q.")],
    b: Annotated[str, typer.Option("--b", help="What the rules are told: 6, or 6..9.")] = "",
    measure: Annotated[bool, typer.Option(help="Measure the errors too (seconds).")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print how far each rule may be from the true gradient, in units of V."""
    from phocas.theory import largest_b, table

    rows = table(workers, byzantine, _range(b) if b else range(byzantine, largest_b(workers) + 1))
    measured = [_measured(row, workers, byzantine) if measure else {} for row in rows]
    if as_json:
        records = [dataclasses.asdict(row) | more for row, more in zip(rows, measured, strict=True)]
        result = {"workers": workers, "byzantine": byzantine, "bounds": records}
        print(json.dumps(result, indent=2))
        return
    _show_bounds(rows, measured, workers, byzantine)


def plan(
    workers: Annotated[int, typer.Option(help="Workers, m.")],
    dims: Annotated[int, typer.Option(help="Parameters, d.")],
    rounds: Annotated[int, typer.Option(help="Rounds of training.")],
    rate: Annotated[float, typer.Option(help="Chance that one value goes bad.")],
    servers: Annotated[
        int, typer.Option(help="Servers, of which one is hit: d/servers columns are exposed.")
    ] = 1,
    b: Annotated[str, typer.Option("--b", help="What the rules are told: 6, or 0..9.")] = "",
    confidence: Annotated[float, typer.Option(help="The chance to survive that is asked for.")] = (
        0.999
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tell which rule, with which b, survives values that go bad at random."""
    from phocas.theory import Exposure, largest_b
    from phocas.theory.bounds import check_majority
    from phocas.theory.survival import RULES, choices

    exposure = Exposure(workers, dims, rounds, rate, servers)
    values = _range(b) if b else range(largest_b(workers) + 1)
    check_majority("a plan", workers, values[-1])
    smallest = {rule: exposure.smallest(rule, confidence) for rule in RULES}
    every = [
        exposure.survival(rule, value)
        for rule in RULES
        for value in choices(rule, workers)
        if value in values
    ]
    if as_json:
        chosen = {rule: found and found.b for rule, found in smallest.items()}
        result = dataclasses.asdict(exposure) | {
            "columns": exposure.columns,
            "confidence": confidence,
            "smallest_b": chosen,
            "survival": [_survival_record(survival) for survival in every],
        }
        print(json.dumps(result, indent=2))
        return
    _show_plan(exposure, values, confidence)


def _range(text: str) -> range:
    """Read ``6`` or ``6..9``, both ends included."""
    first, dots, last = text.partition("..")
    try:
        values = range(int(first), int(last if dots else first) + 1)
    except ValueError:
        raise ValueError(f"--b takes a count or a range such as 6..9: got {text!r}") from None
    if not values or values[0] < 0:
        raise ValueError(f"--b takes a range of counts from low to high: got {text!r}")
    return values


def _measured(row: Bound, workers: int, byzantine: int) -> dict[str, Any]:
    """Measure a rule before and after seeing, if it is one of those measured and feasible."""
    from phocas.theory.measure import MEASURED, worst_of

    if not row.feasible or row.b is None or row.rule not in MEASURED:
        return {}
    found = {
        moment: worst_of(row.rule, workers, byzantine, row.b, after=moment == "after", trials=500)
        for moment in ("before", "after")
    }
    return {"measured": {moment: dataclasses.asdict(each) for moment, each in found.items()}}


def _show_bounds(
    rows: list[Bound], measured: list[dict[str, Any]], workers: int, byzantine: int
) -> None:
    from rich.console import Console

    table = _table(
        f"E ||rule - g||^2 in units of V: m={workers} workers, q={byzantine} bad a column"
    )
    table.add_column("rule", no_wrap=True)
    for name in ("b", "printed", "adaptive"):
        table.add_column(name, justify="right")
    if any(measured):
        table.add_column("before", justify="right")
        table.add_column("after", justify="right")
    table.add_column("feasible")
    previous = rows[0].rule
    for row, more in zip(rows, measured, strict=True):
        if row.b is not None and row.rule != previous:
            table.add_section()
        previous = row.rule
        cells = [row.rule, "-" if row.b is None else str(row.b)]
        cells += [_number(row.printed), _number(row.adaptive)]
        if any(measured):
            found = more.get("measured", {})
            cells += [_number(found[key]["error"]) if found else "-" for key in ("before", "after")]
        verdict = "[green]yes[/]" if row.feasible else "[red]no[/]"
        table.add_row(*cells, verdict + (f": {row.reason}" if row.reason else ""))
    table.caption = (
        "printed: the paper's bound. adaptive: proven for an attacker who picks what to replace"
        " after seeing all."
    )
    if any(measured):
        table.caption += " before, after: measured under the worst attack found, picked then."
    Console().print(table)


def _show_plan(exposure: Exposure, values: range, confidence: float) -> None:
    from rich.console import Console

    from phocas.theory.survival import FIXED, ROWWISE, TRIMMING, choices

    console = Console()
    hit = f" (one of {exposure.servers} servers)" if exposure.servers > 1 else ""
    console.print(
        f"{exposure.workers} workers, {exposure.columns} of {exposure.dims} columns exposed{hit},"
        f" {exposure.rounds} rounds, rate {exposure.rate:g}\n",
        highlight=False,
    )
    summary = _table(f"To survive with {_percent(confidence)}")
    summary.add_column("rule")
    summary.add_column("survives if always")
    for name in ("smallest b", "survives", "fails"):
        summary.add_column(name, justify="right")
    for family, condition in (
        (("mean",), "no value is bad"),
        (("median",), "a minority of a column is bad"),
        (ROWWISE, "at most b rows are touched"),
        (TRIMMING, "at most b of a column are bad"),
    ):
        allowed = choices(family[0], exposure.workers)
        if not allowed:
            summary.add_row(", ".join(family), condition, "[red]needs m > 2[/]", "-", "-")
            continue
        found = exposure.smallest(family[0], confidence)
        shown = found or exposure.survival(family[0], allowed[-1])
        label = f"[green]{shown.b}[/]" if found else f"[red]none[/], b={shown.b}:"
        if family[0] in FIXED:
            label = "[green]yes[/]" if found else "[red]no[/]"
        chance = shown.chance
        summary.add_row(
            ", ".join(family), condition, label, _percent(chance.survives), f"{chance.fails:.2g}"
        )
    console.print(summary)
    by_b = _table("Chance that a run fails, by b")
    by_b.add_column("b", justify="right")
    for name in ("/".join(ROWWISE), "union bound", "/".join(TRIMMING), "union bound"):
        by_b.add_column(name, justify="right")
    for b in values:
        cells = [str(b)]
        for family in (ROWWISE, TRIMMING):
            if b not in choices(family[0], exposure.workers):
                cells += ["2b + 2 >= m", "-"]
                continue
            survival = exposure.survival(family[0], b)
            cells += [f"{survival.chance.fails:.3g}", f"{survival.union:.3g}"]
        by_b.add_row(*cells)
    console.print(by_b)


def _table(title: str) -> Table:
    from rich import box
    from rich.table import Table

    return Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", caption_justify="left")


def _survival_record(survival: Survival) -> dict[str, Any]:
    return {
        "rule": survival.rule,
        "b": survival.b,
        "survives": survival.chance.survives,
        "fails": survival.chance.fails,
        "union": survival.union,
    }


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _percent(share: float) -> str:
    """Write a share with as many nines as it has, never rounding it up to 100%.

    >>> _percent(0.999), _percent(0.99912), _percent(0.4), _percent(1 - 1e-9), _percent(1.0)
    ('99.9%', '99.91%', '40%', '99.9999999%', '100%')
    """
    if share in (0, 1):
        return f"{share:.0%}"
    if share < 1e-4:
        return f"{100 * share:.1e}%"
    digits = 2
    while digits < 14 and float(f"{100 * share:.{digits}f}") == 100:
        digits += 1
    text = f"{100 * share:.{digits}f}".rstrip("0").rstrip(".")
    return text + "%"
