"""The verdict on flagged ranks for launchers: a small JSON file, and torchrun's error file."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypedDict, get_args

from phocas.detection.flags import KINDS
from phocas.integrations.reports import FlaggedRank
from phocas.specs import count

Verdict: TypeAlias = Literal["persistent", "transient", "data", "weights", "not reproduced"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
"""What a replay says about a flagged rank.

- ``persistent``: the device of the rank computes another gradient than the other device does from
  the same data, weights and random state.
- ``transient``: both devices compute the same gradient now, which is not the one that the rank had.
- ``data``: both devices compute the gradient that the rank had: its data or settings are unusual.
- ``weights``: the weights of the two ranks differ, so that there is nothing to replay.
- ``not reproduced``: there is no answer; the report has the reason.
"""

Action: TypeAlias = Literal["cordon", "diagnose", "restart", "inspect"]
ACTIONS: tuple[Action, ...] = get_args(Action)
"""What to do about a flagged rank, the most urgent first.

- ``cordon``: take its host out of service, and restart the job elsewhere.
- ``diagnose``: test its host before it is used again.
- ``restart``: restart the job from a checkpoint; the host may stay.
- ``inspect``: look at the data and the settings of the rank; the host is not at fault.
"""

SCHEMA = 1
_LARGEST = 4096  # bytes of a termination message in Kubernetes
_SHOWN = 4  # parameters of a rank
_BY_VERDICT: dict[str, Action] = {
    "persistent": "cordon",
    "transient": "restart",
    "weights": "restart",
    "data": "inspect",
}
_BY_KIND: dict[str, Action] = {"drifted": "restart", "differs": "inspect"}


class RankVerdict(TypedDict):
    """A flagged rank in a verdict."""

    rank: int
    """Its global rank."""
    host: str
    """The name of its host."""
    action: Action
    """What to do: see :data:`ACTIONS`."""
    kind: str
    """What seems to be wrong: see :data:`phocas.detection.flags.KINDS`."""
    verdict: str | None
    """What a replay says: see :data:`VERDICTS`; None without one."""
    since: int
    """The first step (from 1) with evidence."""
    flagged: int
    """The step in which it was flagged."""
    parameters: list[str]
    """A few parameters in which it is wrong."""


class JobVerdict(TypedDict):
    """The content of a verdict file."""

    schema: int
    """The version of the fields: 1 until a field changes its meaning or is removed."""
    action: Action
    """The most urgent action of all ranks."""
    exit_code: int | None
    """The code that all ranks exit with, or None if the job continues."""
    ranks: list[RankVerdict]
    """The flagged ranks, the most urgent first."""


def action_of(flagged: FlaggedRank) -> Action:
    """Return what to do about a flagged rank: by the verdict of a replay, else by its kind."""
    verdict = verdict_of(flagged)
    return _BY_VERDICT.get(verdict or "") or _BY_KIND.get(flagged.kind, "diagnose")


def verdict_of(flagged: FlaggedRank) -> str | None:
    """Return the verdict of a replay, or None if there was none."""
    return None if flagged.confirmation is None else flagged.confirmation["verdict"]


def checked_codes(exit_code: object) -> int | dict[str, int] | None:
    """Return an exit code, or one for each verdict or kind; raise an error if it is invalid."""
    if exit_code is None:
        return None
    if not isinstance(exit_code, Mapping):
        return _checked(exit_code)
    for name in exit_code:
        if name not in (*VERDICTS, *KINDS):
            known = ", ".join((*VERDICTS, *KINDS))
            raise ValueError(f"exit_code must have keys among {known}: got {name!r}")
    return {name: _checked(code) for name, code in exit_code.items()}


def _checked(code: object) -> int:
    if not 1 <= count("protect", "exit_code", code) <= 255:
        raise ValueError(f"exit_code must be 1 to 255: got {code}")
    return int(code)  # type: ignore[call-overload, no-any-return]


def code_of(flagged: Sequence[FlaggedRank], codes: int | Mapping[str, int] | None) -> int | None:
    """Return the exit code for flagged ranks: that of the most urgent one that has a code.

    The code of the kind counts for a rank without a replay. It also counts if the replay has no
    answer and there is no code for ``not reproduced``. Any other verdict counts alone.
    """
    for one in by_urgency(flagged):
        if not isinstance(codes, Mapping):
            return codes
        verdict = verdict_of(one)
        names = [one.kind] if verdict is None else [verdict]
        if verdict == "not reproduced":
            names.append(one.kind)
        for name in names:
            if name in codes:
                return codes[name]
    return None


def by_urgency(flagged: Sequence[FlaggedRank]) -> list[FlaggedRank]:
    """Return the flagged ranks, the most urgent first."""
    return sorted(flagged, key=lambda one: (ACTIONS.index(action_of(one)), one.rank))


def job_verdict(flagged: Sequence[FlaggedRank], code: int | None) -> JobVerdict:
    """Return the verdict on a job, the same on every rank."""
    ranks = [
        RankVerdict(
            rank=one.rank,
            host=one.host,
            action=action_of(one),
            kind=one.kind,
            verdict=verdict_of(one),
            since=one.onset,
            flagged=one.flagged,
            parameters=_parameters(one),
        )
        for one in by_urgency(flagged)
    ]
    return JobVerdict(schema=SCHEMA, action=ranks[0]["action"], exit_code=code, ranks=ranks)


def _parameters(one: FlaggedRank) -> list[str]:
    found = () if one.confirmation is None else one.confirmation["parameters"]
    return list(found or one.places or one.tensors)[:_SHOWN]


def write_verdict(path: Path, verdict: JobVerdict) -> None:
    """Write a verdict, in at most 4096 bytes; print it if the file cannot be written.

    All ranks of a host write the same bytes, so that it does not matter which is the last. The file
    is written in place, because Kubernetes mounts it.
    """
    ranks = verdict["ranks"]
    while len(text := json.dumps({**verdict, "ranks": ranks}) + "\n") > _LARGEST and ranks:
        bare = [{**one, "parameters": []} for one in ranks]
        ranks = bare if bare != ranks else ranks[:-1]  # type: ignore[assignment]
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:  # a full disk must not end a healthy job
        print(f"phocas: cannot write to {path}: {error}", text, end="", file=sys.stderr)


def write_error_file(message: str, verdict: JobVerdict) -> None:
    """Tell torchrun why this process exits, if it was started by torchrun.

    torchrun prints the message of the first rank that failed, and copies the file to its own error
    file, as for an exception that ``torch.distributed.elastic`` has recorded.
    """
    name = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not name:
        return
    extra: dict[str, Any] = {"timestamp": str(int(time.time())), "phocas": verdict}
    content = {"message": {"message": message, "extraInfo": extra}}
    try:
        Path(name).write_text(json.dumps(content), encoding="utf-8")
    except OSError as error:
        print(f"phocas: cannot write to {name}: {error}", file=sys.stderr)
