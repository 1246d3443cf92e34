"""The hook that DDP calls, and the thread that aggregates while backward goes on."""

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

from phocas.integrations.ddp.step import Aggregator
from phocas.integrations.guard import Guard, Ledger, Options, options_of, watching
from phocas.integrations.job import join_job, ranks_of_job
from phocas.integrations.joining import check_dtypes, check_rule, join, uncompiled
from phocas.integrations.witness import Segment
from phocas.rules import Rule, parse_rule

_Result: TypeAlias = torch.futures.Future[torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    flat: torch.Tensor
    segments: Callable[[], list[Segment]]
    last: bool
    ready: Any  # a CUDA event, or None
    future: torch.futures.Future[Any]


class _Worker:
    """What does the jobs of all steps, one at a time and in the same order on all ranks."""

    def __init__(self, aggregator: Aggregator, ledger: Ledger) -> None:
        self.jobs: queue.Queue[_Job | None] = queue.Queue()
        self.aggregator, self.ledger = aggregator, ledger
        self.waiting: list[torch.futures.Future[Any]] = []
        self.thread = threading.Thread(target=self._work, name="phocas-ddp", daemon=True)
        self.thread.start()

    def later(self, job: _Job) -> None:
        """Leave a job to the thread."""
        self.jobs.put(job)

    def now(self, job: _Job) -> None:
        """Do a job once all that were left to the thread are done."""
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
            if self.ledger.failure is not None:
                raise RuntimeError(f"aggregation ended in an earlier step: {self.ledger.failure}")  # noqa: TRY301
            if job.ready is not None:
                torch.cuda.current_stream(job.flat.device).wait_event(job.ready)
            done: list[Any] = self.aggregator.take(job.flat, job.segments, last=job.last)
        except Exception as error:  # noqa: BLE001 - it is raised where backward waits
            self.ledger.failure = self.ledger.failure or error
            done = [error] * len(self.waiting)
        completed, self.waiting = self.waiting[: len(done)], self.waiting[len(done) :]
        for future, result in zip(completed, done, strict=True):
            future.set_result(result)

    def stop(self) -> None:
        """End the thread; at exit it must be gone before the interpreter, or torch aborts."""
        self.jobs.put(None)
        if self.thread is not threading.current_thread():
            self.thread.join(timeout=1)  # a thread that waits for a hung rank is left behind


class _State:
    """What the hook is given: a worker, the guard (which lives as long), and the parameters."""

    def __init__(
        self, ledger: Ledger, worker: _Worker, group: dist.ProcessGroup, numbers: dict[int, int]
    ) -> None:
        self.worker, self.group, self.numbers = worker, group, numbers
        witness = worker.aggregator.witness
        self.guard = Guard(ledger, witness, catch_up=ledger.receive, close=ledger.finish)
        # The worker knows nothing of the guard, and ends with it.
        weakref.finalize(self.guard, worker.stop)


class _Slot:
    """The state of the one hook that torch takes for a model: after a close, that of the next."""

    def __init__(self, state: _State) -> None:
        self.state = state


def protect(
    model: DistributedDataParallel,
    rule: Rule | str,
    verify: bool = False,
    **options: Unpack[Options],
) -> Guard:
    """Aggregate a model's gradients by a rule from now on; to be called on all its ranks.

    Use :func:`watch` for language models and mixtures of experts: rules that go by coordinates drop
    rare tokens of honest ranks. After a guard is closed, its model can be protected again.

    Args:
        model: The wrapped model, before its first backward pass.
        rule: ``phocas.Phocas(b=2)`` or ``"nnm:b=2|phocas:b=2"``; row i is rank i.
        verify: Have every shard aggregated by two ranks; if they differ, raise on all ranks and
            name who is wrong. Costs a second all-to-all and a second aggregation.
        **options: :class:`phocas.integrations.guard.Options`.
    """
    model = uncompiled(model)
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"model must be a DistributedDataParallel: got {type(model).__name__}; wrap it first"
        )
    rule = parse_rule(rule) if isinstance(rule, str) else rule
    seed, timeout, job_group, reactions = options_of("verify", **options)
    group = model.process_group
    check_rule(rule, dist.get_world_size(group))
    slot = _slot(model)
    named = {
        name: parameter
        for name, parameter in model.module.named_parameters()
        if parameter.requires_grad
    }
    parameters = list(named.values())
    _check_gradients(model, rule, parameters)
    wire, hosts = join(
        group,
        parameters[0].device,
        {
            "rule": str(rule),
            "verify": bool(verify),
            "seed": seed,
            "parameters": sum(parameter.numel() for parameter in parameters),
        },
        timeout,
    )
    mesh = getattr(model, "device_mesh", None)
    # Without a mesh nothing tells whether other ranks of the world train at all.
    ranks = ranks_of_job(mesh, group if job_group is None and mesh is None else job_group)
    ledger = Ledger(rule, list(named), hosts, wire.rank, reactions, wire)
    ledger.job = join_job(wire, ranks, ledger.suspicion.b, timeout)
    aggregator = Aggregator(wire, ledger, verify=verify, seed=seed)
    numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
    state = _State(ledger, _Worker(aggregator, ledger), group, numbers)
    if slot is None:
        model.register_comm_hook(_Slot(state), _hook)
    else:
        slot.state = state
    if wire.rank == 0:
        _warn_of_buffers(model)
    return state.guard


def watch(model: DistributedDataParallel, b: int, **options: Unpack[Options]) -> Guard:
    """Average a model's gradients as before, and know whom Heraclius would have thrown away.

    Args:
        model: The wrapped model, before its first backward pass.
        b: How many ranks may be wrong, 2b < m.
        **options: As for :func:`protect`.
    """
    return protect(model, watching(b), **options)


def _hook(
    slot: _Slot,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Leave a bucket to the worker, which completes the future."""
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
        state.worker.now(job)  # nothing is left of backward that the thread would not hold up
    else:
        state.worker.later(job)
    return result


def _segments(parameters: list[torch.Tensor], numbers: dict[int, int]) -> list[Segment]:
    """Return where in a bucket its parameters lie, one after the other."""
    segments = []
    begin = 0
    for parameter in parameters:
        end = begin + parameter.numel()
        segments.append(Segment(numbers[id(parameter)], begin, end))
        begin = end
    return segments


def _outcome(future: torch.futures.Future[Any]) -> torch.Tensor:
    # Torch reads the result in C++, where Future.set_exception is not understood.
    result = future.value()
    if isinstance(result, Exception):
        raise result
    return result  # type: ignore[no-any-return]


def _slot(model: DistributedDataParallel) -> _Slot | None:
    """Return where the state of a closed guard is; raise if there is another hook or guard."""
    for hook, slot in model._comm_hooks:  # noqa: SLF001 - torch tells it nowhere else
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
    """Warn if rank 0 gives statistics of batches to all ranks, which no rule sees."""
    if not model.will_sync_module_buffers():  # type: ignore[no-untyped-call]  # torch has it so
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
