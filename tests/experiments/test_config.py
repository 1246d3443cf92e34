"""Configurations: invalid settings are rejected by key before anything runs."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Any

import pytest

from phocas.engines.local import LocalSettings
from phocas.engines.ray import RaySettings
from phocas.experiments.config import (
    ConfigError,
    RunConfig,
    expand_grid,
    make_config,
    owners_of,
    read_toml,
)
from phocas.experiments.runner import build_trainer
from phocas.training import TaskSettings

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"workres": 20}, "my.toml: unknown key 'workres'; did you mean 'num_workers'?"),
        ({"rule": "phoca:b=8"}, "my.toml: rule: unknown rule 'phoca'; did you mean 'phocas'?"),
        ({"rule": "phocas:b=10"}, "my.toml: rule: .*b=10.*the largest b is 9"),
        ({"rule": "krum:b=9"}, "my.toml: rule: .*2b \\+ 2 < m.*b=9.*the largest b is 8"),
        ({"rule": "phocas:b=8", "workers": 12}, "my.toml: rule: .*b=8 with m=12"),
        ({"rule": "phocas:q=8"}, "my.toml: rule: unknown parameter of phocas 'q'"),
        ({"rule": 8}, "my.toml: rule: input should be a valid string: got 8"),
        ({"attack": "gambler:server=20"}, "my.toml: attack: gambler needs server < servers"),
        ({"attack": "gambler:server=7", "servers": 5}, "my.toml: attack: gambler needs server"),
        ({"attack": "gaussian:q=21"}, "my.toml: attack: gaussian needs q <= m: got q=21 with m=20"),
        ({"attack": "gausian"}, "my.toml: attack: unknown attack 'gausian'; did you mean"),
        ({"workers": 0}, "my.toml: workers: a run needs workers >= 1: got workers=0"),
        ({"workers": 20.5}, "my.toml: workers: .*integer"),
        ({"workers": True}, "my.toml: workers: .*integer"),
        ({"workers": "20"}, "my.toml: workers: .*integer"),
        ({"lr": 0}, "my.toml: lr: .*finite lr > 0"),
        ({"lr": float("nan")}, "my.toml: lr: "),
        ({"lr": float("inf")}, "my.toml: lr: .*finite"),
        ({"weight_decay": float("inf")}, "my.toml: weight_decay: .*finite"),
        ({"seed": 1 << 63}, r"my.toml: seed: a run needs seed < 2\^63"),
        ({"threads": 0}, "my.toml: threads: a run needs threads >= 1"),
        ({"worker_momentum": 1}, "my.toml: worker_momentum: .*less than 1"),
        ({"validation": -0.1}, "my.toml: validation: .*at least 0 and less than 1"),
        ({"split": "gamma-similarity:gamma=1.5"}, "my.toml: split: .*0 <= gamma <= 1"),
        (
            {"byzantine_data": "iid", "attack": "gambler"},
            "my.toml: byzantine_data: byzantine_data = iid needs an attack by the same workers",
        ),
        ({"model": "mpl"}, "my.toml: model: unknown model 'mpl'; did you mean 'mlp'"),
        ({"dataset": "mnits"}, "my.toml: dataset: unknown dataset 'mnits'; did you mean 'mnist'"),
        ({"split": "dirichlet"}, "my.toml: split: dirichlet needs alpha"),
        ({"schedule": "cos"}, "my.toml: schedule: unknown schedule"),
        ({"optimizer": "sdg"}, "my.toml: optimizer: unknown optimizer 'sdg'; did you mean 'sgd'"),
        ({"on_nonfinite": "ignore"}, "my.toml: on_nonfinite: .*'skip', 'stop' or 'apply'"),
        ({"reduction": "max"}, "my.toml: reduction: "),
        ({"engine": "spark"}, "my.toml: engine: unknown engine 'spark'"),
        ({"rounds": 0, "seed": -1}, "seed.*\n.*rounds"),
    ],
)
def test_invalid_settings_are_rejected_by_key(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(values, "my.toml")


def test_the_defaults_are_the_papers() -> None:
    config = make_config({})
    paper = ("mnist", "mlp", 20, 20, 500, 32, 0.1, "mean", "sgd")
    found = (
        config.dataset,
        config.model,
        config.workers,
        config.servers,
        config.rounds,
        config.batch_size,
        config.lr,
        config.reduction,
        config.optimizer,
    )
    assert found == paper


def test_equivalent_settings_have_the_same_identity() -> None:
    first = make_config({"rule": "trmean:b=08", "attack": "none", "lr": 1, "results": "a.sqlite"})
    second = make_config({"rule": "Trimmed_Mean: b=8", "lr": 1.0, "threads": 2, "name": "mine"})
    assert first.identity() == second.identity()
    for values in ({"seed": 1}, {"rule": "mean"}, {"attack": "gambler"}, {"rounds": 499}):
        assert make_config(values).identity() != make_config({}).identity()


def test_gambler_gets_the_number_of_servers() -> None:
    assert make_config({"attack": "gambler", "servers": 4}).attack == "gambler:servers=4"
    with pytest.raises(ConfigError, match="attack: gambler needs the number of servers"):
        make_config({"attack": "gambler:servers=20", "servers": 4})


def test_keys_may_be_spelt_with_dashes() -> None:
    assert make_config({"batch-size": 7}).batch_size == 7


def test_invalid_and_missing_files_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no configuration file .*none\.toml"):
        read_toml(tmp_path / "none.toml")
    path = tmp_path / "broken.toml"
    path.write_text("rounds = = 3")
    with pytest.raises(ConfigError, match=r"broken\.toml is no TOML: .*line 1"):
        read_toml(path)


def test_grids_are_products() -> None:
    runs = expand_grid(
        {
            "rounds": 7,
            "grid": [
                {"rule": ["mean", "phocas:b=8"], "seed": [0, 1, 2]},
                {"rule": "krum:b=6", "attack": ["gaussian:q=6", "none"]},
                {"rule": ["mean"], "seed": [2]},  # a duplicate
            ],
        },
        "grid.toml",
    )
    assert [(run.rule, run.attack, run.seed) for run in runs] == [
        ("mean", None, 0),
        ("mean", None, 1),
        ("mean", None, 2),
        ("phocas:b=8", None, 0),
        ("phocas:b=8", None, 1),
        ("phocas:b=8", None, 2),
        ("krum:b=6", "gaussian:q=6", 0),
        ("krum:b=6", None, 0),
    ]
    assert {run.rounds for run in runs} == {7}
    assert len(expand_grid({"seed": 3}, "grid.toml")) == 1


def test_one_invalid_run_rejects_the_grid() -> None:
    with pytest.raises(ConfigError, match=r"grid.toml: rule: .*b=10"):
        expand_grid({"grid": {"rule": ["mean", "phocas:b=10"]}}, "grid.toml")
    with pytest.raises(ConfigError, match=r"grid\.seed must have at least one value"):
        expand_grid({"grid": {"seed": []}}, "grid.toml")
    with pytest.raises(ConfigError, match="unknown key 'sed'; did you mean 'seed'"):
        expand_grid({"grid": {"sed": [1]}}, "grid.toml")


def test_configuration_round_trips_through_the_results_file() -> None:
    config = make_config({"optimizer_options": {"momentum": 0.9}, "attack": "gambler"})
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


def test_every_setting_is_a_key_with_its_default_and_a_line_of_help() -> None:
    fields = RunConfig.model_fields
    assert all(field.description and "\n" not in field.description for field in fields.values())
    config = make_config({})
    own = {"num_servers": 20, "rule": "phocas:b=8"}  # the paper's
    settings, values = TaskSettings(rule="mean"), config.task_settings()
    names = {declared.name for declared in dataclasses.fields(settings)}
    assert values.keys() == names - {"gradient_path"}
    for name, value in values.items():
        assert value == own.get(name, getattr(settings, name)), name
    on_ray = make_config({"engine": "ray"}).make_engine()
    for field in dataclasses.fields(RaySettings):
        assert str(getattr(on_ray, field.name)) == str(getattr(RaySettings(), field.name))
        assert ("local" in owners_of(field.name)) == hasattr(LocalSettings(), field.name)


def test_validation_imports_no_user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hostile_module.py").write_text("raise SystemExit('this ran')")
    monkeypatch.chdir(tmp_path)
    config = make_config({"model": " hostile_module:Net ", "optimizer": "hostile_module:Adam"})
    assert config.model == "hostile_module:Net"
    assert "hostile_module" not in sys.modules
    with pytest.raises(SystemExit, match="this ran"):
        build_trainer(make_config({"model": "hostile_module:Net", "dataset": "synthetic"}))
    for text in ("a b:c", "module:", ":name", "module:1", "../module:name", "module:name(1)"):
        with pytest.raises(ConfigError, match=r"my\.toml: model: unknown model"):
            make_config({"model": text}, "my.toml")
        with pytest.raises(ConfigError, match=r"my\.toml: optimizer: unknown optimizer"):
            make_config({"optimizer": text}, "my.toml")


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        ({"clients": 5}, None, "^my.toml: clients: clients must be at least num_workers, "),
        ({"clients": 5, "workers": 9}, None, "^my.toml: clients: clients must be at least workers"),
        ({"clients": 5}, ["clients"], "^--clients: --clients must be at least --num-workers, "),
        (
            {"clients": 5, "num_workers": 9},
            ["clients"],
            "^--clients: --clients must be at least num_workers, ",
        ),
        ({"clients": 5}, [], "^my.toml: clients: clients must be at least --num-workers, "),
        ({"workers": 0}, ["workers"], "^--num-workers: a run needs --num-workers >= 1: got"),
        (
            {"local_steps": 2, "worker_momentum": 0.5},
            ["local_steps", "worker_momentum"],
            "with --local-steps set the momentum in --set optimizer_options$",
        ),
        ({"workers": 5, "num_workers": 5}, None, "my.toml: workers and num_workers are the same"),
        ({"deadline": 5.0}, ["deadline"], "set --engine to ray too"),
        ({"max_staleness": 5}, ["max_staleness"], "has no effect without --asynchronous"),
        ({"virtual_deadline": 5.0}, None, "needs a virtual clock: set speeds too"),
        ({"engine": "ray", "faults": ["die:round=1,worker=99"]}, None, "^my.toml: faults: "),
        ({"asynchronous": "buffers=15", "attack": "straggler:q=3"}, None, "set speeds instead"),
    ],
)
def test_an_error_names_settings_as_the_user_wrote_them(
    values: dict[str, Any], options: list[str] | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(values, "my.toml", options)


def test_settings_of_a_grid_follow_one_another() -> None:
    grid = {
        "rule": ["phocas:b={b}", "krum:b={b}"],
        "attack": "gaussian:q={q}",
        "q": [2, 4],
        "b": ["q", "q + 2", "2*q-1"],
        "name": "run {seed}",
        "seed": [7],
        "num_workers": [20],
        "clients": "num_workers",
    }
    runs = expand_grid({"grid": grid}, "grid.toml")
    assert len(runs) == 12
    assert {(run.rule, run.attack) for run in runs if run.rule.startswith("krum")} == {
        (f"krum:b={b}", f"gaussian:q={q}") for q in (2, 4) for b in (q, q + 2, 2 * q - 1)
    }
    assert {run.name for run in runs} == {"run 7"}
    assert {run.clients for run in runs} == {20}


@pytest.mark.parametrize(
    ("grid", "words"),
    [
        ({"b": "q", "q": "b", "rule": "phocas:b={b}"}, "grid.b depends on itself: b -> q"),
        ({"rule": "phocas:b={c}", "q": [1]}, "unknown key in braces 'c'"),
        ({"rule": "phocas:b={b}", "b": "split+1", "split": "iid"}, "needs a number split"),
        ({"q": [1, 2]}, "unknown key 'q'.* keys: rule"),
    ],
)
def test_mistakes_in_tied_settings_are_one_line(grid: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        expand_grid({"grid": grid}, "grid.toml")
