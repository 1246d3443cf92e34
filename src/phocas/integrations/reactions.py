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
from phocas.integrations.verdicts import (
    checked_codes,
    code_of,
    job_verdict,
    verdict_of,
    write_error_file,
    write_verdict,
)

FAULTY: tuple[Kind, ...] = tuple(kind for kind in KINDS if kind != "differs")
"""The kinds of flagged ranks that reactions are for by default."""


@dataclass(slots=True)
class Reactions:
    """The reactions to a flagged rank, none by default, and a record of those that are done.

    Args:
        on_flagged: Called with each new :class:`FlaggedRank`, on every rank, once.
        log: A file to which the lowest rank that is not flagged appends a line of JSON.
        exit_code: Exit code, 1 to 255, with which every rank exits after the other reactions; or
            one for each verdict of a replay and each kind that ends the job.
        act_on: The kinds of flagged ranks that ``on_flagged``, ``verdict_file`` and ``exit_code``
            are for.
        verdict_file: A file that every rank overwrites with the verdict as JSON.
    """

    on_flagged: Callable[[FlaggedRank], None] | None = None
    log: Path | None = None
    exit_code: int | Mapping[str, int] | None = None
    act_on: tuple[Kind, ...] = FAULTY
    verdict_file: Path | None = None
    logged: set[str] = field(default_factory=set)
    """The entries that the log has."""
    acted: set[int] = field(default_factory=set)
    """The ranks that ``on_flagged`` was called for."""

    @classmethod
    def of(
        cls,
        on_flagged: Callable[[FlaggedRank], None] | None,
        log: str | Path | None,
        exit_code: int | Mapping[str, int] | None,
        act_on: Sequence[Kind] = FAULTY,
        verdict_file: str | Path | None = None,
    ) -> Self:
        """Return the reactions that the options request; raise an error for a wrong option."""
        if on_flagged is not None and not callable(on_flagged):
            raise TypeError(f"on_flagged must be a function of a flagged rank: got {on_flagged!r}")
        codes = checked_codes(exit_code)
        paths = {"log": log, "verdict_file": verdict_file}
        for name, path in paths.items():
            if path is not None and not Path(path).parent.is_dir():
                raise FileNotFoundError(f"{name} must be in a folder that exists: got {path}")
        if isinstance(act_on, str) or not set(act_on) <= set(KINDS):
            raise ValueError(f"act_on must be some of {', '.join(KINDS)}: got {act_on!r}")
        to_log, to_verdict = (None if path is None else Path(path) for path in paths.values())
        return cls(on_flagged, to_log, codes, tuple(act_on), to_verdict)

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
        if act:
            self._conclude(rank, act, leave)

    def _conclude(self, rank: int, act: Sequence[FlaggedRank], leave: Callable[[], None]) -> None:
        """Write the verdict, and exit if there is a code for it."""
        code = code_of(act, self.exit_code)
        verdict = job_verdict(act, code)
        if self.verdict_file is not None:
            write_verdict(self.verdict_file, verdict)
        if code is None:
            return
        sys.stdout.flush()
        ranks = ", ".join(str(one.rank) for one in act)
        kinds = ", ".join(dict.fromkeys(verdict_of(one) or one.kind for one in act))
        message = (
            f"phocas: exiting rank {rank} with code {code}: rank {ranks} was flagged ({kinds})"
        )
        print(message, file=sys.stderr)
        sys.stderr.flush()
        write_error_file(f"{message}; {json.dumps(verdict)}", verdict)
        leave()
        # Backward may be in another thread, or inside of C++: only this ends the process.
        os._exit(code)

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
