"""A task: what is trained, on what, by whom, under which rule and attack, and from which seed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, TypeVar, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from phocas.attacks import Attack, attack_rng, parse_attack
from phocas.attacks.participation import among, check_among
from phocas.data import DATASETS, SPLITS, Assignment, DataSpec, Split, batch_indices, load
from phocas.provenance import RESULTS_VERSION, code_of
from phocas.rules import RULES, Rule
from phocas.seeds import Stream, generator
from phocas.settings import Settings, at_least, below_one, nonnegative, setting, word
from phocas.specs import OnNonfinite, Spec, count, positive, unknown
from phocas.training.devices import find_device
from phocas.training.gradients import worker_gradients
from phocas.training.gradients.base import Loss, Reduction, WorkerGradients
from phocas.training.lanes import Lanes
from phocas.training.local_steps import LocalOptimizer
from phocas.training.models import Builder, build_model
from phocas.training.optimizers import Optimizers, parse_optimizer, parse_server_optimizer
from phocas.training.parameters import FlatParameters
from phocas.training.samples import Samples
from phocas.training.schedules import SCHEDULES, Constant
from phocas.training.server import ParameterServer

T = TypeVar("T")

_SEEDS = 1 << 63  # what a database and every generator can hold


def _seed(owner: str, name: str, value: object) -> int:
    seed = count(owner, name, value)
    if seed >= _SEEDS:
        raise ValueError(f"{owner} needs {name} < 2^63: got {name}={seed}")
    return seed


@dataclass(frozen=True, kw_only=True)
class TaskSettings(Settings):
    """What users choose for a task besides the model, the loss and the data: text or value.

    >>> settings = TaskSettings(rule="phocas:b=2", num_workers=7)
    >>> str(settings.rule), settings.num_workers, settings.lr
    ('phocas:b=2', 7, 0.1)
    """

    owner = "Trainer"

    rule: Rule | str = setting(MISSING, "the aggregation rule: phocas:b=8, median, krum:b=6, ...")
    num_workers: int = setting(20, "m, the number of workers", at_least(1))
    clients: int | None = setting(
        None, "N, of whom so many as there are workers are drawn in every round", at_least(1)
    )
    num_servers: int = setting(
        1, "s, the servers that share the columns; changes no bit", at_least(1)
    )
    batch_size: int = setting(32, "n, the samples of a worker in a round", at_least(1))
    lr: float = setting(0.1, "the learning rate", positive)
    attack: Attack | str | None = setting(None, "what goes wrong: gambler, gaussian:q=6, or none")
    seed: int = setting(0, "the seed of everything random", _seed)
    split: Split | str = setting("iid", "who holds which samples: iid, dirichlet:alpha=0.5, ...")
    optimizer: Optimizers | str = setting(
        "sgd", "the optimiser: a name in torch.optim, or module:callable"
    )
    optimizer_options: Mapping[str, Any] = setting({}, "more arguments of the optimiser")
    schedule: Callable[[int], float] | str = setting(
        "constant", "a factor of the learning rate by the round: cosine:rounds=500, ..."
    )
    weight_decay: float = setting(0.0, "the weight decay of the optimiser", nonnegative)
    local_steps: int | None = setting(
        None,
        "H, the steps of each worker with the optimiser in a round; then the servers step",
        at_least(1),
    )
    server_optimizer: str | None = setting(
        None, "what servers step with after local steps: sgd, nesterov:lr=0.7,momentum=0.9, ..."
    )
    worker_momentum: float = setting(
        0.0, "beta, where workers send v = beta v + (1 - beta) g", below_one
    )
    reduction: Reduction = setting(
        "mean", "whether a worker sends the mean or the sum of its batch", word("mean", "sum")
    )
    standardise: bool = setting(
        default=False, text="subtract the mean of the images, and divide by their deviation"
    )
    on_nonfinite: OnNonfinite = setting(
        "skip",
        "what to do with a step that is not finite: skip it, stop the run, or apply it",
        word(*get_args(OnNonfinite)),
    )
    device: torch.device | str | None = setting(
        None, "where to compute: cpu, cuda, cuda:1; by default where the model is", find_device
    )
    threads: int | None = setting(
        None, "the cores to use, by default all; changes no bit", at_least(1), place=True
    )
    gradient_path: str | None = setting(
        None, "how gradients are computed: merged, vectorised or looped; by default what fits"
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class ServerTask:
    """What servers know of a task: how the rows of a round become a step. No model, no data."""

    num_workers: int
    num_servers: int
    clients: int | None
    rule: Rule
    attack: Attack | None
    optimizer: Optimizers
    optimizer_options: Mapping[str, Any]
    lr: float
    on_nonfinite: OnNonfinite
    seed: int

    def serve(self, model: nn.Module) -> ParameterServer:
        """Make the servers of a model's parameters, which become views of one vector."""
        return ParameterServer(
            model,
            num_workers=self.num_workers,
            num_servers=self.num_servers,
            rule=self.rule,
            optimizer=self.optimizer,
            optimizer_options=self.optimizer_options,
            lr=self.lr,
            on_nonfinite=self.on_nonfinite,
        )

    def rule_rng(self, round: int) -> np.random.Generator:
        """Return the randomness of the rule in one round, for every server the same."""
        return generator(Stream.RULE, self.seed, round)

    def attack_rng(self, round: int) -> np.random.Generator:
        """Return the randomness of the attack in one round, wherever a part of it runs."""
        return attack_rng(self.seed, round)

    def participants(self, round: int) -> npt.NDArray[np.int64] | None:
        """Return which client each row of a round is of, in ascending order, if there are any."""
        if self.clients is None:
            return None
        rng = generator(Stream.CLIENTS, self.seed, round)
        return np.sort(rng.choice(self.clients, self.num_workers, replace=False))

    def attack_of(self, round: int) -> Attack | None:
        """Return what the attack is in a round: of clients, the liars who take part strike."""
        who = self.participants(round)
        if self.attack is None or self.clients is None or who is None:
            return self.attack
        rng = generator(Stream.CLIENTS, self.seed, round, 1)
        return among(self.attack, who, self.clients, rng)


