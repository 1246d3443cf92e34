"""Weights that differ between ranks: four ranks run the scenes of replica_ranks.py once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.integrations.scenes import LIAR, WORLD, Scene, play

from phocas.integrations.replicas import Drift, check_optimizer, digest


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return play(Path(__file__).parent / "replica_ranks.py", tmp_path_factory.mktemp("ranks"))


def alike(results: list[Any]) -> Any:
    assert len(results) == WORLD
    for result in results:
        assert result["report"] == results[0]["report"]
    return results[0]


def test_honest_replicas_do_not_differ(ranks: Scene) -> None:
    result = alike(ranks("honest"))
    assert result["report"]["suspects"] == []
    assert result["report"]["split"] is None


def test_flipped_bit_of_a_weight_flags_its_rank_and_tensor(ranks: Scene) -> None:
    result = alike(ranks("weight"))
    (one,) = result["report"]["suspects"]
    assert (one["rank"], one["kind"], one["grounds"]) == (LIAR, "drifted", ["replicas"])
    assert one["tensors"] == ["3.weight"]
    assert (one["since"], one["flagged"], one["sure"]) == (8, 8, 1.0)
    assert result["told"] == [(LIAR, "drifted", 8)]
    assert result["said"] == [f"rank {LIAR}: since step 8, weights of 3.weight (drifted)"]
    assert "  weights that are not those of the majority:\n    3.weight" in result["text"]


def test_resumed_guard_forgets_a_drift_and_acts_on_the_next_one(ranks: Scene) -> None:
    """The weights of a resumed job are those of a checkpoint."""
    for result in ranks("weight"):
        assert result["resumed"]["report"]["suspects"] == []
        (one,) = result["once more"]["report"]["suspects"]
        assert (one["rank"], one["tensors"]) == (LIAR, ["0.weight"])
        assert [rank for rank, *_ in result["once more"]["told"]] == [LIAR]


def test_state_of_an_optimizer_is_compared_if_it_is_given(ranks: Scene) -> None:
    results = ranks("state")
    compared = alike([result["compared"] for result in results])
    (one,) = compared["report"]["suspects"]
    assert (one["rank"], one["tensors"]) == (LIAR, ["3.bias (optimizer)"])
    assert alike([result["not"] for result in results])["report"]["suspects"] == []


def test_two_against_two_is_reported_as_a_split(ranks: Scene) -> None:
    results = ranks("two_against_two")
    result = alike(results)
    assert result["report"]["suspects"] == []
    assert result["report"]["split"] == {
        "step": 8,
        "tensors": ["3.weight"],
        "ranks": [[0, 1], [2, 3]],
    }
    assert "weights differ since step 8: ranks 0, 1 against 2, 3" in result["text"]
    assert "no majority: the wrong ranks are unknown" in result["text"]
    (said,) = [text for each in results for text in each["warned"]]
    assert "3.weight is the same on ranks 0, 1 and on ranks 2, 3" in said


def test_two_replicas_of_a_shard_are_reported_as_a_split(ranks: Scene) -> None:
    """Ranks 0 and 2 keep the first shard, ranks 1 and 3 the second."""
    result = alike(ranks("sharded"))
    assert result["before"] is None
    split = result["report"]["split"]
    assert (split["step"], split["ranks"]) == (12, [[0], [2]])
    assert split["tensors"][0] == "3.weight"
    assert result["report"]["suspects"] == []


def test_mesh_without_replicas_is_rejected_if_they_should_be_compared(ranks: Scene) -> None:
    for said in ranks("sharded"):
        for option in ("number", "optimizer"):
            assert "compares ranks that keep the same shard, and 4 ranks" in said[option]
        assert said["zero"] == ()


def test_what_cannot_be_compared_is_rejected_on_every_rank(ranks: Scene) -> None:
    for said in ranks("rejected"):
        assert said["negative"] == (
            "ValueError: protect needs digest_every >= 0: got digest_every=-1"
        )
        assert said["type"] == "TypeError: optimizer must be a torch optimizer: got str"
        assert "all ranks must be protected alike" in said["unlike"]
        assert "has digest_every" in said["unlike"]
        assert "has optimizer" in said["on some"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_optimizer_with_a_part_of_its_state_on_each_rank_is_rejected() -> None:
    optim = pytest.importorskip("torch.distributed.optim")
    sharded = optim.ZeroRedundancyOptimizer.__new__(optim.ZeroRedundancyOptimizer)
    with pytest.raises(ValueError, match="got a ZeroRedundancyOptimizer"):
        check_optimizer(sharded)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("size", [1, 2, 7, 8, 31])
@pytest.mark.parametrize("offset", [0, 1])
def test_every_flipped_bit_changes_the_digest(dtype: torch.dtype, size: int, offset: int) -> None:
    rng = torch.Generator().manual_seed(size)
    bits = torch.randint(256, ((size + offset) * dtype.itemsize,), generator=rng).to(torch.uint8)
    tensor = bits.view(dtype)[offset:]
    before = digest(tensor)
    flat = tensor.view(torch.uint8)
    for place in range(len(flat)):
        for bit in range(8):
            flat[place] ^= 1 << bit
            assert digest(tensor) != before
            flat[place] ^= 1 << bit
    assert digest(tensor) == before


def test_digest_does_not_depend_on_strides() -> None:
    tensor = torch.randn(2, 3, 4, 5)
    assert digest(tensor.to(memory_format=torch.channels_last)) == digest(tensor)
    assert digest(torch.tensor(3.0)) == digest(torch.tensor([3.0]))
    assert digest(torch.empty(0)) == 0


@pytest.mark.parametrize("seed", range(20))
def test_minority_is_that_of_a_plain_count(seed: int) -> None:
    rng = np.random.default_rng(seed)
    m, names = int(rng.integers(2, 7)), ("a", "b", "c")
    digests = np.where(rng.random((m, 6)) < 0.25, rng.integers(-2, 2, (m, 6)), 5)
    copies = [[row for row in range(m) if row % 2 == shard] for shard in (0, 1)]
    copies = copies if seed % 2 and m > 3 else [list(range(m))]
    drift = Drift(names, range(10, 10 + m), copies)
    drift.compare(digests, step=9)
    wrong: dict[int, list[str]] = {}
    undecided: list[str] = []
    for rows in copies:
        for column, name in enumerate([*names, *(f"{name} (optimizer)" for name in names)]):
            values = digests[rows, column].tolist()
            ((value, times),) = Counter(values).most_common(1)
            if 2 * times <= len(rows):
                undecided += [] if name in undecided else [name]
                continue
            for row in rows:
                if digests[row, column] != value:
                    wrong.setdefault(row, []).append(name)
    assert {row: list(found) for row, (_, found) in drift.rows.items()} == wrong
    assert (drift.split["tensors"] if drift.split else []) == undecided
    assert not drift.compare(digests, step=19)
    assert all(step == 9 for step, _ in drift.rows.values())
