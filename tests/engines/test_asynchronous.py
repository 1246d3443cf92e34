"""Nobody waits: policies against slow twins, a virtual clock, resuming, and MNIST among liars."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from phocas.data import Dataset, load
from phocas.engines import EngineError
from phocas.engines.asynchronous.buffers import SILENT, Buffered
from phocas.engines.asynchronous.kardam import Kardam
from phocas.engines.asynchronous.policies import parse_policy
from phocas.engines.asynchronous.policy import Arrival, Policy, State, Verdict
from phocas.engines.asynchronous.speeds import SPEEDS
from phocas.engines.asynchronous.zeno import Zeno, ZenoState
from phocas.engines.local import LocalSettings
from phocas.experiments.config import ConfigError, expand_grid, make_config, read_toml
from phocas.experiments.results import Results
from phocas.experiments.runner import execute
from phocas.seeds import Stream, generator
from phocas.training import Trainer
from phocas.training.pool import one_torch_thread

M, D = 7, 5
SETS = "synthetic:train=300,test=60,side=8,noise=20"


@pytest.fixture(scope="module")
def data() -> Dataset:
    made: Dataset = load(SETS)
    return made


def make(data: Any, policy: str | None, **settings: Any) -> Trainer:
    engine = {
        name: settings.pop(name)
        for name in ("speeds", "max_staleness", "virtual_deadline")
        if name in settings
    }
    rule = "phocas:b=2" if policy is None or policy.startswith("buffer") else "mean"
    given: dict[str, Any] = {"rule": rule, "num_workers": M, "lr": 0.1, "batch_size": 8}
    return Trainer(
        settings.pop("model", "softmax"),
        data=data,
        engine=LocalSettings(asynchronous=policy, **engine),
        **{**given, **settings},
    )


# --- the policies alone, against twins that keep everything


def arrivals(number: int, seed: int, workers: int = M) -> list[Arrival]:
    rng = np.random.default_rng(seed)
    hostile = [math.nan, math.inf, -math.inf, 1e38, 0.0]
    rows = []
    for _ in range(number):
        row = torch.from_numpy(rng.normal(size=D).astype(np.float32))
        if rng.random() < 0.15:
            row[int(rng.integers(D))] = hostile[int(rng.integers(len(hostile)))]
        if rng.random() < 0.05:
            row.zero_()
        place = torch.from_numpy(rng.normal(size=D).astype(np.float32))
        rows.append(Arrival(int(rng.integers(workers)), row, int(rng.integers(9)), place))
    return rows


def begin(policy: Policy, lr: float = 0.1) -> tuple[State, torch.Tensor]:
    rows = torch.empty(policy.num_rows(), D)
    return policy.begin(M, D, rows, lr), rows


def test_buffers_hold_means_of_the_rows_since_the_last_step() -> None:
    state, rows = begin(Buffered(buffers=3))
    kept: dict[int, list[torch.Tensor]] = {}
    steps = 0
    for arrival in arrivals(300, seed=1):
        kept.setdefault(arrival.worker, []).append(arrival.row)
        verdict = state.receive(arrival)
        filled = {worker % 3 for worker in kept}
        assert (verdict is not None) == (len(filled) == 3)
        if verdict is None:
            continue
        steps += 1
        assert verdict.workers == tuple(sorted(kept))
        assert verdict.rows == tuple(worker % 3 for worker in sorted(kept))
        for buffer in range(3):
            fed = [row for worker, own in kept.items() if worker % 3 == buffer for row in own]
            mean = torch.stack(fed).double().mean(0)
            finite = mean.isfinite()
            assert torch.equal(rows[buffer].isfinite(), finite)
            assert torch.allclose(rows[buffer].double()[finite], mean[finite], rtol=1e-5, atol=1e-6)
        kept.clear()
    assert steps > 30


def test_zeno_accepts_rows_that_agree_with_the_servers_gradient_and_scales_them() -> None:
    policy = Zeno(rho=0.02, epsilon=0.01, every=4)
    state, _ = begin(policy)
    assert isinstance(state, ZenoState)
    rng = np.random.default_rng(3)
    since, taken = math.inf, []
    for arrival in arrivals(300, seed=2):
        assert state.due == (since >= 4)
        if state.due:
            state.own.copy_(torch.from_numpy(rng.normal(size=D)))
            state.renewed()
            since = 0
        verdict = state.receive(arrival)
        v, g = state.own.numpy().astype(np.float64), arrival.row.numpy().astype(np.float64)
        g[abs(g) > 1e30] = np.inf  # lengths are measured in the rows' own format
        with np.errstate(all="ignore"):
            g = g * np.linalg.norm(v) / np.linalg.norm(g)
            good = 0.1 * (v @ g) - 0.02 * (g @ g) >= -0.1 * 0.01
        taken.append(bool(good) and bool(np.isfinite(g).all()))
        assert verdict is not None
        assert verdict.accepted == taken[-1]
        if verdict.accepted:
            since += 1
            assert verdict.along is not None
            assert np.allclose(verdict.along.numpy(), g, rtol=1e-4)
    assert 60 < sum(taken) < 240


@pytest.mark.parametrize(
    ("dtype", "vanishing"),
    [(torch.float32, 2e-23), (torch.float64, 1.5e-162), (torch.bfloat16, 2e-23)],
)
def test_zeno_rejects_rows_whose_squares_underflow(dtype: torch.dtype, vanishing: float) -> None:
    """One value says how long the row is; all others are longer together, and squares of zero."""
    d = 10_000
    state = Zeno(rho=0).begin(M, d, torch.zeros(M, d, dtype=dtype), lr=0.1)
    assert isinstance(state, ZenoState)
    state.own[0] = 1
    state.renewed()
    for first in np.geomspace(1, 1e14, 60) * vanishing:
        row = torch.full((d,), vanishing, dtype=dtype)
        row[0] = first
        verdict = state.receive(Arrival(0, row, 0, None))
        along = verdict.along
        assert along is None or float(torch.linalg.vector_norm(along)) < 1.01, first
    assert verdict.accepted  # the last one is long enough


@pytest.mark.parametrize("d", [1, (1 << 15) + 1])
def test_kardam_tolerates_rows_whose_squares_overflow(d: int) -> None:
    state = Kardam(b=1).begin(M, d, torch.zeros(M, d, dtype=torch.float64), 0.1)
    place = torch.zeros(d, dtype=torch.float64)
    accepted: list[int] = []
    for number in range(40):
        value = 1e200 * (-1) ** number if number % M == 0 else 1.0 + number / 100
        row = torch.full((d,), value, dtype=torch.float64)
        verdict = state.receive(Arrival(number % M, row, 0, place + number))
        assert isinstance(verdict, Verdict)
        accepted += verdict.workers if verdict.accepted else ()
    assert accepted
    assert 0 not in accepted


def test_kardam_filters_by_rate_and_by_frequency() -> None:
    policy = Kardam(b=2, damping=0.1)
    state, _ = begin(policy)
    last: dict[int, tuple[Any, Any]] = {}
    rates: dict[int, float] = {}
    accepted: list[int] = []
    for arrival in arrivals(400, seed=4):
        verdict = state.receive(arrival)
        assert isinstance(verdict, Verdict)
        assert arrival.given is not None
        i, g, x = arrival.worker, arrival.row.double().numpy(), arrival.given.double().numpy()
        g[abs(g) > 1e30] = np.inf  # lengths are measured in the rows' own format
        expected = False
        if i in last:
            with np.errstate(all="ignore"):
                rate = np.linalg.norm(g - last[i][0]) / np.linalg.norm(x - last[i][1])
            rates[i] = math.inf if math.isnan(rate) else float(rate)
            limit = sorted(rates.values())[len(rates) - 3] if len(rates) > 4 else -1.0
            window = [*accepted[-4:], i]
            most = sorted((window.count(worker) for worker in set(window)), reverse=True)
            fits = rates[i] <= limit * (1 + 1e-6) and math.isfinite(limit)
            expected = bool(fits and sum(most[:2]) <= 2)
        last[i] = (g, x)
        assert verdict.accepted == expected
        if expected:
            accepted.append(i)
            assert verdict.factor == pytest.approx(math.exp(-0.1 * arrival.staleness))
    assert len(accepted) > 20


def test_workers_are_reassigned_to_buffers_when_one_is_silent() -> None:
    state, rows = begin(Buffered(buffers=5))
    told: list[str] = []
    steps = 0
    for number in range(60 * M):  # workers 3 and 4, the only ones of buffers 3 and 4, never send
        worker = (0, 1, 2, 5, 6)[number % 5]
        steps += state.receive(Arrival(worker, torch.ones(D), 0, None)) is not None
        told += state.news
    assert steps > 5
    assert told == ["workers 3, 4 are silent: the others were assigned to the buffers anew"]
    assert set(rows.flatten().tolist()) <= {0.0, 1.0}


# --- the engine


def test_every_row_is_a_gradient_at_the_parameters_of_its_worker(data: Dataset) -> None:
    """Play the events again with a plain loop that keeps every version of the parameters."""
    rounds, lr = 40, 0.1
    with make(data, "mean", speeds="slow:workers=2,factor=5", lr=lr) as trainer:
        done = list(trainer.rounds(rounds))
        task, found = trainer.task, trainer.server.vector.clone()
    with make(data, None) as twin:  # for its model alone
        flat = twin.server.parameters
        speeds = SPEEDS.parse("slow:workers=2,factor=5")
        vector = flat.vector.clone()
        taken = [(speeds.seconds(i, M, 0, 0), i, 0, vector.clone()) for i in range(M)]
        versions = [0] * M
        row = torch.empty(1, flat.size)
        for number in range(rounds):
            taken.sort(key=lambda each: each[:2])
            at, worker, step, given = taken.pop(0)
            assert done[number].virtual_seconds == at
            assert done[number].staleness == number - versions[worker]
            who = done[number].participants
            assert who is not None
            assert who.tolist() == [worker]
            flat.vector.copy_(given)
            inputs, targets = task.batches(step, worker, worker + 1)
            twin.cluster.gradients(inputs, targets, row, 0, step, worker)
            vector = vector - lr * row[0]
            versions[worker] = number + 1
            end = at + speeds.seconds(worker, M, 0, step + 1)
            taken.append((end, worker, step + 1, vector.clone()))
    assert torch.allclose(found, vector, atol=1e-6)
    assert max(each.staleness or 0 for each in done) > M


POLICIES = ["buffers=5", "zeno:validation=32,every=3", "kardam:b=2", "mean"]


def test_noise_depends_only_on_seed_worker_and_step() -> None:
    speeds = SPEEDS.parse("lognormal:sigma=1,noise=0.5")
    for worker, step in [(3, 40), (0, 0), (3, 15), (3, 16), (2, 40), (3, 40)]:
        streams = [generator(Stream.SPEED, 7, worker), generator(Stream.SPEED, 7, worker, step)]
        pace, z = (stream.standard_normal() for stream in streams)
        wanted = math.exp(pace) * math.exp(0.5 * z)
        assert speeds.seconds(worker, 20, 7, step) == wanted


@pytest.mark.parametrize("policy", POLICIES)
def test_resumed_run_has_the_same_bits_with_any_number_of_threads(
    data: Dataset, policy: str, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {
        "speeds": "lognormal:sigma=1",
        "attack": "sign-flip:q=2",
        "model": "mlp:hidden=8",
        "worker_momentum": 0.5,
    }
    with make(data, policy, threads=1, **settings) as whole:
        rounds = list(whole.rounds(90))
        expected = whole.server.vector.clone()
        shares = whole.participation.sums.copy()
    with one_torch_thread(), make(data, policy, threads=2, **settings) as begun:
        list(begun.rounds(41))
        begun.save(tmp_path / "half")
    with make(data, policy, threads=2, num_servers=1, **settings) as resumed:
        resumed.load(tmp_path / "half")
        rest = list(resumed.rounds(49))
        assert torch.equal(resumed.server.vector, expected)
        assert np.array_equal(resumed.participation.sums, shares)
    assert [done.loss for done in rest] == [done.loss for done in rounds[41:]]
    assert [done.virtual_seconds for done in rest] == [d.virtual_seconds for d in rounds[41:]]
    settings["speeds"] = "lognormal:sigma=2"
    with (
        make(data, policy, **settings) as other,
        pytest.raises(ValueError, match="another configuration"),
    ):
        other.load(tmp_path / "half")


_KILLED = """
import json, os, signal, sys
from phocas.experiments.config import make_config
from phocas.experiments.runner import execute
from phocas.seeds import Stream, generator

