"""The training loop: what it learns, what it does not depend on, and what it rejects."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from phocas.attacks import parse_attack
from phocas.data import ByLabel, Dataset, batch_indices, load, parse_split
from phocas.experiments.results import Results, latest
from phocas.experiments.runner import final_model
from phocas.rules import parse_rule
from phocas.training import ParameterServer, Trainer
from phocas.training.models import build_model
from phocas.training.samples import Samples
from phocas.training.schedules import Cosine, Step


@pytest.fixture(scope="module")
def data() -> Dataset:
    made: Dataset = load("synthetic:train=400,test=120,side=8,noise=20")
    return made


def make(data: Dataset, **options: Any) -> Trainer:
    model = build_model(options.pop("model", "mlp:hidden=16"), data.shape, 10, seed=3)
    settings: dict[str, Any] = {
        "num_workers": 10,
        "batch_size": 16,
        "rule": "phocas:b=3",
        "lr": 1.0,
    }
    return Trainer(model, functional.cross_entropy, data, **{**settings, **options})


def train(data: Dataset, rounds: int, **options: Any) -> np.ndarray:
    with make(data, **options) as trainer:
        for _ in trainer.rounds(rounds):
            pass
        return trainer.server.vector.numpy().view(np.uint32).copy()


def top1(trainer: Trainer) -> float:
    found = trainer.evaluate().top1
    assert found is not None
    return found


def slow_twin(
    data: Dataset, rounds: int, lr: float, *, momentum: float = 0.0, form: str = "average"
) -> torch.Tensor:
    """Compute plain SGD: a loop over workers, autograd, and the mean of the gradients."""
    model = build_model("mlp:hidden=16", data.shape, 10, seed=3)
    velocity = [[torch.zeros_like(p) for p in model.parameters()] for _ in range(10)]
    everything = parse_split("iid").assign(data.train_labels, 10, np.random.default_rng(0))
    for t in range(rounds):
        for i, batch in enumerate(batch_indices(everything, 10, 16, seed=0, round=t)):
            inputs = torch.from_numpy(data.train_images[batch].astype(np.float32) / 255)
            targets = torch.from_numpy(data.train_labels[batch].astype(np.int64))
            loss = functional.cross_entropy(model(inputs), targets)
            for mine, gradient in zip(
                velocity[i], torch.autograd.grad(loss, list(model.parameters())), strict=True
            ):
                gain = 1 - momentum if form == "average" else 1.0
                mine.mul_(momentum).add_(gradient, alpha=gain)
        with torch.no_grad():
            for place, parameter in enumerate(model.parameters()):
                parameter.sub_(lr * torch.stack([rows[place] for rows in velocity]).mean(0))
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_rounds_match_plain_sgd(data: Dataset, momentum: float) -> None:
    with make(data, rule="mean", worker_momentum=momentum) as trainer:
        for _ in trainer.rounds(12):
            pass
        expected = slow_twin(data, 12, 1.0, momentum=momentum)
        torch.testing.assert_close(trainer.server.vector, expected, rtol=1e-4, atol=1e-5)


def test_momentum_as_a_sum_matches_plain_sgd(data: Dataset) -> None:
    options: dict[str, Any] = {"worker_momentum": 0.9, "worker_momentum_form": "sum", "lr": 0.1}
    with make(data, rule="mean", **options) as trainer:
        list(trainer.rounds(12))
        expected = slow_twin(data, 12, 0.1, momentum=0.9, form="sum")
        torch.testing.assert_close(trainer.server.vector, expected, rtol=1e-4, atol=1e-5)


def test_validation_samples_are_not_trained_on_and_are_evaluated(data: Dataset) -> None:
    with make(data, validation=0.2, split="by-label") as trainer:
        samples, assignment = trainer.task.samples, trainer.task.assignment
        assert samples.validation is not None
        assert len(samples.validation) == round(0.2 * len(samples))
        held = np.setdiff1d(np.arange(len(samples)), np.concatenate(list(assignment)))
        assert len(held) == len(samples.validation)
        inputs, targets = samples.validation.take(np.arange(len(held))[None])
        torch.testing.assert_close(inputs, samples.train.take(held[None])[0].clone())
        assert targets.tolist() == data.train_labels[held].tolist()
        list(trainer.rounds(3))
        model = trainer.model.eval()
        for test, images, labels in (
            (False, data.train_images[held], data.train_labels[held]),
            (True, data.test_images, data.test_labels),
        ):
            scores = model(torch.from_numpy(data.floats(images))).argmax(1).numpy()
            found = trainer.evaluate(test=test).top1
            assert found == pytest.approx((scores == labels).mean())


@pytest.mark.parametrize("split", ["iid", "by-label", "gamma-similarity:gamma=0.5"])
def test_byzantine_workers_may_hold_data_of_their_own(data: Dataset, split: str) -> None:
    options: dict[str, Any] = {"split": split, "attack": "label-flip:q=3", "byzantine_data": "iid"}
    with make(data, **options) as trainer:
        parts, n = trainer.task.assignment, len(trainer.task.samples)
        assert parts.sizes[:3].tolist() == [n] * 3
        honest = np.concatenate(list(parts)[3:])
        assert len(np.unique(honest)) == n, "no sample is lost to the Byzantine workers"
        indices = batch_indices(parts, 10, 16, seed=0, round=0)
        labels = trainer.task.batches(0)[1].numpy()
        np.testing.assert_array_equal(labels[:3], 9 - data.train_labels[indices[:3]])
        np.testing.assert_array_equal(labels[3:], data.train_labels[indices[3:]])
    with make(data, split=split, byzantine_data="iid") as alone, make(data, split=split) as all_:
        assert alone.task.assignment.sizes.tolist() == all_.task.assignment.sizes.tolist()


def test_long_tail_shortens_the_test_set_too(data: Dataset) -> None:
    with make(data, split="long-tail:factor=0.5") as trainer:
        test = trainer.task.samples.test
        assert test is not None
        labels = np.bincount(test.labels(), minlength=10)
        whole = np.bincount(data.test_labels, minlength=10)
        assert labels.tolist() == [max(1, round(n * 0.5**i)) for i, n in enumerate(whole.tolist())]


def test_the_number_of_servers_and_threads_changes_no_bit(data: Dataset) -> None:
    attack = parse_attack("bit-flip:columns=100")
    reference = train(data, 8, num_servers=1, threads=1, attack=attack)
    for num_servers, threads in ((4, 1), (20, 2), (20, 3)):
        found = train(data, 8, num_servers=num_servers, threads=threads, attack=attack)
        assert np.array_equal(found, reference)


@pytest.mark.parametrize("num_servers", [1, 4, 20])
def test_bits_of_convolutions_with_dropout_do_not_depend_on_threads(
    data: Dataset, num_servers: int
) -> None:
    torch_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        found = train(data, 2, model="cnn", num_servers=num_servers, threads=2, batch_size=4)
        torch.set_num_threads(1)
        assert np.array_equal(found, train(data, 2, model="cnn", threads=1, batch_size=4))
    finally:
        torch.set_num_threads(torch_threads)


def test_the_seed_changes_the_run(data: Dataset) -> None:
    first, again, other = (train(data, 3, seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize("attack", ["gaussian:q=3", "omniscient:q=3", "constant:q=3,value=nan"])
def test_phocas_learns_under_attack_and_the_mean_does_not(data: Dataset, attack: str) -> None:
    with make(data, attack=attack) as trainer:
        done = list(trainer.rounds(60))
        assert top1(trainer) > 0.75
        assert all(round_.action == "applied" for round_ in done)
        assert done[-1].flagged == (0, 1, 2)
    with make(data, attack=attack, rule="mean") as trainer:
        for _ in trainer.rounds(60):
            pass
        assert top1(trainer) < 0.4


@pytest.mark.parametrize("rule", ["phocas:b=3", "median", "krum:b=3", "trimmed-mean:b=3"])
def test_honest_workers_are_not_flagged(data: Dataset, rule: str) -> None:
    with make(data, rule=rule) as trainer:
        assert all(not round_.flagged for round_ in trainer.rounds(150))


@pytest.mark.parametrize(("attack", "named"), [(None, ()), ("gaussian:q=3", (0, 1, 2))])
def test_momentum_causes_no_false_alarm_and_hides_no_attack(
    data: Dataset, attack: str | None, named: tuple[int, ...]
) -> None:
    """A row with momentum stays distant for many rounds: only its new part is evidence."""
    with make(data, worker_momentum=0.95, attack=attack, lr=0.2) as trainer:
        assert [*trainer.rounds(120)][-1].flagged == named


def test_gamblers_server_is_flagged_and_no_worker(data: Dataset) -> None:
    attack = "gambler:servers=5,server=3,probability=0.01"
    with make(data, attack=attack, num_servers=5) as trainer:
        last = [*trainer.rounds(60)][-1]
    assert (last.flagged_servers, last.flagged) == ((3,), ())


def test_no_server_is_flagged_where_workers_have_learned_their_own_labels(data: Dataset) -> None:
    """Most workers add nearly nothing to their momentum; one that adds more may be honest."""
    options: dict[str, Any] = {"num_workers": 20, "num_servers": 20, "rule": "heraclius:b=6"}
    options |= {"split": "by-label", "worker_momentum": 0.9, "lr": 2.0, "model": "mlp:hidden=32"}
    with make(load("synthetic:train=600,test=100"), **options) as trainer:
        assert {each.flagged_servers for each in trainer.rounds(60)} == {()}


@pytest.mark.parametrize("on_nonfinite", ["skip", "apply"])
def test_evidence_stops_when_the_model_is_lost(
    data: Dataset, tmp_path: Path, on_nonfinite: str
) -> None:
    """After a step of 1e17 honest gradients of the last layer are absurd and prove nothing."""
    attack = "gambler:servers=5,server=0,probability=0.01"
    options = {"rule": "mean", "attack": attack, "num_servers": 5, "on_nonfinite": on_nonfinite}
    with make(data, **options) as trainer:
        done = [*trainer.rounds(3)]
        assert [each.lost for each in done] == [None, 1, 1]
        known = trainer.detector.state()
        before = {name: array.copy() for name, array in known.items()}
        trainer.save(tmp_path / "lost")
        with make(data, **options) as other:
            other.load(tmp_path / "lost")
            last = [*other.rounds(40)][-1]
            assert (last.lost, last.flagged, last.flagged_servers) == (1, (), (0,))
            assert (last.outlier_counts, last.unusual) == ((), ())
            for name, array in other.detector.state().items():
                np.testing.assert_array_equal(array, before[name], err_msg=name)
    with make(data, rule="phocas:b=3", attack=attack, num_servers=5) as trainer:
        last = [*trainer.rounds(40)][-1]
        assert (last.lost, last.flagged_servers) == (None, (0,))


def test_byzantine_losses_do_not_end_the_evidence(data: Dataset) -> None:
    """Workers with absurd data have absurd losses; the model of the others is intact."""
    images = [data.train_images[i::10].astype(np.float32) / 255 for i in range(10)]
    for i in range(3):
        images[i] = images[i] * np.float32(1e30)
    labels = [data.train_labels[i::10].astype(np.int64) for i in range(10)]
    pairs = [
        (torch.from_numpy(x), torch.from_numpy(y)) for x, y in zip(images, labels, strict=True)
    ]
    model = build_model("mlp:hidden=16", data.shape, 10, seed=3)
    with Trainer(model, data=pairs, rule="phocas:b=3", num_workers=10, batch_size=16) as trainer:
        last = [*trainer.rounds(30)][-1]
    assert (last.lost, last.flagged) == (None, (0, 1, 2))


def test_losses_of_few_workers_do_not_mark_the_model_as_lost(data: Dataset) -> None:
    """If each row is a step, a round has the loss of the one worker that sent it."""
    with make(data) as trainer:
        few = np.full(trainer.task.num_workers // 2, np.nan)
        trainer._judge_model(few)
        assert trainer.lost is None
        trainer._judge_model(np.full(trainer.task.num_workers // 2 + 1, np.nan))
        assert trainer.lost == 0


def test_flagged_workers_do_not_depend_on_servers_and_threads(data: Dataset) -> None:
    found = []
    for servers, threads in ((1, 1), (3, 2)):
        with make(data, attack="sign-flip:q=2", num_servers=servers, threads=threads) as trainer:
            for _ in trainer.rounds(20):
                pass
            found.append([(one.e_value, one.flagged) for one in trainer.detector.evidence()])
    assert found[0] == found[1]


def test_round_reports_what_happened(data: Dataset) -> None:
    with make(data, attack="gaussian:q=2", num_servers=4) as trainer:
        done = next(trainer.rounds(1))
    assert done.number == 1
    assert 2 < done.loss < 3
    assert done.touched == 2 * trainer.server.vector.numel()
    assert done.dropped.shape == (10,)
    assert done.dropped[:2].tolist() == [1.0, 1.0]
    assert done.expected_dropped == pytest.approx(0.3)
    assert done.by_server is not None
    assert done.by_server.shape == (4, 10)
    assert done.honest_distance is not None
    assert 0 < done.honest_distance < done.gradient_norm
    assert set(done.seconds) == {"data", "gradients", "attack", "aggregate", "update", "metrics"}


def test_distance_to_the_honest_mean_is_correct(data: Dataset) -> None:
    with make(data, rule="mean") as trainer:
        assert next(trainer.rounds(1)).honest_distance == pytest.approx(0, abs=1e-6)


def test_label_flips_reach_the_gradients(data: Dataset) -> None:
    with make(data, attack="label-flip:q=3") as flipped, make(data) as plain:
        next(flipped.rounds(1))
        next(plain.rounds(1))
        same = (flipped.server.rows == plain.server.rows).all(1)
        assert same.tolist() == [False] * 3 + [True] * 7


def test_learning_rate_follows_the_schedule(data: Dataset) -> None:
    with make(data, schedule=Step(every=2, factor=0.5), lr=0.4) as trainer:
        assert [round_.lr for round_ in trainer.rounds(5)] == [0.4, 0.4, 0.2, 0.2, 0.1]
    assert Cosine(rounds=10)(20) == 0


@pytest.mark.parametrize("policy", ["skip", "stop", "apply"])
def test_non_finite_rounds_follow_the_policy(data: Dataset, policy: str) -> None:
    with make(data, rule="mean", attack="crash:worker=0", on_nonfinite=policy) as trainer:
        before = trainer.server.pull()
        done = list(trainer.rounds(3))
        assert not any(round_.finite for round_ in done)
        if policy == "apply":
            assert [round_.action for round_ in done] == ["applied"] * 3
            assert trainer.server.vector.isnan().all()
            assert 0 <= top1(trainer) <= 0.3
        else:
            assert torch.equal(trainer.server.vector, before)
            expected = ["skipped"] * 3 if policy == "skip" else ["stopped"]
            assert [round_.action for round_ in done] == expected


def test_user_arrays_and_regression_are_trained() -> None:
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((300, 4)).astype(np.float32)
    targets = (inputs @ np.array([[1.0], [-2.0], [0.5], [3.0]], np.float32)).astype(np.float32)
    model = nn.Linear(4, 1)
    with Trainer(
        model,
        nn.MSELoss(),
        (inputs, targets),
        num_workers=7,
        rule=parse_rule("trimmed-mean:b=2"),
        attack="gaussian:q=2",
        test=(inputs, targets),
    ) as trainer:
        for _ in trainer.rounds(150):
            pass
        assert trainer.evaluate().loss < 0.01
    assert model.weight.detach().flatten().tolist() == pytest.approx([1, -2, 0.5, 3], abs=0.1)


def test_double_precision_is_kept(data: Dataset) -> None:
    model = build_model("softmax", data.shape, 10, seed=0).double()
    with Trainer(model, data=data, num_workers=5, rule="median") as trainer:
        next(trainer.rounds(1))
        assert trainer.server.rows.dtype == torch.float64
        assert trainer.server.vector.dtype == torch.float64


def test_splits_determine_the_samples_of_each_worker(data: Dataset) -> None:
    with make(data, split=parse_split("by-label")) as trainer:
        assert trainer.task.assignment.sizes.tolist() == [40] * 10
        for part in trainer.task.assignment:
            assert len(np.unique(data.train_labels[part])) <= 3


def test_evaluation_is_top_1_and_top_3_of_the_test_samples(data: Dataset) -> None:
    with make(data) as trainer:
        for _ in trainer.rounds(20):
            pass
        model = copy.deepcopy(trainer.model).eval()
        with torch.no_grad():
            outputs = model(torch.from_numpy(data.floats(data.test_images))).numpy()
        order = np.argsort(-outputs, axis=1)
        hits = order == data.test_labels[:, None]
        found = trainer.evaluate()
        assert found.top1 == pytest.approx(hits[:, :1].any(1).mean())
        assert found.top3 == pytest.approx(hits[:, :3].any(1).mean())
        assert trainer.model.training


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "phocas:b=5"}, "b=5"),
        ({"rule": "krum:b=4"}, "b=4"),
        ({"attack": "gaussian:q=11"}, "q=11"),
        ({"attack": "gambler:server=3"}, "servers"),
        ({"worker_momentum": 1.0}, "less than 1"),
        ({"worker_momentum_form": "sum"}, "set worker_momentum too"),
        ({"validation": 1.0}, "less than 1: got validation=1.0"),
        ({"validation": 1e-9}, "at least one training sample.* holds out 0"),
        ({"validation": 0.9999}, "leave at least one|at least 1 samples"),
        ({"byzantine_data": "own"}, "it may be: split, iid"),
        ({"byzantine_data": "iid", "attack": "random-cells:rate=0.1"}, "the same workers in every"),
        ({"reduction": "max"}, "unknown reduction of Trainer 'max'.*it may be: mean, sum"),
        ({"batch_size": 0}, "batch_size >= 1"),
        ({"seed": -1}, "seed >= 0"),
        ({"gradient_path": "merge"}, "did you mean 'merged'"),
        ({"rule": "phoca:b=3"}, "did you mean 'phocas'"),
    ],
)
def test_impossible_settings_are_rejected(
    data: Dataset, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make(data, **options)


def test_names_are_exported_lazily() -> None:
    import phocas.training

    assert phocas.training.ParameterServer is ParameterServer
    assert "Trainer" in dir(phocas.training)
    with pytest.raises(AttributeError, match="Trainr"):
        _ = phocas.training.Trainr


@pytest.mark.parametrize("standardise", [False, True])
def test_batches_have_the_bits_of_dataset_floats(data: Dataset, standardise: bool) -> None:
    samples = Samples(data, standardise=standardise)
    indices = np.array([[3, 1, 4], [1, 5, 9]])
    inputs, targets = samples.draw(indices)
    expected = data.floats(data.train_images[indices.ravel()], standardise=standardise)
    assert np.array_equal(inputs.numpy().reshape(expected.shape), expected)
    assert np.array_equal(targets.numpy(), data.train_labels[indices])
    whole = torch.cat([samples.test_batch(part)[0] for part in samples.test_parts(50)])
    assert np.array_equal(whole.numpy(), data.floats(data.test_images, standardise=standardise))


@pytest.mark.parametrize("model", ["mlp:hidden=16", "cnn:width=2"])
def test_evaluation_covers_all_test_samples(data: Dataset, model: str) -> None:
    with make(data, model=model, rule="mean", lr=0.1) as trainer:
        trainer.step()
        found = trainer.evaluate()
        inputs = torch.from_numpy(data.floats(data.test_images, standardise=False))
        targets = torch.from_numpy(data.test_labels.astype(np.int64))
        trainer.model.eval()
        with torch.no_grad():
            outputs = trainer.model(inputs)
    ranks = (outputs > outputs.gather(1, targets[:, None])).sum(1)
    assert found.loss == pytest.approx(float(functional.cross_entropy(outputs, targets)), rel=1e-5)
    assert found.top1 == pytest.approx(float((ranks < 1).double().mean()))
    assert found.top3 == pytest.approx(float((ranks < 3).double().mean()))


class Viewing(nn.Module):
    """A convolution and a view, which does not accept channels-last values."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.last = nn.Linear(4 * 64, 10)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found = torch.relu(self.first(inputs))
        return torch.as_tensor(self.last(found.view(found.size(0), -1)))


