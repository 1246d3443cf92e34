"""The Ray engine: workers and servers as actors, on a cluster or on this machine.

Results have the same bits as with the local engine if no row is missing: batches, dropout and
attacks depend only on the seed, the round and the worker.
"""

from phocas.engines.ray.settings import RaySettings

__all__ = ["RaySettings"]
