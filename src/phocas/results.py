"""Results of runs as tables for pandas or polars: ``phocas.results.load("phocas.sqlite").runs``."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from phocas.experiments.results import Results, RunRecord
from phocas.notebook import html_table
from phocas.specs import one_of

__all__ = ["LoadedResults", "load"]

Frame = Literal["pandas", "polars", "rows"]
"""The form of a table: a data frame, or a list with a dictionary for each row."""
_FRAMES: tuple[Frame, ...] = ("pandas", "polars")
_SHOWN = ("run", "rule", "attack", "split", "seed", "status", "rounds_done", "final_accuracy")
_MOST = 20  # runs that a notebook shows
_ROUNDS = """
SELECT r.*, e.loss AS test_loss, e.top1 AS accuracy, e.top3, e.seconds AS evaluation_seconds
FROM rounds r LEFT JOIN evaluations e USING (run, round)
"""
_BEFORE = """
SELECT run, round, loss AS test_loss, top1 AS accuracy, top3, seconds AS evaluation_seconds
FROM evaluations WHERE round = 0
"""


def load(path: str | Path, *, frame: Frame | None = None) -> LoadedResults:
    """Return the tables of a results file, which are read when they are first used.

    Args:
        path: the results file.
        frame: the form of the tables; None: that of the installed package, pandas before polars,
            or ``"rows"``.

    Raises:
        ValueError: the package of the frame is not installed, or the file is no results file.
        FileNotFoundError: there is no such file.

    >>> import tempfile
    >>> from phocas.experiments.results import Results
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with Results(Path(folder) / "r.sqlite"):
    ...         pass
    ...     load(Path(folder) / "r.sqlite", frame="rows").runs
    []
    """
    chosen = _installed() if frame is None else frame
    one_of("load", "frame", chosen, get_args(Frame))
    if chosen != "rows" and importlib.util.find_spec(chosen) is None:
        raise ValueError(
            f"frame={chosen!r} needs {chosen}: pip install {chosen}, or take frame='rows'"
        )
    with Results(Path(path), read=True):
        return LoadedResults(Path(path), chosen)


def _installed() -> Frame:
    """Return the package that is in use already, or else one that is installed, or rows."""
    for found in (sys.modules.__contains__, importlib.util.find_spec):
        for name in _FRAMES:
            if found(name):
                return name
    return "rows"


@dataclass(frozen=True)
class LoadedResults:
    """The tables of a results file; each is read once, when it is first used.

    Attributes:
        path: the results file.
        frame: the form of the tables.

    >>> LoadedResults.runs.__doc__
    'Return one row for each run: its number ``run``, its settings and its outcome.'
    """

    path: Path
    frame: Frame

    @cached_property
    def runs(self) -> Any:
        """Return one row for each run: its number ``run``, its settings and its outcome."""
        return as_frame(columns_of([_plain(record) for record in self._records]), self.frame)

    @cached_property
    def rounds(self) -> Any:
        """Return one row for each round of each run, with the evaluation after it, if any."""
        with self._reading() as results:
            names, rows = results.query(_ROUNDS)
            known, before = results.query(_BEFORE)  # the first round
            places = [known.index(name) if name in known else None for name in names]
            rows += [tuple(None if at is None else row[at] for at in places) for row in before]
            return as_frame(_transposed(names, rows), self.frame)

    @cached_property
    def workers(self) -> Any:
        """Return one row for each worker at each evaluation: the share of it that was dropped.

        ``byzantine`` is what a simulation knows, else None; ``flagged`` is as of the last round.
        """
        with self._reading() as results:
            names, rows = results.query("SELECT run, round, worker, share AS dropped FROM dropped")
            columns: dict[str, Sequence[Any]] = _transposed(names, rows)
            run, worker = (np.array(columns[name], np.int64) for name in ("run", "worker"))
            size = int(worker.max(initial=0)) + 1

            def among(pairs: list[tuple[int, int]]) -> npt.NDArray[np.bool_]:
                return np.isin(run * size + worker, [each * size + who for each, who in pairs])

            records = self._records
            byzantine = among([(each.id, who) for each in records for who in each.byzantine or ()])
            unknown = np.isin(run, [each.id for each in records if each.byzantine is None])
            flags = byzantine.astype(object)
            flags[unknown] = None
            columns["byzantine"] = flags.tolist()
            flagged = among([(each.id, who) for each in records for who in each.suspects])
            columns["flagged"] = flagged.tolist()
            return as_frame(columns, self.frame)

    @cached_property
    def _records(self) -> list[RunRecord]:
        with self._reading() as results:
            return results.runs()

    @contextmanager
    def _reading(self) -> Iterator[Results]:
        """Open the file; no garbage is collected meanwhile, which would take half of the time."""
        collecting = gc.isenabled()
        gc.disable()
        try:
            with Results(self.path, read=True) as results:
                yield results
        finally:
            if collecting:
                gc.enable()

    def __repr__(self) -> str:
        return f"LoadedResults({str(self.path)!r}, {len(self._records)} runs)"

    def _repr_html_(self) -> str:
        """Return the last runs as a small HTML table, which notebooks show."""
        rows = [_plain(record) for record in self._records[-_MOST:]]
        caption = f"{self.path}: {len(self._records)} runs"
        if len(rows) < len(self._records):
            caption += f", the last {len(rows)}"
        return html_table(_SHOWN, [[row.get(key) for key in _SHOWN] for row in rows], caption)


def _plain(record: RunRecord) -> dict[str, Any]:
    """Return a run as one row: its outcome, and all settings; mappings as JSON."""
    row: dict[str, Any] = {"run": record.id}
    for field in fields(record):
        if field.name not in ("id", "config", "versions", "host"):
            value = getattr(record, field.name)
            row[field.name] = list(value) if isinstance(value, tuple) else value
    for key, value in record.config.items():
        row.setdefault(key, json.dumps(value) if isinstance(value, dict) else value)
    return row


def columns_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return rows as columns; a key that a row lacks is None there."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def _transposed(names: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> dict[str, Any]:
    columns: Sequence[Sequence[Any]] = list(zip(*rows, strict=True)) if rows else [()] * len(names)
    return dict(zip(names, columns, strict=True))


def as_frame(columns: Mapping[str, Sequence[Any]], frame: Frame) -> Any:
    """Return columns as a data frame of pandas or polars, or as a list of rows."""
    if frame == "rows":
        names = list(columns)
        return [dict(zip(names, row)) for row in zip(*columns.values(), strict=True)]  # noqa: B905
    package = importlib.import_module(frame)
    arrays = {name: _array(column) for name, column in columns.items()}
    if frame == "pandas":
        return package.DataFrame(arrays)
    return package.DataFrame(arrays, strict=False, nan_to_null=True)


def _array(column: Sequence[Any]) -> Any:
    """Return numbers as an array, which frames take at once, and other values as a list."""
    kinds = set(map(type, column))
    if kinds and kinds <= {float, type(None)}:
        return np.array(column, np.float64)  # None becomes NaN
    return np.array(column, np.int64) if kinds == {int} else list(column)
