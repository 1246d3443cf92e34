"""The study of rare features, run end to end on a small vocabulary, interrupted and resumed."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from phocas.cli import main
from phocas.experiments.config import ConfigError
from phocas.experiments.reproduction.rare.model import WIDTH
from phocas.experiments.reproduction.rare.simulation import (
    FAULTS,
    HONEST,
    WRONG_ROW,
    SimulationSettings,
    build,
    draw,
    frequencies,
    simulate,
    strike,
    train,
)
from phocas.experiments.reproduction.rare.study import StudyResults, plan_study, run_all

STUDY = """
title = "Small"
[settings]
vocabulary = 64
tokens = 16
steps = {steps}
[rates]
adamw = 0.03
sgd = 3.0
[[parts]]
name = "first"
title = "few tokens"
[[parts.grid]]
rule = ["mean", "{rule}"]
fault = ["none", "{fault}"]
[[parts.grid]]
rule = "trimmed-mean:b=1"
momentum = 0.9
[[parts]]
name = "second"
title = "SGD"
settings = {{ optimizer = "sgd", tied = true, experts = 2 }}
[[parts.grid]]
rule = ["mean", "median"]
"""
CODE = "import sys; sys.argv[0] = 'phocas'; from phocas.cli import main; main()"


def study_file(folder: Path, *, steps: int = 12, rule: str = "median", fault: str = "nan") -> Path:
    path = folder / "small.toml"
    path.write_text(STUDY.format(steps=steps, rule=rule, fault=fault))
    return path


def command(study: Path, *words: str) -> list[str]:
    return [sys.executable, "-c", CODE, "reproduce", str(study), *words]


def results_of(study: Path) -> StudyResults:
    return StudyResults(study.parent / "phocas-small-paper" / "results.jsonl")


@pytest.mark.parametrize(("tied", "experts"), [(False, 0), (True, 2)])
def test_honest_mean_equals_plain_training_on_the_union_of_batches(
    tied: bool, experts: int
) -> None:
    torch.set_num_threads(1)  # two threads on a busy machine take many times as long
    setting = SimulationSettings(
        lr=0.01, vocabulary=64, tokens=32, steps=20, tied=tied, experts=experts
    )
    with torch.no_grad():
        trained = train(setting)
    assert trained is not None

    model = build(setting)
    flat = torch.nn.Parameter(model.parameters.clone())
    optimizer = torch.optim.AdamW([flat], lr=0.01)
    for step in range(20):
        tokens, shares = draw(setting, step)
        counts = (shares.sum(0) * 32).round().long()
        batch = tokens.repeat_interleave(counts)
        assert len(batch) == 4 * 32
        views = model.split(flat)
        hidden = functional.embedding(batch, views["embedding"])
        if experts:
            share, chosen = (hidden @ views["router"].T).softmax(1).max(1)
            inner = (views["up"][chosen] @ hidden[:, :, None]).relu()
            hidden = hidden + share[:, None] * (views["down"][chosen] @ inner)[:, :, 0]
        if tied:
            hidden = hidden @ views["middle"].T
        logits = hidden @ views["embedding" if tied else "head"].T
        loss = functional.cross_entropy(logits, model.targets[batch])
        (flat.grad,) = torch.autograd.grad(loss, flat)
        optimizer.step()
    ended = flat.detach()
    moved = (ended - model.parameters).norm()
    assert float((ended - trained.parameters).norm()) < 1e-3 * float(moved)


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_strikes_the_last_rank_alone(fault: str) -> None:
    setting = SimulationSettings(lr=0.1, vocabulary=64, fault=fault)
    clean = torch.randn(4, 2 * 64 * WIDTH, generator=torch.Generator().manual_seed(0))
    rows = clean.clone()
    strike(setting, rows, step=3)
    assert torch.equal(rows[:-1], clean[:-1])
    sent = rows[-1]
    if fault == HONEST:
        assert torch.equal(sent, clean[-1])
    elif fault == "nan":
        assert sent.isnan().all()
    elif fault == "1e20":
        assert (sent == 1e20).all()
    elif fault == "sign-flip":
        assert torch.equal(sent, -10 * clean[-1])
    elif fault == "gaussian":
        assert 0.9 < float(sent.std()) < 1.1
        assert abs(float((sent * clean[-1]).mean())) < 0.1
    elif fault == "wrong-row":
        wrong = (sent != clean[-1]).nonzero()[:, 0]
        assert wrong.tolist() == [*range(WRONG_ROW * WIDTH, (WRONG_ROW + 1) * WIDTH)]
        assert (sent[wrong] == 1e3).all()
    else:
        others = clean[:-1]
        expected = others.mean(0) - others.std(0, correction=0)
        torch.testing.assert_close(sent, expected)


def test_worker_momentum_is_the_running_mean_that_ranks_send() -> None:
    setting = SimulationSettings(
        lr=1.0, optimizer="sgd", vocabulary=32, tokens=8, steps=1, momentum=0.9
    )
    with torch.no_grad():
        plain, slow = train(setting.model_copy(update={"momentum": 0.0})), train(setting)
    assert plain is not None
    assert slow is not None
    start = build(setting).parameters
    torch.testing.assert_close(
        slow.parameters - start, 0.1 * (plain.parameters - start), rtol=1e-3, atol=1e-6
    )


def test_lost_model_gives_nan_for_every_range() -> None:
    losses = simulate(SimulationSettings(lr=0.1, vocabulary=32, tokens=8, steps=30, fault="nan"))
    assert losses is not None
    assert all(math.isnan(loss) for loss in losses)


def test_total_loss_is_that_of_a_token_drawn_by_frequency(tmp_path: Path) -> None:
    study = plan_study(str(study_file(tmp_path)))
    case = study.parts[0].cases[0]
    model = build(case.setting)
    with torch.no_grad():
        expected = float(np.dot(model.losses().double().numpy(), frequencies(64)))
    results = StudyResults(tmp_path / "results.jsonl")
    untrained = simulate(case.setting.model_copy(update={"lr": 1e-30}))
    assert untrained is not None
    results.add(case.setting, untrained)
    found = results.losses(case, 1)
    assert found is not None
    assert found.total == pytest.approx(expected, rel=1e-3)
    assert list(found.bins) == [(0, 32), (32, 64)]


def test_command_prints_draws_and_resumes_to_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    study = study_file(tmp_path)

    def reproduce(*words: str) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["phocas", "reproduce", str(study), *words])
        with pytest.raises(SystemExit) as ended:
            main()
        output, errors = capsys.readouterr()
        assert not ended.value.code, errors
        return output, errors

    printed, _ = reproduce("--figure", "first", "--processes", "1")
    assert "few tokens" in printed
    assert "SGD" not in printed
    *tables, where = printed.splitlines()
    assert max(map(len, tables)) <= 80
    assert where.startswith("figures and results.md in ")
    first = results_of(study).found
    _, told = reproduce("--processes", "2")
    assert f"{len(first)} of 7 runs are complete already" in told
    resumed = results_of(study)
    assert len(resumed.found) == 7
    for setting, losses in resumed.found.items():
        again = simulate(setting)
        assert again is not None
        np.testing.assert_allclose(losses, again, rtol=1e-3)
    folder = tmp_path / "phocas-small-paper"
    assert {path.name for path in folder.iterdir()} == {
        "first.png", "second.png", "parts.png", "first.svg", "second.svg", "parts.svg",
        "results.md", "results.jsonl",
    }  # fmt: skip
    text = (folder / "results.md").read_text()
    assert "7 of 7 runs are complete" in text
    assert "| nan | Mean (`mean`) | NaN |" in text


def test_interrupted_study_keeps_finished_runs_and_resumes(tmp_path: Path) -> None:
    # The lost model of the mean under NaN ends at once; the other runs would take hours.
    study = study_file(tmp_path, steps=1_000_000)
    with subprocess.Popen(
        command(study, "--figure", "first", "--processes", "2"),
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as running:
        assert running.stderr is not None
        for line in running.stderr:
            if "complete" in line:
                os.killpg(running.pid, signal.SIGINT)
                break
        rest = running.stderr.read()
    assert running.returncode == 130, rest
    assert "the same command resumes" in rest
    assert [setting.fault for setting in results_of(study).found] == ["nan"]


def test_processes_end_with_a_killed_command(tmp_path: Path) -> None:
    study = study_file(tmp_path, steps=1_000_000)
    with subprocess.Popen(
        command(study, "--figure", "first", "--processes", "2"),
        cwd=tmp_path,
        stdout=subprocess.PIPE,  # its end is seen when no process holds the other end
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stderr is not None
        assert running.stdout is not None
        for line in running.stderr:
            if "complete" in line:
                running.kill()
                break
        assert running.stdout.read() == ""


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"rule": "medain"}, "part first: unknown rule 'medain'; did you mean 'median'?"),
        ({"rule": "krum:b=1"}, "part first: Krum needs 2b + 2 < m"),
        ({"fault": "nana"}, "part first: fault: unknown fault 'nana'; did you mean 'nan'?"),
        ({"steps": 0}, "part first: steps: Input should be greater than or equal to 1"),
    ],
)
def test_bad_study_is_rejected_with_one_line(
    tmp_path: Path, change: dict[str, object], line: str
) -> None:
    with pytest.raises(ConfigError) as error:
        plan_study(str(study_file(tmp_path, **change)))  # type: ignore[arg-type]
    assert line in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_unknown_part_and_scale_are_rejected() -> None:
    with pytest.raises(ConfigError, match="unknown figure 'bas'; did you mean 'base'"):
        plan_study("rare", only=["bas"])
    with pytest.raises(ConfigError, match="unknown scale 'large'"):
        plan_study("rare", scale="large")


@pytest.mark.parametrize(
    "damage",
    [
        b'{"lr": 0.03, "rule": "median", "version"',
        b"\xff\x00",
        b"[]",
        b'{"lr": 0.03, "version": 2, "losses": [1.0]}',
        b'{"lr": "fast", "version": 2, "losses": []}',
        b'{"rule": "cube", "lr": 0.03, "version": 2, "losses": []}',
    ],
)
def test_damaged_results_are_rejected_with_the_line(tmp_path: Path, damage: bytes) -> None:
    study = study_file(tmp_path)
    file = tmp_path / "results.jsonl"
    results = StudyResults(file)
    case = plan_study(str(study)).parts[0].cases[0]
    results.add(case.setting, [1.0] * 7)
    assert StudyResults(file).found == results.found
    file.write_bytes(file.read_bytes() + damage + b"\n")
    with pytest.raises(ValueError, match=f"{file}, line 2 is no result") as error:
        StudyResults(file)
    assert len(str(error.value).splitlines()) == 1


def test_command_rejects_what_it_cannot_use_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    study = study_file(tmp_path)
    file = tmp_path / "results.jsonl"
    file.write_text("nothing\n")
    for words, line in (
        (["--results", str(file)], f"{file}, line 1 is no result"),
        (["--data-dir", "x"], "--data-dir has no effect with a study of rare features"),
        (["--figure", "frist"], "unknown figure 'frist'; did you mean 'first'?"),
    ):
        monkeypatch.setattr(sys, "argv", ["phocas", "reproduce", str(study), *words])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        told = capsys.readouterr().err
        assert told.startswith(f"phocas: {line}")
        assert len(told.splitlines()) == 1


def test_results_of_another_version_run_again(tmp_path: Path) -> None:
    study = plan_study(str(study_file(tmp_path)))
    file = tmp_path / "results.jsonl"
    results = StudyResults(file)
    for setting in study.runs():
        results.add(setting, [1.0] * 7)
    assert not StudyResults(file).missing(study.runs())
    lines = [{**json.loads(line), "version": -1} for line in file.read_text().splitlines()]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert StudyResults(file).missing(study.runs()) == study.runs()


@pytest.mark.slow
def test_coordinate_wise_trimming_loses_rare_tokens_and_the_mean_does_not(tmp_path: Path) -> None:
    """Run three cells of the published table."""
    study = plan_study("rare", only=["base"])
    part = study.parts[0]
    wanted = {"mean", "trimmed-mean:b=1", "nnm:b=1|trimmed-mean:b=1"}
    cases = [
        case
        for case in part.cases
        if case.setting.fault == HONEST
        and case.setting.rule in wanted
        and not case.setting.momentum
    ]
    results = StudyResults(tmp_path / "results.jsonl")
    run_all([case.setting for case in cases], results)
    mean, trimmed, mixed = (results.losses(case, 1) for case in cases)
    assert mean is not None
    assert trimmed is not None
    assert mixed is not None
    assert mean.total < 0.001
    assert trimmed.total > 0.5
    assert trimmed.bins[0, 32] < 0.01  # frequent tokens are learned
    assert trimmed.bins[1024, 2048] > 5
    assert mixed.total < 1.5 * mean.total
