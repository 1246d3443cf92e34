"""What protects a model: the hook that DDP calls, and the thread behind it that aggregates."""

# No postponed annotations here: torch compares those of a hook with its own types.

import json
import os
import queue
import threading
import weakref
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.nn.parallel import DistributedDataParallel

import phocas
from phocas.floats import FORMATS
from phocas.integrations.ddp.step import Aggregator
from phocas.integrations.ddp.wire import Wire
from phocas.machine import available_cores
from phocas.rules import Rule, parse_rule
from phocas.rules.suspicion import Suspicion
from phocas.specs import count

_DTYPES = tuple(getattr(torch, name) for name in FORMATS)

_Result: TypeAlias = torch.futures.Future[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Suspect:
    """A rank that is farther from the others than chance allows, since step ``since`` (from 1).

    ``dropped`` is the share of its values that was thrown away, ``expected`` what a rank loses if
    who sent a value does not matter.
    """

    rank: int
    since: int
    dropped: float
    expected: float

    @property
    def excess(self) -> float:
        """Return how much more was dropped than expected."""
        return self.dropped - self.expected


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    flat: torch.Tensor
    last: bool
    ready: Any  # a CUDA event, or None
    future: torch.futures.Future[Any]


class Guard:
    """What a protected model knows about its ranks; :func:`protect` makes it."""

    def __init__(self, rule: Rule, wire: Wire, *, verify: bool, seed: int) -> None:
        self.rule = rule
        self._m = wire.m
        self._suspicion = Suspicion(wire.m, rule.liars(wire.m) or None)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._failures: list[Exception] = []
        aggregator = Aggregator(wire, rule, self._suspicion, verify=verify, seed=seed)
        thread = threading.Thread(
            target=_work,
            args=(self._jobs, aggregator, self._failures),
            name="phocas-ddp",
            daemon=True,
        )
        thread.start()
        # The thread knows nothing of the guard, and ends with it.
        weakref.finalize(self, _stop, self._jobs, thread)

    @property
    def steps(self) -> int:
        """Return how many steps have been aggregated."""
        return self._suspicion.rounds

    @property
    def failure(self) -> Exception | None:
        """Return what ended aggregation, as it was raised, or None."""
        return self._failures[0] if self._failures else None

    def dropped(self) -> NDArray[np.float64]:
        """Return the share of each rank's values that was thrown away, over all steps."""
        return self._suspicion.shares()

    def suspects(self) -> tuple[Suspect, ...]:
        """Return the ranks that are wrong beyond chance, the same on every rank.

        If ranks draw from the same data and at most b lie, about gradients or about others, then
        with probability at least 0.999 no honest rank is ever accused; see
        :class:`phocas.rules.suspicion.Suspicion`.
        """
        expected = self.rule.expected(self._m)
        return tuple(
            Suspect(one.worker, one.since, one.dropped, expected)
            for one in self._suspicion.evidence()
            if one.since is not None
        )

    def unusual(self) -> tuple[int, ...]:
        """Return the ranks that are lately dropped far more than most: a warning, and no proof."""
        return self._suspicion.unusual()


def protect(
    model: DistributedDataParallel,
    rule: Rule | str,
    verify: bool = False,
    *,
    seed: int = 0,
    timeout: timedelta | None = None,
) -> Guard:
    """Aggregate a model's gradients by a rule from now on; to be called on all its ranks.

    Args:
        model: The wrapped model, before its first backward pass.
        rule: ``phocas.Phocas(b=2)`` or ``"nnm:b=2|phocas:b=2"``; row i is rank i.
        verify: Have every shard aggregated by two ranks; if they differ, raise on all ranks and
            name who is wrong. Costs a second all-to-all and a second aggregation.
        seed: For rules that draw at random (bucketing); the same on all ranks.
        timeout: How long to wait for a rank before raising; that of the model's group if not given.
    """
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"model must be a DistributedDataParallel: got {type(model).__name__}; wrap it first"
        )
    rule = parse_rule(rule) if isinstance(rule, str) else rule
    seed = count("protect", "seed", seed)
    group = model.process_group
    rule.check(dist.get_world_size(group))
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    _check_gradients(model, rule, parameters)
    device = parameters[0].device
    _share_cores()
    own = dist.new_group(
        dist.get_process_group_ranks(group),
        timeout=timeout or _timeout(group, device),
        use_local_synchronization=True,
    )
    wire = Wire(own, device)
    _check_same(
        wire,
        {
            "rule": str(rule),
            "verify": bool(verify),
            "seed": seed,
            "parameters": sum(parameter.numel() for parameter in parameters),
        },
    )
    guard = Guard(rule, wire, verify=verify, seed=seed)
    model.register_comm_hook(guard, _hook)
    return guard


