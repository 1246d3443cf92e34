"""The ray engine with real processes: three nodes on one machine, killed, hung and lied to."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed: pip install 'phocas[ray]'", allow_module_level=True)

# Before Ray is imported: everything stays on loopback, and nobody is told.
os.environ |= {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",
}

from phocas.attacks.base import Attack, Scene
from phocas.attacks.touched import Touched
from phocas.data import DataError, Dataset, load
from phocas.engines import EngineError
from phocas.engines.faults import Corrupt, FaultScript, NaN, Stale, random_script
from phocas.engines.local import LocalSettings
from phocas.engines.ray import RaySettings
from phocas.engines.ray import cluster as cluster_module
from phocas.engines.ray import session as ray_session
from phocas.engines.ray import settings as settings_module
from phocas.engines.ray.asynchronous import AsynchronousRayCluster
from phocas.engines.ray.cluster import RayCluster
from phocas.engines.ray.hosts import MissingRowsError
from phocas.engines.ray.injection import FaultyAsynchronousRayCluster, FaultyRayCluster
from phocas.engines.ray.placement import node_of
from phocas.engines.ray.session import RayUnreachableError, check_version, reachable, the_ray
from phocas.engines.ray.shared import Offer
from phocas.engines.ray.wire import Address, Header, Kind, Link
from phocas.engines.ray.worker import Senders, WorkerProcess
from phocas.experiments.config import make_config
from phocas.experiments.results import Results
from phocas.experiments.runner import execute
from phocas.training import Round, Trainer
from phocas.training.checkpoints import load_checkpoint, save_checkpoint
from phocas.training.models import build_model

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """Three nodes, each with its own object store, started once for all tests."""
    ray = the_ray()
    cluster_utils = importlib.import_module("ray.cluster_utils")
    node = {"num_cpus": 1, "object_store_memory": 256 << 20, "node_ip_address": "127.0.0.1"}
    cluster = cluster_utils.Cluster(
        initialize_head=True, head_node_args={**node, "include_dashboard": False}
    )
    for rack in "ab":  # without a device: Ray counts them, and nobody uses them
        cluster.add_node(**node, num_gpus=2, resources={"disk": 1}, labels={"rack": rack})
    ray.init(
        address=cluster.address,
        _node_ip_address="127.0.0.1",
        log_to_driver=False,
        logging_level="ERROR",
    )
    yield ray
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="module")
def data() -> Dataset:
    made: Dataset = load("synthetic:train=400,test=120,side=8,noise=20")
    return made


def make(engine: str, data: Any, **options: Any) -> Trainer:
    torch.manual_seed(5)
    model = options.pop("model", None) or build_model("mlp:hidden=16", data.shape, 10, seed=3)
    settings: dict[str, Any] = {
        "num_workers": 8,
        "num_servers": 2,
        "batch_size": 16,
        "rule": "phocas:b=3",
        "lr": 0.5,
    }
    names = {declared.name for declared in dataclasses.fields(RaySettings)}
    for_ray = {name: options.pop(name) for name in names & options.keys()}
    where = RaySettings(**for_ray) if engine == "ray" else LocalSettings()
    return Trainer(model, functional.cross_entropy, data, engine=where, **{**settings, **options})


def bits(trainer: Trainer) -> np.ndarray:
    vector = trainer.server.vector
    return (
        vector.view(torch.uint16 if vector.dtype == torch.bfloat16 else torch.int32).numpy().copy()
    )


def half_model() -> nn.Module:
    """Return a model in bfloat16 without matrix products, whose bits differ between processors."""
    layers = (nn.Flatten(), nn.BatchNorm1d(64), nn.AdaptiveAvgPool1d(10), nn.LayerNorm(10))
    return nn.Sequential(*layers).bfloat16()


def local_bits(data: Dataset, rounds: int, **options: Any) -> np.ndarray:
    with make("local", data, **options) as trainer:
        for _ in trainer.rounds(rounds):
            pass
        return bits(trainer)


@dataclasses.dataclass(frozen=True)
class AbsentOrStale(Attack):
    """Blanks the rows that were missing in a run on Ray; one worker sends its last row once."""

    missing: tuple[tuple[int, ...], ...]
    worker: int
    late: int
    name: ClassVar[str] = "absent-or-stale"
    needs_previous: ClassVar[bool] = True

    def _corrupt(self, scene: Scene) -> Touched:
        if scene.round == self.late:
            assert scene.previous is not None
            scene.matrix.words[self.worker] = scene.previous.words[self.worker]
        scene.rows[list(self.missing[scene.round])] = np.nan
        return Touched(scene.shape)


def news_of(rounds: list[Round], number: int) -> str:
    return "; ".join(rounds[number - 1].news)


def test_every_fault_costs_its_own_rows_of_its_own_round(ray: Any, data: Dataset) -> None:
    script = """
        shape:round=2,worker=1
        dtype:round=3,worker=2
        dtype:round=3,worker=5
        raise:round=4,worker=4      # its process has worker 5 too
        delay:round=5,worker=1,seconds=4
        stale:round=6,worker=3
        kill:round=8,worker=2
    """
    options: dict[str, Any] = {"num_workers": 6, "rule": "phocas:b=2", "lr": 0.1}
    with make("ray", data, processes=3, deadline=3, faults=script, **options) as trainer:
        assert sum(node["Alive"] for node in ray.nodes()) == 3
        rounds = list(trainer.rounds(5))
        cluster = trainer.cluster
        assert isinstance(cluster, RayCluster)
        # Else two processes could be away at once, and b rows be too few.
        ray.get(cluster.hosts.hosts[0].actor.pid.remote())
        rounds += trainer.rounds(3)
        pid_again(ray, cluster.hosts.hosts[1].actor, 0)
        while rounds[-1].missing and len(rounds) < 2000:
            rounds += trainer.rounds(1)
        found = bits(trainer)
        losses = [done.loss for done in rounds]
    assert rounds[-1].missing == ()
    missing = {done.number: done.missing for done in rounds[:8]}
    assert missing[1] == ()
    assert missing[2] == (1,)
    assert missing[3] == (2, 5)
    assert missing[4] == (4, 5)
    assert missing[5] == (0, 1)
    assert missing[6] == missing[7] == ()
    assert missing[8] == (2, 3)
    assert "worker 1 sent shape" in news_of(rounds, 2)
    assert "worker 5 sent float64 where float32 was due" in news_of(rounds, 3)
    assert "workers 4 to 5 raised InjectedError: raise:round=4,worker=4" in news_of(rounds, 4)
    assert "workers 0 to 1 is late: no row after " in news_of(rounds, 5)
    assert "worker 3 sent its last row once more" in news_of(rounds, 6)
    news = [line for done in rounds for line in done.news]
    # In round 8, or later if the machine is so busy that the death is not seen by the deadline.
    assert any("workers 2 to 3 died, and is started again" in line for line in news)
    assert sum("is back" in line for line in news) == 3
    assert all(done.action == "applied" for done in rounds)
    assert np.isfinite(losses).all()
    # The stale row of worker 3 is a value like any other: the local engine is told the same lie.
    absent = tuple(tuple(done.missing) for done in rounds)
    same = AbsentOrStale(absent, worker=3, late=5)
    assert np.array_equal(found, local_bits(data, len(rounds), attack=same, **options))


def test_run_that_waits_for_all_rows_has_the_bits_of_a_run_without_faults(
    ray: Any, data: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Krum, so that servers must exchange distances; momentum, so that they have a state."""
    script = """
        kill:round=2,worker=0
        delay:round=3,worker=5,seconds=1.5
        shape:round=4,worker=1
        hang:round=5,worker=3
        kill:round=5,server=0
    """
    options: dict[str, Any] = {
        "rule": "multi-krum:b=2",
        "num_workers": 7,
        "num_servers": 2,
        "optimizer_options": {"momentum": 0.9},
    }
    with make("ray", data, processes=2, deadline=1, missing=0, faults=script, **options) as trainer:
        rounds = list(trainer.rounds(6))
        cluster = trainer.cluster
        assert isinstance(cluster, RayCluster)
        servers = cluster.servers
        while (None in servers.copies or len(set(servers.owners)) < 2) and len(rounds) < 2000:
            rounds += trainer.rounds(1)  # until the process of server 0 is replaced
        killed = ray.get(servers.owners[1].actor.pid.remote())
        step = cluster.update

        def killing(*arguments: Any) -> Any:
            os.kill(killed, signal.SIGKILL)
            return step(*arguments)

        monkeypatch.setattr(cluster, "update", killing)
        rounds += trainer.rounds(1)
        monkeypatch.setattr(cluster, "update", step)
        rounds += trainer.rounds(1)
        assert ray.get(servers.owners[1].actor.pid.remote()) != killed
        found = bits(trainer)
    assert all(done.missing == () for done in rounds)
    news = [line for done in rounds for line in done.news]
    for line in ("died, and is started", "server 0 died", "sent shape", "three deadlines"):
        assert any(line in text for text in news), line
    assert "server 0 has a process of its own again" in news
    assert "server 1 died: its copy takes over" in news_of(rounds, len(rounds))
    assert np.array_equal(found, local_bits(data, len(rounds), **options))


