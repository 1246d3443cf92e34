"""Normal random numbers at memory speed, each a function of a key and its own position.

No state is carried from number to number, so threads and servers can draw any part of a row in any
order. Threefry (Salmon, Moraes, Dror and Shaw, 2011) maps positions to random bits. The Box-Muller
transform maps pairs of these to pairs of normal numbers. Its polynomials use only additions,
products and square roots, which every host rounds in the same way.
"""

from __future__ import annotations

from typing import NamedTuple

from phocas.kernels.emit import ELEMENTS, SIGNATURE, Element, Function, declarations
from phocas.kernels.target import Target

LANES = 16  # fixed, because positions are numbered by lanes
GROUP = 4 * LANES  # numbers generated at once, 4 from the bits of each lane
ROTATIONS = ((10, 26), (11, 21), (13, 27), (23, 5), (6, 20), (17, 11), (25, 10), (18, 20))
ROUNDS = 20
PARITY = 0x1BD11BDA

# ln(1 + f) = f - f^2 / 2 + f^3 LOGARITHM(f) for 1 + f within [sqrt(1/2), sqrt(2)], to 6e-8;
# sin(a) = a + a^3 SINE(a^2), cos(a) = 1 - a^2 / 2 + a^4 COSINE(a^2) for |a| <= pi / 4, to 1e-8.
LOGARITHM = (
    0.333334103, -0.250009217, 0.199851278, -0.165928563, 0.146763966, -0.141184249, 0.0927221424,
)  # fmt: skip
SINE = (-0.166666647, 0.00833274863, -0.000195879499)
COSINE = (0.0416666647, -0.00138883033, 2.45479913e-05)
ROOT_HALF = 0x3F3504F3  # the bits of sqrt(1/2)
LN2 = 0.693147181
QUARTER_TURN = 1.57079633


class NormalArguments(NamedTuple):
    """Arguments of the kernel; ``first`` is the number of the first group, stored at ``out``."""

    out: int
    first: int
    row: int
    key: int  # address of 4 words of 64 bits, of which the lower halves are used
    std: int  # address of a double


def normals_module(target: Target, element: Element) -> str:
    """Generate the kernel; its range is over groups of 64 numbers, stored as floats or doubles."""
    f = Function(target, ELEMENTS["float32"], LANES)
    args = f.named(NormalArguments._fields)
    out, first, row = args.pointer("out"), args.integer("first"), args.integer("row")
    key = [_word(f, f.integer(args.pointer("key"), i)) for i in range(4)]
    parity = splat_word(PARITY)
    for word in key:
        parity = _words(f, "xor", parity, word)
    std = f.op(f"load double, ptr {args.pointer('std')}")
    lanes = ", ".join(f"i32 {i}" for i in range(LANES))
    with f.loop("%start", "%stop") as group:
        place = f.op(f"mul i64 {f.op(f'add i64 {first}, {group.index}')}, {LANES}")
        counter = [
            _words(f, "add", _word(f, place), f"<{lanes}>"),
            _word(f, f.op(f"lshr i64 {place}, 32")),
            _word(f, row),
            _word(f, f.op(f"lshr i64 {row}, 32")),
        ]
        bits = threefry(f, counter, [*key, parity])
        start = f.op(f"mul i64 {group.index}, {GROUP}")
        numbers = [*_pair(f, bits[0], bits[1]), *_pair(f, bits[2], bits[3])]
        for i, number in enumerate(numbers):
            where = f.at(out, f.op(f"add i64 {start}, {i * LANES}"), element.memory)
            _store(f, number, std, where, element.memory)
    body = "\n".join(f.lines)
    return f"""{declarations(f)}
declare {f.words} @llvm.fshl.v{LANES}i32({f.words}, {f.words}, {f.words})
declare {f.vector} @llvm.sqrt.{f.suffix}({f.vector})
define void @kernel{SIGNATURE} {{
entry:
{body}
  ret void
}}
"""


def threefry(f: Function, counter: list[str], key: list[str]) -> list[str]:
    """Emit code for four words of random bits for the counter of each lane.

    The fifth key word is the parity.
    """
    x = [_words(f, "add", word, key[i]) for i, word in enumerate(counter)]
    for number in range(ROUNDS):
        one, three = (1, 3) if number % 2 == 0 else (3, 1)
        for low, high, turn in zip((0, 2), (one, three), ROTATIONS[number % 8], strict=True):
            x[low] = _words(f, "add", x[low], x[high])
            v = f.words
            turned = f"{v} {x[high]}, {v} {x[high]}, {v} {splat_word(turn)}"
            x[high] = f.op(f"call {v} @llvm.fshl.v{LANES}i32({turned})")
            x[high] = _words(f, "xor", x[high], x[low])
        if number % 4 == 3:
            injected = number // 4 + 1
            x = [_words(f, "add", word, key[(injected + i) % 5]) for i, word in enumerate(x)]
            x[3] = _words(f, "add", x[3], splat_word(injected))
    return x


