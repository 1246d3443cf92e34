"""How far a rule may be from the true gradient: the paper's Deltas, in units of V.

``V`` bounds the variance of one correct gradient, ``E ||v - g||^2 <= V``. Each ``delta_*`` is the
formula as printed, under the conditions its proof needs. The proofs treat the values that were not
replaced as independent, which an attacker who looks first and then picks what to replace makes
false; each ``adaptive_*`` is a bound that holds against that attacker too. The derivations are in
docs/theory.md.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from phocas.specs import count, unknown

if TYPE_CHECKING:
    from collections.abc import Iterable


def largest_b(m: int) -> int:
    """Return the largest b with ``2b < m``: beyond it the bad values may be the majority."""
    return (count("a rule", "m", m, minimum=1) - 1) // 2


def largest_krum(m: int) -> int:
    """Return the largest q with ``2q + 2 < m``, which Krum needs; -1 if there is none."""
    return max((count("Krum", "m", m, minimum=1) - 3) // 2, -1)


def delta_krum(m: int, q: int) -> float:
    """Return Delta_0, the bound of Krum with q bad rows (the paper's first lemma).

    ``6m - 6q + (4q(m-q-2) + 4q^2(m-q-1)) / (m-2q-2)``, for ``2q + 2 < m``.

    >>> delta_krum(m=5, q=1)
    44.0
    """
    m, q = _krum_condition(m, q)
    return 6 * m - 6 * q + (4 * q * (m - q - 2) + 4 * q**2 * (m - q - 1)) / (m - 2 * q - 2)


def delta_trimmed_mean(m: int, q: int, b: int) -> float:
    """Return Delta_1, the bound of the trimmed mean with q bad values a column (Theorem 1).

    ``2(b+1)(m-q) / (m-b-q)^2``, for ``q <= b`` and ``2b < m``. The theorem asks for ``2q < m``
    only, but with ``b < q`` one huge value reaches the result, so there is no bound and this
    raises.

    >>> delta_trimmed_mean(m=3, q=1, b=1)
    8.0
    """
    m, q, b = _column_condition("TrimmedMean", m, q, b)
    return 2 * (b + 1) * (m - q) / (m - b - q) ** 2


def delta_phocas(m: int, q: int, b: int) -> float:
    """Return Delta_2, the bound of Phocas with q bad values a column (Theorem 2).

    ``4 + 12(b+1)(m-q) / (m-b-q)^2``, for ``q <= b`` and ``2b < m`` (``2q < n`` in print). It is
    ``4 + 6 Delta_1``: always above that of the trimmed mean.

    >>> delta_phocas(m=3, q=1, b=1)
    52.0
    """
    m, q, b = _column_condition("Phocas", m, q, b)
    return 4 + 12 * (b + 1) * (m - q) / (m - b - q) ** 2


def adaptive_krum(m: int, q: int) -> float:
    """Bound Krum against an attacker who picks the rows after seeing all: always below Delta_0.

    ``m max(1, (1 + sqrt 2)^2 / (m-2q-1))``, for ``2q + 2 < m``; ``m`` without bad rows.

    >>> round(adaptive_krum(m=5, q=1), 3)
    14.571
    """
    m, q = _krum_condition(m, q)
    return m * max(1.0, (1 + math.sqrt(2)) ** 2 / (m - 2 * q - 1) if q else 0.0)


def adaptive_trimmed_mean(m: int, q: int, b: int) -> float:
    """Bound the trimmed mean against an attacker who picks the values after seeing all.

    ``min(m, 2(b+q+1)) / (m-b-q)``, for ``q <= b`` and ``2b < m``.

    >>> adaptive_trimmed_mean(m=3, q=1, b=1)
    3.0
    """
    m, q, b = _column_condition("TrimmedMean", m, q, b)
    return min(m, 2 * (b + q + 1)) / (m - b - q)


def adaptive_phocas(m: int, q: int, b: int) -> float:
    """Bound Phocas against an attacker who picks the values after seeing all.

    ``(sqrt(m/(m-q)) + 2 sqrt(D))^2`` with D the same bound of the trimmed mean.

    >>> round(adaptive_phocas(m=3, q=1, b=1), 3)
    21.985
    """
    m, q, b = _column_condition("Phocas", m, q, b)
    return (math.sqrt(m / (m - q)) + 2 * math.sqrt(adaptive_trimmed_mean(m, q, b))) ** 2


@dataclasses.dataclass(frozen=True)
class Bound:
    """What is promised of a rule told b: its bounds in units of V, or why there are none."""

    rule: str
    b: int | None
    feasible: bool
    reason: str
    printed: float | None = None
    adaptive: float | None = None


def table(m: int, q: int, values: Iterable[int]) -> list[Bound]:
    """Judge every rule for every b: feasible or not and why, and the bounds in units of V.

    The median is the trimmed mean with the largest b. Krum told b has the bound of b bad rows, of
    which fewer are a special case. The paper has no bound for Multi-Krum.
    """
    q = count("a bound", "q", q)
    if q > largest_b(m):
        raise ValueError(
            f"no rule survives without a correct majority, 2q < m: got q={q} with m={m} workers,"
            f" the largest q is {largest_b(m)}"
        )
    values = [check_majority("a rule", m, b) for b in values]
    median = dataclasses.replace(judge("trimmed-mean", m, q, largest_b(m)), rule="median", b=None)
    return [_mean(m, q), median] + [judge(rule, m, q, b) for rule in JUDGED for b in values]


JUDGED = ("krum", "multi-krum", "trimmed-mean", "phocas")


def judge(rule: str, m: int, q: int, b: int) -> Bound:
    """Judge one of the rules ``JUDGED`` for one b.

    >>> judge("krum", 20, 6, 9).reason
    'needs 2b + 2 < m (b <= 8)'
    >>> judge("phocas", 20, 6, 5).reason
    'needs q <= b'
    """
    if rule not in JUDGED:
        raise ValueError(unknown("rule", rule, JUDGED))
    limit, condition = largest_b(m), "2b < m"
    if rule in ("krum", "multi-krum"):
        limit, condition = largest_krum(m), "2b + 2 < m"
    if b > limit:
        most = f"b <= {limit}" if limit >= 0 else "m >= 3"
        return Bound(rule, b, feasible=False, reason=f"needs {condition} ({most})")
    if q > b:
        return Bound(rule, b, feasible=False, reason="needs q <= b")
    if rule == "multi-krum":
        return Bound(rule, b, feasible=True, reason="no bound")
    if rule == "krum":
        printed, adaptive = delta_krum(m, b), adaptive_krum(m, b)
    elif rule == "phocas":
        printed, adaptive = delta_phocas(m, q, b), adaptive_phocas(m, q, b)
    else:
        printed, adaptive = delta_trimmed_mean(m, q, b), adaptive_trimmed_mean(m, q, b)
    return Bound(rule, b, feasible=True, reason="", printed=printed, adaptive=adaptive)


def check_majority(owner: str, m: int, b: int) -> int:
    """Return b, refused if ``2b >= m``: no rule survives that many."""
    b = count(owner, "b", b)
    if b > largest_b(m):
        raise ValueError(
            f"{owner} needs 2b < m: got b={b} with m={m} workers, the largest b is {largest_b(m)}"
        )
    return b


def _mean(m: int, q: int) -> Bound:
    if q:
        return Bound("mean", None, feasible=False, reason="needs q = 0")
    return Bound("mean", None, feasible=True, reason="no bad values", adaptive=1 / m)


def _krum_condition(m: int, q: int) -> tuple[int, int]:
    q, limit = count("Krum", "q", q), largest_krum(m)
    if q > limit:
        most = f"the largest q is {limit}" if limit >= 0 else "it needs at least 3 workers"
        raise ValueError(f"Krum needs 2q + 2 < m: got q={q} with m={m} workers, {most}")
    return m, q


def _column_condition(owner: str, m: int, q: int, b: int) -> tuple[int, int, int]:
    q, b = count(owner, "q", q), check_majority(owner, m, b)
    if q > b:
        raise ValueError(f"{owner} needs q <= b: got q={q} with b={b}, the largest q is {b}")
    return m, q, b
