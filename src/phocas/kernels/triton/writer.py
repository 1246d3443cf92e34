"""A generator of Triton source with the operations that windows are written in.

The generated function works on one column, whose values are scalars, and the compiler maps it over
the columns (``tl.map_elementwise``). Triton's interpreter cannot do this, so for the interpreter
the same text works on vectors.

Constants are written with their type: a bare Python number would be rounded to single precision.
Multiplications and additions are fused only where the text says so, as on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from phocas.kernels.emit import Element

HEADER = "import triton\nimport triton.language as tl\n"
TYPES = {"float": "tl.float32", "double": "tl.float64"}
# bfloat16 is read and written as 16-bit words and converted by code, so that every device rounds as
# the CPU does; the interpreter would truncate.
STORED = {
    "float16": "tl.float16",
    "bfloat16": "tl.uint16",
    "float32": "tl.float32",
    "float64": "tl.float64",
}
_PREDICATES = {
    "olt": "{a} < {b}",
    "ole": "{a} <= {b}",
    "ogt": "{a} > {b}",
    "ult": "~({a} >= {b})",
    "ugt": "~({a} <= {b})",
}


class FunctionWriter:
    """A generator of the source of one Triton function."""

    everywhere = "True"

    def __init__(self, element: Element, *, vectors: bool = False) -> None:
        self.element = element
        self.vectors = vectors
        self.scalar = element.compute
        self.type = TYPES[element.compute]
        self.lines: list[str] = []
        self._indent = "    "
        self._names = 0
        self._constants: dict[str, str] = {}

    def line(self, text: str) -> None:
        """Append one line."""
        self.lines.append(self._indent + text)

    @contextmanager
    def indented(self) -> Iterator[None]:
        """Indent the lines of a block."""
        outer = self._indent
        self._indent += "    "
        yield
        self._indent = outer

    def op(self, text: str) -> str:
        """Append an assignment of an expression and return the name of its value."""
        self._names += 1
        name = f"v{self._names}"
        self.line(f"{name} = {text}")
        return name

    def splat(self, value: float) -> str:
        """Return a constant, which is defined once, before all other lines."""
        text = f"tl.full((), float('{value!r}'), {self.type})"
        return self._constants.setdefault(text, f"c{len(self._constants)}")

    def text(self) -> str:
        """Return the lines, preceded by the constants that they use."""
        constants = [f"    {name} = {text}" for text, name in self._constants.items()]
        return "\n".join(constants + self.lines)

    def add(self, a: str, b: str) -> str:
        """Emit code for a + b."""
        return self.op(f"{a} + {b}")

    def sub(self, a: str, b: str) -> str:
        """Emit code for a - b."""
        return self.op(f"{a} - {b}")

    def mul(self, a: str, b: str) -> str:
        """Emit code for a * b, rounded separately."""
        return self.op(f"{a} * {b}")

    def div(self, a: str, b: str) -> str:
        """Emit code for a / b, rounded to nearest; Triton's own float32 division is less exact."""
        return self.op(f"tl.div_rn({a}, {b})" if self.scalar == "float" else f"{a} / {b}")

    def root(self, a: str) -> str:
        """Emit code for the square root, rounded to nearest."""
        return self.op(f"tl.sqrt_rn({a})" if self.scalar == "float" else f"tl.sqrt({a})")

    def fma(self, a: str, b: str, c: str) -> str:
        """Emit code for a * b + c, rounded once."""
        return self.op(f"tl.fma({a}, {b}, {c})")

    def multiply_add(self, a: str, b: str, c: str) -> str:
        """Emit code for a * b + c, rounded once."""
        return self.fma(a, b, c)

    def scaled_add(self, a: str, power: float, c: str) -> str:
        """Emit code for a * power + c for a power of two."""
        return self.fma(a, self.splat(power), c)

    def compare(self, predicate: str, a: str, b: str) -> str:
        """Emit code for the mask of a comparison; the predicate has LLVM's name."""
        return self.op(_PREDICATES[predicate].format(a=a, b=b))

    def either(self, a: str, b: str) -> str:
        """Emit code for the mask that is set where one of two masks is set."""
        return self.op(f"{a} | {b}")

    def select(self, mask: str, a: str, b: str) -> str:
        """Emit code for a where the mask is set, b elsewhere."""
        return a if mask == self.everywhere else self.op(f"tl.where({mask}, {a}, {b})")

    def where_any(self, mask: str, rare: Callable[[], str], usual: str) -> str:
        """Emit code for the result of ``rare`` if the mask is set anywhere, otherwise ``usual``."""
        name = self.op(usual)
        self.line(f"if tl.max({mask}.to(tl.int32), 0) > 0:" if self.vectors else f"if {mask}:")
        with self.indented():
            self.line(f"{name} = {rare()}")
        return name

    def low(self, a: str, b: str) -> str:
        """Emit code for the smaller of two ordered values, with one instruction."""
        return self.op(f"tl.minimum({a}, {b})")

    def high(self, a: str, b: str) -> str:
        """Emit code for the larger of two ordered values."""
        return self.op(f"tl.maximum({a}, {b})")

    def negate(self, a: str) -> str:
        """Emit code for -a; Triton's own minus is 0 - a, which loses the sign of zero."""
        return self.mul(a, self.splat(-1.0))

    def absolute(self, a: str) -> str:
        """Emit code for |a|."""
        return self.op(f"tl.abs({a})")

    def nan_to_inf(self, a: str) -> str:
        """Emit code that replaces NaN by infinity, so that all values are ordered.

        The minimum of NaN and a number is the number: one instruction, where a select takes two.
        """
        return self.low(a, self.splat(float("inf")))

    def prefetch(self, address: str, distance: int) -> None:
        """Do nothing: a GPU hides latency by working on other columns."""

    def computed(self, stored: str) -> str:
        """Emit code that converts a stored value to the computing type."""
        value = stored
        if self.element.name == "bfloat16":
            value = self.op(f"({value}.to(tl.uint32) << 16).to(tl.float32, bitcast=True)")
        return self.op(f"{value}.to({self.type})")

    def rounded(self, value: str) -> str:
        """Emit code that converts a computed value to the stored type, rounding to nearest even."""
        if self.element.name != "bfloat16":
            return self.op(f"{value}.to({STORED[self.element.name]})")
        words = self.op(f"{value}.to(tl.uint32, bitcast=True)")
        nearest = self.op(f"{words} + (32767 + (({words} >> 16) & 1))")
        # Rounding could carry a NaN's payload into the sign, so NaN is stored as a quiet NaN.
        chosen = self.op(f"tl.where({value} != {value}, {words} | 4194304, {nearest})")
        return self.op(f"({chosen} >> 16).to(tl.uint16)")
