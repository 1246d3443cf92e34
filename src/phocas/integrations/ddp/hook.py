"""The hook that DDP calls, and the thread that aggregates during backward."""

# No postponed annotations here: torch compares those of a hook with its own types.

import queue
import threading
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, Unpack

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from phocas.detection.observer import Segment
from phocas.integrations.ddp.replay import Replay, check_replay
from phocas.integrations.ddp.step import DDPAggregator
from phocas.integrations.detection_state import DetectionState
from phocas.integrations.guard import Guard, Options, options_of, watching
from phocas.integrations.job import join_job, ranks_of_job
from phocas.integrations.joining import check_dtypes, check_rule, join, uncompiled
from phocas.integrations.replicas import EVERY, Replicas
from phocas.rules import Rule, parse_rule

_Result: TypeAlias = torch.futures.Future[torch.Tensor]
_COLLECTIVE = (RuntimeError, dist.DistBackendError, dist.DistNetworkError)
"""The types of the errors of a collective that fails."""


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    flat: torch.Tensor
    segments: Callable[[], list[Segment]]
    last: bool
    ready: Any  # a CUDA event, or None
    future: torch.futures.Future[Any]


class _Worker:
    """The thread that runs the jobs of all steps, one at a time, in the same order on all ranks."""

    def __init__(self, aggregator: DDPAggregator, detection: DetectionState) -> None:
        self.jobs: queue.Queue[_Job | None] = queue.Queue()
        self.aggregator, self.detection = aggregator, detection
        self.waiting: list[torch.futures.Future[Any]] = []
        self.thread = threading.Thread(target=self._work, name="phocas-ddp", daemon=True)
        self.thread.start()

    def later(self, job: _Job) -> None:
        """Queue a job for the thread."""
        self.jobs.put(job)

    def now(self, job: _Job) -> None:
        """Run a job in this thread, after all queued jobs."""
        self.jobs.join()
        self._do(job)

    def _work(self) -> None:
        while (job := self.jobs.get()) is not None:
            try:
                self._do(job)
            finally:
                self.jobs.task_done()

    def _do(self, job: _Job) -> None:
        self.waiting.append(job.future)
        try:
            if self.detection.failure is not None:
                raise RuntimeError(  # noqa: TRY301
                    f"aggregation ended in an earlier step: {self.detection.failure}"
                )
            if job.ready is not None:
                torch.cuda.current_stream(job.flat.device).wait_event(job.ready)
            done: list[Any] = self.aggregator.take(job.flat, job.segments, last=job.last)
        except Exception as error:  # noqa: BLE001 - the future raises it in the backward pass
            said = self._located(error)
            self.detection.failure = self.detection.failure or said
            done = [said] * len(self.waiting)
        completed, self.waiting = self.waiting[: len(done)], self.waiting[len(done) :]
        for future, result in zip(completed, done, strict=True):
            future.set_result(result)

    def _located(self, error: Exception) -> Exception:
        """Return the error of a collective with the step in which it failed."""
        if self.detection.failure is not None or type(error) not in _COLLECTIVE:
            return error
        step, m = self.detection.detector.rounds + 1, self.detection.m
        return RuntimeError(f"step {step}: waited for all {m} ranks to exchange gradients: {error}")

    def stop(self) -> None:
        """End the thread; torch aborts if the thread is alive when the interpreter exits."""
        self.jobs.put(None)
        if self.thread is not threading.current_thread():
            self.thread.join(timeout=1)  # a thread blocked by a hung rank is abandoned


class _State:
    """The state of the hook: a worker thread, the guard, and the numbers of the parameters."""

    def __init__(
        self,
        detection: DetectionState,
        worker: _Worker,
        group: dist.ProcessGroup,
        numbers: dict[int, int],
    ) -> None:
        self.worker, self.group, self.numbers = worker, group, numbers
        aggregator = worker.aggregator
        observer, replay = aggregator.observer, aggregator.replay

        def close() -> None:
            detection.finish()
            if replay is not None:
                replay.remove()

        self.guard = Guard(detection, observer, catch_up=detection.receive, close=close)
        # The worker has no reference to the guard, so it ends when the guard is collected.
        weakref.finalize(self.guard, worker.stop)


class _Slot:
    """A replaceable hook state: torch accepts one hook per model, and a guard may be replaced."""

    def __init__(self, state: _State) -> None:
        self.state = state


