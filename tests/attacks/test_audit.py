"""The audit: verdicts over all rules, what is a promise, and the command line."""

from __future__ import annotations

import dataclasses
import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from phocas.attacks import ATTACKS, Constant, Gaussian, LabelFlip, Touched, parse_attack
from phocas.attacks.audit import LIMIT, Finding, audit, bound, honest_statistics, promise, suite
from phocas.cli import application
from phocas.rules import RULES, Krum, Mean, Median, Phocas, TrimmedMean, parse_rule

M, Q, D = 20, 6, 2000

# Whoever may send anything breaks the mean. The others hide inside the honest cloud, or send a row
# that an honest worker might have sent: they bias the mean by less than one honest spread a round.
UNBOUNDED = {
    "gaussian",
    "omniscient",
    "bit-flip",
    "gambler",
    "sign-flip 100",
    "inner-product 100",
    "a-little-is-enough tuned",
    "constant nan",
    "constant inf",
    "crash",
    "stuck",
    "random-cells",
    "worst-case distance",
    "worst-case descent",
}
HIDDEN = {
    "sign-flip",
    "inner-product",
    "a-little-is-enough",
    "mimic",
    "min-max",
    "min-sum",
    "constant 0",
    "straggler",
}


def label(finding: Finding) -> str:
    attack = parse_attack(finding.attack)
    for key, value in (("scale", 100.0), ("epsilon", 100.0)):
        if getattr(attack, key, None) == value:
            return f"{attack.name} 100"
    if getattr(attack, "against", None) is not None:
        return f"{attack.name} tuned"
    if isinstance(attack, Constant):
        return f"constant {attack.value:g}"
    if getattr(attack, "model", "rows") == "cells":
        return "worst-case cells"
    return f"{attack.name} {getattr(attack, 'objective', '')}".strip()


@cache
def findings(rule: str) -> dict[str, Finding]:
    return {label(finding): finding for finding in audit(parse_rule(rule), dimensions=D, rounds=2)}


def broken(rule: str) -> set[str]:
    return {name for name, finding in findings(rule).items() if not finding.holds}


def test_the_mean_breaks_under_all_who_may_send_anything() -> None:
    assert set(findings("mean")) == UNBOUNDED | HIDDEN
    assert broken("mean") == UNBOUNDED
    assert not any(finding.promised for finding in findings("mean").values())
    assert all(findings("mean")[name].distance < 1 for name in HIDDEN)


@pytest.mark.parametrize("rule", ["trimmedmean:b=6", "phocas:b=6", "trimmedmean:b=8", "phocas:b=8"])
def test_the_trimmed_mean_and_phocas_hold(rule: str) -> None:
    assert broken(rule) == set()
    assert all(finding.promised for finding in findings(rule).values())
    assert all(finding.bound is not None for finding in findings(rule).values())
    assert findings(rule)["bit-flip"].rows == M


@pytest.mark.parametrize("rule", ["median", "meamed:b=6"])
def test_the_other_column_rules_hold(rule: str) -> None:
    assert broken(rule) == set()


@pytest.mark.parametrize("rule", ["krum:b=6", "multikrum:b=6"])
def test_krum_breaks_where_every_row_is_hit_and_nowhere_else(rule: str) -> None:
    found = findings(rule)
    # Random bits are small numbers half of the time, and may leave one row fit to be chosen.
    assert broken(rule) - {"random-cells"} == {"bit-flip", "gambler", "worst-case cells"}
    assert not any(finding.broken_promise for finding in found.values())
    assert all(found[name].rows == M and not found[name].promised for name in broken(rule))


@pytest.mark.parametrize("rule", ["mean", "median", "trimmedmean:b=6", "phocas:b=6", "krum:b=6"])
def test_the_worst_case_is_the_worst_for_workers_who_own_their_rows(rule: str) -> None:
    found = findings(rule)
    for name, finding in found.items():
        if parse_attack(finding.attack).name in {"bit-flip", "gambler", "random-cells"}:
            continue
        if name != "worst-case cells":
            assert finding.distance <= found["worst-case distance"].distance * (1 + 1e-5)


def test_every_attack_on_a_matrix_is_in_the_suite() -> None:
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        attacks = suite(Krum(2), 10, 50, 2, dtype)
        assert {type(attack) for attack in attacks} == set(ATTACKS.values()) - {LabelFlip}
        for attack in attacks:
            attack.check(10, 50, dtype)


