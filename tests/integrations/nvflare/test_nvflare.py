"""The aggregator with real NVFlare: its classes, and its simulator with a process for each site."""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

if importlib.util.find_spec("nvflare") is None:
    pytest.skip("NVFlare is not installed: make test-flower", allow_module_level=True)

import psutil
import torch
from nvflare.apis.fl_constant import FLMetaKey, ReservedKey
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.app_common.workflows.fedavg import FedAvg
from nvflare.job_config.api import FedJob

import phocas
from phocas.integrations.nvflare import RobustAggregator
from phocas.rules.reference import reference

ROOT = Path(__file__).parents[3]
FLOATS = ("b.weight", "a.bias", "scalar")

# -- without a network -----------------------------------------------------------------------------


def a_model(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "b.weight": rng.normal(size=(7, 5)).astype(np.float32).T,  # not adjacent
        "a.bias": rng.normal(size=3000).astype(np.float32),
        "scalar": np.float32(rng.normal()),
        "batches": np.int64(seed),
        "flag": np.array([seed > 3]),
        "empty": np.zeros((0, 3), np.float32),
    }


def sent(params: Any, round_: int = 0) -> FLContext:
    """Return what components are told when a model is sent to a client."""
    context = FLContext()
    shareable = FLModelUtils.to_shareable(FLModel(params=params, current_round=round_))
    context.set_prop(AppConstants.TRAIN_SHAREABLE, shareable, private=True, sticky=False)
    return context


def prepared(rule: Any, params: Any = None, **options: Any) -> RobustAggregator:
    aggregator = RobustAggregator(rule, **options)
    model = a_model() if params is None else params
    aggregator.handle_event(AppEventType.BEFORE_TRAIN_TASK, sent(model))
    return aggregator


def result(name: str, params: Any, kind: ParamsType = ParamsType.FULL, **options: Any) -> FLModel:
    meta = {"client_name": name, **options.pop("meta", {})}
    return FLModel(params_type=kind, params=params, meta=meta, **options)


def aggregated(aggregator: RobustAggregator, results: list[FLModel]) -> FLModel:
    aggregator.reset_stats()
    for each in results:
        aggregator.accept_model(each)
    return aggregator.aggregate_model()


def flat(params: Any) -> Any:
    return np.concatenate([np.asarray(params[name]).reshape(-1) for name in FLOATS])


def as_tensors(params: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.from_numpy(np.array(value)) for name, value in params.items()}


def logged(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == level]


@pytest.mark.parametrize("kind", list(ParamsType))
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
def test_models_and_updates_are_aggregated_to_the_definition(rule: str, kind: ParamsType) -> None:
    base = a_model()
    models = [a_model(seed) for seed in range(1, 8)]
    start = flat(base) if kind is ParamsType.FULL else np.zeros_like(flat(base))
    rows = np.stack([flat(model) for model in models])
    wanted = start + reference(phocas.parse_rule(rule), rows.astype(float) - start)
    for form in (dict, as_tensors):
        results = [result(f"s{i}", form(model), kind) for i, model in enumerate(models)]
        found = aggregated(prepared(rule, form(base)), results)
        assert found.params_type is kind
        assert list(found.params) == list(base)
        np.testing.assert_allclose(flat(found.params), wanted, rtol=1e-5, atol=1e-5)
        assert found.params["batches"] == 4
        assert found.params["flag"].tolist() == [True]
        example = form(base)["a.bias"]
        for name, value in found.params.items():
            assert type(value) is type(example)
            assert tuple(value.shape) == np.shape(base[name])
        assert found.params["a.bias"].dtype == example.dtype


def test_half_precision_keeps_its_type() -> None:
    base = {"w": torch.zeros(9, dtype=torch.bfloat16)}
    models = [{"w": torch.full((9,), float(seed), dtype=torch.bfloat16)} for seed in range(5)]
    found = aggregated(
        prepared("median", base), [result(f"s{i}", model) for i, model in enumerate(models)]
    )
    assert found.params["w"].dtype == torch.bfloat16
    assert found.params["w"].tolist() == [2.0] * 9


def damaged(kind: str) -> Any:
    state: dict[Any, Any] = a_model(5)
    if kind == "shape":
        state["a.bias"] = state["a.bias"][:-1]
    elif kind == "dtype":
        state["a.bias"] = state["a.bias"].astype(np.float64)
    elif kind == "objects":
        state["a.bias"] = state["a.bias"].astype(object)
    elif kind == "text":
        state["a.bias"] = "rows"
    elif kind == "list":
        state["a.bias"] = state["a.bias"].tolist()
    elif kind == "extra":
        state["more"] = state["a.bias"]
    elif kind == "missing":
        del state["scalar"]
    elif kind == "number":
        state[3] = state.pop("scalar")
    elif kind == "sparse":
        state["a.bias"] = torch.zeros(3000).to_sparse()
    return [1.0, 2.0] if kind == "vector" else state


