"""The verdict on a flagged rank, from replays of its last micro-batch on two ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch

from phocas.integrations.reports import ConfirmationReport
from phocas.integrations.verdicts import Verdict

UNUSABLE = 0.1
"""A rank whose replay differs by more than this, relatively, does not reproduce its gradient."""
_ROUNDING = 16.0  # rounding errors of the largest gradient that a difference must exceed
_MARGIN = 4.0  # between two devices, times the difference between two runs on one device
_LARGEST = 1e9  # of a difference, because JSON has no infinity
_SHOWN = 16  # parameters in a report
_NO_CONTROL = (
    "the other rank does not reproduce its own gradient either: the loss depends on more than the"
    " model's output, or the model is not deterministic"
)

Gradients: TypeAlias = Sequence[torch.Tensor]
Differences: TypeAlias = Sequence[float]
"""For each parameter, how much two gradients differ, relative to the largest value."""


def judge(
    names: Sequence[str],
    precisions: Sequence[float],
    replay: Differences,
    original: Differences | None,
    control: Differences | None,
) -> tuple[Verdict, Mapping[str, float], str]:
    """Return the verdict, the relative difference of each parameter that differs, and the reason.

    Two gradients of a parameter count as equal if their difference, relative to the largest value,
    is at most the square root of the machine epsilon of their type, or at most four times that of
    the control.

    Args:
        names: the names of the parameters.
        precisions: the precision of the type of each gradient.
        replay: between the replays on the flagged and on the other rank.
        original: between the gradient that the flagged rank had in the step and a replay; None if
            it is not known.
        control: the same for the own micro-batch of a rank that is not flagged; None if it is not
            known.
    """
    noise = [0.0] * len(names) if control is None else control
    limits = [
        max(precision**0.5, _MARGIN * own) for precision, own in zip(precisions, noise, strict=True)
    ]
    usable = [own <= UNUSABLE for own in noise]

    def differing(these: Differences) -> dict[str, float]:
        apart = zip(names, these, limits, usable, strict=True)
        found = {name: by for name, by, limit, use in apart if use and by > limit}
        return dict(sorted(found.items(), key=lambda item: -item[1])[:_SHOWN])

    if wrong := differing(replay):
        return "persistent", wrong, ""
    if not all(usable):
        odd = {name: own for name, own, use in zip(names, noise, usable, strict=True) if not use}
        return "not reproduced", dict(list(odd.items())[:_SHOWN]), _NO_CONTROL
    if original is None:
        return (
            "not reproduced",
            {},
            "both ranks compute the same gradient of the last micro-batch, and the step had more",
        )
    if wrong := differing(original):
        return "transient", wrong, ""
    return "data", {}, ""


def differences(these: Gradients, those: Gradients) -> list[float]:
    """Return the difference of each pair of tensors, see :func:`relative`."""
    measured = [
        Measured(distance(one, other), largest_value(other), torch.finfo(other.dtype).eps)
        for one, other in zip(these, those, strict=True)
    ]
    return relative(measured)


class Measured(NamedTuple):
    """The difference of two gradients of a parameter."""

    distance: float
    """The largest difference of two values."""
    largest: float
    """The largest finite value."""
    precision: float
    """The precision of their type."""


def relative(measured: Sequence[Measured]) -> list[float]:
    """Return each difference relative to the largest value of its parameter.

    Differences as small as the rounding errors of the largest value in all tensors count as 0: some
    gradients are zero in exact arithmetic, such as that of a bias before a BatchNorm.
    """
    most = max((each.largest for each in measured), default=0.0)
    return [_ratio(each, most * _ROUNDING * each.precision) for each in measured]


def _ratio(each: Measured, floor: float) -> float:
    if each.distance <= floor:
        return 0.0
    by = each.distance / each.largest if each.largest else _LARGEST
    return min(by, _LARGEST) if by == by else _LARGEST  # noqa: PLR0124 - NaN


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference of two tensors; values that are not finite must be the same."""
    if one.numel() == 0:
        return 0.0
    one, other = one.detach().cpu().double(), other.detach().cpu().double()
    same = (one == other) | (one.isnan() & other.isnan())
    return torch.where(same, 0.0, (one - other).abs()).max().item()


def largest_value(tensor: torch.Tensor) -> float:
    """Return the largest finite absolute value of a tensor, 0 if there is none."""
    finite = tensor[tensor.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def check_confirm(confirm: object, threat: str) -> None:
    """Raise ValueError unless the option is known and ranks can be trusted in a replay."""
    if confirm not in (None, "replay"):
        raise ValueError(f"confirm must be 'replay' or None: got {confirm!r}")
    if confirm and threat != "faults":
        raise ValueError(
            f"confirm needs threat='faults': got {threat!r}; malicious ranks lie in a replay, too"
        )


def not_reproduced(by: int | None, reason: str) -> ConfirmationReport:
    """Return the report of a replay that gives no answer."""
    return ConfirmationReport(verdict="not reproduced", by=by, parameters={}, reason=reason)
