"""The division of the matrix's columns into the shards of the servers."""

from __future__ import annotations

import itertools

from phocas.specs import count


def shard_bounds(d: int, servers: int) -> list[tuple[int, int]]:
    """Return ``servers`` ranges of nearly equal width that cover d columns.

    The first ``d % servers`` shards have one column more than the others. If there are more servers
    than columns, some servers have no column.

    >>> shard_bounds(10, 4)
    [(0, 3), (3, 6), (6, 8), (8, 10)]
    """
    width, longer = divmod(
        count("shard_bounds", "d", d), count("shard_bounds", "servers", servers, 1)
    )
    starts = [server * width + min(server, longer) for server in range(servers + 1)]
    return list(itertools.pairwise(starts))
