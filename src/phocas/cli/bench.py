"""``phocas bench``: the speed of the rules on this machine."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phocas.cli import reject_unused
from phocas.cli.completion import complete_rule

if TYPE_CHECKING:
    from rich.table import Table

    from phocas.experiments.benchmark import Timing


def bench(
    context: typer.Context,
    rule: Annotated[
        list[str] | None,
        typer.Option(
            help="Rule to time, for example phocas:b=6. Repeatable.", autocompletion=complete_rule
        ),
    ] = None,
    num_workers: Annotated[int, typer.Option(help="With --rule: number of rows, m.")] = 20,
    dims: Annotated[int, typer.Option(help="With --rule: number of columns, d.")] = 1_000_000,
    dtype: Annotated[str, typer.Option(help="With --rule: type of the values.")] = "float32",
    device: Annotated[str, typer.Option(help="Device of the rows, for example cuda.")] = "cpu",
    seconds: Annotated[float, typer.Option(help="Seconds to measure each case.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
    costs: Annotated[
        Path | None,
        typer.Option(help="Time every rule, and write this file, which phocas rules reads."),
    ] = None,
) -> None:
    """Time the rules, as ratios to torch.mean in the same run.

    The exit status is 1 if a rule is slower than its limit.
    """
    from rich.console import Console

    from phocas.experiments import benchmark, doctor
    from phocas.files import check_writable, write_atomically
    from phocas.training.devices import find_device

    if not rule:
        reject_unused(context, ["num_workers", "dims", "dtype"], "without --rule")
    where = find_device("bench", "device", device)
    console = Console(quiet=as_json)
    every = benchmark.cost_cases() if costs is not None else {}
    if costs is not None:
        check_writable(costs, "the costs")
        if rule or device != "cpu":
            raise ValueError("--costs times every rule on the CPU: leave --rule and --device out")
        cases = list(every.values())
    elif rule:
        cases = [benchmark.BenchmarkCase(name, num_workers, dims, dtype) for name in rule]
    elif device == "cpu":
        cases = benchmark.default_cases()
    else:
        cases = benchmark.device_cases()
    bandwidth = benchmark.read_bandwidth(device=device)
    about = benchmark.machine()
    console.print(
        f"{about['cpu']}, {about['vector_bits']}-bit vectors, {about['threads']} threads,"
        f" torch {about['torch']} with {about['torch_threads']}; memory is read at"
        f" {bandwidth:.0f} GB/s. Best times, in turns with the baseline: torch.mean, or the plain"
        " rule for explain."
    )
    console.print(f"{device}: {doctor.route(where)}.")
    timings = []
    for case in cases:
        with console.status(str(case)):
            timings.append(
                benchmark.measure(case, seconds=seconds, device=device)
                if costs is None
                else benchmark.measure_cost(case, seconds)
            )
    console.print(_table(timings))
    if costs is not None:
        measured = benchmark.measured_costs(dict(zip(every, timings, strict=True)))
        content = json.dumps(dataclasses.asdict(measured), indent=2) + "\n"
        write_atomically(costs, content.encode())
        console.print(f"processor times of one thread, over the mean's: in {costs}", soft_wrap=True)
    whole = not rule and costs is None and device == "cpu"
    first_uses = {}
    if whole:
        for name, m in (("phocas:b=8", 20), ("phocas:b=32", 128)):
            with console.status(f"first use of {name}"):
                first_uses[f"{name}, m={m}"] = benchmark.first_use(name, m)
        for name, result in first_uses.items():
            console.print(
                f"First use of {name}: {result['cold']:.2f} s, in another process"
                f" {result['remembered']:.2f} s (import phocas: {result['import']:.2f} s)"
            )
    rivals = benchmark.peer_ratios(seconds) if device == "cpu" and costs is None else []
    for rival in rivals:
        console.print(
            f"{rival['peer']} {rival['rule']}: {rival['ratio']:.1f} times the time of"
            f" {rival['ours']} (20 x 118,282)"
        )
    if as_json:
        everything: dict[str, Any] = {
            "machine": about,
            "device": device,
            "read_bandwidth": bandwidth,
            "timings": [timing.as_dict() for timing in timings],
            "first_use": first_uses,
            "peers": rivals,
        }
        typer.echo(json.dumps(everything))
    restless = [timing for timing in timings if not timing.steady]
    if restless:
        worst = max(timing.moved for timing in restless)
        console.print(
            f"The machine is busy: the baseline moved by up to {worst:.1f} times during"
            f" {len(restless)} of {len(timings)} cases, marked '?'. Measure them again."
        )
    past = [timing for timing in timings if timing.past]
    for timing in past:
        console.print(
            f"Slower than its limit: {timing.case} took {timing.ratio:.2f} times the baseline,"
            f" the limit is {timing.case.limit:g}."
        )
    if past:
        raise typer.Exit(1)


def _table(timings: list[Timing]) -> Table:
    """Return a table that fits into 80 columns."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("rule", overflow="fold")
    for name in ("m", "d", "ms", "ratio", "in turns", "at most"):
        table.add_column(name, justify="right", no_wrap=True)
    for timing in timings:
        case = timing.case
        kind = "" if case.dtype == "float32" else f" {case.dtype}"
        ratio = f"{timing.ratio:.2f}" if timing.steady else f"?{timing.ratio:.2f}"
        table.add_row(
            Text(case.rule + kind),
            str(case.m),
            f"{case.d:,}",
            f"{timing.milliseconds:.3g}"
            if timing.milliseconds < 100
            else f"{timing.milliseconds:.0f}",
            Text(ratio, "red" if timing.past else ""),
            f"{timing.lowest:.2f}-{timing.highest:.2f}",
            "" if case.limit is None else f"{case.limit:g}",
        )
    return table
