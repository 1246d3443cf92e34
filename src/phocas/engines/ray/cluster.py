"""Synchronous rounds on a Ray cluster, with workers and servers as actors."""

from __future__ import annotations

import contextlib
import math
import secrets
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from phocas.detection.comparison import Comparison, Sample
from phocas.engines.ray.desk import Desk, Host
from phocas.engines.ray.distributed import (
    DistributedAggregate,
    DistributedDirection,
    changes_buffers,
    check_task,
)
from phocas.engines.ray.hosts import Hosts, RoundResults
from phocas.engines.ray.mailbox import Mailbox, Peer
from phocas.engines.ray.placement import Demand, Domains, live_nodes, node_of
from phocas.engines.ray.servers import Servers, ServersMovedError
from phocas.engines.ray.serving import ServerProcess
from phocas.engines.ray.session import Session, node_address
from phocas.engines.ray.shard import (
    Answer,
    Question,
    ShardJob,
    State,
    piece_shapes,
)
from phocas.engines.ray.start import (
    LEAST_STORE,
    await_start,
    get_momentum,
    path_of,
    set_momentum,
    start_hosts,
)
from phocas.engines.ray.values import array_of, tensor_of
from phocas.engines.ray.wire import TOKEN_BYTES, Address
from phocas.engines.ray.worker import Request, WorkerJob, WorkerProcess
from phocas.machine import available_cores
from phocas.sharding import shard_bounds
from phocas.training.buffers import take_median
from phocas.training.cluster import Gathered, Wanted
from phocas.training.pool import DeterministicPool
from phocas.training.server import Action, Aggregate, ParameterServer
from phocas.training.trusted import TrustedGradient

if TYPE_CHECKING:
    from phocas.engines.ray.settings import RaySettings
    from phocas.training.task import Task
    from phocas.training.trainer import Clock

_SILENCE = (3.0, 15.0)  # seconds without a sign of life; the deadline, within these limits
_BEHIND = 3  # rounds after a late row in which that row may still arrive
_PATIENCE = (1.0, 10.0)  # seconds that a worker process waits for a server; half of the deadline


