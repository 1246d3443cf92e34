"""Aggregation rules: frozen values that reduce m rows to one."""

from phocas.rules.base import Chain, Explanation, Pipeline, PreAggregator, Rule, Told
from phocas.rules.centres import CenteredClipping, GeometricMedian
from phocas.rules.cleaning import Cleaning
from phocas.rules.columnwise import (
    ColumnRule,
    MeaMed,
    Mean,
    Median,
    Phocas,
    TrimmedMean,
    TrimmingRule,
)
from phocas.rules.function import FunctionRule
from phocas.rules.heraclius import Heraclius
from phocas.rules.preaggregation import NNM, AdaptiveClipping, Bucketing, Clipping
from phocas.rules.promise import Tolerance
from phocas.rules.relative import Relative
from phocas.rules.selection import CGE, MDA, Bulyan, Krum, MultiKrum, RowRule
from phocas.rules.sharded import Evaluation
from phocas.rules.table import PRE_AGGREGATORS, RULES, aggregate, parse_rule
from phocas.rules.watch import Watch
from phocas.rules.weighting import Weighted

__all__ = [
    "CGE",
    "MDA",
    "NNM",
    "PRE_AGGREGATORS",
    "RULES",
    "AdaptiveClipping",
    "Bucketing",
    "Bulyan",
    "CenteredClipping",
    "Chain",
    "Cleaning",
    "Clipping",
    "ColumnRule",
    "Evaluation",
    "Explanation",
    "FunctionRule",
    "GeometricMedian",
    "Heraclius",
    "Krum",
    "MeaMed",
    "Mean",
    "Median",
    "MultiKrum",
    "Phocas",
    "Pipeline",
    "PreAggregator",
    "Relative",
    "RowRule",
    "Rule",
    "Told",
    "Tolerance",
    "TrimmedMean",
    "TrimmingRule",
    "Watch",
    "Weighted",
    "aggregate",
    "parse_rule",
]
