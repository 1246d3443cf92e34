"""Merge m files of tensors into one by a rule, a part of a tensor at a time."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, partial
from io import BufferedIOBase
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phocas.files import check_writable, written_atomically
from phocas.integrations.merging.formats import ENDINGS, TensorFile, open_tensors
from phocas.integrations.merging.tensors import Tensor
from phocas.integrations.merging.writers import write
from phocas.rules import Relative, Rule, ShardedAggregation
from phocas.rules.base import Explanation
from phocas.rules.execution import ColumnRange
from phocas.rules.host import HostMatrix
from phocas.rules.inputs import lower_median
from phocas.rules.table import RULES

PART_COLUMNS = 1 << 20
"""Columns that are aggregated at a time: few enough for caches, and a whole number of blocks."""
_EXPONENT = np.uint16(0x7F80)


@dataclass(frozen=True, slots=True, eq=False)
class Merged:
    """The result of a merge.

    Attributes:
        files: the merged files, in this order.
        output: the file with the result.
        columns: the number of floating-point values of each file.
        not_finite: the number of values of the result that are NaN or infinite.
        expected: the share of its values that an honest file loses by chance.
        dropped: the share of each file's values that was dropped, if requested.
        by_tensor: for each tensor, the share of each file's values that was dropped.
        same: pairs of paths that are one file.
        digest: the SHA-256 of the output, if requested.
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
    explain: bool = False,
    digest: bool = False,
    allow_nonfinite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Merged:
    """Aggregate the tensors of m files by name, and write them in the format of the first file.

    Columns are counted over all tensors, in the order of the first file. So the result has the bits
    that the rule gives for the same state dicts in memory. The result of an integer tensor is the
    lower median of the files: the value of the majority, if there is one. The output file appears
    when it is complete, or not at all. A result with NaN or inf is rejected unless it is allowed.

    Args:
        files: the files, .safetensors, .npz, .npy or .pt by their content
        rule: the rule, or its name
        output: the file to write, in the format of the first file
        base: a file that all others started from; the rule aggregates the differences to it
        weights: a number for each file, such as its number of examples
        max_share: the largest share of the total weight that one file may have
        seed: a seed for rules that draw at random
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
    if weights is not None or max_share is not None:
        rule = rule.weighted(weights, max_share)
    rule.check(len(files))
    if rule.whole:
        raise ValueError(f"{rule} needs all values in memory at once: files are merged in parts")
    check_writable(output, "the output")
    everyone = files if base is None else (*files, base)
    for path in everyone:
        if output.exists() and path.exists() and output.samefile(path):
            raise ValueError(f"the output must not be one of the inputs: {path}")
    opened = [open_tensors(path) for path in everyone]
    for other in opened[1:]:
        _check_same(opened[0], other)
    _check_ending(output, opened[0].format)
    rows = [each.tensors for each in opened]
    merge = Merge(rows, len(files), rule if base is None else Relative(rule), seed, progress)
    merge.plan()
    shares = Shares(len(files)) if explain else None
    with written_atomically(output) as file, closing(merge.stream(shares)) as stream:
        write(file, opened[0], _shared_metadata(opened), partial(_taken, stream), output.parent)
        if merge.not_finite and not allow_nonfinite:  # an error here leaves nothing behind
            raise ValueError(_spoilt(merge, rule, files))
        found = _digest(file) if digest else None
    return Merged(
        files=files,
        output=output,
        columns=merge.columns,
        not_finite=merge.not_finite,
        expected=rule.expected(len(files)),
        dropped=None if shares is None else shares.total(),
        by_tensor=None if shares is None else shares.by_tensor(),
        same=_same_files(files),
        digest=found,
    )


def _shared_metadata(files: Sequence[TensorFile]) -> dict[str, str]:
    """Return the metadata that all files have in common."""
    first, *others = (each.metadata for each in files)
    return {k: v for k, v in first.items() if all(each.get(k) == v for each in others)}


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file.

    Args:
        path: the file.

    >>> import os
    >>> file_digest(Path(os.devnull))[:12]
    'e3b0c44298fc'
    """
    with path.open("rb") as file:
        return _digest(file)


