"""What one guard knows and does, whoever carries the gradients."""

from __future__ import annotations

import dataclasses
import io
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from tests.integrations.scenes import environment

from phocas.detection.flags import THREATS, Threat
from phocas.detection.locations import findings_at
from phocas.detection.observer import RankObserver, Segment, within
from phocas.detection.rare_features import by_coordinates
from phocas.integrations.detection_state import DetectionState
from phocas.integrations.guard import Guard
from phocas.integrations.job import Job
from phocas.integrations.reactions import Reactions, write_log
from phocas.integrations.reports import FlaggedRank, as_text
from phocas.integrations.wire import Wire
from phocas.report.page.guards import read_reports
from phocas.rules import Heraclius, Phocas, parse_rule

NAMES = ["a.weight", "a.bias"]
M, WIDTH = 4, 4096


def detection(
    reactions: Reactions | None = None, rank: int = 0, threat: Threat = "adversaries"
) -> DetectionState:
    """Return the state of a rank; adversaries are the harder case, with the older tests."""
    reactions = reactions or Reactions()
    return DetectionState(Heraclius(b=1), NAMES, ["host"] * M, rank, reactions, threat)


def step(
    state: DetectionState,
    observers: list[RankObserver],
    seed: int,
    wrong: slice | None,
    others: Sequence[DetectionState] = (),
    value: float = 1e30,
) -> None:
    """Let every observer see its columns, in which worker 2 is wrong somewhere."""
    told = []
    for number, observer in enumerate(observers):
        rng = torch.Generator().manual_seed(1000 * seed + number)
        rows = torch.randn(M, WIDTH, generator=rng)
        if wrong is not None:
            rows[2, wrong] = value
        whole = (Segment(0, 0, WIDTH - 64, number * WIDTH), Segment(1, WIDTH - 64, WIDTH))
        observer.see(rows, whole, number)
        observer.bet()
        told.append(observer.report().view(torch.float64).clone().numpy())
        observer.end()
    lost = np.tile([0.0, 0.0, 0.0 if wrong is None else 0.1 * WIDTH, 0.0], (M, 1))
    for each in (state, *others):
        each.hear(np.array(told), lost, M * WIDTH)
    for observer in observers:
        observer.follow(state.detector)
    for each in (state, *others):
        each.react()


def nothing() -> None:
    """Do nothing."""


def guards(states: list[DetectionState]) -> list[Guard]:
    return [Guard(state, state.observer(0), nothing, nothing) for state in states]


def resumed(
    state: list[dict[str, Any]], hosts: list[str], threat: Threat = "adversaries"
) -> list[Guard]:
    """Return the guards of all ranks of a new job, which have gone through a file."""
    fresh = guards(
        [
            DetectionState(Heraclius(b=1), NAMES, hosts, rank, Reactions(), threat)
            for rank in range(M)
        ]
    )
    for guard, own in zip(fresh, state, strict=True):
        file = io.BytesIO()
        torch.save(own, file)
        guard.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    return fresh


def go_on(each: list[Guard], steps: range, begin: int) -> None:
    """Take steps in the view of the guards of all ranks, which have observers of their own."""
    observers = [guard._observer for guard in each]
    for number in steps:
        wrong = slice(5, 3000, 32) if number >= begin else None
        states = [guard._detection for guard in each]
        step(states[0], observers, number, wrong, others=states[1:])


def played(state: DetectionState, begin: int, steps: int, value: float = 1e30) -> DetectionState:
    observers = [state.observer(0) for _ in range(M)]
    for number in range(steps):
        wrong = slice(5, 3000, 32) if number >= begin else None
        step(state, observers, number, wrong, value=value)
    return state


