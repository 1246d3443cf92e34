"""The strategy with real Flower: its simulation, and a SuperLink with SuperNodes on loopback."""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

if importlib.util.find_spec("flwr") is None:
    pytest.skip("Flower is not installed: make test-flower", allow_module_level=True)

import flwr.serverapp.strategy as flwr_strategies
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.serverapp.exception import AggregationError
from flwr.supercore.privacy_accounting import SamplingMethod
from flwr.supercore.task_identity import TaskIdentity

import phocas
from phocas.integrations.flower import Adam, Momentum, RobustStrategy, Yogi
from phocas.integrations.flower.replies import tensors_of
from phocas.rules.reference import reference

ROOT = Path(__file__).parent.parent.parent.parent
KINDS = {0: "nan", 3: "keys", 5: "shape", 6: "raises", 8: "greedy", 9: "dtype", 11: "absurd"}
LEFT_OUT = {"keys", "shape", "raises", "dtype"}

# -- without a network -----------------------------------------------------------------------------


class Reply:
    """What the strategy sees of a message."""

    def __init__(self, node: int, arrays: dict[str, Any], **metrics: Any) -> None:
        self.metadata = type("Metadata", (), {"src_node_id": node})
        found = {
            name: value if isinstance(value, Array) else Array(np.asarray(value))
            for name, value in arrays.items()
        }
        self.content = RecordDict(
            {
                "arrays": ArrayRecord(found),
                "metrics": MetricRecord({"num-examples": 10, **metrics}),
            }
        )

    def has_error(self) -> bool:
        return False


def a_model(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "b.weight": rng.normal(size=(5, 7)).astype(np.float32),
        "a.bias": rng.normal(size=3000).astype(np.float32),
        "scalar": np.float32(rng.normal()),
        "batches": np.int64(seed),
        "empty": np.zeros((0, 3), np.float32),
    }


def prepared(rule: Any, model: dict[str, Any] | None = None, **options: Any) -> RobustStrategy:
    strategy = RobustStrategy(rule, **options)
    arrays = {name: Array(np.asarray(value)) for name, value in (model or a_model()).items()}
    strategy._model = tensors_of(ArrayRecord(arrays))
    return strategy


def flat(arrays: Any) -> Any:
    names = ("b.weight", "a.bias", "scalar")
    return np.concatenate([arrays[name].numpy().reshape(-1) for name in names])


@pytest.mark.parametrize(
    "rule",
    [
        "phocas:b=2",
        "nnm:b=2|heraclius:b=2",
        "cge:b=2",
        "clipping:radius=2.0|median",
        "cell-filter:b=2|nnm:b=2|trimmed-mean:b=2",
        "monitor:rule=phocas:b=2",
    ],
)
def test_updates_are_aggregated_to_the_definition(rule: str) -> None:
    base = a_model()
    sent = [a_model(seed) for seed in range(1, 8)]
    replies = [Reply(90 - i, state) for i, state in enumerate(sent)]
    arrays, metrics = prepared(rule).aggregate_train(1, replies)
    assert arrays is not None
    assert metrics is not None
    assert list(arrays) == list(base)
    rows = np.stack([flat(reply.content["arrays"]) for reply in replies])
    start = flat({name: Array(np.asarray(value)) for name, value in base.items()})
    wanted = start + reference(phocas.parse_rule(rule), rows.astype(float) - start)
    np.testing.assert_allclose(flat(arrays), wanted, rtol=1e-5, atol=1e-5)
    assert arrays["batches"].numpy() == 4
    assert arrays["scalar"].numpy().shape == ()
    assert arrays["empty"].numpy().shape == (0, 3)
    assert metrics["phocas/nodes"] == list(range(84, 91))


