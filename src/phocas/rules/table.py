"""The tables of rules and pre-aggregators, and rules by name."""

from __future__ import annotations

from typing import Any

import numpy as np

from phocas.rules.base import Chain, Pipeline, PreAggregator, Rule
from phocas.rules.centres import CenteredClipping, GeometricMedian
from phocas.rules.columnwise import MeaMed, Mean, Median, Phocas, TrimmedMean
from phocas.rules.heraclius import Heraclius
from phocas.rules.preaggregation import NNM, AdaptiveClipping, Bucketing, Clipping
from phocas.rules.selection import CGE, MDA, Bulyan, Krum, MultiKrum
from phocas.rules.watch import Watch
from phocas.specs import Table, split, unknown

RULES: Table[Rule] = Table(
    "rule",
    [
        Mean,
        Median,
        TrimmedMean,
        Phocas,
        Heraclius,
        MeaMed,
        Krum,
        MultiKrum,
        Bulyan,
        GeometricMedian,
        CenteredClipping,
        MDA,
        CGE,
        Watch,
    ],
)
PRE_AGGREGATORS: Table[PreAggregator] = Table(
    "pre-aggregator", [NNM, Bucketing, Clipping, AdaptiveClipping]
)


def parse_rule(text: str) -> Rule:
    """Read a rule, with its pre-aggregators if any, from text.

    >>> parse_rule("nnm:b=6|phocas:b=6")
    Pipeline(stages=(NNM(b=6),), rule=Phocas(b=6))
    >>> parse_rule("phoca:b=6")
    Traceback (most recent call last):
        ...
    ValueError: unknown rule 'phoca'; did you mean 'phocas'? rules: mean, median, ...
    """
    *before, last = split(text, "|")
    rule = RULES.parse(last)
    stages = []
    for part in before:
        name = part.partition(":")[0].strip()
        if name not in PRE_AGGREGATORS and name in RULES:
            raise ValueError(
                unknown("pre-aggregator", name, PRE_AGGREGATORS)
                + f"; {name} is a rule, which must come last"
            )
        stages.append(PRE_AGGREGATORS.parse(part))
    if isinstance(rule, Pipeline) or not stages:
        return rule
    return Pipeline(tuple(stages), rule)


def aggregate(rows: Any, rule: str | Rule, *, rng: np.random.Generator | None = None) -> Any:
    """Aggregate m rows by a rule or its name.

    >>> aggregate(np.array([[1.0], [2.0], [900.0]]), "median")
    array([2.])
    """
    chosen = parse_rule(rule) if isinstance(rule, str) else rule
    if not isinstance(chosen, Rule):
        hint = " that ends in a rule" if isinstance(chosen, PreAggregator | Chain) else ""
        raise TypeError(f"aggregate needs a rule{hint}, or its name: got {chosen!r}")
    return chosen(rows, rng=rng)
