"""Where a worker's wrong values lie: in which parameter, at which addresses, time and again.

Distances say that a worker is wrong, whatever it does; this says where, for an operator who has to
decide between a broken machine and strange data. Whoever holds columns looks at them and writes
down a few findings in each round; everyone hears the findings of all holders.

A worker is *absurd* in a parameter if its values there are not finite, or many times as large as
is usual among workers. A machine that corrupts silently does so at the same addresses again and
again, while what is in the data moves about.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Addresses = npt.NDArray[np.int64]

ABSURD = 16.0
"""A row of a parameter this many times as long as usual is nobody's gradient."""
WILD = 8.0
"""Spreads beyond which a value is wrong: where Heraclius by default gives it no weight."""
GROSS = 32.0
"""Spreads beyond which the address of a value is remembered."""
TIMES = 3
"""How often a worker must be absurd at the same addresses before it is named."""

_WITHIN = 8  # rounds from one time to the next
_REMEMBERED = 4096  # addresses for each worker and parameter
_TRACES = 64  # parameters of each worker of which a trace is kept
_SHOWN = 8  # addresses in a report
_AGAIN = 0.25  # the share of addresses that must come again, and so many times chance
_CHANCE = 8.0
_SURELY = 0.9


def middle(values: Floats) -> float:
    """Return the lower median: with a minority of liars it is between honest values."""
    return float(np.sort(np.where(np.isnan(values), np.inf, values))[(len(values) - 1) // 2])


def absurd(sizes: Floats, usual: float, b: int) -> npt.NDArray[np.bool_]:
    """Say whose values are absurd, by the length of each worker's row of a parameter.

    ``usual`` is the usual length of a whole unit's row, below which nothing is large. If more than
    b workers are absurd then it is not they who are wrong, and nobody is. Where the usual length is
    zero only what is not finite is absurd: others may have had no use for the parameter.

    >>> absurd(np.array([1.0, 2.0, np.nan, 1.0]), usual=1.0, b=1)
    array([False, False,  True, False])
    """
    limit = ABSURD * max(middle(sizes), usual)
    found = ~(sizes <= limit) if limit else ~np.isfinite(sizes)
    return found if found.sum() <= b else np.zeros(len(sizes), bool)


def plausible(lengths: Floats) -> bool:
    """Say whether rows are so short that nobody can be absurd in any parameter of theirs.

    A row of a parameter is no longer than all of the row. (What is between 15 and 16 times the
    usual is left to :func:`absurd`: lengths are rounded.)

    >>> plausible(np.array([1.0, 2.0, 14.0])), plausible(np.array([1.0, np.nan, 1.0]))
    (True, False)
    """
    return bool((lengths <= 15 / 16 * ABSURD * middle(lengths)).all())


@dataclass(frozen=True, slots=True)
class Finding:
    """What one holder saw of one worker in its columns of one parameter, in one round."""

    parameter: int
    worker: int
    wild: int
    columns: int
    others: float
    """The largest share of wild values of another worker here, but for b - 1 of them."""
    absurd: bool
    address: int
    """The first address of a gross value, -1 if there is none."""
    stride: int
    """What divides the distances between addresses that came again, 0 if none did."""
    repeats: float
    """The share of gross addresses that were known before, beyond chance; -1 the first time."""
    again: bool
    """Whether that is far more than chance."""
    nonfinite: bool = False
    """Whether a value here is NaN or infinite."""
    along: float = 0.0
    """Evidence on the direction of the worker's rows: :class:`phocas.rules.bets.Direction`."""

    NUMBERS = 12

    def numbers(self) -> list[float]:
        """Return the finding as numbers, for the wire."""
        return [float(getattr(self, name)) for name in _FIELDS]

    @classmethod
    def read(cls, numbers: Floats) -> Finding | None:
        """Read a finding; what is none, as a liar may send, is None."""
        if len(numbers) != cls.NUMBERS or not np.isfinite(numbers).all() or numbers[3] < 1:
            return None
        return cls(*(kind(number) for kind, number in zip(_KINDS, numbers, strict=True)))


_FIELDS = tuple(Finding.__dataclass_fields__)
_KINDS = (int, int, int, int, float, bool, int, int, float, bool, bool, float)


class Memory:
    """The addresses at which a holder has seen gross values, of few parameters and workers."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, int], Addresses] = {}

    def compare(
        self, parameter: int, worker: int, found: Addresses, columns: int
    ) -> tuple[float, int, bool]:
        """Return the repeated share beyond chance, the stride of these, and whether it is news.

        Of addresses drawn at random, as many are known as there are known ones among the columns.
        The share is 0 for so many and 1 if all are known.

        >>> memory = Memory()
        >>> memory.compare(0, 3, np.array([5, 69, 133]), columns=6000)
        (-1.0, 0, False)
        >>> memory.compare(0, 3, np.array([5, 7, 133, 197]), columns=12)
        (0.3333333333333333, 128, False)
        """
        key = (parameter, worker)
        before = self.known.get(key)
        if before is None:
            if sum(kept == worker for _, kept in self.known) < _TRACES:
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
        """Return what a checkpoint must keep, ready for ``json``."""
        return [[*key, addresses.tolist()] for key, addresses in self.known.items()]

    def load_state(self, state: Iterable[Any]) -> None:
        """Go on from a checkpoint."""
        self.known = {(key, worker): np.array(found, np.int64) for key, worker, found in state}


@dataclass(slots=True)
class Trace:
    """What all holders together know of one worker in one parameter."""

    since: int
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
    """By holder, the round in which the present run of absurd rounds began."""
    nonfinite: bool = False

    @classmethod
    def read(cls, state: Mapping[str, Any]) -> Trace:
        """Return what was written as JSON, which has no numbers for keys."""
        counts = {
            name: {int(holder): number for holder, number in state[name].items()}
            for name in ("times", "last", "begun")
        }
        return cls(**{**state, **counts})

    def hear(self, holder: int, finding: Finding, round: int) -> None:
        """Take what a holder found."""
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

    @property
    def share(self) -> float:
        """Return the share of the worker's values here that is wild."""
        return self.wild / max(1.0, self.columns)

    @property
    def usual(self) -> float:
        """Return the same for the worst of the others, but for b - 1, in the mean over looks."""
        return self.others / max(1, self.looks)

    @property
    def weight(self) -> float:
        """Return how much this says: infinite if absurd, else deviations from what is usual."""
        if self.times:
            return np.inf
        expected = self.usual * self.columns
        return float((self.wild - expected) / np.sqrt(max(1.0, expected)))


class Traces:
    """The traces of all workers, and who is absurd at the same addresses in the eyes of many.

    A worker is named once more than b holders other than itself have each found it absurd TIMES
    times at the same addresses of a parameter, with at most 8 rounds from one time to the next. Up
    to b holders may lie, so one of them tells the truth. That honest values are never absurd so is
    not a matter of chance: it holds where workers draw from the same data.
    """

    def __init__(self, num_workers: int, b: int) -> None:
        self.b = b
        self.workers: list[dict[int, Trace]] = [{} for _ in range(num_workers)]
        self.since = np.zeros(num_workers, np.int64)
        self.onset = np.zeros(num_workers, np.int64)
        self.along: list[dict[int, float]] = [{} for _ in range(num_workers)]

    def hear(self, round: int, holder: int, findings: Iterable[Finding]) -> None:
        """Take what a holder found in a round."""
        for finding in findings:
            if not 0 <= finding.worker < len(self.workers):
                continue
            traces = self.workers[finding.worker]
            self.along[finding.worker][holder] = finding.along
            if finding.parameter not in traces:
                if len(traces) >= _TRACES:
                    continue
                traces[finding.parameter] = Trace(since=round)
            traces[finding.parameter].hear(holder, finding, round)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must keep, ready for ``json``."""
        return {
            "since": self.since.tolist(),
            "onset": self.onset.tolist(),
            "along": [list(known.items()) for known in self.along],
            "workers": [
                [[parameter, asdict(trace)] for parameter, trace in traces.items()]
                for traces in self.workers
            ],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.since[:] = state["since"]
        self.onset[:] = state["onset"]
        self.along = [{int(holder): z for holder, z in known} for known in state["along"]]
        self.workers = [
            {parameter: Trace.read(trace) for parameter, trace in traces}
            for traces in state["workers"]
        ]

    def forget(self, worker: int) -> None:
        """Begin anew with a worker."""
        self.workers[worker], self.along[worker] = {}, {}
        self.since[worker] = self.onset[worker] = 0

    def direction(self, worker: int) -> tuple[float, float]:
        """Return the evidence that a worker's rows point as the others' do, and that they do not.

        Both are sums over holders, in deviations. Each leaves out the b holders that say it most.
        """
        told = np.sort([z for holder, z in self.along[worker].items() if holder != worker])
        kept = len(told) - self.b
        if kept < 1:
            return 0.0, 0.0
        return (
            float(told[:kept].sum() / np.sqrt(kept)),
            float(-told[-kept:].sum() / np.sqrt(kept)),
        )

    def judge(self, round: int) -> None:
        """Name who is now known by enough holders."""
        if not self.b:
            return
        for worker, traces in enumerate(self.workers):
            begun = [
                (holder, trace.begun[holder])
                for trace in traces.values()
                for holder, times in trace.times.items()
                if times >= TIMES and holder != worker
            ]
            if len({holder for holder, _ in begun}) > self.b and not self.since[worker]:
                self.since[worker] = round
                self.onset[worker] = min(since for _, since in begun)
