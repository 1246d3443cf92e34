"""DDP with real processes: four ranks run the scenes of ddp_ranks.py once, for all tests here."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.helpers import bits
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
from torch.nn.parallel import DistributedDataParallel

import phocas
from phocas.integrations.ddp import protect
from phocas.integrations.wire import pack, unpack
from phocas.rules.measures import Partial
from phocas.seeds import Stream, generator
from phocas.sharding import shard_bounds


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return play(Path(__file__).parent / "ddp_ranks.py", tmp_path_factory.mktemp("ranks"))


def stacked(results: list[Any], step: int) -> torch.Tensor:
    return torch.stack([torch.cat(result[step]["sent"]) for result in results])


def compare(results: list[Any], rule: str) -> None:
    """Compare all ranks' gradients with the rule on one process, bit by bit."""
    assert len(results) == WORLD
    for step in range(len(results[0])):
        rows = stacked(results, step)
        rng = generator(Stream.RULE, 0, step)  # as a trainer draws
        expected = phocas.parse_rule(rule)(rows, rng=rng)
        assert bool(expected.isfinite().all())
        for result in results:
            assert bits(torch.cat(result[step]["got"])) == bits(expected)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("columns", "phocas:b=1"),
        ("verified", "phocas:b=1"),
        ("bucket_views", "trimmed-mean:b=1"),
        ("krum", "krum:b=0"),
        ("mixing", "nnm:b=1|phocas:b=1"),
        ("centre", "geometric-median"),
        ("drawing", "bucketing:size=3|mean"),
        ("cleaned", "cell-filter:b=1,cutoff=2|nnm:b=1|heraclius:b=1"),
        ("watched", "monitor:rule=heraclius:b=1"),
        ("bfloat16", "phocas:b=1"),
        ("bfloat16_krum", "krum:b=0"),
        ("two_columns", "phocas:b=1"),
        ("accumulated", "phocas:b=1"),
    ],
)
def test_every_rank_has_the_bits_of_one_process(ranks: Scene, name: str, rule: str) -> None:
    compare(ranks(name), rule)


def test_heraclius_has_the_blocks_of_a_shard(ranks: Scene) -> None:
    results = ranks("blocks")
    assert len(results) == WORLD
    for step in range(len(results[0])):
        buckets = zip(*(result[step]["sent"] for result in results), strict=True)
        parts = [
            phocas.Heraclius(b=1)(torch.stack(rows)[:, begin:end])
            for rows in buckets
            for begin, end in shard_bounds(len(rows[0]), WORLD)
        ]
        for result in results:
            assert bits(torch.cat(result[step]["got"])) == bits(torch.cat(parts))


def test_the_byzantine_row_is_sent_and_buckets_are_several_and_rebuilt(ranks: Scene) -> None:
    results = ranks("columns")
    layouts = [[len(flat) for flat in step["sent"]] for step in results[0]]
    assert layouts[0] != layouts[-1]
    assert len(layouts[-1]) >= 3
    assert any(len(flat) % WORLD for flat in results[0][-1]["sent"])
    assert bool(stacked(results, 0)[LIAR].isnan().all())


def test_krum_sees_the_whole_gradient(ranks: Scene) -> None:
    """Bucket by bucket it would choose other rows: one choice for each bucket."""
    results = ranks("krum")
    differs = []
    for step in range(len(results[0])):
        whole = torch.cat(results[0][step]["got"])
        buckets = zip(*(result[step]["sent"] for result in results), strict=True)
        apart = torch.cat([phocas.Krum(b=0)(torch.stack(rows)) for rows in buckets])
        differs.append(bits(whole) != bits(apart))
    assert any(differs)


def test_random_rules_draw_anew_in_each_step(ranks: Scene) -> None:
    results = ranks("drawing")
    rule = phocas.parse_rule("bucketing:size=3|mean")
    first = np.random.default_rng([0, 0])
    assert any(
        bits(torch.cat(results[0][step]["got"])) != bits(rule(stacked(results, step), rng=first))
        for step in range(1, len(results[0]))
    )


