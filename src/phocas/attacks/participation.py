"""Attacks by q of N clients in a round in which only m clients participate."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from phocas.attacks.base import Attack, RowAttack

if TYPE_CHECKING:
    import numpy.typing as npt


def check_among(
    attack: Attack,
    clients: int | None,
    m: int,
    servers: int,
    d: int | None = None,
    dtype: str | None = None,
) -> None:
    """Raise ValueError if an attack is impossible when m of ``clients`` clients participate.

    The q Byzantine workers of a row attack are q of all clients, so q is compared with ``clients``.
    The settings of other attacks are compared with m, the number of rows in a round.
    """
    population = clients if clients is not None and isinstance(attack, RowAttack) else m
    attack.check(population, d, dtype, servers)


def among(
    attack: Attack, participants: npt.NDArray[np.int64], clients: int, rng: np.random.Generator
) -> Attack:
    """Return the attack restricted to the Byzantine clients that participate in a round.

    Fixed Byzantine clients are clients 0 to q - 1. Participants are in ascending order, so the
    Byzantine ones have the first rows. If Byzantine clients are resampled, their number in the
    round is drawn from the hypergeometric distribution. Attacks on cells of any row are returned
    unchanged.

    >>> from phocas.attacks import parse_attack
    >>> rng = np.random.default_rng(0)
    >>> print(among(parse_attack("gaussian:q=300"), np.array([7, 40, 512, 900]), 1000, rng))
    gaussian:q=2
    """
    if not isinstance(attack, RowAttack):
        return attack
    m = len(participants)
    if attack.who == "fixed":
        present = int(np.searchsorted(participants, attack.q))
    else:
        present = int(rng.hypergeometric(attack.q, clients - attack.q, m))
    # An attack that is computed from honest rows needs at least one of them.
    most = m - 1 if attack.needs_honest else m
    return dataclasses.replace(attack, q=min(present, most))  # type: ignore[type-var]
