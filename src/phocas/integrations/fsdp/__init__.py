"""Make a model under FSDP2 (``fully_shard``) Byzantine-resilient: same bytes on the wire.

::

    for block in model.layers:
        fully_shard(block)
    fully_shard(model)
    guard = phocas.integrations.fsdp.protect(model, phocas.Heraclius(b=1))
    guard = phocas.integrations.fsdp.watch(model, b=1)  # or: the mean as before, and who is wrong
    ...  # train as before
    guard.suspects()

Instead of being summed on their way, the shards of each unit's gradient are exchanged as they are
(all-to-all), and the rule is applied to the m rows where they arrive: that is the reduce-scatter.
``docs/fsdp.md`` says what this protects against, and what not.
"""

from phocas.integrations.fsdp.protect import protect, watch
from phocas.integrations.guard import Guard, Suspect

__all__ = ["Guard", "Suspect", "protect", "watch"]
