"""A benchmark chooses settings on validation data, by the worst attack."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phocas.cli import main
from phocas.experiments.attack_benchmark import Cell, judge_cell, plan_benchmark
from phocas.experiments.config import ConfigError, make_config

LISTS: dict[str, Any] = {
    "honest": 6,
    "byzantine": [1, 2],
    "rules": ["mean", "trimmed-mean:b={f}"],
    "attacks": ["sign-flip:q={f}", "optimal-alie:q={f},evaluations=3"],
    "splits": ["gamma-similarity:gamma=0", "iid"],
}
COMMON: dict[str, Any] = {"dataset": "synthetic:train=120,test=40", "model": "softmax"}


def file(common: dict[str, Any] | None = None, **lists: Any) -> dict[str, Any]:
    return {**COMMON, **(common or {}), "benchmark": {**LISTS, **lists}}


def test_every_combination_is_a_run_with_its_own_number_of_workers() -> None:
    plan = plan_benchmark(file(seeds=[0, 7]), "my.toml")
    assert [(cell.rule, cell.split, cell.byzantine) for cell in plan.cells][:3] == [
        ("mean", "gamma-similarity:gamma=0", 1),
        ("mean", "gamma-similarity:gamma=0", 2),
        ("mean", "iid", 1),
    ]
    assert len(plan.cells) == 8
    configs = plan.configs()
    assert len(configs) == 8 * 2 * 2
    assert {config.seed for config in configs[:16]} == {0}, "first seeds first"
    for config in configs:
        assert config.attack is not None
        f = config.workers - 6
        assert f"q={f}" in config.attack
        assert config.rule in ("mean", f"trimmed-mean:b={f}")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (COMMON, r"my.toml has no \[benchmark\]"),
        (file(attacks=[]), "benchmark.attacks needs at least one value: got an empty list"),
        (file(attacks=["none"]), "benchmark.attacks needs at least one attack: got none"),
        (file(rules=[]), "benchmark.rules needs at least one value"),
        (file(byzantine=[-1]), "benchmark.byzantine needs numbers >= 0: got -1"),
        (file(rules=["krum:b={f}"], byzantine=[5]), "f = 5: rule: .*the largest b is 4"),
        (file(rules=["trimmd-mean:b={f}"]), "did you mean 'trimmed-mean'"),
        (file(attacks=["fang:q={f},target=krum"], byzantine=[4]), "f = 4: attack: .*2q \\+ 2 < m"),
        (file(splits=["gamma-similarity:gamma=2"]), "split: .*0 <= gamma <= 1"),
        (file(choose={"lr": [0.1, 0.2]}), "choose needs validation samples"),
        (file(choose={"lr": []}), "benchmark.choose.lr needs at least one value"),
        (file({"validation": 0.2, "lr": 1.0}, choose={"lr": [0.1]}), "is set elsewhere"),
        (file({"validation": 1.5}), "validation: .*less than 1"),
        (file({"num_workers": 9}), "benchmark.honest and num_workers are two ways"),
        (file({"attack": "sign-flip:q=1"}), "attack has its list in benchmark.attacks"),
        (file(rounds=[3]), "benchmark.rounds: extra inputs"),
    ],
)
def test_a_benchmark_that_cannot_run_is_rejected_in_one_line(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        plan_benchmark(values, "my.toml")
    assert "\n" not in str(raised.value)


def test_settings_are_chosen_by_the_worst_attack_on_validation_data() -> None:
    """Choice A is best on average and on the test set; B has the better worst case."""
    validation = {"A": {"x": [0.9, 0.9], "y": [0.2, 0.4]}, "B": {"x": [0.6, 0.6], "y": [0.5, 0.5]}}
    test = {"A": {"x": [0.95, 0.95], "y": [0.9, 0.9]}, "B": {"x": [0.4, 0.6], "y": [0.7, 0.7]}}
    runs: dict[str, dict[str, list[Any]]] = {}
    records: dict[str, Any] = {}
    for index, choice in enumerate(validation):
        for attack in ("x", "y"):
            for seed in (0, 1):
                config = make_config(
                    {"lr": 0.1 + index, "name": attack, "seed": seed, "validation": 0.1}
                    | {"batch_size": 7 if attack == "x" else 8}
                )
                runs.setdefault(choice, {}).setdefault(attack, []).append(config)
                records[config.identity()] = SimpleNamespace(
                    status="complete",
                    final_accuracy=validation[choice][attack][seed],
                    test_accuracy=test[choice][attack][seed],
                )
    cell = Cell("mean", "iid", 1, runs)
    found = judge_cell(cell, records)
    assert found is not None
    assert (found.choice, found.worst, found.validation) == ("B", "x", 0.5)
    assert (found.accuracy.mean, found.accuracy.seeds) == (0.5, 2)
    assert found.by_attack["y"].mean == 0.7
    records.popitem()
    assert judge_cell(cell, records) is None


def test_benchmark_command_resumes_and_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    content = """
        dataset = "synthetic:train=120,test=40"
        model = "softmax"
        rounds = 2
        validation = 0.2
        [benchmark]
        honest = 4
        byzantine = [1]
        rules = ["mean", "median"]
        attacks = ["sign-flip:q={f}"]
        splits = ["iid"]
        [benchmark.choose]
        lr = [0.1, 0.5]
    """
    Path("my.toml").write_text("\n".join(line.strip() for line in content.splitlines()))

    def run(*words: str, status: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["phocas", "benchmark", "my.toml", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        output = capsys.readouterr()
        assert (ended.value.code or 0) == status, output.err
        return output.out + output.err * (status != 0)

    assert "4 runs into phocas.sqlite, 4 of them to be run" in run("--dry-run")
    table = run("--processes", "1", "--output", "heat.png")
    assert table.count("sign-flip") == 2
    assert Path("heat.png").read_bytes().startswith(b"\x89PNG")
    assert "4 runs into phocas.sqlite, 0 of them to be run" in run("--dry-run")
    cells = json.loads(run("--json"))
    assert [cell["rule"] for cell in cells] == ["mean", "median"]
    assert {cell["choice"] for cell in cells} <= {"lr 0.1", "lr 0.5"}
    assert all(cell["accuracy"]["seeds"] == 1 for cell in cells)
    assert "is written as .png or .svg" in run("--output", "heat.pdf", status=2)
