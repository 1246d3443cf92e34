"""Byzantine-resilient aggregation and training: robust rules at the price of an average.

>>> import numpy as np
>>> rows = np.array([[1.0, 10.0], [2.0, 20.0], [6.0, 60.0], [-1e20, np.nan]])
>>> Phocas(b=1)(rows)
array([ 3., 30.])
>>> aggregate(rows, "trimmed-mean:b=1")
array([ 1.5, 40. ])
"""

import importlib
from typing import Any

from phocas.deprecation import former_names
from phocas.kernels import Window, get_num_threads, set_num_threads
from phocas.rules import (
    CAF,
    CGE,
    FLAME,
    FORMER_NAMES,
    MDA,
    NNM,
    PRE_AGGREGATORS,
    RULES,
    SMEA,
    AdaptiveClipping,
    Bounded,
    Bucketing,
    Bulyan,
    CellFilter,
    CenteredClipping,
    Clipping,
    ColumnRule,
    Distances,
    DnC,
    Explanation,
    FLTrust,
    FoolsGold,
    FunctionRule,
    GeometricMedian,
    Heraclius,
    Krum,
    MeaMed,
    Mean,
    Median,
    Mix,
    Monitor,
    MoNNA,
    MultiKrum,
    Norms,
    Phocas,
    Pipeline,
    PreAggregator,
    Referenced,
    Relative,
    RowRule,
    Rule,
    ShardedAggregation,
    SignGuard,
    Tolerance,
    TrimmedMean,
    TrimmingRule,
    Weighted,
    aggregate,
    centred_gram,
    measured_distances,
    parse_rule,
)

__version__ = "0.2.0"

__all__ = [
    "CAF",
    "CGE",
    "FLAME",
    "MDA",
    "NNM",
    "PRE_AGGREGATORS",
    "RULES",
    "SMEA",
    "AdaptiveClipping",
    "Bounded",
    "Bucketing",
    "Bulyan",
    "CellFilter",
    "CenteredClipping",
    "Clipping",
    "ColumnRule",
    "Distances",
    "DnC",
    "Explanation",
    "FLTrust",
    "FoolsGold",
    "FunctionRule",
    "GeometricMedian",
    "Heraclius",
    "Krum",
    "MeaMed",
    "Mean",
    "Median",
    "Mix",
    "MoNNA",
    "Monitor",
    "MultiKrum",
    "Norms",
    "Phocas",
    "Pipeline",
    "PreAggregator",
    "Referenced",
    "Relative",
    "RowRule",
    "Rule",
    "ShardedAggregation",
    "SignGuard",
    "Tolerance",
    "TrimmedMean",
    "TrimmingRule",
    "Weighted",
    "Window",
    "__version__",
    "aggregate",
    "attacks",
    "centred_gram",
    "get_num_threads",
    "measured_distances",
    "parse_rule",
    "set_num_threads",
]

_LATER = (
    "attacks",
    "data",
    "detection",
    "engines",
    "experiments",
    "integrations",
    "results",
    "theory",
    "training",
)


def __getattr__(name: str) -> Any:
    """Import a subpackage on first use, because many programs do not need it."""
    if name in _LATER:
        return importlib.import_module(f"phocas.{name}")
    return former_names("phocas", FORMER_NAMES)(name)
