"""The attacks of Fang et al. against the trimmed mean and against Krum, with full knowledge."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

import numpy as np

from phocas.attacks.base import HonestRows, RowAttack, Scene, Setting, Who
from phocas.attacks.blocks import column_blocks, run, sum_rows
from phocas.rules.algebra import Distances
from phocas.rules.inputs import open_rows
from phocas.specs import checks, one_of, positive

Target = Literal["trimmed-mean", "krum"]
_HALVINGS = 40


@dataclass(frozen=True)
class Fang(RowAttack):
    """q workers push every column against the sign of the honest mean, as far as a rule allows.

    Fang, Cao, Jia, Gong, "Local model poisoning attacks to Byzantine-robust federated learning",
    USENIX Security 2020, for attackers who know all honest rows.

    Against the trimmed mean (and the median): where the honest mean is positive, the values are at
    or below the honest minimum, down to the minimum times (or divided by) ``stretch``. Where it is
    negative, they are at or above the maximum. The paper draws the values at random from this
    interval; here they are spaced evenly over it.

    Against Krum: all rows are -step * sign(honest mean). The step is the paper's upper bound,
    halved until Krum with b = q selects a Byzantine row.

    Args:
        q: number of Byzantine workers.
        target: the rule under attack, ``"trimmed-mean"`` or ``"krum"``.
        stretch: ratio of the ends of the interval, for ``"trimmed-mean"``.
        who: which workers are Byzantine; ``"fixed"``: workers 0 to q - 1; ``"resampled"``: q
            workers drawn in every round.

    >>> import numpy as np
    >>> from phocas.attacks import Fang, attack_rng
    >>> rows = np.array([[0.0], [0.0], [2.0], [4.0], [6.0]])
    >>> touched = Fang(q=2).corrupt(rows, rng=attack_rng(7, 0))
    >>> rows.ravel().tolist()
    [1.75, 1.25, 2.0, 4.0, 6.0]
    """

    name: ClassVar[str] = "fang"
    q: int
    target: Target = "trimmed-mean"
    stretch: float = field(default=2.0, metadata=checks(positive))
    who: Who = "fixed"
    needs_honest = True

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self.name, "target", self.target, get_args(Target))
        if self.stretch < 1:
            raise ValueError(f"{self.name} needs stretch >= 1: got stretch={self.stretch}")

    @property
    def sharded(self) -> bool:
        """Return whether a column's values depend on that column alone: not against Krum."""
        return self.target == "trimmed-mean"

    def problems(self, setting: Setting) -> Iterator[str]:
        """Yield a message also if Krum does not exist for b = q."""
        yield from super().problems(setting)
        if self.target == "krum" and self.q and 2 * self.q + 2 >= setting.m:
            yield (
                f"2q + 2 < m against Krum: got q={self.q} with m={setting.m} workers, the largest"
                f" q is {max(0, (setting.m - 3) // 2)}"
            )

    def fill(self, scene: Scene, rows: np.ndarray) -> None:
        """Write the Byzantine rows."""
        matrix = scene.matrix
        honest = HonestRows(matrix, rows)
        if self.target == "krum":
            direction = -np.sign(honest.mean()).astype(matrix.kind.work)
            step = matrix.kind.work.type(self._krum_step(honest, direction))
            matrix.write(rows, step * direction)
            return

        def work(columns: slice) -> None:
            near, far = self._ends(honest.read(columns))
            for place, row in enumerate(rows):
                share = near.dtype.type((place + 0.5) / len(rows))
                matrix.write([row], near + share * (far - near), columns)

        run(work, column_blocks(matrix.d))

    def _ends(self, honest: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return both ends of each column's interval: the honest extreme, and beyond."""
        down = sum_rows(honest) > 0
        near = np.where(down, honest.min(axis=0), honest.max(axis=0))
        stretch = near.dtype.type(self.stretch)
        outward = down == (near < 0)  # multiplying moves away from the honest values
        return near, np.where(outward, near * stretch, near / stretch)

    def _krum_step(self, honest: HonestRows, direction: np.ndarray) -> float:
        """Return the largest of the halved steps with which Krum selects a Byzantine row."""
        matrix, h = honest.matrix, honest.count
        m, q = matrix.m, self.q
        rows = [matrix.read(worker) for worker in honest.workers]
        zero = np.zeros_like(direction)
        squared = open_rows([*rows, zero, direction]).measure(Distances(wide=True))
        lengths, length2 = squared[:h, h], float(squared[h, h + 1])
        along = (lengths + length2 - squared[:h, h + 1]) / 2
        between = np.sort(squared[:h, :h], axis=1)[:, 1:]  # without the row itself
        closest = between[:, : m - q - 2].sum(axis=1).min()
        step = math.sqrt(closest / (m - 2 * q - 1) / max(length2, 1.0))
        step += math.sqrt(lengths.max() / max(length2, 1.0))
        if not math.isfinite(step) or not np.isfinite(squared).all():
            return 0.0
        for _ in range(_HALVINGS):
            away = lengths - 2 * step * along + step**2 * length2
            byzantine = np.sort(away)[: m - 2 * q - 1].sum()
            copies = np.repeat(away[:, None], q, axis=1)
            scores = np.sort(np.hstack([between, copies]), axis=1)[:, : m - q - 2].sum(axis=1)
            if byzantine <= scores.min():
                break
            step /= 2
        return step