def test_restart_that_breaks_the_guarantee_of_failure_domains_is_reported_once(
    ray: Any, data: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"num_workers": 6, "rule": "phocas:b=2", "failure_domain": "node"}
    with make("ray", data, processes=3, deadline=20, **options) as trainer:
        cluster = trainer.cluster
        assert isinstance(cluster, RayCluster)
        hosts = cluster.hosts.hosts
        placed = [host.node for host in hosts]
        rounds = list(trainer.rounds(2))
        assert [node_of(host.actor) for host in hosts] == placed == [host.node for host in hosts]
        assert not [line for done in rounds for line in done.news]
        # As if its node were lost. The process itself starts again where it was.
        monkeypatch.setattr(cluster_module, "node_of", lambda _: placed[0])
        for host in hosts[1:]:
            pid = ray.get(host.actor.pid.remote())
            os.kill(pid, signal.SIGKILL)
            pid_again(ray, host.actor, pid)
            rounds += trainer.rounds(1)
            while rounds[-1].missing and len(rounds) < 2000:
                rounds += trainer.rounds(1)
    news = [line for done in rounds for line in done.news]
    cost = "the loss of one node would cost 4 of 6 rows, of which 2 may be missing"
    expected = [f"failure_domain=node does not hold any more: {cost}"]
    assert [line for line in news if line.startswith("failure_domain")] == expected


def test_too_many_missing_rows_stop_the_run_before_a_step(ray: Any, data: Dataset) -> None:
    options: dict[str, Any] = {"num_workers": 4, "num_servers": 1, "rule": "phocas:b=1"}
    script = "raise:round=3,worker=0"  # its process has worker 1 too
    with make(
        "ray", data, processes=2, on_missing="stop", deadline=20, faults=script, **options
    ) as trainer:
        assert len(list(trainer.rounds(2))) == 2
        before = bits(trainer)
        with pytest.raises(
            MissingRowsError, match=r"round 3 needs all rows but 1: 2 are missing.*workers 0, 1"
        ) as stopped:
            trainer.step()
        raised = "raised InjectedError: raise:round=3,worker=0"
        assert stopped.value.failures == {"worker 0": raised, "worker 1": raised}
        assert np.array_equal(bits(trainer), before)
        assert trainer.rounds_done == 2
        # Nothing was lost: the round is run again as if nothing had been.
        assert all(done.missing == () for done in trainer.rounds(2))
        assert np.array_equal(bits(trainer), local_bits(data, 4, **options))
        # Who dies between two rounds and is back before the next learns its job once more.
        cluster = trainer.cluster
        assert isinstance(cluster, RayCluster)
        host = cluster.hosts.hosts[1]
        before_that = ray.get(host.actor.pid.remote())
        os.kill(before_that, signal.SIGKILL)
        assert pid_again(ray, host.actor, before_that) != before_that
        assert trainer.step().missing == ()
        assert np.array_equal(bits(trainer), local_bits(data, 5, **options))


def pid_again(ray: Any, actor: Any, before: int) -> int:
    """Wait until a process that was killed is there again."""
    deadline = time.monotonic() + 60
    found = before
    while found == before and time.monotonic() < deadline:
        try:
            found = ray.get(actor.pid.remote())
        except ray.exceptions.RayActorError:
            continue
    return found


