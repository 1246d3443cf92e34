"""Results in SQLite: runs, rounds, evaluations, and dropped shares.

The file is in WAL mode: it can be read while several processes write to it, and it survives if any
of them is killed. Every write is one transaction.
"""

from __future__ import annotations

import json
import math
import sqlite3
import time
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

from phocas.experiments import detection_tables

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import numpy as np
    import numpy.typing as npt

    from phocas.detection import Evidence
    from phocas.training.evaluation import Metrics
    from phocas.training.trainer import Round

SCHEMA_VERSION = 5
PHASES = ("data", "gradients", "attack", "aggregate", "update", "metrics")
Status = Literal["running", "complete", "interrupted", "stopped", "failed"]
ENDED = ("complete", "stopped")
"""Statuses of finished runs, which have nothing left to do."""
TABLES = ("rounds", "evaluations", "dropped", "dropped_by_server", "implausible", "virtual")
"""Names of the tables with rows for each run, beside the table of runs."""
NUMBERED = ("suspects", "unusual", "suspect_servers")
"""Columns with indices of flagged workers and servers, as of the last round."""

_EVALUATIONS = """
CREATE TABLE evaluations (
    run INTEGER NOT NULL REFERENCES runs (id),
    round INTEGER NOT NULL,
    loss REAL, top1 REAL, top3 REAL, seconds REAL NOT NULL,
    PRIMARY KEY (run, round)
) STRICT, WITHOUT ROWID
"""

_IMPLAUSIBLE = """
CREATE TABLE implausible (
    run INTEGER NOT NULL REFERENCES runs (id),
    round INTEGER NOT NULL, reach REAL NOT NULL,
    most INTEGER NOT NULL, rows INTEGER NOT NULL, share REAL NOT NULL,
    PRIMARY KEY (run, round, reach)
) STRICT, WITHOUT ROWID
"""

