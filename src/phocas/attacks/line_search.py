"""ALIE and inner-product manipulation with a factor that is searched against the rule."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from phocas.attacks.base import SELF, HonestRows, RowAttack, RunRule, Scene, Setting, Who
from phocas.attacks.geometry import Cloud, survey
from phocas.attacks.search import Search
from phocas.rules import RULES, Rule
from phocas.settings import at_least
from phocas.specs import checks, normalise

STEP, RATIO = 10.0, 0.8
"""First step of the search for the factor, and the ratio by which later steps shrink."""


class LineSearched(RowAttack):
    """An attack with one factor, which is chosen to move the rule's result the farthest.

    Both signs of the factor are searched. The search of one sign starts at 0. Its steps begin with
    10 and double while the distance of the result from the honest mean grows; then they shrink by
    the ratio 0.8.
    """

    q: int
    against: RunRule
    evaluations: int
    who: Who
    needs_honest = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.against != SELF:
            normalise(self, against=RULES.of(self.against, self.name))

    @property
    def sharded(self) -> bool:
        """Return False, because evaluating a rule needs the whole matrix."""
        return False

    def problems(self, setting: Setting) -> Iterator[str]:
        """Yield the messages of a row attack; raise ValueError if the rule rejects m workers."""
        yield from super().problems(setting)
        if isinstance(self.against, Rule):
            self.against.check(setting.m)

    @abstractmethod
    def line(self, cloud: Cloud) -> tuple[float, np.ndarray]:
        """Return (start, direction): the factor f stands for mean + (start + f) * direction."""

    def fill(self, scene: Scene, rows: np.ndarray) -> None:
        """Write the rows of the best factor."""
        if not isinstance(self.against, Rule):
            raise TypeError(f"{self.name} needs a rule: call aimed_at(rule) first")
        cloud = survey(HonestRows(scene.matrix, rows), "std")
        start, direction = self.line(cloud)
        search = Search(
            scene,
            self.against,
            rows,
            cloud.mean,
            objective="distance",
            budget=2 * self.evaluations,
        )
        for sign in (1.0, -1.0):
            if search.best < np.inf:
                search.expand(sign * direction, sign * start, STEP, RATIO, self.evaluations)
        search.commit()


@dataclass(frozen=True)
class OptimalALIE(LineSearched):
    """q workers send the honest mean +- z standard deviations, with the most harmful z found.

    The z that the paper of ALIE gives depends on the number of workers only (see
    ``a-little-is-enough``). Here z maximises the distance of the rule's result from the honest
    mean, by a line search in every round, as in the benchmark of ByzFL.

    Args:
        q: number of Byzantine workers.
        against: the rule to search against; by default ``"self"``, that of the run.
        evaluations: number of evaluations of the rule for each sign of z.
        who: which workers are Byzantine; ``"fixed"``: workers 0 to q - 1; ``"resampled"``: q
            workers drawn in every round.

    >>> import numpy as np
    >>> from phocas.attacks import OptimalALIE, attack_rng
    >>> rows = np.array([[0.0], [1.0], [2.0], [3.0], [4.0]])
    >>> attack = OptimalALIE(q=1, against="trimmed-mean:b=1")
    >>> touched = attack.corrupt(rows, rng=attack_rng(7, 0))
    >>> bool(rows[0, 0] <= 1 or rows[0, 0] >= 4)
    True
    """

    name: ClassVar[str] = "optimal-alie"
    aliases: ClassVar[tuple[str, ...]] = ("optimal-little",)
    q: int
    against: RunRule = SELF
    evaluations: int = field(default=20, metadata=checks(at_least(1)))
    who: Who = "fixed"

    def line(self, cloud: Cloud) -> tuple[float, np.ndarray]:
        """Return the line from the mean along the standard deviations."""
        return 0.0, cloud.direction.astype(np.float64)


@dataclass(frozen=True)
class OptimalInnerProduct(LineSearched):
    """q workers send the honest mean times the most harmful factor found, of either sign.

    The rows are -epsilon times the mean, as those of ``inner-product``. Here epsilon maximises the
    distance of the rule's result from the honest mean, by a line search in every round, as in the
    benchmark of ByzFL.

    Args:
        q: number of Byzantine workers.
        against: the rule to search against; by default ``"self"``, that of the run.
        evaluations: number of evaluations of the rule for each sign of epsilon.
        who: which workers are Byzantine; ``"fixed"``: workers 0 to q - 1; ``"resampled"``: q
            workers drawn in every round.

    >>> import numpy as np
    >>> from phocas.attacks import OptimalInnerProduct, attack_rng
    >>> rows = np.ones((5, 2))
    >>> attack = OptimalInnerProduct(q=1, against="mean", evaluations=5)
    >>> touched = attack.corrupt(rows, rng=attack_rng(7, 0))
    >>> bool(abs(rows[0]).min() > 50), rows[1:].max().item()
    (True, 1.0)
    """

    name: ClassVar[str] = "optimal-ipm"
    aliases: ClassVar[tuple[str, ...]] = ("optimal-inner-product",)
    q: int
    against: RunRule = SELF
    evaluations: int = field(default=20, metadata=checks(at_least(1)))
    who: Who = "fixed"

    def line(self, cloud: Cloud) -> tuple[float, np.ndarray]:
        """Return the line through 0 along minus the mean: the factor 0 sends zeros."""
        return 1.0, -cloud.mean.astype(np.float64)
