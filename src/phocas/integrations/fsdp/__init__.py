"""Byzantine-resilient FSDP2 (``fully_shard``): one added line, the same traffic.

::

    for block in model.layers:
        fully_shard(block)
    fully_shard(model)
    guard = phocas.integrations.fsdp.protect(model, phocas.Heraclius(b=1))
    guard = phocas.integrations.fsdp.watch(model, b=1)  # or: average as before, detect faulty ranks
    ...  # train as before
    guard.flagged()

A reduce-scatter sums the shards of each unit's gradient on their way. Here the shards are exchanged
unchanged (all-to-all), and each rank applies the rule to the m rows of its shard. ``docs/fsdp.md``
describes what this protects against, and what not.
"""

from phocas.deprecation import former_names
from phocas.integrations.fsdp.protect import protect, watch
from phocas.integrations.guard import Guard
from phocas.integrations.reports import FlaggedRank

__all__ = ["FlaggedRank", "Guard", "protect", "watch"]

__getattr__ = former_names(__name__, {"Suspect": "FlaggedRank"})
