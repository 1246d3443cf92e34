"""Frames that arrive at a server or at the trainer: what a hostile or a returning process costs."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch.optim import SGD

from phocas.engines.ray import serving
from phocas.engines.ray.desk import Desk, Event, Host
from phocas.engines.ray.mailbox import Mailbox, Peer
from phocas.engines.ray.serving import ServerProcess
from phocas.engines.ray.shard import ShardJob, State
from phocas.engines.ray.wire import Address, FrameError, Header, Kind, Link
from phocas.rules import Mean
from phocas.training.task import ServerTask

D = 1000
HOSTILE, HONEST, SERVERS = b"h" * 32, b"o" * 32, b"s" * 32
PEERS = {HOSTILE: Peer("worker 0", range(1)), HONEST: Peer("worker 1", range(1, 2))}
TASK = ServerTask(
    num_workers=2,
    num_servers=1,
    clients=None,
    rule=Mean(),
    attack=None,
    optimizer=SGD,
    optimizer_options={},
    lr=1.0,
    on_nonfinite="apply",
    seed=0,
)
JOB = ShardJob(TASK, start=0, d=D, shapes=[(D,)], threads=1, patience=1.0)


def state(round: int = 0) -> State:
    return {"vector": np.zeros(D, np.float32), "round": np.array(round)}


class Process(ServerProcess):
    """A server process without Ray, which notes when content begins and a frame is rejected."""

    def __init__(self) -> None:
        self.began, self.refused = threading.Event(), threading.Event()
        super().__init__(PEERS, Address("127.0.0.1", 0, b""), SERVERS)

    def room(self, peer: Peer, header: Header) -> memoryview | None:
        """Note that a frame with content has begun."""
        found = super().room(peer, header)
        if header.length:
            self.began.set()
        return found

    def rejected(self, peer: Peer, reason: str) -> None:
        """Note that a connection was closed."""
        super().rejected(peer, reason)
        self.refused.set()

    @property
    def vectors(self) -> dict[int, Any]:
        """The parameters of the servers and copies."""
        held = {**self._copies, **self._shards}
        return {number: shard.server.vector.numpy() for number, shard in held.items()}


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[Process]:
    monkeypatch.setattr(serving, "node_address", lambda: "127.0.0.1")
    monkeypatch.setattr(serving, "node_id", lambda: "here")
    monkeypatch.setattr(serving, "Lifeline", lambda _: None)
    # A reference is the value itself: there is no object store.
    monkeypatch.setattr(serving, "the_ray", lambda: SimpleNamespace(get=lambda it, **_: it))
    made = Process()
    yield made
    made._mailbox.close()
    for inbox in made._inboxes.values():
        inbox.close()


@contextmanager
def connected(mailbox: Mailbox, token: bytes) -> Iterator[Link]:
    link = Link(Address(mailbox.host, mailbox.port, token), 20.0)
    try:
        yield link
    finally:
        link.close()


def pull(link: Link, server: int = 0, round: int = 0) -> np.ndarray:
    values = np.full(D, np.nan, np.float32)
    link.send(Header(Kind.PULL, round, server=server))
    link.receive_into(Kind.PARAMETERS, values, round)
    return values


def begin(link: Link, header: Header, content: Any) -> memoryview:
    """Send a header and half of the content; return the rest."""
    whole = memoryview(content).cast("B")
    half = len(whole) // 2
    link.send_packed(header.pack())
    link.send_packed(bytes(whole[:half]))
    return whole[half:]


def is_closed(link: Link) -> bool:
    """Wait for the other side; return whether it closes the connection."""
    try:
        link.receive_into(Kind.TAKEN, np.empty(0, np.uint8))
    except ConnectionError:
        return True
    return False


# -- servers ---------------------------------------------------------------------------------------


def test_server_that_is_handed_over_within_a_row_costs_that_row_only(process: Process) -> None:
    process.serve(0, JOB, state())
    process.serve(1, JOB, state())
    with connected(process._mailbox, HOSTILE) as link:
        row = Header(Kind.ROW, 0, 0, 0, "float32", 4 * D)
        rest = begin(link, row, np.ones(D, np.float32))
        assert process.began.wait(20)
        process.hand_over(0, keep=True)
        link.send_packed(bytes(rest))
        assert not pull(link, server=1).any()


def test_row_that_began_before_a_server_returned_does_not_count(process: Process) -> None:
    process.serve(0, JOB, state())
    process.serve(1, JOB, state())
    with connected(process._mailbox, HONEST) as link:
        row = Header(Kind.ROW, 0, 1, 0, "float32", 4 * D)
        values = np.ones(D, np.float32)
        rest = begin(link, row, values)
        assert process.began.wait(20)
        process.hand_over(0, keep=True)
        process.take_over(0)  # with other memory for the rows
        link.send_packed(bytes(rest))
        link.send(row, values)
        pull(link, server=1)
    delivery = process._inboxes[0].deliver([1], patience=0.0)
    assert delivery.news == []
    assert np.array_equal(np.asarray(delivery.rows[1]), values)


def test_process_that_never_reads_its_answers_is_disconnected(process: Process) -> None:
    process.serve(0, JOB, state())
    mailbox = process._mailbox
    with connected(mailbox, HONEST) as honest:
        with socket.create_connection((mailbox.host, mailbox.port)) as hostile:
            hostile.sendall(Header(Kind.HELLO, length=32).pack() + HOSTILE)
            with suppress(ConnectionError):
                hostile.sendall(Header(Kind.PULL).pack() * 100_000)
            assert process.refused.wait(20)
        assert not pull(honest).any()
    assert process._inboxes[0].deliver([], patience=0.0).news == [
        "worker 0 did not read 2048 answers: connection closed"
    ]


@pytest.mark.parametrize("round", [3, 5])
def test_aggregate_of_another_round_does_not_reach_a_copy(process: Process, round: int) -> None:
    process.copy(0, JOB, [state(4)])
    with (
        connected(process._mailbox, SERVERS) as owner,
        connected(process._mailbox, SERVERS) as returned,
    ):
        owner.send(Header(Kind.VALUE, 4, dtype="float32"), np.ones(D, np.float32))
        owner.receive_into(Kind.TAKEN, np.empty(0, np.uint8))
        returned.send(Header(Kind.VALUE, round, dtype="float32"), np.full(D, 9, np.float32))
        assert is_closed(returned)
    process.step([0], 4, 1.0)
    assert np.all(process.vectors[0] == -1)


def test_rest_of_an_aggregate_does_not_change_a_copy_that_has_taken_over(process: Process) -> None:
    process.copy(0, JOB, [state()])
    with (
        connected(process._mailbox, SERVERS) as owner,
        connected(process._mailbox, SERVERS) as late,
    ):
        owner.send(Header(Kind.VALUE, dtype="float32"), np.ones(D, np.float32))
        owner.receive_into(Kind.TAKEN, np.empty(0, np.uint8))
        process.began.clear()
        sent = Header(Kind.VALUE, dtype="float32", length=4 * D)
        rest = begin(late, sent, np.r_[np.ones(D // 2), np.full(D // 2, 9)].astype(np.float32))
        assert process.began.wait(20)
        process.take_over(0)
        late.send_packed(bytes(rest))
        assert is_closed(late)
    process.step([0], 0, 1.0)
    assert np.all(process.vectors[0] == -1)


# -- mailboxes -------------------------------------------------------------------------------------


class Failing:
    """A receiver with a defect that the frames of one process meet."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def opened(self, peer: Peer) -> None:
        """Do nothing."""

    def closed(self, peer: Peer) -> None:
        """Do nothing."""

    def room(self, peer: Peer, header: Header) -> memoryview:
        """Return no memory."""
        del peer, header
        return memoryview(b"")

    def arrived(self, peer: Peer, header: Header, content: memoryview) -> list[bytes]:
        """Raise an error for worker 0, and answer the others."""
        del header, content
        if peer.name == "worker 0":
            raise KeyError("x" * 1000)
        return [Header(Kind.TAKEN).pack()]

    def rejected(self, peer: Peer, reason: str) -> None:
        """Note the reason."""
        self.reasons.append(f"{peer.name} {reason}")


