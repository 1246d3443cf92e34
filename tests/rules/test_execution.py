"""The driver of rules: how filter, weights, base and monitoring combine."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import phocas
from phocas import CellFilter, Monitor, Phocas, Relative, Weighted
from phocas.rules import execution
from phocas.rules.accelerator import DeviceMatrix
from phocas.rules.base import plan_of


def test_monitor_counts_what_a_weighted_rule_drops() -> None:
    rows = np.random.default_rng(1).normal(size=(5, 300)).astype(np.float32)
    rule = Weighted(Phocas(b=1), (3, 1, 1, 1, 2))
    found = Monitor(rule).explain(rows)
    np.testing.assert_array_equal(found.dropped, rule.explain(rows).dropped)
    np.testing.assert_array_equal(found.value, phocas.Mean()(rows))


def test_base_is_not_filtered_by_torch_operations() -> None:
    rows = np.random.default_rng(2).normal(size=(10, 1500))
    rows[3, 7], rows[9] = 1e9, 50.0
    rule = Relative(CellFilter(2) | phocas.TrimmedMean(2))
    there = DeviceMatrix([torch.from_numpy(rows)], lambda answers: answers[0].numpy())
    value, dropped = execution.explain(plan_of(rule, 10), there)
    wanted = rule.explain(rows)
    np.testing.assert_allclose(value, wanted.value, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(dropped, wanted.dropped, atol=1e-9)
    assert dropped[9] == wanted.dropped[9]


def test_monitored_mean_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.random.default_rng(3).normal(size=(9, 40))
    monkeypatch.setattr("phocas.rules.measures.partial", None)
    np.testing.assert_array_equal(Monitor(phocas.Krum(2))(rows), phocas.Mean()(rows))