@pytest.mark.parametrize("name", RULES)
def test_every_rule_can_be_audited(name: str) -> None:
    parameters = {"b": "b=2", "radius": "radius=10", "rule": "rule=phocas:b=2"}
    required = [
        parameters[field.name]
        for field in dataclasses.fields(RULES[name])  # type: ignore[arg-type]  # all are dataclasses
        if field.default is dataclasses.MISSING
    ]
    rule = parse_rule(name + (":" + ",".join(required) if required else ""))
    few = [Gaussian(2), Constant(2, math.nan)]
    for finding in audit(rule, workers=12, byzantine=2, dimensions=60, attacks=few, rounds=2):
        assert finding.distance >= 0
        assert finding.verdict


def test_a_broken_promise_is_found() -> None:
    class Liar(Phocas):
        """A mean that says it is Phocas."""

        def __call__(self, rows: Any, *, rng: np.random.Generator | None = None) -> Any:
            return Mean()(rows, rng=rng)

    (finding,) = audit(Liar(6), dimensions=50, attacks=[Gaussian(6)])
    assert finding.broken_promise
    assert finding.verdict == "BROKEN PROMISE"
    (finding,) = audit(Liar(5), dimensions=50, attacks=[Gaussian(6)])
    assert not finding.broken_promise
    assert finding.verdict == "breaks"


def test_bounds_are_the_papers() -> None:
    rows = Touched((20, 5), whole_rows=np.arange(6))
    assert bound(TrimmedMean(8), 20, rows) == pytest.approx(math.sqrt(2 * 9 * 14 / 36))
    assert bound(Phocas(8), 20, rows) == pytest.approx(math.sqrt(4 + 12 * 9 * 14 / 36))
    krum = 6 * 20 - 6 * 6 + (4 * 6 * 12 + 4 * 36 * 13) / 6
    assert bound(Krum(6), 20, rows) == pytest.approx(math.sqrt(krum))
    assert bound(Median(), 20, rows) == bound(TrimmedMean(9), 20, rows)
    assert bound(Mean(), 20, rows) is None
    assert bound(TrimmedMean(5), 20, rows) is None
    assert bound(Krum(5), 20, rows) is None
    one = Touched((20, 5), whole_rows=np.arange(1))
    assert bound(Krum(6), 20, one) == bound(Krum(6), 20, rows)
    everywhere = Touched((20, 20), cell_rows=np.arange(20), cell_columns=np.arange(20))
    assert bound(Krum(6), 20, everywhere) is None
    assert bound(TrimmedMean(6), 20, everywhere) is not None


def test_promises() -> None:
    assert promise(Mean(), 20) == 0
    assert promise(Median(), 20) == 9
    assert promise(Phocas(6), 20) == 6
    assert promise(Krum(6), 20) == 6


def test_honest_statistics_are_those_of_the_untouched_cells() -> None:
    rows = np.random.default_rng(0).normal(size=(7, 4))
    touched = Touched(
        (7, 4),
        whole_rows=np.array([2]),
        cell_rows=np.array([0, 1, 3, 4, 5, 6, 0]),
        cell_columns=np.array([1, 1, 1, 1, 1, 1, 3]),
    )
    mean, variance = honest_statistics(rows, touched)
    keep = [0, 1, 3, 4, 5, 6]
    expected = [rows[keep, 0], rows[:, 1], rows[keep, 2], rows[keep[1:], 3]]
    np.testing.assert_allclose(mean, [column.mean() for column in expected])
    assert variance == pytest.approx(sum(column.var(ddof=1) for column in expected))


def test_identical_honest_rows_have_no_spread() -> None:
    rows = np.ones((9, 5), np.float32)
    holds, breaks = audit(
        Median(), rows, byzantine=4, attacks=[Constant(4, 50.0), Constant(4, math.nan)]
    )
    assert holds.distance == breaks.distance == 0
    (gone,) = audit(Mean(), rows, byzantine=4, attacks=[Constant(4, 50.0)])
    assert gone.distance == math.inf


