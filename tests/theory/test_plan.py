"""Survival probabilities, compared with exact fractions and simulation, and their commands."""

from __future__ import annotations

import json
import math
import sys
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import phocas
from phocas.theory import Exposure, Participation, extremes, survival

if TYPE_CHECKING:
    from numpy.typing import NDArray


def exact_tail(m: int, b: int, rate: Fraction) -> Fraction:
    """Return P[Binomial(m, rate) > b] as a fraction."""
    return sum(
        (math.comb(m, k) * rate**k * (1 - rate) ** (m - k) for k in range(b + 1, m + 1)),
        Fraction(0),
    )


@settings(deadline=None, derandomize=True)  # slow runs on a busy machine are no failures
@given(
    m=st.integers(1, 60),
    b=st.integers(0, 60),
    rate=st.one_of(st.floats(0, 1), st.floats(0, 1e-12), st.floats(1 - 1e-12, 1)),
)
def test_binomial_tail_is_exact_on_both_sides(m: int, b: int, rate: float) -> None:
    chance = survival.at_most(m, b, survival.every(rate))
    exact = exact_tail(m, b, Fraction(rate))
    for mine, truth in ((chance.log_fails, exact), (chance.log_survives, 1 - exact)):
        if truth == 0:
            assert mine == -math.inf
            continue
        log_truth = math.log(truth.numerator) - math.log(truth.denominator)
        if truth > Fraction(1, 2):
            log_truth = math.log1p(-float(1 - truth))
        assert mine == pytest.approx(log_truth, rel=1e-11, abs=1e-11 if truth < 0.5 else 1e-300)


@pytest.mark.parametrize(("rate", "times"), [(1e-300, 10**9), (1e-17, 10**6), (0.3, 7), (1.0, 3)])
def test_repeated_trials_keep_tiny_probabilities(rate: float, times: int) -> None:
    chance = survival.every(rate).repeated(times)
    union = survival.every(rate).union(times)
    assert chance.fails <= union <= min(1.0, rate * times * (1 + 1e-12))
    if rate * times < 1e-6:
        assert chance.fails == pytest.approx(rate * times, rel=1e-6)
    else:
        assert chance.fails == pytest.approx(1 - (1 - rate) ** times, rel=1e-12)


def test_papers_gambler_matches_hand_computed_values() -> None:
    """m=20, 118282 parameters on 20 servers, 500 rounds, 0.05%: b=3 suffices, Krum fails."""
    gambler = Exposure(20, 118282, 500, 0.0005, servers=20)
    assert gambler.columns == 5915
    found = gambler.survival("phocas:b=3")
    by_hand = 5915 * 500 * float(exact_tail(20, 3, Fraction(0.0005)))
    assert found.union == pytest.approx(by_hand, rel=1e-12)
    assert found.chance.fails == pytest.approx(-math.expm1(-by_hand), rel=1e-9)
    smallest = gambler.smallest("phocas")
    assert smallest is not None
    assert smallest.b == 3
    assert gambler.survival("phocas:b=2").chance.survives < 0.7
    assert gambler.smallest("krum") is None
    assert gambler.survival("krum:b=8").chance.survives < 1e-300
    assert gambler.smallest("mean") is None
    median = gambler.smallest("median")
    assert median is not None
    assert median.chance == gambler.survival("phocas:b=9").chance


def test_survival_depends_on_b_rounds_and_servers() -> None:
    run = Exposure(11, 100, 50, 0.01)
    fails = [run.survival(phocas.TrimmedMean(b)).chance.log_fails for b in range(6)]
    assert fails == sorted(fails, reverse=True)
    for worse in (Exposure(11, 100, 51, 0.01), Exposure(11, 101, 50, 0.01)):
        assert worse.survival("krum:b=3").chance.log_survives < (
            run.survival("krum:b=3").chance.log_survives
        )
    assert Exposure(11, 100, 50, 0.01, servers=7).columns == 15
    nothing = Exposure(11, 100, 50, 0.0)
    for rule in phocas.RULES:
        assert all(each.chance.survives == 1 for each in nothing.every_b(rule))
    everything = Exposure(11, 100, 50, 1.0)
    assert everything.survival("phocas:b=5").chance.fails == 1
    assert everything.survival("krum:b=4").chance.fails == 1


