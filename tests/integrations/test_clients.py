"""Rounds of federated learning: reference vectors, unequal local work, sums of groups."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.rules.test_weighted_definitions import PIPELINES, slowly, some_rows

from phocas import CenteredClipping, FLTrust, Mean, Median, Rule, TrimmedMean, parse_rule
from phocas.floats import from_bfloat16, to_bfloat16
from phocas.integrations.client_replies import Client
from phocas.integrations.clients import ClientDrops, Terms
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
    found, drops = terms.aggregate(
        clients, tensors(model), turn, lambda _, parts: np.concatenate(parts), updates=as_updates
    )
    assert found is not None
    assert drops.dropped.shape == (len(updates),)
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


# -- claimed examples ------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [t for t in PIPELINES if t.count("|") < 2 and "b=0" not in t])
def test_claims_weigh_updates_as_the_definition_says(text: str) -> None:
    """Every rule of the table, alone and after a stage, over differences to the model."""
    rule = parse_rule(text)
    updates = some_rows(len(text), "far")
    rng = np.random.default_rng(9)
    claims = np.where(np.arange(len(updates)) == 3, 1e12, rng.uniform(1, 30, size=len(updates)))
    base = rng.normal(size=updates.shape[1])
    model = tensors({"w": np.asarray(base)})
    clients = [
        Client(n, None, tensors({"w": base + update}), float(claims[n]))
        for n, update in enumerate(updates)
    ]
    found, _ = Terms(rule, max_share=0.16).aggregate(
        clients, model, 0, lambda _, parts: np.concatenate(parts)
    )
    assert found is not None
    wanted = slowly(rule, updates, claims, 0.16)
    np.testing.assert_allclose(found["w"] - base, wanted, rtol=1e-4, atol=1e-4)


# -- unequal local work ----------------------------------------------------------------------------


@pytest.mark.parametrize("as_updates", [False, True])
def test_normalized_updates_are_as_long_as_the_median_of_steps(as_updates: bool) -> None:
    """With the mean this is FedNova, except that the median is in place of the mean of steps."""
    updates = RNG.normal(1.0, 0.5, size=(5, 19))
    steps = np.array([5.0, 500.0, 40.0, 80.0, 20.0])
    terms = Terms(Mean(), normalize=True)
    clients = []
    for number, update in enumerate(updates):
        sent = {**MODEL, **cut(update.astype(np.float32))}
        if not as_updates:
            sent |= {name: MODEL[name] + sent[name] for name in ("a", "b")}
        clients.append(Client(number, None, tensors(sent), 1.0, steps[number]))
    model = tensors(MODEL)
    kept = terms.select(clients, model, updates=as_updates)
    found, _ = terms.aggregate(
        kept, model, 0, lambda _, parts: np.concatenate(parts), updates=as_updates
    )
    assert found is not None
    whole = np.concatenate([found["a"], found["b"]])
    start = np.concatenate([MODEL["a"].ravel(), MODEL["b"]])
    per_step = sum(update / taken for update, taken in zip(updates, steps, strict=True)) / 5
    np.testing.assert_allclose(whole - (0 if as_updates else start), 40 * per_step, atol=1e-4)
    assert found["n"].tolist() == [3]


def test_buffers_and_bfloat16_are_normalized_as_they_should_be() -> None:
    words = to_bfloat16(np.full(4, 3.0, np.float32))
    start = to_bfloat16(np.ones(4, np.float32))
    model: dict[str, Tensor] = {
        "w": Tensor("w", "bfloat16", (4,), start.dtype, lambda: start),
        **tensors({"norm.running_var": np.ones(3, np.float32)}),
    }
    sent = {
        "w": Tensor("w", "bfloat16", (4,), words.dtype, lambda: words),
        **tensors({"norm.running_var": np.full(3, 0.25, np.float32)}),
    }
    clients = [Client(n, None, sent, 1.0, steps) for n, steps in enumerate((10.0, 40.0, 40.0))]
    first, _, last = Terms(Mean(), normalize=True).select(clients, model)
    assert from_bfloat16(first.tensors["w"].open()).tolist() == [9.0] * 4
    assert last.tensors["w"] is sent["w"]
    assert first.tensors["norm.running_var"].open().tolist() == [0.25] * 3


@pytest.mark.parametrize("claim", [1e-300, 1e300])
def test_absurd_claim_of_steps_costs_one_row(claim: float) -> None:
    updates = RNG.normal(1.0, 0.1, size=(7, 19)).astype(np.float32)
    model = tensors({**MODEL, "a": 0 * MODEL["a"], "b": 0 * MODEL["b"]})
    clients = [
        Client(n, None, tensors({**MODEL, **cut(update)}), 1.0, claim if n == 2 else 10.0)
        for n, update in enumerate(updates)
    ]
    terms = Terms(TrimmedMean(b=1), normalize=True)
    kept = terms.select(clients, model)
    found, _ = terms.aggregate(kept, model, 0, lambda _, parts: np.concatenate(parts))
    assert found is not None
    others = np.delete(updates, 2, axis=0)
    whole = np.concatenate([found["a"], found["b"]])
    assert (whole >= others.min(axis=0) - 1e-6).all()
    assert (whole <= others.max(axis=0) + 1e-6).all()


# -- secure aggregation ----------------------------------------------------------------------------


@pytest.mark.parametrize("attack", [-1e6, np.nan, 3.0])
def test_rule_over_sums_of_groups_tolerates_b_clients(attack: float) -> None:
    """The server sees the sum of each group; a Byzantine client spoils its own group's alone."""
    rng = np.random.default_rng(3)
    honest = rng.normal(1.0, 0.2, size=(21, 500))
    for b in (1, 2):
        rule = TrimmedMean(b)
        rows = honest.copy()
        rows[rng.choice(21, b, replace=False)] = attack
        means = rows.reshape(7, 3, -1).sum(axis=1) / 3
        good = honest.reshape(7, 3, -1).mean(axis=1)
        bound = rule.error_bound(7, b)
        assert bound is not None
        deviation = np.sqrt(np.square(good - good.mean(axis=0)).sum(axis=1).mean())
        assert np.linalg.norm(rule(means) - good.mean(axis=0)) <= 2 * bound * deviation


def test_client_that_lost_all_values_is_unusual_whatever_others_lost() -> None:
    names = list("abcdef")
    assert ClientDrops(np.array([0.05, 0.2, 1.0, 0.4, 0.1, 0.65]), 0.2, 0).unusual(names) == ["c"]
    chosen = np.array([1.0, 1.0, 0.0, 1.0, 1.0, 1.0])  # Krum drops all rows but one
    assert ClientDrops(chosen, 0.8, 0).unusual(names) == []
