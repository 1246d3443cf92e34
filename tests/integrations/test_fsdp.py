"""FSDP2 with real processes: four ranks run the scenes of fsdp_ranks.py once, for all tests."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers import bits
from tests.integrations.fsdp_ranks import COMBINED, COMBINED_ALONE
from tests.integrations.mesh_models import check_trial
from tests.integrations.scenes import (
    LIAR,
    ROOT,
    WORLD,
    Scene,
    check_dead,
    check_hung,
    check_rare,
    environment,
    play,
)

import phocas
from phocas.seeds import Stream, generator


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return play(Path(__file__).parent / "fsdp_ranks.py", tmp_path_factory.mktemp("ranks"))


def compare(results: list[Any], rule: str, factor: float = 1.0) -> None:
    """Compare each rank's shards with the rule on the same columns in one process, bit by bit."""
    assert len(results) == WORLD
    for step, units in enumerate(results[0]["steps"]):
        assert sorted(unit["unit"] for unit in units) == ["0", "1", "2", "3", "the model"]
        for number in range(len(units)):
            each = [result["steps"][step][number] for result in results]
            rows = torch.stack([unit["sent"].view(WORLD, -1) for unit in each])
            for shard, unit in enumerate(each):
                expected = phocas.parse_rule(rule)(rows[:, shard].contiguous())
                assert bool(expected.isfinite().all())
                assert bits(unit["got"]) == bits(expected * factor)
    for result in results:
        assert bits(result["weights"]) == bits(results[0]["weights"])


@pytest.mark.parametrize(
    ("name", "rule", "factor"),
    [
        ("columns", "phocas:b=1", 1),
        ("blocks", "heraclius:b=1", 1),
        ("averaged", "mean", 1),
        ("watched", "mean", 1),
        ("sum_op", "mean", WORLD),
        ("premultiplied", "heraclius:b=1", WORLD),
        ("bfloat16", "phocas:b=1", 1),
        ("reduced_in_float32", "heraclius:b=1", 1),
        ("float16", "phocas:b=1", WORLD),
    ],
)
def test_every_rank_keeps_the_bits_of_one_process(
    ranks: Scene, name: str, rule: str, factor: int
) -> None:
    compare(ranks(name), rule, factor)


def test_units_have_the_requested_type_and_the_byzantine_row_is_sent(ranks: Scene) -> None:
    for name, dtype in [
        ("columns", torch.float32),
        ("bfloat16", torch.bfloat16),
        ("reduced_in_float32", torch.float32),
        ("float16", torch.float16),
    ]:
        unit = ranks(name)[LIAR]["steps"][-1][0]
        assert unit["sent"].dtype == dtype
        assert bool(unit["sent"].isnan().any())


def test_square_weights_may_be_sharded_by_columns(ranks: Scene) -> None:
    results = ranks("crosswise")
    for step, units in enumerate(results[0]["steps"]):
        for number in range(len(units)):
            each = [result["steps"][step][number] for result in results]
            rows = torch.stack([unit["sent"].view(WORLD, -1) for unit in each])
            for shard, unit in enumerate(each):
                expected = phocas.TrimmedMean(b=1)(rows[:, shard].contiguous())
                assert bits(unit["got"]) == bits(expected)
    # The first address of every holder: a quarter of a row further on each.
    assert results[0]["addresses"]["1.0.weight"] == [0, 8, 16, 24]


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("per_unit", "nnm:b=1|phocas:b=1"),
        ("filtered", "cell-filter:b=1,cutoff=2|nnm:b=1|phocas:b=1"),
    ],
)
def test_rule_that_measures_rows_chooses_for_each_unit(ranks: Scene, name: str, rule: str) -> None:
    results = ranks(name)
    for step, units in enumerate(results[0]["steps"]):
        for number in range(len(units)):
            each = [result["steps"][step][number] for result in results]
            rows = torch.stack([unit["sent"] for unit in each])
            rng = generator(Stream.RULE, 0, step, number)
            expected = phocas.parse_rule(rule)(rows, rng=rng)
            assert bits(torch.cat([unit["got"] for unit in each])) == bits(expected)


@pytest.mark.parametrize("name", ["average", "sum", "bfloat16", "float16"])
def test_the_mean_is_that_of_plain_fsdp_within_rounding_and_watching_changes_nothing(
    ranks: Scene, name: str
) -> None:
    tolerance = {"bfloat16": 1e-3, "float16": 1e-4}.get(name, 1e-6)
    for result in ranks("plain"):
        plain, mean, watched = result[name]
        assert bits(mean) == bits(watched)
        for parameter, weights in plain.items():
            torch.testing.assert_close(weights, mean[parameter], rtol=0, atol=tolerance)