@pytest.mark.parametrize(
    "kind",
    ["shape", "dtype", "objects", "text", "list", "extra", "missing", "number", "sparse", "vector"],
)
def test_damaged_result_costs_its_own_row(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    honest = [result(f"s{seed}", a_model(seed)) for seed in range(1, 6)]
    wanted = aggregated(prepared("phocas:b=1"), honest)
    with caplog.at_level(logging.WARNING):
        found = aggregated(prepared("phocas:b=1"), [result("s0", damaged(kind)), *honest])
    assert flat(found.params).tobytes() == flat(wanted.params).tobytes()
    (said,) = logged(caplog, logging.WARNING)
    assert "s0 is left out: " in said


def test_client_that_sends_another_kind_than_most_is_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """FedAvg's own average adds what the first client calls a difference, or does not."""
    honest = [result(f"s{seed}", a_model(seed)) for seed in range(1, 6)]
    wanted = aggregated(prepared("phocas:b=1"), honest)
    other = result("s0", a_model(9), ParamsType.DIFF)
    with caplog.at_level(logging.WARNING):
        found = aggregated(prepared("phocas:b=1"), [other, *honest])
    assert found.params_type is ParamsType.FULL
    assert flat(found.params).tobytes() == flat(wanted.params).tobytes()
    assert "s0 is left out: it must send what most do, FULL" in logged(caplog, logging.WARNING)[0]


def test_nan_and_absurd_values_are_tolerated_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    results = [result(f"s{seed}", a_model(seed)) for seed in range(1, 8)]
    results[1].params["a.bias"] = np.full(3000, np.nan, np.float32)
    results[4].params["a.bias"] = np.full(3000, -1e38, np.float32)
    with caplog.at_level(logging.INFO):
        found = aggregated(prepared("phocas:b=2"), results)
    assert np.abs(flat(found.params)).max() < 10
    (line,) = [each for each in logged(caplog, logging.INFO) if "dropped" in each]
    assert "round 0: 7 of 7 results are usable; dropped by phocas:b=2 (29% by chance)" in line
    assert all(f"s{seed} " in line for seed in range(1, 8))
    (warned,) = logged(caplog, logging.WARNING)
    assert warned.endswith("far more values dropped than of others: s2, s5")


def lost(rule: str, **options: Any) -> FLModel:
    """Aggregate three results of which two have inf, by a rule that does not survive them."""
    results = [result(f"s{seed}", a_model(seed), metrics={"loss": 0.5}) for seed in range(1, 4)]
    for each in results[:2]:
        each.params["a.bias"] = np.full(3000, np.inf, np.float32)
    return aggregated(prepared(rule, **options), results)


@pytest.mark.parametrize("rule", ["phocas:b=1", "mean"])
def test_non_finite_aggregate_is_skipped(rule: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = lost(rule)
    assert found.params_type is ParamsType.FULL
    assert flat(found.params).tobytes() == flat(a_model()).tobytes()
    assert found.metrics == {"loss": 0.5}
    (said,) = [line for line in logged(caplog, logging.WARNING) if "not finite" in line]
    assert "skipped round 0: 3 of 3 results are usable: 3000 values of the aggregate" in said
    assert said.endswith("NaN or inf came from s1, s2")


def test_non_finite_aggregate_stops_the_job_or_is_applied_on_request() -> None:
    with pytest.raises(ValueError, match=r"round 0: .* NaN or inf came from s1, s2"):
        lost("mean", on_nonfinite="stop")
    assert np.isinf(lost("mean", on_nonfinite="apply").params["a.bias"]).all()


def test_too_few_results_are_skipped_or_stop_the_job(caplog: pytest.LogCaptureFixture) -> None:
    results = [result(f"s{seed}", a_model(seed)) for seed in range(1, 5)]
    with caplog.at_level(logging.WARNING):
        found = aggregated(prepared("phocas:b=2"), results)
    assert found.params_type is ParamsType.FULL
    assert flat(found.params).tobytes() == flat(a_model()).tobytes()
    assert "skipped round 0: 4 of 4 results are usable: Phocas needs 2b < m" in caplog.text
    with pytest.raises(ValueError, match="Phocas needs 2b < m: got b=2 with m=4 workers"):
        aggregated(prepared("phocas:b=2", on_too_few="stop"), results)
    assert aggregated(prepared("mean"), []).params_type is ParamsType.FULL


def test_claimed_steps_are_ignored_or_capped() -> None:
    steps = FLMetaKey.NUM_STEPS_CURRENT_ROUND
    models = [a_model(seed) for seed in range(1, 10)]
    results = [
        result(f"s{i}", model, meta={steps: 1e9 if i == 3 else 100})
        for i, model in enumerate(models)
    ]
    rows = np.stack([flat(model) for model in models])
    plain = aggregated(prepared("phocas:b=1"), results)
    assert flat(plain.params).tobytes() == phocas.Phocas(b=1)(rows).tobytes()
    capped = aggregated(prepared("phocas:b=1", max_share=0.2), results)
    wanted = phocas.Phocas(b=1)(rows, weights=[100.0] * 3 + [1e9] + [100.0] * 5, max_share=0.2)
    assert flat(capped.params).tobytes() == wanted.tobytes()
    for claim in (math.nan, -1, 0, None, "100"):
        results[3].meta[steps] = claim
        others = [each for i, each in enumerate(results) if i != 3]
        found = aggregated(prepared("phocas:b=1", max_share=0.2), results)
        without = aggregated(prepared("phocas:b=1", max_share=0.2), others)
        assert flat(found.params).tobytes() == flat(without.params).tobytes()


@pytest.mark.parametrize("kind", list(ParamsType))
def test_updates_are_normalized_by_the_steps_of_the_clients(kind: ParamsType) -> None:
    base, taken = {"w": np.ones(4, np.float32)}, [10, 30, 20, 40, 25]
    start = 1.0 if kind is ParamsType.FULL else 0.0
    results = [
        result(
            f"s{steps}",
            {"w": np.full(4, start + steps, np.float32)},
            kind,
            meta={FLMetaKey.NUM_STEPS_CURRENT_ROUND: steps},
        )
        for steps in taken
    ]
    found = aggregated(prepared("mean", base, normalize=True), results)
    np.testing.assert_allclose(found.params["w"], start + 25.0)


def test_metrics_are_medians_and_do_not_depend_on_the_order_of_arrival() -> None:
    results = [
        result(f"s{seed}", a_model(seed), metrics={"loss": np.float32(seed)}) for seed in range(5)
    ]
    results[4].metrics = {"loss": 1e30, "mine": 1.0, "all": [1, 2]}
    found = aggregated(prepared("nnm:b=1|phocas:b=1"), results)
    assert found.metrics == {"loss": 2.0}
    again = aggregated(prepared("nnm:b=1|phocas:b=1"), results[::-1])
    assert flat(found.params).tobytes() == flat(again.params).tobytes()


def test_excluded_client_is_not_aggregated_even_after_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    models = {f"s{seed}": a_model(seed) for seed in range(1, 8)}
    results = [result(name, model) for name, model in models.items()]
    results[1].params["a.bias"] = np.full(3000, np.nan, np.float32)
    without = aggregated(prepared("phocas:b=1"), [results[0], *results[2:]])
    options: Any = {"exclude": "evidence", "state": str(tmp_path / "state.npz")}
    aggregator = prepared("phocas:b=1", **options)
    with caplog.at_level(logging.INFO):
        for _ in range(20):
            found = aggregated(aggregator, results)
    assert flat(found.params).tobytes() == flat(without.params).tobytes()
    assert "excluded for good, false alarm probability 0.001: s2" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO):
        again = aggregated(prepared("phocas:b=1", **options), results)
    assert flat(again.params).tobytes() == flat(without.params).tobytes()
    assert "7 of 7 results are usable; excluded by evidence: s2" in caplog.text
    with pytest.raises(RuntimeError, match="belongs to another federation"):
        aggregated(prepared("phocas:b=1", seed=3, **options), results)


def test_client_with_two_results_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    results = [result(f"s{seed}", a_model(seed)) for seed in range(1, 8)]
    wanted = aggregated(prepared("phocas:b=1"), results[1:])
    found = aggregated(prepared("phocas:b=1"), [*results, results[0]])
    assert flat(found.params).tobytes() == flat(wanted.params).tobytes()
    assert "s1 is left out: it must reply once in a round: it replied 2 times" in caplog.text


def contribution(name: str, params: Any, begun: int, now: int) -> tuple[Any, FLContext]:
    """Return what ScatterAndGather hands on: a result, and a context with who sent it."""
    shareable = FLModelUtils.to_shareable(FLModel(params=params, meta={"client_name": "s1"}))
    shareable.add_cookie(AppConstants.CONTRIBUTION_ROUND, begun)
    context, peer = FLContext(), FLContext()
    peer.set_prop(ReservedKey.IDENTITY_NAME, name, private=False, sticky=False)
    context.set_peer_context(peer)
    context.set_prop(AppConstants.CURRENT_ROUND, now, private=True, sticky=False)
    return shareable, context


def test_scatter_and_gather_checks_sender_and_round(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A client that calls itself by another's name has its own row, and that is all it has."""
    aggregator = prepared("phocas:b=1")
    models = [a_model(seed) for seed in range(1, 6)]
    with caplog.at_level(logging.WARNING):
        for i, model in enumerate(models):
            assert aggregator.accept(*contribution(f"s{i}", model, 4, 4))
        assert not aggregator.accept(*contribution("s9", a_model(9), 3, 4))
        damaged, context = contribution("s8", a_model(8), 4, 4)
        damaged.set_cookie_jar("no jar")
        assert not aggregator.accept(damaged, context)
    assert "s9 is left out: it must answer round 4: it answers round 3" in caplog.text
    assert "s8 is left out: " in caplog.text
    found = FLModelUtils.from_shareable(aggregator.aggregate(FLContext()))
    rows = np.stack([flat(model) for model in models])
    assert flat(found.params).tobytes() == phocas.Phocas(b=1)(rows).tobytes()


def test_bad_options_are_rejected() -> None:
    with pytest.raises(ValueError, match="on_too_few must be one of skip, stop"):
        RobustAggregator("median", on_too_few="ignore")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_share must be more than 0"):
        RobustAggregator("median", max_share=0)
    with pytest.raises(ValueError, match="unknown on_nonfinite 'ignore'"):
        RobustAggregator("median", on_nonfinite="ignore")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"got b=2 with max_share=0\.25, .* is 0\.2499"):
        RobustAggregator("trimmed-mean:b=2", max_share=0.25)
    with pytest.raises(ValueError, match="the model must be sent to clients before"):
        RobustAggregator("median").aggregate_model()


def test_job_stores_the_rule_as_text(tmp_path: Path) -> None:
    job = FedJob("robust", min_clients=3)
    job.set_app_packages(["phocas"])
    rule = phocas.NNM(b=1) | phocas.Phocas(b=1)
    aggregator = RobustAggregator(rule, max_share=0.4, on_nonfinite="stop")
    job.to_server(FedAvg(num_clients=3, aggregator=aggregator))
    job.export_job(str(tmp_path))
    (config,) = tmp_path.rglob("config_fed_server.json")
    (workflow,) = json.loads(config.read_text())["workflows"]
    assert workflow["args"]["aggregator"] == {
        "path": "phocas.integrations.nvflare.RobustAggregator",
        "args": {"rule": "nnm:b=1|phocas:b=1", "max_share": 0.4, "on_nonfinite": "stop"},
    }
    assert not list(tmp_path.rglob("*.py"))


# -- with real processes ---------------------------------------------------------------------------


def run(words: list[str], folder: Path) -> str:
    """Run a job to its end, and return what it says."""
    with subprocess.Popen(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            log, _ = process.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            # The simulator is in a session of its own.
            for each in (*psutil.Process(process.pid).children(recursive=True), process):
                each.kill()
            log, _ = process.communicate()
            pytest.fail(f"the simulator did not end in 300 s: did it lose a client?\n{log}")
    return log


def test_example_of_the_documentation_runs_in_the_simulator(tmp_path: Path) -> None:
    """Without the line of the aggregator, that is: with it, the next test has every bad kind."""
    page = (ROOT / "docs/federated.md").read_text()
    for name, text in re.findall(
        r"^```python\n# (\w+\.py)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE
    ):
        (tmp_path / name).write_text(text)
    job = tmp_path / "job.py"
    (line,) = re.findall(r"^ *aggregator=RobustAggregator.*\n", job.read_text(), re.MULTILINE)
    job.write_text(job.read_text().replace(line, ""))
    log = run(["job.py"], tmp_path)
    saved = tmp_path / "workspace/server/simulate_job/models/server.npy"
    assert saved.exists(), log
    assert np.load(saved).mean() == pytest.approx(-26.32, abs=0.01)


def test_simulation_with_clients_of_every_bad_kind(tmp_path: Path) -> None:
    """Two rounds bring honest clients three quarters of the way.

    There are no more clients than needed: the simulator starts a process for each at once, gives it
    10 s to connect, and waits for ever for the result of a client that did not.
    """
    kinds = "site-1=greedy,site-3=keys,site-5=raises"
    words = ["-m", "tests.integrations.nvflare.job", str(tmp_path), "phocas:b=1", kinds, "5"]
    log = run(words, ROOT)
    report = tmp_path / "report.jsonl"
    assert report.exists(), log
    _, found = (json.loads(line) for line in report.read_text().splitlines())
    assert found["layer.weight"] == [pytest.approx(3 * 3 / 4, abs=0.02), "float32"]
    assert found["layer.bias"] == [pytest.approx(3 * 3 / 4, abs=0.02), "float32"]
    assert found["batches"] == [2, "int64"]
    assert "site-3 is left out: it must have the keys of the model: it lacks 'layer.bias'" in log
    for turn in range(2):
        assert f"round {turn}: 3 of 4 results are usable; dropped by phocas:b=1" in log
    assert log.count("far more values dropped than of others: site-1") == 2
