"""Fetch a data set: try its origins in turn, check what they bring, keep it as a whole."""

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
    """Where a data set is now, what it came from (None: it was there), what was tried in vain.

    Attributes:
        home: the folder that has it.
        origin: what it came from, None if it was there.
        seconds: how long that took.
        failures: what was tried in vain, and why.

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
    """Bring what the folder lacks of a data set and check everything that is there, by digest.

    Args:
        spec: the data set.
        folder: the data folder, by default as :func:`data_folder` says.
        sources: only origins of these kinds (``mirror``, ``pypi``, ``npm``, ``apt``), in this
            order; a URL stands for a mirror of your own.
        progress: show bars on standard error; by default if that is a terminal.
    """
    start = time.perf_counter()
    folder = data_folder(folder)
    home = folder / spec.name
    origins = _chosen(spec, sources)
    try:
        home.mkdir(parents=True, exist_ok=True)
        with (
            locked(home),
            _bars(show=sys.stderr.isatty() if progress is None else progress) as bars,
        ):
            for left_over in home.glob(f"{SCRATCH}*"):  # of a process that was killed
                shutil.rmtree(left_over, ignore_errors=True)
            lacking = problems(home, spec.files, thorough=True)
            if not lacking:
                return Fetched(home)
            failures: list[str] = []
            for origin in origins:
                try:
                    contents = _brought(spec, origin, [kept.name for kept in lacking], home, bars)
                except OriginError as error:
                    failures.append(f"{origin.kind}: {error}")
                    continue
                for kept in lacking:
                    write_atomically(home / kept.name, contents[kept.name])
                shutil.rmtree(home / ".partial", ignore_errors=True)
                problems(home, spec.files)  # remember the digests for the next load
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


def _brought(
    spec: Published, origin: Origin, lacking: list[str], home: Path, bars: Progress
) -> dict[str, bytes]:
    """Return the lacking files from one origin, all of them checked, or raise OriginError."""
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
    """Return the origins to try."""
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


def _bars(*, show: bool) -> Progress:
    from rich import progress as rich_progress  # noqa: PLC0415  not needed to load what is there
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
