# ruff: noqa: INP001 - a script, not a package
"""Measure rules over federated clients with skewed data, unequal sizes and partial participation.

    python benchmarks/skewed_clients.py                # five seeds
    python benchmarks/skewed_clients.py --seeds 7      # one seed

MNIST, an MLP 784-32-10, fifteen clients whose labels are split by Dirichlet(0.3), ten of them in
each round, two malicious. Local work is equal (25 steps of 16 images), or unequal: in proportion to
the data of a client, 25 steps on average. The clients of a round are trained side by side.
"""

from __future__ import annotations

import argparse
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from phocas import Mean, data, parse_rule
from phocas.integrations.client_replies import Client
from phocas.integrations.clients import Terms
from phocas.integrations.merging.tensors import in_memory
from phocas.report.statistics import spread

CLIENTS, IN_A_ROUND, MALICIOUS = 15, 10, (0, 1)
STEPS, BATCH, LR, HIDDEN = 25, 16, 0.1, 32
SHAPES = [(784, HIDDEN), (1, HIDDEN), (HIDDEN, 10), (1, 10)]
ATTACKS = ("none", "sign flip x10", "label flip", "NaN", "flip, claims 1e12")
RULE = "nnm:b=2|trimmed-mean:b=2"
ROWS = [
    ("FedAvg", "equal"),
    (RULE, "equal"),
    ("FedAvg", "unequal"),
    (RULE, "unequal"),
    (RULE, "normalised"),
]
Floats = NDArray[np.float32]


def cut(flat: torch.Tensor) -> list[torch.Tensor]:
    """Return the layers of each of m flat models as views."""
    sizes = [a * b for a, b in SHAPES]
    parts = flat.split(sizes, dim=1)
    return [part.view(len(flat), *shape) for part, shape in zip(parts, SHAPES, strict=True)]


def forward(layers: list[torch.Tensor], images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the hidden values and the outputs of m models for (m, n, 784) images."""
    hidden = torch.relu(torch.baddbmm(layers[1], images, layers[0]))
    return hidden, torch.baddbmm(layers[3], hidden, layers[2])


def trained(
    start: Floats, images: torch.Tensor, labels: torch.Tensor, picks: torch.Tensor, steps: Floats
) -> Floats:
    """Return the models of m clients after their local steps of SGD.

    ``picks`` has the images of each step, (steps, m, batch), and ``steps`` how many a client takes.
    """
    models = torch.from_numpy(np.repeat(start[None], len(steps), axis=0))
    w1, b1, w2, b2 = layers = cut(models)
    limits = torch.from_numpy(steps)
    for step, pick in enumerate(picks):
        rates = (LR / BATCH * (limits > step)).float()[:, None, None]
        batch = images[pick]
        hidden, outputs = forward(layers, batch)
        error = outputs.softmax(dim=2)
        error.scatter_add_(2, labels[pick][..., None], torch.full((*pick.shape, 1), -1.0))
        error *= rates
        back = error @ w2.mT * (hidden > 0)
        w2 -= hidden.mT @ error
        b2 -= error.sum(dim=1, keepdim=True)
        w1 -= batch.mT @ back
        b1 -= back.sum(dim=1, keepdim=True)
    return models.numpy()


@cache
def samples() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the images and labels of MNIST for training, and those for tests."""
    mnist = data.load("mnist")
    return (
        torch.from_numpy(mnist.floats(mnist.train_images).reshape(-1, 784)),
        torch.tensor(mnist.train_labels).long(),
        torch.from_numpy(mnist.floats(mnist.test_images).reshape(1, -1, 784)),
        torch.tensor(mnist.test_labels).long(),
    )


def accuracy(rule: str, work: str, attack: str, seed: int, rounds: int) -> float:
    """Return the mean test accuracy of the last three rounds."""
    rng = np.random.default_rng(seed)
    images, labels, tests, wanted = samples()
    parts = data.Dirichlet(alpha=0.3, minimum=BATCH).assign(labels.numpy(), CLIENTS, rng)
    sizes = np.array([len(part) for part in parts])
    model = np.concatenate([rng.normal(0, a**-0.5, a * b) for a, b in SHAPES]).astype(np.float32)
    fedavg = rule == "FedAvg"
    terms = Terms(
        Mean() if fedavg else parse_rule(rule),
        max_share=1.0 if fedavg else None,
        on_nonfinite="apply",
        normalize=work == "normalised",
    )
    found = []
    for turn in range(rounds):
        who = np.sort(rng.choice(CLIENTS, IN_A_ROUND, replace=False))
        steps = np.full(IN_A_ROUND, float(STEPS), np.float32)
        if work != "equal":
            steps = np.ceil(STEPS * sizes[who] / sizes.mean()).astype(np.float32)
        shape = (int(steps.max()), BATCH)
        picks = torch.from_numpy(np.stack([rng.choice(parts[i], shape) for i in who], axis=1))
        bad = np.isin(who, MALICIOUS) & (attack != "none")
        truth = labels
        if attack == "label flip" and bad.any():
            own = np.concatenate([parts[i] for i in who[bad]])
            truth = labels.clone()
            truth[own] = 9 - truth[own]
        models = trained(model, images, truth, picks, steps)
        claims = sizes[who].astype(float)
        if "flip" in attack and attack != "label flip":
            models[bad] = model - 10 * (models[bad] - model)
        if attack == "NaN":
            models[bad] = np.nan
        if "claims" in attack:
            claims[bad] = 1e12
        base = {"w": in_memory("w", model, "w")}
        clients = [
            Client(int(i), None, {"w": in_memory("w", row, "w")}, claim, float(taken))
            for i, row, claim, taken in zip(who, models, claims, steps, strict=True)
        ]
        kept = terms.select(clients, base)
        values, _ = terms.aggregate(kept, base, turn, lambda _, made: np.concatenate(made))
        assert values is not None
        model = values["w"]
        if turn >= rounds - 3:
            outputs = forward(cut(torch.from_numpy(model)[None]), tests)[1][0]
            found.append(float((outputs.argmax(dim=1) == wanted).float().mean()))
    return float(np.mean(found))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    print("| rule | local work |", " | ".join(ATTACKS), "|\n" + "|---" * (2 + len(ATTACKS)) + "|")
    for rule, work in ROWS:
        cells = []
        for attack in ATTACKS:
            by_seed = [
                accuracy(rule, work, attack, seed, arguments.rounds) for seed in arguments.seeds
            ]
            found = spread(by_seed)
            half = 0.0 if found["high"] is None else found["high"] - np.mean(by_seed)
            cells.append(f"{np.mean(by_seed):.3f} ± {half:.3f}")
        print(f"| {rule.replace('|', ', ')} | {work} |", " | ".join(cells), "|", flush=True)