def test_replicas_are_rows_too(ranks: Scene) -> None:
    """A rank keeps a shard of half; half of that it aggregates, and gets the other half."""
    results = ranks("replicated")
    for step, units in enumerate(results[0]["phocas:b=1"]["steps"]):
        for number in range(len(units)):
            each = [result["phocas:b=1"]["steps"][step][number] for result in results]
            rows = torch.stack([unit["sent"].view(2, -1) for unit in each])
            for result, unit in zip(results, each, strict=True):
                shard = rows[:, result["place"][1]].contiguous()
                assert bits(unit["got"]) == bits(phocas.Phocas(b=1)(shard))
    for result in results:
        assert bits(result["phocas:b=1"]["weights"]) == bits(results[0]["phocas:b=1"]["weights"])
        # All of it but the columns that fill up shards, in which everyone has zeros.
        assert 0.95 < result["phocas:b=1"]["dropped"][LIAR] < 1
        for parameter, weights in result["plain"].items():
            torch.testing.assert_close(weights, result["mean"]["weights"][parameter])
        assert all(bool(each.isfinite().all()) for each in result["phocas:b=1"]["weights"].values())


def test_gradients_can_be_clipped(ranks: Scene) -> None:
    norms = ranks("clipped")
    assert norms == [norms[0]] * WORLD
    assert all(0.01 < norm < 100 for norm in norms[0])


def test_gradients_are_accumulated_before_they_are_reduced(ranks: Scene) -> None:
    for result in ranks("accumulated"):
        assert [len(step) for step in result["steps"]] == [5]
        assert result["quiet"] == []
        (said,) = result["said"]
        assert "rules are not linear" in said
        assert "set_requires_gradient_sync(False)" in said


def test_a_resumed_job_has_the_bits_of_one_that_went_on(ranks: Scene) -> None:
    for result in ranks("resumed"):
        on, again = result["weights"]
        assert bits(on) == bits(again)
        assert all(bool(weights.isfinite().all()) for weights in on.values())


def test_a_resumed_job_knows_what_one_that_went_on_does(ranks: Scene) -> None:
    for result in ranks("resumed"):
        on, again = result["reports"]
        assert on == again
        assert on["steps"] == 6
        assert [(one["rank"], one["flagged"]) for one in again["suspects"]] == [(LIAR, 3)]
        assert again["suspects"][0]["since"] == 1
        assert result["at once"] == [LIAR]
        assert result["told"] == []


def test_unused_parameters(ranks: Scene) -> None:
    results = ranks("unused")
    for result in results:
        assert result["nowhere"]["grads"] == [True, True, False, False, False, False]
        assert result["somewhere"]["grads"] == [True] * 6
    units = [result["somewhere"]["steps"][0][0] for result in results]
    rows = torch.stack([unit["sent"].view(WORLD, -1) for unit in units])
    for shard, unit in enumerate(units):
        assert bits(unit["got"]) == bits(phocas.Median()(rows[:, shard].contiguous()))


def test_nan_in_one_parameter_is_survived_and_flagged(ranks: Scene) -> None:
    for result in ranks("one_parameter"):
        assert result["finite"]
        (suspect,) = result["suspects"]
        assert suspect["rank"] == LIAR
        assert (suspect["since"], suspect["flagged"]) == (5, 7)
        assert (suspect["sure"], suspect["kind"]) == (1.0, "nonfinite")
        assert suspect["grounds"] == ["addresses", "values"]
        assert list(suspect["layers"]) == ["1.0.weight"]
        assert suspect["places"]["1.0.weight"]["since"] == 5
        assert suspect["places"]["1.0.weight"]["share"] > 0.99
        assert f"rank {LIAR}" in result["text"]
        assert max(map(len, result["text"].splitlines())) <= 80


def test_silent_corruption_is_flagged_by_rank_and_parameter_within_ten_steps(ranks: Scene) -> None:
    check_corrupted(ranks("corrupted"), seeds=2)


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    folder = tmp_path_factory.mktemp("long")
    return play(Path(__file__).parent / "fsdp_ranks.py", folder, 600, "long")


@pytest.mark.slow
def test_no_honest_rank_is_flagged_with_any_of_twenty_seeds(long: Scene) -> None:
    check_corrupted(long("corrupted_long"), seeds=20)


