"""The ray engine with real processes: three nodes on one machine, killed, hung and lied to."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
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
from phocas.engines.faults import Corrupt, FaultScript, NaN, Stale, random_script
from phocas.engines.local import LocalSettings
from phocas.engines.ray import RaySettings
from phocas.engines.ray import session as ray_session
from phocas.engines.ray import shard as ray_shard
from phocas.engines.ray.asynchronous import AsynchronousRayCluster
from phocas.engines.ray.cluster import RayCluster
from phocas.engines.ray.hosts import MissingRowsError
from phocas.engines.ray.injection import FaultyAsynchronousRayCluster, FaultyRayCluster
from phocas.engines.ray.servers import Servers
from phocas.engines.ray.session import RayUnreachableError, reachable, the_ray
from phocas.engines.ray.shard import read_rows
from phocas.engines.ray.shared import Offer
from phocas.engines.ray.worker import cut, join
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
    for _ in range(2):
        cluster.add_node(**node)
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


def make(engine: str, data: Dataset, **options: Any) -> Trainer:
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


def told(rounds: list[Round], number: int) -> str:
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
        late = cluster.hosts.hosts[0].asked
        assert late is not None
        ray.wait([late[1][-1]])  # else two processes could be away at once, and b rows be too few
        rounds += trainer.rounds(3)
        while rounds[-1].missing and len(rounds) < 200:
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
    assert "worker 1 sent shape" in told(rounds, 2)
    assert "worker 5 sent float64 where float32 was due" in told(rounds, 3)
    assert "workers 4 to 5 raised InjectedError: raise:round=4,worker=4" in told(rounds, 4)
    assert "workers 0 to 1 is late: no row after " in told(rounds, 5)
    assert "worker 3 sent its last row once more" in told(rounds, 6)
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
        killed = ray.get(cluster.servers.actors[1].pid.remote())
        step = cluster.update

        def killing(*arguments: Any) -> Any:
            os.kill(killed, signal.SIGKILL)
            return step(*arguments)

        monkeypatch.setattr(cluster, "update", killing)
        rounds += trainer.rounds(1)
        monkeypatch.setattr(cluster, "update", step)
        rounds += trainer.rounds(1)
        assert ray.get(cluster.servers.actors[1].pid.remote()) != killed
        found = bits(trainer)
    assert all(done.missing == () for done in rounds)
    news = [line for done in rounds for line in done.news]
    for line in ("died, and is started", "server 0 died", "sent shape", "three deadlines"):
        assert any(line in text for text in news), line
    assert "server 1 died: restored from its checkpoint" in told(rounds, 8)
    assert np.array_equal(found, local_bits(data, 8, **options))


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
    assert "worker 3 sent float64 where bfloat16 was due" in told(rounds, 3)
    assert "worker 4 sent its last row once more" in told(rounds, 4)


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


@pytest.mark.parametrize("length", [1, 1 << 17, 1 << 18, (1 << 18) + 1, 600_000])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_slices_pass_the_object_store_in_pieces_and_are_read_without_a_copy(
    ray: Any, length: int, dtype: str
) -> None:
    row = np.random.default_rng(3).normal(size=length).astype(dtype)
    pieces = ray.get(ray.put(cut(row)))
    assert all(piece.nbytes <= 1 << 20 for piece in pieces)
    found = join(pieces)
    assert np.array_equal(found, row)
    assert found.dtype == dtype
    assert all(np.shares_memory(found, piece) for piece in pieces)
    # Pieces that lie elsewhere are put together, and so are those with gaps or of other types.
    apart = [piece.copy() for piece in cut(row)]
    for other in (apart[::-1], [np.repeat(piece, 2)[::2] for piece in apart], [*apart, row[:0]]):
        assert np.array_equal(join(other), np.concatenate(other))
    assert join([*apart, np.zeros(3, "float16")]).dtype == dtype


class Silent:
    """An actor that never answers."""

    def hang(self) -> None:
        """Wait for what never comes."""
        threading.Event().wait()


@pytest.fixture
def never(ray: Any) -> Iterator[Any]:
    """Return a reference to what is never there, as behind a node that cannot be reached."""
    silent = ray.remote(num_cpus=0)(Silent).remote()
    yield silent.hang.remote()
    ray.kill(silent)


DUE = np.arange(4, dtype=np.float32)


@pytest.mark.parametrize(
    ("sent", "problem"),
    [
        ([DUE.astype(">f4")], "sent >f4 where float32 was due"),
        ([DUE[:2], DUE[2:].astype(">f4")], "sent >f4 where float32 was due"),
        ([DUE[:2], DUE[2:].astype("float64")], "sent float64 where float32 was due"),
        ([DUE[:2], DUE[2:].astype("datetime64[s]")], "sent datetime64[s] where float32 was due"),
        ([DUE[:2], np.array(["a", None], object)], "sent object where float32 was due"),
        ([DUE[:2], np.zeros(2, [("x", "f4")])], "sent [('x', '<f4')] where float32 was due"),
        ([np.ma.masked_less(DUE, 2)], "sent MaskedArray where an array of one dimension was due"),
        ([DUE[None]], "sent ndarray where an array of one dimension was due"),
        ([DUE[:2], 3.0], "sent float where an array of one dimension was due"),
        ([DUE, DUE], "sent shape (8,) where (4,) was due"),
        ([], "sent list where a list of arrays was due"),
        (DUE, "sent ndarray where a list of arrays was due"),
    ],
)
def test_unusable_pieces_are_reported_and_cost_no_other_row(
    ray: Any, sent: Any, problem: str
) -> None:
    parts = [(0, 2, ray.put([[DUE[:1], DUE[1:]], sent])), (2, 3, ray.put([[DUE]]))]
    rows, problems = read_rows(parts, np.zeros_like(DUE), 3, 10)
    assert problems == {1: problem}
    assert rows[1] is None
    for row in (rows[0], rows[2]):
        assert row is not None
        assert np.array_equal(row, DUE)


def test_missing_slices_cost_one_deadline_however_many_they_are(
    ray: Any, never: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = [ray.remote(num_cpus=0)(Silent).remote() for _ in range(2)]
    late = [never, *(actor.hang.remote() for actor in silent)]
    # An actor that died is an error at once, and no reason to wait for anything else.
    ray.kill(silent[1])
    ray.wait(late[2:])
    parts = [(i, i + 1, reference) for i, reference in enumerate([*late, ray.put([[DUE]])])]
    waits: list[tuple[Any, float]] = []

    def counted(call: Any) -> Any:
        def counting(what: Any, *, timeout: float, **options: Any) -> Any:
            waits.append((what, timeout))
            return call(what, timeout=timeout, **options)

        return counting

    seen = types.SimpleNamespace(
        get=counted(ray.get), wait=counted(ray.wait), exceptions=ray.exceptions
    )
    monkeypatch.setattr(ray_shard, "the_ray", lambda: seen)
    rows, problems = read_rows(parts, np.zeros_like(DUE), 5, 1.5)
    ray.kill(silent[0])
    every = [reference for *_, reference in parts]
    # Once for all values, then for what is left of the same time; then those that are ready alone.
    assert [what for what, _ in waits] == [every, every, every[2], every[3]]
    assert waits[0][1] == 1.5
    assert all(0 <= timeout <= 1.5 for _, timeout in waits)
    assert [row is not None for row in rows] == [False, False, False, True, False]
    assert problems[0] == problems[1] == "did not deliver its values within 1.5 s"
    assert "lost its values on the way (ActorDiedError)" in problems[2]
    assert set(problems) == {0, 1, 2}  # nobody was to read a row of worker 4


def test_missing_and_unusable_rows_count_as_nan_and_restore_no_server(
    ray: Any, data: Dataset, never: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two rows are lost, and the straggler may send one that was lost before: b = 3.
    options: dict[str, Any] = {"rule": "phocas:b=3", "attack": "straggler:q=1"}
    with make("ray", data, processes=4, server_deadline=6, **options) as trainer:
        cluster = trainer.cluster
        assert isinstance(cluster, RayCluster)
        host = cluster.hosts.hosts[1]
        bounds = trainer.server.bounds
        honest = [np.zeros(part.stop - part.start, np.float32) for part in bounds]
        hostile = [
            ray.put([[row.astype(">f4")], [row[:1], row[1:].astype("M8[s]")]]) for row in honest
        ]
        collect = cluster.hosts.collect
        for references, reason in (
            ([never, never], "did not deliver its values within 1.5 s"),
            # The rows of the round before are read too: still out of reach, for as long again.
            (hostile, "worker 2 sent >f4 where float32 was due"),
        ):

            def replacing(harvest: Any, references: list[Any] = references) -> None:
                collect(harvest)
                harvest.sources[host] = host.first, host.last, references

            monkeypatch.setattr(cluster.hosts, "collect", replacing)
            done = trainer.step()
            assert done.missing == (2, 3)
            assert reason in "; ".join(done.news)
            assert not any("server" in line for line in done.news)
            assert done.action == "applied"
        assert "worker 3 sent datetime64[s] where float32 was due" in done.news
        previous = cluster.state()["previous"].isnan().all(1)
        assert previous.tolist() == [worker in {2, 3} for worker in range(8)]


DIES, HANGS = -1, -2


class Slow:
    """A server that dies or hangs on demand, or has much to say."""

    def answer(self, size: int) -> tuple[np.ndarray, int]:
        """Return zeros and how many; or none at all."""
        if size == DIES:
            os.kill(os.getpid(), signal.SIGKILL)
        if size == HANGS:
            threading.Event().wait()
        return np.zeros(size), size


@pytest.mark.parametrize(
    ("how", "said"), [(DIES, "died"), (HANGS, "did not answer for 2 s")], ids=["dies", "hangs"]
)
def test_restoring_a_server_does_not_use_the_time_of_the_others(
    ray: Any, how: int, said: str
) -> None:
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    here = ray.get_runtime_context().get_node_id()
    elsewhere = next(n["NodeID"] for n in ray.nodes() if n["Alive"] and n["NodeID"] != here)
    there = strategies.NodeAffinitySchedulingStrategy(elsewhere, soft=False)
    make_slow = ray.remote(num_cpus=0)(Slow).options(scheduling_strategy=there).remote
    actors = [make_slow() for _ in range(2)]
    ray.get(actors[1].answer.remote(1))
    restored = []

    def restore(number: int) -> Any:
        restored.append(number)
        actor = make_slow()
        ray.get(actor.answer.remote(1))
        time.sleep(max(0.0, until - time.monotonic()))  # a restoration that takes all the time
        return actor

    servers = Servers(actors, restore, deadline=2.0)
    until = time.monotonic() + 2.5
    # Too large to come with the answer: it has to be fetched from another node.
    results = servers.call("answer", [(how,), (1 << 19,)], again=[(7,), (1 << 19,)])
    assert [result.values[1] for result in results] == [7, 1 << 19]
    assert restored == [0]
    assert servers.news == [f"server 0 {said}: restored from its checkpoint"]
    for actor in servers.actors:
        ray.kill(actor)


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
        ({"on_missing": "panic"}, "unknown on_missing of the ray engine 'panic'"),
    ],
)
def test_bad_settings_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RaySettings(**settings)


@pytest.mark.slow
def test_hundred_rounds_of_random_faults_on_mnist(ray: Any) -> None:
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
        rng, rounds=100, num_workers=m, most=2, kinds=(*losing, "kill", "hang"), seconds=3.0
    )
    lies = random_script(
        rng, rounds=100, num_workers=m, most=1, kinds=("nan", "corrupt", "stale", "corrupt")
    )
    struck = rng.permutation(np.arange(2, 100))[:8]
    servers = [
        f"{kind}:round={number},server={rng.integers(2)}{',seconds=1' * (kind == 'delay')}"
        for kind, number in zip(["kill"] * 4 + ["delay"] * 3 + ["hang"], struck, strict=True)
    ]
    script = FaultScript([*lost.faults, *lies.faults, *FaultScript.parse(servers).faults])
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
        rounds = list(trainer.rounds(100))
        accuracy = trainer.evaluate().top1 or 0.0
        assert isinstance(trainer.cluster, FaultyRayCluster)
        script = trainer.cluster.script
    counts = Counter(
        f"{type(fault).name} {'server' if fault.worker is None else 'worker'}"
        for fault in script.struck
    )
    print(f"accuracy {accuracy:.3f} after", ", ".join(f"{n} {k}" for k, n in counts.most_common()))
    assert len(script.struck) > 100
    for kind in (*losing, "nan", "corrupt", "stale"):
        assert counts[f"{kind} worker"] >= 4, kind
    assert counts["kill server"] == 4
    assert counts["hang server"] == 1
    news = [line for done in rounds for line in done.news]
    for line in ("died, and is", "is late", "three deadlines", "raised", "sent shape", "once more"):
        assert any(line in text for text in news), line
    lied = Counter(
        fault.round for fault in script.struck if isinstance(fault, NaN | Corrupt | Stale)
    )
    assert all(len(done.missing) + lied[done.number] <= b for done in rounds)
    assert all(done.action == "applied" for done in rounds)
    assert accuracy > 0.85


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
    assert "round 4: server 1 died: restored from its checkpoint" in ended.stderr
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
