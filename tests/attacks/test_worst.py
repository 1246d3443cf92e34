"""Attacks that know the rule: the computed optimum, and searches that no other attack beats."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from phocas.attacks import (
    ALittleIsEnough,
    Attack,
    ConstantRows,
    Gaussian,
    InnerProduct,
    Mimic,
    MinMax,
    MinSum,
    Omniscient,
    SignFlip,
    Straggler,
    WorstCase,
    attack_rng,
)
from phocas.attacks.memory import host_array
from phocas.attacks.search import Objective, climb
from phocas.kernels import Window
from phocas.rules import (
    FunctionRule,
    Heraclius,
    MeaMed,
    Median,
    Phocas,
    Pipeline,
    Rule,
    TrimmedMean,
    parse_rule,
)
from phocas.rules.base import Randomness

M, D, Q = 20, 400, 6
COMPUTED = [
    "mean",
    "median",
    "trimmed-mean:b=6",
    "phocas:b=6",
    "meamed:b=6",
    "heraclius:b=6",
    "heraclius:b=8,cutoff=16",
    "monitor:rule=(phocas:b=6)",
]
SEARCHED = [
    "krum:b=6",
    "multi-krum:b=6",
    "bulyan:b=4",
    "geometric-median",
    "centered-clipping:radius=20",
    "mda:b=6",
    "cge:b=6",
    "nnm:b=6|phocas:b=6",
    "nnm:b=6|krum:b=6",
    "bucketing:size=2|median",
    "adaptive-clipping:b=6|trimmed-mean:b=6",
]


def rounds(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return honest rows, a gradient with as much noise, and the rows of the previous round."""
    rng = np.random.default_rng(seed)
    gradient = rng.normal(size=D)
    now, before = gradient + rng.normal(size=(2, M, D))
    return now.astype(np.float32), before.astype(np.float32)


def harm(rule: Rule, attack: Attack, objective: Objective) -> float:
    G, previous = rounds()
    mean = G[Q:].astype(np.float64).mean(axis=0)
    attack.corrupt(G, rng=attack_rng(0, 1), round=1, previous=previous)
    result = host_array(rule(G, rng=np.random.default_rng(0)))
    if not np.isfinite(result).all():
        return math.inf
    return float(np.linalg.norm(result - mean) if objective == "distance" else -result @ mean)


def rivals(rule: Rule) -> list[Attack]:
    attacks: list[Attack] = [
        Gaussian(Q),
        Gaussian(Q, std=1.0),
        Omniscient(Q),
        Omniscient(Q, scale=0.1),
        SignFlip(Q),
        SignFlip(Q, scale=10.0),
        InnerProduct(Q),
        InnerProduct(Q, epsilon=1.0),
        InnerProduct(Q, epsilon=10.0),
        ALittleIsEnough(Q),
        ALittleIsEnough(Q, z=1.5),
        ALittleIsEnough(Q, z=-1.5),
        ALittleIsEnough(Q, against=rule),
        Straggler(Q),
    ]
    attacks += [Mimic(Q), *(Mimic(Q, worker=worker) for worker in range(Q, M))]
    for direction in ("std", "unit", "sign"):
        attacks += [MinMax(Q, direction), MinSum(Q, direction)]
    return attacks + [ConstantRows(Q, value) for value in (0.0, 3.0, -100.0, math.nan, math.inf)]


@pytest.mark.parametrize("objective", ["distance", "descent"])
@pytest.mark.parametrize("text", COMPUTED + SEARCHED)
def test_no_other_attack_by_the_same_workers_is_worse(text: str, objective: Objective) -> None:
    rule = parse_rule(text)
    worst = harm(rule, WorstCase(rule, Q, objective=objective), objective)
    for rival in rivals(rule):
        other = harm(rule, rival, objective)
        # In float32 the last digits of two equally harmful results may differ.
        assert worst >= other - (1e-5 * abs(other) if math.isfinite(other) else 0), str(rival)


