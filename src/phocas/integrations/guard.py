"""The guard of a model, the object that ``protect`` and ``watch`` return, and their options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Self, TypedDict

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from phocas.deprecation import former_attributes, former_names, warn_renamed
from phocas.detection.flags import Kind, Threat, check_threat
from phocas.detection.observer import RankObserver
from phocas.integrations.confirmation import check_confirm
from phocas.integrations.detection_state import DetectionState
from phocas.integrations.metrics import metrics
from phocas.integrations.reactions import FAULTY, Reactions
from phocas.integrations.replicas import check_optimizer
from phocas.integrations.reports import FlaggedRank, NonfiniteReport, Report, as_text
from phocas.rules import Heraclius, Monitor, Rule
from phocas.specs import count, unknown

__getattr__ = former_names(__name__, {"Suspect": "FlaggedRank"})


class Options(TypedDict, total=False):
    """The options of ``protect`` and ``watch``, in DDP and in FSDP2."""

    threat: Threat
    """What ranks may do: ``faults`` (default) or ``adversaries``. Against adversaries ranks are not
    trusted in their reports, and faults in single parameters are found later or not at all."""
    seed: int
    """For rules that draw at random (bucketing); the same on all ranks."""
    timeout: timedelta | None
    """How long to wait for a rank before raising; that of the model's group if not given."""
    on_flagged: Callable[[FlaggedRank], None] | None
    """Called with each new flagged rank, on every rank, in backward (with CUDA: in a thread)."""
    on_suspect: Callable[[FlaggedRank], None] | None
    """Deprecated name of ``on_flagged``."""
    log: str | Path | None
    """A file to which one rank appends a line of JSON for each new flagged rank."""
    exit_code: int | Mapping[str, int] | None
    """The code with which all ranks exit when a rank is flagged. A mapping has a code for each
    verdict of a replay, or kind, that ends the job: ``{"persistent": 77, "drifted": 78}``."""
    act_on: Sequence[Kind]
    """The kinds to which ``on_flagged``, ``verdict_file`` and ``exit_code`` apply; all but
    ``differs`` by default."""
    verdict_file: str | Path | None
    """A file that every rank overwrites with the verdict as JSON when a rank is flagged."""
    job_group: dist.ProcessGroup | None
    """The ranks that share flags and the exit code. Each must protect its model and take the same
    number of steps. If not given: all ranks of the mesh that the model's mesh is a part of; for
    DDP without a mesh, the ranks of its process group."""
    digest_every: int
    """Compare the weights of replicas every so many steps, 100 by default; 0 compares nothing. A
    rank whose weights are not those of the majority is flagged as ``drifted``. Under DDP all ranks
    are replicas; under FSDP2 those ranks of a mesh of two dimensions (HSDP) that keep the same
    shard. A mesh of one dimension has none, and a number other than 0 is rejected."""
    optimizer: torch.optim.Optimizer | None
    """The optimizer whose state is compared between ranks too; none by default."""
    confirm: Literal["replay"] | None
    """With ``"replay"``, a rank that is flagged by its gradients and one other rank compute the
    last micro-batch of the flagged rank again. This tells a broken device from unusual data."""


@dataclass(frozen=True, slots=True, eq=False)
class GuardSettings:
    """The options that a user has chosen, checked; the fields are those of :class:`Options`."""

    threat: Threat
    seed: int
    timeout: timedelta | None
    job_group: dist.ProcessGroup | None
    digest_every: int | None
    optimizer: torch.optim.Optimizer | None
    confirm: str | None
    reactions: Reactions

    def shared(self) -> dict[str, Any]:
        """Return the options that must be the same on all ranks."""
        return {
            "threat": self.threat,
            "seed": self.seed,
            "digest_every": self.digest_every,
            "optimizer": self.optimizer is not None,
            "confirm": self.confirm,
        }


def watching(b: int) -> Monitor:
    """Return the rule that averages and detects up to b faulty ranks."""
    if count("watch", "b", b) < 1:
        raise ValueError(f"Detection needs b >= 1: got b={b}")
    return Monitor(Heraclius(b=b))


def options_of(
    *own: str,
    threat: Threat = "faults",
    seed: int = 0,
    timeout: timedelta | None = None,
    on_flagged: Callable[[FlaggedRank], None] | None = None,
    on_suspect: Callable[[FlaggedRank], None] | None = None,
    log: str | Path | None = None,
    exit_code: int | Mapping[str, int] | None = None,
    act_on: Sequence[Kind] = FAULTY,
    verdict_file: str | Path | None = None,
    job_group: dist.ProcessGroup | None = None,
    digest_every: int | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    confirm: str | None = None,
    **mistyped: object,
) -> GuardSettings:
    """Check the options before training starts, and return them.

    ``own`` are the names of the caller's options that are not in :class:`Options`.
    """
    for name in mistyped:
        known = [name for name in Options.__annotations__ if name != "on_suspect"]
        raise TypeError(unknown("option", name, [*own, *known]))
    if on_suspect is not None:
        if on_flagged is not None:
            raise TypeError("give on_flagged or its former name on_suspect: got both")
        warn_renamed("on_suspect", "on_flagged")
        on_flagged = on_suspect
    reactions = Reactions.of(on_flagged, log, exit_code, act_on, verdict_file)
    if digest_every is not None:
        count("protect", "digest_every", digest_every)
    check_threat(threat)
    check_optimizer(optimizer)
    check_confirm(confirm, threat)
    return GuardSettings(
        threat=threat,
        seed=count("protect", "seed", seed),
        timeout=timeout,
        job_group=job_group,
        digest_every=digest_every,
        optimizer=optimizer,
        confirm=confirm,
        reactions=reactions,
    )