class RayCluster:
    """The workers and servers of a task, on Ray.

    In a round the trainer receives numbers about the rows, and never the rows, the aggregate or the
    parameters. :attr:`server` fetches the parameters from the servers when they are needed.
    """

    kind = "RayCluster"
    server_class: ClassVar[type[ServerProcess]] = ServerProcess
    process_class: ClassVar[type[WorkerProcess]] = WorkerProcess

    def __init__(self, task: Task, settings: RaySettings) -> None:
        self.task = task
        self.same_rows = task.clients is None or task.worker_data == "differ"
        self._server = task.serve(task.model)
        self._current = True  # whether the trainer's copy of the parameters is up to date
        self.gradients = task.differentiate(
            self._server.parameters, DeterministicPool(task.threads)
        )
        self.trusted = TrustedGradient.of(task, self.gradients)
        self.allowed = check_task(task, self._server, settings)
        self.compute_seconds = 0.0
        """The time that the slowest process took for its gradients in the last round."""
        self._closing = contextlib.ExitStack()
        self._closing.callback(self.gradients.pool.close)
        self._buffers = self._copies() if changes_buffers(self.gradients) else None
        self._round, self._history = 0, 0
        self._unmet = ""  # what the loss of one failure domain would cost beyond the guarantee
        self._pairs: list[tuple[str, str] | None] = []  # the nodes of servers and their copies
        matrix = 8 * self._server.rows.numel()
        self.session = Session(
            settings.address,
            cores=task.threads or available_cores(),
            store_bytes=max(LEAST_STORE, matrix + task.samples.nbytes),
        )
        try:
            self._start(settings)
        except BaseException:
            self.close()
            raise

    # -- making ------------------------------------------------------------------------------------

    def _start(self, settings: RaySettings) -> None:
        self._ray = self.session.ray
        self._closing.callback(self.session.close)
        self.recent_direction = DistributedDirection(self.joined, self.load)
        buffers = [(value.dtype, value.shape) for value in (self._buffers or {}).values()]
        self._desk = Desk(buffers, array_of(self._server.vector))
        self.mailbox = Mailbox(node_address(), {}, self._desk)
        self._closing.callback(self.mailbox.close)
        self._domains = domains = Domains(settings.failure_domain)
        self._server_demand = Demand("server", "server_resources", settings.server_resources)
        demand = Demand("worker", "worker_resources", settings.worker_resources)
        hosts = self._make_hosts(settings.processes, demand)
        self._placed = [(host.node, demand) for host in hosts]
        self.servers = Servers(
            self._make_shard_jobs(settings),
            self._start_server,
            self._place_server,
            domains.of,
            lambda token: self._desk.silent(self.mailbox.peers[token], self.mailbox.polled),
            deadline=settings.server_deadline,
            silence=min(max(settings.deadline, _SILENCE[0]), _SILENCE[1]),
        )
        self.job = self._ray.put(  # keep the reference: a restarted worker reads it again
            WorkerJob(
                self.task.for_worker(path_of(self.gradients)),
                bounds=self._server.bounds,
                patience=min(max(settings.deadline / 2, _PATIENCE[0]), _PATIENCE[1]),
            )
        )
        self.hosts = Hosts(
            hosts,
            self._ask,
            self._desk,
            self.servers.check,
            allowed=self.allowed,
            deadline=settings.deadline,
            on_missing=settings.on_missing,
            wait_seconds=settings.wait_seconds,
        )
        await_start(hosts, self._desk, self.job, self.servers.starting())
        self.servers.serve(self._cut({"vector": self._server.vector}, 0))

    def _make_shard_jobs(self, settings: RaySettings) -> list[ShardJob]:
        parameters, bounds = self._server.parameters, self._server.bounds
        return [
            ShardJob(
                self.task.for_server(),
                start=part.start,
                d=parameters.size,
                shapes=piece_shapes(parameters.shapes, part),
                threads=max(1, self.session.cores // len(bounds)),
                patience=min(settings.deadline, settings.server_deadline / 4),
            )
            for part in bounds
        ]

    def _make_hosts(self, processes: int | None, demand: Demand) -> list[Host]:
        m, cores = self.task.num_workers, self.session.cores
        enough = math.ceil(m / self.allowed) if self.allowed else 1
        number = processes or cores * math.ceil(enough / cores)
        bounds = shard_bounds(m, min(m, number))
        rows = [last - first for first, last in bounds]
        nodes = self._domains.spread(rows, self.allowed, demand)
        hosts = start_hosts(bounds, nodes, self.process_class, self.mailbox, self._desk, demand)
        for host in hosts:
            self._closing.callback(self._kill, host.actor)
        self._worker_peers = {
            token: peer for token, peer in self.mailbox.peers.items() if peer.workers
        }
        self._servers_token = secrets.token_bytes(TOKEN_BYTES)
        return hosts

    def _start_server(self, node: str, token: bytes) -> Any:
        """Start a server process on a node."""
        peer = Peer(f"server process {len(self.mailbox.peers)}")
        self.mailbox.peers[token] = peer
        self._desk.register(peer)
        kind = self._ray.remote(self.server_class)
        contact = Address(self.mailbox.host, self.mailbox.port, token)
        actor = kind.options(**self._server_demand.on_node(node)).remote(
            self._worker_peers, contact, self._servers_token
        )
        self._closing.callback(self._kill, actor)
        return actor

    def _place_server(self, used: Sequence[str], avoid: AbstractSet[str], wanted: int) -> str:
        """Return the node for one more server process."""
        demand = self._server_demand
        placed = [*self._placed, *((node, demand) for node in used)]
        return self._domains.pick(live_nodes(), demand, placed, wanted, avoid)

    def _kill(self, actor: Any) -> None:
        if self._ray.is_initialized():
            self._ray.kill(actor)

    # -- parameters --------------------------------------------------------------------------------

    @property
    def server(self) -> ParameterServer:
        """The trainer's copy of the parameters, fetched from the servers if they have changed."""
        if not self._current:
            found = self._retry(
                lambda: self.servers.call("vector", [()] * len(self._server.bounds))
            )
            for part, kept in zip(self._server.bounds, found, strict=True):
                array_of(self._server.vector)[part] = kept["vector"]
                if self._server.reference is not None and "reference" in kept:
                    array_of(self._server.reference)[part] = kept["reference"]
            self._current = True
        return self._server

    def _retry(self, call: Any) -> Any:
        """Call a function; call it again if servers moved to other processes meanwhile."""
        while True:
            try:
                return call()
            except ServersMovedError:
                continue

    def joined(self, *names: str) -> dict[str, torch.Tensor]:
        """Return vectors of the servers' state, joined over the servers."""
        states: list[State] = self._states()
        return {
            name: tensor_of(np.concatenate([state[name] for state in states])) for name in names
        }

    def _states(self) -> list[State]:
        found: list[State] = self._retry(
            lambda: self.servers.call("state", [()] * len(self._server.bounds))
        )
        return found

    def _cut(self, vectors: Mapping[str, torch.Tensor], round: int) -> list[State]:
        """Return for each server its part of the vectors, and the round."""
        return [
            {name: array_of(vector)[part].copy() for name, vector in vectors.items()}
            | {"round": np.array(round)}
            for part in self._server.bounds
        ]

    def load(self, vectors: Mapping[str, torch.Tensor]) -> None:
        """Set vectors of the servers' state."""
        self.servers.load(self._cut(vectors, self._round))

    # -- a round -----------------------------------------------------------------------------------

    def _ask(self, host: Host, round: int) -> None:
        """Request the rows of a process."""
        request = Request(
            host.requests,
            round,
            self._history,
            float(self.task.schedule(round)),
            self._buffers,
            self.servers.routes,
            host.again,
        )
        job = [] if host.ready else [self.job]
        host.actor.gradients.options(num_returns=0).remote(job, request)

    def gather(self, round: int, clock: Clock, wanted: Wanted) -> Gathered:
        """Request the rows, wait for them until the deadline, and let the servers aggregate."""
        self._begin_round(round)
        gathered = self.hosts.begin(round)
        gathered.news += self._placement_news()
        if self.trusted is not None:  # while the workers compute theirs
            self.trusted.provide(self.server, round)
        missing, answers = self._reduce(gathered, clock, wanted)
        aggregate = DistributedAggregate.of(answers, self._server.bounds)
        compared = self._compare(wanted, answers)
        gathered.news += self._news(gathered, answers)
        clock.stop("aggregate")
        losses = self._losses(gathered, missing)
        self.compute_seconds = max(report.seconds for report in gathered.reports.values())
        self._take_buffers(gathered)
        shown = [
            sample.joined([answer.shown[number] for answer in answers])
            for number, sample in enumerate(self._shown(wanted))
        ]
        clock.stop("metrics")
        return Gathered(
            aggregate,
            losses,
            aggregate.honest_distance,
            sum(answer.touched for answer in answers),
            tuple(sorted(missing)),
            tuple(gathered.news),
            sampled=tuple(shown if wanted.picture is None else shown[:-1]),
            compared=compared,
            picture=None if wanted.picture is None else shown[-1],
            participants=self.task.participants(round),
        )

    def _shown(self, wanted: Wanted) -> list[Sample]:
        """Return the columns whose values the trainer receives.

        Rows are compared by a server, unless each worker is compared with its own past, which the
        trainer keeps.
        """
        samples = wanted.samples if self.task.worker_data == "differ" else ()
        return [*samples, *([] if wanted.picture is None else [wanted.picture])]

    def _compare(self, wanted: Wanted, answers: Sequence[Answer]) -> Comparison | None:
        """Let server 0 compare the rows in the columns of all servers."""
        parts = [reference for answer in answers for reference in answer.compared]
        if not parts:
            return None
        found: Comparison | None = self.servers.call_first(
            "compare", parts, wanted.samples[0], self.task.worker_momentum, wanted.outliers
        )
        return found

    def _begin_round(self, round: int) -> None:
        with contextlib.suppress(ServersMovedError):  # no row of this round is lost
            self.servers.check()
        self.servers.tend()
        if round != self._round:  # a checkpoint was restored
            self._round = round
            self.load({})

    def _placement_news(self) -> list[str]:
        """Return a line if processes that were started again break the guarantee of the domains.

        The guarantee is checked when a process has moved, and a broken one is reported once.
        """
        servers, moved = self.servers, [host for host in self.hosts.hosts if host.moved]
        copies = [
            None if copy is None else (owner.node, copy.node)
            for owner, copy in zip(servers.owners, servers.copies, strict=True)
        ]
        if self._domains.kind == "process" or (not moved and copies == self._pairs):
            return []
        self._pairs = copies
        for host in moved:
            host.node, host.moved = node_of(host.actor) or host.node, False
        rows = [(host.node, len(host.workers)) for host in self.hosts.hosts]
        known = self._unmet
        self._unmet = self._domains.unmet(live_nodes(), rows, self.allowed, copies)
        if known or not self._unmet:
            return []
        kind = self._domains.kind
        cost = f"the loss of one {kind} would cost {self._unmet}"
        return [f"failure_domain={kind} does not hold any more: {cost}"]

    def _reduce(
        self, gathered: RoundResults, clock: Clock, wanted: Wanted
    ) -> tuple[set[int], list[Answer]]:
        """Collect rows and aggregate them, until no column lacks more rows than allowed."""
        while True:
            try:
                self.hosts.collect(gathered)
                clock.stop("gradients")
                absent = gathered.missing(self.hosts.hosts)
                answers = self._ask_servers(gathered, wanted, absent)
            except ServersMovedError:
                self.hosts.send_again(gathered)
                continue
            bad: dict[int, str] = {}
            for answer in answers:
                for worker, problem in answer.problems.items():
                    bad.setdefault(worker, problem)
            gathered.news += [f"worker {worker} {text}" for worker, text in sorted(bad.items())]
            missing = absent | set(bad)
            if max(len(absent | set(answer.problems)) for answer in answers) <= self.allowed:
                self.servers.drop_copies(
                    [number for number, answer in enumerate(answers) if not answer.copied]
                )
                return missing, answers
            gathered.problems.update(bad)
            self.hosts.check_missing(gathered, missing)
            again = self.hosts.discard(gathered, missing)
            self._forget(again)

    def _forget(self, workers: set[int]) -> None:
        """Let the servers drop the slices of workers, which are to be sent again."""
        self._retry(lambda: self.servers.call("forget", [(workers,)] * len(self._server.bounds)))

    def _ask_servers(
        self, gathered: RoundResults, wanted: Wanted, absent: set[int]
    ) -> list[Answer]:
        """Let the servers aggregate, with the measurements that they need of each other."""
        due = tuple(i for i in range(self.task.num_workers) if i not in absent)
        trusted = None if self.trusted is None else self._server.reference
        copies = [self.servers.copy_address(number) for number in range(len(self._server.bounds))]
        answers: list[Answer] = self.servers.call(
            "aggregate",
            [
                (
                    Question(
                        gathered.round,
                        due,
                        wanted.honest,
                        wanted.samples if self.task.worker_data == "alike" else (),
                        self._shown(wanted),
                        None if trusted is None else array_of(trusted)[part],
                    ),
                    copy,
                )
                for part, copy in zip(self._server.bounds, copies, strict=True)
            ],
        )
        while answers[0].partial is not None:
            partials = [answer.partial[0] for answer in answers if answer.partial is not None]
            answers = self.servers.call("answer", [(partials, copy) for copy in copies])
        return answers

    def _news(self, gathered: RoundResults, answers: Sequence[Answer]) -> list[str]:
        repeated = set.intersection(*(answer.repeated for answer in answers))
        behind = [host for host in self.hosts.hosts if gathered.round - host.late <= _BEHIND]
        known = {worker for host in behind for worker in host.workers}
        late = set().union(*(answer.late for answer in answers)) - known
        told = dict.fromkeys(line for answer in answers for line in answer.news)
        news = [f"worker {i} sent its last row once more" for i in sorted(repeated)]
        news += [f"worker {i} sent a row of an earlier round: dropped" for i in sorted(late)]
        news += [*told, *self.servers.news]
        if not self.servers.news:
            news += [f"{host} {reason}" for host, reason in gathered.unreached.items()]
        self.servers.news.clear()
        return news

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
        for number, buffer in enumerate(self.task.model.buffers()):
            values = [tensor_of(np.array(buffers[number])).view(buffer.dtype) for buffers in sent]
            take_median(buffer, values)
        self._buffers = self._copies()

    def _copies(self) -> dict[str, np.ndarray]:
        return {name: array_of(buffer).copy() for name, buffer in self.task.model.named_buffers()}

    def update(self, aggregate: Aggregate, factor: float) -> Action:
        """Let every server step along its part of the aggregate."""
        action = self._server.verdict(aggregate)
        applied = action == "applied"
        self.servers.step(self._round, self.task.server_factor(factor) if applied else None)
        self._current = self._current and not applied
        self._round += 1
        return action

    # -- checkpoints -------------------------------------------------------------------------------

    def state(self) -> dict[str, torch.Tensor]:
        """Return the servers' optimizers, the workers' momentum and, for some attacks, their rows.

        The momentum of a worker that does not answer is saved as zero, as after a restart.
        """
        states = self._states()
        state = {
            f"server.{number}.{name.removeprefix('state.')}": tensor_of(np.array(values))
            for number, kept in enumerate(states)
            for name, values in kept.items()
            if name.startswith("state.")
        }
        rows = self._server.rows
        if self.task.worker_momentum:
            state["velocity"] = get_momentum(
                self.hosts.hosts, self._desk, self.job, rows, self.hosts.deadline
            )
        for number, kept in enumerate(states):
            if "before" in kept:
                state[f"before.{number}"] = tensor_of(np.array(kept["before"]))
        if all("previous" in kept for kept in states):
            parts = [np.array(kept["previous"]) for kept in states]
            state["previous"] = tensor_of(np.concatenate(parts, axis=1))
        return state

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore a checkpoint; the trainer has restored the parameters already."""
        vectors = {"vector": self._server.vector}
        if self._server.reference is not None:
            vectors["reference"] = self._server.reference
        parts = self._cut(vectors, self._round)
        for number, kept in enumerate(parts):
            kept["before"] = array_of(state.get(f"before.{number}", torch.empty(0)))
        for name, tensor in state.items():
            if name.startswith("server."):
                _, which, rest = name.split(".", 2)
                parts[int(which)][f"state.{rest}"] = array_of(tensor)
        if "previous" in state:
            for part, kept in zip(self._server.bounds, parts, strict=True):
                kept["previous"] = array_of(state["previous"])[:, part].copy()
        self._current = True
        self._history += 1
        self.servers.load(parts)
        if self._buffers is not None:
            self._buffers = self._copies()
        if "velocity" in state:
            set_momentum(self.hosts.hosts, self._desk, self.job, state["velocity"])

    def close(self) -> None:
        """Kill the actors, and shut Ray down if this cluster started it."""
        self._closing.close()
