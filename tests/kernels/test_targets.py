"""The IR for every processor: it compiles for all, and gives the same bits on older ones."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from llvmlite import binding as llvm

from phocas.floats import FORMATS
from phocas.kernels import (
    Window,
    blocks,
    columns,
    distances,
    filtering,
    jit,
    masses,
    means,
    mixing,
    normals,
    products,
    programs,
    weighted,
)
from phocas.kernels.emit import ELEMENTS, ColumnArguments, Element
from phocas.kernels.target import ALL_TARGETS, ARM64, X86_AVX2, X86_BASELINE, Target, host
from phocas.kernels.threads import write_threads

llvm.initialize_all_targets()
llvm.initialize_all_asmprinters()

REACHING = Window(6, 6, cutoff=4.0)
MODULES: dict[str, Callable[[Target, Element], str]] = {
    "mean": lambda t, e: columns.straight_module(t, e, 5, Window(plain=True)),
    "median": lambda t, e: blocks.straight_module(t, e, 8, Window(3), blame=True),
    "phocas": lambda t, e: blocks.straight_module(t, e, 20, Window(6, 6), blame=True),
    "bulyan": lambda t, e: columns.straight_module(t, e, 7, Window(3, 4)),
    "heraclius": lambda t, e: blocks.straight_module(t, e, 20, REACHING, blame=True),
    "watch": lambda t, e: blocks.straight_module(t, e, 20, REACHING, blame=True, gives="mean"),
    "radii": lambda t, e: blocks.straight_module(t, e, 20, REACHING, blame=False, gives="radii"),
    "marks": lambda t, e: blocks.straight_module(t, e, 20, REACHING, blame=False, gives="marks"),
    "clean": filtering.clean_module,
    "masked": filtering.masked_module,
    "table": lambda t, e: programs.table_module(t, e, drop=False),
    "table drop": lambda t, e: programs.table_module(t, e, drop=True),
    "table blame": lambda t, e: programs.blocks_module(t, e, False, False, blame=True),
    "table cutoff": lambda t, e: programs.blocks_module(t, e, True, True, blame=True),
    "table marks": lambda t, e: programs.blocks_module(t, e, True, True, False, gives="marks"),
    "weighted": lambda t, e: weighted.weighted_module(
        t, e, True, True, True, radii=False, straight=(20, masses.Sure(6, 11, 6, 9))
    ),
    "weighted trim": lambda t, e: weighted.weighted_module(
        t, e, False, False, True, radii=False, straight=(9, masses.Sure(2, 4))
    ),
    "weighted pairs": lambda t, e: weighted.weighted_module(t, e, True, True, True, radii=False),
    "combine": mixing.combine_module,
    "combine few": mixing.combine_few_module,
    "combine wide": lambda t, e: mixing.combine_module(t, e.wide()),
    "fused": mixing.fused_module,
    "fused wide": lambda t, e: mixing.fused_module(t, e.wide()),
    "mean of many": means.mean_module,
    "pairs": distances.pairs_module,
    "pairs wide": lambda t, e: distances.pairs_module(t, e.wide()),
    "norms": distances.norms_module,
    "origin": distances.origin_module,
    "origin wide": lambda t, e: distances.origin_module(t, e.wide()),
    "products": lambda t, e: (
        # Doubles are for rows whose products would overflow.
        products.products_module(t, e) if e.compute == "float" else distances.pairs_module(t, e)
    ),
    "norms wide": lambda t, e: distances.norms_module(t, e.wide()),
    "signs wide": lambda t, e: distances.signs_module(t, e.wide()),
    "normals": lambda t, e: normals.normals_module(t, ELEMENTS[FORMATS[e.name].work.name]),
}


@pytest.mark.parametrize("target", ALL_TARGETS.values(), ids=ALL_TARGETS.keys())
@pytest.mark.parametrize("element", ELEMENTS.values(), ids=ELEMENTS.keys())
@pytest.mark.parametrize("name", MODULES)
def test_modules_compile_for_every_processor(name: str, element: Element, target: Target) -> None:
    if element.name == "float16" and not target.has_half:
        pytest.skip("such hosts convert half precision before they compute")
    code = jit.compile_text(MODULES[name](target, element), target)
    machine = 183 if target is ARM64 else 62
    assert code[:4] == b"\x7fELF"
    assert int.from_bytes(code[18:20], "little") == machine


@pytest.mark.parametrize("target", ALL_TARGETS.values(), ids=ALL_TARGETS.keys())
def test_threads_compile_for_every_processor(target: Target) -> None:
    assert jit.compile_text(write_threads(target), target)[:4] == b"\x7fELF"


def _lesser() -> list[Target]:
    """Return processors that the host can emulate: the host without some features."""
    features = dict(llvm.get_host_cpu_features())
    fitting: list[Target] = []
    if not host().triple.startswith("x86_64"):
        return fitting
    if features.get("avx2") and features.get("fma") and features.get("f16c"):
        fitting.append(replace(X86_AVX2, triple=host().triple))
    fitting.append(replace(X86_BASELINE, triple=host().triple))
    return fitting


def _run(target: Target, text: str, words: list[int], local: np.ndarray, columns_: int) -> None:
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target.machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(jit.compile_text(text, target)))
    engine.finalize_object()
    kernel = ctypes.CFUNCTYPE(
        None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64
    )(engine.get_function_address("kernel"))
    arguments = np.array(words + [0] * (8 - len(words)), np.uint64)
    kernel(arguments.ctypes.data, local.ctypes.data, 0, columns_)


@pytest.mark.parametrize("target", _lesser(), ids=lambda target: target.cpu)
@pytest.mark.parametrize("kind", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize(
    ("window", "gives"),
    [
        (Window(plain=True), "values"),
        (Window(6), "values"),
        (Window(9), "values"),
        (Window(6, 6), "values"),
        (Window(9, 6), "values"),
        (Window(9, 14), "values"),
        (REACHING, "values"),
        (REACHING, "mean"),
    ],
)
def test_older_processors_give_the_same_bits(
    target: Target, kind: str, window: Window, gives: blocks.Gives
) -> None:
    rng = np.random.default_rng(0)
    d = 2 * 1083 if window.cutoff else 2 * 83
    values = rng.normal(size=(20, d)).astype(np.float32)
    values[rng.integers(20, size=d), np.arange(d)] = rng.choice([np.nan, np.inf, 3e38, -0.0], d)
    rows = values.astype(kind) if kind != "bfloat16" else values.view(np.uint16)[:, 1::2].copy()
    addresses = np.array([row.ctypes.data for row in rows], np.uint64)
    numbers = np.array([window.cutoff, np.nan], np.float64 if kind == "float64" else np.float32)
    d = rows.shape[1]
    answers: list[tuple[bytes, list[int]]] = []
    for machine in (host(), target):
        out, counts = np.zeros(d, rows.dtype), np.zeros(20, np.int64)
        element = ELEMENTS[kind]
        words = ColumnArguments(
            addresses.ctypes.data, out.ctypes.data, 20, constants=numbers.ctypes.data
        )
        if not window.cutoff:
            plain = np.zeros_like(out)
            text = columns.straight_module(machine, element, 20, window)
            _run(machine, text, [*words._replace(out=plain.ctypes.data)], counts, d)
            answers.append((plain.tobytes(), []))
        if not window.plain:
            text = blocks.straight_module(machine, element, 20, window, blame=True, gives=gives)
            _run(machine, text, [*words], counts, d)
            answers.append((out.tobytes(), counts.tolist()))
    half = len(answers) // 2
    assert answers[:half] == answers[half:]


@pytest.mark.parametrize("target", _lesser(), ids=lambda target: target.cpu)
@pytest.mark.parametrize(
    "window", [Window(60), Window(99, 60), Window(99, 150), Window(60, 60, cutoff=1.5)]
)
def test_older_processors_run_the_table_program(target: Target, window: Window) -> None:
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(200, 37)).astype(np.float32)
    addresses = np.array([row.ctypes.data for row in rows], np.uint64)
    steps, numbers = programs.program(200), programs.constants(window, 200, np.float32)
    answers = []
    for machine in (host(), target):
        out, counts = np.zeros(37, np.float32), np.zeros(200, np.int64)
        text = programs.blocks_module(
            machine, ELEMENTS["float32"], bool(window.drop), bool(window.cutoff), blame=True
        )
        words = [addresses.ctypes.data, out.ctypes.data, 200, steps.ctypes.data, len(steps)]
        words += [window.trim, window.drop or 0, numbers.ctypes.data]
        _run(machine, text, words, counts, 37)
        answers.append((out.tobytes(), counts.tolist()))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("target", _lesser(), ids=lambda target: target.cpu)
@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_older_processors_draw_the_same_normal_numbers(target: Target, kind: str) -> None:
    key, std = np.arange(1, 5, dtype=np.uint64), np.array(200.0)
    answers = []
    for machine in (host(), target):
        out = np.zeros(64 * 500, kind)
        words = normals.NormalArguments(
            out.ctypes.data, first=9, row=3, key=key.ctypes.data, std=std.ctypes.data
        )
        _run(machine, normals.normals_module(machine, ELEMENTS[kind]), [*words], key, 500)
        answers.append(out.tobytes())
    assert answers[0] == answers[1]


@pytest.mark.parametrize("target", [t for t in _lesser() if t.has_fma], ids=lambda t: t.cpu)
def test_older_processors_compute_the_same_distances(target: Target) -> None:
    """Lanes are added in the same order everywhere; only the blocks of pairs differ."""
    rows = np.random.default_rng(2).normal(size=(8, 1024)).astype(np.float32)
    addresses = np.array([row.ctypes.data for row in rows], np.uint64)
    answers = []
    for machine in (host(), target):
        side = distances.block_rows(machine)
        blocks = 8 // side
        out = np.zeros(blocks * (blocks + 1) // 2 * side * side)
        local = np.zeros(distances.scratch_words(machine, 8) + 8, np.uint64)
        local = local[-local.ctypes.data % 64 // 8 :]
        panels = distances.panel_pairs(8, 64)
        words = distances.DistanceArguments(
            rows=addresses.ctypes.data,
            out=out.ctypes.data,
            blocks=blocks,
            columns=1024,
            granule=1024,
            tile=128,
            pairs=panels.ctypes.data,
            panel=64,
        )
        _run(machine, distances.pairs_module(machine, ELEMENTS["float32"]), [*words], local, 1)
        pairs = {}
        place = iter(out.reshape(-1, side, side))
        for left in range(blocks):
            for right in range(left, blocks):
                block = next(place)
                for i in range(side):
                    for j in range(side):
                        first, second = left * side + i, right * side + j
                        if first < second:
                            pairs[first, second] = float(block[i, j])
        answers.append(pairs)
    assert answers[0] == answers[1]


def test_host_target_describes_this_processor() -> None:
    target = host()
    assert target.vector_bits in (128, 256, 512)
    assert target.triple == llvm.get_process_triple()


@pytest.mark.parametrize("target", _lesser(), ids=lambda target: target.cpu)
@pytest.mark.parametrize("in_registers", [False, True])
@pytest.mark.parametrize("cut", [6.0, 30.0])
@pytest.mark.parametrize("nearest", [False, True])
def test_weighted_kernels_give_the_same_bits_on_older_processors(
    target: Target, in_registers: bool, cut: float, nearest: bool
) -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(size=(20, 83)).astype(np.float32)
    values[rng.integers(20, size=83), np.arange(83)] = rng.choice([np.nan, np.inf, 3e38, -0.0], 83)
    weights = rng.integers(1, 9, size=20)
    units = weighted.padded_weights(weights, np.float32)
    cuts = masses.Masses(cut, cut if nearest else None)
    numbers = weighted.constants(cuts, int(weights.sum()), np.float32)
    sure = masses.Sure.of(masses.Weighing(weights, cuts))
    assert bool(sure.inner(20)) == (cut == 6.0)
    table = values.ctypes.data + np.arange(20, dtype=np.uint64) * np.uint64(values.strides[0])
    found = []
    for each in (host(), target):
        text = weighted.weighted_module(
            each,
            ELEMENTS["float32"],
            nearest,
            False,
            True,
            radii=False,
            straight=(20, sure) if in_registers else None,
        )
        out, local = np.empty(83, np.float32), np.zeros(20, np.int64)
        words = ColumnArguments(
            rows=table.ctypes.data,
            out=out.ctypes.data,
            m=20,
            program=units.ctypes.data,
            steps=units.shape[1],
            constants=numbers.ctypes.data,
        )
        _run(each, text, list(words), local, 83)
        found.append((out.tobytes(), local.tolist()))
    assert found[0] == found[1]
    assert any(found[0][1])
