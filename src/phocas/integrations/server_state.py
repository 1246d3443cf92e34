"""The file in which a server of federated learning keeps its memory between rounds."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phocas.files import check_writable, written_atomically

FORMAT = "phocas federation 1"
"""The first entry of a state file, by which it is recognised."""
_TOLD = "told"
UNREADABLE = (
    OSError,
    EOFError,
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    IndexError,
    zipfile.BadZipFile,
    NotImplementedError,
)
"""Errors of reading a damaged file."""


def write_state(
    path: Path,
    identity: Mapping[str, Any],
    told: Mapping[str, Any],
    arrays: Mapping[str, NDArray[Any]],
) -> None:
    """Write the memory of a server; after a crash the file is the new one or the one before.

    Args:
        path: the file.
        identity: what distinguishes this federation from others, ready for ``json``.
        told: values, ready for ``json``.
        arrays: arrays by name.
    """
    text = json.dumps({"format": FORMAT, "identity": identity, **told}).encode()
    with written_atomically(path) as stream, zipfile.ZipFile(stream, "w") as file:
        for name, array in {_TOLD: np.frombuffer(text, np.uint8), **arrays}.items():
            with file.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asarray(array), allow_pickle=False)


def read_state(
    path: Path, identity: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, NDArray[Any]]] | None:
    """Return the values and arrays of a state file, or None if there is no file yet.

    Raises:
        ValueError: if the file is damaged, is no state file, or belongs to another federation.
    """
    check_writable(path, "state")
    if not path.exists():
        return None
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        told = json.loads(bytes(arrays.pop(_TOLD)))
        known = told.pop("format") == FORMAT
        belongs = told.pop("identity")
    except UNREADABLE as error:
        raise damaged(path, error) from None
    if not known:
        raise ValueError(f"state {path} is of another version of phocas: give another file")
    if belongs != json.loads(json.dumps(identity)):
        different = [key for key in identity if belongs.get(key) != identity[key]]
        raise ValueError(
            f"state {path} belongs to another federation ({', '.join(different)} differ): give"
            " another file, or remove it to begin anew"
        )
    return told, arrays


def damaged(path: Path, error: Exception) -> ValueError:
    """Return the error for a state file that cannot be read."""
    reason = str(error) or type(error).__name__
    return ValueError(
        f"state {path} must be the file that this federation has written, and is damaged or another"
        f" file ({reason}): restore it, or remove it to begin anew"
    )