def check_corrupted(results: list[Any], seeds: int) -> None:
    """See that with each seed the bad rank is named, from step 7 to 16, and nobody else."""
    assert [len(result) for result in results] == [seeds] * WORLD
    for told in zip(*results, strict=True):
        assert all(one["suspects"] == told[0]["suspects"] for one in told)
        assert [rank for rank, one in enumerate(told) if one["struck"]] == [told[0]["bad"]]
        (suspect,) = told[0]["suspects"]
        assert suspect["rank"] == told[0]["bad"]
        assert suspect["since"] <= suspect["flagged"] <= 6 + 10
        assert next(iter(suspect["layers"])) == "2.0.weight"
        places = suspect["places"]["2.0.weight"]
        assert places["kind"] == "hardware"
        assert places["stride"] is not None
        assert places["stride"] % 16 == 0
        assert 0.01 < places["share"] < 0.1
        assert all(one["told"] == [suspect["rank"]] for one in told)
        line = f"rank {suspect['rank']}: since step {suspect['since']}, 2.0.weight"
        assert told[0]["line"][0].startswith(line)


def test_no_rank_is_flagged_if_all_are_honest(ranks: Scene) -> None:
    for result in ranks("honest"):
        report = result["report"]
        assert report["suspects"] == []
        assert report["steps"] == 24
        assert report["ranks"] == WORLD
        assert json.loads(json.dumps(report)) == report
        assert "no rank is flagged" in result["text"]


def test_a_part_of_a_model_is_warned_of_once(ranks: Scene) -> None:
    results = ranks("partial_model")
    assert [len(result["one"]) for result in results] == [1, 0, 0, 0]
    assert results[0]["one"][0].startswith("only 1 of 5 units of the model are protected")
    assert results[0]["four"][0].startswith("only 4 of 5 units of the model are protected")
    assert [result["whole"] for result in results] == [[]] * WORLD


def test_parameters_of_a_compiled_model_have_their_own_names(ranks: Scene) -> None:
    assert ranks("compiled") == [True] * WORLD


@pytest.mark.parametrize("name", COMBINED)
def test_what_is_combined_with_fsdp_keeps_its_weights_and_has_its_faulty_rank_flagged(
    ranks: Scene, name: str
) -> None:
    check_trial([result[name] for result in ranks("combined")], LIAR, steps=5)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMBINED_ALONE)
def test_what_is_used_alone_keeps_its_weights_and_has_its_faulty_rank_flagged(
    long: Scene, name: str
) -> None:
    check_trial([result[name] for result in long("combined_alone")], LIAR, steps=5)


def test_a_mesh_that_is_too_small_for_the_rule_is_averaged_on_request(ranks: Scene) -> None:
    results = ranks("small")
    (said,) = results[0]["told"]
    assert said.startswith("heraclius:b=1 cannot hold on 2 ranks [0, 1], which reduce blocks.0")
    for result in results[1:]:
        assert result["told"] == []
    # The fault is in the gradients of experts too, which are NaN on half of the ranks.
    assert [result["flagged"] for result in results] == [[LIAR]] * WORLD


def test_a_rank_cannot_frame_another_by_what_it_says_to_have_found(ranks: Scene) -> None:
    assert ranks("framing") == [[]] * WORLD


def test_flagged_rank_is_reported_and_logged_once_and_a_closed_guard_is_gone(ranks: Scene) -> None:
    for result in ranks("reactions"):
        assert result["told"] == [LIAR]
        first, entry = map(json.loads, result["log"].splitlines())
        assert (first["event"], first["rank"], first["step"]) == ("nonfinite", LIAR, 3)
        assert first["seen_by"] == WORLD - 1
        assert (entry["event"], entry["rank"], entry["told_by"]) == ("suspect", LIAR, 0)
        assert entry["host"]
        assert result["steps"] == 8
        assert result["after"] == [True] * len(result["after"])


def test_rows_on_a_device_stay_there(ranks: Scene) -> None:
    """What leaves it are samples, lengths of rows, and addresses where a rank sent NaN."""
    results = ranks("on_a_device")
    for text in results[0]:
        rows = torch.stack([each[text]["sent"].view(WORLD, -1) for each in results])
        for shard, each in enumerate(results):
            wanted = phocas.parse_rule(text)(rows[:, shard].contiguous())
            assert bool(wanted.isfinite().all())
            torch.testing.assert_close(each[text]["got"], wanted, rtol=1e-5, atol=1e-6)
            assert each[text]["steps"] == 1
            sent, fetched = each[text]["moved"]
            assert sent < rows.nbytes / WORLD / 8
            assert fetched < rows.nbytes / WORLD / 8


def test_rare_tokens_are_warned_of_once_under_a_rule_and_never_when_watched_or_dense(
    ranks: Scene,
) -> None:
    check_rare(ranks("rare"))


