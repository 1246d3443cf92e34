# ruff: noqa: INP001 - a script, no package
"""Time the cell filter and weights against the same rule without them, and merging against cat.

    python benchmarks/ratios.py [cell-filter] [weights] [files]

Each ratio compares the best of several turns, which both sides take in one run. The merge reads
eight files of 524 MB in a temporary folder from the page cache, which needs 4.2 GB. Its result is
written to /dev/shm.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np

import phocas
from phocas.experiments.benchmark import in_turns

WORKERS, MLP, CNN = 20, 118_282, 2_431_018
FILES, VALUES = 8, 131_000_000
SECONDS, TURNS = 8.0, 8


def cell_filter() -> None:
    """Filter honest rows, and rows with 1% wrong cells, before NNM and the trimmed mean."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(WORKERS, CNN)).astype(np.float32)
    plain = phocas.parse_rule("nnm:b=6|trimmed-mean:b=6")
    cleaned = phocas.parse_rule("cell-filter:b=8|nnm:b=6|trimmed-mean:b=6")
    for what, share in (("honest rows", 0.0), ("1% of the cells wrong", 0.01)):
        rows.reshape(-1)[rng.integers(0, rows.size, int(share * rows.size))] = 1e6
        found = in_turns(partial(plain, rows), partial(cleaned, rows), SECONDS, TURNS)
        print(f"cell filter, {what}: {found.ratio:.2f} of {plain}", flush=True)


def weights() -> None:
    """Aggregate rows of a small model with and without weights."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(WORKERS, MLP)).astype(np.float32)
    units = rng.integers(400, 900, size=WORKERS)
    for b in (6, 8):
        for name in ("trimmed-mean", "heraclius", "phocas", "meamed"):
            rule = phocas.parse_rule(f"{name}:b={b}")
            weighed = partial(rule, rows, weights=units)
            found = in_turns(partial(rule, rows), weighed, SECONDS / 4, TURNS)
            print(f"weights, {rule}: {found.ratio:.2f} of the rule without", flush=True)


def files() -> None:
    """Merge files in the page cache, against reading them with cat."""
    rng = np.random.default_rng(0)
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory(dir="/dev/shm") as ram,
    ):
        names = [str(Path(folder, f"{i}.npy")) for i in range(FILES)]
        for name in names:
            np.save(name, rng.standard_normal(VALUES, dtype=np.float32))
        merge = [sys.executable, "-m", "phocas", "aggregate", *names, "--rule", "phocas:b=2"]
        merge += ["-o", str(Path(ram, "merged.npy")), "--quiet"]
        run = partial(subprocess.run, check=True, stdout=subprocess.DEVNULL)
        found = in_turns(partial(run, ["cat", *names]), partial(run, merge), SECONDS, TURNS)
        print(f"files: {found.ratio:.2f} of cat", flush=True)


if __name__ == "__main__":
    known = {"cell-filter": cell_filter, "weights": weights, "files": files}
    words = sys.argv[1:] or list(known)
    if not set(words) <= set(known):
        sys.exit(f"words must be among {', '.join(known)}: got {' '.join(words)}")
    for word in words:
        known[word]()
