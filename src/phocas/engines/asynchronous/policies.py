r"""What a server does with a row that comes alone, computed at parameters of a while ago.

Four ways, from their papers; what those leave open is said at each.

- :class:`Buffered`: BASGD, Yang and Li, *Buffered Asynchronous SGD for Byzantine Learning*, JMLR 24
  (2023).
- :class:`Zeno`: Zeno++, Xie, Koyejo and Gupta, *Robust Fully Asynchronous SGD*, ICML 2020; and its
  authors' program, github.com/xcgoner/iclr2020_zeno_async.
- :class:`Kardam`: Damaskinos et al., *Asynchronous Byzantine Machine Learning*, ICML 2018; and its
  authors' template, github.com/LPD-EPFL/kardam.
- :class:`AsynchronousMean`: every row is a step, as in plain asynchronous SGD. Survives nothing.

How stale a row is the server knows by itself: it remembers which parameters it gave to whom. What a
worker says about it is not asked.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from phocas.rules import Mean, Rule
from phocas.settings import nonnegative
from phocas.specs import Foreign, Spec, Table, count, loaded, normalise

_PIECE = 1 << 16  # values: three such pieces fit a cache of 1 MB
SILENT = 20
"""A worker is silent if so many times m rows have come from others since its last one."""


@dataclass(frozen=True, eq=False)
class Arrival:
    """A row that came."""

    worker: int
    row: torch.Tensor
    staleness: int
    """How many steps the server has taken since it gave the worker its parameters."""
    given: torch.Tensor | None
    """These parameters, where the policy asks for them."""


@dataclass(frozen=True, eq=False)
class Verdict:
    """What is done now: a step along a vector, or along the rows of the buffers, or none."""

    along: torch.Tensor | None
    """The vector; None where the rule is to reduce the buffers, or where a row was turned down."""
    workers: tuple[int, ...]
    """Whose rows were decided on."""
    rows: tuple[int, ...] = ()
    """The buffer of each, where the rule decides."""
    accepted: bool = True
    factor: float = 1.0
    """Of the learning rate."""


class Policy(Spec):
    """One way to train without waiting."""

    uses_rule: ClassVar[bool] = False
    """Whether the rule of the task reduces rows here; otherwise there is none."""
    needs_given: ClassVar[bool] = False
    """Whether arrivals must tell at which parameters they were computed."""

    def check(self, m: int, rule: Rule) -> None:
        """Raise if this is impossible with m workers and this rule."""
        if rule != Mean():
            raise ValueError(f"{self.name} decides by itself: leave rule={rule} out, of m={m} rows")

    @abstractmethod
    def begin(self, m: int, d: int, rows: torch.Tensor, lr: float) -> State:
        """Return the state before the first row; ``rows`` are those that the rule reduces."""

    def num_rows(self) -> int:
        """Return how many rows the rule reduces."""
        return 1


class State(ABC):
    """What a policy remembers from row to row."""

    news: tuple[str, ...] = ()
    """What happened besides, in words, with the last arrival."""

    @abstractmethod
    def receive(self, arrival: Arrival) -> Verdict | None:
        """Take a row; None says that more must come before anything is decided."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return what a checkpoint must keep: tensors that are changed in place."""
        return {}

    def load(self, kept: Mapping[str, torch.Tensor]) -> None:
        """Go on from a checkpoint."""
        for name, tensor in self.tensors().items():
            tensor.copy_(kept[name])


@dataclass(frozen=True)
class AsynchronousMean(Policy):
    """Step along every row, as soon as it comes: plain asynchronous SGD, which survives nothing.

    >>> parse_policy("mean")
    AsynchronousMean()
    """

    name = "mean"

    def begin(self, m: int, d: int, rows: torch.Tensor, lr: float) -> State:
        """Return a state that remembers nothing."""
        del m, d, rows, lr
        return _Mean()


class _Mean(State):
    def receive(self, arrival: Arrival) -> Verdict:
        return Verdict(arrival.row, (arrival.worker,))


