"""A task: the model, the data, the workers, the rule, the attack and the seed of a training."""

from __future__ import annotations

import functools
import hashlib
import json
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from phocas.attacks import ATTACKS, Attack, attack_rng, parse_attack
from phocas.attacks.participation import among, check_among
from phocas.data import (
    DATASETS,
    IID,
    SPLITS,
    Assignment,
    DataSpec,
    OwnData,
    Split,
    batch_indices,
    load,
)
from phocas.data.dataset import takes
from phocas.detection.exclusion import EXCLUSIONS, AfterEvidence, Never
from phocas.detection.own_past import WORKER_DATA, WorkerData
from phocas.provenance import RESULTS_VERSION, code_of
from phocas.rules import RULES, Rule
from phocas.seeds import Stream, generator
from phocas.settings import (
    Conflict,
    Settings,
    Spelling,
    at_least,
    below_one,
    nonnegative,
    setting,
    word,
)
from phocas.specs import SPELLINGS, OnNonfinite, Spec, count, positive, unknown
from phocas.training.augmentation import AUGMENTATIONS, Augmentation, crop_and_flip
from phocas.training.devices import find_device
from phocas.training.gradients import worker_gradients
from phocas.training.gradients.base import Loss, Reduction, WorkerGradients
from phocas.training.local_steps import LocalOptimizer
from phocas.training.models import Builder, build_model
from phocas.training.optimizers import Optimizers, parse_optimizer, parse_server_optimizer
from phocas.training.parameters import FlatParameters
from phocas.training.pool import DeterministicPool
from phocas.training.samples import Samples
from phocas.training.schedules import SCHEDULES, Constant
from phocas.training.server import ParameterServer

T = TypeVar("T")

ByzantineData = Literal["split", "iid"]
"""The data of Byzantine workers: their part of the split, or all samples."""
MomentumForm = Literal["average", "sum"]
"""The momentum of workers: v = beta v + (1 - beta) g, or v = beta v + g."""

_SEEDS = 1 << 63  # smaller seeds fit into a database and into every generator


def _seed(owner: str, name: str, value: object) -> int:
    seed = count(owner, name, value)
    if seed >= _SEEDS:
        raise ValueError(f"{owner} needs {name} < 2^63: got {name}={seed}")
    return seed


