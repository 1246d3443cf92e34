"""A small writer of LLVM IR text: element types, vectors and loops.

Text is written directly because a network of 128 wires is ten thousand instructions, and building
them as objects takes longer than compiling them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from phocas.kernels.target import Target


@dataclass(frozen=True, slots=True)
class Element:
    """A type of stored values, and the type they are computed in."""

    name: str
    size: int
    memory: str
    compute: str

    @property
    def compute_bits(self) -> int:
        """Return the width of one computed value."""
        return 64 if self.compute == "double" else 32


ELEMENTS = {
    "float16": Element("float16", 2, "half", "float"),
    "bfloat16": Element("bfloat16", 2, "i16", "float"),
    "float32": Element("float32", 4, "float", "float"),
    "float64": Element("float64", 8, "double", "double"),
}


def constant(value: float, kind: str) -> str:
    """Write a constant, rounded to its type; LLVM wants the bits of the double that it equals."""
    if kind == "float":
        (value,) = struct.unpack("f", struct.pack("f", value))
    return "0x" + struct.pack(">d", value).hex().upper()


class Function:
    """The body of one function over vectors of ``lanes`` computed values."""

    def __init__(self, target: Target, element: Element, lanes: int | None = None) -> None:
        self.element = element
        self.target = target
        self.lanes = lanes or target.vector_bits // element.compute_bits
        self.scalar = element.compute
        self.vector = f"<{self.lanes} x {self.scalar}>"
        self.mask = f"<{self.lanes} x i1>"
        self.lines: list[str] = []
        self._names = 0
        self.block = "entry"

    # -- plumbing ------------------------------------------------------------------------------
    def name(self) -> str:
        """Return a fresh value name."""
        self._names += 1
        return f"%v{self._names}"

    def line(self, text: str) -> None:
        """Write one line."""
        self.lines.append(text)

    def op(self, text: str) -> str:
        """Write an instruction and return the name of its result."""
        self._names += 1
        name = f"%v{self._names}"
        self.lines.append(f"  {name} = {text}")
        return name

    def label(self, name: str) -> None:
        """Begin a basic block."""
        self.lines.append(f"{name}:")
        self.block = name

    @contextmanager
    def loop(self, start: str, stop: str, step: int = 1) -> Iterator[Loop]:
        """Write ``for i in range(start, stop, step)``; carried values go through ``Loop.carry``."""
        self._names += 1
        loop = Loop(self, f"{self._names}", start, stop, step)
        yield loop
        loop.close()

    # -- values --------------------------------------------------------------------------------
    def splat(self, value: float) -> str:
        """Return a vector constant."""
        return f"splat ({self.scalar} {constant(value, self.scalar)})"

    def broadcast(self, scalar: str) -> str:
        """Return a vector whose lanes all hold the scalar."""
        first = self.op(f"insertelement {self.vector} poison, {self.scalar} {scalar}, i32 0")
        zero = f"<{self.lanes} x i32> zeroinitializer"
        return self.op(f"shufflevector {self.vector} {first}, {self.vector} poison, {zero}")

    def add(self, a: str, b: str) -> str:
        """Return a + b."""
        return self.op(f"fadd {self.vector} {a}, {b}")

    def sub(self, a: str, b: str) -> str:
        """Return a - b."""
        return self.op(f"fsub {self.vector} {a}, {b}")

    def mul(self, a: str, b: str) -> str:
        """Return a * b, rounded on its own: contraction would make bits depend on the host."""
        return self.op(f"fmul {self.vector} {a}, {b}")

    def fma(self, a: str, b: str, c: str) -> str:
        """Return a * b + c, rounded once, which hosts without such an instruction do slowly."""
        v = self.vector
        suffix = f"v{self.lanes}f{self.element.compute_bits}"
        return self.op(f"call {v} @llvm.fma.{suffix}({v} {a}, {v} {b}, {v} {c})")

    def scaled_add(self, a: str, power: float, c: str) -> str:
        """Return a * power + c for a power of two: the product is exact, fused or not."""
        if self.target.has_fma:
            return self.fma(a, self.splat(power), c)
        return self.add(self.mul(a, self.splat(power)), c)

    def compare(self, predicate: str, a: str, b: str) -> str:
        """Return the mask of a comparison."""
        return self.op(f"fcmp {predicate} {self.vector} {a}, {b}")

    def select(self, mask: str, a: str, b: str) -> str:
        """Return a where the mask is set, b elsewhere."""
        return self.op(f"select {self.mask} {mask}, {self.vector} {a}, {self.vector} {b}")

    def low(self, a: str, b: str) -> str:
        """Return the smaller of two ordered values: one ``vminps``."""
        return self.select(self.op(f"fcmp nnan olt {self.vector} {a}, {b}"), a, b)

    def high(self, a: str, b: str) -> str:
        """Return the larger, such that (low, high) is an exchange even of -0.0 and 0.0."""
        return self.select(self.op(f"fcmp nnan ogt {self.vector} {b}, {a}"), b, a)

    def nan_to_inf(self, a: str) -> str:
        """Make NaN the largest value of all, so that every value is ordered."""
        # One instruction: x < inf is false for NaN.
        return self.select(self.compare("olt", a, self.splat(math.inf)), a, self.splat(math.inf))

    # -- memory --------------------------------------------------------------------------------
    def pointer(self, table: str, index: str | int) -> str:
        """Load the pointer at an index of a table of pointers."""
        slot = self.op(f"getelementptr ptr, ptr {table}, i64 {index}")
        return self.op(f"load ptr, ptr {slot}")

    def at(self, base: str, offset: str, kind: str | None = None) -> str:
        """Return the address of an element."""
        return self.op(f"getelementptr {kind or self.element.memory}, ptr {base}, i64 {offset}")

    def load(self, address: str) -> str:
        """Load a vector of stored values and convert it to the computing type."""
        memory = self.element.memory
        raw = f"<{self.lanes} x {memory}>"
        value = self.op(f"load {raw}, ptr {address}, align {self.element.size}")
        if self.element.name == "bfloat16":
            wide = self.op(f"zext {raw} {value} to <{self.lanes} x i32>")
            bits = self.op(f"shl <{self.lanes} x i32> {wide}, splat (i32 16)")
            return self.op(f"bitcast <{self.lanes} x i32> {bits} to {self.vector}")
        if memory != self.scalar:
            return self.op(f"fpext {raw} {value} to {self.vector}")
        return value

    def store(self, value: str, address: str) -> None:
        """Convert a vector to the stored type, to nearest even, and store it."""
        memory = self.element.memory
        raw = f"<{self.lanes} x {memory}>"
        if self.element.name == "bfloat16":
            value = self._round_bfloat16(value)
        elif memory != self.scalar:
            value = self.op(f"fptrunc {self.vector} {value} to {raw}")
        self.line(f"  store {raw} {value}, ptr {address}, align {self.element.size}")

    def _round_bfloat16(self, value: str) -> str:
        words = f"<{self.lanes} x i32>"
        bits = self.op(f"bitcast {self.vector} {value} to {words}")
        odd = self.op(f"lshr {words} {bits}, splat (i32 16)")
        odd = self.op(f"and {words} {odd}, splat (i32 1)")
        bias = self.op(f"add {words} {odd}, splat (i32 32767)")
        rounded = self.op(f"add {words} {bits}, {bias}")
        # Rounding could carry a NaN's payload into the sign; a quiet NaN is kept as it is.
        quiet = self.op(f"or {words} {bits}, splat (i32 4194304)")
        nan = self.compare("uno", value, value)
        chosen = self.op(f"select {self.mask} {nan}, {words} {quiet}, {words} {rounded}")
        short = self.op(f"lshr {words} {chosen}, splat (i32 16)")
        return self.op(f"trunc {words} {short} to <{self.lanes} x i16>")


class Loop:
    """A counted loop being written: its index, and values carried from turn to turn."""

    def __init__(self, function: Function, tag: str, start: str, stop: str, step: int) -> None:
        self.function = function
        self.tag = tag
        self.stop = stop
        self.step = step
        self.index = f"%i{tag}"
        self._carried: list[tuple[str, str, str, str]] = []
        self._start = start
        self._entry = function.block
        function.line(f"  br label %head{tag}")
        function.label(f"head{tag}")
        self._phi_at = len(function.lines)
        more = function.op(f"icmp slt i64 {self.index}, {stop}")
        function.line(f"  br i1 {more}, label %body{tag}, label %end{tag}")
        function.label(f"body{tag}")

    def carry(self, kind: str, initial: str) -> str:
        """Return a value that starts as ``initial`` and is replaced with ``update``."""
        name = self.function.name()
        self._carried.append((kind, initial, name, ""))
        return name

    def update(self, carried: str, value: str) -> None:
        """Set what a carried value becomes in the next turn."""
        self._carried = [
            (kind, initial, name, value if name == carried else old)
            for kind, initial, name, old in self._carried
        ]

    def close(self) -> None:
        """Write the end of the loop and its phi nodes."""
        function = self.function
        following = function.op(f"add nsw i64 {self.index}, {self.step}")
        latch = function.block
        function.line(f"  br label %head{self.tag}")
        phis = [
            f"  {self.index} = phi i64 [ {self._start}, %{self._entry} ], [ {following}, %{latch} ]"
        ]
        phis += [
            f"  {name} = phi {kind} [ {initial}, %{self._entry} ], [ {value}, %{latch} ]"
            for kind, initial, name, value in self._carried
        ]
        function.lines[self._phi_at : self._phi_at] = phis
        function.label(f"end{self.tag}")
