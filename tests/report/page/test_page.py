"""The HTML report as a file: its data, its security policy, and the rejection of bad input."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shlex
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.report.page.scenes import (
    HOSTILE,
    SMALL,
    SUSPECT,
    a_round,
    embedded_data,
    guard_report,
    real_runs,
)

from phocas.cli import main
from phocas.experiments.config import make_config
from phocas.experiments.results import SCHEMA_VERSION, Results
from phocas.experiments.runner import execute
from phocas.report.page import MODULES, embedded, policy, render, script, style
from phocas.report.page.contents import MOST_BINS, MOST_POINTS, Contents
from phocas.report.page.writing import open_contents, write_report
from phocas.training.evaluation import Metrics

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "results.sqlite"
    real_runs(path)
    return path


@pytest.fixture
def phocas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["phocas", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        output, errors = capsys.readouterr()
        return int(ended.value.code or 0), output, errors

    return run


def decoded(text: str, kind: Any) -> Any:
    return np.frombuffer(base64.b64decode(text), kind)


def test_the_report_has_the_data_of_the_file(
    results: Path, tmp_path: Path, phocas: Command
) -> None:
    output = tmp_path / "deep" / "r.html"
    status, said, _ = phocas("results", "report", str(results), "-o", str(output))
    assert status == 0
    assert "10 runs" in said
    page = (tmp_path / "deep" / "r.html").read_text("utf-8")
    data = embedded_data(page)
    with Results(results, read=True) as file:
        records = {record.id: record for record in file.runs()}
        evaluations = {number: file.table("evaluations", number) for number in records}
    assert [run["id"] for run in data["runs"]] == list(records)
    for run in data["runs"]:
        record = records[run["id"]]
        assert run["curve"]["round"] == [row["round"] for row in evaluations[record.id]]
        for mine, row in zip(run["curve"]["top1"], evaluations[record.id], strict=True):
            assert mine == pytest.approx(row["top1"], rel=1e-4)
        assert run["curve"]["seconds"] == sorted(run["curve"]["seconds"])
        assert run["suspects"] == list(record.suspects)
        assert run["cost"]["gradients"] > 0
        shares = decoded(run["blame"]["workers"], "<u2").reshape(-1, 10) / 65535
        assert shares.shape == (30, 10)
        assert len(run["pictures"]["shown"]) == 3
    struck = [run for run in data["runs"] if run["rule"] == "phocas:b=3" and run["suspects"]]
    assert len(struck) == 2
    for run in struck:
        shares = decoded(run["blame"]["workers"], "<u2").reshape(-1, 10) / 65535
        assert shares.mean(axis=0).argmax() == SUSPECT
        assert [each[0] for each in run["evidence"] if each[2] is not None] == [SUSPECT]
        assert run["bounds"][-1][1] == sum(size for _, size in run["layers"]) == 650
    gambled = next(run for run in data["runs"] if (run["attack"] or "").startswith("gambler"))
    absurd = decoded(gambled["absurd"], np.bool_).reshape(4, 10)
    assert absurd[2].sum() > 3
    assert not absurd[[0, 1, 3]].any()


def test_decoded_matrix_values_are_close_to_the_recorded_ones(results: Path) -> None:
    with Results(results, read=True) as file:
        expected = next(iter(file.pictures(2)))
    contents = Contents(results)
    contents.read()
    shown = contents.whole()["runs"][1]["pictures"]["shown"][0]
    codes = decoded(shown["values"], "<i2").astype(np.float64).reshape(expected.values.shape)
    values = np.sign(codes) * 2.0 ** (np.abs(codes) / 100 - 160) * (codes != 0)
    assert np.isnan(expected.values[SUSPECT]).all()
    values[codes == -32768] = np.nan
    np.testing.assert_allclose(values, expected.values, rtol=0.004)
    np.testing.assert_array_equal(decoded(shown["lost"], np.uint8), expected.lost.ravel())


def test_nan_and_infinite_matrix_values_are_encoded() -> None:
    from phocas.report.page.contents import _logarithms

    values = np.array([np.nan, np.inf, -np.inf, 0, -0.0, 1, -1, 1e-45, 3e38, 1e-30], np.float32)
    codes = _logarithms(values)
    assert codes[:5].tolist() == [-32768, 32767, -32767, 0, 0]
    assert codes[5] == 16000 == -codes[6]
    assert 0 < codes[7] < codes[9] < codes[5] < codes[8] < 32767


def test_names_cannot_inject_html(tmp_path: Path) -> None:
    path = tmp_path / "results<b>.sqlite"
    execute(make_config({**SMALL, "rounds": 2, "name": HOSTILE, "results": str(path)}))
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE runs SET rule = ?, message = ?", (HOSTILE, HOSTILE))
    connection.close()
    write_report(path, tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text("utf-8")
    assert page.count("<script") == page.count("</script>") == 2
    assert "<img" not in page
    assert "<title>results&lt;b&gt;.sqlite" in page
    run = embedded_data(page)["runs"][0]
    assert run["name"] == run["rule"] == run["message"] == HOSTILE


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    path = tmp_path / "r.sqlite"
    with Results(path) as file:
        run = file.begin(make_config({"results": str(path)}), {}, {})
        rounds = [a_round(number, 20, np.random.default_rng(0)) for number in (1, 2)]
        nan = float("nan")
        file.record(
            run, rounds, [(1, Metrics(nan, 0.5, 0.6, 0)), (2, Metrics(float("inf"), 1, 1, 0))]
        )
    contents = open_contents(path)
    found = contents.whole()["runs"][0]
    assert found["curve"]["loss"] == [None, None]
    json.loads(embedded(contents.whole()))


def test_long_runs_are_thinned(tmp_path: Path) -> None:
    path = tmp_path / "r.sqlite"
    rng = np.random.default_rng(0)
    with Results(path) as file:
        config = make_config({"rounds": 1500, "evaluate_every": 1, "results": str(path)})
        run = file.begin(config, {}, {})
        metrics = [(at, Metrics(1.0, at / 1500, 1.0, 0.001)) for at in range(1501)]
        file.record(run, [a_round(at, 20, rng) for at in range(1, 1501)], metrics)
    contents = Contents(path)
    contents.read()
    found = contents.whole()["runs"][0]
    assert found["curve"]["points"] == 1501
    assert len(found["curve"]["round"]) == MOST_POINTS
    assert (found["curve"]["round"][0], found["curve"]["round"][-1]) == (0, 1500)
    blame = found["blame"]
    assert (blame["kept"], len(blame["from"])) == (1500, MOST_BINS)
    assert (blame["from"][0], blame["to"][-1]) == (1, 1500)
    assert all(end + 1 == start for end, start in zip(blame["to"], blame["from"][1:], strict=False))
    means = decoded(blame["workers"], "<u2").reshape(MOST_BINS, 20).mean(axis=0) / 65535
    assert means[0] == pytest.approx(0.98, abs=1e-3)
    assert means[1:] == pytest.approx(0.3, abs=0.01)


def test_only_changed_runs_are_read_again(results: Path, tmp_path: Path) -> None:
    path = tmp_path / "r.sqlite"
    path.write_bytes(results.read_bytes())
    contents = Contents(path)
    assert len(contents.read()["runs"]) == 10
    assert contents.read() == {}
    execute(make_config({**SMALL, "rounds": 3, "seed": 9, "results": str(path)}))
    assert [run["seed"] for run in contents.read()["runs"]] == [9]


def test_the_command_of_a_run_repeats_it(tmp_path: Path, phocas: Command) -> None:
    settings: dict[str, Any] = {
        **SMALL,
        "rounds": 2,
        "name": 'it\'s "one" $run',
        "optimizer": "sgd",
        "optimizer_options": {"momentum": 0.5, "nesterov": True},
        "standardise": True,
        "lr": 0.01,
        "attack": "gambler:server=1,probability=0.1",
        "results": str(tmp_path / "r.sqlite"),
    }
    first = execute(make_config(settings))
    contents = open_contents(tmp_path / "r.sqlite")
    (run,) = contents.whole()["runs"]
    words = shlex.split(run["command"])
    assert words[0] == "phocas"
    status, _, errors = phocas(*words[1:], "--quiet")
    assert status == 0, errors
    with Results(tmp_path / "r.sqlite", read=True) as file:
        again = file.runs()[-1]
    assert again.id == 2
    assert again.identity == first.identity
    assert again.config == first.config
    assert again.final_accuracy == first.final_accuracy


def test_the_security_policy_allows_only_this_script() -> None:
    page = render({"source": {"name": "x"}, "runs": [], "guards": []})
    inline = re.search(r'<script type="module">(.*?)</script>', page, re.DOTALL)
    assert inline is not None
    digest = base64.b64encode(hashlib.sha256(inline[1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy(live=False)
    assert "connect-src 'none'" in policy(live=False)
    assert "unsafe" not in policy(live=True)
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", script() + style())
    assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|\beval\(", script())


def test_every_module_is_included_after_those_that_it_imports() -> None:
    folder = resources.files("phocas.report.page") / "script"
    texts = {each.name: each.read_text("utf-8") for each in folder.iterdir()}
    assert sorted(texts) == sorted(f"{name}.js" for name in MODULES)
    for place, name in enumerate(MODULES):
        text = texts[f"{name}.js"]
        lines = re.findall(r"^import .*$", text, re.MULTILINE)
        for line in lines:
            found = re.fullmatch(r'import \{([^}]*)\} from "\./(\w+)\.js";', line)
            assert found is not None, line
            assert found[2] in MODULES[:place]
            for each in found[1].split(","):
                exported = rf"^export .*\b{each.strip()}\b"
                assert re.search(exported, texts[f"{found[2]}.js"], re.MULTILINE), each


def test_a_guards_report_is_shown(tmp_path: Path, phocas: Command) -> None:
    path = tmp_path / "guard.json"
    path.write_text(json.dumps({**guard_report(), "dropped": [float("nan")] * 8}))
    status, said, _ = phocas("results", "report", str(path))
    assert (status, said) == (
        0,
        f"a guard's report in report.html, {size(tmp_path)}: open it in a browser\n",
    )
    (guard,) = embedded_data((tmp_path / "report.html").read_text("utf-8"))["guards"]
    assert guard["dropped"] == [None] * 8
    assert guard["suspects"][0]["host"] == f"node7{HOSTILE}"


def test_a_guards_log_is_shown_with_a_report_for_each_job(tmp_path: Path, phocas: Command) -> None:
    report = guard_report()
    (suspect,) = report.pop("suspects")
    jobs = [(120, 5), (130, 1), (40, 5), (44, 5)]
    lines = [
        {"event": "suspect", "time": 1e9, "told_by": 0, **suspect, "rank": rank}
        | {"job": {**report, "steps": steps}}
        for steps, rank in jobs
    ]
    path = tmp_path / "suspects.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert phocas("results", "report", str(path))[0] == 0
    shown = embedded_data((tmp_path / "report.html").read_text("utf-8"))["guards"]
    found = [(each["steps"], [one["rank"] for one in each["suspects"]]) for each in shown]
    assert found == [(130, [5, 1]), (40, [5]), (44, [5])]
    path.write_text(json.dumps(lines[0]) + "\n" + json.dumps(lines[1])[:99])
    status, _, said = phocas("results", "report", str(path))
    assert status == 2
    assert "is no report of a guard" in said


def size(folder: Path) -> str:
    return f"{(folder / 'report.html').stat().st_size / 1e6:.1f} MB"


def _bad(folder: Path) -> dict[str, str]:
    """Write a file of each kind that is rejected, and return the expected messages."""
    (folder / "text.sqlite").write_text("this is no database" * 99)
    (folder / "empty.sqlite").write_bytes(b"")
    (folder / "folder").mkdir()
    Results(folder / "newer.sqlite").close()
    for name, statement in (
        ("newer.sqlite", f"PRAGMA user_version = {SCHEMA_VERSION + 1}"),
        ("foreign.sqlite", "CREATE TABLE mine (x)"),
    ):
        with sqlite3.connect(folder / name) as connection:
            connection.execute(statement)
        connection.close()
    whole = guard_report()
    del whole["steps"]
    for name, text in {
        "broken.json": '{"schema": 2,',
        "other.json": '{"a": 1}',
        "list.json": "[1]",
        "later.json": '{"schema": 99}',
        "partial.json": json.dumps(whole),
        "odd.json": json.dumps({**guard_report(), "suspects": [3]}),
    }.items():
        (folder / name).write_text(text)
    return {
        "none.sqlite": "there is no results file none.sqlite",
        "text.sqlite": "cannot be used as a results file",
        "empty.sqlite": "schema version 0",
        "folder": "must be a file",
        "newer.sqlite": f"schema version {SCHEMA_VERSION + 1}",
        "foreign.sqlite": "schema version 0",
        "broken.json": "is no report of a guard",
        "other.json": "guard.report() as JSON, or the file",
        "list.json": "guard.report() as JSON, or the file",
        "later.json": "schema 99, this phocas reads 2",
        "partial.json": "lacks steps",
        "odd.json": "is no whole report",
    }


@pytest.mark.parametrize("options", [(), ("--serve",)])
def test_bad_input_is_one_line_and_status_2(
    tmp_path: Path, phocas: Command, options: tuple[str, ...]
) -> None:
    for name, words in _bad(tmp_path).items():
        before = {path.name for path in tmp_path.iterdir()}
        status, output, errors = phocas("results", "report", name, *options)
        assert (status, output) == (2, ""), name
        assert words in errors
        assert len(errors.splitlines()) == 1, errors
        assert {path.name for path in tmp_path.iterdir()} == before


def test_a_report_that_cannot_be_written_is_rejected(
    results: Path, tmp_path: Path, phocas: Command
) -> None:
    (tmp_path / "taken").mkdir()
    status, _, errors = phocas("results", "report", str(results), "-o", str(tmp_path / "taken"))
    assert status == 2
    assert len(errors.splitlines()) == 1
    status, _, errors = phocas("results", "report", str(results), "--serve", "--port", "70000")
    assert (status, errors) == (2, "phocas: a port is 0 to 65535: got 70000\n")
    status, _, errors = phocas(
        "results", "report", str(results), "--serve", "--host", "192.0.2.1", "--port", "0"
    )
    assert status == 2
    assert "cannot listen on 192.0.2.1" in errors


def test_a_file_without_runs_and_older_ones_are_shown(results: Path, tmp_path: Path) -> None:
    Results(tmp_path / "none.sqlite").close()
    assert open_contents(tmp_path / "none.sqlite").whole()["runs"] == []
    older = tmp_path / "older.sqlite"
    older.write_bytes(results.read_bytes())
    with sqlite3.connect(older) as connection:
        for table in ("shares", "pictures", "evidence", "absurd", "layers"):
            connection.execute(f"DROP TABLE {table}")
    connection.close()
    runs = open_contents(older).whole()["runs"]
    assert len(runs) == 10
    assert all(run["blame"] is None and run["evidence"] == [] for run in runs)
    assert all(run["curve"]["round"] for run in runs)


def test_a_killed_run_is_shown_up_to_its_last_round(tmp_path: Path) -> None:
    settings = {**SMALL, "rounds": 100000, "results": str(tmp_path / "r.sqlite")}
    text = f"""
from phocas.experiments.config import make_config
from phocas.experiments.runner import execute
execute(make_config({settings!r}), watch=lambda c, done, e: done.number % 50 or print(flush=True))
"""
    with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        contents = None
        while contents is None or contents.whole()["runs"][0]["done"] < 50:
            process.stdout.readline()
            contents = open_contents(tmp_path / "r.sqlite")
        assert contents.whole()["runs"][0]["status"] == "running"
        process.send_signal(signal.SIGKILL)
    (run,) = open_contents(tmp_path / "r.sqlite").whole()["runs"]
    assert run["status"] == "killed"
    assert run["done"] >= 50
    assert run["blame"]["kept"] == run["done"] // 50
