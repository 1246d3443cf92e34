"""Rounds of federated learning with rules that need a reference vector."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from phocas import CenteredClipping, FLTrust, Median, Rule
from phocas.floats import from_bfloat16, to_bfloat16
from phocas.integrations.clients import Client, Terms
from phocas.integrations.merging.tensors import Tensor, in_memory

Arrays = dict[str, NDArray[Any]]
RNG = np.random.default_rng(1)
MODEL: Arrays = {
    "a": RNG.normal(size=(3, 4)).astype(np.float32) * 5,
    "n": np.array([3]),
    "b": RNG.normal(size=7).astype(np.float32),
}


def cut(update: NDArray[Any]) -> Arrays:
    return {"a": update[:12].reshape(3, 4), "b": update[12:]}


def tensors(arrays: Arrays) -> dict[str, Tensor]:
    return {name: in_memory(name, value, name) for name, value in arrays.items()}


def aggregated(
    terms: Terms, model: Arrays, updates: NDArray[Any], turn: int, *, as_updates: bool = False
) -> NDArray[Any]:
    """Return the aggregated update of clients that send models, or updates."""
    clients = []
    for number, update in enumerate(updates):
        sent = {**model, **cut(update.astype(np.float32))}
        if not as_updates:
            sent |= {name: model[name] + sent[name] for name in ("a", "b")}
        clients.append(Client(number, None, tensors(sent), 1.0))
    found, blame = terms.aggregate(
        clients, tensors(model), turn, lambda _, parts: np.concatenate(parts), updates=as_updates
    )
    assert found is not None
    assert blame.dropped.shape == (len(updates),)
    assert found["n"].tolist() == [3]
    whole = np.concatenate([found["a"], found["b"]])
    return whole if as_updates else whole - np.concatenate([model["a"].ravel(), model["b"]])


@pytest.mark.parametrize("as_updates", [False, True])
def test_previous_update_is_the_reference(as_updates: bool) -> None:
    rule = CenteredClipping("median", 2, "previous")
    terms = Terms(rule)
    previous = np.zeros(19)
    model = dict(MODEL)
    for turn in range(3):
        updates = RNG.normal(1.0, 0.5, size=(5, 19))
        updates[0] = -3.0
        got = aggregated(terms, model, updates, turn, as_updates=as_updates)
        np.testing.assert_allclose(got, rule(updates, reference=previous), atol=1e-4)
        previous = got.astype(np.float64)
        model |= {name: model[name] + change for name, change in cut(got).items()}


@pytest.mark.parametrize("as_updates", [False, True])
def test_trusted_update_is_given_by_a_function(as_updates: bool) -> None:
    updates = RNG.normal(1.0, 0.5, size=(5, 19))
    updates[:3] *= -4
    trusted = RNG.normal(1.0, 0.5, size=19)
    calls = []

    def train(model: Arrays, turn: int) -> Arrays:
        np.testing.assert_array_equal(model["a"], MODEL["a"])
        calls.append(turn)
        return cut(trusted)

    got = aggregated(Terms(FLTrust(), reference=train), MODEL, updates, 7, as_updates=as_updates)
    np.testing.assert_allclose(got, FLTrust()(updates, reference=trusted), atol=1e-4)
    assert calls == [7]
    fixed = aggregated(Terms(FLTrust(), reference=cut(trusted)), MODEL, updates, 7)
    np.testing.assert_allclose(fixed, got, atol=1e-4)


def test_bfloat16_models_take_a_reference() -> None:
    words = to_bfloat16(np.ones(4, np.float32))
    model = {"w": Tensor("w", "bfloat16", (4,), words.dtype, lambda: words)}
    clients = [Client(n, None, model, 1.0) for n in range(3)]
    terms = Terms(CenteredClipping(1.0, 2, "previous"))
    for turn in range(2):
        found, _ = terms.aggregate(clients, model, turn, lambda _, parts: np.concatenate(parts))
        assert found is not None
        assert from_bfloat16(found["w"]).tolist() == [1.0] * 4


@pytest.mark.parametrize(
    ("rule", "reference", "words"),
    [
        (FLTrust(), None, "needs the server's own update on trusted samples: give reference="),
        (Median(), {"a": np.ones(3)}, "median needs no update of the server"),
    ],
)
def test_settings_are_checked_before_a_round(rule: Rule, reference: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Terms(rule, reference=reference)


@pytest.mark.parametrize(
    ("update", "words"),
    [
        ({"a": np.ones((3, 4))}, "the reference must have the keys of the model: it lacks 'b'"),
        ({"a": np.ones(12), "b": np.ones(7)}, r"of the shape \(3, 4\) for key 'a'"),
        ({"a": np.full((3, 4), np.nan), "b": np.ones(7)}, "the reference must be finite"),
    ],
)
def test_bad_update_is_rejected(update: Arrays, words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        aggregated(Terms(FLTrust(), reference=update), MODEL, np.ones((3, 19)), 0)
