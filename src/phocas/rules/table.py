"""The registered rules and pre-aggregators, and the parser of their names."""

from __future__ import annotations

from typing import Any

from phocas.rules.base import Chain, PreAggregator, Randomness, Rule
from phocas.rules.cell_filter import CellFilter
from phocas.rules.centres import CenteredClipping, GeometricMedian
from phocas.rules.columnwise import MeaMed, Mean, Median, Phocas, TrimmedMean
from phocas.rules.directions import FLAME, FoolsGold
from phocas.rules.function import FunctionRule
from phocas.rules.heraclius import Heraclius
from phocas.rules.monitor import Monitor
from phocas.rules.preaggregation import NNM, AdaptiveClipping, Bucketing, Clipping
from phocas.rules.selection import CGE, MDA, Bulyan, Krum, MoNNA, MultiKrum
from phocas.rules.signguard import SignGuard
from phocas.rules.spectral import CAF, SMEA, DnC
from phocas.rules.trust import FLTrust
from phocas.specs import Foreign, Table, loaded, split

PRE_AGGREGATORS: Table[PreAggregator] = Table(
    "pre-aggregator", [CellFilter, NNM, Bucketing, Clipping, AdaptiveClipping], PreAggregator
)


class RuleTable(Table[Rule]):
    """A table of rules, whose text may have pre-aggregators first: ``nnm:b=6|phocas:b=6``."""

    def read(self, text: str) -> Rule | Foreign:
        """Parse a rule without importing modules; return Foreign if a step is user-defined."""
        *before, last = split(text, "|")
        if before and not all(part.strip() for part in (*before, last)):
            raise ValueError(f"a step must stand on both sides of every |: got {text!r}")
        for part in before:
            name = part.partition(":")[0].strip()
            if name not in PRE_AGGREGATORS and name in self:
                raise ValueError(
                    f"{name} is a rule, which must come last: got {text!r}; before it stand"
                    f" pre-aggregators: {', '.join(PRE_AGGREGATORS)}"
                )
        name = last.partition(":")[0].strip()
        if name in PRE_AGGREGATORS and name not in self:
            raise ValueError(
                f"{name} is a pre-aggregator, which needs a rule after it: write {last}|median"
            )
        rule = super().read(last)
        stages = [PRE_AGGREGATORS.read(part) for part in before]
        if isinstance(rule, Foreign) or any(isinstance(stage, Foreign) for stage in stages):
            return Foreign("|".join(str(step) for step in (*stages, rule)), self.parse)
        return _joined(stages, rule)

    def of(self, value: object, owner: str) -> Rule:
        """Return a rule, given as a rule, text or function; error messages name the ``owner``."""
        if isinstance(value, PreAggregator):
            raise TypeError(
                f"{owner} needs a rule, and {value!r} is a pre-aggregator: write a rule after it,"
                f" {value!r} | Median()"
            )
        return super().of(value, owner)

    def parse(self, text: str) -> Rule:
        """Parse a rule, and import its user-defined steps."""
        *before, last = split(text, "|")
        found = self.read(text)
        if not isinstance(found, Foreign):
            return found
        rule = super().parse(last)
        return _joined([loaded(PRE_AGGREGATORS.read(part)) for part in before], rule)


def _joined(stages: list[Any], rule: Rule) -> Rule:
    return Chain(tuple(stages)) | rule if stages else rule


RULES = RuleTable(
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
        FLTrust,
        MDA,
        CGE,
        MoNNA,
        CAF,
        SMEA,
        DnC,
        SignGuard,
        FLAME,
        FoolsGold,
        Monitor,
    ],
    base=Rule,
    adapt=FunctionRule.adapt,
)


def parse_rule(text: str) -> Rule:
    """Parse the text of a rule and of its pre-aggregators, if any.

    Args:
        text: the rule as on the command line.

    >>> parse_rule("nnm:b=6|phocas:b=6")
    NNM(b=6) | Phocas(b=6)
    >>> parse_rule("phoca:b=6")
    Traceback (most recent call last):
        ...
    ValueError: unknown rule 'phoca'; did you mean 'phocas'? rules: mean, median, ...
    """
    return RULES.parse(text)


def aggregate(
    rows: Any,
    rule: str | Rule,
    *,
    rng: Randomness = None,
    weights: Any = None,
    max_share: float | None = None,
    reference: Any = None,
) -> Any:
    """Aggregate m rows by a rule or its name; see :meth:`Rule.__call__`.

    Args:
        rows: an (m, d) array or tensor, m vectors, m mappings or m lists of arrays.
        rule: a rule, its text, or a function of the rows.
        rng: a generator or a seed, for rules that draw.
        weights: one number for each worker, such as its number of examples.
        max_share: the largest share of all weight that a worker may have.
        reference: a vector like a row, for a rule that needs one (``rule.needs_reference``).

    >>> import numpy as np
    >>> aggregate(np.array([[1.0], [2.0], [900.0]]), "median")
    array([2.])
    """
    found = RULES.of(rule, "aggregate")
    return found(rows, rng=rng, weights=weights, max_share=max_share, reference=reference)
