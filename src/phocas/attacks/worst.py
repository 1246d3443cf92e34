"""Attackers who know the rule: a little is enough, tuned or not, and the worst case."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import NormalDist
from typing import ClassVar, Literal, get_args

import numpy as np

from phocas.attacks.base import ColumnLie, HonestRows, RowAttack, Scene, Setting, Who
from phocas.attacks.blocks import deviations, sum_rows
from phocas.attacks.field import ConstantRows, InnerProduct, SignFlip
from phocas.attacks.geometry import Cloud, Mimic, MinMax, MinSum, survey
from phocas.attacks.paper import Gaussian, Omniscient
from phocas.attacks.placement import edge_of_reach, highest_kept
from phocas.attacks.search import Objective, Search, climb, norm
from phocas.attacks.touched import Touched
from phocas.kernels import Window
from phocas.rules import RULES, Rule
from phocas.rules.algebra import UNMIXED
from phocas.rules.promise import survived
from phocas.specs import count, normalise, number, one_of

TRIES = 24  # evaluations of the rule along one direction: 12 doublings, then 12 halvings


@dataclass(frozen=True)
class ALittleIsEnough(ColumnLie):
    """q rows at the honest mean minus z standard deviations, column by column.

    Baruch, Baruch, Goldberg, NeurIPS 2019. z is the given one, or the one that moves the result of
    the rule ``against`` farthest from the honest mean, or the paper's: with s = floor(m/2 + 1) - q
    workers to be won over, the largest z with Phi(z) < (m - q - s) / (m - q).

    Args:
        q: how many workers lie.
        z: how many deviations; the paper's, if there is neither z nor a rule.
        against: the rule for which z is the worst.
        who: ``"fixed"``: workers 0 to q - 1, every round; ``"resampled"``: others every round.

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
    against: Rule | None = None
    who: Who = "fixed"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.against is not None:
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
        """To try a rule takes the whole matrix."""
        return self.against is None

    def problems(self, setting: Setting) -> Iterator[str]:
        """Ask also for what the paper's z takes: a minority of liars among three."""
        yield from super().problems(setting)
        m = setting.m
        if self.against is not None:
            self.against.check(m)
        elif self.z is None and self.q and (2 * self.q > m or m < 3):
            yield (
                f"2q <= m and m >= 3 to choose z: got q={self.q} with m={m} workers,"
                f" the largest q is {m // 2}; or give z"
            )

    def given_z(self, m: int) -> float:
        """Return z, or the paper's z for m workers.

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
        spread = deviations(honest, mean)
        spread *= spread.dtype.type(self.given_z(m))
        mean -= spread
        return mean

    def fill(self, scene: Scene, rows: np.ndarray) -> None:
        """Write the lie, tuned against the rule if there is one."""
        if self.against is None:
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
    """q rows made by one who knows the rule and the honest rows, and searches for the worst.

    For a rule that is a window of each column (the mean, the median, the trimmed mean, Phocas and
    MeaMed) the optimum of every column is computed (see ``phocas.attacks.placement``). If the
    window has a reach, as that of Heraclius, liars at the edge of it are tried as well. For other
    rules it is a search, within ``budget`` evaluations of the rule: all the row attacks of this
    package first, then lines from the honest mean along their directions, along the directions in
    which honest rows vary, and along random ones until the budget is spent.

    ``objective="distance"`` moves the result farthest from the honest mean; ``"descent"`` makes its
    inner product with the honest mean least. ``model="cells"`` is the paper's generalised model: at
    most q values a column, but not in the same rows. It makes no difference to a rule that reduces
    each column on its own; others also face one infinite value in every worker's row, and the worst
    lie, nearer and farther, spread over all rows: q values of every column, in other rows from
    column to column.

    Args:
        rule: the rule that they know.
        q: how many workers lie.
        budget: how often they may try the rule.
        seed: of the search.
        objective: ``"distance"``: far from the honest mean; ``"descent"``: against it.
        model: ``"rows"``: they own rows; ``"cells"``: as many values a column, in any row.
        who: ``"fixed"``: workers 0 to q - 1, every round; ``"resampled"``: others every round.

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
    rule: Rule
    q: int
    budget: int = 200
    seed: int = 0
    objective: Objective = "distance"
    model: Literal["rows", "cells"] = "rows"
    who: Who = "fixed"
    needs_honest = True

    def __post_init__(self) -> None:
        super().__post_init__()
        normalise(
            self,
            rule=RULES.of(self.rule, self.name),
            budget=count(self.name, "budget", self.budget, 1),
            seed=count(self.name, "seed", self.seed),
        )
        one_of(self.name, "objective", self.objective, get_args(Objective))
        one_of(self.name, "model", self.model, ("rows", "cells"))

    @property
    def sharded(self) -> bool:
        """A column's optimum depends on that column alone, unless blocks have a spread."""
        window = self._window(2 * self.q + 1)  # whether there is a reach does not depend on m
        return window is not None and not window.reach

    def _window(self, m: int) -> Window | None:
        """Return the window of each column that the rule is, if it is nothing else."""
        if not self.rule.columnwise:
            return None
        decision = self.rule.decision(UNMIXED, m)
        return decision.window if decision.function is None else None

    def problems(self, setting: Setting) -> Iterator[str]:
        """Ask also for a rule that runs on m workers, and for cells enough to reach every row."""
        yield from super().problems(setting)
        self.rule.check(setting.m)
        d, cells = setting.d, self.model == "cells"
        if cells and self.q and d is not None and d * self.q < setting.m:
            yield f"q * d >= m to put a value into every row: got q={self.q}, d={d}, m={setting.m}"

    def fill(self, scene: Scene, rows: np.ndarray) -> None:
        """Write the worst rows that are known or found."""
        self._search(scene, rows)

    def _corrupt(self, scene: Scene) -> Touched:
        rows = self.chosen(scene.matrix.m, scene.rng)
        if not self.q:
            return scene.touched(rows)
        search = self._search(scene, rows)
        if self.model == "cells" and self._window(scene.matrix.m) is None:
            cells = self._one_in_every_row(search)
            if cells is None:
                cells = self._spread(search)
            if cells is not None:
                return cells
            search.commit()
        return scene.touched(rows)

    def _search(self, scene: Scene, rows: np.ndarray) -> Search:
        honest = HonestRows(scene.matrix, rows)
        window = self._window(scene.matrix.m)
        cloud = survey(honest, "std") if window is None else None
        mean = honest.mean() if cloud is None else cloud.mean
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
            self._restart(search, honest, cloud)
            search.commit()
        return search

    def _one_in_every_row(self, search: Search) -> Touched | None:
        """Put a huge value into one cell of every row, q to a column, if that is worse still."""
        scene, matrix = search.scene, search.scene.matrix
        search.honest_again()
        workers, columns = np.arange(matrix.m), np.arange(matrix.m) // self.q
        own = matrix.words[workers]
        for value in (np.inf, matrix.kind.large, -matrix.kind.large):
            matrix.put(workers, columns, np.full(matrix.m, value))
            if search.measure() > search.best:
                return scene.cells_here(workers, columns)
        matrix.words[workers] = own
        return None

    def _spread(self, search: Search) -> Touched | None:
        """Put the worst lie into q rows of every column, other rows each time, if that is worse."""
        scene, matrix = search.scene, search.scene.matrix
        lie = search.worst_row() - search.mean
        search.honest_again()
        columns = np.repeat(np.arange(matrix.d), self.q)
        workers = np.arange(columns.size) % matrix.m
        everybody = np.arange(matrix.m)
        own = matrix.words[everybody]

        def put(step: float) -> None:
            values = (search.mean + step * lie).astype(matrix.kind.work)
            matrix.put(workers, columns, np.repeat(values, self.q))

        def measured(step: float) -> float:
            put(step)
            return search.measure()

        step = climb(measured, 1.0, TRIES)
        if measured(step) > search.best:
            return scene.cells_here(workers, columns)
        matrix.words[everybody] = own
        return None

    def _place(self, search: Search, honest: HonestRows, window: Window) -> None:
        """Try the few placements of which one is optimal, and keep the worst for each column."""
        matrix, mean = search.scene.matrix, search.mean
        work = matrix.kind.work
        ordered = np.sort(honest.read().astype(np.float64), axis=0)
        worst = np.full(matrix.d, -np.inf)
        lies = np.zeros((self.q, matrix.d), work)
        for up in (True, False):
            sorted_up = ordered if up else -ordered[::-1]
            sign = 1.0 if up else -1.0
            candidates = self._candidates(sorted_up, matrix.kind.mantissa, window)
            if window.reach and self.q <= survived(window):
                candidates.append((self.q, edge_of_reach(sorted_up, self.q, window)))
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
                lies[:, better] = tried[:, better]
        for row, values in zip(search.rows, lies, strict=True):
            matrix.write([row], values)

    def _candidates(
        self, honest: np.ndarray, mantissa: int, window: Window
    ) -> list[tuple[int, np.ndarray]]:
        """List (liars together, their value in each column), pushing upwards; the rest at inf."""
        found = [(0, np.zeros(honest.shape[1]))]
        trim, drop = window.trim, window.drop
        if drop is not None and self.q <= survived(window):
            # At the very edge rounding decides whether the liars are kept: try a little below too.
            slack = 2.0 ** (3 - mantissa) * np.abs(honest).max(axis=0)
            for j in range(1, self.q + 1):
                edge = highest_kept(honest, q=self.q, together=j, dropped=drop, trimmed=trim)
                found += [(j, edge), (j, edge - slack), (j, edge - 8 * slack)]
        return found

    def _restart(self, search: Search, honest: HonestRows, cloud: Cloud) -> None:
        """Try the rivals, then lines along their directions, then along random ones."""
        q, scene = self.q, search.scene
        rivals: list[RowAttack] = [
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
        for rival in rivals:
            if search.left > 0 and search.best < np.inf:
                search.honest_again()
                rival.fill(scene, search.rows)
                search.score()
        for direction in (cloud.direction, -cloud.direction):
            # As a tuned ALittleIsEnough goes, step for step: near its cliff, steps matter.
            if search.left > 0 and search.best < np.inf:
                search.along(direction, 1.0, TRIES)
        rng = np.random.default_rng(self.seed)
        spread = np.sqrt(cloud.norms.mean())
        directions = self._directions(search, honest, cloud, rng)
        while search.left > 0 and search.best < np.inf:
            direction = next(directions)
            length = norm(direction)
            if length > 0:
                search.along(direction * (spread / length), 1.0, TRIES)
            else:
                search.left -= 1

    def _directions(
        self, search: Search, honest: HonestRows, cloud: Cloud, rng: np.random.Generator
    ) -> Iterator[np.ndarray]:
        """Yield directions from the mean: against it, along the spread, then within the cloud.

        The last ones go on for ever, random ones and changes to the worst in turns.
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
