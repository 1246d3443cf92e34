"""Attacks that search against the rule of a run, learn over rounds, or target one rule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from phocas.attacks import (
    ALittleIsEnough,
    Fang,
    InnerProduct,
    Mimic,
    OptimalALIE,
    OptimalInnerProduct,
    attack_rng,
    parse_attack,
)
from phocas.attacks.audit import audit
from phocas.attacks.search import expand
from phocas.data import load
from phocas.engines.local import LocalSettings
from phocas.rules import Krum, Rule, TrimmedMean, parse_rule
from phocas.training import Trainer

M, Q, D = 14, 4, 300


def drawn(seed: int = 0, shift: float = 0.3) -> np.ndarray:
    """Rows of workers whose data differ: each has a mean of its own."""
    rng = np.random.default_rng(seed)
    return shift + rng.normal(size=(M, D)) + rng.normal(size=(M, 1)) * rng.normal(size=D)


def moved(rule: Rule, rows: np.ndarray) -> float:
    return float(np.linalg.norm(rule(rows, rng=np.random.default_rng(0)) - rows[Q:].mean(axis=0)))


RULES = ["mean", "median", f"trimmed-mean:b={Q}", f"nnm:b={Q}|trimmed-mean:b={Q}", f"krum:b={Q}"]


@pytest.mark.parametrize("text", RULES)
def test_searched_factor_moves_the_rule_farther_than_given_ones(text: str) -> None:
    rule = parse_rule(text)
    for searched, given in (
        (
            OptimalALIE(Q, against=rule),
            [ALittleIsEnough(Q), *(ALittleIsEnough(Q, z=z) for z in (1, -1))],
        ),
        (OptimalInnerProduct(Q, against=rule), [InnerProduct(Q), InnerProduct(Q, epsilon=1.0)]),
    ):
        rows = drawn()
        searched.corrupt(rows, rng=attack_rng(0, 0))
        for attack in given:
            other = drawn()
            attack.corrupt(other, rng=attack_rng(0, 0))
            assert moved(rule, rows) >= moved(rule, other) * 0.98, (searched, attack)


@pytest.mark.parametrize("kind", [OptimalALIE, OptimalInnerProduct])
def test_rows_lie_on_the_line_of_the_attack(kind: Any) -> None:
    rows = drawn()
    kind(Q, against="median").corrupt(rows, rng=attack_rng(0, 0))
    honest = rows[Q:]
    assert (rows[:Q] == rows[0]).all()
    offset = rows[0] - (honest.mean(axis=0) if kind is OptimalALIE else 0)
    factors = offset / (honest.std(axis=0) if kind is OptimalALIE else honest.mean(axis=0))
    np.testing.assert_allclose(factors, factors[0], rtol=1e-6)


def test_both_signs_are_searched() -> None:
    """With skewed rows, one side of the median is farther from the mean than the other."""
    for sign in (1.0, -1.0):
        rows = np.zeros((M, 40))
        rows[Q:] = sign * np.random.default_rng(0).exponential(size=(M - Q, 40)) ** 3
        OptimalALIE(Q, against=parse_rule("median")).corrupt(rows, rng=attack_rng(0, 0))
        assert np.sign((rows[0] - rows[Q:].mean(axis=0)).sum()) == -sign


@pytest.mark.parametrize("peak", [0.0, 0.3, 3.0, 25.0, 900.0])
def test_line_search_comes_near_the_peak(peak: float) -> None:
    seen: list[float] = []

    def value(step: float) -> float:
        seen.append(step)
        return -abs(step - peak)

    found = expand(value, 0.0, 10.0, 0.8, 20)
    assert len(seen) == 20
    assert min(seen) >= 0
    assert found == min(seen, key=lambda step: abs(step - peak))
    assert abs(found - peak) <= 0.5 + 0.1 * peak
    assert expand(value, 2.0, 10.0, 0.8, 1) == 2.0


def test_a_run_and_an_audit_give_their_rule_to_the_attack() -> None:
    options: dict[str, Any] = {"num_workers": 7, "attack": "optimal-alie:q=2,evaluations=3"}
    with Trainer(
        "softmax", data=load("synthetic:train=60,test=9"), rule="median", **options
    ) as trainer:
        assert str(trainer.task.attack) == "optimal-alie:q=2,against=(median),evaluations=3"
        next(trainer.rounds(1))
    (trial,) = audit("median", num_workers=7, byzantine=2, dims=20, attacks=["optimal-ipm:q=2"])
    assert "against=(median)" in trial.attack
    aimed = parse_attack("optimal-alie:q=2,against=mean")
    assert aimed.aimed_at(Krum(b=2)) is aimed


def slow_fang(honest: np.ndarray, q: int, stretch: float) -> np.ndarray:
    """The definition of Fang et al., value by value, evenly spaced."""
    rows = np.empty((q, honest.shape[1]))
    for j, column in enumerate(honest.T):
        if column.mean() > 0:
            end = column.min()
            far = end / stretch if end > 0 else end * stretch
        else:
            end = column.max()
            far = end * stretch if end > 0 else end / stretch
        for k in range(q):
            rows[k, j] = end + (k + 0.5) / q * (far - end)
    return rows


@pytest.mark.parametrize("shift", [-5.0, -0.2, 0.2, 5.0])
def test_fang_against_the_trimmed_mean_matches_its_definition(shift: float) -> None:
    rows = drawn(shift=shift)
    Fang(Q, stretch=2.0).corrupt(rows, rng=attack_rng(0, 0))
    np.testing.assert_allclose(rows[:Q], slow_fang(rows[Q:], Q, 2.0))
    honest = rows[Q:]
    up = honest.mean(axis=0) <= 0
    assert (rows[:Q, up] >= honest.max(axis=0)[up]).all()
    assert (rows[:Q, ~up] <= honest.min(axis=0)[~up]).all()
    changed = (TrimmedMean(b=Q)(rows) - honest.mean(axis=0)) * np.where(up, 1, -1)
    assert changed.mean() > 0


@pytest.mark.parametrize("seed", range(4))
def test_krum_selects_a_row_of_fang(seed: int) -> None:
    rows = drawn(seed)
    Fang(Q, target="krum").corrupt(rows, rng=attack_rng(0, 0))
    mean = rows[Q:].mean(axis=0)
    assert np.array_equal(np.sign(rows[0]), -np.sign(mean))
    np.testing.assert_array_equal(Krum(b=Q)(rows), rows[0])
    louder = rows.copy()
    louder[:Q] *= 2.0
    first = np.sqrt(np.square(rows[Q:]).sum(axis=1).max() / D)
    if np.abs(rows[0]).max() < first:  # not the upper bound: twice the step is not selected
        assert not np.array_equal(Krum(b=Q)(louder), louder[0])


def biased(round_: int) -> np.ndarray:
    """Rows around 0, of which worker 9 is shifted along one direction a little in every round."""
    rows = np.random.default_rng([3, round_]).normal(size=(M, D))
    rows[9, 0] += 4.0
    return rows


def test_mimic_with_warmup_copies_one_worker_from_then_on() -> None:
    memory: dict[str, np.ndarray] = {}
    attack, chosen = Mimic(Q, warmup=40), []
    anew = []
    for t in range(60):
        rows = biased(t)
        attack.corrupt(rows, rng=attack_rng(0, t), round=t, memory=memory)
        chosen += [int(np.flatnonzero((rows[Q:] == rows[0]).all(axis=1))[0]) + Q]
        assert (rows[:Q] == rows[0]).all()
        rows = biased(t)
        Mimic(Q).corrupt(rows, rng=attack_rng(0, t), round=t)
        anew += [int(np.flatnonzero((rows[Q:] == rows[0]).all(axis=1))[0]) + Q]
    assert set(chosen[40:]) == {9}
    assert len(set(anew)) > 3, "without a warm-up the noise of each round decides"
    assert memory["rounds"].tolist() == [40.0]


def test_memory_of_an_attack_survives_a_checkpoint(tmp_path: Any) -> None:
    options: dict[str, Any] = {
        "num_workers": 7,
        "rule": "median",
        "attack": "mimic:q=2,warmup=4",
        "split": "by-label",
    }
    data = load("synthetic:train=100,test=9")
    with Trainer("softmax", data=data, **options) as whole:
        list(whole.rounds(3))
        whole.save(tmp_path / "half")
        list(whole.rounds(4))
        expected = whole.server.vector.clone()
    with Trainer("softmax", data=data, **options) as again:
        again.load(tmp_path / "half")
        list(again.rounds(4))
        assert torch.equal(again.server.vector, expected)
    with pytest.raises(ValueError, match="take part in every round"):
        Trainer("softmax", data=data, clients=20, **options)
    engine = LocalSettings(asynchronous="buffers=3")
    with pytest.raises(ValueError, match="leave its warm-up or"):
        Trainer("softmax", data=data, engine=engine, **options)


@pytest.mark.parametrize("text", ["centered-clipping:start=previous,radius=median", "fl-trust"])
def test_searched_factor_knows_the_reference(text: str) -> None:
    rule, reference = parse_rule(text), 3 * drawn().mean(axis=0)

    def effect(attack: OptimalInnerProduct | InnerProduct, known: np.ndarray) -> float:
        rows = drawn()
        attack.corrupt(rows, rng=attack_rng(0, 0), reference=known)
        return float(np.linalg.norm(rule(rows, reference=reference) - rows[Q:].mean(axis=0)))

    searched = OptimalInnerProduct(Q, against=rule)
    for epsilon in (0.1, 1.0, -5.0, 10.0):
        given = InnerProduct(Q, epsilon=epsilon)
        assert effect(searched, reference) >= effect(given, reference) * 0.98
    assert effect(searched, reference) > effect(searched, -reference) * 1.001


@pytest.mark.parametrize(
    ("rule", "trusted"),
    [("centered-clipping:start=previous,radius=median", None), ("fl-trust", 20)],
)
def test_search_against_the_reference_of_a_run(rule: str, trusted: int | None) -> None:
    options: dict[str, Any] = {"rule": rule, "num_workers": 6, "batch_size": 4, "trusted": trusted}

    def distance(attack: str) -> float:
        data = load("synthetic")
        with Trainer("softmax", data=data, attack=attack, **options) as trainer:
            return sum(done.honest_distance or 0.0 for done in trainer.rounds(3))

    assert distance("optimal-alie:q=2") > distance("alie:q=2")
