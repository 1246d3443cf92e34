"""The detector: decides which workers are faulty, since when and where, from all observations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from phocas.deprecation import former_attributes
from phocas.detection.comparison import AbsurdServers, Comparison, Sample, compare, group_sizes
from phocas.detection.evalues import (
    MEASURES,
    DriftTest,
    EValueTest,
    Onset,
    distances,
)
from phocas.detection.flags import (
    Evidence,
    Flag,
    Ground,
    Threat,
    check_threat,
    confidence,
    kind_of,
    note_nonfinite,
    telling,
)
from phocas.detection.locations import Locations, ParameterFinding, findings_at, read_findings
from phocas.detection.own_past import OwnPast, WorkerData, check_worker_data
from phocas.detection.parameter_test import whole_scores, whole_test
from phocas.specs import count

Floats = npt.NDArray[np.float64]

FALSE_ALARM = 1e-3
"""The probability that any honest worker is flagged within RUN_LENGTH = 100,000 observed rounds."""

_RECENT = 0.8  # weight of earlier rounds in the recent dropped shares
_DEVIATIONS = 6.0  # median deviations above the median: far outside of what noise does
_VISIBLE = 0.05  # smaller differences between dropped shares do not count
_EARLY = 64  # rounds at the beginning, all of which are observed
_EVERY = 4  # later, one round in so many is observed while there is no evidence
_NOTABLE = 0.5  # e-value of a worker that is not flagged, above which every round is observed
_NEARLY = 20.0  # e-value at which a worker's columns are inspected, long before it is flagged
_LATELY = 8  # rounds after a finding, all of which are observed
_BESIDE_DIRECTION, _DIRECTION = (0.6, 0.1), (0.3,)  # parts of the wealth, where there is one


@former_attributes(suspects="flagged", odds="e_values")
class Detector:
    r"""Detection of faulty workers, with a bound on the probability of a false alarm.

    A detector observes one round after the other. :meth:`wants` says whether a round should be
    observed. If so, :meth:`observe` takes the rows, or :meth:`observe_holders` takes the evidence
    of the holders, which are the ranks or servers that each hold a range of columns. If not,
    :meth:`rest` is called. :meth:`update` takes the shares that the rule dropped. :meth:`hear` does
    all this from the reports of ranks. :meth:`flagged`, :meth:`evidence` and :meth:`flag` give the
    answers, :meth:`state` is for checkpoints.

    Workers are flagged by distances between rows. Byzantine workers cannot change the distance
    between two honest rows: :class:`EValueTest` has the test and the proof. With ``direction`` the
    angle to a direction known before the round counts as well, which shows workers that pull back
    even where gradients are mostly noise. Worker i is flagged once its e-value reaches m / alpha,
    alpha = 0.001.

    **Guarantee.** If at most b workers are Byzantine, and honest rows are independent draws of one
    distribution in every round, given all rounds before, then with probability at least 1 - alpha
    *no* honest worker is flagged within 100,000 observed rounds, whatever the Byzantine workers
    send and know. (Each of at most m honest workers has probability alpha / m.) In t rounds the
    probability is at most alpha (0.9 + t / 1,000,000). A flagged worker stays flagged.

    With ``threat="faults"`` the holders of columns use stronger tests and are trusted: see
    :class:`phocas.detection.parameter_test.ParameterTest` and
    :class:`phocas.detection.locations.Locations`. The guarantee is the same if faulty rows do not
    depend on which honest worker has which row.

    Delays with 20 workers and b = 6: one Byzantine worker is flagged after 5 rounds, three after
    10, six after 19. One that begins in round 400 is flagged after 5 to 9 rounds, if every round is
    observed. One with gross errors in a fifth of the rounds is flagged after about 30. Attacks that
    stay within the honest distribution are not detected.

    - Flagging q workers needs q < m - b - 1. With m - b - 1 < 2, as with b = 1 of 3, no worker can
      be flagged, nor with b = 0. The default b is the largest with which workers can be flagged:
      it allows for more Byzantine workers, and one of 20 is flagged after 6 rounds.
    - Honest workers that hold different data (Dirichlet, by label, federated clients) do not have
      one distribution. With ``data="differ"`` each worker is compared with its own past instead:
      :class:`phocas.detection.own_past.OwnPast` has the assumption and the limits.
    - Rows with the worker's own ``momentum`` are not independent of the rounds before. Of such rows
      only the new part of each round is observed, which is (1 - momentum) times a gradient.
    - A worker whose rows are missing is infinitely far, and is flagged like any other fault.

    :meth:`unusual` is an early warning without a guarantee. Byzantine workers can cause it for an
    honest worker.

    Args:
        num_workers: m.
        b: the largest number of Byzantine workers.
        servers: the column ranges of the servers, to find servers that receive wrong values.
        momentum: the momentum of the workers' rows.
        direction: whether rows are compared with a direction that is known before each round.
        threat: what workers may do: :data:`phocas.detection.flags.THREATS`.
        data: the data of honest workers: :data:`phocas.detection.own_past.WORKER_DATA`.

    >>> rng = np.random.default_rng(0)
    >>> detector = Detector(num_workers=10, b=2)
    >>> for _ in range(12):
    ...     rows = rng.normal(size=(10, 50))
    ...     rows[3] *= 2
    ...     detector.observe(rows)
    >>> detector.flagged(), detector.evidence()[3].flagged
    ((3,), 6)
    """

    def __init__(
        self,
        num_workers: int,
        b: int | None = None,
        servers: Sequence[tuple[int, int]] = (),
        momentum: float = 0.0,
        *,
        direction: bool = False,
        threat: Threat = "adversaries",
        data: WorkerData = "alike",
    ) -> None:
        self.threat = check_threat(threat)
        differ = check_worker_data(data) == "differ"
        self.num_workers = m = count("Detector", "num_workers", num_workers, minimum=1)
        self.b = max(0, (m - 3) // 2) if b is None else count("Detector", "b", b)
        self.own_past = OwnPast(m, momentum) if differ else None
        """The test of each worker against its own past, if the data of honest workers differ."""
        most = 0 if differ else min(self.b, m - 1)  # 0 leaves the tests between workers empty
        direction = direction and not differ
        self.test = EValueTest(m, most, _BESIDE_DIRECTION if direction else MEASURES)
        self.direction_test = EValueTest(m, most, _DIRECTION, by_score=True) if direction else None
        self.whole = whole_test(m, most) if threat == "faults" else None
        self.drift = DriftTest(m)
        self.onset = Onset(m)
        self.locations = Locations(m, self.b, trusted=threat == "faults")
        self.e_values = np.zeros(m)
        self.flagged_in = np.zeros(m)
        """The round (from 1) in which distances flagged each worker, 0 if they did not."""
        self.judged = 0
        """The rounds that were observed, or passed over by :meth:`rest`."""
        self.total = np.zeros(m)
        self.recent = np.zeros(m)
        self.rounds = 0
        """The rounds of which the dropped shares are known."""
        self.absurd_servers = AbsurdServers(m, servers)
        self.momentum = momentum
        self.kept = np.zeros(0)
        self.notable = False
        self.alert = 0
        """The round before which every round is observed."""
        self.attention: tuple[int, ...] = ()
        """The workers whose values the holders of columns should inspect."""
        self.nonfinite: list[tuple[int, int, list[int], int]] = []
        """First values that are not finite: worker, round, parameters, how many have seen them."""
        self.lost = 0
        """The round since which no worker is finite, 0 if there is none."""
        self._last = b""
        self._findings_at = findings_at(m)

    def wants(self) -> bool:
        """Return whether the next round should be observed; if not, call :meth:`rest`.

        One round in four is observed, and every round

        - if data differ, or rows have momentum,
        - at the beginning, and shortly after a finding,
        - while a worker that is not flagged has an e-value above a half, or has lately been the
          farthest more often than chance explains.

        The choice depends on the past alone, so that the e-values stay valid.
        """
        return (
            self.own_past is not None
            or self.judged < _EARLY
            or self.judged % _EVERY == 0
            or self.notable
            or self.rounds < self.alert
            or bool(self.momentum)
        )

    def rest(self) -> None:
        """Advance by a round that is not observed."""
        self.judged += 1

    def skip(self) -> None:
        """Advance by a round in which no worker's row is finite; it gives no evidence."""
        before = self.lost
        self.pass_over()
        self.lost = before or self.rounds
        if not before:
            self.locations.add_loss(self.judged)

    def pass_over(self) -> None:
        """Advance by a round of which neither rows nor dropped shares are known."""
        self.total += self.shares()
        self.rounds += 1
        self.judged += 1
        self.lost = 0

    def observe(
        self,
        values: npt.ArrayLike,
        sample: Sample | None = None,
        following: npt.ArrayLike | None = None,
        direction: npt.ArrayLike | None = None,
        participants: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """Observe the rows of one round.

        Args:
            values: the rows, (m, columns), or the values of a sample of their columns. Which
                columns are sampled must not depend on the rows. If data differ, the columns are the
                same in every round.
            sample: the columns that were sampled.
            following: only for rows with momentum: the values in this round of the columns that
                are observed in the next round, to compute what is new in the next round.
            direction: a direction in these columns that was known before the round.
            participants: the workers of the rows, if not all took part; only if data differ.
        """
        if participants is not None and self.own_past is None:
            raise ValueError("participants are for data that differ: give the rows of all workers")
        seen = np.asarray(values, np.float64)
        expected = self.num_workers if participants is None else len(participants)
        if seen.ndim != 2 + (sample is not None) or len(seen) != expected:
            raise ValueError(
                f"there must be a row for each of {expected} workers: got shape {seen.shape}"
            )
        if self.own_past is not None:
            self._judge(self.own_past.observe(seen, participants))
            if sample is not None and participants is None:
                self.absurd_servers.observe(group_sizes(seen), sample)
            return
        way = None if direction is None else np.asarray(direction, np.float64)
        before = self.kept if self.kept.size else None
        compared = compare(seen, way, momentum=self.momentum, before=before)
        if following is not None:
            self.kept = np.asarray(following, np.float64)
        self.observe_comparison(compared, sample)

    def observe_comparison(self, compared: Comparison, sample: Sample | None = None) -> None:
        """Observe the rows of one round by their comparison, if data are alike.

        Args:
            compared: the comparison of what is new in the rows.
            sample: the columns that were sampled.
        """
        apart = distances(compared.products)
        e_values = self.test.observe(apart)
        if self.direction_test is not None:
            away = compared.angles
            scores = np.full(self.num_workers, np.inf) if away is None else away
            e_values = e_values + self.direction_test.observe(scores[None, None])
        self._judge(e_values)
        self.notable |= self.test.growing(self.flagged())
        self.drift.observe(apart[0])
        if sample is not None:
            self.absurd_servers.observe(compared.sizes, sample)

    def no_verdict(self) -> tuple[int, ...]:
        """Return the workers about which nothing can be said yet: their own past is too short."""
        return () if self.own_past is None else self.own_past.no_verdict()

    def hear(self, reports: Floats, lost: Floats, columns: int) -> bool:
        """Observe a step by the reports of all m ranks; return whether there is new evidence.

        Args:
            reports: the report of each rank's :class:`~phocas.detection.observer.RankObserver`.
            lost: how many values of each rank (column) each rank (row) dropped in its columns.
            columns: the number of columns of the gradient.
        """
        m, awake = len(reports), self.wants()
        # If most ranks report that no rank is finite, the evidence is about the model.
        if 2 * np.count_nonzero(reports[:, m] > 0) > m:
            known = self.flagged()
            self.skip()
            return self.flagged() != known  # the last rank before that was not finite
        # A faulty rank may report any number, but not more dropped values than there are.
        shares = np.fmin(np.fmax(lost, 0.0), columns).sum(axis=0) / max(1, columns)
        self.update(np.fmin(shares, 1.0))
        content = reports.tobytes()
        if content == self._last:
            self.rest()
            return False
        first = self._findings_at
        told = reports[:, first:-1]
        findings = [] if np.isnan(told).all() else read_findings(told)
        self._last = b"" if findings else content  # the same finding again is evidence
        self.observe_holders(reports[:, :m], findings, reports[:, m + 1 : first] if awake else None)
        growing = np.count_nonzero(reports[:, m] < 0)
        self.notable |= bool(growing >= (1 if self.locations.trusted else m / 2))
        return True

    def observe_holders(
        self,
        evidence: Floats,
        findings: Sequence[tuple[int, ParameterFinding]] = (),
        totals: Floats | None = None,
    ) -> None:
        """Observe the evidence of all holders, the ranks or servers that hold ranges of columns.

        Each holder computes e-values in its own columns. Up to b holders may be faulty. So the
        detector uses the mean of the smallest e-values, without the b largest. This mean is at most
        the mean over honest holders, so the guarantee holds. If holders are trusted, the detector
        uses the mean of their e-values, and adds that of a test of all columns.

        Args:
            evidence: the e-values by holder and worker, (holders, m).
            findings: pairs of a holder's number and a finding of the holder in a parameter.
            totals: sums over the columns of each holder, if the round was observed.
        """
        kept = np.where(evidence >= 0, evidence, 0.0)
        if self.whole is None:
            kept = np.sort(kept, axis=0)[: max(1, len(kept) - self.b)]
            self._judge(kept.mean(axis=0))
        else:
            if totals is not None:
                self.whole.observe(whole_scores(totals))
            self._judge(kept.mean(axis=0) + self.whole.evidence())
            self.notable |= self.whole.growing(self.flagged())
        now = self.judged
        if findings:
            note_nonfinite(self.nonfinite, findings, now, self.b, self.num_workers)
            for holder, finding in findings:
                self.locations.add(self._since(finding), holder, [finding])
            self.locations.flag(now)
            self.locations.add_values(now, (finding for _, finding in findings))
        flagged = self.flagged()
        if not {finding.worker for _, finding in findings} <= set(flagged):
            self.alert = now + _LATELY
        elif not set(self.unusual()) <= set(flagged):
            self.alert = max(self.alert, now + 1)
        near = np.flatnonzero(self.e_values > _NEARLY)
        self.attention = tuple(sorted({*near.tolist(), *flagged}))

    def _since(self, finding: ParameterFinding) -> int:
        """Return the first round of a finding: the worker's onset if it is by distances."""
        if finding.e_value and 0 <= finding.worker < self.num_workers:
            return min(self.judged, int(self.onset.rounds[finding.worker]))
        return self.judged

    def _judge(self, e_values: Floats) -> None:
        """Flag workers by their e-values after a round."""
        before, self.e_values = self.e_values, e_values
        self.judged += 1
        if self.b:
            flagged = (e_values >= self.num_workers / FALSE_ALARM) & (self.flagged_in == 0)
            self.flagged_in[flagged] = self.judged
        unflagged = self.flagged_in == 0
        self.notable = bool((e_values[unflagged] > _NOTABLE).any())
        if not np.array_equal(before, e_values):
            self.onset.observe(e_values, self.judged, ~unflagged)

    def update(self, dropped: npt.ArrayLike) -> None:
        """Observe, for each worker, the share of its values that the rule dropped in one round."""
        shares = np.asarray(dropped, np.float64)
        memory = _RECENT if self.rounds else 0.0
        self.recent = memory * self.recent + (1 - memory) * shares
        self.total += shares
        self.rounds += 1
        self.lost = 0

    def flagged(self) -> tuple[int, ...]:
        """Return the flagged workers."""
        known = self.locations
        found = (self.flagged_in > 0) | (known.flagged > 0) | (known.flagged_by_values > 0)
        return tuple(np.flatnonzero(found).tolist())

    def unusual(self, at_least: float = 0.0) -> tuple[int, ...]:
        """Return the workers whose values were lately dropped far more than usual, or that drift.

        There is no guarantee: Byzantine workers can cause this warning for an honest worker.

        Args:
            at_least: dropped shares up to this one are not unusual.
        """
        half = self.num_workers // 2
        middle = np.sort(self.recent)[half]
        deviation = np.sort(np.abs(self.recent - middle))[half]
        limit = max(at_least, middle + max(_VISIBLE, _DEVIATIONS * deviation))
        drifted = self.drift.wealth >= self.num_workers / FALSE_ALARM
        return tuple(np.flatnonzero((self.recent > limit) | drifted).tolist())

    def servers(self) -> tuple[int, ...]:
        """Return the servers in whose columns more than b workers have sent absurd values.

        At most b workers are Byzantine, so the fault is between the workers and this server. That
        holds if honest values are never absurd (:class:`AbsurdServers`); it is not a matter of
        chance.
        """
        found = self.absurd_servers.found.sum(axis=1)
        return tuple(np.flatnonzero(found > self.b).tolist())

    @property
    def absurd(self) -> Floats:
        """Return an array (servers, m): 1 where a server has received absurd values of a worker."""
        return self.absurd_servers.found

    def evidence(self) -> tuple[Evidence, ...]:
        """Return the evidence against each worker."""
        numbers = zip(self.e_values, self.shares(), self.drift.wealth, strict=True)
        found = []
        for worker, (e_value, dropped, drift) in enumerate(numbers):
            flagged = int(self.flagged_in[worker])
            onset = min(int(self.onset.rounds[worker]), flagged)
            found.append(
                Evidence(
                    worker,
                    float(e_value),
                    flagged or None,
                    float(dropped),
                    float(drift),
                    onset or None,
                )
            )
        return tuple(found)

    def flag(self, worker: int) -> Flag:
        """Return the flag of a worker: since when it is faulty, where, and in what way."""
        steps: dict[Ground, int] = {
            "distances": int(self.flagged_in[worker]),
            "addresses": int(self.locations.flagged[worker]),
            "values": int(self.locations.flagged_by_values[worker]),
        }
        onsets = {
            "distances": self.onset.rounds[worker],
            "addresses": self.locations.onset[worker],
            "values": self.locations.first_implausible(worker) or steps["values"],
        }
        flagged, first = min((step, ground) for ground, step in steps.items() if step)
        shown = telling(self.locations.workers[worker])
        certain = steps["addresses"] > 0 or steps["values"] > 0
        return Flag(
            worker=worker,
            kind=kind_of(self.locations, worker, shown),
            onset=min(int(onsets[first]), flagged),
            flagged=flagged,
            confidence=confidence(self.num_workers, float(self.e_values[worker]), certain=certain),
            grounds=tuple(ground for ground, step in steps.items() if step),
            locations=shown,
        )

    def shares(self) -> Floats:
        """Return the mean dropped share of each worker."""
        return self.total / max(1, self.rounds)

    def state(self) -> dict[str, Floats]:
        """Return the arrays for a checkpoint; :meth:`findings_state` has the rest."""
        numbers = [self.test.rounds, self.judged, self.rounds, self.notable]
        state = {
            "money": self.test.wealth,
            "past": self.drift.seen,
            "changed": self.drift.wealth,
            "odds": self.e_values,
            "since": self.flagged_in,
            "total": self.total,
            "recent": self.recent,
            "absurd": self.absurd_servers.found,
            "size": self.absurd_servers.size,
            "kept": self.kept,
            "usual": self.test.usual,
            "numbers": np.array(numbers, np.float64),
            "onset": self.onset.state(),
            "series": self.onset.series,
            "streaks": self.test.streaks,
        }
        if self.whole is not None:
            state |= {f"whole_{name}": array for name, array in self.whole.arrays().items()}
            state["whole_rounds"] = np.array([self.whole.rounds], np.float64)
        if self.direction_test is not None:
            state |= {"course": self.direction_test.wealth, "heading": self.direction_test.usual}
        return state if self.own_past is None else state | self.own_past.state()

    def load_state(self, state: Mapping[str, Floats]) -> None:
        """Restore the arrays of a checkpoint."""
        own = self.state()
        # These arrays were added after version 0.2.
        added = ("size", "onset", "series", "streaks")
        state = {**{name: own[name] for name in added}, **state}
        self._last = b""
        self.kept = np.array(state["kept"])
        own["kept"] = self.kept
        if self.own_past is not None:
            if "own_counts" not in state or len(state["own_counts"]) != self.num_workers:
                raise ValueError(
                    f"a checkpoint for data that differ, of {self.num_workers} workers, is needed:"
                    " start anew (--restart)"
                )
            self.own_past.load_state(state)
            own = {name: array for name, array in own.items() if not name.startswith("own_")}
        for name, array in own.items():
            if state[name].shape != array.shape:
                raise ValueError(
                    f"a checkpoint of {len(state['total'])} workers and {len(state['absurd'])}"
                    f" servers cannot be used with {self.num_workers} and {len(own['absurd'])},"
                    " nor with another b"
                )
            np.copyto(array, state[name])
        numbers = state["numbers"].astype(int).tolist()
        self.test.rounds, self.judged, self.rounds, notable = numbers
        self.notable = bool(notable)
        self.onset.load_state(state["onset"])
        self.drift.rounds = self.test.rounds
        if self.whole is not None:
            self.whole.rounds = int(state["whole_rounds"][0])
        if self.direction_test is not None:
            self.direction_test.rounds = self.test.rounds

    def findings_state(self) -> dict[str, Any]:
        """Return the findings of :meth:`observe_holders` for a checkpoint, ready for ``json``."""
        return {
            "alert": self.alert,
            "attention": self.attention,
            "traces": self.locations.state(),
            "nonfinite": self.nonfinite,
            "lost": self.lost,
        }

    def load_findings_state(self, state: Mapping[str, Any]) -> None:
        """Restore the findings of a checkpoint."""
        self.alert, self.attention = state["alert"], tuple(state["attention"])
        self.locations.load_state(state["traces"])
        self.nonfinite = [tuple(first) for first in state["nonfinite"]]
        self.lost = state["lost"]

    def acquit(self, worker: int) -> None:
        """Discard the evidence on a worker whose data differ, and keep its past."""
        self.e_values[worker] = self.flagged_in[worker] = 0.0
        if self.own_past is not None:
            self.own_past.wealth[..., worker] = 0.0

    def forget(self, worker: int) -> None:
        """Discard all evidence on a worker; the holders of columns must discard theirs as well."""
        for known in (self.e_values, self.flagged_in, self.total, self.recent):
            known[worker] = 0.0
        if self.whole is not None:
            self.whole.forget(worker)
        if self.own_past is not None:
            self.own_past.forget(worker)
        self.locations.forget(worker)
        self.onset.forget(worker)
