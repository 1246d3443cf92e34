"""What a guard knows, written down: one schema for JSON, and a text for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypedDict

SCHEMA = 1
"""Raised when a field changes its meaning or goes; new fields do not raise it."""

_LAYERS_SHOWN = 3


class PlacesReport(TypedDict):
    """Where a rank's wrong values lie within one parameter, and whether they come again."""

    since: int
    """The first step (from 1) in which wrong values of this rank were seen here."""
    share: float
    """The share of its values here that are wrong, where they were looked at."""
    others: float
    """The same for the worst of the other ranks, but for b - 1, in the mean over steps."""
    addresses: list[int]
    """The first few wrong values, as flat indices of the parameter."""
    stride: int | None
    """The distance that divides all distances between repeated addresses, if any repeat."""
    repeats: float
    """The share of wrong addresses that were wrong the last time too."""
    kind: Literal["hardware", "data", "unclear"]
    """Same addresses again and again (hardware), others each time (data), or not known yet."""


class SuspectReport(TypedDict):
    """What is known against one rank."""

    rank: int
    host: str
    """The name of the machine that it runs on."""
    since: int
    """The step (from 1) in which it was named."""
    grounds: list[Literal["distances", "addresses"]]
    """Why: farther from others than chance allows, or absurd values at the same addresses."""
    sure: float
    """1 minus the chance that distances alone accuse any honest rank so; 0 if they say nothing."""
    dropped: float
    """The share of its values that the rule threw away, over all steps."""
    expected: float
    """What a rank loses if who sent a value does not matter."""
    layers: dict[str, float]
    """By parameter name, the share of its values there that is wrong; the most telling first."""
    places: dict[str, PlacesReport]
    """By parameter name, where they lie; the same keys in the same order."""


class Report(TypedDict):
    """All that :meth:`phocas.integrations.guard.Guard.report` has to say, ready for ``json``."""

    schema: int
    rule: str
    ranks: int
    steps: int
    dropped: list[float]
    """By rank, the share of its values that the rule threw away, over all steps."""
    expected: float
    suspects: list[SuspectReport]
    unusual: list[int]
    """Ranks that are lately dropped far more than most: a warning, and no proof."""
    failure: str | None
    """What ended aggregation, or None."""


def as_text(report: Report) -> str:
    """Write a report for people, a line for each rank and parameter, within 80 columns."""
    return "\n".join(_lines(report))


def _lines(report: Report) -> Iterator[str]:
    yield f"{report['ranks']} ranks, {report['steps']} steps, {report['rule']}"
    if report["failure"] is not None:
        yield f"aggregation ended: {report['failure']}"
    if not report["suspects"]:
        yield "no rank is suspect"
    for suspect in report["suspects"]:
        where = f" on {suspect['host']}" if suspect["host"] else ""
        yield f"rank {suspect['rank']}{where}: named in step {suspect['since']}"
        yield f"  by {_grounds(suspect)}"
        yield (
            f"  {suspect['dropped']:.1%} of its values thrown away, where"
            f" {suspect['expected']:.1%} is expected"
        )
        for name in list(suspect["places"])[:_LAYERS_SHOWN]:
            yield f"  {name}"
            yield f"    {_places(suspect['places'][name])}"
        if more := len(suspect["places"]) - _LAYERS_SHOWN:
            yield from [f"  and {more} more"] if more > 0 else []
    if report["unusual"]:
        yield f"unusual, which is no proof: {', '.join(map(str, report['unusual']))}"


def _grounds(suspect: SuspectReport) -> str:
    words = " and ".join(suspect["grounds"])
    return words + (f", {suspect['sure']:.2%} sure" if suspect["sure"] else "")


def _places(places: PlacesReport) -> str:
    where = f"since step {places['since']}: {places['share']:.2%} against {places['others']:.2%}"
    if places["kind"] == "hardware":
        return f"{where}, same addresses, stride {places['stride']}: hardware"
    return where + (", addresses change: data" if places["kind"] == "data" else "")