def test_a_report_has_layers_addresses_and_stride() -> None:
    state = played(detection(), begin=6, steps=12)
    report = state.report()
    (suspect,) = report["suspects"]
    assert (suspect["rank"], suspect["grounds"]) == (2, ["addresses"])
    assert (suspect["since"], suspect["flagged"]) == (7, 9)
    assert (suspect["sure"], suspect["kind"]) == (1.0, "hardware")
    assert list(suspect["layers"]) == ["a.weight"]
    places = suspect["places"]["a.weight"]
    assert places["kind"] == "hardware"
    assert places["stride"] == 32
    assert places["since"] == 7
    assert places["addresses"] == [5 + number * WIDTH for number in range(M)]
    assert places["share"] == pytest.approx(94 / (WIDTH - 64), rel=0.1)
    assert places["others"] < 0.001
    assert json.loads(json.dumps(report)) == report
    text = as_text(report)
    assert "rank 2 on host: flagged in step 9" in text
    assert "same addresses, stride 32: hardware" in text
    assert max(map(len, text.splitlines())) <= 80
    assert str(state.flagged_row(2)).startswith(
        "rank 2: since step 7, a.weight, 2.3% of its values"
    )


@pytest.mark.parametrize("begin", range(80, 84))
def test_most_quiet_steps_are_not_observed_and_a_late_fault_is_flagged_in_time(begin: int) -> None:
    state = detection()
    observers = [state.observer(0) for _ in range(M)]
    seen = []
    for number in range(begin + 40):
        seen.append({observer.awake for observer in observers})
        step(state, observers, number, slice(5, 3000, 32) if number >= begin else None)
    assert all(len(one) == 1 for one in seen)  # ranks look at the same steps
    looked = [one == {True} for one in seen]
    assert all(looked[:64])
    assert sum(looked[64:80]) == 4
    (suspect,) = state.report()["suspects"]
    assert suspect["rank"] == 2
    assert suspect["flagged"] <= begin + 1 + 3 + 2  # it is seen in the fourth, then in each
    assert sum(looked[-16:]) == 4  # who is named is known


def test_a_rank_that_is_wrong_in_steps_that_are_passed_over_is_looked_at() -> None:
    """It knows which steps these are, but not that others notice what is thrown away."""
    state = detection()
    observers = [state.observer(0) for _ in range(M)]
    for number in range(120):
        passed = number >= 70 and number % 4 != 0
        step(state, observers, number, slice(5, 3000, 32) if passed else None)
    assert [suspect["rank"] for suspect in state.report()["suspects"]] == [2]


@pytest.mark.parametrize("poisoned", range(70, 74))
def test_first_nonfinite_value_is_found_in_steps_that_are_not_looked_at(poisoned: int) -> None:
    """One value in one step, of which the model is lost."""
    state = detection()
    observers = [state.observer(0) for _ in range(M)]
    nan = float("nan")
    for number in range(90):
        told = []
        for holder, observer in enumerate(observers):
            rng = torch.Generator().manual_seed(1000 * number + holder)
            rows = torch.randn(M, WIDTH, generator=rng)
            if number == poisoned and holder == 1:
                rows[2, 17] = nan
            if number > poisoned:
                rows[:, 5] = nan
            observer.see(rows, lambda: [Segment(0, 0, 64), Segment(1, 64, WIDTH)], holder)
            observer.bet()
            told.append(observer.report().view(torch.float64).clone().numpy())
            observer.end()
        state.hear(np.array(told), np.zeros((M, M)), M * WIDTH)
        for observer in observers:
            observer.follow(state.detector)
    (first,) = state.report()["nonfinite"]
    assert first == {"rank": 2, "step": poisoned + 1, "parameters": ["a.weight"], "seen_by": 1}
    assert state.report()["lost"] == poisoned + 2
    assert state.report()["suspects"] == []


def test_impossible_dropped_counts_of_ranks_are_tolerated() -> None:
    state = detection()
    told = np.zeros((M, state.observer(0).numbers.size))
    told[:, findings_at(M) :] = np.nan
    lost = np.array([[np.nan] * M, [np.inf] * M, [-np.inf] * M, [0.0, 10.0, 1e300, 5.0]])
    state.hear(told, lost[[0, 2, 3, 3]], 100)
    np.testing.assert_allclose(state.detector.shares(), [0.0, 0.2, 1.0, 0.1])
    state.hear(told, lost, 100)
    assert (state.detector.shares() <= 1.0).all()