def _digest(file: BufferedIOBase) -> str:
    file.flush()
    file.seek(0)
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


def _check_same(first: TensorFile, other: TensorFile) -> None:
    """Raise ValueError if the keys, shapes or types of a file differ from those of the first."""
    missing = [name for name in first.tensors if name not in other.tensors]
    extra = [name for name in other.tensors if name not in first.tensors]
    if missing or extra:
        what = f"lacks {missing[0]!r}" if missing else f"has {extra[0]!r} too"
        raise ValueError(f"all files must have the keys of {first.path}: {other.path} {what}")
    for name, wanted in first.tensors.items():
        got = other.tensors[name]
        if got.shape != wanted.shape:
            adapter = "; LoRA adapters of different ranks cannot be merged" * ("lora_" in name)
            raise ValueError(
                f"{other.path}, key {name!r} has the shape {got.shape}, and {wanted.shape} in"
                f" {first.path}{adapter}"
            )
        if got.element != wanted.element:
            raise ValueError(
                f"{other.path}, key {name!r} is {got.element}, and {wanted.element} in {first.path}"
            )


class Shares:
    """The share of each row's values that was dropped, by tensor and in total."""

    def __init__(self, m: int) -> None:
        self.m = m
        self._lost: dict[str, NDArray[np.float64]] = {}
        self._columns: dict[str, int] = {}

    def add(self, name: str, why: Explanation, columns: int) -> None:
        """Add the shares of some columns of a tensor."""
        before = self._lost.get(name, np.zeros(self.m))
        self._lost[name] = before + why.dropped[: self.m] * columns
        self._columns[name] = self._columns.get(name, 0) + columns

    def by_tensor(self) -> dict[str, NDArray[np.float64]]:
        """Return the shares of each tensor."""
        return {name: lost / self._columns[name] for name, lost in self._lost.items()}

    def total(self) -> NDArray[np.float64]:
        """Return the shares of all values."""
        lost = sum(self._lost.values(), start=np.zeros(self.m))
        return np.asarray(lost / max(1, sum(self._columns.values())))


