"""The failure model: attacks and faults that corrupt the gradient matrix of a round.

>>> import numpy as np
>>> rows = np.ones((4, 6), np.float32)
>>> touched = parse_attack("omniscient:q=1,scale=10").corrupt(rows, rng=attack_rng(seed=7, round=0))
>>> rows[:, 0].tolist(), touched.rows.tolist()
([-30.0, 1.0, 1.0, 1.0], [0])
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from phocas.attacks.base import (
    Attack,
    ColumnLie,
    HonestRows,
    RowAttack,
    Scene,
    Setting,
    Who,
    attack_rng,
)
from phocas.attacks.fang import Fang
from phocas.attacks.field import ConstantRows, InnerProduct, LabelFlip, SignFlip
from phocas.attacks.function import FunctionAttack
from phocas.attacks.geometry import Mimic, MinMax, MinSum
from phocas.attacks.line_search import OptimalALIE, OptimalInnerProduct
from phocas.attacks.machine import Crash, RandomCells, SilentCorruption, Straggler, Stuck
from phocas.attacks.paper import BitFlip, Gambler, Gaussian, Omniscient
from phocas.attacks.table import ATTACKS, parse_attack
from phocas.attacks.touched import Touched
from phocas.attacks.worst import ALittleIsEnough, WorstCase

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Name the class of an attack that is asked for by another name, such as ``ALIE``."""
        found = f"; write {ATTACKS[name].__name__}" if name in ATTACKS else ""
        raise AttributeError(f"module 'phocas.attacks' has no attribute {name!r}{found}")


__all__ = [
    "ATTACKS",
    "ALittleIsEnough",
    "Attack",
    "BitFlip",
    "ColumnLie",
    "ConstantRows",
    "Crash",
    "Fang",
    "FunctionAttack",
    "Gambler",
    "Gaussian",
    "HonestRows",
    "InnerProduct",
    "LabelFlip",
    "Mimic",
    "MinMax",
    "MinSum",
    "Omniscient",
    "OptimalALIE",
    "OptimalInnerProduct",
    "RandomCells",
    "RowAttack",
    "Scene",
    "Setting",
    "SignFlip",
    "SilentCorruption",
    "Straggler",
    "Stuck",
    "Touched",
    "Who",
    "WorstCase",
    "attack_rng",
    "parse_attack",
]
