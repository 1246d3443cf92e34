"""How the columns of the matrix are cut into the shards of the servers."""

from __future__ import annotations

import itertools

from phocas.specs import count


def shard_bounds(d: int, servers: int) -> list[tuple[int, int]]:
    """Cut d columns into ``servers`` ranges as even as can be, the longer ones first.

    The first ``d % servers`` shards have one column more than the others. A server may own no
    column when there are more servers than columns.

    >>> shard_bounds(10, 4)
    [(0, 3), (3, 6), (6, 8), (8, 10)]
    """
    width, longer = divmod(
        count("shard_bounds", "d", d), count("shard_bounds", "servers", servers, 1)
    )
    starts = [server * width + min(server, longer) for server in range(servers + 1)]
    return list(itertools.pairwise(starts))