def damaged(kind: str) -> dict[str, Any]:
    state = a_model(5)
    whole = Array(state["a.bias"])
    if kind == "short":
        state["a.bias"] = Array(whole.dtype, whole.shape, whole.stype, whole.data[:-8])
    elif kind == "empty":
        state["a.bias"] = Array(whole.dtype, whole.shape, whole.stype, b"")
    elif kind == "header":
        state["a.bias"] = Array(whole.dtype, whole.shape, whole.stype, b"\x93NUMPY" + b"{" * 900)
    elif kind == "unclosed":  # NumPy raises tokenize.TokenError for it, which is no ValueError
        text = b"{'descr': '<f4', 'fortran_order': False, 'shape': (3000,"
        head = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little")
        state["a.bias"] = Array(whole.dtype, whole.shape, whole.stype, head + text)
    elif kind == "objects":
        text = whole.data.replace(b"'<f4'", b"'|O' ")
        state["a.bias"] = Array(whole.dtype, whole.shape, whole.stype, text)
    elif kind == "pickle":
        state["a.bias"] = Array("float32", (3000,), "pickle", b"cos\nsystem\n(S'true'\ntR.")
    elif kind == "claims":  # says what is expected, and sends something else
        other = Array(np.zeros(12))
        state["a.bias"] = Array(whole.dtype, whole.shape, whole.stype, other.data)
    elif kind == "missing":
        del state["scalar"]
    return state


@pytest.mark.parametrize(
    "kind", ["short", "empty", "header", "unclosed", "objects", "pickle", "claims", "missing"]
)
def test_damaged_reply_costs_its_own_row(kind: str) -> None:
    honest = [Reply(node, a_model(node)) for node in range(1, 6)]
    wanted, _ = prepared("phocas:b=1").aggregate_train(1, honest)
    arrays, metrics = prepared("phocas:b=1").aggregate_train(1, [*honest, Reply(9, damaged(kind))])
    assert arrays is not None
    assert metrics is not None
    assert flat(arrays).tobytes() == flat(wanted).tobytes()
    assert metrics["phocas/failed"] == 1


def test_too_few_replies_are_skipped_or_stop_the_run() -> None:
    replies = [Reply(node, a_model(node)) for node in range(4)]
    arrays, metrics = prepared("phocas:b=2").aggregate_train(1, replies)
    assert arrays is None
    assert dict(metrics or {}) == {"phocas/replies": 4, "phocas/failed": 0}
    with pytest.raises(AggregationError, match="Phocas needs 2b < m: got b=2 with m=4"):
        prepared("phocas:b=2", on_too_few="stop").aggregate_train(1, replies)
    arrays, _ = prepared("mean").aggregate_train(1, [])
    assert arrays is None


def with_nan(*bad: int) -> list[Any]:
    """Return the replies of nodes 1 to 5, of which some have NaN in a bias."""
    replies = []
    for node in range(1, 6):
        state = a_model(node)
        if node in bad:
            state["a.bias"][:1000] = np.nan
        replies.append(Reply(node, state, loss=0.5))
    return replies


