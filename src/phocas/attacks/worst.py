"""Attacks that know the rule: ALIE, optionally tuned against a rule, and the worst case."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import ClassVar, Literal, get_args

import numpy as np

from phocas.attacks.base import (
    SELF,
    ColumnLie,
    HonestRows,
    RowAttack,
    RunRule,
    Scene,
    Setting,
    Who,
)
from phocas.attacks.blocks import deviations, sum_rows
from phocas.attacks.field import ConstantRows, InnerProduct, SignFlip
from phocas.attacks.geometry import Cloud, Mimic, MinMax, MinSum, survey
from phocas.attacks.paper import Gaussian, Omniscient
from phocas.attacks.placement import edge_of_cutoff, highest_kept
from phocas.attacks.search import Objective, Search, climb, norm
from phocas.attacks.touched import Touched
from phocas.kernels import Window
from phocas.rules import RULES, Rule
from phocas.rules.base import plan_of
from phocas.rules.guarantee import survived
from phocas.settings import at_least
from phocas.specs import checks, count, normalise, number, one_of

TRIES = 24  # evaluations of the rule along one direction: 12 doublings, then 12 halvings


@dataclass(frozen=True)
class ALittleIsEnough(ColumnLie):
    """q workers send the honest mean minus z standard deviations in each column.

    Baruch, Baruch, Goldberg, NeurIPS 2019. With neither ``z`` nor ``against``, z is the paper's:
    the largest z with Phi(z) < (m - q - s) / (m - q), where s = floor(m/2 + 1) - q is the number of
    honest workers that the Byzantine ones need for a majority.

    Args:
        q: number of Byzantine workers.
        z: number of standard deviations.
        against: a rule, or ``"self"``, the rule of the run; z is then chosen to move its result
            farthest from the honest mean.
        who: which workers are Byzantine; ``"fixed"``: workers 0 to q - 1; ``"resampled"``: q
            workers drawn in every round.

    >>> import numpy as np
    >>> from phocas.attacks import ALittleIsEnough, attack_rng
    >>> rows = np.array([[0.0], [1.0], [2.0], [3.0]])
    >>> touched = ALittleIsEnough(q=1, z=1).corrupt(rows, rng=attack_rng(7, 0))
    >>> rows.round(3).tolist()
    [[1.184], [1.0], [2.0], [3.0]]
    """

    name: ClassVar[str] = "a-little-is-enough"
    aliases: ClassVar[tuple[str, ...]] = ("alie", "little")
    q: int
    z: float | None = None
    against: RunRule | None = None
    who: Who = "fixed"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.against is not None and self.against != SELF:
            normalise(self, against=RULES.of(self.against, self.name))
        if self.z is not None:
            normalise(self, z=number(self.name, "z", self.z))
            if self.against is not None:
                raise ValueError(
                    f"{self.name} needs z or against, not both: got z={self.z} against"
                    f" {self.against}"
                )

    @property
    def sharded(self) -> bool:
        """Return False if a rule is attacked, because evaluating it needs the whole matrix."""
        return self.against is None

    def problems(self, setting: Setting) -> Iterator[str]:
        """Yield a message for each requirement that the setting violates.

        Without z, the paper's formula for it needs 2q <= m and m >= 3. Raise ValueError if the rule
        ``against`` which z is chosen rejects m workers.
        """
        yield from super().problems(setting)
        m = setting.m
        if isinstance(self.against, Rule):
            self.against.check(m)
        elif self.against is None and self.z is None and self.q and (2 * self.q > m or m < 3):
            yield (
                f"2q <= m and m >= 3 to choose z: got q={self.q} with m={m} workers,"
                f" the largest q is {m // 2}; or give z"
            )

    def given_z(self, m: int) -> float:
        """Return z, the distance of the Byzantine values from the honest mean.

        The unit is the standard deviation of the honest values. z is the setting of the attack or,
        if that is None, the value that the paper of the attack gives for m workers.

        >>> round(ALittleIsEnough(q=6).given_z(20), 3)
        0.366
        """
        if self.z is not None:
            return self.z
        honest = m - self.q
        return NormalDist().inv_cdf((honest - (m // 2 + 1 - self.q)) / honest)

    def lie(self, honest: np.ndarray, m: int) -> np.ndarray:
        """Return mean - z * standard deviation of the honest values."""
        mean = sum_rows(honest)
        mean /= mean.dtype.type(len(honest))
        deviation = deviations(honest, mean)
        deviation *= deviation.dtype.type(self.given_z(m))
        mean -= deviation
        return mean

    def fill(self, scene: Scene, rows: np.ndarray) -> None:
        """Write the Byzantine rows, with z tuned against the rule if one is given."""
        if not isinstance(self.against, Rule):
            super().fill(scene, rows)
            return
        cloud = survey(HonestRows(scene.matrix, rows), "std")
        search = Search(
            scene, self.against, rows, cloud.mean, objective="distance", budget=2 * TRIES
        )
        for direction in (cloud.direction, -cloud.direction):
            search.along(direction, 1.0, TRIES)
        search.commit()


@dataclass(frozen=True)
class WorstCase(RowAttack):
    """q workers that know the rule and the honest rows send the most harmful rows found.

    For a rule that applies a window to each column (mean, median, trimmed mean, Phocas, MeaMed) the
    optimum of every column is computed (see ``phocas.attacks.placement``). If the window has a
    cutoff, as that of Heraclius, values at the cutoff are tried too, but none that use its tail.
    For other rules the attack searches, within ``budget`` evaluations of the rule. It first tries
    most row attacks of this package. It then tries lines from the honest mean along their
    directions, along the directions in which honest rows vary, and along random directions.

    ``model="cells"`` is the paper's generalised model: at most q Byzantine values per column, in
    any rows. It makes no difference to a rule that reduces each column on its own. Against other
    rules, the attack also tries one infinite value in every worker's row, and the worst row found,
    scaled, with its values distributed over all rows: q values per column, in different rows from
    column to column.

    Args:
        rule: the rule under attack; ``"self"`` is the rule of the run.
        q: number of Byzantine workers.
        budget: largest number of evaluations of the rule.
        seed: seed of the search.
        objective: ``"distance"``: move the result far from the honest mean; ``"descent"``: minimise
            its inner product with the honest mean.
        model: ``"rows"``: q whole rows; ``"cells"``: q values per column, in any row.
        who: which workers are Byzantine; ``"fixed"``: workers 0 to q - 1; ``"resampled"``: q
            workers drawn in every round.

    >>> import numpy as np
    >>> from phocas import Phocas
    >>> from phocas.attacks import WorstCase, attack_rng
    >>> rows = np.array([[0.0], [1.0], [2.0], [3.0], [4.0]])
    >>> rng = attack_rng(7, 0)
    >>> touched = WorstCase(Phocas(b=1), q=1).corrupt(rows, rng=rng)
    >>> touched.rows.tolist(), Phocas(b=1)(rows).tolist()
    ([0], [1.5])
    """

    name: ClassVar[str] = "worst-case"
    rule: RunRule
    q: int
    budget: int = field(default=200, metadata=checks(at_least(1)))
    seed: int = field(default=0, metadata=checks(count))
    objective: Objective = "distance"
    model: Literal["rows", "cells"] = "rows"
    who: Who = "fixed"
    needs_honest = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rule != SELF:
            normalise(self, rule=RULES.of(self.rule, self.name))
        one_of(self.name, "objective", self.objective, get_args(Objective))
        one_of(self.name, "model", self.model, ("rows", "cells"))

    @property
    def sharded(self) -> bool:
        """Return whether each column's optimum depends on that column alone.

        This is so for a window without a cutoff; a cutoff depends on a block of columns.
        """
        window = self._window(2 * self.q + 1)  # whether there is a cutoff does not depend on m
        return window is not None and not window.cutoff

    def _window(self, m: int) -> Window | None:
        """Return the rule's window if the rule only applies a window to each column, else None."""
        if not isinstance(self.rule, Rule) or not self.rule.columnwise:
            return None
        plan = plan_of(self.rule, m)
        return plan.window if plan.function is None else None

    def problems(self, setting: Setting) -> Iterator[str]:
        """Yield a message if q or the model does not fit; ValueError if the rule rejects m."""
        yield from super().problems(setting)
        if isinstance(self.rule, Rule):
            self.rule.check(setting.m)
        d, cells = setting.d, self.model == "cells"
        if cells and self.q and d is not None and d * self.q < setting.m:
            yield f"q * d >= m to put a value into every row: got q={self.q}, d={d}, m={setting.m}"

    def fill(self, scene: Scene, rows: np.ndarray) -> None:
        """Write the worst rows that are computed or found."""
        self._search(scene, rows)

    def _corrupt(self, scene: Scene) -> Touched:
        rows = self.chosen(scene.matrix.m, scene.rng)
        if not self.q:
            return scene.touched(rows)
        search = self._search(scene, rows)
        if self.model == "cells" and self._window(scene.matrix.m) is None:
            cells = self._one_in_every_row(search)
            if cells is None:
                cells = self._distribute(search)
            if cells is not None:
                return cells
            search.commit()
        return scene.touched(rows)

    def _search(self, scene: Scene, rows: np.ndarray) -> Search:
        honest = HonestRows(scene.matrix, rows)
        window = self._window(scene.matrix.m)
        cloud = survey(honest, "std") if window is None else None
        mean = honest.mean() if cloud is None else cloud.mean
        assert isinstance(self.rule, Rule)  # corrupt rejects "self"
        search = Search(
            scene,
            self.rule,
            rows,
            mean,
            objective=self.objective,
            budget=self.budget,
            seed=self.seed,
        )
        if window is not None:
            self._place(search, honest, window)
        elif cloud is not None:
            self._search_directions(search, honest, cloud)
            search.commit()
        return search

    def _one_in_every_row(self, search: Search) -> Touched | None:
        """Write a huge value into one cell of every row, q per column, if that is worse."""
        scene, matrix = search.scene, search.scene.matrix
        search.honest_again()
        workers, columns = np.arange(matrix.m), np.arange(matrix.m) // self.q
        original = matrix.words[workers]
        for value in (np.inf, matrix.kind.large, -matrix.kind.large):
            matrix.put(workers, columns, np.full(matrix.m, value))
            if search.measure() > search.best:
                return scene.cells_here(workers, columns)
        matrix.words[workers] = original
        return None

    def _distribute(self, search: Search) -> Touched | None:
        """Write the worst row's values into q rotating rows of every column, if that is worse."""
        scene, matrix = search.scene, search.scene.matrix
        offset = search.worst_row() - search.mean
        search.honest_again()
        columns = np.repeat(np.arange(matrix.d), self.q)
        workers = np.arange(columns.size) % matrix.m
        all_workers = np.arange(matrix.m)
        original = matrix.words[all_workers]

        def put(step: float) -> None:
            values = (search.mean + step * offset).astype(matrix.kind.work)
            matrix.put(workers, columns, np.repeat(values, self.q))

        def measured(step: float) -> float:
            put(step)
            return search.measure()

        step = climb(measured, 1.0, TRIES)
        if measured(step) > search.best:
            return scene.cells_here(workers, columns)
        matrix.words[all_workers] = original
        return None

    def _place(self, search: Search, honest: HonestRows, window: Window) -> None:
        """Try the few placements that contain the optimum, and keep the worst for each column."""
        matrix, mean = search.scene.matrix, search.mean
        work = matrix.kind.work
        ordered = np.sort(honest.read().astype(np.float64), axis=0)
        worst = np.full(matrix.d, -np.inf)
        worst_rows = np.zeros((self.q, matrix.d), work)
        for up in (True, False):
            sorted_up = ordered if up else -ordered[::-1]
            sign = 1.0 if up else -1.0
            candidates = self._candidates(sorted_up, matrix.kind.mantissa, window)
            if window.cutoff and self.q <= survived(window):
                candidates.append((self.q, edge_of_cutoff(sorted_up, self.q, window)))
            for together, value in candidates:
                if search.left <= 0:
                    break
                tried = np.full((self.q, matrix.d), sign * np.inf, work)
                tried[:together] = sign * value
                for row, values in zip(search.rows, tried, strict=True):
                    matrix.write([row], values)
                result = search.result()
                score = np.abs(result - mean) if self.objective == "distance" else -result * mean
                score = np.where(np.isfinite(result), score, np.inf)
                better = score > worst
                worst[better] = score[better]
                worst_rows[:, better] = tried[:, better]
        for row, values in zip(search.rows, worst_rows, strict=True):
            matrix.write([row], values)

    def _candidates(
        self, honest: np.ndarray, mantissa: int, window: Window
    ) -> list[tuple[int, np.ndarray]]:
        """Return pairs (number of values, their common value per column); the others are at inf."""
        found = [(0, np.zeros(honest.shape[1]))]
        trim, drop = window.trim, window.drop
        if drop is not None and self.q <= survived(window):
            # Rounding decides whether a value at the very edge is kept, so try slightly lower
            # values too.
            slack = 2.0 ** (3 - mantissa) * np.abs(honest).max(axis=0)
            for j in range(1, self.q + 1):
                edge = highest_kept(honest, q=self.q, together=j, dropped=drop, trimmed=trim)
                found += [(j, edge), (j, edge - slack), (j, edge - 8 * slack)]
        return found

    def _search_directions(self, search: Search, honest: HonestRows, cloud: Cloud) -> None:
        """Try the known attacks, then lines along their directions and along random ones."""
        q, scene = self.q, search.scene
        known: list[RowAttack] = [
            ConstantRows(q, np.inf),
            ConstantRows(q, np.nan),
            Omniscient(q),
            Gaussian(q),
            ConstantRows(q, 0.0),
            SignFlip(q),
            InnerProduct(q),
            ALittleIsEnough(q, z=1.5),
            *(Mimic(q, worker=int(worker)) for worker in honest.workers),
            *(
                cls(q, direction)
                for cls in (MinMax, MinSum)
                for direction in ("std", "unit", "sign")
            ),
        ]
        for attack in known:
            if search.left > 0 and search.best < np.inf:
                search.honest_again()
                attack.fill(scene, search.rows)
                search.score()
        for direction in (cloud.direction, -cloud.direction):
            # Same steps as the tuned ALittleIsEnough: close to the edge of selection, steps matter.
            if search.left > 0 and search.best < np.inf:
                search.along(direction, 1.0, TRIES)
        rng = np.random.default_rng(self.seed)
        deviation = np.sqrt(cloud.norms.mean())
        directions = self._directions(search, honest, cloud, rng)
        while search.left > 0 and search.best < np.inf:
            direction = next(directions)
            length = norm(direction)
            if length > 0:
                search.along(direction * (deviation / length), 1.0, TRIES)
            else:
                search.left -= 1

    def _directions(
        self, search: Search, honest: HonestRows, cloud: Cloud, rng: np.random.Generator
    ) -> Iterator[np.ndarray]:
        """Yield directions from the mean: against it, along the deviations, then within the rows.

        The last kind is endless: random directions and changes of the worst row alternate.
        """
        rows = honest.read().astype(np.float64) - cloud.mean
        mean = cloud.mean.astype(np.float64)
        vectors = np.linalg.eigh(cloud.gram).eigenvectors if np.isfinite(cloud.gram).all() else None
        yield -mean
        yield cloud.direction.astype(np.float64)
        yield -np.sign(mean) * np.abs(cloud.direction)
        if vectors is not None:
            yield vectors[:, -1] @ rows
            yield -vectors[:, -1] @ rows
        while True:
            drift = rng.normal(size=len(rows)) @ rows - abs(rng.normal()) * mean
            yield drift
            worst = search.worst_row() - mean
            yield worst + drift * (0.5 * norm(worst) / (norm(drift) or 1.0))
