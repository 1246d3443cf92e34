"""Faults of single ranks, with real processes: how soon they are flagged, and with what.

Four ranks run the scenes of fault_ranks.py. Rank 2 is faulty from step 7 or from step 501 on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.integrations.fault_ranks import LATE
from tests.integrations.scenes import LIAR, Scene, play

SCRIPT = Path(__file__).parent / "fault_ranks.py"
AFTER = {
    "nan_row": 3,
    "bit_30": 3,
    "bit_30_seldom": 60,
    "nan_layer": 3,
    "flipped_layer": 60,
    "noisy_layer": 60,
}
KINDS = {
    "nan_row": {"nonfinite", "hardware"},
    "nan_layer": {"nonfinite"},
    "bit_30": {"wrong", "hardware"},
    "bit_30_seldom": {"wrong", "hardware"},
    "flipped_layer": {"wrong"},
    "noisy_layer": {"wrong", "differs"},
}

WATCHED = ("nan_row", "bit_30")
KNOWN_SIZES = {"known_sizes_flipped": "wrong", "known_sizes_nan": "nonfinite"}


def flagged(results: list[Any], begin: int, steps: int) -> dict[str, Any]:
    """Return the flag of rank 2, which all ranks must have, so many steps after its onset."""
    for result in results[1:]:
        assert result["report"] == results[0]["report"]
    assert results[LIAR]["struck"][0] >= begin
    (one,) = results[0]["report"]["suspects"]
    assert one["rank"] == LIAR
    assert one["flagged"] - begin <= steps
    found: dict[str, Any] = one
    return found


def check_local(ranks: Scene, engine: str, name: str) -> None:
    results = ranks(f"{engine}_{name}")
    one = flagged(results, 6, AFTER[name])
    assert one["kind"] in KINDS[name]
    assert next(iter(one["places"])) in {"1.0.weight", "1.0.bias"}
    assert set(one["places"]) <= {"1.0.weight", "1.0.bias"}
    first = results[LIAR]["struck"][0] + 1
    if "layer" not in name or name == "nan_layer":
        assert one["since"] == first
        assert one["grounds"][-1] == "values"
        assert one["sure"] == 1.0
    else:
        assert abs(one["since"] - first) <= 3
    if "bit_30" in name:
        assert 45 in one["places"]["1.0.weight"]["addresses"]
    if name == "nan_row":
        assert 7 * 64 in one["places"]["1.0.weight"]["addresses"]


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    names = ["ddp_nan_row", "ddp_bit_30", "ddp_flipped_layer", "fsdp_nan_layer", "rejected"]
    names += ["ddp_excluded", "fsdp_excluded", "ddp_unknown_sizes"]
    names += [f"unobserved_{name}" for name in WATCHED]
    for engine in ("ddp", "fsdp"):
        names += [f"{engine}_{name}" for name in ("known_sizes", *KNOWN_SIZES, "bad_samples")]
    return play(SCRIPT, tmp_path_factory.mktemp("quick"), 900, *names)


@pytest.mark.parametrize(
    ("engine", "name"),
    [("ddp", "nan_row"), ("ddp", "bit_30"), ("ddp", "flipped_layer"), ("fsdp", "nan_layer")],
)
def test_local_fault_is_flagged_with_its_parameter(quick: Scene, engine: str, name: str) -> None:
    check_local(quick, engine, name)


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_flagged_rank_is_excluded_from_the_next_step(quick: Scene, engine: str) -> None:
    results = quick(f"{engine}_excluded")
    honest = np.mean([each["own"] for i, each in enumerate(results) if i != LIAR], axis=0)
    for result in results:
        assert result["flagged"] == LIAR
        assert np.linalg.norm(result["moved"] - honest) < 1e-3 * np.linalg.norm(honest)


@pytest.mark.parametrize("name", WATCHED)
def test_watch_flags_a_fault_in_a_step_that_is_not_observed(quick: Scene, name: str) -> None:
    results = quick(f"unobserved_{name}")
    for result in results:
        assert result["apart"] < 1e-5
        guard, run = result["counted"]
        assert guard == run
    begin = results[0]["begin"]
    one = flagged(results, begin, 3)
    assert one["since"] == begin + 1
    assert one["grounds"] == ["values"]


def test_rank_with_a_small_batch_differs_unless_sizes_are_given(quick: Scene) -> None:
    for result in quick("ddp_unknown_sizes"):
        (one,) = result["report"]["suspects"]
        assert (one["rank"], one["kind"]) == (1, "differs")
    for engine in ("ddp", "fsdp"):
        for result in quick(f"{engine}_known_sizes"):
            assert result["report"]["suspects"] == []
            assert result["steps"] == 60


@pytest.mark.parametrize("name", KNOWN_SIZES)
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_fault_among_ranks_with_known_sizes_is_flagged(
    quick: Scene, engine: str, name: str
) -> None:
    for result in quick(f"{engine}_{name}"):
        (one,) = result["report"]["suspects"]
        assert (one["rank"], one["kind"]) == (LIAR, KNOWN_SIZES[name])


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_bad_sizes_are_rejected_on_every_rank(quick: Scene, engine: str) -> None:
    for said in quick(f"{engine}_bad_samples"):
        for name in ("zero", "negative", "nan", "text"):
            assert "samples must be finite numbers > 0: rank 1 gave another" in said[name]
        assert "samples must be given on every rank or on none: rank 1 gave none" in said["missing"]
        assert "samples must be given from the first step on" in said["late"]
        assert "samples are for threat='faults'" in said["adversaries"]


def test_threats_and_states_that_do_not_fit_are_rejected_on_every_rank(quick: Scene) -> None:
    for said in quick("rejected"):
        assert said["unknown"] == (
            "ValueError: threat must be one of faults, adversaries: got 'fault'"
        )
        assert "all ranks must be protected alike: rank" in said["unlike"]
        assert "threat" in said["unlike"]
        assert said["other threat"].startswith(
            "ValueError: evidence must be for the same threat: got 'faults', and this guard has"
            " 'adversaries'; protect the model with threat='faults'"
        )
        assert said["other model"].startswith(
            "ValueError: evidence must be of the same parameters: got 6 of them, which are not"
        )


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    names = [f"{engine}_{name}" for engine in ("ddp", "fsdp") for name in AFTER]
    names += [f"{engine}_watched_{name}" for engine in ("ddp", "fsdp") for name in WATCHED]
    names += ["ddp_late", "fsdp_late"]
    return play(SCRIPT, tmp_path_factory.mktemp("every"), 1800, *names)


@pytest.mark.slow
@pytest.mark.parametrize("name", AFTER)
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_every_local_fault_is_flagged_with_its_parameter(
    every: Scene, engine: str, name: str
) -> None:
    check_local(every, engine, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", WATCHED)
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_watch_flags_the_rank_that_ruined_the_model(every: Scene, engine: str, name: str) -> None:
    one = flagged(every(f"{engine}_watched_{name}"), 6, 3)
    assert one["since"] == 7
    assert one["grounds"] == ["values"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "steps"), [("noise", 40), ("flipped", 60), ("x4", 30)])
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_late_fault_is_flagged_soon_after_its_onset(
    every: Scene, engine: str, name: str, steps: int
) -> None:
    results = every(f"{engine}_late")
    assert results[0]["honest"]["suspects"] == []
    one = flagged([result[name] for result in results], LATE, steps)
    assert abs(one["since"] - (LATE + 1)) <= 16
    assert one["since"] < one["flagged"]
    assert one["kind"] == ("wrong" if name == "flipped" else "differs")
