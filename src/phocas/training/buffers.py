"""The buffers of a model, such as the running means of batch norm, after a round of workers."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def take_median(buffer: torch.Tensor, sent: Sequence[torch.Tensor]) -> None:
    """Set a buffer of the server to the median of those that the workers sent.

    NaN and inf are ignored. If fewer than half of the finite values of a coordinate are of
    Byzantine workers, their median is between two honest values. A coordinate keeps its value
    unless more than half of the workers sent a finite one, as for an attention mask of ``-inf``.

    Args:
        buffer: the buffer of the server, which is overwritten: bool, or a type that torch sorts.
        sent: the buffer of each worker.
    """
    values = torch.stack(tuple(sent))
    if values.is_floating_point():
        finite = values.isfinite()
        median = values.where(finite, torch.nan).nanmedian(0).values
        most = 2 * finite.sum(0) > len(sent)
        buffer.copy_(median.where(most, buffer))
    elif values.dtype == torch.bool:  # torch has no median of these
        buffer.copy_(values.byte().median(0).values)
    else:
        buffer.copy_(values.median(0).values)