@pytest.mark.parametrize("text", ["krum:b=6", "multi-krum:b=6", "geometric-median", "mda:b=6"])
def test_the_generalised_model_is_worse_for_rules_that_compare_rows(text: str) -> None:
    rule = parse_rule(text)
    G, _ = rounds()
    touched = WorstCase(rule, Q, model="cells", budget=30).corrupt(G, rng=attack_rng(0, 1))
    assert touched.most_per_column <= Q
    assert len(touched.rows) == M
    result = host_array(rule(G))
    assert not np.isfinite(result).all() or np.linalg.norm(result) > 1e9


@pytest.mark.parametrize("follows", ["nnm:b=6|trimmed-mean:b=6", "multi-krum:b=6"])
def test_values_distributed_over_all_rows_do_not_break_cell_filter(follows: str) -> None:
    rule = parse_rule(f"cell-filter:b=8|{follows}")
    honest, _ = rounds()
    mean = honest[Q:].mean(axis=0)
    length = np.sqrt(np.square(honest[Q:] - mean).sum(axis=1).mean())
    moved = {}
    for model in ("rows", "cells"):
        G, _ = rounds()
        attack = WorstCase(rule, Q, model=model, budget=30)
        touched = attack.corrupt(G, rng=attack_rng(0, 1))
        assert touched.most_per_column <= Q
        assert touched.count == np.count_nonzero(honest - G)
        moved[model] = np.linalg.norm(rule(G) - mean) / length
    assert len(touched.rows) == M
    assert moved["rows"] < moved["cells"] < 8  # NNM and Multi-Krum alone fail here


