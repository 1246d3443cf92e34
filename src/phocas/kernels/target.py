"""Properties of the host's processor that the kernels need."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from llvmlite import binding as llvm


@dataclass(frozen=True, slots=True)
class Target:
    """A processor that kernels are compiled for.

    Attributes:
        triple: LLVM's target triple.
        cpu: LLVM's name of the processor.
        features: LLVM's list of features.
        vector_bits: width of the widest vectors to use.
        has_fma: whether it has fused multiply-add instructions.
        has_half: whether it converts half precision in hardware.
    """

    triple: str
    cpu: str
    features: str
    vector_bits: int
    has_fma: bool
    has_half: bool

    def machine(self) -> llvm.TargetMachine:
        """Return LLVM's code generator for this processor."""
        return llvm.Target.from_triple(self.triple).create_target_machine(
            cpu=self.cpu, features=self.features, opt=2, reloc="pic", codemodel="jitdefault"
        )


# Processors for which tests compile the IR, whatever the host is.
X86_BASELINE = Target("x86_64-unknown-linux-gnu", "x86-64", "", 128, False, False)
X86_AVX2 = Target("x86_64-unknown-linux-gnu", "haswell", "+avx2,+fma,+f16c", 256, True, True)
X86_AVX512 = Target(
    "x86_64-unknown-linux-gnu", "skylake-avx512", "-prefer-256-bit", 512, True, True
)
ARM64 = Target("aarch64-unknown-linux-gnu", "generic", "+neon,+fp-armv8", 128, True, True)
ALL_TARGETS = {
    "x86-64": X86_BASELINE,
    "x86-64-avx2": X86_AVX2,
    "x86-64-avx512": X86_AVX512,
    "arm64": ARM64,
}


@lru_cache(maxsize=1)
def host() -> Target:
    """Return the processor that this process runs on."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    triple = llvm.get_process_triple()
    features = dict(llvm.get_host_cpu_features())
    if triple.startswith(("aarch64", "arm64")):
        return Target(triple, llvm.get_host_cpu_name(), _flatten(features), 128, True, True)
    if features.get("avx512f") and features.get("avx512vl"):
        bits = 512
        # LLVM splits 512-bit vectors on such hosts unless this is off; whole vectors measured
        # faster.
        features["prefer-256-bit"] = False
    elif features.get("avx2"):
        bits = 256
    else:
        bits = 128
    return Target(
        triple=triple,
        cpu=llvm.get_host_cpu_name(),
        features=_flatten(features),
        vector_bits=bits,
        has_fma=bool(features.get("fma")),
        has_half=bool(features.get("f16c")),
    )


def instructions() -> str:
    """Return a text about the processor; hosts with the same text compute the same bits."""
    target = host()
    family = target.triple.partition("-")[0]
    return f"{family}, {'fused' if target.has_fma else 'separate'} multiply-add"


def _flatten(features: dict[str, bool]) -> str:
    return ",".join(("+" if on else "-") + name for name, on in sorted(features.items()))
