"""Bounds on a rule's error: the paper's Deltas, in units of V.

``V`` bounds the variance of one honest gradient, ``E ||v - g||^2 <= V``. Each ``delta_*`` is the
formula as printed in the paper, under the conditions its proof needs. Each raises ValueError where
``rule.bound(m, q)``, which holds the formula, returns None. The proofs assume that the honest
values are independent of the choice which values are replaced. An adaptive attacker, who sees all
values before choosing, violates this. Each ``adaptive_*`` is a bound that also holds against an
adaptive attacker. The derivations are in docs/theory.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from phocas.rules import RULES, Bounded, Heraclius, Krum, Phocas, Rule, TrimmedMean
from phocas.specs import count


def largest_b(m: int) -> int:
    """Return the largest b with ``2b < m``; for larger b Byzantine values may be the majority.

    Args:
        m: number of workers.

    >>> from phocas.theory import largest_b
    >>> largest_b(20), largest_b(21)
    (9, 10)
    """
    return TrimmedMean.largest_b(count("a rule", "m", m, minimum=1))


def largest_krum(m: int) -> int:
    """Return the largest q with ``2q + 2 < m``, which Krum needs; -1 if there is none.

    Args:
        m: number of workers.

    >>> from phocas.theory import largest_krum
    >>> largest_krum(20), largest_krum(2)
    (8, -1)
    """
    return max(Krum.largest_b(count("Krum", "m", m, minimum=1)), -1)


def delta_krum(m: int, q: int) -> float:
    """Return Delta_0, the bound of Krum with q Byzantine rows (the paper's first lemma).

    ``6m - 6q + (4q(m-q-2) + 4q^2(m-q-1)) / (m-2q-2)``, for ``2q + 2 < m``.

    Args:
        m: number of workers.
        q: number of Byzantine rows.

    >>> delta_krum(m=5, q=1)
    44.0
    """
    return _krum_bound(m, q, adaptive=False)


def delta_trimmed_mean(m: int, q: int, b: int) -> float:
    """Return Delta_1, the trimmed mean's bound with q Byzantine values per column (Theorem 1).

    ``2(b+1)(m-q) / (m-b-q)^2``, for ``q <= b`` and ``2b < m``. The theorem requires only ``2q <
    m``. With ``b < q``, however, one huge value can change the result without limit, so there is no
    bound and this function raises ValueError.

    Args:
        m: number of workers.
        q: number of Byzantine values per column.
        b: number of Byzantine values per column that the rule is configured to tolerate.

    >>> delta_trimmed_mean(m=3, q=1, b=1)
    8.0
    """
    return _bound(TrimmedMean(b), m, q, adaptive=False)


def delta_phocas(m: int, q: int, b: int) -> float:
    """Return Delta_2, the bound of Phocas with q Byzantine values per column (Theorem 2).

    ``4 + 12(b+1)(m-q) / (m-b-q)^2``, for ``q <= b`` and ``2b < m`` (``2q < n`` in print). It equals
    ``4 + 6 Delta_1``, so it is always above the bound of the trimmed mean.

    Args:
        m: number of workers.
        q: number of Byzantine values per column.
        b: number of Byzantine values per column that the rule is configured to tolerate.

    >>> delta_phocas(m=3, q=1, b=1)
    52.0
    """
    return _bound(Phocas(b), m, q, adaptive=False)


def delta_heraclius(
    m: int, q: int, b: int, cutoff: float = Heraclius.cutoff, tail: float = Heraclius.tail
) -> float:
    """Return Delta_3, the bound of Heraclius with q Byzantine values per column (docs/theory.md).

    ``(sqrt D + K (1 + sqrt D))^2`` with D = Delta_1 and K at least 1, for ``q <= b`` and ``2b <
    m``. K grows with the tail, and with the cutoff if q > 0. Without a cutoff the bound is Delta_2.

    Args:
        m: number of workers.
        q: number of Byzantine values per column.
        b: number of Byzantine values per column that the rule is configured to tolerate.
        cutoff: distance from the centre, in deviations, up to which a value has full weight.
        tail: largest length of a row's tail, in units of the root of the sum of squared radii.

    >>> [round(delta_heraclius(m=20, q=q, b=6, tail=0), 1) for q in (0, 3, 6)]
    [14.6, 101.1, 500.6]
    """
    return _bound(Heraclius(b, cutoff, tail), m, q, adaptive=False)


def adaptive_krum(m: int, q: int) -> float:
    """Return a bound of Krum against an adaptive attacker; it is always below Delta_0.

    ``m max(1, (1 + sqrt 2)^2 / (m-2q-1))``, for ``2q + 2 < m``; ``m`` without Byzantine rows.

    Args:
        m: number of workers.
        q: number of Byzantine rows.

    >>> round(adaptive_krum(m=5, q=1), 3)
    14.571
    """
    return _krum_bound(m, q, adaptive=True)


def adaptive_trimmed_mean(m: int, q: int, b: int) -> float:
    """Return a bound of the trimmed mean against an adaptive attacker.

    ``min(m, 2(b+q+1)) / (m-b-q)``, for ``q <= b`` and ``2b < m``.

    Args:
        m: number of workers.
        q: number of Byzantine values per column.
        b: number of Byzantine values per column that the rule is configured to tolerate.

    >>> adaptive_trimmed_mean(m=3, q=1, b=1)
    3.0
    """
    return _bound(TrimmedMean(b), m, q, adaptive=True)


def adaptive_phocas(m: int, q: int, b: int) -> float:
    """Return a bound of Phocas against an adaptive attacker.

    ``(sqrt(m/(m-q)) + 2 sqrt(D))^2``, where D is ``adaptive_trimmed_mean(m, q, b)``.

    Args:
        m: number of workers.
        q: number of Byzantine values per column.
        b: number of Byzantine values per column that the rule is configured to tolerate.

    >>> round(adaptive_phocas(m=3, q=1, b=1), 3)
    21.985
    """
    return _bound(Phocas(b), m, q, adaptive=True)


def adaptive_heraclius(
    m: int, q: int, b: int, cutoff: float = Heraclius.cutoff, tail: float = Heraclius.tail
) -> float:
    """Return a bound of Heraclius against an adaptive attacker.

    ``(sqrt D + K (sqrt(m/(m-q)) + sqrt D))^2``, where D is ``adaptive_trimmed_mean(m, q, b)``.

    Args:
        m: number of workers.
        q: number of Byzantine values per column.
        b: number of Byzantine values per column that the rule is configured to tolerate.
        cutoff: distance from the centre, in deviations, up to which a value has full weight.
        tail: largest length of a row's tail, in units of the root of the sum of squared radii.

    >>> adaptive_heraclius(m=20, q=3, b=6, cutoff=0) == adaptive_phocas(m=20, q=3, b=6)
    True
    """
    return _bound(Heraclius(b, cutoff, tail), m, q, adaptive=True)


@dataclasses.dataclass(frozen=True)
class Bound:
    """The bounds of a rule given b, in units of V, or the reason why there are none.

    Attributes:
        rule: name of the rule.
        b: the rule's b, or None if it has none.
        feasible: whether the rule tolerates q Byzantine values with this b.
        reason: why it does not, or why there is no bound; empty otherwise.
        printed: the paper's bound.
        adaptive: the bound against an adaptive attacker.

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
    """Return the error bounds of every registered rule, one entry for each rule and each b.

    Rules that need more parameters than b, such as a radius, are omitted.

    Args:
        m: number of workers.
        q: number of Byzantine workers.
        values: the values of b to use.

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
        for rule in ([cls(b) for b in values] if issubclass(cls, Bounded) else cls.choices(m))
    ]
    return [judge(rule, m, q) for rule in rules]


def judge(rule: Rule, m: int, q: int) -> Bound:
    """Return the bounds of one rule, or the reason why there are none.

    >>> judge(Krum(9), 20, 6).reason
    'needs 2b + 2 < m (b <= 8)'
    >>> judge(Phocas(5), 20, 6).reason
    'needs q <= b'
    """
    b = rule.b if isinstance(rule, Bounded) else None
    if isinstance(rule, Bounded) and rule.b > (limit := rule.largest_b(m)):
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
    """Return a rule's bound; raise ValueError with the violated condition if there is none."""
    owner = type(rule).__name__
    m, q = count(owner, "m", m, minimum=1), count(owner, "q", q)
    rule.check(m)
    bound = rule.bound(m, q, adaptive=adaptive)
    if bound is None:
        raise ValueError(
            f"{owner} needs q <= b: got q={q} with b={rule.b}, the largest q is {rule.b}"
        )
    return bound