def test_a_resumed_guard_draws_and_knows_as_one_that_went_on(ranks: Scene) -> None:
    """Buckets are those of a new model at first, whose rule is the same on any of them."""
    for (weights, report), (weights_again, again) in ranks("resumed"):
        assert report == again
        assert report["steps"] == 6
        for name, value in weights.items():
            torch.testing.assert_close(value, weights_again[name])


def test_gradients_are_accumulated_before_they_are_exchanged(ranks: Scene) -> None:
    """Six batches were added up, and two exchanges made."""
    assert [len(result) for result in ranks("accumulated")] == [2] * WORLD


def test_unused_parameters(ranks: Scene) -> None:
    results = ranks("unused")
    compare([result["steps"] for result in results], "median")
    assert [result["never"] for result in results] == [[True, True]] * WORLD


def test_only_the_byzantine_rank_is_flagged(ranks: Scene) -> None:
    for lying, honest in ranks("flagged_ranks"):
        assert [rank for rank, _ in lying["suspects"]] == [LIAR]
        assert lying["suspects"][0][1] == pytest.approx(lying["dropped"][LIAR] - 1 / WORLD)
        assert lying["suspects"][0][1] > 0.5
        assert lying["since"][0] <= lying["flagged"][0] <= 25
        assert honest["suspects"] == []
        assert lying["steps"] == honest["steps"] == 60


def test_watching_names_the_rank_and_layers_that_are_corrupted(ranks: Scene) -> None:
    results = ranks("corrupted")
    assert [bool(result["struck"]) for result in results] == [rank == LIAR for rank in range(WORLD)]
    for result in results:
        assert result["report"] == results[0]["report"]
        (suspect,) = result["report"]["suspects"]
        assert suspect["rank"] == LIAR
        assert 7 <= suspect["since"] <= suspect["flagged"] <= 6 + 10
        assert {"0.weight", "1.weight"} <= set(suspect["layers"])
        assert suspect["places"]["1.weight"]["kind"] == "hardware"
        assert suspect["places"]["1.weight"]["stride"] % 16 == 0
        assert result["told"] == [LIAR]


def test_first_nonfinite_value_is_kept_when_the_model_is_lost(ranks: Scene) -> None:
    """NaN in one weight of one rank in step 4 is in all weights, and in all ranks, from step 5."""
    for before, report, text, unusual in ranks("lost"):
        (first,) = report["nonfinite"]
        assert first == {"rank": LIAR, "step": 4, "parameters": ["0.weight"], "seen_by": 3}
        assert report["lost"] == 5
        assert report["steps"] == 12
        (suspect,) = report["suspects"]  # the last rank before all that was not finite
        assert (suspect["rank"], suspect["kind"], suspect["grounds"]) == (
            LIAR,
            "nonfinite",
            ["values"],
        )
        assert (suspect["since"], suspect["flagged"]) == (4, 5)
        assert report["unusual"] == [LIAR]
        assert unusual == (LIAR,)
        assert report["dropped"] == pytest.approx(before["dropped"])
        assert f"the first non-finite value came from rank {LIAR} in step 4" in text
        assert "  parameter 0.weight" in text
        assert "no rank is finite since step 5: evidence is void since" in text


def test_a_flagged_rank_has_the_kind_that_its_gradients_show(ranks: Scene) -> None:
    results = ranks("kinds")
    for result in results:
        for name, kind in [
            ("half the batch", "differs"),
            ("loss x50", "differs"),
            ("signs flipped", "wrong"),
            ("x1e20", "wrong"),
            ("NaN", "nonfinite"),
        ]:
            (suspect,) = result[name]["suspects"]
            assert (suspect["rank"], suspect["kind"]) == (LIAR, kind), (name, suspect)
            assert suspect["sure"] > 0.99
            assert all(places["kind"] != "hardware" for places in suspect["places"].values())
            assert (result[name]["told"] == []) == (kind == "differs")
            assert abs(suspect["since"] - 7) <= 1, (name, suspect)
            assert suspect["flagged"] >= suspect["since"]
        assert result["asked for"] == [LIAR]
        assert "differs from the others, and need not be faulty" in result["half the batch"]["text"]


