# ruff: noqa: INP001 - a script, not a package
"""Train ten clients on MNIST with Flower while two of them are malicious.

    python examples/flower/app.py                      # FedAvg, then RobustStrategy
    python examples/flower/app.py --rule phocas:b=2    # another rule

A malicious client sends -10 times its update, and claims a hundred times its number of examples.
Every client takes the same number of steps, however much data it has. With unequal steps the update
of a large client would be longer than the others, and a robust rule would drop it.
"""

from __future__ import annotations

import argparse
import logging
import os

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import nn

from phocas import data
from phocas.integrations.flower import RobustStrategy

CLIENTS, ATTACKERS, ROUNDS = 10, 2, 5
STEPS, BATCH = 180, 32  # of every client in every round
RULE = "nnm:b=2|trimmed-mean:b=2"
BACKEND = {
    "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
    # On this machine alone, whatever its address is and whatever else of Ray runs on it.
    "init_args": {"address": "local", "include_dashboard": False, "_node_ip_address": "127.0.0.1"},
}
client = ClientApp()


def make_model() -> nn.Module:
    """Return the network, with the same weights on every client."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


def samples(which: str, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images and labels of a part of the data."""
    dataset = data.load(os.environ.get("FLOWER_EXAMPLE_DATA", "mnist"))
    images = getattr(dataset, f"{which}_images")[part]
    labels = getattr(dataset, f"{which}_labels")[part]
    return torch.from_numpy(dataset.floats(images)), torch.tensor(labels).long()


@client.train()
def train(message: Message, context: Context) -> Message:
    """Train on the client's tenth of the data; malicious clients send -10 times their update."""
    number = int(context.node_config["partition-id"])
    model = make_model()
    start = message.content["arrays"].to_torch_state_dict()
    model.load_state_dict(start)
    images, labels = samples("train", slice(number, None, CLIENTS))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in torch.randint(len(labels), (STEPS, BATCH)):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()
    state, examples = model.state_dict(), len(labels)
    if number < ATTACKERS:
        state = {name: start[name] - 10 * (value - start[name]) for name, value in state.items()}
        examples *= 100
    metrics = MetricRecord({"num-examples": examples, "loss": loss.item()})
    return Message(RecordDict({"arrays": ArrayRecord(state), "metrics": metrics}), reply_to=message)


def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Measure the model on the test set, at the server."""
    del server_round
    model = make_model()
    model.load_state_dict(arrays.to_torch_state_dict())
    images, labels = samples("test", slice(None))
    with torch.no_grad():
        hits = (model(images).argmax(dim=1) == labels).float().mean()
    return MetricRecord({"accuracy": float(hits)})


def server_app(rule: str | None = None, rounds: int = ROUNDS) -> ServerApp:
    """Return a server app for a rule, FedAvg for "fedavg", or the rule of `flwr run` for None."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        chosen = rule or str(context.run_config.get("rule", RULE))
        options = {"fraction_train": 1.0, "fraction_evaluate": 0.0, "min_train_nodes": CLIENTS}
        strategy = FedAvg(**options) if chosen == "fedavg" else RobustStrategy(chosen, **options)
        initial = ArrayRecord(make_model().state_dict())
        result = strategy.start(grid, initial, rounds, evaluate_fn=evaluate)
        found = result.evaluate_metrics_serverapp.values()
        print(chosen, *(f"{float(each['accuracy']):.3f}" for each in found), flush=True)

    return app


server = server_app()

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rule", default=RULE, help="see phocas rules")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # without it Ray warns
    print("test accuracy before the first round and after each")
    for each in ("fedavg", arguments.rule):
        run_simulation(server_app(each, arguments.rounds), client, CLIENTS, backend_config=BACKEND)
