"""Attacks that stay within the distances between honest rows, and the geometry they need."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

import numpy as np

from phocas.attacks.base import HonestRows, RowAttack, Scene, Setting, Who
from phocas.attacks.blocks import column_blocks, deviations, run, sum_rows
from phocas.rules.algebra import Distances
from phocas.rules.inputs import open_rows
from phocas.specs import checks, count, one_of

Direction = Literal["unit", "std", "sign"]


@dataclass(frozen=True)
class Cloud:
    """The honest rows around their mean, and a direction away from the mean.

    Attributes:
        mean: the mean of the honest rows.
        direction: the direction away from the mean.
        distances: squared distances between honest rows.
        norms: squared distances of the honest rows from the mean.
        along: inner products of the centred honest rows with the direction.
        length2: squared length of the direction.
    """

    mean: np.ndarray
    direction: np.ndarray
    distances: np.ndarray
    norms: np.ndarray
    along: np.ndarray
    length2: float

    @property
    def gram(self) -> np.ndarray:
        """Return the matrix of inner products of the centred rows."""
        products: np.ndarray = (self.norms[:, None] + self.norms - self.distances) / 2
        return products


def survey(honest: HonestRows, direction: Direction) -> Cloud:
    """Measure the honest rows: compute the mean and the direction, then all distances.

    Args:
        honest: the honest rows.
        direction: ``"unit"``: minus the mean; ``"std"``: minus the standard deviation of each
            column; ``"sign"``: minus the signs of the mean. The length of the direction does not
            matter.
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
    # With the mean and mean + direction as two more rows, the distances contain everything needed:
    # |x - mean - p|^2 = |x - mean|^2 - 2 <x - mean, p> + |p|^2.
    squared = open_rows([*rows, mean, mean + away]).measure(Distances(wide=True))
    h = honest.count
    norms, length2 = squared[:h, h], float(squared[h, h + 1])
    along = (norms + length2 - squared[:h, h + 1]) / 2
    return Cloud(mean, away, squared[:h, :h], norms, along, length2)


class Hidden(RowAttack):
    """An attack that moves q rows from the honest mean as far as distances to honest rows allow.

    Shejwalkar, Houmansadr, "Manipulating the Byzantine", NDSS 2021. The paper finds the step by
    bisection. The conditions are quadratic, so this code solves them.
    """

    direction: Direction
    needs_honest = True

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self.name, "direction", self.direction, get_args(Direction))

    @property
    def sharded(self) -> bool:
        """Return False, because distances are sums over all columns."""
        return False

    def step(self, cloud: Cloud) -> float:
        """Return the largest allowed step along the direction."""
        raise NotImplementedError

    def fill(self, scene: Scene, rows: np.ndarray) -> None:
        """Write mean + step * direction into the rows."""
        matrix = scene.matrix
        cloud = survey(HonestRows(matrix, rows), self.direction)
        step = matrix.kind.work.type(self.step(cloud) if cloud.length2 else 0)

        def work(columns: slice) -> None:
            values = cloud.mean[columns] + step * cloud.direction[columns]
            matrix.write(rows, values, columns)

        run(work, column_blocks(matrix.d))


