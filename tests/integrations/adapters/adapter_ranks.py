"""What the ranks of test_adapters do: ``python adapter_ranks.py FOLDER``.

Results are as scenes.py says.
"""

import os
import sys
import warnings
from pathlib import Path
from typing import Any, ClassVar

import torch
from tests.integrations.scenes import LIAR, WORLD, Play, act, start_ranks
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


def summary(guard: Guard | None, model: nn.Module) -> dict[str, Any]:
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
    return summary(guard, model)


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
    return {**summary(guard, model), "kind": type(model).__name__}


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
    from lightning.pytorch.loggers import Logger
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import DDPStrategy

    from phocas.integrations.lightning import Protect, Watch

    class Regression(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> Any:
            return (self.net(batch["x"]) - batch["labels"]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.01)

    class Numbers(Logger):  # type: ignore[misc]
        name, version = "numbers", 0
        seen: ClassVar[list[Any]] = []

        def log_metrics(self, metrics: Any, step: Any = None) -> None:
            self.seen.append((step, metrics))

        def log_hyperparams(self, *_: Any, **__: Any) -> None:
            pass

    def fit(protect: Any, steps: int, checkpoint: str | None = None) -> Any:
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=WORLD,
            strategy=DDPStrategy(
                process_group_backend="gloo", cluster_environment=TorchElasticEnvironment()
            ),
            max_steps=steps,
            callbacks=[protect],
            logger=Numbers(),
            log_every_n_steps=4,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        module = Regression()
        trainer.fit(module, batches(rank), ckpt_path=checkpoint)
        return trainer, module

    protect = Protect("heraclius:b=1")
    trainer, module = fit(protect, STEPS)
    path = f"{sys.argv[1]}/lightning.ckpt"
    trainer.save_checkpoint(path)
    resumed = Protect("heraclius:b=1")
    fit(resumed, STEPS + 2, path)
    watch = Watch(b=1)
    fit(watch, 2)
    assert watch.guard is not None
    return {
        **summary(protect.guard, module),
        "resumed": summary(resumed.guard, module),
        "logged": Numbers.seen[:1],
        "watched": str(watch.guard.rule),
    }


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

    def arguments(steps: int) -> Any:
        return TrainingArguments(**{**common, "max_steps": steps})

    common: dict[str, Any] = {
        "output_dir": f"{sys.argv[1]}/trainer",
        "use_cpu": True,
        "per_device_train_batch_size": 8,
        "learning_rate": 0.01,
        "max_grad_norm": 0.0,
        "report_to": "none",
        "save_strategy": "steps",
        "save_steps": STEPS,
        "logging_strategy": "steps",
        "logging_steps": 4,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "remove_unused_columns": False,
    }

    def train(steps: int, resume: bool) -> Any:
        training = Trainer(Regression(), arguments(steps), train_dataset=Poisoned(rank))
        protect = Protect(training, "heraclius:b=1")
        training.add_callback(protect)
        training.train(resume_from_checkpoint=resume)
        return summary(protect.guard, training.model), training.state.log_history

    first, logged = train(STEPS, resume=False)
    resumed, _ = train(STEPS + 2, resume=True)
    logged = [(each["step"], each) for each in logged if "phocas/steps" in each]
    return {**first, "resumed": resumed, "logged": logged[:1]}


if __name__ == "__main__":
    warnings.simplefilter("default")  # what others warn of is their own business
    rank = start_ranks()
    os.environ |= {
        **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(WORLD)),
        "MASTER_ADDR": "127.0.0.1",  # where nobody listens: ranks have met in a file
        "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": "adapters",
        "ACCELERATE_USE_CPU": "true",
    }
    act(SCENES, rank, Path(sys.argv[1]))
