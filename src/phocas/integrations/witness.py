"""What one rank sees of all ranks in the columns that it holds, and what it tells the others."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from phocas.integrations.rare import RareFeatures
from phocas.rules import Median
from phocas.rules.bets import Bets, Direction
from phocas.rules.places import GROSS, WILD, Finding, Memory, absurd, middle, plausible
from phocas.rules.sampling import Sample, products, views
from phocas.seeds import Stream, generator

Floats = NDArray[np.float64]

FINDINGS = 4
"""How many findings a rank tells in one step."""
RARE_STEPS = 16
"""The step in which a rank tells the parameter in which few ranks have values, if there is one."""
_GLANCES = 2  # parameters a step that are looked at because someone is under suspicion
_SATED = 16  # findings about a worker in a parameter, after which it is looked at less often
_SELDOM = 16


@dataclass(frozen=True, slots=True)
class Segment:
    """Columns of one parameter among those that a rank holds.

    ``first`` is the flat index within the parameter of the first column of its shard. The next lie
    beside it, or ``jump`` further on after each ``run`` of columns where the parameter is cut
    crosswise. So many columns of the shard are ``before`` this segment.
    """

    parameter: int
    begin: int
    end: int
    first: int = 0
    run: int = 0
    jump: int = 0
    before: int = 0

    def address(self, columns: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the flat indices within the parameter of columns of this segment."""
        places = self.before + columns
        if not self.run:
            return self.first + places
        return self.first + places // self.run * self.jump + places % self.run


Segments: TypeAlias = Sequence[Segment] | Callable[[], Sequence[Segment]]


def within(segments: Sequence[Segment], begin: int, end: int) -> list[Segment]:
    """Return what lies within a range of columns, counted from its beginning."""
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


def testimony_bytes(m: int) -> int:
    """Return how long a testimony of m ranks is."""
    return 8 * (m + 1 + FINDINGS * Finding.NUMBERS + 1)


