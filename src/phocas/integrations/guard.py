"""What is known about the ranks of a job, whoever carries its gradients, and what follows.

A :class:`Ledger` is the one state behind every adapter: it hears what all ranks have seen in a
step, names suspects, and reacts. A :class:`Guard` is what the user holds.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Self, TypedDict, cast

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from phocas.integrations.job import Job
from phocas.integrations.rare import RareFeatures, by_coordinates
from phocas.integrations.reports import (
    KINDS,
    SCHEMA,
    Kind,
    NonfiniteReport,
    PlacesReport,
    Report,
    SuspectReport,
    as_text,
)
from phocas.integrations.wire import Wire
from phocas.integrations.witness import Witness, as_arrays, as_tensors, heard, model_lost
from phocas.rules import Heraclius, Rule, Watch
from phocas.rules.bets import Onset
from phocas.rules.places import Finding, Trace, Traces
from phocas.rules.suspicion import Suspicion
from phocas.specs import count, unknown

_LATELY = 8  # steps after a finding in which none is passed over
_NEARLY = 20.0  # odds at which a rank is looked at more closely, long before it is accused
_HARDWARE = 0.5  # the share of addresses that come again where a machine is broken
_DATA = 0.1
_EVERYWHERE = 0.9  # a share of wrong values whose addresses say nothing
_TELLING = 5.0  # deviations from what is usual in a parameter
_ALONG = 2.0  # deviations of evidence that rows that are too long still point as the others do
_AGAINST = 3.0  # the same, that rows of a plausible length do not
_UNLESS_IT_DIFFERS: tuple[Kind, ...] = tuple(kind for kind in KINDS if kind != "differs")


@dataclass(frozen=True, slots=True)
class Suspect:
    """A rank that is named, and what is known against it.

    ``dropped`` is the share of its values that was thrown away, ``expected`` what a rank loses if
    who sent a value does not matter. :class:`phocas.integrations.reports.SuspectReport` has the
    rest.

    Attributes:
        rank: its global rank.
        since: the step (from 1) in which it began, as far as can be told.
        dropped: the share of its values that was thrown away.
        expected: the share that chance would take.
        sure: how sure it is.
        grounds: on what grounds it is named.
        host: the host that it runs on.
        places: what is known of each parameter.
        kind: what seems to be wrong: :data:`phocas.integrations.reports.KINDS`.
        flagged: the step in which there was enough evidence to name it.

    >>> suspect = Suspect(rank=3, since=15, dropped=0.98, expected=0.001)
    >>> suspect.rank, round(suspect.excess, 3)
    (3, 0.979)
    """

    rank: int
    since: int
    dropped: float
    expected: float
    sure: float = 0.0
    grounds: tuple[Literal["distances", "addresses"], ...] = ()
    host: str = ""
    places: Mapping[str, PlacesReport] = field(default_factory=dict)
    kind: Kind = "wrong"
    flagged: int = 0

    @property
    def excess(self) -> float:
        """Return how much more was dropped than expected."""
        return self.dropped - self.expected

    @property
    def layers(self) -> dict[str, float]:
        """Return by parameter the share of values that is wrong, the most telling first."""
        return {name: places["share"] for name, places in self.places.items()}

    def report(self) -> SuspectReport:
        """Return it for ``json``."""
        return SuspectReport(
            rank=self.rank,
            host=self.host,
            kind=self.kind,
            since=self.since,
            flagged=self.flagged,
            grounds=list(self.grounds),
            sure=self.sure,
            dropped=self.dropped,
            expected=self.expected,
            layers=self.layers,
            places=dict(self.places),
        )

    @classmethod
    def read(cls, report: Mapping[str, Any]) -> Self:
        """Return what :meth:`report` has written."""
        known = {name: report[name] for name in cls.__dataclass_fields__}
        return cls(**{**known, "grounds": tuple(report["grounds"])})

    def __str__(self) -> str:
        text = f"rank {self.rank}: since step {self.since}"
        for name, places in self.places.items():
            shares = f"{places['share']:.1%} of its values against {places['others']:.1%}"
            return f"{text}, {name}, {shares} ({self.kind})"
        shares = f"{self.dropped:.0%} of its values against {self.expected:.1%}"
        return f"{text}, {shares} ({self.kind})"


@dataclass(frozen=True, slots=True)
class Reactions:
    """What follows when a rank is named; nothing, unless it is asked for.

    Args:
        on_suspect: Called with each new :class:`Suspect`, on every rank, once.
        log: A file to which the lowest rank that is not suspect adds a line of JSON.
        exit_code: End the process of every rank with it, after the above; 1 to 255.
        act_on: The kinds of suspects that ``on_suspect`` and ``exit_code`` are for.
    """

    on_suspect: Callable[[Suspect], None] | None = None
    log: Path | None = None
    exit_code: int | None = None
    act_on: tuple[Kind, ...] = _UNLESS_IT_DIFFERS

    @classmethod
    def of(
        cls,
        on_suspect: Callable[[Suspect], None] | None,
        log: str | Path | None,
        exit_code: int | None,
        act_on: Sequence[Kind] = _UNLESS_IT_DIFFERS,
    ) -> Self:
        """Check what was asked for."""
        if on_suspect is not None and not callable(on_suspect):
            raise TypeError(f"on_suspect must be a function of a suspect: got {on_suspect!r}")
        if exit_code is not None and not 1 <= count("protect", "exit_code", exit_code) <= 255:
            raise ValueError(f"exit_code must be 1 to 255: got {exit_code}")
        path = None if log is None else Path(log)
        if path is not None and not path.parent.is_dir():
            raise FileNotFoundError(f"log must be in a folder that exists: got {path}")
        if isinstance(act_on, str) or not set(act_on) <= set(KINDS):
            raise ValueError(f"act_on must be some of {', '.join(KINDS)}: got {act_on!r}")
        return cls(on_suspect, path, exit_code, tuple(act_on))


class Options(TypedDict, total=False):
    """What both ``protect`` and ``watch`` may be told, in DDP and in FSDP2."""

    seed: int
    """For rules that draw at random (bucketing); the same on all ranks."""
    timeout: timedelta | None
    """How long to wait for a rank before raising; that of the model's group if not given."""
    on_suspect: Callable[[Suspect], None] | None
    """Called with each new suspect, on every rank, in backward (with CUDA: in a thread)."""
    log: str | Path | None
    """A file to which a line of JSON is added for each new suspect, by one rank."""
    exit_code: int | None
    """End the processes of all ranks with it when a rank is named."""
    act_on: Sequence[Kind]
    """The kinds that ``on_suspect`` and ``exit_code`` are for; all but ``differs`` if not given."""
    job_group: dist.ProcessGroup | None
    """The ranks that have one answer and one exit code: each must protect its model and take as
    many steps. If not given, all ranks of the mesh that the model's mesh is a part of; for DDP
    without a mesh, the ranks of its process group."""


