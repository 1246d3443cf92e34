"""Scripts of faults: what they say, what they refuse, and what each fault does to a row."""

from __future__ import annotations

import itertools
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest

from phocas.engines import EngineError
from phocas.engines.faults import (
    FAULTS,
    Corrupt,
    Delay,
    FaultScript,
    InjectedError,
    Kill,
    NaN,
    Raise,
    RowFault,
    Stale,
    WrongShape,
    WrongType,
    random_script,
)
from phocas.engines.local import LocalSettings
from phocas.engines.ray import RaySettings
from phocas.engines.ray.hosts import MissingRowsError
from phocas.engines.ray.session import RayNotInstalledError, RayUnreachableError, the_ray
from phocas.experiments.config import ConfigError, RunConfig, make_config

ROW = np.arange(1, 8, dtype=np.float32)


def test_script_is_parsed_by_line_and_printed_back() -> None:
    text = """
    # the first week
    kill:round=7,worker=3      # in mid-round
    delay:worker=2,round=9,seconds=2.5

    kill:round=15,server=1
    """
    script = FaultScript.parse(text)
    assert script.faults == [Kill(7, worker=3), Delay(9, worker=2, seconds=2.5), Kill(15, server=1)]
    assert FaultScript.parse(str(script)).faults == script.faults


@pytest.mark.parametrize("kind", sorted(FAULTS))
def test_every_fault_is_parsed_from_its_own_text(kind: str) -> None:
    fault = FAULTS[kind](4, worker=2)
    assert FAULTS.parse(str(fault)) == fault


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("kil:round=1,worker=0", "did you mean 'kill'"),
        ("kill:worker=0", "kill needs round"),
        ("kill:round=0,worker=0", "round >= 1"),
        ("kill:round=1", "a worker or a server, and not both"),
        ("kill:round=1,worker=0,server=0", "a worker or a server, and not both"),
        ("kill:round=1,worker=-1", "worker >= 0"),
        ("kill:round=1.5,worker=1", "an integer"),
        ("nan:round=1,server=0", "changes a worker's row"),
        ("raise:round=1,server=0", "a worker's fault"),
        ("delay:round=1,worker=0,seconds=0", "seconds > 0"),
        ("delay:round=1,worker=0,seconds=nan", "seconds > 0"),
        ("corrupt:round=1,worker=0,scale=-1", "scale > 0"),
        ("kill:round=1,worker=0,who=me", "unknown parameter"),
    ],
)
def test_bad_line_is_rejected_with_its_number(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"line 2: .*{message}"):
        FaultScript.parse(f"# comment\n{line}\n")


def test_faults_of_missing_workers_are_rejected() -> None:
    script = FaultScript.parse(["kill:round=1,worker=9"])
    script.check(10, 1)
    with pytest.raises(ValueError, match="workers are 0 to 8: got kill:round=1,worker=9"):
        script.check(9, 1)
    with pytest.raises(ValueError, match="servers are 0 to 1: got kill:round=1,server=2"):
        FaultScript.parse(["kill:round=1,server=2"]).check(9, 2)


def test_fault_strikes_once_and_only_its_worker_in_its_round() -> None:
    script = FaultScript.parse(["nan:round=2,worker=1", "kill:round=2,server=1"])
    assert script.take(1, workers=range(9)) == []
    assert script.take(2, workers=[0, 2, 3]) == []
    assert script.take(2, server=0) == []
    assert script.take(2, workers=range(9)) == [NaN(2, worker=1)]
    assert script.take(2, workers=range(9)) == []
    assert script.struck == [NaN(2, worker=1)]
    assert script.take(2, server=1) == [Kill(2, server=1)]
    assert script.take(2, server=1) == []
    assert script.struck == [NaN(2, worker=1), Kill(2, server=1)]


def test_row_faults_change_what_is_sent_and_not_the_workers_own_values() -> None:
    own = ROW.copy()
    before = ROW - 100

    def sent(fault: RowFault, start: int = 0) -> np.ndarray:
        return np.asarray(fault.change(own, before, start))

    assert np.isnan(sent(NaN(1, worker=0))).all()
    assert sent(WrongShape(1, worker=0)).shape == (6,)
    assert sent(WrongType(1, worker=0)).dtype == np.float64
    assert np.array_equal(sent(Stale(1, worker=0)), before)
    assert not np.asarray(Stale(1, worker=0).change(own, None, 0)).any()
    noise = sent(Corrupt(1, worker=0, scale=50))
    assert noise.dtype == own.dtype
    assert noise.shape == own.shape
    assert 5 < np.abs(noise).mean() < 500
    others = [Corrupt(2, worker=0, scale=50), Corrupt(1, worker=1, scale=50)]
    assert np.array_equal(noise, sent(Corrupt(1, worker=0, scale=50)))
    for values in (*map(sent, others), sent(Corrupt(1, worker=0, scale=50), start=7)):
        assert not np.array_equal(noise, values)
    assert np.array_equal(own, ROW)


