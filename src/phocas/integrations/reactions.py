"""The reactions to a flagged rank: a callback, a line in a log, an exit code."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from phocas.detection.flags import KINDS, Kind
from phocas.integrations.reports import FlaggedRank, NonfiniteReport, Report
from phocas.specs import count

FAULTY: tuple[Kind, ...] = tuple(kind for kind in KINDS if kind != "differs")
"""The kinds of flagged ranks that reactions are for by default."""


@dataclass(slots=True)
class Reactions:
    """The reactions to a flagged rank, and which of them are done; no reaction by default.

    Args:
        on_flagged: Called with each new :class:`FlaggedRank`, on every rank, once.
        log: A file to which the lowest rank that is not flagged appends a line of JSON.
        exit_code: Exit code, 1 to 255, with which every rank exits after the other reactions.
        act_on: The kinds of flagged ranks that ``on_flagged`` and ``exit_code`` are for.
    """

    on_flagged: Callable[[FlaggedRank], None] | None = None
    log: Path | None = None
    exit_code: int | None = None
    act_on: tuple[Kind, ...] = FAULTY
    logged: set[str] = field(default_factory=set)
    """The entries that the log has."""
    acted: set[int] = field(default_factory=set)
    """The ranks that ``on_flagged`` was called for."""

    @classmethod
    def of(
        cls,
        on_flagged: Callable[[FlaggedRank], None] | None,
        log: str | Path | None,
        exit_code: int | None,
        act_on: Sequence[Kind] = FAULTY,
    ) -> Self:
        """Check the options."""
        if on_flagged is not None and not callable(on_flagged):
            raise TypeError(f"on_flagged must be a function of a flagged rank: got {on_flagged!r}")
        if exit_code is not None and not 1 <= count("protect", "exit_code", exit_code) <= 255:
            raise ValueError(f"exit_code must be 1 to 255: got {exit_code}")
        path = None if log is None else Path(log)
        if path is not None and not path.parent.is_dir():
            raise FileNotFoundError(f"log must be in a folder that exists: got {path}")
        if isinstance(act_on, str) or not set(act_on) <= set(KINDS):
            raise ValueError(f"act_on must be some of {', '.join(KINDS)}: got {act_on!r}")
        return cls(on_flagged, path, exit_code, tuple(act_on))

    def react(
        self,
        rank: int,
        everyone: Sequence[int],
        flagged: Sequence[FlaggedRank],
        nonfinite: Sequence[NonfiniteReport],
        report: Callable[[], Report],
        leave: Callable[[], None],
    ) -> None:
        """Execute the reactions that are configured and not done yet.

        Args:
            rank: the global rank of this process.
            everyone: the global ranks of the job.
            flagged: the flagged ranks.
            nonfinite: the first values that were not finite.
            report: returns the report that an entry of the log contains.
            leave: waits until all ranks are about to exit.
        """
        act = [one for one in flagged if one.kind in self.act_on and one.rank not in self.acted]
        self.acted.update(one.rank for one in act)
        for one in act:
            self._call(rank, one)
        unwritten = self.unwritten(flagged, nonfinite)
        writer = min(set(everyone) - {one.rank for one in flagged}, default=0)
        if unwritten and self.log is not None and rank == writer:
            write_log(self.log, unwritten, rank, report())
        if act and self.exit_code is not None:
            sys.stdout.flush()
            ranks = ", ".join(str(one.rank) for one in act)
            kinds = ", ".join(dict.fromkeys(one.kind for one in act))
            print(
                f"phocas: exiting rank {rank} with code {self.exit_code}: rank {ranks} was flagged"
                f" ({kinds})",
                file=sys.stderr,
            )
            sys.stderr.flush()
            leave()
            # Backward may be in another thread, or inside of C++: only this ends the process.
            os._exit(self.exit_code)

    def _call(self, rank: int, flagged: FlaggedRank) -> None:
        if self.on_flagged is None:
            return
        try:
            self.on_flagged(flagged)
        except Exception:  # noqa: BLE001 - the user's code must not end a healthy job
            reason = traceback.format_exc()
            print(
                f"phocas: on_flagged raised on rank {rank} for rank {flagged.rank}; training"
                f" continues\n{reason}",
                file=sys.stderr,
            )

    def unwritten(
        self, flagged: Sequence[FlaggedRank], nonfinite: Sequence[NonfiniteReport]
    ) -> list[dict[str, Any]]:
        """Return the entries that are not in the log yet, and record these as written."""
        found: dict[str, dict[str, Any]] = {
            f"nonfinite {first['rank']} {first['step']}": {"event": "nonfinite", **first}
            for first in nonfinite
        } | {
            f"suspect {one.rank} {one.kind}": {"event": "suspect", **one.report()}
            for one in flagged
        }
        new = [entry for name, entry in found.items() if name not in self.logged]
        self.logged.update(found)
        return new

    def forget(self, rank: int) -> None:
        """Discard the record of reactions to a rank."""
        self.logged -= {f"suspect {rank} {kind}" for kind in KINDS}
        self.acted.discard(rank)


def write_log(log: Path, new: Sequence[Mapping[str, Any]], rank: int, report: Report) -> None:
    """Append entries to a log; print the entries if the log cannot be written."""
    job = {name: value for name, value in report.items() if name != "suspects"}
    common = {"time": time.time(), "told_by": rank, "job": job}
    lines = [json.dumps({**common, **entry}) + "\n" for entry in new]
    try:
        with log.open("a", encoding="utf-8") as file:
            file.writelines(lines)
    except OSError as error:  # a full disk must not end a healthy job
        print(f"phocas: cannot write to {log}: {error}", *lines, file=sys.stderr)
