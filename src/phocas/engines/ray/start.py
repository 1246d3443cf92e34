"""Start the worker processes of a Ray cluster, and read and restore their momentum."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from phocas.engines import EngineError
from phocas.engines.ray.desk import Desk, Host
from phocas.engines.ray.mailbox import Mailbox, Peer
from phocas.engines.ray.placement import Demand, live_nodes
from phocas.engines.ray.session import first_line, the_ray
from phocas.engines.ray.values import array_of
from phocas.engines.ray.wire import TOKEN_BYTES, Address, Kind
from phocas.engines.ray.worker import WorkerProcess
from phocas.training.gradients import Looped, Vectorised
from phocas.training.gradients.base import WorkerGradients
from phocas.training.gradients.merged import MergedBatchGradients

LEAST_STORE = 256 << 20
_START_SECONDS = 300.0
_CONNECT_SECONDS = 10.0  # from the start of an actor, as Ray tells it, to its connection


def start_hosts(
    bounds: Sequence[tuple[int, int]],
    nodes: Sequence[str],
    process_class: type[WorkerProcess],
    mailbox: Mailbox,
    desk: Desk,
    demand: Demand,
) -> list[Host]:
    """Start worker processes, given the workers and the node of each process."""
    # Ray restarts dead workers by itself; it does not repeat the calls that died with them.
    actor = the_ray().remote(max_restarts=-1)(process_class)
    hosts = []
    for (first, last), node in zip(bounds, nodes, strict=True):
        token = secrets.token_bytes(TOKEN_BYTES)
        contact = Address(mailbox.host, mailbox.port, token)
        host = Host(None, first, last, node)
        peer = Peer(str(host), host.workers)
        desk.register(peer, host)
        mailbox.peers[token] = peer
        placed = actor.options(**demand.on_node(node))
        host.actor = placed.remote(first, last, contact)
        hosts.append(host)
    return hosts


def await_start(
    hosts: Sequence[Host], desk: Desk, job: Any, servers: Mapping[str, Any] | None = None
) -> None:
    """Wait until every process has started; raise EngineError if one fails.

    Args:
        hosts: the worker processes.
        desk: the receiver of their answers.
        job: a reference to their job.
        servers: references to the first answers of the servers, by name.
    """
    ray = the_ray()
    started = {}
    for host in hosts:
        host.actor.prepare.options(num_returns=0).remote([job])
        # Wait for this call, and never read its value: reading would unpickle it.
        started[host.actor.__ray_ready__.remote()] = host
    addresses = {node.id: node.address for node in live_nodes()}
    waiting = dict(servers or {})
    failures: dict[str, str] = {}
    ended: dict[Host, float] = {}
    until = time.monotonic() + _START_SECONDS
    while not failures and (waiting or not all(host.ready for host in hosts)):
        for event in desk.wait(0.2):
            event.host.note_event(event, [])
            if event.kind == Kind.READY:
                event.host.ready = True
            elif event.kind == Kind.FAILURE:
                failures[str(event.host)] = event.text
        if waiting:
            ready, _ = ray.wait(list(waiting.values()), num_returns=len(waiting), timeout=0)
            for name in [name for name, reference in waiting.items() if reference in ready]:
                try:
                    ray.get(waiting.pop(name))
                except ray.exceptions.RayError as error:
                    failures[name] = first_line(error)
        if started:
            ready, _ = ray.wait(list(started), num_returns=len(started), timeout=0)
            for reference in ready:
                ended[started.pop(reference)] = time.monotonic()
        now = time.monotonic()
        for host, since in ended.items():
            if not host.connected and now - since > _CONNECT_SECONDS:
                where = addresses.get(host.node, host.node)
                failures[str(host)] = (
                    f"did not start on node {where}, or did not connect: is phocas installed there?"
                )
        if now > until:
            late = [str(host) for host in hosts if not host.ready]
            failures |= dict.fromkeys([*late, *waiting], f"not there after {_START_SECONDS:.0f} s")
    if failures:
        name, reason = next(iter(failures.items()))
        raise EngineError(
            f"not all of {len(hosts)} worker processes and {len(servers or {})} servers"
            f" started: {name} {reason}",
            failures,
        )


def path_of(gradients: WorkerGradients) -> str:
    """Return the name of the trainer's gradient path, so that all workers use the same path."""
    names = {MergedBatchGradients: "merged", Vectorised: "vectorised", Looped: "looped"}
    return names[type(gradients)]


def get_momentum(
    hosts: Sequence[Host], desk: Desk, job: Any, like: torch.Tensor, seconds: float
) -> torch.Tensor:
    """Return the momentum of all workers, in the shape of their rows.

    The momentum of a worker that does not answer is zero, as after a restart.
    """
    velocity = torch.zeros_like(like)
    with desk.receiving(array_of(velocity)):
        for host in hosts:
            host.actor.momentum.options(num_returns=0).remote([job])
        _await_ready(hosts, desk, seconds)
    return velocity.clone()  # a late worker may still write into the first


def set_momentum(hosts: Sequence[Host], desk: Desk, job: Any, velocity: torch.Tensor) -> None:
    """Restore the momentum of all workers."""
    values = array_of(velocity)
    for host in hosts:
        part = values[host.first : host.last]
        host.actor.set_momentum.options(num_returns=0).remote([job], part)
    _await_ready(hosts, desk, _START_SECONDS)


def _await_ready(hosts: Sequence[Host], desk: Desk, seconds: float) -> None:
    """Wait until all connected processes have answered, at most so many seconds."""
    until = time.monotonic() + seconds
    ready: set[Host] = set()
    while time.monotonic() < until:
        if all(host in ready or not host.connected for host in hosts):
            return
        for event in desk.wait(0.2):
            if event.kind in {Kind.READY, Kind.FAILURE}:
                ready.add(event.host)
                event.host.ready = event.kind == Kind.READY
            elif event.kind in {"opened", "closed"}:
                event.host.note_event(event, [])