def test_a_closed_guard_averages_again(ranks: Scene) -> None:
    for result in ranks("closed"):
        assert result["steps"] == 2
        assert all(result["nan"])


def test_a_model_is_protected_once_at_a_time_and_again_after_a_close(ranks: Scene) -> None:
    for result in ranks("protected_again"):
        assert result["twice"] == (
            "ValueError: the model is protected already: close its guard first"
        )
        assert result["steps"] == (0, 3)
        assert result["finite"]
        assert "has a communication hook already" in result["hooked"]
        assert "got allreduce_hook" in result["hooked"]


def test_a_compiled_model_is_protected(ranks: Scene) -> None:
    assert ranks("compiled") == [[(2, True), (2, True)]] * WORLD


def test_buffers_that_rank_0_gives_to_all_are_warned_of_once(ranks: Scene) -> None:
    results = ranks("buffers")
    assert [len(result["given"]) for result in results] == [1, 0, 0, 0]
    (said,) = results[0]["given"]
    assert said.startswith("1 has running statistics, and DDP overwrites them with rank 0's")
    assert "forward_sync_buffers=False" in said
    for result in results:
        assert result["kept"] == result["none"] == []


def test_a_rank_cannot_frame_another_by_what_it_says_of_its_shard(ranks: Scene) -> None:
    assert ranks("framing") == [[]] * WORLD


def test_dropped_shares_are_those_of_one_process(ranks: Scene) -> None:
    results = ranks("flagged_ranks")
    for run in range(2):
        each = zip(*(result[run]["each"] for result in results), strict=True)
        shares = [phocas.Phocas(b=1).explain(torch.stack(rows)).dropped for rows in each]
        for result in results:
            np.testing.assert_allclose(result[run]["dropped"], np.mean(shares, axis=0), atol=1e-12)


@pytest.mark.parametrize("name", ["lying_aggregator", "lying_measurer", "lying_checker"])
def test_rank_that_aggregates_wrongly_is_reported_on_every_rank(ranks: Scene, name: str) -> None:
    results = ranks(name)
    assert len(results) == WORLD
    for result in results:
        assert result["kind"] == "AggregatorError"
        assert result["ranks"] == (LIAR,)
        first, second = result["said"]
        assert f"rank {LIAR} aggregated shard" in first
        assert "aggregation ended in an earlier step" in second


def test_two_versions_of_a_gradient_are_noticed(ranks: Scene) -> None:
    for result in ranks("two_versions"):
        assert result["kind"] == "AggregatorError"
        assert LIAR in result["ranks"]
        assert f"different values of rank {LIAR}" in result["said"][0]


def test_rare_tokens_are_warned_of_once_under_a_rule_and_never_when_watched_or_dense(
    ranks: Scene,
) -> None:
    check_rare(ranks("rare"))


def test_impossible_options_are_rejected(ranks: Scene) -> None:
    for rank, said in enumerate(ranks("rejected")):
        assert "2b < m: got b=2 with m=4 workers, the largest b is 1" in said["too many"]
        assert "the largest b is 0" in said["krum"]
        assert said["bare"].startswith("TypeError: model must be a DistributedDataParallel")
        assert "must be dense" in said["sparse"]
        assert "did you mean 'phocas'?" in said["unknown"]
        assert "use a column rule" in said["dtypes"]
        options = (
            "options: verify, threat, seed, timeout, on_flagged, log, exit_code, act_on,"
            " verdict_file, job_group, digest_every, optimizer, confirm"
        )
        unknown = "TypeError: unknown option 'exitcode'; did you mean 'exit_code'? "
        assert said["option"] == unknown + options
        assert "did you mean 'verify'?" in said["own option"]
        assert said["nobody"] == "ValueError: Detection needs b >= 1: got b=0"
        pattern = f"rank {rank} has rule '(mean|median)', rank \\d has '(mean|median)'"
        assert re.search(pattern, said["unlike"])


def test_a_rank_that_hangs_raises_on_the_others_within_the_timeout(ranks: Scene) -> None:
    check_hung(ranks("hung"), "step 3: waited for all 4 ranks")


