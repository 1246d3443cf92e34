"""Synchronous rounds on a Ray cluster, with workers and servers as actors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from phocas.engines.ray.hosts import Host, Hosts, RoundResults
from phocas.engines.ray.servers import Result, Servers
from phocas.engines.ray.session import Session
from phocas.engines.ray.shard import (
    Answer,
    Part,
    Shard,
    ShardJob,
    check_optimizer,
    fill,
    piece_shapes,
    read_rows,
)
from phocas.engines.ray.start import (
    LEAST_STORE,
    OPTIONS,
    await_start,
    get_momentum,
    path_of,
    set_momentum,
    start_hosts,
)
from phocas.engines.ray.values import array_of, tensor_of
from phocas.engines.ray.worker import Source, WorkerJob, WorkerProcess, cut
from phocas.machine import available_cores
from phocas.training.cluster import Gathered, Wanted
from phocas.training.gradients import Looped
from phocas.training.pool import DeterministicPool
from phocas.training.server import Action, Aggregate, ParameterServer
from phocas.training.trusted import TrustedGradient

if TYPE_CHECKING:
    from phocas.engines.ray.settings import RaySettings
    from phocas.training.gradients.base import WorkerGradients
    from phocas.training.task import Task
    from phocas.training.trainer import Clock


class RayCluster:
    """The workers and servers of a task, on Ray."""

    kind = "RayCluster"
    shard_class: ClassVar[type[Shard]] = Shard
    process_class: ClassVar[type[WorkerProcess]] = WorkerProcess

    def __init__(self, task: Task, settings: RaySettings) -> None:
        self.task = task
        self.same_rows = task.clients is None or task.worker_data == "differ"
        self.server = task.serve(task.model)
        self.gradients = task.differentiate(self.server.parameters, DeterministicPool(task.threads))
        self.trusted = TrustedGradient.of(task, self.gradients)
        self.allowed = _check(task, self.server, settings)
        self.compute_seconds = 0.0
        """The time that the slowest process took for its gradients in the last round."""
        self._previous: list[Source] | None = None
        self._values: list[Any] = []
        self._states: list[dict[str, np.ndarray]] = [{} for _ in self.server.bounds]
        self._buffers = self._copies() if _changes_buffers(self.gradients) else None
        # A round may read current and previous slices: half of the deadline is left to aggregate.
        self._patience = settings.server_deadline / 4
        matrix = 8 * self.server.rows.numel()
        self.session = Session(
            settings.address,
            cores=task.threads or available_cores(),
            store_bytes=max(LEAST_STORE, 3 * matrix + task.samples.nbytes),
        )
        try:
            self._start(settings)
        except BaseException:
            self.session.close()
            raise

    # -- making ------------------------------------------------------------------------------------

    def _start(self, settings: RaySettings) -> None:
        self._ray = self.session.ray
        self._shard_actor = self._ray.remote(**OPTIONS)(self.shard_class)
        self._shard_jobs = self._make_shard_jobs()
        self.servers = Servers(
            [self._make_shard(number) for number in range(self.task.num_servers)],
            self._make_shard,
            deadline=settings.server_deadline,
        )
        self._parameters: list[Any] = []
        self._publish()
        self.hosts = Hosts(
            self._make_hosts(settings.processes),
            self._ask,
            allowed=self.allowed,
            deadline=settings.deadline,
            on_missing=settings.on_missing,
            wait_seconds=settings.wait_seconds,
        )
        servers = {f"server {i}": actor.pid.remote() for i, actor in enumerate(self.servers.actors)}
        await_start(self.hosts.hosts, self.job, servers)

    def _make_shard_jobs(self) -> list[ShardJob]:
        parameters, bounds = self.server.parameters, self.server.bounds
        return [
            ShardJob(
                self.task.for_server(),
                start=part.start,
                d=parameters.size,
                shapes=piece_shapes(parameters.shapes, part),
                threads=max(1, self.session.cores // len(bounds)),
                patience=self._patience,
            )
            for part in bounds
        ]

    def _make_shard(self, number: int) -> Any:
        """Start a server with the trainer's copy of its columns and of its optimizer state."""
        columns = array_of(self.server.vector)[self.server.bounds[number]]
        return self._shard_actor.remote(self._shard_jobs[number], columns, self._states[number])

    def _make_hosts(self, processes: int | None) -> list[Host]:
        m = self.task.num_workers
        self.job = self._ray.put(  # keep the reference: a restarted worker reads it again
            WorkerJob(self.task.for_worker(path_of(self.gradients)), bounds=self.server.bounds)
        )
        cores = self.session.cores
        enough = math.ceil(m / self.allowed) if self.allowed else 1
        return start_hosts(m, processes or cores * math.ceil(enough / cores), self.process_class)

    # -- a round -----------------------------------------------------------------------------------

    def _publish(self) -> None:
        """Put the trainer's copy of the parameters into the object store."""
        vector = array_of(self.server.vector)
        self._parameters = [self._ray.put(vector[part]) for part in self.server.bounds]

    def _ask(self, host: Host, round: int) -> list[Any]:
        """Request the rows of a process."""
        call = host.actor.gradients.options(num_returns=len(self.servers.actors) + 1)
        job = [] if host.ready else [self.job]
        factor = float(self.task.schedule(round))
        # References are separate arguments: in a list, a worker would ask the trainer for each.
        references: list[Any] = call.remote(job, round, factor, self._buffers, *self._parameters)
        return references

    def gather(self, round: int, clock: Clock, wanted: Wanted) -> Gathered:
        """Request the rows, wait for them until the deadline, and let the servers aggregate."""
        gathered = self.hosts.begin(round)
        if self.trusted is not None:  # while the workers compute theirs
            self.trusted.provide(self.server, round)
        missing, results = self._reduce(gathered, clock, wanted)
        aggregate = self._aggregate(results)
        answers: list[Answer] = [result.values[1] for result in results]
        repeated = set.intersection(*(answer.repeated for answer in answers))
        gathered.news += [f"worker {i} sent its last row once more" for i in sorted(repeated)]
        gathered.news += self.servers.news
        self.servers.news.clear()
        if self.task.attack is not None and self.task.attack.needs_previous:
            self._previous = list(gathered.sources.values())
        clock.stop("aggregate")
        distance = None
        means = [answer.honest for answer in answers]
        if wanted.honest and all(mean is not None for mean in means):
            mean = tensor_of(np.concatenate(means))  # type: ignore[arg-type]
            distance = float(torch.dist(aggregate.value, mean))
        losses = self._losses(gathered, missing)
        self.compute_seconds = max(report.seconds for report in gathered.reports.values())
        self._take_buffers(gathered)
        clock.stop("metrics")
        return Gathered(
            aggregate,
            losses,
            distance,
            sum(answer.touched for answer in answers),
            tuple(sorted(missing)),
            tuple(gathered.news),
            tuple(
                sample.joined([answer.sampled[number] for answer in answers])
                for number, sample in enumerate(wanted.samples)
            ),
            self.task.participants(round),
        )

    def _reduce(
        self, gathered: RoundResults, clock: Clock, wanted: Wanted
    ) -> tuple[set[int], list[Result]]:
        """Collect rows and aggregate them, until no column lacks more rows than allowed."""
        while True:
            self.hosts.collect(gathered)
            clock.stop("gradients")
            absent = gathered.missing(self.hosts.hosts)
            self.servers.begin()
            reference = self.server.reference
            beside = None if reference is None else array_of(reference)
            arguments = [
                (
                    gathered.round,
                    _parts(gathered.sources.values(), number),
                    None if self._previous is None else _parts(self._previous, number),
                    wanted.honest,
                    wanted.samples,
                    None if beside is None else beside[self.server.bounds[number]],
                )
                for number in range(len(self.servers.actors))
            ]
            results = self.servers.call("aggregate", arguments)
            while True:
                answers: list[Answer] = [result.values[1] for result in results]
                if answers[0].partial is None:
                    break
                partials = [answer.partial for answer in answers]
                results = self.servers.call("answer", [(partials,)] * len(answers))
            bad: dict[int, str] = {}
            for answer in answers:
                for worker, problem in answer.problems.items():
                    bad.setdefault(worker, problem)
            gathered.news += [f"worker {worker} {text}" for worker, text in sorted(bad.items())]
            missing = absent | set(bad)
            if max(len(absent | set(answer.problems)) for answer in answers) <= self.allowed:
                self.servers.begin()  # releases the rows: the next ones can use their memory
                return missing, results
            gathered.problems.update(bad)
            self.hosts.check_missing(gathered, missing)
            self.hosts.discard(gathered, missing)
            self._publish()  # the parameters may be what was lost

    def _aggregate(self, results: Sequence[Result]) -> Aggregate:
        self._values = [result.references[0] for result in results]
        values = np.concatenate([result.values[0] for result in results])
        answers: list[Answer] = [result.values[1] for result in results]
        shares = np.stack([np.asarray(answer.dropped) for answer in answers])
        widths = np.array([part.stop - part.start for part in self.server.bounds])
        return Aggregate(
            tensor_of(values),
            widths @ shares / widths.sum(),
            answers[0].expected,
            shares,
        )

    def _losses(self, gathered: RoundResults, missing: set[int]) -> np.ndarray:
        """Return the losses of the workers whose rows arrived, in the order of the workers."""
        found = [
            gathered.reports[host].losses[worker - host.first]
            for host in self.hosts.hosts
            if host in gathered.reports
            for worker in host.workers
            if worker not in missing
        ]
        return np.asarray(found)

    def _take_buffers(self, gathered: RoundResults) -> None:
        """Set the model's buffers to the median over the workers, as the local engine does."""
        if self._buffers is None:
            return
        sent = [
            buffers
            for host in self.hosts.hosts
            if host in gathered.reports
            for buffers in gathered.reports[host].buffers
        ]
        for name, buffer in self.task.model.named_buffers():
            values = [tensor_of(np.array(buffers[name])).view(buffer.dtype) for buffers in sent]
            buffer.copy_(torch.stack(values).median(0).values)
        self._buffers = self._copies()

    def _copies(self) -> dict[str, np.ndarray]:
        return {name: array_of(buffer).copy() for name, buffer in self.task.model.named_buffers()}

    def update(self, aggregate: Aggregate, factor: float) -> Action:
        """Let every server step along its part of the aggregate, and copy the new parameters."""
        action = self.server.verdict(aggregate)
        if action != "applied":
            return action
        self.server.remember(aggregate)
        factor = self.task.server_factor(factor)
        self.servers.begin()
        results = self.servers.call(
            "step",
            [([], factor)] * len(self._values),
            again=[([value], factor) for value in self._values],
        )
        self._parameters = [result.references[0] for result in results]
        self._states = [result.values[1] for result in results]
        vector = array_of(self.server.vector)
        for part, result in zip(self.server.bounds, results, strict=True):
            vector[part] = result.values[0]
        return action

    # -- checkpoints -------------------------------------------------------------------------------

    def state(self) -> dict[str, torch.Tensor]:
        """Return the servers' optimizers, the workers' momentum and, for some attacks, their rows.

        The momentum of a worker that does not answer is saved as zero, as after a restart.
        """
        state = {
            f"server.{number}.{name}": tensor_of(np.array(values))
            for number, kept in enumerate(self._states)
            for name, values in kept.items()
        }
        rows = self.server.rows
        if self.task.worker_momentum:
            state["velocity"] = get_momentum(self.hosts.hosts, self.job, rows, self.hosts.deadline)
        if self._previous is not None:
            matrix = torch.empty_like(rows)
            for number, part in enumerate(self.server.bounds):
                columns = array_of(matrix)[:, part]
                sent = _parts(self._previous, number)
                found, _ = read_rows(sent, columns[0], len(columns), self._patience)
                columns[:] = fill(found, columns[0])
            state["previous"] = matrix
        return state

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore a checkpoint; the trainer has restored the parameters already."""
        bounds = self.server.bounds
        self._states = [{} for _ in bounds]
        for name, tensor in state.items():
            if name.startswith("server."):
                _, which, rest = name.split(".", 2)
                self._states[int(which)][rest] = array_of(tensor)
        vector = array_of(self.server.vector)
        self.servers.begin()
        self.servers.call(
            "restore",
            [(vector[part], kept) for part, kept in zip(bounds, self._states, strict=True)],
        )
        self._publish()
        if self._buffers is not None:
            self._buffers = self._copies()
        if "velocity" in state:
            set_momentum(self.hosts.hosts, self.job, state["velocity"])
        if "previous" in state:
            rows = array_of(state["previous"])
            parts = [self._ray.put([cut(row[part]) for row in rows]) for part in bounds]
            self._previous = [(0, len(rows), parts)]

    def close(self) -> None:
        """Kill the actors, and shut Ray down if this cluster started it."""
        if self._ray.is_initialized():
            for actor in (*self.servers.actors, *(host.actor for host in self.hosts.hosts)):
                self._ray.kill(actor)
        self.session.close()
        self.gradients.pool.close()


def _check(task: Task, server: ParameterServer, settings: RaySettings) -> int:
    """Check the settings before any process starts; return how many rows may be missing."""
    m, s = task.num_workers, task.num_servers
    if s > 1 and task.attack is not None and not task.attack.sharded:
        raise ValueError(
            f"{task.attack} looks at all columns, and a server holds only its own: run it on"
            " the local engine, or with one server"
        )
    if task.attack is not None and task.attack.needs_memory:
        raise ValueError(
            f"{task.attack} keeps what it has seen in earlier rounds, which a server does not: run"
            " it on the local engine"
        )
    check_optimizer(server)
    most = task.rule.tolerates(m).rows
    if settings.missing is None:
        return most
    if settings.missing > most:
        raise ValueError(
            f"{task.rule} with m={m} workers tolerates at most {most} missing rows:"
            f" got missing={settings.missing}"
        )
    return settings.missing


def _parts(sources: Iterable[Source], number: int) -> list[Part]:
    """Return the references that one server reads."""
    return [(first, last, references[number]) for first, last, references in sources]


def _changes_buffers(gradients: WorkerGradients) -> bool:
    has_some = next(gradients.model.buffers(), None) is not None
    return isinstance(gradients, Looped) and gradients.serial and has_some