@dataclass(frozen=True)
class MinMax(Hidden):
    """q workers send a row far from the mean, within the largest distance between honest rows.

    Every distance from the Byzantine row to an honest row is at most that largest distance.

    Args:
        q: number of Byzantine workers.
        direction: direction away from the honest mean; ``"std"``: minus the standard deviations of
            the columns; ``"unit"``: minus the mean; ``"sign"``: minus its signs.
        who: which workers are Byzantine; ``"fixed"``: workers 0 to q - 1; ``"resampled"``: q
            workers drawn in every round.

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
    """q workers send a row as far from the mean as its sum of squared distances allows.

    The sum of its squared distances to all honest rows is at most the largest such sum of an honest
    row.

    Args:
        q: number of Byzantine workers.
        direction: direction away from the honest mean; ``"std"``: minus the standard deviations of
            the columns; ``"unit"``: minus the mean; ``"sign"``: minus its signs.
        who: which workers are Byzantine; ``"fixed"``: workers 0 to q - 1; ``"resampled"``: q
            workers drawn in every round.

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
    """q workers copy the row of one honest worker, so that its data count too much.

    Karimireddy, He, Jaggi, "Byzantine-robust learning on heterogeneous datasets", ICLR 2022.

    Args:
        q: number of Byzantine workers.
        worker: the worker to copy; None selects the honest row that is farthest along the direction
            in which honest rows vary most.
        warmup: number of rounds over which this direction and this worker are found, as in the
            paper; the worker is the same from then on. With 0 every round selects anew.
        who: which workers are Byzantine; ``"fixed"``: workers 0 to q - 1; ``"resampled"``: q
            workers drawn in every round.

    >>> import numpy as np
    >>> from phocas.attacks import Mimic, attack_rng
    >>> rows = np.array([[0.0], [1.0], [2.0], [3.0]])
    >>> touched = Mimic(q=1, worker=2).corrupt(rows, rng=attack_rng(7, 0))
    >>> rows.tolist()
    [[2.0], [1.0], [2.0], [3.0]]
    """

    name: ClassVar[str] = "mimic"
    q: int
    worker: int | None = field(default=None, metadata=checks(count))
    warmup: int = field(default=0, metadata=checks(count))
    who: Who = "fixed"
    needs_honest = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warmup and self.worker is not None:
            raise ValueError(
                f"{self.name} needs worker or warmup, not both: got worker={self.worker},"
                f" warmup={self.warmup}"
            )

    @property
    def needs_memory(self) -> bool:
        """Return whether the worker is found over several rounds."""
        return self.warmup > 0

    @property
    def sharded(self) -> bool:
        """Return whether ``worker`` is given; selecting it needs the whole matrix."""
        return self.worker is not None

    def problems(self, setting: Setting) -> Iterator[str]:
        """Yield a message if the worker to copy does not exist or is itself Byzantine."""
        yield from super().problems(setting)
        lowest = self.q if self.who == "fixed" else 0
        if self.worker is not None and not lowest <= self.worker < setting.m:
            yield (
                f"an honest worker to copy, {lowest} <= worker < m: got worker={self.worker} with"
                f" q={self.q}, m={setting.m}"
            )

    def fill(self, scene: Scene, rows: np.ndarray) -> None:
        """Copy the bits of one row into the Byzantine rows."""
        matrix, worker = scene.matrix, self.worker
        if worker is None:
            honest = HonestRows(matrix, rows)
            worker = self._learned(scene, honest) if self.warmup else self._farthest(honest)
        copied = matrix.words[worker].copy()  # the worker may be one of the Byzantine rows
        matrix.copy_rows(rows, np.broadcast_to(copied, matrix.words.shape))

    def _farthest(self, honest: HonestRows) -> int:
        gram = survey(honest, "unit").gram
        if not np.isfinite(gram).all():
            index = 0
        else:
            index = int(np.abs(np.linalg.eigh(gram).eigenvectors[:, -1]).argmax())
        return int(honest.workers[index])

    def _learned(self, scene: Scene, honest: HonestRows) -> int:
        """Return the honest worker that has been farthest along the learned direction."""
        memory = scene.memory
        if scene.round < self.warmup or "scores" not in memory:
            self._learn(memory, honest)
        return int(honest.workers[np.abs(memory["scores"][honest.workers]).argmax()])

    def _learn(self, memory: dict[str, np.ndarray], honest: HonestRows) -> None:
        """Update the direction of largest variance, and add each row's position along it.

        The direction is a running mean of C z, normalised, where C is the covariance of the honest
        rows of a round and z the direction before (Oja's rule, as in the paper).
        """
        rows = honest.read()
        centred = np.nan_to_num(rows - sum_rows(rows) / len(rows), posinf=0.0, neginf=0.0)
        rounds = memory.get("rounds", np.zeros(1))
        if "direction" in memory:
            share = 1 / (1 + float(rounds[0]))
            step = (centred @ memory["direction"]) @ centred
            found = (1 - share) * memory["direction"] + share * _unit(step)
        else:
            found = _unit(np.linalg.eigh(centred @ centred.T).eigenvectors[:, -1] @ centred)
        scores = memory.get("scores", np.zeros(honest.matrix.m)).copy()
        scores[honest.workers] += centred @ found
        memory.update(direction=found, rounds=rounds + 1, scores=scores)


def _unit(vector: np.ndarray) -> np.ndarray:
    length = float(np.sqrt(np.square(vector).sum()))
    return vector / length if length > 0 and math.isfinite(length) else np.zeros_like(vector)
