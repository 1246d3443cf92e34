"""The ray engine: workers and servers as actors, on a cluster or on this machine.

The same trainer as the local engine's, and the same bits where the rows are the same: batches,
dropout and lies depend on the seed, the round and the worker alone.
"""

from phocas.engines.ray.settings import RaySettings

__all__ = ["RaySettings"]