@dataclass(frozen=True)
class Buffered(Policy):
    """Worker i feeds buffer i mod B with a running mean; the rule reduces the B rows when all are.

    At most q buffers are touched by q liars, so the rule must survive q wrong rows of B.

    A worker that has been silent while 20 m rows came is not waited for: if a buffer has none but
    silent workers, those who answer are dealt out over the buffers anew, and all buffers are
    emptied, so that no liar reaches two of them between two steps. (The paper reassigns after a
    time of waiting and leaves open how long, and what becomes of half-filled buffers.)

    Args:
        buffers: B, at most as many as there are workers.

    >>> from phocas import Phocas
    >>> Buffered(buffers=10).check(20, Phocas(b=5))
    Traceback (most recent call last):
        ...
    ValueError: Phocas needs 2b < m: got b=5 with m=10 ... (the rows are the 10 buffers)
    """

    name = "buffered"
    uses_rule = True

    buffers: int

    def __post_init__(self) -> None:
        normalise(self, buffers=count("buffered", "buffers", self.buffers, 1))

    def num_rows(self) -> int:
        """Return B."""
        return self.buffers

    def check(self, m: int, rule: Rule) -> None:
        """Ask for B <= m, and for a rule that B rows are enough for."""
        if self.buffers > m:
            raise ValueError(
                f"buffered needs a worker for each buffer: got buffers={self.buffers} with m={m}"
                f" workers, the largest number of buffers is {m}"
            )
        try:
            rule.check(self.buffers)
        except ValueError as error:
            raise ValueError(f"{error} (the rows are the {self.buffers} buffers)") from None

    def begin(self, m: int, d: int, rows: torch.Tensor, lr: float) -> State:
        """Return empty buffers."""
        del d, lr
        return _Buffers(m, rows)


class _Buffers(State):
    def __init__(self, m: int, rows: torch.Tensor) -> None:
        self.m = m
        self.rows = rows.zero_()
        self.counts = torch.zeros(len(rows), dtype=torch.int64)
        self.owner = torch.arange(m) % len(rows)
        self.last = torch.zeros(m, dtype=torch.int64)
        self.fed = torch.zeros(m, dtype=torch.bool)
        self.arrivals = torch.zeros((), dtype=torch.int64)

    def receive(self, arrival: Arrival) -> Verdict | None:
        self.news = ()
        if self.counts.all():  # they were reduced after the last row
            self._empty()
        self.arrivals += 1
        self.last[arrival.worker] = self.arrivals
        buffer = int(self.owner[arrival.worker])
        self.counts[buffer] += 1
        # A value that is not finite stays so in the mean: the rule is to see it.
        self.rows[buffer].lerp_(arrival.row, 1 / int(self.counts[buffer]))
        self.fed[arrival.worker] = True
        if self.counts.all():
            workers = torch.nonzero(self.fed).flatten().tolist()
            return Verdict(None, tuple(workers), tuple(self.owner[workers].tolist()))
        self._deal()
        return None

    def _deal(self) -> None:
        """Deal those who answer over the buffers, if there is a buffer that nobody feeds."""
        answers = self.arrivals - self.last <= SILENT * self.m
        fed = torch.zeros(len(self.rows), dtype=torch.bool)
        fed[self.owner[answers]] = True
        if fed.all():
            return
        there = torch.nonzero(answers).flatten()
        if len(there) < len(self.rows):
            raise SilenceError(
                f"only {len(there)} of {self.m} workers answer, too few for {len(self.rows)}"
                " buffers: use fewer of them"
            )
        silent = torch.nonzero(~answers).flatten().tolist()
        self.owner[there] = torch.arange(len(there)) % len(self.rows)
        self._empty()
        names = ", ".join(map(str, silent))
        self.news = (f"workers {names} are silent: the others were dealt over the buffers anew",)

    def _empty(self) -> None:
        self.counts.zero_()
        self.rows.zero_()
        self.fed.zero_()

    def tensors(self) -> dict[str, torch.Tensor]:
        names = ("rows", "counts", "owner", "last", "fed", "arrivals")
        return {name: getattr(self, name) for name in names}


class SilenceError(RuntimeError):
    """Too few workers answer for training to go on; what the last one sent is kept."""


