"""Tables of dropped shares by round, evidence against workers, and matrix pictures.

These tables are in the same file as those of :mod:`phocas.experiments.results`. A file of an
earlier phocas has none of them: they are created when it is next written to, and read as empty
until then. Their size is bounded, however long a run is.
"""

from __future__ import annotations

import json
import math
import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from phocas.detection import Evidence
from phocas.detection.comparison import Sample

if TYPE_CHECKING:
    from phocas.training.trainer import Round

Floats = npt.NDArray[np.float64]

TABLES = ("shares", "pictures", "evidence", "absurd", "layers", "exclusions")
BY_ROUND = ("shares", "pictures", "exclusions")
MOST_ROUNDS = 2000
"""Largest number of rounds of a run with stored shares; a longer run stores every n-th round."""
MOST_LINKS = 10_000
"""Largest number of (server, worker) pairs for which shares are stored at each evaluation."""
MOST_PICTURES = 100
PICTURE_CELLS = 8192

SCHEMA = """
CREATE TABLE IF NOT EXISTS shares (       -- what was dropped of each worker in a round
    run INTEGER NOT NULL REFERENCES runs (id),
    round INTEGER NOT NULL,
    workers BLOB NOT NULL,                -- m half-precision numbers, little-endian
    servers BLOB,                         -- s x m of them, in rounds of evaluations
    PRIMARY KEY (run, round)
) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS pictures (     -- some columns of the matrix of a round
    run INTEGER NOT NULL REFERENCES runs (id),
    round INTEGER NOT NULL,
    columns TEXT NOT NULL,                -- start, runs, stride, width: see Sample
    cells BLOB NOT NULL,                  -- zlib: m rows of single precision, little-endian
    lost BLOB NOT NULL,                   -- zlib: m rows of bytes, 255 is left out altogether
    PRIMARY KEY (run, round)
) STRICT;
CREATE TABLE IF NOT EXISTS evidence (     -- against each worker, as of the last round written
    run INTEGER NOT NULL REFERENCES runs (id),
    worker INTEGER NOT NULL,
    odds REAL NOT NULL, since INTEGER, dropped REAL NOT NULL, changed REAL NOT NULL,
    PRIMARY KEY (run, worker)
) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS absurd (       -- which workers' values have reached a server absurd
    run INTEGER PRIMARY KEY REFERENCES runs (id),
    workers INTEGER NOT NULL,
    links BLOB NOT NULL                   -- s x m bytes, 1 where it has been so
) STRICT;
CREATE TABLE IF NOT EXISTS layers (       -- the parameters in the order of the matrix's columns
    run INTEGER NOT NULL REFERENCES runs (id),
    place INTEGER NOT NULL, name TEXT NOT NULL, size INTEGER NOT NULL,
    PRIMARY KEY (run, place)
) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS exclusions (   -- rounds after which other clients are excluded
    run INTEGER NOT NULL REFERENCES runs (id),
    round INTEGER NOT NULL,
    clients TEXT NOT NULL,                -- all that are excluded from then on
    PRIMARY KEY (run, round)
) STRICT, WITHOUT ROWID
"""


@dataclass(frozen=True, eq=False)
class DroppedShares:
    """The dropped shares of the workers in the rounds that are stored."""

    rounds: npt.NDArray[np.int64]
    """Numbers of the stored rounds."""
    workers: npt.NDArray[np.float16]
    """Dropped share of each worker, (rounds, m)."""
    server_round: int | None = None
    servers: Floats | None = None
    """Mean share of each worker at each server, (s, m), over the rounds up to ``server_round``."""


@dataclass(frozen=True)
class Exclusion:
    """Rounds in which a client is excluded."""

    client: int
    """Number of the client."""
    first: int
    """The first of these rounds."""
    last: int | None = None
    """The last of these rounds; None if the client is still excluded."""

    def __str__(self) -> str:
        if self.last is None:
            return f"{self.client} (from round {self.first})"
        return f"{self.client} (rounds {self.first} to {self.last})"


@dataclass(frozen=True, eq=False)
class RecordedPicture:
    """Some columns of the matrix of one round."""

    round: int
    """Number of the round."""
    sample: Sample
    """The sampled columns."""
    values: npt.NDArray[np.float32]
    """The values, (m, columns)."""
    lost: npt.NDArray[np.uint8]
    """The dropped share of each value, from 0 to 255."""


def write(
    connection: sqlite3.Connection,
    run: int,
    rounds: Sequence[Round],
    total: int,
    evidence: Iterable[Evidence],
    absurd: npt.NDArray[np.floating] | None,
) -> None:
    """Store some rounds of a run of ``total`` rounds, and the evidence as of the last one.

    Shares are stored for rounds in which all workers participate. Those of clients are stored as
    means, by evaluation.
    """
    every = math.ceil(total / MOST_ROUNDS)
    connection.executemany(
        "INSERT INTO shares VALUES (?, ?, ?, ?)",
        [
            (run, done.number, _halves(done.dropped), _links(done.by_server))
            for done in rounds
            if done.participants is None and (done.number % every == 0 or done.number == total)
        ],
    )
    connection.executemany(
        "INSERT INTO pictures VALUES (?, ?, ?, ?, ?)",
        [
            (
                run,
                done.number,
                json.dumps(astuple(done.picture.sample)),
                _packed(_single(done.picture.values)),
                _packed(np.rint(done.picture.lost * 255).astype(np.uint8)),
            )
            for done in rounds
            if done.picture is not None
        ],
    )
    before = _rows(connection, "exclusions", "clients", run, "round")
    last = before[-1][0] if before else "[]"
    for done in rounds:
        if last != (last := json.dumps(sorted(done.excluded))):
            connection.execute("INSERT INTO exclusions VALUES (?, ?, ?)", (run, done.number, last))
    connection.executemany(
        "INSERT OR REPLACE INTO evidence VALUES (?, ?, ?, ?, ?, ?)",
        [
            (run, each.worker, each.e_value, each.flagged, each.dropped, each.drift)
            for each in evidence
        ],
    )
    if absurd is not None and absurd.size:
        connection.execute(
            "INSERT OR REPLACE INTO absurd VALUES (?, ?, ?)",
            (run, absurd.shape[1], (absurd > 0).tobytes()),
        )


