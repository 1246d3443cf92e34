"""Audit a rule: run every attack against it and check its guarantees.

Errors are measured in honest standard deviations. One standard deviation is sqrt(V), where V is the
sum over columns of the variance of the honest values, the paper's E|G - g|^2. It is the root mean
square distance of an honest worker's row from the honest mean. An honest value is a cell that the
attack did not touch.

A rule *guarantees* to survive an attack that touches no more rows, or no more values per column,
than ``rule.tolerates`` returns. It *holds* if the root mean square distance of its result from the
honest mean, over the rounds, is within a limit. The limit is the paper's bound sqrt(Delta) if there
is one, and ``rule.error_bound`` otherwise. A rule without an error bound, such as a function with a
``b``, only claims what it tolerates: its limit is ``LIMIT``. An attack beyond the guarantee is also
tried, with ``LIMIT`` as the limit. Failing it breaks no guarantee. A rule *breaks* if its distance
exceeds the limit or its result is not finite. A rule or an attack that raises an error, or that
takes too long, costs its own trial only, which has the error.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from phocas.attacks.base import Attack, attack_rng
from phocas.attacks.fang import Fang
from phocas.attacks.field import ConstantRows, InnerProduct, SignFlip
from phocas.attacks.geometry import Mimic, MinMax, MinSum
from phocas.attacks.line_search import OptimalALIE, OptimalInnerProduct
from phocas.attacks.machine import Crash, RandomCells, SilentCorruption, Straggler, Stuck
from phocas.attacks.memory import host_array, kind_of
from phocas.attacks.paper import BitFlip, Gambler, Gaussian, Omniscient
from phocas.attacks.table import ATTACKS
from phocas.attacks.touched import Touched
from phocas.attacks.worst import ALittleIsEnough, WorstCase
from phocas.provenance import describe_error
from phocas.rules import RULES, Rule
from phocas.rules.inputs import is_tensor
from phocas.specs import count, positive

LIMIT = 2.0
"""Limit, in honest standard deviations, for attacks that the rule does not guarantee to survive."""

_UNTOLERATED = 6
"""Byzantine workers against a rule that tolerates none: those of the paper's experiments."""

Source = Literal["paper", "rule", "claim", "none"]
TIMEOUT = 120.0
"""Seconds after which the trial of one attack ends."""


@dataclass(frozen=True)
class Trial:
    """The result of one attack on a rule; distances are in honest standard deviations.

    Attributes:
        attack: the attack's spec text.
        rows: largest number of rows that the attack touched in a round.
        per_column: largest number of values that the attack touched in one column.
        distance: root mean square distance of the rule's result from the honest mean.
        inner_product: mean inner product of the rule's result with the honest mean.
        limit: largest ``distance`` with which the rule holds.
        source: origin of the limit: ``"paper"``, ``"rule"``, ``"claim"`` for a rule that claims its
            tolerance without a bound, or ``"none"`` for ``LIMIT``.
        promised: whether the rule guarantees, or claims, to survive the attack.
        seconds: duration of the trial.
        megabytes: the most memory that attack and rule allocated at a time in the first round, by
            Python and NumPy; memory of torch and of compiled code is not counted.
        error: the error of the rule or of the attack, with its file and line; else None. The
            trial then has the distance inf.

    >>> from phocas.attacks.audit import audit
    >>> (trial,) = audit("mean", byzantine=1, dims=50, attacks=["constant:q=1,value=inf"])
    >>> trial.holds, trial.promised, trial.verdict
    (False, False, 'breaks')
    """

    attack: str
    rows: int
    per_column: int
    distance: float
    inner_product: float
    limit: float
    source: Source
    promised: bool
    seconds: float = 0.0
    megabytes: float = 0.0
    error: str | None = None

    @property
    def holds(self) -> bool:
        """Return whether the rule's result stayed within the limit."""
        return self.error is None and self.distance <= self.limit

    @property
    def broken_promise(self) -> bool:
        """Return whether the rule broke under an attack that it guarantees or claims to survive."""
        return self.promised and not self.holds

    @property
    def verdict(self) -> str:
        """Return the result in words."""
        if self.error is not None:
            return "fails"
        if self.holds:
            return "holds"
        if self.promised and self.source == "claim":
            return "CLAIM BROKEN"
        return "GUARANTEE BROKEN" if self.promised else "breaks"


