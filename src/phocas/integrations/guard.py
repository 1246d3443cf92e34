"""What is known about the ranks of a job, whoever carries its gradients, and what follows.

A :class:`Ledger` is the one state behind every adapter: it hears what all ranks have seen in a
step, names suspects, and reacts. A :class:`Guard` is what the user holds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Literal, Self, TypedDict

import numpy as np
from numpy.typing import NDArray

from phocas.integrations.reports import (
    SCHEMA,
    PlacesReport,
    Report,
    SuspectReport,
    as_text,
)
from phocas.integrations.witness import Witness
from phocas.rules import Rule
from phocas.rules.places import Finding, Trace, Traces
from phocas.rules.suspicion import Suspicion
from phocas.specs import count

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
        """Check what was asked for, before a job runs for days."""
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
    timeout: timedelta | None
    on_suspect: Callable[[Suspect], None] | None
    log: str | Path | None
    exit_code: int | None


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
        self.reactions = reactions
        self.failure: Exception | None = None

    def witness(self, seed: int) -> Witness:
        """Return eyes for the columns that this rank holds."""
        return Witness(self.m, self.suspicion.b, seed)

    def hear(
        self,
        odds: NDArray[np.float64],
        findings: Sequence[Sequence[Finding]],
        dropped: NDArray[np.float64],
    ) -> None:
        """Take a step: what each rank has won and found, and whose values were thrown away."""
        before = self.named()
        self.suspicion.judge(odds, liars=self.suspicion.b)
        self.suspicion.update(dropped)
        for holder, found in enumerate(findings):
            self.traces.hear(self.suspicion.rounds, holder, found)
        self.traces.judge(self.suspicion.rounds)
        if new := [rank for rank in self.named() if rank not in before]:
            self._react([self.suspect(rank) for rank in new])

    def attention(self) -> tuple[int, ...]:
        """Return the ranks to be looked at more closely."""
        near = np.flatnonzero(self.suspicion.odds > _NEARLY)
        return tuple(sorted({*near.tolist(), *self.named()}))

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
            if reactions.on_suspect is not None:
                reactions.on_suspect(suspect)
        writer = min(set(range(self.m)) - set(self.named()), default=0)
        if reactions.log is not None and self.rank == writer:
            _write(reactions.log, new, self.rank)
        if reactions.exit_code is not None:
            sys.stdout.flush()
            ranks = ", ".join(str(suspect.rank) for suspect in new)
            print(f"phocas: rank {self.rank} ends, for rank {ranks} is suspect", file=sys.stderr)
            sys.stderr.flush()
            # Backward may be in another thread, or inside of C++: only this ends the process.
            os._exit(reactions.exit_code)


def _write(log: Path, new: Sequence[Suspect], rank: int) -> None:
    entry = {"event": "suspect", "time": time.time(), "told_by": rank}
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
        catch_up: waits until all that was seen is known.
        close: gives the model back.
    """

    def __init__(
        self, ledger: Ledger, catch_up: Callable[[], None], close: Callable[[], None]
    ) -> None:
        self._ledger, self._catch_up, self._close = ledger, catch_up, close
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

    def close(self) -> None:
        """Reduce by the mean again from now on; what is known stays."""
        if not self.closed:
            self.closed = True
            self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