@dataclass(frozen=True, kw_only=True)
class TaskSettings(Settings):
    """Settings of a task besides the model, the loss and the data.

    Rules, attacks, splits, schedules and optimizers may be given as text or as values.

    >>> settings = TaskSettings(rule="phocas:b=2", num_workers=7)
    >>> str(settings.rule), settings.num_workers, settings.lr
    ('phocas:b=2', 7, 0.1)
    """

    owner = "Trainer"

    rule: Rule | str = setting(MISSING, "Aggregation rule: phocas:b=8, median, krum:b=6, ...")
    num_workers: int = setting(20, "Number of workers, m.", at_least(1))
    clients: int | None = setting(
        None, "Number of clients from which the workers of a round are drawn.", at_least(1)
    )
    num_servers: int = setting(
        1, "Number of servers that share the parameters; the result does not change.", at_least(1)
    )
    batch_size: int = setting(32, "Samples of each worker in a round, n.", at_least(1))
    lr: float = setting(0.1, "Learning rate.", positive)
    attack: Attack | Callable[..., Any] | str | None = setting(
        None, "Attack or fault: gambler, gaussian:q=6, ..., or none."
    )
    seed: int = setting(0, "Seed of all random numbers.", _seed)
    split: Split | Callable[..., Any] | str = setting(
        "iid", "Distribution of the samples over workers: iid, dirichlet:alpha=0.5, ..."
    )
    byzantine_data: ByzantineData = setting(
        "split",
        "Data of Byzantine workers: a part of the split, or iid: all samples, and the honest"
        " workers divide them.",
        word(*get_args(ByzantineData)),
    )
    validation: float = setting(
        0.0,
        "Share of the training samples that is held out and evaluated instead of the test samples,"
        " which are evaluated once, at the end.",
        below_one,
    )
    worker_data: WorkerData | None = setting(
        None,
        "Data of honest workers, for detection: alike or differ; by default as the split gives it.",
        word(*WORKER_DATA),
    )
    exclude: Never | AfterEvidence | str = setting(
        "never",
        "Exclusion of clients that no longer act as in their own past: never, evidence,"
        " evidence:rounds=20.",
    )
    optimizer: Optimizers | str = setting(
        "sgd", "Optimizer: a name in torch.optim, or module:callable."
    )
    optimizer_options: Mapping[str, Any] = setting({}, "Other arguments of the optimizer.")
    schedule: Callable[[int], float] | str = setting(
        "constant", "Schedule of the learning rate: cosine:rounds=500, ..."
    )
    weight_decay: float = setting(0.0, "Weight decay of the optimizer.", nonnegative)
    local_steps: int | None = setting(
        None, "Optimizer steps of each worker in a round, before it sends.", at_least(1)
    )
    server_optimizer: str | None = setting(
        None, "Optimizer of the servers after local steps: sgd, nesterov:lr=0.7,momentum=0.9."
    )
    worker_momentum: float = setting(
        0.0, "Momentum beta of the workers, which send v = beta v + (1 - beta) g.", below_one
    )
    worker_momentum_form: MomentumForm = setting(
        "average",
        "Form of the workers' momentum: average, or sum for v = beta v + g.",
        word(*get_args(MomentumForm)),
    )
    trusted: int | None = setting(
        None,
        "Number of training samples that the server keeps for its own gradient (fl-trust).",
        at_least(1),
    )
    reduction: Reduction = setting(
        "mean", "Gradient of a batch: the mean or the sum over its samples.", word("mean", "sum")
    )
    standardise: bool = setting(
        default=False, text="Subtract the mean of the images and divide by their deviation."
    )
    augmentation: Augmentation = setting(
        "none",
        "Random changes of training images: none, or crop-flip (shifted by up to 4, mirrored).",
        word(*AUGMENTATIONS),
    )
    on_nonfinite: OnNonfinite = setting(
        "skip",
        "If an aggregate has NaN or inf: skip the step, stop the run, or apply it.",
        word(*get_args(OnNonfinite)),
    )
    device: torch.device | str | None = setting(
        None, "Device: cpu, cuda, cuda:1; by default that of the model.", find_device
    )
    threads: int | None = setting(
        None,
        "Number of cores to use, by default all; the result does not change.",
        at_least(1),
        place=True,
    )
    gradient_path: str | None = setting(
        None, "Computation of gradients: merged, vectorised or looped; by default automatic."
    )

    def conflicts(self, say: Spelling = str) -> Iterator[Conflict]:
        """Yield the conflicts between settings, without importing user-defined code.

        A user-defined rule or attack is checked only if it is a value, not a text.
        """
        if self.server_optimizer is not None and self.local_steps is None:
            yield Conflict(
                "server_optimizer",
                f"{say('server_optimizer')} is for rounds of local steps: give {say('local_steps')}"
                f" too, or set {say('optimizer')} instead",
            )
        if self.worker_momentum and self.local_steps is not None:
            yield Conflict(
                "worker_momentum",
                f"{say('worker_momentum')} is for workers that send gradients: with"
                f" {say('local_steps')} set the momentum in {say('optimizer_options')}",
            )
        if self.worker_momentum and self.clients is not None:
            yield Conflict(
                "worker_momentum",
                f"{say('worker_momentum')} is for workers that take part in every round: leave it"
                f" or {say('clients')} out",
            )
        if self.clients is not None and self.clients < self.num_workers:
            yield Conflict(
                "clients",
                f"{say('clients')} must be at least {say('num_workers')}, which are drawn from"
                f" them: got {self.clients} clients for {self.num_workers} workers",
            )
        yield from self._of_exclusion(say)
        if self.worker_momentum_form != "average" and not self.worker_momentum:
            yield Conflict(
                "worker_momentum_form",
                f"{say('worker_momentum_form')} is for workers with momentum: set"
                f" {say('worker_momentum')} too",
            )
        rule = RULES.read(self.rule) if isinstance(self.rule, str) else self.rule
        if isinstance(rule, Rule):
            yield from self._of_reference(rule, say)
        attack = ATTACKS.read(self.attack) if isinstance(self.attack, str) else self.attack
        if isinstance(attack, Attack) and attack.needs_memory and self.clients is not None:
            yield Conflict(
                "attack",
                f"{attack} is for workers that take part in every round: leave its warm-up or"
                f" {say('clients')} out",
            )
        if (
            self.byzantine_data == "iid"
            and isinstance(attack, Attack)
            and attack.byzantine() is None
        ):
            yield Conflict(
                "byzantine_data",
                f"{say('byzantine_data')} = iid needs an attack by the same workers in every round:"
                f" got {attack}",
            )
        try:
            if isinstance(rule, Rule):
                rule.check(self.num_workers)
        except ValueError as error:
            yield Conflict("rule", str(error))
        try:
            if isinstance(attack, Attack):
                check_among(attack, self.clients, self.num_workers, self.num_servers)
        except ValueError as error:
            yield Conflict("attack", str(error))

    def _of_exclusion(self, say: Spelling) -> Iterator[Conflict]:
        """Yield the conflicts of the exclusion of clients with their data."""
        if isinstance(EXCLUSIONS.of(self.exclude, self.owner), Never):
            return
        if self.clients is None:
            yield Conflict("exclude", f"{say('exclude')} is for clients: set {say('clients')} too")
        split = SPLITS.read(self.split) if isinstance(self.split, str) else self.split
        alike = isinstance(split, Split) and split.alike
        if self.worker_data == "alike" or (self.worker_data is None and alike):
            yield Conflict(
                "exclude",
                f"{say('exclude')} compares each client with its own past: set"
                f" {say('worker_data')} = differ",
            )

    def _of_reference(self, rule: Rule, say: Spelling) -> Iterator[Conflict]:
        """Yield the conflicts of the trusted samples with the rule."""
        needed = rule.needs_reference == "trusted"
        if needed and self.trusted is None:
            yield Conflict(
                "trusted",
                f"{rule} needs trusted samples, on which the server computes a gradient: set"
                f" {say('trusted')} to their number, such as 100",
            )
        if self.trusted is not None and not needed:
            yield Conflict(
                "trusted",
                f"{say('trusted')} is for a rule that needs trusted samples, such as fl-trust, and"
                f" {rule} does not: leave {say('trusted')} out",
            )