def test_convolution_followed_by_a_view_is_trained_and_evaluated(data: Dataset) -> None:
    model = Viewing()
    weight = model.first.weight
    weight.data = weight.data.clone(memory_format=torch.channels_last)
    with pytest.raises(RuntimeError, match="view"):
        model(torch.ones(2, 1, 8, 8))
    torch.manual_seed(0)
    with Trainer(
        Viewing(), functional.cross_entropy, data, num_workers=4, rule="mean", lr=0.5, batch_size=16
    ) as trainer:
        losses = [done.loss for done in trainer.rounds(20)]
        assert losses[-1] < losses[0]
        assert top1(trainer) > 0.2


def test_run_can_be_kept_and_continued(data: Dataset, tmp_path: Path) -> None:
    file = tmp_path / "r.sqlite"
    with make(data, attack="gaussian:q=3", split=ByLabel(), seed=4) as trainer:
        first = trainer.run(25, results=file, name="mine", evaluate_every=5)
        assert [round.number for round in first.rounds] == list(range(1, 26))
        assert list(first.evaluations) == [0, 5, 10, 15, 20, 25]
        assert first.accuracy == top1(trainer)
        assert "25 rounds" in repr(first)
        assert first._repr_html_().startswith("<table><caption>TrainingRun: 25 rounds")
        second = trainer.run(3, results=file)
        assert (first.number, second.number) == (1, 1)
        vector = trainer.server.vector.clone()
        bits = train(data, 28, attack="gaussian:q=3", split="by-label", seed=4)
    np.testing.assert_array_equal(vector.numpy().view(np.uint32), bits)
    with Results(file, read=True) as results:
        (record,) = results.runs()
        assert (record.status, record.rounds_done, record.rounds) == ("complete", 28, 28)
        assert (record.rule, record.attack, record.seed) == ("phocas:b=3", "gaussian:q=3", 4)
        assert (record.model, record.dataset) == ("Sequential", "synthetic")
        assert record.byzantine == (0, 1, 2)
        assert record.config["split"] == "by-label"
        assert record.config["workers"] == 10
        assert record.final_accuracy == second.accuracy
        rounds = results.table("rounds", 1)
    assert [row["loss"] for row in rounds] == [
        each.loss for each in (*first.rounds, *second.rounds)
    ]
    saved = final_model(file, 1)
    assert torch.equal(torch.cat([each.flatten() for each in saved.values()]), vector)


