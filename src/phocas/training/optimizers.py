"""Server-side optimisers by name: those of torch.optim, or any of the user's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch

from phocas.specs import imported_callable, is_place, unknown

Optimizers = Callable[..., torch.optim.Optimizer]
"""What makes an optimiser of parameters, a learning rate and options: a class of torch.optim."""

OPTIMIZERS: dict[str, Optimizers] = {
    name.lower(): cls
    for name, cls in vars(torch.optim).items()
    if inspect.isclass(cls)
    and issubclass(cls, torch.optim.Optimizer)
    and cls is not torch.optim.Optimizer
    and name != "LBFGS"  # evaluates the loss again within a step, which servers cannot
}


def check_optimizer_text(text: str) -> str:
    """Return the text of an optimiser if it can be read; nothing is imported."""
    if text.strip().lower() not in OPTIMIZERS and not is_place(text):
        raise ValueError(unknown("optimizer", text.strip(), OPTIMIZERS) + ", or module:callable")
    return text


def parse_optimizer(text: str) -> Optimizers:
    """Read ``sgd``, ``adam``, any other name in torch.optim, or ``module:callable``.

    >>> parse_optimizer("adam").__name__
    'Adam'
    """
    name = check_optimizer_text(text).strip().lower()
    return OPTIMIZERS[name] if name in OPTIMIZERS else imported_callable(text)
