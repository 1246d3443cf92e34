"""Local steps: rows are parameter changes, servers have an optimizer, bits stay the same."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from phocas.data import Dataset, load
from phocas.engines.local import LocalSettings
from phocas.engines.ray import RaySettings
from phocas.experiments.config import ConfigError, make_config
from phocas.training import Task, Trainer, local_steps
from phocas.training.optimizers import ServerOptimizer, parse_server_optimizer
from phocas.training.parameters import FlatParameters
from phocas.training.pool import DeterministicPool, one_torch_thread

M, N, LR = 6, 8, 0.07  # not a power of two, so that rounding differences would show


@pytest.fixture(scope="module")
def data() -> Dataset:
    made: Dataset = load("synthetic:train=300,test=60,side=8,noise=20")
    return made


class Normed(nn.Module):
    """A model with running means, which is no stack of linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.Tanh())
        self.last = nn.Linear(12, 10)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the scores."""
        scores: torch.Tensor = self.last(self.parts(values))
        return scores


def models() -> dict[str, nn.Module]:
    torch.manual_seed(3)
    dense = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    dropping = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Dropout(0.4), nn.Linear(16, 10))
    return {"dense": dense, "dropout": dropping, "normed": Normed()}


def train(data: Dataset, model: str = "dense", **settings: Any) -> tuple[list[float], torch.Tensor]:
    given: dict[str, Any] = {"rule": "phocas:b=2", "num_workers": M, "batch_size": N, "lr": LR}
    rounds = settings.pop("rounds", 3)
    with Trainer(models()[model], data=data, **{**given, **settings}) as trainer:
        losses = [done.loss for done in trainer.rounds(rounds)]
        state = [part.flatten().double() for part in trainer.model.state_dict().values()]
        return losses, torch.cat(state)


@pytest.mark.parametrize("model", ["dense", "dropout", "normed"])
@pytest.mark.parametrize("attack", ["gaussian:q=2", "label-flip:q=2,who=resampled"])
def test_one_step_of_sgd_is_a_synchronous_round_to_the_bit(
    data: Dataset, model: str, attack: str
) -> None:
    settings: dict[str, Any] = {"attack": attack, "schedule": "inverse:scale=3"}
    plain = train(data, model, **settings)
    stepped = train(data, model, local_steps=1, **settings)
    assert plain[0] == stepped[0]
    assert torch.equal(plain[1], stepped[1])


@pytest.mark.parametrize("model", ["dense", "normed"])
def test_zero_learning_rate_changes_no_parameter(data: Dataset, model: str) -> None:
    settings: dict[str, Any] = {"local_steps": 4, "schedule": "cosine:rounds=3"}
    with Trainer(
        models()[model], data=data, rule="phocas:b=2", num_workers=M, batch_size=N, **settings
    ) as trainer:
        list(trainer.rounds(3))
        before = trainer.server.vector.clone()
        assert [done.action for done in trainer.rounds(2)] == ["applied", "applied"]
        assert torch.equal(trainer.server.vector, before)


def by_hand(
    data: Dataset,
    steps: int,
    inner: Any,
    outer: Any,
    rounds: int = 3,
) -> torch.Tensor:
    """Compute the definition: every worker alone, by autograd, with torch's optimizers."""
    model = models()["dense"]
    task = Task.make(
        copy.deepcopy(model),
        data=data,
        rule="mean",
        num_workers=M,
        batch_size=N,
        local_steps=steps,
    )
    server = outer(list(model.parameters()))
    for round_ in range(rounds):
        changes = []
        for worker in range(M):
            own = copy.deepcopy(model)
            optimizer = inner(own.parameters())
            for step in range(steps):
                inputs, targets = task.batches(round_, step=step)
                loss = functional.cross_entropy(own(inputs[worker]), targets[worker])
                tensors = list(own.parameters())
                for tensor, slope in zip(tensors, torch.autograd.grad(loss, tensors), strict=True):
                    tensor.grad = slope
                optimizer.step()
            pairs = zip(model.parameters(), own.parameters(), strict=True)
            changes.append([(old - new).detach() for old, new in pairs])
        for tensor, *parts in zip(model.parameters(), *changes, strict=True):
            tensor.grad = torch.stack(parts).mean(0)
        server.step()
    return torch.cat([tensor.detach().flatten().double() for tensor in model.parameters()])