@pytest.mark.parametrize(
    ("rule", "trusted"),
    [
        ("centered-clipping:radius=median,iterations=2,start=previous", None),
        ("nnm:b=1|fl-trust", 30),
    ],
)
def test_reference_vectors_match_the_local_engine(
    ray: Any, data: Dataset, tmp_path: Path, rule: str, trusted: int | None
) -> None:
    def model() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    options: dict[str, Any] = {"rule": rule, "trusted": trusted, "num_servers": 2}
    with make("local", data, model=model(), **options) as local:
        list(local.rounds(4))
        whole = bits(local)
    with make("ray", data, model=model(), processes=2, **options) as trainer:
        list(trainer.rounds(2))
        save_checkpoint(tmp_path / "c", trainer)
        list(trainer.rounds(2))
        assert np.array_equal(bits(trainer), whole)
        load_checkpoint(tmp_path / "c", trainer)
        list(trainer.rounds(2))
        assert np.array_equal(bits(trainer), whole)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_checkpoints_attacks_momentum_adam_and_batch_norm_match_the_local_engine(
    ray: Any, data: Dataset, tmp_path: Path, dtype: str
) -> None:
    def model() -> nn.Module:
        torch.manual_seed(1)
        if dtype == "bfloat16":
            return half_model()
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.Linear(12, 10))

    options: dict[str, Any] = {
        "rule": "nnm:b=2|phocas:b=2",
        "attack": "straggler:q=2",  # sends the rows of the round before, which are kept too
        "optimizer": torch.optim.AdamW,
        "lr": 0.01,
        "weight_decay": 0.1,
        "worker_momentum": 0.5,
        "num_servers": 2,
        "schedule": lambda t: 1 / (1 + t),
    }
    with make("local", data, model=model(), **options) as local:
        expected = list(local.rounds(6))
        whole = bits(local)
        odds = local.detector.e_values
        statistics = {name: value.clone() for name, value in local.model.named_buffers()}
    means = [value for name, value in statistics.items() if name.endswith("running_mean")]
    assert float(means[0].abs().max()) > 0
    with make("ray", data, model=model(), processes=2, **options) as trainer:
        rounds = list(trainer.rounds(3))
        save_checkpoint(tmp_path / "c", trainer)
        rounds += trainer.rounds(3)
        assert np.array_equal(bits(trainer), whole)
        load_checkpoint(tmp_path / "c", trainer)
        assert trainer.rounds_done == 3
        again = list(trainer.rounds(3))
        assert np.array_equal(bits(trainer), whole)
        assert np.array_equal(trainer.detector.e_values, odds)
        for name, value in trainer.model.named_buffers():
            assert torch.equal(value, statistics[name]), name
    precision = 0.02 if dtype == "bfloat16" else 1e-5  # one rounds the mean where the other adds
    for mine, theirs in zip([*rounds, *again], [*expected, *expected[3:]], strict=True):
        assert mine.loss == theirs.loss
        assert mine.touched == theirs.touched
        np.testing.assert_allclose(mine.dropped, theirs.dropped, rtol=1e-6, atol=1e-9)
        assert mine.honest_distance == pytest.approx(theirs.honest_distance, rel=precision)


def dense() -> nn.Module:
    """Return a model whose workers step together, with random numbers of their own."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Dropout(), nn.Linear(12, 10)
    )


def normed() -> nn.Module:
    """Return a model that has buffers, which every worker changes."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.Linear(12, 10))


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (dense, {"clients": 20, "attack": "gaussian:q=6", "server_optimizer": "nesterov:lr=0.7"}),
        # The servers' rate does not take over the factor of the schedule, as it does above.
        (
            normed,
            {"optimizer": "adam", "server_optimizer": "adam:lr=0.01", "attack": "sign-flip:q=1"},
        ),
    ],
)
def test_local_steps_and_clients_match_the_local_engine(
    ray: Any, data: Dataset, tmp_path: Path, model: Any, options: dict[str, Any]
) -> None:
    script = """
        raise:round=2,worker=0
        shape:round=3,worker=4
        kill:round=4,worker=3
    """
    common: dict[str, Any] = {
        "num_workers": 5,
        "rule": "nnm:b=2|phocas:b=2",
        "lr": 0.02,
        "local_steps": 3,
        "schedule": lambda t: 1 / (1 + t),
        **options,
    }
    with make("local", data, model=model(), **common) as local:
        expected = list(local.rounds(5))
        whole = bits(local)
        sums = local.participation.sums.copy()
        statistics = {name: value.clone() for name, value in local.model.named_buffers()}
    engine: dict[str, Any] = {"processes": 2, "missing": 0, "faults": script}
    with make("ray", data, model=model(), **engine, **common) as trainer:
        rounds = list(trainer.rounds(3))
        save_checkpoint(tmp_path / "c", trainer)
        rounds += trainer.rounds(2)
        assert np.array_equal(bits(trainer), whole)
        load_checkpoint(tmp_path / "c", trainer)
        rounds += trainer.rounds(2)
        assert np.array_equal(bits(trainer), whole)
        np.testing.assert_allclose(trainer.participation.sums, sums, rtol=1e-6, atol=1e-9)
        for name, value in trainer.model.named_buffers():
            assert torch.equal(value, statistics[name]), name
    news = [line for done in rounds for line in done.news]
    for line in ("raised InjectedError", "worker 4 sent shape", "died, and is started"):
        assert any(line in text for text in news), line
    for mine, theirs in zip(rounds, [*expected, *expected[3:]], strict=True):
        assert mine.loss == theirs.loss
        assert mine.touched == theirs.touched
        np.testing.assert_equal(mine.participants, theirs.participants)
        np.testing.assert_allclose(mine.dropped, theirs.dropped, rtol=1e-6, atol=1e-9)
        assert mine.flagged == theirs.flagged


def test_cell_filter_excludes_the_same_rows_on_all_servers(ray: Any, data: Dataset) -> None:
    options = {
        "rule": "cell-filter:b=3|nnm:b=2|trimmed-mean:b=2",
        "attack": "random-cells:rate=0.02",
        "num_servers": 3,
    }
    whole = local_bits(data, 3, **options)
    with make("ray", data, processes=2, **options) as trainer:
        rounds = list(trainer.rounds(3))
        assert np.array_equal(bits(trainer), whole)
    assert all(done.dropped.sum() > 0 for done in rounds)


def test_faults_change_the_numbers_of_bfloat16_rows_and_not_their_words(
    ray: Any, data: Dataset
) -> None:
    script = """
        nan:round=1,worker=1
        corrupt:round=2,worker=2,scale=1e30
        dtype:round=3,worker=3
        stale:round=4,worker=4
    """
    with make("ray", data, model=half_model(), processes=2, faults=script) as trainer:
        rounds = list(trainer.rounds(4))
        assert trainer.server.vector.dtype == torch.bfloat16
        assert bool(trainer.server.vector.isfinite().all())
    assert all(done.action == "applied" for done in rounds)
    assert [int(done.dropped.argmax()) for done in rounds[:3]] == [1, 2, 3]
    assert [float(done.dropped.max()) for done in rounds[:3]] == [1.0, 1.0, 1.0]
    assert [done.missing for done in rounds] == [(), (), (3,), ()]
    assert "worker 3 sent float64 where bfloat16 was due" in news_of(rounds, 3)
    assert "worker 4 sent its last row once more" in news_of(rounds, 4)


def test_configured_run_is_recorded_as_with_the_local_engine(ray: Any, tmp_path: Path) -> None:
    common = {
        "dataset": "synthetic:train=300,test=60,side=8",
        "model": "mlp:hidden=8",
        "workers": 5,
        "servers": 2,
        "rule": "trimmed-mean:b=2",
        "attack": "gaussian:q=2",
        "rounds": 6,
        "evaluate_every": 3,
    }
    local = execute(make_config({**common, "results": str(tmp_path / "a")}))
    on_ray = {"engine": "ray", "processes": 1, "results": str(tmp_path / "b")}
    seen: list[str] = []
    script = ["shape:round=2,worker=4"]  # asked again, since no row may be missing
    record = execute(
        make_config({**common, **on_ray, "faults": script, "missing": 0}),
        watch=lambda _config, done, _evaluation: seen.extend(done.news),
    )
    assert record.status == "complete"
    assert record.final_accuracy == local.final_accuracy
    assert len(seen) == 1
    assert "worker 4 sent shape" in seen[0]


