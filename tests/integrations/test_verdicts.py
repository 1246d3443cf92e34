"""What launchers are told about flagged ranks: actions, exit codes and files."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.integrations.scenes import ROOT, environment
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from phocas.detection.flags import Kind
from phocas.integrations.reactions import Reactions
from phocas.integrations.reports import ConfirmationReport, FlaggedRank
from phocas.integrations.verdicts import (
    ACTIONS,
    VERDICTS,
    action_of,
    code_of,
    job_verdict,
    write_verdict,
)


def flagged(rank: int, kind: Kind = "wrong", verdict: str | None = None) -> FlaggedRank:
    confirmation = None
    if verdict is not None:
        confirmation = ConfirmationReport(
            verdict=verdict, by=0, parameters={"a.weight": 0.5}, reason=""
        )
    return FlaggedRank(
        rank=rank,
        onset=5,
        dropped=0.5,
        expected=0.1,
        kind=kind,
        host=f"node{rank}",
        flagged=7,
        confirmation=confirmation,
    )


@pytest.mark.parametrize(
    ("kind", "verdict", "action"),
    [
        ("wrong", "persistent", "cordon"),
        ("differs", "persistent", "cordon"),
        ("hardware", "transient", "restart"),
        ("hardware", "data", "inspect"),
        ("wrong", "weights", "restart"),
        ("wrong", "not reproduced", "diagnose"),
        ("differs", "not reproduced", "inspect"),
        ("hardware", None, "diagnose"),
        ("nonfinite", None, "diagnose"),
        ("drifted", None, "restart"),
        ("differs", None, "inspect"),
    ],
)
def test_action_is_that_of_the_verdict_or_else_of_the_kind(
    kind: Kind, verdict: str | None, action: str
) -> None:
    assert action_of(flagged(3, kind, verdict)) == action


def test_verdict_has_the_most_urgent_rank_first() -> None:
    found = job_verdict([flagged(1, "drifted"), flagged(3, "wrong", "persistent")], 77)
    assert json.loads(json.dumps(found)) == found
    assert (found["schema"], found["action"], found["exit_code"]) == (1, "cordon", 77)
    assert [(one["rank"], one["host"]) for one in found["ranks"]] == [(3, "node3"), (1, "node1")]
    assert found["ranks"][0]["parameters"] == ["a.weight"]
    assert {one["action"] for one in found["ranks"]} <= set(ACTIONS)


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        (77, 77),
        (None, None),
        ({"persistent": 78}, None),
        ({"drifted": 79, "persistent": 78}, 79),
        ({"transient": 80, "wrong": 81}, 80),  # the verdict counts first
        ({"wrong": 81, "drifted": 79}, 79),  # the verdict of the other rank has no code
    ],
)
def test_exit_code_is_that_of_a_verdict_or_kind(codes: Any, expected: int | None) -> None:
    both = [flagged(3, "wrong", "transient"), flagged(4, "drifted")]
    found = Reactions.of(None, None, codes).exit_code
    assert code_of(both, found) == expected


@pytest.mark.parametrize(
    ("verdict", "codes", "expected"),
    [
        (None, {"persistent": 77, "hardware": 79}, 79),
        ("data", {"persistent": 77, "hardware": 79}, None),
        ("transient", {"persistent": 77, "hardware": 79}, None),
        ("not reproduced", {"persistent": 77, "hardware": 79}, 79),
        ("not reproduced", {"not reproduced": 80, "hardware": 79}, 80),
    ],
)
def test_code_of_the_kind_counts_only_without_an_answer_of_the_replay(
    verdict: str | None, codes: dict[str, int], expected: int | None
) -> None:
    assert code_of([flagged(3, "hardware", verdict)], codes) == expected


def test_codes_and_files_that_are_none_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"keys among persistent, transient, .*: got 'broken'"):
        Reactions.of(None, None, {"broken": 77})
    for code in (0, 256, {"persistent": 0}):
        with pytest.raises(ValueError, match="exit_code must be 1 to 255: got"):
            Reactions.of(None, None, code)
    with pytest.raises(FileNotFoundError, match="verdict_file must be in a folder that exists"):
        Reactions.of(None, None, None, verdict_file=tmp_path / "none" / "verdict.json")


def test_verdict_fits_into_a_termination_message(tmp_path: Path) -> None:
    path = tmp_path / "verdict.json"
    many = [flagged(rank, "wrong", VERDICTS[rank % 5]) for rank in range(200)]
    write_verdict(path, job_verdict(many, None))
    assert len(path.read_bytes()) <= 4096
    found = json.loads(path.read_text())
    assert found["action"] == "cordon"
    assert found["ranks"][0]["rank"] == 0
    assert len(found["ranks"]) >= 10


@pytest.mark.parametrize("room", [0, 1])
def test_largest_verdict_has_4096_bytes_with_its_line_end(tmp_path: Path, room: int) -> None:
    path = tmp_path / "verdict.json"
    verdict = job_verdict([flagged(0)], 77)
    verdict["ranks"][0]["host"] += "h" * (4096 - room - len(json.dumps(verdict)))
    write_verdict(path, verdict)
    assert path.stat().st_size <= 4096
    assert bool(json.loads(path.read_text())["ranks"]) == bool(room)


def test_verdict_that_cannot_be_written_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_verdict(tmp_path, job_verdict([flagged(3)], None))
    assert '"host": "node3"' in capsys.readouterr().err


SCRIPT = """
import sys
from tests.integrations.test_verdicts import flagged
from phocas.integrations.reactions import Reactions

