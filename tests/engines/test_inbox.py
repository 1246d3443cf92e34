"""The rows of a server, as worker processes send them: what a hostile process may not do."""

from __future__ import annotations

import numpy as np

from phocas.engines.ray.inbox import Inbox
from phocas.engines.ray.mailbox import Peer
from phocas.engines.ray.wire import Header, Kind


def test_a_flood_of_wrong_frames_costs_a_few_lines_and_no_row() -> None:
    inbox = Inbox(np.zeros(4, np.float32), num_workers=3, round=0)
    hostile, honest = Peer("worker 2", range(2, 3)), Peer("worker 0", range(1))
    try:
        for worker in range(100_000):
            assert inbox.room(hostile, Header(Kind.ROW, worker=3 + worker)) is None
        sent = Header(Kind.ROW, worker=0, dtype="float32", length=16)
        room = inbox.room(honest, sent)
        assert room is not None
        room[:] = np.arange(4, dtype=np.float32).tobytes()
        inbox.arrived(sent, room)
        delivery = inbox.deliver([0], patience=0.0)
        assert len(delivery.news) == 16
        assert delivery.news[0] == "worker 2 sent a row for worker 3: dropped"
        row = delivery.rows[0]
        assert row is not None
        assert np.array_equal(row, np.arange(4))
        assert delivery.problems == {}
    finally:
        inbox.close()
