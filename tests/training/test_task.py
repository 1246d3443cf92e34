"""Tasks: specs or values, checked once, divided into what workers and servers receive."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch
from torch import nn

import phocas
from phocas.attacks import Gambler, parse_attack
from phocas.data import Dataset, Dirichlet, load
from phocas.engines.local import LocalSettings
from phocas.specs import imported_callable
from phocas.training import Task, TaskSettings, Trainer
from phocas.training.keywords import TrainerKeywords
from phocas.training.models import build_model
from phocas.training.pool import kernel_threads
from phocas.training.schedules import Step

DATA = "synthetic:train=300,test=60,side=8,noise=20"


@pytest.fixture(scope="module")
def data() -> Dataset:
    made: Dataset = load(DATA)
    return made


def make(data: Any, **options: Any) -> Task:
    settings: dict[str, Any] = {"rule": "phocas:b=2", "num_workers": 6}
    return Task.make("mlp:hidden=8", data=data, **{**settings, **options})


def test_specs_and_values_give_the_same_run(data: Dataset) -> None:
    text: dict[str, Any] = {
        "rule": "phocas:b=2",
        "attack": "gaussian:q=2",
        "split": "dirichlet:alpha=0.5",
        "schedule": "step:every=2,factor=0.5",
        "optimizer": "adam",
    }
    values: dict[str, Any] = {
        "rule": phocas.Phocas(b=2),
        "attack": parse_attack("gaussian:q=2"),
        "split": Dirichlet(alpha=0.5),
        "schedule": Step(every=2, factor=0.5),
        "optimizer": torch.optim.Adam,
    }
    common: dict[str, Any] = {"num_workers": 6, "batch_size": 8, "lr": 0.05, "seed": 4}
    found = []
    model = build_model("mlp:hidden=8", data.shape, 10, seed=4)
    for of, on, settings in (("mlp:hidden=8", DATA, text), (model, data, values)):
        with Trainer(of, data=on, **common, **settings) as trainer:
            losses = [done.loss for done in trainer.rounds(4)]
            found.append((losses, trainer.server.vector.tolist(), trainer.task.identity()))
    assert found[0] == found[1]
    assert len(set(found[0][0])) == 4


def test_gambler_gets_the_tasks_servers_unless_its_spec_sets_them(
    data: Dataset,
) -> None:
    assert make(data, attack="gambler").attack == Gambler(servers=1)
    assert make(data, attack="gambler:server=3", num_servers=4).attack == Gambler(4, server=3)
    with Trainer("softmax", data=data, rule="median", attack="gambler", num_workers=5) as trainer:
        assert trainer.step().touched > 0
    for attack in ("gambler:servers=20", "gambler: servers = 20", Gambler()):
        with pytest.raises(ValueError, match="servers=20 where there are 4"):
            make(data, attack=attack, num_servers=4)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_worker": 5}, TypeError, "unknown setting of a Trainer 'num_worker'; did you mean"),
        ({"lr": float("nan")}, ValueError, "finite lr > 0: got lr=nan"),
        ({"lr": "fast"}, TypeError, "a number lr: got 'fast'"),
        ({"weight_decay": -1}, ValueError, "weight_decay >= 0"),
        ({"worker_momentum": float("nan")}, ValueError, "less than 1: got worker_momentum=nan"),
        ({"seed": 1 << 63}, ValueError, r"seed < 2\^63"),
        ({"num_workers": 2.5}, TypeError, "integer num_workers"),
        ({"num_workers": True}, TypeError, "integer num_workers"),
        ({"num_servers": 0}, ValueError, "num_servers >= 1"),
        ({"threads": 0}, ValueError, "threads >= 1"),
        ({"on_nonfinite": "ignore"}, ValueError, "it may be: skip, stop, apply"),
        ({"split": "dirichlet"}, ValueError, "dirichlet needs alpha"),
        ({"schedule": "cos"}, ValueError, "unknown schedule 'cos'"),
        ({"optimizer": "sdg"}, ValueError, "unknown optimizer 'sdg'; did you mean 'sgd'"),
        ({"optimizer": "no_such_module:Adam"}, ValueError, "no Python module 'no_such_module'"),
        ({"optimizer": "torch.optim:Adm"}, ValueError, "did you mean 'Adam'"),
    ],
)
def test_impossible_tasks_are_rejected_with_a_reason(
    data: Dataset, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make(data, **options)


def test_missing_and_invalid_arguments_are_rejected() -> None:
    with pytest.raises(TypeError, match=r"data must be a phocas Dataset, .*: got None"):
        Trainer("mlp", rule="mean")
    with pytest.raises(TypeError, match="needs a rule"):
        Trainer("mlp", data=DATA)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="unknown engine 'spark'"):
        Trainer("mlp", data="no such data, which nobody reads", rule="mean", engine="spark")
    with pytest.raises(TypeError, match=r"an engine is a name or has build\(task\): got 5"):
        Trainer("mlp", data=DATA, rule="mean", engine=5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be callable: got module"):
        imported_callable("torch:nn")


def test_editors_see_the_settings_of_a_trainer() -> None:
    hints = {name: hint for name, hint in get_type_hints(TrainerKeywords).items() if name != "rule"}
    declared = get_type_hints(TaskSettings)
    assert [*get_type_hints(TrainerKeywords)] == [each.name for each in fields(TaskSettings)]
    assert {name: declared[name] for name in hints} == hints


@pytest.mark.parametrize(
    ("given", "right"),
    [
        ("workers", "'num_workers'"),
        ("m", "'num_workers'"),
        ("learning_rate", "'lr'"),
        ("f", "rule='phocas:b=3'"),
        ("b", "rule='phocas:b=3'"),
        ("num_byzantine", r"rule='phocas:b=3'.* or attack='gaussian:q=3'"),
    ],
)
def test_usual_spellings_are_answered_with_the_right_one(given: str, right: str) -> None:
    settings: Any = {"rule": "mean", given: 3}
    words = f"unknown setting of a Trainer '{given}'; did you mean {right}.* settings: rule"
    with pytest.raises(TypeError, match=words):
        Trainer("mlp", data=DATA, **settings)


def test_a_trainer_and_a_round_describe_themselves(data: Dataset) -> None:
    with Trainer(
        "softmax", data=data, rule="phocas:b=1", num_workers=4, attack="sign-flip:q=1"
    ) as it:
        assert repr(it) == (
            "Trainer(rule='phocas:b=1', num_workers=4, attack='sign-flip:q=1', rounds_done=0)"
        )
        page = it.step()._repr_html_()
    assert page.startswith("<table><caption>round 1</caption>")
    assert "flagged workers" in page


def test_none_is_the_default_of_every_setting(data: Dataset) -> None:
    names = {declared.name for declared in fields(TaskSettings)} - {"rule", "num_workers"}
    assert make(data, **dict.fromkeys(names)).identity() == make(data).identity()


def test_task_is_frozen_and_engines_create_clusters_from_it(data: Dataset) -> None:
    task = make(data)
    with pytest.raises(FrozenInstanceError):
        task.seed = 7  # type: ignore[misc]
    with Trainer.of(task, LocalSettings().build(task)) as trainer:
        first = trainer.step().loss
    with Trainer("mlp:hidden=8", data=data, rule="phocas:b=2", num_workers=6) as trainer:
        assert trainer.step().loss == first


def test_servers_receive_no_data_and_workers_no_test_samples(data: Dataset) -> None:
    task = make(data, schedule=lambda t: 1 / (1 + t), threads=2)
    server = task.for_server()
    assert len(pickle.dumps(server)) < 2000
    assert not hasattr(server, "samples")
    assert (server.rule, server.seed, server.lr) == (task.rule, task.seed, task.lr)
    assert server.rule_rng(3).integers(1 << 40) == task.rule_rng(3).integers(1 << 40)
    worker = pickle.loads(pickle.dumps(task.for_worker("looped")))
    assert (worker.gradient_path, worker.threads) == ("looped", 1)
    assert worker.samples.test is None
    assert task.samples.test is not None


@pytest.mark.parametrize("attack", [None, "label-flip:q=2", "label-flip:q=2,who=resampled"])
def test_part_of_the_workers_sees_the_same_batches_as_among_all(
    data: Dataset, attack: str | None
) -> None:
    task = make(data, attack=attack, batch_size=4)
    inputs, targets = (part.clone() for part in task.batches(5))
    for first, last in ((0, 2), (2, 5), (5, 6)):
        some, labels = task.batches(5, first, last)
        assert torch.equal(some, inputs[first:last])
        assert torch.equal(labels, targets[first:last])
    plain = make(data, batch_size=4).batches(5)[1]
    assert torch.equal(plain, targets) == (attack is None)


def test_threads_of_a_trainer_apply_only_to_its_own_kernels(
    data: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = phocas.get_num_threads()
    with Trainer("softmax", data=data, rule="median", num_workers=5, threads=3) as trainer:
        seen = []
        aggregate = trainer.server.aggregate

        def watching(**options: Any) -> Any:
            seen.append(phocas.get_num_threads())
            return aggregate(**options)

        monkeypatch.setattr(trainer.server, "aggregate", watching)
        trainer.step()
        assert phocas.get_num_threads() == before
        assert seen == [3]
        monkeypatch.setattr(trainer.server, "aggregate", lambda **_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            trainer.step()
    assert phocas.get_num_threads() == before
    with kernel_threads(None):
        assert phocas.get_num_threads() == before


def test_saved_trainer_continues_to_the_same_bits(data: Dataset, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "rule": "phocas:b=2",
        "num_workers": 6,
        "optimizer": "adam",
        "lr": 0.01,
        "worker_momentum": 0.5,
        "attack": "straggler:q=1",
    }
    with Trainer("mlp:hidden=8", data=data, **options) as whole:
        list(whole.rounds(3))
        whole.save(tmp_path / "half")
        list(whole.rounds(3))
        bits = whole.server.vector.numpy().view(np.uint32).copy()
    with Trainer("mlp:hidden=8", data=data, threads=1, **options) as again:
        again.load(str(tmp_path / "half"))
        assert again.rounds_done == 3
        list(again.rounds(3))
        assert np.array_equal(again.server.vector.numpy().view(np.uint32), bits)
    with Trainer("mlp:hidden=8", data=data, **options | {"seed": 1}) as other:
        with pytest.raises(ValueError, match="belongs to a run with another configuration"):
            other.load(tmp_path / "half")
        assert other.rounds_done == 0


def test_identity_covers_what_the_result_depends_on(data: Dataset) -> None:
    task = make(data)
    assert task.identity() == make(DATA, threads=2).identity()
    others = [
        make(data, **{key: value})
        for key, value in {
            "seed": 1,
            "rule": "median",
            "attack": "gaussian:q=1",
            "lr": 0.2,
            "optimizer": "adam",
            "optimizer_options": {"momentum": 0.9},
            "weight_decay": 0.1,
            "schedule": "cosine:rounds=9",
            "split": "partition",
            "batch_size": 8,
            "reduction": "sum",
            "num_workers": 7,
        }.items()
    ]
    others += [replace(task, loss=nn.MSELoss()), replace(task, model=nn.Linear(64, 10))]
    assert len({task.identity(), *(other.identity() for other in others)}) == len(others) + 1