@pytest.mark.parametrize("optimizer", [None, Momentum(), Adam()])
def test_non_finite_aggregate_is_skipped(optimizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Neither the model nor the optimizer's state is spoilt for later rounds."""
    strategy = prepared("trimmed-mean:b=1", optimizer=optimizer)
    arrays, metrics = strategy.aggregate_train(1, with_nan(2, 4))
    assert arrays is None
    assert metrics is not None
    assert metrics["phocas/not-finite"] == 1000
    assert metrics["phocas/not-finite-nodes"] == [2, 4]
    assert metrics["loss"] == 0.5
    (warned,) = [line for line in caplog.messages if "finite" in line]
    assert warned.startswith("aggregate_train: skipped round 1: 1000 values of the aggregate")
    assert warned.endswith("NaN or inf came from 2, 4")
    arrays, metrics = strategy.aggregate_train(2, with_nan())
    wanted, _ = prepared("trimmed-mean:b=1", optimizer=optimizer).aggregate_train(2, with_nan())
    assert flat(arrays).tobytes() == flat(wanted).tobytes()
    assert (metrics or {})["phocas/not-finite"] == 0


def test_non_finite_aggregate_stops_the_run_or_is_applied_on_request() -> None:
    replies = with_nan(2, 4)
    with pytest.raises(AggregationError, match=r"round 7: 1000 values .* came from 2, 4"):
        prepared("trimmed-mean:b=1", on_nonfinite="stop").aggregate_train(7, replies)
    arrays, _ = prepared("trimmed-mean:b=1", on_nonfinite="apply").aggregate_train(1, replies)
    assert arrays is not None
    assert np.count_nonzero(~np.isfinite(arrays["a.bias"].numpy())) == 1000


def test_non_finite_aggregate_of_finite_clients_names_no_client(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = {"w": np.full(4, np.nan)}
    replies = [Reply(node, {"w": np.arange(4.0) * node}) for node in range(5)]
    rule = "clipping:radius=1.0|median"  # goes by distances to the model
    arrays, metrics = prepared(rule, model).aggregate_train(1, replies)
    assert arrays is None
    assert (metrics or {})["phocas/not-finite-nodes"] == []
    assert "4 values of the aggregate are not finite: no client sent NaN or inf" in caplog.text


def test_claimed_examples_are_ignored_or_capped() -> None:
    sent = [a_model(node) for node in range(1, 10)]
    replies = [Reply(node, state, **{"num-examples": 100}) for node, state in enumerate(sent)]
    replies[3] = Reply(3, sent[3], **{"num-examples": 1e9})
    plain, _ = prepared("phocas:b=1").aggregate_train(1, replies)
    rows = np.stack([flat(reply.content["arrays"]) for reply in replies])
    assert flat(plain).tobytes() == phocas.Phocas(b=1)(rows).tobytes()
    capped, _ = prepared("phocas:b=1", max_share=0.2).aggregate_train(1, replies)
    wanted = phocas.Phocas(b=1)(rows, weights=[100.0] * 3 + [1e9] + [100.0] * 5, max_share=0.2)
    assert flat(capped).tobytes() == wanted.tobytes()
    for claim in (math.nan, -1, 0, [1.0, 2.0]):
        replies[3] = Reply(3, sent[3], **{"num-examples": claim})
        _, metrics = prepared("phocas:b=1", max_share=0.2).aggregate_train(1, replies)
        assert (metrics or {})["phocas/failed"] == 1


def shortened(rows: Any) -> Any:
    """Return half of the median, which does not move with its rows."""
    return np.median(rows, axis=0) / 2


@pytest.mark.parametrize("columnwise", [False, True])
def test_function_rule_gets_the_differences_to_the_model(columnwise: bool) -> None:
    rule = phocas.FunctionRule(shortened, b=2, columnwise=columnwise)
    replies = [Reply(i, a_model(i + 1)) for i in range(7)]
    arrays, metrics = prepared(rule).aggregate_train(1, replies)
    assert arrays is not None
    assert (metrics or {})["phocas/dropped"] == [0.0] * 7
    rows = np.stack([flat(reply.content["arrays"]) for reply in replies]).astype(float)
    start = flat({name: Array(np.asarray(value)) for name, value in a_model().items()})
    np.testing.assert_allclose(flat(arrays), start + shortened(rows - start), rtol=1e-5, atol=1e-5)
    assert arrays["batches"].numpy() == 4
    assert arrays["empty"].numpy().shape == (0, 3)


@pytest.mark.parametrize(
    ("rule", "share"), [("mean", 1.0), ("clipping:radius=50|mean", 0.3), ("nnm:b=1|mean", 0.3)]
)
def test_claims_count_in_every_pipeline(rule: str, share: float) -> None:
    claims = [100.0, 200.0, 300.0, 150.0, 250.0, 120.0, 180.0]
    sent = [a_model(node) for node in range(1, 8)]
    replies = [Reply(i, sent[i], **{"num-examples": claims[i]}) for i in range(7)]
    arrays, _ = prepared(rule, max_share=share).aggregate_train(1, replies)
    rows = np.stack([flat(reply.content["arrays"]) for reply in replies]).astype(float)
    start = flat({name: Array(np.asarray(value)) for name, value in a_model().items()})
    weighted = phocas.Weighted(phocas.parse_rule(rule), tuple(claims))
    wanted = start + reference(weighted, rows - start)
    np.testing.assert_allclose(flat(arrays), wanted, rtol=1e-4, atol=1e-4)


def test_two_claims_within_b_do_not_stop_training() -> None:
    sent = [a_model(node) for node in range(1, 10)]
    claims = [1e12, 1e12, *[100.0] * 7]
    replies = [Reply(i, sent[i], **{"num-examples": claims[i]}) for i in range(9)]
    arrays, _ = prepared("trimmed-mean:b=2", max_share=0.2499).aggregate_train(1, replies)
    assert arrays is not None


def test_metrics_are_medians_over_the_clients() -> None:
    replies = [Reply(node, a_model(node), loss=0.1 * node) for node in range(1, 6)]
    replies[4] = Reply(5, a_model(5), loss=1e30, **{"num-examples": 1e9})
    _, metrics = prepared("median").aggregate_train(1, replies)
    assert (metrics or {})["loss"] == pytest.approx(0.3)
    found = prepared("median").aggregate_evaluate(1, replies)
    assert (found or {})["loss"] == pytest.approx(0.3)


@pytest.mark.parametrize("optimizer", [Momentum(lr=0.5, momentum=0.9), Adam(lr=0.1), Yogi(lr=0.1)])
def test_server_optimizers_take_their_steps(optimizer: Any) -> None:
    model = {"w": np.zeros(4)}
    strategy = prepared("median", model, optimizer=optimizer)
    place, moving, square = np.zeros(4), np.zeros(4), np.zeros(4)
    for turn in range(1, 4):
        target = np.array([1.0, -2.0, 3.0, 0.5]) * turn
        strategy._model = tensors_of(ArrayRecord({"w": Array(place)}))
        arrays, _ = strategy.aggregate_train(turn, [Reply(i, {"w": target}) for i in range(3)])
        update = target - place
        if isinstance(optimizer, Momentum):
            moving = 0.9 * moving + update
            place = place + 0.5 * moving
        else:
            moving, new = 0.9 * moving + 0.1 * update, update**2
            if isinstance(optimizer, Yogi):
                square = square + 0.01 * np.where(square > new, -new, new)
            else:
                square = 0.99 * square + 0.01 * new
            step = moving / (1 - 0.9**turn) / (np.sqrt(square / (1 - 0.99**turn)) + 1e-3)
            place = place + 0.1 * step
        assert arrays is not None
        np.testing.assert_allclose(arrays["w"].numpy(), place, rtol=1e-12)


def trained_batch_norm(model: dict[str, Any], count: int) -> dict[str, Any]:
    """Return what a client sends whose data have mean 5 and variance 0.01."""
    kept = np.float32(0.9**count)
    return {
        "norm.weight": model["norm.weight"] + np.float32(0.1),
        "norm.running_mean": kept * model["norm.running_mean"] + (1 - kept) * np.float32(5),
        "norm.running_var": kept * model["norm.running_var"] + (1 - kept) * np.float32(0.01),
        "norm.num_batches_tracked": model["norm.num_batches_tracked"] + count,
    }


def after_rounds(rounds: int, model: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Return the model after some rounds of a server with momentum."""
    strategy = RobustStrategy("median", optimizer=Momentum(lr=1.0, momentum=0.9), **options)
    for turn in range(1, rounds + 1):
        sent = ArrayRecord({name: Array(np.asarray(value)) for name, value in model.items()})
        strategy._model = tensors_of(sent)
        replies = [Reply(node, trained_batch_norm(model, 8 + node)) for node in range(3)]
        arrays, _ = strategy.aggregate_train(turn, replies)
        assert arrays is not None
        model = {name: array.numpy() for name, array in arrays.items()}
    return model


def test_buffers_bypass_the_optimizer_of_the_server() -> None:
    """Momentum drives BatchNorm's variance below zero; what clients agree on stays above it."""
    start = {
        "norm.weight": np.ones(4, np.float32),
        "norm.running_mean": np.zeros(4, np.float32),
        "norm.running_var": np.ones(4, np.float32),
        "norm.num_batches_tracked": np.int64(0),
    }
    found = after_rounds(3, start)
    kept = 0.9 ** (3 * 9)  # of the start, by the client in the middle
    np.testing.assert_allclose(found["norm.running_var"], kept + (1 - kept) * 0.01, rtol=1e-4)
    np.testing.assert_allclose(found["norm.running_mean"], (1 - kept) * 5, rtol=1e-4)
    assert found["norm.num_batches_tracked"] == 3 * 9
    assert (found["norm.weight"] > 1.0 + 3 * 0.1).all()  # further than the updates: momentum
    stepped = after_rounds(3, start, buffers=())
    assert stepped["norm.running_var"].min() < 0
    listed = after_rounds(3, start, buffers=["norm.weight", "norm.running_var"])
    np.testing.assert_allclose(listed["norm.weight"], 1.3, rtol=1e-5)


def test_aggregation_needs_little_more_memory_than_its_output() -> None:
    model = {f"t{i}": np.zeros(2_000_000, np.float32) for i in range(6)}
    rng = np.random.default_rng(0)
    replies = [
        Reply(n, {k: rng.normal(size=v.shape).astype(np.float32) for k, v in model.items()})
        for n in range(7)
    ]
    for rule in ("phocas:b=2", "nnm:b=2|phocas:b=2"):
        strategy = prepared(rule, model)
        strategy.aggregate_train(1, replies)  # makes the kernels
        tracemalloc.start()
        arrays, _ = strategy.aggregate_train(2, replies)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert arrays is not None
        assert peak <= 6 * 8_000_000 + (64 << 20)


def test_bad_options_are_rejected() -> None:
    with pytest.raises(ValueError, match="on_too_few must be one of skip, stop"):
        RobustStrategy("median", on_too_few="ignore")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_share must be more than 0"):
        RobustStrategy("median", max_share=0)
    with pytest.raises(ValueError, match="unknown on_nonfinite 'ignore'; policies: skip, stop"):
        RobustStrategy("median", on_nonfinite="ignore")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="buffers must be a list of names: got 'running_var'"):
        RobustStrategy("median", buffers="running_var")
    with pytest.raises(ValueError, match=r"got b=2 with max_share=0\.25, .* is 0\.2499"):
        RobustStrategy("trimmed-mean:b=2", max_share=0.25)
    with pytest.raises(ValueError, match="cannot be weighted"):
        RobustStrategy("monitor:rule=median", max_share=0.25)
    with pytest.raises(ValueError, match="0 <= momentum < 1"):
        Momentum(momentum=1.0)
    for wrong, right in (("max_shar", "max_share"), ("fraction_trian", "fraction_train")):
        with pytest.raises(TypeError, match=f"option '{wrong}'; did you mean '{right}'"):
            RobustStrategy("median", **cast("Any", {wrong: 0.5}))


class TorchLike:
    """An optimizer of another library."""

    def step(self, closure: Any = None) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("wrong", ["adam", Adam, TorchLike()])
def test_object_that_is_no_optimizer_is_rejected_when_the_strategy_is_made(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"optimizer must be .*Momentum.*Adam.* or None: got"):
        RobustStrategy("median", optimizer=wrong)


@pytest.mark.parametrize(
    ("max_share", "line"),
    [(None, "Claimed 'n': ignored"), (0.2, "Claimed 'n': weights, at most 0.2 of all each")],
)
def test_summary_says_once_how_claims_are_used(
    max_share: float | None, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "flwr"):
        RobustStrategy("median", max_share=max_share, weighted_by_key="n").summary()
    assert [each.split("── ")[-1] for each in caplog.messages if "'n'" in each] == [line]
    assert any("Minimum nodes: train (2)" in each for each in caplog.messages)


# -- exclusion, and a server that is restarted -----------------------------------------------------


@pytest.fixture(autouse=True)
def _server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process make messages, as a server app may."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


class Nodes:
    """A grid with connected nodes."""

    def __init__(self, nodes: range) -> None:
        self.nodes = nodes

    def get_node_ids(self) -> list[int]:
        return list(self.nodes)


def rounds_with_nan(strategy: RobustStrategy, turns: range, nodes: int = 8) -> list[Any]:
    """Run rounds in which node 2 sends NaN, and return the sampled nodes and metrics of each."""
    model = ArrayRecord({"w": Array(np.zeros(40))})
    found = []
    for turn in turns:
        messages = strategy.configure_train(turn, model, ConfigRecord(), Nodes(range(nodes)))
        sampled = sorted(message.metadata.dst_node_id for message in messages)
        rng = np.random.default_rng(turn)
        rows = {node: rng.normal(node, 1.0, size=40) for node in range(nodes)}
        rows[2][:] = np.nan
        replies = [Reply(node, {"w": rows[node]}) for node in sampled]
        arrays, metrics = strategy.aggregate_train(turn, replies)
        assert arrays is not None
        assert metrics is not None
        found.append((sampled, metrics))
    return found


def test_excluded_node_is_neither_sampled_nor_aggregated(
    caplog: pytest.LogCaptureFixture,
) -> None:
    strategy = RobustStrategy("trimmed-mean:b=1", exclude="evidence:rounds=5")
    found = rounds_with_nan(strategy, range(1, 25))
    excluded = [list(metrics["phocas/excluded"]) for _, metrics in found]
    first = excluded.index([2])
    assert 5 < first < 20
    assert excluded[first : first + 6] == [[2]] * 5 + [[]]
    for (sampled, metrics), out in zip(found, excluded, strict=True):
        assert sampled == [node for node in range(8) if node not in out]
        assert metrics["phocas/suspects"] == metrics["phocas/flagged"]
    assert "excluded for 5 rounds, false alarm probability 0.001: 2" in caplog.text
    assert "readmitted after 5 rounds: 2" in caplog.text
    assert found[first][1]["phocas/flagged"] == [2]


def test_excluded_node_is_sampled_and_left_out_if_few_are_connected() -> None:
    strategy = RobustStrategy("trimmed-mean:b=1", exclude="evidence", min_train_nodes=8)
    sampled, metrics = rounds_with_nan(strategy, range(1, 25))[-1]
    assert sampled == list(range(8))
    assert metrics["phocas/excluded"] == [2]
    assert metrics["phocas/nodes"] == [node for node in range(8) if node != 2]


@pytest.mark.parametrize("optimizer", [None, Momentum(), Adam()])
def test_restarted_server_has_exclusions_and_the_state_of_the_optimizer(
    optimizer: Any, tmp_path: Path
) -> None:
    options: Any = {"exclude": "evidence", "optimizer": optimizer}
    whole = RobustStrategy("trimmed-mean:b=1", **options)
    rounds_with_nan(whole, range(1, 22))
    options["state"] = tmp_path / "state.npz"
    rounds_with_nan(RobustStrategy("trimmed-mean:b=1", **options), range(1, 20))
    second = RobustStrategy("trimmed-mean:b=1", **options)
    found = rounds_with_nan(second, range(20, 22))
    assert [metrics["phocas/excluded"] for _, metrics in found] == [[2], [2]]
    assert second._turn == whole._turn == 21
    assert second._state.keys() == whole._state.keys()
    for name, slots in whole._state.items():
        for slot, values in slots.items():
            assert second._state[name][slot].tobytes() == values.tobytes()
    other = RobustStrategy("trimmed-mean:b=1", **options)
    model = ArrayRecord({"w": Array(np.zeros(41))})
    with pytest.raises(AggregationError, match="belongs to another federation"):
        other.configure_train(1, model, ConfigRecord(), Nodes(range(8)))


# -- composition with other parts of Flower --------------------------------------------------------


def test_updates_are_normalized_by_the_steps_of_the_clients() -> None:
    steps = [10, 30, 20, 40, 25]
    replies = [
        Reply(n, {"w": np.full(4, 1.0 + taken)}, work=taken) for n, taken in enumerate(steps)
    ]
    replies.append(Reply(9, {"w": np.full(4, 5.0)}, work=0))
    replies.append(Reply(8, {"w": np.full(4, 5.0)}))
    strategy = prepared("mean", {"w": np.ones(4)}, normalized_by_key="work")
    arrays, metrics = strategy.aggregate_train(1, replies)
    assert arrays is not None
    np.testing.assert_allclose(arrays["w"].numpy(), 1.0 + 25.0)
    assert (metrics or {})["phocas/failed"] == 2


@pytest.mark.parametrize("wrapper", ["Fixed", "Adaptive"])
def test_server_side_privacy_wrapper_around_the_strategy(wrapper: str) -> None:
    """Updates are clipped before the rule, and the aggregate gets noise."""
    inner = RobustStrategy("trimmed-mean:b=1")
    name = f"DifferentialPrivacyServerSide{wrapper}Clipping"
    norm = {"Fixed": "clipping_norm", "Adaptive": "initial_clipping_norm"}[wrapper]
    options = {"noise_multiplier": 0.01, "num_sampled_clients": 7, norm: 1.0}
    strategy = getattr(flwr_strategies, name)(inner, **options)
    model = ArrayRecord({"w": Array(np.zeros(400, np.float32))})
    strategy.configure_train(1, model, ConfigRecord(), Nodes(range(7)))
    rows = np.random.default_rng(1).normal(1.0, 0.1, size=(7, 400)).astype(np.float32)
    rows[3] *= -1000
    replies = [Reply(node, {"w": row}) for node, row in enumerate(rows)]
    arrays, metrics = strategy.aggregate_train(1, replies)
    assert arrays is not None
    assert metrics is not None
    clipped = rows / np.linalg.norm(rows, axis=1)[:, None]
    got = arrays["w"].numpy() - phocas.TrimmedMean(b=1)(clipped)
    assert 0 < np.linalg.norm(got) < 0.5
    assert metrics["phocas/nodes"] == list(range(7))


def test_privacy_accounting_rejects_a_robust_rule() -> None:
    """The noise is that of a mean: another rule may depend more on one client."""
    config = SimpleNamespace(sampling_method=SamplingMethod.NO_AMPLIFICATION)
    accountant: Any = SimpleNamespace(config=config)
    with pytest.raises(ValueError, match=r"requires a strategy using FedAvg\.aggregate_train"):
        flwr_strategies.DifferentialPrivacyServerSideFixedClipping(
            RobustStrategy("median"), 1.0, 1.0, 7, accountant=accountant
        )


def test_proximal_term_reaches_the_clients() -> None:
    model = ArrayRecord({"w": Array(np.zeros(4))})
    config = ConfigRecord({"proximal-mu": 0.1})
    messages = RobustStrategy("median").configure_train(1, model, config, Nodes(range(3)))
    assert [message.content["config"]["proximal-mu"] for message in messages] == [0.1] * 3


@pytest.mark.parametrize("name", ["FedAdam", "FedYogi", "FedAdagrad", "FedAvgM"])
def test_strategy_with_an_optimizer_of_flower_is_rejected(name: str) -> None:
    with pytest.raises(TypeError, match="pass optimizer="):
        type("Both", (RobustStrategy, getattr(flwr_strategies, name)), {})


# -- with real processes ---------------------------------------------------------------------------


def environment(
    home: Path, strategy: str, kinds: dict[int, str], rounds: int, nodes: int
) -> dict[str, str]:
    return {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "SERVER_STRATEGY": strategy,
        "SERVER_ROUNDS": str(rounds),
        "SERVER_NODES": str(nodes),
        "SERVER_REPORT": str(home / "report.json"),
        "CLIENT_KINDS": json.dumps(kinds),
    }


def simulated(home: Path, strategy: str, nodes: int = 13) -> dict[str, Any]:
    home.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "tests.integrations.flower.simulate", str(nodes)],
        env=environment(home, strategy, KINDS, 3, nodes),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    report = home / "report.json"
    assert report.exists(), done.stdout + done.stderr
    found: dict[str, Any] = json.loads(report.read_text())
    return found | {"log": done.stdout + done.stderr}


def test_simulation_with_clients_of_every_bad_kind(tmp_path: Path) -> None:
    """Three rounds bring honest clients seven eighths of the way; FedAvg does not survive one."""
    fedavg = simulated(tmp_path / "fedavg", "fedavg")
    assert fedavg.get("error") == "InconsistentMessageReplies"
    robust = simulated(tmp_path / "robust", "robust")
    assert robust["weight"] == pytest.approx(3 * 7 / 8, abs=0.02)
    assert robust["bias"] == pytest.approx(3 * 7 / 8, abs=0.02)
    assert robust["batches"] == 3
    assert robust["dtypes"] == ["float32", "float32", "int64"]
    for metrics in robust["train"]:
        assert metrics["phocas/failed"] == len(LEFT_OUT)
        assert len(metrics["phocas/unusual"]) == 2  # who sends NaN, and who sends -100
    assert [each["distance"] for each in robust["evaluate"]] == pytest.approx(
        [1.5, 0.75, 0.375], abs=0.02
    )
    assert "it must have the keys of the model: it lacks 'layer.bias'" in robust["log"]
    weighted = simulated(tmp_path / "weighted", "weighted")
    assert weighted["weight"] == pytest.approx(3 * 7 / 8, abs=0.02)
    assert weighted["train"][0]["phocas/failed"] == len(LEFT_OUT) + 1  # NaN examples as well


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def running(words: list[str], env: dict[str, str], log: Path) -> Iterator[None]:
    with log.open("w") as file:
        process = subprocess.Popen(
            words, env=env, stdout=file, stderr=file, start_new_session=True, cwd=log.parent
        )
        try:
            yield
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


APP = """
[project]
name = "hostile"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "phocas"

[tool.flwr.app.components]
serverapp = "apps:server"
clientapp = "apps:client"

[tool.flwr.app.config]
"""


def test_superlink_with_two_supernodes(tmp_path: Path) -> None:
    app = tmp_path / "app"
    app.mkdir()
    shutil.copy(Path(__file__).parent / "apps.py", app)
    (app / "pyproject.toml").write_text(APP)
    port = free_port()
    (tmp_path / "config.toml").write_text(
        '[superlink]\ndefault = "here"\n\n[superlink.here]\n'
        f'address = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    env = environment(tmp_path, "two", {}, 2, 2)
    binary = Path(sys.executable).parent
    report = tmp_path / "report.json"
    with ExitStack() as stack:
        link = [str(binary / "flower-superlink"), "--insecure", "--host", "127.0.0.1"]
        stack.enter_context(running([*link, "--port", str(port)], env, tmp_path / "link.log"))
        for number in range(2):
            node = [str(binary / "flower-supernode"), "--insecure"]
            node += ["--superlink", f"127.0.0.1:{port}", "--port", str(free_port())]
            node += ["--node-config", f"partition-id={number} num-partitions=2"]
            stack.enter_context(running(node, env, tmp_path / f"node{number}.log"))
        submit = [str(binary / "flwr"), "run", str(app), "here", "--stream"]
        said = ""
        for _ in range(30):  # until the SuperLink answers
            done = subprocess.run(
                submit, env=env, capture_output=True, text=True, timeout=240, check=False
            )
            said = done.stdout + done.stderr
            if "is unavailable" not in said:
                break
        logs = "\n".join(path.read_text() for path in tmp_path.glob("*.log"))
        assert report.exists(), said + logs
    found = json.loads(report.read_text())
    assert found["weight"] == pytest.approx(3 * 3 / 4, abs=0.02)
    assert [each["phocas/replies"] for each in found["train"]] == [2, 2]
