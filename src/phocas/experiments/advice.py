"""Report what b and cutoff a recorded run would have needed, and the measured rules for such runs.

The counts are a lower bound on what was wrong. Attacks that stay within the honest distribution are
not counted, and with a b that is too small nothing is guaranteed. A simulation knows how many
workers its attack makes Byzantine, so no smaller b is reported as sufficient. The report shows what
past rounds needed and what other choices cost. The choice of b is left to the reader.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from phocas.attacks import ATTACKS, RowAttack
from phocas.attacks.machine import OneWorker
from phocas.data.splits import IID, Partition
from phocas.detection.comparison import GROSS, OutlierCount
from phocas.detection.own_past import check_worker_data
from phocas.experiments.locks import actual_status
from phocas.experiments.recommendations import Recommendation, recommended
from phocas.rules import RULES, Bounded, Heraclius, Monitor, Rule
from phocas.specs import Foreign

if TYPE_CHECKING:
    from phocas.experiments.results import Results, RunRecord
    from phocas.rules.guarantee import Tolerance

_MOST_CHOICES = 8
_OTHER_CUTOFFS = (0.0, 2.0, 4.0, 8.0, 16.0)


@dataclass(frozen=True)
class Seen:
    """Values beyond a cutoff, summarised over all rounds that were counted."""

    cutoff: float
    """Number of deviations from the centre of the column beyond which values are counted."""
    most: int
    """Largest number of such values in one column."""
    rows: int
    """Largest number of workers with such a value in one round."""
    rounds: int
    """Number of rounds with at least one such value."""
    share: float
    """Mean share of such values among all values."""


@dataclass(frozen=True)
class Cost:
    """The error bound Delta of the rule with some b and cutoff, for the values of the run."""

    b: int
    cutoff: float | None
    bound: float | None
    """None if there is no theorem, or more was wrong than this b tolerates."""


@dataclass(frozen=True)
class Advice:
    """The b that a run needed, compared with the tolerance of its rule."""

    record: RunRecord
    """The run."""
    status: str
    """Status of the run, which may not have finished."""
    counted: int
    """Number of rounds in which values were counted."""
    seen: tuple[Seen, ...]
    """Values beyond each of several cutoffs."""
    by_rows: bool
    """Whether the rule tolerates Byzantine rows only, so that workers are counted, not values.
    """
    tolerated: int | None
    """Number that the rule tolerates; None for a user-defined rule, which is not imported here."""
    watched: str | None
    """The monitored rule, if the run applied the mean and only monitored this rule."""
    would: int | None
    """Number that the monitored rule would tolerate."""
    byzantine: int | None
    """Number of workers that the simulated attack makes Byzantine; None if unknown."""
    unknown: str | None
    """Why more values may have been wrong than ``needed`` says; None if there is no reason."""
    needed: int
    """Smallest b that would have sufficed for everything that is certain."""
    grounds: tuple[str, ...]
    """What requires ``needed``: distant values, flagged workers, or the simulated attack."""
    costs: tuple[Cost, ...]
    """Error bounds of the rule with other values of b and of the cutoff."""
    rules: tuple[Recommendation, ...]
    """The rules that were measured for such data and momentum, with the b of this run."""

    @property
    def hopeless(self) -> bool:
        """Return whether so much was wrong that no rule with any b suffices."""
        return 2 * self.needed >= int(self.record.config["workers"])

    @property
    def unused(self) -> range:
        """Return the values of b above ``needed``; if ``unknown`` is set, the run may need them."""
        return range(self.needed + 1, (self.tolerated or 0) + 1)


def advise(results: Results, record: RunRecord) -> Advice:
    """Compute what b a run would have needed; raise ValueError if nothing was counted."""
    rows = results.table("implausible", record.id)
    if not rows:
        raise ValueError(
            f"run {record.id} has no counts of implausible values: {_why_uncounted(record)}"
        )
    counts = [OutlierCount(row["reach"], row["most"], row["rows"], row["share"]) for row in rows]
    seen = tuple(
        _sum_up([one for one in counts if one.cutoff == cutoff]) for cutoff in _cutoffs(counts)
    )
    m = int(record.config["workers"])
    rule = RULES.read(record.config["rule"])
    watched = rule.rule if isinstance(rule, Monitor) else None
    judged = rule if watched is None else watched
    by_rows = not isinstance(judged, Foreign) and _survives_rows_only(judged.tolerates(m))
    gross = next(one for one in seen if one.cutoff == GROSS)
    byzantine = _byzantine(record)
    what = "workers with values" if by_rows else "values of a column"
    each = {
        f"{byzantine} Byzantine workers of the attack": byzantine or 0,
        f"the {what} beyond {GROSS:g} deviations": gross.rows if by_rows else gross.most,
        "flagged workers": _proven(record),
    }
    needed = max(each.values())
    tolerated = None if isinstance(rule, Foreign) else _most(rule.tolerates(m))
    would = None if watched is None else _most(watched.tolerates(m))
    return Advice(
        record=record,
        status=actual_status(record, results.path),
        counted=len(counts) // len(seen),
        seen=seen,
        by_rows=by_rows,
        tolerated=tolerated,
        watched=None if watched is None else str(watched),
        would=would,
        byzantine=byzantine,
        unknown=_unknown(record, byzantine),
        needed=needed,
        grounds=tuple(name for name, most in each.items() if needed and most == needed),
        costs=() if isinstance(judged, Foreign) else _costs(judged, m, needed),
        rules=_rules(record, max(1, needed, tolerated or 0, would or 0)),
    )


def _rules(record: RunRecord, b: int) -> tuple[Recommendation, ...]:
    """Return the recommended rules for the data and the momentum of a run, with this b."""
    config = record.config
    alike = config["split"] in (IID.name, Partition.name)
    data = check_worker_data(config.get("worker_data") or ("alike" if alike else "differ"))
    found = recommended(data, momentum=bool(config.get("worker_momentum")))
    most = (int(config["workers"]) - 1) // 2
    return tuple(replace(each, rule=each.rule_with(min(b, most))) for each in found)


def _survives_rows_only(tolerance: Tolerance) -> bool:
    return tolerance.values == 0 < tolerance.rows


def _most(tolerance: Tolerance) -> int:
    return max(tolerance.rows, tolerance.values)


def _why_uncounted(record: RunRecord) -> str:
    """Return why nothing was counted, and what to do about it."""
    for key in ("clients", "asynchronous"):
        value = record.config.get(key)
        if value is not None:
            return (
                "values are counted only where every worker has its row in every round: got"
                f" {key} {value}; a run without {key} can be advised on"
            )
    if not record.rounds_done:
        return "none of its rounds is recorded; continue it with the command that started it"
    return "it was recorded by an older phocas; run it again with --restart to be advised on it"


def _byzantine(record: RunRecord) -> int | None:
    """Return the number of workers that the attack makes Byzantine, or None if it is not fixed."""
    if record.attack is None:
        return 0
    attack = ATTACKS.read(record.attack)
    if isinstance(attack, RowAttack):
        return attack.q
    return 1 if isinstance(attack, OneWorker) else None


def _unknown(record: RunRecord, byzantine: int | None) -> str | None:
    """Return why the counts cannot show everything that was wrong, or None if they can."""
    if record.config["split"] != "iid":
        return (
            f"workers hold different data ({record.config['split']}), and the counts cannot tell"
            " honest values that differ from wrong ones"
        )
    if byzantine is None:
        return f"{record.attack} does not say how many workers it makes Byzantine"
    if record.config.get("faults"):
        return "the fault script adds wrong values, and the counts show only those far away"
    return None


def _proven(record: RunRecord) -> int:
    """Return the number of flagged workers, or 0 if workers hold different kinds of data."""
    return len(record.suspects) if record.config["split"] == "iid" else 0


def _cutoffs(counts: list[OutlierCount]) -> list[float]:
    return sorted({one.cutoff for one in counts})


def _sum_up(counts: list[OutlierCount]) -> Seen:
    return Seen(
        counts[0].cutoff,
        max(one.most for one in counts),
        max(one.rows for one in counts),
        sum(one.most > 0 for one in counts),
        sum(one.share for one in counts) / len(counts),
    )


def _costs(rule: Rule, m: int, q: int) -> tuple[Cost, ...]:
    """Return the bounds for b from what was needed to the configured b, and for other cutoffs."""
    if not isinstance(rule, Bounded):
        return ()
    top = max(q, rule.b)
    between = range(q, top + 1, max(1, (top - q) // _MOST_CHOICES))
    choices = sorted({max(0, q - 1), *between, top})
    choices = [b for b in choices if b <= rule.largest_b(m)]
    if isinstance(rule, Heraclius):
        cutoffs = sorted({rule.cutoff, *_OTHER_CUTOFFS})
        return tuple(
            Cost(b, cutoff, replace(rule, b=b, cutoff=cutoff).bound(m, q))
            for b in choices
            for cutoff in cutoffs
        )
    return tuple(Cost(b, None, replace(rule, b=b).bound(m, q)) for b in choices)