def _hook(
    guard: Guard,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Queue a bucket for the guard's thread, which completes the future."""
    flat = bucket.buffer()
    devices = [flat.device] if flat.is_cuda else None
    ready = torch.cuda.current_stream(flat.device).record_event() if flat.is_cuda else None
    future: torch.futures.Future[Any] = torch.futures.Future(devices=devices)
    result: _Result = future.then(_outcome)
    guard._jobs.put(_Job(flat, bucket.is_last(), ready, future))  # noqa: SLF001 - its own hook
    return result


def _outcome(future: torch.futures.Future[Any]) -> torch.Tensor:
    # Torch reads the result in C++, where Future.set_exception is not understood.
    result = future.value()
    if isinstance(result, Exception):
        raise result
    return result  # type: ignore[no-any-return]


def _work(
    jobs: "queue.SimpleQueue[_Job | None]", aggregator: Aggregator, failures: list[Exception]
) -> None:
    """Aggregate buckets in the order of the queue, which is the same on all ranks."""
    waiting: list[torch.futures.Future[Any]] = []
    while (job := jobs.get()) is not None:
        waiting.append(job.future)
        try:
            if failures:
                raise RuntimeError(f"aggregation ended in an earlier step: {failures[0]}")  # noqa: TRY301
            if job.ready is not None:
                torch.cuda.current_stream(job.flat.device).wait_event(job.ready)
            done: list[Any] = aggregator.take(job.flat, last=job.last)
        except Exception as error:  # noqa: BLE001 - it is raised where backward waits
            failures.append(error)
            done = [error] * len(waiting)
        completed, waiting = waiting[: len(done)], waiting[len(done) :]
        for future, result in zip(completed, done, strict=True):
            future.set_result(result)


def _stop(jobs: "queue.SimpleQueue[_Job | None]", thread: threading.Thread) -> None:
    """End the thread; at exit it must be gone before the interpreter, or torch aborts."""
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join(timeout=1)  # a thread that waits for a hung rank is left behind


def _check_gradients(
    model: DistributedDataParallel, rule: Rule, parameters: list[torch.nn.Parameter]
) -> None:
    dtypes = {parameter.dtype for parameter in parameters}
    for dtype in dtypes:
        if dtype not in _DTYPES:
            known = ", ".join(str(dtype) for dtype in _DTYPES)
            raise TypeError(f"gradients must be of {known}: got {dtype}")
    if not rule.columnwise and torch.float64 in dtypes and len(dtypes) > 1:
        raise TypeError(
            f"{rule} measures whole gradients, which must be all float64 or without it: got"
            f" {', '.join(sorted(map(str, dtypes)))}; use a column rule (phocas, trimmed-mean)"
        )
    for name, module in model.module.named_modules():
        if getattr(module, "sparse", False):
            raise TypeError(f"gradients must be dense: {name or 'the model'} has sparse=True")


def _check_same(wire: Wire, settings: dict[str, Any]) -> None:
    """Compare what ranks were told, so that a difference is an error and not a hang."""
    text = bytearray(json.dumps(settings).encode())
    said = wire.gather([torch.frombuffer(text, dtype=torch.uint8)])
    for rank, message in enumerate(said):
        theirs = json.loads(message.cpu().numpy().tobytes())
        for key, value in settings.items():
            if theirs.get(key) != value:
                raise ValueError(
                    f"all ranks must be protected alike: rank {wire.rank} has {key} {value!r},"
                    f" rank {rank} has {theirs.get(key)!r}"
                )


def _share_cores() -> None:
    """Leave cores to the other ranks of this host, as torchrun does with OpenMP's."""
    neighbours = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if neighbours > 1 and "PHOCAS_NUM_THREADS" not in os.environ:
        cores = max(1, available_cores() // neighbours)
        phocas.set_num_threads(min(cores, phocas.get_num_threads()))


def _timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    # Left alone, a new group waits for minutes; there is no public way to ask what another does.
    options = group._get_backend(device).options  # noqa: SLF001
    return getattr(options, "_timeout", None)
