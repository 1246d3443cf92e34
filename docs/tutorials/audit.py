"""Audit your own rule.

A rule of your own is a frozen dataclass that says which window of a sorted column it averages. What
it survives follows from the window, and `audit` puts every attack to it that the package knows.
"""

# The first attempt: average the middle half of every column, whatever b says.
from dataclasses import dataclass

import phocas
from phocas import ColumnRule, FunctionRule, TrimmingRule, Window
from phocas.attacks.audit import audit


@dataclass(frozen=True)
class MiddleHalf(ColumnRule):
    """Average the middle half of each column."""

    def window(self, m):
        return Window(trim=m // 4)


# Its window says what it survives: a quarter of the values of a column. So among 20 workers it
# promises 5, and an attack by 5 is one that it must hold against.
rule = MiddleHalf()
print(f"among 20 workers, {type(rule).__name__} survives {rule.tolerates(20).values}")


# A trial is one attack. `distance` is how far the result is from the honest mean, in honest
# spreads; `limit` is what the rule is proven to keep, or two spreads where it promises nothing.
def show(name, trials):
    broken = [trial for trial in trials if trial.broken_promise]
    worst = max(trials, key=lambda trial: trial.distance)
    print(f"{name}: {len(trials)} attacks, {len(broken)} broken promises")
    print(f"  worst: {worst.attack.partition(':')[0]} at {worst.distance:.2g} spreads")


show("five liars", audit(rule, num_workers=20, byzantine=5, dims=2000, rounds=1))
show("six liars", audit(rule, num_workers=20, byzantine=6, dims=2000, rounds=1))


# Six liars are one more than it promises: it is carried away, and no promise is broken. Told a
# b, a rule can be asked for more, and it refuses what cannot hold.
@dataclass(frozen=True)
class Interior(TrimmingRule):
    """Cut b values at each end of a column, then drop the one farthest from the rest's mean."""

    def window(self, m):
        return Window(trim=self.b, drop=max(1, self.b))


show("Interior(b=6)", audit(Interior(b=6), num_workers=20, byzantine=6, dims=2000, rounds=1))


# Any function of the rows is a rule too. What it survives is only known from what it is said to
# survive, and an audit finds out a claim that is not so.
def plain_mean(rows):
    return rows.mean(axis=0)


claim = FunctionRule(plain_mean, b=1, columnwise=True)
trials = audit(claim, num_workers=20, byzantine=1, dims=2000, rounds=1)
broken = [trial.attack.partition(":")[0] for trial in trials if trial.broken_promise]
print(f"a mean that claims to survive one: {len(broken)} broken promises, {broken[0]} first")

# It goes through everything else as well: pipelines, text, blame.
rule = phocas.NNM(b=3) | Interior(b=3)
print(rule)
