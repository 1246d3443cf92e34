"""Torchft's DiLoCo and LocalSGD with a lighthouse on loopback and one thread a replica group."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
from tests.helpers import bits
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # it is exported

torchft = pytest.importorskip("torchft", reason="pip install torchft-nightly")

REPLICAS, LIAR = 4, 2


def train(rule: str, *, outer_steps: int, diloco: bool) -> list[dict[str, Any]]:
    """Train all replica groups, one of which sends huge values; return what each ends with."""
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo, LocalSGD

    from phocas.integrations.outer.torchft import RobustManager

    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=REPLICAS, join_timeout_ms=20_000)
    results: list[dict[str, Any]] = [{} for _ in range(REPLICAS)]

    def run(replica: int) -> None:
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        model = nn.Linear(20, 3)
        with torch.no_grad():
            model.weight.fill_(0.1)
            model.bias.zero_()
        manager = torchft.Manager(
            pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=30)),
            load_state_dict=lambda _: None,
            state_dict=dict,
            min_replica_size=REPLICAS,
            use_async_quorum=False,
            replica_id=f"replica_{replica}",
            store_addr="localhost",
            store_port=store.port,
            rank=0,
            world_size=1,
            lighthouse_addr=lighthouse.address(),
            timeout=timedelta(seconds=30),
            init_sync=False,
        )
        robust = RobustManager(manager, rule)
        inner = torch.optim.SGD(model.parameters(), 0.1)
        outer = torch.optim.SGD(model.parameters(), 0.7, momentum=0.9, nesterov=True)
        strategy = (
            DiLoCo(robust, [model], inner, outer, sync_every=2, use_bucketization=True)
            if diloco
            else LocalSGD(robust, model, inner, sync_every=2)
        )
        generator = torch.Generator().manual_seed(replica)
        try:
            with strategy:
                for step in range(2 * outer_steps):
                    x = torch.randn(8, 20, generator=generator)
                    inner.zero_grad()
                    (model(x) - x[:, :3]).square().mean().backward()
                    if replica == LIAR and step % 2:
                        for parameter in model.parameters():
                            assert parameter.grad is not None
                            parameter.grad.fill_(1e6)
                    inner.step()
        finally:
            results[replica] = {
                "parameters": torch.cat([p.detach().flatten() for p in model.parameters()]),
                "committed": manager.current_step(),
                "errored": str(manager.errored()),
            }
            manager.shutdown()

    threads = [threading.Thread(target=run, args=(replica,)) for replica in range(REPLICAS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lighthouse.shutdown()
    return results


@pytest.mark.parametrize("diloco", [True, False])
def test_replica_groups_agree_in_spite_of_a_malicious_one(diloco: bool) -> None:
    results = train("trimmed-mean:b=1", outer_steps=3, diloco=diloco)
    assert len({bits(result["parameters"]) for result in results}) == 1
    assert [result["committed"] for result in results] == [3] * REPLICAS
    assert float(results[0]["parameters"].abs().max()) < 10


def test_step_with_too_few_replica_groups_is_not_committed() -> None:
    results = train("trimmed-mean:b=2", outer_steps=1, diloco=True)
    assert [result["committed"] for result in results] == [0] * REPLICAS
    assert float(results[0]["parameters"].abs().max()) < 10
