"""Examples of every rule, from what it may be told, and the values that nobody should send."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

import phocas
from phocas import PRE_AGGREGATORS, RULES, Rule
from phocas.floats import FORMATS
from phocas.rules.base import Stage

Doubles: TypeAlias = NDArray[np.float64]

DTYPES = tuple(FORMATS)
TINY = {"float16": 6e-8, "bfloat16": 1e-40, "float32": 1.4e-45, "float64": 5e-324}
LARGEST = {"float16": 65504.0, "bfloat16": 3e38, "float32": 3e38, "float64": 1.7e308}
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}


def hostile_values(dtype: str = "float32") -> list[float]:
    """Return what a fault or an attacker may put where a value belongs."""
    large = LARGEST[dtype]
    return [
        np.nan,
        np.inf,
        -np.inf,
        large,
        -large,
        min(1e20, large),
        -min(1e20, large),
        TINY[dtype],
        -TINY[dtype],
        -0.0,
    ]


# -- examples --------------------------------------------------------------------------------------


MORE: dict[type[Stage], Callable[[int], Sequence[Stage]]] = {
    phocas.MultiKrum: lambda m: [phocas.MultiKrum(rule.b, 2) for rule in _told(phocas.Krum, m)],
    phocas.Heraclius: lambda m: [
        phocas.Heraclius(rule.b, 0.5) for rule in _told(phocas.Heraclius, m) if rule.b
    ],
    phocas.Watch: lambda m: [
        *([phocas.Watch(phocas.NNM(1) | phocas.Krum(1))] if m > 4 else []),
        phocas.Watch(phocas.Heraclius((m - 1) // 2)),
    ],
    phocas.CenteredClipping: lambda _: [
        phocas.CenteredClipping(radius=2.0),
        phocas.CenteredClipping(radius=30.0, iterations=3),
    ],
    phocas.Bucketing: lambda m: [phocas.Bucketing(size) for size in (1, 2, 3) if size <= m],
    phocas.Clipping: lambda _: [phocas.Clipping(radius=8.0)],
}
"""Examples of what b does not say, or not all."""

S = TypeVar("S", bound=Stage)


def _told(cls: type[S], m: int) -> list[S]:
    """Return a step that is told nothing, about half, and all of what it can survive."""
    every = cls.choices(m)
    return [every[place] for place in sorted({0, len(every) // 2, len(every) - 1}) if every]


def examples_of(cls: type[S], m: int) -> list[S]:
    """Return steps of one class that hold with m workers, the strongest last."""
    more = MORE[cls](m) if cls in MORE else []
    return [*(step for step in more if isinstance(step, cls)), *_told(cls, m)]


def examples(m: int) -> list[Rule]:
    """Return rules that hold with m workers: for each class of the table at least one."""
    return [rule for cls in RULES.values() for rule in examples_of(cls, m)]


def strongest(m: int) -> list[Rule]:
    """Return one rule of each class, told to survive as much as it can."""
    return [found[-1] for cls in RULES.values() if (found := examples_of(cls, m))]


def pipelines(m: int) -> list[Rule]:
    """Return each pre-aggregator before each rule that holds with what is left of m rows."""
    result: list[Rule] = []
    for cls in PRE_AGGREGATORS.values():
        found = examples_of(cls, m)
        stage = found[len(found) // 2]
        rules = strongest(stage.rows_after(m))
        result += [stage | rule for rule in rules if not rule.outermost]
    return result


def averages(rule: Rule) -> bool:
    """Tell whether a rule's value is a plain mean, which survives nothing."""
    last = rule.rule if isinstance(rule, phocas.Pipeline) else rule
    return isinstance(last, phocas.Mean | phocas.Watch)


# -- values ----------------------------------------------------------------------------------------


def stored(values: Any, dtype: str) -> Any:
    """Return values as an array, or as a tensor where NumPy has no such type."""
    if dtype == "bfloat16":
        return torch.from_numpy(np.asarray(values, np.float64)).to(torch.bfloat16)
    with np.errstate(over="ignore", under="ignore"):
        return np.asarray(values, np.float64).astype(dtype)


def doubles(values: Any) -> Doubles:
    """Return the values of an array or a tensor, none of them rounded."""
    if isinstance(values, torch.Tensor):
        return np.asarray(values.detach().to(torch.float64).numpy())
    return np.asarray(values, np.float64)


def bits(values: Any) -> bytes:
    """Return the bytes of an array or a tensor, or of all those in a mapping."""
    if isinstance(values, dict):
        return b"".join(bits(value) for value in values.values())
    if isinstance(values, torch.Tensor):
        # View as bytes needs adjacent values, and an empty tensor has none.
        return (
            values.numpy(force=True).tobytes()
            if values.dtype != torch.bfloat16
            else (values.detach().view(torch.uint16).numpy().tobytes())
        )
    return np.asarray(values).tobytes()


@contextmanager
def num_threads(number: int) -> Iterator[None]:
    """Use so many threads for a while."""
    before = phocas.get_num_threads()
    phocas.set_num_threads(number)
    try:
        yield
    finally:
        phocas.set_num_threads(before)