_SCHEMA = f"""
CREATE TABLE runs (
    id INTEGER PRIMARY KEY,
    identity TEXT NOT NULL,               -- digest of settings and of the user's own code
    name TEXT,
    dataset TEXT NOT NULL, model TEXT NOT NULL, rule TEXT NOT NULL, attack TEXT,
    seed INTEGER NOT NULL, rounds INTEGER NOT NULL,
    config TEXT NOT NULL,                 -- JSON, like versions, host and lists of workers
    versions TEXT NOT NULL,
    host TEXT NOT NULL,
    started TEXT NOT NULL,
    updated TEXT NOT NULL,
    status TEXT NOT NULL
        CHECK (status IN ('running', 'complete', 'interrupted', 'stopped', 'failed')),
    message TEXT,
    rounds_done INTEGER NOT NULL DEFAULT 0,
    final_accuracy REAL, best_accuracy REAL, final_top3 REAL, best_top3 REAL,
    ms_per_round REAL,                    -- the median round, without evaluations
    nonfinite_rounds INTEGER NOT NULL DEFAULT 0,
    skipped_rounds INTEGER NOT NULL DEFAULT 0,
    suspects TEXT NOT NULL DEFAULT '[]',
    unusual TEXT NOT NULL DEFAULT '[]',
    suspect_servers TEXT NOT NULL DEFAULT '[]',
    lost INTEGER,                         -- the round that destroyed the model, if one did
    byzantine TEXT,                       -- the Byzantine workers of a simulation, if known
    test_accuracy REAL, test_top3 REAL, -- at the end, if the evaluations are of other samples
    origin TEXT                           -- the run and the round that it goes on from, if any
) STRICT;
CREATE INDEX runs_identity ON runs (identity);
CREATE TABLE rounds (
    run INTEGER NOT NULL REFERENCES runs (id),
    round INTEGER NOT NULL,               -- from 1: so many rounds have been run
    loss REAL, lr REAL NOT NULL,          -- not-a-number is NULL here
    action TEXT NOT NULL, finite INTEGER NOT NULL,
    gradient_norm REAL, honest_distance REAL,
    expected_dropped REAL NOT NULL, touched INTEGER NOT NULL,
    {", ".join(f"{phase}_ms REAL NOT NULL" for phase in PHASES)},
    PRIMARY KEY (run, round)
) STRICT, WITHOUT ROWID;
{_EVALUATIONS};
{_IMPLAUSIBLE};
CREATE TABLE dropped (                    -- mean share since the evaluation before
    run INTEGER NOT NULL REFERENCES runs (id),
    round INTEGER NOT NULL, worker INTEGER NOT NULL, share REAL NOT NULL,
    PRIMARY KEY (run, round, worker)
) STRICT, WITHOUT ROWID;
CREATE TABLE dropped_by_server (          -- in the round of the last evaluation
    run INTEGER NOT NULL REFERENCES runs (id),
    server INTEGER NOT NULL, worker INTEGER NOT NULL, round INTEGER NOT NULL, share REAL NOT NULL,
    PRIMARY KEY (run, server, worker)
) STRICT, WITHOUT ROWID;
PRAGMA user_version = {SCHEMA_VERSION};
"""
# Only runs with a virtual clock have rows here, and files of earlier versions lack the table.
_VIRTUAL = """
CREATE TABLE IF NOT EXISTS virtual (
    run INTEGER NOT NULL REFERENCES runs (id),
    round INTEGER NOT NULL,
    seconds REAL NOT NULL,                -- what the virtual clock shows after the round
    staleness INTEGER,                    -- how many steps behind the last row was
    refused INTEGER NOT NULL,             -- rows that came too late since the round before
    PRIMARY KEY (run, round)
) STRICT, WITHOUT ROWID
"""
_FROM_1_TO_2 = (
    "ALTER TABLE runs ADD COLUMN origin TEXT",
    "ALTER TABLE evaluations RENAME TO earlier",
    _EVALUATIONS,
    "INSERT INTO evaluations SELECT * FROM earlier",
    "DROP TABLE earlier",
    "PRAGMA user_version = 2",
)
_FROM_2_TO_3 = (
    "ALTER TABLE runs ADD COLUMN unusual TEXT NOT NULL DEFAULT '[]'",
    "ALTER TABLE runs ADD COLUMN suspect_servers TEXT NOT NULL DEFAULT '[]'",
    _IMPLAUSIBLE,
    "PRAGMA user_version = 3",
)
_FROM_3_TO_4 = (
    "ALTER TABLE runs ADD COLUMN lost INTEGER",
    "ALTER TABLE runs ADD COLUMN byzantine TEXT",
    "PRAGMA user_version = 4",
)
_FROM_4_TO_5 = (
    "ALTER TABLE runs ADD COLUMN test_accuracy REAL",
    "ALTER TABLE runs ADD COLUMN test_top3 REAL",
    "PRAGMA user_version = 5",
)
_STEPS = {
    1: (*_FROM_1_TO_2, *_FROM_2_TO_3, *_FROM_3_TO_4, *_FROM_4_TO_5),
    2: (*_FROM_2_TO_3, *_FROM_3_TO_4, *_FROM_4_TO_5),
    3: (*_FROM_3_TO_4, *_FROM_4_TO_5),
    4: _FROM_4_TO_5,
}
"""Statements that upgrade a file of an older version."""
_UNREADABLE = (sqlite3.DatabaseError, UnicodeDecodeError)


class ResultsError(ValueError):
    """A results file that cannot be read or written; the message names it."""


class Described(Protocol):
    """The settings of a run: a :class:`RunConfig`, or those of a user's own trainer."""

    def identity(self) -> str:
        """Return a digest of what the result depends on."""

    def recorded(self) -> dict[str, Any]:
        """Return the settings for the file."""


@dataclass(frozen=True)
class RunRecord:
    """One run as stored in the results file.

    Attributes:
        id: number of the run.
        identity: digest of the settings and of user-defined code.
        name: name given by the user, if any.
        dataset: spec of the data set.
        model: spec of the model.
        rule: spec of the rule.
        attack: spec of the attack, if any.
        seed: seed of the run.
        rounds: number of rounds to run.
        config: all settings.
        versions: versions of packages.
        host: description of the machine.
        started: time of the start.
        updated: time of the last write.
        status: status of the run.
        message: reason of the status, if there is one.
        rounds_done: number of rounds that are stored.
        final_accuracy: accuracy of the last evaluation.
        best_accuracy: highest accuracy of all evaluations.
        final_top3: top-3 accuracy of the last evaluation.
        best_top3: highest top-3 accuracy of all evaluations.
        ms_per_round: median milliseconds of a round, without evaluations.
        nonfinite_rounds: number of rounds with a non-finite aggregate.
        skipped_rounds: number of rounds whose aggregate was not applied.
        suspects: flagged workers.
        origin: the run and round that this run continues, if any.
        unusual: workers whose dropped share is far above that of most workers.
        suspect_servers: flagged servers.
    """

    id: int
    identity: str
    name: str | None
    dataset: str
    model: str
    rule: str
    attack: str | None
    seed: int
    rounds: int
    config: dict[str, Any]
    versions: dict[str, str]
    host: dict[str, Any]
    started: str
    updated: str
    status: Status
    message: str | None
    rounds_done: int
    final_accuracy: float | None
    best_accuracy: float | None
    final_top3: float | None
    best_top3: float | None
    ms_per_round: float | None
    nonfinite_rounds: int
    skipped_rounds: int
    suspects: tuple[int, ...]
    origin: str | None = None
    unusual: tuple[int, ...] = ()
    suspect_servers: tuple[int, ...] = ()
    lost: int | None = None
    """The round that destroyed the model, or None; evidence of later rounds is not counted."""
    byzantine: tuple[int, ...] | None = None
    """The Byzantine workers, if a simulation knows them."""
    test_accuracy: float | None = None
    """Accuracy on the test samples at the end, if the run has validation samples."""
    test_top3: float | None = None
    """Top-3 accuracy on the test samples at the end, if the run has validation samples."""


