"""The column kernels: networks, windows of all shapes, straight-line code and table programs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from phocas import kernels
from phocas.kernels import Window, code, programs
from phocas.kernels.columns import wanted_wires
from phocas.kernels.networks import Comparator, prune, sorting_network, valley_network
from phocas.rules.measures import rows_of
from phocas.rules.reference import nearest, trimmed


def run(network: tuple[Comparator, ...] | tuple[tuple[int, int], ...], wires: np.ndarray) -> None:
    """Run a network over the rows of an array; outputs that it does not keep are undefined."""
    for step in network:
        c = step if isinstance(step, Comparator) else Comparator(*step)
        low = np.minimum(wires[c.low], wires[c.high])
        high = np.maximum(wires[c.low], wires[c.high])
        wires[c.low] = low if c.keep_low else -99
        wires[c.high] = high if c.keep_high else -99


@pytest.mark.parametrize("m", range(1, 21))
def test_networks_sort_all_zeros_and_ones(m: int) -> None:
    """A network that sorts every sequence of zeros and ones sorts everything.

    Bit j of an integer is its wire's value in the j-th of all 2^m sequences.
    """
    everything = (1 << (1 << m)) - 1
    wires = [everything // ((1 << (1 << i)) + 1) << (1 << i) for i in range(m)]
    assert wires[0] & 0b1111 == 0b1010 & everything
    for low, high in sorting_network(m):
        wires[low], wires[high] = wires[low] & wires[high], wires[low] | wires[high]
    assert all(low & ~high == 0 for low, high in itertools.pairwise(wires))


@pytest.mark.parametrize("m", [20, 31, 32, 33, 100, 129, 192])
def test_large_networks_sort_thresholds(m: int) -> None:
    rng = np.random.default_rng(m)
    inputs = (rng.random((m, 2000)) < rng.random(2000)).astype(np.int8)
    wires = inputs.copy()
    run(sorting_network(m), wires)
    np.testing.assert_array_equal(wires, np.sort(inputs, axis=0))


@pytest.mark.parametrize("m", range(1, 33))
def test_valley_network_sorts_values_that_fall_and_then_rise(m: int) -> None:
    """Zeros and ones that fall and then rise: ones, zeros, and ones again."""
    ends = itertools.combinations_with_replacement(range(m + 1), 2)
    places = np.arange(m)
    valleys = np.array([(places < fall) | (places >= rise) for fall, rise in ends], np.int16).T
    wires = valleys.copy()
    run(valley_network(m), wires)
    np.testing.assert_array_equal(wires, np.sort(valleys, axis=0))


@pytest.mark.parametrize("m", range(1, 14))
def test_pruned_networks_keep_the_wanted_outputs(m: int) -> None:
    inputs = np.array(list(itertools.product((0, 1), repeat=m)), np.int16).T
    # Distinct values, too: equal values would hide a wrong permutation.
    ramps = np.stack([np.random.default_rng(i).permutation(m) for i in range(500)], axis=1)
    for values in (inputs, ramps):
        ordered = np.sort(values, axis=0)
        for window in _windows(m):
            wanted = wanted_wires(window, m)
            wires = values.astype(np.int16)
            run(prune(sorting_network(m), wanted), wires)
            for group in set(wanted.values()):
                places = [wire for wire, name in wanted.items() if name == group]
                got = np.sort(wires[places], axis=0)
                np.testing.assert_array_equal(got, ordered[places])


def _windows(m: int) -> list[Window]:
    trims = [Window(trim) for trim in range((m + 1) // 2)]
    drops = [Window(trim, drop) for trim in {0, (m - 1) // 4, (m - 1) // 2} for drop in range(1, m)]
    return trims + [w for w in drops if w.drop and (w.trim >= w.drop or 2 * w.trim + 2 >= m)]


@pytest.mark.parametrize("m", [*range(2, 14), 200, 450])
@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_windows_match_the_definition(m: int, kind: str) -> None:
    """Windows that drop more than half, as in Bulyan, are included; both kinds of code are run."""
    rng = np.random.default_rng(m)
    # Multiples of 1/8 around a centre that is one of them: nothing is rounded, so ties are exact.
    rows = (rng.integers(-9, 10, size=(m, 19)) / 8).astype(kind)
    sizes = _windows(m)
    if m > 13:
        odd = m - 1 - m % 2
        rows, m = rows[:odd].copy(), odd
        sizes = [Window((m - 1) // 2, drop) for drop in (1, m // 3, m // 2, m // 2 + 1, m - 40)]
    for window in sizes:
        out = np.empty(19, kind)
        kernels.reduce(rows_of(rows), window, out.ctypes.data)
        columns = rows.astype(np.float64).T
        wanted = np.array([trimmed(column, window.trim) for column in columns])
        if window.drop:
            wanted = np.array(
                [
                    nearest(column, y, m - window.drop)
                    for column, y in zip(columns, wanted, strict=True)
                ]
            )
        np.testing.assert_allclose(out, wanted, rtol=0, atol=2e-6 if kind == "float32" else 1e-14)


@pytest.mark.parametrize("m", [3, 32, 33, 100, 193, 300, 1024])
def test_table_programs_sort(m: int) -> None:
    """The steps of the table program, interpreted in NumPy, sort m wires among padding."""
    padded = programs.padded_rows(m)
    rng = np.random.default_rng(m)
    wires = np.full((padded, 300), np.inf)
    wires[:m] = rng.integers(0, 50, size=(m, 300))
    ordered = np.sort(wires, axis=0)
    for kind, first, stride, unit in programs.program(m).tolist():
        groups = 1 << kind if kind else 1
        places = [
            first + g * stride + c * unit
            for g in range(groups)
            for c in range(programs.BLOCK // groups)
        ]
        block = wires[places]
        run(
            sorting_network(programs.BLOCK)
            if kind == programs.SORT
            else programs._bitonic_layers(kind),
            block,
        )
        wires[places] = block
    np.testing.assert_array_equal(wires, ordered)


@pytest.mark.parametrize("kind", ["float16", "float32", "float64"])
def test_straight_line_code_and_table_program_agree(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(40, 37)).astype(kind)
    rows[rng.integers(40, size=37), np.arange(37)] = np.nan
    windows = [Window(9), Window(19), Window(13, 13), Window(19, 13), Window(19, 30)]
    windows += [Window(13, 13, cutoff=cutoff) for cutoff in (0.5, 1.0, 4.0)]
    cases = [(window, False) for window in windows] + [(Window(13, 13, cutoff=1.0), True)]
    for window, mean in cases:
        answers, tallies = [], []
        for limit in (192, 10):
            monkeypatch.setattr(code, "STRAIGHT_LINE_ROWS", limit)
            counts, out = np.zeros(40, np.int64), np.empty(37, kind)
            kernels.reduce(rows_of(rows), window, out.ctypes.data, counts, mean=mean)
            answers.append(out)
            tallies.append(counts)
        eps = float(np.finfo(np.float32 if kind == "float16" else kind).eps)
        rtol = 1e-3 if kind == "float16" else 8 * eps
        # The two add the same values, of size 1, in different orders.
        np.testing.assert_allclose(answers[0], answers[1], rtol=rtol, atol=4 * eps)
        np.testing.assert_array_equal(tallies[0], tallies[1])