@dataclass(frozen=True)
class Zeno(Policy):
    """Zeno++: accept a row if it goes down by the server's own gradient, at that one's length.

    With v the gradient over ``validation`` samples that the server holds and g the row, the step is
    along h, taken if the second line holds:

        h = g |v| / |g|
        gamma <v, h> - rho |h|^2 >= -gamma epsilon

    with gamma the learning rate. With epsilon = 0 this asks for an angle: a cosine of at least
    rho / gamma. Survives any number of liars, since nobody else is asked.

    rho = 0.001, epsilon = 0 and a gradient that is renewed every 10 rows are those of the authors'
    program. It renews after rows that came, and each time over other samples, of a set that no
    worker has; here v is computed anew after ``every`` accepted rows, without which nothing has
    moved, over all of the server's samples, which are drawn once from the training samples.

    rho is weighed against gamma, so a smaller step asks for a better angle. The rows of stale
    parameters want a small one: see docs/asynchronous.md.

    Args:
        validation: how many samples the server holds.
        rho: how much is asked of the angle.
        epsilon: how far uphill a row may lead.
        every: after how many accepted rows the server's gradient is computed anew.

    >>> parse_policy("zeno++:validation=64")
    Zeno(validation=64, rho=0.001, epsilon=0.0, every=10)
    """

    name = "zeno"
    aliases = ("zeno++",)

    validation: int = 128
    rho: float = 0.001
    epsilon: float = 0.0
    every: int = 10

    def __post_init__(self) -> None:
        normalise(
            self,
            validation=count("zeno", "validation", self.validation, 1),
            rho=nonnegative("zeno", "rho", self.rho),
            epsilon=nonnegative("zeno", "epsilon", self.epsilon),
            every=count("zeno", "every", self.every, 1),
        )

    def begin(self, m: int, d: int, rows: torch.Tensor, lr: float) -> State:
        """Return a state without a validation gradient yet."""
        del m
        return ZenoState(self, rows.new_zeros(d), lr)


