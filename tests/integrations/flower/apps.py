"""A Flower app in NumPy whose clients misbehave by their number, and its servers."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from phocas.integrations.flower import RobustStrategy

TARGET = 3.0
STRATEGIES: dict[str, Any] = {
    "fedavg": FedAvg,
    "robust": partial(RobustStrategy, "nnm:b=3|phocas:b=3"),
    "weighted": partial(RobustStrategy, "phocas:b=3", max_share=0.12),
    "two": partial(RobustStrategy, "mean"),
}
client = ClientApp()
server = ServerApp()


def model(value: float) -> dict[str, np.ndarray[Any, Any]]:
    return {
        "layer.weight": np.full((40, 30), value, np.float32),
        "layer.bias": np.full(7, value, np.float32),
        "batches": np.array(round(value), np.int64),
    }


def kind(context: Context) -> str:
    """Say how this client behaves: by its number, as the environment has it."""
    kinds = json.loads(os.environ.get("CLIENT_KINDS", "{}"))
    return str(kinds.get(str(context.node_config["partition-id"]), "honest"))


def train(message: Message, context: Context) -> Message:
    how = kind(context)
    given = message.content["arrays"]
    rng = np.random.default_rng(int(context.node_config["partition-id"]))
    state = {name: array.numpy().copy() for name, array in given.items()}
    for name in ("layer.weight", "layer.bias"):
        noise = rng.normal(scale=0.01, size=state[name].shape)
        state[name] = (state[name] + 0.5 * (TARGET - state[name]) + noise).astype(np.float32)
    state["batches"] = state["batches"] + 1
    examples: float = 100
    if how == "raises":
        raise RuntimeError("this client's disk is full")
    if how == "nan":
        state["layer.weight"][:] = np.nan
    elif how == "keys":
        state["layer.extra"] = state.pop("layer.bias")
    elif how == "shape":
        state["layer.weight"] = state["layer.weight"][:-1]
    elif how == "dtype":
        state["layer.weight"] = state["layer.weight"].astype(np.float64)
    elif how == "greedy":
        state["layer.weight"][:] = -100
        examples = 1e9
    elif how == "absurd":
        examples = float("nan")
    arrays = ArrayRecord({name: Array(np.asarray(value)) for name, value in state.items()})
    metrics = MetricRecord({"num-examples": examples, "loss": float(rng.uniform(0.4, 0.6))})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


def evaluate(message: Message, context: Context) -> Message:
    weight = message.content["arrays"]["layer.weight"].numpy()
    found = MetricRecord({"num-examples": 10, "distance": float(np.abs(weight - TARGET).mean())})
    if kind(context) == "keys":
        found = MetricRecord({"something": 1.0})
    return Message(RecordDict({"metrics": found}), reply_to=message)


def main(grid: Grid, context: Context) -> None:
    del context
    nodes = int(os.environ["SERVER_NODES"])  # nobody is sampled before all are there
    strategy = STRATEGIES[os.environ["SERVER_STRATEGY"]](
        min_train_nodes=nodes, min_evaluate_nodes=nodes, min_available_nodes=nodes
    )
    initial = ArrayRecord({name: Array(value) for name, value in model(0.0).items()})
    rounds = int(os.environ.get("SERVER_ROUNDS", "3"))
    try:
        result = strategy.start(grid, initial, rounds, train_config=ConfigRecord(), timeout=600)
    except Exception as error:
        _report({"error": type(error).__name__})
        raise
    _report(
        {
            "weight": float(result.arrays["layer.weight"].numpy().mean()),
            "bias": float(result.arrays["layer.bias"].numpy().mean()),
            "batches": int(result.arrays["batches"].numpy()),
            "dtypes": [array.dtype for array in result.arrays.values()],
            "train": [dict(each) for each in result.train_metrics_clientapp.values()],
            "evaluate": [dict(each) for each in result.evaluate_metrics_clientapp.values()],
        }
    )


def _report(found: dict[str, Any]) -> None:
    Path(os.environ["SERVER_REPORT"]).write_text(json.dumps(found))


client.train()(train)
client.evaluate()(evaluate)
server.main()(main)
