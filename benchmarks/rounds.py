"""Time whole rounds against ByzFL, the CNN against a plain loop, and local steps against rounds.

    python benchmarks/rounds.py [--rounds 40] [--threads 1 2] [--json]

All variants run in one process and take turns. The best turn of each counts. Local steps are
compared with the gradients of as many plain rounds. ByzFL is left out if it is not installed. ByzFL
has no Phocas, so it runs its trimmed mean. The six Byzantine clients of ByzFL compute no gradients,
those of phocas do.
"""

# ruff: noqa: INP001 - a script

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch
from torch.nn import functional

import phocas
from phocas.data import load
from phocas.training import Trainer
from phocas.training.gradients import worker_gradients
from phocas.training.models import CNN, MLP, build_model
from phocas.training.parameters import FlatParameters
from phocas.training.pool import DeterministicPool

WORKERS, BYZANTINE, BATCH = 20, 6, 32
TURNS = 5


def ours(threads: int) -> tuple[Callable[[], None], dict[str, list[float]]]:
    """Return a round of phocas, and the dict that collects its times by phase."""
    data = load("synthetic")
    trainer = Trainer(
        build_model("mlp", data.shape, 10, 0),
        functional.cross_entropy,
        data,
        num_workers=WORKERS,
        num_servers=20,
        rule=phocas.Phocas(b=BYZANTINE),
        attack=f"gaussian:q={BYZANTINE}",
        batch_size=BATCH,
        threads=threads,
    )
    phases: dict[str, list[float]] = {}

    def a_round() -> None:
        for phase, seconds in trainer.step(detailed=False).seconds.items():
            phases.setdefault(phase, []).append(seconds)

    return a_round, phases


def local_rounds(threads: int, steps: int) -> float:
    """Return the time of local steps over that of the gradients of as many plain rounds."""
    best = {}
    data = load("synthetic")
    common: dict[str, Any] = {"num_workers": WORKERS, "batch_size": BATCH, "rule": "mean"}
    with (
        Trainer("mlp", data=data, threads=threads, **common) as plain,
        Trainer("mlp", data=data, threads=threads, local_steps=steps, **common) as local,
    ):
        for trainer, rounds in ((plain, steps), (local, 1)) * (4 * TURNS):  # short ones
            phases = [trainer.step(detailed=False).seconds for _ in range(rounds)]
            spent = sum(seconds["gradients"] for seconds in phases)
            best[trainer] = min(best.get(trainer, spent), spent)
        return best[local] / best[plain]


def byzfl_round() -> Callable[[], None] | None:
    """Return a round of ByzFL's own benchmark loop without evaluation, or None without ByzFL."""
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError):
        sys.modules["torchvision"] = MagicMock()  # for ByzFL's downloads, which are not used here
    try:
        byzfl = importlib.import_module("byzfl")
    except ImportError:
        return None
    models = importlib.import_module("byzfl.fed_framework.models")
    models.paper_mlp = lambda: MLP().layers((1, 28, 28), 10)  # type: ignore[attr-defined]
    data = load("synthetic")
    tensors = torch.utils.data.TensorDataset(
        torch.from_numpy(data.floats(data.train_images)),
        torch.from_numpy(data.train_labels.astype(np.int64)),
    )
    common: dict[str, Any] = {
        "model_name": "paper_mlp",
        "device": "cpu",
        "optimizer_name": "SGD",
        "learning_rate": 0.1,
        "weight_decay": 0.0,
        "milestones": [],
        "learning_rate_decay": 1.0,
    }
    clients = [
        byzfl.Client(
            {
                **common,
                "loss_name": "CrossEntropyLoss",
                "LabelFlipping": False,
                "training_dataloader": torch.utils.data.DataLoader(tensors, BATCH, shuffle=True),
                "momentum": 0.0,
                "nb_labels": 10,
                "store_per_client_metrics": False,
            }
        )
        for _ in range(WORKERS - BYZANTINE)
    ]
    server = byzfl.Server(
        {
            **common,
            "validation_loader": None,
            "test_loader": torch.utils.data.DataLoader(tensors, 100),
            "aggregator_info": {"name": "TrMean", "parameters": {"f": BYZANTINE}},
            "pre_agg_list": [],
        }
    )
    malicious = byzfl.ByzantineClient(
        {"name": "Gaussian", "f": BYZANTINE, "parameters": {"mu": 0.0, "sigma": 200.0}}
    )

    def a_round() -> None:
        for client in clients:
            client.compute_gradients()
        honest = [client.get_flat_gradients_with_momentum() for client in clients]
        server.update_model_with_gradients(honest + malicious.apply_attack(honest))
        state = server.get_dict_parameters()
        for client in clients:
            client.set_model_state(state)

    return a_round


