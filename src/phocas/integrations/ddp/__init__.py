"""Byzantine-resilient DistributedDataParallel: one added line, the same traffic.

::

    ddp = DistributedDataParallel(model)
    guard = phocas.integrations.ddp.protect(ddp, phocas.Phocas(b=2))
    guard = phocas.integrations.ddp.watch(ddp, b=2)  # or: average as before, detect faulty ranks
    ...  # train as before
    guard.flagged()

Each bucket of gradients is split into one shard for each rank, instead of an all-reduce. Rank s
receives shard s of all ranks, aggregates these m rows by the rule, and sends the result to all
ranks. ``docs/ddp.md`` describes what this protects against, and what not.
"""

from phocas.deprecation import former_names
from phocas.integrations.ddp.hook import protect, watch
from phocas.integrations.ddp.verify import AggregatorError
from phocas.integrations.guard import Guard
from phocas.integrations.reports import FlaggedRank

__all__ = ["AggregatorError", "FlaggedRank", "Guard", "protect", "watch"]

__getattr__ = former_names(__name__, {"Suspect": "FlaggedRank"})