class ZenoState(State):
    """The server's own gradient, which an engine computes when it is :attr:`due`."""

    def __init__(self, policy: Zeno, own: torch.Tensor, lr: float) -> None:
        self.policy = policy
        self.own = own
        self.lr = lr
        self.accepted = torch.zeros((), dtype=torch.int64)
        self.computed = torch.full((), -1, dtype=torch.int64)

    @property
    def due(self) -> bool:
        """Whether ``own`` must be computed anew before the next row is judged."""
        stale = int(self.accepted - self.computed)
        return int(self.computed) < 0 or stale >= self.policy.every

    def renewed(self) -> None:
        """Say that ``own`` is that of the current parameters."""
        self.computed.copy_(self.accepted)

    def receive(self, arrival: Arrival) -> Verdict:
        """Judge a row by its angle to the server's own gradient."""
        who = (arrival.worker,)
        length = float(torch.linalg.vector_norm(arrival.row))
        own = float(torch.linalg.vector_norm(self.own))
        if not 0 < length < math.inf or not 0 < own < math.inf:
            return Verdict(None, who, accepted=False)
        scale = own / length
        score = self.lr * scale * float(self.own @ arrival.row) - self.policy.rho * own**2
        if not score >= -self.lr * self.policy.epsilon:
            return Verdict(None, who, accepted=False)
        self.accepted += 1
        return Verdict(arrival.row * scale, who)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the gradient and how old it is."""
        return {"own": self.own, "accepted": self.accepted, "computed": self.computed}


@dataclass(frozen=True)
class Kardam(Policy):
    """Kardam: accept a row if it changed no faster than rows do, from nobody who sends too many.

    Worker p's row and its last one, g and g', with the parameters x and x' they were computed at,
    give its rate of change:

        K_p = |g - g'| / |x - x'|

    The row is accepted if K_p is at most the (m - b)/m quantile of the workers' latest, and if
    among 2b + 1 rows accepted in a row no b workers have sent more than b (the frequency filter).
    Needs m > 3b. Steps are damped by exp(-damping staleness).

    Left open is what is done with a worker's first row, which has none to be compared to: here it
    is only remembered. Nor is it said what K is of parameters that have not moved: here such rows
    are judged by how much they changed, among each other. A sign that is always flipped changes as
    fast as an honest row, and is accepted.

    The authors' template is another filter: it compares a row with the last one accepted from
    anybody, against two thirds of the workers' largest of 25 coefficients, accepts any row after m
    were refused, has no frequency filter, and damps with 0.2.

    Args:
        b: how many workers may lie, 3b < m.
        damping: how much less a stale row counts.

    >>> Kardam(b=7).check(20, Mean())
    Traceback (most recent call last):
        ...
    ValueError: kardam needs m > 3b: got b=7 with m=20 workers, the largest b is 6
    """

    name = "kardam"
    needs_given = True

    b: int
    damping: float = 0.0

    def __post_init__(self) -> None:
        normalise(
            self,
            b=count("kardam", "b", self.b),
            damping=nonnegative("kardam", "damping", self.damping),
        )

    def check(self, m: int, rule: Rule) -> None:
        """Ask for m > 3b."""
        super().check(m, rule)
        if m <= 3 * self.b:
            raise ValueError(
                f"kardam needs m > 3b: got b={self.b} with m={m} workers, the largest b is"
                f" {(m - 1) // 3}"
            )

    def begin(self, m: int, d: int, rows: torch.Tensor, lr: float) -> State:
        """Return a state that has seen nobody."""
        del lr
        return _Kardam(self, m, rows.new_zeros(m, d))


class _Kardam(State):
    def __init__(self, policy: Kardam, m: int, like: torch.Tensor) -> None:
        self.policy = policy
        self.rows = like
        self.places = torch.zeros_like(like)
        self.seen = torch.zeros(m, dtype=torch.bool)
        self.rates = torch.full((m,), math.nan, dtype=torch.float64)
        self.changes = self.rates.clone()
        self.recent = torch.full((2 * policy.b,), -1, dtype=torch.int64)

    def receive(self, arrival: Arrival) -> Verdict:
        i = arrival.worker
        assert arrival.given is not None
        first = not self.seen[i]
        moved = _replace(self.places[i], arrival.given)
        changed = _replace(self.rows[i], arrival.row)
        self.seen[i] = True
        refused = Verdict(None, (i,), accepted=False)
        if first:
            return refused
        latest = self.rates if moved else self.changes
        rate = changed / moved if moved else changed
        latest[i] = math.inf if math.isnan(rate) else rate
        b = self.policy.b
        known = np.sort(latest[~latest.isnan()].numpy())
        # Until all are known, b of those who are may lie: the (known - b)-th is the limit.
        enough = len(known) > 2 * b
        if not (enough and rate <= known[len(known) - b - 1] < math.inf and self._frequent(i)):
            return refused
        if b:
            self.recent[:-1] = self.recent[1:].clone()
            self.recent[-1] = i
        return Verdict(arrival.row, (i,), factor=math.exp(-self.policy.damping * arrival.staleness))

    def _frequent(self, worker: int) -> bool:
        """Say whether the b who sent most of the last 2b + 1, this one included, sent at most b."""
        b = self.policy.b
        lately = [each for each in self.recent.tolist() if each >= 0] + [worker]
        counts = np.sort(np.bincount(lately))[::-1]
        return not b or int(counts[:b].sum()) <= b

    def tensors(self) -> dict[str, torch.Tensor]:
        names = ("rows", "places", "seen", "rates", "changes", "recent")
        return {name: getattr(self, name) for name in names}


def _replace(old: torch.Tensor, new: torch.Tensor) -> float:
    """Put a vector in another's place, piece by piece in a cache, and return how far it moved."""
    squares = 0.0
    for before, after in zip(torch.split(old, _PIECE), torch.split(new, _PIECE), strict=True):
        squares += float(torch.linalg.vector_norm(after - before)) ** 2
        before.copy_(after)
    return math.sqrt(squares)


POLICIES: Table[Policy] = Table("policy", [Buffered, Zeno, Kardam, AsynchronousMean], base=Policy)


def parse_policy(text: str) -> Policy:
    """Read a policy; ``buffers=10`` is short for ``buffered:buffers=10``.

    Args:
        text: the policy as on the command line.

    >>> parse_policy("buffers=10"), parse_policy("zeno:validation=64").validation
    (Buffered(buffers=10), 64)
    """
    policy: Policy = loaded(read_policy(text))
    return policy


def read_policy(text: str) -> Policy | Foreign:
    """Read a policy and import nothing: what is the user's own comes back as text."""
    short = text.strip().startswith("buffers=")
    return POLICIES.read(f"buffered:{text.strip()}" if short else text)
