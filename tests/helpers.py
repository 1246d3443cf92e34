"""Examples of every rule with valid parameters, and hostile values."""

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
    """Return the values that a fault or an attacker may send."""
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
    phocas.MultiKrum: lambda m: [phocas.MultiKrum(rule.b, 2) for rule in _with_b(phocas.Krum, m)],
    phocas.Heraclius: lambda m: [
        phocas.Heraclius(rule.b, 0.5) for rule in _with_b(phocas.Heraclius, m) if rule.b
    ],
    phocas.Monitor: lambda m: [
        *([phocas.Monitor(phocas.NNM(1) | phocas.Krum(1))] if m > 4 else []),
        phocas.Monitor(phocas.Heraclius((m - 1) // 2)),
    ],
    phocas.GeometricMedian: lambda _: [phocas.GeometricMedian(iterations=3, smoothing=0.1)],
    phocas.MoNNA: lambda m: [phocas.MoNNA(0, trusted=m - 1)],
    phocas.CenteredClipping: lambda _: [
        phocas.CenteredClipping(radius=2.0),
        phocas.CenteredClipping(radius=30.0, iterations=3),
        phocas.CenteredClipping(radius="median", iterations=2, start="previous"),
    ],
    phocas.Bucketing: lambda m: [phocas.Bucketing(size) for size in (1, 2, 3) if size <= m],
    phocas.Clipping: lambda _: [phocas.Clipping(radius=8.0)],
}
"""Examples of rules with parameters other than b, by class."""

S = TypeVar("S", bound=Stage)


def _with_b(cls: type[S], m: int) -> list[S]:
    """Return a step with b = 0, with about half of its largest b, and with its largest b."""
    every = cls.choices(m)
    return [every[place] for place in sorted({0, len(every) // 2, len(every) - 1}) if every]


def examples_of(cls: type[S], m: int) -> list[S]:
    """Return steps of one class that are valid for m workers, the strongest last."""
    more = MORE[cls](m) if cls in MORE else []
    return [*(step for step in more if isinstance(step, cls)), *_with_b(cls, m)]


def examples(m: int) -> list[Rule]:
    """Return rules that are valid for m workers, at least one of each registered class."""
    return [rule for cls in RULES.values() for rule in examples_of(cls, m)]


def strongest(m: int) -> list[Rule]:
    """Return one rule of each class, with its largest b."""
    return [found[-1] for cls in RULES.values() if (found := examples_of(cls, m))]


def pipelines(m: int) -> list[Rule]:
    """Return each pre-aggregator with each rule that is valid for the rows it leaves."""
    result: list[Rule] = []
    for cls in PRE_AGGREGATORS.values():
        found = examples_of(cls, m)
        stage = found[len(found) // 2]
        rules = strongest(stage.rows_after(m))
        result += [stage | rule for rule in rules if not rule.outermost]
    return result


def averages(rule: Rule) -> bool:
    """Return whether one Byzantine row of any length has its weight in the mean."""
    last = rule.rule if isinstance(rule, phocas.Pipeline) else rule
    return isinstance(last, phocas.Mean | phocas.Monitor | phocas.FoolsGold)


# -- values ----------------------------------------------------------------------------------------


def stored(values: Any, dtype: str) -> Any:
    """Return values as an array, or as a tensor if NumPy has no such dtype."""
    if dtype == "bfloat16":
        return torch.from_numpy(np.asarray(values, np.float64)).to(torch.bfloat16)
    with np.errstate(over="ignore", under="ignore"):
        return np.asarray(values, np.float64).astype(dtype)


def doubles(values: Any) -> Doubles:
    """Return the values of an array or a tensor, without rounding."""
    if isinstance(values, torch.Tensor):
        return np.asarray(values.detach().to(torch.float64).numpy())
    return np.asarray(values, np.float64)


def bits(values: Any) -> bytes:
    """Return the bytes of an array or a tensor, or of all those in a mapping."""
    if isinstance(values, dict):
        return b"".join(bits(value) for value in values.values())
    if isinstance(values, torch.Tensor):
        # A view as bytes needs contiguous values, and an empty tensor has none.
        return (
            values.numpy(force=True).tobytes()
            if values.dtype != torch.bfloat16
            else (values.detach().view(torch.uint16).numpy().tobytes())
        )
    return np.asarray(values).tobytes()


@contextmanager
def num_threads(number: int) -> Iterator[None]:
    """Use this number of threads inside the block."""
    before = phocas.get_num_threads()
    phocas.set_num_threads(number)
    try:
        yield
    finally:
        phocas.set_num_threads(before)