def hits(run: Exposure, repeats: int, seed: int) -> NDArray[np.bool_]:
    """Draw which values are corrupted: repeats x rounds x workers x columns."""
    shape = (repeats, run.rounds, run.num_workers, run.columns)
    return np.random.default_rng(seed).random(shape) < run.rate


@pytest.mark.parametrize("servers", [1, 4])
@pytest.mark.parametrize(
    ("rule", "b"),
    [
        ("mean", 0),
        ("krum", 2),
        ("multi-krum", 1),
        ("trimmed-mean", 1),
        ("phocas", 2),
        ("median", 3),
    ],
)
def test_plan_matches_a_simulation(rule: str, b: int, servers: int) -> None:
    rate = {"mean": 0.0005, "krum": 0.01, "multi-krum": 0.005}.get(rule, 0.01 * 2.5**b)
    run = Exposure(num_workers=7, dims=12, rounds=6, rate=rate, servers=servers)
    repeats = 20_000
    bad = hits(run, repeats, seed=b)
    counted = {
        "mean": bad.any(axis=(2, 3)),
        "krum": bad.any(axis=3).sum(axis=2) > b,
        "multi-krum": bad.any(axis=3).sum(axis=2) > b,
    }.get(rule, (bad.sum(axis=2) > b).any(axis=2))
    share = counted.any(axis=1).mean()
    found = run.survival(rule if rule in ("mean", "median") else f"{rule}:b={b}")
    expected = found.chance.fails
    assert 0.005 < expected < 0.995  # otherwise the comparison would be meaningless
    assert abs(share - expected) < 4 * math.sqrt(expected * (1 - expected) / repeats)
    assert found.union >= expected


@pytest.mark.parametrize("rule", ["trimmed-mean:b=2", "phocas:b=2", "meamed:b=2", "median"])
def test_plan_matches_the_behaviour_of_rules(rule: str) -> None:
    """Values of 1 become -1e20: a run fails exactly if one column of one round fails."""
    run = Exposure(num_workers=7, dims=12, rounds=6, rate=0.05 if rule != "median" else 0.1)
    values = np.where(hits(run, 4000, seed=9), -1e20, 1.0)
    results = phocas.aggregate(np.moveaxis(values, 2, 0).reshape(7, -1), rule)
    lost = (results.reshape(4000, -1) < 0).any(axis=1).mean()
    expected = run.survival(rule).chance.fails
    assert abs(lost - expected) < 4 * math.sqrt(expected * (1 - expected) / 4000)


