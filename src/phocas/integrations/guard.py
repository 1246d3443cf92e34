"""What is known about the ranks of a job, whoever carries its gradients, and what follows.

A :class:`Ledger` is the one state behind every adapter: it hears what all ranks have seen in a
step, names suspects, and reacts. A :class:`Guard` is what the user holds.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Self, TypedDict

import numpy as np
from numpy.typing import NDArray

from phocas.integrations.rare import RareFeatures, by_coordinates
from phocas.integrations.reports import (
    SCHEMA,
    PlacesReport,
    Report,
    SuspectReport,
    as_text,
)
from phocas.integrations.witness import Witness, as_arrays, as_tensors, heard
from phocas.rules import Heraclius, Rule, Watch
from phocas.rules.places import Finding, Trace, Traces
from phocas.rules.suspicion import Suspicion
from phocas.specs import count, unknown

_LATELY = 8  # steps after a finding in which none is passed over
_NEARLY = 20.0  # odds at which a rank is looked at more closely, long before it is accused
_HARDWARE = 0.5  # the share of addresses that come again where a machine is broken
_DATA = 0.1
_EVERYWHERE = 0.9  # a share of wrong values whose addresses say nothing
_TELLING = 5.0  # deviations from what is usual in a parameter


@dataclass(frozen=True, slots=True)
class Suspect:
    """A rank that is named since step ``since`` (from 1), and what is known against it.

    ``dropped`` is the share of its values that was thrown away, ``expected`` what a rank loses if
    who sent a value does not matter. :class:`phocas.integrations.reports.SuspectReport` has the
    rest.

    Attributes:
        rank: who it is.
        since: since which step.
        dropped: the share of its values that was thrown away.
        expected: the share that chance would take.
        sure: how sure it is.
        grounds: on what grounds it is named.
        host: the host that it runs on.
        places: what is known of each parameter.

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
            since=self.since,
            grounds=list(self.grounds),
            sure=self.sure,
            dropped=self.dropped,
            expected=self.expected,
            layers=self.layers,
            places=dict(self.places),
        )

    def __str__(self) -> str:
        text = f"rank {self.rank}: since step {self.since}"
        for name, places in self.places.items():
            shares = f"{places['share']:.1%} of its values against {places['others']:.1%}"
            return f"{text}, {name}, {shares}"
        return f"{text}, {self.dropped:.0%} of its values against {self.expected:.1%}"


@dataclass(frozen=True, slots=True)
class Reactions:
    """What follows when a rank is named; nothing, unless it is asked for.

    Args:
        on_suspect: Called with each new :class:`Suspect`, on every rank, once.
        log: A file to which the lowest rank that is not suspect adds a line of JSON.
        exit_code: End the process of every rank with it, after the above; 1 to 255.
    """

    on_suspect: Callable[[Suspect], None] | None = None
    log: Path | None = None
    exit_code: int | None = None

    @classmethod
    def of(
        cls,
        on_suspect: Callable[[Suspect], None] | None,
        log: str | Path | None,
        exit_code: int | None,
    ) -> Self:
        """Check what was asked for."""
        if on_suspect is not None and not callable(on_suspect):
            raise TypeError(f"on_suspect must be a function of a suspect: got {on_suspect!r}")
        if exit_code is not None and not 1 <= count("protect", "exit_code", exit_code) <= 255:
            raise ValueError(f"exit_code must be 1 to 255: got {exit_code}")
        path = None if log is None else Path(log)
        if path is not None and not path.parent.is_dir():
            raise FileNotFoundError(f"log must be in a folder that exists: got {path}")
        return cls(on_suspect, path, exit_code)


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
    **mistyped: object,
) -> tuple[int, timedelta | None, Reactions]:
    """Check what was asked for, before a job runs for days: seed, timeout and reactions.

    ``own`` are the options that the caller has beside these.
    """
    for name in mistyped:
        raise TypeError(unknown("option", name, [*own, *Options.__annotations__]))
    return count("protect", "seed", seed), timeout, Reactions.of(on_suspect, log, exit_code)


