"""Where a worker's wrong values lie: in which parameters, and whether at the same addresses.

Distances show that a worker is faulty; locations help an operator to tell broken hardware from
unusual data. A holder is a rank or server that holds a range of columns. Every holder inspects its
columns and reports a few findings in each round to all other holders.

A worker's values in a parameter are *absurd* if they are not finite, or many times as large as is
usual among workers. A single value is *gross* if it is so far from the centre of its column that
its address is remembered. Hardware that corrupts silently does so at the same addresses again and
again; the addresses of outliers that come from data change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Addresses = npt.NDArray[np.int64]

TIMES = 3
"""How often a worker must send absurd values at the same addresses before it is flagged."""

_WITHIN = 8  # rounds from one time to the next
_OFTEN = 64  # rounds in which a worker is not finite TIMES times
_REMEMBERED = 4096  # addresses for each worker and parameter
_LOCATIONS = 64  # parameters of each worker of which a location is kept
_SHOWN = 8  # addresses in a report
_AGAIN = 0.25  # the share of addresses that must repeat, and so many times chance
_CHANCE = 8.0
_SURELY = 0.9


@dataclass(frozen=True, slots=True)
class ParameterFinding:
    """Outliers of one worker in one parameter in one round, in the columns of one holder."""

    parameter: int
    worker: int
    wild: int
    """The number of outliers among its values here."""
    columns: int
    """The number of columns that were inspected."""
    others: float
    """The b-th largest share of outliers of another worker here."""
    absurd: bool
    """Whether the values here are absurd as a whole."""
    address: int
    """The first address of a gross value, -1 if there is none."""
    stride: int
    """The greatest common divisor of the distances between repeated addresses, 0 if none."""
    repeats: float
    """The share of gross addresses that were gross before, beyond chance; -1 the first time."""
    again: bool
    """Whether the repeated share is far more than chance."""
    nonfinite: bool = False
    """Whether a value here is NaN or infinite."""
    along: float = 0.0
    """Evidence on the direction of the worker's rows, in deviations."""
    implausible: bool = False
    """Whether no honest worker can produce a value here: not finite, or far too large."""
    e_value: float = 0.0
    """Evidence by distances in this parameter; 0 if the finding is about outliers."""

    NUMBERS = 14

    @classmethod
    def by_distances(
        cls, parameter: int, worker: int, along: float, e_value: float
    ) -> ParameterFinding:
        """Return a finding of evidence by distances in a parameter."""
        nothing: dict[str, Any] = {"wild": 0, "columns": 1, "others": 0.0, "absurd": False}
        nothing |= {"address": -1, "stride": 0, "repeats": -1.0, "again": False}
        return cls(parameter, worker, **nothing, along=along, e_value=e_value)

    def numbers(self) -> list[float]:
        """Return the finding as numbers, for a message."""
        return [float(getattr(self, name)) for name in _FIELDS]

    @classmethod
    def read(cls, numbers: Floats) -> ParameterFinding | None:
        """Decode a finding; return None for invalid numbers, which a faulty holder may send."""
        if len(numbers) != cls.NUMBERS or not np.isfinite(numbers).all() or numbers[3] < 1:
            return None
        return cls(*(kind(number) for kind, number in zip(_KINDS, numbers, strict=True)))


_FIELDS = tuple(ParameterFinding.__dataclass_fields__)
_KINDS = (int, int, int, int, float, bool, int, int, float, bool, bool, float, bool, float)


def findings_at(m: int) -> int:
    """Return how many numbers a report about m ranks has before its findings.

    These are m e-values, a number for the state, and 3m + 1 sums over columns.
    """
    return 4 * m + 2


def read_findings(numbers: Floats) -> list[tuple[int, ParameterFinding]]:
    """Decode the findings in the reports of all ranks, as pairs of a rank and its finding.

    ``numbers`` has a row for each rank, with NaN for findings that the rank does not have.
    """
    width = ParameterFinding.NUMBERS
    findings = []
    for holder, place in np.argwhere(~np.isnan(numbers[:, ::width])).tolist():
        finding = ParameterFinding.read(numbers[holder, place * width : (place + 1) * width])
        if finding is not None:
            findings.append((holder, finding))
    return findings


