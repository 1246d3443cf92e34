"""Claims: intervals, verdicts, and synthetic results that agree with the paper or contradict it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from matplotlib.image import imread

from phocas.experiments.reproduction.claims import CLAIMS, CLEANED, PAPER
from phocas.experiments.reproduction.front import Errors, worst_errors
from phocas.experiments.reproduction.outcomes import Outcomes, Repeats
from phocas.experiments.reproduction.tasks import (
    BASELINE,
    Case,
    ClaimsOf,
    Figure,
    Reproduction,
    label_of,
    plan,
)
from phocas.experiments.reproduction.verdicts import Check, ClaimResult, Interval, interval, judge
from phocas.report.claims_table import describe, markdown
from phocas.report.front import draw_front, front_lines, lowest_accuracies
from phocas.report.palette import BASELINE as BASELINE_STYLE
from phocas.report.paper_figures import curves_by_b, draw

if TYPE_CHECKING:
    from phocas.experiments.reproduction.verdicts import Verdict

Level = Callable[[Figure, Case], float]


def as_the_paper_says(figure: Figure, case: Case) -> float:
    """Return an accuracy at the end for which every claim holds."""
    label = case.label.split()[0] if case.label != BASELINE else BASELINE
    steps = {"Mean": 0.0, BASELINE: 0.0, "Phocas": -0.002, "Multi-Krum": -0.006, "Trmean": -0.009}
    level = 0.93 + {**steps, "Krum": -0.014}.get(label, 0.0)
    attacked = case.config.attack is not None
    if attacked and label == "Mean":
        return 0.1
    if attacked and figure.name in ("bit-flip", "gambler", "krum-q", "gambler-b"):
        if "Krum" in label:
            return 0.1
        lead = 0.001 if case.b == 8 else 0.0
        return 0.925 + (lead if label == "Trmean" else 0.0)
    if figure.name == "omniscient" and label == "Trmean":
        return 0.7
    if figure.name == "batch-size":
        return 0.93 + (level - 0.93) * 32 / float(case.config.batch_size)
    return level


def as_we_say(figure: Figure, case: Case) -> float:
    """Return an accuracy at the end for which every claim about Heraclius holds."""
    behind = {"Heraclius": 0.003 if figure.name == "none" else 0.005}
    return 0.93 - behind.get(case.label, 0.0 if case.label.startswith("Mean") else 0.02)


def made_up(level: Level, repeats: int = 5, *, without: int = 0, task: str = "mnist") -> Outcomes:
    """Create results; in every case the last ``without`` repeats are missing."""
    reproduction = plan(task, repeats=repeats)
    milliseconds = {"Mean": 1.0, "Trmean": 2.0, "Phocas": 3.0, "Krum": 5.0, "Multi-Krum": 6.0}
    figures: dict[str, list[Repeats]] = {}
    for figure in reproduction.figures:
        figures[figure.name] = []
        for case in figure.cases:
            rng = np.random.default_rng(
                7
            )  # repeats vary in the same way in every case, as seeds do
            end = level(figure, case) + rng.normal(0, 0.002, (repeats, 1))
            curve = 0.1 + (end - 0.1) * np.array([0.0, 0.7, 0.95, 1.0])
            kept = repeats - without
            figures[figure.name].append(
                Repeats(
                    case=case,
                    wanted=repeats,
                    seeds=tuple(range(kept)),
                    rounds=(0, 100, 300, 500),
                    accuracy=curve[:kept],
                    distance=np.full(kept, 0.5 if case.label == "Trmean" else 0.2),
                    aggregate_ms=np.full(kept, milliseconds.get(case.label, 1.0)),
                    dropped_of_byzantine=np.ones(kept),
                    dropped_of_honest=np.zeros(kept),
                    nonfinite=np.zeros(kept, np.int64),
                )
            )
    return Outcomes(reproduction, figures)


def verdicts(outcomes: Outcomes) -> dict[str, ClaimResult]:
    return {claim.name: judge(claim, outcomes) for claim in CLAIMS[outcomes.reproduction.claims]}


def test_interval_is_students_t_interval() -> None:
    found = interval([0.90, 0.92, 0.97])  # by hand: s = 0.0360555, t = 4.303, / sqrt 3
    assert found.mean == pytest.approx(0.93)
    assert found.high - found.mean == pytest.approx(4.303 * 0.0360555 / math.sqrt(3), rel=1e-5)
    assert interval([0.5] * 4) == Interval(0.5, 0.5, 0.5, 4)
    long = interval(np.arange(101.0))
    assert long.high - long.mean == pytest.approx(1.96 * 29.3 / math.sqrt(101), rel=1e-3)


def test_interval_has_the_stated_coverage() -> None:
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(2000):
        found = interval(rng.normal(3.0, 1.0, 5))
        inside += found.low <= 3.0 <= found.high
    assert inside / 2000 == pytest.approx(0.95, abs=0.015)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (-0.005, 0.005, "holds"),
        (-0.01, 0.01, "holds"),
        (-0.02, 0.005, "not decided"),
        (0.005, 0.02, "not decided"),
        (-1.0, 1.0, "not decided"),
        (0.011, 0.02, "does not hold"),
        (-0.03, -0.02, "does not hold"),
        (-math.inf, math.inf, "not decided"),
        (math.nan, math.nan, "not decided"),
    ],
)
def test_a_check_is_decided_by_its_whole_interval(
    low: float, high: float, verdict: Verdict
) -> None:
    assert Check("x", Interval((low + high) / 2, low, high, 3), -0.01, 0.01).verdict == verdict


def test_every_claim_holds_for_results_like_the_papers() -> None:
    found = verdicts(made_up(as_the_paper_says))
    assert {name: f.verdict for name, f in found.items()} == dict.fromkeys(found, "holds")
    assert {finding.repeats for finding in found.values()} == {5}


def test_every_claim_about_heraclius_holds_for_results_like_ours() -> None:
    found = verdicts(made_up(as_we_say, task="heraclius"))
    assert {name: f.verdict for name, f in found.items()} == dict.fromkeys(found, "holds")
    assert len(found) == len(CLAIMS["heraclius"])
    assert not set(found) & {claim.name for claim in PAPER}


@pytest.mark.parametrize(
    ("figure", "level", "broken"),
    [
        ("none", 0.92, {"none-heraclius"}),
        ("none", 0.94, {"none-heraclius"}),
        ("omniscient", 0.92, {"omniscient-heraclius"}),
        ("gambler", 0.3, {"gambler-heraclius", "gambler-heraclius-phocas"}),
    ],
)
def test_accuracy_cost_of_heraclius_is_detected(
    figure: str, level: float, broken: set[str]
) -> None:
    def other(where: Figure, case: Case) -> float:
        changed = where.name == figure and case.label == "Heraclius"
        return level if changed else as_we_say(where, case)

    found = verdicts(made_up(other, task="heraclius"))
    assert {name for name, f in found.items() if f.verdict == "does not hold"} == broken


def as_cleaning_does(figure: Figure, case: Case) -> float:
    """Return an accuracy at the end for which every claim about the cell filter holds."""
    cells = figure.name in ("bit-flip", "gambler")
    if case.label == "NNM + Trmean" and cells:
        return 0.1
    return 0.921 if case.label in (BASELINE, "Mean") else 0.92


@pytest.mark.parametrize(
    ("task", "figure", "label", "level", "broken"),
    [
        ("choosing", "none", "Mean", 0.93, set()),
        ("choosing", "none", CLEANED, 0.91, {"none-cleaning"}),
        ("choosing", "omniscient", CLEANED, 0.91, {"omniscient-cleaning"}),
        ("choosing", "min-max", CLEANED, 0.91, set()),
        ("choosing", "min-max", CLEANED, 0.85, {"min-max-cleaning"}),
        ("choosing", "gambler", "NNM + Trmean", 0.9, {"cells-nnm"}),
        ("choosing-momentum", "min-max", "Heraclius", 0.5, set()),
        ("choosing-momentum", "none", CLEANED, 0.91, {"none-cleaning"}),
        ("choosing-momentum", "min-max", CLEANED, 0.89, {"min-max-cleaning"}),
        ("choosing-cifar10", "none", "Mean", 0.93, set()),
        ("choosing-cifar10", "none", CLEANED, 0.90, {"none-cleaning"}),
        ("choosing-cifar10", "gambler", CLEANED, 0.85, {"gambler-cleaning"}),
        ("choosing-cifar10", "gambler", "NNM + Trmean", 0.9, {"cells-nnm"}),
    ],
)
def test_claims_about_cell_filter(
    task: ClaimsOf, figure: str, label: str, level: float, broken: set[str]
) -> None:
    def other(where: Figure, case: Case) -> float:
        changed = where.name == figure and case.label == label
        return level if changed else as_cleaning_does(where, case)

    found = verdicts(made_up(other, task=task))
    assert len(found) == len(CLAIMS[task])
    assert {name for name, f in found.items() if f.verdict != "holds"} == broken


def test_front_is_drawn_and_reported(tmp_path: Path) -> None:
    outcomes = made_up(as_cleaning_does, task="choosing")
    errors = {
        label_of(case.config): Errors(case.config.rule, 0.1, None if case.label == "Mean" else 2.0)
        for case in outcomes.reproduction.figures[0].cases
    }
    draw_front(outcomes, errors, tmp_path / "front")
    assert (tmp_path / "front.png").stat().st_size > 10_000
    low = lowest_accuracies(outcomes)["NNM + Trmean"]
    assert low.accuracy == pytest.approx(0.1, abs=0.01)
    assert low.figure in ("bit-flip", "gambler")
    assert low.attacks == 8
    lines = front_lines(outcomes, errors)
    assert any("cell-filter:b=8\\|nnm:b=8" in line and "| 2.00 |" in line for line in lines)
    assert any(line.startswith("| Mean") and "no bound" in line for line in lines)
    quiet = [figure for figure in outcomes.reproduction.figures if figure.name == "none"]
    alone = Outcomes(
        dataclasses.replace(outcomes.reproduction, figures=tuple(quiet)),
        {"none": outcomes.figure("none")},
    )
    draw_front(alone, errors, tmp_path / "alone")
    sizes = [imread(tmp_path / name).shape for name in ("front.png", "alone.png")]
    assert sizes[0][1] > sizes[1][1] > 0  # one bar instead of two


def test_worst_errors_are_measured_once(tmp_path: Path) -> None:
    small = plan("choosing", repeats=1, scale="small")
    config = (
        small.figures[0]
        .cases[0]
        .config.model_copy(
            update={
                "dataset": "synthetic",
                "model": "softmax",
                "workers": 9,
                "servers": 1,
                "rounds": 4,
            }
        )
    )
    cases = tuple(
        Case(rule, config.model_copy(update={"rule": rule}))
        for rule in ("mean", "median", "cell-filter:b=4|nnm:b=3|median")
    )
    figure = dataclasses.replace(small.figures[0], cases=cases)
    tiny = dataclasses.replace(small, figures=(figure,), front=(2, 4))
    path = tmp_path / "worst.json"
    found = worst_errors(tiny, path, q=2)
    assert found["Mean"].worst is None
    assert found["Mean"].quiet < 1e-6
    for label in ("Median", "CellFilter + NNM + Median"):
        quiet, worst = found[label].quiet, found[label].worst
        assert worst is not None
        assert 0 < quiet < worst
    path.write_text(path.read_text().replace('"quiet": 0', '"quiet": 7'))
    assert worst_errors(tiny, path, q=2)["Median"].quiet > 7


@pytest.mark.parametrize(
    ("figure", "whose", "share", "broken"),
    [
        ("gaussian", "byzantine", 0.93, {"dropped-liars"}),
        ("gaussian", "honest", 0.036, {"dropped-honest"}),
        ("omniscient", "byzantine", 0.8, set()),  # the claim is only about the Gaussian attack
        ("bit-flip", "honest", 0.035, {"dropped-honest"}),
    ],
)
def test_wrong_dropped_shares_are_detected(
    figure: str, whose: str, share: float, broken: set[str]
) -> None:
    outcomes = made_up(as_we_say, task="heraclius")
    getattr(outcomes.get(figure, "Heraclius"), f"dropped_of_{whose}")[:] = share
    found = verdicts(outcomes)
    assert {name for name, f in found.items() if f.verdict == "does not hold"} == broken


@pytest.mark.parametrize(
    ("figure", "label", "level", "broken"),
    [
        ("omniscient", "Trmean", 0.92, {"omniscient-trmean"}),
        ("gambler", "Krum", 0.91, {"gambler-others", "classic-krum", "gambler-probability"}),
        (
            "bit-flip",
            "Phocas",
            0.3,
            {"bit-flip-survivors"},
        ),
        ("none", "Phocas", 0.91, {"none-phocas", "none-krum", "candidates",
                                  "phocas-multi-krum"}),
    ],
)  # fmt: skip
def test_claim_contradicted_by_results_does_not_hold(
    figure: str, label: str, level: float, broken: set[str]
) -> None:
    def other(where: Figure, case: Case) -> float:
        changed = where.name == figure and case.label == label
        return level if changed else as_the_paper_says(where, case)

    found = verdicts(made_up(other))
    assert {name for name, f in found.items() if f.verdict == "does not hold"} == broken


def test_phocas_may_be_behind_in_one_experiment_but_not_in_two() -> None:
    def other(*figures: str) -> Level:
        def level(where: Figure, case: Case) -> float:
            behind = where.name in figures and case.label == "Phocas"
            return as_the_paper_says(where, case) - (0.03 if behind else 0.0)

        return level

    one = verdicts(made_up(other("none")))["phocas-best"]
    assert one.verdict == "holds"
    assert "none: Phocas - Multi-Krum, the best other -0.02" in one.checks[0].what
    assert verdicts(made_up(other("none", "gambler")))["phocas-best"].verdict == "does not hold"


def test_rules_that_are_equal_decide_a_claim_of_a_difference() -> None:
    inside = Interval(0.0, -0.0015, 0.0015, 10)
    assert Check("x", inside, at_least=0.0).verdict == "not decided"
    assert Check("x", inside, at_least=0.0, equal=0.002).verdict == "does not hold"
    assert Check("x", inside, at_least=0.0, equal=0.001).verdict == "not decided"
    ahead = Interval(0.001, 0.0005, 0.0015, 10)
    assert Check("x", ahead, at_least=0.0, equal=0.002).verdict == "holds"

    outcomes = made_up(as_the_paper_says)
    multi = outcomes.get("omniscient", "Multi-Krum")
    multi.accuracy[:] = outcomes.get("omniscient", "Phocas").accuracy
    multi.accuracy[:, -1] += [0.0002, -0.0002, 0.0001, -0.0001, 0.0]
    finding = verdicts(outcomes)["omniscient-multi-krum"]
    assert finding.verdict == "does not hold"
    assert finding.note.startswith("Equal within 0.2 points. With b = q both average")


def test_survivors_of_a_rule_that_fails_are_counted() -> None:
    outcomes = made_up(as_the_paper_says)
    outcomes.get("gambler", "Krum").accuracy[:, -1] = [0.92, 0.1, 0.1, 0.1, 0.1]
    texts = [check.what for check in verdicts(outcomes)["gambler-others"].checks]
    assert sum("survive" in text for text in texts) == 1
    assert any(text.endswith("(gambler); 1 of 5 repeats survive") for text in texts)


def test_one_b_that_breaks_a_rule_is_enough_to_reject_a_claim() -> None:
    def other(where: Figure, case: Case) -> float:
        weak = where.name == "gambler-b" and case.label == "Phocas" and case.b == 1
        return 0.3 if weak else as_the_paper_says(where, case)

    finding = verdicts(made_up(other))["gambler-b-phocas"]
    assert finding.verdict == "does not hold"
    assert [check.what for check in finding.checks if check.verdict == "does not hold"] == [
        "Phocas, b=1 - b=8, best"
    ]


def test_one_repeat_decides_nothing_but_shows_the_tendency() -> None:
    found = verdicts(made_up(as_the_paper_says, repeats=1))
    assert {finding.verdict for finding in found.values()} == {"not decided"}
    assert all("agree with" in finding.note for finding in found.values())


def test_disagreeing_repeats_leave_a_claim_undecided() -> None:
    outcomes = made_up(as_the_paper_says, repeats=4)
    wild = outcomes.get("gaussian", "Phocas")
    wild.accuracy[:, -1] = [0.1, 0.93, 0.93, 0.93]
    finding = verdicts(outcomes)["gaussian-phocas"]
    assert finding.verdict == "not decided"
    assert "speak against" in finding.note


def test_rounding_error_does_not_contradict_a_claim() -> None:
    assert Check("equal", Interval(-1e-17, -0.1, 0.1, 3), at_least=0.0).mean_says
    assert not Check("less", Interval(-1e-6, -0.1, 0.1, 3), at_least=0.0).mean_says


def test_a_claim_without_runs_is_not_decided() -> None:
    outcomes = Outcomes(plan("mnist", repeats=2, only=["none"]), {"none": []})
    for finding in verdicts(outcomes).values():
        assert finding.verdict == "not decided"
        assert finding.checks == ()
        assert "no complete run" in finding.note


def test_differences_are_taken_between_the_same_repeats() -> None:
    outcomes = made_up(as_the_paper_says, repeats=5)
    figures = {name: outcomes.figure(name) for name in ("none", "gaussian")}
    phocas = outcomes.get("gaussian", "Phocas")
    late = Repeats(**{**vars(phocas), "seeds": (0, 2, 4), "accuracy": phocas.accuracy[[0, 2, 4]]})
    figures["gaussian"] = [late if case is phocas else case for case in figures["gaussian"]]
    finding = verdicts(Outcomes(outcomes.reproduction, figures))["gaussian-phocas"]
    assert finding.repeats == 3
    assert finding.checks[0].found.mean == pytest.approx(-0.002)
    assert finding.checks[0].found.high == pytest.approx(-0.002)  # the common part cancels


def test_report_shows_claimed_measured_and_missing_results() -> None:
    outcomes = made_up(as_the_paper_says, repeats=5, without=1)
    findings = list(verdicts(outcomes).values())
    text = markdown(
        outcomes.reproduction, outcomes, findings, command="phocas reproduce mnist", facts=["f"]
    )
    assert f"holds: {len(PAPER)}, does not hold: 0, not decided: 0." in text
    assert "`phocas reproduce mnist`" in text
    assert "4 of 5" in text
    assert "Phocas - Mean without failures, at the end (gaussian): -0.002 [" in text
    check = Check("x", interval([12.0, 13.0]), at_most=3.0, unit="ms")
    assert describe(check) == "x: +12.5 ms [+6.15, +18.9], wanted at most 3"


def test_figures_show_the_number_of_repeats(tmp_path: Path) -> None:
    whole, short = made_up(as_the_paper_says), made_up(as_the_paper_says, without=2)
    for name in ("gaussian", "batch-size", "gambler-b"):
        figure = _figure(whole.reproduction, name)
        png, svg = draw(figure, whole, tmp_path / name)
        assert png.read_bytes().startswith(b"\x89PNG")
        text = svg.read_text()
        assert "5 repeats;" in text
        assert " of 5" not in text
        assert "Phocas" in text
    figure = _figure(whole.reproduction, "gaussian")
    again = draw(figure, whole, tmp_path / "again")[1]
    assert again.read_text() == (tmp_path / "gaussian.svg").read_text()
    few = draw(figure, short, tmp_path / "short")[1].read_text()
    assert "3 of 5 repeats: some are missing" in few
    assert "Phocas (3 of 5 repeats)" in few


@pytest.mark.parametrize("name", ["gaussian", "batch-size", "gambler-b"])
def test_one_repeat_has_no_band(tmp_path: Path, name: str) -> None:
    one = made_up(as_the_paper_says, without=4)
    text = draw(_figure(one.reproduction, name), one, tmp_path / name)[1].read_text()
    assert "1 of 5 repeats" in text
    assert "band" not in text
    assert "FillBetween" not in text


def test_no_line_joins_values_of_b_with_unmeasured_ones_between() -> None:
    outcomes = made_up(as_the_paper_says)
    measured = [case for case in outcomes.figure("gambler-b") if case.case.b in (None, 1, 2, 8)]
    styles = dict.fromkeys((case.case.label for case in measured), BASELINE_STYLE)
    for curve in curves_by_b(measured, styles, "best"):
        if curve.label == "Phocas":
            known = ~np.ma.getmaskarray(curve.repeats[0])
            assert known.tolist() == [True, True, False, True]
            assert np.round(np.asarray(curve.x)[known]).tolist() == [1, 2, 8]


def test_each_repeat_is_drawn_if_some_collapse(tmp_path: Path) -> None:
    outcomes = made_up(as_the_paper_says)
    figure = _figure(outcomes.reproduction, "gambler")
    calm = draw(figure, outcomes, tmp_path / "calm")[1].read_text()
    outcomes.get("gambler", "Krum").accuracy[:, -1] = [0.1, 0.9, 0.1, 0.9, 0.1]
    wild = draw(figure, outcomes, tmp_path / "wild")[1].read_text()
    assert "thin: each repeat" in wild
    assert "thin: each repeat" not in calm
    # Two panels, each with one line more for every repeat and one band less.
    assert wild.count('id="line2d_') == calm.count('id="line2d_') + 2 * 5
    assert wild.count('id="FillBetween') == calm.count('id="FillBetween') - 2


def test_only_means_are_drawn_among_many_lines(tmp_path: Path) -> None:
    outcomes = made_up(as_cleaning_does, task="choosing")
    outcomes.get("min-max", "Krum").accuracy[:, -1] = [0.1, 0.9, 0.1, 0.9, 0.1]
    figure = _figure(outcomes.reproduction, "min-max")
    text = draw(figure, outcomes, tmp_path / "many")[1].read_text()
    assert "line: mean" in text
    assert "band" not in text
    assert "thin" not in text
    assert "FillBetween" not in text


def test_reasons_found_on_mnist_are_marked_as_such_elsewhere() -> None:
    outcomes = made_up(as_the_paper_says)
    outcomes.get("gaussian", "Krum").accuracy[:] -= 0.2
    elsewhere = Outcomes(
        dataclasses.replace(outcomes.reproduction, task="cifar10"),
        {figure.name: outcomes.figure(figure.name) for figure in outcomes.reproduction.figures},
    )
    here, there = verdicts(outcomes)["gaussian-krum"], verdicts(elsewhere)["gaussian-krum"]
    assert here.verdict == there.verdict == "does not hold"
    assert here.note == here.claim.reason
    assert there.note == f"On MNIST: {here.claim.reason}"


def _figure(reproduction: Reproduction, name: str) -> Figure:
    return next(figure for figure in reproduction.figures if figure.name == name)
