# ruff: noqa: INP001 - a script, not a package
"""Train fifteen clients on MNIST with Flower while two of them are malicious.

    python examples/flower/app.py                      # FedAvg, then RobustStrategy
    python examples/flower/app.py --rule phocas:b=2    # another rule
    python examples/flower/app.py --attackers 0        # all clients are honest
    python examples/flower/app.py --work normalized    # one epoch each, see below

The data of the clients differ: each class is divided over them by Dirichlet(0.3), so some have few
classes and some have few images. Ten of the fifteen take part in each round. A malicious client
sends -10 times its update, and claims a hundred times its number of examples.

Every client takes the same number of steps, however much data it has (``--work equal``). With one
epoch each (``--work epochs``) the update of a large client is longer than the others, and a robust
rule drops it, unless updates are divided by the number of steps (``--work normalized``).
"""

from __future__ import annotations

import argparse
import logging
import os

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import nn

from phocas import data
from phocas.integrations.flower import RobustStrategy

CLIENTS, IN_A_ROUND, ATTACKERS, ROUNDS = 15, 10, 2, 10
STEPS, BATCH = 60, 32  # of every client in every round
RULE = "nnm:b=2|trimmed-mean:b=2"
SPLIT = data.Dirichlet(alpha=0.3, minimum=BATCH)
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


def dataset() -> data.Dataset:
    """Return the data set."""
    return data.load(os.environ.get("FLOWER_EXAMPLE_DATA", "mnist"))


@client.train()
def train(message: Message, context: Context) -> Message:
    """Train on the client's own data; malicious clients send -10 times their update."""
    number, config = int(context.node_config["partition-id"]), message.content["config"]
    seed, mnist = int(config["seed"]), dataset()
    own = SPLIT.assign(mnist.train_labels, CLIENTS, np.random.default_rng(seed))[number]
    images = torch.from_numpy(mnist.floats(mnist.train_images[own]))
    labels = torch.tensor(mnist.train_labels[own]).long()
    model = make_model()
    start = message.content["arrays"].to_torch_state_dict()
    model.load_state_dict(start)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = STEPS if config["work"] == "equal" else 1 + len(own) // BATCH
    torch.manual_seed(hash((seed, number, config["server-round"])))
    for batch in torch.randint(len(labels), (steps, BATCH)):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()
    state, examples = model.state_dict(), len(labels)
    if number < int(config["attackers"]):
        state = {name: start[name] - 10 * (value - start[name]) for name, value in state.items()}
        examples *= 100
    metrics = MetricRecord({"num-examples": examples, "num-steps": steps, "loss": loss.item()})
    return Message(RecordDict({"arrays": ArrayRecord(state), "metrics": metrics}), reply_to=message)


def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Measure the model on the test set, at the server."""
    del server_round
    model, mnist = make_model(), dataset()
    model.load_state_dict(arrays.to_torch_state_dict())
    labels = torch.tensor(mnist.test_labels).long()
    with torch.no_grad():
        found = model(torch.from_numpy(mnist.floats(mnist.test_images))).argmax(dim=1)
    return MetricRecord({"accuracy": float((found == labels).float().mean())})


def server_app(settings: dict[str, str | int] | None = None) -> ServerApp:
    """Return a server app; the settings are those of `flwr run` if they are not given."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        chosen = {
            "rule": RULE,
            "rounds": ROUNDS,
            "attackers": ATTACKERS,
            "work": "equal",
            "seed": 0,
        }
        chosen |= context.run_config if settings is None else settings
        options = {"fraction_train": IN_A_ROUND / CLIENTS, "fraction_evaluate": 0.0}
        options["min_available_nodes"] = CLIENTS
        if chosen["rule"] == "fedavg":
            strategy = FedAvg(**options)
        else:
            key = "num-steps" if chosen["work"] == "normalized" else None
            strategy = RobustStrategy(str(chosen["rule"]), normalized_by_key=key, **options)
        result = strategy.start(
            grid,
            ArrayRecord(make_model().state_dict()),
            int(chosen["rounds"]),
            train_config=ConfigRecord({key: chosen[key] for key in ("seed", "attackers", "work")}),
            evaluate_fn=evaluate,
        )
        found = result.evaluate_metrics_serverapp.values()
        print(chosen["rule"], *(f"{float(each['accuracy']):.3f}" for each in found), flush=True)

    return app


server = server_app()

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rule", default=RULE, help="see phocas rules")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--attackers", type=int, default=ATTACKERS)
    parser.add_argument("--work", choices=("equal", "epochs", "normalized"), default="equal")
    parser.add_argument("--seed", type=int, default=0)
    arguments = vars(parser.parse_args())
    logging.getLogger("flwr").setLevel(logging.ERROR)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # without it Ray warns
    print("test accuracy before the first round and after each")
    for each in ("fedavg", arguments["rule"]):
        app = server_app({**arguments, "rule": each})
        run_simulation(app, client, CLIENTS, backend_config=BACKEND)
