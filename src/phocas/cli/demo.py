"""``phocas demo``: real MNIST, twenty workers, the gambler attack, six rules side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RULES = ("mean", "krum:b=8", "multi-krum:b=8", "trimmed-mean:b=8", "phocas:b=8", "heraclius:b=8")


def demo(
    output: Annotated[
        Path, typer.Option(help="Folder for the results, the figure and the HTML report.")
    ] = Path("phocas-demo"),
    dataset: Annotated[
        str, typer.Option(help="Data set: mnist, fashion-mnist or synthetic.")
    ] = "mnist",
    rounds: Annotated[int, typer.Option(help="Number of rounds of each run.")] = 500,
    seed: Annotated[int, typer.Option(help="Seed of all random numbers.")] = 0,
    data_dir: Annotated[
        str | None,
        typer.Option(
            help="Folder of the data sets.", envvar="PHOCAS_DATA", show_default="user cache"
        ),
    ] = None,
) -> None:
    """Compare six rules under the gambler attack, with a figure.

    The attack hits one of 20 servers: each value that reaches it is
    multiplied by -1e20 with probability 0.05%. That is about three values
    of every worker. The mean without an attack is the baseline.
    """
    import time

    from phocas.data import load
    from phocas.experiments.config import make_config
    from phocas.experiments.reproduction.tasks import label_of
    from phocas.experiments.results import Results
    from phocas.experiments.sweep import sweep
    from phocas.files import check_writable
    from phocas.report.figures import RunCurve, accuracy_figure
    from phocas.report.page.writing import write_report
    from phocas.report.palette import BASELINE, Palette
    from phocas.report.progress import SweepProgress, interruptible
    from phocas.report.tables import print_runs

    start = time.monotonic()
    results = output / "results.sqlite"
    common = {
        "dataset": dataset,
        "rounds": rounds,
        "seed": seed,
        "data_dir": data_dir,
        "results": str(results),
    }
    configs = [
        make_config({**common, "rule": rule, "attack": attack}, "phocas demo")
        for rule, attack in [("mean", "none"), *((rule, "gambler") for rule in RULES)]
    ]
    check_writable(results, "the results file")
    load(dataset, data_dir)  # once, before all runs need it
    with interruptible() as stop, SweepProgress(configs) as progress:
        records = sweep(configs, watch=progress.show, should_stop=stop.is_set)
    ended = [record for record in records if record is not None]
    if ended:
        print_runs(ended)
    if len(ended) < len(configs) or any(record.status != "complete" for record in ended):
        typer.echo(f"not all runs are complete; the same command resumes. Results in {results}")
        raise typer.Exit(130 if stop.is_set() else 1)
    palette = Palette()
    with Results(results) as file:
        curves = []
        for config, record in zip(configs, ended, strict=True):
            points = file.table("evaluations", record.id)
            label = label_of(config)
            curves.append(
                RunCurve(
                    label if record.attack else f"{label}, no attack",
                    [point["round"] for point in points],
                    [point["top1"] for point in points],
                    palette.style(record.rule) if record.attack else BASELINE,
                )
            )
    figure = output / "accuracy.png"
    title = f"{dataset}, 20 workers, 20 servers; a gambler at one server"
    accuracy_figure(curves, figure, title=title)
    typer.echo(f"figure in {figure}, results in {results}; {time.monotonic() - start:.0f} s")
    typer.echo(write_report(results, output / "report.html"))