def test_error_of_a_receiver_closes_one_connection_and_no_other() -> None:
    receiver = Failing()
    mailbox = Mailbox("127.0.0.1", PEERS, receiver)
    try:
        with connected(mailbox, HOSTILE) as hostile, connected(mailbox, HONEST) as honest:
            hostile.send(Header(Kind.READY))
            assert is_closed(hostile)
            honest.send(Header(Kind.READY))
            honest.receive_into(Kind.TAKEN, np.empty(0, np.uint8))
    finally:
        mailbox.close()
    assert len(receiver.reasons) == 1
    assert receiver.reasons[0].startswith("worker 0 sent a frame that raised KeyError: 'xxx")
    assert len(receiver.reasons[0]) < 220


# -- the trainer -----------------------------------------------------------------------------------


def desk_with_hosts() -> tuple[Desk, list[Host]]:
    desk = Desk([], np.zeros(D, np.float32))
    hosts = [Host(None, 0, 1), Host(None, 1, 2)]
    for peer, host in zip(PEERS.values(), hosts, strict=True):
        desk.register(peer, host)
    return desk, hosts


def news_of(events: list[Event]) -> list[str]:
    news: list[str] = []
    for event in events:
        event.host.note_event(event, news)
    return news


def test_flood_of_frames_costs_the_trainer_few_events_and_the_process_its_connection() -> None:
    desk, (hostile, honest) = desk_with_hosts()
    mailbox = Mailbox("127.0.0.1", PEERS, desk)
    try:
        with connected(mailbox, HONEST) as link:
            link.send(Header(Kind.READY, worker=7))
            with connected(mailbox, HOSTILE) as flooding, suppress(ConnectionError):
                flooding.send_packed(Header(Kind.READY).pack() * 10_000)
                assert is_closed(flooding)
            with connected(mailbox, HOSTILE) as again:  # after all that has arrived
                again.send(Header(Kind.HELLO))
                assert is_closed(again)
    finally:
        mailbox.close()
    events = desk.wait(0)
    assert [event.kind for event in events if event.host is honest][:2] == ["opened", Kind.READY]
    assert [event.kind for event in events if event.host is hostile][:2] == ["rejected", "closed"]
    assert len(events) < 10
    assert "worker 0 sent 32 frames before the trainer read them: connection closed" in news_of(
        events
    )
    assert not hostile.connected