@dataclass(frozen=True, eq=False, kw_only=True)
class Task(ServerTask):
    """Everything that an engine needs to know, checked, with all that was text made a value.

    >>> task = Task.make("softmax", data="synthetic:train=50,test=9", rule="median", num_workers=5)
    >>> task.rule, task.schedule, len(task.assignment)
    (Median(), Constant(), 5)
    """

    model: nn.Module
    loss: Loss
    samples: Samples
    assignment: Assignment
    batch_size: int
    schedule: Callable[[int], float]
    worker_momentum: float
    reduction: Reduction
    device: torch.device
    threads: int | None
    gradient_path: str | None
    local: LocalOptimizer | None
    """What workers step with before they send; ``optimizer`` and ``lr`` are then the servers'."""
    code: Mapping[str, str]
    """Digests of the user's own code that the task is made of, by module."""

    @classmethod
    def make(
        cls,
        model: nn.Module | Builder | str,
        loss: Loss = functional.cross_entropy,
        data: Any = None,
        *,
        test: Any = None,
        **settings: Any,
    ) -> Task:
        """Make a task of what users give; see :class:`TaskSettings` for the settings.

        Args:
            model: any module, or a model's spelling, whose weights then come from the seed.
            loss: ``loss(outputs, targets)``, the mean over a batch.
            data: a :class:`phocas.data.Dataset`, its spelling, or what :class:`Samples` takes.
            test: what to evaluate on, if ``data`` has none of its own.
            settings: those of :class:`TaskSettings`.
        """
        asked = _asked(settings)
        rule = RULES.of(asked.rule, "Trainer")
        rule.check(asked.num_workers)
        _check_clients(asked)
        attack = asked.attack
        if isinstance(attack, str):
            attack = parse_attack(attack, asked.num_servers)
        split = SPLITS.of(asked.split, "Trainer")
        made: dict[str, Any] = {
            "loss": loss,
            "rule": rule,
            "attack": attack,
            "schedule": _value(SCHEDULES.parse, asked.schedule),
            **_optimizers(asked),
        }
        spec = DATASETS.parse(data) if isinstance(data, str) else data
        samples = Samples(  # after all that can be refused without it: a download takes long
            load(spec) if isinstance(spec, DataSpec) else spec,
            test,
            standardise=asked.standardise,
            dtype=_dtype(model),
        )
        module = (
            model
            if isinstance(model, nn.Module)
            else build_model(model, samples.shape, samples.num_classes, asked.seed)
        )
        if attack is not None:
            d = sum(tensor.numel() for tensor in module.parameters() if tensor.requires_grad)
            dtype = str(_dtype(module)).removeprefix("torch.")
            check_among(attack, asked.clients, asked.num_workers, asked.num_servers, d, dtype)
        if asked.device is not None:
            module.to(asked.device)
        made["device"] = next(module.parameters(), torch.empty(0)).device
        rng = generator(Stream.SPLIT, asked.seed)
        assignment = samples.assign(split, asked.clients or asked.num_workers, rng)
        made |= {"model": module, "samples": samples, "assignment": assignment}
        used = (*made.values(), split, spec, test, model, *vars(asked).values())
        made["code"] = code_of([data, *(each for each in used if each is not samples)])
        left = {declared.name for declared in fields(cls)} - made.keys()
        return cls(**made, **{name: getattr(asked, name) for name in left})

    def for_server(self) -> ServerTask:
        """Return what a server is told."""
        told = {declared.name: getattr(self, declared.name) for declared in fields(ServerTask)}
        return ServerTask(**told)

    def for_worker(self, gradient_path: str) -> Task:
        """Return what a worker process is told: no test samples, and how gradients are computed."""
        return replace(
            self,
            samples=self.samples.without_test(),
            schedule=Constant(),
            threads=1,
            gradient_path=gradient_path,
        )

    def differentiate(self, flat: FlatParameters, lanes: Lanes) -> WorkerGradients:
        """Choose how the workers' gradients are computed, by a trial on a sample."""
        sample = self.samples.draw(np.zeros((1, self.batch_size), np.int64))
        return worker_gradients(
            self.model,
            self.loss,
            flat,
            lanes,
            sample=self._there(*sample),
            reduction=self.reduction,
            path=self.gradient_path,
        )

    def server_factor(self, factor: float) -> float:
        """Return the factor of the servers' rate: the changes of workers may have it in them."""
        return factor if self.local is None or self.local.linear else 1.0

    def batches(
        self, round: int, first: int = 0, last: int | None = None, *, step: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw what the workers first to last - 1 see in a round, as the attack leaves it.

        ``step`` is that of workers who take several in a round.
        """
        workers = slice(first, last)
        number = round if self.local is None else round * self.local.steps + step
        holders = len(self.assignment)
        indices = batch_indices(self.assignment, holders, self.batch_size, self.seed, number)
        who = self.participants(round)
        if who is not None:
            indices = indices[who]
        classes = self.samples.num_classes
        attack = self.attack_of(round)
        if attack is None or not (classes or attack.acts_on_data):
            return self._there(*self.samples.draw(indices[workers]))
        inputs, targets = self.samples.draw(indices)  # labels are corrupted for all workers at once
        attack.corrupt_labels(targets.numpy(), classes, rng=self.attack_rng(number), round=round)
        return self._there(inputs[workers], targets[workers])

    def _there(
        self, inputs: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return inputs.to(self.device), targets.to(self.device)

    def identity(self) -> str:
        """Return a digest of all that the result depends on, besides the user's own code.

        A checkpoint belongs to one, and to the code that is in ``code``.
        """
        said = {
            declared.name: _written(getattr(self, declared.name))
            for declared in fields(self)
            if declared.name not in ("model", "samples", "assignment", "device", "threads", "code")
        }
        if RESULTS_VERSION > 1:  # the first is that of checkpoints which name none
            said["results_version"] = RESULTS_VERSION
        if self.device.type != "cpu":  # whose digests are older than the setting
            said["device"] = self.device.type
        if self.local is None:
            del said["local"]
        if self.clients is None:
            del said["clients"]
        said["model"] = [
            (name, str(tensor.dtype), *tensor.shape)
            for name, tensor in self.model.state_dict().items()
        ]
        said["samples"] = (len(self.samples), self.samples.num_classes, *self.samples.shape)
        said["assignment"] = self.assignment.sizes.tolist()
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]


def _asked(settings: Mapping[str, Any]) -> TaskSettings:
    """Take what was given and is not None, which stands for the default."""
    known = [declared.name for declared in fields(TaskSettings)]
    for name in settings:
        if name not in known:
            raise TypeError(unknown("setting of a Trainer", name, known, plural="settings"))
    given = {name: value for name, value in settings.items() if value is not None}
    if "rule" not in given:
        raise TypeError("Trainer needs a rule: write rule='phocas:b=8', or pass a rule")
    return TaskSettings(**given)


def _check_clients(asked: TaskSettings) -> None:
    if asked.clients is None:
        return
    if asked.clients < asked.num_workers:
        raise ValueError(
            "Trainer needs clients >= num_workers, who are drawn from them: got"
            f" clients={asked.clients} with num_workers={asked.num_workers}"
        )
    if asked.worker_momentum:
        raise ValueError(
            "worker_momentum is for workers that take part in every round: leave it out, or clients"
        )


def _optimizers(asked: TaskSettings) -> dict[str, Any]:
    """Say what servers step with, and what workers do before they send, if they do."""
    decay = {"weight_decay": asked.weight_decay} if asked.weight_decay else {}
    kind = _value(parse_optimizer, asked.optimizer)
    options = {**asked.optimizer_options, **decay}
    if asked.local_steps is None:
        if asked.server_optimizer is not None:
            raise ValueError(
                f"server_optimizer={asked.server_optimizer} is for rounds of local steps: give"
                " local_steps too, or say optimizer for the servers' own"
            )
        said = {"optimizer": kind, "optimizer_options": options, "lr": asked.lr}
        return {**said, "local": None}
    if asked.worker_momentum:
        raise ValueError(
            "worker_momentum is for workers that send gradients: with local_steps give the"
            " optimiser a momentum, optimizer_options={'momentum': 0.9}"
        )
    server = parse_server_optimizer(asked.server_optimizer or "sgd")
    of_server, more = server.make()
    return {
        "optimizer": of_server,
        "optimizer_options": more,
        "lr": server.lr * asked.lr if server.linear else server.lr,
        "local": LocalOptimizer(asked.local_steps, kind, options, asked.lr, server.linear),
    }


def _value(parse: Callable[[str], T], given: T | str) -> T:
    return parse(given) if isinstance(given, str) else given


def _dtype(model: object) -> torch.dtype:
    tensors = model.parameters() if isinstance(model, nn.Module) else iter(())
    return next((tensor.dtype for tensor in tensors if tensor.requires_grad), torch.float32)


def _written(value: object) -> Any:
    """Write a setting down so that it reads the same in every process."""
    if isinstance(value, Spec):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _written(content) for key, content in value.items()}
    if value is None or isinstance(value, int | float | str):
        return value
    if isinstance(value, LocalOptimizer):
        return _written(vars(value))
    if isinstance(value, tuple | list):
        return [_written(content) for content in value]
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"