def test_injected_error_names_its_fault() -> None:
    with pytest.raises(InjectedError, match="raise:round=3,worker=1"):
        Raise(3, worker=1).strike()


def test_random_scripts_respect_their_limit_and_depend_on_the_seed() -> None:
    def draw(seed: int) -> FaultScript:
        rng = np.random.default_rng(seed)
        return random_script(rng, rounds=200, num_workers=7, most=3, seconds=0.5)

    script = draw(5)
    assert script.faults == draw(5).faults
    assert script.faults != draw(6).faults
    sizes = set()
    for number, group in itertools.groupby(script.faults, lambda fault: fault.round):
        assert 1 <= number <= 200
        workers = [fault.worker for fault in group]
        assert len(set(workers)) == len(workers) <= 3
        sizes.add(len(workers))
    assert sizes == {1, 2, 3}
    assert {type(fault).name for fault in script.faults} == {
        "delay", "raise", "nan", "corrupt", "shape", "dtype", "stale",
    }  # fmt: skip
    assert {fault.worker for fault in script.faults} == set(range(7))
    with pytest.raises(ValueError, match="unknown fault 'explode'"):
        random_script(np.random.default_rng(0), rounds=1, num_workers=3, most=1, kinds=["explode"])


def test_configuration_checks_faults_and_settings_of_engines(tmp_path: Path) -> None:
    base = {"dataset": "synthetic", "workers": 5, "servers": 2, "rule": "phocas:b=2"}
    local = make_config(base)
    script = ["kill: worker=3, round=7 # in mid-round", "", "# no more"]
    ray = make_config({**base, "engine": "ray", "faults": script, "deadline": 2})
    assert ray.faults == ["kill:round=7,worker=3"]
    engine = ray.make_engine()
    assert isinstance(engine, RaySettings)
    assert engine.deadline == 2.0
    assert str(engine.faults) == "kill:round=7,worker=3"
    assert local.make_engine() == LocalSettings()
    # Where it runs and how long it waits are not what is run; what goes wrong is.
    same = make_config(
        {**base, "engine": "ray", "faults": script, "processes": 3, "address": "auto"}
    )
    assert same.identity() == ray.identity()
    assert make_config({**base, "engine": "ray"}).identity() != ray.identity()
    for bad, message in (
        ({"faults": script}, "faults is a setting of the ray engine"),
        ({"address": "auto"}, "address is a setting of the ray engine"),
        ({"engine": "ray", "faults": ["kill:round=1,worker=5"]}, "workers are 0 to 4"),
        ({"engine": "ray", "faults": ["boom"]}, "line 1: unknown fault 'boom'"),
        ({"engine": "ray", "deadline": 0}, "deadline"),
        ({"engine": "ray", "on_missing": "panic"}, "on_missing"),
        ({"engine": "ry"}, "did you mean 'ray'"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_config({**base, **bad})


def test_documentation_lists_every_key() -> None:
    text = (Path(__file__).parents[2] / "docs" / "training.md").read_text("utf-8")
    rows = " ".join(line for line in text.splitlines() if line.startswith("| `"))
    assert [key for key in RunConfig.model_fields if f"`{key}`" not in rows] == []


def test_missing_ray_is_reported_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    with pytest.raises(EngineError, match=r"pip install 'phocas\[ray\]'"):
        the_ray()


def test_errors_of_an_engine_carry_failures_and_can_be_pickled() -> None:
    for kind in (EngineError, MissingRowsError, RayUnreachableError, RayNotInstalledError):
        error = kind("two are gone", {"worker 3": "died", "server 0": "did not answer"})
        found = pickle.loads(pickle.dumps(error))
        assert type(found) is kind
        assert str(found) == "two are gone"
        assert found.failures == {"worker 3": "died", "server 0": "did not answer"}
    assert EngineError("nothing is known").failures == {}


def test_settings_keep_their_script_when_a_cluster_uses_it() -> None:
    settings = RaySettings(faults="kill:round=1,worker=0")
    script = FaultScript.of(settings.faults)
    assert len(script.take(1, workers=[0])) == 1
    assert FaultScript.of(settings.faults).struck == []