@dataclass(frozen=True, eq=False, kw_only=True)
class ServerTask:
    """The part of a task that servers need, without the model and the data."""

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
        """Return the servers of a model, whose parameters become views of one vector."""
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
        """Return the random generator of the rule in one round, the same on every server."""
        return generator(Stream.RULE, self.seed, round)

    def attack_rng(self, round: int) -> np.random.Generator:
        """Return the random generator of the attack in one round, the same in every process."""
        return attack_rng(self.seed, round)

    def participants(
        self, round: int, excluded: Sequence[int] = ()
    ) -> npt.NDArray[np.int64] | None:
        """Return the client of each row of a round, in ascending order; None without clients.

        Args:
            round: the number of the round, from 0.
            excluded: clients that are not drawn.
        """
        if self.clients is None:
            return None
        rng = generator(Stream.CLIENTS, self.seed, round)
        drawn = rng.choice(self.clients - len(excluded), self.num_workers, replace=False)
        return np.sort(np.delete(np.arange(self.clients), excluded)[drawn] if excluded else drawn)

    def attack_of(self, round: int, excluded: Sequence[int] = ()) -> Attack | None:
        """Return the attack of a round; with clients, only Byzantine participants attack."""
        who = self.participants(round, excluded)
        if self.attack is None or self.clients is None or who is None:
            return self.attack
        rng = generator(Stream.CLIENTS, self.seed, round, 1)
        return among(self.attack, who, self.clients, rng)