codes = {"persistent": 77, "drifted": 78}
reactions = Reactions.of(None, None, codes, verdict_file=sys.argv[1])
act = lambda *ranks: reactions.react(0, range(8), ranks, [], dict, lambda: None)
act(flagged(2, "wrong", "data"))
print(open(sys.argv[1]).read())
act(flagged(2, "wrong", "data"), flagged(3, "hardware", "persistent"))
print("not reached")
"""


def test_torchrun_error_file_says_why_a_rank_exits(tmp_path: Path) -> None:
    """A rank without a code does not end the job; torch's own classes read the error file."""
    verdict, error = tmp_path / "verdict.json", tmp_path / "error.json"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(verdict)],
        env={**environment(), "TORCHELASTIC_ERROR_FILE": str(error)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 77, done.stderr
    assert json.loads(done.stdout)["exit_code"] is None
    found = json.loads(verdict.read_text())
    assert (found["action"], found["exit_code"]) == ("cordon", 77)
    assert [one["host"] for one in found["ranks"]] == ["node3"]
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=77, error_file=str(error))
    assert failure.timestamp > 0
    shown = str(ChildFailedError("train.py", {0: failure}))
    assert "rank 3 was flagged (persistent)" in shown
    assert '"host": "node3"' in shown
    assert json.loads(error.read_text())["message"]["extraInfo"]["phocas"] == found


HOST = socket.gethostname()
TORCHRUN = """#!/bin/sh
echo "$@" >> attempts
number=$(wc -l < attempts)
[ -f "verdict.$number" ] && cp "verdict.$number" verdict.json
exit "$(cat "code.$number" 2> /dev/null || echo 1)"
"""
"""A torchrun whose n-th call ends with the verdict and the code that are prepared for it."""


def launch(folder: Path, **variables: str) -> tuple[int, list[str]]:
    """Run the script of docs/flagged.md; return its exit code, and how torchrun was called."""
    page = (ROOT / "docs/flagged.md").read_text("utf-8")
    script = re.search(r"```sh\n(#!/bin/sh\n.*?)```", page, re.DOTALL)
    assert script is not None
    env = {**environment(), "HEAD": "localhost:0", "VERDICT": "verdict.json", **variables}
    (folder / "verdict.json").write_text(json.dumps(job_verdict([flagged(3)], 99)))  # a former one
    done = subprocess.run(
        ["sh", "-c", script[1], "launch.sh", "--lr", "0.1"], cwd=folder, env=env, check=False
    )
    attempts = folder / "attempts"
    return done.returncode, attempts.read_text().splitlines() if attempts.exists() else []


def here(one: FlaggedRank) -> FlaggedRank:
    return dataclasses.replace(one, host=HOST)


CORDON, DIAGNOSE = flagged(3, "wrong", "persistent"), flagged(3, "hardware")
RESTART = flagged(3, "wrong", "transient")


@pytest.mark.skipif(shutil.which("jq") is None, reason="the script needs jq")
@pytest.mark.parametrize(
    ("calls", "expected", "attempts"),
    [
        ([0], 0, 1),
        ([1], 1, 1),  # an error of train.py, or a signal: nobody is flagged
        ([143], 143, 1),
        ([(flagged(3, "differs"), None)], 1, 1),  # the verdict did not end the job
        ([(here(CORDON), 77)], 77, 1),
        ([(here(DIAGNOSE), 77)], 77, 1),
        ([(CORDON, 77), 0], 0, 2),
        ([(here(RESTART), 78), 0], 0, 2),
        ([(CORDON, 77), 1], 1, 2),
        ([(RESTART, 78)] * 3, 78, 3),
    ],
)
def test_script_of_the_page_restarts_only_hosts_that_are_not_flagged(
    tmp_path: Path, calls: list[Any], expected: int, attempts: int
) -> None:
    for number, call in enumerate(calls, 1):
        if isinstance(call, int):
            (tmp_path / f"code.{number}").write_text(str(call))
        else:
            one, code = call
            text = json.dumps(job_verdict([one], code))
            (tmp_path / f"verdict.{number}").write_text(text)
    fake = tmp_path / "bin" / "torchrun"
    fake.parent.mkdir()
    fake.write_text(TORCHRUN)
    fake.chmod(0o755)
    code, made = launch(tmp_path, PATH=f"{fake.parent}{os.pathsep}{os.environ['PATH']}")
    assert (code, len(made)) == (expected, attempts)
    assert all(line.endswith("train.py --lr 0.1") for line in made)
    assert len({line.split("--rdzv-id")[1] for line in made}) == attempts


TRAIN = """
import pathlib
import sys
from tests.integrations.test_verdicts import CORDON, here
from phocas.integrations.reactions import Reactions

assert sys.argv[1:] == ["--lr", "0.1"]
attempts = pathlib.Path("attempts")
done = attempts.read_text() if attempts.exists() else ""
attempts.write_text(done + "attempt\\n")
reactions = Reactions.of(None, None, {"persistent": 77}, verdict_file="verdict.json")
reactions.react(0, range(8), [here(CORDON) if done else CORDON], [], dict, lambda: None)
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("jq") is None, reason="the script needs jq")
def test_script_of_the_page_runs_with_torchrun(tmp_path: Path) -> None:
    """A persistent fault of another host, then one of this host."""
    (tmp_path / "train.py").write_text(TRAIN)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    assert launch(tmp_path, NNODES="1", PATH=path) == (77, ["attempt", "attempt"])
