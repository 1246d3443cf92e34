"""The replay of a flagged rank's last micro-batch under FSDP2.

The parameters are gathered unit by unit, so that all ranks compute again together: the flagged rank
and another one the micro-batch of the flagged rank, the others their own, as a control. Gradients
are compared unit by unit, before they are reduced, so that no rank holds more than in training.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from phocas.integrations.confirmation import (
    Measured,
    distance,
    judge,
    largest_value,
    not_reproduced,
    relative,
)
from phocas.integrations.fsdp.exchange import Unit
from phocas.integrations.joining import tell_all
from phocas.integrations.replay import Parcel, Pass, Recorder, receive, unpacked
from phocas.integrations.replicas import digest
from phocas.integrations.reports import ConfirmationReport
from phocas.integrations.wire import Wire, as_bytes, local_values


class ShardedReplay(Recorder):
    """The procedure that confirms a flag under FSDP2.

    Of the gradient of a step, each rank keeps a sum for each shard of each parameter, to compare it
    with those of a replay: a value that is wrong by some amount changes a sum by that amount.

    Args:
        wire: the collectives of the mesh.
        hosts: the host of each rank.
        model: the model, on which ``fully_shard`` was called.
        device: the device of its gradients.
        reduces: returns whether the gradients of the next backward pass are reduced.
        names: the names of the parameters.
        weights: returns the parameters, in the order of their names.
        copies: the rows that keep the same shard, for each shard; none without replicas.
    """

    def __init__(
        self,
        wire: Wire,
        hosts: Sequence[str],
        model: Any,
        device: torch.device,
        reduces: Callable[[], bool],
        names: Sequence[str],
        weights: Callable[[], Sequence[Any]],
        copies: Sequence[Sequence[int]],
    ) -> None:
        super().__init__(wire, hosts, model, device, reduces)
        self._state = model._get_fsdp_state()  # noqa: SLF001 - torch has no other way
        self.names, self.weights, self.copies = names, weights, copies
        self._times: Counter[int] = Counter()
        """By the number of a unit, how many times it was reduced."""
        self._sums: dict[tuple[str, int], torch.Tensor] = {}
        self._measured: dict[tuple[str, int], Measured] = {}
        self._roles = (0, 0)

    def end(self) -> None:
        """Release what was kept of a step."""
        super().end()
        self._times.clear()
        self._sums.clear()

    def take(self, unit: Unit, shards: torch.Tensor) -> bool:
        """Take the gradients of a unit before their reduction, (shards, columns).

        Returns:
            Whether they are of a replay, and must not be reduced.
        """
        self._times[unit.number] += 1
        parts = self._parts(unit, shards)
        if not self.replaying:
            self._sums.update({key: _sums(part) for key, part in parts.items()})
            return False
        row, other = self._roles
        if self.wire.rank == other:
            theirs = torch.empty_like(shards)
            dist.recv(as_bytes(theirs), self.wire.ranks[row], group=self.wire.group)
            for key, one in self._parts(unit, theirs).items():
                self._measured[key] = _measured(distance(one, parts[key]), parts[key])
            return True
        if self.wire.rank == row:
            dist.send(as_bytes(shards), self.wire.ranks[other], group=self.wire.group)
        for key, part in parts.items():
            known = self._sums.get(key)
            apart = math.inf if known is None else distance(known, _sums(part))
            self._measured[key] = _measured(apart, part)
        return True

    def _parts(self, unit: Unit, shards: torch.Tensor) -> dict[tuple[str, int], torch.Tensor]:
        """Return the columns of each parameter, or of the whole unit if some are unused."""
        times = self._times[unit.number]
        if shards.shape[1] != unit.width:
            return {(unit.name, times): shards}
        ends = [segment.begin for segment in unit.segments[1:]] + [unit.width]
        return {
            (self.names[segment.parameter], times): shards[:, segment.begin : end]
            for segment, end in zip(unit.segments, ends, strict=True)
        }

    def confirm(self, row: int, flagged: Sequence[int]) -> ConfirmationReport:
        """Replay the last micro-batch of a row; call it on all ranks, at the end of backward.

        Returns:
            The verdict, the same on every rank.
        """
        other = self.other(row, flagged)
        if other is None:
            return not_reproduced(None, "there is no rank that is not flagged")
        by = self.wire.ranks[other]
        parcel = Parcel()
        header, own = self._prepared(parcel, row)
        told = tell_all(self.wire, own)
        for rank, one in zip(self.wire.ranks, told, strict=True):
            if "failed" in one:
                return not_reproduced(by, f"no replay on rank {rank}: {one['failed']}")
        if wrong := self._unlike(told, row, other):
            return ConfirmationReport(
                verdict="weights", by=by, parameters=dict.fromkeys(wrong, 0.0), reason=""
            )
        if not all(one["finite"] for one in told):
            return not_reproduced(by, "the weights are not finite")
        if len({one["passes"] for one in told}) > 1:
            return not_reproduced(by, "ranks have different numbers of forward passes")
        passes, buffers = self.usable(), None
        if self.wire.rank == row:
            parcel.send(self.wire, other, header)
        elif self.wire.rank == other:
            passes, buffers = unpacked(*receive(self.wire, row))
        self._roles = row, other
        self._play(passes, buffers)
        return self._judged(row, other, flagged)

    def _prepared(self, parcel: Parcel, row: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the micro-batch if it is that of this rank, and what all ranks must know."""
        try:
            self._check()
            header = self.packed(parcel) if self.wire.rank == row else {}
            weights = [local_values(each) for each in self.weights()]
            return header, {
                "passes": len(self.usable()),
                "weights": [int(digest(each)) for each in weights],
                "finite": all(bool(each.isfinite().all()) for each in weights),
            }
        except Exception as error:  # noqa: BLE001 - all ranks must be told
            return {}, {"failed": f"{type(error).__name__}: {error}"}

    def _check(self) -> None:
        if torch._C._current_graph_task_id() == -1:  # noqa: SLF001 - as torch's FSDP2 does
            raise ValueError("gradients must be reduced in a backward pass: they were after it")
        if not self._state._is_root:  # noqa: SLF001
            raise ValueError("the whole model must be protected: this is a part of one")

    def _unlike(self, told: Sequence[Any], row: int, other: int) -> list[str]:
        """Return the parameters whose weights differ between the replicas of two rows."""
        replicas = [
            [rows[place] for rows in self.copies]
            for place in range(len(self.copies[0]) if self.copies else 0)
        ]
        theirs, own = (
            next((rows for rows in replicas if each in rows), ()) for each in (row, other)
        )
        return [
            name
            for number, name in enumerate(self.names)
            if any(
                told[one]["weights"][number] != told[two]["weights"][number]
                for one, two in zip(theirs, own, strict=True)
            )
        ]

    def _play(self, passes: Sequence[Pass], buffers: Sequence[torch.Tensor] | None) -> None:
        """Compute passes again, together with all ranks; gradients and weights stay as they are."""
        self._measured = {}
        self._times.clear()
        with self.playing(buffers), self._without_gradients():
            outputs: list[torch.Tensor] = []
            gradients: list[torch.Tensor] = []
            for each in passes:
                ends, begins = self.forward(each)
                outputs += ends
                gradients += begins
            torch.autograd.backward(outputs, gradients)

    @contextlib.contextmanager
    def _without_gradients(self) -> Iterator[None]:
        """Set the gradients of parameters and the hooks on them aside; restore them afterwards."""
        before = [(each, each.grad, each._post_accumulate_grad_hooks) for each in self.weights()]  # noqa: SLF001
        for each, _, _ in before:
            each.grad = each._post_accumulate_grad_hooks = None  # noqa: SLF001
        try:
            yield
        finally:
            for each, grad, hooks in before:
                each.grad, each._post_accumulate_grad_hooks = grad, hooks  # noqa: SLF001

    def _judged(self, row: int, other: int, flagged: Sequence[int]) -> ConfirmationReport:
        """Exchange what the replays have shown, and judge."""
        names = [name for name, _ in self._measured]
        found = relative([*self._measured.values()])
        told = tell_all(self.wire, None if self.accumulated and self.wire.rank != other else found)
        controls = [
            each
            for number, each in enumerate(told)
            if number not in (*flagged, other) and each is not None
        ]
        # If the model is deterministic on one rank, it is on all. Sums may hide a difference of one
        # parameter, not of all.
        noise = min((max(each) for each in controls), default=None)
        control = None if noise is None else [noise] * len(names)
        precisions = [each.precision for each in self._measured.values()]
        verdict, parameters, reason = judge(names, precisions, told[other], told[row], control)
        return ConfirmationReport(
            verdict=verdict,
            by=self.wire.ranks[other],
            parameters=dict(parameters),
            reason=reason,
        )


def _sums(part: torch.Tensor) -> torch.Tensor:
    return part.sum(dim=1, dtype=torch.promote_types(part.dtype, torch.float32))


def _measured(apart: float, part: torch.Tensor) -> Measured:
    return Measured(apart, largest_value(part), torch.finfo(part.dtype).eps)
