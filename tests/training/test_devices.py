"""Training on a device: only batches, samples and small numbers are transferred."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.fake_device import THERE, FakeDevice

from phocas.cli import main
from phocas.data import load
from phocas.experiments.config import ConfigError, make_config
from phocas.training import Trainer
from phocas.training.task import Task
from phocas.training.trainer import Round

DATA = load("synthetic:train=400,test=100")
M = 8
BATCH = M * 4 * (784 * 4 + 8)  # four images per worker, and their labels
ROUNDS = 2


def trainer(**settings: Any) -> Trainer:
    asked = {"rule": "phocas:b=2", "model": "mlp:hidden=64", "lr": 0.5, **settings}
    return Trainer(data=DATA, num_workers=M, batch_size=4, threads=1, **asked)


def trained(**settings: Any) -> tuple[list[Round], Any]:
    with trainer(**settings) as made:
        return list(made.rounds(ROUNDS)), made.evaluate()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_servers": 3},
        {"rule": "heraclius:b=2", "num_servers": 3},
        {"rule": "clipping:radius=2.0|phocas:b=2", "optimizer": "Adam", "lr": 0.01},
        {"rule": "krum:b=2", "gradient_path": "vectorised"},
        {"rule": "median", "gradient_path": "looped", "worker_momentum": 0.5},
    ],
    ids=str,
)
def test_rounds_on_a_device_match_the_cpu_and_rows_stay_there(settings: dict[str, Any]) -> None:
    here, judged = trained(**settings)
    with FakeDevice() as device, trainer(device="meta", **settings) as made:
        assert made.server.vector.device == made.server.rows.device == THERE
        row = made.server.vector.nbytes
        for wanted in here:
            device.sent.clear()
            device.fetched.clear()
            done = made.step()
            # Batches are sent to the device. Numbers about workers are received, and a sample of
            # 1024 columns per worker; with momentum also of the next round's columns, and of the
            # present and earlier parameters. No row is received.
            assert BATCH <= sum(device.sent) < BATCH + 4096
            sampled = M * (2 if "worker_momentum" in settings else 1) + 2
            samples = sampled * 1024 * 8
            assert samples <= sum(device.fetched) < samples + 8192
            assert max(device.fetched) < row
            np.testing.assert_allclose(done.loss, wanted.loss, rtol=1e-5)
            np.testing.assert_allclose(done.gradient_norm, wanted.gradient_norm, rtol=1e-4)
            # A value may be within rounding of the edge of the window.
            np.testing.assert_allclose(done.dropped, wanted.dropped, atol=2e-3)
            assert done.by_server is not None
            assert done.by_server.shape == (settings.get("num_servers", 1), M)
        found = made.evaluate()
    np.testing.assert_allclose(found.loss, judged.loss, rtol=1e-4)
    assert found.top1 == judged.top1


def test_attacks_run_in_host_memory() -> None:
    here, _ = trained(attack="gaussian:q=2")
    with FakeDevice() as device, trainer(device="meta", attack="gaussian:q=2") as made:
        for wanted in here:
            device.fetched.clear()
            done = made.step()
            assert max(device.fetched) == made.server.rows.nbytes
            assert done.touched == wanted.touched
            np.testing.assert_allclose(done.dropped, wanted.dropped, atol=2e-3)
            np.testing.assert_allclose(done.gradient_norm, wanted.gradient_norm, rtol=1e-4)


def test_model_is_trained_on_its_own_device() -> None:
    with FakeDevice():
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10)).to(THERE)
        with trainer(model=model) as made:
            assert made.task.device == THERE
            assert np.isfinite(made.step().loss)


def test_tensors_on_two_devices_are_rejected() -> None:
    """Check that the fake device rejects mixed operations; otherwise it would test nothing."""
    with FakeDevice():
        there = torch.ones(3, device=THERE)
        with pytest.raises(RuntimeError, match="must be on one device"):
            there + torch.ones(3)
        with pytest.raises(TypeError, match="meta"):
            there.numpy()
        assert (there + 1).cpu().tolist() == [2.0, 2.0, 2.0]
    split = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, device="meta"))
    with pytest.raises(ValueError, match="must be on one device: got cpu, meta"):
        trainer(model=split, rule="median")


def test_cpu_may_be_named_or_omitted() -> None:
    named = Task.make("softmax", data=DATA, rule="median", device="cpu")
    assert named.identity() == Task.make("softmax", data=DATA, rule="median").identity()


@pytest.mark.parametrize("name", ["nothing", "cuda:99", "meta", ""])
def test_missing_devices_are_rejected(name: str) -> None:
    with pytest.raises(
        ValueError, match=f"Trainer needs a device that torch has here: got '{name}'"
    ):
        trainer(device=name)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            ["--device", "cuda:99"],
            "device: a run needs a device that torch has here: got 'cuda:99'",
        ),
        (
            ["--device", "nothing"],
            "device: a run needs a device that torch has here: got 'nothing'",
        ),
    ],
)
def test_command_line_reports_a_missing_device_in_one_line(
    options: list[str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["phocas", "train", *options])
    said = io.StringIO()
    with contextlib.redirect_stderr(said), pytest.raises(SystemExit) as status:
        main()
    assert status.value.code == 2
    assert reason in said.getvalue()
    assert said.getvalue().count("\n") == 1


def test_ray_engine_rejects_a_device() -> None:
    with FakeDevice():
        with pytest.raises(
            ConfigError, match=r"device: the ray engine computes on .*: got device=meta"
        ):
            make_config({"engine": "ray", "device": "meta"})
        assert make_config({"device": "meta"}).identity() != make_config({}).identity()
        with pytest.raises(ValueError, match="ray engine computes on the processors of its hosts"):
            trainer(device="meta", engine="ray")


def test_run_on_a_device_resumes_from_a_checkpoint(tmp_path: Path) -> None:
    settings = {"device": "meta", "optimizer": "Adam", "lr": 0.01, "worker_momentum": 0.5}
    file = tmp_path / "checkpoint"
    with FakeDevice():
        with trainer(**settings) as first:
            first.step()
            first.save(file)
            wanted = first.step().loss
        with trainer(**settings) as second:
            second.load(file)
            assert second.step().loss == wanted
