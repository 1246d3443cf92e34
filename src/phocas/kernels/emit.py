"""A small generator of LLVM IR text: element types, vectors and loops.

Text is generated directly because a network of 128 wires is ten thousand instructions. Building
them as objects takes longer than compiling them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from phocas.floats import FORMATS
from phocas.kernels.target import Target


@dataclass(frozen=True, slots=True)
class Element:
    """A type of stored values, and the type that they are computed in.

    Attributes:
        name: NumPy's or torch's name of the stored type.
        size: bytes of a stored value.
        memory: LLVM's stored type.
        compute: LLVM's type for computation.
    """

    name: str
    size: int
    memory: str
    compute: str

    @property
    def compute_bits(self) -> int:
        """Return the width of a computed value in bits."""
        return 64 if self.compute == "double" else 32

    def wide(self) -> Element:
        """Return the same stored type, computed in double precision."""
        return replace(self, compute="double")


_LLVM = {"float16": "half", "bfloat16": "i16", "float32": "float", "float64": "double"}
ELEMENTS = {
    name: Element(name, each.bits // 8, _LLVM[name], _LLVM[each.work.name])
    for name, each in FORMATS.items()
}


def constant(value: float, kind: str) -> str:
    """Return a constant, rounded to its type; LLVM expects the bits of the equal double."""
    if kind == "float":
        (value,) = struct.unpack("f", struct.pack("f", value))
    return "0x" + struct.pack(">d", value).hex().upper()


class Vectors(Protocol):
    """The operations on vectors that a back end, for CPU or GPU, generates code for.

    Arguments and results are names of values in the generated code. Each operation emits code and
    returns the name of the result. The reduction of a column by a window is written once, with
    these operations.
    """

    element: Element
    scalar: str
    everywhere: str

    def splat(self, value: float) -> str:
        """Return a constant in every lane."""

    def add(self, a: str, b: str) -> str:
        """Emit code for a + b."""

    def sub(self, a: str, b: str) -> str:
        """Emit code for a - b."""

    def mul(self, a: str, b: str) -> str:
        """Emit code for a * b, rounded separately."""

    def div(self, a: str, b: str) -> str:
        """Emit code for a / b, rounded to nearest."""

    def fma(self, a: str, b: str, c: str) -> str:
        """Emit code for a * b + c, rounded once."""

    def multiply_add(self, a: str, b: str, c: str) -> str:
        """Emit code for a * b + c, rounded once if the target can fuse, else twice."""

    def scaled_add(self, a: str, power: float, c: str) -> str:
        """Emit code for a * power + c for a power of two."""

    def compare(self, predicate: str, a: str, b: str) -> str:
        """Emit code for the mask of a comparison; the predicate has LLVM's name."""

    def either(self, a: str, b: str) -> str:
        """Emit code for the mask that is set where one of two masks is set."""

    def select(self, mask: str, a: str, b: str) -> str:
        """Emit code for a where the mask is set, b elsewhere."""

    def where_any(self, mask: str, rare: Callable[[], str], usual: str) -> str:
        """Emit code for the result of ``rare`` if the mask is set anywhere, otherwise ``usual``."""

    def low(self, a: str, b: str) -> str:
        """Emit code for the smaller of two ordered values."""

    def high(self, a: str, b: str) -> str:
        """Emit code for the larger of two ordered values."""

    def negate(self, a: str) -> str:
        """Emit code for -a."""

    def absolute(self, a: str) -> str:
        """Emit code for |a|."""

    def nan_to_inf(self, a: str) -> str:
        """Emit code that replaces NaN by infinity."""

    def prefetch(self, address: str, distance: int) -> None:
        """Emit code that prefetches the cache line ``distance`` bytes further on."""