def cnn_rounds(
    threads: int, workers: int, batch: int
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return the CNN's gradients by phocas, and by a plain channels-last loop."""
    model = build_model(CNN().layers, (3, 32, 32), 10, 0)
    twin = build_model(CNN().layers, (3, 32, 32), 10, 0).to(
        memory_format=torch.channels_last  # type: ignore[call-overload]
    )
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(workers, batch, 3, 32, 32, generator=generator)
    targets = torch.randint(0, 10, (workers, batch), generator=generator)
    flat = FlatParameters(model)
    rows = torch.empty(workers, flat.size)
    way = worker_gradients(
        model, functional.cross_entropy, flat, DeterministicPool(threads), sample=(inputs, targets)
    )

    def our_way() -> None:
        way(inputs, targets, rows, 0, 0)

    def plain() -> None:
        for i in range(workers):
            twin.zero_grad()
            batch = inputs[i].contiguous(memory_format=torch.channels_last)
            functional.cross_entropy(twin(batch), targets[i]).backward()  # type: ignore[no-untyped-call]
            rows[i] = torch.cat([p.grad.flatten() for p in twin.parameters() if p.grad is not None])

    return our_way, plain


def take_turns(contenders: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Return the milliseconds per round of each variant: the median of its best turn."""
    best = dict.fromkeys(contenders, float("inf"))
    for contender in contenders.values():
        contender()
    for _ in range(TURNS):
        for name, contender in contenders.items():
            times = []
            for _ in range(rounds):
                start = time.perf_counter()
                contender()
                times.append(time.perf_counter() - start)
            best[name] = min(best[name], statistics.median(times) * 1e3)
    return best


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=40, help="rounds a turn")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--local-steps", type=int, default=20, help="0 leaves them out")
    parser.add_argument("--cnn-workers", type=int, default=4, help="0 leaves the CNN out")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found: dict[str, Any] = {}
    for threads in options.threads:
        torch.set_num_threads(threads)
        mine, phases = ours(threads)
        contenders = {"phocas": mine}
        theirs = byzfl_round()
        if theirs is not None:
            contenders["byzfl"] = theirs
        times = take_turns(contenders, options.rounds)
        medians = {phase: statistics.median(values) * 1e3 for phase, values in phases.items()}
        result: dict[str, Any] = {"ms_per_round": times, "phases_ms": medians}
        result["aggregate_share"] = medians["aggregate"] / sum(medians.values())
        if theirs is not None:
            result["byzfl_over_phocas"] = times["byzfl"] / times["phocas"]
        if options.local_steps:
            result["local_over_plain"] = local_rounds(threads, options.local_steps)
        if options.cnn_workers:
            our_way, plain = cnn_rounds(threads, options.cnn_workers, 16)
            result["cnn_ms"] = take_turns({"phocas": our_way, "plain loop": plain}, 2)
            result["cnn_over_plain"] = result["cnn_ms"]["phocas"] / result["cnn_ms"]["plain loop"]
        found[f"{threads} threads"] = result
    if options.json:
        print(json.dumps(found))
        return
    for name, result in found.items():
        print(name)
        for key, value in result.items():
            if isinstance(value, dict):
                print(f"  {key}: " + ", ".join(f"{k} {v:.2f}" for k, v in value.items()))
            else:
                print(f"  {key}: {value:.3f}")


if __name__ == "__main__":
    main()
