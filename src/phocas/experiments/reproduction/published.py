"""Studies of other authors: their figures as data, our runs of the same settings, and verdicts.

A study is a TOML file with tables. A cell of a table has the settings of the file, of the table, of
its column and of its row, in this order; later ones replace earlier ones. In a setting of text,
``{key}`` stands for the value of the key in an earlier layer, or for a number that a layer gives
beside the settings, such as ``f``. If ``attack`` is a list, the cell is that of the worst attack. A
column or row with ``not_run`` has no runs, and says why. The table ``notes`` has the reasons of
differences, by the name of the cell: ``"table-2: iid, Krum" = "..."``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from phocas.experiments.attack_benchmark import Accuracy, Cell, CellResult
from phocas.experiments.config import ConfigError, RunConfig, make_config, read_toml
from phocas.experiments.reproduction.tasks import task_path
from phocas.experiments.reproduction.verdicts import student
from phocas.specs import unknown

Verdict = Literal["agrees", "better", "worse", "not decided", "not run"]
VERDICTS: tuple[Verdict, ...] = ("agrees", "better", "worse", "not decided", "not run")
_FIGURE = re.compile(r"^(\d+(?:\.\d+)?)(?: \+- (\d+(?:\.\d+)?))?$")


class _TableFile(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    title: str
    settings: dict[str, Any] = Field(default_factory=dict)
    columns: list[dict[str, Any]] = Field(min_length=1)
    rows: list[dict[str, Any]] = Field(min_length=1)


class _PublishedStudyFile(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    title: str
    source: str
    percent: bool
    """Whether published figures are in percent."""
    seeds: int = Field(ge=1)
    """Number of seeds of the published figures."""
    tolerance: float = 0.005
    heat_map: bool = False
    settings: dict[str, Any]
    scale: dict[str, dict[str, Any]] = Field(default={"paper": {}})
    tables: list[_TableFile] = Field(min_length=1)
    notes: dict[str, str] = Field(default_factory=dict)


@dataclass(frozen=True)
class PublishedCell:
    """One cell of a published table.

    Attributes:
        row: name of the row.
        column: name of the column.
        published: the published accuracy, from 0 to 1; None if there is none.
        cell: our runs; None if they cannot be run.
        reason: why there are no runs.
        note: why our accuracy differs, if that is known.
    """

    row: str
    column: str
    published: Accuracy | None
    cell: Cell | None
    reason: str = ""
    note: str = ""


@dataclass(frozen=True, eq=False)
class PublishedTable:
    """One published table.

    Attributes:
        name: short name.
        title: what the table is about.
        rows: names of the rows.
        columns: names of the columns.
        cells: the cells, row by row.
    """

    name: str
    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[PublishedCell, ...]


@dataclass(frozen=True)
class PublishedStudy:
    """The tables of one publication.

    Attributes:
        title: title of the study.
        scale: name of the scale.
        source: where the figures are published.
        tolerance: largest difference that counts as agreement, in accuracy.
        heat_map: whether the tables are drawn as heat maps.
        repeats: number of seeds of our runs.
        tables: the tables.
    """

    title: str
    scale: str
    source: str
    tolerance: float
    heat_map: bool
    repeats: int
    tables: tuple[PublishedTable, ...]

    def runs(self) -> list[RunConfig]:
        """Return all distinct runs; all first seeds come before the second ones."""
        every = [cell.cell.configs() for table in self.tables for cell in table.cells if cell.cell]
        found: dict[str, RunConfig] = {}
        for seed in range(self.repeats):
            for configs in every:
                for config in configs:
                    if config.seed == seed:
                        found.setdefault(config.settings_digest(), config)
        return list(found.values())


def is_published(task: str) -> bool:
    """Return whether a task of ``phocas reproduce`` is a study of other authors."""
    return "tables" in read_toml(task_path(task))


def plan_published(
    task: str,
    *,
    scale: str = "paper",
    repeats: int | None = None,
    only: Sequence[str] = (),
    places: Mapping[str, Any] | None = None,
) -> PublishedStudy:
    """Read a study.

    Args:
        task: the name of a study of the package, or the path of a TOML file.
        scale: the scale of the file to use.
        repeats: number of seeds; by default that of the publication.
        only: names of the tables to include; by default all.
        places: settings that change no result, such as ``results`` and ``data_dir``.

    >>> study = plan_published("byzfl", repeats=1)
    >>> [table.name for table in study.tables], len(study.tables[0].cells)
    (['heat-map'], 32)
    """
    path = task_path(task)
    try:
        file = _PublishedStudyFile.model_validate(read_toml(path))
    except ValidationError as error:
        raise ConfigError(
            "\n".join(
                f"{path}: {'.'.join(map(str, problem['loc']))}: {problem['msg']}"
                for problem in error.errors()
            )
        ) from None
    if scale not in file.scale:
        raise ConfigError(unknown("scale", scale, file.scale))
    titles = [
        f"{table.name}: {row['name']}, {column['name']}"
        for table in file.tables
        for row in table.rows
        for column in table.columns
    ]
    for name in file.notes:
        if name not in titles:
            raise ConfigError(f"{path}: notes: {unknown('cell', name, titles)}")
    names = [table.name for table in file.tables]
    for name in only:
        if name not in names:
            raise ConfigError(unknown("table", name, names))
    common = {**file.settings, **(places or {})}
    number = file.seeds if repeats is None else repeats
    tables = tuple(
        _table(table, common, file.scale[scale], file, number, str(path))
        for table in file.tables
        if not only or table.name in only
    )
    return PublishedStudy(
        file.title, scale, file.source, file.tolerance, file.heat_map, number, tables
    )


def _table(
    table: _TableFile,
    common: Mapping[str, Any],
    scale: Mapping[str, Any],
    file: _PublishedStudyFile,
    repeats: int,
    source: str,
) -> PublishedTable:
    cells = []
    for row in table.rows:
        own = dict(row)
        figures = own.pop("published", [])
        if len(figures) != len(table.columns):
            raise ConfigError(
                f"{source}: row {own.get('name')!r} of {table.name} needs one published figure for"
                f" each of {len(table.columns)} columns: got {len(figures)}"
            )
        for column, text in zip(table.columns, figures, strict=True):
            layers = [common, table.settings, column, own, scale]
            reason = next((each["not_run"] for each in layers if "not_run" in each), "")
            title = f"{table.name}: {own['name']}, {column['name']}"
            cells.append(
                PublishedCell(
                    own["name"],
                    column["name"],
                    _figure(text, file, source),
                    None if reason else _cell(_merged(layers), title, repeats, source),
                    reason,
                    file.notes.get(title, ""),
                )
            )
    rows, columns = (tuple(each["name"] for each in part) for part in (table.rows, table.columns))
    return PublishedTable(table.name, table.title, rows, columns, tuple(cells))


def _figure(text: str, file: _PublishedStudyFile, source: str) -> Accuracy | None:
    """Read ``93.20 +- 0.21``, or ``-`` for nothing."""
    if text == "-":
        return None
    found = _FIGURE.match(text)
    if found is None:
        raise ConfigError(f"{source}: a published figure is '93.2 +- 0.2' or '-': got {text!r}")
    unit = 0.01 if file.percent else 1.0
    mean, deviation = found.groups()
    spread = None if deviation is None else float(deviation) * unit
    return Accuracy(float(mean) * unit, spread, file.seeds)


def _merged(layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings of a cell: later layers replace earlier ones, and may quote them.

    >>> _merged([{"rule": "krum:b={f}"}, {"f": 2}, {"rule": "nnm:b={f}|{rule}"}])
    {'rule': 'nnm:b=2|krum:b=2', 'f': 2}
    """
    known: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            before = str(known.get(key, ""))
            if isinstance(value, str):
                known[key] = value.replace(f"{{{key}}}", before)
            else:
                known[key] = value
    numbers = {key: value for key, value in known.items() if isinstance(value, int)}

    def filled(value: Any) -> Any:
        if isinstance(value, list):
            return [filled(each) for each in value]
        if isinstance(value, str):
            for key, number in numbers.items():
                value = value.replace(f"{{{key}}}", str(number))
        return value

    return {key: filled(value) for key, value in known.items()}


