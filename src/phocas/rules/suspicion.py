"""Who is thrown away more often than chance allows."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from phocas.specs import count

FALSE_ALARM = 1e-3
"""The chance that honest workers with data of one kind are ever accused, in a run of any length."""

_LAMBDAS = np.array([1.0, 4.0, 16.0, 64.0])


class Suspicion:
    r"""Accuse the workers that are dropped more often than at least m - b others, beyond chance.

    Two honest workers draw from the same data, so in every round it is a toss-up which of the two a
    rule drops more of. With D_i the dropped share of worker i in a round, each pair keeps the bet

        E_ij = prod over rounds of  2 exp(lambda D_i) / (exp(lambda D_i) + exp(lambda D_j))

    which is fair between honest workers: by Ville's inequality it *ever* reaches m^2 / alpha with
    probability at most alpha / m^2, however long the run. (Four lambdas share the stake.) A worker
    is suspected when it wins its bet against at least m - b others. At least one of these is
    honest, so an honest worker is accused with probability at most alpha, even when liars take care
    to be kept. Who is always dropped is found after 21 rounds at the earliest (m = 20).

    Workers that honestly hold different data (a Dirichlet split) are no toss-up: there a suspect is
    a worker that differs from the rest, no more.

    >>> watch = Suspicion(num_workers=5, b=1)
    >>> for _ in range(30):
    ...     watch.update(np.array([0.9, 0.1, 0.1, 0.1, 0.1]))
    >>> watch.suspects()
    (0,)
    """

    def __init__(self, num_workers: int, b: int) -> None:
        self.num_workers = count("Suspicion", "num_workers", num_workers, minimum=1)
        self.b = count("Suspicion", "b", b)
        self.logs = np.zeros((len(_LAMBDAS), num_workers, num_workers))
        self.total = np.zeros(num_workers)
        self.rounds = 0

    def update(self, dropped: npt.NDArray[np.floating]) -> None:
        """Take the dropped shares of one round."""
        shares = np.asarray(dropped, np.float64)
        self.total += shares
        self.rounds += 1
        lead = shares[:, None] - shares[None, :]
        if lead.any():
            self.logs += math.log(2) - np.logaddexp(0, -_LAMBDAS[:, None, None] * lead)

    def suspects(self) -> tuple[int, ...]:
        """Return the workers that are suspected by now."""
        limit = math.log(self.num_workers**2 / FALSE_ALARM) + math.log(len(_LAMBDAS))
        wins = (self.logs.max(axis=0) >= limit).sum(axis=1)
        return tuple(np.flatnonzero(wins >= max(1, self.num_workers - self.b)).tolist())

    def shares(self) -> npt.NDArray[np.float64]:
        """Return the mean dropped share of each worker."""
        return self.total / max(1, self.rounds)

    def state(self) -> dict[str, npt.NDArray[np.float64]]:
        """Return what a checkpoint must keep."""
        return {"logs": self.logs, "total": self.total, "rounds": np.array([float(self.rounds)])}

    def load_state(self, state: dict[str, npt.NDArray[np.float64]]) -> None:
        """Go on from a checkpoint."""
        if state["logs"].shape != self.logs.shape:
            raise ValueError(
                f"a checkpoint of {state['logs'].shape[1]} workers cannot be used"
                f" with {self.num_workers}"
            )
        self.logs = np.array(state["logs"])
        self.total = np.array(state["total"])
        self.rounds = int(state["rounds"][0])
