"""Attacks that hide inside the cloud of honest rows, and the geometry they need of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import numpy as np

from phocas.attacks.base import HonestRows, RowAttack, Scene, Setting, Who
from phocas.attacks.blocks import column_blocks, deviations, run, sum_rows
from phocas.rules.algebra import Distances
from phocas.rules.inputs import open_rows
from phocas.specs import count, normalise, one_of

Direction = Literal["unit", "std", "sign"]


@dataclass(frozen=True)
class Cloud:
    """The honest rows around their mean, and a direction to leave it by.

    ``distances`` are squared, between honest rows; ``norms`` are the squared distances from the
    mean; ``along`` holds the inner products of the centred rows with the direction, of which
    ``length2`` is the squared length.
    """

    mean: np.ndarray
    direction: np.ndarray
    distances: np.ndarray
    norms: np.ndarray
    along: np.ndarray
    length2: float

    @property
    def gram(self) -> np.ndarray:
        """Return the inner products of the centred rows."""
        products: np.ndarray = (self.norms[:, None] + self.norms - self.distances) / 2
        return products


def survey(honest: HonestRows, direction: Direction) -> Cloud:
    """Measure the cloud in two passes: the mean and the direction, then all distances at once.

    The direction is minus the mean, minus the standard deviations, or minus the signs of the mean;
    its length does not matter.
    """
    matrix = honest.matrix
    mean, away = np.empty((2, matrix.d), matrix.kind.work)

    def prepare(columns: slice) -> None:
        block = honest.read(columns)
        centre = sum_rows(block)
        centre /= centre.dtype.type(len(block))
        mean[columns] = centre
        if direction == "std":
            np.negative(deviations(block, centre), out=away[columns])
        else:
            np.negative(np.sign(centre) if direction == "sign" else centre, out=away[columns])

    run(prepare, column_blocks(matrix.d))
    rows = [matrix.read(worker) for worker in honest.workers]
    # With the mean and a point in the direction as two more rows, distances say all there is to
    # know: |x - mean - p|^2 = |x - mean|^2 - 2 <x - mean, p> + |p|^2.
    squared = open_rows([*rows, mean, mean + away]).measure(Distances(wide=True))
    h = honest.count
    norms, length2 = squared[:h, h], float(squared[h, h + 1])
    along = (norms + length2 - squared[:h, h + 1]) / 2
    return Cloud(mean, away, squared[:h, :h], norms, along, length2)


class Hidden(RowAttack):
    """q rows at the honest mean plus as much of a direction as distances to honest rows allow.

    Shejwalkar, Houmansadr, "Manipulating the Byzantine", NDSS 2021. There the step is found by
    bisection; the conditions are quadratic, so here it is solved for.
    """

    direction: Direction
    needs_honest = True

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self.name, "direction", self.direction, get_args(Direction))

    @property
    def sharded(self) -> bool:
        """Distances are sums over all columns."""
        return False

    def step(self, cloud: Cloud) -> float:
        """Return how far along the direction the lie may go."""
        raise NotImplementedError

    def fill(self, scene: Scene, rows: np.ndarray) -> None:
        """Go that far from the mean."""
        matrix = scene.matrix
        cloud = survey(HonestRows(matrix, rows), self.direction)
        step = matrix.kind.work.type(self.step(cloud) if cloud.length2 else 0)

        def work(columns: slice) -> None:
            lie = cloud.mean[columns] + step * cloud.direction[columns]
            matrix.write(rows, lie, columns)

        run(work, column_blocks(matrix.d))


@dataclass(frozen=True)
class MinMax(Hidden):
    """q rows as far out as keeps each distance to an honest row within the honest diameter.

    Args:
        q: how many workers lie.
        direction: away from the honest mean by ``"std"``, the deviations, by ``"unit"``, the
            mean itself, or by ``"sign"``, its signs.
        who: ``"fixed"``: workers 0 to q - 1, every round; ``"resampled"``: others every round.

    >>> import numpy as np
    >>> from phocas.attacks import MinMax, attack_rng
    >>> rows = np.array([[0.0], [1.0], [2.0], [3.0]])
    >>> touched = MinMax(q=1).corrupt(rows, rng=attack_rng(7, 0))
    >>> rows.tolist()
    [[1.0], [1.0], [2.0], [3.0]]
    """

    name: ClassVar[str] = "min-max"
    q: int
    direction: Direction = "std"
    who: Who = "fixed"

    def step(self, cloud: Cloud) -> float:
        """Solve max_i |mean + step p - x_i|^2 = max_ij |x_i - x_j|^2 for the step."""
        room = np.maximum(cloud.distances.max() - cloud.norms, 0)
        root = np.sqrt(cloud.along**2 + cloud.length2 * room)
        return float(((cloud.along + root) / cloud.length2).min())


@dataclass(frozen=True)
class MinSum(Hidden):
    """q rows whose squared distances to honest rows sum to no more than an honest row's do.

    Args:
        q: how many workers lie.
        direction: away from the honest mean by ``"std"``, the deviations, by ``"unit"``, the
            mean itself, or by ``"sign"``, its signs.
        who: ``"fixed"``: workers 0 to q - 1, every round; ``"resampled"``: others every round.

    >>> import numpy as np
    >>> from phocas.attacks import MinSum, attack_rng
    >>> rows = np.array([[0.0], [1.0], [2.0], [3.0]])
    >>> touched = MinSum(q=1).corrupt(rows, rng=attack_rng(7, 0))
    >>> rows.round(3).tolist()
    [[1.0], [1.0], [2.0], [3.0]]
    """

    name: ClassVar[str] = "min-sum"
    q: int
    direction: Direction = "std"
    who: Who = "fixed"

    def step(self, cloud: Cloud) -> float:
        """Solve sum_i |mean + step p - x_i|^2 = max_i sum_j |x_i - x_j|^2 for the step."""
        room = cloud.distances.sum(axis=0).max() - cloud.norms.sum()
        return math.sqrt(max(room, 0) / (len(cloud.norms) * cloud.length2))


@dataclass(frozen=True)
class Mimic(RowAttack):
    """q rows that copy one honest worker, to over-represent its data.

    Karimireddy, He, Jaggi, "Byzantine-robust learning on heterogeneous datasets", ICLR 2022.
    Without a ``worker``, the honest row that lies farthest along the direction in which honest rows
    vary most.

    Args:
        q: how many workers lie.
        worker: whom they copy.
        who: ``"fixed"``: workers 0 to q - 1, every round; ``"resampled"``: others every round.

    >>> import numpy as np
    >>> from phocas.attacks import Mimic, attack_rng
    >>> rows = np.array([[0.0], [1.0], [2.0], [3.0]])
    >>> touched = Mimic(q=1, worker=2).corrupt(rows, rng=attack_rng(7, 0))
    >>> rows.tolist()
    [[2.0], [1.0], [2.0], [3.0]]
    """

    name: ClassVar[str] = "mimic"
    q: int
    worker: int | None = None
    who: Who = "fixed"
    needs_honest = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.worker is not None:
            normalise(self, worker=count(self.name, "worker", self.worker))

    @property
    def sharded(self) -> bool:
        """To find the worker takes the whole matrix."""
        return self.worker is not None

    def problems(self, setting: Setting) -> Iterator[str]:
        """Ask for a worker to copy that exists and, among fixed attackers, is honest."""
        yield from super().problems(setting)
        lowest = self.q if self.who == "fixed" else 0
        if self.worker is not None and not lowest <= self.worker < setting.m:
            yield (
                f"an honest worker to copy, {lowest} <= worker < m: got worker={self.worker} with"
                f" q={self.q}, m={setting.m}"
            )

    def fill(self, scene: Scene, rows: np.ndarray) -> None:
        """Copy the bits of one row."""
        matrix, worker = scene.matrix, self.worker
        if worker is None:
            worker = self._farthest(HonestRows(matrix, rows))
        copied = matrix.words[worker].copy()  # the worker may be one of the rows
        matrix.copy_rows(rows, np.broadcast_to(copied, matrix.words.shape))

    def _farthest(self, honest: HonestRows) -> int:
        gram = survey(honest, "unit").gram
        if not np.isfinite(gram).all():
            place = 0
        else:
            place = int(np.abs(np.linalg.eigh(gram).eigenvectors[:, -1]).argmax())
        return int(honest.workers[place])
