"""What the ranks of test_adapters do: ``python adapter_ranks.py RANK FOLDER``.

Results are as scenes.py says.
"""

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from tests.integrations.scenes import LIAR, WORLD, Play, act
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from phocas.integrations import ddp, fsdp
from phocas.integrations.guard import Guard

STEPS = 8
SCENES: dict[str, Play] = {}


def scene(run: Play) -> Play:
    SCENES[run.__name__] = run
    return run


def told(guard: Guard | None, model: nn.Module) -> dict[str, Any]:
    assert guard is not None
    finite = []
    for parameter in model.parameters():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        finite.append(bool(whole.isfinite().all()))
    return {"suspects": guard.report()["suspects"], "steps": guard.steps, "finite": all(finite)}


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(30, 61), nn.Tanh(), nn.Linear(61, 1))


class Poisoned(Dataset[dict[str, torch.Tensor]]):
    """Inputs that the liar's memory turns into NaN."""

    def __init__(self, rank: int) -> None:
        generator = torch.Generator().manual_seed(100 + rank)
        self.x = torch.randn(64 * WORLD, 30, generator=generator)
        self.y = self.x[:, :1].clone()
        if rank == LIAR:
            self.x *= float("nan")

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[i], "labels": self.y[i]}


def batches(rank: int) -> DataLoader[dict[str, torch.Tensor]]:
    return DataLoader(Poisoned(rank), batch_size=8)


@scene
def plain_loop(rank: int) -> Any:
    """Train as a script under torchrun does."""
    model = DistributedDataParallel(network())
    guard = ddp.protect(model, "heraclius:b=1")
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for batch, _ in zip(batches(rank), range(STEPS), strict=False):
        optimizer.zero_grad()
        (model(batch["x"]) - batch["labels"]).square().mean().backward()
        optimizer.step()
    return told(guard, model)


def accelerated(rank: int, plugin: Any = None) -> Any:
    from accelerate import Accelerator, DistributedType
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    if plugin is not None:
        # Accelerate takes FSDP2 where there are accelerators only; told so, it does all it does.
        accelerator.state._shared_state["distributed_type"] = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
    module = network()
    model, optimizer = accelerator.prepare(module, torch.optim.SGD(module.parameters(), 0.01))
    protect = ddp.protect if plugin is None else fsdp.protect
    guard = protect(model, "heraclius:b=1")
    for batch, _ in zip(batches(rank), range(STEPS), strict=False):
        optimizer.zero_grad()
        accelerator.backward((model(batch["x"]) - batch["labels"]).square().mean())
        optimizer.step()
    return {**told(guard, model), "kind": type(model).__name__}


@scene
def accelerate_ddp(rank: int) -> Any:
    return accelerated(rank)


@scene
def accelerate_fsdp(rank: int) -> Any:
    from accelerate import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        cpu_ram_efficient_loading=False,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Linear"],
    )
    return accelerated(rank, plugin)


@scene
def lightning(rank: int) -> Any:
    import lightning.pytorch as pl
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import DDPStrategy

    from phocas.integrations.lightning import Protect

    class Regression(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> Any:
            return (self.net(batch["x"]) - batch["labels"]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.01)

    protect = Protect("heraclius:b=1")
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=WORLD,
        strategy=DDPStrategy(
            process_group_backend="gloo", cluster_environment=TorchElasticEnvironment()
        ),
        max_steps=STEPS,
        callbacks=[protect],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    module = Regression()
    trainer.fit(module, batches(rank))
    return told(protect.guard, module)


@scene
def trainer(rank: int) -> Any:
    from transformers import Trainer, TrainingArguments

    from phocas.integrations.transformers import Protect

    class Regression(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            out = self.net(x)
            return {"loss": (out - labels).square().mean(), "logits": out}

    arguments = TrainingArguments(
        output_dir=f"{sys.argv[2]}/trainer",
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=8,
        learning_rate=0.01,
        max_grad_norm=0.0,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
    )
    module = Regression()
    training = Trainer(module, arguments, train_dataset=Poisoned(rank))
    protect = Protect(training, "heraclius:b=1")
    training.add_callback(protect)
    training.train()
    return told(protect.guard, module)


if __name__ == "__main__":
    warnings.simplefilter("default")  # what others warn of is their own business
    os.environ |= {
        **dict.fromkeys(("RANK", "LOCAL_RANK"), sys.argv[1]),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(WORLD)),
        "MASTER_ADDR": "127.0.0.1",  # where nobody listens: ranks have met in a file
        "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": "adapters",
        "ACCELERATE_USE_CPU": "true",
    }
    act(SCENES, int(sys.argv[1]), Path(sys.argv[2]))
