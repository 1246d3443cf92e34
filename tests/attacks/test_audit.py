"""The audit: verdicts on all rules, guarantees, and the command line."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.helpers import strongest
from typer.testing import CliRunner

from phocas.attacks import ATTACKS, ConstantRows, Gaussian, LabelFlip, Touched, parse_attack
from phocas.attacks.audit import LIMIT, Trial, audit, honest_statistics, suite, yardstick
from phocas.cli import application
from phocas.rules import (
    CGE,
    MDA,
    RULES,
    CenteredClipping,
    FunctionRule,
    Krum,
    MeaMed,
    Mean,
    Median,
    Phocas,
    Rule,
    TrimmedMean,
    parse_rule,
)
from phocas.rules.base import Randomness

M, Q, D = 20, 6, 2000

# Attacks with arbitrary values break the mean. The others stay within the honest distribution, or
# send a row that an honest worker might send: they bias the mean by less than one honest standard
# deviation per round.
UNBOUNDED = {
    "gaussian",
    "omniscient",
    "bit-flip",
    "gambler",
    "sign-flip 100",
    "inner-product 100",
    "a-little-is-enough tuned",
    "optimal-alie tuned",
    "optimal-ipm tuned",
    "constant nan",
    "constant inf",
    "crash",
    "stuck",
    "random-cells",
    "silent-corruption",
    "worst-case distance",
    "worst-case descent",
}
HIDDEN = {
    "sign-flip",
    "inner-product",
    "a-little-is-enough",
    "fang",
    "fang krum",
    "mimic",
    "min-max",
    "min-sum",
    "constant 0",
    "straggler",
}


def label(trial: Trial) -> str:
    attack = parse_attack(trial.attack)
    for key, value in (("scale", 100.0), ("epsilon", 100.0)):
        if getattr(attack, key, None) == value:
            return f"{attack.name} 100"
    if getattr(attack, "target", None) == "krum":
        return "fang krum"
    if getattr(attack, "against", None) is not None:
        return f"{attack.name} tuned"
    if isinstance(attack, ConstantRows):
        return f"constant {attack.value:g}"
    if getattr(attack, "model", "rows") == "cells":
        return "worst-case cells"
    return f"{attack.name} {getattr(attack, 'objective', '')}".strip()


@cache
def trials(rule: str) -> dict[str, Trial]:
    return {label(trial): trial for trial in audit(parse_rule(rule), dims=D, rounds=2)}


def broken(rule: str) -> set[str]:
    return {name for name, trial in trials(rule).items() if not trial.holds}


def test_mean_breaks_under_every_attack_with_arbitrary_values() -> None:
    assert set(trials("mean")) == UNBOUNDED | HIDDEN
    assert broken("mean") == UNBOUNDED
    assert not any(trial.promised for trial in trials("mean").values())
    assert all(trials("mean")[name].distance < 1 for name in HIDDEN)


@pytest.mark.parametrize("rule", ["trimmedmean:b=6", "phocas:b=6", "trimmedmean:b=8", "phocas:b=8"])
def test_trimmed_mean_and_phocas_hold_under_every_attack(rule: str) -> None:
    assert broken(rule) == set()
    assert all(trial.promised for trial in trials(rule).values())
    assert all(trial.source == "paper" for trial in trials(rule).values())
    assert trials(rule)["bit-flip"].rows == M


@pytest.mark.parametrize("rule", ["median", "meamed:b=6"])
def test_other_column_rules_hold_under_every_attack(rule: str) -> None:
    assert broken(rule) == set()


@pytest.mark.parametrize("rule", ["krum:b=6", "multikrum:b=6"])
def test_krum_breaks_only_if_every_row_is_hit(rule: str) -> None:
    found = trials(rule)
    # Random bits are small numbers half of the time, and may leave one row fit to be selected.
    assert broken(rule) - {"random-cells"} == {"bit-flip", "gambler", "worst-case cells"}
    assert not any(trial.broken_promise for trial in found.values())
    assert all(found[name].rows == M and not found[name].promised for name in broken(rule))


@pytest.mark.parametrize("rule", ["mean", "median", "trimmedmean:b=6", "phocas:b=6", "krum:b=6"])
def test_worst_case_is_the_worst_of_all_row_attacks(rule: str) -> None:
    found = trials(rule)
    for name, trial in found.items():
        if parse_attack(trial.attack).name in {"bit-flip", "gambler", "random-cells"}:
            continue
        if name != "worst-case cells":
            assert trial.distance <= found["worst-case distance"].distance * (1 + 1e-5)


def test_suite_contains_every_attack_on_a_matrix() -> None:
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        attacks = suite(Krum(2), 10, 50, 2, dtype)
        assert {type(attack) for attack in attacks} == set(ATTACKS.values()) - {LabelFlip}
        for attack in attacks:
            attack.check(10, 50, dtype)


def test_rule_that_needs_trusted_samples_is_not_audited() -> None:
    with pytest.raises(ValueError, match="fl-trust needs trusted samples, which an audit has not"):
        audit("fl-trust")


@pytest.mark.parametrize("name", sorted(set(RULES) - {"fl-trust"}))
def test_every_rule_can_be_audited(name: str) -> None:
    parameters = {"b": "b=2", "radius": "radius=10", "rule": "rule=phocas:b=2"}
    required = [
        parameters[field.name]
        for field in dataclasses.fields(RULES[name])  # type: ignore[arg-type]  # all are dataclasses
        if field.default is dataclasses.MISSING
    ]
    rule = parse_rule(name + (":" + ",".join(required) if required else ""))
    few = [Gaussian(2), ConstantRows(2, math.nan)]
    for trial in audit(rule, num_workers=12, byzantine=2, dims=60, attacks=few, rounds=2):
        assert trial.distance >= 0
        assert trial.verdict


def test_broken_guarantee_is_found() -> None:
    class Liar(Phocas):
        """A mean that claims the guarantee of Phocas."""

        def __call__(self, rows: Any, *, rng: Randomness = None, **_: Any) -> Any:
            return Mean()(rows, rng=rng)

    (trial,) = audit(Liar(6), dims=50, attacks=[Gaussian(6)])
    assert trial.broken_promise
    assert trial.verdict == "GUARANTEE BROKEN"
    (trial,) = audit(Liar(5), dims=50, attacks=[Gaussian(6)])
    assert not trial.broken_promise
    assert trial.verdict == "breaks"


def test_limit_is_the_papers_bound_or_the_rules_own() -> None:
    rows = Touched((20, 5), whole_rows=np.arange(6))
    one = Touched((20, 5), whole_rows=np.arange(1))
    everywhere = Touched((20, 20), cell_rows=np.arange(20), cell_columns=np.arange(20))
    krum = 6 * 20 - 6 * 6 + (4 * 6 * 12 + 4 * 36 * 13) / 6
    known: list[tuple[Rule, Touched, float]] = [
        (TrimmedMean(8), rows, 2 * 9 * 14 / 36),
        (Phocas(8), rows, 4 + 12 * 9 * 14 / 36),
        (Krum(6), rows, krum),
        (Krum(6), one, krum),
        (Median(), rows, 2 * 10 * 14 / 25),
        (MeaMed(9), rows, 4 + 6 * 2 * 10 * 14 / 25),
        (TrimmedMean(6), everywhere, 2 * 7 * 19 / 13**2),
    ]
    for rule, touched, delta in known:
        found = yardstick(rule, 20, touched)
        assert found is not None
        assert found[0] == pytest.approx(math.sqrt(delta))
        assert found[1] == "paper"
    beyond: list[tuple[Rule, Touched]] = [
        (Mean(), rows),
        (TrimmedMean(5), rows),
        (Krum(5), rows),
        (Krum(6), everywhere),
        (CGE(6), one),
        (CenteredClipping(1.0), one),
    ]
    for rule, touched in beyond:
        assert yardstick(rule, 20, touched) is None
    assert yardstick(MDA(6), 20, rows) == (MDA(6).error_bound(20, 6), "rule")


def test_attacks_on_data_are_rejected() -> None:
    with pytest.raises(ValueError, match="label-flip:q=3 acts on data, not on rows"):
        audit("median", attacks=["label-flip:q=3"], dims=9)


# Every registered rule with its largest b, and cases in which the audit once blamed a rule beyond
# its guarantee.
AUDITED = [
    *(str(rule) for rule in strongest(M)),
    *("heraclius:b=6", "heraclius:b=8,cutoff=16", "centered-clipping:radius=1000"),
    *("bucketing:size=2|median", "bucketing:size=4|median", "clipping:radius=9|median"),
    *("nnm:b=6|phocas:b=6", "adaptive-clipping:b=6|median"),
]


@pytest.mark.slow
@pytest.mark.parametrize("q", [1, 3, 6])
@pytest.mark.parametrize("rule", AUDITED)
def test_no_rule_breaks_its_guarantee(rule: str, q: int) -> None:
    found = audit(rule, byzantine=q, dims=D, rounds=2)
    assert [trial for trial in found if trial.broken_promise] == []


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


def test_identical_honest_rows_have_zero_standard_deviation() -> None:
    rows = np.ones((9, 5), np.float32)
    holds, breaks = audit(
        Median(), rows, byzantine=4, attacks=[ConstantRows(4, 50.0), ConstantRows(4, math.nan)]
    )
    assert holds.distance == breaks.distance == 0
    (gone,) = audit(Mean(), rows, byzantine=4, attacks=[ConstantRows(4, 50.0)])
    assert gone.distance == math.inf


def test_invalid_audits_are_rejected() -> None:
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
        audit(Median(), dims=9, attacks=[parse_attack("bit-flip")])


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(application(), [*arguments], catch_exceptions=False)
    return result.exit_code, result.output


def test_command_prints_a_table_and_no_broken_guarantee() -> None:
    status, output = run(
        "audit",
        "--rule",
        "phocas:b=6",
        "--num-workers",
        "20",
        "--byzantine",
        "6",
        "--dims",
        "500",
    )
    assert status == 0
    lines = output.splitlines()
    assert lines[0] == "phocas:b=6 against 27 attacks: m = 20, q = 6, d = 500"
    heading = ["attack", "rows", "column", "distance", "<,>", "limit", "covered", "s", "MB"]
    assert lines[2].split() == [*heading, "verdict"]
    assert any(line.startswith("gaussian:q=6 ") and line.endswith("holds") for line in lines)
    assert lines[-1] == "0 of 27 attacks break phocas:b=6; broken guarantees: 0"
    assert "\x1b" not in output


@pytest.mark.parametrize(
    ("rule", "m", "q"),
    [("trimmed-mean:b=2", 11, 2), ("phocas:b=8", 20, 8), ("mean", 20, 6), ("mean", 7, 3)],
)
def test_audit_tries_as_many_byzantine_rows_as_the_rule_tolerates(
    rule: str, m: int, q: int
) -> None:
    words = ("audit", "--rule", rule, "--num-workers", str(m), "--dims", "50", "--rounds", "1")
    _, output = run(*words)
    assert output.splitlines()[0].endswith(f" attacks: m = {m}, q = {q}, d = 50")
    trials = audit(rule, num_workers=m, dims=50, rounds=1)
    assert str(Gaussian(q)) in {trial.attack for trial in trials}


def test_json_output_of_an_attack_beyond_the_guarantee() -> None:
    arguments = ["--rule", "mean", "--dims", "100", "--attack", "constant:q=6,value=nan"]
    status, output = run("audit", *arguments, "--json")
    report = json.loads(output)
    assert status == 0
    assert (report["rule"], report["workers"], report["broken_promises"]) == ("mean", 20, 0)
    (trial,) = report["trials"]
    assert trial["distance"] is None
    assert trial["holds"] is False
    assert trial["verdict"] == "breaks"


def test_broken_claim_exits_with_status_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "boastful.py").write_text(
        "import numpy as np\n\ndef mean(rows):\n    return rows.mean(axis=0)\n"
    )
    monkeypatch.chdir(tmp_path)
    rule = "boastful:mean:b=6,columnwise=True"
    status, output = run("audit", "--rule", rule, "--dims", "50", "--attack", "gaussian:q=6")
    assert LIMIT > 0
    assert status == 1
    assert "CLAIM BROKEN" in output
    assert "claims, without a proof, to tolerate 6 Byzantine rows" in output
    assert output.endswith(f"1 of 1 attacks break {rule}; broken claims: 1\n")


def test_saved_matrices_are_audited(tmp_path: Path) -> None:
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
    for report in reports:
        assert (report["workers"], report["dims"]) == (12, 300)
        for trial in report["trials"]:
            del trial["seconds"], trial["megabytes"]
    assert reports[0] == reports[1]
    assert all(trial["holds"] for report in reports for trial in report["trials"])
    for arguments, message in [
        (["--matrix", str(tmp_path / "two.safetensors")], "name one with --tensor"),
        (["--matrix", str(tmp_path / "two.safetensors"), "--tensor", "h"], "unknown tensor 'h'"),
        (["--matrix", str(tmp_path / "g.txt")], "must be a .npy or .safetensors"),
        (["--matrix", str(tmp_path / "bad.safetensors")], "is no safetensors file"),
        (["--matrix", str(tmp_path / "g.npy"), "--num-workers", "20"], "got 20 with 12 rows"),
    ]:
        with pytest.raises(ValueError, match=message):
            run(*common, *arguments)


def test_attacks_are_listed() -> None:
    status, output = run("attacks")
    assert status == 0
    for name, cls in ATTACKS.items():
        assert f"\n{name} " in output
        assert cls.summary() in " ".join(output.split())
        assert cls.parameters() in " ".join(output.split())
    assert max(map(len, output.splitlines())) <= 80
    listing = json.loads(run("attacks", "--json")[1])
    assert [entry["name"] for entry in listing] == list(ATTACKS)


def test_a_rule_that_raises_or_hangs_costs_its_own_trials() -> None:
    def touchy(rows: np.ndarray) -> np.ndarray:
        if np.isnan(rows).any():
            raise RuntimeError("no NaN")
        while np.isinf(rows).any():
            with contextlib.suppress(TimeoutError):
                while True:
                    pass
            raise ValueError("stopped at last")
        return np.asarray(np.median(rows, axis=0))

    seen: list[int] = []
    trials = audit(
        FunctionRule(touchy, b=2),
        num_workers=7,
        byzantine=2,
        dims=40,
        rounds=1,
        attacks=[f"constant:q=2,value={value}" for value in ("nan", "inf", "0")],
        timeout=2.0,
        watch=lambda index, attacks: seen.append(index - len(attacks)),
    )
    assert [trial.verdict for trial in trials] == ["fails", "fails", "holds"]
    assert re.search(r"test_audit\.py:\d+: RuntimeError: no NaN", trials[0].error or "")
    assert "stopped at last" in (trials[1].error or "")
    assert [trial.source for trial in trials] == ["claim"] * 3
    assert [trial.broken_promise for trial in trials] == [True, True, False]
    assert trials[2].error is None
    assert seen == [-3, -2, -1]
    assert all(trial.seconds >= 0 for trial in trials)


def test_memory_of_a_trial_is_what_rule_and_attack_allocate() -> None:
    def hungry(rows: np.ndarray) -> np.ndarray:
        return np.asarray(rows[0] + np.ones(2_000_000)[0])

    def modest(rows: np.ndarray) -> np.ndarray:
        return np.array(rows[0])

    used = []
    for function in (hungry, modest):
        (trial,) = audit(FunctionRule(function), byzantine=1, dims=9, attacks=["constant:q=1"])
        used.append(trial.megabytes)
    assert 16 < used[0] < 18
    assert used[1] < 1


def test_an_unproven_tolerance_is_a_claim() -> None:
    first = FunctionRule(lambda rows: rows[0], b=1)
    (trial,) = audit(first, num_workers=5, byzantine=1, dims=9, attacks=["constant:q=1,value=1e9"])
    assert (trial.verdict, trial.source, trial.limit) == ("CLAIM BROKEN", "claim", LIMIT)
