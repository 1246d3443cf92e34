"""Faults of machines: crashes, stragglers and corrupted memory, without malice."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from phocas.attacks.base import Attack, RowAttack, Scene, Setting, Who
from phocas.attacks.cells import bernoulli, bit_mask, missing_bits, read_bits, rows_and_columns
from phocas.attacks.touched import Touched
from phocas.floats import Format
from phocas.settings import at_least
from phocas.specs import checks, count, normalise, probability


class OneWorker(Attack):
    """A fault of one worker."""

    worker: int

    def __post_init__(self) -> None:
        normalise(self, worker=count(self.name, "worker", self.worker))
        super().__post_init__()

    def byzantine(self) -> tuple[int, ...]:
        """Return the faulty worker."""
        return (self.worker,)

    def problems(self, setting: Setting) -> Iterator[str]:
        """Yield a message if the worker does not exist."""
        yield from super().problems(setting)
        if self.worker >= setting.m:
            yield (
                f"worker < m: got worker={self.worker} with m={setting.m} workers,"
                f" the largest is {setting.m - 1}"
            )


@dataclass(frozen=True)
class Crash(OneWorker):
    """A worker sends no row from a round on; its row is NaN.

    Args:
        worker: the faulty worker.
        round: the first round without its row.

    >>> import numpy as np
    >>> from phocas.attacks import Crash, attack_rng
    >>> rows = np.ones((4, 3), np.float32)
    >>> touched = Crash(worker=2).corrupt(rows, rng=attack_rng(7, 0))
    >>> rows[:, 0].tolist()
    [1.0, 1.0, nan, 1.0]
    """

    name: ClassVar[str] = "crash"
    worker: int
    round: int = field(default=0, metadata=checks(count))

    def _corrupt(self, scene: Scene) -> Touched:
        if scene.round < self.round:
            return Touched(scene.shape)
        rows = np.array([self.worker])
        scene.matrix.write(rows, np.array(math.nan))
        return scene.touched(rows)


@dataclass(frozen=True)
class Straggler(RowAttack):
    """q workers are one round late: they send their rows of the previous round again.

    In round 0 there is no previous round, so the rows are NaN.

    Args:
        q: number of late workers.
        who: which workers are late; ``"fixed"``: workers 0 to q - 1; ``"resampled"``: q workers
            drawn in every round.

    >>> import numpy as np
    >>> from phocas.attacks import Straggler, attack_rng
    >>> before, rows = np.zeros((3, 2)), np.ones((3, 2))
    >>> rng = attack_rng(7, 1)
    >>> touched = Straggler(q=1).corrupt(rows, rng=rng, round=1, previous=before)
    >>> rows[:, 0].tolist()
    [0.0, 1.0, 1.0]
    """

    name: ClassVar[str] = "straggler"
    needs_previous = True
    q: int
    who: Who = "fixed"

    def fill(self, scene: Scene, rows: np.ndarray) -> None:
        """Copy the bits of the previous round's rows."""
        if scene.previous is not None:
            if scene.previous.kind != scene.matrix.kind:
                raise TypeError(
                    f"{self.name} needs the previous rows in {scene.matrix.kind.name}:"
                    f" got {scene.previous.kind.name}"
                )
            scene.matrix.copy_rows(rows, scene.previous.words)
        elif scene.round == 0:
            scene.matrix.write(rows, np.array(math.nan))
        else:
            raise ValueError(
                f"{self.name} needs previous, the rows of the round before: got none in round"
                f" {scene.round}"
            )


@dataclass(frozen=True)
class Stuck(OneWorker):
    """Bits of one cell, in one column of one worker, are stuck at 1 or 0.

    Args:
        worker: the faulty worker.
        column: the column of the cell.
        bits: the stuck bits; 1 is the least significant.
        at: the value of the stuck bits, 1 or 0.

    >>> import numpy as np
    >>> from phocas.attacks import Stuck, attack_rng
    >>> rows = np.ones((4, 3), np.float32)
    >>> touched = Stuck(worker=1, bits=(31,)).corrupt(rows, rng=attack_rng(7, 0))
    >>> rows[:, 0].tolist()
    [1.0, inf, 1.0, 1.0]
    """

    name: ClassVar[str] = "stuck"
    worker: int
    column: int = field(default=0, metadata=checks(count))
    bits: tuple[int, ...] = field(default=(31,), metadata=checks(read_bits))
    at: int = field(default=1, metadata=checks(count))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.at not in (0, 1):
            raise ValueError(f"{self.name} needs at = 0 or 1: got at={self.at}")

    def problems(self, setting: Setting) -> Iterator[str]:
        """Yield a message if the worker, the column or a bit of the format does not exist."""
        yield from super().problems(setting)
        if setting.d is not None and self.column >= setting.d:
            yield f"column < d: got column={self.column} with d={setting.d}"
        yield from missing_bits(self.bits, setting.kind)

    def _corrupt(self, scene: Scene) -> Touched:
        touched = scene.cells_here(np.array([self.worker]), np.array([self.column]))
        mask = bit_mask(self.bits, scene.matrix.kind)
        scene.matrix.change_bits(
            touched.cell_rows,
            touched.cell_columns,
            lambda word: word | mask if self.at else word & ~mask,
        )
        return touched