class Ledger:
    """What was heard about m ranks, step by step; the same on every rank."""

    def __init__(
        self,
        rule: Rule,
        names: Sequence[str],
        hosts: Sequence[str],
        rank: int,
        reactions: Reactions,
    ) -> None:
        m = len(hosts)
        self.rule, self.m, self.names, self.hosts, self.rank = rule, m, names, hosts, rank
        self.suspicion = Suspicion(m, rule.liars(m) or None)
        self.traces = Traces(m, self.suspicion.b)
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
        if self.rank != self._writer() or np.isnan(told).all():
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
        """Return the rank that speaks for all: the lowest that is not suspect."""
        return min(set(range(self.m)) - set(self.named()), default=0)

    def _judge(self, odds: NDArray[np.float64], findings: Sequence[tuple[int, Finding]]) -> None:
        before, now = self.named(), self.suspicion.rounds
        self.suspicion.judge(odds, liars=self.suspicion.b)
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
        if new := [rank for rank in named if rank not in before]:
            self._react([self.suspect(rank) for rank in new])

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
        self.said = b""
        hosts = zip(told["hosts"], self.hosts, strict=True)
        moved = [rank for rank, (before, now) in enumerate(hosts) if before != now]
        for rank in moved:
            self.suspicion.forget(rank)
            self.traces.forget(rank)
        return moved

    def named(self) -> tuple[int, ...]:
        """Return who is suspect, on whatever grounds."""
        return tuple(np.flatnonzero((self.suspicion.since > 0) | (self.traces.since > 0)).tolist())

    def suspect(self, rank: int) -> Suspect:
        """Return what is known against a rank that is named."""
        steps: dict[Literal["distances", "addresses"], int] = {
            "distances": int(self.suspicion.since[rank]),
            "addresses": int(self.traces.since[rank]),
        }
        known = self.suspicion.evidence()[rank]
        traces = self._telling(rank)
        return Suspect(
            rank=rank,
            since=min(step for step in steps.values() if step),
            dropped=known.dropped,
            expected=self.rule.expected(self.m),
            sure=max(0.0, 1.0 - self.m / known.odds) if known.odds else 0.0,
            grounds=tuple(ground for ground, step in steps.items() if step),
            host=self.hosts[rank],
            places={
                self.names[parameter]: _places(trace)
                for parameter, trace in traces
                if 0 <= parameter < len(self.names)
            },
        )

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
            steps=self.suspicion.rounds,
            dropped=[float(share) for share in self.suspicion.shares()],
            expected=self.rule.expected(self.m),
            suspects=[self.suspect(rank).report() for rank in self.named()],
            unusual=list(self.suspicion.unusual()),
            failure=None if self.failure is None else str(self.failure),
        )

    def _react(self, new: Sequence[Suspect]) -> None:
        reactions = self.reactions
        for suspect in new:
            self._call(reactions.on_suspect, suspect)
        if reactions.log is not None and self.rank == self._writer():
            _write(reactions.log, new, self.rank, self.report())
        if reactions.exit_code is not None:
            sys.stdout.flush()
            ranks = ", ".join(str(suspect.rank) for suspect in new)
            print(f"phocas: rank {self.rank} ends, for rank {ranks} is suspect", file=sys.stderr)
            sys.stderr.flush()
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
                f"phocas: on_suspect raised on rank {self.rank} for rank {suspect.rank}; training"
                f" continues\n{reason}",
                file=sys.stderr,
            )


def _write(log: Path, new: Sequence[Suspect], rank: int, report: Report) -> None:
    job = {name: value for name, value in report.items() if name != "suspects"}
    entry = {"event": "suspect", "time": time.time(), "told_by": rank, "job": job}
    lines = [json.dumps({**entry, **suspect.report()}) + "\n" for suspect in new]
    try:
        with log.open("a", encoding="utf-8") as file:
            file.writelines(lines)
    except OSError as error:  # a full disk must not end a job that goes well
        print(f"phocas: cannot write to {log}: {error}", *lines, file=sys.stderr)


def _importance(item: tuple[int, Trace]) -> tuple[float, float]:
    return -item[1].weight, -item[1].share


def _places(trace: Trace) -> PlacesReport:
    kind: Literal["hardware", "data", "unclear"] = "unclear"
    if trace.share <= _EVERYWHERE and trace.repeats >= 0:
        if trace.repeats >= _HARDWARE:
            kind = "hardware"
        elif trace.repeats < _DATA:
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
        """Return the ranks that are wrong beyond chance, the same on every rank.

        By *distances*: if ranks draw from the same data and at most b lie, about gradients or about
        others, then with probability at least 0.999 no honest rank is ever accused; see
        :class:`phocas.rules.suspicion.Suspicion`. By *addresses*: more than b ranks have seen
        absurd values of it at the same addresses, three times; see
        :class:`phocas.rules.places.Traces`.
        """
        self._catch_up()
        return tuple(self._ledger.suspect(rank) for rank in self._ledger.named())

    def unusual(self) -> tuple[int, ...]:
        """Return the ranks that are lately dropped far more than most: a warning, and no proof."""
        self._catch_up()
        return self._ledger.suspicion.unusual()

    def report(self) -> Report:
        """Return what is known, ready for ``json``; the text is :meth:`report_text`."""
        self._catch_up()
        return self._ledger.report()

    def report_text(self) -> str:
        """Return what is known, for people."""
        return as_text(self.report())

    def state_dict(self) -> dict[str, Any]:
        """Return what is known, for a checkpoint; to be called on all ranks, between two steps.

        What all ranks know is under ``ledger``, what this one has seen under ``rank3``, so that
        states of all ranks may go into one checkpoint (``torch.distributed.checkpoint``).
        """
        self._catch_up()
        return {"ledger": self._ledger.state(), self._own: self._witness.state()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned on the same rank of a job alike.

        Who was named stays named, and is not told again. Ranks whose host has changed are new.
        """
        self._catch_up()
        for name in ("ledger", self._own):
            if name not in state_dict:
                found = ", ".join(map(str, state_dict)) or "nothing"
                raise ValueError(f"a guard's state must have {name!r}: got {found}")
        moved = self._ledger.load_state(state_dict["ledger"])
        self._witness.load_state(state_dict[self._own])
        for rank in moved:
            self._witness.forget(rank)
        self._ledger.instruct(self._witness)

    @property
    def _own(self) -> str:
        return f"rank{self._ledger.rank}"

    def close(self) -> None:
        """Reduce by the mean again from now on; what is known stays."""
        if not self.closed:
            self.closed = True
            self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
