# ruff: noqa: INP001 - a script, no package
"""Time every attack on a (20, 2.4M) float32 matrix against writing the cells that it changes.

    python benchmarks/attacks.py

Both times are the best of several in the same run.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from phocas.attacks import Attack, Touched, attack_rng, parse_attack

M, D, REPEATS = 20, 2_431_018, 9
ATTACKS = [
    "gaussian:q=6",
    "omniscient:q=6",
    "bit-flip",
    "bit-flip:columns=100000",
    "gambler",
    "gambler:servers=1,probability=0.01",
    "sign-flip:q=6",
    "inner-product:q=6",
    "a-little-is-enough:q=6",
    "mimic:q=6,worker=7",
    "mimic:q=6",
    "min-max:q=6",
    "min-sum:q=6",
    "constant:q=6,value=nan",
    "crash:worker=0",
    "straggler:q=6",
    "stuck:worker=0",
    "random-cells:rate=0.001",
]


def best(call: Callable[[], object], repeats: int = REPEATS) -> float:
    """Return the best of several times, in seconds."""
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return min(times)


def write_cells(G: np.ndarray, touched: Touched) -> None:
    """Write existing values into the changed cells: the minimum work of an attack."""
    for row in touched.whole_rows:
        G[row] = G[-1]
    G[touched.cell_rows, touched.cell_columns] = np.float32(1)


def main() -> None:
    """Print milliseconds and ratios."""
    G = np.random.default_rng(0).normal(1, 1, (M, D)).astype(np.float32)
    previous = G.copy()
    print(f"{'attack':38s} {'cells':>10s} {'attack ms':>10s} {'write ms':>10s} {'ratio':>6s}")
    for text in ATTACKS:
        attack = parse_attack(text)

        def corrupt(attack: Attack = attack) -> Touched:
            return attack.corrupt(G, rng=attack_rng(0, 1), round=1, previous=previous)

        touched = corrupt()
        np.copyto(G, previous)
        taken = best(corrupt)
        np.copyto(G, previous)
        written = best(lambda touched=touched: write_cells(G, touched))  # type: ignore[misc]
        np.copyto(G, previous)
        print(
            f"{text:38s} {touched.count:10d} {taken * 1e3:10.3f} {written * 1e3:10.3f}"
            f" {taken / written:6.2f}"
        )


if __name__ == "__main__":
    main()
