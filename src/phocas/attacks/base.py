"""Base classes of attacks: frozen values that corrupt a matrix in place and return what changed.

All randomness comes from the generator that the caller passes. An engine passes ``attack_rng(seed,
round)``, so the same seed, round and attack give the same corruption wherever the round runs. A
server that holds a slice of the columns passes the same generator, its slice, and the position of
the slice. The corrupted cells are then the same as if the whole matrix had been corrupted at once.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Final, Literal, Self, get_args

import numpy as np

from phocas.attacks.blocks import column_blocks, run, sum_rows
from phocas.attacks.memory import WritableMatrix, kind_of
from phocas.attacks.touched import Touched
from phocas.floats import Format
from phocas.rules import Rule
from phocas.seeds import Stream, generator
from phocas.specs import Spec, count, normalise, one_of

Who = Literal["fixed", "resampled"]
SELF: Final = "self"
"""The text that stands for the rule of the run in a parameter of an attack."""
RunRule = Rule | Literal["self"]
"""A rule, or ``"self"``: the rule of the run in which the attack takes place."""


def attack_rng(seed: int, round: int) -> np.random.Generator:
    """Return the generator of one round, which depends only on the seed and the round.

    Args:
        seed: the seed of the run.
        round: the number of the round, from 0.

    >>> bool(attack_rng(7, 3).integers(100) == attack_rng(7, 3).integers(100))
    True
    """
    return generator(Stream.ATTACK, seed, count("attack_rng", "round", round))


@dataclass(frozen=True)
class Setting:
    """The size of the system that an attack runs in; None where it is not known yet.

    Args:
        m: number of workers.
        d: number of columns, if known.
        kind: float format of the values, if known.
        servers: number of servers, if known.

    >>> from phocas.attacks import Crash, Setting
    >>> list(Crash(worker=9).problems(Setting(m=4)))
    ['worker < m: got worker=9 with m=4 workers, the largest is 3']
    """

    m: int
    d: int | None = None
    kind: Format | None = None
    servers: int | None = None


@dataclass(frozen=True, eq=False)
class Scene:
    """The input of an attack in one round: some or all columns, and the previous round's rows.

    Attributes:
        rows: the rows as the caller passed them.
        matrix: the same rows, readable and writable.
        rng: the generator of the round.
        round: the number of the round, from 0.
        previous: the rows of the previous round, if given.
        start: index of the first column of ``matrix`` in the whole matrix.
        d: number of columns of the whole matrix.
        memory: arrays that the attack has kept in earlier rounds, and may change.
        reference: the reference vector that the rule of the run will use, if it needs one.

    >>> import numpy as np
    >>> from phocas.attacks.memory import WritableMatrix
    >>> rows = np.ones((3, 4))
    >>> scene = Scene(rows, WritableMatrix(rows), attack_rng(7, 0), 0, None, start=4, d=8)
    >>> scene.shape, scene.cells_here(np.array([1, 2]), np.array([3, 5])).cell_columns
    ((3, 4), array([1]))
    """

    rows: Any
    matrix: WritableMatrix
    rng: np.random.Generator
    round: int
    previous: WritableMatrix | None
    start: int
    d: int
    memory: dict[str, np.ndarray] = field(default_factory=dict)
    reference: Any = None

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape (m, columns) of the slice."""
        return self.matrix.m, self.matrix.d

    def touched(self, rows: np.ndarray) -> Touched:
        """Return a ``Touched`` for whole rows."""
        return Touched(self.shape, whole_rows=rows)

    def cells_here(self, rows: np.ndarray, columns: np.ndarray) -> Touched:
        """Return a ``Touched`` for those of these cells that lie in this slice of the matrix."""
        if self.matrix.d < self.d:
            here = (columns >= self.start) & (columns < self.start + self.matrix.d)
            rows, columns = rows[here], columns[here] - self.start
        return Touched(self.shape, cell_rows=rows, cell_columns=columns)