def test_krum_survives_more_often_than_planned() -> None:
    """More than b corrupted rows void Krum's guarantee; it fails only if it selects one."""
    run = Exposure(num_workers=7, dims=12, rounds=1, rate=0.03)
    values = np.where(hits(run, 4000, seed=10)[:, 0], -1e20, 1.0)
    values += np.random.default_rng(11).normal(size=values.shape) * 0.1
    lost = (extremes.krum(values, 2) < -1e19).any(axis=1).mean()
    assert lost < run.survival("krum:b=2").chance.fails


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Exposure(20, 10, 5, 1.5), "0 <= rate <= 1: got rate=1.5"),
        (lambda: Exposure(20, 10, 5, math.nan), "0 <= rate <= 1"),
        (lambda: Exposure(0, 10, 5, 0.1), "workers >= 1"),
        (lambda: Exposure(20, 10, 0, 0.1), "rounds >= 1"),
        (lambda: Exposure(20, 10, 5, 0.1, servers=11), "largest number of servers is 10"),
        (
            lambda: Exposure(20, 10, 5, 0.1).survival("phocas:b=10"),
            "Phocas needs 2b < m: got b=10 with m=20 workers, the largest b is 9",
        ),
        (
            lambda: Exposure(20, 10, 5, 0.1).survival("krum:b=9"),
            r"Krum needs 2b \+ 2 < m: got b=9 with m=20 workers, the largest b is 8",
        ),
        (lambda: Exposure(2, 10, 5, 0.1).survival("krum:b=0"), "no b is small enough"),
        (lambda: Exposure(20, 10, 5, 0.1).survival("mena"), "did you mean 'mean'"),
        (lambda: Exposure(20, 10, 5, 0.1).smallest("krum", 1.0), "between 0 and 1: got 1.0"),
    ],
)
def test_invalid_plans_are_rejected(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def command(
    arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str, str]:
    """Run the command line as the console script does."""
    from phocas.cli import main

    monkeypatch.setattr(sys, "argv", ["phocas", *arguments.split()])
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stop:
        main()
    shown = capsys.readouterr()
    return int(stop.value.code or 0), shown.out, shown.err


GAMBLER = "theory plan --num-workers 20 --dims 118282 --rounds 500 --rate 0.0005 --servers 20"


def test_plan_command_prints_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = command(GAMBLER, monkeypatch, capsys)
    assert status == 0
    assert "5915 of 118282 columns exposed (one of 20 servers)" in out
    lines = {line.split()[0]: line for line in out.splitlines() if line.split()}
    assert "none" in lines["krum,"]
    assert "rows <= b <= 8" in lines["krum,"]
    assert "yes" in lines["median"]
    assert "3" in lines["trimmed-mean,"]
    assert "99.91%" in lines["trimmed-mean,"]
    assert "0.000889" in lines["3"]
    assert max(map(len, out.splitlines())) <= 80


def test_plan_command_prints_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = command(GAMBLER + " --b 2..9 --json", monkeypatch, capsys)
    plan = json.loads(out)
    assert status == 0
    assert plan["columns"] == 5915
    assert plan["smallest_b"]["phocas"] == 3
    assert plan["smallest_b"]["krum"] is None
    rows = {(row["rule"], row["b"]): row for row in plan["survival"]}
    assert rows["phocas", 3]["survives"] == pytest.approx(1 - rows["phocas", 3]["fails"])
    assert ("krum", 8) in rows
    assert ("krum", 9) not in rows
    assert ("phocas", 1) not in rows


def test_bounds_command_prints_a_table_and_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = "theory bounds --num-workers 20 --byzantine 6 --b 6..9"
    status, out, _ = command(asked, monkeypatch, capsys)
    assert status == 0
    cells = [line.split() for line in out.splitlines()]
    assert ["phocas", "6", "22.4", "19", "yes"] in cells
    assert [
        "krum",
        "9",
        "-",
        "-",
        "no:",
        "needs",
        "2b",
        "+",
        "2",
        "<",
        "m",
        "(b",
        "<=",
        "8)",
    ] in cells
    assert max(map(len, out.splitlines())) <= 80
    status, out, _ = command(asked + " --json", monkeypatch, capsys)
    rows = {(row["rule"], row["b"]): row for row in json.loads(out)["bounds"]}
    assert rows["phocas", 6]["printed"] == 22.375
    assert rows["krum", 9]["feasible"] is False


def test_bounds_command_measures_errors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = "theory bounds --num-workers 5 --byzantine 1 --measure"
    status, out, _ = command(asked + " --json", monkeypatch, capsys)
    assert status == 0
    rows = [row for row in json.loads(out)["bounds"] if "measured" in row]
    assert {row["rule"] for row in rows} == {"krum", "trimmed-mean", "phocas", "heraclius"}
    for row in rows:
        found = row["measured"]
        assert 0 < found["before"]["error"] < found["after"]["error"] < row["adaptive"]
    _, out, _ = command(asked, monkeypatch, capsys)
    assert "before" in out.splitlines()[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (GAMBLER + " --b 9..10", "2b < m: got b=10 with m=20 workers, the largest b is 9"),
        (
            "theory bounds --num-workers 20 --byzantine 2 --b 10",
            "2b < m: got b=10 with m=20 workers",
        ),
        (
            "theory bounds --num-workers 20 --byzantine 10",
            "got q=10 with m=20 workers, the largest q is 9",
        ),
        ("theory bounds --num-workers 20 --byzantine 6 --b 9..6", "from low to high: got '9..6'"),
        (
            "theory bounds --num-workers 20 --byzantine 6 --b six",
            "a count or a range such as 6..9: got 'six'",
        ),
        (
            "theory plan --num-workers 20 --dims 9 --rounds 5 --rate 2",
            "0 <= rate <= 1: got rate=2.0",
        ),
        ("theory plan --num-workers 20 --dims 0 --rounds 5 --rate 0.1", "dims >= 1: got dims=0"),
        (
            "theory plan --num-workers 20 --rounds 5",
            "--dims and --rate, or --clients and --byzantine",
        ),
        (
            "theory plan --num-workers 20 --rounds 5 --clients 30",
            "--clients and --byzantine go together",
        ),
        (
            "theory plan --num-workers 20 --rounds 5 --clients 9 --byzantine 1",
            "workers <= clients: got",
        ),
        (
            "theory plan --num-workers 2 --rounds 5 --clients 9 --byzantine 10",
            "byzantine <= clients: got",
        ),
    ],
)
def test_mistakes_end_with_one_line_and_status_2(
    arguments: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, out, err = command(arguments, monkeypatch, capsys)
    assert status == 2
    assert out == ""
    assert message in err
    assert len(err.splitlines()) == 1


def test_byzantine_participants_follow_the_hypergeometric_distribution() -> None:
    for clients, liars, m in ((10, 3, 4), (12, 12, 5), (9, 0, 4), (30, 11, 13), (8, 6, 5)):
        plan = Participation(clients, liars, m, rounds=1)
        ways = {k: math.comb(liars, k) * math.comb(clients - liars, m - k) for k in range(m + 1)}
        total = math.comb(clients, m)
        for b in range(m + 1):
            below = Fraction(sum(ways[k] for k in range(b + 1)), total)
            assert plan.at_most(b).survives == pytest.approx(float(below), rel=1e-12)
            assert plan.at_most(b).fails == pytest.approx(float(1 - below), rel=1e-12)


def test_more_participants_need_a_smaller_share_of_b() -> None:
    plan = Participation(clients=1000, byzantine=150, num_workers=50, rounds=300)
    found = [plan.with_workers(m).smallest("phocas") for m in (50, 100, 400)]
    shares = [each.b / m for each, m in zip(found, (50, 100, 400), strict=True) if each and each.b]
    assert shares == sorted(shares, reverse=True)
    assert len(shares) == 3
    all_of_them = plan.with_workers(1000).smallest("phocas")
    assert all_of_them is not None
    assert all_of_them.b == 150


def test_plan_for_clients_prints_a_table_and_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "theory plan --clients 1000 --byzantine 100 --num-workers 50 --rounds 500"
    status, shown, _ = command(words, monkeypatch, capsys)
    assert status == 0
    assert "1000 clients, 100 of them Byzantine; 50 take part in each" in shown
    assert max(map(len, shown.splitlines())) <= 80
    _, written, _ = command(f"{words} --json", monkeypatch, capsys)
    told = json.loads(written)
    assert told["smallest_b"]["phocas"] == 16
    assert told["smallest_b"]["mean"] is None
    assert told["runs_beyond_b"]["16"] == pytest.approx(8.34e-4, rel=1e-2)
