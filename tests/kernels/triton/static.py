"""What kernels cost on devices that are not here, read out of their binaries.

The estimate divides what a column executes, by the pipe that executes it, by what a device does in
a second, and what it reads and writes by the bandwidth of its memory; the slower of the two counts.
It knows nothing of latencies, caches, launch times and what else really happens.

Run as a program, it prints the table of ``docs/gpu.md``.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from phocas.kernels import Window
from phocas.kernels.emit import ELEMENTS
from phocas.kernels.triton.calls import BLOCK
from phocas.kernels.triton.loader import THREADS, load
from phocas.kernels.triton.windows import window_source

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
POINTERS = {"float16": "*fp16", "bfloat16": "*u16", "float32": "*fp32", "float64": "*fp64"}


@dataclass(frozen=True, slots=True)
class Device:
    """Figures of an SM or compute unit, and of the memory.

    They are published figures, from memory and a third-party table: check before relying on them.
    The clock is the one behind the single-precision rate. ``pipe`` is the number of minima,
    comparisons and integer operations of a clock (AMD: of all vector instructions), ``issue`` the
    number of instructions that can begin, in lanes.
    """

    name: str
    target: GPUTarget
    units: int
    hertz: float
    bandwidth: float
    pipe: int = 64
    issue: int = 128


DEVICES = {
    "sm_80": Device("A100 80 GB SXM", GPUTarget("cuda", 80, 32), 108, 1.41e9, 2.039e12),
    "sm_90": Device("H100 SXM", GPUTarget("cuda", 90, 32), 132, 1.98e9, 3.35e12),
    "sm_100": Device("B200", GPUTarget("cuda", 100, 32), 148, 1.98e9, 7.7e12),
    "gfx942": Device("MI300X", GPUTarget("hip", "gfx942", 64), 304, 2.1e9, 5.3e12),
}
# Instructions that NVIDIA executes in the pipe of comparisons and integers; AMD has one vector
# pipe.
PIPED = ("FMNMX", "FSETP", "FSEL", "SEL", "IADD", "ISETP", "LOP", "SHF", "PRMT", "LEA", "MNMX")


@dataclass(frozen=True, slots=True)
class Binary:
    """Resources of a compiled kernel: registers, bytes of local memory, instructions per column."""

    registers: int
    local: int
    instructions: Counter[str]
    assembly: str

    def seconds(self, device: Device) -> float:
        """Return the shortest time that the arithmetic of a column takes."""
        rate = device.units * device.hertz
        piped = sum(
            number for name, number in self.instructions.items() if name.startswith(("v_", *PIPED))
        )
        return max(piped / device.pipe, sum(self.instructions.values()) / device.issue) / rate


def compiled(
    text: str,
    device: str,
    signature: dict[str, str],
    name: str = "kernel",
    constants: dict[str, Any] | None = None,
) -> Any:
    """Compile a kernel for a device, which need not be present."""
    constants = constants or {}
    kinds = {**signature, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(fn=load(text)[name].function, signature=kinds, constexprs=constants)
    target = DEVICES[device].target
    options = {"num_warps": THREADS // target.warp_size, "enable_fp_fusion": False}
    return triton.compile(source, target=target, options=options)


@lru_cache(maxsize=64)
def window(
    device: str,
    element: str,
    m: int,
    window: Window,
    *,
    blame: bool = False,
    radii: bool = False,
    mean: bool = False,
) -> Binary:
    """Compile a window kernel and read its binary."""
    text = window_source(ELEMENTS[element], m, window, blame=blame, radii=radii, mean=mean)
    computed = POINTERS["float64" if ELEMENTS[element].compute == "double" else "float32"]
    signature = {"rows": "*i64", "out": computed if radii else POINTERS[element]}
    signature["tallies"] = "*i32"
    if window.cutoff and not radii:
        signature |= {"spreads": computed, "cutoff": computed, "first": "i64"}
    signature["columns"] = "i64"
    return binary(compiled(text, device, signature, constants={"BLOCK": BLOCK}))


def binary(kernel: Any) -> Binary:
    """Read the resources of a compiled kernel from its machine code."""
    if "amdgcn" in kernel.asm:
        return _amd(kernel.asm["amdgcn"])
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        used = _tool("cuobjdump", "-res-usage", file.name)
        code = _tool("cuobjdump", "-sass", file.name)
    registers = int(re.findall(r"REG:(\d+)", used)[0])
    local = sum(int(number) for number in re.findall(r"(?:STACK|LOCAL):(\d+)", used))
    lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.+?) *;", code)
    return Binary(registers, local, _nvidia(lines), code)


def _nvidia(lines: list[tuple[str, str]]) -> Counter[str]:
    """Count the instructions executed for a column, without skipped code."""
    counted: Counter[str] = Counter()
    skip = 0
    for address, text in lines:
        words = re.sub(r"^@!?U?P\w+ ", "", text).split()
        if int(address, 16) < skip or words[0].startswith("NOP"):
            continue
        counted[words[0].split(".")[0]] += 1
        if words[0] == "BRA" and text.startswith("@"):
            skip = int(words[-1], 16)
        elif words[0] == "EXIT" and not text.startswith("@"):
            break
    return counted


def _amd(text: str) -> Binary:
    def stated(name: str) -> int:
        return int(re.findall(rf"\.{name}:\s*(\d+)", text)[0])

    first, *others = re.split(r"s_cbranch_execz.*\n", text.partition("s_endpgm")[0])
    executed = first
    for block in others:
        jumped, _, after = block.partition("\n.LBB")
        # A masked load or store is skipped only if no lane needs it, which never happens.
        executed += (jumped if re.search("_load_|_store_", jumped) else "") + "\n" + after
    counted = Counter(re.findall(r"^\t([svbdg]\w*_\w+)", executed, re.MULTILINE))
    local = stated("private_segment_fixed_size") + stated("vgpr_spill_count")
    return Binary(stated("vgpr_count"), local, counted, text)


def _tool(name: str, *arguments: str) -> str:
    command = [str(TOOLS / name), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def ratio(device: str, m: int, rule: Window) -> float:
    """Return the estimate for single precision: the kernel's time divided by its memory time."""
    reading = 4 * (m + 1) / DEVICES[device].bandwidth
    return max(1.0, window(device, "float32", m, rule).seconds(DEVICES[device]) / reading)


if __name__ == "__main__":
    for name, device in DEVICES.items():
        for m, b in ((20, 8), (32, 8), (64, 16)):
            rule = Window(b, b)
            found = window(name, "float32", m, rule)
            arithmetic, memory = found.seconds(device), 4 * (m + 1) / device.bandwidth
            print(
                f"| {device.name} ({name}) | {m} | {found.registers} | "
                f"{sum(found.instructions.values())} | {arithmetic * 1e12:.0f} | "
                f"{memory * 1e12:.0f} | {ratio(name, m, rule):.2f} |",
                flush=True,
            )
