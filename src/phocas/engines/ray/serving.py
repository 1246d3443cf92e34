"""The server processes of a Ray cluster, which hold servers and copies of other servers."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from phocas.detection.comparison import Comparison, Sample, compare
from phocas.engines.ray.inbox import Inbox
from phocas.engines.ray.mailbox import Mailbox, Peer
from phocas.engines.ray.session import check_version, node_address, node_id, the_ray
from phocas.engines.ray.shard import Answer, ComparedPart, Question, Shard, ShardJob, State
from phocas.engines.ray.shared import Place
from phocas.engines.ray.values import Values, array_of, holds
from phocas.engines.ray.wire import Address, FrameError, Header, Kind, Lifeline, Link, dtype_name
from phocas.kernels import set_num_threads
from phocas.rules.measures import Partial

COPY_SECONDS = 20.0
_SERVER = Peer("a server process", alone=False)


@dataclass(frozen=True)
class Route:
    """The address of a server, to which workers send slices and from which they read parameters."""

    number: int
    """The number of the server."""
    host: str
    port: int
    node: str
    """The node of its process: workers of this node may use the shared memory."""
    place: Place | None


class ServerProcess:
    """The actor of a server process.

    Args:
        peers: the worker processes that may connect, by their tokens.
        trainer: the trainer's mailbox.
        token: the token of all server processes among themselves.
    """

    def __init__(self, peers: Mapping[bytes, Peer], trainer: Address, token: bytes) -> None:
        torch.set_num_threads(1)
        self._token = token
        self._shards: dict[int, Shard] = {}
        self._copies: dict[int, Shard] = {}
        self._inboxes: dict[int, Inbox] = {}
        self._links: dict[tuple[str, int], Link] = {}
        self._mailbox = Mailbox(node_address(), {**peers, token: _SERVER}, self)
        self._node = node_id()
        self._lifeline = Lifeline(trainer)

    def where(self, version: str) -> tuple[Address, str]:
        """Return the address of this process for other server processes, and its node.

        Args:
            version: the trainer's version of phocas.
        """
        check_version(version)
        return Address(self._mailbox.host, self._mailbox.port, b""), self._node

    def pid(self) -> int:
        """Return the process id."""
        return os.getpid()

    # -- servers and copies ------------------------------------------------------------------------

    def serve(self, number: int, job: ShardJob, state: State) -> Route:
        """Become a server, given its state; return its route."""
        set_num_threads(job.threads)
        self._shards[number] = Shard(job, state)
        return self._open(number)

    def copy(self, number: int, job: ShardJob, state: Sequence[Any]) -> None:
        """Hold a copy of a server, given a reference to its state."""
        set_num_threads(job.threads)
        found = the_ray().get(state[0], timeout=COPY_SECONDS / 2)
        self._copies[number] = Shard(job, found)

    def take_over(self, number: int) -> Route:
        """Become the server of which this process holds the copy."""
        shard = self._shards[number] = self._copies.pop(number)
        # The lost process may have sent a part of an aggregate: its rest must change nothing.
        shard.value = shard.value.copy()
        return self._open(number)

    def hand_over(self, number: int, *, keep: bool) -> None:
        """End a server of this process, which is in another process now.

        Args:
            number: the number of the server.
            keep: whether to hold a copy of it.
        """
        shard = self._shards.pop(number)
        self._inboxes.pop(number).close()
        if keep:
            self._copies[number] = shard

    def state(self, number: int) -> State:
        """Return the state of a server."""
        return self._shards[number].state()

    def vector(self, number: int) -> dict[str, Values]:
        """Return the parameters of a server, and its reference vector if it has one."""
        server = self._shards[number].server
        kept = {"vector": array_of(server.vector)}
        if server.reference is not None:
            kept["reference"] = array_of(server.reference)
        return kept

    def load(self, number: int, state: State) -> None:
        """Restore a server, or a copy, from a checkpoint."""
        shard = self._shards.get(number) or self._copies[number]
        shard.load(shard.state() | state)
        if number in self._shards:
            self._begin(number)

    def _open(self, number: int) -> Route:
        shard = self._shards[number]
        like = array_of(shard.server.vector)
        inbox = Inbox(like, shard.job.task.num_workers, shard.round)
        self._inboxes[number] = inbox
        return Route(number, self._mailbox.host, self._mailbox.port, self._node, inbox.place)

    def _begin(self, number: int) -> None:
        shard = self._shards[number]
        self._inboxes[number].begin(shard.round, array_of(shard.server.vector))

    # -- a round -----------------------------------------------------------------------------------

    def aggregate(self, number: int, question: Question, copy: Address | None) -> Answer:
        """Aggregate the slices of a round, or return a measurement.

        Args:
            number: the number of the server.
            question: the round, and the measurements to return.
            copy: the process that holds the copy of this server.
        """
        shard = self._shards[number]
        delivery = self._inboxes[number].deliver(question.due, shard.job.patience)
        return self._answer(number, shard.aggregate(question, delivery), copy)

    def answer(self, number: int, partials: Sequence[Any], copy: Address | None) -> Answer:
        """Continue with the measurements of all servers, given references to them."""
        shard = self._shards[number]
        found: list[Partial] = the_ray().get(list(partials), timeout=shard.job.patience)
        return self._answer(number, shard.answer(found), copy)

    def _answer(self, number: int, partial: Partial | None, copy: Address | None) -> Answer:
        shard = self._shards[number]
        if partial is not None:
            return Answer(partial=[the_ray().put(partial)])
        if shard.compared is not None:
            shard.result.compared = [the_ray().put(shard.compared)]
        shard.result.copied = copy is not None and self._send_copy(shard, number, copy)
        return shard.result

    def compare(
        self, number: int, parts: Sequence[Any], sample: Sample, momentum: float, outliers: bool
    ) -> Comparison | None:
        """Compare the rows of a round, given references to the parts of all servers.

        Return None if a part is lost, or what is new in rows with momentum is not known.
        """
        shard, ray = self._shards[number], the_ray()
        try:
            found: list[ComparedPart] = ray.get(list(parts), timeout=shard.job.patience)
        except ray.exceptions.RayError:
            return None
        known = [part.before for part in found if part.before is not None]
        if momentum and shard.round and len(known) < len(found):
            return None
        return compare(
            sample.joined([part.values for part in found]),
            np.concatenate([part.direction for part in found]),
            momentum=momentum,
            before=sample.joined(known) if known else None,
            outliers=outliers,
        )

    def _send_copy(self, shard: Shard, number: int, copy: Address) -> bool:
        """Send the aggregate to the process with the copy; return False if that fails."""
        at = copy.host, copy.port
        header = Header(Kind.VALUE, shard.round, 0, number, dtype_name(shard.value))
        for _ in range(2):  # the connection may be an old one
            try:
                link = self._links.get(at)
                if link is None:
                    address = replace(copy, token=self._token)
                    link = self._links[at] = Link(address, shard.job.patience)
                link.send(header, shard.value)
                link.receive_into(Kind.TAKEN, np.empty(0, np.uint8))
            except (OSError, FrameError):
                broken = self._links.pop(at, None)
                if broken is not None:
                    broken.close()
            else:
                return True
        return False

    def forget(self, number: int, workers: Collection[int]) -> None:
        """Drop the slices of workers, which are to be sent again."""
        self._inboxes[number].forget(workers)

    def step(self, numbers: Sequence[int], round: int, factor: float | None) -> None:
        """Step with these servers or copies along their aggregates of a round."""
        for number in numbers:
            shard = self._shards.get(number) or self._copies[number]
            if shard.round == round:
                shard.step(round, factor)
                if number in self._shards:
                    self._begin(number)

    # -- the mailbox -------------------------------------------------------------------------------

    def opened(self, peer: Peer) -> None:
        """Do nothing: a process has connected."""

    def closed(self, peer: Peer) -> None:
        """Do nothing: the trainer notices dead processes."""

    def room(self, peer: Peer, header: Header) -> memoryview | None:
        """Return the memory for a slice of a worker, or for the aggregate of a server."""
        if header.kind == Kind.VALUE and peer is _SERVER:
            return self._expecting(header).value.data.cast("B")
        inbox = self._inboxes.get(header.server)
        if inbox is None:  # of an earlier round, for a server that is elsewhere now
            return None
        if header.kind in {Kind.ROW, Kind.IN_PLACE}:
            return inbox.room(peer, header)
        if header.kind == Kind.PULL and not header.length:
            return memoryview(b"")
        raise FrameError(f"sent {header.kind.name}, which a server does not take")

    def arrived(self, peer: Peer, header: Header, content: memoryview) -> list[Any]:
        """Take a slice or an aggregate, or answer a pull of the parameters."""
        del peer
        if header.kind == Kind.VALUE:
            copy = self._expecting(header)
            if not holds(copy.value, content):
                raise FrameError("sent the aggregate of a server whose copy was replaced meanwhile")
            copy.valued = header.round
            return [Header(Kind.TAKEN).pack()]
        inbox = self._inboxes.get(header.server)
        if inbox is None:  # the server was handed over while the slice arrived
            return []
        if header.kind == Kind.PULL:
            values = inbox.parameters(header.round)
            return [Header(Kind.PARAMETERS, header.round, length=values.nbytes).pack(), values]
        inbox.arrived(header, content)
        return []

    def _expecting(self, header: Header) -> Shard:
        """Return the copy for which an aggregate is; raise FrameError if it expects no such one.

        A process that was cut off and has come back may send the aggregate of an earlier round.
        """
        copy = self._copies.get(header.server)
        if copy is None or header.length != copy.value.nbytes:
            raise FrameError("sent the aggregate of a server that has no copy here")
        if header.round != copy.round:
            due = f"where {copy.round + 1} was due"
            raise FrameError(f"sent the aggregate of round {header.round + 1} {due}")
        return copy

    def rejected(self, peer: Peer, reason: str) -> None:
        """Report that the connection of a process was closed because it sent invalid bytes."""
        for inbox in list(self._inboxes.values()):
            inbox.rejected(peer, reason)