class AddressMemory:
    """The addresses at which one holder has seen gross values, by parameter and worker.

    An address is the index of a value in the flat parameter.
    """

    def __init__(self) -> None:
        self.known: dict[tuple[int, int], Addresses] = {}

    def compare(
        self, parameter: int, worker: int, found: Addresses, columns: int
    ) -> tuple[float, int, bool]:
        """Return the repeated share beyond chance, its stride, and whether it is far above chance.

        The repeated share is 1 if all found addresses are known from before. It is 0 if as many of
        them are known as among addresses that are drawn at random.

        >>> memory = AddressMemory()
        >>> memory.compare(0, 3, np.array([5, 69, 133]), columns=6000)
        (-1.0, 0, False)
        >>> memory.compare(0, 3, np.array([5, 7, 133, 197]), columns=12)
        (0.3333333333333333, 128, False)
        """
        key = (parameter, worker)
        before = self.known.get(key)
        if before is None:
            if sum(kept == worker for _, kept in self.known) < _LOCATIONS:
                self.known[key] = found[:_REMEMBERED]
            return -1.0, 0, False
        again = np.intersect1d(before, found, assume_unique=True)
        share = len(again) / max(1, len(found))
        stride = int(np.gcd.reduce(np.diff(again))) if len(again) > 1 else 0
        chance = len(before) / max(1, columns)
        self.known[key] = np.union1d(before, found)[:_REMEMBERED]
        beyond = max(0.0, share - chance) / max(1e-9, 1 - chance)
        return beyond, stride, share >= min(_SURELY, max(_AGAIN, _CHANCE * chance))

    def state(self) -> list[Any]:
        """Return the state for a checkpoint, ready for ``json``."""
        return [[*key, addresses.tolist()] for key, addresses in self.known.items()]

    def load_state(self, state: Iterable[Any]) -> None:
        """Restore the state of a checkpoint."""
        self.known = {(key, worker): np.array(found, np.int64) for key, worker, found in state}


@dataclass(slots=True)
class Location:
    """The findings of all holders about one worker in one parameter.

    Holders are the ranks or servers that hold columns of the parameter.
    """

    since: int
    """The first round with a finding."""
    wild: float = 0.0
    columns: float = 0.0
    others: float = 0.0
    looks: int = 0
    addresses: list[int] = field(default_factory=list)
    stride: int = 0
    repeats: float = -1.0
    times: dict[int, int] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)
    begun: dict[int, int] = field(default_factory=dict)
    """By holder, the round in which the present sequence of absurd rounds began."""
    nonfinite: bool = False
    implausible: int = 0
    """The first round with a value that no honest worker can produce, 0 if there is none."""
    e_value: float = 0.0

    @classmethod
    def read(cls, state: Mapping[str, Any]) -> Location:
        """Read a location from JSON, whose keys are text."""
        counts = {
            name: {int(holder): number for holder, number in state[name].items()}
            for name in ("times", "last", "begun")
        }
        return cls(**{**state, **counts})

    def add(self, holder: int, finding: ParameterFinding, round: int) -> None:
        """Add a finding of a holder."""
        if finding.e_value:
            self.e_value = max(self.e_value, finding.e_value)
            self.since = min(self.since, round)
            return
        self.wild += min(finding.wild, finding.columns)
        self.columns += finding.columns
        self.others += finding.others
        self.looks += 1
        if finding.address >= 0 and finding.address not in self.addresses:
            self.addresses = sorted([*self.addresses, finding.address])[:_SHOWN]
        if finding.repeats >= 0:
            self.repeats = finding.repeats if self.repeats < 0 else max(self.repeats, 0.0)
            self.repeats += (finding.repeats - self.repeats) / 4
        if finding.stride:
            self.stride = int(np.gcd(self.stride, finding.stride))
        if finding.absurd:
            recent = round - self.last.get(holder, -_WITHIN - 1) <= _WITHIN
            self.times[holder] = self.times.get(holder, 0) + 1 if recent and finding.again else 1
            self.last[holder] = round
            if not recent:
                self.begun[holder] = round
        self.nonfinite |= finding.nonfinite
        if finding.implausible:
            self.implausible = self.implausible or round

    @property
    def share(self) -> float:
        """Return the share of outliers among the worker's values here."""
        return self.wild / max(1.0, self.columns)

    @property
    def usual(self) -> float:
        """Return the share of outliers of the b-th worst other worker, averaged over findings."""
        return self.others / max(1, self.looks)

    @property
    def weight(self) -> float:
        """Return the weight of the evidence: infinite if the values are absurd.

        Otherwise the weight is the :attr:`deviation`, or the logarithm of the e-value, if that is
        larger.
        """
        if self.times or self.implausible:
            return np.inf
        return max(self.deviation, float(np.log(max(1.0, self.e_value))))

    @property
    def deviation(self) -> float:
        """Return how far :attr:`share` is above :attr:`usual`, in standard deviations."""
        expected = self.usual * self.columns
        return float((self.wild - expected) / np.sqrt(max(1.0, expected)))


