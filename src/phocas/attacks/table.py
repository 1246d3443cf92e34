"""The table of attacks, and attacks by name."""

from __future__ import annotations

import dataclasses

from phocas.attacks.base import Attack
from phocas.attacks.field import ConstantRows, InnerProduct, LabelFlip, SignFlip
from phocas.attacks.geometry import Mimic, MinMax, MinSum
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
)


def parse_attack(text: str, servers: int | None = None) -> Attack:
    """Read an attack from ``gambler:probability=0.0005,scale=-1e20``.

    An attack that asks how many servers there are is told, unless its text says so itself.

    Args:
        text: the attack as on the command line.
        servers: how many servers there are, for attacks that ask.

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
