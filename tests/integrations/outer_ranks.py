"""What the peers of test_outer do: ``python outer_ranks.py FOLDER``.

Results are as scenes.py says.
"""

import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.integrations.scenes import Play, act, rejection, scene, start_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from phocas.integrations.outer import OuterStep
from phocas.integrations.outer.group import GroupExchange
from phocas.integrations.outer.step import Exchange

WORLD = 4
LIAR = 2
EVERY = 2
STATE = b"the state of most peers"
SCENES: dict[str, Play] = {}


def network(seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(30, 41), nn.Tanh(), nn.Linear(41, 3))


def flat(tensors: Any) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten().clone() for tensor in tensors])


class Peer:
    """A peer that trains on data of its own with a persistent AdamW."""

    def __init__(self, rank: int, rule: str, seed: int = 1, **options: Any) -> None:
        self.rank = rank
        self.model = network(seed)
        self.inner = torch.optim.AdamW(self.model.parameters(), 0.01)
        self.outer = OuterStep(self.model, rule, every=EVERY, **options)
        self.generator = torch.Generator().manual_seed(100 + rank)

    def train(self, outer_steps: int, poison: float = 1.0) -> list[dict[str, Any]]:
        """Train; return the parameters before and after each outer step, and what came of it."""
        found = []
        for _ in range(outer_steps):
            for inner in range(EVERY):
                x = torch.randn(8, 30, generator=self.generator)
                self.inner.zero_grad()
                (self.model(x) - x[:, :3]).square().mean().backward()
                self.inner.step()
                if inner == EVERY - 1 and poison != 1.0:
                    with torch.no_grad():
                        for parameter in self.model.parameters():
                            parameter.mul_(poison)
                local, kept = flat(self.model.parameters()), self.moments()
                result = self.outer.step()
            assert result is not None
            assert kept == self.moments()
            found.append({"local": local, "now": flat(self.model.parameters()), "result": result})
        return found

    def moments(self) -> list[float]:
        """Return what the inner optimizer remembers: outer steps must not touch it."""
        return [float(state["exp_avg"].sum()) for state in self.inner.state.values()]


@scene(SCENES)
def averaged(rank: int) -> Any:
    """Average models: local SGD as everybody knows it."""
    peer = Peer(rank, "mean", optimizer=lambda base: torch.optim.SGD(base, lr=1.0))
    return {"first": flat(network().parameters()), "steps": peer.train(2)}


@scene(SCENES)
def robust(rank: int) -> Any:
    """Let a peer multiply its parameters: DiLoCo's optimizer on a trimmed mean."""
    peer = Peer(rank, "trimmed-mean:b=1")
    poison = -50.0 if rank == LIAR else 1.0
    return {"first": flat(network().parameters()), "steps": peer.train(3, poison)}