def attempt(number: int) -> str:
    """Return what the hostile process does in a round, from 1."""
    tries = (
        "honest",
        "pickle",
        "version",
        "length",
        "type",
        "another worker",
        "second",
        "old",
        "future",
        "endless",
        "report",
        "honest",
    )
    return tries[min(number, len(tries)) - 1]


HARM = Path(tempfile.gettempdir()) / "phocas-crafted-pickle"


class Crafted:
    """An object whose unpickling writes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


class HostileSenders(Senders):
    """The connections of a process that breaks the protocol in a new way in each round."""

    harm: bytes

    def push(self, round: int, route: Any, slices: Any) -> None:
        """Send something else, or something more, than the row."""
        how, (row,) = attempt(round + 1), [np.array(values) for values in slices]
        link = self._link(route)
        header = Header(Kind.ROW, round, self.first, route.number, "float32")
        if how == "pickle":
            link.send_packed(self.harm)
        elif how == "version":
            link.send_packed(header.pack().replace(b"PHOC\x01", b"PHOC\x07"))
        elif how == "length":
            link.send(header, row[:-1])
        elif how == "type":
            link.send(dataclasses.replace(header, dtype="float64"), self.harm)
        elif how == "future":
            link.send(dataclasses.replace(header, round=1 << 40), row)
        elif how == "endless":
            link.send_packed(dataclasses.replace(header, length=1 << 60).pack())
        else:
            if how == "another worker":
                link.send(dataclasses.replace(header, worker=1), 1e30 * row)
            elif how == "old":
                link.send(dataclasses.replace(header, round=round - 1), 1e30 * row)
            super().push(round, route, slices)
            if how == "second":
                link.send(header, 1e30 * row)


class HostileProcess(WorkerProcess):
    """A worker process of a hostile host: the first worker is Byzantine, whatever the protocol."""

    def gradients(self, job: Any, request: Any) -> None:
        """Send nonsense to the trainer too, in one of the rounds."""
        workers = self._at_work(job)
        if self.first:
            super().gradients(job, request)
            return
        assert self._senders is not None
        harm = pickle.dumps(Crafted(str(HARM)))
        self._senders.__class__ = HostileSenders
        self._senders.harm = harm  # type: ignore[attr-defined]
        if attempt(request.round + 1) == "report":
            self._lifeline.send(Header(Kind.REPORT, request.round, request.serial), harm)
            return
        del workers
        super().gradients(job, request)


class HostileCluster(RayCluster):
    """A cluster with a hostile process."""

    process_class = HostileProcess


def test_nothing_that_a_hostile_process_sends_is_executed_or_costs_another_row(
    ray: Any, data: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings_module, "RayCluster", HostileCluster)
    options: dict[str, Any] = {"num_workers": 3, "num_servers": 2, "rule": "phocas:b=1"}
    with make("ray", data, processes=3, deadline=20, **options) as trainer:
        rounds = list(trainer.rounds(13))
        found = bits(trainer)
        # A stranger is not heard at all.
        cluster = trainer.cluster
        assert isinstance(cluster, HostileCluster)
        route = cluster.servers.routes[0]
        stranger = Link(Address(route.host, route.port, bytes(32)), 5.0)
        stranger.send(Header(Kind.ROW, 13, 1, 0, "float32"), np.zeros(4, np.float32))
        with pytest.raises(OSError):  # noqa: PT011 - reset or closed
            stranger.receive_into(Kind.PARAMETERS, np.zeros(1))
        while rounds[-1].missing and len(rounds) < 2000:
            rounds += trainer.rounds(1)
    assert not HARM.exists()
    due = {
        "pickle": "worker 0 sent bytes that are no frame: connection closed",
        "version": "worker 0 sent a frame of version 7 where 1 was due",
        "length": "worker 0 sent shape",
        "type": "worker 0 sent float64 where float32 was due",
        "future": f"worker 0 sent a row of round {(1 << 40) + 1}",
        "endless": f"worker 0 sent {1 << 60} bytes",
        "report": "worker 0 sent losses as none: connection closed",
    }
    for number, done in enumerate(rounds[:11], 1):
        how = attempt(number)
        assert done.missing == ((0,) if how in due else ()), (how, done.news)
        assert done.action == "applied"
        if how in due:
            assert due[how] in news_of(rounds, number), how
    assert "worker 0 sent a row for worker 1: dropped" in news_of(rounds, 6)
    assert "worker 0 sent a second row: dropped" in news_of(rounds, 7)
    assert "worker 0 sent a row of an earlier round: dropped" in news_of(rounds, 8)
    assert rounds[-1].missing == ()
    absent = tuple(tuple(done.missing) for done in rounds[:13])
    same = AbsentOrStale(absent, worker=0, late=-1)
    assert np.array_equal(found, local_bits(data, 13, attack=same, **options))


@pytest.mark.parametrize(("rule", "momentum"), [("phocas:b=3", 0.0), ("multi-krum:b=2", 0.5)])
def test_trainer_receives_few_bytes_in_a_round_whatever_the_model(
    ray: Any, data: Dataset, rule: str, momentum: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers of 200 to 200,000 columns: their answers, and all that workers send the trainer."""
    counts = []
    given: dict[str, Any] = {"num_workers": 20, "rule": rule, "worker_momentum": momentum}
    for hidden in (8, 8000):
        options = given | {"num_servers": 4 if hidden == 8 else 2}

        def model(hidden: int = hidden) -> nn.Module:
            return build_model(f"mlp:hidden={hidden}", data.shape, 10, seed=3)

        with make("ray", data, model=model(), processes=2, **options) as trainer:
            cluster = trainer.cluster
            assert isinstance(cluster, RayCluster)
            received = [0]
            call = cluster.servers.call

            def counting(*given: Any, call: Any = call, received: list[int] = received) -> Any:
                found = call(*given)
                received[0] += sum(len(pickle.dumps(each)) for each in found)
                return found

            first = cluster.servers.call_first

            def counting_first(
                *given: Any, first: Any = first, received: list[int] = received
            ) -> Any:
                found = first(*given)
                assert found is not None
                received[0] += len(pickle.dumps(found))
                return found

            monkeypatch.setattr(cluster.servers, "call", counting)
            monkeypatch.setattr(cluster.servers, "call_first", counting_first)
            before = cluster.mailbox.received
            rounds = list(trainer.rounds(4))  # all are observed
            most = (received[0] + cluster.mailbox.received - before) / 4
            assert most < 32 << 10
            counts.append(most)
            monkeypatch.undo()
            assert trainer.evaluate().loss > 0
            with make("local", data, model=model(), **options) as local:
                expected = list(local.rounds(4))
                assert np.array_equal(bits(trainer), bits(local))
                known = trainer.detector.state() | {"kept": local.detector.kept}
                for name, array in local.detector.state().items():
                    assert np.array_equal(known[name], array, equal_nan=True), name
            for mine, theirs in zip(rounds, expected, strict=True):
                assert mine.outlier_counts == theirs.outlier_counts
    assert counts[1] < 1.1 * counts[0]


