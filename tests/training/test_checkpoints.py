"""Checkpoints: the same bits after resuming, complete files or none, clear errors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import save
from torch import nn
from torch.nn import functional

from phocas.data import Dataset, load
from phocas.files import check_writable, write_atomically
from phocas.training import Trainer, checkpoints
from phocas.training.checkpoints import (
    DamagedCheckpointError,
    discard_checkpoint,
    load_checkpoint,
    read_model,
    save_checkpoint,
)
from phocas.training.models import build_model
from phocas.training.schedules import Cosine

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def data() -> Dataset:
    made: Dataset = load("synthetic:train=200,test=50,side=8")
    return made


def normed(*_: object) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))


CASES: dict[str, dict[str, Any]] = {
    "sgd": {},
    "dropout": {"model": "mlp:hidden=8,dropout=0.5"},
    "momentum of the workers": {"worker_momentum": 0.9},
    "momentum of the server": {"optimizer_options": {"momentum": 0.9}},
    "adam": {"optimizer": torch.optim.Adam, "schedule": Cosine(rounds=10)},
    "the round before": {"attack": "straggler:q=2"},
    "buffers": {"model": normed},
    "random attack": {"attack": "gaussian:q=2,who=resampled"},
}


def make(data: Dataset, **options: Any) -> Trainer:
    model = build_model(options.pop("model", "mlp:hidden=8"), data.shape, 10, seed=3)
    settings: dict[str, Any] = {"num_workers": 7, "batch_size": 8, "rule": "phocas:b=2"}
    return Trainer(model, functional.cross_entropy, data, **{**settings, **options})


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_ends_with_the_same_bits(case: str, data: Dataset, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.safetensors"
    with make(data, **CASES[case]) as whole:
        for done in whole.rounds(9):
            if done.number == 5:
                save_checkpoint(path, whole, "me", {"note": torch.ones(2)})
        expected = whole.model.state_dict()
        save_checkpoint(tmp_path / "end", whole)
        kept = read_model(tmp_path / "end")
        assert kept.keys() == expected.keys()
        assert all(torch.equal(expected[name], kept[name]) for name in expected)
        with make(data, **CASES[case]) as resumed:
            extra = load_checkpoint(path, resumed, "me")
            assert extra["note"].tolist() == [1, 1]
            assert resumed.rounds_done == 5
            last = list(resumed.rounds(4))[-1]
            found = resumed.model.state_dict()
    assert last.number == 9
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert whole.detector.evidence() == resumed.detector.evidence()


def test_checkpoint_of_version_0_2_resumes_to_the_same_bits(data: Dataset, tmp_path: Path) -> None:
    """Format 4 has no code digests, no first loss, no lost model and no size of values."""
    path = tmp_path / "checkpoint.safetensors"
    with make(data) as whole:
        for done in whole.rounds(9):
            if done.number == 5:
                save_checkpoint(path, whole)
        expected = whole.model.state_dict()
    header, tensors = checkpoints._read(path)
    header["format"] = 4
    for name in ("code", "first_loss", "lost"):
        del header[name]
    del tensors["suspicion.size"]
    path.write_bytes(checkpoints._seal(save(tensors, checkpoints._metadata(header))))
    with make(data) as resumed:
        load_checkpoint(path, resumed)
        for _ in resumed.rounds(4):
            pass
        found = resumed.model.state_dict()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_checkpoints_of_other_runs_are_rejected(data: Dataset, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.safetensors"
    with make(data) as trainer:
        save_checkpoint(path, trainer, "me")
        with pytest.raises(ValueError, match="another configuration"):
            load_checkpoint(path, trainer, "you")
    with make(data, model="softmax") as other, pytest.raises(ValueError, match="parameters"):
        load_checkpoint(path, other, "me")
    with make(data, num_workers=9) as other, pytest.raises(ValueError, match="7 workers"):
        load_checkpoint(path, other, "me")


def test_checkpoints_of_trainers_with_other_settings_are_rejected(
    data: Dataset, tmp_path: Path
) -> None:
    path = tmp_path / "checkpoint.safetensors"
    with make(data) as trainer:
        save_checkpoint(path, trainer)
    with make(data, worker_momentum=0.5) as other, pytest.raises(ValueError, match="velocity"):
        load_checkpoint(path, other)


@pytest.mark.parametrize("size", [0, 10, 500])
def test_truncated_checkpoints_are_rejected(data: Dataset, tmp_path: Path, size: int) -> None:
    path = tmp_path / "checkpoint.safetensors"
    with make(data) as trainer:
        save_checkpoint(path, trainer)
        path.write_bytes(path.read_bytes()[:size])
        with pytest.raises(DamagedCheckpointError, match=r"checkpoint\.safetensors"):
            load_checkpoint(path, trainer)


@pytest.mark.parametrize("bits", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_checkpoint_with_flipped_bit_is_rejected(data: Dataset, tmp_path: Path, bits: int) -> None:
    """Flip bits of each byte of the header, and 200 of the values."""
    path = tmp_path / "checkpoint.safetensors"
    with make(data) as trainer:
        list(trainer.rounds(2))
        save_checkpoint(path, trainer)
        before = trainer.server.vector.clone()
        whole = path.read_bytes()
        header = 8 + int.from_bytes(whole[:8], "little")
        rng = np.random.default_rng(5)
        places = [
            8 * byte + int(bit) for byte in range(header) for bit in rng.permutation(8)[:bits]
        ]
        places += rng.integers(8 * header, 8 * len(whole), 200).tolist()
        for place in places:
            byte, bit = divmod(place, 8)
            path.write_bytes(whole[:byte] + bytes([whole[byte] ^ 1 << bit]) + whole[byte + 1 :])
            with pytest.raises(DamagedCheckpointError, match="damaged"):
                load_checkpoint(path, trainer)
        assert torch.equal(trainer.server.vector, before)
        path.write_bytes(whole)
        load_checkpoint(path, trainer)


def test_previous_checkpoint_is_kept_on_request(tmp_path: Path) -> None:
    path, keep = tmp_path / "file", tmp_path / "before"
    for content in (b"1", b"2", b"3"):
        write_atomically(path, content, keep=keep)
    assert (path.read_bytes(), keep.read_bytes()) == (b"3", b"2")


def test_unwritable_paths_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    for path in (tmp_path / "file", tmp_path / "new", tmp_path / "deep" / "new"):
        check_writable(path, "the model")
    assert not (tmp_path / "deep").exists()
    for path, reason in ((tmp_path, "a folder"), (tmp_path / "file" / "new", "is no folder")):
        with pytest.raises(ValueError, match=f"the model.*{reason}"):
            check_writable(path, "the model")


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def full(_descriptor: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_writer_killed_at_any_moment_leaves_an_intact_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    code = """
import sys
from pathlib import Path
from phocas.files import check_writable, write_atomically
path, number = Path(sys.argv[1]), 0
while True:
    write_atomically(path, bytes([number % 256]) * 5_000_000)
    print(number, flush=True)
    number += 1
"""
    for writes in (1, 3):
        child = subprocess.Popen(
            [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        for _ in range(writes):
            child.stdout.readline()
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        content = path.read_bytes()
        assert len(content) == 5_000_000
        assert len(set(content)) == 1


def test_discarding_a_checkpoint_removes_files_of_killed_writers(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    half = tmp_path / "run.safetensors.4711.tmp"
    other = tmp_path / "other.safetensors.4711.tmp"
    for file in (path, half, other):
        file.write_bytes(b"x")
    discard_checkpoint(path)
    assert sorted(tmp_path.iterdir()) == [other]