class Witness:
    """Bet on who is far from whom in the columns held here, and find where wrong values lie.

    Only while ``awake``, which whoever hears all witnesses decides before a step. Steps that are
    passed over are those that the past says nothing about, so that bets stay fair. Values that are
    not finite are found in every step. If every rank has some, the model itself is lost or its
    loss overflows: then nothing else is said of the step.
    """

    def __init__(self, m: int, b: int, seed: int, rare: RareFeatures | None = None) -> None:
        self.m, self.b, self.seed, self.rare = m, b, seed, rare
        self.bets = Bets(m, b)
        self.direction = Direction(m)
        self.memory = Memory()
        self.looks: dict[tuple[int, int], int] = {}
        self.attention: tuple[int, ...] = ()
        self.awake = True
        self.told = np.full(testimony_bytes(m) // 8, np.nan)
        self.told[: m + 1] = 0.0
        self._spoken = torch.from_numpy(self.told.view(np.uint8))
        self.step = 0
        self.turn = 0
        self._begin()

    def _begin(self) -> None:
        self.products = np.zeros((self.m, self.m))
        self.broken = np.zeros(self.m, bool)
        self.findings: list[Finding] = []
        self.glances = _GLANCES
        self.seen = 0

    def see(self, rows: torch.Tensor, segments: Segments, place: int) -> None:
        """Look at the (m, width) rows of some columns, which begin at a place of the gradient.

        Segments that take time to work out may be a function, which is called if they are needed.
        """
        if not rows.shape[1]:
            return
        self.look(rows, segments)
        if not self.awake:
            return
        rng = generator(Stream.SAMPLE, self.seed, self.step, place)
        sample = Sample.draw(rows.shape[1], rng)
        values = sample.take(rows)
        self.products += products(values)
        if self.rare is not None and self.step < RARE_STEPS:
            parts = segments() if callable(segments) else segments
            self.rare.count(values, sample, parts)

    def look(self, rows: torch.Tensor, segments: Segments) -> None:
        """Find who is absurd in which parameter, and have a glance at who is under suspicion."""
        broken = _broken(rows)
        if broken.any():
            self.broken |= broken
        if broken.all() or not (self.awake or broken.any()):
            return
        segments = segments() if callable(segments) else segments
        if not self.attention and not broken.any() and plausible(_sizes(rows)):
            self.seen += len(segments)
            return
        sizes = np.array([_sizes(rows[:, part.begin : part.end]) for part in segments])
        with np.errstate(over="ignore"):
            usual = middle(np.sqrt(np.square(sizes).sum(axis=0))) if len(sizes) else 0.0
        for part, lengths in zip(segments, sizes, strict=True):
            self.seen += 1
            wrong = np.flatnonzero(absurd(lengths, usual, self.b))
            curious = [*np.flatnonzero(broken & ~np.isfinite(lengths)), *self._curious()]
            if len(wrong) or curious:
                self._inspect(rows[:, part.begin : part.end], part, wrong.tolist(), curious)

    def _curious(self) -> tuple[int, ...]:
        """Return whom to look at in this parameter: each step, it is the turn of the next few."""
        if not self.attention or not self.glances or self.seen <= self.turn:
            return ()
        self.glances -= 1
        self.turn = self.seen
        return self.attention

    def _inspect(
        self, rows: torch.Tensor, part: Segment, wrong: list[int], curious: Sequence[int]
    ) -> None:
        asked = [
            rank
            for rank in dict.fromkeys([*wrong, *curious])
            if self.looks.get((part.parameter, rank), 0) < _SATED or self.step % _SELDOM == 0
        ][: FINDINGS - len(self.findings)]
        if not asked:
            return
        exact = rows if rows.dtype == torch.float64 else rows.float()
        away = (exact - Median()(exact)).abs_()
        width = away.shape[1]
        spread = middle(_sizes(away)) / math.sqrt(width)
        near = (away <= WILD * spread).sum(dim=1).cpu().numpy()
        finite = exact.isfinite().all(dim=1).cpu().numpy()
        along = self.direction.along()
        for rank in asked:
            gross = (~(away[rank] <= GROSS * spread)).nonzero().flatten().cpu().numpy()
            found = part.address(gross)
            share, stride, again = self.memory.compare(part.parameter, rank, found, width)
            key = (part.parameter, rank)
            self.looks[key] = self.looks.get(key, 0) + 1
            self.findings.append(
                Finding(
                    parameter=part.parameter,
                    worker=rank,
                    wild=width - int(near[rank]),
                    columns=width,
                    others=_most(np.delete(1 - near / width, rank), self.b),
                    absurd=rank in wrong,
                    address=int(found[0]) if len(found) else -1,
                    stride=stride,
                    repeats=share,
                    again=again,
                    nonfinite=not finite[rank],
                    along=float(along[rank]),
                )
            )

    def bet(self) -> None:
        """Bet on the columns of this step: all have been seen."""
        lost = bool(self.broken.all())
        self.told[self.m] = lost
        if self.awake and not lost:
            self.told[: self.m] = self.bets.observe(views(self.products))
            self.direction.observe(self.products)
            if self.rare is not None and self.step + 1 == RARE_STEPS:
                self.told[-1] = self.rare.found(self.b)
                self.rare = None
        told = self.told[self.m + 1 : -1].reshape(FINDINGS, Finding.NUMBERS)
        for row, finding in zip(told, self.findings, strict=False):
            row[:] = finding.numbers()

    def testimony(self) -> torch.Tensor:
        """Return the bytes of what is told to all: the odds against each, and what was found."""
        return self._spoken

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint of this rank must keep."""
        numbers = np.array([self.step, self.turn, self.bets.rounds], np.float64)
        arrays = {"odds": self.told[: self.m], "numbers": numbers, **self._bets()}
        looks = [[*key, times] for key, times in self.looks.items()]
        places = json.dumps({"looks": looks, "memory": self.memory.state()})
        return {**as_tensors(arrays), "places": places}

    def _bets(self) -> dict[str, Floats]:
        return {
            "money": self.bets.money,
            "usual": self.bets.usual,
            "direction": self.direction.sums,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint, between two steps."""
        arrays = {"odds": self.told[: self.m], **self._bets()}
        for name, array in as_arrays(state, arrays).items():
            np.copyto(arrays[name], array)
        self.step, self.turn, self.bets.rounds = state["numbers"].long().tolist()
        places = json.loads(state["places"])
        self.looks = {(parameter, rank): times for parameter, rank, times in places["looks"]}
        self.memory.load_state(places["memory"])
        self._begin()

    def forget(self, rank: int) -> None:
        """Begin anew with a rank."""
        self.bets.forget(rank)
        self.direction.forget(rank)
        self.told[rank] = 0.0
        for known in (self.looks, self.memory.known):
            for key in [key for key in known if key[1] == rank]:
                del known[key]

    def end(self) -> None:
        """Go on to the next step."""
        self.step += 1
        if self.awake and self.turn >= self.seen:
            self.turn = 0
        if self.awake or self.broken.any():
            self.told[self.m + 1 :] = np.nan
            self._begin()


def model_lost(told: Floats) -> bool:
    """Say whether most of m ranks have seen values that are not finite of every rank."""
    return bool(2 * np.count_nonzero(told[:, len(told)] > 0) > len(told))


def heard(told: Floats) -> tuple[Floats, list[tuple[int, Finding]]]:
    """Read the testimonies of m ranks: the odds of each against each, and who found what."""
    m = len(told)
    rows = told[:, m + 1 : -1].reshape(m, FINDINGS, Finding.NUMBERS)
    holders, places = np.nonzero(~np.isnan(rows[:, :, 0]))
    found = [
        (int(h), Finding.read(rows[h, place])) for h, place in zip(holders, places, strict=True)
    ]
    return told[:, :m], [(holder, finding) for holder, finding in found if finding is not None]


def as_tensors(arrays: Mapping[str, Floats]) -> dict[str, torch.Tensor]:
    """Return copies for a checkpoint; those without values are left out, as many formats do."""
    return {name: torch.tensor(array) for name, array in arrays.items() if array.size}


def as_arrays(state: Mapping[str, Any], own: Mapping[str, Floats]) -> dict[str, Floats]:
    """Return the arrays of a checkpoint, which must have the shapes of one's own."""
    found = {name: state[name].numpy() if own[name].size else own[name] for name in own}
    for name, array in found.items():
        if array.shape != own[name].shape:
            raise ValueError(
                f"evidence must be of as many ranks, with the same b: {name} is of shape"
                f" {array.shape} and must be {own[name].shape}; leave it out to begin anew"
            )
    return found


def _most(shares: Floats, b: int) -> float:
    """Return the largest share, but for b - 1 that may be of other liars."""
    return float(np.sort(shares)[-min(max(1, b), len(shares))]) if len(shares) else 0.0


def _broken(rows: torch.Tensor) -> NDArray[np.bool_]:
    """Return whose rows have a value that is not finite."""
    # One sum over all rows is finite only if its values are: 10 us where row by row takes 34.
    dtype = torch.float64 if rows.dtype == torch.float64 else torch.float32
    if math.isfinite(rows.sum(dtype=dtype).item()):
        return np.zeros(len(rows), bool)
    return np.asarray((~rows.isfinite().all(dim=1)).cpu().numpy())


def _sizes(rows: torch.Tensor) -> Floats:
    dtype = torch.float64 if rows.dtype == torch.float64 else torch.float32
    lengths = torch.linalg.vector_norm(rows, dim=1, dtype=dtype)
    return np.asarray(lengths.double().cpu().numpy())
