"""The reports of a guard: flagged ranks, as JSON with one schema and as text."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self, TypedDict

from phocas.deprecation import former_attributes
from phocas.detection.flags import Ground, Kind, LocationKind

SCHEMA = 2
"""The version of the fields: it rises when a field changes its meaning or is removed."""

_LAYERS_SHOWN = 3


class PlacesReport(TypedDict):
    """Where a rank's wrong values lie within one parameter, and whether they repeat."""

    since: int
    """The first step (from 1) in which wrong values of this rank were seen here."""
    share: float
    """The share of its values here that are wrong, where they were inspected."""
    others: float
    """The same share of the b-th worst of the other ranks, averaged over steps."""
    addresses: list[int]
    """The first few wrong values, as flat indices of the parameter."""
    stride: int | None
    """The greatest common divisor of the distances between repeated addresses, if any repeat."""
    repeats: float
    """The share of wrong addresses that were wrong before, beyond chance: from 0 to 1."""
    kind: LocationKind
    """Same addresses again and again (hardware), NaN or infinite values (nonfinite), other
    addresses each time (data), evidence by distances without outliers (differs), or not known
    yet."""


class NonfiniteReport(TypedDict):
    """The first values of a rank that were not finite.

    Other ranks report these values. Up to b ranks may be faulty and report anything, so that b
    reports are no proof.
    """

    rank: int
    """The global rank that sent them."""
    step: int
    """The step (from 1)."""
    parameters: list[str]
    """The parameters in which they were found, a few of them at most, in the model's order."""
    seen_by: int
    """How many ranks other than itself have seen them, each in its own columns."""


class ConfirmationReport(TypedDict):
    """The result of a replay of a flagged rank's last micro-batch."""

    verdict: str
    """What the replay says: see :data:`phocas.integrations.verdicts.VERDICTS`."""
    by: int | None
    """The global rank of the other rank that replayed the micro-batch; None if there was none."""
    parameters: dict[str, float]
    """For each parameter that differs, the largest difference relative to the largest value; the
    parameter that differs most comes first."""
    reason: str
    """Why there is no answer, if there is none."""


class LaterSuspectFields(TypedDict, total=False):
    """The fields of a flagged rank that reports of version 0.2 do not have."""

    tensors: list[str]
    """The parameters in which its weights are not those of the majority; ``(optimizer)`` after the
    name: the state of the optimizer."""
    confirmation: ConfirmationReport | None
    """The result of a replay; None without ``confirm="replay"``."""


class SuspectReport(LaterSuspectFields):
    """A flagged rank, and the evidence against it."""

    rank: int
    """Its global rank."""
    host: str
    """The name of the machine that it runs on."""
    kind: Kind
    """What seems to be wrong with it: see :data:`phocas.detection.flags.KINDS`."""
    since: int
    """The onset: the first step (from 1) with evidence against it."""
    flagged: int
    """The step in which there was enough evidence to flag it."""
    grounds: list[Ground]
    """Why: farther from others than chance allows (distances), absurd values at the same addresses
    (addresses), or values that no honest rank can produce (values)."""
    sure: float
    """1 minus the false alarm probability of distances; 1 if there is another ground."""
    dropped: float
    """The share of its values that the rule dropped, over all steps."""
    expected: float
    """The share that is dropped of a rank whose values are like those of the others."""
    layers: dict[str, float]
    """By parameter name, the share of its values there that is wrong; the most telling first."""
    places: dict[str, PlacesReport]
    """By parameter name, where the wrong values lie; the same keys in the same order."""


class SplitReport(TypedDict):
    """Weights that differ between ranks, of which no value has a majority."""

    step: int
    """The step of the comparison that first showed it."""
    tensors: list[str]
    """The parameters that differ; ``(optimizer)`` after the name: the state of the optimizer."""
    ranks: list[list[int]]
    """The global ranks, in groups that have the same bits in the first of these parameters."""