class Results:
    """A results file, created if it does not exist.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, Results(Path(folder) / "r.sqlite") as results:
    ...     results.runs()
    []
    """

    def __init__(self, path: Path, *, read: bool = False) -> None:
        """Open a file; with ``read`` it must exist, and nothing is written."""
        self.path = Path(path)
        if self.path.is_dir():
            raise ResultsError(f"a results file must be a file: got {self.path}, a folder")
        if read and not self.path.exists():
            raise FileNotFoundError(f"there is no results file {self.path}")
        if not read:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._named():
            self._connect()
            try:
                version = self._read_version() if read else self._open()
            except BaseException:
                self._connection.close()
                raise
        if version not in ((*_STEPS, SCHEMA_VERSION) if read else (SCHEMA_VERSION,)):
            self._connection.close()
            raise ResultsError(
                f"{self.path} has schema version {version}, this phocas reads {SCHEMA_VERSION}"
            )

    def _connect(self, options: str = "") -> None:
        where = f"{self.path.absolute().as_uri()}{options}"
        self._connection = sqlite3.connect(where, timeout=60, isolation_level=None, uri=True)
        self._connection.row_factory = sqlite3.Row

    def _read_version(self) -> int:
        try:
            return self._version()
        except sqlite3.OperationalError:
            # WAL mode cannot create its files in a read-only folder. It needs none if no write is
            # pending in them, but SQLite must then be opened as immutable: the file must
            # not change.
            waiting = self.path.with_name(f"{self.path.name}-wal")
            if waiting.exists() and waiting.stat().st_size:
                raise
            self._connection.close()
            self._connect("?immutable=1")
            return self._version()

    def _version(self) -> int:
        self._connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        return int(version)

    def _open(self) -> int:
        """Create the tables if there are none, upgrade older ones, and return the version."""
        self._retry("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = NORMAL")
        with self.transaction():
            version = self._version()
            (tables,) = self._connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            new = _SCHEMA.split(";") if version == tables == 0 else ()
            for statement in _STEPS.get(version, new):
                self._connection.execute(statement)
            version = self._version()
            if version == SCHEMA_VERSION:  # otherwise the file belongs to another program
                for statement in (*detection_tables.SCHEMA.split(";"), _VIRTUAL):
                    self._connection.execute(statement)
            return version

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Add the file's name to SQLite's errors, which omit it."""
        try:
            yield
        except sqlite3.IntegrityError:
            raise
        except _UNREADABLE as error:
            raise ResultsError(f"{self.path} cannot be used as a results file: {error}") from error

    def _retry(self, statement: str) -> None:
        """Execute a statement that SQLite rejects at once if the file is locked; retry for 60 s."""
        deadline = time.monotonic() + 60
        while True:
            try:
                self._connection.execute(statement)
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
            else:
                return

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Execute the writes of a block as one transaction: all of them, or none."""
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")

    def begin(
        self,
        config: Described,
        versions: Mapping[str, str],
        host: Mapping[str, Any],
        origin: str | None = None,
        layers: Iterable[tuple[str, int]] = (),
        byzantine: tuple[int, ...] | None = None,
    ) -> int:
        """Add a run and return its number.

        Args:
            config: settings of the run.
            versions: versions of packages.
            host: description of the machine.
            origin: the run and round that this run continues, if any.
            layers: names and sizes of its parameters.
            byzantine: the Byzantine workers, if known.
        """
        now, settings = _now(), config.recorded()
        columns = ("name", "dataset", "model", "rule", "attack", "seed", "rounds")
        with self.transaction():
            cursor = self._connection.execute(
                "INSERT INTO runs (identity, name, dataset, model, rule, attack, seed, rounds,"
                " config, versions, host, started, updated, origin, byzantine, status)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 'running')",
                (
                    config.identity(),
                    *(settings[column] for column in columns),
                    json.dumps(settings),
                    json.dumps(versions),
                    json.dumps(host),
                    now,
                    now,
                    origin,
                    None if byzantine is None else json.dumps(byzantine),
                ),
            )
            assert cursor.lastrowid is not None
            detection_tables.write_layers(self._connection, cursor.lastrowid, layers)
        return cursor.lastrowid

    def rewind(self, run: int, rounds_done: int) -> None:
        """Delete what a run wrote after its checkpoint; resuming writes it again."""
        with self.transaction():
            kept = ("rounds", "evaluations", "dropped", "implausible", "virtual")
            for table in (*kept, *detection_tables.BY_ROUND):
                self._connection.execute(
                    f"DELETE FROM {table} WHERE run = ? AND round > ?",  # noqa: S608
                    (run, rounds_done),
                )
            self._connection.execute(
                "UPDATE runs SET status = 'running', message = NULL, rounds_done = ?, updated = ?"
                " WHERE id = ?",
                (max(0, rounds_done), _now(), run),
            )

    def extend(self, run: int, config: Described, rounds_done: int) -> None:
        """Give a run other settings, such as more rounds, after which it continues."""
        settings = config.recorded()
        with self.transaction():
            self._connection.execute(
                "UPDATE runs SET identity = ?, name = ?, rounds = ?, config = ? WHERE id = ?",
                (
                    config.identity(),
                    settings["name"],
                    settings["rounds"],
                    json.dumps(settings),
                    run,
                ),
            )
        self.rewind(run, rounds_done or -1)

    def copy(self, origin: int, run: int, rounds_done: int, evaluate_every: int) -> None:
        """Copy the first rounds of another run, without values that are stored at its end only."""
        regular = "round <= ?3 AND round % ?4 = 0"
        copied = ", ".join(
            f"iif(round % ?4 = 0, {column}, NULL)" if column == "honest_distance" else column
            for column in self._columns("rounds")
        )
        with self.transaction():
            self._connection.execute(
                f"INSERT INTO rounds SELECT ?2, {copied} FROM rounds"  # noqa: S608
                " WHERE run = ?1 AND round <= ?3",
                (origin, run, rounds_done, evaluate_every),
            )
            for table in ("evaluations", "dropped", "dropped_by_server"):
                self._connection.execute(
                    f"INSERT INTO {table} SELECT ?2, {', '.join(self._columns(table))}"  # noqa: S608
                    f" FROM {table} WHERE run = ?1 AND {regular}",
                    (origin, run, rounds_done, evaluate_every),
                )
            for table in ("implausible", "virtual", *detection_tables.BY_ROUND):
                self._connection.execute(
                    f"INSERT INTO {table} SELECT ?2, {', '.join(self._columns(table))}"  # noqa: S608
                    f" FROM {table} WHERE run = ?1 AND round <= ?3",
                    (origin, run, rounds_done),
                )
            self._connection.execute(
                "UPDATE runs SET rounds_done = ? WHERE id = ?", (rounds_done, run)
            )

    def _columns(self, table: str) -> list[str]:
        """Return the names of a table's columns, without the run."""
        rows = self._connection.execute("SELECT name FROM pragma_table_info(?)", (table,))
        return [name for (name,) in rows if name != "run"]

    def record(
        self,
        run: int,
        rounds: Sequence[Round],
        evaluations: Iterable[tuple[int, Metrics]] = (),
        dropped: Iterable[tuple[int, Sequence[float]]] = (),
        evidence: Iterable[Evidence] = (),
        absurd: npt.NDArray[np.floating] | None = None,
    ) -> None:
        """Add rounds, evaluations by round, and each worker's mean dropped share by round.

        Args:
            run: number of the run.
            rounds: the rounds to add.
            evaluations: evaluations, by round.
            dropped: mean dropped share of each worker, by round.
            evidence: evidence against each worker as of the last round.
            absurd: (s, m); positive where a worker sent absurd values to a server.
        """
        with self.transaction():
            self._connection.executemany(
                f"INSERT INTO rounds VALUES ({', '.join('?' * (10 + len(PHASES)))})",  # noqa: S608
                [
                    (
                        run,
                        done.number,
                        done.loss,
                        done.lr,
                        done.action,
                        done.finite,
                        done.gradient_norm,
                        done.honest_distance,
                        done.expected_dropped,
                        done.touched,
                        *(done.seconds.get(phase, 0.0) * 1e3 for phase in PHASES),
                    )
                    for done in rounds
                ],
            )
            self._connection.executemany(
                "INSERT INTO virtual VALUES (?, ?, ?, ?, ?)",
                [
                    (run, done.number, done.virtual_seconds, done.staleness, done.refused)
                    for done in rounds
                    if done.virtual_seconds is not None
                ],
            )
            self._connection.executemany(
                "INSERT INTO evaluations VALUES (?, ?, ?, ?, ?, ?)",
                [(run, at, e.loss, e.top1, e.top3, e.seconds) for at, e in evaluations],
            )
            self._connection.executemany(
                "INSERT INTO dropped VALUES (?, ?, ?, ?)",
                [
                    (run, at, i, share)
                    for at, shares in dropped
                    for i, share in enumerate(shares)
                    if not math.isnan(share)  # NaN: the worker did not participate
                ],
            )
            self._connection.executemany(
                "INSERT INTO implausible VALUES (?, ?, ?, ?, ?, ?)",
                [
                    (run, done.number, each.cutoff, each.most, each.rows, each.share)
                    for done in rounds
                    for each in done.outlier_counts
                ],
            )
            detailed = [done for done in rounds if done.by_server is not None]
            for done in detailed[-1:]:
                assert done.by_server is not None
                self._connection.executemany(
                    "INSERT OR REPLACE INTO dropped_by_server VALUES (?, ?, ?, ?, ?)",
                    [
                        (run, server, worker, done.number, float(share))
                        for server, shares in enumerate(done.by_server)
                        for worker, share in enumerate(shares)
                    ],
                )
            if rounds:
                (total,) = self._connection.execute(
                    "SELECT rounds FROM runs WHERE id = ?", (run,)
                ).fetchone()
                detection_tables.write(self._connection, run, rounds, total, evidence, absurd)
                self._connection.execute(
                    "UPDATE runs SET rounds_done = ?, updated = ?, suspects = ?, unusual = ?,"
                    " suspect_servers = ?, lost = ? WHERE id = ?",
                    (
                        rounds[-1].number,
                        _now(),
                        json.dumps(rounds[-1].flagged),
                        json.dumps(rounds[-1].unusual),
                        json.dumps(rounds[-1].flagged_servers),
                        rounds[-1].lost,
                        run,
                    ),
                )
                self._summarise(run)

    def _summarise(self, run: int) -> None:
        total = " + ".join(f"{phase}_ms" for phase in PHASES)
        last = "FROM evaluations WHERE run = ?1 ORDER BY round DESC LIMIT 1"
        self._connection.execute(
            f"""
            UPDATE runs SET
                final_accuracy = (SELECT top1 {last}),
                final_top3 = (SELECT top3 {last}),
                best_accuracy = (SELECT max(top1) FROM evaluations WHERE run = ?1),
                best_top3 = (SELECT max(top3) FROM evaluations WHERE run = ?1),
                nonfinite_rounds = (SELECT count(*) FROM rounds WHERE run = ?1 AND NOT finite),
                skipped_rounds =
                    (SELECT count(*) FROM rounds WHERE run = ?1 AND action != 'applied'),
                ms_per_round =
                    (SELECT {total} FROM rounds WHERE run = ?1 ORDER BY 1
                     LIMIT 1 OFFSET (SELECT (count(*) - 1) / 2 FROM rounds WHERE run = ?1))
            WHERE id = ?1
            """,  # noqa: S608 - made of constants
            (run,),
        )

    def record_test(self, run: int, metrics: Metrics) -> None:
        """Store the evaluation of the test samples at the end of a run with validation samples."""
        with self.transaction():
            self._connection.execute(
                "UPDATE runs SET test_accuracy = ?, test_top3 = ? WHERE id = ?",
                (metrics.top1, metrics.top3, run),
            )

    def end(self, run: int, status: Status, message: str | None = None) -> None:
        """Store the status with which a run ended."""
        with self.transaction():
            self._summarise(run)
            self._connection.execute(
                "UPDATE runs SET status = ?, message = ?, updated = ? WHERE id = ?",
                (status, message, _now(), run),
            )

    def run(self, run: int | None) -> RunRecord:
        """Return one run, or the last one for None; raise ValueError if it does not exist."""
        rows = self._connection.execute(
            "SELECT * FROM runs WHERE ? IS NULL OR id = ? ORDER BY id DESC LIMIT 1", (run, run)
        ).fetchall()
        if not rows:
            number = "" if run is None else f" {run}"
            raise ValueError(f"there is no run{number} in {self.path}")
        return self._record(rows[0])

    def runs(self, identity: str | None = None) -> list[RunRecord]:
        """Return all runs, or those of one configuration, oldest first."""
        rows = self._connection.execute(
            "SELECT * FROM runs WHERE ? IS NULL OR identity = ? ORDER BY id", (identity, identity)
        )
        return [self._record(row) for row in rows]

    def progress(self) -> list[tuple[int, str, int, str]]:
        """Return (number, status, completed rounds, time of the last write) of each run."""
        rows = self._connection.execute(
            "SELECT id, status, rounds_done, updated FROM runs ORDER BY id"
        )
        return [tuple(row) for row in rows]

    def _record(self, row: sqlite3.Row) -> RunRecord:
        values = dict(row)
        try:
            for key in ("config", "versions", "host"):
                values[key] = dict(json.loads(values[key]))
            for key in NUMBERED:
                values[key] = tuple(json.loads(values.get(key, "[]")))
            if values.get("byzantine") is not None:
                values["byzantine"] = tuple(json.loads(values["byzantine"]))
            return RunRecord(**values)
        except (TypeError, ValueError) as error:
            raise ResultsError(f"a run in {self.path} cannot be read: {error}") from error

    def table(self, name: str, run: int) -> list[dict[str, Any]]:
        """Return the rows of one run in one of :data:`TABLES`; empty if an older file lacks it."""
        if name not in TABLES:
            raise ValueError(f"there is no table {name!r} in the results")
        if not self._columns(name):
            return []
        rows = self._connection.execute(f"SELECT * FROM {name} WHERE run = ?", (run,))  # noqa: S608
        return [dict(row) for row in rows]

    def numbers(
        self, name: Literal["rounds", "evaluations"], run: int, columns: Sequence[str]
    ) -> list[tuple[float | None, ...]]:
        """Return some columns of one run, ordered by round; faster than ``table``."""
        cursor = self._connection.cursor()
        cursor.row_factory = None
        query = f"SELECT {', '.join(columns)} FROM {name} WHERE run = ? ORDER BY round"  # noqa: S608
        return cursor.execute(query, (run,)).fetchall()

    def query(self, text: str) -> tuple[list[str], list[tuple[Any, ...]]]:
        """Return the names of the columns of a query, and its rows."""
        cursor = self._connection.cursor()
        cursor.row_factory = None
        cursor.execute(text)
        return [each[0] for each in cursor.description], cursor.fetchall()

    def shares(self, run: int) -> detection_tables.DroppedShares | None:
        """Return the dropped share of each worker of a run by round, or None if not stored."""
        return detection_tables.read_shares(self._connection, run)

    def evidence(self, run: int) -> list[Evidence]:
        """Return the evidence against each worker of a run."""
        return detection_tables.read_evidence(self._connection, run)

    def exclusions(self, run: int) -> list[detection_tables.Exclusion]:
        """Return the rounds in which clients of a run are excluded."""
        return detection_tables.read_exclusions(self._connection, run)

    def absurd(self, run: int) -> npt.NDArray[np.bool_] | None:
        """Return which workers sent absurd values to which servers of a run, (s, m)."""
        return detection_tables.read_absurd(self._connection, run)

    def layers(self, run: int) -> list[tuple[str, int]]:
        """Return the names and sizes of a run's parameters, in the order of the columns."""
        return detection_tables.read_layers(self._connection, run)

    def pictures(self, run: int) -> Iterator[detection_tables.RecordedPicture]:
        """Yield the pictures of a run's matrices."""
        return detection_tables.read_pictures(self._connection, run)

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self.close()
        if isinstance(error, _UNREADABLE):
            with self._named():
                raise error


def latest(records: Iterable[RunRecord]) -> list[RunRecord]:
    """Return the last finished run of each configuration."""
    found: dict[str, RunRecord] = {}
    for record in records:
        if record.status in ENDED:
            found[record.identity] = record
    return list(found.values())


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