class Attack(Spec):
    """A corruption of the gradient matrix of a round.

    >>> from phocas.attacks import Crash, Gambler, parse_attack
    >>> parse_attack("gambler:scale=-10"), str(Crash(worker=3))
    (Gambler(servers=20, server=0, probability=0.0005, scale=-10.0), 'crash:worker=3')
    """

    needs_previous: ClassVar[bool] = False
    """Whether ``corrupt`` needs the uncorrupted rows of the previous round."""
    acts_on_data: ClassVar[bool] = False
    """Whether the attack changes a round's data, by ``corrupt_labels``, instead of the matrix."""

    @property
    def sharded(self) -> bool:
        """Return whether a server can corrupt its own columns without the other columns."""
        return True

    @property
    def needs_memory(self) -> bool:
        """Return whether ``corrupt`` needs the same ``memory`` in every round of a run."""
        return False

    def byzantine(self) -> tuple[int, ...] | None:
        """Return the Byzantine workers if they are the same in every round, and None if not.

        >>> from phocas.attacks import Crash, Gambler
        >>> Crash(worker=3).byzantine(), Gambler().byzantine()
        ((3,), None)
        """
        return None

    def aimed_at(self, rule: Rule) -> Self:
        """Return the attack with ``"self"`` replaced by the rule of the run.

        >>> from phocas import Median
        >>> from phocas.attacks import parse_attack
        >>> print(parse_attack("alie:q=2,against=self").aimed_at(Median()))
        a-little-is-enough:q=2,against=(median)
        """
        names = self._unaimed()
        return replace(self, **dict.fromkeys(names, rule)) if names else self  # type: ignore[type-var]

    def _unaimed(self) -> list[str]:
        """Return the parameters that stand for the rule of the run."""
        every = [each.name for each in fields(self)]  # type: ignore[arg-type]  # every Spec is one
        return [
            name
            for name in every
            if isinstance(value := getattr(self, name), str) and value == SELF
        ]

    def check(
        self,
        m: int,
        d: int | None = None,
        dtype: Any = None,
        servers: int | None = None,
    ) -> None:
        """Raise ValueError if this attack is impossible on a system of that size.

        A size that is None is not checked here. ``corrupt`` checks it when the attack runs.

        Args:
            m: number of workers.
            d: number of columns.
            dtype: dtype of the values.
            servers: number of servers.
        """
        count(self.name, "m", m, 1)
        if d is not None:
            count(self.name, "d", d)
        if servers is not None:
            count(self.name, "servers", servers, 1)
        setting = Setting(m, d, None if dtype is None else kind_of(dtype), servers)
        for problem in self.problems(setting):
            raise ValueError(f"{self.name} needs {problem}")

    def problems(self, setting: Setting) -> Iterator[str]:
        """Yield a message for each requirement of this attack that the setting violates."""
        del setting
        yield from ()

    def corrupt(
        self,
        rows: Any,
        *,
        rng: np.random.Generator,
        round: int = 0,
        previous: Any = None,
        start: int = 0,
        d: int | None = None,
        memory: dict[str, np.ndarray] | None = None,
        reference: Any = None,
    ) -> Touched:
        """Corrupt an (m, d) array or CPU tensor in place and return which cells were touched.

        Args:
            rows: the gradients; row i is worker i.
            rng: the randomness of this round, ``attack_rng(seed, round)`` in an engine.
            round: the number of the round, from 0.
            previous: the uncorrupted rows of the round before, if the attack ``needs_previous``.
            start: the first column of the rows within the whole matrix, if they are a slice.
            d: the columns of the whole matrix, if the rows are a slice.
            memory: a mapping that the caller keeps between the rounds of a run, if the attack
                ``needs_memory``; empty before the first round.
            reference: the reference vector of the round, if the rule that the attack searches
                against needs one.
        """
        if names := self._unaimed():
            raise ValueError(
                f"{self} needs the rule of a run for {names[0]}=self: outside of training and audit"
                " call aimed_at(rule) first"
            )
        matrix = WritableMatrix(rows)
        whole = matrix.d if d is None else count(self.name, "d", d)
        start = count(self.name, "start", start)
        if start + matrix.d > whole:
            raise ValueError(
                f"{self.name} needs start + columns <= d: got {start} + {matrix.d} with d={whole}"
            )
        if matrix.d < whole and not self.sharded:
            raise ValueError(
                f"{self} needs the whole matrix: got {matrix.d} of {whole} columns, from {start}"
            )
        self.check(matrix.m, whole, matrix.kind.name)
        before = None if previous is None else WritableMatrix(previous)
        if before is not None and before.words.shape != matrix.words.shape:
            raise ValueError(
                f"{self.name} needs the previous rows in the same shape: got"
                f" {before.words.shape} with {matrix.words.shape}"
            )
        number = count(self.name, "round", round)
        with np.errstate(all="ignore"):  # attacks produce inf and NaN on purpose
            kept = {} if memory is None else memory
            return self._corrupt(
                Scene(rows, matrix, rng, number, before, start, whole, kept, reference)
            )

    def corrupt_labels(
        self,
        labels: Any,
        num_classes: int,
        *,
        rng: np.random.Generator,
        round: int = 0,
    ) -> Touched:
        """Corrupt the (m, n) labels of a round in place, before gradients are computed.

        Most attacks change no labels.
        """
        del num_classes, rng, round
        return Touched(tuple(labels.shape))

    @abstractmethod
    def _corrupt(self, scene: Scene) -> Touched: ...


