"""Replays of a flagged rank's micro-batch: four ranks run the scenes of replay_ranks.py once."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.helpers import bits
from tests.integrations.replay_ranks import STEPS
from tests.integrations.scenes import LIAR, WORLD, Scene, play
from torch import nn

from phocas.integrations.confirmation import differences, judge
from phocas.integrations.ddp.replay import check_replay

SCRIPT = Path(__file__).parent / "replay_ranks.py"
OTHER = (LIAR + 1) % WORLD


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return play(SCRIPT, tmp_path_factory.mktemp("ranks"))


def verdict(results: list[Any], expected: str) -> dict[str, Any]:
    """Return the confirmation of rank 2 alone, which must be the same on every rank."""
    assert len(results) == WORLD
    for result in results:
        assert result["found"] == results[0]["found"]
        assert result["found"].keys() == {LIAR}
        assert result["told"] == [(LIAR, result["found"][LIAR])]
    found: dict[str, Any] = results[0]["found"][LIAR]
    assert (found["verdict"], found["by"]) == (expected, OTHER), found
    assert bool(found["reason"]) == (expected == "not reproduced")
    assert max(map(len, results[0]["text"].splitlines())) <= 80
    return found


def test_fault_that_persists(ranks: Scene) -> None:
    results = ranks("persistent")
    found = verdict(results, "persistent")
    assert list(found["parameters"]) == ["head.weight"]
    assert found["parameters"]["head.weight"] > 1e6
    assert "a persistent fault of its device" in results[0]["text"]
    assert results[LIAR]["strikes"] == 4 + 1  # one replay, once


def test_fault_of_plausible_values_that_persists(ranks: Scene) -> None:
    assert list(verdict(ranks("noise"), "persistent")["parameters"]) == ["body.0.weight"]


def test_fault_that_strikes_once(ranks: Scene) -> None:
    results = ranks("transient")
    assert list(verdict(results, "transient")["parameters"]) == ["head.weight"]
    assert results[LIAR]["strikes"] == 1
    assert "a transient fault of its device" in results[0]["text"]


def test_data_that_are_poisoned(ranks: Scene) -> None:
    results = ranks("data")
    assert verdict(results, "data")["parameters"] == {}
    assert "its data or settings are unusual" in results[0]["text"]


@pytest.mark.parametrize("name", ["with_loss", "views", "autocast"])
@pytest.mark.parametrize("expected", ["persistent", "transient"])
def test_loops_of_several_kinds(ranks: Scene, name: str, expected: str) -> None:
    found = verdict([result[expected] for result in ranks(name)], expected)
    assert list(found["parameters"]) == ["head.weight"]


def test_accumulated_micro_batches_show_a_fault_that_persists_only(ranks: Scene) -> None:
    results = ranks("accumulated")
    verdict([result["persistent"] for result in results], "persistent")
    found = verdict([result["transient"] for result in results], "not reproduced")
    assert "the same gradient of the last micro-batch, and the step had more" in found["reason"]


def test_weights_that_differ(ranks: Scene) -> None:
    assert list(verdict(ranks("weights"), "weights")["parameters"]) == ["head.weight"]


def test_weights_that_are_not_finite(ranks: Scene) -> None:
    found = verdict(ranks("nan_under_watch"), "not reproduced")
    assert "the weights are not finite" in found["reason"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("output", "no micro-batch is known"),
        ("input", "got a Box"),
        ("fails", "MemoryError: no room for a second pass"),
        ("penalty", "the loss depends on more than the model's output"),
    ],
)
def test_micro_batch_that_is_gone_has_a_reason_on_every_rank(
    ranks: Scene, name: str, reason: str
) -> None:
    assert reason in verdict([one[name] for one in ranks("gone")], "not reproduced")["reason"]


def test_replay_disturbs_neither_training_nor_random_states(ranks: Scene) -> None:
    for (state, random, told), (expected, same_random, same_told) in ranks("undisturbed"):
        assert told == same_told == 1
        assert bits(random) == bits(same_random)
        torch.testing.assert_close(state, expected, rtol=0, atol=0, equal_nan=True)


def test_closed_guard_has_no_hooks_and_another_may_follow(ranks: Scene) -> None:
    assert ranks("closed") == [(0, 3)] * WORLD


def test_what_cannot_be_replayed_is_rejected_on_every_rank(ranks: Scene) -> None:
    for said in ranks("rejected"):
        assert said["unknown"] == "ValueError: confirm must be 'replay' or None: got 'again'"
        assert "confirm needs threat='faults': got 'adversaries'" in said["threat"]
        assert "has confirm" in said["unlike"]


def test_layers_that_need_all_ranks_are_rejected() -> None:
    """DDP takes SyncBatchNorm on GPUs only."""
    model: Any = SimpleNamespace(module=nn.Sequential(nn.Linear(3, 3), nn.SyncBatchNorm(3)))
    with pytest.raises(ValueError, match="1 is a SyncBatchNorm, which needs all ranks"):
        check_replay(model)


@pytest.mark.parametrize("name", ["plain", "replicas", "mixed", "loss", "twice"])
@pytest.mark.parametrize("expected", ["persistent", "transient"])
def test_fault_under_fsdp(ranks: Scene, name: str, expected: str) -> None:
    found = verdict([result[name][expected] for result in ranks("sharded")], expected)
    assert list(found["parameters"]) == ["head.weight"]
    assert found["parameters"]["head.weight"] > 1e6


def test_data_that_are_poisoned_under_fsdp(ranks: Scene) -> None:
    assert verdict([one["data"] for one in ranks("sharded")], "data")["parameters"] == {}


def test_fault_of_plausible_values_under_fsdp(ranks: Scene) -> None:
    found = verdict(ranks("sharded_noise"), "persistent")
    assert found["parameters"] == {"head.weight": pytest.approx(11)}  # from x to -10 x


def test_accumulated_micro_batches_under_fsdp(ranks: Scene) -> None:
    results = ranks("sharded_accumulated")
    verdict([result["persistent"] for result in results], "persistent")
    found = verdict([result["transient"] for result in results], "not reproduced")
    assert "the same gradient of the last micro-batch, and the step had more" in found["reason"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("output", "no replay on rank 0: ValueError: no micro-batch is known"),
        ("input", f"no replay on rank {LIAR}: TypeError: inputs of the model must be tensors"),
        ("unlike", "the other rank does not reproduce its own gradient either"),
    ],
)
def test_micro_batch_that_is_gone_under_fsdp(ranks: Scene, name: str, reason: str) -> None:
    found = verdict([one[name] for one in ranks("sharded_gone")], "not reproduced")
    assert found["reason"].startswith(reason)


def test_replicas_with_other_weights_are_not_compared(ranks: Scene) -> None:
    for result in ranks("sharded_weights"):
        found = result["found"][LIAR]
        assert (found["verdict"], found["by"]) == ("weights", 0)
        assert list(found["parameters"]) == ["head.weight"]


def test_replay_under_fsdp_disturbs_nothing(ranks: Scene) -> None:
    for (kept, random, *counts), (expected, same_random, *same) in ranks("sharded_undisturbed"):
        assert counts == same == [1, STEPS]
        assert bits(random) == bits(same_random)
        torch.testing.assert_close(kept, expected, rtol=0, atol=0)


def test_closed_guard_under_fsdp_has_no_hooks(ranks: Scene) -> None:
    assert ranks("sharded_closed") == [2] * WORLD


def test_what_cannot_be_replayed_under_fsdp_is_rejected_on_every_rank(ranks: Scene) -> None:
    for said in ranks("sharded_rejected"):
        assert "call fully_shard on the model itself, too" in said["bare"]
        assert "the ranks of this job share samples or have several meshes" in said["meshes"]
        assert "confirm needs threat='faults': got 'adversaries'" in said["threat"]
        assert "has confirm" in said["unlike"]


NAMES = ["a", "b"]
RIGHT = [torch.tensor([1.0, 2.0]), torch.tensor([3.0])]
WRONG = [RIGHT[0], torch.tensor([4.0])]
NOISE = [RIGHT[0], torch.tensor([1e-9])]  # of a gradient that is zero in exact arithmetic
OTHER_NOISE = [RIGHT[0], torch.tensor([-2e-9])]
NAN = [RIGHT[0], torch.tensor([math.nan])]


@pytest.mark.parametrize(
    ("original", "replay", "elsewhere", "control", "expected"),
    [
        (RIGHT, RIGHT, RIGHT, [0, 0], ("data", [])),
        (WRONG, WRONG, RIGHT, [0, 0], ("persistent", ["b"])),
        (RIGHT, WRONG, RIGHT, [0, 0], ("persistent", ["b"])),
        (NAN, NAN, RIGHT, [0, 0], ("persistent", ["b"])),
        (NAN, NAN, NAN, [0, 0], ("data", [])),
        (WRONG, RIGHT, RIGHT, [0, 0], ("transient", ["b"])),
        (NAN, RIGHT, RIGHT, [0, 0], ("transient", ["b"])),
        (WRONG, RIGHT, RIGHT, [0, 0.5], ("not reproduced", ["b"])),
        (WRONG, WRONG, RIGHT, [0.5, 0], ("persistent", ["b"])),
        (WRONG, RIGHT, RIGHT, [0, 0.09], ("data", [])),  # 4 is within 4 x 0.09 of 3
        (None, WRONG, RIGHT, None, ("persistent", ["b"])),
        (None, RIGHT, RIGHT, None, ("not reproduced", [])),
        (NOISE, NOISE, OTHER_NOISE, [0, 0], ("data", [])),
    ],
)
def test_verdicts(
    original: Any, replay: Any, elsewhere: Any, control: Any, expected: tuple[str, list[str]]
) -> None:
    found, parameters, reason = judge(
        NAMES,
        [torch.finfo(torch.float32).eps] * 2,
        differences(replay, elsewhere),
        None if original is None else differences(original, elsewhere),
        control,
    )
    assert (found, list(parameters)) == expected
    assert bool(reason) == (found == "not reproduced")


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    (found,) = differences([one], [other])
    return found


def test_difference_is_relative_and_counts_values_that_are_not_finite() -> None:
    nan, inf = math.nan, math.inf
    assert difference(torch.tensor([1.0, nan]), torch.tensor([1.0, nan])) == 0
    assert difference(torch.tensor([3.0, inf]), torch.tensor([4.0, inf])) == pytest.approx(0.25)
    for one, other in [([nan], [1.0]), ([inf], [-inf]), ([1.0], [inf]), ([1.0], [0.0])]:
        assert difference(torch.tensor(one), torch.tensor(other)) == 1e9
    assert difference(torch.tensor([5.0], dtype=torch.bfloat16), torch.tensor([4.0])) == 0.25
    assert difference(torch.empty(0), torch.empty(0)) == 0


@pytest.mark.slow
def test_twenty_seeds_of_silent_corruption_are_flagged_and_confirmed(tmp_path: Path) -> None:
    results = play(SCRIPT, tmp_path, 280, "seeds")("seeds")
    for result in results[1:]:
        assert result == results[0]
    for who, name, lasting, found in results[0]:
        assert found.keys() == {who}
        assert found[who]["verdict"] == ("persistent" if lasting else "transient")
        assert list(found[who]["parameters"]) == [name]