def _pair(f: Function, size: str, direction: str) -> tuple[str, str]:
    """Emit code for two independent normal numbers from two words of bits: a length and an angle.

    The angle is one of 2^30 within a quarter of the circle, rotated by the two other bits.
    """
    uniform = f.op(f"uitofp {f.words} {size} to {f.vector}")
    uniform = f.fma(uniform, f.splat(2.0**-32), f.splat(2.0**-33))  # in (0, 1]
    squared = f.mul(_logarithm(f, uniform), f.splat(-2.0))
    length = f.op(f"call {f.vector} @llvm.sqrt.{f.suffix}({f.vector} {squared})")
    within = _words(f, "shl", direction, splat_word(2))
    angle = f.op(f"sitofp {f.words} {within} to {f.vector}")
    angle = f.mul(angle, f.splat(QUARTER_TURN * 2.0**-32))
    z = f.mul(angle, angle)
    sine = f.fma(f.mul(angle, z), _polynomial(f, SINE, z), angle)
    cosine = f.fma(f.mul(z, z), _polynomial(f, COSINE, z), f.fma(z, f.splat(-0.5), f.splat(1.0)))
    sign = _words(f, "and", direction, splat_word(1 << 31))
    signed = _words(f, "xor", f.op(f"bitcast {f.vector} {cosine} to {f.words}"), sign)
    cosine = f.op(f"bitcast {f.words} {signed} to {f.vector}")
    bit = _words(f, "and", direction, splat_word(1 << 30))
    swap = f.op(f"icmp ne {f.words} {bit}, zeroinitializer")
    return (
        f.mul(length, f.select(swap, sine, cosine)),
        f.mul(length, f.select(swap, cosine, sine)),
    )


def _logarithm(f: Function, value: str) -> str:
    """Emit code for the natural logarithm of positive numbers; exactly zero for 1."""
    bits = f.op(f"bitcast {f.vector} {value} to {f.words}")
    from_root = _words(f, "sub", bits, splat_word(ROOT_HALF))
    exponent = _words(f, "ashr", from_root, splat_word(23))
    mantissa = _words(f, "sub", bits, _words(f, "shl", exponent, splat_word(23)))
    x = f.sub(f.op(f"bitcast {f.words} {mantissa} to {f.vector}"), f.splat(1.0))
    square = f.mul(x, x)
    result = f.fma(f.mul(square, x), _polynomial(f, LOGARITHM, x), f.mul(square, f.splat(-0.5)))
    power = f.op(f"sitofp {f.words} {exponent} to {f.vector}")
    return f.add(f.fma(power, f.splat(LN2), x), result)


def _polynomial(f: Function, coefficients: tuple[float, ...], x: str) -> str:
    value = f.splat(coefficients[-1])
    for each in coefficients[-2::-1]:
        value = f.fma(value, x, f.splat(each))
    return value


def _store(f: Function, number: str, std: str, where: str, memory: str) -> None:
    """Emit code that multiplies by the standard deviation in the stored precision, and stores."""
    kind = f"<{LANES} x {memory}>"
    if memory == "double":
        number = f.op(f"fpext {f.vector} {number} to {kind}")
    else:
        std = f.op(f"fptrunc double {std} to float")
    first = f.op(f"insertelement {kind} poison, {memory} {std}, i32 0")
    zero = f"{f.words} zeroinitializer"
    deviation = f.op(f"shufflevector {kind} {first}, {kind} poison, {zero}")
    value = f.op(f"fmul {kind} {number}, {deviation}")
    f.line(f"  store {kind} {value}, ptr {where}, align {8 if memory == 'double' else 4}")


def splat_word(value: int) -> str:
    """Emit code for a constant of 32 bits in every lane."""
    return f"splat (i32 {value})"


def _word(f: Function, value: str) -> str:
    """Emit code for the lower 32 bits of an integer in every lane."""
    low = f.op(f"trunc i64 {value} to i32")
    first = f.op(f"insertelement {f.words} poison, i32 {low}, i32 0")
    return f.op(f"shufflevector {f.words} {first}, {f.words} poison, {f.words} zeroinitializer")


def _words(f: Function, operation: str, a: str, b: str) -> str:
    return f.op(f"{operation} {f.words} {a}, {b}")
