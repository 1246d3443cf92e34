"""The state of detection in a job, which is the same on every rank of a group.

A group is the set of data-parallel ranks, which have gradients of the same parameters. Under tensor
or pipeline parallelism, a job has several groups.
"""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from phocas.detection.detector import Detector
from phocas.detection.flags import Threat, location_kind
from phocas.detection.locations import Location
from phocas.detection.observer import RankObserver, as_arrays, as_tensors
from phocas.detection.rare_features import RareFeatures, by_coordinates
from phocas.integrations.batch_sizes import BatchSizes
from phocas.integrations.job import Job
from phocas.integrations.reactions import Reactions
from phocas.integrations.replay import Recorder
from phocas.integrations.replicas import Replicas, warn_of_split
from phocas.integrations.reports import (
    SCHEMA,
    ConfirmationReport,
    FlaggedRank,
    NonfiniteReport,
    PlacesReport,
    Report,
    SplitReport,
    SuspectReport,
)
from phocas.integrations.tail_scale import TailScale
from phocas.integrations.wire import Wire
from phocas.rules import Explanation, Mean, Rule
from phocas.rules.base import plan_of


class DetectionState:
    """The evidence that the m ranks of a group have about one another after each step.

    Inside the state, a rank is identified by its row, 0 to m - 1. All results have global ranks.
    With a ``job`` of several groups, results contain only reports that all groups have received, so
    that all ranks of the job return the same results.

    Args:
        rule: the rule.
        names: the names of the model's parameters.
        hosts: the host of each rank.
        rank: the row of this process.
        reactions: what to do about flagged ranks.
        threat: what ranks may do: :data:`phocas.detection.flags.THREATS`.
        wire: the collectives of the group.
        job: the exchange with the other groups of the job, if there are any.
    """

    def __init__(
        self,
        rule: Rule,
        names: Sequence[str],
        hosts: Sequence[str],
        rank: int,
        reactions: Reactions,
        threat: Threat = "faults",
        wire: Wire | None = None,
        job: Job | None = None,
    ) -> None:
        m = len(hosts)
        self.wire, self.job = wire, job
        self.members: Sequence[int] = range(m) if wire is None else wire.ranks
        self.own = self.members[rank]
        self.rule, self.m, self.names, self.hosts = rule, m, names, hosts
        self.detector = Detector(m, rule.max_byzantine(m) or None, threat=threat)
        self.tolerated = rule.tolerates(m).rows
        plan = plan_of(rule, m)
        self.drop = (plan.window.drop or 0) if rule.columnwise else 0
        """The number of values of each column, farthest from the centre, that the rule drops."""
        self.scale = TailScale(m, self.detector.b) if plan.keeps_tail else None
        """The scale of all columns, if the rule adds outliers to its result."""
        self.sizes = BatchSizes(trusted=threat == "faults")
        self.left_out: list[int] = []
        """The excluded rows, in the order of exclusion; a change of kind does not readmit them."""
        self.reactions = reactions
        self.public: dict[int, FlaggedRank] = {}
        """The flagged ranks that all groups of the job know of."""
        self.firsts: list[NonfiniteReport] = []
        """The reports of first non-finite values that all groups of the job know of."""
        self.announced: set[str] = set()
        self.replicas: Replicas | None = None
        """The comparison of weights between ranks, if there is one."""
        self.confirmations: dict[int, ConfirmationReport] = {}
        """The result of the replay of each global rank that had one."""
        self._warned_of_split = False
        self.changed = False
        self.failure: Exception | None = None
        self._receiving = threading.RLock()

    def observer(self, seed: int) -> RankObserver:
        """Return an observer of the columns that this rank holds."""
        rare = RareFeatures(self.m, len(self.names)) if by_coordinates(self.rule, self.m) else None
        threat, parameters = self.detector.threat, len(self.names)
        return RankObserver(self.m, self.detector.b, seed, rare, threat, parameters)

    def hear(self, reports: NDArray[np.float64], lost: NDArray[np.float64], columns: int) -> None:
        """Let the detector observe a step, see :meth:`Detector.hear`."""
        if self.detector.hear(reports, lost, columns):
            self.note(reports)

    def note(self, reports: NDArray[np.float64]) -> None:
        """Record that reports have brought new evidence, so that :meth:`react` acts."""
        self.changed = True
        self._warn_of_rare_features(reports[:, -1])

    def _warn_of_rare_features(self, parameters: NDArray[np.float64]) -> None:
        """Warn on one rank of the parameters with rare values, which ranks report once."""
        if np.isnan(parameters).all() or self.own != self._writer():
            return
        found = [name for number, name in enumerate(self.names) if number in parameters]
        if found:
            warnings.warn(
                f"{found[0]}: the gradients are mostly zero on most ranks, and {self.rule} may"
                " drop values that only few ranks have as outliers: rare tokens and experts of"
                " honest ranks are then learned worse or not at all. Heraclius alone keeps such"
                f" values (docs/ddp.md); watch(model, b={self.detector.b}) averages",
                RuntimeWarning,
                stacklevel=2,
            )

    def exclude(self, rows: torch.Tensor, excluded: Sequence[int]) -> None:
        """Replace excluded rows by the mean of the other rows, which biases no rule.

        A wrong row among the others makes the replaced rows wrong, too. Together these are still at
        most b rows, if at most b ranks are faulty. If :meth:`average` aggregates, rows stay.
        """
        if excluded and len(excluded) != self.drop:
            wide = rows.double() if rows.dtype == torch.float64 else rows.float()
            mean = wide[self._others(excluded)].mean(dim=0)
            rows[list(excluded)] = mean.to(rows.dtype)

    def average(self, rows: torch.Tensor, excluded: Sequence[int]) -> Explanation | None:
        """Return the mean of the other rows if the rule would drop the excluded rows only.

        That is so if as many rows are excluded as the rule drops values of each column. Otherwise,
        return None.
        """
        if not excluded or len(excluded) != self.drop:
            return None
        mean = Mean()(rows[self._others(excluded)])
        return Explanation(mean, np.zeros(self.m), self.rule.expected(self.m))

    def _others(self, excluded: Sequence[int]) -> list[int]:
        return [row for row in range(self.m) if row not in excluded]

    def excluded(self) -> list[int]:
        """Return the rows that aggregation drops: ranks that are flagged by distances.

        These are at most as many rows as the rule tolerates, those flagged first. A rank of kind
        ``differs`` keeps its row. So does a rank that is flagged only by addresses or values: the
        rule drops its wrong values.
        """
        step = self.detector.flagged_in
        if not step.any():
            self.left_out = []
            return []
        found = sorted(np.flatnonzero(step).tolist(), key=lambda row: (step[row], row))
        self.left_out = [row for row in self.left_out if row in found]
        for row in found:
            new = row not in self.left_out and len(self.left_out) < self.tolerated
            if new and self.detector.flag(row).kind != "differs":
                self.left_out.append(row)
        return list(self.left_out)

    def _writer(self) -> int:
        """Return the rank that prints for its group: the lowest that is not flagged."""
        return self.members[min(set(range(self.m)) - set(self.detector.flagged()), default=0)]

    def state(self) -> dict[str, Any]:
        """Return the state of the group for a checkpoint."""
        drifted = {
            f"suspect {one.rank} drifted": one.rank
            for one in self.flagged()
            if one.kind == "drifted"
        }
        told = {
            "hosts": list(self.hosts),
            "names": list(self.names),
            "threat": self.detector.threat,
            **self.detector.findings_state(),
            # Weights come from the checkpoint too, so that a drift before it is over.
            "public": [one.report() for one in self.public.values() if one.kind != "drifted"],
            "firsts": self.firsts,
            "confirmations": list(self.confirmations.items()),
            "left_out": self.left_out,
            "squares": 0.0 if self.scale is None else self.scale.known,
            "steps": 0 if self.job is None else self.job.steps,
            "logged": sorted(self.reactions.logged - drifted.keys()),
            "acted": sorted(self.reactions.acted - set(drifted.values())),
        }
        return {**as_tensors(self.detector.state()), "told": json.dumps(told)}

    def load_state(self, state: Mapping[str, Any]) -> list[int]:
        """Restore the state of a checkpoint.

        A rank that now runs on another host starts without evidence.

        Returns:
            The row numbers of the ranks that run on another host.
        """
        told = json.loads(state["told"])
        if told["names"] != list(self.names):
            raise ValueError(
                f"evidence must be of the same parameters: got {len(told['names'])} of them, which"
                f" are not the {len(self.names)} of this model; leave it out to begin anew"
            )
        if told["threat"] != self.detector.threat:
            raise ValueError(
                f"evidence must be for the same threat: got {told['threat']!r}, and this guard has"
                f" {self.detector.threat!r}; protect the model with threat={told['threat']!r}, or"
                " leave the state out to begin anew"
            )
        self.detector.load_state(as_arrays(state, self.detector.state()))
        self.detector.load_findings_state(told)
        self.firsts, self.left_out = told["firsts"], told["left_out"]
        self.confirmations = dict(told.get("confirmations", ()))
        if self.scale is not None:
            self.scale.known = told.get("squares", 0.0)
        self.reactions.logged, self.reactions.acted = set(told["logged"]), set(told["acted"])
        self.announced = set()
        self.public = {one["rank"]: FlaggedRank.read(one) for one in told["public"]}
        if self.job is not None:
            self.job.steps = told["steps"]
            for rank, host in self.job.hosts.items():
                if rank in self.public and self.public[rank].host != host:
                    self._forget(rank)
        hosts = zip(told["hosts"], self.hosts, strict=True)
        moved = [row for row, (before, now) in enumerate(hosts) if before != now]
        for row in moved:
            self.detector.forget(row)
            self._forget(self.members[row])
        return moved

    def _forget(self, rank: int) -> None:
        self.public.pop(rank, None)
        self.confirmations.pop(rank, None)
        self.reactions.forget(rank)

    def flagged_row(self, row: int) -> FlaggedRank:
        """Return a flagged rank of the group, by its row."""
        since, tensors = self._drifted().get(row, (0, ()))
        if row not in self.detector.flagged():
            return FlaggedRank(
                rank=self.members[row],
                kind="drifted",
                onset=since,
                flagged=since,
                dropped=float(self.detector.shares()[row]),
                expected=self.rule.expected(self.m),
                sure=1.0,
                grounds=("replicas",),
                host=self.hosts[row],
                tensors=tensors,
            )
        flag = self.detector.flag(row)
        return FlaggedRank(
            rank=self.members[row],
            kind=flag.kind,
            onset=flag.onset,
            flagged=flag.flagged,
            dropped=float(self.detector.shares()[row]),
            expected=self.rule.expected(self.m),
            sure=flag.confidence,
            grounds=flag.grounds,
            host=self.hosts[row],
            places={
                self.names[parameter]: _places(location)
                for parameter, location in flag.locations
                if 0 <= parameter < len(self.names)
            },
            tensors=tensors,
            confirmation=self.confirmations.get(self.members[row]),
        )

    def confirm(self, replay: Recorder) -> None:
        """Replay the micro-batch of each rank that this step has flagged; release the step."""
        flagged = self.detector.flagged() if self.changed else ()
        for row in flagged:
            if (rank := self.members[row]) not in self.confirmations:
                self.confirmations[rank] = replay.confirm(row, flagged)
        replay.end()

    def _drifted(self) -> Mapping[int, tuple[int, tuple[str, ...]]]:
        """Return the rows whose weights differ from the majority: the step and the tensors."""
        return {} if self.replicas is None else self.replicas.drift.rows

    def _own_flagged(self) -> list[FlaggedRank]:
        rows = {*self.detector.flagged(), *self._drifted()}
        return [self.flagged_row(row) for row in sorted(rows)]

    def compare_replicas(self) -> None:
        """Begin a step: compare the weights of the ranks if it is due, see :class:`Replicas`."""
        replicas = self.replicas
        if replicas is None:
            return
        replicas.steps += 1
        if replicas.steps >= replicas.due and replicas.step():
            self._note_drift()

    def _note_drift(self) -> None:
        self.changed = True
        split = self._split()
        if split is not None and self.own == self._writer() and not self._warned_of_split:
            self._warned_of_split = True
            warn_of_split(split)

    def _split(self) -> SplitReport | None:
        return None if self.replicas is None else self.replicas.drift.split

    def flagged(self) -> list[FlaggedRank]:
        """Return the flagged ranks of the job; the same on every rank."""
        if self.job is None:
            return self._own_flagged()
        return [self.public[rank] for rank in sorted(self.public)]

    def report(self) -> Report:
        """Return the report, ready for ``json``."""
        return Report(
            schema=SCHEMA,
            rule=str(self.rule),
            ranks=self.m,
            members=list(self.members),
            steps=self.detector.rounds,
            dropped=[float(share) for share in self.detector.shares()],
            expected=self.rule.expected(self.m),
            nonfinite=self.first_nonfinite(),
            lost=self.detector.lost or None,
            suspects=[one.report() for one in self.flagged()],
            unusual=self.unusual(),
            failure=None if self.failure is None else str(self.failure),
            split=self._split(),
        )

    def first_nonfinite(self) -> list[NonfiniteReport]:
        """Return which ranks of the job sent the first values that are not finite."""
        return self._own_nonfinite() if self.job is None else self.firsts

    def _own_nonfinite(self) -> list[NonfiniteReport]:
        return [
            NonfiniteReport(
                rank=self.members[row],
                step=step,
                parameters=[self.names[p] for p in parameters if 0 <= p < len(self.names)],
                seen_by=seen_by,
            )
            for row, step, parameters, seen_by in self.detector.nonfinite
        ]

    def unusual(self) -> list[int]:
        """Return the ranks of the group whose values were lately dropped far more than usual."""
        return [self.members[row] for row in self.detector.unusual()]

    def send(self) -> None:
        """Send new reports to the other groups of the job; call this at the end of each step."""
        if self.job is None:
            return
        due = self.job.due()
        news = self._news() if due else {}
        self.announced.update(news)
        self.job.send(list(news.values()), due=due)

    def _news(self) -> dict[str, dict[str, Any]]:
        """Return the reports that are new to the other groups, each under a unique name."""
        flagged = self._own_flagged()
        found: dict[str, dict[str, Any]] = {
            f"{one.rank} {one.kind} {one.grounds}": {"event": "suspect", **one.report()}
            for one in flagged
        } | {
            f"{first['rank']} {first['step']}": {"event": "nonfinite", **first}
            for first in self._own_nonfinite()
        }
        return {name: entry for name, entry in found.items() if name not in self.announced}

    def receive(self) -> None:
        """Receive the reports that the process groups of the job have sent about their ranks.

        A report is of a flagged rank, or of a rank's first value that is not finite. The call
        blocks until the reports of all ranks have arrived. Without a job, there are none. A
        comparison of weights that is under way is completed, too.
        """
        with self._receiving:
            if self.replicas is not None and self.replicas.receive():
                self._note_drift()
            if self.job is None:
                return
            for entry in self.job.agreed(self.job.receive()):
                self.changed = True
                self._publish(entry)

    def _publish(self, entry: dict[str, Any]) -> None:
        """Store a report of another group; drop an entry that has other fields than a report."""
        event = entry.pop("event")
        wanted = {"suspect": SuspectReport, "nonfinite": NonfiniteReport}.get(event)
        if wanted is None or entry.keys() != wanted.__annotations__.keys():
            return
        if event == "suspect":
            self.public[entry["rank"]] = FlaggedRank.read(entry)
            return
        first = cast("NonfiniteReport", entry)
        if first not in self.firsts:
            known = sorted([*self.firsts, first], key=lambda one: (one["step"], one["rank"]))
            self.firsts = _earliest(known, self.detector.b)

    def finish(self) -> None:
        """Receive the last reports of other groups and react; call this after the last step."""
        self.receive()
        self.react()

    def react(self) -> None:
        """React to new flags and non-finite values; call this in a step, on all ranks."""
        if not self.changed:
            return
        self.changed = False
        flagged, nonfinite = self.flagged(), self.first_nonfinite()
        if flagged or nonfinite:
            everyone = self.members if self.job is None else self.job.wire.ranks
            self.reactions.react(self.own, everyone, flagged, nonfinite, self.report, self._leave)

    def _leave(self) -> None:
        wire = self.wire if self.job is None else self.job.wire
        if wire is not None:
            wire.leave()


def _earliest(known: Sequence[NonfiniteReport], b: int) -> list[NonfiniteReport]:
    """Return the reports of the first step, and of the first step with more than b witnesses."""
    seen = [one for one in known if one["seen_by"] > b]
    steps = {each[0]["step"] for each in (known, seen) if each}
    return [one for one in known if one["step"] in steps]


def _places(location: Location) -> PlacesReport:
    return PlacesReport(
        since=location.since,
        share=location.share,
        others=location.usual,
        addresses=list(location.addresses),
        stride=location.stride or None,
        repeats=max(0.0, location.repeats),
        kind=location_kind(location),
    )
