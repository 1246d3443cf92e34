"""The observations of one rank: which ranks deviate in the columns that this rank holds.

The rank reports its observations to all other ranks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from phocas.detection.comparison import Sample
from phocas.detection.detector import Detector
from phocas.detection.evalues import EValueTest, distances, products
from phocas.detection.flags import Threat
from phocas.detection.locations import AddressMemory, ParameterFinding, findings_at
from phocas.detection.parameter_test import Direction, ParameterTest, absurd, middle, plausible
from phocas.detection.rare_features import RareFeatures
from phocas.rules import Median
from phocas.seeds import Stream, generator

Floats = NDArray[np.float64]

FINDINGS = 4
"""How many findings a rank reports in one step."""
RARE_STEPS = 16
"""The step in which a rank reports the parameter with the most rare values, if it has any."""
IMPLAUSIBLE = 1e6
"""A row this many times as long as the longest usual row so far comes from no honest rank."""
OUTLIER = 8.0
"""Deviations beyond which a value is wrong: where Heraclius by default gives it no weight."""
GROSS = 32.0
"""Deviations beyond which the address of a value is remembered."""
_INSPECTED = 2  # parameters a step that are inspected because there is evidence against a rank
_STRONG = 20.0  # evidence in a parameter from which on it is reported
_ENOUGH = 16  # findings about a worker in a parameter, after which it is inspected less often
_SELDOM = 16


@dataclass(frozen=True, slots=True)
class Segment:
    """Columns of one parameter among those that a rank holds.

    The columns of a shard are contiguous in the parameter if the parameter is cut along its first
    dimension. Otherwise they are groups of ``run`` neighbours that begin ``jump`` apart.
    """

    parameter: int
    """The number of the parameter."""
    begin: int
    """The first column."""
    end: int
    """The column after the last."""
    first: int = 0
    """The flat index within the parameter of the first column of the shard."""
    run: int = 0
    """The number of columns of a group of neighbours; 0 if all columns are contiguous."""
    jump: int = 0
    """The distance from the start of one group to the next."""
    before: int = 0
    """Columns of the shard before this segment."""

    def address(self, columns: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the flat indices within the parameter of columns of this segment."""
        places = self.before + columns
        if not self.run:
            return self.first + places
        return self.first + places // self.run * self.jump + places % self.run


Segments: TypeAlias = Sequence[Segment] | Callable[[], Sequence[Segment]]


def within(segments: Sequence[Segment], begin: int, end: int) -> list[Segment]:
    """Return the parts of segments within a range, with columns counted from its first column."""
    return [
        replace(
            part,
            begin=max(part.begin, begin) - begin,
            end=min(part.end, end) - begin,
            before=part.before + max(0, begin - part.begin),
        )
        for part in segments
        if max(part.begin, begin) < min(part.end, end)
    ]


def report_bytes(m: int) -> int:
    """Return the length of a report about m ranks."""
    return 8 * (findings_at(m) + FINDINGS * ParameterFinding.NUMBERS + 1)


