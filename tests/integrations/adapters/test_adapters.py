"""Other people's loops with real processes: the real thing trains, and the bad rank is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.integrations.scenes import LIAR, WORLD, Scene, play

pytest.importorskip("accelerate", reason="make test-integrations installs it")
pytest.importorskip("lightning", reason="make test-integrations installs it")
pytest.importorskip("transformers", reason="make test-integrations installs it")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    script = Path(__file__).parent / "adapter_ranks.py"
    return play(script, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize(
    "name", ["plain_loop", "accelerate_ddp", "accelerate_fsdp", "lightning", "trainer"]
)
def test_the_faulty_rank_is_flagged_and_the_model_stays_finite(ranks: Scene, name: str) -> None:
    results = ranks(name)
    assert len(results) == WORLD
    for result in results:
        assert [one["rank"] for one in result["suspects"]] == [LIAR]
        assert result["suspects"][0]["since"] <= 4  # DDP moves its buckets after the first step
        assert result["steps"] == 8
        assert result["finite"]


def test_accelerate_wraps_by_its_plugin(ranks: Scene) -> None:
    kinds = {name: ranks(name)[0]["kind"] for name in ("accelerate_ddp", "accelerate_fsdp")}
    assert kinds == {
        "accelerate_ddp": "DistributedDataParallel",
        "accelerate_fsdp": "FSDPSequential",
    }


@pytest.mark.parametrize("name", ["lightning", "trainer"])
def test_checkpoint_keeps_the_evidence_and_metrics_are_logged(ranks: Scene, name: str) -> None:
    results = ranks(name)
    for result in results:
        resumed = result["resumed"]
        assert resumed["steps"] == 10
        assert resumed["suspects"][0]["rank"] == LIAR
        assert resumed["suspects"][0]["flagged"] == result["suspects"][0]["flagged"]
    step, metrics = results[0]["logged"][0]
    assert step == metrics["phocas/steps"] == 4
    assert metrics[f"phocas/dropped/rank{LIAR}"] == 1


def test_monitoring_callback_averages(ranks: Scene) -> None:
    assert ranks("lightning")[0]["watched"] == "monitor:rule=(heraclius:b=1)"