def protect(
    model: DistributedDataParallel,
    rule: Rule | str,
    verify: bool = False,
    **options: Unpack[Options],
) -> Guard:
    """Aggregate the gradients of a model by a rule; call it on all ranks of the model.

    Use ``heraclius:b=1`` alone or :func:`watch` for language models and mixtures of experts: other
    column rules drop the gradients of rare tokens of honest ranks (docs/costs.md). After its
    guard is closed, a model can be protected again.

    Args:
        model: The wrapped model, before its first backward pass.
        rule: ``phocas.Phocas(b=2)`` or ``"nnm:b=2|phocas:b=2"``; row i is rank i.
        verify: Whether two ranks aggregate every shard. If their results differ, all ranks raise
            an error that names the faulty rank. This costs a second all-to-all and a second
            aggregation.
        **options: :class:`phocas.integrations.guard.Options`.
    """
    model = uncompiled(model)
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"model must be a DistributedDataParallel: got {type(model).__name__}; wrap it first"
        )
    rule = parse_rule(rule) if isinstance(rule, str) else rule
    chosen = options_of("verify", **options)
    if chosen.confirm:
        check_replay(model)
    group = model.process_group
    check_rule(rule, dist.get_world_size(group))
    slot = _slot(model)
    weights = dict(model.module.named_parameters())
    named = {name: parameter for name, parameter in weights.items() if parameter.requires_grad}
    parameters = list(named.values())
    _check_gradients(model, rule, parameters)
    wire, hosts = join(
        group,
        parameters[0].device,
        {
            "rule": str(rule),
            "verify": bool(verify),
            **chosen.shared(),
            "parameters": sum(parameter.numel() for parameter in parameters),
        },
        chosen.timeout,
    )
    mesh = getattr(model, "device_mesh", None)
    # Without a mesh it is not known whether the other ranks of the world train.
    ranks = ranks_of_job(mesh, chosen.job_group or (group if mesh is None else None))
    detection = DetectionState(
        rule, list(named), hosts, wire.rank, chosen.reactions, chosen.threat, wire
    )
    detection.job = join_job(wire, ranks, detection.detector.b, chosen.timeout)
    every = EVERY if chosen.digest_every is None else chosen.digest_every
    detection.replicas = Replicas(
        wire, list(weights), lambda: list(weights.values()), every, chosen.optimizer
    )
    if chosen.confirm and detection.job is not None:
        raise ValueError(
            "confirm replays a micro-batch on two ranks, and this job has several groups of ranks:"
            " leave confirm out"
        )
    replay = Replay(wire, hosts, model, named) if chosen.confirm else None
    aggregator = DDPAggregator(wire, detection, verify=verify, seed=chosen.seed, replay=replay)
    numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
    state = _State(detection, _Worker(aggregator, detection), group, numbers)
    if slot is None:
        model.register_comm_hook(_Slot(state), _hook)
    else:
        slot.state = state
    if wire.rank == 0:
        _warn_of_buffers(model)
    return state.guard


def watch(model: DistributedDataParallel, b: int, **options: Unpack[Options]) -> Guard:
    """Average a model's gradients as before, and detect faulty ranks as with Heraclius.

    Args:
        model: The wrapped model, before its first backward pass.
        b: The largest number of faulty ranks, 2b < m.
        **options: As for :func:`protect`.
    """
    return protect(model, watching(b), **options)


def _hook(
    slot: _Slot,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Queue a bucket for the worker, which completes the future."""
    state = slot.state
    if state.guard.closed:
        return allreduce_hook(state.group, bucket)
    flat = bucket.buffer()
    devices = [flat.device] if flat.is_cuda else None
    ready = torch.cuda.current_stream(flat.device).record_event() if flat.is_cuda else None
    future: torch.futures.Future[Any] = torch.futures.Future(devices=devices)
    result: _Result = future.then(_outcome)
    segments = partial(_segments, bucket.parameters(), state.numbers)
    job = _Job(flat, segments, bucket.is_last(), ready, future)
    if job.last and ready is None:
        state.worker.now(job)  # the backward pass has no other work to overlap with
    else:
        state.worker.later(job)
    return result


def _segments(parameters: list[torch.Tensor], numbers: dict[int, int]) -> list[Segment]:
    """Return the ranges of the parameters of a bucket, one after the other."""
    segments = []
    begin = 0
    for parameter in parameters:
        end = begin + parameter.numel()
        segments.append(Segment(numbers[id(parameter)], begin, end))
        begin = end
    return segments


def _outcome(future: torch.futures.Future[Any]) -> torch.Tensor:
    # Torch reads the result in C++, which does not support Future.set_exception.
    result = future.value()
    if isinstance(result, Exception):
        raise result
    return result  # type: ignore[no-any-return]


def _slot(model: DistributedDataParallel) -> _Slot | None:
    """Return the slot of a closed guard, or None; raise if there is another hook or guard."""
    for hook, slot in model._comm_hooks:  # noqa: SLF001 - torch has no public way
        if not isinstance(slot, _Slot):
            raise ValueError(  # noqa: TRY004 - the type is right, the state is not
                "the model has a communication hook already, and DDP takes one only: got"
                f" {getattr(hook, '__qualname__', hook)}; leave it out to protect the model"
            )
        if not slot.state.guard.closed:
            raise ValueError("the model is protected already: close its guard first")
        return slot
    return None


def _warn_of_buffers(model: DistributedDataParallel) -> None:
    """Warn if DDP copies the batch statistics of rank 0 to all ranks, which no rule checks."""
    if not model.will_sync_module_buffers():  # type: ignore[no-untyped-call]  # untyped in torch
        return
    for name, module in model.module.named_modules():
        if isinstance(module, _NormBase) and module.running_mean is not None:
            warnings.warn(
                f"{name or 'the model'} has running statistics, and DDP overwrites them with rank"
                " 0's in every step: if rank 0 is faulty they are wrong on all ranks, and phocas"
                " does not see it. Use DistributedDataParallel(..., forward_sync_buffers=False),"
                " broadcast_buffers=False in older versions of torch, or layers without running"
                " statistics",
                RuntimeWarning,
                stacklevel=3,
            )
            return


def _check_gradients(
    model: DistributedDataParallel, rule: Rule, parameters: list[torch.nn.Parameter]
) -> None:
    dtypes = {parameter.dtype for parameter in parameters}
    check_dtypes(dtypes)
    if not rule.columnwise and torch.float64 in dtypes and len(dtypes) > 1:
        raise TypeError(
            f"{rule} measures whole gradients, which must be all float64 or without it: got"
            f" {', '.join(sorted(map(str, dtypes)))}; use a column rule (phocas, trimmed-mean)"
        )
    for name, module in model.module.named_modules():
        if getattr(module, "sparse", False):
            raise TypeError(f"gradients must be dense: {name or 'the model'} has sparse=True")