def audit(
    rule: Rule | str,
    rows: Any = None,
    *,
    num_workers: int = 20,
    byzantine: int | None = None,
    dims: int = 20_000,
    attacks: Iterable[Attack | str] | None = None,
    rounds: int = 3,
    signal: float = 1.0,
    seed: int = 0,
    timeout: float = TIMEOUT,
    watch: Callable[[int, Sequence[Attack]], None] = lambda *_: None,
) -> list[Trial]:
    """Run attacks by ``byzantine`` workers against a rule and return one trial per attack.

    Args:
        rule: the rule, or its spec text.
        rows: an (m, d) matrix of honest gradients; None draws a matrix for each round.
        num_workers: m, if the matrix is drawn.
        byzantine: q, the number of Byzantine workers, or of Byzantine values per column; None is
            that of :func:`usual_byzantine`.
        dims: d, if the matrix is drawn.
        attacks: attacks to run, as values or spec texts; None runs all of ``suite``.
        rounds: number of rounds to average over.
        signal: length of the true gradient in honest standard deviations, if the matrix is drawn.
        seed: seed of the drawn matrices and of the attacks.
        timeout: seconds after which a trial ends. Python code is interrupted, in the main thread
            on Linux and macOS; a call of compiled code ends by itself.
        watch: called before each trial with its index and with all attacks.

    >>> trials = audit("phocas:b=2", num_workers=7, byzantine=2, dims=50, rounds=1)
    >>> len(trials) > 20, [trial.attack for trial in trials if trial.broken_promise]
    (True, [])
    """
    rule = RULES.of(rule, "audit")
    if rule.needs_reference == "trusted":
        raise ValueError(
            f"{rule} needs trusted samples, which an audit has not: use it in training"
        )
    count("audit", "rounds", rounds, 1)
    matrices = _Matrices(rows, num_workers, dims, positive("audit", "signal", signal), seed)
    m, d = matrices.shape
    rule.check(m)
    wanted = usual_byzantine(rule, m) if byzantine is None else byzantine
    q = count("audit", "byzantine", wanted)
    if 2 * q >= m:
        raise ValueError(
            f"audit needs an honest majority, 2 * byzantine < workers: got byzantine={q} with"
            f" {m} workers, the largest is {(m - 1) // 2}"
        )
    chosen = (
        suite(rule, m, d, q, matrices.dtype)
        if attacks is None
        else [ATTACKS.of(attack, "audit").aimed_at(rule) for attack in attacks]
    )
    for attack in chosen:
        if attack.acts_on_data:
            raise ValueError(
                f"{attack} acts on data, not on rows, so that an audit cannot try it: use it in"
                " training"
            )
        attack.check(m, d, matrices.dtype)
    limit = positive("audit", "timeout", timeout)
    trials = []
    for index, attack in enumerate(chosen):
        watch(index, chosen)
        trials.append(_try(rule, attack, matrices, rounds, seed, limit))
    return trials


