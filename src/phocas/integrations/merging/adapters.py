"""LoRA adapters of PEFT: compute the weight changes that a rule aggregates, and factor the result.

An adapter changes a weight of the model by s B A, where A and B are small matrices of rank r and
s = alpha / r. The matrices A and B of several clients cannot be averaged one by one: the mean of
products is not the product of means, and the ranks of clients may differ. So a rule aggregates the
products s B A. A truncated SVD then factors the result into matrices A and B of a given rank.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phocas.floats import from_bfloat16, to_bfloat16
from phocas.integrations.merging.formats import TensorFile, check_regular, reading, unique
from phocas.integrations.merging.tensors import Tensor, TensorError
from phocas.specs import count

CONFIG = "adapter_config.json"
_FACTOR = re.compile(r"(.+)\.lora_(embedding_)?([AB])((?:\.\w+)?\.weight)?")
_LITERAL = re.compile(r"[\w.]+")
_OTHER_BASE = ("pissa", "olora", "corda", "loftq")
"""Initialisations of PEFT that change the weights of the base model too."""
_SPARE = 8  # further directions of the subspace iteration, which make it converge


def has_factors(names: Iterable[str]) -> bool:
    """Return True if some tensors are matrices of LoRA."""
    return any(".lora_" in name for name in names)


@dataclass(frozen=True, slots=True)
class LowRankProduct(Tensor):
    """The product s B A of a module, computed part by part when it is read.

    Attributes:
        a: the matrix A, of shape (r, inputs); trailing dimensions of a convolution count as inputs.
        b: the matrix B, of shape (outputs, r).
        scale: the factor s.
    """

    a: Tensor
    b: Tensor
    scale: float

    def reader(self) -> Callable[[int, int], NDArray[Any]]:
        """Return a function that multiplies the rows of B for a range of the values."""
        rows, width = self.shape
        with np.errstate(all="ignore"):
            left = _numbers(self.b).reshape(rows, -1) * self.dtype.type(self.scale)
        right = _numbers(self.a).reshape(-1, width)

        def read(begin: int, end: int) -> NDArray[Any]:
            end = min(end, self.columns)
            first = begin // width
            with np.errstate(all="ignore"):
                block: NDArray[Any] = left[first : -(-end // width)] @ right
            return block.reshape(-1)[begin - first * width : end - first * width]

        return read


@dataclass(frozen=True, slots=True)
class Adapter:
    """The configuration of an adapter.

    Attributes:
        path: the file ``adapter_config.json``.
        config: its content.
    """

    path: Path
    config: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path, owner: Path) -> Adapter:
        """Read a configuration; raise TensorError if the products do not follow from it."""
        if not path.exists():
            raise TensorError(f"{owner} needs {CONFIG} beside it, with r and lora_alpha: no file")
        check_regular(path)
        with reading(str(path)):
            config = json.loads(path.read_bytes(), object_pairs_hook=unique)
        if not isinstance(config, dict) or config.get("peft_type") != "LORA":
            raise TensorError(f"{path} must be the configuration of a LoRA adapter: it is not")
        for name in ("use_dora", "lora_bias"):
            if config.get(name):
                raise TensorError(f"{path}: adapters with {name} cannot be merged")
        if str(config.get("init_lora_weights")).startswith(_OTHER_BASE):
            raise TensorError(
                f"{path}: adapters with init_lora_weights={config['init_lora_weights']!r} change"
                " the base model, and cannot be merged"
            )
        for name in ("rank_pattern", "alpha_pattern"):
            found = config.get(name) or {}
            # A regular expression of others may take hours, so that only names are accepted.
            if not isinstance(found, dict) or not all(map(_LITERAL.fullmatch, found)):
                raise TensorError(f"{path}: {name} must have names of modules: got {found!r:.60}")
        return cls(path, config)

    def products(self, tensors: Mapping[str, Tensor], owner: Path) -> dict[str, Tensor]:
        """Return the tensors with one product in place of each pair of matrices."""
        found: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            match = _FACTOR.fullmatch(name)
            if match is None and ".lora_" in name:
                raise TensorError(
                    f"{owner}, key {name!r} must be a matrix A or B of LoRA: it is not"
                )
            if match is None:
                found[name] = tensor
                continue
            module, kind, letter, end = (part or "" for part in match.groups())
            pair = {each: f"{module}.lora_{kind}{each}{end}" for each in "AB"}
            missing = pair["B" if letter == "A" else "A"]
            if missing not in tensors:
                raise TensorError(f"{owner} has {name!r}, and lacks {missing!r}")
            if letter == "A":
                if module in tensors or module in found:
                    raise TensorError(f"{owner} has two tensors for {module!r}")
                a, b = tensors[pair["A"]], tensors[pair["B"]]
                found[module] = self._product(module, a, b, owner)
        return found

    def _product(self, module: str, a: Tensor, b: Tensor, owner: Path) -> LowRankProduct:
        r = a.shape[0] if a.shape else 0
        wanted = self._of(module, "rank_pattern", "r")
        if a.is_integer or b.is_integer or len(a.shape) < 2 or b.shape[1:2] != (r,) or not r:
            raise TensorError(
                f"{owner}, module {module!r} must have matrices A (r, inputs) and B (outputs, r):"
                f" got {a.shape} and {b.shape}"
            )
        if b.columns != b.shape[0] * r:
            raise TensorError(f"{owner}, module {module!r}: B must be a matrix: got {b.shape}")
        if wanted != r:
            raise TensorError(f"{self.path} says rank {wanted!r} for {module!r}: it has rank {r}")
        alpha = self._of(module, "alpha_pattern", "lora_alpha")
        if isinstance(alpha, bool) or not isinstance(alpha, int | float):
            raise TensorError(f"{self.path}: lora_alpha must be a number: got {alpha!r}")
        try:
            scale = float(alpha) / (math.sqrt(r) if self.config.get("use_rslora") else r)
        except OverflowError:
            scale = math.inf
        if not math.isfinite(scale):
            raise TensorError(f"{self.path}: lora_alpha must be finite: got {alpha!r:.20}")
        element = "float64" if "float64" in (a.element, b.element) else "float32"
        shape = (b.shape[0], a.columns // r)
        product = LowRankProduct(
            module, element, shape, np.dtype(element), lambda: np.empty(0), a=a, b=b, scale=scale
        )
        return replace(product, open=lambda: product.reader()(0, product.columns))

    def _of(self, module: str, pattern: str, usual: str) -> Any:
        """Return the value of a pattern for a module, or else that of the whole adapter."""
        for name, value in (self.config.get(pattern) or {}).items():
            if module == name or module.endswith(f".{name}"):
                return value
        return self.config.get(usual)


class AdapterOutput:
    """The output of a merge of adapters: products come in, and matrices of a rank go out.

    Args:
        example: the file of the first adapter.
        adapters: the configurations of all adapters.
        rows: the products and other tensors of each adapter.
        rank: the rank of all modules; by default the lower median of the adapters.
    """

    def __init__(
        self,
        example: TensorFile,
        adapters: Sequence[Adapter],
        rows: Sequence[Mapping[str, Tensor]],
        rank: int | None,
    ) -> None:
        ranks = sorted(
            max(
                (each.a.shape[0] for each in row.values() if isinstance(each, LowRankProduct)),
                default=1,
            )
            for row in rows
        )
        usual = ranks[(len(ranks) - 1) // 2]  # the largest would be any client's to choose
        self.rank = usual if rank is None else count("merge_files", "rank", rank, 1)
        self._ready: dict[str, NDArray[Any]] = {}
        self._products: dict[str, LowRankProduct] = {}
        self._norm, self._kept = 0.0, 0.0
        tensors: dict[str, Tensor] = {}
        for name, tensor in rows[0].items():
            if isinstance(tensor, LowRankProduct):
                a, b = tensor.a, tensor.b
                out, trailing = b.shape[0], b.shape[2:]
                tensors[a.name] = replace(a, shape=(self.rank, *a.shape[1:]))
                tensors[b.name] = replace(b, shape=(out, self.rank, *trailing))
                self._products |= {a.name: tensor, b.name: tensor}
            else:
                tensors[name] = tensor
        self.example = replace(example, tensors=tensors, format="safetensors")
        self.config = {
            **_majority([adapter.config for adapter in adapters]),
            "r": self.rank,
            "lora_alpha": self.rank,
            "use_rslora": False,
            "rank_pattern": {},
            "alpha_pattern": {},
        }

    @property
    def kept(self) -> float:
        """Return the share of the squared norm of the merged products that the rank keeps."""
        return self._kept / self._norm if self._norm else 1.0

    def parts(
        self, taken: Callable[[Tensor], Iterable[NDArray[Any]]], tensor: Tensor
    ) -> Iterator[NDArray[Any]]:
        """Yield the values of a matrix of the output; its product is read once, for A and B."""
        product = self._products.get(tensor.name)
        if product is None:
            yield from taken(tensor)
            return
        if tensor.name not in self._ready:
            whole = np.concatenate([*taken(product)]).reshape(product.shape)
            b, a = factored(whole, self.rank)
            self._norm += float(np.square(whole, dtype=np.float64).sum())
            lengths = [
                np.square(each, dtype=np.float64).sum(axis) for each, axis in ((b, 0), (a, 1))
            ]
            self._kept += float(lengths[0] @ lengths[1])  # columns of B are orthogonal
            self._ready |= {product.b.name: b, product.a.name: a}
        yield _stored(self._ready.pop(tensor.name).reshape(-1), tensor)


def factored(
    product: NDArray[Any], rank: int, most: int = 100
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return B and A of a rank whose product is nearest to a matrix, by a truncated SVD.

    The singular vectors come from a subspace iteration, because a full SVD of a layer with 4096
    inputs and outputs takes a minute. Matrices with NaN or inf give matrices of NaN.

    Args:
        product: the matrix.
        rank: the number of columns of B and of rows of A.
        most: the largest number of iterations.

    >>> b, a = factored(np.outer([1.0, 2.0], [3.0, 0.0, 4.0]), rank=1)
    >>> np.round(b @ a, 6)
    array([[3., 0., 4.],
           [6., 0., 8.]])
    """
    rows, columns = product.shape
    if not np.isfinite(product).all():
        nan = np.full((rows + columns) * rank, np.nan, product.dtype)
        return nan[: rows * rank].reshape(rows, rank), nan[rows * rank :].reshape(rank, columns)
    largest = max(float(np.abs(product).max(initial=0)), np.finfo(product.dtype).tiny)
    matrix = product / product.dtype.type(largest)  # squares of large values must not overflow
    size = min(rank + _SPARE, rows, columns)
    left = np.random.default_rng(0).standard_normal((rows, size)).astype(product.dtype)
    energy = -1.0
    for _ in range(most):
        right = np.linalg.qr(matrix.T @ left)[0]
        left, small = np.linalg.qr(matrix @ right)
        before, energy = energy, float((np.linalg.svd(small)[1][:rank] ** 2).sum())
        if energy - before <= np.finfo(product.dtype).eps * energy:
            break
    u, s, v = np.linalg.svd(small)
    kept = min(rank, size)
    root = np.sqrt(s[:kept] * largest)
    b, a = np.zeros((rows, rank), product.dtype), np.zeros((rank, columns), product.dtype)
    b[:, :kept] = (left @ u[:, :kept]) * root
    a[:kept] = root[:, None] * (v[:kept] @ right.T)
    return b, a


def _majority(configs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the entries that more than half of the configurations have, in sorted order.

    >>> _majority([{"bias": "all"}, {"bias": "none"}, {"bias": "none", "more": 1}])
    {'bias': 'none'}
    """
    votes: Counter[tuple[str, str]] = Counter()
    for config in configs:
        for name, value in config.items():
            words = isinstance(value, list) and all(isinstance(each, str) for each in value)
            votes[name, json.dumps(sorted(value) if words else value, sort_keys=True)] += 1
    found = {name: json.loads(text) for (name, text), n in votes.items() if 2 * n > len(configs)}
    return dict(sorted(found.items()))


def _numbers(tensor: Tensor) -> NDArray[Any]:
    """Return the values of a matrix in the type of its product."""
    values = tensor.open()
    if tensor.element == "bfloat16":
        return from_bfloat16(values)
    return values.astype(np.float64 if tensor.element == "float64" else np.float32)


def _stored(values: NDArray[Any], tensor: Tensor) -> NDArray[Any]:
    """Return numbers as a tensor stores them."""
    if tensor.element == "bfloat16":
        return to_bfloat16(values.astype(np.float32))
    with np.errstate(over="ignore"):
        return values.astype(tensor.dtype)