@pytest.mark.parametrize("threat", THREATS)
@pytest.mark.parametrize(("saved", "begin"), [(4, 6), (8, 6), (30, 6), (70, 72), (75, 72)])
def test_what_is_known_survives_a_checkpoint(saved: int, begin: int, threat: Threat) -> None:
    whole = guards([detection(rank=rank, threat=threat) for rank in range(M)])
    go_on(whole, range(saved), begin)
    again = resumed([guard.state_dict() for guard in whole], ["host"] * M, threat)
    assert [guard.report() for guard in again] == [guard.report() for guard in whole]
    for each in (whole, again):
        go_on(each, range(saved, saved + 20), begin)
    for one, other in zip(whole, again, strict=True):
        assert one.report() == other.report()
        (suspect,) = other.flagged()
        assert suspect.rank == 2
        assert suspect.places["a.weight"]["stride"] == 32


def test_a_rank_on_another_host_is_new() -> None:
    whole = guards([detection(rank=rank) for rank in range(M)])
    go_on(whole, range(12), begin=6)
    states = [guard.state_dict() for guard in whole]
    stays = resumed(states, ["host", "other", "host", "host"])
    assert [suspect.rank for suspect in stays[0].flagged()] == [2]
    moved = resumed(states, ["host", "host", "other", "host"])
    assert moved[0].flagged() == ()
    go_on(moved, range(12, 40), begin=100)
    assert moved[0].flagged() == ()
    go_on(moved, range(40, 46), begin=40)
    assert [(one.rank, one.onset, one.flagged) for one in moved[0].flagged()] == [(2, 41, 43)]


def test_evidence_of_another_job_is_rejected() -> None:
    guard, other = guards([detection(), detection(rank=1)])
    with pytest.raises(ValueError, match="must have 'rank1': got ledger, rank0"):
        other.load_state_dict(guard.state_dict())
    reactions = Reactions()
    model = DetectionState(Heraclius(b=1), ["b.weight"], ["host"] * M, 0, reactions, "adversaries")
    with pytest.raises(ValueError, match="of the same parameters: got 2 of them, which are not"):
        guards([model])[0].load_state_dict(guard.state_dict())
    five = DetectionState(Heraclius(b=1), NAMES, ["host"] * 5, 0, reactions, "adversaries")
    with pytest.raises(ValueError, match="of as many ranks, with the same b"):
        guards([five])[0].load_state_dict(guard.state_dict())
    (faults,) = guards([detection(threat="faults")])
    with pytest.raises(
        ValueError,
        match="same threat: got 'adversaries', and this guard has 'faults'; protect the model with",
    ):
        faults.load_state_dict(guard.state_dict())
    with pytest.raises(ValueError, match="faults, adversaries: got 'fault'"):
        detection(threat="fault")  # type: ignore[arg-type]


def test_reactions_come_once_and_in_order(tmp_path: Path) -> None:
    told: list[FlaggedRank] = []
    log = tmp_path / "suspects.jsonl"
    for rank in (0, 2):
        played(detection(Reactions.of(told.append, log, None), rank), begin=1, steps=8)
    assert [suspect.rank for suspect in told] == [2, 2]  # on each of two ranks
    (line,) = log.read_text().splitlines()  # by the lowest that is not suspect
    assert json.loads(line)["places"]["a.weight"]["stride"] == 32
    with pytest.raises(FileNotFoundError, match="a folder that exists"):
        Reactions.of(None, tmp_path / "nowhere" / "log", None)
    with pytest.raises(ValueError, match="1 to 255: got 0"):
        Reactions.of(None, None, 0)
    with pytest.raises(ValueError, match="differs, drifted: got 'wrong'"):
        Reactions.of(None, None, 1, "wrong")  # type: ignore[arg-type]