class Clipped(torch.optim.Optimizer):
    """A user-defined optimizer that checks its inputs and their order."""

    def __init__(self, tensors: Any, lr: float) -> None:
        super().__init__(tensors, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # no closure
        for group in self.param_groups:
            slopes = torch.cat([tensor.grad.view(-1) for tensor in group["params"]])
            for tensor in group["params"]:
                tensor.view(-1).sub_(tensor.grad.view(-1) / slopes.norm(), alpha=group["lr"])


INNER: dict[str, tuple[dict[str, Any], Any]] = {
    "sgd": ({}, lambda tensors: torch.optim.SGD(tensors, lr=LR)),
    "momentum": (
        {"optimizer_options": {"momentum": 0.9}, "weight_decay": 0.01},
        lambda tensors: torch.optim.SGD(tensors, lr=LR, momentum=0.9, weight_decay=0.01),
    ),
    "adamw": (
        {"optimizer": "adamw", "lr": 0.003},
        lambda tensors: torch.optim.AdamW(tensors, lr=0.003),
    ),
    "adafactor": (
        {"optimizer": "adafactor", "lr": 0.05},
        lambda tensors: torch.optim.Adafactor(tensors, lr=0.05),
    ),
    "clipped": ({"optimizer": Clipped}, lambda tensors: Clipped(tensors, lr=LR)),
}
OUTER = {
    "sgd": lambda tensors: torch.optim.SGD(tensors, lr=1.0),
    "nesterov:lr=0.7,momentum=0.9": lambda tensors: torch.optim.SGD(
        tensors, lr=0.7, momentum=0.9, nesterov=True
    ),
    "adam:lr=0.01,betas=0.9/0.99,eps=0.001": lambda tensors: torch.optim.Adam(
        tensors, lr=0.01, betas=(0.9, 0.99), eps=0.001
    ),
}


@pytest.mark.parametrize(
    ("inner", "outer", "path"),
    [
        *(("sgd", outer, None) for outer in OUTER),
        *((inner, "nesterov:lr=0.7,momentum=0.9", None) for inner in INNER if inner != "sgd"),
        *((inner, "sgd", "looped") for inner in INNER),
    ],
)
def test_workers_and_servers_match_a_plain_loop(
    data: Dataset, inner: str, outer: str, path: str | None
) -> None:
    settings, make = INNER[inner]
    _, found = train(
        data,
        local_steps=4,
        server_optimizer=outer,
        rule="mean",
        gradient_path=path,
        **settings,
    )
    with one_torch_thread():
        expected = by_hand(data, 4, make, OUTER[outer])
        moved = float((expected - by_hand(data, 4, make, OUTER[outer], rounds=0)).abs().max())
    assert moved > 0.02
    assert float((found - expected).abs().max()) < 2e-4 * moved + 2e-6


@pytest.mark.parametrize("model", ["dense", "dropout", "normed"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_bits_depend_neither_on_threads_nor_on_servers(
    data: Dataset, model: str, optimizer: str
) -> None:
    settings: dict[str, Any] = {"local_steps": 5, "optimizer": optimizer, "attack": "sign-flip:q=2"}
    losses, state = train(data, model, threads=1, **settings)
    assert torch.isfinite(state).all()
    assert len(set(losses)) == 3
    other, again = train(data, model, threads=2, num_servers=4, **settings)
    assert losses == other
    assert torch.equal(state, again)


@pytest.mark.parametrize("model", ["dense", "dropout", "normed"])
@pytest.mark.parametrize(("steps", "optimizer"), [(1, "sgd"), (3, "sgd"), (3, "adam")])
@pytest.mark.parametrize("batch_size", [7, 32, 120])  # the last three workers are one block
def test_some_workers_alone_get_the_bits_of_all_at_once(
    data: Dataset, model: str, steps: int, optimizer: str, batch_size: int
) -> None:
    """Compute some of the workers, as a worker process does."""
    settings: dict[str, Any] = {"clients": 9, "attack": "label-flip:q=4", "optimizer": optimizer}

    def walk(first: int, last: int) -> list[torch.Tensor]:
        task = Task.make(
            models()[model],
            data=data,
            rule="mean",
            num_workers=M,
            batch_size=batch_size,
            local_steps=steps,
            **settings,
        )
        with DeterministicPool(1) as pool:
            gradients = task.differentiate(FlatParameters(task.model), pool)
            assert task.local is not None
            walking = local_steps.local_steps(gradients, task.local)
            rows = gradients.flat.rows(last - first)

            def draw(step: int) -> tuple[torch.Tensor, torch.Tensor]:
                return task.batches(2, first, last, step=step)

            losses = walking(draw, rows, task.seed, 2, 0.5, first)
        found = [rows, losses]
        if model == "normed":
            left = [torch.cat([part.flatten() for part in each.values()]) for each in walking.left]
            found.append(torch.stack(left))
        return found

    whole = walk(0, M)
    assert float(whole[0].std(0).max()) > 0
    for parts in ([(0, 1), (1, 3), (3, 6)], [(0, 4), (4, 6)]):
        found = [walk(*part) for part in parts]
        joined = [torch.cat(pieces) for pieces in zip(*found, strict=True)]
        assert len(joined) == len(whole)
        assert all(map(torch.equal, joined, whole))


def test_both_implementations_of_steps_agree_on_dropout(data: Dataset) -> None:
    settings: dict[str, Any] = {"local_steps": 5, "rounds": 1}
    fast, slow = (
        train(data, "dropout", gradient_path=path, **settings) for path in (None, "looped")
    )
    assert fast[0] == pytest.approx(slow[0], rel=1e-6)
    assert torch.allclose(fast[1], slow[1], atol=1e-6)


def test_resumed_run_ends_with_the_same_bits(data: Dataset, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "rule": "phocas:b=2",
        "num_workers": M,
        "local_steps": 3,
        "server_optimizer": "nesterov:lr=0.7",
    }
    whole, begun, resumed = (Trainer("softmax", data=data, **settings) for _ in range(3))
    list(whole.rounds(4))
    list(begun.rounds(2))
    begun.save(tmp_path / "half")
    resumed.load(tmp_path / "half")
    list(resumed.rounds(2))
    assert torch.equal(whole.server.vector, resumed.server.vector)
    other = Trainer("softmax", data=data, **{**settings, "local_steps": 4})
    with pytest.raises(ValueError, match="another configuration"):
        other.load(tmp_path / "half")
    for trainer in (whole, begun, resumed, other):
        trainer.close()


def test_diverging_worker_is_survived(data: Dataset) -> None:
    settings: dict[str, Any] = {"local_steps": 10, "rounds": 15, "lr": 0.3}
    honest, _ = train(data, **settings)
    robust, _ = train(data, attack="constant:q=2,value=inf", **settings)
    assert honest[-1] < honest[0] / 2
    assert robust[-1] < honest[0] / 2
    with Trainer(
        models()["dense"],
        data=data,
        rule="phocas:b=2",
        num_workers=10,
        attack="gaussian:q=2",
        local_steps=3,
    ) as trainer:
        assert [done.flagged for done in trainer.rounds(15)][-1] == (0, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"local_steps": 0}, "needs local_steps >= 1: got local_steps=0"),
        ({"server_optimizer": "sgd"}, "is for rounds of local steps"),
        ({"local_steps": 2, "worker_momentum": 0.9}, "worker_momentum is for workers that send"),
        ({"local_steps": 2, "server_optimizer": "sdg"}, "unknown optimizer 'sdg'; did you mean"),
        ({"local_steps": 2, "server_optimizer": "sgd:lr=0"}, "a finite lr > 0"),
        ({"local_steps": 2, "server_optimizer": "sgd:rate=1"}, "sgd cannot be made with 'rate=1'"),
        ({"local_steps": 2, "server_optimizer": "adam:betas=x"}, "betas must be a number"),
    ],
)
def test_impossible_settings_are_rejected(
    data: Dataset, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        train(data, **options)
    with pytest.raises(ConfigError, match=message.replace("needs", ".*needs")):
        make_config(options)


def test_server_optimizer_spec_round_trips() -> None:
    for text in ("sgd", "nesterov:lr=0.7,momentum=0.9", "adam:betas=0.9/0.99,amsgrad=true"):
        assert str(parse_server_optimizer(text)) == text
    assert parse_server_optimizer(" SGD:lr=1 ") == ServerOptimizer()
    assert not parse_server_optimizer("sgd:weight_decay=0.1").linear


def test_a_run_without_local_steps_keeps_the_identity_that_it_had() -> None:
    plain = make_config({})
    assert plain.identity() == make_config({"local_steps": None}).identity()
    assert plain.identity() != make_config({"local_steps": 1}).identity()


@pytest.mark.parametrize("engine", ["local", "ray"])
@pytest.mark.parametrize("setting", ["local_steps", "clients"])
def test_asynchronous_training_excludes_local_steps_and_clients(
    data: Dataset, engine: str, setting: str
) -> None:
    asked: dict[str, Any] = {setting: 30}
    message = f"sends the gradients of all workers: leave {setting} or asynchronous out"
    with pytest.raises(ConfigError, match=f"{setting}: asynchronous training {message}"):
        make_config({**asked, "engine": engine, "asynchronous": "mean", "rule": "mean"})
    settings = (LocalSettings if engine == "local" else RaySettings)(asynchronous="mean")
    with pytest.raises(ValueError, match=message):
        Trainer("softmax", data=data, rule="mean", num_workers=M, engine=settings, **asked)
