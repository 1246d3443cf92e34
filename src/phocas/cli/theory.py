"""``phocas theory``: the paper's error bounds, and which b a job needs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phocas.cli import Application, given, require_command

if TYPE_CHECKING:
    from rich.table import Table

    from phocas.rules import Tolerance
    from phocas.theory import Bound, Exposure, Survival


def register(app: typer.Typer, group: str) -> None:
    """Add the group of commands."""
    inner = Application()
    inner.callback()(theory)
    inner.command("bounds")(bounds)
    inner.command("plan")(plan)
    inner.command("figures")(figures)
    app.add_typer(inner, name="theory", rich_help_panel=group)


def theory(context: typer.Context) -> None:
    """Print error bounds, and the b that a job needs."""
    require_command(context)


def bounds(
    num_workers: Annotated[int, typer.Option(help="Number of workers, m.")],
    byzantine: Annotated[int, typer.Option(help="Byzantine values in each column, q.")],
    b: Annotated[
        str,
        typer.Option("--b", help="Given b of the rules: 6, or 6..9.", show_default="q and more"),
    ] = "",
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure the errors too; this takes seconds.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the error bound of each rule, in units of the variance V."""
    from phocas.theory import largest_b, table

    m = num_workers
    rows = table(m, byzantine, _range(b) if b else range(byzantine, largest_b(m) + 1))
    measured = [_measured(row, m, byzantine) if measure else {} for row in rows]
    if as_json:
        records = [dataclasses.asdict(row) | more for row, more in zip(rows, measured, strict=True)]
        result = {"workers": m, "byzantine": byzantine, "bounds": records}
        print(json.dumps(result, indent=2))
        return
    _show_bounds(rows, measured, m, byzantine)


