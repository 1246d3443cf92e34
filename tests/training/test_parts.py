"""Data that each worker loads itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phocas.data import DataError, Dataset, load, npz_files
from phocas.training import Trainer


def part(worker: int | None, size: int = 20) -> Any:
    """Return samples of one worker."""
    rng = np.random.default_rng(99 if worker is None else worker)
    return rng.normal(size=(size, 3)).astype(np.float32), rng.integers(0, 4, size)


def halves(worker: int | None) -> Dataset:
    """Return a Dataset, of which a worker uses the training half and the trainer the test half."""
    made: Dataset = load(
        f"synthetic:train=30,test=20,side=4,seed={5 if worker is None else worker}"
    )
    return made


def train(data: Any, **settings: Any) -> Any:
    options: dict[str, Any] = {"rule": "median", "num_workers": 3, "batch_size": 4} | settings
    with Trainer("softmax", data=data, **options) as trainer:
        list(trainer.rounds(3))
        return trainer.server.vector.numpy().copy(), trainer.evaluate().loss


def test_function_of_the_worker_gives_the_bits_of_a_list() -> None:
    expected, loss = train([part(worker) for worker in range(3)], test=part(None))
    found, own_loss = train(part)
    assert np.array_equal(found, expected)
    assert own_loss == loss
    again, other = train(part, test=part(1))
    assert np.array_equal(again, expected)
    assert other != loss


def test_files_give_the_bits_of_a_list(tmp_path: Path) -> None:
    for worker in (0, 1, 2, None):
        inputs, targets = part(worker)
        np.savez(tmp_path / f"{worker}.npz", inputs=inputs, targets=targets)
    expected = train([part(worker) for worker in range(3)], test=part(None))
    for pattern in ("[0-9].npz", "%d.npz"):
        text = f"phocas.data:npz_files:train={tmp_path}/{pattern},test={tmp_path}/None.npz"
        found = train(text)
        assert np.array_equal(found[0], expected[0])
        assert found[1] == expected[1]


def test_dataset_of_each_worker_has_its_training_half_drawn() -> None:
    expected, _ = train([halves(worker) for worker in range(3)], test=halves(5))
    assert np.array_equal(train(halves)[0], expected)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"clients": 5}, "clients"),
        ({"split": "dirichlet:alpha=1"}, "split"),
        ({"validation": 0.5}, "validation"),
        ({"rule": "fl-trust", "trusted": 3}, "trusted"),
        ({"byzantine_data": "iid", "attack": "sign-flip:q=1"}, "byzantine_data"),
    ],
)
def test_settings_that_need_all_samples_are_rejected(settings: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} needs the training samples of all workers"):
        train(part, **settings)


def test_missing_test_samples_are_reported() -> None:
    def nothing(worker: int | None) -> Any:
        return None if worker is None else part(worker)

    with pytest.raises(DataError, match=r"cannot load the test samples: ValueError: .*got None"):
        train(nothing)


def test_files_are_divided_by_their_names(tmp_path: Path) -> None:
    for number in range(5):
        np.savez(tmp_path / f"{number}.npz", inputs=np.full(2, number), targets=np.arange(2))
    np.savez(tmp_path / "other.npy.npz", images=np.zeros(2))
    given: dict[str, Any] = {"train": f"{tmp_path}/[0-9].npz", "test": f"{tmp_path}/4.npz"}
    found = [npz_files(worker, 2, **given)[0].tolist() for worker in range(2)]
    assert found == [[0, 0, 2, 2, 4, 4], [1, 1, 3, 3]]
    assert npz_files(None, 2, **given)[0].tolist() == [4, 4]
    given["train"] = f"{tmp_path}/%d.npz"
    assert npz_files(3, 2, **given)[0].tolist() == [3, 3]
    with pytest.raises(DataError, match=r"at least one file: 0 match '.*/7.npz', for 9 workers"):
        npz_files(7, 9, **given)
    with pytest.raises(DataError, match="needs the arrays inputs and targets: got images"):
        npz_files(0, 1, f"{tmp_path}/other*", "")
