"""Runs that are killed, interrupted, stopped and resumed, in processes of their own."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pytest
from safetensors.numpy import load_file

from phocas.cli import main
from phocas.experiments.config import make_config
from phocas.experiments.locks import RunTakenError, actual_status, checkpoint_path, state_path
from phocas.experiments.results import Results
from phocas.experiments.runner import execute, final_model
from phocas.training.checkpoints import DamagedCheckpointError

if TYPE_CHECKING:
    from pathlib import Path

    from phocas.experiments.config import RunConfig
    from phocas.experiments.results import RunRecord

TINY = {
    "dataset": "synthetic:train=200,test=50,side=8",
    "model": "mlp:hidden=8,dropout=0.2",
    "workers": 9,
    "servers": 3,
    "rounds": 40,
    "batch_size": 8,
    "rule": "phocas:b=3",
    "attack": "gaussian:q=3",
    "evaluate_every": 4,
    "worker_momentum": 0.5,
    "checkpoint_rounds": 3,
    "threads": 1,
}


def write_toml(path: Path, **values: Any) -> Path:
    lines = [f"{key} = {json.dumps(value)}" for key, value in {**TINY, **values}.items()]
    path.write_text("\n".join(lines))
    return path


# The command, which waits at a line with this prefix until its input ends.
GATED = """
import sys
from phocas.cli import main

class Gated:
    def __init__(self, stream):
        self.stream = stream
    def __getattr__(self, name):
        return getattr(self.stream, name)
    def write(self, text):
        self.stream.write(text)
        self.stream.flush()
        if text.startswith("round 36/"):
            sys.stdin.read()

