"""Audit your own rule.

In this tutorial you write three rules and test each against every attack of the package. A rule is
a frozen dataclass. The method `window` selects the values of a sorted column that the rule
averages. The guarantee of the rule follows from the window.
"""

# The first rule averages the middle half of every column. This rule has no parameter b.
from dataclasses import dataclass

import phocas
from phocas import ColumnRule, FunctionRule, TrimmingRule, Window
from phocas.attacks.audit import audit


@dataclass(frozen=True)
class MiddleHalf(ColumnRule):
    """Average the middle half of each column."""

    def window(self, m):
        return Window(trim=m // 4)


# The window trims a quarter of the values at each end of a column, so the rule tolerates that many
# wrong values. Among 20 workers these are 5: the rule must hold against any attack by 5 workers.
rule = MiddleHalf()
print(f"among 20 workers, {type(rule).__name__} tolerates {rule.tolerates(20).values}")


# A trial is one attack. `distance` is the distance of the result from the honest mean, in standard
# deviations of the honest rows. `limit` is the proven bound of the rule, or two standard deviations
# where the rule has no guarantee. A broken guarantee is a trial within the guarantee, and above its
# limit.
def show(name, trials):
    broken = [trial for trial in trials if trial.broken_promise]
    worst = max(trials, key=lambda trial: trial.distance)
    print(f"{name}: {len(trials)} attacks, {len(broken)} broken guarantees")
    print(f"  worst: {worst.attack.partition(':')[0]}, {worst.distance:.2g} standard deviations")


show("five Byzantine workers", audit(rule, num_workers=20, byzantine=5, dims=2000, rounds=1))
show("six Byzantine workers", audit(rule, num_workers=20, byzantine=6, dims=2000, rounds=1))


# Six Byzantine workers are one more than the rule tolerates. The result is not bounded any more,
# but no guarantee is broken. A rule with a parameter b can tolerate more: here six. Such a rule
# raises an error if b is too large for the number of workers.
@dataclass(frozen=True)
class Interior(TrimmingRule):
    """Cut b values at each end of a column, then drop the one farthest from the rest's mean."""

    def window(self, m):
        return Window(trim=self.b, drop=max(1, self.b))


show("Interior(b=6)", audit(Interior(b=6), num_workers=20, byzantine=6, dims=2000, rounds=1))


# Any function of the rows is a rule too. The package cannot derive a guarantee from a function, so
# you declare one by b. The audit shows when the declaration is wrong.
def plain_mean(rows):
    return rows.mean(axis=0)


claim = FunctionRule(plain_mean, b=1, columnwise=True)
trials = audit(claim, num_workers=20, byzantine=1, dims=2000, rounds=1)
broken = [trial.attack.partition(":")[0] for trial in trials if trial.broken_promise]
print(f"a mean declared with b=1: {len(broken)} broken guarantees, {broken[0]} first")

# A rule of your own also works in pipelines, has a text form, and explains its result.
rule = phocas.NNM(b=3) | Interior(b=3)
print(rule)