class LaterFields(TypedDict, total=False):
    """The fields of a report that reports of version 0.2 do not have."""

    split: SplitReport | None
    """Weights that differ between ranks without a majority, or None."""


class Report(LaterFields):
    """The report of :meth:`phocas.integrations.guard.Guard.report`, ready for ``json``."""

    schema: int
    rule: str
    ranks: int
    members: list[int]
    """The global ranks of the data-parallel group that ``dropped`` and ``unusual`` are about."""
    steps: int
    dropped: list[float]
    """By member, the share of its values that the rule dropped, over all steps."""
    expected: float
    nonfinite: list[NonfiniteReport]
    """Where the first values that are not finite came from; empty if there were none."""
    lost: int | None
    """The step since which every rank has non-finite values; later evidence is void."""
    suspects: list[SuspectReport]
    unusual: list[int]
    """Ranks that are lately dropped far more than most: a warning, not a proof."""
    failure: str | None
    """What ended aggregation, or None."""


@former_attributes(since="onset")
@dataclass(frozen=True, slots=True)
class FlaggedRank:
    """A flagged rank, and the evidence against it.

    :class:`SuspectReport` has the same data for ``json``.

    Attributes:
        rank: the global rank.
        onset: the first step (from 1) with evidence against the rank.
        dropped: the share of the rank's values that was dropped.
        expected: the share that is dropped of a rank whose values are like those of the others.
        sure: 1 minus the false alarm probability.
        grounds: the reason for the flag.
        host: the host that the rank runs on.
        places: where wrong values lie, by parameter.
        kind: what seems to be wrong: :data:`phocas.detection.flags.KINDS`.
        flagged: the step in which there was enough evidence to flag the rank.
        tensors: the parameters in which the weights of the rank are not those of the majority.
        confirmation: the result of a replay, with ``confirm="replay"``.

    >>> flagged = FlaggedRank(rank=3, onset=15, dropped=0.98, expected=0.001)
    >>> flagged.rank, round(flagged.excess, 3)
    (3, 0.979)
    """

    rank: int
    onset: int
    dropped: float
    expected: float
    sure: float = 0.0
    grounds: tuple[Ground, ...] = ()
    host: str = ""
    places: Mapping[str, PlacesReport] = field(default_factory=dict)
    kind: Kind = "wrong"
    flagged: int = 0
    tensors: tuple[str, ...] = ()
    confirmation: ConfirmationReport | None = None

    @property
    def excess(self) -> float:
        """Return how much more was dropped than expected."""
        return self.dropped - self.expected

    @property
    def layers(self) -> dict[str, float]:
        """Return the share of wrong values by parameter, the strongest evidence first."""
        return {name: places["share"] for name, places in self.places.items()}

    def report(self) -> SuspectReport:
        """Return the flagged rank as a dictionary for ``json``."""
        return SuspectReport(
            rank=self.rank,
            host=self.host,
            kind=self.kind,
            since=self.onset,
            flagged=self.flagged,
            grounds=list(self.grounds),
            sure=self.sure,
            dropped=self.dropped,
            expected=self.expected,
            layers=self.layers,
            places=dict(self.places),
            tensors=list(self.tensors),
            confirmation=self.confirmation,
        )

    @classmethod
    def read(cls, report: Mapping[str, Any]) -> Self:
        """Return the flagged rank that :meth:`report` has written."""
        known = {name: report[name] for name in SuspectReport.__required_keys__ - {"layers"}}
        onset, grounds = known.pop("since"), tuple(known.pop("grounds"))
        tensors, confirmation = tuple(report.get("tensors", ())), report.get("confirmation")
        return cls(
            onset=onset, grounds=grounds, tensors=tensors, confirmation=confirmation, **known
        )

    def __str__(self) -> str:
        text = f"rank {self.rank}: since step {self.onset}"
        for name, places in self.places.items():
            shares = f"{places['share']:.1%} of its values against {places['others']:.1%}"
            return f"{text}, {name}, {shares} ({self.kind})"
        if self.kind == "drifted":
            return f"{text}, weights of {', '.join(self.tensors)} ({self.kind})"
        shares = f"{self.dropped:.0%} of its values against {self.expected:.1%}"
        return f"{text}, {shares} ({self.kind})"


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
    if (split := report.get("split")) is not None:
        yield from _split(split)
    if not report["suspects"]:
        yield "no rank is flagged"
    for flagged in report["suspects"]:
        where = f" on {flagged['host']}" if flagged["host"] else ""
        yield f"rank {flagged['rank']}{where}: flagged in step {flagged['flagged']}"
        yield f"  {_SAID[flagged['kind']]} since step {flagged['since']}"
        yield f"  by {_grounds(flagged)}"
        yield (
            f"  {flagged['dropped']:.1%} of its values dropped, where"
            f" {flagged['expected']:.1%} is expected"
        )
        for name in list(flagged["places"])[:_LAYERS_SHOWN]:
            yield f"  {name}"
            yield f"    {_places(flagged['places'][name])}"
        yield from _more(flagged["places"])
        if tensors := flagged.get("tensors"):
            yield "  weights that are not those of the majority:"
            yield from (f"    {name}" for name in tensors[:_LAYERS_SHOWN])
            yield from _more(tensors)
        if (confirmation := flagged.get("confirmation")) is not None:
            yield from _confirmation(confirmation)
    if report["unusual"]:
        yield f"unusual, which is not a proof: {', '.join(map(str, report['unusual']))}"


