"""``phocas doctor``: the kernels of each device, checked against the definitions."""

from __future__ import annotations

from typing import Annotated

import typer


def doctor(
    device: Annotated[
        str | None,
        typer.Option(help="Device of torch, for example cuda:1.", show_default="all"),
    ] = None,
) -> None:
    """Check the compiled rules of this machine against their definitions.

    The exit status is 1 if a rule differs from its definition.
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
            f"  {passed} of {len(checks)} cases agree with the definition, among them NaN, inf and"
            f" huge values; {same} have the bits of the CPU"
        )
        failed += len(checks) - passed
    if failed:
        raise typer.Exit(1)
