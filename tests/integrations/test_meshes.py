"""Jobs of several data-parallel groups: eight ranks run the scenes of mesh_ranks.py once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.integrations.mesh_ranks import EXIT_CODE, FAULTY, GROUP, RANKS
from tests.integrations.scenes import Scene, play


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """Play all scenes; the last one ends every rank with the exit code, or this fails."""
    script = Path(__file__).parent / "mesh_ranks.py"
    return play(script, tmp_path_factory.mktemp("ranks"), world=RANKS, code=EXIT_CODE)


def check(results: list[Any], group: list[int]) -> None:
    """See that every rank names the faulty one by its global rank, in the same words."""
    assert len(results) == RANKS
    for rank, result in enumerate(results):
        assert result["suspects"] == results[0]["suspects"]
        (suspect,) = result["suspects"]
        assert (suspect["rank"], suspect["kind"], suspect["since"]) == (FAULTY, "nonfinite", 3)
        assert result["named"] == result["told"] == [FAULTY]
        (first,) = result["nonfinite"]
        assert (first["rank"], first["step"], first["seen_by"]) == (FAULTY, 3, 3)
        assert f"rank {FAULTY} on " in result["text"]
        others = sorted(set(range(RANKS)) - set(group))
        assert result["members"] == (group if rank in group else others)
        assert result["unusual"] == ([FAULTY] if rank in group else [])
        assert set(result["state"]) == {f"ledger{result['members'][0]}", f"rank{rank}"}


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("fsdp_on_a_part_of_a_mesh", GROUP),
        ("ddp_in_a_subgroup", GROUP),
        ("hybrid_on_a_part_of_a_mesh", GROUP),
    ],
)
def test_all_groups_name_one_global_rank(ranks: Scene, name: str, group: list[int]) -> None:
    check(ranks(name), group)


def test_one_rank_of_the_job_writes_the_log(ranks: Scene) -> None:
    for result in ranks("fsdp_on_a_part_of_a_mesh"):
        first, suspect = map(json.loads, result["log"].splitlines())
        assert (first["event"], first["rank"], first["told_by"]) == ("nonfinite", FAULTY, 0)
        assert (suspect["event"], suspect["rank"], suspect["told_by"]) == ("suspect", FAULTY, 0)


def test_a_resumed_job_has_the_answer_on_every_rank_and_does_not_tell_it_again(
    ranks: Scene,
) -> None:
    for result in ranks("ddp_in_a_subgroup"):
        assert result["again"]["named"] == [FAULTY]
        assert result["again"]["told"] == [FAULTY]  # by the first guard


def test_a_group_may_be_all_of_a_job(ranks: Scene) -> None:
    for rank, result in zip(range(RANKS), ranks("apart"), strict=True):
        if rank in GROUP:
            assert result["named"] == [FAULTY]
            assert (
                "job_group must have all ranks of the model's group, [1, 3, 5, 7]" in result["said"]
            )


def test_every_rank_of_every_group_ends_with_the_exit_code(ranks: Scene) -> None:
    with pytest.raises(AssertionError, match="no scene of this name"):
        ranks("leaving")  # no rank has come to the end of it
