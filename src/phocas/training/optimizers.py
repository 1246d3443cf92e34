"""Server-side optimisers by name: those of torch.optim, or any of the user's own."""

from __future__ import annotations

import importlib
import inspect
from typing import TYPE_CHECKING

import torch

from phocas.specs import unknown

if TYPE_CHECKING:
    from collections.abc import Callable

OPTIMIZERS = {
    name.lower(): cls
    for name, cls in vars(torch.optim).items()
    if inspect.isclass(cls)
    and issubclass(cls, torch.optim.Optimizer)
    and cls is not torch.optim.Optimizer
    and name != "LBFGS"  # evaluates the loss again within a step, which servers cannot
}


def parse_optimizer(text: str) -> Callable[..., torch.optim.Optimizer]:
    """Read ``sgd``, ``adam``, any other name in torch.optim, or ``module:callable``.

    >>> parse_optimizer("adam").__name__
    'Adam'
    """
    name, colon, attribute = text.strip().partition(":")
    if name.lower() in OPTIMIZERS and not colon:
        return OPTIMIZERS[name.lower()]
    if not colon:
        raise ValueError(unknown("optimizer", name, OPTIMIZERS) + ", or module:callable")
    target = getattr(importlib.import_module(name), attribute, None)
    if not callable(target):
        raise TypeError(f"optimizer {text!r} must name something callable")
    return target  # type: ignore[no-any-return]
