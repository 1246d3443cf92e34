"""The results of detection: the evidence against each worker, and the kind of fault if flagged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np

from phocas.deprecation import former_attributes
from phocas.detection.locations import Location, Locations, ParameterFinding

Kind: TypeAlias = Literal["nonfinite", "hardware", "wrong", "differs", "drifted"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""What may be wrong with a flagged worker.

- ``nonfinite``: it sends NaN or infinite values.
- ``hardware``: its values are wrong at the same addresses again and again.
- ``differs``: its rows are noisier or longer than those of the others, and point as these do, as
  far as the evidence shows: another batch size, another loss scale, other data.
- ``wrong``: none of these: its rows point elsewhere, or are more than 1000 times too long.
- ``drifted``: its weights or the state of its optimizer are not those of the majority of its
  replicas (DDP, HSDP).
"""

Ground: TypeAlias = Literal["distances", "addresses", "values", "replicas"]
LocationKind: TypeAlias = Literal["nonfinite", "hardware", "data", "differs", "unclear"]

Threat: TypeAlias = Literal["faults", "adversaries"]
THREATS: tuple[Threat, ...] = get_args(Threat)
"""What workers may do.

- ``faults``: faulty workers compute or send wrong values, and follow the protocol otherwise. What
  they send does not depend on which honest worker has which row, and they report what they see.
- ``adversaries``: malicious workers know the rows of all others, choose what they send by them, and
  lie in their reports.
"""

_HARDWARE = 0.5  # the share of addresses that repeat where hardware is broken
_DATA = 0.1
_EVERYWHERE = 0.9  # a share of outliers whose addresses say nothing
_TELLING = 5.0  # deviations from what is usual in a parameter
_ALONG = 2.0  # deviations of evidence that rows that are too long still point as the others do
_AGAINST = 3.0  # the same, that rows of a plausible length do not


@former_attributes(odds="e_value", since="flagged", changed="drift")
@dataclass(frozen=True, slots=True)
class Evidence:
    """The evidence against one worker.

    >>> evidence = Evidence(worker=3, e_value=2e4, flagged=15, dropped=0.98, drift=1.0)
    >>> evidence.flagged is not None
    True
    """

    worker: int
    """Its number."""
    e_value: float
    """The wealth of the bets against it, which do not win on average if it is honest."""
    flagged: int | None
    """The round (from 1) in which it was flagged."""
    dropped: float
    """The mean share of its values that the rule dropped."""
    drift: float
    """The e-value of a test of whether it has changed since it began."""
    onset: int | None = None
    """The first round with evidence, for a flagged worker."""


@dataclass(frozen=True, slots=True)
class Flag:
    """A flagged worker, and what seems to be wrong with it."""

    worker: int
    kind: Kind
    onset: int
    """The first round with evidence."""
    flagged: int
    """The round in which it was flagged."""
    confidence: float
    """1 minus the false alarm probability."""
    grounds: tuple[Ground, ...]
    """Why: farther from others than chance allows, absurd values at the same addresses, or values
    that no honest worker can produce."""
    locations: Sequence[tuple[int, Location]]
    """The parameters with the most telling evidence, the most telling first."""


def telling(locations: dict[int, Location]) -> list[tuple[int, Location]]:
    """Return the parameters with absurd values; if there are none, those with unusual values."""
    found = sorted(locations.items(), key=lambda item: (-item[1].weight, -item[1].share))
    least = np.inf if found and found[0][1].weight == np.inf else _TELLING
    return [(parameter, location) for parameter, location in found if location.weight >= least]


def kind_of(locations: Locations, worker: int, shown: Sequence[tuple[int, Location]]) -> Kind:
    """Return what seems to be wrong with a flagged worker."""
    if shown and location_kind(shown[0][1]) == "hardware":
        return "hardware"
    if any(location.nonfinite for _, location in shown):
        return "nonfinite"
    along, against = locations.direction(worker)
    if any(location.implausible for _, location in shown):
        return "wrong"
    if any(location.times for _, location in shown):
        return "differs" if along > _ALONG else "wrong"
    return "wrong" if against > _AGAINST else "differs"


def location_kind(location: Location) -> LocationKind:
    """Return the kind of fault that the addresses of outliers in a parameter indicate.

    The kind is ``differs`` if there is evidence by distances and no outliers.
    """
    if location.share <= _EVERYWHERE and location.repeats >= _HARDWARE:
        return "hardware"
    if location.nonfinite:
        return "nonfinite"
    if location.e_value and location.deviation < _TELLING:
        return "differs"
    if location.share <= _EVERYWHERE and 0 <= location.repeats < _DATA:
        return "data"
    return "unclear"


def note_nonfinite(
    known: list[tuple[int, int, list[int], int]],
    findings: Sequence[tuple[int, ParameterFinding]],
    now: int,
    b: int,
    num_workers: int,
) -> None:
    """Add the first non-finite values, and the first that more than b holders have seen.

    ``known`` has the worker, the round, the parameters, and how many holders have seen them.
    """
    if any(seen_by > b for *_, seen_by in known):
        return
    seen: dict[int, tuple[set[int], set[int]]] = {}
    for holder, finding in findings:
        if finding.nonfinite and 0 <= finding.worker < num_workers:
            holders, parameters = seen.setdefault(finding.worker, (set(), set()))
            holders.add(holder)
            parameters.add(finding.parameter)
    for worker, (holders, parameters) in sorted(seen.items()):
        seen_by = len(holders - {worker})
        if seen_by > b or not known:
            known.append((worker, now, sorted(parameters), seen_by))


def confidence(num_workers: int, e_value: float, *, certain: bool) -> float:
    """Return 1 minus the probability of a false alarm at this e-value."""
    if certain:
        return 1.0  # not a matter of chance
    return max(0.0, 1.0 - num_workers / e_value) if e_value else 0.0


def check_threat(threat: str) -> Threat:
    """Return the threat; raise ValueError if there is no such threat."""
    for known in THREATS:
        if threat == known:
            return known
    raise ValueError(f"threat must be one of {', '.join(THREATS)}: got {threat!r}")