@dataclass(frozen=True)
class RandomCells(Attack):
    """Each cell is overwritten with random bits, NaN and inf included, with probability ``rate``.

    Args:
        rate: the probability of each cell.

    >>> import numpy as np
    >>> from phocas.attacks import RandomCells, attack_rng
    >>> rows = np.ones((4, 3), np.float32)
    >>> touched = RandomCells(rate=1.0).corrupt(rows, rng=attack_rng(7, 0))
    >>> touched.count, bool((rows == 1).any())
    (12, False)
    """

    name: ClassVar[str] = "random-cells"
    rate: float = field(metadata=checks(probability))

    def _corrupt(self, scene: Scene) -> Touched:
        kind = scene.matrix.kind
        hits = bernoulli(scene.rng, scene.matrix.m * scene.d, self.rate)
        noise = scene.rng.integers(1 << kind.bits, size=len(hits), dtype=kind.word)
        rows, columns = rows_and_columns(hits, scene.matrix.m, scene.d)
        if scene.matrix.d < scene.d:
            here = (columns >= scene.start) & (columns < scene.start + scene.matrix.d)
            rows, columns, noise = rows[here], columns[here], noise[here]
        touched = scene.cells_here(rows, columns)
        scene.matrix.change_bits(touched.cell_rows, touched.cell_columns, lambda _: noise)
        return touched


@dataclass(frozen=True)
class SilentCorruption(OneWorker):
    """A worker's device corrupts values at addresses of a fixed stride, from a round on.

    A study of GPU faults (arXiv 2605.04213) found this pattern: the same addresses fail again and
    again, one bit flips in fewer than 40% of the values and several bits in the others, and only 1%
    become NaN. The other values stay finite, so a search for NaN misses nearly all of them.

    Args:
        worker: the faulty worker.
        round: the first round with the fault.
        stride: distance between corrupted columns.
        first: the first corrupted column.
        nan: the share of corrupted values that become NaN.

    >>> import numpy as np
    >>> from phocas.attacks import SilentCorruption, attack_rng
    >>> rows = np.ones((4, 12), np.float32)
    >>> touched = SilentCorruption(worker=2, stride=4).corrupt(rows, rng=attack_rng(7, 0))
    >>> touched.cell_columns.tolist(), touched.rows.tolist()
    ([0, 4, 8], [2])
    """

    name: ClassVar[str] = "silent-corruption"
    worker: int
    round: int = field(default=0, metadata=checks(count))
    stride: int = field(default=64, metadata=checks(at_least(1)))
    first: int = field(default=0, metadata=checks(count))
    nan: float = field(default=0.01, metadata=checks(probability))

    def problems(self, setting: Setting) -> Iterator[str]:
        """Yield a message if there is no such worker, or no column with the number ``first``."""
        yield from super().problems(setting)
        if setting.d and self.first >= setting.d:
            yield f"first < d: got first={self.first} with d={setting.d}"

    def _corrupt(self, scene: Scene) -> Touched:
        if scene.round < self.round:
            return Touched(scene.shape)
        kind = scene.matrix.kind
        columns = np.arange(self.first, scene.d, self.stride)
        flips = _flips(scene.rng, len(columns), kind)
        lost = scene.rng.random(len(columns)) < self.nan
        here = (columns >= scene.start) & (columns < scene.start + scene.matrix.d)
        touched = scene.cells_here(np.full(len(columns), self.worker), columns)
        flips, lost = flips[here], lost[here]
        exponent = bit_mask(tuple(range(kind.mantissa + 1, kind.bits)), kind)
        top = bit_mask((kind.bits - 1,), kind)

        def change(words: np.ndarray) -> np.ndarray:
            flipped = words ^ flips
            finite = np.where(flipped & exponent == exponent, flipped & ~top, flipped)
            corrupted: np.ndarray = np.where(lost, exponent | (exponent >> 1), finite)
            return corrupted

        scene.matrix.change_bits(touched.cell_rows, touched.cell_columns, change)
        return touched


_ONE_BIT = 0.38
_MOST_BITS = 8


def _flips(rng: np.random.Generator, size: int, kind: Format) -> np.ndarray:
    """Draw words with the bits to flip: one bit in 38% of the words, two to eight in the others."""
    several = np.where(rng.random(size) < _ONE_BIT, 1, rng.integers(2, _MOST_BITS + 1, size=size))
    bits = rng.random((size, kind.bits)).argsort(axis=1) < several[:, None]
    weights = kind.word.type(1) << np.arange(kind.bits, dtype=kind.word)
    words: np.ndarray = np.where(bits, weights, kind.word.type(0)).sum(axis=1, dtype=kind.word)
    return words
