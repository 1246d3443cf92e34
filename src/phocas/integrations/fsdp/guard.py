"""The guard of a model whose units are on several meshes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from phocas.detection.flags import KINDS
from phocas.detection.observer import RankObserver
from phocas.integrations.detection_state import DetectionState
from phocas.integrations.guard import Guard
from phocas.integrations.reports import FlaggedRank, NonfiniteReport, Report
from phocas.integrations.wire import Wire


class MeshDetection(NamedTuple):
    """The detection on one mesh of a model."""

    state: DetectionState
    observer: RankObserver
    mates: Mapping[int, Sequence[int]]
    """For each global rank, the ranks that share its samples, see :meth:`Mesh.mates`."""


class MeshesGuard(Guard):
    """A guard that joins the results of all meshes of a model.

    Each mesh has its own detection among its ranks. A rank is flagged if it is flagged on any mesh,
    except if another rank explains its wrong gradients, see :func:`join_flags`.

    Args:
        parts: the detection on each mesh.
        whole: the collectives of all ranks of the job.
        catch_up: waits until all reports have arrived.
        close: removes the rule from the model.
    """

    def __init__(
        self,
        parts: Sequence[MeshDetection],
        whole: Wire,
        catch_up: Callable[[], None],
        close: Callable[[], None],
    ) -> None:
        super().__init__(parts[0].state, parts[0].observer, catch_up, close)
        self.parts, self.whole = parts, whole
        self._guards = [Guard(part.state, part.observer, catch_up, close) for part in parts]

    @property
    def failure(self) -> Exception | None:
        """Return the exception that ended aggregation, or None."""
        return next((each.failure for each in self._guards if each.failure is not None), None)

    def samples(self, number: float) -> None:
        """Set the number of samples or tokens over which this rank's gradients are averaged."""
        for each in self._guards:
            each.samples(number)

    def dropped(self) -> NDArray[np.float64]:
        """Return the share of each rank's values that was dropped, over all steps.

        The ranks are the ``members`` of the report. A share is the largest over the rank's meshes.
        """
        return np.array(self.report()["dropped"])

    def flagged(self) -> tuple[FlaggedRank, ...]:
        """Return the ranks that differ from the others beyond chance, the same on every rank."""
        self._catch_up()
        return tuple(join_flags(self.parts))

    def nonfinite(self) -> tuple[NonfiniteReport, ...]:
        """Return which ranks sent the first values that are not finite, the same on every rank."""
        self._catch_up()
        return tuple(self._nonfinite())

    def _nonfinite(self) -> list[NonfiniteReport]:
        found = [each for part in self.parts for each in part.state.first_nonfinite()]
        return sorted(found, key=lambda each: (each["step"], each["rank"]))

    def unusual(self) -> tuple[int, ...]:
        """Return the ranks whose values were lately dropped far more than usual."""
        self._catch_up()
        return tuple(sorted({rank for part in self.parts for rank in part.state.unusual()}))

    def report(self) -> Report:
        """Return the report, ready for ``json``: of all ranks that share a mesh with this rank."""
        self._catch_up()
        reports = [part.state.report() for part in self.parts]
        dropped: dict[int, float] = {}
        for each in reports:
            for rank, share in zip(each["members"], each["dropped"], strict=True):
                dropped[rank] = max(share, dropped.get(rank, 0.0))
        members = sorted(dropped)
        lost = [each["lost"] for each in reports if each["lost"] is not None]
        return {
            **reports[0],
            "ranks": len(members),
            "members": members,
            "dropped": [dropped[rank] for rank in members],
            "nonfinite": self._nonfinite(),
            "lost": min(lost, default=None),
            "suspects": [one.report() for one in join_flags(self.parts)],
            "unusual": list(self.unusual()),
            "split": next((each["split"] for each in reports if each["split"] is not None), None),
            "failure": None if self.failure is None else str(self.failure),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint; call it on all ranks, between two steps."""
        self._catch_up()
        self.react()
        return {f"mesh{number}": each.state_dict() for number, each in enumerate(self._guards)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned on the same rank of the same job."""
        for number, each in enumerate(self._guards):
            name = f"mesh{number}"
            if name not in state_dict:
                found = ", ".join(map(str, state_dict)) or "nothing"
                raise ValueError(f"a guard's state must have {name!r}: got {found}")
            each.load_state_dict(state_dict[name])

    def react(self) -> None:
        """React to new flags and non-finite values of all meshes; call this in a step."""
        states = [part.state for part in self.parts]
        if not any(state.changed for state in states):
            return
        for state in states:
            state.changed = False
        flagged, nonfinite = join_flags(self.parts), self._nonfinite()
        if flagged or nonfinite:
            states[0].reactions.react(
                states[0].own,
                self.whole.ranks,
                flagged,
                nonfinite,
                self.report,
                self.whole.leave,
            )


def join_flags(parts: Sequence[MeshDetection]) -> list[FlaggedRank]:
    """Return the flagged ranks of all meshes, in the order of ranks.

    Ranks that share samples on a mesh (expert parallelism) have wrong gradients there as soon as
    one of them has wrong activations. If a mesh on which fewer ranks share samples flags one of
    them, the others are not flagged for it.
    """
    found: dict[int, FlaggedRank] = {}
    exact: dict[int, int] = {}  # by flagged rank, the fewest ranks that it shares samples with
    for part in parts:
        for one in part.state.flagged():
            found[one.rank] = _joined(found[one.rank], one) if one.rank in found else one
            size = len(part.mates[one.rank])
            exact[one.rank] = min(size, exact.get(one.rank, size))
    explained = {
        rank
        for part in parts
        for rank in found
        if not found[rank].tensors  # no other rank explains weights that have drifted
        and len(part.mates[rank]) == exact[rank]
        and any(exact.get(mate, exact[rank]) < exact[rank] for mate in part.mates[rank])
    }
    return [found[rank] for rank in sorted(found) if rank not in explained]


def _joined(one: FlaggedRank, other: FlaggedRank) -> FlaggedRank:
    """Return the evidence of two meshes against one rank."""
    first, second = sorted([one, other], key=lambda each: KINDS.index(each.kind))
    return replace(
        first,
        onset=min(one.onset, other.onset),
        flagged=min(one.flagged, other.flagged),
        dropped=max(one.dropped, other.dropped),
        sure=max(one.sure, other.sure),
        grounds=tuple(dict.fromkeys([*first.grounds, *second.grounds])),
        places={**first.places, **second.places},
        tensors=(*first.tensors, *second.tensors),
    )
