"""Receipts: the inputs, settings and result of a merge, for others to repeat and compare."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from phocas.files import write_atomically
from phocas.integrations.merging.merge import Merged, file_digest
from phocas.kernels import instructions

_VERSIONS = ("phocas", "numpy", "llvmlite")


@dataclass(frozen=True, slots=True)
class Request:
    """The settings of a merge, besides its files.

    Args:
        rule: the rule, as text.
        base: the file that all others started from.
        weights: a number for each file.
        max_share: the largest share of the total weight that one file may have.
        seed: a seed for rules that draw at random.

    >>> Request("phocas:b=2", max_share=0.4).rule
    'phocas:b=2'
    """

    rule: str
    base: Path | None = None
    weights: Sequence[float] | None = None
    max_share: float | None = None
    seed: int | None = None


def receipt(merged: Merged, request: Request) -> dict[str, Any]:
    """Describe a merge, without its time and folder: a repeated merge has the same receipt.

    The same versions give the same bits on all processors with the same ``instructions``. The width
    of vectors does not matter; fused multiply-add does, because it rounds once where two
    instructions round twice.

    Args:
        merged: the result of the merge, with its digest.
        request: the settings of the merge.
    """
    if merged.digest is None:
        raise ValueError("a receipt needs the digest of the output: merge with digest=True")
    paths = [*merged.files, *([] if request.base is None else [request.base])]
    with ThreadPoolExecutor() as pool:
        digests = list(pool.map(file_digest, paths))
    names = [*merged.names, *([] if request.base is None else [request.base.name])]
    described = [
        {"name": name, "bytes": path.stat().st_size, "sha256": digest}
        for name, path, digest in zip(names, paths, digests, strict=True)
    ]
    return {
        "rule": request.rule,
        "weights": None if request.weights is None else list(request.weights),
        "max_share": request.max_share,
        "seed": request.seed,
        "inputs": described[: len(merged.files)],
        "base": None if request.base is None else described[-1],
        "output": {
            "bytes": merged.output.stat().st_size,
            "sha256": merged.digest,
        },
        "values": merged.columns,
        "not_finite": merged.not_finite,
        "versions": {name: metadata.version(name) for name in _VERSIONS},
        "instructions": instructions(),
    }


def write_receipt(path: Path, content: dict[str, Any]) -> None:
    """Write a receipt as JSON.

    Args:
        path: the file to write.
        content: the result of :func:`receipt`.
    """
    write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())
