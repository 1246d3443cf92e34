"""One run of the study: ranks that train the token model, one of them perhaps faulty.

All ranks are in one process and have one model. In each step every rank draws tokens, the rows of
gradients are corrupted, a rule aggregates them, and torch's optimizer takes the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from phocas.attacks import parse_attack
from phocas.attacks.base import attack_rng
from phocas.experiments.reproduction.rare.model import WIDTH, TokenModel
from phocas.rules import parse_rule
from phocas.seeds import Stream, generator
from phocas.specs import unknown
from phocas.training.pool import kernel_threads, one_torch_thread

HONEST = "none"
WRONG_ROW = 10
"""The token whose row in the embedding's gradient is wrong."""
WRONG_VALUE = 1e3
ATTACKS = {
    "nan": "constant:q=1,value=nan",
    "1e20": "constant:q=1,value=1e20",
    "sign-flip": "sign-flip:q=1,scale=10",
    "gaussian": "gaussian:q=1,std=1",
    # The z of the attack's paper is negative for four workers, and helps them.
    "alie": "a-little-is-enough:q=1,z=1",
}
FAULTS = {
    HONEST: "no fault",
    "nan": "NaN in every value",
    "1e20": "1e20 in every value",
    "sign-flip": "gradient times -10",
    "gaussian": "normal values, standard deviation 1",
    "wrong-row": f"{WRONG_VALUE:g} in the row of token {WRONG_ROW} of the embedding",
    "alie": "a little is enough: mean minus one standard deviation",
}
"""Faults by name: a description of the values that the last rank sends in every step."""
OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}
CHECKED = 25
"""Steps between two checks whether parameters are finite: a lost model is not trained further."""


class SimulationSettings(BaseModel):
    """The settings of a run."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    rule: str = "mean"
    fault: str = HONEST
    ranks: int = Field(default=4, ge=1)
    vocabulary: int = Field(default=2048, ge=2)
    tied: bool = False
    experts: int = Field(default=0, ge=0)
    optimizer: Literal["adamw", "sgd"] = "adamw"
    lr: float = Field(gt=0)
    momentum: float = Field(default=0.0, ge=0, lt=1)
    """Momentum beta of the ranks, which send v = beta v + (1 - beta) g."""
    steps: int = Field(default=1500, ge=1)
    tokens: int = Field(default=256, ge=1)
    """Tokens of a rank in a step."""
    seed: int = Field(default=0, ge=0)

    @field_validator("fault")
    @classmethod
    def _known_fault(cls, value: str) -> str:
        if value not in FAULTS:
            raise ValueError(unknown("fault", value, FAULTS))
        return value

    @model_validator(mode="after")
    def _possible_rule(self) -> SimulationSettings:
        parse_rule(self.rule).check(self.ranks)
        return self


def frequencies(vocabulary: int) -> NDArray[np.float64]:
    """Return the probability of each token: token k is drawn in proportion to 1 / (k + 1).

    >>> frequencies(3).round(3).tolist()
    [0.545, 0.273, 0.182]
    """
    weights = 1 / np.arange(1, vocabulary + 1)
    return np.asarray(weights / weights.sum())


def octaves(vocabulary: int) -> list[tuple[int, int]]:
    """Return ranges of tokens by frequency, each twice as long as the one before.

    >>> octaves(10)
    [(0, 1), (1, 2), (2, 4), (4, 8), (8, 10)]
    """
    edges = [0, *(2**k for k in range(vocabulary.bit_length()) if 2**k < vocabulary), vocabulary]
    return list(pairwise(edges))


def targets(vocabulary: int, seed: int) -> torch.Tensor:
    """Return the token to predict for each token: a random permutation."""
    return torch.from_numpy(generator(Stream.SPLIT, seed).permutation(vocabulary))


def build(setting: SimulationSettings) -> TokenModel:
    """Return the model of a run before its first step."""
    return TokenModel(
        targets(setting.vocabulary, setting.seed),
        tied=setting.tied,
        experts=setting.experts,
        seed=setting.seed,
    )


def draw(setting: SimulationSettings, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the distinct tokens of a step, and their share in the batch of each rank."""
    drawn = generator(Stream.SPLIT, setting.seed, step).random((setting.ranks, setting.tokens))
    bounds = frequencies(setting.vocabulary).cumsum()
    tokens = np.minimum(np.searchsorted(bounds, drawn, "right"), setting.vocabulary - 1)
    distinct, places = np.unique(tokens, return_inverse=True)
    counts = [np.bincount(row, minlength=len(distinct)) for row in places.reshape(tokens.shape)]
    shares = np.array(counts, np.float32) / np.float32(setting.tokens)
    return torch.from_numpy(distinct), torch.from_numpy(shares)


def strike(setting: SimulationSettings, rows: torch.Tensor, step: int) -> None:
    """Replace the row of the last rank by that of its fault."""
    if setting.fault == "wrong-row":
        rows[-1, WRONG_ROW * WIDTH : (WRONG_ROW + 1) * WIDTH] = WRONG_VALUE
    elif setting.fault != HONEST:
        attack = parse_attack(ATTACKS[setting.fault])
        # Attacks corrupt the first rows; the view has them in reverse order.
        attack.corrupt(rows.numpy()[::-1], rng=attack_rng(setting.seed, step), round=step)


def train(
    setting: SimulationSettings, should_stop: Callable[[], bool] = lambda: False
) -> TokenModel | None:
    """Return the trained model, or None if the run was stopped before its end."""
    model = build(setting)
    rule = parse_rule(setting.rule)
    parameters = torch.nn.Parameter(model.parameters)
    optimizer = OPTIMIZERS[setting.optimizer](  # type: ignore[call-arg]
        [parameters], lr=setting.lr, fused=True
    )
    rows = torch.zeros(setting.ranks, len(model.parameters))
    velocity = torch.zeros_like(rows) if setting.momentum else None
    for step in range(setting.steps):
        if should_stop():
            return None
        model.gradients(*draw(setting, step), rows)
        if velocity is not None:
            velocity.lerp_(rows, 1 - setting.momentum)
            rows.copy_(velocity)
        strike(setting, rows, step)
        parameters.grad = rule(rows)
        optimizer.step()
        if step % CHECKED == 0 and not bool(model.parameters.isfinite().all()):
            break
    return model


def simulate(
    setting: SimulationSettings, should_stop: Callable[[], bool] = lambda: False
) -> list[float] | None:
    """Return the final loss by octave of token frequency, or None if the run was stopped.

    The loss of a range of tokens is the mean over its tokens, weighted by their frequencies.
    """
    with torch.no_grad(), one_torch_thread(), kernel_threads(1), _without_subnormals():
        model = train(setting, should_stop)
        if model is None:
            return None
        losses = model.losses().double().numpy()
    weights = frequencies(setting.vocabulary)
    return [
        float(np.average(losses[low:high], weights=weights[low:high]))
        for low, high in octaves(setting.vocabulary)
    ]


@contextmanager
def _without_subnormals() -> Iterator[None]:
    """Round subnormal numbers to 0 in a block: computing with them is many times slower."""
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
