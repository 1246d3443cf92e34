"""The table of attacks, and the parser of attack specs."""

from __future__ import annotations

import dataclasses

from phocas.attacks.base import Attack
from phocas.attacks.fang import Fang
from phocas.attacks.field import ConstantRows, InnerProduct, LabelFlip, SignFlip
from phocas.attacks.function import FunctionAttack
from phocas.attacks.geometry import Mimic, MinMax, MinSum
from phocas.attacks.line_search import OptimalALIE, OptimalInnerProduct
from phocas.attacks.machine import Crash, RandomCells, SilentCorruption, Straggler, Stuck
from phocas.attacks.paper import BitFlip, Gambler, Gaussian, Omniscient
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
        OptimalALIE,
        OptimalInnerProduct,
        Fang,
        Mimic,
        MinMax,
        MinSum,
        LabelFlip,
        ConstantRows,
        Crash,
        Straggler,
        Stuck,
        RandomCells,
        SilentCorruption,
        WorstCase,
    ],
    base=Attack,
    adapt=FunctionAttack.adapt,
)


def parse_attack(text: str, servers: int | None = None) -> Attack:
    """Parse an attack from a spec such as ``gambler:probability=0.0005,scale=-1e20``.

    Args:
        text: the attack's spec, as on the command line.
        servers: number of servers, for attacks that have such a parameter and a spec that does not
            set it.

    >>> parse_attack("gambler", servers=4).servers
    4
    """
    attack = ATTACKS.parse(text)
    if (
        servers is not None
        and hasattr(attack, "servers")
        and "servers=" not in text.replace(" ", "")
    ):
        return dataclasses.replace(attack, servers=servers)  # type: ignore[type-var]  # every Spec is a dataclass
    return attack
