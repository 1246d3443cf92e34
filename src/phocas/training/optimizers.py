"""Optimizers by name: those of torch.optim, or user-defined ones."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from phocas.specs import imported_callable, is_place, positive, split_arguments, unknown

Optimizers = Callable[..., torch.optim.Optimizer]
"""A callable that returns an optimizer, given parameters, a learning rate and options."""

OPTIMIZERS: dict[str, Optimizers] = {
    name.lower(): cls
    for name, cls in vars(torch.optim).items()
    if inspect.isclass(cls)
    and issubclass(cls, torch.optim.Optimizer)
    and cls is not torch.optim.Optimizer
    and name != "LBFGS"  # evaluates the loss within a step, which servers cannot do
}


def is_plain(kind: Optimizers, options: Mapping[str, Any]) -> bool:
    """Return True if a step is x - lr g and nothing else.

    >>> is_plain(torch.optim.SGD, {}), is_plain(torch.optim.SGD, {"momentum": 0.9})
    (True, False)
    """
    return kind is torch.optim.SGD and not options


def check_optimizer_text(text: str, *others: str) -> str:
    """Return the text of an optimizer; raise ValueError if it is unknown. Nothing is imported."""
    known = (*others, *OPTIMIZERS)
    if text.strip().lower() not in known and not is_place(text):
        raise ValueError(unknown("optimizer", text.strip(), known) + ", or module:callable")
    return text


def parse_optimizer(text: str) -> Optimizers:
    """Return an optimizer: ``sgd``, ``adam``, another name in torch.optim, or ``module:callable``.

    >>> parse_optimizer("adam").__name__
    'Adam'
    """
    name = check_optimizer_text(text).strip().lower()
    return OPTIMIZERS[name] if name in OPTIMIZERS else imported_callable(text)


@dataclass(frozen=True)
class ServerOptimizer:
    """The optimizer of a server for local steps, written ``adam:lr=0.01``.

    ``nesterov`` is SGD with Nesterov momentum, as in DiLoCo.

    >>> parse_server_optimizer("nesterov:lr=0.7,momentum=0.9")
    ServerOptimizer(kind='nesterov', lr=0.7, options={'momentum': 0.9})
    """

    kind: str = "sgd"
    lr: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        said = {} if self.lr == 1.0 else {"lr": self.lr}
        parts = [f"{name}={_spelt(value)}" for name, value in (said | self.options).items()]
        return self.kind + (":" + ",".join(parts) if parts else "")

    @property
    def linear(self) -> bool:
        """Whether a step is linear in the aggregates so far: SGD without weight decay."""
        return self.kind in ("sgd", "nesterov") and not self.options.get("weight_decay")

    def make(self) -> tuple[Optimizers, dict[str, Any]]:
        """Return the optimizer's class and its options besides the learning rate."""
        if self.kind == "nesterov":
            return torch.optim.SGD, {"momentum": 0.9, **self.options, "nesterov": True}
        return parse_optimizer(self.kind), self.options


def parse_server_optimizer(text: str) -> ServerOptimizer:
    """Parse an optimizer of the server with its learning rate (default 1) and options."""
    kind, _, rest = text.strip().partition(":")
    if is_place(text):
        kind, rest = text.strip(), ""
    name = kind.strip().lower() if kind.strip().lower() in OPTIMIZERS else kind.strip()
    check_optimizer_text(name, "nesterov")
    options = {key: _option(name, key, said) for key, said in split_arguments(rest, name).items()}
    lr = positive(name, "lr", options.pop("lr", 1.0))
    found = ServerOptimizer(name, lr, options)
    if not is_place(name):  # user-defined optimizers are made when a run begins
        kinds, given = found.make()
        try:
            kinds([torch.zeros(1, 1)], lr=lr, **given)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name} cannot be made with {rest!r}: {error}") from None
    return found


def _option(owner: str, name: str, text: str) -> Any:
    said = f"[{text.strip('()').replace('/', ',')}]" if "/" in text else text
    try:
        value = tomllib.loads(f"value = {said}")["value"]
    except tomllib.TOMLDecodeError:
        raise ValueError(
            f"{owner}: {name} must be a number, true or false, or numbers with / between them:"
            f" got {text!r}"
        ) from None
    return tuple(value) if isinstance(value, list) else value


def _spelt(value: object) -> str:
    if isinstance(value, tuple):
        return "/".join(map(_spelt, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
