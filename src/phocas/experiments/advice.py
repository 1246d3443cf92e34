"""What a recorded run says about its b and its reach: never which ones to take.

The counts are a lower bound of what went wrong: attacks that stay within the honest distribution
are not counted, and a b that is too small has no bound at all. A simulation knows how many workers
its attack makes Byzantine, so that no smaller b is ever said to be enough. This tells what the past
would have needed and what other choices would have cost, and leaves the choice to the reader.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from phocas.attacks import ATTACKS, RowAttack
from phocas.attacks.machine import OneWorker
from phocas.experiments.locks import actual_status
from phocas.rules import RULES, Heraclius, Rule, Told, Watch
from phocas.rules.census import GROSS, Count
from phocas.specs import Foreign

if TYPE_CHECKING:
    from phocas.experiments.results import Results, RunRecord
    from phocas.rules.promise import Tolerance

_MOST_CHOICES = 8
_OTHER_REACHES = (0.0, 2.0, 4.0, 8.0, 16.0)


@dataclass(frozen=True)
class Seen:
    """The values beyond a reach, over all rounds that were counted."""

    reach: float
    most: int
    """The largest number in one column."""
    rows: int
    """The largest number of workers with one, in one round."""
    rounds: int
    """The rounds with at least one."""
    share: float
    """The mean share of all values."""


@dataclass(frozen=True)
class Cost:
    """The bound Delta that a b and a reach would have had against what was seen."""

    b: int
    reach: float | None
    bound: float | None
    """None: there is no theorem, or more was wrong than this b survives."""


@dataclass(frozen=True)
class Advice:
    """What a run used of what its rule survives."""

    record: RunRecord
    status: str
    """Of the run, which may not have come to its end."""
    counted: int
    """The rounds in which values were counted."""
    seen: tuple[Seen, ...]
    by_rows: bool
    """Whether the rule survives wrong rows only, so that workers count and not values."""
    told: int | None
    """What the rule survives; None for a rule of the user's own, which is not imported here."""
    watched: str | None
    """The rule that was only asked whom it would drop, while the mean was applied."""
    would: int | None
    """What that one would survive."""
    byzantine: int | None
    """How many workers the attack of the simulation made Byzantine; None if it does not say."""
    unknown: str | None
    """Why a b beyond ``needed`` may have been used without being seen; None if it was not."""
    needed: int
    """What would have been enough for all that is beyond doubt."""
    grounds: tuple[str, ...]
    """What needs so much: values far away, suspects, or the attack of the simulation."""
    costs: tuple[Cost, ...]

    @property
    def hopeless(self) -> bool:
        """Tell whether so much was wrong that no b is enough, of whatever rule."""
        return 2 * self.needed >= int(self.record.config["workers"])

    @property
    def unused(self) -> range:
        """Return the b beyond what was needed; with ``unknown`` they may have been used."""
        return range(self.needed + 1, (self.told or 0) + 1)


def advise(results: Results, record: RunRecord) -> Advice:
    """Work out what a run would have needed; refuse one of which nothing was counted."""
    rows = results.table("implausible", record.id)
    if not rows:
        raise ValueError(f"run {record.id} has no counts of implausible values: {_why(record)}")
    counts = [Count(row["reach"], row["most"], row["rows"], row["share"]) for row in rows]
    seen = tuple(
        _sum_up([one for one in counts if one.reach == reach]) for reach in _reaches(counts)
    )
    m = int(record.config["workers"])
    rule = RULES.read(record.config["rule"])
    watched = rule.rule if isinstance(rule, Watch) else None
    judged = rule if watched is None else watched
    by_rows = not isinstance(judged, Foreign) and _survives_rows_only(judged.tolerates(m))
    gross = next(one for one in seen if one.reach == GROSS)
    byzantine = _byzantine(record)
    what = "workers with values" if by_rows else "values of a column"
    each = {
        f"{byzantine} Byzantine workers of the attack": byzantine or 0,
        f"the {what} beyond {GROSS:g} spreads": gross.rows if by_rows else gross.most,
        "suspects": _proven(record),
    }
    needed = max(each.values())
    return Advice(
        record=record,
        status=actual_status(record, results.path),
        counted=len(counts) // len(seen),
        seen=seen,
        by_rows=by_rows,
        told=None if isinstance(rule, Foreign) else _most(rule.tolerates(m)),
        watched=None if watched is None else str(watched),
        would=None if watched is None else _most(watched.tolerates(m)),
        byzantine=byzantine,
        unknown=_unknown(record, byzantine),
        needed=needed,
        grounds=tuple(name for name, most in each.items() if needed and most == needed),
        costs=() if isinstance(judged, Foreign) else _costs(judged, m, needed),
    )


def _survives_rows_only(tolerance: Tolerance) -> bool:
    return tolerance.values == 0 < tolerance.rows


def _most(tolerance: Tolerance) -> int:
    return max(tolerance.rows, tolerance.values)


def _why(record: RunRecord) -> str:
    """Say why nothing was counted, and what can be done about it."""
    for key in ("clients", "asynchronous"):
        value = record.config.get(key)
        if value is not None:
            return (
                "values are counted only where every worker has its row in every round: got"
                f" {key} {value}; a run without {key} can be advised on"
            )
    if not record.rounds_done:
        return "none of its rounds is recorded; let it go on, by the command that began it"
    return "it was recorded by an older phocas; run it again with --restart to be advised on it"


def _byzantine(record: RunRecord) -> int | None:
    """Return how many workers the attack makes Byzantine, where it says so by itself."""
    if record.attack is None:
        return 0
    attack = ATTACKS.read(record.attack)
    if isinstance(attack, RowAttack):
        return attack.q
    return 1 if isinstance(attack, OneWorker) else None


def _unknown(record: RunRecord, byzantine: int | None) -> str | None:
    """Say why the counts cannot show all that was wrong, if they cannot."""
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
    """Count the suspects where they are proven: of workers with one kind of data."""
    return len(record.suspects) if record.config["split"] == "iid" else 0


def _reaches(counts: list[Count]) -> list[float]:
    return sorted({one.reach for one in counts})


def _sum_up(counts: list[Count]) -> Seen:
    return Seen(
        counts[0].reach,
        max(one.most for one in counts),
        max(one.rows for one in counts),
        sum(one.most > 0 for one in counts),
        sum(one.share for one in counts) / len(counts),
    )


def _costs(rule: Rule, m: int, q: int) -> tuple[Cost, ...]:
    """Try the b from what was needed to what was told, and other reaches if there is one."""
    if not isinstance(rule, Told):
        return ()
    top = max(q, rule.b)
    between = range(q, top + 1, max(1, (top - q) // _MOST_CHOICES))
    choices = sorted({max(0, q - 1), *between, top})
    choices = [b for b in choices if b <= rule.largest_b(m)]
    if isinstance(rule, Heraclius):
        reaches = sorted({rule.reach, *_OTHER_REACHES})
        return tuple(
            Cost(b, reach, replace(rule, b=b, reach=reach).bound(m, q))
            for b in choices
            for reach in reaches
        )
    return tuple(Cost(b, None, replace(rule, b=b).bound(m, q)) for b in choices)
