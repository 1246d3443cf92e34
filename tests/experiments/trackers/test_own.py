"""User-defined trackers: what they receive, and that their failures end no run."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.experiments.trackers.conftest import SMALL

from phocas.cli import main
from phocas.experiments.config import ConfigError, RunConfig, make_config
from phocas.experiments.results import Results
from phocas.experiments.runner import execute
from phocas.experiments.trackers import TrackedRun, Tracker, open_tracker

OWN = '''
import json

class Recorder:
    """Write a line for each call."""

    def start(self, run):
        lr, done = run.config["lr"], run.rounds_done
        self._tell(start=run.title, run=run.id, key=run.key, done=done, lr=lr)

    def log(self, round, values):
        self._tell(round=round, **values)

    def finish(self, status):
        self._tell(finish=status)

    def _tell(self, **what):
        with open("calls.jsonl", "a") as file:
            file.write(json.dumps(what) + "\\n")


class Fails(Recorder):
    """Fail at a round, or at the start, or at the end."""

    when = 12

    def log(self, round, values):
        if round == self.when:
            raise OSError("the disk\\nis full")
        super().log(round, values)


class NeverStarts(Recorder):
    def start(self, run):
        raise ConnectionError("nobody is there")


class NeverEnds(Recorder):
    def finish(self, status):
        raise RuntimeError("too late")


class Half:
    def start(self, run):
        pass


def raises():
    return 1 / 0
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_trackers", raising=False)
    (tmp_path / "own_trackers.py").write_text(OWN)
    return tmp_path


def config(*track: str, **settings: Any) -> RunConfig:
    return make_config({**SMALL, **settings, "track": list(track)})


def calls() -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("calls.jsonl").read_text().splitlines()]


def test_evaluations_of_validation_samples_are_not_logged_as_tests(folder: Path) -> None:
    record = execute(config("own_trackers:Recorder", validation=0.25))
    held = [each["validation/top1"] for each in calls() if "validation/top1" in each]
    tested = [each["test/top1"] for each in calls() if "test/top1" in each]
    assert held[-1] == record.final_accuracy
    assert tested == [record.test_accuracy]


def test_every_round_and_evaluation_is_logged(folder: Path) -> None:
    record = execute(config("own_trackers:Recorder"))
    first, *rounds, last = calls()
    assert first["start"] == "phocas:b=2 under sign-flip:q=2"
    assert (first["run"], first["done"], first["lr"]) == (1, 0, 0.1)
    assert first["key"] == f"{record.identity}-1"
    assert last == {"finish": "complete"}
    assert [each["round"] for each in rounds] == list(range(31))
    with Results(Path("phocas.sqlite"), read=True) as results:
        kept = {row["round"]: row for row in results.table("rounds", 1)}
        evaluated = {row["round"]: row for row in results.table("evaluations", 1)}
        shares = results.shares(1)
    assert shares is not None
    for each in rounds[1:]:
        assert each["train/loss"] == kept[each["round"]]["loss"]
        assert each["train/gradient_norm"] == kept[each["round"]]["gradient_norm"]
    at = {each["round"]: each["test/top1"] for each in rounds if "test/top1" in each}
    assert at == {number: row["top1"] for number, row in evaluated.items()}
    assert record.suspects == (0, 1)
    for worker in record.suspects:
        named = {
            each["round"]: each[f"suspects/dropped_{worker}"]
            for each in rounds
            if f"suspects/dropped_{worker}" in each
        }
        assert 1 < min(named) < max(named) == 30
        for number, share in named.items():
            assert share == pytest.approx(float(shares.workers[number - 1, worker]), abs=1e-3)
    assert not any("suspects/dropped_5" in each for each in rounds)


def test_trackers_change_no_result(folder: Path) -> None:
    told_of = execute(config("own_trackers:Recorder", results="a.sqlite"))
    plain = execute(config(results="b.sqlite"))
    assert told_of.identity == plain.identity
    assert told_of.final_accuracy == plain.final_accuracy
    with Results(Path("a.sqlite")) as one, Results(Path("b.sqlite")) as other:
        for first, second in zip(one.table("rounds", 1), other.table("rounds", 1), strict=True):
            assert (first["loss"], first["gradient_norm"]) == (
                second["loss"],
                second["gradient_norm"],
            )


def test_tracker_learns_that_a_run_continues(folder: Path) -> None:
    rounds = iter(range(100))
    execute(config("own_trackers:Recorder"), should_stop=lambda: next(rounds) == 11)
    execute(config("own_trackers:Recorder"))
    starts = [each for each in calls() if "start" in each]
    assert [each["done"] for each in starts] == [0, 12]
    assert len({each["key"] for each in starts}) == 1
    assert [each["finish"] for each in calls() if "finish" in each] == ["interrupted", "complete"]
    assert [each["round"] for each in calls() if "round" in each] == list(range(31))


@pytest.mark.parametrize(
    ("name", "reason", "rounds"),
    [
        ("Fails", "OSError: the disk is full", 12),
        ("NeverStarts", "ConnectionError: nobody is there", 0),
        ("NeverEnds", "RuntimeError: too late", 31),
    ],
)
def test_failing_tracker_is_disabled_and_reported_once(
    folder: Path, name: str, reason: str, rounds: int
) -> None:
    said: list[str] = []
    both = config(f"own_trackers:{name}", "own_trackers:Recorder")
    assert execute(both, tell=said.append).status == "complete"
    assert said == [f"own_trackers:{name} is disabled for the rest of this run: {reason}"]
    numbers = [each["round"] for each in calls() if "round" in each]
    assert len(numbers) == rounds + 31
    assert sum("finish" in each for each in calls()) == 1


def test_non_finite_numbers_are_logged(folder: Path) -> None:
    execute(config("own_trackers:Recorder", rule="mean", attack="crash:worker=1", rounds=3))
    losses = [each for each in calls() if each.get("round") == 3]
    assert losses[0]["train/skipped"] == 1.0
    assert math.isnan(losses[0]["train/gradient_norm"])


def test_sweep_and_command_line_use_trackers(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [f"{key} = {json.dumps(value)}" for key, value in SMALL.items() if key != "rounds"]
    (folder / "grid.toml").write_text("\n".join([*lines, "rounds = 3", "[grid]", "seed = [0, 1]"]))
    for words in (
        ["sweep", "grid.toml", "--processes", "1", "--track", "own_trackers:Recorder"],
        ["train", "--config", "one.toml", "--track", "own_trackers:Recorder", "--quiet"],
    ):
        (folder / "one.toml").write_text("\n".join([*lines, "rounds = 3", "seed = 2"]))
        monkeypatch.setattr(sys, "argv", ["phocas", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code, capsys.readouterr().err
    assert [each["finish"] for each in calls() if "finish" in each] == ["complete"] * 3
    assert sum("round" in each for each in calls()) == 3 * 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tensorbord", "did you mean 'tensorboard'"),
        ("", "unknown tracker ''"),
        ("own_trackers:Recorder:path=3", "unknown tracker 'own_trackers'"),
    ],
)
def test_invalid_trackers_are_rejected_by_key(folder: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"track: .*{message}"):
        config(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("own_trackers:Half", "must make something with start, log and finish"),
        ("own_trackers:Own", "unknown name in own_trackers 'Own'"),
        ("own_trackers:json", "must make something with start, log and finish"),
        ("tensorbord:runs", "did you mean 'tensorboard'.* there is no module 'tensorbord'"),
        ("own_trackers:raises", "division by zero"),
    ],
)
def test_tracker_that_cannot_be_created_is_rejected_before_the_run(
    folder: Path, text: str, message: str
) -> None:
    with pytest.raises(Exception, match=message):
        execute(config(text))
    assert not Path("phocas.sqlite").exists()


def test_missing_library_is_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "wandb").mkdir()  # wandb leaves such a folder behind
    monkeypatch.setattr(sys, "path", [str(folder)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(ConfigError, match=r"wandb is not installed: pip install 'phocas\[wandb\]'"):
        config("wandb")


def test_open_tracker_returns_a_tracker(folder: Path) -> None:
    assert isinstance(open_tracker("own_trackers:Recorder"), Tracker)
    run = TrackedRun(3, "abc", "title", {}, 0)
    assert run.key == "abc-3"