@dataclass(frozen=True, eq=False, kw_only=True)
class Task(ServerTask):
    """A checked task, as engines need it; texts have become values.

    >>> task = Task.make("softmax", data="synthetic:train=50,test=9", rule="median", num_workers=5)
    >>> task.rule, task.schedule, len(task.assignment)
    (Median(), Constant(), 5)
    """

    model: nn.Module
    loss: Loss
    samples: Samples
    assignment: Assignment
    worker_data: WorkerData
    """Whether the data of honest workers are alike or differ, on which detection depends."""
    exclude: Never | AfterEvidence
    """When clients are excluded that no longer act as in their own past."""
    batch_size: int
    schedule: Callable[[int], float]
    worker_momentum: float
    worker_momentum_form: MomentumForm
    reduction: Reduction
    augmentation: Augmentation
    device: torch.device
    threads: int | None
    gradient_path: str | None
    local: LocalOptimizer | None
    """The optimizer of local steps, if any; ``optimizer`` and ``lr`` are then the servers'."""
    code: Mapping[str, str]
    """Digests of the user-defined code that the task uses, by module."""
    trusted: npt.NDArray[np.int64] | None = None
    """The samples that the server keeps for the reference vector of the rule, if it needs them."""

    @classmethod
    def make(
        cls,
        model: nn.Module | Builder | str,
        loss: Loss = functional.cross_entropy,
        data: Any = None,
        *,
        test: Any = None,
        of_engine: Callable[[TaskSettings], Iterable[Conflict]] = lambda _: (),
        **settings: Any,
    ) -> Task:
        """Return a task from texts or values; see :class:`TaskSettings` for the settings.

        Args:
            model: any module, or a model as text, whose weights then come from the seed.
            loss: ``loss(outputs, targets)``, the mean over a batch.
            data: a :class:`phocas.data.Dataset`, its text, a function that returns data, or an
                argument of :class:`Samples`.
            test: the test data, if ``data`` has none.
            of_engine: the conflicts of the settings with those of an engine.
            settings: those of :class:`TaskSettings`.
        """
        asked = _asked(settings)
        rule = RULES.of(asked.rule, "Trainer")
        attack = asked.attack
        if isinstance(attack, str):
            attack = parse_attack(attack, asked.num_servers)
        if attack is not None:
            attack = ATTACKS.of(attack, "Trainer").aimed_at(rule)
        asked = replace(asked, rule=rule, attack=attack)
        for _, text in (*asked.conflicts(), *of_engine(asked)):
            raise ValueError(text)
        split = SPLITS.of(asked.split, "Trainer")
        made: dict[str, Any] = {
            "loss": loss,
            "rule": rule,
            "attack": attack,
            "exclude": EXCLUSIONS.of(asked.exclude, "Trainer"),
            "schedule": _value(SCHEDULES.parse, asked.schedule),
            **_optimizers(asked),
        }
        spec = data
        if isinstance(data, str | types.FunctionType | functools.partial):
            spec = DATASETS.of(data, "Trainer")
        # After all checks that need no data, because a download takes long.
        found = load(spec) if isinstance(spec, DataSpec) or takes(spec, "worker") else spec
        options: dict[str, Any] = {"standardise": asked.standardise, "dtype": _dtype(model)}
        if isinstance(found, OwnData):
            _check_parts(asked, split)
            samples = Samples.described(found, asked.num_workers, test, **options)
        else:
            samples = Samples(found, test, **options)
        if asked.augmentation != "none" and len(samples.shape) != 3:
            raise ValueError(
                f"augmentation={asked.augmentation!r} needs images of (channels, height, width):"
                f" got inputs of shape {samples.shape}"
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
        if asked.validation:
            samples.hold_out(asked.validation, generator(Stream.VALIDATION, asked.seed, 1))
        trusted = None
        if asked.trusted is not None:
            trusted = samples.trusted(asked.trusted, generator(Stream.TRUSTED, asked.seed))
        rng = generator(Stream.SPLIT, asked.seed)
        holders = asked.clients or asked.num_workers
        byzantine = None if attack is None else attack.byzantine()
        iid = (byzantine or ()) if asked.byzantine_data == "iid" else ()
        assignment = (
            Assignment.everything(1, holders)
            if isinstance(found, OwnData)
            else samples.assign(split, holders, rng, iid=iid)
        )
        made |= {"model": module, "samples": samples, "assignment": assignment, "trusted": trusted}
        made["worker_data"] = asked.worker_data or ("alike" if split.alike else "differ")
        used = (*made.values(), split, spec, test, model, *vars(asked).values())
        made["code"] = code_of([data, *(each for each in used if each is not samples)])
        left = {declared.name for declared in fields(cls)} - made.keys()
        return cls(**made, **{name: getattr(asked, name) for name in left})

    def for_server(self) -> ServerTask:
        """Return the part of the task that servers need."""
        told = {declared.name: getattr(self, declared.name) for declared in fields(ServerTask)}
        return ServerTask(**told)

    def for_worker(self, gradient_path: str) -> Task:
        """Return the task of a worker process, without test samples."""
        return replace(
            self,
            samples=self.samples.without_test(),
            schedule=Constant(),
            threads=1,
            gradient_path=gradient_path,
        )

    def load_parts(self, first: int = 0, last: int | None = None) -> Task:
        """Return the task with the data of workers first to last - 1, if workers load their own.

        Raises:
            DataError: a worker cannot load its data.
        """
        if self.samples.parts is None:
            return self
        stop = self.num_workers if last is None else last
        samples, assignment = self.samples.load_parts(self.num_workers, first, stop)
        return replace(self, samples=samples, assignment=assignment)

    def differentiate(self, flat: FlatParameters, pool: DeterministicPool) -> WorkerGradients:
        """Return the computation of the workers' gradients, chosen by a trial on a sample."""
        sample = self.samples.draw(np.zeros((1, self.batch_size), np.int64))
        return worker_gradients(
            self.model,
            self.loss,
            flat,
            pool,
            sample=self._there(*sample),
            reduction=self.reduction,
            path=self.gradient_path,
        )

    @property
    def momentum_gain(self) -> float:
        """Return the factor of a new gradient in the workers' momentum."""
        return 1.0 if self.worker_momentum_form == "sum" else 1 - self.worker_momentum

    def server_factor(self, factor: float) -> float:
        """Return the factor by which the servers multiply the learning rate.

        The result is ``factor``, or 1 if the workers' local steps have already applied ``factor``.
        """
        return factor if self.local is None or self.local.linear else 1.0

    def batches(
        self,
        round: int,
        first: int = 0,
        last: int | None = None,
        *,
        step: int = 0,
        excluded: Sequence[int] = (),
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the batches of workers first to last - 1 in a round, after an attack on data.

        ``step`` counts the local steps of the round; ``excluded`` are clients that are not drawn.
        """
        workers = slice(first, last)
        number = round if self.local is None else round * self.local.steps + step
        holders = len(self.assignment)
        indices = batch_indices(self.assignment, holders, self.batch_size, self.seed, number)
        who = self.participants(round, excluded)
        if who is not None:
            indices = indices[who]
        classes = self.samples.num_classes
        attack = self.attack_of(round, excluded)
        if attack is None or not (classes or attack.acts_on_data):
            inputs, targets = self.samples.draw(indices[workers])
        else:
            # Labels are corrupted for all workers. Workers that load their own data have no others.
            drawn = slice(None) if self.samples.parts is None else workers
            inputs, some = self.samples.draw(indices[drawn])
            targets = some.new_zeros((len(indices), *some.shape[1:]))
            targets[drawn] = some
            attack.corrupt_labels(
                targets.numpy(), classes, rng=self.attack_rng(number), round=round
            )
            targets = targets[workers]
            inputs = inputs[workers] if self.samples.parts is None else inputs
        if self.augmentation != "none":
            inputs = crop_and_flip(inputs, self.seed, number, workers, len(indices))
        return self._there(inputs, targets)

    def _there(
        self, inputs: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return inputs.to(self.device), targets.to(self.device)

    def identity(self) -> str:
        """Return a digest of all settings that determine the result, except user-defined code.

        A checkpoint can be loaded only by a task with the same digest and the same ``code``.
        """
        said = {
            declared.name: written(getattr(self, declared.name))
            for declared in fields(self)
            if declared.name not in ("model", "samples", "assignment", "device", "threads", "code")
        }
        said["trusted"] = None if self.trusted is None else len(self.trusted)
        if RESULTS_VERSION > 1:  # checkpoints of version 1 do not name their version
            said["results_version"] = RESULTS_VERSION
        if self.device.type != "cpu":  # digests of CPU runs are older than this setting
            said["device"] = self.device.type
        if self.worker_data == "alike":  # digests of such runs are older than this setting
            del said["worker_data"]
        if self.local is None:
            del said["local"]
        for name in ("clients", "trusted"):
            if said[name] is None:
                del said[name]
        if isinstance(self.exclude, Never):  # older digests do not name it
            del said["exclude"]
        if self.worker_momentum_form == "average":  # older digests do not name the form
            del said["worker_momentum_form"]
        if self.augmentation == "none":
            del said["augmentation"]
        said["model"] = [
            (name, str(tensor.dtype), *tensor.shape)
            for name, tensor in self.model.state_dict().items()
        ]
        said["samples"] = (len(self.samples), self.samples.num_classes, *self.samples.shape)
        said["assignment"] = self.assignment.sizes.tolist()
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]


def _asked(settings: Mapping[str, Any]) -> TaskSettings:
    """Return the settings that were given; None stands for the default."""
    known = [declared.name for declared in fields(TaskSettings)]
    for name in settings:
        if name not in known:
            raise TypeError(_unknown_setting(name, settings[name], known))
    given = {name: value for name, value in settings.items() if value is not None}
    if "rule" not in given:
        raise TypeError("Trainer needs a rule: write rule='phocas:b=8', or pass a rule")
    return TaskSettings(**given)


def _unknown_setting(name: str, value: object, known: Sequence[str]) -> str:
    """Return the error text; b and q, by any usual name, belong to the rule and to the attack."""
    if name not in ("b", "q") and not {"b", "q"} & {*SPELLINGS.get(name, ())}:
        return unknown("setting of a Trainer", name, known, plural="settings")
    return (
        f"unknown setting of a Trainer {name!r}; did you mean rule='phocas:b={value}', for the"
        f" values that the rule tolerates, or attack='gaussian:q={value}', for Byzantine workers?"
        f" settings: {', '.join(known)}"
    )


def _check_parts(asked: TaskSettings, split: Split) -> None:
    """Raise ValueError for settings that need the training samples of all workers."""
    given = {
        "clients": asked.clients is not None,
        "split": not isinstance(split, IID),
        "byzantine_data": asked.byzantine_data != "split",
        "validation": bool(asked.validation),
        "trusted": asked.trusted is not None,
    }
    for name in (name for name, is_given in given.items() if is_given):
        raise ValueError(
            f"{name} needs the training samples of all workers, and here each worker loads its own:"
            f" leave {name} out, or give one data set for all"
        )


def _optimizers(asked: TaskSettings) -> dict[str, Any]:
    """Return the optimizer of the servers, and that of local steps."""
    decay = {"weight_decay": asked.weight_decay} if asked.weight_decay else {}
    kind = _value(parse_optimizer, asked.optimizer)
    options = {**asked.optimizer_options, **decay}
    if asked.local_steps is None:
        said = {"optimizer": kind, "optimizer_options": options, "lr": asked.lr}
        return {**said, "local": None}
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


def written(value: object) -> Any:
    """Return a setting as JSON data that is the same in every process."""
    if isinstance(value, Spec | torch.device):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): written(content) for key, content in value.items()}
    if value is None or isinstance(value, int | float | str):
        return value
    if isinstance(value, LocalOptimizer):
        return written(vars(value))
    if isinstance(value, tuple | list):
        return [written(content) for content in value]
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"
