"""The real TensorBoard, wandb and MLflow, offline: they store what the results file has."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.experiments.trackers.conftest import SMALL

from phocas.experiments.config import make_config
from phocas.experiments.results import Results
from phocas.experiments.runner import execute

INSTALLED = "make test-integrations installs it"
Kept = dict[str, dict[int, float]]
"""Numbers by name and round."""


def tensorboard() -> Iterator[Kept]:
    """Read event files as TensorBoard does."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for folder in sorted(Path("tb").iterdir()):
        events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
        yield {
            name: {event.step: event.value for event in events.Scalars(name)}
            for name in events.Tags()["scalars"]
        }


def mlflow() -> Iterator[Kept]:
    """Read the numbers with MLflow's own client."""
    from mlflow import MlflowClient

    client = MlflowClient("sqlite:///store.db")
    experiment = client.get_experiment_by_name("phocas")
    for run in client.search_runs([experiment.experiment_id]):
        assert run.data.params["rule"] == "phocas:b=2"
        assert run.info.status == "FINISHED"
        assert run.data.tags["status"] == "complete"
        yield {
            name: {
                point.step: point.value
                for point in client.get_metric_history(run.info.run_id, name)
            }
            for name in run.data.metrics
        }


def wandb() -> Iterator[Kept]:
    """Read the log of an offline run: records in blocks of 32 kB, as LevelDB writes them."""
    from wandb.proto import wandb_internal_pb2

    found: Kept = {}
    for path in sorted(Path("wandb").glob("offline-run-*/*.wandb")):
        data = path.read_bytes()
        assert data.startswith(b":W&B")
        place, whole = 7, b""
        while place + 7 <= len(data):
            left = 32768 - place % 32768
            _, length, kind = struct.unpack_from("<IHB", data, place) if left >= 7 else (0, 0, 0)
            if kind == 0:
                place += left
                continue
            whole += data[place + 7 : place + 7 + length]
            place += 7 + length
            if kind in (1, 4):  # a whole record, or the last part of one
                record = wandb_internal_pb2.Record.FromString(whole)
                whole = b""
                if record.WhichOneof("record_type") != "history":
                    continue
                values = {
                    ".".join(item.nested_key) or item.key: json.loads(item.value_json)
                    for item in record.history.item
                }
                number = values.pop("round")
                for name, value in values.items():
                    if not name.startswith("_"):
                        found.setdefault(name, {})[number] = float(value)
    yield found


LIBRARIES: dict[str, tuple[str, Callable[[], Iterator[Kept]]]] = {
    "tensorboard": ("tensorboard:tb", tensorboard),
    "mlflow": ("mlflow:sqlite:///store.db", mlflow),
    "wandb": ("wandb", wandb),
}


@pytest.fixture(params=LIBRARIES)
def library(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, Callable[[], Iterator[Kept]]]:
    pytest.importorskip(request.param, reason=INSTALLED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    return LIBRARIES[request.param]


@pytest.mark.filterwarnings("default")  # warnings of the libraries
def test_logged_values_match_the_run_even_after_interruption(
    library: tuple[str, Callable[[], Iterator[Kept]]],
    capfd: pytest.CaptureFixture[str],
) -> None:
    text, read = library
    said: list[str] = []
    config = make_config({**SMALL, "track": [text]})
    rounds = iter(range(100))
    execute(config, should_stop=lambda: next(rounds) == 14, warn=said.append)
    record = execute(config, warn=said.append)
    assert said == []
    printed, noise = capfd.readouterr()
    assert printed == noise == ""
    assert record.status == "complete"
    (kept,) = read()
    with Results(Path("phocas.sqlite"), read=True) as results:
        losses = {row["round"]: row["loss"] for row in results.table("rounds", 1)}
        tops = {row["round"]: row["top1"] for row in results.table("evaluations", 1)}
    assert kept["train/loss"] == pytest.approx(losses, rel=1e-6)
    assert kept["test/top1"] == pytest.approx(tops, rel=1e-6)
    assert kept["suspects/number"][30] == 2
    assert set(kept["suspects/dropped_0"]) < set(range(31))
    assert max(kept["suspects/dropped_0"]) == 30


@pytest.mark.filterwarnings("default")
def test_non_finite_numbers_do_not_end_the_run(
    library: tuple[str, Callable[[], Iterator[Kept]]],
) -> None:
    text, _ = library
    said: list[str] = []
    settings: dict[str, Any] = {**SMALL, "rule": "mean", "attack": "crash:worker=1"}
    record = execute(make_config({**settings, "rounds": 5, "track": [text]}), warn=said.append)
    assert said == []
    assert record.skipped_rounds == 5
    assert not math.isnan(record.final_accuracy or math.nan)


@pytest.mark.filterwarnings("default")
def test_missing_server_is_reported_and_the_run_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow", reason=INSTALLED)
    monkeypatch.chdir(tmp_path)
    for name in ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT"):
        monkeypatch.setenv(name, "1")
    said: list[str] = []
    nobody = "mlflow:http://127.0.0.1:9"
    record = execute(make_config({**SMALL, "track": [nobody]}), warn=said.append)
    assert record.status == "complete"
    (line,) = said
    assert line.startswith(f"{nobody} is disabled for the rest of this run: ")