def test_flood_of_connections_costs_the_trainer_few_events_and_lines() -> None:
    desk, (hostile, _) = desk_with_hosts()
    peer = PEERS[HOSTILE]
    news: list[str] = []
    for _ in range(100):
        for _ in range(100):
            desk.opened(peer)
            desk.rejected(peer, "sent bytes that are no frame")
            desk.closed(peer)
        desk.opened(peer)
        events = desk.wait(0)
        assert len(events) <= 32
        news += news_of(events)
        assert hostile.connected
    assert len([line for line in news if "no frame: connection closed" in line]) == 16
    assert len(news) < 20
    hostile.note_answer(news)
    desk.rejected(peer, "sent bytes that are no frame")
    assert news_of(desk.wait(0)) == ["worker 0 sent bytes that are no frame: connection closed"]


def test_flood_of_unusable_rows_closes_the_connection() -> None:
    desk, _ = desk_with_hosts()
    unusable = Header(Kind.ROW, dtype="float64", length=8)
    with desk.receiving(np.zeros((2, D), np.float32)):
        for _ in range(32):
            assert desk.room(PEERS[HOSTILE], unusable) is None
        with pytest.raises(FrameError, match="sent 32 frames before the trainer read them"):
            desk.room(PEERS[HOSTILE], unusable)
    assert desk.wait(0) == []
