"""``phocas doctor``: which kernels are used here, and whether they can be trusted."""

from __future__ import annotations

from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(doctor)


def doctor(
    device: Annotated[
        str | None, typer.Option(help="A device of torch's, such as cuda:1. Default: all.")
    ] = None,
) -> None:
    """Say which kernels each device takes, and compare them with the rules' definitions.

    The status is 1 if a rule is not what its definition says.
    """
    from phocas.experiments import doctor as examine
    from phocas.training.devices import find_device

    found = examine.devices() if device is None else [find_device("doctor", "device", device)]
    failed = 0
    for each in found:
        typer.echo(f"{each}: {examine.route(each)}")
        checks = list(examine.checks(each))
        for check in checks:
            if not check.passed:
                typer.echo(
                    f"  {check.rule}, {check.dtype}: {check.distance:.2g} from its definition,"
                    f" at most {check.allowed:.2g} is rounding"
                )
        passed = sum(check.passed for check in checks)
        same = sum(check.same_bits for check in checks)
        typer.echo(
            f"  {passed} of {len(checks)} cases are what the definition says, among NaN, infinities"
            f" and huge values; {same} have the processor's bits"
        )
        failed += len(checks) - passed
    if failed:
        raise typer.Exit(1)