def write_layers(
    connection: sqlite3.Connection, run: int, layers: Iterable[tuple[str, int]]
) -> None:
    """Store which parameters the columns of a run belong to."""
    connection.executemany(
        "INSERT OR REPLACE INTO layers VALUES (?, ?, ?, ?)",
        [(run, place, name, size) for place, (name, size) in enumerate(layers)],
    )


def read_shares(connection: sqlite3.Connection, run: int) -> DroppedShares | None:
    """Return the stored shares of a run, or None."""
    rows = _rows(connection, "shares", "round, workers, servers", run, "round")
    if not rows:
        return None
    m = len(rows[0][1]) // 2
    workers = np.frombuffer(b"".join(row[1] for row in rows), "<f2").reshape(-1, m)
    numbers = np.array([row[0] for row in rows], np.int64)
    linked = [(row[0], row[2]) for row in rows if row[2] is not None]
    if not linked:
        return DroppedShares(numbers, workers)
    last = np.frombuffer(b"".join(blob for _, blob in linked), "<f2")
    links = last.reshape(len(linked), -1, m).astype(np.float64).mean(axis=0)
    return DroppedShares(numbers, workers, linked[-1][0], links)


def read_evidence(connection: sqlite3.Connection, run: int) -> list[Evidence]:
    """Return the evidence against each worker of a run."""
    rows = _rows(connection, "evidence", "worker, odds, since, dropped, changed", run, "worker")
    return [Evidence(*row) for row in rows]


def read_exclusions(connection: sqlite3.Connection, run: int) -> list[Exclusion]:
    """Return the exclusions of clients in a run, in the order of their first rounds."""
    found: list[Exclusion] = []
    current: dict[int, int] = {}
    for round_, text in _rows(connection, "exclusions", "round, clients", run, "round"):
        now = set(json.loads(text))
        found += [Exclusion(c, current.pop(c), round_) for c in sorted(current.keys() - now)]
        current |= dict.fromkeys(sorted(now - current.keys()), round_ + 1)
    found += [Exclusion(client, first) for client, first in current.items()]
    return sorted(found, key=lambda each: (each.first, each.client))


def read_absurd(connection: sqlite3.Connection, run: int) -> npt.NDArray[np.bool_] | None:
    """Return which workers sent absurd values to which servers, (s, m), or None if not stored."""
    for workers, links in _rows(connection, "absurd", "workers, links", run, "run"):
        return np.frombuffer(links, np.bool_).reshape(-1, workers)
    return None


def read_layers(connection: sqlite3.Connection, run: int) -> list[tuple[str, int]]:
    """Return the names and sizes of a run's parameters, in the order of the columns."""
    return [(name, size) for name, size in _rows(connection, "layers", "name, size", run, "place")]


def read_pictures(connection: sqlite3.Connection, run: int) -> Iterator[RecordedPicture]:
    """Yield the pictures of a run."""
    for round_, columns, cells, lost in _rows(
        connection, "pictures", "round, columns, cells, lost", run, "round"
    ):
        sample = Sample(*json.loads(columns))
        width = sample.runs * sample.width
        yield RecordedPicture(
            round_,
            sample,
            np.frombuffer(zlib.decompress(cells), "<f4").reshape(-1, width),
            np.frombuffer(zlib.decompress(lost), np.uint8).reshape(-1, width),
        )


def picture_sample(d: int, workers: int) -> Sample:
    """Return the columns that a picture shows: at most 256, and fewer if there are many workers."""
    return Sample.even(d, max(16, min(256, PICTURE_CELLS // workers)))


def _rows(
    connection: sqlite3.Connection, table: str, columns: str, run: int, order: str
) -> list[tuple[Any, ...]]:
    there = connection.execute(
        "SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name = ?", (table,)
    ).fetchone()[0]
    if not there:
        return []
    query = f"SELECT {columns} FROM {table} WHERE run = ? ORDER BY {order}"  # noqa: S608 - constants
    return [tuple(row) for row in connection.execute(query, (run,))]


def _halves(shares: npt.NDArray[np.floating]) -> bytes:
    return shares.astype("<f2").tobytes()


def _links(shares: npt.NDArray[np.floating] | None) -> bytes | None:
    return None if shares is None or shares.size > MOST_LINKS else _halves(shares)


def _single(values: Floats) -> npt.NDArray[np.float32]:
    with np.errstate(over="ignore"):
        return values.astype("<f4")


def _packed(values: npt.NDArray[np.generic]) -> bytes:
    return zlib.compress(values.tobytes(), 1)