def watch(config, done, evaluation):
    if done.number == 230:
        os.kill(os.getpid(), signal.SIGKILL)

execute(make_config({**json.loads(sys.argv[1]), "results": sys.argv[2]}), watch=watch)
"""


def test_killed_run_resumes_to_the_same_bits(tmp_path: Path) -> None:
    values = {
        "dataset": SETS, "model": "softmax", "workers": M, "servers": 2, "rule": "phocas:b=2",
        "attack": "gaussian:q=2", "asynchronous": "buffers=5", "speeds": "slow:workers=1",
        "rounds": 300, "evaluate_every": 100, "checkpoint_rounds": 20,
    }  # fmt: skip
    outcomes = []
    for name in ("whole", "killed"):
        path = tmp_path / f"{name}.sqlite"
        config = make_config({**values, "results": str(path)})
        if name == "killed":
            words = [sys.executable, "-c", _KILLED, json.dumps(values), str(path)]
            child = subprocess.run(words, check=False)
            assert child.returncode == -signal.SIGKILL
        record = execute(config)
        with Results(path, read=True) as results:
            clock = results.table("virtual", record.id)
            outcomes.append((record.final_accuracy, [(r["round"], r["seconds"]) for r in clock]))
    assert outcomes[0] == outcomes[1]
    assert len(outcomes[0][1]) == 300


def test_silent_workers_do_not_stop_training(data: Dataset) -> None:
    speeds = "slow:workers=2,factor=inf"
    with make(data, "buffers=5", speeds=speeds) as trainer:
        rounds = list(trainer.rounds(60))
        news = [line for done in rounds for line in done.news]
        assert not news  # two workers have a buffer with others
    with (
        make(data, "buffers=6", rule="phocas:b=1", speeds=speeds) as few,
        pytest.raises(EngineError, match="only 5 of 7 workers answer, too few for 6"),
    ):
        list(few.rounds(60))
    with make(data, "mean", speeds=speeds) as trainer:
        rounds = list(trainer.rounds(100))
        assert trainer.participation.sums[1].tolist()[5:] == [0, 0]
        assert len(rounds) == 100


def test_stale_rows_are_rejected_and_counted(data: Dataset) -> None:
    with make(data, "mean", speeds="slow:workers=1,factor=9", max_staleness=20) as trainer:
        rounds = list(trainer.rounds(200))
    assert max(done.staleness or 0 for done in rounds) <= 20
    assert sum(done.refused for done in rounds) >= 2


def test_synchronous_rounds_take_as_long_as_the_slowest_worker_or_the_deadline(
    data: Dataset,
) -> None:
    clocks, missing = {}, {}
    for deadline in (None, 2.0):
        with make(
            data, None, speeds="slow:workers=1,noise=0", virtual_deadline=deadline
        ) as trainer:
            rounds = list(trainer.rounds(5))
            clocks[deadline], missing[deadline] = rounds[-1].virtual_seconds, rounds[-1].missing
    assert clocks == {None: 50.0, 2.0: 10.0}
    assert missing == {None: (), 2.0: (6,)}


def test_validation_samples_that_are_test_samples_are_rejected() -> None:
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(50, 6)).astype(np.float32)
    targets = rng.integers(0, 3, 50)
    model = torch.nn.Linear(6, 3)
    whole = {"train": (inputs, targets), "test": (inputs[:10], targets[:10])}
    with pytest.raises(ValueError, match="10 of the 50 validation samples are test samples too"):
        make(whole, "zeno:validation=50", model=model)
    apart = {"train": (inputs[10:], targets[10:]), "test": (inputs[:10], targets[:10])}
    make(apart, "zeno:validation=40", model=model).close()
    with pytest.raises(ValueError, match="validation <= the training samples: got 41 of 40"):
        make(apart, "zeno:validation=41", model=model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"asynchronous": "buffers=4"}, r"2b < m: got b=2 with m=4 workers.*the 4 buffers"),
        ({"asynchronous": "buffers=8"}, "a worker for each buffer: got buffers=8 with m=7"),
        ({"asynchronous": "buffers=0"}, "buffers >= 1"),
        ({"asynchronous": "zeno"}, "decides by itself"),
        ({"asynchronous": "kardam:b=3", "rule": "mean"}, "m > 3b: got b=3 with m=7"),
        ({"asynchronous": "zen"}, "unknown policy 'zen'; did you mean 'zeno'"),
        ({"asynchronous": "other"}, "policies: buffered, zeno"),
        ({"asynchronous": "buffers"}, "buffered needs buffers: write"),
        ({"speeds": "lognormal:sigma=1000"}, "lognormal needs sigma <= 20"),
        ({"speeds": "even:noise=1000"}, "even needs noise <= 20"),
        ({"speeds": "slow:workers=1,factor=0.5"}, "factor >= 1"),
        ({"speeds": "fast"}, "unknown speed 'fast'"),
    ],
)
def test_impossible_settings_are_rejected_by_key(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config({"workers": M, "rule": "phocas:b=2", **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "mean", "local_steps": 2}, "leave local_steps or asynchronous out"),
        ({"policy": "mean", "clients": 9}, "leave clients or asynchronous out"),
        ({"policy": "mean", "attack": "straggler:q=1"}, "set speeds"),
        ({"policy": "mean", "virtual_deadline": 2.0}, "is for synchronous rounds"),
        ({"policy": None, "virtual_deadline": 2.0}, "set speeds too"),
        ({"policy": None, "speeds": "slow:workers=1,factor=inf"}, "never answer"),
        ({"policy": "mean", "speeds": "slow:workers=7,factor=inf"}, "a worker that answers"),
    ],
)
def test_impossible_settings_are_rejected_before_a_round(
    data: Dataset, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make(data, **options)


def test_policy_without_a_rule_needs_no_rule_and_keeps_identities_of_other_runs() -> None:
    assert make_config({"asynchronous": "zeno"}).rule == "mean"
    assert make_config({"asynchronous": "zeno"}).asynchronous == "zeno"
    assert make_config({"asynchronous": " buffers=17 "}).asynchronous == "buffered:buffers=17"
    plain = make_config({})
    assert plain.identity() == make_config({"max_staleness": 1000}).identity()
    assert plain.identity() != make_config({"speeds": "even"}).identity()
    with pytest.raises(ConfigError, match="setting of the local engine"):
        make_config({"speeds": "even", "engine": "ray"})
    on_ray = make_config({"engine": "ray"})
    assert on_ray.identity() == make_config({"engine": "ray", "max_staleness": 1000}).identity()
    assert on_ray.identity() != make_config({"engine": "ray", "asynchronous": "zeno"}).identity()
    assert str(parse_policy("zeno++:rho=0.01")) == "zeno:rho=0.01"
    assert SILENT * 20 > 10 * 20  # a worker ten times slower is not silent


def test_experiment_of_the_documentation_runs() -> None:
    grid = Path(__file__).parents[2] / "docs" / "asynchronous.toml"
    configs = expand_grid(read_toml(grid), str(grid))
    assert len(configs) == 7 * 4 * 10
    assert {config.speeds for config in configs} == {"slow:workers=4"}
    assert len({(config.asynchronous, config.virtual_deadline) for config in configs}) == 6
