from __future__ import annotations

import itertools
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
import pytest

from phocas import RULES, Bounded, theory

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize(
    ("m", "q", "by_hand"),
    [
        (3, 0, 18),  # 6*3
        (5, 1, 44),  # 24 + (4*2 + 4*3) / 1
        (20, 6, 444),  # 84 + (24*12 + 144*13) / 6
        (20, 8, 1640),  # 72 + (32*10 + 256*11) / 2
    ],
)
def test_krum_bound_matches_hand_computed_values(m: int, q: int, by_hand: float) -> None:
    assert theory.delta_krum(m, q) == pytest.approx(by_hand, rel=1e-15)


@pytest.mark.parametrize(
    ("m", "q", "b", "trimmed", "phocas"),
    [
        (1, 0, 0, Fraction(2), Fraction(16)),
        (3, 1, 1, Fraction(8), Fraction(52)),  # 2*2*2 / 1
        (5, 1, 2, Fraction(6), Fraction(40)),  # 2*3*4 / 4
        (20, 6, 6, Fraction(49, 16), Fraction(179, 8)),  # 2*7*14 / 64
        (20, 6, 9, Fraction(56, 5), Fraction(356, 5)),  # 2*10*14 / 25
        (20, 0, 0, Fraction(1, 10), Fraction(23, 5)),
    ],
)
def test_column_rule_bounds_match_hand_computed_values(
    m: int, q: int, b: int, trimmed: Fraction, phocas: Fraction
) -> None:
    assert theory.delta_trimmed_mean(m, q, b) == pytest.approx(float(trimmed), rel=1e-15)
    assert theory.delta_phocas(m, q, b) == pytest.approx(float(phocas), rel=1e-15)


def test_bounds_change_as_the_paper_says() -> None:
    """Both bounds fall when m rises and when b or q falls, as the paper says."""
    for delta in (theory.delta_trimmed_mean, theory.delta_phocas):
        for m, b in itertools.product(range(3, 30), range(1, 14)):
            for q in range(b + 1):
                if 2 * b >= m:
                    continue
                assert delta(m + 1, q, b) < delta(m, q, b)
                if q < b:
                    assert delta(m, q, b - 1) < delta(m, q, b)
                    assert delta(m, q, b) < delta(m, q + 1, b)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: theory.delta_krum(20, 9), "2q + 2 < m: got q=9 with m=20 workers, .* q is 8"),
        (lambda: theory.delta_krum(2, 0), "Krum needs 2q .* at least 3 workers"),
        (
            lambda: theory.delta_trimmed_mean(8, 1, 4),
            "TrimmedMean needs 2b < m: got b=4 with m=8 workers, the largest b is 3",
        ),
        (
            lambda: theory.delta_phocas(20, 7, 6),
            "Phocas needs q <= b: got q=7 with b=6, the largest q is 6",
        ),
        (lambda: theory.adaptive_trimmed_mean(3, 1, 0), "q <= b"),
        (lambda: theory.adaptive_phocas(4, 1, 2), "2b < m"),
        (lambda: theory.delta_phocas(20, -1, 6), "q >= 0"),
        (lambda: theory.table(20, 10, [9]), "2q < m: got q=10 with m=20 .* largest q is 9"),
        (lambda: theory.table(20, 6, [9, 10]), "2b < m: got b=10 .* largest b is 9"),
    ],
)
def test_errors_name_the_condition_and_the_limit(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("+", r"\+")):
        call()


def test_parameters_must_be_counts() -> None:
    with pytest.raises(TypeError, match="a count, not a fraction"):
        theory.delta_phocas(20, 6, 0.3)  # type: ignore[arg-type]
    assert theory.delta_phocas(np.int64(20), np.int8(6), np.uint8(6)) == 22.375  # type: ignore[arg-type]


def test_krum_bound_holds_against_an_adaptive_attacker() -> None:
    for m in range(3, 200):
        for q in range(theory.largest_krum(m) + 1):
            assert theory.adaptive_krum(m, q) < theory.delta_krum(m, q)


def test_phocas_bound_is_never_below_four_or_the_trimmed_mean_s() -> None:
    """Delta_2 = 4 + 6 Delta_1: the theory never prefers Phocas, even to a single worker."""
    for m in range(3, 100):
        for b in range(theory.largest_b(m) + 1):
            trimmed = theory.delta_trimmed_mean(m, b, b)
            assert theory.delta_phocas(m, b, b) == pytest.approx(4 + 6 * trimmed)


def test_table_contains_every_rule() -> None:
    rows = {(row.rule, row.b): row for row in theory.table(20, 6, range(5, 10))}
    with_b = {cls.name for cls in RULES.values() if issubclass(cls, Bounded)}
    assert {key for key in rows if key[0] in with_b} == set(itertools.product(with_b, range(5, 10)))
    without_b = {(rule, b) for rule, b in rows if rule not in with_b}
    assert without_b >= {("mean", None), ("median", None), ("geometric-median", None)}
    assert without_b <= {(rule, None) for rule in RULES}
    assert rows["mean", None].reason == "needs q <= 0"
    assert rows["median", None].printed == theory.delta_trimmed_mean(20, 6, 9)
    assert rows["krum", 9].reason == "needs 2b + 2 < m (b <= 8)"
    assert rows["krum", 8].printed == theory.delta_krum(20, 8)
    assert rows["phocas", 5].reason == "needs q <= b"
    assert rows["phocas", 5].printed is None
    assert rows["multi-krum", 6].feasible
    assert rows["multi-krum", 6].printed is None
    assert rows["meamed", 6].printed == theory.delta_phocas(20, 6, 9)
    assert theory.table(20, 0, [0])[0].adaptive == 1 / 20
