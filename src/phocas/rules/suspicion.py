"""Who is wrong beyond doubt, and who is merely unusual."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from phocas.rules.bets import VIEWS, Bets, begun_by
from phocas.rules.sampling import Sample, astray, products, views
from phocas.specs import count

Floats = npt.NDArray[np.float64]

FALSE_ALARM = 1e-3
"""The chance that any honest worker is ever accused, in a run of any length."""

_RECENT = 0.8  # memory of dropped shares, from one round to the next
_DEVIATIONS = 6.0  # median deviations above the median: far outside of what noise does
_VISIBLE = 0.05  # a share that is larger by less than this is no news
_STEPS_A_DOUBLING = 4  # how finely distances are told apart when a worker is compared to its past
_DOUBLINGS = 8
_FIRST = 20  # rounds until there is a past to be compared to
_WATCHFUL = 64  # rounds at the beginning, of which none is left out
_EVERY = 4  # later on, one round in so many is looked at as long as nothing stirs
_STIRRED = 0.5  # odds of a worker that is then watched in every round
_BESIDE_COURSE, _ON_COURSE = (0.6, 0.1), (0.3,)  # parts of the money, where there is a course
_ABSURD = 1e6  # values so many times the usual size are nobody's gradient


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known against one worker."""

    worker: int
    odds: float
    """What one coin would have won in fair bets if it were honest; accused at m / FALSE_ALARM."""
    since: int | None
    """The round (from 1) in which it was accused."""
    dropped: float
    """The mean share of its values that the rule left out."""
    changed: float
    """The same odds, for bets that it has not changed since it began."""


def stand_out(shares: Floats) -> npt.NDArray[np.bool_]:
    """Tell whose share is far above that of most."""
    half = len(shares) // 2
    middle = np.sort(shares)[half]
    spread = np.sort(np.abs(shares - middle))[half]
    return np.asarray(shares > middle + max(_VISIBLE, _DEVIATIONS * spread))


