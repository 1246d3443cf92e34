"""Jobs of several data-parallel groups: eight ranks run the scenes of mesh_ranks.py once."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.integrations.mesh_models import check_trial
from tests.integrations.mesh_ranks import EXIT_CODE, FAULTY, GROUP, RANKS
from tests.integrations.scenes import Scene, play

from phocas.integrations.fsdp.guard import MeshDetection, join_flags
from phocas.integrations.reports import FlaggedRank


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


def test_replicas_that_drift_are_reported_by_global_rank_and_tensor(ranks: Scene) -> None:
    for result in ranks("drifting"):
        assert result["told"] == [2, FAULTY]
        assert [(one["rank"], one["kind"], one["since"]) for one in result["suspects"]] == [
            (2, "drifted", 8),
            (FAULTY, "drifted", 8),
        ]
        assert [one["tensors"] for one in result["suspects"]] == [
            ["2.bias (optimizer)"],
            ["0.weight"],
        ]


@pytest.mark.parametrize(
    "name",
    [
        "experts_by_placement",
        "experts_as_units",
        "tensor_parallel",
        "replicas_and_tensor_parallel",
        "pipeline",
    ],
)
def test_mesh_keeps_the_weights_of_plain_fsdp_and_has_its_faulty_rank_flagged(
    ranks: Scene, name: str
) -> None:
    check_trial(ranks(name), FAULTY)


def test_wrong_samples_of_a_rank_do_not_flag_the_ranks_with_its_experts(ranks: Scene) -> None:
    results = ranks("experts_with_wrong_samples")
    for result in results:
        assert result["told"] == result["named"] == [FAULTY]
        assert result["suspects"] == result["again"] == results[0]["suspects"]
        assert {name.split(".")[2] for name in result["layers"] if "blocks" in name} >= {"experts"}
        assert result["members"] == list(range(RANKS))
        assert result["dropped"].argmax() in (FAULTY - 1, FAULTY)
        assert result["finite"]
        assert set(result["state"]) == {"mesh0", "mesh1"}
        flagged = [json.loads(line) for line in result["log"].splitlines()]
        assert [one["rank"] for one in flagged if one["event"] == "suspect"] == [FAULTY]


PAIRS = {rank: [rank - rank % 2, rank - rank % 2 + 1] for rank in range(4)}
ALONE = {rank: [rank] for rank in range(4)}


@pytest.mark.parametrize(
    ("dense", "experts", "joined"),
    [
        ([1], [0, 1], [1]),  # rank 0 has the tokens of rank 1
        ([], [0], [0]),
        ([0, 1], [0, 1], [0, 1]),
        ([3], [0], [0, 3]),  # rank 3 has no tokens of rank 0
        ([2], [], [2]),
        ([0], [1, 2, 3], [0, 2, 3]),
    ],
)
def test_flag_of_experts_is_dropped_if_a_rank_with_its_tokens_is_flagged_by_itself(
    dense: list[int], experts: list[int], joined: list[int]
) -> None:
    def part(ranks: list[int], mates: dict[int, list[int]]) -> MeshDetection:
        flagged = [FlaggedRank(rank=rank, onset=3, dropped=0.5, expected=0.1) for rank in ranks]
        return MeshDetection(
            cast("Any", SimpleNamespace(flagged=lambda: flagged)), cast("Any", None), mates
        )

    parts = [part(dense, ALONE), part(experts, PAIRS)]
    assert [one.rank for one in join_flags(parts)] == joined
    assert [one.rank for one in join_flags(parts[::-1])] == joined


def test_evidence_of_two_meshes_is_joined() -> None:
    early = FlaggedRank(1, 3, 0.1, 0.1, 0.9, ("distances",), "host", {}, "differs", flagged=9)
    late = FlaggedRank(1, 5, 0.4, 0.1, 1.0, ("values",), "host", {}, "nonfinite", flagged=7)
    parts = [
        MeshDetection(
            cast("Any", SimpleNamespace(flagged=lambda one=one: [one])), cast("Any", None), ALONE
        )
        for one in (early, late)
    ]
    (one,) = join_flags(parts)
    assert (one.kind, one.onset, one.flagged, one.dropped) == ("nonfinite", 3, 7, 0.4)
    assert (one.sure, one.grounds) == (1.0, ("values", "distances"))


def test_ranks_with_other_settings_raise_on_every_rank_of_every_group(ranks: Scene) -> None:
    for rank, (rule, large) in enumerate(ranks("unlike")):
        assert "all ranks must be protected alike" in rule
        assert ("rank 5 cannot be protected" in large) == (rank != FAULTY)
        assert "2b < m: got b=2 with m=4 workers" in large


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