def watching(b: int) -> Watch:
    """Return the rule that averages and detects up to b faulty ranks."""
    if count("watch", "b", b) < 1:
        raise ValueError(f"Detection needs b >= 1: got b={b}")
    return Watch(Heraclius(b=b))


def options_of(
    *own: str,
    seed: int = 0,
    timeout: timedelta | None = None,
    on_suspect: Callable[[Suspect], None] | None = None,
    log: str | Path | None = None,
    exit_code: int | None = None,
    act_on: Sequence[Kind] = _UNLESS_IT_DIFFERS,
    job_group: dist.ProcessGroup | None = None,
    **mistyped: object,
) -> tuple[int, timedelta | None, dist.ProcessGroup | None, Reactions]:
    """Check what was asked for, before a job runs for days: all but reactions, and these.

    ``own`` are the options that the caller has beside these.
    """
    for name in mistyped:
        raise TypeError(unknown("option", name, [*own, *Options.__annotations__]))
    reactions = Reactions.of(on_suspect, log, exit_code, act_on)
    return count("protect", "seed", seed), timeout, job_group, reactions


class Ledger:
    """What was heard about the m ranks of a group, step by step; the same on every one of them.

    Inside, a rank is its row, from 0 to m - 1. Whatever leaves the ledger has global ranks. With a
    ``job`` of several groups, only what all of them have been told leaves it, so that all ranks of
    the job give one answer.
    """

    def __init__(
        self,
        rule: Rule,
        names: Sequence[str],
        hosts: Sequence[str],
        rank: int,
        reactions: Reactions,
        wire: Wire | None = None,
        job: Job | None = None,
    ) -> None:
        m = len(hosts)
        self.wire, self.job = wire, job
        self.members: Sequence[int] = range(m) if wire is None else wire.ranks
        self.own = self.members[rank]
        self.rule, self.m, self.names, self.hosts = rule, m, names, hosts
        self.suspicion = Suspicion(m, rule.liars(m) or None)
        self.traces = Traces(m, self.suspicion.b)
        self.onset = Onset(m)
        self.nonfinite: list[NonfiniteReport] = []
        self.lost = 0
        self.public: dict[int, Suspect] = {}
        self.firsts: list[NonfiniteReport] = []
        self.announced: set[str] = set()
        self.changed = False
        self.logged: set[str] = set()
        self.acted: set[int] = set()
        self._receiving = threading.RLock()
        self.said = b""
        self.attention: tuple[int, ...] = ()
        self.alert = 0
        self.reactions = reactions
        self.failure: Exception | None = None

    def witness(self, seed: int) -> Witness:
        """Return eyes for the columns that this rank holds."""
        rare = RareFeatures(self.m, len(self.names)) if by_coordinates(self.rule, self.m) else None
        return Witness(self.m, self.suspicion.b, seed, rare)

    def hear(self, told: NDArray[np.float64], lost: NDArray[np.float64], columns: int) -> None:
        """Take a step of so many columns: the testimony of each rank, and what it threw away.

        Row i is what rank i says; of ``lost`` it is how many values of each rank, in its columns.
        """
        if model_lost(told):  # whatever is seen of a rank is what became of the model
            self.suspicion.skip()
            self.lost = self.lost or self.suspicion.rounds
            return
        self.lost = 0
        # A rank may say anything, but it cannot have thrown away more than there is.
        shares = np.fmin(np.fmax(lost, 0.0), columns).sum(axis=0) / max(1, columns)
        self.suspicion.update(np.fmin(shares, 1.0))
        said = told.tobytes()
        if said == self.said:
            self.suspicion.rest()
            return
        self._warn_of_rare_features(told[:, -1])
        odds, findings = heard(told)
        self.said = b"" if findings else said  # the same find again is news
        self._judge(odds, findings)

    def _warn_of_rare_features(self, told: NDArray[np.float64]) -> None:
        """Warn on one rank of the parameters that ranks have told, which they do once."""
        if self.own != self._writer() or np.isnan(told).all():
            return
        found = [name for number, name in enumerate(self.names) if number in told]
        if found:
            warnings.warn(
                f"{found[0]}: the gradients are mostly zero on most ranks, and {self.rule} drops"
                " values that only few ranks have as outliers: rare tokens and experts of honest"
                " ranks are not learned. For language models and mixtures of experts use"
                f" watch(model, b={self.suspicion.b}), which averages; docs/ddp.md has numbers",
                RuntimeWarning,
                stacklevel=2,
            )

    def _writer(self) -> int:
        """Return the rank that speaks for its group: the lowest that is not flagged."""
        return self.members[min(set(range(self.m)) - set(self.named()), default=0)]

    def _judge(self, odds: NDArray[np.float64], findings: Sequence[tuple[int, Finding]]) -> None:
        now, self.changed = self.suspicion.rounds, True
        before = self.suspicion.odds
        self.suspicion.judge(odds, liars=self.suspicion.b)
        if not np.array_equal(before, self.suspicion.odds):
            wealth = np.where(self.suspicion.since > 0, np.inf, self.suspicion.odds)
            self.onset.observe(wealth, now)
        self._note_nonfinite(now, findings)
        for holder, finding in findings:
            self.traces.hear(now, holder, [finding])
        self.traces.judge(now)
        named = self.named()
        if not {finding.worker for _, finding in findings} <= set(named):
            self.alert = now + _LATELY
        elif not set(self.suspicion.unusual()) <= set(named):
            self.alert = max(self.alert, now + 1)
        near = np.flatnonzero(self.suspicion.odds > _NEARLY)
        self.attention = tuple(sorted({*near.tolist(), *named}))

    def _note_nonfinite(self, now: int, findings: Sequence[tuple[int, Finding]]) -> None:
        """Keep the first values that are not finite, and the first that more than b have seen."""
        if any(first["seen_by"] > self.suspicion.b for first in self.nonfinite):
            return
        seen: dict[int, tuple[set[int], set[int]]] = {}
        for holder, finding in findings:
            if finding.nonfinite and 0 <= finding.worker < self.m:
                holders, parameters = seen.setdefault(finding.worker, (set(), set()))
                holders.add(holder)
                parameters.add(finding.parameter)
        for row, (holders, parameters) in sorted(seen.items()):
            witnesses = len(holders - {row})
            if witnesses > self.suspicion.b or not self.nonfinite:
                names = [self.names[p] for p in sorted(parameters) if 0 <= p < len(self.names)]
                self.nonfinite.append(
                    NonfiniteReport(
                        rank=self.members[row], step=now, parameters=names, seen_by=witnesses
                    )
                )

    def instruct(self, witness: Witness) -> None:
        """Say whether the next step is looked at, and at whom more closely.

        Every step is in the beginning, and while somebody who is not named is under suspicion, was
        found to be wrong lately, or is dropped more than most; otherwise one in four.
        """
        witness.attention = self.attention
        witness.awake = self.suspicion.wants() or self.suspicion.rounds < self.alert

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must keep of what all ranks know."""
        told = {
            "hosts": list(self.hosts),
            "names": list(self.names),
            "alert": self.alert,
            "attention": self.attention,
            "traces": self.traces.state(),
            "onset": self.onset.state(),
            "nonfinite": self.nonfinite,
            "lost": self.lost,
            "public": [suspect.report() for suspect in self.public.values()],
            "firsts": self.firsts,
            "steps": 0 if self.job is None else self.job.steps,
            "logged": sorted(self.logged),
            "acted": sorted(self.acted),
        }
        return {**as_tensors(self.suspicion.state()), "told": json.dumps(told)}

    def load_state(self, state: Mapping[str, Any]) -> list[int]:
        """Go on from a checkpoint, and return the ranks whose host has changed, which are new."""
        told = json.loads(state["told"])
        if told["names"] != list(self.names):
            raise ValueError(
                f"evidence must be of the same parameters: got {len(told['names'])} of them, which"
                f" are not the {len(self.names)} of this model; leave it out to begin anew"
            )
        self.suspicion.load_state(as_arrays(state, self.suspicion.state()))
        self.traces.load_state(told["traces"])
        self.alert, self.attention = told["alert"], tuple(told["attention"])
        self.onset.load_state(told["onset"])
        self.nonfinite, self.lost, self.firsts = told["nonfinite"], told["lost"], told["firsts"]
        self.logged, self.acted = set(told["logged"]), set(told["acted"])
        self.said, self.announced = b"", set()
        self.public = {one["rank"]: Suspect.read(one) for one in told["public"]}
        if self.job is not None:
            self.job.steps = told["steps"]
            for rank, host in self.job.hosts.items():
                if rank in self.public and self.public[rank].host != host:
                    self._forget(rank)
        hosts = zip(told["hosts"], self.hosts, strict=True)
        moved = [rank for rank, (before, now) in enumerate(hosts) if before != now]
        for rank in moved:
            self.suspicion.forget(rank)
            self.traces.forget(rank)
            self.onset.forget(rank)
            self._forget(self.members[rank])
        return moved

    def _forget(self, rank: int) -> None:
        self.public.pop(rank, None)
        self.logged -= {f"suspect {rank} {kind}" for kind in KINDS}
        self.acted.discard(rank)

    def named(self) -> tuple[int, ...]:
        """Return who is suspect, on whatever grounds."""
        return tuple(np.flatnonzero((self.suspicion.since > 0) | (self.traces.since > 0)).tolist())

    def suspect(self, rank: int) -> Suspect:
        """Return what is known against a rank of the group that is named, by its row."""
        steps: dict[Literal["distances", "addresses"], int] = {
            "distances": int(self.suspicion.since[rank]),
            "addresses": int(self.traces.since[rank]),
        }
        begun = {"distances": self.onset.rounds[rank], "addresses": self.traces.onset[rank]}
        known = self.suspicion.evidence()[rank]
        traces = self._telling(rank)
        flagged, ground = min((step, ground) for ground, step in steps.items() if step)
        return Suspect(
            rank=self.members[rank],
            kind=self._kind(rank, traces),
            since=min(int(begun[ground]), flagged),
            flagged=flagged,
            dropped=known.dropped,
            expected=self.rule.expected(self.m),
            sure=_sure(self.m, known.odds, by_addresses=steps["addresses"] > 0),
            grounds=tuple(ground for ground, step in steps.items() if step),
            host=self.hosts[rank],
            places={
                self.names[parameter]: _places(trace)
                for parameter, trace in traces
                if 0 <= parameter < len(self.names)
            },
        )

    def _kind(self, rank: int, traces: Sequence[tuple[int, Trace]]) -> Kind:
        if traces and _places(traces[0][1])["kind"] == "hardware":
            return "hardware"
        if any(trace.nonfinite for _, trace in traces):
            return "nonfinite"
        along, against = self.traces.direction(rank)
        if any(trace.times for _, trace in traces):
            return "differs" if along > _ALONG else "wrong"
        return "wrong" if against > _AGAINST else "differs"

    def _telling(self, rank: int) -> list[tuple[int, Trace]]:
        """Return where a rank is absurd or, if it is nowhere, where it differs from all others."""
        found = sorted(self.traces.workers[rank].items(), key=_importance)
        least = np.inf if any(trace.times for _, trace in found) else _TELLING
        return [(parameter, trace) for parameter, trace in found if trace.weight >= least]

    def report(self) -> Report:
        """Return all of it for ``json``."""
        return Report(
            schema=SCHEMA,
            rule=str(self.rule),
            ranks=self.m,
            members=list(self.members),
            steps=self.suspicion.rounds,
            dropped=[float(share) for share in self.suspicion.shares()],
            expected=self.rule.expected(self.m),
            nonfinite=self.first_nonfinite(),
            lost=self.lost or None,
            suspects=[suspect.report() for suspect in self.suspects()],
            unusual=self.unusual(),
            failure=None if self.failure is None else str(self.failure),
        )

    def suspects(self) -> list[Suspect]:
        """Return the ranks of the job that are named; the same on every rank."""
        if self.job is None:
            return [self.suspect(row) for row in self.named()]
        return [self.public[rank] for rank in sorted(self.public)]

    def first_nonfinite(self) -> list[NonfiniteReport]:
        """Return where the first values that are not finite came from, in the whole job."""
        return self.nonfinite if self.job is None else self.firsts

    def unusual(self) -> list[int]:
        """Return the ranks of the group that are unusual lately."""
        return [self.members[row] for row in self.suspicion.unusual()]

    def send(self) -> None:
        """Tell the other groups of the job what is new; to be called at the end of each step."""
        if self.job is None:
            return
        due = self.job.due()
        news = self._news() if due else {}
        self.announced.update(news)
        self.job.send(list(news.values()), due=due)

    def _news(self) -> dict[str, dict[str, Any]]:
        """Return what the other groups have not been told, under names of their own."""
        suspects = [self.suspect(row) for row in self.named()]
        found: dict[str, dict[str, Any]] = {
            f"{one.rank} {one.kind} {one.grounds}": {"event": "suspect", **one.report()}
            for one in suspects
        } | {
            f"{first['rank']} {first['step']}": {"event": "nonfinite", **first}
            for first in self.nonfinite
        }
        return {name: entry for name, entry in found.items() if name not in self.announced}

    def receive(self) -> None:
        """Hear what the groups of the job have told one another; this may wait for them."""
        if self.job is None:
            return
        with self._receiving:
            for entry in self.job.agreed(self.job.receive()):
                self.changed = True
                self._publish(entry)

    def _publish(self, entry: dict[str, Any]) -> None:
        """Take a verdict of a group; one that is not whole is left out."""
        event = entry.pop("event")
        wanted = {"suspect": SuspectReport, "nonfinite": NonfiniteReport}.get(event)
        if wanted is None or entry.keys() != wanted.__annotations__.keys():
            return
        if event == "suspect":
            self.public[entry["rank"]] = Suspect.read(entry)
            return
        first = cast("NonfiniteReport", entry)
        if first not in self.firsts:
            known = sorted([*self.firsts, first], key=lambda one: (one["step"], one["rank"]))
            self.firsts = _earliest(known, self.suspicion.b)

    def finish(self) -> None:
        """Hear and do what there is to hear and to do, where no step is to come."""
        self.receive()
        self.react()

    def react(self) -> None:
        """Do what was asked for about named ranks; to be called in a step, on all ranks."""
        if not self.changed:
            return
        self.changed = False
        suspects, reactions = self.suspects(), self.reactions
        named = {suspect.rank for suspect in suspects}
        everyone = self.members if self.job is None else self.job.wire.ranks
        act = [one for one in suspects if one.kind in reactions.act_on]
        act = [one for one in act if one.rank not in self.acted]
        self.acted.update(one.rank for one in act)
        for suspect in act:
            self._call(reactions.on_suspect, suspect)
        unwritten = self._unwritten(suspects)
        writer = min(set(everyone) - named, default=0)
        if unwritten and reactions.log is not None and self.own == writer:
            _write(reactions.log, unwritten, self.own, self.report())
        if act and reactions.exit_code is not None:
            sys.stdout.flush()
            ranks = ", ".join(str(suspect.rank) for suspect in act)
            kinds = ", ".join(dict.fromkeys(suspect.kind for suspect in act))
            code = reactions.exit_code
            print(
                f"phocas: exiting rank {self.own} with code {code}: rank {ranks} was flagged"
                f" ({kinds})",
                file=sys.stderr,
            )
            sys.stderr.flush()
            if self.wire is not None:
                (self.wire if self.job is None else self.job.wire).leave()
            # Backward may be in another thread, or inside of C++: only this ends the process.
            os._exit(reactions.exit_code)

    def _call(self, on_suspect: Callable[[Suspect], None] | None, suspect: Suspect) -> None:
        if on_suspect is None:
            return
        try:
            on_suspect(suspect)
        except Exception:  # noqa: BLE001 - the user's code must not end a job that goes well
            reason = traceback.format_exc()
            print(
                f"phocas: on_suspect raised on rank {self.own} for rank {suspect.rank}; training"
                f" continues\n{reason}",
                file=sys.stderr,
            )

    def _unwritten(self, suspects: Sequence[Suspect]) -> list[dict[str, Any]]:
        """Return what the log lacks, and note that it no longer does."""
        found: dict[str, dict[str, Any]] = {
            f"nonfinite {first['rank']} {first['step']}": {"event": "nonfinite", **first}
            for first in self.first_nonfinite()
        } | {
            f"suspect {suspect.rank} {suspect.kind}": {"event": "suspect", **suspect.report()}
            for suspect in suspects
        }
        new = [entry for name, entry in found.items() if name not in self.logged]
        self.logged.update(found)
        return new


def _write(log: Path, new: Sequence[Mapping[str, Any]], rank: int, report: Report) -> None:
    job = {name: value for name, value in report.items() if name != "suspects"}
    common = {"time": time.time(), "told_by": rank, "job": job}
    lines = [json.dumps({**common, **entry}) + "\n" for entry in new]
    try:
        with log.open("a", encoding="utf-8") as file:
            file.writelines(lines)
    except OSError as error:  # a full disk must not end a job that goes well
        print(f"phocas: cannot write to {log}: {error}", *lines, file=sys.stderr)


def _earliest(known: Sequence[NonfiniteReport], b: int) -> list[NonfiniteReport]:
    """Return those of the earliest step, and of the earliest that more than b ranks have seen."""
    seen = [one for one in known if one["seen_by"] > b]
    steps = {each[0]["step"] for each in (known, seen) if each}
    return [one for one in known if one["step"] in steps]


def _sure(m: int, odds: float, *, by_addresses: bool) -> float:
    if by_addresses:
        return 1.0  # not a matter of chance
    return max(0.0, 1.0 - m / odds) if odds else 0.0


def _importance(item: tuple[int, Trace]) -> tuple[float, float]:
    return -item[1].weight, -item[1].share


def _places(trace: Trace) -> PlacesReport:
    kind: Literal["nonfinite", "hardware", "data", "unclear"] = "unclear"
    if trace.share <= _EVERYWHERE and trace.repeats >= _HARDWARE:
        kind = "hardware"
    elif trace.nonfinite:
        kind = "nonfinite"
    elif trace.share <= _EVERYWHERE and 0 <= trace.repeats < _DATA:
        kind = "data"
    return PlacesReport(
        since=trace.since,
        share=trace.share,
        others=trace.usual,
        addresses=list(trace.addresses),
        stride=trace.stride or None,
        repeats=max(0.0, trace.repeats),
        kind=kind,
    )


class Guard:
    """What a protected or watched model knows about its ranks; ``protect`` and ``watch`` make it.

    It is a context manager: at its end the model is reduced by the mean again, as before.

    Args:
        ledger: what is known about the ranks.
        witness: where the values that were thrown away lie.
        catch_up: waits until all that was seen is known.
        close: gives the model back.
    """

    def __init__(
        self,
        ledger: Ledger,
        witness: Witness,
        catch_up: Callable[[], None],
        close: Callable[[], None],
    ) -> None:
        self._ledger, self._witness = ledger, witness
        self._catch_up, self._close = catch_up, close
        self.closed = False

    @property
    def rule(self) -> Rule:
        """Return the rule."""
        return self._ledger.rule

    @property
    def steps(self) -> int:
        """Return how many steps have been aggregated."""
        self._catch_up()
        return self._ledger.suspicion.rounds

    @property
    def failure(self) -> Exception | None:
        """Return what ended aggregation, as it was raised, or None."""
        return self._ledger.failure

    def dropped(self) -> NDArray[np.float64]:
        """Return the share of each rank's values that was thrown away, over all steps."""
        self._catch_up()
        return self._ledger.suspicion.shares()

    def suspects(self) -> tuple[Suspect, ...]:
        """Return the ranks that differ from the others beyond chance, the same on every rank.

        ``kind`` says in what way: a rank of kind ``differs`` need not be wrong.

        By *distances*: if ranks draw from the same data and at most b lie, about gradients or about
        others, then with probability at least 0.999 no honest rank is ever accused; see
        :class:`phocas.rules.suspicion.Suspicion`. By *addresses*: more than b ranks have seen
        absurd values of it at the same addresses, three times; see
        :class:`phocas.rules.places.Traces`.
        """
        self._catch_up()
        return tuple(self._ledger.suspects())

    def nonfinite(self) -> tuple[NonfiniteReport, ...]:
        """Return where the first values that are not finite came from, the same on every rank.

        That is what ranks say that they saw; if more than b say so, one of them is honest.
        """
        self._catch_up()
        return tuple(self._ledger.first_nonfinite())

    def unusual(self) -> tuple[int, ...]:
        """Return the ranks that are lately dropped far more than most: a warning, and no proof."""
        self._catch_up()
        return tuple(self._ledger.unusual())

    def report(self) -> Report:
        """Return what is known, ready for ``json``; the text is :meth:`report_text`."""
        self._catch_up()
        return self._ledger.report()

    def report_text(self) -> str:
        """Return what is known, for people."""
        return as_text(self.report())

    def state_dict(self) -> dict[str, Any]:
        """Return what is known, for a checkpoint; to be called on all ranks, between two steps.

        What all ranks know is under ``ledger`` (in a job of several groups ``ledger4`` for the one
        that begins with rank 4), what this one has seen under ``rank3``, so that states of all
        ranks may go into one checkpoint (``torch.distributed.checkpoint``).
        """
        self._catch_up()
        self._ledger.react()  # on all ranks: a checkpoint keeps what was reported
        return {self._shared: self._ledger.state(), self._own: self._witness.state()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned on the same rank of a job alike.

        Who was named stays named, and is not told again. Ranks whose host has changed are new.
        """
        self._catch_up()
        for name in (self._shared, self._own):
            if name not in state_dict:
                found = ", ".join(map(str, state_dict)) or "nothing"
                raise ValueError(f"a guard's state must have {name!r}: got {found}")
        try:
            moved = self._ledger.load_state(state_dict[self._shared])
            self._witness.load_state(state_dict[self._own])
        except KeyError as error:
            raise ValueError(
                f"a guard's state must be of this version of phocas: it has no {error}; leave it"
                " out to begin anew"
            ) from None
        for rank in moved:
            self._witness.forget(rank)
        self._ledger.instruct(self._witness)

    @property
    def _own(self) -> str:
        return f"rank{self._ledger.own}"

    @property
    def _shared(self) -> str:
        return "ledger" if self._ledger.job is None else f"ledger{self._ledger.members[0]}"

    def close(self) -> None:
        """Reduce by the mean again from now on; what is known stays."""
        if not self.closed:
            self.closed = True
            self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