@scene(SCENES)
def sharded(rank: int) -> Any:
    """Shard each of two replicas over two ranks: peers are the ranks with the same shard."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    model: Any = fully_shard(network(), mesh=mesh["shard"])
    inner = torch.optim.SGD(model.parameters(), 0.1)
    group = mesh.get_group("replica")
    said = rejection(lambda: OuterStep(model, "geometric-median", every=1, group=group))
    outer = OuterStep(model, "mean", every=EVERY, group=group)

    def whole() -> torch.Tensor:
        return flat(parameter.full_tensor() for parameter in model.parameters())

    torch.manual_seed(100 + rank)
    found: dict[str, Any] = {"first": whole(), "steps": [], "said": said}
    for _ in range(2):
        for step in range(EVERY):
            inner.zero_grad()
            model(torch.randn(8, 30)).square().mean().backward()
            inner.step()
            local = whole()
            result = outer.step()
            assert (result is not None) == (step == EVERY - 1)
        found["steps"].append({"local": local, "now": whole()})
    return found


@scene(SCENES)
def remembering(rank: int) -> Any:
    """Clip around the last outer update."""
    peer = Peer(rank, "centered-clipping:radius=0.5,start=previous")
    return peer.train(3, float("inf") if rank == LIAR else 1.0)


@scene(SCENES)
def hostile(rank: int) -> Any:
    """Let a peer send bytes that are no update: each peer must reject that row alone."""
    found: dict[str, list[Any]] = {}
    for compress in ("float32", "int8", "top-k:share=0.1"):
        peer = Peer(rank, "nnm:b=1|mean", compress=compress)
        members = peer.outer.exchange
        assert members is not None
        for head in (0, 56):  # all of the message, or what follows its header
            if rank == LIAR:
                peer.outer.exchange = partial(spoilt, members, head)
            found.setdefault(compress, []).append(peer.train(1)[0]["result"])
        peer.outer.exchange = members
        found[compress].append(peer.train(1)[0]["result"])
        found[f"{compress} parameters"] = [flat(peer.model.parameters())]
    return found


def spoilt(members: Exchange, head: int, message: bytes) -> Mapping[int, bytes]:
    return members(message[:head] + b"\xff" * (len(message) - head))


@scene(SCENES)
def rejected(rank: int) -> Any:
    model = network()
    two = dist.new_group([0, 1])
    said = {
        "too many": rejection(lambda: OuterStep(model, "phocas:b=3", every=2)),
        "unlike": rejection(
            lambda: OuterStep(model, "median" if rank == LIAR else "mean", every=2)
        ),
        "apart": rejection(lambda: OuterStep(network(rank), "mean", every=2)),
        "sparse": rejection(
            lambda: OuterStep(model, "phocas:b=1", every=2, compress="top-k:share=0.1")
        ),
    }
    if rank < 2:
        said["two peers"] = rejection(lambda: OuterStep(model, "phocas:b=1", every=2, group=two))
    return said


@scene(SCENES)
def joining(rank: int) -> Any:
    """Let the last peer join after two outer steps, with parameters of its own."""
    first = dist.new_group(list(range(WORLD - 1)))
    late = rank == WORLD - 1
    if late:
        peer = Peer.__new__(Peer)
        alone = dist.new_group([rank], use_local_synchronization=True)
        Peer.__init__(peer, rank, "mean", seed=7, group=alone)
    else:
        peer = Peer(rank, "mean", group=first)
        peer.train(2)
    peer.outer.regroup(dist.group.WORLD)
    joined = {
        "parameters": flat(peer.model.parameters()),
        "momentum": flat(state["momentum_buffer"] for state in peer.outer.optimizer.state.values()),
        "steps": peer.outer.steps,
    }
    after = peer.train(1)[0]
    return {**joined, "after": after["now"], "peers": after["result"].peers}


class Equivocal(GroupExchange):
    """A malicious peer: it asks peer 1 for its state, and sends wrong bytes to who asks."""

    def _send(self, message: bytes, to: int) -> None:
        asks = len(message) == 1 and to == 1
        if len(message) > 1:
            message = b"?" * len(message)
        super()._send(b"\x01" if asks else message, to)
        if asks:
            self._receive(len(STATE), to)


@scene(SCENES)
def equivocating(rank: int) -> Any:
    """Let the last peer ask a malicious one first for the state of most."""
    members = Equivocal if rank == 0 else GroupExchange
    assert dist.group.WORLD is not None
    exchange = members(dist.group.WORLD, torch.device("cpu"), {})
    return exchange.majority(b"another" if rank == WORLD - 1 else STATE)


@scene(SCENES)
def leaving(rank: int) -> Any:
    """Let a peer end: the others raise, go on without it, and refuse when too few are left."""
    peer = Peer(rank, "trimmed-mean:b=1")
    peer.train(1)
    if rank == LIAR:
        os._exit(0)
    before = flat(peer.outer.base)
    said = ""
    try:
        peer.train(1)
    except RuntimeError as error:
        said = str(error)
    kept = torch.equal(before, flat(peer.outer.base))
    left = [other for other in range(WORLD) if other != LIAR]
    if rank == WORLD - 1:  # torch names a group by how many groups a rank has: make them equal
        dist.new_group([rank], use_local_synchronization=True)
    peer.outer.regroup(dist.new_group(left, use_local_synchronization=True))
    result = peer.train(1)[0]
    fewer = (
        ""
        if rank > 1
        else rejection(
            lambda: peer.outer.regroup(dist.new_group([0, 1], use_local_synchronization=True))
        )
    )
    return {
        "said": said,
        "kept": kept,
        "now": result["now"],
        "peers": result["result"].peers,
        "fewer": fewer,
    }


if __name__ == "__main__":
    act(SCENES, start_ranks(WORLD), Path(sys.argv[1]), WORLD)
