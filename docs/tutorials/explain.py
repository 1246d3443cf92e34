"""Aggregate, and explain whose values were dropped.

In this tutorial you aggregate one round of gradients by five rules, compare their errors, and see
whose values a rule dropped. Twenty workers send gradients. Six of them are Byzantine, and one
honest worker has a flipped bit.
"""

# The rows are random here. Yours may be an array, a torch tensor, twenty vectors or twenty state
# dicts. Row i is worker i.
import numpy as np

import phocas

rng = np.random.default_rng(0)
truth = rng.normal(size=10_000)
rows = (truth + rng.normal(size=(20, 10_000))).astype(np.float32)

# Workers 0 to 3 send noise with a standard deviation of 1000. Worker 4 sends -10 times the
# gradient. Worker 5 crashed. Worker 12 is honest, but one bit of its memory flipped.
rows[:4] = rng.normal(scale=1e3, size=(4, 10_000))
rows[4] = -10 * truth
rows[5] = np.nan
rows[12, 7] = 1e30


# The error is the distance from the true gradient, in lengths of the true gradient. A single NaN
# makes the mean NaN. Krum tolerates the Byzantine rows, but returns one row, with all the noise of
# one worker.
def error(value):
    return float(np.linalg.norm(value - truth) / np.linalg.norm(truth))


print("rule                      error")
for text in "mean", "krum:b=6", "trimmed-mean:b=6", "phocas:b=6", "heraclius:b=6":
    print(f"{text:<24}{error(phocas.aggregate(rows, text)):7.2f}")

# `tolerates` returns the guarantee of a rule among m workers. A rule raises an error if b is too
# large.
rule = phocas.Heraclius(b=6)
print()
print(f"{rule} tolerates {rule.tolerates(20).values} wrong values in every column of 20")
try:
    phocas.Heraclius(b=10)(rows)
except ValueError as error_message:
    print(error_message)

# `explain` returns the same result, and for each worker the share of its dropped values. One
# dropped value in ten thousand is the flipped bit of worker 12. A worker with nearly all values
# dropped is broken. Most values of worker 4 are within the cutoff of Heraclius, so Heraclius keeps
# them. Phocas drops six values of every column, and has a smaller error here. [Which rule to
# take](../choosing.md) explains this choice.
why = rule.explain(rows)
print()
print("worker  dropped")
for worker, dropped in enumerate(why.dropped):
    print(f"{worker:>6}  {dropped:7.2%}" + ("  <- look here" if dropped > 0.5 else ""))

# `Monitor` returns the plain mean, which is NaN here, and reports the values that the rule drops.
# Use it to leave training as it is.
watched = phocas.Monitor(rule).explain(rows)
print()
print("the mean is a number:", bool(np.isfinite(watched.value).any()))
print("the same values are dropped:", bool(np.array_equal(watched.dropped, why.dropped)))