class Locations:
    """The locations of all workers, and the workers whose values many holders found absurd.

    A worker is flagged once more than b other holders have each found its values absurd TIMES
    times at the same addresses of a parameter, with at most 8 rounds from one time to the next. At
    most b holders are faulty, so one of these is honest. That honest values are never absurd in
    this way is not a matter of chance: it holds where workers draw from the same data.

    If holders are ``trusted``, the report of one is enough. A worker is flagged at once by a
    value that is finite and that no honest worker can produce. It is flagged by values that are not
    finite in three of 64 rounds, or in the last round before no worker is finite any more: an
    honest worker's loss may overflow once, when a loss scale grows. If more than b workers send
    such values in one round, none of these is flagged for it.

    Args:
        num_workers: m.
        b: the largest number of faulty workers.
        trusted: whether all holders report what they have seen.
    """

    def __init__(self, num_workers: int, b: int, *, trusted: bool = False) -> None:
        self.b, self.trusted = b, trusted
        self.flagged_by_values = np.zeros(num_workers, np.int64)
        self.nonfinite_rounds: list[list[int]] = [[] for _ in range(num_workers)]
        """The last rounds in which each worker alone was not finite."""
        self.workers: list[dict[int, Location]] = [{} for _ in range(num_workers)]
        self.flagged = np.zeros(num_workers, np.int64)
        self.onset = np.zeros(num_workers, np.int64)
        self.along: list[dict[int, float]] = [{} for _ in range(num_workers)]
        """By worker and holder, evidence on the direction of the worker's rows."""
        self.local: list[dict[int, float]] = [{} for _ in range(num_workers)]
        """By worker and holder, the same evidence in a parameter with evidence by distances."""

    def add(self, round: int, holder: int, findings: Iterable[ParameterFinding]) -> None:
        """Add the findings of a holder in a round."""
        for finding in findings:
            if not 0 <= finding.worker < len(self.workers):
                continue
            locations = self.workers[finding.worker]
            evidence = self.local if finding.e_value else self.along
            evidence[finding.worker][holder] = finding.along
            if finding.parameter not in locations:
                if len(locations) >= _LOCATIONS:
                    continue
                locations[finding.parameter] = Location(since=round)
            locations[finding.parameter].add(holder, finding, round)

    def add_values(self, round: int, findings: Iterable[ParameterFinding]) -> None:
        """Add the values of a round that no honest worker can produce, seen by any holder."""
        if not self.trusted or not self.b:
            return
        huge = {one.worker: not one.nonfinite for one in findings if one.implausible}
        huge = {worker: found for worker, found in huge.items() if 0 <= worker < len(self.workers)}
        if len(huge) > self.b:
            return
        for worker, at_once in huge.items():
            rounds = self.nonfinite_rounds[worker]
            if not at_once:
                rounds[:] = [*rounds, round][-TIMES:]
            often = len(rounds) == TIMES and round - rounds[0] < _OFTEN
            if (at_once or often) and not self.flagged_by_values[worker]:
                self.flagged_by_values[worker] = round

    def first_implausible(self, worker: int) -> int:
        """Return the first round with a value that no honest worker can produce, 0 if none."""
        found = [place.implausible for place in self.workers[worker].values()]
        return min(filter(None, found), default=0)

    def add_loss(self, round: int) -> None:
        """Flag the first workers with NaN or inf, if one round later no worker is finite.

        Call this in the first round in which no row is finite. Workers are flagged if their values
        were not finite in the round before, and at most b workers had such values then. Under the
        plain mean they are the ones that destroyed the model.
        """
        for worker, rounds in enumerate(self.nonfinite_rounds):
            if rounds and rounds[-1] == round - 1 and not self.flagged_by_values[worker]:
                self.flagged_by_values[worker] = round

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, ready for ``json``."""
        return {
            "since": self.flagged.tolist(),
            "values": self.flagged_by_values.tolist(),
            "broken": self.nonfinite_rounds,
            "onset": self.onset.tolist(),
            "along": [list(known.items()) for known in self.along],
            "local": [list(known.items()) for known in self.local],
            "workers": [
                [[parameter, asdict(location)] for parameter, location in locations.items()]
                for locations in self.workers
            ],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self.flagged[:] = state["since"]
        self.flagged_by_values[:] = state["values"]
        self.nonfinite_rounds = state["broken"]
        self.onset[:] = state["onset"]
        self.along, self.local = (
            [{int(holder): z for holder, z in known} for known in state[name]]
            for name in ("along", "local")
        )
        self.workers = [
            {parameter: Location.read(location) for parameter, location in locations}
            for locations in state["workers"]
        ]

    def forget(self, worker: int) -> None:
        """Discard all findings about a worker."""
        self.workers[worker], self.along[worker], self.local[worker] = {}, {}, {}
        self.flagged[worker] = self.onset[worker] = self.flagged_by_values[worker] = 0
        self.nonfinite_rounds[worker] = []

    def direction(self, worker: int) -> tuple[float, float]:
        """Return the evidence for and against a worker's rows pointing as the others' do.

        Both numbers are sums over holders, in standard deviations, without the b holders with the
        largest values, unless all are trusted.
        """
        told = (self.local[worker] or self.along[worker]).items()
        reported = np.sort([z for holder, z in told if self.trusted or holder != worker])
        kept = len(reported) - (0 if self.trusted else self.b)
        if kept < 1:
            return 0.0, 0.0
        return (
            float(reported[:kept].sum() / np.sqrt(kept)),
            float(-reported[-kept:].sum() / np.sqrt(kept)),
        )

    def flag(self, round: int) -> None:
        """Flag the workers whose values enough holders have found absurd."""
        if not self.b:
            return
        for worker, locations in enumerate(self.workers):
            begun = [
                (holder, location.begun[holder])
                for location in locations.values()
                for holder, times in location.times.items()
                if times >= TIMES and holder != worker
            ]
            if len({holder for holder, _ in begun}) > self.b and not self.flagged[worker]:
                self.flagged[worker] = round
                self.onset[worker] = min(since for _, since in begun)
