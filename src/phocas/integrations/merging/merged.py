"""Merge files, sharded checkpoints or LoRA adapters into one by a rule."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phocas.files import check_writable
from phocas.integrations.merging.adapters import CONFIG, AdapterOutput
from phocas.integrations.merging.formats import ENDINGS
from phocas.integrations.merging.merge import Merge, Shares, rows_not_finite
from phocas.integrations.merging.sources import MergeInput, open_source
from phocas.integrations.merging.tensors import Tensor, TensorError
from phocas.integrations.merging.writers import write_like
from phocas.rules import Relative, Rule
from phocas.rules.table import RULES

HELD_BYTES = 128 << 20
"""Bytes that are read before pages of mapped files are released."""


@dataclass(frozen=True, slots=True, eq=False)
class Merged:
    """The result of a merge.

    Attributes:
        files: the merged files or folders, in this order.
        output: the file or folder with the result.
        columns: the number of floating-point values of each file.
        not_finite: the number of values of the result that are NaN or infinite.
        expected: the share of its values that an honest file loses by chance.
        dropped: the share of each file's values that was dropped, if requested.
        by_tensor: for each tensor, the share of each file's values that was dropped.
        same: pairs of paths that are one file.
        digest: the SHA-256 of the output, if requested; see :func:`content_digest`.
        left_out: the files that were left out, with the reason.
        rank: the rank of merged LoRA adapters.
        kept: the share of the squared norm of the merged products that this rank keeps.
        weights: the weights of the merged files.
        outputs: the files that were written.
    """

    files: tuple[Path, ...]
    output: Path
    columns: int
    not_finite: int
    expected: float
    dropped: NDArray[np.float64] | None = None
    by_tensor: dict[str, NDArray[np.float64]] | None = None
    same: tuple[tuple[Path, Path], ...] = ()
    digest: str | None = None
    left_out: tuple[tuple[Path, str], ...] = ()
    rank: int | None = None
    kept: float | None = None
    weights: tuple[float, ...] | None = None
    outputs: tuple[Path, ...] = ()

    @property
    def names(self) -> list[str]:
        """Return short names of the files, each of them unique."""
        return short_names(self.files)


def merge_files(
    files: Sequence[Path],
    rule: Rule | str,
    output: Path,
    *,
    base: Path | None = None,
    weights: Sequence[float] | None = None,
    max_share: float | None = None,
    seed: int | None = None,
    rank: int | None = None,
    skip_bad: bool = False,
    explain: bool = False,
    digest: bool = False,
    allow_nonfinite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Merged:
    """Aggregate the tensors of m files by name, and write them in the format of the first file.

    Columns are counted over all tensors, in the order of the first file. So the result has the bits
    that the rule gives for the same state dicts in memory. The result of an integer tensor is the
    lower median of the files: the value of the majority, if there is one. The output appears when
    it is complete, or not at all. A result with NaN or inf is rejected unless it is allowed.

    A sharded checkpoint becomes a folder with the same shards and their index. LoRA adapters become
    a folder with an adapter of the given rank: the rule aggregates the products of their matrices.

    Args:
        files: files of tensors, .safetensors, .npz, .npy or .pt by their content; indices of
            sharded checkpoints; or folders with one of them or with an adapter of PEFT
        rule: the rule, or its name
        output: the file or new folder to write, in the format of the first file
        base: a file that all others started from; the rule aggregates the differences to it
        weights: a number for each file, such as its number of examples
        max_share: the largest share of the total weight that one file may have
        seed: a seed for rules that draw at random
        rank: the rank of merged LoRA adapters; by default the lower median of their ranks
        skip_bad: leave out files that cannot be read, or whose tensors differ from those of most
        explain: measure the share of each file's values that is dropped
        digest: compute the SHA-256 of the output
        allow_nonfinite: write the result even if some of its values are NaN or infinite
        progress: called with the number of bytes done and of all bytes

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> files = [Path(folder.name, f"{value}.npy") for value in (1, 2, 900)]
    >>> for file in files:
    ...     np.save(file, np.full(3, float(file.stem)))
    >>> merged = merge_files(files, "median", Path(folder.name, "merged.npy"), explain=True)
    >>> np.load(merged.output), merged.dropped
    (array([2., 2., 2.]), array([1., 0., 1.]))
    >>> folder.cleanup()
    """
    rule = RULES.of(rule, "merge_files")
    files = tuple(files)
    if weights is not None and len(weights) != len(files):
        raise ValueError(f"weights must be one for each of {len(files)} files: got {len(weights)}")
    if rule.whole:
        raise ValueError(f"{rule} needs all values in memory at once: files are merged in parts")
    start = [] if base is None else [open_source(base)]
    opened, left_out = _open_all(files, start, skip_bad=skip_bad)
    sources = list(opened.values())
    kept = None if weights is None else [weights[index] for index in opened]
    rule = _fitting(rule, kept, max_share, len(sources), left_out)
    if rank is not None and sources[0].adapter is None:
        raise ValueError(f"a rank is for LoRA adapters: got rank={rank} for {sources[0].path}")
    everyone = [*sources, *start]
    _check_output(output, everyone)
    read = _Released(everyone, progress)
    rows = [each.tensors for each in everyone]
    merge = Merge(rows, len(sources), rule if base is None else Relative(rule), seed, read)
    merge.plan()
    shares = Shares(len(sources)) if explain else None
    split = _split(sources, rank)
    paths = tuple(source.path for source in sources)
    with closing(merge.stream(shares)) as stream, ExitStack() as written:
        outputs = write_like(everyone, output, split, partial(_taken, stream), written)
        if merge.not_finite and not allow_nonfinite:  # an error here leaves nothing behind
            raise ValueError(_spoilt(merge, rule, paths))
    return Merged(
        files=paths,
        output=output,
        columns=merge.columns,
        not_finite=merge.not_finite,
        expected=rule.expected(len(sources)),
        dropped=None if shares is None else shares.total(),
        by_tensor=None if shares is None else shares.by_tensor(),
        same=_same_files(paths),
        digest=content_digest(outputs) if digest else None,
        left_out=tuple((files[index], why) for index, why in left_out.items()),
        rank=None if split is None else split.rank,
        kept=None if split is None else split.kept,
        weights=None if kept is None else tuple(kept),
        outputs=tuple(outputs),
    )


def _open_all(
    files: Sequence[Path], base: Sequence[MergeInput], *, skip_bad: bool
) -> tuple[dict[int, MergeInput], dict[int, str]]:
    """Return the inputs that can be merged and the reasons against the others, by their indices."""
    opened: dict[int, MergeInput] = {}
    left_out: dict[int, str] = {}
    for index, path in enumerate(files):
        try:
            opened[index] = open_source(path)
        except (TensorError, OSError) as error:
            if not skip_bad:
                raise
            why = error.strerror if isinstance(error, OSError) else None
            left_out[index] = f"{path}: {why.lower()}" if why else str(error)
    layouts = {index: _layout(source) for index, source in opened.items()}
    votes = Counter(layouts.values())
    usual = max(opened, key=lambda index: votes[layouts[index]], default=None)
    if usual is None:
        raise ValueError(f"no file can be merged: {'; '.join(left_out.values())}")
    example = base[0] if base else opened[usual if skip_bad else 0]
    for index, source in list(opened.items()):
        try:
            _check_same(example, source)
        except ValueError as error:
            if not skip_bad:
                raise
            left_out[index] = str(error)
            del opened[index]
    return opened, dict(sorted(left_out.items()))


def _fitting(
    rule: Rule,
    weights: Sequence[float] | None,
    max_share: float | None,
    m: int,
    left_out: Mapping[int, str],
) -> Rule:
    """Return the rule with its weights; raise ValueError if it cannot aggregate m files."""
    try:
        if weights is not None or max_share is not None:
            rule = rule.weighted(weights, max_share)
        rule.check(m)
    except ValueError as error:
        if not left_out:
            raise
        raise ValueError(f"{error}; left out: {'; '.join(left_out.values())}") from None
    return rule


class _Released:
    """Report progress, and release pages of mapped files that were read."""

    def __init__(
        self, sources: Sequence[MergeInput], progress: Callable[[int, int], None] | None
    ) -> None:
        self._sources, self._progress = sources, progress
        self._before = 0

    def __call__(self, done: int, size: int) -> None:
        if not 0 <= done - self._before < HELD_BYTES:
            self._before = done
            for source in self._sources:
                source.release()
        if self._progress is not None:
            self._progress(done, size)


def _check_output(output: Path, sources: Sequence[MergeInput]) -> None:
    """Raise ValueError if the output cannot be written, or is one of the inputs."""
    first = sources[0]
    if not first.is_folder:
        check_writable(output, "the output")
        _check_ending(output, first.files[0].format)
    elif output.suffix.lower() in ENDINGS or (output.exists() and not output.is_dir()):
        raise ValueError(
            f"the output must be a folder, for {first.path} has several files: {output}"
        )
    elif output.is_dir() and any(output.iterdir()):
        raise ValueError(f"the output must be a new or empty folder: {output} has files")
    else:
        check_writable(output / CONFIG, "the output")
    for path in (path for source in sources for path in source.paths):
        if output.exists() and output.samefile(path):
            raise ValueError(f"the output must not be one of the inputs: {path}")


def _split(sources: Sequence[MergeInput], rank: int | None) -> AdapterOutput | None:
    """Return the way from products back to matrices, if the sources are adapters."""
    adapters = [source.adapter for source in sources if source.adapter is not None]
    if sources[0].adapter is None:
        return None
    return AdapterOutput(sources[0].files[0], adapters, [each.tensors for each in sources], rank)


def content_digest(paths: Sequence[Path]) -> str:
    """Return the SHA-256 of a file; of several files, that of their list as sha256sum prints it."""
    if len(paths) == 1:
        return file_digest(paths[0])
    with ThreadPoolExecutor() as pool:
        digests = pool.map(file_digest, paths)
        lines = [f"{digest}  {path.name}\n" for digest, path in zip(digests, paths, strict=True)]
    return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file.

    Args:
        path: the file.

    >>> import os
    >>> file_digest(Path(os.devnull))[:12]
    'e3b0c44298fc'
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _same_files(files: Sequence[Path]) -> tuple[tuple[Path, Path], ...]:
    """Return pairs of paths that are one file."""
    first: dict[tuple[int, int], Path] = {}
    pairs = []
    for path in files:
        state = path.stat()
        seen = first.setdefault((state.st_dev, state.st_ino), path)
        if seen is not path:
            pairs.append((seen, path))
    return tuple(pairs)


def short_names(paths: Sequence[Path]) -> list[str]:
    """Return the shortest end of each path that no other path has.

    >>> short_names([Path("a/model.npz"), Path("b/model.npz"), Path("b/other.npz")])
    ['a/model.npz', 'b/model.npz', 'other.npz']
    """
    parts = [Path(os.path.abspath(path)).parts for path in paths]  # noqa: PTH100 - removes ".."
    found: dict[tuple[str, ...], str] = {}
    depth = 0
    while len(found) < len(set(parts)):
        depth += 1
        ends = Counter(each[-depth:] for each in set(parts))
        for each in parts:
            if ends[each[-depth:]] == 1:
                found.setdefault(each, Path(*each[-depth:]).as_posix())
    return [found[each] for each in parts]


def _check_ending(output: Path, kind: str) -> None:
    """Raise ValueError if the output is named like a file of another format."""
    if ENDINGS.get(output.suffix.lower(), kind) != kind:
        ending = next(ending for ending, each in ENDINGS.items() if each == kind)
        raise ValueError(
            f"the output must be named {ending}, like the format of the first file: got {output}"
        )


def _spoilt(merge: Merge, rule: Rule, files: Sequence[Path]) -> str:
    """Describe, in one line, why a merge is not finite and which files caused it."""
    names = short_names(files)
    bad = [names[index] for index in rows_not_finite(merge.rows[: merge.m])]
    why = f"more files are wrong than {rule} tolerates; NaN or inf are in {', '.join(bad)}"
    if not bad:
        why = "no file has NaN or inf; values overflow, or the base is not finite"
    return (
        f"{merge.not_finite:,} values of the merge are not finite: {why}; nothing was written"
        " (--allow-nonfinite writes the merge as it is)"
    )


def _layout(source: MergeInput) -> tuple[Any, ...]:
    """Return what must be the same in all files: names, shapes and types."""
    return tuple(sorted((name, t.shape, t.element) for name, t in source.tensors.items()))


def _check_same(first: MergeInput, other: MergeInput) -> None:
    """Raise ValueError if the keys, shapes or types of a file differ from those of the first."""
    missing = [name for name in first.tensors if name not in other.tensors]
    extra = [name for name in other.tensors if name not in first.tensors]
    if missing or extra:
        what = f"lacks {missing[0]!r}" if missing else f"has {extra[0]!r} too"
        raise ValueError(f"all files must have the keys of {first.path}: {other.path} {what}")
    for name, wanted in first.tensors.items():
        got = other.tensors[name]
        if got.shape != wanted.shape:
            raise ValueError(
                f"{other.path}, key {name!r} has the shape {got.shape}, and {wanted.shape} in"
                f" {first.path}"
            )
        if got.element != wanted.element:
            raise ValueError(
                f"{other.path}, key {name!r} is {got.element}, and {wanted.element} in {first.path}"
            )


def _taken(stream: Iterator[NDArray[Any]], tensor: Tensor) -> Iterator[NDArray[Any]]:
    """Yield the parts of the next tensor of a stream."""
    left = tensor.columns
    while left:
        part = next(stream)
        left -= len(part)
        yield part
