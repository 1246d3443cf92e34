"""The paper's experiments as data, run end to end on a small problem, interrupted and resumed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Protocol

import pytest

from phocas.cli import main
from phocas.experiments.config import ConfigError
from phocas.experiments.reproduction.outcomes import collect, read_outcomes
from phocas.experiments.reproduction.tasks import byzantine_workers, plan, tasks
from phocas.experiments.results import Results
from phocas.experiments.runner import execute

TASK = """
title = "softmax on made-up images"
metric = "top1"
figures = ["{figure}"]
[settings]
dataset = "synthetic:train=400,test=100,side=8"
model = "{model}"
rounds = {rounds}
batch_size = 4
evaluate_every = 10
on_nonfinite = "apply"
"""

OWN_FIGURE = """
title = "Two rules"
axis = "rounds"
[[grid]]
rule = ["median", "phocas:b=6"]
attack = "gaussian:q=6"
"""


def task_file(
    folder: Path, *, model: str = "softmax", rounds: int = 20, figure: str = "gaussian"
) -> Path:
    path = folder / "tiny.toml"
    path.write_text(TASK.format(model=model, rounds=rounds, figure=figure))
    (folder / "own.toml").write_text(OWN_FIGURE)
    return path


def command(task: Path, *words: str) -> list[str]:
    processes = [] if "--judge" in words else ["--processes", "1"]
    return ["phocas", "reproduce", str(task), "--repeats", "2", *processes, *words]


class Reproduce(Protocol):
    def __call__(self, task: Path, *words: str) -> subprocess.CompletedProcess[str]: ...


@pytest.fixture
def reproduce(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Reproduce:
    """Run a command in this process, in the folder of its task."""

    def run(task: Path, *words: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.chdir(task.parent)
        monkeypatch.setattr(sys, "argv", command(task, *words))
        with pytest.raises(SystemExit) as ended:
            main()
        status = ended.value.code or 0
        assert isinstance(status, int)
        return subprocess.CompletedProcess(sys.argv, status, *capsys.readouterr())

    return run


def test_settings_are_those_of_the_papers_table_1() -> None:
    choosing = ["choosing", "choosing-cifar10", "choosing-momentum"]
    own = [*choosing, "cifar10", "complexity", "heraclius", "mnist", "rare"]
    assert tasks() == ["bucketing", "byzfl", *own]
    expected = {
        "mnist": ("mnist", "mlp", 0.1, 500, 32, "top1"),
        "cifar10": ("cifar10", "cnn", 5e-4, 4000, 128, "top3"),
    }
    for task, (dataset, model, lr, rounds, batch, metric) in expected.items():
        reproduction = plan(task, repeats=1)
        assert reproduction.metric == metric
        for config in reproduction.runs():
            assert (config.dataset, config.rounds) == (dataset, rounds)
            assert config.model in {model, f"{model}:init=torch"}
            assert (config.workers, config.servers) == (20, 20)
            assert config.on_nonfinite == "apply" or "skipped" in (config.name or "")
            # gamma = 0.1 x batchsize / 32, for every batch size
            assert config.lr == pytest.approx(lr * config.batch_size / batch, rel=1e-12)


def test_attacks_and_b_are_the_papers() -> None:
    figures = {figure.name: figure for figure in plan("mnist", repeats=1).figures}
    attacks = {
        "none": (None, 6),
        "gaussian": ("gaussian:q=6", 6),
        "omniscient": ("omniscient:q=6", 6),
        "bit-flip": ("bit-flip", 8),
        "gambler": ("gambler", 8),
    }
    for name, (attack, b) in attacks.items():
        cases = {case.label: case for case in figures[name].cases}
        assert set(cases) >= {"Mean", "Krum", "Multi-Krum", "Trmean", "Phocas"}
        for label, case in cases.items():
            if label == "Mean without Byzantine":
                assert case.config.attack is None
            else:
                assert case.config.attack == attack
            assert case.b == (None if label.startswith("Mean") else b)
    assert {(case.label, case.b) for case in figures["krum-q"].cases[1:]} == {
        (label, b) for label in ("Krum", "Multi-Krum") for b in range(1, 9)
    }
    assert figures["krum-q"].value == "final"
    assert figures["gambler-b"].value == "best"


def test_task_like_another_overrides_its_keys() -> None:
    ours, paper = plan("heraclius", repeats=1), plan("mnist", repeats=1)
    assert (ours.claims, paper.claims) == ("heraclius", "paper")
    assert ours.title != paper.title
    figures = {figure.name: figure for figure in paper.figures}
    assert [figure.name for figure in ours.figures] == [
        "none", "gaussian", "omniscient", "bit-flip", "gambler"
    ]  # fmt: skip
    for figure in ours.figures:
        theirs = figures[figure.name]
        assert (figure.title, figure.zoom) == (theirs.title, theirs.zoom)
        first, *others = figure.cases
        assert first == theirs.cases[0]  # the mean without failures
        assert [case.config.rule for case in others] == [
            "trimmed-mean:b=8", "phocas:b=8", "heraclius:b=8"
        ]  # fmt: skip
        for case in others:
            same = {"rule": theirs.cases[-1].config.rule, "name": theirs.cases[-1].config.name}
            assert case.config.model_copy(update=same) == theirs.cases[-1].config
            byzantine = 6 if figure.name in ("gaussian", "omniscient") else 0
            assert byzantine_workers(case.config) == range(byzantine)


def test_task_rules_do_not_replace_those_of_a_figure_over_b(tmp_path: Path) -> None:
    task = task_file(tmp_path, figure="krum-q")
    plain = plan(str(task)).figures
    task.write_text('rules = ["median"]\n' + task.read_text())
    assert plan(str(task)).figures == plain


def test_resampled_byzantine_workers_are_not_fixed_workers(tmp_path: Path) -> None:
    own = OWN_FIGURE.replace("gaussian:q=6", "gaussian:q=6,who=resampled")
    task = task_file(tmp_path, figure="own")
    (tmp_path / "own.toml").write_text(own)
    assert {len(byzantine_workers(case.config)) for case in plan(str(task)).figures[0].cases} == {0}


def test_repeats_differ_in_seed_and_first_repeats_come_first() -> None:
    one, three = plan("mnist", repeats=1).runs(), plan("mnist", repeats=3).runs()
    assert [config.identity() for config in three[: len(one)]] == [c.identity() for c in one]
    assert [config.seed for config in three] == sorted(config.seed for config in three)
    assert len(three) == 3 * len(one) == len({config.identity() for config in three})
    assert 80 <= len(one) <= 100


def test_small_scales_are_smaller() -> None:
    for task in ("cifar10", "mnist"):
        small, paper = plan(task, scale="small", repeats=1), plan(task, repeats=1)
        assert len(small.runs()) < len(paper.runs())
        assert small.runs()[0].rounds < paper.runs()[0].rounds
        assert small.runs()[0].model.partition(":")[0] == paper.runs()[0].model
    assert plan("cifar10").repeats == 10
    assert plan("cifar10", scale="small").repeats == 3
    assert plan("cifar10", scale="small", repeats=7).repeats == 7
    names = [config.name for config in plan("mnist", repeats=1).runs()]
    assert len(set(names)) == len(names)
    runs = plan("cifar10", scale="small", repeats=1).runs()
    assert {c.lr * c.batch_size for c in runs if c.reduction == "sum"} == {5e-4 * 128}
    assert {c.lr for c in runs if c.reduction == "mean"} == {5e-4}


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ({"task": "mnits"}, "unknown task 'mnits'; did you mean 'mnist'"),
        ({"task": "nowhere.toml"}, "there is no configuration file nowhere.toml"),
        ({"task": "like.toml"}, "unknown task 'mnits'; did you mean 'mnist'"),
        ({"task": "mnist", "scale": "smal"}, "unknown scale 'smal'; did you mean 'small'"),
        ({"task": "mnist", "only": ["gausian"]}, "unknown figure 'gausian'; did you mean 'gauss"),
    ],
)
def test_unknown_names_are_rejected_with_the_known_ones(
    words: dict[str, str], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("like.toml").write_text('like = "mnits"')
    with pytest.raises(ConfigError) as error:
        plan(**words)  # type: ignore[arg-type]
    assert complaint in str(error.value)


def test_invalid_task_is_rejected_with_its_keys(tmp_path: Path) -> None:
    path = task_file(tmp_path)
    path.write_text(path.read_text().replace("metric", "metrik"))
    with pytest.raises(ConfigError, match=r"tiny\.toml: metric: Field required"):
        plan(str(path))
    path = task_file(tmp_path)
    path.write_text(path.read_text().replace("rounds = 20", "rounds = 20\nworkers = 12"))
    with pytest.raises(ConfigError, match=r"gaussian\.toml: .*b"):  # krum:b=6 of 12
        plan(str(path))


def test_task_runs_from_file_to_figures_and_claims(tmp_path: Path, reproduce: Reproduce) -> None:
    task = task_file(tmp_path)
    ended = reproduce(task)
    assert ended.returncode == 0, ended.stderr
    assert "[12/12]" in ended.stderr
    assert "left" in ended.stderr  # the remaining time
    folder = tmp_path / "phocas-tiny-paper"
    text = (folder / "claims.md").read_text()
    assert "Made by `phocas reproduce " in text
    assert "| Mean does not survive the Gaussian attack. |" in text
    assert "no complete run of figure" in text  # for figures that this task lacks
    assert (folder / "gaussian.png").read_bytes().startswith(b"\x89PNG")
    assert "2 repeats;" in (folder / "gaussian.svg").read_text()

    with Results(folder / "results.sqlite") as results:
        before = results.runs()
    planned = plan(str(task), repeats=2)
    outcomes = collect(planned, read_outcomes(folder / "results.sqlite", planned.runs()))
    phocas = outcomes.get("gaussian", "Phocas")
    by_seed = {record.seed: record for record in before if record.rule == "phocas:b=6"}
    assert phocas.seeds == (0, 1)
    assert phocas.final.tolist() == [by_seed[seed].final_accuracy for seed in (0, 1)]
    assert phocas.best.tolist() == [by_seed[seed].best_accuracy for seed in (0, 1)]
    assert phocas.rounds == (0, 10, 20)
    # With b = 6, exactly the six Byzantine workers are dropped.
    assert phocas.dropped_of_byzantine.tolist() == pytest.approx([1.0, 1.0], abs=0.01)
    assert phocas.dropped_of_honest.tolist() == pytest.approx([0.0, 0.0], abs=0.01)

    again = reproduce(task)
    assert again.returncode == 0
    assert "12 of 12 runs are complete already" in again.stderr
    with Results(folder / "results.sqlite") as results:
        assert results.runs() == before
    assert (folder / "claims.md").read_text() == text


def test_failed_repeat_is_reported_and_omitted_from_the_figure(
    tmp_path: Path, reproduce: Reproduce
) -> None:
    (tmp_path / "deadly.py").write_text(
        """
