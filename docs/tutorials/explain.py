"""Aggregate, and explain who was thrown away.

Twenty workers send the gradients of one round. Six of them lie, each in its own way, and one has a
flipped bit. We aggregate them, ask whose values were thrown away, and compare what it would have
cost to do nothing.
"""

# The rows are drawn here; yours may be an array, a torch tensor, twenty vectors or twenty state
# dicts. Row i is worker i.
import numpy as np

import phocas

rng = np.random.default_rng(0)
truth = rng.normal(size=10_000)
rows = (truth + rng.normal(size=(20, 10_000))).astype(np.float32)

# Workers 0 to 3 send noise a thousand times too large, worker 4 the gradient turned round and
# ten times as long, and worker 5 crashed. Worker 12 is honest, but one bit of its memory
# flipped.
rows[:4] = rng.normal(scale=1e3, size=(4, 10_000))
rows[4] = -10 * truth
rows[5] = np.nan
rows[12, 7] = 1e30


# The error is the distance from the true gradient, in lengths of the true gradient. The mean is
# lost to a single NaN. Krum survives the liars, but it returns one row, with all the noise of
# one worker.
def error(value):
    return float(np.linalg.norm(value - truth) / np.linalg.norm(truth))


print("rule                      error")
for text in "mean", "krum:b=6", "trimmed-mean:b=6", "phocas:b=6", "heraclius:b=6":
    print(f"{text:<24}{error(phocas.aggregate(rows, text)):7.2f}")

# A rule knows what it survives among m workers, and refuses what it cannot.
rule = phocas.Heraclius(b=6)
print()
print(f"{rule} survives {rule.tolerates(20).values} wrong values in every column of 20")
try:
    phocas.Heraclius(b=10)(rows)
except ValueError as refusal:
    print(refusal)

# `explain` gives the same result, and for each worker the share of its values that did not
# enter. One value in ten thousand is a flipped bit, and a worker whose values are all gone is
# broken. Worker 4 hides among the others: most of what it sends is within reach of what is
# plausible, so Heraclius lets it in, and Phocas, which drops six values of every column, is
# nearer to the truth. [Which rule to take](../choosing.md) is about that.
why = rule.explain(rows)
print()
print("worker  dropped")
for worker, dropped in enumerate(why.dropped):
    print(f"{worker:>6}  {dropped:7.2%}" + ("  <- look here" if dropped > 0.5 else ""))

# If you may not change the training, watch it: the plain mean, which is lost here, with the
# blame of the rule.
watched = phocas.Watch(rule).explain(rows)
print()
print("the mean is a number:", bool(np.isfinite(watched.value).any()))
print("the same workers are named:", bool(np.array_equal(watched.dropped, why.dropped)))