def test_processes_have_the_resources_that_were_requested(ray: Any, data: Dataset) -> None:
    def assigned(_: Any) -> tuple[str, dict[str, float]]:
        context = the_ray().get_runtime_context()
        return context.get_node_id(), context.get_assigned_resources()

    labels = {node["NodeID"]: node["Labels"].get("rack") for node in ray.nodes()}
    with make(
        "ray",
        data,
        processes=4,
        worker_resources={"num_gpus": 1},
        server_resources={"resources": {"disk": 0.5}, "label_selector": {"rack": "a"}},
    ) as trainer:
        assert trainer.step().missing == ()
        cluster = trainer.cluster
        assert isinstance(cluster, RayCluster)
        workers = [host.actor for host in cluster.hosts.hosts]
        servers = [process.actor for process in cluster.servers.processes]
        found = ray.get([actor.__ray_call__.remote(assigned) for actor in (*workers, *servers)])
    assert [each.get("GPU") for _, each in found] == [1.0] * 4 + [None] * 2
    assert [each.get("disk") for _, each in found] == [None] * 4 + [0.5] * 2
    assert Counter(labels[node] for node, _ in found) == {"a": 4, "b": 2}


# -- data that workers load ------------------------------------------------------------------------


def own_part(worker: int | None, num_workers: int, size: int = 40, missing: int = -1) -> Any:
    """Return the samples of one worker: each has its own, and not as many as the others."""
    if worker == missing:
        raise FileNotFoundError(f"no file\nfor {num_workers} workers")
    rng = np.random.default_rng([7, 0 if worker is None else 1 + worker])
    number = 60 if worker is None else size + worker
    inputs = rng.normal(size=(number, 1, 8, 8)).astype(np.float32)
    return inputs, (inputs[:, 0, 0, 0] > 0).astype(np.int64) + 8


class OwnPart(torch.utils.data.Dataset[Any]):
    """The same samples as a torch Dataset."""

    def __init__(self, worker: int | None, num_workers: int) -> None:
        self.inputs, self.targets = own_part(worker, num_workers)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, number: int) -> Any:
        return self.inputs[number], self.targets[number]


def test_workers_that_load_their_own_data_match_the_local_engine(ray: Any) -> None:
    options: dict[str, Any] = {"num_workers": 6, "rule": "phocas:b=2", "attack": "label-flip:q=2"}
    options |= {"model": "softmax", "test": OwnPart(None, 6)}
    with make("local", [OwnPart(worker, 6) for worker in range(6)], **options) as local:
        list(local.rounds(4))
        expected, loss = bits(local), local.evaluate().loss
    del options["test"]
    with make("local", OwnPart, **options) as trainer:
        list(trainer.rounds(4))
        assert np.array_equal(bits(trainer), expected)
    with make("ray", OwnPart, processes=2, **options) as trainer:
        cluster = trainer.cluster
        assert isinstance(cluster, RayCluster)
        assert len(pickle.dumps(ray.get(cluster.job).task.samples)) < 1000
        list(trainer.rounds(4))
        assert np.array_equal(bits(trainer), expected)
        assert trainer.evaluate().loss == loss


def test_data_that_a_worker_cannot_load_and_another_version_are_reported(ray: Any) -> None:
    described = functools.partial(own_part, missing=5)
    line = r"workers 4 to 7 raised DataError: on node 127.0.0.1, .*own_part cannot load the data of"
    with pytest.raises(EngineError, match=rf"{line} worker 5: FileNotFoundError: no file$"):
        make("ray", described, model="softmax", processes=2)
    with pytest.raises(EngineError, match=line):
        make("ray", described, model="softmax", processes=2, rule="mean", asynchronous="mean")
    assert not [each for each in threading.enumerate() if each.name == "phocas-mailbox"]
    with pytest.raises(DataError, match="cannot load the data of worker 5"):
        make("local", described, model="softmax")
    with pytest.raises(EngineError, match=r"node 127.0.0.1 has phocas .*, and the trainer has 0:"):
        check_version("0")


# -- asynchronous ----------------------------------------------------------------------------------


