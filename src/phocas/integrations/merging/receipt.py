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
from phocas.integrations.merging.formats import check_regular
from phocas.integrations.merging.merged import (
    Merged,
    content_digest,
    short_names,
)
from phocas.integrations.merging.sources import open_source
from phocas.integrations.merging.tensors import TensorError
from phocas.kernels import instructions

_VERSIONS = ("phocas", "numpy", "llvmlite")


@dataclass(frozen=True, slots=True)
class MergeRequest:
    """The settings of a merge, besides its files.

    Args:
        rule: the rule, as text.
        base: the file that all others started from.
        weights: a number for each file.
        max_share: the largest share of the total weight that one file may have.
        seed: a seed for rules that draw at random.

    >>> MergeRequest("phocas:b=2", max_share=0.4).rule
    'phocas:b=2'
    """

    rule: str
    base: Path | None = None
    weights: Sequence[float] | None = None
    max_share: float | None = None
    seed: int | None = None


def receipt(merged: Merged, request: MergeRequest) -> dict[str, Any]:
    """Describe a merge, without its time and folder: a repeated merge has the same receipt.

    The same versions give the same bits on all processors with the same ``instructions``. The width
    of vectors does not matter; fused multiply-add does, because it rounds once where two
    instructions round twice. The bits of merged LoRA adapters depend on NumPy's linear algebra too.

    Args:
        merged: the result of the merge, with its digest.
        request: the settings of the merge.
    """
    if merged.digest is None:
        raise ValueError("a receipt needs the digest of the output: merge with digest=True")
    everyone = [*merged.files, *(path for path, _ in merged.left_out)]
    names = short_names(everyone)
    with ThreadPoolExecutor() as pool:
        described = list(pool.map(_described, names, everyone))
    m = len(merged.files)
    reasons = [why for _, why in merged.left_out]
    for name, path in sorted(zip(names, everyone, strict=True), key=lambda x: -len(str(x[1]))):
        reasons = [why.replace(str(path), name) for why in reasons]
    return {
        "rule": request.rule,
        "weights": None if merged.weights is None else list(merged.weights),
        "max_share": request.max_share,
        "seed": request.seed,
        "rank": merged.rank,
        "inputs": described[:m],
        "left_out": [
            {**entry, "why": why} for entry, why in zip(described[m:], reasons, strict=True)
        ],
        "base": None if request.base is None else _described(request.base.name, request.base),
        "output": {
            "bytes": sum(path.stat().st_size for path in merged.outputs),
            "sha256": merged.digest,
        },
        "values": merged.columns,
        "not_finite": merged.not_finite,
        "versions": {name: metadata.version(name) for name in _VERSIONS},
        "instructions": instructions(),
    }


def _described(name: str, path: Path) -> dict[str, Any]:
    """Return the name, size and digest of an input; a bad one may have neither."""
    files = parts_of(path)
    found: dict[str, Any] = {"name": name, "bytes": None, "sha256": None}
    if files:
        found["bytes"] = sum(file.stat().st_size for file in files)
        found["sha256"] = content_digest(files)
    return found


def parts_of(path: Path) -> list[Path]:
    """Return the files of an input: itself, its shards with their index, or an adapter's two.

    Args:
        path: a file or folder. Of a folder that cannot be merged, all files are returned.
    """
    try:
        return open_source(path).paths
    except (TensorError, OSError):
        found = sorted(path.iterdir()) if path.is_dir() else [path]
        return [file for file in found if file.is_file()]


def read_receipt(path: Path) -> dict[str, Any]:
    """Read a receipt; raise ValueError if it is none.

    Args:
        path: the file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_receipt(Path(folder, "r.json"), {"inputs": [], "output": {"sha256": "12"}})
    ...     read_receipt(Path(folder, "r.json"))
    {'inputs': [], 'output': {'sha256': '12'}}
    """
    check_regular(path)
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} must be a receipt: it is no JSON ({error})") from None
    lists = (
        (content.get("inputs"), content.get("left_out", [])) if isinstance(content, dict) else ()
    )
    entries = [*lists, content.get("output")] if lists else [None]
    flat = [each for part in entries for each in (part if isinstance(part, list) else [part])]
    if not all(isinstance(each, dict) and "sha256" in each for each in flat):
        raise ValueError(f"{path} must be a receipt of phocas aggregate: it lacks digests")
    return dict(content)


def differences(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Return what differs between two receipts, a line each; names and versions may differ.

    Args:
        expected: the receipt to verify.
        found: the receipt of the repeated merge.

    >>> old = {"rule": "median", "inputs": [], "output": {"sha256": "12"}}
    >>> differences(old, {**old, "rule": "mean"})
    ["the receipt has rule 'median': got 'mean'"]
    """
    lines = [
        f"the receipt has {key} {expected.get(key)!r}: got {found.get(key)!r}"
        for key in ("rule", "weights", "max_share", "seed", "rank")
        if expected.get(key) != found.get(key)
    ]
    for key, what in (("inputs", "merged"), ("left_out", "left out")):
        old, new = expected.get(key) or [], found.get(key) or []
        if len(old) != len(new):
            lines.append(f"{len(old)} files are {what} in the receipt: got {len(new)}")
            continue
        lines += [
            f"{b['name']} is {what}, and has another content than {a.get('name')} in the receipt"
            for a, b in zip(old, new, strict=True)
            if a["sha256"] != b["sha256"]
        ]
    base = [(each.get("base") or {}).get("sha256") for each in (expected, found)]
    if base[0] != base[1]:
        lines.append("the base has another content than in the receipt, or is missing")
    if not lines and expected["output"]["sha256"] != found["output"]["sha256"]:
        lines.append("the repeated merge has another content than the output of the receipt")
        for key in ("versions", "instructions"):
            if expected.get(key) != found.get(key):
                lines[-1] += f"; {key} differ: {expected.get(key)}, here {found.get(key)}"
    return lines


def write_receipt(path: Path, content: dict[str, Any]) -> None:
    """Write a receipt as JSON.

    Args:
        path: the file to write.
        content: the result of :func:`receipt`.
    """
    write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())
