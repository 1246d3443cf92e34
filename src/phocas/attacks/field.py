"""Attacks from the literature by q workers that control their whole rows."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from phocas.attacks.base import ColumnLie, RowAttack, Scene, Who
from phocas.attacks.blocks import column_blocks, run, sum_rows
from phocas.attacks.touched import Touched
from phocas.rules.inputs import is_tensor
from phocas.specs import checks, count, normalise, number


@dataclass(frozen=True)
class SignFlip(RowAttack):
    """q workers send their own gradient, multiplied by -scale.

    Args:
        q: number of Byzantine workers.
        scale: factor by which the row becomes longer.
        who: which workers are Byzantine; ``"fixed"``: workers 0 to q - 1; ``"resampled"``: q
            workers drawn in every round.

    >>> import numpy as np
    >>> from phocas.attacks import SignFlip, attack_rng
    >>> rows = np.ones((4, 3), np.float32)
    >>> touched = SignFlip(q=1, scale=5).corrupt(rows, rng=attack_rng(7, 0))
    >>> rows[:, 0].tolist()
    [-5.0, 1.0, 1.0, 1.0]
    """

    name: ClassVar[str] = "sign-flip"
    q: int
    scale: float = field(default=1.0, metadata=checks(number))
    who: Who = "fixed"

    def fill(self, scene: Scene, rows: np.ndarray) -> None:
        """Multiply each row by -scale."""
        matrix = scene.matrix
        factor = matrix.kind.work.type(-self.scale)

        def work(columns: slice) -> None:
            for row in rows:
                part = matrix.in_place(row, columns)
                if part is None:
                    matrix.write([row], matrix.read(row, columns) * factor, columns)
                else:
                    part *= factor

        run(work, column_blocks(matrix.d))


@dataclass(frozen=True)
class InnerProduct(ColumnLie):
    """q workers send -epsilon times the honest mean (inner-product manipulation).

    Xie, Koyejo, Gupta, "Fall of Empires", UAI 2019.

    Args:
        q: number of Byzantine workers.
        epsilon: length of the Byzantine row, relative to the honest mean.
        who: which workers are Byzantine; ``"fixed"``: workers 0 to q - 1; ``"resampled"``: q
            workers drawn in every round.

    >>> import numpy as np
    >>> from phocas.attacks import InnerProduct, attack_rng
    >>> rows = np.ones((4, 3), np.float32)
    >>> touched = InnerProduct(q=1, epsilon=0.5).corrupt(rows, rng=attack_rng(7, 0))
    >>> rows[:, 0].tolist()
    [-0.5, 1.0, 1.0, 1.0]
    """

    name: ClassVar[str] = "inner-product"
    aliases: ClassVar[tuple[str, ...]] = ("ipm", "empire")
    q: int
    epsilon: float = field(default=0.1, metadata=checks(number))
    who: Who = "fixed"

    def lie(self, honest: np.ndarray, m: int) -> np.ndarray:
        """Return - epsilon * mean of the honest values."""
        del m
        total = sum_rows(honest)
        total *= total.dtype.type(-self.epsilon / len(honest))
        return total


@dataclass(frozen=True)
class ConstantRows(RowAttack):
    """q workers send rows of one constant: zero, NaN, inf or any number.

    Args:
        q: number of Byzantine workers.
        value: the constant.
        who: which workers are Byzantine; ``"fixed"``: workers 0 to q - 1; ``"resampled"``: q
            workers drawn in every round.

    >>> import numpy as np
    >>> from phocas.attacks import ConstantRows, attack_rng
    >>> rows = np.ones((4, 3), np.float32)
    >>> touched = ConstantRows(q=1, value=np.nan).corrupt(rows, rng=attack_rng(7, 0))
    >>> rows[:, 0].tolist()
    [nan, 1.0, 1.0, 1.0]
    """

    name: ClassVar[str] = "constant"
    q: int
    value: float = 0.0
    who: Who = "fixed"

    def __post_init__(self) -> None:
        super().__post_init__()
        value = number(self.name, "value", self.value)
        # One NaN object, so that two attacks with value=NaN compare equal.
        normalise(self, value=math.nan if math.isnan(value) else value)

    def fill(self, scene: Scene, rows: np.ndarray) -> None:
        """Write the constant into every cell of the rows."""
        scene.matrix.write(rows, np.array(self.value))


@dataclass(frozen=True)
class LabelFlip(RowAttack):
    """q workers train on flipped labels: label y becomes num_classes - 1 - y.

    This attack changes the data, by ``corrupt_labels``, and leaves the matrix unchanged.

    Args:
        q: number of Byzantine workers.
        who: which workers are Byzantine; ``"fixed"``: workers 0 to q - 1; ``"resampled"``: q
            workers drawn in every round.

    >>> import numpy as np
    >>> from phocas.attacks import LabelFlip, attack_rng
    >>> labels = np.array([[0, 1, 9], [0, 1, 9]])
    >>> touched = LabelFlip(q=1).corrupt_labels(labels, 10, rng=attack_rng(7, 0))
    >>> labels.tolist()
    [[9, 8, 0], [0, 1, 9]]
    """

    name: ClassVar[str] = "label-flip"
    acts_on_data = True
    q: int
    who: Who = "fixed"

    def corrupt_labels(
        self,
        labels: Any,
        num_classes: int,
        *,
        rng: np.random.Generator,
        round: int = 0,
    ) -> Touched:
        """Flip the labels of q workers in place, in an (m, n) array or CPU tensor."""
        del round
        view = labels.detach().numpy() if is_tensor(labels) else labels
        if view.ndim != 2 or view.dtype.kind not in "iu":
            raise ValueError(
                f"{self.name} needs an (m, n) matrix of integer labels, row i of worker i:"
                f" got shape {view.shape} of {view.dtype}"
            )
        classes = count(self.name, "num_classes", num_classes, 1)
        self.check(view.shape[0])
        if view.size and not (view.min() >= 0 and view.max() < classes):
            raise ValueError(
                f"{self.name} needs labels in 0..{classes - 1}:"
                f" got labels from {view.min()} to {view.max()}"
            )
        rows = self.chosen(view.shape[0], rng)
        view[rows] = classes - 1 - view[rows]
        return Touched(view.shape, whole_rows=rows)

    def fill(self, scene: Scene, rows: np.ndarray) -> None:
        """Leave the matrix unchanged."""

    def _corrupt(self, scene: Scene) -> Touched:
        return Touched(scene.shape)