def test_on_flagged_that_raises_is_reported_and_nothing_else_stops(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(suspect: FlaggedRank) -> None:
        raise ConnectionError(f"no pager for rank {suspect.rank}")

    log = tmp_path / "suspects.jsonl"
    state = played(detection(Reactions.of(fail, log, None)), begin=1, steps=8)
    assert state.detector.flagged() == (2,)
    said = capsys.readouterr().err
    assert said.startswith("phocas: on_flagged raised on rank 0 for rank 2; training continues\n")
    assert said.endswith("ConnectionError: no pager for rank 2\n\n")
    assert log.exists()


def test_the_log_alone_makes_the_report_of_its_job(tmp_path: Path) -> None:
    log = tmp_path / "suspects.jsonl"
    state = played(detection(Reactions.of(None, log, None)), begin=1, steps=4)
    (report,) = read_reports(log)
    (suspect,) = report["suspects"]
    assert {name: suspect[name] for name in state.flagged_row(2).report()} == state.flagged_row(
        2
    ).report()
    assert {**report, "suspects": state.report()["suspects"]} == state.report()


def test_log_of_a_rank_that_sends_nan_makes_a_report(tmp_path: Path) -> None:
    log = tmp_path / "suspects.jsonl"
    state = played(detection(Reactions.of(None, log, None)), begin=1, steps=4, value=float("nan"))
    events = [json.loads(line)["event"] for line in log.read_text().splitlines()]
    assert events[0] == "nonfinite"
    assert "suspect" in events
    (report,) = read_reports(log)
    assert report["nonfinite"] == state.report()["nonfinite"]
    assert [suspect["rank"] for suspect in report["suspects"]] == [2]


def test_rank_that_is_flagged_as_another_kind_is_logged_again(tmp_path: Path) -> None:
    log = tmp_path / "suspects.jsonl"
    state = played(detection(Reactions.of(None, log, None)), begin=1, steps=4)
    first = state.flagged_row(2)
    other = dataclasses.replace(first, kind="differs" if first.kind != "differs" else "wrong")
    assert state.reactions.unwritten([first], []) == []
    (entry,) = state.reactions.unwritten([other], [])
    write_log(log, [entry], 0, state.report())
    (report,) = read_reports(log)
    assert [(one["rank"], one["kind"]) for one in report["suspects"]] == [(2, other.kind)]


def test_honest_job_leaves_no_log(tmp_path: Path) -> None:
    log = tmp_path / "suspects.jsonl"
    assert (
        played(detection(Reactions.of(None, log, None)), begin=99, steps=6).detector.flagged() == ()
    )
    assert not log.exists()


@pytest.mark.parametrize(
    "entry",
    [
        {"event": "suspect", "rank": 1},
        {"event": "nonfinite", "rank": 1},
        {"event": "other", "rank": 1, "step": 1, "parameters": [], "seen_by": 3},
    ],
    ids=str,
)
def test_verdict_that_is_not_whole_is_left_out(entry: dict[str, Any]) -> None:
    state = detection()
    state._publish(entry)
    assert (state.public, state.firsts) == ({}, [])


@pytest.mark.parametrize(
    ("rule", "by_single_values"),
    [
        ("heraclius:b=1", False),
        ("heraclius:b=1,tail=0", True),
        ("median", True),
        ("nnm:b=1|phocas:b=1", True),
        ("cell-filter:b=1|mean", True),
        ("mean", False),
        ("monitor:rule=heraclius:b=1", False),
        ("monitor:rule=(cell-filter:b=1|mean)", False),
        ("krum:b=0", False),
        ("geometric-median", False),
        ("phocas:b=0", False),
    ],
)
def test_rules_that_drop_single_values_are_known(rule: str, by_single_values: bool) -> None:
    assert by_coordinates(parse_rule(rule), M) == by_single_values


def rare_parameter(rows: Callable[[torch.Tensor, int], None]) -> float:
    """Return the parameter whose values are found to be rare in 16 steps."""
    state = DetectionState(Phocas(b=1), NAMES, ["host"] * M, 0, Reactions(), "adversaries")
    observer = state.observer(0)
    for number in range(16):
        values = torch.randn(M, WIDTH, generator=torch.Generator().manual_seed(number))
        rows(values[:, 2048:], number)
        observer.see(values, [Segment(0, 0, 2048), Segment(1, 2048, WIDTH)], 0)
        observer.bet()
        told = float(observer.numbers[-1])
        assert np.isnan(told) or number == 15
        observer.end()
    return told


def test_rare_values_are_distinguished_from_unused_and_faulty_ones() -> None:
    def tokens(values: torch.Tensor, number: int) -> None:
        seen = torch.rand(M, 64, generator=torch.Generator().manual_seed(number)) < 0.15
        values.mul_(seen.repeat_interleave(32, dim=1))

    def expert(values: torch.Tensor, number: int) -> None:
        values[torch.arange(M) != number % M] = 0  # one rank at a time has tokens for it

    def unused(values: torch.Tensor, number: int) -> None:
        del number
        values.zero_()

    def unused_and_one_faulty(values: torch.Tensor, number: int) -> None:
        del number
        values[torch.arange(M) != 2] = 0

    def half_off(values: torch.Tensor, number: int) -> None:
        values.mul_(torch.rand(M, 2048, generator=torch.Generator().manual_seed(number)) < 0.6)

    assert rare_parameter(tokens) == 1
    assert rare_parameter(expert) == 1
    for rows in (unused, unused_and_one_faulty, half_off):
        assert np.isnan(rare_parameter(rows))


def test_the_exit_code_is_that_of_the_process(tmp_path: Path) -> None:
    program = (
        "from tests.integrations.test_guard import detection, played, Reactions\n"
        f"played(detection(Reactions.of(print, {str(tmp_path / 'log')!r}, 77)), begin=1, steps=8)\n"
        "print('went on')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 77, done.stderr
    assert done.stdout.startswith("rank 2: since step 2, a.weight")
    assert "went on" not in done.stdout
    assert done.stderr == "phocas: exiting rank 0 with code 77: rank 2 was flagged (hardware)\n"
    assert json.loads((tmp_path / "log").read_text())["rank"] == 2


def test_flags_sent_by_at_most_b_members_of_a_group_are_ignored() -> None:
    """Ranks 4 and 5 tell of rank 6; rank 4 alone tells of rank 7, and rank 0 of another group."""
    job = Job(cast(Wire, SimpleNamespace(m=8)), [((0, 1, 2, 3), 1), ((4, 5, 6, 7), 1)])
    one, other = {"event": "suspect", "rank": 6}, {"event": "suspect", "rank": 7}
    foreign = {"event": "suspect", "rank": 0}
    garbage = ["x", 3, None, {"rank": 7}, [other]]
    told: list[tuple[int, list[Any]]] = [
        (0, [other]),
        (4, [one, other, other, foreign]),
        (5, [*garbage, foreign, one]),
        (6, []),
    ]
    assert list(job.agreed(told)) == [one]


def test_addresses_of_a_shard_are_those_of_the_parameter() -> None:
    """Cut (6, 8, 5) into four along each dimension that allows it, and look values up."""
    whole = torch.arange(6 * 8 * 5)
    for shape, cut in [((8, 30), 0), ((6, 8, 5), 1), ((30, 8), 1)]:
        tail = int(np.prod(shape[cut:]))
        for rank, part in enumerate(whole.view(shape).chunk(4, dim=cut)):
            flat = part.reshape(-1)
            crosswise = {"run": tail // 4, "jump": tail} if cut else {}
            first = rank * (tail // 4 if cut else len(flat))
            segment = Segment(0, 10, 10 + len(flat), first, **crosswise)
            columns = np.arange(len(flat))
            assert segment.address(columns).tolist() == flat.tolist()
            (later,) = within([segment], 13, 40)
            assert (later.begin, later.end) == (0, 27)
            assert later.address(np.arange(27)).tolist() == flat[3:30].tolist()
    assert within([Segment(0, 5, 5), Segment(1, 5, 9)], 0, 5) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30, -1e30])
def test_implausible_values_are_found_in_every_type(dtype: torch.dtype, value: float) -> None:
    observer = RankObserver(M, 1, 0)
    rows = torch.randn(M, 300, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows[1, 100:200:10] = value
    observer.see(rows, [Segment(0, 0, 300)], 0)
    (found,) = observer.findings
    assert (found.worker, found.wild, found.address) == (1, 10, 100)
    assert found.absurd
