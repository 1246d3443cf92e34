"""The four attacks of the paper's experiments, exactly as described there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from phocas import kernels
from phocas.attacks.base import Attack, ColumnLie, RowAttack, Scene, Setting, Who
from phocas.attacks.blocks import column_blocks, sum_rows
from phocas.attacks.cells import (
    bernoulli,
    bit_mask,
    distinct,
    missing_bits,
    read_bits,
    rows_and_columns,
)
from phocas.attacks.touched import Touched
from phocas.settings import at_least
from phocas.sharding import shard_bounds
from phocas.specs import checks, count, number, positive, probability


@dataclass(frozen=True)
class Gaussian(RowAttack):
    """q workers send independent normal values with mean 0.

    A value depends only on the round, its row and its column, so threads and servers can draw
    values in any order.

    Args:
        q: number of Byzantine workers.
        std: standard deviation of the values.
        who: which workers are Byzantine; ``"fixed"``: workers 0 to q - 1; ``"resampled"``: q
            workers drawn in every round.

    >>> import numpy as np
    >>> from phocas.attacks import Gaussian, attack_rng
    >>> rows = np.ones((4, 3), np.float32)
    >>> touched = Gaussian(q=1).corrupt(rows, rng=attack_rng(7, 0))
    >>> touched.rows.tolist(), bool(abs(rows[0]).max() > 10), rows[1:].max().item()
    ([0], True, 1.0)
    """

    name: ClassVar[str] = "gaussian"
    q: int
    std: float = field(default=200.0, metadata=checks(positive))
    who: Who = "fixed"

    def fill(self, scene: Scene, rows: np.ndarray) -> None:
        """Draw the values of each Byzantine row."""
        matrix = scene.matrix
        first, second = scene.rng.integers(1 << 63, size=2).tolist()
        for row in rows.tolist():
            for columns in column_blocks(matrix.d):
                out = matrix.in_place(row, columns)
                size = columns.stop - columns.start
                drawn = np.empty(size, matrix.kind.work) if out is None else out
                first_column = scene.start + columns.start
                kernels.draw_normals(drawn, (first, second), row, first_column, self.std)
                if out is None:
                    matrix.write([row], drawn, columns)


@dataclass(frozen=True)
class Omniscient(ColumnLie):
    """q workers send minus the sum of all honest gradients, multiplied by the scale.

    Args:
        q: number of Byzantine workers.
        scale: factor of the negative sum.
        who: which workers are Byzantine; ``"fixed"``: workers 0 to q - 1; ``"resampled"``: q
            workers drawn in every round.

    >>> import numpy as np
    >>> from phocas.attacks import Omniscient, attack_rng
    >>> rows = np.ones((4, 3), np.float32)
    >>> touched = Omniscient(q=1, scale=2).corrupt(rows, rng=attack_rng(7, 0))
    >>> rows[:, 0].tolist()
    [-6.0, 1.0, 1.0, 1.0]
    """

    name: ClassVar[str] = "omniscient"
    q: int
    scale: float = field(default=1e20, metadata=checks(number))
    who: Who = "fixed"

    def lie(self, honest: np.ndarray, m: int) -> np.ndarray:
        """Return - scale * sum of the honest values."""
        del m
        total = sum_rows(honest)
        total *= total.dtype.type(-self.scale)
        return total


@dataclass(frozen=True)
class BitFlip(Attack):
    """Flip bits of some workers' values in the first columns.

    In each of the first ``columns`` columns, ``per_column`` workers are drawn anew.

    Args:
        columns: number of columns that are hit, from the first.
        per_column: number of workers that are hit in each column.
        bits: the bits to flip; 1 is the least significant.

    >>> import numpy as np
    >>> from phocas.attacks import BitFlip, attack_rng
    >>> rows = np.ones((4, 3), np.float32)
    >>> touched = BitFlip(columns=2, bits=(32,)).corrupt(rows, rng=attack_rng(7, 0))
    >>> touched.count, rows[:, :2].sum(axis=0).tolist()
    (2, [2.0, 2.0])
    """

    name: ClassVar[str] = "bit-flip"
    columns: int = field(default=1000, metadata=checks(count))
    per_column: int = field(default=1, metadata=checks(count))
    bits: tuple[int, ...] = field(default=(22, 30, 31, 32), metadata=checks(read_bits))

    def problems(self, setting: Setting) -> Iterator[str]:
        """Yield a message if per_column > m, columns > d, or the format lacks one of the bits."""
        yield from super().problems(setting)
        if self.per_column > setting.m:
            yield (f"per_column <= m: got per_column={self.per_column} with m={setting.m} workers")
        if setting.d is not None and self.columns > setting.d:
            yield f"columns <= d: got columns={self.columns} with d={setting.d}"
        yield from missing_bits(self.bits, setting.kind)

    def _corrupt(self, scene: Scene) -> Touched:
        rows = distinct(scene.rng, scene.matrix.m, self.per_column, self.columns).ravel()
        columns = np.concatenate([np.arange(self.columns)] * max(self.per_column, 1))[: len(rows)]
        touched = scene.cells_here(rows, columns)
        mask = bit_mask(self.bits, scene.matrix.kind)
        scene.matrix.change_bits(touched.cell_rows, touched.cell_columns, lambda word: word ^ mask)
        return touched


@dataclass(frozen=True)
class Gambler(Attack):
    """Multiply each value sent to one server by the scale, with a small probability.

    Args:
        servers: number of servers that share the columns.
        server: the server whose columns are hit.
        probability: the probability of each value.
        scale: the factor.

    >>> import numpy as np
    >>> from phocas.attacks import Gambler, attack_rng
    >>> rows = np.ones((4, 3), np.float32)
    >>> touched = Gambler(servers=3, server=1, probability=1.0).corrupt(rows, rng=attack_rng(7, 0))
    >>> rows[0].tolist(), touched.count
    ([1.0, -1.0000000200408773e+20, 1.0], 4)
    """

    name: ClassVar[str] = "gambler"
    servers: int = field(default=20, metadata=checks(at_least(1)))
    server: int = field(default=0, metadata=checks(count))
    probability: float = field(default=0.0005, metadata=checks(probability))
    scale: float = field(default=-1e20, metadata=checks(number))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.server >= self.servers:
            raise ValueError(
                f"{self.name} needs server < servers: got server={self.server} with"
                f" servers={self.servers}, the largest is {self.servers - 1}"
            )

    def problems(self, setting: Setting) -> Iterator[str]:
        """Yield a message if the system has a different number of servers."""
        yield from super().problems(setting)
        if setting.servers is not None and setting.servers != self.servers:
            yield (
                f"the number of servers that there are: got servers={self.servers} where there"
                f" are {setting.servers}"
            )

    def _corrupt(self, scene: Scene) -> Touched:
        matrix = scene.matrix
        first, stop = shard_bounds(scene.d, self.servers)[self.server]
        hits = bernoulli(scene.rng, matrix.m * (stop - first), self.probability)
        rows, columns = rows_and_columns(hits, matrix.m, stop - first)
        columns += first
        touched = scene.cells_here(rows, columns)
        cells = touched.cell_rows, touched.cell_columns
        matrix.put(*cells, matrix.take(*cells) * matrix.kind.work.type(self.scale))
        return touched