class Merge:
    """The aggregation of m rows of named tensors, a part of a tensor at a time.

    Args:
        rows: the tensors of each row, by name; a base that all rows started from comes last.
        m: the number of rows without the base.
        rule: the rule; with a base, a :class:`Relative`.
        seed: a seed for rules that draw at random.
        progress: called with the number of bytes done and of all bytes.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Tensor]],
        m: int,
        rule: Rule,
        seed: int | None,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self.rows = rows
        self.m = m
        self.starts: dict[str, int] = {}
        """The first column of each tensor that is not of integers."""
        self.columns = 0
        self.not_finite = 0
        for tensor in rows[0].values():
            if not tensor.is_integer:
                self.starts[tensor.name] = self.columns
                self.columns += tensor.columns
        self.evaluation = ShardedAggregation(rule, len(rows), seed, d=self.columns)
        self._progress = progress
        self._done = 0
        self._size = len(rows) * sum(each.nbytes for each in rows[0].values())

    def plan(self) -> None:
        """Measure the whole rows as the rule requires, such as their distances."""
        while self.evaluation.request is not None:
            self._done = 0
            self.evaluation.answer(
                self.evaluation.partial(matrix, start) for start, matrix in self._measured()
            )

    def parts(self, tensor: Tensor, shares: Shares | None) -> Iterator[NDArray[Any]]:
        """Yield the aggregated values of a tensor, part by part."""
        if tensor.is_integer:
            arrays = [row[tensor.name].open() for row in self.rows[: self.m]]
            for begin in range(0, tensor.columns, PART_COLUMNS):
                part = [array[begin : begin + PART_COLUMNS] for array in arrays]
                self._report(len(self.rows) * part[0].nbytes)
                yield lower_median(part)
            return
        if self.evaluation.rule.whole:
            yield self._at_once(tensor, shares)
            return
        for start, matrix in self._matrices(tensor):
            if shares is None:
                values = self.evaluation.finish(matrix, start)
            else:
                why = self.evaluation.explain(matrix, start)
                shares.add(tensor.name, why, matrix.d)
                values = why.value
            self.not_finite += count_not_finite(values, tensor.element)
            yield values

    def stream(self, shares: Shares | None) -> Generator[NDArray[Any], None, None]:
        """Yield the values of all tensors in parts; compute a part ahead of the caller."""
        everything = (
            part for tensor in self.rows[0].values() for part in self.parts(tensor, shares)
        )
        with ThreadPoolExecutor(1) as pool:
            coming = pool.submit(next, everything, None)
            while (part := coming.result()) is not None:
                coming = pool.submit(next, everything, None)
                yield part

    def _measured(self) -> Iterator[tuple[int, HostMatrix]]:
        """Yield (first column, matrix) to measure: parts of tensors, or all values at once."""
        if self.evaluation.rule.whole:
            yield 0, self._whole
            return
        for tensor in self.rows[0].values():
            if not tensor.is_integer:
                yield from self._matrices(tensor)

    @cached_property
    def _whole(self) -> HostMatrix:
        """All values of all rows, for a rule that needs all columns at once."""
        pieces = [
            ColumnRange(
                start, tensor.columns, [row[name].open() for row in self.rows], tensor.element
            )
            for name, start in self.starts.items()
            for tensor in [self.rows[0][name]]
        ]
        return HostMatrix(pieces, lambda answers: dict(zip(self.starts, answers, strict=True)))

    @cached_property
    def _explained(self) -> Explanation:
        return self.evaluation.explain(self._whole, 0)

    def _at_once(self, tensor: Tensor, shares: Shares | None) -> NDArray[Any]:
        """Return a tensor of the result of a rule that needs all columns at once."""
        values: NDArray[Any] = self._explained.value[tensor.name]
        if shares is not None:
            shares.add(tensor.name, self._explained, tensor.columns)
        self.not_finite += count_not_finite(values, tensor.element)
        return values

    def _matrices(self, tensor: Tensor) -> Iterator[tuple[int, HostMatrix]]:
        """Yield the values that all rows have in one tensor, as matrices of a range of columns.

        Each item is (first column, matrix). Columns are counted over all tensors.
        """
        arrays = [row[tensor.name].open() for row in self.rows]
        start = self.starts[tensor.name]
        begin = 0
        while begin < tensor.columns:
            end = min(tensor.columns, begin + PART_COLUMNS - (start + begin) % PART_COLUMNS)
            rows = [array[begin:end] for array in arrays]
            yield (
                start + begin,
                HostMatrix([ColumnRange(0, end - begin, rows, tensor.element)], _only),
            )
            self._report(sum(row.nbytes for row in rows))
            begin = end

    def _report(self, read: int) -> None:
        self._done += read
        if self._progress is not None:
            self._progress(self._done, self._size)


def _taken(stream: Iterator[NDArray[Any]], tensor: Tensor) -> Iterator[NDArray[Any]]:
    """Yield the parts of the next tensor of a stream."""
    left = tensor.columns
    while left:
        part = next(stream)
        left -= len(part)
        yield part


def _only(answers: list[NDArray[Any]]) -> NDArray[Any]:
    return answers[0]


def rows_not_finite(rows: Sequence[Mapping[str, Tensor]]) -> list[int]:
    """Return the indices of the rows in which a value is NaN or infinite."""
    return [
        index
        for index, row in enumerate(rows)
        if any(
            count_not_finite(tensor.open(), tensor.element)
            for tensor in row.values()
            if not tensor.is_integer
        )
    ]


def count_not_finite(values: NDArray[Any], element: str) -> int:
    """Return how many stored values are NaN or infinite."""
    if element == "bfloat16":
        return int(np.count_nonzero((values & _EXPONENT) == _EXPONENT))
    return values.size - int(np.count_nonzero(np.isfinite(values)))