def plan(
    context: typer.Context,
    num_workers: Annotated[int, typer.Option(help="Number of workers in a round, m.")],
    rounds: Annotated[int, typer.Option(help="Number of rounds.")],
    dims: Annotated[int | None, typer.Option(help="Number of parameters, d.")] = None,
    rate: Annotated[
        float | None, typer.Option(help="Probability that one value is wrong in a round.")
    ] = None,
    clients: Annotated[
        int | None, typer.Option(help="Number of clients from which the workers are drawn.")
    ] = None,
    byzantine: Annotated[
        int | None, typer.Option(help="With --clients: number of Byzantine clients.")
    ] = None,
    servers: Annotated[
        int, typer.Option(help="With --dims: servers, of which one is exposed to faults.")
    ] = 1,
    b: Annotated[
        str,
        typer.Option("--b", help="With --dims: b to tabulate, 6 or 0..9.", show_default="all"),
    ] = "",
    confidence: Annotated[
        float, typer.Option(help="Wanted probability that every round is tolerated.")
    ] = 0.999,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print which rule and b tolerate random faults or Byzantine clients.

    Give --dims and --rate for values that are wrong at random, or --clients
    and --byzantine for clients that are drawn at random.
    """
    from phocas.rules import RULES, TrimmedMean
    from phocas.theory import Exposure

    workers = num_workers
    if clients is not None or byzantine is not None:
        unused = list(given(context, ["dims", "rate", "servers", "b"]))
        if clients is None or byzantine is None or unused:
            raise ValueError(
                "--clients and --byzantine go together, with --num-workers and --rounds; --dims,"
                " --rate, --servers and --b are for values that are wrong at random"
            )
        _plan_participation(clients, byzantine, workers, rounds, confidence, as_json=as_json)
        return
    if dims is None or rate is None:
        raise ValueError("a plan needs --dims and --rate, or --clients and --byzantine")
    exposure = Exposure(workers, dims, rounds, rate, servers)
    values = _range(b) if b else range(TrimmedMean.largest_b(workers) + 1)
    TrimmedMean(values[-1]).check(workers)
    if as_json:
        every = {name: exposure.every_b(name) for name in RULES}
        smallest = {name: exposure.smallest(name, confidence) for name in RULES}
        result = dataclasses.asdict(exposure) | {
            "columns": exposure.columns,
            "confidence": confidence,
            "smallest_b": {
                name: found and found.b
                for name, found in smallest.items()
                if every[name] and every[name][0].b is not None
            },
            "survival": [
                _survival_record(each)
                for chances in every.values()
                for each in chances
                if each.b is None or each.b in values
            ],
        }
        print(json.dumps(result, indent=2))
        return
    _show_plan(exposure, values, confidence)


def figures(
    output: Annotated[Path, typer.Option(help="Folder for the figures.")] = Path("phocas-theory"),
    num_workers: Annotated[int, typer.Option(help="Number of workers, m.")] = 20,
    byzantine: Annotated[int, typer.Option(help="Byzantine workers, q; b is the same.")] = 6,
    rounds: Annotated[int, typer.Option(help="Number of rounds of the runs.")] = 500,
) -> None:
    """Draw the paper's Figure 1, and runs against Theorems 3 and 4."""
    from phocas.report.tables import print_table
    from phocas.report.theory import draw_models, draw_trajectories
    from phocas.theory.trajectories import RULES, smooth_problem, strongly_convex

    m, q = num_workers, byzantine
    runs = [
        *(strongly_convex(rule, m, q, step=0.02, rounds=rounds) for rule in RULES),
        *(strongly_convex(rule, m, q, step=0.4, rounds=rounds) for rule in RULES),
        *(smooth_problem(rule, m, q, rounds=rounds) for rule in RULES),
    ]
    draw_models(output / "figure-1")
    draw_trajectories(runs, output / "theorems")
    columns = {
        "theorem": [str(run.theorem) for run in runs],
        "rule": [f"{run.rule}:b={q}" for run in runs],
        "step": [f"{run.step:g}" for run in runs],
        "end": [f"{run.measured[-1]:.3g}" for run in runs],
        "bound": [f"{run.bound[-1]:.3g}" for run in runs],
        "printed": ["-" if run.printed is None else f"{run.printed[-1]:.3g}" for run in runs],
        "verdict": [
            "holds"
            if run.printed_holds
            else "holds, not as printed"
            if run.holds
            else "does not hold"
            for run in runs
        ],
    }
    print_table(columns, right=("step", "end", "bound", "printed"))
    typer.echo(f"figure-1 and theorems in {output}")


def _plan_participation(
    clients: int, byzantine: int, workers: int, rounds: int, confidence: float, *, as_json: bool
) -> None:
    from rich.console import Console

    from phocas.rules import RULES
    from phocas.theory import Participation

    asked = Participation(clients, byzantine, workers, rounds)
    smallest = {name: asked.smallest(name, confidence) for name in RULES}
    told = {name: found for name, found in smallest.items() if RULES[name].choices(workers)}
    sizes = [(each.num_workers, each) for each in map(asked.with_workers, asked.sizes())]
    of_phocas = {m: each.smallest("phocas", confidence) for m, each in sizes}
    chances = [(b, asked.at_most(b)) for b in range((workers - 1) // 2 + 1)]
    if as_json:
        result = dataclasses.asdict(asked) | {
            "confidence": confidence,
            "smallest_b": {name: found and found.b for name, found in told.items()},
            "rounds_beyond_b": {b: chance.fails for b, chance in chances},
            "runs_beyond_b": {b: chance.repeated(rounds).fails for b, chance in chances},
            "smallest_b_of_phocas_by_workers": {m: f and f.b for m, f in of_phocas.items()},
        }
        print(json.dumps(result, indent=2))
        return
    console = Console()
    console.print(
        f"{clients} clients, {byzantine} of them Byzantine; {workers} take part in each of {rounds}"
        " rounds\n",
        highlight=False,
    )
    by_b = _table("Probability of more than b Byzantine workers")
    for name in ("b", "in a round", "in any round"):
        by_b.add_column(name, justify="right")
    for b, chance in chances:
        by_b.add_row(str(b), f"{chance.fails:.3g}", f"{chance.repeated(rounds).fails:.3g}")
    console.print(by_b)
    families: dict[int | None, list[str]] = {}
    for name, found in told.items():
        families.setdefault(found.b if found else -1, []).append(name)
    summary = _table(f"Smallest b that is enough with probability {_percent(confidence)}")
    summary.add_column("b", justify="right")
    summary.add_column("rules")
    for b_, names in sorted(families.items(), key=lambda pair: (pair[0] is None, pair[0] or 0)):
        label = "[red]none[/]" if b_ == -1 else "any" if b_ is None else f"[green]{b_}[/]"
        summary.add_row(label, ", ".join(names))
    console.print(summary)
    by_size = _table("Smallest b of phocas, by workers in a round")
    for name in ("workers", "smallest b", "share of the workers"):
        by_size.add_column(name, justify="right")
    for m, found in of_phocas.items():
        b_of = None if found is None else found.b
        cells = ("[red]none[/]", "-") if b_of is None else (str(b_of), _percent(b_of / m))
        by_size.add_row(str(m), *cells)
    console.print(by_size)


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
    """Measure a rule's error against attackers that choose before and after seeing the values.

    Return nothing for a rule that is not feasible, or for which there is no search.
    """
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
        f"E ||rule - g||^2 in units of V: m={workers} workers, q={byzantine} Byzantine per column"
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
        "printed: the paper's bound. adaptive: the bound against an attacker who chooses the"
        " values to replace after seeing all."
    )
    if any(measured):
        table.caption += (
            " before, after: the measured error under the worst attack found, chosen then."
        )
    Console().print(table)


def _show_plan(exposure: Exposure, values: range, confidence: float) -> None:
    from rich.console import Console

    from phocas.rules import Tolerance

    console = Console()
    hit = f" (one of {exposure.servers} servers)" if exposure.servers > 1 else ""
    console.print(
        f"{exposure.num_workers} workers, {exposure.columns} of {exposure.dims} columns"
        f" exposed{hit}, {exposure.rounds} rounds, rate {exposure.rate:g}\n",
        highlight=False,
    )
    summary = _table(f"To tolerate the job with probability {_percent(confidence)}")
    summary.add_column("rule")
    summary.add_column("tolerates", no_wrap=True)
    for name in ("smallest b", "succeeds", "fails"):
        summary.add_column(name, justify="right")
    for tolerances, names in _families(exposure.num_workers).items():
        found = exposure.smallest(names[0], confidence)
        shown = found or exposure.every_b(names[0])[-1]
        label = f"[green]{shown.b}[/]" if found else f"[red]none[/], b={shown.b}:"
        if shown.b is None or len(tolerances) == 1:
            label = "[green]yes[/]" if found else "[red]no[/]"
        chance = shown.chance
        cells = _condition(tolerances), label, _percent(chance.survives), f"{chance.fails:.2g}"
        summary.add_row(", ".join(names), *cells)
    summary.caption = "values: wrong values in every column. rows: wrong rows in a round."
    console.print(summary)
    by_b = _table("Probability that the job fails if at most b are tolerated")
    by_b.add_column("b", justify="right")
    for name in ("rows", "union bound", "values per column", "union bound"):
        by_b.add_column(name, justify="right")
    for b in values:
        cells_of_b = [str(b)]
        for tolerance in (Tolerance(rows=b), Tolerance(rows=b, values=b)):
            trial, times = exposure.trial(tolerance)
            cells_of_b += [f"{trial.repeated(times).fails:.3g}", f"{trial.union(times):.3g}"]
        by_b.add_row(*cells_of_b)
    console.print(by_b)


def _families(num_workers: int) -> dict[tuple[Tolerance, ...], list[str]]:
    """Group the rules that have the same guarantee for every b."""
    from phocas.rules import RULES

    families: dict[tuple[Tolerance, ...], list[str]] = {}
    for name, cls in RULES.items():
        promised = dict.fromkeys(rule.tolerates(num_workers) for rule in cls.choices(num_workers))
        if promised:
            families.setdefault(tuple(promised), []).append(name)
    return families


def _condition(tolerances: tuple[Tolerance, ...]) -> str:
    """Return what rules with this guarantee tolerate, as text."""
    most = tolerances[-1]
    if not most.rows:
        return "nothing"
    unit = "values" if most.values else "rows"
    if len(tolerances) == 1:
        return f"{unit} <= {most.rows}"
    told = all(each.rows == b for b, each in enumerate(tolerances))
    return f"{unit} <= b <= {most.rows}" if told else f"{unit} <= 0..{most.rows}"


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