def elsewhere(*given: Any) -> Offer:
    """Offer memory that nobody finds: as on another machine, where no such process is."""
    offer = Offer(*given)
    offer.place = dataclasses.replace(offer.place, process=1 << 30)
    return offer


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="the system has no shared memory")
@pytest.mark.parametrize("way", ["near", "far", "rounds"])
def test_stale_row_is_the_row_that_was_sent_before_with_its_faults(
    ray: Any, data: Dataset, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One worker is asked once a round, so that every step is its row's."""
    if way == "far":
        monkeypatch.setattr(Offer, "if_possible", elsewhere)
    script = """
        nan:round=2,worker=0
        stale:round=3,worker=0
        corrupt:round=5,worker=0
        stale:round=6,worker=0
    """
    options: dict[str, Any] = {"num_workers": 1, "num_servers": 1, "rule": "mean", "lr": 0.1}
    engine = {"processes": 1, "faults": script} | (
        {} if way == "rounds" else {"asynchronous": "mean"}
    )
    with make("ray", data, **engine, **options) as trainer:
        vectors, actions = [trainer.server.vector.clone()], []
        for _ in range(7):
            actions += [done.action for done in trainer.rounds(1)]
            vectors.append(trainer.server.vector.clone())
        if isinstance(trainer.cluster, AsynchronousRayCluster):
            assert bool(trainer.cluster._near) == (way == "near")
    assert [i for i, action in enumerate(actions, 1) if action != "applied"] == [2, 3]
    steps = [after - before for before, after in pairwise(vectors)]
    torch.testing.assert_close(steps[5], steps[4])
    assert float(steps[5].norm()) > 100 * float(steps[3].norm()) > 0


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="the system has no shared memory")
@pytest.mark.parametrize(
    ("dtype", "near", "processes"),
    [("float32", True, 1), ("float32", False, 1), ("bfloat16", True, 1), ("float32", True, 2)],
)
def test_rows_are_computed_at_the_parameters_that_the_server_recorded(
    ray: Any,
    data: Dataset,
    dtype: str,
    near: bool,
    processes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A plain loop knows every row, from who was decided on and how stale that was.

    One process answers in order, always one step behind. Of two, one rests before it looks at its
    parameters, for longer than there is room for versions.
    """
    if not near:
        monkeypatch.setattr(Offer, "if_possible", elsewhere)
    m, rounds, lr = 3, 20, 0.1
    options: dict[str, Any] = {"num_workers": m, "num_servers": 2, "rule": "mean", "lr": lr}

    def model() -> nn.Module:
        torch.manual_seed(2)
        if dtype == "float32":
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        # Without matrix products, whose bits differ between processors in bfloat16.
        return nn.Sequential(nn.Flatten(), nn.AdaptiveAvgPool1d(10), nn.LayerNorm(10)).bfloat16()

    options["worker_momentum"] = 0.5
    engine: dict[str, Any] = {"asynchronous": "mean", "processes": processes}
    engine |= {"max_staleness": 100_000, "faults": "delay:round=10,worker=0,seconds=0.5"}
    with make("ray", data, model=model(), **engine, **options) as trainer:
        cluster = trainer.cluster
        assert isinstance(cluster, AsynchronousRayCluster)
        done = list(trainer.rounds(rounds))
        while processes == 2 and len(done) < 10_000 and (done[-1].staleness or 0) <= 20:
            done += trainer.rounds(1)
        assert bool(cluster._near) == near
        found, task = trainer.server.vector.clone(), trainer.task
    who = [int(each.participants[0]) for each in done if each.participants is not None]
    stale = [each.staleness or 0 for each in done]
    if processes == 1:
        assert stale == [0, *[1] * (rounds - 1)]
        assert who == [number % m for number in range(rounds)]
    else:
        assert stale[-1] > 20
    seconds = [each.virtual_seconds or 0.0 for each in done]
    assert seconds == sorted(seconds)
    with make("local", data, model=model(), **options) as twin:
        flat = twin.server.parameters
        versions = [flat.vector.clone()]
        velocity = torch.zeros(m, flat.size, dtype=flat.vector.dtype)
        row = torch.empty(1, flat.size, dtype=flat.vector.dtype)
        for number, worker in enumerate(who):
            step = who[:number].count(worker)
            flat.vector.copy_(versions[number - stale[number]])
            inputs, targets = task.batches(step, worker, worker + 1)
            loss = twin.cluster.gradients(inputs, targets, row, task.seed, step, worker)
            assert done[number].loss == float(loss)
            velocity[worker].mul_(0.5).add_(row[0], alpha=0.5)
            versions.append(versions[-1].add(velocity[worker], alpha=-lr))
    assert torch.equal(found, versions[-1])


@pytest.mark.parametrize(
    ("policy", "late"),
    # Who is late or dead is the engine's business: two policies are enough to wait for them with.
    [
        ("buffers=7", True),
        ("zeno:validation=64,rho=0", True),
        ("kardam:b=2", False),  # workers 0 and 1 may lie at once
        ("mean", False),
    ],
)
def test_every_policy_tolerates_faults_of_real_processes(
    ray: Any, data: Dataset, policy: str, late: bool, tmp_path: Path
) -> None:
    script = """
        corrupt:round=3,worker=0
        nan:round=4,worker=1
        shape:round=5,worker=2
        raise:round=6,worker=3
        stale:round=8,worker=1
        dtype:round=9,worker=5
    """
    said = {
        "worker 2 sent shape",
        "workers 2 to 3 raised InjectedError",
        "worker 5 sent float64 where float32 was due",
    }
    if late:
        script += "kill:round=9,worker=6\ndelay:round=9,worker=4,seconds=1.5"
        said |= {
            "workers 6 to 7 died, and is started again",
            "workers 6 to 7 is back",
            "workers 4 to 5 is late: no row after 1",
        }
    options: dict[str, Any] = {
        "rule": "phocas:b=3" if policy.startswith("buffers") else "mean",
        "lr": 0.05,
        "num_workers": 8,
        "attack": "sign-flip:q=1",
    }
    engine = {"asynchronous": policy, "processes": 4, "deadline": 1.0, "faults": script}
    with make("ray", data, **engine, **options) as trainer:
        cluster = trainer.cluster
        assert isinstance(cluster, FaultyAsynchronousRayCluster)
        before = trainer.evaluate().loss
        rounds = list(trainer.rounds(40 if late else 300))  # Kardam turns most rows down
        news = "; ".join(line for each in rounds for line in each.news)
        faults = cluster.script
        while len(rounds) < 20_000 and not (
            faults.struck == faults.faults and all(text in news for text in said)
        ):
            rounds += trainer.rounds(1)
            news += "; ".join(rounds[-1].news)
        assert faults.struck == faults.faults
        for text in said:
            assert text in news, text
        assert cluster._offer is None or cluster.hosts[3] in cluster._near  # after a kill too
        assert bool(trainer.server.vector.isfinite().all())
        if policy != "mean":  # which takes the garbage of worker 0
            assert trainer.evaluate().loss < before
        trainer.save(tmp_path / "half")
        version, steps = cluster.async_server.version, cluster.async_server.arrivals
        vector = trainer.server.vector.clone()
        list(trainer.rounds(5))
        trainer.load(tmp_path / "half")
        assert (cluster.async_server.version, cluster.async_server.arrivals) == (version, steps)
        assert torch.equal(trainer.server.vector, vector)
        assert len(list(trainer.rounds(5))) == 5
    applied = sum(each.action == "applied" for each in rounds)
    assert version == applied > 0


def test_worker_that_never_answers_does_not_block_buffers(ray: Any, data: Dataset) -> None:
    options: dict[str, Any] = {"num_workers": 4, "num_servers": 1, "rule": "phocas:b=1", "lr": 0.1}
    engine = {"asynchronous": "buffers=3", "processes": 4, "faults": "hang:round=4,worker=2"}
    with make("ray", data, **engine, **options) as trainer:
        before = trainer.evaluate().loss
        rounds = list(trainer.rounds(40))
        assert trainer.evaluate().loss < before
    news = [line for each in rounds for line in each.news]
    assert news == ["workers 2 are silent: the others were assigned to the buffers anew"]
    assert all(each.action == "applied" for each in rounds)
    who = [set(each.participants.tolist()) for each in rounds if each.participants is not None]
    assert who[-1] == {0, 1, 3}


def test_too_few_workers_for_the_buffers_are_reported_once(ray: Any, data: Dataset) -> None:
    """Of five workers three sleep, and fall silent one by one: 3 answer, then 2."""
    options: dict[str, Any] = {"num_workers": 5, "num_servers": 1, "rule": "phocas:b=1", "lr": 0.1}
    faults = [f"delay:round=2,worker={worker},seconds=6" for worker in (1, 2, 3)]
    engine = {"asynchronous": "buffers=4", "processes": 5, "faults": faults}
    with make("ray", data, **engine, **options) as trainer:
        rounds = list(trainer.rounds(2))
        while len(rounds) < 200 and not any("too few" in line for line in rounds[-1].news):
            rounds += trainer.rounds(1)
    told = [line for line in rounds[-1].news if "too few" in line]
    few = "only 3 of 5 workers answer, too few for 4 buffers: use fewer of them"
    assert told == [f"{few}; waiting for the others"]


def test_stale_rows_are_rejected_and_recorded(ray: Any, tmp_path: Path) -> None:
    values = {
        "dataset": "synthetic:train=300,test=60,side=8",
        "model": "softmax",
        "workers": 3,
        "servers": 1,
        "engine": "ray",
        "asynchronous": "mean",
        "max_staleness": 5,
        "processes": 3,
        "rounds": 1000,
        "evaluate_every": 500,
        "faults": ["delay:round=4,worker=1,seconds=1"],
        "results": str(tmp_path / "r"),
    }
    record = execute(make_config(values))
    assert record.status == "complete"
    with Results(tmp_path / "r", read=True) as results:
        clock = results.table("virtual", record.id)
    assert len(clock) == 1000
    assert max(row["staleness"] for row in clock) <= 5
    assert sum(row["refused"] for row in clock) >= 1


def test_run_without_answers_stops_with_the_known_failures(ray: Any, data: Dataset) -> None:
    options: dict[str, Any] = {"num_workers": 2, "num_servers": 1, "rule": "mean"}
    script = "hang:round=2,worker=0\nhang:round=2,worker=1"
    engine = {"asynchronous": "mean", "processes": 2, "wait_seconds": 2.0, "faults": script}
    with make("ray", data, **engine, **options) as trainer:
        with pytest.raises(MissingRowsError, match="needs a row, and none came for 2") as ended:
            list(trainer.rounds(10))
        assert set(ended.value.failures) == {"worker 0", "worker 1"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"missing": 1}, "missing and on_missing are for synchronous rounds"),
        ({"on_missing": "stop"}, "missing and on_missing are for synchronous rounds"),
        ({"failure_domain": "node"}, "which is lost with its node: got failure_domain=node"),
        ({"faults": "kill:round=1,server=0"}, "the trainer's process is the server"),
        ({"faults": "kill:round=1,worker=8"}, "workers are 0 to 7"),
    ],
)
def test_settings_of_synchronous_rounds_are_rejected_with_asynchronous_training(
    ray: Any, data: Dataset, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make("ray", data, asynchronous="mean", rule="mean", **settings)


# -- without a cluster -----------------------------------------------------------------------------


def test_ray_that_does_not_start_is_reported_whatever_it_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray gives up after 30 seconds of a busy machine, with an exception of no type of its own."""

    def init(**_: Any) -> None:
        raise Exception("The current node timed out.\nSee its logs.")  # noqa: TRY002

    slow = types.SimpleNamespace(is_initialized=lambda: False, init=init)
    monkeypatch.setattr(ray_session, "the_ray", lambda: slow)
    told = "Ray did not start on this machine: The current node timed out; try again, use fewer"
    with pytest.raises(RayUnreachableError, match=told) as ended:
        ray_session.Session()
    assert "--engine local" in str(ended.value)
    assert "\n" not in str(ended.value)


def test_unreachable_addresses_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        closed = free.getsockname()[1]
    monkeypatch.setattr(ray_session, "CONNECT_SECONDS", 1.0)
    with pytest.raises(
        RayUnreachableError, match=rf"127.0.0.1 port {closed} gave Connection.* within 1 s"
    ):
        reachable(f"127.0.0.1:{closed}")
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{closed}")
    with pytest.raises(RayUnreachableError, match=rf"auto \(that is 127.0.0.1:{closed}\)"):
        reachable("auto")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        with pytest.raises(
            RayUnreachableError, match=r"answer as a Ray head node does within 1 s.*set that"
        ):
            reachable(f"127.0.0.1:{port}")
    for bad in ("nowhere", "host:", "host:port", "host:0", "host:99999", ""):
        with pytest.raises(RayUnreachableError, match=r"auto or host:port"):
            reachable(bad)
    with pytest.raises(RayUnreachableError, match="not through a Ray client"):
        reachable("ray://127.0.0.1:10001")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"missing": 4}, "tolerates at most 3 missing rows: got missing=4"),
        (
            {"failure_domain": "node", "rule": "phocas:b=2", "processes": 4},
            "one node must cost at most 2 of 8 rows and no parameter: got 3 of them, with 4 rows",
        ),
        (
            {"worker_resources": {"num_gpus": 1}, "processes": 5},
            r"5 worker .* with .* = {'num_gpus': 1} each: got room for 4 \(127.0.0.1: GPU 0;",
        ),
        (
            {"worker_resources": {"label_selector": {"rack": "c"}}},
            r"got room for 0 \(127.0.0.1: rack=; 127.0.0.1: rack=[ab]; 127.0.0.1: rack=[ab]\)",
        ),
        (
            {
                "worker_resources": {"resources": {"disk": 0.75}},
                "server_resources": {"resources": {"disk": 0.75}},
                "processes": 1,
            },
            r"2 server processes with .*: got room for 1 \(127.0.0.1: disk 0; 127.0.0.1: disk 1",
        ),
        ({"attack": "min-max:q=1"}, "looks at all columns"),
        ({"optimizer": torch.optim.Adafactor}, "steps otherwise when a parameter is cut"),
        ({"faults": "kill:round=1,worker=8"}, "workers are 0 to 7"),
    ],
)
def test_impossible_settings_are_rejected_before_any_process_starts(
    ray: Any, data: Dataset, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make("ray", data, **options)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"deadline": 0.0}, "deadline > 0"),
        ({"processes": 0}, "processes >= 1"),
        ({"missing": -1}, "missing >= 0"),
        ({"worker_resources": {"gpus": 1}}, "unknown resource 'gpus'; did you mean 'num_gpus'"),
        ({"worker_resources": {"num_gpus": -1}}, r"worker_resources.num_gpus >= 0: got -1"),
        ({"server_resources": {"resources": 1}}, "a table for server_resources.resources: got 1"),
        ({"on_missing": "panic"}, "unknown on_missing of the ray engine 'panic'"),
    ],
)
def test_bad_settings_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RaySettings(**settings)