@former_attributes(suspects="flagged")
class Guard:
    """The results of detection for a model; ``protect`` and ``watch`` return a guard.

    A guard is a context manager: at the end of the block, gradients are averaged again, as before.

    Args:
        state: the state of detection, the same on all ranks.
        observer: the observations of this rank.
        catch_up: waits until all reports have arrived.
        close: removes the rule from the model.
    """

    def __init__(
        self,
        state: DetectionState,
        observer: RankObserver,
        catch_up: Callable[[], None],
        close: Callable[[], None],
    ) -> None:
        self._detection, self._observer = state, observer
        self._catch_up, self._close = catch_up, close
        self.closed = False

    @property
    def rule(self) -> Rule:
        """Return the rule."""
        return self._detection.rule

    @property
    def steps(self) -> int:
        """Return how many steps have been aggregated."""
        self._catch_up()
        return self._detection.detector.rounds

    @property
    def failure(self) -> Exception | None:
        """Return the exception that ended aggregation, or None."""
        return self._detection.failure

    def samples(self, number: float) -> None:
        """Set the number of samples or tokens over which this rank's gradients are averaged.

        Call this on every rank before the first backward pass, if ranks have batches of different
        sizes, and again whenever the size changes. Gradients of smaller batches are noisier, and
        without this number such a rank is flagged as one that ``differs``. A number that is not
        positive, or that only some ranks give, raises an error on every rank, in one of the next
        four steps.

        Args:
            number: the size of the batch, on the same scale on all ranks.
        """
        self._detection.sizes.give(number)

    def dropped(self) -> NDArray[np.float64]:
        """Return the share of each rank's values that was dropped, over all steps."""
        self._catch_up()
        return self._detection.detector.shares()

    def flagged(self) -> tuple[FlaggedRank, ...]:
        """Return the ranks that differ from the others beyond chance, the same on every rank.

        ``kind`` says how a rank differs: a rank of kind ``differs`` need not be faulty.

        By *distances*: if ranks draw from the same data and at most b are faulty, in gradients or
        in reports about others, then with probability at least 0.999 no honest rank is flagged
        in 100,000 observed steps; see :class:`phocas.detection.detector.Detector`. By *addresses*:
        more than b ranks have seen absurd values of the rank at the same addresses, three times;
        see :class:`phocas.detection.locations.Locations`. By *replicas*: the weights of the rank
        are not those of the majority.
        """
        self._catch_up()
        return tuple(self._detection.flagged())

    def nonfinite(self) -> tuple[NonfiniteReport, ...]:
        """Return which ranks sent the first values that are not finite, the same on every rank.

        The result is a list of reports of ranks. If more than b ranks report the same values, at
        least one of these ranks is honest.
        """
        self._catch_up()
        return tuple(self._detection.first_nonfinite())

    def unusual(self) -> tuple[int, ...]:
        """Return the ranks whose values were lately dropped far more than usual.

        This is a warning, not a proof.
        """
        self._catch_up()
        return tuple(self._detection.unusual())

    def report(self) -> Report:
        """Return the report, ready for ``json``; the text is :meth:`report_text`."""
        self._catch_up()
        return self._detection.report()

    def report_text(self) -> str:
        """Return the report as text, for people."""
        return as_text(self.report())

    def metrics(self) -> dict[str, float]:
        """Return numbers for any tracker, by name: ``wandb.log(guard.metrics())``."""
        return metrics(self.report())

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint; call it on all ranks, between two steps.

        The key ``ledger`` has the state that all ranks share. (In a job of several groups, the key
        is ``ledger4`` for the group that begins with rank 4.) The key ``rank3`` has the state of
        rank 3. So one checkpoint can contain the states of all ranks
        (``torch.distributed.checkpoint``).
        """
        self._catch_up()
        self._detection.react()  # on all ranks: a checkpoint keeps what was reported
        return {self._shared: self._detection.state(), self._own: self._observer.state()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned on the same rank of the same job.

        Flagged ranks stay flagged, and reactions are not repeated. A rank that now runs on another
        host starts without evidence.
        """
        self._catch_up()
        for name in (self._shared, self._own):
            if name not in state_dict:
                found = ", ".join(map(str, state_dict)) or "nothing"
                raise ValueError(f"a guard's state must have {name!r}: got {found}")
        try:
            moved = self._detection.load_state(state_dict[self._shared])
            self._observer.load_state(state_dict[self._own])
        except KeyError as error:
            raise ValueError(
                f"a guard's state must be of this version of phocas: it has no {error}; leave it"
                " out to begin anew"
            ) from None
        for rank in moved:
            self._observer.forget(rank)
        self._observer.follow(self._detection.detector)

    @property
    def _own(self) -> str:
        return f"rank{self._detection.own}"

    @property
    def _shared(self) -> str:
        return "ledger" if self._detection.job is None else f"ledger{self._detection.members[0]}"

    def close(self) -> None:
        """Average gradients again from now on; the results of detection stay available."""
        if not self.closed:
            self.closed = True
            self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
