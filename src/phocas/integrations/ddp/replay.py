"""The replay of a flagged rank's last micro-batch under DDP, on that rank and on another one."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from phocas.detection.observer import Segment
from phocas.integrations.confirmation import differences, judge, not_reproduced
from phocas.integrations.replay import Parcel, Pass, Recorder, receive, unpacked
from phocas.integrations.replicas import digest
from phocas.integrations.reports import ConfirmationReport
from phocas.integrations.wire import Wire


class Replay(Recorder):
    """The procedure that confirms a flag under DDP: two ranks compute a micro-batch again.

    Args:
        wire: the collectives of the model's ranks.
        hosts: the host of each rank.
        model: the wrapped model.
        named: the parameters that have gradients, by name.
    """

    def __init__(
        self,
        wire: Wire,
        hosts: Sequence[str],
        model: DistributedDataParallel,
        named: Mapping[str, nn.Parameter],
    ) -> None:
        self.names, self.parameters = list(named), list(named.values())
        known = weakref.ref(model)
        super().__init__(
            wire,
            hosts,
            model.module,
            self.parameters[0].device,
            lambda: bool(getattr(known(), "require_backward_grad_sync", False)),
        )
        # Without bucket views, .grad has the gradient of this rank until all buckets are done. On a
        # device, the buckets that are done first are copied to .grad while the last is under way.
        self._copies = model.gradient_as_bucket_view or self.device.type != "cpu"
        self._buckets: list[tuple[torch.Tensor, Callable[[], Sequence[Segment]]]] = []

    def keep(self, flat: torch.Tensor, segments: Callable[[], Sequence[Segment]]) -> None:
        """Keep the gradients of a bucket as they are before the exchange, if nothing else does."""
        if self._copies:
            self._buckets.append((flat.clone(), segments))

    def end(self) -> None:
        """Release what was kept of a step."""
        super().end()
        self._buckets.clear()

    def confirm(self, row: int, flagged: Sequence[int]) -> ConfirmationReport:
        """Replay the last micro-batch of a row; call it on all ranks, in the backward pass.

        Returns:
            The verdict, the same on every rank.
        """
        other = self.other(row, flagged)
        if other is None:
            return not_reproduced(None, "there is no rank that is not flagged")
        if self.wire.rank == row:
            self._send(other)
        own = json.dumps(self._compare(row)).encode() if self.wire.rank == other else b""
        message = torch.frombuffer(bytearray(own), dtype=torch.uint8) if own else torch.empty(0)
        told = self.wire.gather([message.to(torch.uint8)])[other].cpu().numpy().tobytes()
        found: ConfirmationReport = json.loads(told)
        return found

    def _send(self, other: int) -> None:
        """Send the micro-batch, its gradient and that of a replay to another row."""
        parcel = Parcel()
        try:
            header = {
                **self.packed(parcel),
                "replay": [parcel.add(each) for each in self._gradients(self.usable())],
                "original": [parcel.add(each) for each in self._original() or []],
                "weights": parcel.add(self._digests()),
            }
        except Exception as error:  # noqa: BLE001 - the other rank must be told
            parcel, header = Parcel(), {"failed": f"{type(error).__name__}: {error}"}
        parcel.send(self.wire, other, header)

    def _compare(self, row: int) -> ConfirmationReport:
        """Receive the micro-batch of a row, replay it here, and judge."""
        own = self.wire.ranks[self.wire.rank]
        header, tensors = receive(self.wire, row)
        if "failed" in header:
            return not_reproduced(own, f"no replay on the flagged rank: {header['failed']}")
        try:
            theirs, mine = tensors[header["weights"]].cpu(), self._digests().cpu()
            wrong = [
                name for name, same in zip(self.names, theirs == mine, strict=True) if not same
            ]
            if wrong:
                return ConfirmationReport(
                    verdict="weights", by=own, parameters=dict.fromkeys(wrong, 0.0), reason=""
                )
            if not all(bool(each.isfinite().all()) for each in self.parameters):
                return not_reproduced(own, "the weights are not finite on any rank")
            elsewhere = self._gradients(*unpacked(header, tensors))
            original = [tensors[number] for number in header["original"]]
            replay = [tensors[number] for number in header["replay"]]
            known = self._original()
            again = self._gradients(self.usable()) if known is not None else []
            verdict, parameters, reason = judge(
                self.names,
                [torch.finfo(each.dtype).eps for each in elsewhere],
                differences(replay, elsewhere),
                differences(original, elsewhere) if original else None,
                None if known is None else differences(again, known),
            )
        except Exception as error:  # noqa: BLE001 - all ranks must be told
            return not_reproduced(own, f"no replay on rank {own}: {type(error).__name__}: {error}")
        return ConfirmationReport(
            verdict=verdict, by=own, parameters=dict(parameters), reason=reason
        )

    def _digests(self) -> torch.Tensor:
        return torch.stack([digest(each) for each in self.parameters])

    def _original(self) -> list[torch.Tensor] | None:
        """Return the gradients of this rank in this step; None if micro-batches were added up."""
        if self.accumulated:
            return None
        found = [parameter.grad for parameter in self.parameters]
        if self._copies:
            for flat, segments in self._buckets:
                for part in segments():
                    like, values = self.parameters[part.parameter], flat[part.begin : part.end]
                    found[part.parameter] = values.as_strided(like.shape, like.stride())
        both = zip(found, self.parameters, strict=True)
        return [torch.zeros_like(like) if one is None else one.detach() for one, like in both]

    def _gradients(
        self, passes: Sequence[Pass], buffers: Sequence[torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """Return the gradients of forward passes, computed again; nothing else changes."""
        total = [torch.zeros_like(parameter) for parameter in self.parameters]
        with self.playing(buffers):
            for each in passes:
                outputs, gradients = self.forward(each)
                found = torch.autograd.grad(outputs, self.parameters, gradients, allow_unused=True)
                for known, new in zip(total, found, strict=True):
                    if new is not None:
                        known.add_(new)
        return total


def check_replay(model: DistributedDataParallel) -> None:
    """Raise ValueError if the last micro-batch of a model cannot be replayed on two ranks alone."""
    for name, module in model.module.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise ValueError(  # noqa: TRY004 - the type is right, the option is not
                f"confirm replays a micro-batch on two ranks, and {name or 'the model'} is a"
                " SyncBatchNorm, which needs all ranks: leave confirm out"
            )
    for name, parameter in model.module.named_parameters():
        if isinstance(parameter, DTensor):
            raise ValueError(  # noqa: TRY004 - the type is right, the option is not
                f"confirm replays a micro-batch on two ranks, and {name} is spread over several:"
                " leave confirm out"
            )