class Suspicion:
    r"""Accuse workers whose rows are farther from others than chance allows, and nobody else.

    Accusations rest on distances between rows, which liars cannot bend: :class:`Bets` has the bets
    and the proof. With ``course`` they rest on the angle to a way known beforehand as well, which
    shows who pulls back even where gradients are mostly noise. Worker i is a suspect once the bets
    against it have won m / alpha, alpha = 0.001.

    **Guarantee.** If at most b workers lie, and honest rows are independent draws of one kind in
    every round, given all rounds before, then with probability at least 1 - alpha *no* honest
    worker is *ever* accused, however long the run, whatever the liars send and whatever they know.
    (Each of at most m honest workers has probability alpha / m.) Who was accused once stays so.

    Of 20 workers with b = 6, one liar is named after 5 rounds, three after 10, six after 19; one
    that begins to lie in round 400 after 5 to 9, if every round is observed; one that lies grossly
    in a fifth of the rounds after about 30. Who hides among the honest (a little is enough) is not
    named.

    - Naming q liars needs q < m - b - 1. With m - b - 1 < 2, as with b = 1 of 3, nobody can be
      named, nor with b = 0. Not knowing b, take the largest for which anybody can be, the default:
      more liars are then allowed for, and one of 20 is named after 6 rounds.
    - Honest workers that hold different data (Dirichlet, by label) are not of one kind. There a
      suspect is a worker that differs from the others, and need not be wrong.
    - Rows that remember the rounds before are not independent. Of a worker's own ``momentum``, what
      is new in each round is (1 - momentum) times a gradient, and that alone is observed.
    - A worker whose rows do not come is as far as can be, and is named like any other fault.

    :meth:`unusual` are early warnings and a picture. Liars can bring them upon an honest worker.

    >>> rng = np.random.default_rng(0)
    >>> watch = Suspicion(num_workers=10, b=2)
    >>> for _ in range(12):
    ...     rows = rng.normal(size=(10, 50))
    ...     rows[3] *= 2
    ...     watch.observe(rows)
    >>> watch.suspects(), watch.evidence()[3].since
    ((3,), 6)
    """

    def __init__(
        self,
        num_workers: int,
        b: int | None = None,
        servers: Sequence[tuple[int, int]] = (),
        momentum: float = 0.0,
        *,
        course: bool = False,
    ) -> None:
        self.num_workers = m = count("Suspicion", "num_workers", num_workers, minimum=1)
        self.b = max(0, (m - 3) // 2) if b is None else count("Suspicion", "b", b)
        self.bets = Bets(m, min(self.b, m - 1), _BESIDE_COURSE if course else VIEWS)
        self.on_course = Bets(m, min(self.b, m - 1), _ON_COURSE, course=True) if course else None
        self.past = Past(m)
        self.odds = np.zeros(m)
        self.since = np.zeros(m)
        self.judged = 0
        self.total = np.zeros(m)
        self.recent = np.zeros(m)
        self.rounds = 0
        self.bounds = servers
        self.absurd = np.zeros((len(servers), m))
        self.size = np.zeros(1)
        self.momentum = momentum
        self.kept = np.zeros(0)
        self.stirred = False

    def wants(self) -> bool:
        """Say whether the next round is to be observed; if not, :meth:`rest`.

        Every round is at the beginning, with momentum, and while someone who is not accused has
        odds above a half; otherwise one in four. This depends on the past alone, so that bets stay
        fair.
        """
        early = self.judged < _WATCHFUL or bool(self.momentum)
        return early or self.stirred or self.judged % _EVERY == 0

    def rest(self) -> None:
        """Let a round pass unobserved."""
        self.judged += 1

    def skip(self) -> None:
        """Count a round whose evidence is void: nothing that is known changes."""
        self.total += self.shares()
        self.rounds += 1
        self.judged += 1

    def observe(
        self,
        values: npt.ArrayLike,
        sample: Sample | None = None,
        following: npt.ArrayLike | None = None,
        course: npt.ArrayLike | None = None,
    ) -> None:
        """Take the rows of one round, (m, columns), or the values of a sample of their columns.

        Which columns are sampled must not depend on the rows. Where rows have a momentum, only what
        is new in them counts: ``following`` are the values in this round of the columns that are
        observed in the next. ``course`` is a way in these columns that was known before the round.
        """
        seen = np.asarray(values, np.float64)
        if seen.ndim != 2 + (sample is not None) or len(seen) != self.num_workers:
            raise ValueError(
                f"there must be a row for each of {self.num_workers} workers: got shape"
                f" {seen.shape}"
            )
        if self.momentum and self.kept.size:
            with np.errstate(invalid="ignore"):
                seen = seen - self.momentum * self.kept
        if following is not None:
            self.kept = np.asarray(following, np.float64)
        apart = views(products(seen))
        odds = self.bets.observe(apart)
        if self.on_course is not None:
            way = np.zeros(seen.shape[1:]) if course is None else np.asarray(course, np.float64)
            odds = odds + self.on_course.observe(astray(seen, way)[None, None])
        self.judge(odds[None])
        self.past.observe(apart[0])
        if sample is not None and self.bounds:
            self._blame_servers(seen, sample)

    def judge(self, odds: Floats, liars: int = 0) -> None:
        """Take what each holder of columns has won in its bets on its own columns, (holders, m).

        So many of the holders may lie about it. The mean of the others' smallest is at most the
        mean over honest holders, and what is said of :class:`Bets` holds for it.
        """
        kept = np.sort(np.where(odds >= 0, odds, 0.0), axis=0)[: max(1, len(odds) - liars)]
        self.odds = kept.mean(axis=0)
        self.judged += 1
        if self.b:
            accused = (self.odds >= self.num_workers / FALSE_ALARM) & (self.since == 0)
            self.since[accused] = self.judged
        self.stirred = bool((self.odds[self.since == 0] > _STIRRED).any())

    def update(self, dropped: npt.ArrayLike) -> None:
        """Take the shares that a rule dropped of each worker in one round."""
        shares = np.asarray(dropped, np.float64)
        memory = _RECENT if self.rounds else 0.0
        self.recent = memory * self.recent + (1 - memory) * shares
        self.total += shares
        self.rounds += 1

    def suspects(self) -> tuple[int, ...]:
        """Return the workers that have been accused."""
        return tuple(np.flatnonzero(self.since).tolist())

    def unusual(self) -> tuple[int, ...]:
        """Return who was lately dropped far more than most, or has drifted away from the others.

        Without a guarantee, and liars who place themselves well can bring an honest worker here.
        """
        dropped = stand_out(self.recent)
        changed = self.past.money >= self.num_workers / FALSE_ALARM
        return tuple(np.flatnonzero(dropped | changed).tolist())

    def servers(self) -> tuple[int, ...]:
        """Return the servers in whose columns more than b workers have sent absurd values.

        A run of values is absurd if it is not finite or a million times the usual size, and if its
        worker sent none to at least half of the servers. The usual size is the median of a round,
        and the largest of these medians so far: gradients of workers that have learned their own
        data vanish, and another worker's gradient is not absurd because of that. At most b workers
        lie, so it is not they: what is between the workers and this server is wrong. That holds if
        honest values are never absurd; it is not a matter of chance.
        """
        return tuple(np.flatnonzero(self.absurd.sum(axis=1) > self.b).tolist())

    def _blame_servers(self, values: Floats, sample: Sample) -> None:
        with np.errstate(all="ignore"):
            sizes = np.sqrt(np.einsum("mrw,mrw->mr", values, values))  # NaN stays NaN
        usual = np.partition(sizes.ravel(), sizes.size // 2)[sizes.size // 2]
        if not usual < math.inf:
            return
        np.maximum(self.size, usual, out=self.size)
        wild = ~(sizes <= _ABSURD * self.size)
        if not wild.any() or not self.size:
            return
        owners = sample.owners(self.bounds)
        found = np.zeros(self.absurd.shape, bool)
        for server in set(owners.tolist()) - {-1}:
            found[server] = wild[:, owners == server].any(axis=1)
        found &= found.sum(axis=0) <= len(found) / 2
        self.absurd[found] = 1

    def evidence(self) -> tuple[Evidence, ...]:
        """Return what is known against each worker."""
        return tuple(
            Evidence(
                worker, float(odds), int(self.since[worker]) or None, float(dropped), float(changed)
            )
            for worker, (odds, dropped, changed) in enumerate(
                zip(self.odds, self.shares(), self.past.money, strict=True)
            )
        )

    def shares(self) -> Floats:
        """Return the mean dropped share of each worker."""
        return self.total / max(1, self.rounds)

    def state(self) -> dict[str, Floats]:
        """Return what a checkpoint must keep."""
        return {
            "money": self.bets.money,
            "past": self.past.seen,
            "changed": self.past.money,
            "odds": self.odds,
            "since": self.since,
            "total": self.total,
            "recent": self.recent,
            "absurd": self.absurd,
            "size": self.size,
            "kept": self.kept,
            "usual": self.bets.usual,
            **(
                {}
                if self.on_course is None
                else {"course": self.on_course.money, "heading": self.on_course.usual}
            ),
            "numbers": np.array(
                [self.bets.rounds, self.judged, self.rounds, self.stirred], np.float64
            ),
        }

    def load_state(self, state: dict[str, Floats]) -> None:
        """Go on from a checkpoint."""
        state = {"size": np.zeros(1), **state}  # version 0.2 did not save it
        self.kept = np.array(state["kept"])
        for name, own in self.state().items():
            if state[name].shape != own.shape:
                raise ValueError(
                    f"a checkpoint of {len(state['total'])} workers and {len(state['absurd'])}"
                    f" servers cannot be used with {self.num_workers} and {len(self.absurd)},"
                    " nor with another b"
                )
            np.copyto(own, state[name])
        numbers = state["numbers"].astype(int).tolist()
        self.bets.rounds, self.judged, self.rounds, stirred = numbers
        self.stirred = bool(stirred)
        self.past.rounds = self.bets.rounds
        if self.on_course is not None:
            self.on_course.rounds = self.bets.rounds

    def forget(self, worker: int) -> None:
        """Begin anew with a worker, where holders of columns have forgotten it as well."""
        for known in (self.odds, self.since, self.total, self.recent):
            known[worker] = 0.0


class Past:
    r"""Bet that a worker is no farther from the others than it used to be.

    The score of a worker is its median distance to the others over the median of these, in steps of
    a quarter of a doubling. If its scores are exchangeable over the rounds, then p, the share of
    rounds so far with a score at least as large as now's, this one included, is small with
    probability at most p whatever the p before, and money that is multiplied by 1 / (2 sqrt(p)) in
    every round is expected not to grow: it *ever* reaches m / alpha with probability at most
    alpha / m. (A conformal test martingale.)

    This needs nothing of the other workers' data, so it is for those who differ. What it does need
    is that nothing changes over time, which training does not promise: scores drift while a model
    learns, and liars who move change the scores of the others. Therefore it only warns.
    """

    def __init__(self, num_workers: int) -> None:
        self.seen = np.zeros((num_workers, 2 * _DOUBLINGS * _STEPS_A_DOUBLING + 1))
        self.money = np.zeros(num_workers)
        self.rounds = 0

    def observe(self, distances: Floats) -> None:
        """Take one round's squared distances."""
        m = len(distances)
        self.rounds += 1
        if m < 3:
            return
        scores = np.sort(distances, axis=1)[:, m // 2]
        middle = np.sort(scores)[m // 2]
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.log2(scores / middle) / 2  # of distances, not of their squares
        limit = _DOUBLINGS * _STEPS_A_DOUBLING
        steps = np.nan_to_num(ratio * _STEPS_A_DOUBLING, nan=0.0, posinf=limit, neginf=-limit)
        places = limit + np.clip(np.rint(steps), -limit, limit).astype(np.int64)
        workers = np.arange(m)
        self.seen[workers, places] += 1
        if self.rounds > _FIRST:
            as_far = np.arange(self.seen.shape[1]) >= places[:, None]
            p = (self.seen * as_far).sum(axis=1) / self.rounds
            stake = begun_by(self.rounds - _FIRST) - begun_by(self.rounds - _FIRST - 1)
            self.money += stake
            self.money *= 0.5 / np.sqrt(p)
            np.minimum(self.money, 1e30, out=self.money)