def test_a_rank_that_dies_raises_on_the_others(ranks: Scene) -> None:
    check_dead(ranks("dead"), "step 3: waited for all 4 ranks")


@pytest.mark.parametrize("verify", [False, True])
def test_a_world_of_one_and_a_guard_that_ends_with_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verify: bool
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        module = torch.nn.Linear(3, 2)
        model = DistributedDataParallel(module)
        guard = weakref.ref(protect(model, "mean", verify))
        inputs = torch.tensor([[1.0, 2.0, 3.0]])
        model(inputs).sum().backward()
        assert module.weight.grad is not None
        assert module.weight.grad.tolist() == [[1.0, 2.0, 3.0]] * 2
        assert guard() is not None
        del model
        gc.collect()
        assert guard() is None
        assert "phocas-ddp" not in [thread.name for thread in threading.enumerate()]
    finally:
        dist.destroy_process_group()


def test_measurements_survive_the_wire() -> None:
    rng = np.random.default_rng(0)
    sums = ((3, rng.normal(size=(2, 6))),)
    edges = ((7, rng.normal(size=(4, 5)).astype(np.float32)), (9000, np.full((4, 1), np.nan)))
    original = Partial(4, sums, edges)
    again = unpack(pack([Partial(4, sums, edges[:1]), Partial(4, (), edges[1:])]))
    assert again.m == 4
    for sent, got in zip(original.sums + original.edges, again.sums + again.edges, strict=True):
        assert sent[0] == got[0]
        assert sent[1].dtype == got[1].dtype
        np.testing.assert_array_equal(sent[1], got[1])


@pytest.mark.parametrize(
    ("position", "value"), [(8, -1), (8, 99), (32, -6), (40, 1 << 62), (48, 3)]
)
def test_malformed_measurements_are_rejected(position: int, value: int) -> None:
    message = pack([Partial(4, ((0, np.ones((2, 6))),))])
    message[position : position + 8].view(torch.int64)[0] = value
    with pytest.raises(ValueError, match="measurements must be whole"):
        unpack(message)


def test_measurements_that_are_too_short_or_too_long_are_rejected() -> None:
    message = pack([Partial(4, ((0, np.ones((2, 6))),))])
    for broken in (message[:-1], message[:12], torch.cat([message, message[:1]])):
        with pytest.raises(ValueError, match="measurements must be whole"):
            unpack(broken)


def test_the_example_under_torchrun(tmp_path: Path) -> None:
    """One of four ranks sends 1e20 times noise; agents and ranks meet in files, on loopback."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(WORLD)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", str(tmp_path / "agents")),
        *("--rdzv-conf", "store_type=file", "--local-addr", "127.0.0.1"),
        *(str(ROOT / "examples" / "ddp_mnist.py"), "--rounds", "60"),
        *("--data", "synthetic:train=2000,test=500", "--rendezvous", f"file://{tmp_path}/ranks"),
    ]
    done = subprocess.run(
        command,
        # Else the agent opens a store for its ranks on all interfaces, though they have their own.
        env={**environment(), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    accuracy = re.search(r"round 60: test accuracy ([\d.]+)", done.stdout)
    assert accuracy is not None, done.stdout
    assert float(accuracy[1]) > 0.6
    assert "rank 1 is flagged: 100% of its values were dropped, where 25%" in done.stdout


def test_rows_on_a_device_stay_there(ranks: Scene) -> None:
    """What leaves it are samples, sums of granules and the columns where shards meet."""
    results = ranks("on_a_device")
    for text, first in results[0].items():
        rows = torch.stack([each[text]["sent"] for each in results])
        wanted = phocas.parse_rule(text)(rows)
        for each in results:
            torch.testing.assert_close(each[text]["got"], wanted, rtol=1e-5, atol=1e-6)
            assert bits(each[text]["got"]) == bits(first["got"])
            sent, fetched = each[text]["moved"]
            shard = rows.nbytes // WORLD
            assert sent < shard / 2
            assert fetched < shard / 2