@pytest.mark.parametrize("seed", range(25))
def test_the_computed_optimum_is_the_optimum_of_a_grid(seed: int) -> None:
    rng = np.random.default_rng(seed)
    m = int(rng.integers(3, 10))
    b = int(rng.integers(1, (m - 1) // 2 + 1))
    q = int(rng.integers(1, min(b, 2) + 1))
    honest = [
        rng.normal(size=(m - q, 4)),
        rng.standard_t(1.5, size=(m - q, 4)),
        rng.integers(-3, 4, size=(m - q, 4)).astype(float),  # ties
    ][seed % 3]
    mean = honest.mean(axis=0)
    for rule in (Phocas(b), MeaMed(b), TrimmedMean(b), Median()):
        G = np.vstack([np.zeros((q, 4)), honest])
        WorstCase(rule, q).corrupt(G, rng=attack_rng(0, 0))
        reached = np.abs(rule(G) - mean)
        for column in range(4):
            values = honest[:, column]
            cutoff = 3 * np.ptp(values) + 1
            line = np.linspace(values.min() - cutoff, values.max() + cutoff, 1500 if q == 1 else 60)
            grid = [*line, *values, np.inf, -np.inf]
            lies = np.array(list(itertools.combinations_with_replacement(grid, q))).T
            tried = np.vstack([lies, np.repeat(values[:, None], lies.shape[1], axis=1)])
            best = np.abs(rule(tried) - mean[column]).max()
            assert reached[column] >= best - 1e-9 * (1 + best), (str(rule), m, q)


@pytest.mark.parametrize(
    "honest",
    [
        [-4.61, -1.866, -1.038, -0.235, 0.557, 0.922, 9.43],
        [0.001, 0.001, 4.215, 6.233, 8.511, 13.25, 30.166, 32.709, 59.754],
    ],
)
def test_optimum_may_be_among_the_values_of_the_centre(honest: list[float]) -> None:
    rule, values = Phocas(2), np.array(honest) - 100  # for a negative mean, descent means upwards
    G = np.concatenate([np.zeros(2), values])[:, None]
    WorstCase(rule, 2, objective="descent").corrupt(G, rng=attack_rng(0, 0))
    assert values.min() < G[0, 0] < values.max()
    line = np.linspace(values.min() - 10, values.max() + 10, 300)
    lies = np.array(list(itertools.combinations_with_replacement([*line, np.inf, -np.inf], 2))).T
    tried = np.vstack([lies, np.repeat(values[:, None], lies.shape[1], axis=1)])
    best = np.max(rule(tried))
    assert best <= rule(G)[0] <= best + 0.5


@dataclass(frozen=True)
class Interior(Rule):
    """A user-defined rule that is a window, and no subclass of the package's rules."""

    columnwise = True

    def window(self, m: int) -> Window:
        return Window(trim=m - 14, drop=Q)


def test_attack_depends_on_the_window_not_on_the_class() -> None:
    own, known = (rounds()[0] for _ in range(2))
    WorstCase(Interior(), Q).corrupt(own, rng=attack_rng(0, 0))
    WorstCase(Phocas(Q), Q).corrupt(known, rng=attack_rng(0, 0))
    assert np.array_equal(own, known)
    assert WorstCase(Interior(), Q).sharded
    # These are column-wise too, but a cutoff depends on a block, and a function is unknown.
    assert not WorstCase(Heraclius(Q), Q).sharded
    assert not WorstCase(FunctionRule(np.median, columnwise=True), Q).sharded


def test_values_at_the_cutoff_are_worst_in_blocks_of_any_scale() -> None:
    rng = np.random.default_rng(0)
    scales = np.repeat([1.0, 1e-3, 10.0], [1024, 1024, 300])
    honest = rng.standard_t(3, size=(M - Q, len(scales))) * scales
    honest[:, 2048:] *= rng.random((M - Q, 300)) < 0.3  # sparse columns, whose radius is 0
    mean = honest.mean(axis=0)
    for rule in (Heraclius(Q, tail=0), Heraclius(8, cutoff=1.5, tail=0)):
        G = np.vstack([np.zeros((Q, len(scales))), honest])
        WorstCase(rule, Q).corrupt(G, rng=attack_rng(0, 0))
        reached = np.abs(rule(G) - mean)
        for block in np.split(np.arange(len(scales)), [1024, 2048]):
            spread = honest[:, block].std()
            tried = np.vstack([np.zeros((Q, len(block))), honest[:, block]])
            pushes = []
            for place in np.linspace(-20, 20, 161):
                tried[:Q] = mean[block] + place * spread
                pushes.append(np.linalg.norm(rule(tried) - mean[block]))
            assert np.linalg.norm(reached[block]) > 0.99 * max(pushes)
            promised = rule.error_bound(M, Q)
            assert promised is not None
            deviation = np.sqrt(np.square(honest[:, block] - mean[block]).sum() / (M - Q))
            assert np.linalg.norm(reached[block]) < promised * deviation


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("text", ["phocas:b=6", "meamed:b=6"])
def test_the_optimum_is_nearly_reached_in_every_format(text: str, kind: str) -> None:
    rule = parse_rule(text)
    exact = rounds()[0].astype(np.float64)
    mean = exact[Q:].mean(axis=0)
    WorstCase(rule, Q).corrupt(exact, rng=attack_rng(0, 0))
    most = np.linalg.norm(rule(exact) - mean)
    G = torch.tensor(rounds()[0]).to(getattr(torch, kind))
    WorstCase(rule, Q).corrupt(G, rng=attack_rng(0, 0))
    digits = {"float16": 1e-2, "bfloat16": 1e-1, "float32": 1e-5}[kind]
    assert np.linalg.norm(host_array(rule(G)) - mean) == pytest.approx(most, rel=digits)


def test_descent_objective_lowers_every_column() -> None:
    rule = TrimmedMean(6)
    G, _ = rounds()
    mean = G[Q:].mean(axis=0)
    WorstCase(rule, Q, objective="descent").corrupt(G, rng=attack_rng(0, 0))
    assert (np.isinf(G[:Q]) & (np.sign(G[:Q]) == -np.sign(mean))).all()


class Counted(Median):
    """A median that counts its calls."""

    calls = 0

    def __call__(self, rows: Any, *, rng: Randomness = None, **_: Any) -> Any:
        Counted.calls += 1
        return super().__call__(rows, rng=rng)


class Opaque(Pipeline):
    """A median that declares nothing about itself."""

    def __call__(self, rows: Any, *, rng: Randomness = None, **_: Any) -> Any:
        return Counted()(rows, rng=rng)


@pytest.mark.parametrize("budget", [1, 2, 31, 57])
def test_search_stays_within_its_budget(budget: int) -> None:
    Counted.calls = 0
    WorstCase(Opaque((), Median()), Q, budget=budget).corrupt(rounds()[0], rng=attack_rng(0, 0))
    assert Counted.calls == budget
    Counted.calls = 0
    WorstCase(Counted(), Q, budget=budget).corrupt(rounds()[0], rng=attack_rng(0, 0))
    assert Counted.calls == min(budget, 2)


def test_same_seed_repeats_the_search() -> None:
    rule = parse_rule("krum:b=6")
    found = []
    for seed in (1, 1, 2):
        G, _ = rounds()
        WorstCase(rule, Q, budget=250, seed=seed).corrupt(G, rng=attack_rng(0, 0))
        found.append(G)
    assert np.array_equal(found[0], found[1])


@pytest.mark.parametrize(("m", "q", "z"), [(20, 6, 0.3661), (50, 24, 1.4261), (11, 5, 0.9674)])
def test_default_z_is_the_papers(m: int, q: int, z: float) -> None:
    # m = 50, q = 24 is the paper's example: s = 2, Phi(z) < 24 / 26, z = 1.43.
    assert ALittleIsEnough(q).given_z(m) == pytest.approx(z, abs=1e-4)


def test_a_little_is_enough_is_mean_minus_z_deviations() -> None:
    G, _ = rounds()
    honest = G[Q:].astype(np.float64)
    ALittleIsEnough(Q, z=1.25).corrupt(G, rng=attack_rng(0, 0))
    expected = honest.mean(axis=0) - 1.25 * honest.std(axis=0)
    for row in range(Q):
        np.testing.assert_allclose(G[row], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("text", ["phocas:b=6", "krum:b=6"])
def test_the_tuned_z_beats_a_grid_of_z(text: str) -> None:
    rule = parse_rule(text)
    tuned = harm(rule, ALittleIsEnough(Q, against=rule), "distance")
    grid = [harm(rule, ALittleIsEnough(Q, z=z), "distance") for z in np.linspace(-4, 4, 81)]
    assert tuned >= 0.98 * max(grid)
    assert tuned > harm(rule, ALittleIsEnough(Q), "distance")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ALittleIsEnough(2, z=1.0, against=Median()), "needs z or against, not both"),
        (lambda: ALittleIsEnough(11).check(20), "needs 2q <= m and m >= 3 to choose z: got q=11"),
        (lambda: WorstCase(Median(), 20).check(20), "needs q < m, to leave an honest row"),
        (lambda: WorstCase(Phocas(10), 2).check(20), "2b < m"),
        (lambda: WorstCase(Median(), 2, budget=0), "needs budget >= 1"),
        (lambda: WorstCase(Median(), 2, objective="up"), "unknown objective of worst-case 'up'"),  # type: ignore[arg-type]
        (lambda: WorstCase(Median(), 2, model="row"), "did you mean 'rows'"),  # type: ignore[arg-type]
        (lambda: WorstCase(Median(), 2, model="cells").check(20, 9), "needs q . d >= m"),
    ],
)
def test_invalid_worst_case_attacks_are_rejected(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]


def test_climb_finds_a_maximum_and_an_edge() -> None:
    def cliff(step: float) -> float:
        return step if step < 13.7 else 0.0

    def hill(step: float) -> float:
        return -((step - 5.3) ** 2)

    assert climb(cliff, 1.0, 30) == pytest.approx(13.7, rel=0.01)
    assert climb(hill, 1.0, 30) == pytest.approx(5.3, rel=0.02)
    assert climb(hill, 1.0, 1) == 0.25