import os, signal
import torch
def model(input_shape, num_classes):
    if torch.initial_seed() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, num_classes))
"""
    )
    task = task_file(tmp_path, model="deadly:model", figure="own")
    ended = reproduce(task, "--figure", "own")
    assert ended.returncode == 1
    assert "failed: own: Phocas, seed 1: its process ended with status -9" in ended.stderr, (
        ended.stderr
    )
    folder = tmp_path / "phocas-tiny-paper"
    assert "1 of 2 repeats: some are missing" in (folder / "own.svg").read_text()
    assert "Phocas (1 of 2 repeats)" in (folder / "own.svg").read_text()
    text = (folder / "claims.md").read_text()
    assert "failed and left out: own: Phocas, seed 1: its process ended" in text
    assert "| 1 of 2 |" in text


# A process of a sweep imports this file under another name, before its own code runs.
TOLD_EARLY = """
import os, signal, sys
if __name__ == "__mp_main__":
    os.killpg(0, signal.{signal})  # as timeout(1), service managers and terminals do
else:
    sys.argv[0] = "phocas"
    from phocas.cli import main
    main()
"""


@pytest.mark.parametrize("name", ["SIGTERM", pytest.param("SIGINT", marks=pytest.mark.slow)])
def test_signal_to_the_group_while_a_process_starts_loses_nothing(
    tmp_path: Path, reproduce: Reproduce, name: str
) -> None:
    task = task_file(tmp_path, figure="own")
    (tmp_path / "program.py").write_text(TOLD_EARLY.format(signal=name))
    ended = subprocess.run(
        [sys.executable, "program.py", *command(task)[1:]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        start_new_session=True,
    )
    assert ended.returncode == 130, ended.stderr
    assert "the same command resumes" in ended.stderr
    assert "failed" not in ended.stderr
    assert not (tmp_path / "phocas-tiny-paper" / "claims.md").exists()
    ended = reproduce(task)
    assert ended.returncode == 0, ended.stderr
    with Results(tmp_path / "phocas-tiny-paper" / "results.sqlite") as results:
        records = results.runs()
    assert [record.status for record in records] == ["complete"] * 4
    assert len({record.identity for record in records}) == 4


def test_dry_run_lists_the_runs(tmp_path: Path, reproduce: Reproduce) -> None:
    ended = reproduce(task_file(tmp_path), "--dry-run")
    lines = ended.stdout.splitlines()
    assert lines[0] == "gaussian: Mean without Byzantine"
    assert len(lines) == 7
    assert lines[-1].startswith("12 runs, 2 of each, into")
    assert not (tmp_path / "phocas-tiny-paper").exists()


def test_scale_may_be_a_part_of_the_name(reproduce: Reproduce) -> None:
    joined = reproduce(Path("cifar10-medium"), "--dry-run")
    assert joined.stdout == reproduce(Path("cifar10"), "--scale", "medium", "--dry-run").stdout
    assert joined.stdout.splitlines()[-1].endswith("into phocas-cifar10-medium/results.sqlite")
    twice = reproduce(Path("cifar10-medium"), "--scale", "small", "--dry-run")
    assert twice.returncode == 2
    assert "--scale has no effect with cifar10-medium, which has a scale" in twice.stderr
    unknown = reproduce(Path("cifar10-large"), "--dry-run")
    assert "unknown task 'cifar10-large'; did you mean 'cifar10'" in unknown.stderr


def test_missing_results_are_reported_in_one_line(tmp_path: Path, reproduce: Reproduce) -> None:
    ended = reproduce(task_file(tmp_path), "--judge")
    assert ended.returncode == 2
    assert ended.stderr.startswith("phocas: there is nothing to judge: phocas-tiny-paper has no")
    assert len(ended.stderr.splitlines()) == 1


def test_curve_of_a_stopped_run_is_extended(tmp_path: Path) -> None:
    task = task_file(tmp_path, model="mlp:hidden=16", figure="omniscient")
    task.write_text(task.read_text().replace('"apply"', '"stop"'))
    places = {"results": str(tmp_path / "results.sqlite")}
    reproduction = plan(str(task), repeats=1, places=places)
    lost, kept = (
        next(case for case in reproduction.figures[0].cases if case.label == label)
        for label in ("Mean", "Phocas")
    )
    assert execute(lost.config).status == "stopped"
    assert execute(kept.config).status == "complete"
    outcomes = collect(
        reproduction, read_outcomes(tmp_path / "results.sqlite", reproduction.runs())
    )
    stopped, complete = outcomes.get("omniscient", "Mean"), outcomes.get("omniscient", "Phocas")
    assert stopped.rounds == complete.rounds == (0, 10, 20)
    assert stopped.accuracy.shape == complete.accuracy.shape == (1, 3)
    assert stopped.accuracy[0, 1] == stopped.accuracy[0, 2]


def test_initial_weights_vary_only_for_models_with_init(tmp_path: Path) -> None:
    def models(model: str) -> set[str]:
        task = task_file(tmp_path, model=model, figure="choices")
        return {config.model for config in plan(str(task), repeats=1).runs()}

    assert models("softmax") == {"softmax", "softmax:init=torch"}
    assert models("mlp:hidden=8") == {"mlp:hidden=8", "mlp:hidden=8,init=torch"}
    assert models("mlp:init=torch") == {"mlp:init=torch"}
    assert models("torch.nn:Identity") == {"torch.nn:Identity"}
