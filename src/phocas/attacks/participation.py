"""What an attack by q of N clients is in a round in which m of them take part."""

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
    """Raise if an attack is impossible where m of that many clients take part in a round."""
    liars = clients if clients is not None and isinstance(attack, RowAttack) else m
    attack.check(liars, d, dtype, servers)


def among(
    attack: Attack, participants: npt.NDArray[np.int64], clients: int, rng: np.random.Generator
) -> Attack:
    """Return the attack of those liars who take part; participants come in ascending order.

    Fixed liars are clients 0 to q - 1, so that those who take part have the first rows. Where q are
    resampled every round, so many of them as chance has it take part. Faults that touch cells of
    any row are what they were.

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
    most = (
        m - 1 if attack.needs_honest else m
    )  # who lies by what others say leaves one to listen to
    return dataclasses.replace(attack, q=min(present, most))  # type: ignore[type-var]