def test_resources_are_settings_of_a_run() -> None:
    config = make_config({"engine": "ray", "worker_resources": {"num_gpus": 0.5}})
    engine = config.make_engine()
    assert isinstance(engine, RaySettings)
    assert engine.worker_resources == {"num_gpus": 0.5}
    assert config.identity() == make_config({"engine": "ray"}).identity()
    with pytest.raises(ValueError, match=r"server_resources: unknown resource 'cpus'"):
        make_config({"engine": "ray", "server_resources": {"cpus": 1}})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rounds", "servers", "times", "least"),
    [
        (25, ["kill", "delay", "hang"], 1, 0.5),
        (100, ["kill"] * 4 + ["delay"] * 3 + ["hang"], 4, 0.85),  # 5 minutes: make test-slow
    ],
)
def test_random_faults_on_mnist(
    ray: Any, rounds: int, servers: list[str], times: int, least: float
) -> None:
    try:
        mnist = load("mnist")
    except DataError as error:
        pytest.skip(f"MNIST is out of reach: {error}")
    rng = np.random.default_rng(17)
    m, b = 10, 4
    # Each round at most two faults that lose a row, one that changes it, and one of a server: b in
    # all. A process has one worker, so that no fault strikes more than the one it names, and at
    # most two rows may be missing: who is started again is away for rounds that have faults too.
    losing = ("kill", "hang", "delay", "raise", "shape", "dtype")
    lost = random_script(
        rng, rounds=rounds, num_workers=m, most=2, kinds=(*losing, "kill", "hang"), seconds=3.0
    )
    lies = random_script(
        rng, rounds=rounds, num_workers=m, most=1, kinds=("nan", "corrupt", "stale", "corrupt")
    )
    struck = rng.permutation(np.arange(2, rounds))[: len(servers)]
    lines = [
        f"{kind}:round={number},server={rng.integers(2)}{',seconds=1' * (kind == 'delay')}"
        for kind, number in zip(servers, struck, strict=True)
    ]
    script = FaultScript([*lost.faults, *lies.faults, *FaultScript.parse(lines).faults])
    with Trainer(
        build_model("mlp", mnist.shape, 10, seed=0),
        functional.cross_entropy,
        mnist,
        num_workers=m,
        num_servers=2,
        rule=f"phocas:b={b}",
        batch_size=32,
        lr=0.1,
        engine=RaySettings(
            processes=m, deadline=2.0, server_deadline=20.0, missing=2, faults=script
        ),
    ) as trainer:
        done = list(trainer.rounds(rounds))
        accuracy = trainer.evaluate().top1 or 0.0
        assert isinstance(trainer.cluster, FaultyRayCluster)
        script = trainer.cluster.script
    counts = Counter(
        f"{type(fault).name} {'server' if fault.worker is None else 'worker'}"
        for fault in script.struck
    )
    print(f"accuracy {accuracy:.3f} after", ", ".join(f"{n} {k}" for k, n in counts.most_common()))
    assert len(script.struck) > rounds
    for kind in (*losing, "nan", "corrupt", "stale"):
        assert counts[f"{kind} worker"] >= times, kind
    for kind in servers:
        assert counts[f"{kind} server"] == servers.count(kind)
    news = [line for each in done for line in each.news]
    said = ["died, and is", "is late", "three deadlines", "raised", "sent shape"]
    if rounds == 100:
        said.append("once more")  # of the few stale rows in fewer rounds, none may be the same
    for line in said:
        assert any(line in text for text in news), line
    lied = Counter(
        fault.round for fault in script.struck if isinstance(fault, NaN | Corrupt | Stale)
    )
    assert all(len(each.missing) + lied[each.number] <= b for each in done)
    assert all(each.action == "applied" for each in done)
    assert accuracy > least


