"""One step of training, unit by unit: rows in, the own shard of the aggregate out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from phocas.integrations.fsdp.exchange import Arrived
from phocas.integrations.guard import Ledger
from phocas.integrations.wire import Wire, as_bytes, pack, read
from phocas.integrations.witness import Segment, testimony_bytes, within
from phocas.rules import Evaluation, Explanation
from phocas.seeds import Stream, generator


@dataclass(frozen=True, slots=True)
class Unit:
    """What FSDP2 reduces at once: its name, its number, and its parameters in the own shard."""

    name: str
    number: int
    segments: tuple[Segment, ...]
    width: int


class Aggregator:
    """The rule over the units of each step, and what it says of each rank.

    Units are reduced one after the other in backward, each when its gradients are there. After the
    last one every rank tells the others what it has seen, by one small exchange that nobody waits
    for before the next step.
    """

    def __init__(self, wire: Wire, ledger: Ledger, *, shards: int, seed: int) -> None:
        self.wire, self.ledger, self.shards, self.seed = wire, ledger, shards, seed
        self.rule = ledger.rule
        self.witness = ledger.witness(seed)
        self.told: _Told | None = None
        self.said_twice = self.said_partial = False
        self._begin()

    @property
    def step(self) -> int:
        """Return how many steps were taken."""
        return self.witness.step

    def _begin(self) -> None:
        self.dropped = np.zeros(self.wire.m)
        self.columns = 0

    def reduce(self, unit: Unit, arrived: Arrived) -> Any:
        """Aggregate the rows of the own columns of a unit."""
        if self.columns == 0:
            self.catch_up()
            self.ledger.react()
        # Other units are to come, and nobody but the engine knows which one is the last.
        engine = torch.autograd.Variable._execution_engine  # noqa: SLF001
        engine.queue_callback(partial(self.end, self.step))
        rows = arrived.rows
        whole = arrived.width == unit.width
        segments = within(unit.segments, *arrived.own) if whole else ()
        self.witness.see(rows, segments, unit.number)
        result = self._explain(unit, arrived)
        self.dropped += result.dropped * rows.shape[1]
        self.columns += arrived.width
        return result.value

    def _explain(self, unit: Unit, arrived: Arrived) -> Explanation:
        rows = arrived.rows
        if self.rule.columnwise:
            return self.rule.explain(rows)
        rng = generator(Stream.RULE, self.seed, self.step, unit.number)
        evaluation = Evaluation(self.rule, self.wire.m, rng, whole_blocks=False)
        host = rows.cpu()
        while evaluation.request is not None:
            measured = evaluation.partial(host, arrived.start)
            messages = self.wire.gather([pack([measured])])
            told = zip(self.wire.ranks, messages, strict=True)
            evaluation.answer(read(rank, message) for rank, message in told)
        return evaluation.explain(host)

    def end(self, step: int) -> None:
        """Tell the others what was seen in a step, unless that has been done."""
        if step != self.step:
            return
        self.witness.bet()
        told = [self.witness.testimony(), as_bytes(torch.from_numpy(self.dropped))]
        self.told = _Told.send(self.wire, told, self.columns * self.shards)
        self.ledger.send()
        self.witness.end()
        self._begin()

    def catch_up(self) -> None:
        """Hear what the others have seen in the last step."""
        self.ledger.receive()
        if self.told is None:
            return
        sent, self.told = self.told, None
        messages = sent.wait(self.wire.m)
        before = testimony_bytes(self.wire.m) // 8
        self.ledger.hear(messages[:, :before], messages[:, before:], sent.columns)
        self.ledger.instruct(self.witness)


@dataclass(frozen=True, slots=True)
class _Told:
    """Testimonies that are under way, about a step of so many columns."""

    arrived: torch.Tensor
    work: dist.Work
    columns: int

    @classmethod
    def send(cls, wire: Wire, parts: Sequence[torch.Tensor], columns: int) -> _Told:
        own = torch.cat([part.to(wire.device) for part in parts])
        arrived = own.new_empty(wire.m * own.numel())
        return cls(arrived, wire.gather_later(arrived, own), columns)

    def wait(self, m: int) -> np.ndarray:
        """Return the numbers of every rank, (m, numbers)."""
        self.work.wait()
        return np.asarray(self.arrived.view(torch.float64).cpu().numpy().reshape(m, -1))