sys.argv[0] = "phocas"
sys.stderr = Gated(sys.stderr)
main()
"""


@dataclass
class Output:
    stdout: str
    stderr: str


class Phocas(Protocol):
    def __call__(self, *words: object, status: int = 0) -> Output: ...


@pytest.fixture
def phocas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Phocas:
    """Run a command in this process, in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def run(*words: object, status: int = 0) -> Output:
        monkeypatch.setattr(sys, "argv", ["phocas", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        output = Output(*capsys.readouterr())
        assert (ended.value.code or 0) == status, output.stderr
        return output

    return run


def start_and_await(round_: int, *words: object, cwd: Path) -> subprocess.Popen[str]:
    """Start a run and return when it reports its first round; it ends with its input."""
    child = subprocess.Popen(
        [sys.executable, "-c", GATED, *map(str, words)],
        cwd=cwd,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stderr is not None
    for line in child.stderr:
        if line.startswith(f"round {round_}/"):
            return child
    raise AssertionError(f"the run ended before round {round_}")


def content(path: Path, run: int) -> dict[str, list[dict[str, Any]]]:
    """Return what a run stored in the results, without times."""
    with Results(path) as results:
        tables = {
            name: results.table(name, run)
            for name in ("rounds", "evaluations", "dropped", "dropped_by_server")
        }
    return {
        name: [
            {k: v for k, v in row.items() if not k.endswith(("_ms", "seconds")) and k != "run"}
            for row in rows
        ]
        for name, rows in tables.items()
    }


def same_models(first: Path, second: Path) -> bool:
    one, two = load_file(first), load_file(second)
    return one.keys() == two.keys() and all(np.array_equal(one[key], two[key]) for key in one)


def test_a_run_killed_again_and_again_ends_with_the_same_bits(
    tmp_path: Path, phocas: Phocas
) -> None:
    toml = write_toml(tmp_path / "run.toml")
    whole = make_config({**TINY, "results": str(tmp_path / "whole.sqlite")})
    expected = execute(whole, model_file=tmp_path / "whole.safetensors")

    rng = np.random.default_rng(11)
    killed = tmp_path / "killed.sqlite"
    # Lines come every fourth round, so the kill hits a round, a write or a checkpoint.
    for round_ in sorted(4 * int(k) for k in rng.choice(np.arange(1, 10), 2, replace=False)):
        child = start_and_await(
            round_, "train", "--config", toml, "--results", killed, cwd=tmp_path
        )
        child.send_signal(signal.SIGKILL)
        child.communicate()
        with Results(killed) as results:
            (record,) = results.runs()
            assert record.status == "running"
            assert actual_status(record, killed) == "killed"
    ended = phocas(
        "train", "--config", toml, "--results", killed, "--json",
        "--save-model", tmp_path / "killed.safetensors",
    )  # fmt: skip
    assert "continuing run 1 from round" in ended.stderr
    outcome = json.loads(ended.stdout)
    assert (outcome["status"], outcome["rounds_done"], outcome["id"]) == ("complete", 40, 1)
    assert outcome["final_accuracy"] == expected.final_accuracy
    assert same_models(tmp_path / "whole.safetensors", tmp_path / "killed.safetensors")
    assert content(killed, 1) == content(tmp_path / "whole.sqlite", expected.id)
    left = (tmp_path / "killed.sqlite.checkpoints").iterdir()
    assert [path.name for path in left] == ["run-1.safetensors"]


def test_interrupted_run_prints_how_to_continue_and_continues(
    tmp_path: Path, phocas: Phocas
) -> None:
    toml = write_toml(tmp_path / "run.toml", checkpoint_rounds=1000)
    child = start_and_await(8, "train", "--config", toml, "--seed", 4, cwd=tmp_path)
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate()
    assert child.returncode == 130
    assert "interrupted after round" in errors
    assert f"resume with:\n  phocas train --config {toml} --seed 4\n" in errors
    listed = json.loads(phocas("results", "list", "--json").stdout)
    assert [run["status"] for run in listed] == ["interrupted"]

    done = phocas("train", "--config", toml, "--seed", 4)
    assert "continuing run 1 from round" in done.stderr
    assert "run 1 is in phocas.sqlite" in done.stdout
    whole = make_config({**TINY, "seed": 4, "results": str(tmp_path / "whole.sqlite")})
    execute(whole)
    assert content(tmp_path / "phocas.sqlite", 1) == content(tmp_path / "whole.sqlite", 1)


def test_a_complete_run_is_not_run_again(tmp_path: Path) -> None:
    config = make_config({**TINY, "rounds": 5, "results": str(tmp_path / "r.sqlite")})
    first = execute(config)
    messages: list[str] = []
    assert execute(config, tell=messages.append, model_file=tmp_path / "late.safetensors") == first
    assert messages == [f"run 1 in {config.results} is complete already"]
    again = execute(config, restart=True, model_file=tmp_path / "again.safetensors")
    assert again.id == 2
    assert same_models(tmp_path / "late.safetensors", tmp_path / "again.safetensors")
    assert final_model(config.results, 1).keys() == final_model(config.results, 2).keys()


def interrupt(config: RunConfig, round_: int) -> RunRecord:
    """Run a configuration up to a round."""
    done: list[int] = []
    return execute(
        config,
        watch=lambda _config, one, _evaluation: done.append(one.number),
        should_stop=lambda: done[-1] == round_,
    )


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def test_damaged_checkpoint_is_reported_and_the_previous_one_used(tmp_path: Path) -> None:
    whole = make_config({**TINY, "results": str(tmp_path / "whole.sqlite")})
    execute(whole)
    config = make_config({**TINY, "results": str(tmp_path / "r.sqlite")})
    assert interrupt(config, 11).rounds_done == 11
    newest = checkpoint_path(config.results, config.identity())
    flip_a_bit(newest)
    messages: list[str] = []
    assert execute(config, tell=messages.append).status == "complete"
    (line,) = messages
    assert f"checkpoint {newest} is damaged" in line
    assert line.endswith("the previous one is intact: continuing run 1 from round 9")
    assert content(tmp_path / "r.sqlite", 1) == content(tmp_path / "whole.sqlite", 1)

    flip_a_bit(state_path(config.results, 1))
    with pytest.raises(DamagedCheckpointError, match=r"run-1\.safetensors is damaged"):
        execute(config, model_file=tmp_path / "model.safetensors")


def test_run_killed_between_checkpoints_continues_from_the_first(tmp_path: Path) -> None:
    config = make_config({**TINY, "rounds": 15, "results": str(tmp_path / "r.sqlite")})
    interrupt(config, 11)
    checkpoint_path(config.results, config.identity()).unlink()
    messages: list[str] = []
    assert execute(config, tell=messages.append).rounds_done == 15
    assert messages == ["continuing run 1 from round 9"]


def test_run_without_intact_checkpoint_is_rejected_and_unchanged(tmp_path: Path) -> None:
    config = make_config({**TINY, "results": str(tmp_path / "r.sqlite")})
    interrupt(config, 11)
    for path in (tmp_path / "r.sqlite.checkpoints").glob("*.safetensors"):
        flip_a_bit(path)
    with pytest.raises(DamagedCheckpointError, match="no checkpoint of run 1 is intact"):
        execute(config)
    with Results(tmp_path / "r.sqlite") as results:
        assert len(results.table("rounds", 1)) == 11
    assert execute(config, restart=True).id == 2


def test_restart_keeps_the_state_of_the_interrupted_run(tmp_path: Path) -> None:
    config = make_config({**TINY, "rounds": 15, "results": str(tmp_path / "r.sqlite")})
    interrupt(config, 7)
    assert execute(config, restart=True).id == 2
    assert final_model(config.results, 1).keys() == final_model(config.results, 2).keys()
    with Results(tmp_path / "r.sqlite") as results:
        assert [(run.id, run.status) for run in results.runs()] == [
            (1, "interrupted"),
            (2, "complete"),
        ]


@pytest.mark.parametrize("first", [{"rounds": 18}, {"rounds": 30, "stop": 14}])
def test_longer_run_continues_a_shorter_one_with_the_same_bits(
    tmp_path: Path, first: dict[str, int]
) -> None:
    whole = make_config({**TINY, "results": str(tmp_path / "whole.sqlite")})
    expected = execute(whole, model_file=tmp_path / "whole.safetensors")
    config = make_config({**TINY, "results": str(tmp_path / "r.sqlite")})
    shorter = config.model_copy(update={"rounds": first["rounds"]})
    ended = interrupt(shorter, first["stop"]) if "stop" in first else execute(shorter)
    before = content(tmp_path / "r.sqlite", 1)

    messages: list[str] = []
    watched: list[int] = []
    record = execute(
        config,
        tell=messages.append,
        watch=lambda _config, one, _evaluation: watched.append(one.number),
        model_file=tmp_path / "model.safetensors",
    )
    assert watched[0] == ended.rounds_done + 1
    assert messages == [
        f"run 2 is run 1 with more rounds: continuing from round {ended.rounds_done}"
    ]
    assert (record.id, record.origin) == (2, f"run 1, round {ended.rounds_done}")
    assert record.final_accuracy == expected.final_accuracy
    assert same_models(tmp_path / "whole.safetensors", tmp_path / "model.safetensors")
    assert content(tmp_path / "r.sqlite", 2) == content(tmp_path / "whole.sqlite", 1)
    assert content(tmp_path / "r.sqlite", 1) == before  # the shorter run is unchanged


def test_killed_longer_run_does_not_restart_at_round_0(tmp_path: Path) -> None:
    config = make_config({**TINY, "results": str(tmp_path / "r.sqlite")})
    execute(config.model_copy(update={"rounds": 18}))

    def die(*_told: object) -> None:
        raise SystemExit("killed in the first round")

    with pytest.raises(SystemExit):
        execute(config, watch=die)
    messages: list[str] = []
    assert execute(config, tell=messages.append).status == "complete"
    assert messages == ["continuing run 2 from round 18"]


def test_run_in_progress_is_rejected(tmp_path: Path) -> None:
    config = make_config({**TINY, "results": str(tmp_path / "r.sqlite")})
    refusals = []

    def meddle(_config: object, done: Any, _evaluation: object) -> None:
        if done.number == 2:
            with Results(tmp_path / "r.sqlite") as results:
                assert actual_status(results.runs()[0], tmp_path / "r.sqlite") == "running"
            with pytest.raises(RunTakenError, match="another process") as refusal:
                execute(config, patience=0)
            refusals.append(refusal)

    assert execute(config, watch=meddle).status == "complete"
    assert len(refusals) == 1


def test_stopped_run_gives_the_reason(tmp_path: Path, phocas: Phocas) -> None:
    options = ("--rule", "mean", "--attack", "crash:worker=2,round=3", "--on-nonfinite", "stop")
    toml = write_toml(tmp_path / "run.toml")
    done = phocas("train", "--config", toml, *options, "--json", status=3)
    outcome = json.loads(done.stdout)
    assert outcome["status"] == "stopped"
    assert outcome["rounds_done"] == 4
    assert outcome["message"] == "the aggregate of round 4 was not finite"


def test_skipped_rounds_are_reported(tmp_path: Path, phocas: Phocas) -> None:
    options = ("--rule", "mean", "--attack", "crash:worker=2,round=30")
    toml = write_toml(tmp_path / "run.toml")
    done = phocas("train", "--config", toml, *options)
    heading, row = (line.split() for line in done.stdout.splitlines()[1:3])
    assert row[heading.index("skipped")] == "10"
    assert "10 rounds had an aggregate with NaN or inf, and were skipped" in done.stderr


def test_late_workers_are_not_reported_as_byzantine(tmp_path: Path, phocas: Phocas) -> None:
    options = ("--rule", "phocas:b=1", "--speeds", "slow:workers=2,factor=inf")
    toml = write_toml(tmp_path / "run.toml", rounds=2, attack="none")
    done = phocas("train", "--config", toml, *options, "--virtual-deadline", "2")
    assert "2 rounds had an aggregate with NaN or inf" in done.stderr
    assert "values of late or silent workers count as wrong" in done.stderr
    assert "Byzantine" not in done.stderr


def test_failing_engine_names_the_results_only_if_there_are_some(
    tmp_path: Path, phocas: Phocas
) -> None:
    toml = write_toml(tmp_path / "run.toml", rounds=2)
    silent = ("--asynchronous", "buffers=9", "--speeds", "slow:workers=4,factor=inf")
    begun = phocas("train", "--config", toml, *silent, status=3)
    assert begun.stderr.rstrip().endswith("; what was done is in phocas.sqlite, run 1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = server.getsockname()[1]
    nowhere = ("--engine", "ray", "--address", f"127.0.0.1:{closed}", "--results", "no.sqlite")
    refused = phocas("train", "--config", toml, *nowhere, status=3)
    assert refused.stderr.startswith("phocas: ")
    assert "what was done" not in refused.stderr
    assert not (tmp_path / "no.sqlite").exists()


def test_a_failing_run_is_recorded_as_failed(tmp_path: Path) -> None:
    config = make_config({**TINY, "results": str(tmp_path / "r.sqlite")})

    def trip(*_: object) -> None:
        raise RuntimeError("tripped")

    with pytest.raises(RuntimeError, match="tripped"):
        execute(config, watch=trip)
    with Results(tmp_path / "r.sqlite") as results:
        (record,) = results.runs()
    assert record.status == "failed"
    assert re.fullmatch(r".*test_runner\.py:\d+: RuntimeError: tripped", record.message or "")


def test_invalid_settings_end_with_one_line_and_no_results_file(
    tmp_path: Path, phocas: Phocas
) -> None:
    for words, message in (
        (("--rule", "krum:b=9"), "rule: Krum needs"),
        (("--attack", "gambler:server=20"), "attack: gambler needs server < servers"),
        (("--attack", "bit-flip:columns=1000000"), "columns"),
        (("--set", "wokers=3"), "did you mean 'num_workers'"),
        (("--set", "workers"), "--set takes key=value"),
        (("--config", "none.toml"), "no configuration file"),
        (("--num-servers", "2000000"), "2000000 servers"),
    ):
        done = phocas("train", "--dataset", "synthetic", *words, status=2)
        assert message in done.stderr
        assert "Traceback" not in done.stderr
    assert not (tmp_path / "phocas.sqlite").exists()


def test_flags_override_the_file_and_tables_are_exported(tmp_path: Path, phocas: Phocas) -> None:
    toml = write_toml(tmp_path / "run.toml")
    words = ("--config", toml, "--rounds", 6, "--set", "schedule=step:every=2", "--quiet")
    done = phocas("train", *words)
    assert done.stderr == ""
    assert "6/6" in done.stdout
    listed = phocas("results", "list").stdout
    assert "phocas:b=3" in listed
    assert "complete" in listed
    rows = phocas("results", "export", "--csv", "-", "--table", "rounds").stdout.splitlines()
    assert len(rows) == 7
    rates = [row.split(",")[rows[0].split(",").index("lr")] for row in rows[1:]]
    assert [float(rate) for rate in rates] == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001, 0.001])
    phocas("results", "export", "--csv", "runs.csv")
    heading = (tmp_path / "runs.csv").read_text().splitlines()[0].split(",")
    assert {"id", "rule", "lr", "split", "workers", "batch_size"} <= set(heading)
    assert "in model.safetensors" in phocas("results", "export", "--model", 1).stdout
    assert load_file(tmp_path / "model.safetensors").keys() == {
        f"{layer}.{kind}" for layer in (1, 4) for kind in ("weight", "bias")
    }
    done = phocas("results", "export", "--csv", "-", "--table", "round", status=2)
    assert "did you mean 'rounds'" in done.stderr
    done = phocas("results", "list", "--results", "none.sqlite", status=2)
    assert "there is no results file none.sqlite" in done.stderr


def test_checkpoints_are_written_by_rounds_and_by_seconds(tmp_path: Path) -> None:
    for settings, expected in (
        ({"checkpoint_rounds": 7}, {7, 14}),
        ({"checkpoint_rounds": None, "checkpoint_seconds": 0}, set(range(1, 21))),
        ({"checkpoint_rounds": None, "checkpoint_seconds": 1e6}, set()),
    ):
        name = f"{len(expected)}.sqlite"
        config = make_config({**TINY, **settings, "rounds": 20, "results": str(tmp_path / name)})
        path = checkpoint_path(config.results, config.identity())
        seen: dict[int, int] = {}

        def look(_config: object, done: Any, _evaluation: object) -> None:
            if path.exists():  # noqa: B023 - called before the loop goes on
                seen.setdefault(path.stat().st_mtime_ns, done.number - 1)  # noqa: B023

        execute(config, watch=look)
        assert set(seen.values()) <= expected
        assert len(seen) >= len(expected) - 1  # the last one is removed at the end of the run


def test_test_samples_are_evaluated_once_at_the_end_of_a_run_with_validation(
    tmp_path: Path, phocas: Phocas
) -> None:
    config = write_toml(tmp_path / "v.toml", validation=0.25, rounds=8)
    told = json.loads(phocas("train", "--config", config, "--json").stdout)
    assert told["test_accuracy"] is not None
    assert told["final_accuracy"] is not None
    listed = phocas("results", "list").stdout
    assert " test " in listed
    shown = phocas("results", "show", told["id"]).stdout
    assert "accuracy on the validation samples" in shown
    assert f"on the test set {told['test_accuracy']:.3f}" in shown
    plain = json.loads(phocas("train", "--config", config, "--validation", 0, "--json").stdout)
    assert plain["test_accuracy"] is None
    assert plain["identity"] != told["identity"]