def test_equal_trainers_are_one_run_and_others_are_not(data: Dataset, tmp_path: Path) -> None:
    file = tmp_path / "r.sqlite"
    other = load("synthetic:train=400,test=120,side=8,noise=20,seed=1")
    for given, lr in ((data, 1.0), (data, 1.0), (other, 1.0), (data, 0.5)):
        with make(given, lr=lr) as trainer:
            trainer.run(2, results=file)
    with Results(file, read=True) as results:
        records = results.runs()
    assert [record.id for record in latest(records)] == [2, 3, 4]


def test_failed_run_keeps_its_rounds(data: Dataset, tmp_path: Path) -> None:
    def fragile(rows: np.ndarray) -> np.ndarray:
        if trainer.rounds_done == 3:
            raise RuntimeError("oh")
        return np.asarray(rows.mean(axis=0))

    file = tmp_path / "r.sqlite"
    trainer = make(data, rule=fragile, num_servers=1)
    with trainer, pytest.raises(RuntimeError, match="oh"):
        trainer.run(9, results=file, evaluate_every=2)
    with Results(file, read=True) as results:
        (record,) = results.runs()
        assert len(results.table("rounds", 1)) == 3
    assert record.status == "failed"
    assert re.search(r"test_trainer\.py:\d+: RuntimeError: oh", record.message or "")
    assert "fragile" in record.rule


def test_run_shows_progress_and_needs_no_test_samples(
    capsys: pytest.CaptureFixture[str],
) -> None:
    inputs = torch.randn(60, 4)
    model = nn.Linear(4, 1)
    with Trainer(
        model, functional.mse_loss, (inputs, inputs[:, :1]), rule="mean", num_workers=5
    ) as trainer:
        done = trainer.run(4, progress=True)
        assert (done.evaluations, done.accuracy, done.number) == ({}, None, None)
        assert "round 4/4  loss" in capsys.readouterr().err
        trainer.run(1)
        assert not capsys.readouterr().err
        with pytest.raises(ValueError, match="run needs rounds >= 1"):
            trainer.run(0)


def test_run_with_validation_samples_has_a_test_accuracy(data: Dataset, tmp_path: Path) -> None:
    with make(data, validation=0.2) as trainer:
        done = trainer.run(3, results=tmp_path / "r.sqlite")
        assert done.test is not None
        assert done.test.top1 == trainer.evaluate(test=True).top1
    with Results(tmp_path / "r.sqlite", read=True) as results:
        assert results.run(1).test_accuracy == done.test.top1
