"""Aggregation rules: frozen values that reduce m rows to one."""

from phocas.deprecation import former_names
from phocas.rules.algebra import Distances, Mix, Norms, centred_gram, measured_distances
from phocas.rules.base import Bounded, Chain, Pipeline, PreAggregator, Rule
from phocas.rules.cell_filter import CellFilter
from phocas.rules.centres import CenteredClipping, GeometricMedian
from phocas.rules.columnwise import (
    ColumnRule,
    MeaMed,
    Mean,
    Median,
    Phocas,
    TrimmedMean,
    TrimmingRule,
)
from phocas.rules.directions import FLAME, FoolsGold
from phocas.rules.explanation import Explanation
from phocas.rules.function import FunctionRule
from phocas.rules.guarantee import Tolerance
from phocas.rules.heraclius import Heraclius
from phocas.rules.monitor import Monitor
from phocas.rules.preaggregation import NNM, AdaptiveClipping, Bucketing, Clipping
from phocas.rules.relative import Referenced, Relative
from phocas.rules.selection import CGE, MDA, Bulyan, Krum, MoNNA, MultiKrum, RowRule
from phocas.rules.sharded import ShardedAggregation
from phocas.rules.signguard import SignGuard
from phocas.rules.spectral import CAF, SMEA, DnC
from phocas.rules.table import PRE_AGGREGATORS, RULES, aggregate, parse_rule
from phocas.rules.trust import FLTrust
from phocas.rules.weighting import Weighted

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
    "Chain",
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
    "aggregate",
    "centred_gram",
    "measured_distances",
    "parse_rule",
]

FORMER_NAMES = {
    "Cleaning": "CellFilter",
    "Evaluation": "ShardedAggregation",
    "Told": "Bounded",
    "Watch": "Monitor",
}
__getattr__ = former_names(__name__, FORMER_NAMES)