class RankObserver:
    """Tests of which ranks are far from the others in the columns held here, and where.

    The detector decides before each step whether the observer is ``awake``. If the observer is not
    awake, its only work on the values is one sum that shows whether all values are finite and of a
    plausible size. If every rank has a value that is not finite, the model has diverged or its loss
    overflows; nothing else is reported in such a step.

    Args:
        m: the number of ranks.
        b: the largest number of faulty ranks.
        seed: the seed of the samples of columns.
        rare: counts of values that few ranks have, if the rule would drop these.
        threat: what ranks may do. Against adversaries, every rank is a reference for the distances
            of the others. For faults, there are tests of each parameter.
        parameters: the number of parameters of the model.
    """

    def __init__(
        self,
        m: int,
        b: int,
        seed: int,
        rare: RareFeatures | None = None,
        threat: Threat = "adversaries",
        parameters: int = 0,
    ) -> None:
        self.m, self.b, self.seed, self.rare = m, b, seed, rare
        self._findings_at = findings_at(m)
        self.pairs = EValueTest(m, b) if threat == "adversaries" else None
        self.scores = ParameterTest(m, b, parameters) if threat == "faults" else None
        self.usual: dict[int, float] = {}
        """By the number of the first column, the largest usual length of a row so far."""
        self.flagged: tuple[int, ...] = ()
        """The ranks that are flagged."""
        self.sizes: Floats | None = None
        """The size of the batch of each rank in this step, None if they are equal or not known."""
        self.direction = Direction(m)
        self.memory = AddressMemory()
        self.inspections: dict[tuple[int, int], int] = {}
        self.attention: tuple[int, ...] = ()
        """The ranks to inspect."""
        self.awake = True
        self.numbers = np.full(report_bytes(m) // 8, np.nan)
        """The report: e-values, a state, sums over columns, findings, and a rare parameter.

        The state is 1 if no rank is finite, -1 if a rank has lately been the farthest more often
        than chance explains, and 0 otherwise.
        """
        self.numbers[: self._findings_at] = 0.0
        self._bytes = torch.from_numpy(self.numbers.view(np.uint8))
        self.step = 0
        self.turn = 0
        self._begin()

    def _begin(self) -> None:
        self.products = np.zeros((self.m, self.m))
        self.nonfinite: NDArray[np.bool_] | None = None
        """The ranks with values that are not finite in this step, None if there are none."""
        self.findings: list[ParameterFinding] = []
        self.left = _INSPECTED
        self.seen = 0

    def see(self, rows: torch.Tensor, segments: Segments, place: int) -> None:
        """Observe the (m, width) rows of some columns.

        Args:
            rows: the rows.
            segments: the parameters in these columns, or a function that returns them.
            place: the number of the first column in the gradient, for the seed of the sample.
        """
        if not rows.shape[1]:
            return
        if self.awake and callable(segments):
            segments = segments()
        self.look(rows, segments, place)
        if not self.awake:
            return
        parts = segments() if callable(segments) else segments
        if self.scores is not None:
            self.products += self.scores.take(rows, parts, place, self.sizes)
        if self.scores is None or (self.rare is not None and self.step < RARE_STEPS):
            rng = generator(Stream.SAMPLE, self.seed, self.step, place)
            sample = Sample.draw(rows.shape[1], rng)
            values = sample.take(rows)
            if self.scores is None:
                self.products += products(values)
            if self.rare is not None and self.step < RARE_STEPS:
                self.rare.count(values, sample, parts)

    def look(self, rows: torch.Tensor, segments: Segments, place: int) -> None:
        """Find ranks with absurd values in a parameter, and inspect ranks that need attention."""
        total = total_of(rows)
        broken = None if math.isfinite(total) else _nonfinite(rows)
        if broken is not None:
            self.nonfinite = broken if self.nonfinite is None else self.nonfinite | broken
            if broken.all():
                return
        elif not self.awake and self._plausible_total(total, rows.shape[1], place):
            return
        segments = segments() if callable(segments) else segments
        if not self.attention and broken is None and self._plausible(lengths_of(rows), place):
            self.seen += len(segments)
            return
        clean = np.zeros(self.m, bool)
        self._locate(rows, segments, clean if broken is None else broken, place)

    def _plausible(self, lengths: Floats, place: int) -> bool:
        """Return whether no rank can have absurd values here, and remember the usual length."""
        if not plausible(lengths):
            return False
        self.usual[place] = max(self.usual.get(place, 0.0), middle(lengths))
        return True

    def _plausible_total(self, total: float, columns: int, place: int) -> bool:
        """Return whether the sum of all values may be that of plausible rows.

        The sum of a row is at most its length times the square root of the number of its columns.
        """
        limit = IMPLAUSIBLE * self.usual.get(place, 0.0) * self.m * math.sqrt(columns)
        return abs(total) <= limit or not limit

    def _locate(
        self, rows: torch.Tensor, segments: Sequence[Segment], broken: NDArray[np.bool_], place: int
    ) -> None:
        """Find the parameters in which a rank has absurd or non-finite values."""
        lengths = np.array([lengths_of(rows[:, part.begin : part.end]) for part in segments])
        with np.errstate(over="ignore"):
            usual = middle(np.sqrt(np.square(lengths).sum(axis=0))) if len(lengths) else 0.0
        before = self.usual.get(place, usual)
        longest = IMPLAUSIBLE * max(usual, before)
        diverged = usual > IMPLAUSIBLE * before  # if the usual row itself is too long
        for part, sizes in zip(segments, lengths, strict=True):
            self.seen += 1
            wrong = np.flatnonzero(absurd(sizes, usual, self.b))
            others = [*np.flatnonzero(broken & ~np.isfinite(sizes)), *self._in_turn()]
            if len(wrong) or others:
                far = ~(sizes <= longest) if longest else ~np.isfinite(sizes)
                far &= not diverged
                self._inspect(rows[:, part.begin : part.end], part, wrong.tolist(), others, far)

    def _in_turn(self) -> tuple[int, ...]:
        """Return the ranks to inspect in this parameter.

        Each step inspects the next few parameters in turn.
        """
        if not self.attention or not self.left or self.seen <= self.turn:
            return ()
        self.left -= 1
        self.turn = self.seen
        return self.attention

    def _inspect(
        self,
        rows: torch.Tensor,
        part: Segment,
        wrong: list[int],
        others: Sequence[int],
        implausible: NDArray[np.bool_],
    ) -> None:
        asked = [
            rank
            for rank in dict.fromkeys([*wrong, *others])
            if self.inspections.get((part.parameter, rank), 0) < _ENOUGH or self.step % _SELDOM == 0
        ][: FINDINGS - len(self.findings)]
        if not asked:
            return
        exact = rows if rows.dtype == torch.float64 else rows.float()
        away = (exact - Median()(exact)).abs_()
        width = away.shape[1]
        deviation = middle(lengths_of(away)) / math.sqrt(width)
        near = (away <= OUTLIER * deviation).sum(dim=1).cpu().numpy()
        finite = exact.isfinite().all(dim=1).cpu().numpy()
        along = self.direction.along()
        for rank in asked:
            gross = (~(away[rank] <= GROSS * deviation)).nonzero().flatten().cpu().numpy()
            found = part.address(gross)
            share, stride, again = self.memory.compare(part.parameter, rank, found, width)
            key = (part.parameter, rank)
            self.inspections[key] = self.inspections.get(key, 0) + 1
            self.findings.append(
                ParameterFinding(
                    parameter=part.parameter,
                    worker=rank,
                    wild=width - int(near[rank]),
                    columns=width,
                    others=_largest(np.delete(1 - near / width, rank), self.b),
                    absurd=rank in wrong,
                    address=int(found[0]) if len(found) else -1,
                    stride=stride,
                    repeats=share,
                    again=again,
                    nonfinite=not finite[rank],
                    along=float(along[rank]),
                    implausible=bool(implausible[rank]),
                )
            )

    def bet(self) -> None:
        """Update the e-values by the columns of this step, and write the report.

        Call this method when all columns of the step have been observed.
        """
        lost = self.nonfinite is not None and bool(self.nonfinite.all())
        self.numbers[self.m] = lost
        if self.awake and not lost:
            self.direction.observe(self.products)
            if self.pairs is not None:
                self.numbers[: self.m] = self.pairs.observe(distances(self.products))
                self.numbers[self.m] = -1.0 if self.pairs.growing(self.flagged) else 0.0
            if self.scores is not None:
                self.numbers[self.m + 1 : self._findings_at] = self.scores.totals()
                self.numbers[: self.m] = self.scores.observe()
                self.numbers[self.m] = -1.0 if self.scores.each.growing(self.flagged) else 0.0
                self._name_parameters(self.scores)
            if self.rare is not None and self.step + 1 == RARE_STEPS:
                self.numbers[-1] = self.rare.found(self.b)
                self.rare = None
        if self.findings:
            rows = self.numbers[self._findings_at : -1].reshape(FINDINGS, ParameterFinding.NUMBERS)
            for row, finding in zip(rows, self.findings, strict=False):
                row[:] = finding.numbers()

    def _name_parameters(self, scores: ParameterTest) -> None:
        """Add findings of the parameters in which there is evidence against a rank.

        The evidence on the direction of the rank's rows is that in the first of these parameters,
        or in all of them together if that speaks more against the rank.
        """
        for rank in self.attention:
            evidence = scores.by_parameter()[:, rank]
            most = float(evidence.max(initial=0.0))
            first = np.argsort(-evidence, kind="stable")[:_INSPECTED]
            found = first[evidence[first] >= max(_STRONG, most / _STRONG)]
            if not len(found):
                continue
            along = float(min(scores.along(found[0])[rank], self.direction.along()[rank]))
            named = [
                ParameterFinding.by_distances(int(p), rank, along, float(evidence[p]))
                for p in found
            ]
            self.findings = [*named, *self.findings][:FINDINGS]

    def report(self) -> torch.Tensor:
        """Return the bytes of the report: the e-value of each rank, and the findings."""
        return self._bytes

    def follow(self, detector: Detector) -> None:
        """Copy from a detector whether to observe the next step, and which ranks to inspect."""
        self.attention = detector.attention
        self.flagged = detector.flagged()
        self.awake = detector.wants()

    def state(self) -> dict[str, Any]:
        """Return the state of this rank for a checkpoint."""
        numbers = np.array([self.step, self.turn, self._test.rounds], np.float64)
        arrays = {"odds": self.numbers[: self.m], "numbers": numbers, **self._tests()}
        looks = [[*key, times] for key, times in self.inspections.items()]
        usual = list(self.usual.items())
        places = json.dumps({"looks": looks, "memory": self.memory.state(), "usual": usual})
        return {**as_tensors(arrays), "places": places}

    @property
    def _test(self) -> EValueTest | ParameterTest:
        test = self.pairs or self.scores
        assert test is not None
        return test

    def _tests(self) -> dict[str, Floats]:
        return {"direction": self.direction.sums, **self._test.arrays()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint, between two steps."""
        arrays = {"odds": self.numbers[: self.m], **self._tests()}
        for name, array in as_arrays(state, arrays).items():
            np.copyto(arrays[name], array)
        self.step, self.turn, self._test.rounds = state["numbers"].long().tolist()
        places = json.loads(state["places"])
        self.usual = {int(place): float(length) for place, length in places["usual"]}
        self.inspections = {(parameter, rank): times for parameter, rank, times in places["looks"]}
        self.memory.load_state(places["memory"])
        self._begin()

    def forget(self, rank: int) -> None:
        """Discard all observations of a rank."""
        self._test.forget(rank)
        self.direction.forget(rank)
        self.numbers[rank] = 0.0
        for known in (self.inspections, self.memory.known):
            for key in [key for key in known if key[1] == rank]:
                del known[key]

    def end(self) -> None:
        """End the step."""
        self.step += 1
        if self.awake and self.turn >= self.seen:
            self.turn = 0
        if self.awake or self.findings or self.nonfinite is not None:
            self.numbers[self._findings_at :] = np.nan
            self._begin()


def as_tensors(arrays: Mapping[str, Floats]) -> dict[str, torch.Tensor]:
    """Return copies for a checkpoint; empty arrays are omitted, as many formats do."""
    return {name: torch.tensor(array) for name, array in arrays.items() if array.size}


def as_arrays(state: Mapping[str, Any], own: Mapping[str, Floats]) -> dict[str, Floats]:
    """Return the arrays of a checkpoint; raise ValueError if shapes differ from ``own``."""
    found = {name: state[name].numpy() if own[name].size else own[name] for name in own}
    for name, array in found.items():
        if array.shape != own[name].shape:
            raise ValueError(
                f"evidence must be of as many ranks, with the same b: {name} is of shape"
                f" {array.shape} and must be {own[name].shape}; leave it out to begin anew"
            )
    return found


def _largest(shares: Floats, b: int) -> float:
    """Return the b-th largest share: those above it may be of other faulty ranks."""
    return float(np.sort(shares)[-min(max(1, b), len(shares))]) if len(shares) else 0.0


def lengths_of(rows: torch.Tensor) -> Floats:
    """Return the length of each row."""
    dtype = torch.float64 if rows.dtype == torch.float64 else torch.float32
    lengths = torch.linalg.vector_norm(rows, dim=1, dtype=dtype)
    return np.asarray(lengths.double().cpu().numpy())


def total_of(rows: torch.Tensor) -> float:
    """Return the sum of all values, which is finite only if these are."""
    # 10 us, where a check of each row takes 34.
    return rows.sum(dtype=torch.float64 if rows.dtype == torch.float64 else torch.float32).item()


def _nonfinite(rows: torch.Tensor) -> NDArray[np.bool_] | None:
    """Return which rows have a value that is not finite, or None if all rows are finite."""
    found = (~rows.isfinite().all(dim=1)).cpu().numpy()
    return found if found.any() else None
