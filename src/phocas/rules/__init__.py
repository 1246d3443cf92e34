"""Aggregation rules: frozen values that reduce m rows to one."""

from phocas.rules.base import Explanation, Pipeline, PreAggregator, Rule
from phocas.rules.centres import CenteredClipping, GeometricMedian
from phocas.rules.columnwise import MeaMed, Mean, Median, Phocas, TrimmedMean
from phocas.rules.heraclius import Heraclius
from phocas.rules.preaggregation import NNM, AdaptiveClipping, Bucketing, Clipping
from phocas.rules.selection import CGE, MDA, Bulyan, Krum, MultiKrum
from phocas.rules.sharded import Evaluation
from phocas.rules.table import PRE_AGGREGATORS, RULES, aggregate, parse_rule
from phocas.rules.watch import Watch

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
    "Clipping",
    "Evaluation",
    "Explanation",
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
    "Rule",
    "TrimmedMean",
    "Watch",
    "aggregate",
    "parse_rule",
]