_SAID: dict[str, str] = {
    "nonfinite": "sends values that are not finite",
    "hardware": "wrong at the same addresses, as broken hardware is,",
    "wrong": "wrong",
    "differs": "differs from the others, and need not be faulty,",
    "drifted": "has other weights than the majority",
}


def _more(shown: Collection[str]) -> Iterator[str]:
    more = len(shown) - _LAYERS_SHOWN
    if more > 0:
        yield f"  and {more} more"


_VERDICTS: dict[str, str] = {
    "persistent": "a persistent fault of its device",
    "transient": "a transient fault of its device",
    "data": "the same gradient: its data or settings are unusual",
    "weights": "no replay, because its weights are different",
    "not reproduced": "not reproduced",
}


def _confirmation(found: ConfirmationReport) -> Iterator[str]:
    where = "replay" if found["by"] is None else f"replay there and on rank {found['by']}"
    yield f"  {where}:"
    yield f"    {_VERDICTS.get(found['verdict'], found['verdict'])}"
    if found["reason"]:
        yield from textwrap.wrap(
            found["reason"], 80, initial_indent="    ", subsequent_indent="    "
        )
    for name in list(found["parameters"])[:_LAYERS_SHOWN]:
        yield f"    {name} differs by {found['parameters'][name]:.2g} of its largest value"
    yield from _more(found["parameters"])


def _split(split: SplitReport) -> Iterator[str]:
    sides = " against ".join(", ".join(map(str, ranks)) for ranks in split["ranks"])
    yield f"weights differ since step {split['step']}: ranks {sides}"
    yield "  no majority: the wrong ranks are unknown"
    yield from (f"  {name}" for name in split["tensors"][:_LAYERS_SHOWN])
    yield from _more(split["tensors"])


def _grounds(flagged: SuspectReport) -> str:
    words = " and ".join(flagged["grounds"])
    return words + (f", {flagged['sure']:.2%} sure" if flagged["sure"] else "")


def _places(places: PlacesReport) -> str:
    if places["kind"] == "differs":
        return f"since step {places['since']}: differs from the others, without outliers"
    where = f"since step {places['since']}: {places['share']:.2%} against {places['others']:.2%}"
    if places["kind"] == "hardware":
        return f"{where}, same addresses, stride {places['stride']}: hardware"
    if places["kind"] == "nonfinite":
        return f"{where}, not finite"
    return where + (", addresses change: data" if places["kind"] == "data" else "")