def test_what_cannot_be_audited_is_refused() -> None:
    for rows, message in [
        (np.full((5, 3), np.nan), "all finite"),
        (np.zeros(5), "row i from worker i"),
    ]:
        with pytest.raises(ValueError, match=message):
            audit(Median(), rows, byzantine=1)
    with pytest.raises(
        ValueError, match=r"honest majority.*got byzantine=10 with 20.*largest is 9"
    ):
        audit(Median(), byzantine=10)
    with pytest.raises(TypeError, match="got list"):
        audit(Median(), [[1.0]], byzantine=0)
    with pytest.raises(ValueError, match="columns <= d"):
        audit(Median(), dimensions=9, attacks=[parse_attack("bit-flip")])


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(application(), [*arguments], catch_exceptions=False)
    return result.exit_code, result.output


def test_the_command_prints_a_table_and_says_nothing_was_broken() -> None:
    status, output = run(
        "audit",
        "--rule",
        "phocas:b=6",
        "--workers",
        "20",
        "--byzantine",
        "6",
        "--dimensions",
        "500",
    )
    assert status == 0
    lines = output.splitlines()
    assert lines[0] == "phocas:b=6 against 22 attacks: m = 20, q = 6, d = 500"
    heading = ["attack", "rows", "column", "distance", "<,>", "bound", "promised", "verdict"]
    assert lines[2].split() == heading
    assert any(line.startswith("gaussian:q=6 ") and line.endswith("holds") for line in lines)
    assert lines[-1] == "0 of 22 attacks break phocas:b=6; broken promises: 0"
    assert "\x1b" not in output


def test_json_for_machines_and_an_attack_beyond_the_promise() -> None:
    arguments = ["--rule", "mean", "--dimensions", "100", "--attack", "constant:q=6,value=nan"]
    status, output = run("audit", *arguments, "--json")
    report = json.loads(output)
    assert status == 0
    assert (report["rule"], report["workers"], report["broken_promises"]) == ("mean", 20, 0)
    (finding,) = report["findings"]
    assert finding["distance"] is None
    assert finding["holds"] is False
    assert finding["verdict"] == "breaks"


def test_status_1_for_a_broken_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    # A limit of nothing: the rule that has no bound in the paper cannot keep it.
    monkeypatch.setattr("phocas.attacks.audit.LIMIT", 0.0)
    status, output = run(
        "audit", "--rule", "meamed:b=6", "--dimensions", "50", "--attack", "gaussian:q=6"
    )
    assert LIMIT > 0
    assert status == 1
    assert "BROKEN PROMISE" in output
    assert output.endswith("1 of 1 attacks break meamed:b=6; broken promises: 1\n")


def test_saved_matrices(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).normal(size=(12, 300)).astype(np.float16)
    np.save(tmp_path / "g.npy", rows)
    save_file({"g": torch.tensor(rows)}, tmp_path / "one.safetensors")
    tensors = {"g": torch.tensor(rows).bfloat16(), "other": torch.zeros(3)}
    save_file(tensors, tmp_path / "two.safetensors")
    (tmp_path / "bad.safetensors").write_bytes(b"no such thing")
    common = ["audit", "--rule", "trimmedmean:b=4", "--byzantine", "4", "--rounds", "1", "--json"]
    reports = [
        json.loads(run(*common, "--matrix", str(tmp_path / name), *rest)[1])
        for name, rest in [
            ("g.npy", []),
            ("one.safetensors", []),
            ("two.safetensors", ["--tensor", "g"]),
        ]
    ]
    assert all((report["workers"], report["dimensions"]) == (12, 300) for report in reports)
    assert reports[0] == reports[1]
    assert all(finding["holds"] for report in reports for finding in report["findings"])
    for arguments, message in [
        (["--matrix", str(tmp_path / "two.safetensors")], "name one with --tensor"),
        (["--matrix", str(tmp_path / "two.safetensors"), "--tensor", "h"], "unknown tensor 'h'"),
        (["--matrix", str(tmp_path / "g.txt")], "must be a .npy or .safetensors"),
        (["--matrix", str(tmp_path / "bad.safetensors")], "is no safetensors file"),
        (["--matrix", str(tmp_path / "g.npy"), "--workers", "20"], "got 20 with 12 rows"),
    ]:
        with pytest.raises(ValueError, match=message):
            run(*common, *arguments)


def test_attacks_are_listed() -> None:
    status, output = run("attacks")
    assert status == 0
    for name, cls in ATTACKS.items():
        (line,) = [line for line in output.splitlines() if line.split()[0] == name]
        assert cls.summary() in line
        assert cls.parameters() in line
    listing = json.loads(run("attacks", "--json")[1])
    assert [entry["name"] for entry in listing] == list(ATTACKS)