LISTENERS = """
import os, pathlib, sys
from phocas.engines.ray import RaySettings
from phocas.training import Trainer

with Trainer("softmax", data="synthetic:train=100,test=20,side=8", num_workers=3, rule="median",
             batch_size=4, engine=RaySettings(processes=1)) as trainer:
    list(trainer.rounds(2))
    parents = {}
    for status in pathlib.Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        except OSError:
            continue
        parents[int(fields["Pid"])] = int(fields["PPid"])
    family = {os.getpid()}
    while new := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= new
    inodes = set()
    for pid in family:
        try:
            for link in pathlib.Path(f"/proc/{pid}/fd").iterdir():
                inodes.add(os.readlink(link))
        except OSError:
            continue
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in pathlib.Path(table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in inodes:
                found.append(words[1].split(":")[0])
    print(len(family), *found)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads the listeners from /proc")
def test_local_ray_listens_on_loopback_only_and_is_shut_down() -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    ended = subprocess.run(
        [sys.executable, "-c", LISTENERS],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    family, *listeners = ended.stdout.split()
    assert int(family) > 5
    assert len(listeners) > 3
    loopback = {"0100007F", "0" * 24 + "01000000", "0" * 16 + "FFFF00000100007F"}
    assert set(listeners) <= loopback


def phocas(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command where nothing is set for Ray but this."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    return subprocess.run(
        [sys.executable, "-c", "from phocas.cli import main; main()", *arguments],
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.slow
def test_command_line_trains_on_ray_with_a_script_of_faults(tmp_path: Path) -> None:
    script = tmp_path / "faults.txt"
    script.write_text("nan:round=2,worker=0\nshape:round=3,worker=1\nkill:round=4,server=1\n")
    arguments = [
        "train", "--engine", "ray", "--dataset", "synthetic:train=500,test=100,side=8",
        "--num-workers", "5", "--num-servers", "2", "--rule", "phocas:b=2", "--rounds", "8",
        "--faults", str(script), "--processes", "1", "--results", str(tmp_path / "r.sqlite"),
    ]  # fmt: skip
    ended = phocas(*arguments)
    assert ended.returncode == 0, ended.stderr
    assert "round 3: worker 1 sent shape" in ended.stderr
    assert "round 4: server 1 died: its copy takes over" in ended.stderr
    assert "complete" in ended.stdout
    refused = phocas(*arguments, "--restart", "--address", "127.0.0.1:1")
    assert refused.returncode == 3
    assert "no Ray at 127.0.0.1:1" in refused.stderr
    assert "Traceback" not in refused.stderr
    again = phocas(*arguments)  # what was complete before the failed restart still is
    assert again.returncode == 0, again.stderr
    assert "is complete already" in again.stdout + again.stderr


@pytest.mark.slow
def test_stdout_is_one_json_object_whatever_ray_prints(tmp_path: Path) -> None:
    """Ray warns of more processes than cores, and of those that die."""
    script = tmp_path / "faults.txt"
    script.write_text("kill:round=2,worker=0\n")
    ended = phocas(
        "train", "--engine", "ray", "--dataset", "synthetic:train=500,test=100,side=8",
        "--num-workers", "5", "--num-servers", "20", "--processes", "1", "--rule", "phocas:b=2",
        "--rounds", "3", "--faults", str(script), "--results", str(tmp_path / "r.sqlite"), "--json",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    assert (told["status"], told["rounds_done"]) == ("complete", 3)
    assert ended.stderr == ""


@pytest.mark.slow
def test_command_reports_in_one_line_that_ray_cannot_start(tmp_path: Path) -> None:
    directory = tmp_path / ("x" * 110)  # too long for the sockets of Ray
    directory.mkdir()
    refused = phocas(
        "train", "--engine", "ray", "--dataset", "synthetic:train=500,test=100,side=8",
        "--num-workers", "5", "--num-servers", "1", "--rule", "phocas:b=2", "--rounds", "2",
        "--results", str(tmp_path / "r.sqlite"), RAY_TMPDIR=str(directory),
    )  # fmt: skip
    assert refused.returncode == 3
    assert refused.stdout == ""
    (line,) = refused.stderr.splitlines()
    assert line.startswith("phocas: Ray did not start on this machine:")
    assert "AF_UNIX path length" in line
    assert "use fewer servers or processes, or use --engine local" in line
