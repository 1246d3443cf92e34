"""The failure model: every way the matrix of a round goes wrong, as values.

>>> import numpy as np
>>> G = np.ones((4, 6), np.float32)
>>> touched = parse_attack("omniscient:q=1,scale=10").corrupt(G, rng=attack_rng(seed=7, round=0))
>>> G[:, 0].tolist(), touched.rows.tolist()
([-30.0, 1.0, 1.0, 1.0], [0])
"""

from __future__ import annotations

from phocas.attacks.base import Attack, Who, attack_rng
from phocas.attacks.field import Constant, InnerProduct, LabelFlip, SignFlip
from phocas.attacks.geometry import Mimic, MinMax, MinSum
from phocas.attacks.machine import Crash, RandomCells, Straggler, Stuck
from phocas.attacks.paper import BitFlip, Gambler, Gaussian, Omniscient
from phocas.attacks.touched import Touched
from phocas.attacks.worst import ALittleIsEnough, WorstCase
from phocas.specs import Table

ATTACKS: Table[Attack] = Table(
    "attack",
    [
        Gaussian,
        Omniscient,
        BitFlip,
        Gambler,
        SignFlip,
        InnerProduct,
        ALittleIsEnough,
        Mimic,
        MinMax,
        MinSum,
        LabelFlip,
        Constant,
        Crash,
        Straggler,
        Stuck,
        RandomCells,
        WorstCase,
    ],
)


def parse_attack(text: str) -> Attack:
    """Read an attack from ``gambler:probability=0.0005,scale=-1e20``."""
    return ATTACKS.parse(text)


__all__ = [
    "ATTACKS",
    "ALittleIsEnough",
    "Attack",
    "BitFlip",
    "Constant",
    "Crash",
    "Gambler",
    "Gaussian",
    "InnerProduct",
    "LabelFlip",
    "Mimic",
    "MinMax",
    "MinSum",
    "Omniscient",
    "RandomCells",
    "SignFlip",
    "Straggler",
    "Stuck",
    "Touched",
    "Who",
    "WorstCase",
    "attack_rng",
    "parse_attack",
]