class RowAttack(Attack):
    """An attack by q workers that control their whole rows.

    Args:
        q: number of Byzantine workers.
        who: which workers are Byzantine; ``"fixed"``: workers 0 to q - 1; ``"resampled"``: q
            workers drawn from the round's generator, before anything else is drawn.

    >>> from phocas.attacks import SignFlip, attack_rng
    >>> SignFlip(q=2).chosen(5, attack_rng(7, 0)).tolist()
    [0, 1]
    >>> SignFlip(q=2, who="resampled").chosen(5, attack_rng(7, 0)).tolist()
    [0, 2]
    """

    q: int
    who: Who
    needs_honest: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Add the fields q, first, and who, last, to a subclass that does not declare them."""
        super().__init_subclass__(**kwargs)
        known = getattr(cls, "__dataclass_fields__", {})
        declared = dict(inspect.get_annotations(cls))
        if "q" not in declared and "q" not in known:
            declared = {"q": int, **declared}
        if "who" not in declared and "who" not in known:
            declared["who"] = Who
            cls.who = "fixed"
        cls.__annotations__ = declared

    def __post_init__(self) -> None:
        normalise(self, q=count(self.name, "q", self.q))
        super().__post_init__()
        one_of(self.name, "who", self.who, get_args(Who))

    def problems(self, setting: Setting) -> Iterator[str]:
        """Yield a message if q > m, or if q = m and the attack needs honest rows."""
        yield from super().problems(setting)
        limit = setting.m - 1 if self.needs_honest else setting.m
        if self.q > limit:
            sign = "q < m, to leave an honest row" if self.needs_honest else "q <= m"
            yield (f"{sign}: got q={self.q} with m={setting.m} workers, the largest q is {limit}")

    def byzantine(self) -> tuple[int, ...] | None:
        """Return workers 0 to q - 1 if they are fixed, or None if they are drawn each round."""
        return tuple(range(self.q)) if self.who == "fixed" else None

    def chosen(self, m: int, rng: np.random.Generator) -> np.ndarray:
        """Return the Byzantine workers of a round in ascending order."""
        if self.who == "fixed":
            return np.arange(self.q)
        return np.sort(rng.choice(m, self.q, replace=False))

    @abstractmethod
    def fill(self, scene: Scene, rows: np.ndarray) -> None:
        """Write the Byzantine rows; ``rows`` holds at least one worker."""

    def _corrupt(self, scene: Scene) -> Touched:
        rows = self.chosen(scene.matrix.m, scene.rng)
        if self.q:
            self.fill(scene, rows)
        return scene.touched(rows)


class HonestRows:
    """The honest rows of a round, read a block of columns at a time.

    Args:
        matrix: the matrix of the round.
        bad: the Byzantine workers, in ascending order.

    >>> import numpy as np
    >>> from phocas.attacks.memory import WritableMatrix
    >>> rows = np.array([[9.0], [1.0], [3.0]])
    >>> honest = HonestRows(WritableMatrix(rows), np.array([0]))
    >>> honest.mean(), honest.workers
    (array([2.]), array([1, 2]))
    """

    def __init__(self, matrix: WritableMatrix, bad: np.ndarray) -> None:
        self.matrix = matrix
        q = len(bad)
        self.workers = np.setdiff1d(np.arange(matrix.m), bad)
        self.count = matrix.m - q
        fixed = q == 0 or bad[-1] == q - 1
        self.rows: Any = slice(q, None) if fixed else self.workers  # a slice is read without a copy

    def read(self, columns: slice = slice(None)) -> np.ndarray:
        """Return the honest values of these columns, perhaps as a view: do not write to it."""
        return self.matrix.read(self.rows, columns)

    def mean(self) -> np.ndarray:
        """Return the mean of the honest rows, in float64."""
        mean: np.ndarray = sum_rows(self.read().astype(np.float64)) / self.count
        return mean


class ColumnLie(RowAttack):
    """An attack in which all q rows are one vector, computed column by column from honest values.

    >>> import numpy as np
    >>> from phocas.attacks import InnerProduct
    >>> InnerProduct(q=1, epsilon=0.5).lie(np.array([[1.0, 4.0], [3.0, 8.0]]), m=3)
    array([-1., -3.])
    """

    needs_honest = True

    @abstractmethod
    def lie(self, honest: np.ndarray, m: int) -> np.ndarray:
        """Return the Byzantine values of a block of columns, given its honest rows."""

    def fill(self, scene: Scene, rows: np.ndarray) -> None:
        """Write the Byzantine values, one block of columns at a time."""
        matrix = scene.matrix
        honest = HonestRows(matrix, rows)

        def work(columns: slice) -> None:
            matrix.write(rows, self.lie(honest.read(columns), matrix.m), columns)

        run(work, column_blocks(matrix.d))