def _cell(settings: dict[str, Any], title: str, repeats: int, source: str) -> Cell:
    f = int(settings.pop("f", 0))
    attacks = settings.pop("attack", "none")
    settings["name"] = title
    runs = {
        attack: [
            make_config({**settings, "attack": attack, "seed": seed}, source)
            for seed in range(repeats)
        ]
        for attack in (attacks if isinstance(attacks, list) else [attacks])
    }
    some = next(iter(runs.values()))[0]
    return Cell(some.rule, some.split, f, {"": runs})


def judge(cell: PublishedCell, found: CellResult | None, tolerance: float) -> Verdict:
    """Compare our accuracy with the published one.

    They agree if they differ by at most ``tolerance``. Ours is better or worse if the 95% interval
    of the difference (Welch) excludes 0; for a single seed, the standard deviation of the other
    side is used. Otherwise the comparison is not decided.
    """
    theirs = cell.published
    if found is None or theirs is None:
        return "not run"
    ours = found.accuracy
    difference = ours.mean - theirs.mean
    if abs(difference) <= tolerance + 1e-9:
        return "agrees"
    half = _half_width(ours, theirs)
    if half is None or abs(difference) <= half:
        return "not decided"
    return "better" if difference > 0 else "worse"


def _half_width(ours: Accuracy, theirs: Accuracy) -> float | None:
    """Return half of the 95% interval of the difference of two means, None if not known."""
    sides = []
    for side, other in ((ours, theirs), (theirs, ours)):
        deviation = side.deviation if side.deviation is not None else other.deviation
        if deviation is None:
            return None
        sides.append((deviation**2 / side.seeds, max(side.seeds - 1, 1)))
    total = sum(square for square, _ in sides)
    if total == 0:
        return 0.0
    freedom = total**2 / sum(square**2 / degrees for square, degrees in sides)
    whole = max(1, math.floor(freedom))
    return student(whole) * math.sqrt(total)