class Function:
    """A generator of the LLVM IR of one function, which works on vectors of ``lanes`` values."""

    everywhere = "splat (i1 true)"

    def __init__(self, target: Target, element: Element, lanes: int | None = None) -> None:
        self.element = element
        self.target = target
        self.scalar = element.compute
        self.set_lanes(lanes or target.vector_bits // element.compute_bits)
        self.lines: list[str] = []
        self._names = 0
        self.block = "entry"

    def set_lanes(self, lanes: int) -> None:
        """Use vectors of ``lanes`` values from here on."""
        self.lanes = lanes
        self.vector = f"<{lanes} x {self.scalar}>"
        self.mask = f"<{lanes} x i1>"
        self.words = f"<{lanes} x i32>"
        self.suffix = f"v{lanes}f{self.element.compute_bits}"

    # -- plumbing ------------------------------------------------------------------------------
    def name(self) -> str:
        """Return a new value name."""
        self._names += 1
        return f"%v{self._names}"

    def line(self, text: str) -> None:
        """Append one line."""
        self.lines.append(text)

    def op(self, text: str) -> str:
        """Append an instruction and return the name of its result."""
        self._names += 1
        name = f"%v{self._names}"
        self.lines.append(f"  {name} = {text}")
        return name

    def label(self, name: str) -> None:
        """Start a basic block."""
        self.lines.append(f"{name}:")
        self.block = name

    @contextmanager
    def loop(self, start: str, stop: str, step: int | str = 1) -> Iterator[Loop]:
        """Emit ``for i in range(start, stop, step)``; carried values use ``Loop.carry``."""
        self._names += 1
        loop = Loop(self, f"{self._names}", start, stop, step)
        yield loop
        loop.close()

    # -- values --------------------------------------------------------------------------------
    def splat(self, value: float) -> str:
        """Return a vector constant."""
        return f"splat ({self.scalar} {constant(value, self.scalar)})"

    def broadcast(self, scalar: str) -> str:
        """Emit code for a vector whose lanes all hold the scalar."""
        first = self.op(f"insertelement {self.vector} poison, {self.scalar} {scalar}, i32 0")
        zero = f"<{self.lanes} x i32> zeroinitializer"
        return self.op(f"shufflevector {self.vector} {first}, {self.vector} poison, {zero}")

    def add(self, a: str, b: str) -> str:
        """Emit code for a + b."""
        return self.op(f"fadd {self.vector} {a}, {b}")

    def sub(self, a: str, b: str) -> str:
        """Emit code for a - b."""
        return self.op(f"fsub {self.vector} {a}, {b}")

    def mul(self, a: str, b: str) -> str:
        """Emit code for a * b, rounded separately, so that all hosts give the same bits."""
        return self.op(f"fmul {self.vector} {a}, {b}")

    def div(self, a: str, b: str) -> str:
        """Emit code for a / b, rounded to nearest."""
        return self.op(f"fdiv {self.vector} {a}, {b}")

    def fma(self, a: str, b: str, c: str) -> str:
        """Emit code for a * b + c, rounded once; slow on hosts without such an instruction."""
        v = self.vector
        return self.op(f"call {v} @llvm.fma.{self.suffix}({v} {a}, {v} {b}, {v} {c})")

    def multiply_add(self, a: str, b: str, c: str) -> str:
        """Emit code for a * b + c, fused if the host can."""
        if self.target.has_fma:
            return self.fma(a, b, c)
        return self.add(self.mul(a, b), c)

    def scaled_add(self, a: str, power: float, c: str) -> str:
        """Emit code for a * power + c for a power of two: the product is exact, fused or not."""
        if self.target.has_fma:
            return self.fma(a, self.splat(power), c)
        return self.add(self.mul(a, self.splat(power)), c)

    def compare(self, predicate: str, a: str, b: str) -> str:
        """Emit code for the mask of a comparison."""
        return self.op(f"fcmp {predicate} {self.vector} {a}, {b}")

    def either(self, a: str, b: str) -> str:
        """Emit code for the mask that is set where one of two masks is set."""
        return self.op(f"or {self.mask} {a}, {b}")

    def both(self, a: str, b: str) -> str:
        """Emit code for the mask that is set where both masks are set."""
        return self.op(f"and {self.mask} {a}, {b}")

    def where_any(self, mask: str, rare: Callable[[], str], usual: str) -> str:
        """Emit code for the result of ``rare`` if the mask is set anywhere, otherwise ``usual``."""
        bits = self.op(f"bitcast {self.mask} {mask} to i{self.lanes}")
        any_ = self.op(f"icmp ne i{self.lanes} {bits}, 0")
        before, tag = self.block, self.name()[1:]
        self.line(f"  br i1 {any_}, label %rare{tag}, label %join{tag}")
        self.label(f"rare{tag}")
        other = rare()
        after = self.block
        self.line(f"  br label %join{tag}")
        self.label(f"join{tag}")
        return self.op(f"phi {self.vector} [ {usual}, %{before} ], [ {other}, %{after} ]")

    def select(self, mask: str, a: str, b: str) -> str:
        """Emit code for a where the mask is set, b elsewhere."""
        return self.op(f"select {self.mask} {mask}, {self.vector} {a}, {self.vector} {b}")

    def low(self, a: str, b: str) -> str:
        """Emit code for the smaller of two ordered values; compiles to one ``vminps``."""
        return self.select(self.op(f"fcmp nnan olt {self.vector} {a}, {b}"), a, b)

    def high(self, a: str, b: str) -> str:
        """Emit code for the larger of two values.

        Of -0.0 and 0.0, ``high`` is the one that ``low`` is not.
        """
        return self.select(self.op(f"fcmp nnan ogt {self.vector} {b}, {a}"), b, a)

    def negate(self, a: str) -> str:
        """Emit code for -a."""
        return self.op(f"fneg {self.vector} {a}")

    def absolute(self, a: str) -> str:
        """Emit code for |a|."""
        return self.op(f"call {self.vector} @llvm.fabs.{self.suffix}({self.vector} {a})")

    def nan_to_inf(self, a: str) -> str:
        """Emit code that replaces NaN by infinity, so that all values are ordered."""
        # One instruction: x < inf is false for NaN.
        return self.select(self.compare("olt", a, self.splat(math.inf)), a, self.splat(math.inf))

    # -- memory --------------------------------------------------------------------------------
    def pointer(self, table: str, index: str | int) -> str:
        """Emit code that loads the pointer at an index of a table of pointers."""
        slot = self.op(f"getelementptr ptr, ptr {table}, i64 {index}")
        return self.op(f"load ptr, ptr {slot}")

    def named(self, names: tuple[str, ...], table: str = "%args") -> Words:
        """Return access to a table of 64-bit words by name."""
        return Words(self, names, table)

    def integer(self, table: str, index: int) -> str:
        """Emit code that loads the 64-bit integer at an index of a table."""
        return self.op(f"load i64, ptr {self.at(table, str(index), 'i64')}")

    def scalar_at(self, table: str, index: int | str) -> str:
        """Emit code that loads one computed value from an array of them."""
        return self.op(f"load {self.scalar}, ptr {self.at(table, str(index), self.scalar)}")

    def load_vector(self, address: str) -> str:
        """Emit code that loads a vector of computed values from aligned scratch memory."""
        return self.op(f"load {self.vector}, ptr {address}, align 16")

    def store_vector(self, value: str, address: str) -> None:
        """Emit code that stores a vector of computed values to aligned scratch memory."""
        self.line(f"  store {self.vector} {value}, ptr {address}, align 16")

    def at(self, base: str, offset: str, kind: str | None = None) -> str:
        """Emit code for the address of an element."""
        return self.op(f"getelementptr {kind or self.element.memory}, ptr {base}, i64 {offset}")

    def prefetch(self, address: str, distance: int) -> None:
        """Emit code that prefetches the cache line ``distance`` bytes further on."""
        ahead = self.at(address, str(distance), "i8")
        self.line(f"  call void @llvm.prefetch.p0(ptr {ahead}, i32 0, i32 3, i32 1)")

    def load(self, address: str) -> str:
        """Emit code that loads a vector of stored values and converts it to the computing type."""
        memory = self.element.memory
        raw = f"<{self.lanes} x {memory}>"
        value = self.op(f"load {raw}, ptr {address}, align {self.element.size}")
        if self.element.name == "bfloat16":
            wide = self.op(f"zext {raw} {value} to <{self.lanes} x i32>")
            bits = self.op(f"shl <{self.lanes} x i32> {wide}, splat (i32 16)")
            single = f"<{self.lanes} x float>"
            value = self.op(f"bitcast <{self.lanes} x i32> {bits} to {single}")
            if self.scalar == "float":
                return value
            return self.op(f"fpext {single} {value} to {self.vector}")
        if memory != self.scalar:
            return self.op(f"fpext {raw} {value} to {self.vector}")
        return value

    def store(self, value: str, address: str) -> None:
        """Emit code that rounds a vector to the stored type, to nearest even, and stores it."""
        memory = self.element.memory
        raw = f"<{self.lanes} x {memory}>"
        if self.element.name == "bfloat16":
            value = self._round_bfloat16(value)
        elif memory != self.scalar:
            value = self.op(f"fptrunc {self.vector} {value} to {raw}")
        self.line(f"  store {raw} {value}, ptr {address}, align {self.element.size}")

    def _round_bfloat16(self, value: str) -> str:
        words = self.words
        bits = self.op(f"bitcast {self.vector} {value} to {words}")
        odd = self.op(f"lshr {words} {bits}, splat (i32 16)")
        odd = self.op(f"and {words} {odd}, splat (i32 1)")
        bias = self.op(f"add {words} {odd}, splat (i32 32767)")
        rounded = self.op(f"add {words} {bits}, {bias}")
        # Rounding could carry a NaN's payload into the sign, so NaN is stored as a quiet NaN.
        quiet = self.op(f"or {words} {bits}, splat (i32 4194304)")
        nan = self.compare("uno", value, value)
        chosen = self.op(f"select {self.mask} {nan}, {words} {quiet}, {words} {rounded}")
        short = self.op(f"lshr {words} {chosen}, splat (i32 16)")
        return self.op(f"trunc {words} {short} to <{self.lanes} x i16>")


@dataclass(frozen=True, slots=True)
class Words:
    """Words in memory, named by the fields of the NamedTuple that the caller packs."""

    function: Function
    names: tuple[str, ...]
    table: str

    def pointer(self, name: str) -> str:
        """Emit code that loads a word as a pointer."""
        return self.function.pointer(self.table, self.names.index(name))

    def integer(self, name: str) -> str:
        """Emit code that loads a word as an integer."""
        return self.function.integer(self.table, self.names.index(name))

    def slot(self, name: str) -> str:
        """Emit code for the address of a word."""
        return self.function.at(self.table, str(self.names.index(name)), "i64")


class Loop:
    """A counted loop under construction: its index, and values carried between iterations."""

    def __init__(
        self, function: Function, tag: str, start: str, stop: str, step: int | str
    ) -> None:
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
        """Set the value of a carried variable in the next iteration."""
        self._carried = [
            (kind, initial, name, value if name == carried else old)
            for kind, initial, name, old in self._carried
        ]

    def carried(self) -> list[str]:
        """Return the carried values; after the loop, they have their last values."""
        return [name for _, _, name, _ in self._carried]

    def close(self) -> None:
        """Emit the end of the loop and its phi nodes."""
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


def declarations(f: Function) -> str:
    """Return declarations of the intrinsics that functions of this type may use."""
    v = f.vector
    return f"""
declare {v} @llvm.fma.{f.suffix}({v}, {v}, {v})
declare {v} @llvm.fabs.{f.suffix}({v})
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)
"""


class ColumnArguments(NamedTuple):
    """Arguments of a column kernel: eight words, of which each kernel reads those it needs."""

    rows: int  # table of m pointers
    out: int
    m: int
    program: int = 0
    steps: int = 0
    trim: int = 0
    drop: int = 0
    constants: int = 0


SIGNATURE = "(ptr noalias %args, ptr noalias %local, i64 %start, i64 %stop)"


def pad_text(f: Function) -> str:
    """Generate an IR function that copies the last columns, fewer than a vector, with padding.

    So only code for whole vectors is compiled. The padding is zero in every row, and a zero among
    zeros is never dropped.
    """
    lanes, kind, size = f.lanes, f.element.memory, f.element.size
    return f"""
define internal void @pad(
    ptr noalias %rows, i64 %m, i64 %column, i64 %rest, ptr noalias %table, ptr noalias %cells
) noinline {{
entry:
  %number = mul i64 %m, {lanes * size}
  call void @llvm.memset.p0.i64(ptr %cells, i8 0, i64 %number, i1 false)
  %bytes = mul i64 %rest, {size}
  br label %copy
copy:
  %i = phi i64 [ 0, %entry ], [ %next, %copy ]
  %slot = getelementptr ptr, ptr %rows, i64 %i
  %row = load ptr, ptr %slot
  %from = getelementptr {kind}, ptr %row, i64 %column
  %offset = mul i64 %i, {lanes}
  %to = getelementptr {kind}, ptr %cells, i64 %offset
  call void @llvm.memcpy.p0.p0.i64(ptr %to, ptr %from, i64 %bytes, i1 false)
  %entry_slot = getelementptr ptr, ptr %table, i64 %i
  store ptr %to, ptr %entry_slot
  %next = add i64 %i, 1
  %more = icmp slt i64 %next, %m
  br i1 %more, label %copy, label %done
done:
  ret void
}}
"""


def module_text(f: Function) -> str:
    """Generate a ``kernel`` over any number of columns from a body over whole vectors of columns.

    ``args`` are :class:`ColumnArguments`.
    """
    words = ColumnArguments._fields
    rows, out, m = (words.index(name) for name in ("rows", "out", "m"))
    lanes, kind, size = f.lanes, f.element.memory, f.element.size
    body = "\n".join(f.lines)
    return f"""{declarations(f)}{pad_text(f)}
define internal void @body{SIGNATURE} noinline {{
entry:
{body}
  ret void
}}

define void @kernel{SIGNATURE} {{
entry:
  %n = sub i64 %stop, %start
  %rest = srem i64 %n, {lanes}
  %whole = sub i64 %stop, %rest
  call void @body(ptr %args, ptr %local, i64 %start, i64 %whole)
  %any = icmp sgt i64 %rest, 0
  br i1 %any, label %tail, label %done
tail:
  %padded = alloca [{len(words)} x ptr], align 8
  call void @llvm.memcpy.p0.p0.i64(ptr %padded, ptr %args, i64 {8 * len(words)}, i1 false)
  %rows_slot = getelementptr ptr, ptr %args, i64 {rows}
  %rows = load ptr, ptr %rows_slot
  %out_slot = getelementptr ptr, ptr %args, i64 {out}
  %out = load ptr, ptr %out_slot
  %m_slot = getelementptr i64, ptr %args, i64 {m}
  %m = load i64, ptr %m_slot
  %number = mul i64 %m, {lanes}
  %cells = alloca {kind}, i64 %number, align 64
  %answer = alloca {kind}, i64 {lanes}, align 64
  %table = alloca ptr, i64 %m, align 8
  %table_slot = getelementptr ptr, ptr %padded, i64 {rows}
  store ptr %table, ptr %table_slot
  %answer_slot = getelementptr ptr, ptr %padded, i64 {out}
  store ptr %answer, ptr %answer_slot
  call void @pad(ptr %rows, i64 %m, i64 %whole, i64 %rest, ptr %table, ptr %cells)
  call void @body(ptr %padded, ptr %local, i64 0, i64 {lanes})
  %bytes = mul i64 %rest, {size}
  %place = getelementptr {kind}, ptr %out, i64 %whole
  call void @llvm.memcpy.p0.p0.i64(ptr %place, ptr %answer, i64 %bytes, i1 false)
  br label %done
done:
  ret void
}}
"""
