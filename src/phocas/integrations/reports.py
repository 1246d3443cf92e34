"""What a guard knows, written down: one schema for JSON, and a text for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeAlias, TypedDict, get_args

SCHEMA = 2
"""Raised when a field changes its meaning or goes; new fields do not raise it."""

_LAYERS_SHOWN = 3

Kind: TypeAlias = Literal["nonfinite", "hardware", "wrong", "differs"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""What a suspect may be.

- ``nonfinite``: it sends NaN or infinite values.
- ``hardware``: its values are wrong at the same addresses again and again.
- ``differs``: its rows are noisier or longer than those of the others, and point as these do, as
  far as can be told: another batch size, another loss scale, other data.
- ``wrong``: none of these: its rows point elsewhere, or are more than 1000 times too long.
"""


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
    """The share of wrong addresses that were wrong before, beyond chance: from 0 to 1."""
    kind: Literal["nonfinite", "hardware", "data", "unclear"]
    """Same addresses again and again (hardware), NaN or infinite values (nonfinite), other
    addresses each time (data), or not known yet."""


class NonfiniteReport(TypedDict):
    """The first values of a rank that were not finite.

    This is what ranks say that they saw. It is no proof against a rank if at most b say it.
    """

    rank: int
    """The global rank that sent them."""
    step: int
    """The step (from 1)."""
    parameters: list[str]
    """The parameters in which they were found, a few of them at most, in the model's order."""
    seen_by: int
    """How many ranks other than itself have seen them, each in its own columns."""


class SuspectReport(TypedDict):
    """What is known against one rank."""

    rank: int
    """Its global rank."""
    host: str
    """The name of the machine that it runs on."""
    kind: Kind
    """What seems to be wrong with it: see ``KINDS``."""
    since: int
    """The step (from 1) in which it began, as far as can be told."""
    flagged: int
    """The step in which there was enough evidence to name it."""
    grounds: list[Literal["distances", "addresses"]]
    """Why: farther from others than chance allows, or absurd values at the same addresses."""
    sure: float
    """1 minus the chance that distances accuse any honest rank so; 1 if named by addresses."""
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
    members: list[int]
    """The global ranks of the data-parallel group that ``dropped`` and ``unusual`` are about."""
    steps: int
    dropped: list[float]
    """By member, the share of its values that the rule threw away, over all steps."""
    expected: float
    nonfinite: list[NonfiniteReport]
    """Where the first values that are not finite came from; empty if there were none."""
    lost: int | None
    """The step since which every rank has values that are not finite: evidence is void since."""
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
    for first in report["nonfinite"]:
        yield (
            f"the first non-finite value came from rank {first['rank']} in step {first['step']},"
            f" seen by {first['seen_by']}"
        )
        more = len(first["parameters"]) - 1
        for name in first["parameters"][:1]:
            yield f"  parameter {name}" + (f" and {more} more" if more else "")
    if report["lost"] is not None:
        yield f"no rank is finite since step {report['lost']}: evidence is void since"
    if not report["suspects"]:
        yield "no rank is suspect"
    for suspect in report["suspects"]:
        where = f" on {suspect['host']}" if suspect["host"] else ""
        yield f"rank {suspect['rank']}{where}: named in step {suspect['flagged']}"
        yield f"  {_SAID[suspect['kind']]} since step {suspect['since']}"
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


_SAID: dict[str, str] = {
    "nonfinite": "sends values that are not finite",
    "hardware": "wrong at the same addresses, as broken hardware is,",
    "wrong": "wrong",
    "differs": "differs from the others, and need not be wrong,",
}


def _grounds(suspect: SuspectReport) -> str:
    words = " and ".join(suspect["grounds"])
    return words + (f", {suspect['sure']:.2%} sure" if suspect["sure"] else "")


def _places(places: PlacesReport) -> str:
    where = f"since step {places['since']}: {places['share']:.2%} against {places['others']:.2%}"
    if places["kind"] == "hardware":
        return f"{where}, same addresses, stride {places['stride']}: hardware"
    if places["kind"] == "nonfinite":
        return f"{where}, not finite"
    return where + (", addresses change: data" if places["kind"] == "data" else "")
