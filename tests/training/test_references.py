"""Training with rules that need a reference vector."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers import bits

import phocas
from phocas.data import load
from phocas.training import Trainer
from phocas.training.server import ParameterServer

PREVIOUS = "centered-clipping:radius=median,iterations=2,start=previous"
DATA = "synthetic:train=500,test=100"


def trainer(rule: str, **settings: Any) -> Trainer:
    defaults: dict[str, Any] = {"num_workers": 6, "lr": 0.2, "batch_size": 8, "seed": 3}
    if rule.endswith("fl-trust"):
        defaults["trusted"] = 40
    return Trainer("mlp:hidden=8", data=DATA, rule=rule, **{**defaults, **settings})


def trained(rule: str, rounds: int = 4, **settings: Any) -> bytes:
    with trainer(rule, **settings) as found:
        list(found.rounds(rounds))
        return bits(found.server.vector)


def test_rule_starts_from_the_previous_aggregate() -> None:
    rule = phocas.parse_rule(PREVIOUS)
    with trainer(PREVIOUS) as found:
        previous = torch.zeros_like(found.server.vector)
        for _ in range(3):
            before = found.server.vector.clone()
            found.step()
            value = rule(found.server.rows, reference=previous)
            assert found.server.reference is not None
            assert bits(found.server.reference) == bits(value)
            torch.testing.assert_close(found.server.vector, before - 0.2 * value)
            previous = value


def test_trusted_gradient_is_that_of_the_kept_samples() -> None:
    with trainer("fl-trust") as found:
        kept = found.task.trusted
        assert kept is not None
        assert len(kept) == 40
        for part in found.task.assignment:
            assert not set(part) & set(kept)
            assert len(part) == 460
        before = found.server.vector.clone()
        found.step()
        with torch.no_grad():
            after = found.server.vector.clone()
            found.server.vector.copy_(before)
        inputs, targets = found.task.samples.draw(kept[None])
        loss = torch.nn.functional.cross_entropy(found.model(inputs[0]), targets[0])
        gradient = torch.cat(
            [g.flatten() for g in torch.autograd.grad(loss, found.server.parameters.tensors)]
        )
        assert found.server.reference is not None
        torch.testing.assert_close(found.server.reference, gradient, rtol=1e-4, atol=1e-6)
        value = phocas.FLTrust()(found.server.rows, reference=found.server.reference)
        torch.testing.assert_close(after, before - 0.2 * value)


@pytest.mark.parametrize("rule", [PREVIOUS, "fl-trust", "nnm:b=1|fl-trust"])
@pytest.mark.parametrize("settings", [{}, {"worker_momentum": 0.9}, {"local_steps": 2}], ids=str)
def test_checkpoint_keeps_the_reference(
    rule: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    wanted = trained(rule, **settings)
    with trainer(rule, **settings) as first:
        list(first.rounds(2))
        first.save(tmp_path / "c")
    with trainer(rule, **settings) as second:
        second.load(tmp_path / "c")
        list(second.rounds(2))
        assert bits(second.server.vector) == wanted


@pytest.mark.parametrize("rule", [PREVIOUS, "fl-trust"])
def test_result_does_not_depend_on_the_number_of_servers(rule: str) -> None:
    assert trained(rule, num_servers=3) == trained(rule)


def test_sum_of_gradients_is_scaled_to_a_batch() -> None:
    found = {}
    for reduction in ("mean", "sum"):
        with trainer("fl-trust", reduction=reduction) as each:
            each.step()
            assert each.server.reference is not None
            found[reduction] = each.server.reference
    torch.testing.assert_close(found["sum"], 8 * found["mean"], rtol=1e-4, atol=1e-6)


def test_trusted_gradient_leaves_batch_norm_to_the_workers() -> None:
    torch.manual_seed(0)
    layers = [torch.nn.Flatten(), torch.nn.Linear(784, 4), torch.nn.BatchNorm1d(4)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(4, 10))
    with Trainer(model, data=load(DATA), rule="fl-trust", num_workers=3, trusted=40) as found:
        cluster: Any = found.cluster
        before = [buffer.clone() for buffer in model.buffers()]
        cluster.trusted.provide(found.server, 0)
        for buffer, old in zip(model.buffers(), before, strict=True):
            assert torch.equal(buffer, old)
        found.step()
        assert int(model[2].num_batches_tracked) == 1  # type: ignore[arg-type]


def test_skipped_round_keeps_the_reference() -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    server = ParameterServer(
        model, num_workers=3, rule="centered-clipping:radius=median,start=previous"
    )
    server.rows.copy_(torch.tensor([[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]))
    server.step()
    server.rows.fill_(float("nan"))
    assert not server.step().finite
    assert server.reference is not None
    assert server.reference.tolist() == [1.0, 1.0]


def test_server_without_trusted_reference_says_so() -> None:
    server = ParameterServer(torch.nn.Linear(2, 1), num_workers=3, rule="fl-trust")
    server.rows.fill_(1.0)
    with pytest.raises(ValueError, match=r"fl-trust needs a reference of d=3 values: set .* none"):
        server.step()
    server.reference = torch.ones(2)
    with pytest.raises(ValueError, match=r"needs a reference of d=3 values: .* shape \(2,\)"):
        server.step()
    server.reference = torch.full((3,), float("nan"))
    assert not server.step().finite
    server.reference = torch.ones(3)
    assert server.step().value.tolist() == pytest.approx([1.0, 1.0, 1.0])


@pytest.mark.parametrize(
    ("rule", "settings", "words"),
    [
        (
            "fl-trust",
            {"trusted": None},
            "needs trusted samples, on which .* set trusted",
        ),
        ("median", {"trusted": 10}, "trusted is for a rule that needs trusted samples"),
        ("fl-trust", {"trusted": 0}, "Trainer needs trusted >= 1"),
        ("fl-trust", {"trusted": 500}, "taken out of 500 training samples, .* got trusted=500"),
    ],
)
def test_bad_settings_are_rejected(rule: str, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        trainer(rule, **settings)


def test_asynchronous_training_rejects_a_reference() -> None:
    from phocas.engines.local import LocalSettings

    engine = LocalSettings(asynchronous="buffers=3")
    with pytest.raises(ValueError, match="needs a reference vector, which synchronous rounds have"):
        trainer(PREVIOUS, engine=engine)


def test_one_data_set_a_worker_gives_trusted_samples_too() -> None:
    rng = np.random.default_rng(0)
    data = [(rng.normal(size=(20, 5)).astype(np.float32), np.arange(20) % 2) for _ in range(3)]
    model = torch.nn.Linear(5, 2)
    with Trainer(model, data=data, rule="fl-trust", num_workers=3, trusted=6) as found:
        assert found.task.trusted is not None
        assert sum(map(len, found.task.assignment)) == 54
        for worker, part in enumerate(found.task.assignment):
            assert set(part) <= set(range(20 * worker, 20 * worker + 20)) - set(found.task.trusted)
        found.step()
