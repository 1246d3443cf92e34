"""Selection of the contract's tests for the interpreter, which takes 0.1 s per call."""

from __future__ import annotations

import pytest
from tests.helpers import pipelines, strongest
from tests.rules.test_contract import M

from phocas import Pipeline


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep one rule of every class, and one with every pre-aggregator.

    The CPU's contract covers the others. Bits are compared with the CPU's anyway.
    """
    behind = {rule.stages: rule for rule in pipelines(M) if isinstance(rule, Pipeline)}
    chosen = {*map(str, strongest(M)), *map(str, behind.values())}
    here = [item for item in items if "triton/test_contract.py" in item.nodeid]
    dropped = [
        item
        for item in here
        if "same_input" in item.name
        or (isinstance(item, pytest.Function) and str(_rule(item)) not in chosen)
    ]
    items[:] = [item for item in items if item not in dropped]
    config.hook.pytest_deselected(items=dropped)


def _rule(item: pytest.Function) -> object:
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return parameters.get("rule", next(iter(strongest(M))))