def test_impossible_options_are_rejected(ranks: Scene) -> None:
    for rank, said in enumerate(ranks("rejected")):
        assert "2b < m: got b=2 with m=4 workers, the largest b is 1" in said["too many"]
        assert "use a column rule" in said["krum"]
        assert "per_unit=True" in said["krum"]
        assert said["bare"].startswith("TypeError: model must be sharded: got Linear")
        assert "got str" in said["no model"]
        assert "use phocas.integrations.ddp" in said["ddp"]
        assert "1.weight is in no sharded unit" in said["partly"]
        for meshes, units in (("two meshes", "the model"), ("groups", "the model and 2 more")):
            assert "phocas:b=1 must hold on every mesh of the model: " in said[meshes]
            assert f"4 ranks [0, 1, 2, 3], which reduce {units}" in said[meshes]
            assert re.search(r"2 ranks \[\d, \d\], which reduce .*: .*2b < m", said[meshes])
            assert ": holds" in said[meshes]
            assert "small_groups='average'" in said[meshes]
        assert "did you mean 'average'?" in said["small"]
        assert "replicas need two shards or more" in said["one shard"]
        blame = "" if rank == LIAR else f"rank {LIAR} cannot be protected: "
        assert said["unlike b"].startswith(f"ValueError: {blame}Phocas needs 2b < m: got b=2")
        assert "must be sharded alike: rank 0 has 20 values in 1 unit on" in said["unlike meshes"]
        assert (
            f"rank {LIAR} has 20 values in 1 unit on ranks 0, 1, 2, 3 in 2 replicas"
            in (said["unlike meshes"])
        )
        assert f"rank {rank} has version of phocas " in said["version"]
        assert f"rank 0 has 1, rank {LIAR} has 2; if these are stages" in said["unlike numbers"]
        assert "the model is protected already" in said["twice"]
        assert "did you mean 'per_unit'?" in said["option"]
        assert "Detection needs b >= 1" in said["nobody"]
        assert "2b < m: got b=1 with m=2 workers" in said["pairs"]
        assert "workers are the 2 data-parallel ranks, of 4 ranks in all" in said["pairs"]
        assert said["together"] == "2 steps"
        assert "exit_code must be 1 to 255: got 256" in said["exit code"]
        assert "on_flagged must be a function" in said["callback"]
        pattern = f"rank {rank} has rule '(mean|median)', rank \\d has '(mean|median)'"
        assert re.search(pattern, said["unlike"])


def test_a_rank_that_hangs_raises_on_the_others_within_the_timeout(ranks: Scene) -> None:
    check_hung(ranks("hung"), "step 3, gradients of 3: waited for all 4 ranks")


def test_a_rank_that_dies_raises_on_the_others(ranks: Scene) -> None:
    check_dead(ranks("dead"), "step 3, gradients of 3: waited for all 4 ranks")


@pytest.mark.slow
def test_the_example_with_experts_names_a_broken_device_and_confirms_it() -> None:
    script = str(ROOT / "examples" / "fsdp_mixture_of_experts.py")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "4", script, "--steps", "24"),
        ],
        env={**environment(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "plain FSDP2: step 24, loss nan" in done.stdout
    loss = re.search(r"heraclius:b=1: step 24, loss ([\d.]+)", done.stdout)
    assert loss is not None
    assert float(loss[1]) < 4
    assert re.search(r"rank 2 on .*: flagged in step 1[3-6]\n", done.stdout)
    assert re.search(r"  blocks\.1\.experts\.up\n    since step 1[23]: .*hardware", done.stdout)
    assert "a persistent fault of its device\n    blocks.1.experts.up differs" in done.stdout


@pytest.mark.slow
def test_the_example_outlives_a_broken_device_and_names_it(tmp_path: Path) -> None:
    figure = tmp_path / "curves.png"
    done = subprocess.run(
        [
            *(sys.executable, str(ROOT / "examples" / "fsdp_language_model.py")),
            *("--steps", "90", "--begin", "30", "--figure", str(figure)),
        ],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    assert "plain FSDP2: step 90, loss nan" in done.stdout
    loss = re.search(r"heraclius:b=1: step 90, loss ([\d.]+)", done.stdout)
    assert loss is not None
    assert float(loss[1]) < 3.2
    assert re.search(r"rank 3 on .*: flagged in step 3\d", done.stdout)
    assert "  layers.2.attention.weight\n    since step 31:" in done.stdout
    assert "same addresses, stride 64: hardware" in done.stdout
    assert figure.stat().st_size > 5000
