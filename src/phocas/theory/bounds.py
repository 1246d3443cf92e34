"""How far a rule may be from the true gradient: the paper's Deltas, in units of V.

``V`` bounds the variance of one correct gradient, ``E ||v - g||^2 <= V``. Each ``delta_*`` is the
formula as printed, under the conditions its proof needs; the formulas live on the rules, as
``rule.bound(m, q)``, and what raises here is None there. The proofs treat the values that were not
replaced as independent, which an attacker who looks first and then picks what to replace makes
false; each ``adaptive_*`` is a bound that holds against that attacker too. The derivations are in
docs/theory.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from phocas.rules import RULES, Heraclius, Krum, Phocas, Rule, Told, TrimmedMean
from phocas.specs import count


def largest_b(m: int) -> int:
    """Return the largest b with ``2b < m``: beyond it the bad values may be the majority.

    Args:
        m: how many workers there are.

    >>> from phocas.theory import largest_b
    >>> largest_b(20), largest_b(21)
    (9, 10)
    """
    return TrimmedMean.largest_b(count("a rule", "m", m, minimum=1))


def largest_krum(m: int) -> int:
    """Return the largest q with ``2q + 2 < m``, which Krum needs; -1 if there is none.

    Args:
        m: how many workers there are.

    >>> from phocas.theory import largest_krum
    >>> largest_krum(20), largest_krum(2)
    (8, -1)
    """
    return max(Krum.largest_b(count("Krum", "m", m, minimum=1)), -1)


def delta_krum(m: int, q: int) -> float:
    """Return Delta_0, the bound of Krum with q bad rows (the paper's first lemma).

    ``6m - 6q + (4q(m-q-2) + 4q^2(m-q-1)) / (m-2q-2)``, for ``2q + 2 < m``.

    Args:
        m: how many workers there are.
        q: how many rows are bad.

    >>> delta_krum(m=5, q=1)
    44.0
    """
    return _krum_bound(m, q, adaptive=False)


def delta_trimmed_mean(m: int, q: int, b: int) -> float:
    """Return Delta_1, the bound of the trimmed mean with q bad values a column (Theorem 1).

    ``2(b+1)(m-q) / (m-b-q)^2``, for ``q <= b`` and ``2b < m``. The theorem asks for ``2q < m``
    only, but with ``b < q`` one huge value reaches the result, so there is no bound and this
    raises.

    Args:
        m: how many workers there are.
        q: how many values of each column are bad.
        b: how many the rule is told to survive.

    >>> delta_trimmed_mean(m=3, q=1, b=1)
    8.0
    """
    return _bound(TrimmedMean(b), m, q, adaptive=False)


def delta_phocas(m: int, q: int, b: int) -> float:
    """Return Delta_2, the bound of Phocas with q bad values a column (Theorem 2).

    ``4 + 12(b+1)(m-q) / (m-b-q)^2``, for ``q <= b`` and ``2b < m`` (``2q < n`` in print). It is
    ``4 + 6 Delta_1``: always above that of the trimmed mean.

    Args:
        m: how many workers there are.
        q: how many values of each column are bad.
        b: how many the rule is told to survive.

    >>> delta_phocas(m=3, q=1, b=1)
    52.0
    """
    return _bound(Phocas(b), m, q, adaptive=False)


def delta_heraclius(m: int, q: int, b: int, reach: float = Heraclius.reach) -> float:
    """Return Delta_3, the bound of Heraclius with q bad values a column (docs/theory.md).

    ``(sqrt D + K (1 + sqrt D))^2`` with D = Delta_1 and K at least 1, which grows with the reach if
    q > 0; for ``q <= b`` and ``2b < m``. Without a reach it is Delta_2.

    Args:
        m: how many workers there are.
        q: how many values of each column are bad.
        b: how many the rule is told to survive.
        reach: up to how many spreads a value counts in full.

    >>> [round(delta_heraclius(m=20, q=q, b=6), 1) for q in (0, 3, 6)]
    [14.6, 101.1, 500.6]
    """
    return _bound(Heraclius(b, reach), m, q, adaptive=False)


def adaptive_krum(m: int, q: int) -> float:
    """Bound Krum against an attacker who picks the rows after seeing all: always below Delta_0.

    ``m max(1, (1 + sqrt 2)^2 / (m-2q-1))``, for ``2q + 2 < m``; ``m`` without bad rows.

    Args:
        m: how many workers there are.
        q: how many rows are bad.

    >>> round(adaptive_krum(m=5, q=1), 3)
    14.571
    """
    return _krum_bound(m, q, adaptive=True)


def adaptive_trimmed_mean(m: int, q: int, b: int) -> float:
    """Bound the trimmed mean against an attacker who picks the values after seeing all.

    ``min(m, 2(b+q+1)) / (m-b-q)``, for ``q <= b`` and ``2b < m``.

    Args:
        m: how many workers there are.
        q: how many values of each column are bad.
        b: how many the rule is told to survive.

    >>> adaptive_trimmed_mean(m=3, q=1, b=1)
    3.0
    """
    return _bound(TrimmedMean(b), m, q, adaptive=True)


def adaptive_phocas(m: int, q: int, b: int) -> float:
    """Bound Phocas against an attacker who picks the values after seeing all.

    ``(sqrt(m/(m-q)) + 2 sqrt(D))^2`` with D the same bound of the trimmed mean.

    Args:
        m: how many workers there are.
        q: how many values of each column are bad.
        b: how many the rule is told to survive.

    >>> round(adaptive_phocas(m=3, q=1, b=1), 3)
    21.985
    """
    return _bound(Phocas(b), m, q, adaptive=True)


def adaptive_heraclius(m: int, q: int, b: int, reach: float = Heraclius.reach) -> float:
    """Bound Heraclius against an attacker who picks the values after seeing all.

    ``(sqrt D + K (sqrt(m/(m-q)) + sqrt D))^2`` with D the same bound of the trimmed mean.

    Args:
        m: how many workers there are.
        q: how many values of each column are bad.
        b: how many the rule is told to survive.
        reach: up to how many spreads a value counts in full.

    >>> adaptive_heraclius(m=20, q=3, b=6, reach=0) == adaptive_phocas(m=20, q=3, b=6)
    True
    """
    return _bound(Heraclius(b, reach), m, q, adaptive=True)


@dataclasses.dataclass(frozen=True)
class Bound:
    """What is promised of a rule told b: its bounds in units of V, or why there are none.

    Attributes:
        rule: its name.
        b: what it is told.
        feasible: whether it may be told that.
        reason: why not.
        printed: the paper's bound.
        adaptive: the one against who picks after seeing all.

    >>> (bound,) = [each for each in table(4, q=1, values=[1]) if each.rule == "krum"]
    >>> bound.feasible, bound.reason
    (False, 'needs 2b + 2 < m (b <= 0)')
    """

    rule: str
    b: int | None
    feasible: bool
    reason: str
    printed: float | None = None
    adaptive: float | None = None


def table(m: int, q: int, values: Iterable[int]) -> list[Bound]:
    """Judge every rule for every b: feasible or not and why, and the bounds in units of V.

    Rules that need more than a b to be told, such as a radius, are not among them.

    Args:
        m: how many workers there are.
        q: how many are wrong.
        values: the b that rules are told.

    >>> found = {bound.rule: bound for bound in table(5, q=1, values=[1])}
    >>> found["phocas"].b, round(found["phocas"].printed, 1), found["mean"].feasible
    (1, 14.7, False)
    """
    q = count("a bound", "q", q)
    if q > largest_b(m):
        raise ValueError(
            f"no rule survives without a correct majority, 2q < m: got q={q} with m={m} workers,"
            f" the largest q is {largest_b(m)}"
        )
    for b in (values := list(values)):
        TrimmedMean(b).check(m)
    rules = [
        rule
        for cls in RULES.values()
        for rule in ([cls(b) for b in values] if issubclass(cls, Told) else cls.choices(m))
    ]
    return [judge(rule, m, q) for rule in rules]


def judge(rule: Rule, m: int, q: int) -> Bound:
    """Judge one rule.

    >>> judge(Krum(9), 20, 6).reason
    'needs 2b + 2 < m (b <= 8)'
    >>> judge(Phocas(5), 20, 6).reason
    'needs q <= b'
    """
    b = rule.b if isinstance(rule, Told) else None
    if isinstance(rule, Told) and rule.b > (limit := rule.largest_b(m)):
        most = f"b <= {limit}" if limit >= 0 else "m is too small"
        return Bound(rule.name, b, feasible=False, reason=f"needs {rule.condition} ({most})")
    survived = max(rule.tolerates(m).rows, rule.tolerates(m).values)
    if q > survived:
        reason = "needs q <= b" if survived == b else f"needs q <= {survived}"
        return Bound(rule.name, b, feasible=False, reason=reason)
    printed, adaptive = rule.bound(m, q), rule.bound(m, q, adaptive=True)
    reason = "no bound" if printed is None else ""
    return Bound(rule.name, b, feasible=True, reason=reason, printed=printed, adaptive=adaptive)


def _krum_bound(m: int, q: int, *, adaptive: bool) -> float:
    q, limit = count("Krum", "q", q), largest_krum(m)
    if q > limit:
        most = f"the largest q is {limit}" if limit >= 0 else "it needs at least 3 workers"
        raise ValueError(f"Krum needs 2q + 2 < m: got q={q} with m={m} workers, {most}")
    return _bound(Krum(q), m, q, adaptive=adaptive)


def _bound(
    rule: Krum | TrimmedMean | Phocas | Heraclius, m: int, q: int, *, adaptive: bool
) -> float:
    """Return a rule's bound, or raise with the condition that fails."""
    owner = type(rule).__name__
    m, q = count(owner, "m", m, minimum=1), count(owner, "q", q)
    rule.check(m)
    bound = rule.bound(m, q, adaptive=adaptive)
    if bound is None:
        raise ValueError(
            f"{owner} needs q <= b: got q={q} with b={rule.b}, the largest q is {rule.b}"
        )
    return bound
