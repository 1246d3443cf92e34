"""Servers and their copies, moved between processes: real ones, called without Ray."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch.optim import SGD

from phocas.engines import EngineError
from phocas.engines.ray import servers as servers_module
from phocas.engines.ray import serving
from phocas.engines.ray.servers import Process, Servers, ServersMovedError
from phocas.engines.ray.serving import ServerProcess
from phocas.engines.ray.shard import ShardJob
from phocas.engines.ray.wire import Address
from phocas.rules import Mean
from phocas.training.task import ServerTask

TASK = ServerTask(
    num_workers=2,
    num_servers=3,
    clients=None,
    rule=Mean(),
    attack=None,
    optimizer=SGD,
    optimizer_options={},
    lr=1.0,
    on_nonfinite="apply",
    seed=0,
)
JOBS = [ShardJob(TASK, 4 * i, 12, [(4,)], threads=1, patience=1.0) for i in range(3)]


class CallError(Exception):
    """An error of a call."""


class DeadError(CallError):
    """The error of a call of a dead process."""


class Reference:
    """The result of a call."""

    def __init__(self, value: Any = None, error: Exception | None = None) -> None:
        self.value, self.error = value, error


class Actor:
    """A server process of this process, called as an actor is."""

    def __init__(self) -> None:
        self.alive = True
        self.process = ServerProcess({}, Address("127.0.0.1", 0, b""), b"s" * 32)

    def __getattr__(self, name: str) -> Any:
        def remote(*arguments: Any, **named: Any) -> Reference:
            if not self.alive:
                return Reference(error=DeadError())
            return Reference(getattr(self.process, name)(*arguments, **named))

        return SimpleNamespace(remote=remote)


class Calls:
    """The functions of Ray that servers use: every call is done at once."""

    exceptions = SimpleNamespace(
        RayError=CallError,
        RayActorError=DeadError,
        ObjectLostError=DeadError,
        GetTimeoutError=DeadError,
    )

    def get(self, asked: Any, **_: Any) -> Any:
        """Return the results of calls."""
        if isinstance(asked, list):
            return [self.get(each) for each in asked]
        if asked.error is not None:
            raise asked.error
        return asked.value

    def wait(self, asked: Sequence[Reference], **_: Any) -> tuple[list[Reference], list[Reference]]:
        """Return the calls as done."""
        return list(asked), []

    def kill(self, actor: Actor) -> None:
        """Kill a process."""
        actor.alive = False


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Servers]:
    calls, actors = Calls(), []
    tokens: dict[bytes, Actor] = {}
    monkeypatch.setattr(servers_module, "the_ray", lambda: calls)
    monkeypatch.setattr(serving, "the_ray", lambda: calls)
    monkeypatch.setattr(serving, "node_address", lambda: "127.0.0.1")
    monkeypatch.setattr(serving, "node_id", lambda: "here")
    monkeypatch.setattr(serving, "Lifeline", lambda _: None)

    def start(node: str, token: bytes) -> Actor:
        tokens[token] = actor = Actor()
        actors.append(actor)
        return actor

    made = Servers(
        JOBS,
        start,
        lambda *_: "here",
        lambda node: node,
        lambda token: 0.0 if tokens[token].alive else None,
        deadline=1.0,
        silence=1.0,
    )
    states = [{"vector": np.zeros(4, np.float32), "round": np.array(0)} for _ in JOBS]
    made.serve(states)
    yield made
    for actor in actors:
        actor.process._mailbox.close()
        for inbox in actor.process._inboxes.values():
            inbox.close()


def check_held(servers: Servers, round: int) -> None:
    """Check that servers and copies are where the trainer knows them, all in the same round."""
    for number, (owner, copy) in enumerate(zip(servers.owners, servers.copies, strict=True)):
        assert copy is not None
        assert copy is not owner
        assert owner.actor.process._shards[number].round == round
        assert copy.actor.process._copies[number].round == round
    for process in servers.processes:
        own = {number for number, owner in enumerate(servers.owners) if owner is process}
        assert process.actor.process._shards.keys() == own
        assert process.actor.process._inboxes.keys() == own


@pytest.mark.parametrize("order", list(itertools.product(range(3), repeat=3)))
def test_every_copy_steps_after_servers_have_moved(
    servers: Servers, order: tuple[int, ...]
) -> None:
    for round, lost in enumerate(order):
        check_held(servers, round)
        process: Process = servers.processes[lost]
        process.actor.alive = False
        with pytest.raises(ServersMovedError):
            servers.check()
        servers.tend()
        check_held(servers, round)
        servers.step(round, None)
    check_held(servers, len(order))


def test_restoring_servers_that_always_move_is_an_error(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def moved(_: Any) -> None:
        raise ServersMovedError([0])

    monkeypatch.setattr(servers, "_collect", moved)
    with pytest.raises(EngineError, match="lost in each of 4 attempts to restore the state"):
        servers.load([{}] * 3)
