"""``phocas bench``: how fast the rules are here."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(bench)


def bench(
    rule: Annotated[
        list[str] | None, typer.Option(help="A rule, such as phocas:b=6; may be repeated.")
    ] = None,
    workers: Annotated[int, typer.Option(help="With --rule: the number of rows.")] = 20,
    dims: Annotated[int, typer.Option(help="With --rule: the number of columns.")] = 1_000_000,
    dtype: Annotated[str, typer.Option(help="With --rule: the type of values.")] = "float32",
    device: Annotated[str, typer.Option(help="Where the rows are, such as cuda.")] = "cpu",
    seconds: Annotated[float, typer.Option(help="Time for each case.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time the rules as ratios to torch.mean in the same run; with --rule, just those."""
    from rich.console import Console
    from rich.table import Table

    from phocas.experiments import benchmark, doctor

    where = doctor.find(device)
    console = Console(quiet=as_json)
    if rule:
        cases = [benchmark.Case(name, workers, dims, dtype) for name in rule]
    elif device == "cpu":
        cases = benchmark.default_cases()
    else:
        cases = benchmark.device_cases()
    bandwidth = benchmark.read_bandwidth(device=device)
    about = benchmark.machine()
    console.print(
        f"{about['cpu']}, {about['vector_bits']}-bit vectors, {about['threads']} threads,"
        f" torch {about['torch']} with {about['torch_threads']}; memory is read at"
        f" {bandwidth:.0f} GB/s. Best times, in turns with the baseline."
    )
    console.print(f"{device}: {doctor.route(where)}.")
    table = Table("rule", "m", "d", "dtype", "ms", "baseline ms", "ratio", "at most", "GB/s")
    for name in ("m", "d", "ms", "baseline ms", "ratio", "at most", "GB/s"):
        column = next(column for column in table.columns if column.header == name)
        column.justify = "right"
    timings = []
    for case in cases:
        with console.status(f"{case.rule}, {case.m} x {case.d:,}"):
            timing = benchmark.measure(case, seconds=seconds, device=device)
        timings.append(timing)
        over = case.limit is not None and timing.ratio > case.limit
        table.add_row(
            case.rule,
            str(case.m),
            f"{case.d:,}",
            case.dtype,
            f"{timing.milliseconds:.3g}",
            f"{timing.baseline:.3g}",
            f"[red]{timing.ratio:.2f}[/]" if over else f"{timing.ratio:.2f}",
            "" if case.limit is None else f"{case.limit:g}",
            f"{timing.gigabytes:.1f}",
        )
    console.print(table)
    first_uses = {}
    if not rule and device == "cpu":
        for name, m in (("phocas:b=8", 20), ("phocas:b=32", 128)):
            with console.status(f"first use of {name}"):
                first_uses[f"{name}, m={m}"] = benchmark.first_use(name, m)
        for name, result in first_uses.items():
            console.print(
                f"First use of {name}: {result['cold']:.2f} s, in another process"
                f" {result['remembered']:.2f} s (import phocas: {result['import']:.2f} s)"
            )
    rivals = benchmark.peer_ratios(seconds) if device == "cpu" else []
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
