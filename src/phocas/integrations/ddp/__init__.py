"""Make a script with DistributedDataParallel Byzantine-resilient: one line, same bytes on the wire.

::

    ddp = DistributedDataParallel(model)
    guard = phocas.integrations.ddp.protect(ddp, phocas.Phocas(b=2))
    guard = phocas.integrations.ddp.watch(ddp, b=2)  # or: the mean as before, and who is wrong
    ...  # train as before
    guard.suspects()

Instead of being averaged by all-reduce, each bucket of gradients is cut into one shard for each
rank. Rank s gets everyone's shard s, aggregates these m rows by the rule, and gives the result to
all. ``docs/ddp.md`` says what this protects against, and what not.
"""

from phocas.integrations.ddp.hook import protect, watch
from phocas.integrations.ddp.verify import AggregatorError
from phocas.integrations.guard import Guard, Suspect

__all__ = ["AggregatorError", "Guard", "Suspect", "protect", "watch"]