def usual_byzantine(rule: Rule, m: int) -> int:
    """Return the q of an audit that is given none: the number of rows that the rule tolerates.

    For a rule that tolerates none it is 6, or fewer where 6 of m workers are half or more.

    Args:
        rule: the rule.
        m: the number of workers.

    >>> from phocas import Mean, TrimmedMean
    >>> usual_byzantine(TrimmedMean(b=2), 11)
    2
    >>> usual_byzantine(Mean(), 20), usual_byzantine(Mean(), 7)
    (6, 3)
    """
    return min(rule.tolerates(m).rows or _UNTOLERATED, max(1, (m - 1) // 2))


def suite(rule: Rule, m: int, d: int, q: int, dtype: Any) -> list[Attack]:
    """Return every attack on a matrix, with parameters that fit its size and dtype.

    If d is small, the gambler attack gets fewer servers and a higher probability, so that it hits
    about five values of each worker, as in the paper's networks. LabelFlip is omitted because it
    acts on data, before there is a matrix.

    Args:
        rule: the rule under audit, for the worst-case attacks against it.
        m: number of workers.
        d: number of columns.
        q: number of Byzantine workers.
        dtype: dtype of the values.

    >>> from phocas import Median
    >>> attacks = suite(Median(), 7, 50, 2, np.float32)
    >>> str(attacks[0]), len(attacks)
    ('gaussian:q=2', 27)
    """
    kind = kind_of(dtype)
    servers = max(1, min(20, d // 500))
    gamble = min(0.05, max(0.0005, 5 * servers / d))
    attacks: list[Attack] = [
        Gaussian(q),
        Omniscient(q),
        BitFlip(columns=min(1000, d), bits=kind.paper_bits()),
        Gambler(servers=servers, probability=gamble),
        SignFlip(q),
        SignFlip(q, scale=100.0),
        InnerProduct(q),
        InnerProduct(q, epsilon=100.0),
        ALittleIsEnough(q),
        ALittleIsEnough(q, against=rule),
        OptimalALIE(q, against=rule),
        OptimalInnerProduct(q, against=rule),
        Fang(q),
        *([Fang(q, target="krum")] if 2 * q + 2 < m else []),
        Mimic(q),
        MinMax(q),
        MinSum(q),
        ConstantRows(q, 0.0),
        ConstantRows(q, math.nan),
        ConstantRows(q, math.inf),
        Crash(worker=0),
        Straggler(q),
        Stuck(worker=0, bits=(kind.bits - 1,)),
        RandomCells(rate=0.001),
        SilentCorruption(worker=0),
        WorstCase(rule, q),
        WorstCase(rule, q, objective="descent"),
    ]
    if not rule.columnwise and q * d >= m:
        attacks.append(WorstCase(rule, q, model="cells"))
    return attacks


def yardstick(rule: Rule, m: int, touched: Touched) -> tuple[float, Source] | None:
    """Return the guaranteed limit of the rule's error, and the source of the guarantee.

    The error is the distance of the result from the honest mean, in standard deviations of the
    honest rows. The source is ``paper`` (a theorem), ``rule`` (``rule.error_bound``) or ``claim``
    (the rule claims its tolerance without a bound, and the limit is ``LIMIT``). Return
    None if the rule has no guarantee for so many touched cells.

    Args:
        rule: the rule.
        m: number of workers.
        touched: the cells that an attack touched.

    >>> from phocas import Median
    >>> touched = Touched((5, 2), whole_rows=np.array([0]))
    >>> yardstick(Median(), 5, touched)
    (2.449489742783178, 'paper')
    >>> yardstick(Median(), 5, Touched((5, 2), whole_rows=np.arange(3)))
    """
    tolerance = rule.tolerates(m)
    q = touched.most_per_column
    if q > tolerance.values:
        q = len(touched.rows)
        if q > tolerance.rows:
            return None
    delta, error_bound = rule.bound(m, q), rule.error_bound(m, q)
    if delta is not None:
        return math.sqrt(delta), "paper"
    if error_bound is None:
        return None
    return (error_bound, "rule") if rule.proven else (LIMIT, "claim")


class _Matrices:
    """The honest matrix of each round: the given matrix, or a new draw around one gradient."""

    def __init__(self, rows: Any, m: int, d: int, signal: float, seed: int) -> None:
        self.rows = rows
        if rows is None:
            self.shape = count("audit", "num_workers", m, 1), count("audit", "dims", d, 1)
            self.dtype: Any = np.float32
            direction = np.random.default_rng([seed, 1]).normal(size=d)
            self.gradient = direction * (signal * math.sqrt(d) / np.linalg.norm(direction))
            self.seed = seed
        else:
            if not is_tensor(rows) and not isinstance(rows, np.ndarray):
                raise TypeError(f"audit needs an array or a tensor: got {type(rows).__name__}")
            if len(rows.shape) != 2:
                raise ValueError(
                    f"audit needs an (m, d) matrix, row i from worker i: got shape {rows.shape}"
                )
            self.shape, self.dtype = tuple(rows.shape), rows.dtype
            kind_of(rows.dtype)
            if not np.isfinite(host_array(rows)).all():
                raise ValueError("audit needs honest rows, all finite: got NaN or inf among them")

    def honest(self, t: int) -> Any:
        """Return a new copy of the honest rows of round t."""
        if self.rows is None:
            noise = np.random.default_rng([self.seed, 2, t]).normal(size=self.shape)
            return (self.gradient + noise).astype(np.float32)
        return self.rows.clone() if is_tensor(self.rows) else self.rows.copy()

    def previous(self, t: int) -> Any:
        """Return the rows of the previous round; a given matrix is shifted by one worker."""
        if self.rows is None:
            return self.honest(t - 1)
        order = [*range(1, self.shape[0]), 0]
        return self.rows[order]


def _try(
    rule: Rule, attack: Attack, matrices: _Matrices, rounds: int, seed: int, timeout: float
) -> Trial:
    squares, inner, most_rows, most_per_column = [], [], 0, 0
    kept: dict[str, Any] = {"memory": {}} if attack.needs_memory else {}
    limits: list[tuple[float, Source] | None] = []
    m = matrices.shape[0]
    began, failure = time.perf_counter(), None
    memory = _Memory()
    try:
        with _time_limit(timeout):
            for t in range(1, rounds + 1):
                rows = matrices.honest(t)
                before = host_array(rows)
                previous = matrices.previous(t) if attack.needs_previous else None
                rng = attack_rng(seed, t)
                with memory if t == 1 else contextlib.nullcontext():
                    touched = attack.corrupt(rows, rng=rng, round=t, previous=previous, **kept)
                    limits.append(yardstick(rule, m, touched))
                    most_rows = max(most_rows, len(touched.rows))
                    most_per_column = max(most_per_column, touched.most_per_column)
                    result = host_array(rule(rows, rng=np.random.default_rng([seed, 3, t])))
                mean, variance = honest_statistics(before, touched)
                with np.errstate(all="ignore"):
                    squares.append(_ratio(float(np.square(result - mean).sum()), variance))
                    inner.append(float(np.multiply(result, mean).sum()))
    except Exception as error:  # noqa: BLE001  # it costs this trial, which says so
        failure = describe_error(error)
    guaranteed = [limit for limit in limits if limit is not None]
    all_guaranteed = 0 < len(guaranteed) == len(limits)
    no_guarantee: tuple[float, Source] = (LIMIT, "none")
    limit, source = max(guaranteed) if all_guaranteed else no_guarantee
    return Trial(
        attack=str(attack),
        rows=most_rows,
        per_column=most_per_column,
        distance=math.inf if failure else math.sqrt(np.mean(squares)),
        inner_product=math.nan if failure else float(np.mean(inner)),
        limit=limit,
        source=source,
        promised=all_guaranteed,
        seconds=time.perf_counter() - began,
        megabytes=memory.peak / 1e6,
        error=failure,
    )


class _Memory:
    """The most bytes that a block allocates at a time; tracing slows Python code down."""

    peak = 0

    def __enter__(self) -> None:
        self._ours = not tracemalloc.is_tracing()
        if self._ours:
            tracemalloc.start()
        tracemalloc.reset_peak()
        self._before = tracemalloc.get_traced_memory()[0]

    def __exit__(self, *_: object) -> None:
        self.peak = max(0, tracemalloc.get_traced_memory()[1] - self._before)
        if self._ours:
            tracemalloc.stop()


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block after some seconds, if a signal can interrupt it."""
    alarms = hasattr(signal, "setitimer")
    if not alarms or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise TimeoutError(f"no result within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)  # again, if the code catches the error
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _ratio(square: float, variance: float) -> float:
    if math.isnan(square):
        return math.inf
    if variance == 0:
        return 0.0 if square == 0 else math.inf
    return square / variance


def honest_statistics(rows: np.ndarray, touched: Touched) -> tuple[np.ndarray, float]:
    """Return the honest mean of each column, and V, the sum of the columns' variances.

    Only untouched cells are honest. A column without any counts with all its values from before the
    attack.

    Args:
        rows: the matrix before the attack.
        touched: the cells that the attack touched.

    >>> rows = np.array([[9.0], [1.0], [3.0]])
    >>> honest_statistics(rows, Touched((3, 1), whole_rows=np.array([0])))
    (array([2.]), 2.0)
    """
    honest = ~touched.mask()
    honest[:, ~honest.any(axis=0)] = True
    size = honest.sum(axis=0)
    mean = np.where(honest, rows, 0).sum(axis=0) / size
    squares = np.where(honest, np.square(rows - mean), 0).sum(axis=0)
    return mean, float((squares / np.maximum(size - 1, 1)).sum())
