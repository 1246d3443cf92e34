"""The HTML report in a real browser: its figures, its texts, and that it sends no request."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.browser import browser_installed, launched
from tests.report.page.scenes import (
    HOSTILE,
    SMALL,
    SUSPECT,
    a_round,
    guard_report,
    many_runs,
    real_runs,
)

import phocas
from phocas.detection import Evidence
from phocas.experiments.config import make_config
from phocas.experiments.results import Results
from phocas.experiments.runner import execute
from phocas.report.page.server import PageServer
from phocas.report.page.writing import write_report
from phocas.training.evaluation import Metrics

if not browser_installed():
    pytest.skip(
        "THE HTML REPORT IS NOT TRIED IN A BROWSER: there is no playwright or no chromium here;"
        " make test-page installs them where it can",
        allow_module_level=True,
    )

from playwright.sync_api import Browser, Page

PHONE = {"width": 360, "height": 740}
ORANGE = np.array([213, 94, 0])
Open = Callable[..., Page]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with launched() as browser:
        yield browser


@pytest.fixture
def visit(browser: Browser) -> Iterator[Open]:
    """Open a report; at the end, check that it logged no error and sent no request."""
    problems: list[str] = []
    contexts = []

    def go(url: str, **options: Any) -> Page:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        contexts.append(context)
        asked: list[str] = []
        page = context.new_page()
        page.set_default_timeout(120_000)
        page.on("console", lambda said: problems.append(f"{said.type}: {said.text}"))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("dialog", lambda dialog: problems.append(f"dialog: {dialog.message}"))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(url)
        page.wait_for_selector("html[data-ready]")
        own = url.rstrip("/")
        assert all(each.startswith((own, "data:")) for each in asked), asked
        return page

    yield go
    for context in contexts:
        context.close()
    assert not [each for each in problems if "ERR_CONNECTION" not in each], problems


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "results.sqlite"
    real_runs(path)
    return path


@pytest.fixture(scope="module")
def report(results: Path) -> str:
    path = results.with_suffix(".html")
    write_report(results, path)
    return path.as_uri()


def page_of(path: Path) -> str:
    output = path.with_suffix(".html")
    write_report(path, output)
    return output.as_uri()


@contextmanager
def served(path: Path) -> Iterator[PageServer]:
    with PageServer(path) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def chosen(page: Page, section: str, words: str) -> None:
    """Choose the first run whose title contains some words."""
    select = page.locator(f"#{section} select").first
    value = select.locator("option", has_text=words).first.get_attribute("value")
    select.select_option(value)


# -- accuracy --------------------------------------------------------------------------------------


def test_curves_have_the_values_of_the_file(visit: Open, report: str, results: Path) -> None:
    page = visit(report)
    with Results(results, read=True) as file:
        ends = {
            (record.rule, record.attack): [
                other.final_accuracy or 0.0
                for other in file.runs()
                if (other.rule, other.attack) == (record.rule, record.attack)
            ]
            for record in file.runs()
        }
    panels = page.locator("#accuracy figure")
    assert panels.count() == 2
    for place in range(2):
        panel = panels.nth(place)
        attack = panel.locator("figcaption").inner_text().split(" ")[0]
        panel.locator(".chart").focus()
        page.keyboard.press("End")
        said = panel.locator(".readout").text_content() or ""
        assert said.startswith("round 30: ")
        read = dict(re.findall(r"([a-z][^,]*(?:, no attack)?) ([0-9.]+)(?:, |$)", said[10:]))
        expected = {rule: ends[rule, each] for rule, each in ends if each == attack}
        expected["mean, no attack"] = ends["mean", None]
        assert set(read) == set(expected)
        for label, values in expected.items():
            assert len(values) == 2
            assert float(read[label]) == pytest.approx(np.mean(values), rel=1e-3), label
        # The line ends where its value is: the axis is read off its ticks.
        ticks = panel.locator(".axes text[text-anchor=end]")
        pixels = {
            float(ticks.nth(at).text_content() or ""): float(ticks.nth(at).get_attribute("y") or 0)
            - 4
            for at in range(ticks.count())
        }
        for label, values in expected.items():
            path = panel.locator(f'.line[data-label="{label}"]').get_attribute("d") or ""
            y = float(path.rsplit(" ", 1)[1])
            wanted = pixels[0] + (pixels[1] - pixels[0]) * np.mean(values)
            assert y == pytest.approx(wanted, abs=0.6), label
        assert "mean of 2 seeds; band: smallest to largest" in panel.inner_text()


def test_lines_are_hidden_and_zoomed(visit: Open, report: str) -> None:
    page = visit(report)
    panel = page.locator("#accuracy figure").first
    assert panel.locator(".line").count() == 4
    page.locator('#accuracy .legend button[data-label="heraclius:b=3"]').click()
    assert panel.locator(".line").count() == 3
    page.locator('#accuracy .legend button[data-label="heraclius:b=3"]').press("Enter")
    assert panel.locator(".line").count() == 4
    ticks = panel.locator(".axes text[text-anchor=middle]")
    before = ticks.all_text_contents()
    box = panel.locator(".chart").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 100, box["y"] + 30)
    page.mouse.down()
    page.mouse.move(box["x"] + 200, box["y"] + 120, steps=5)
    page.mouse.up()
    zoomed = ticks.all_text_contents()
    assert zoomed != before
    assert max(float(each) for each in zoomed if each != "round") < 30
    page.get_by_role("button", name="Whole range").click()
    assert ticks.all_text_contents() == before
    page.get_by_role("button", name="Zoom to the best").click()
    assert ticks.all_text_contents() == before  # by height alone
    panel.locator(".chart").dblclick()
    page.get_by_role("button", name="by seconds").click()
    assert "seconds" in (panel.locator(".axes").text_content() or "")
    page.get_by_role("button", name="loss").click()
    assert "test loss" in panel.inner_text()


def test_hovering_reads_a_value(visit: Open, report: str) -> None:
    page = visit(report)
    panel = page.locator("#accuracy figure").first
    panel.locator(".chart").hover(position={"x": 200, "y": 60})
    tip = panel.locator(".tooltip")
    assert tip.is_visible()
    assert re.match(r"round \d+", tip.inner_text())
    assert "mean, no attack" in tip.inner_text()


def test_a_sweep_opens_on_the_comparison_of_its_rules(
    visit: Open, report: str, results: Path
) -> None:
    page = visit(report)
    first = page.locator("main > section:visible").first
    assert first.get_attribute("id") == "accuracy"
    columns = first.locator(".comparison thead th").all_inner_texts()
    assert columns[:5] == ["rule", "attack", "final accuracy", "95% interval", "ms/round"]
    assert columns[5:] == ["flagged", "Byzantine"]
    rows = first.locator(".comparison tbody tr")
    shown = {
        tuple(row.locator("th, td").all_inner_texts()[:2]): row.locator("td").all_inner_texts()
        for row in rows.all()
    }
    with Results(results, read=True) as file:
        runs = file.runs()
    assert set(shown) == {(run.rule, run.attack or "none") for run in runs}
    for (rule, attack), cells in shown.items():
        own = [run for run in runs if (run.rule, run.attack or "none") == (rule, attack)]
        final = np.mean([run.final_accuracy or 0 for run in own])
        assert float(cells[1].split()[0]) == pytest.approx(final, abs=6e-4)
        low, high = map(float, cells[2].split(" to "))
        assert (low + high) / 2 == pytest.approx(final, abs=6e-4)
    crashed = shown["phocas:b=3", f"crash:worker={SUSPECT}"]
    assert crashed[4:] == [f"worker {SUSPECT}", str(SUSPECT)]
    assert shown["mean", "none"][4:] == ["none", "none"]


def test_one_run_opens_on_that_run_without_empty_maps(visit: Open, tmp_path: Path) -> None:
    path = tmp_path / "one.sqlite"
    execute(make_config({**SMALL, "rule": "mean", "results": str(path)}))
    page = visit(page_of(path))
    first = page.locator("main > section:visible").first
    assert first.get_attribute("id") == "detection"
    assert first.locator("h2").inner_text() == "Run 1: mean, no attack, seed 0"
    assert first.locator(".line").count() == 1
    assert "No worker is flagged" in first.locator(".verdict").inner_text()
    assert first.locator(".nothing").all_inner_texts() == ["No values were dropped."]
    assert page.locator("#detection .heat").count() == 0


# -- detection -------------------------------------------------------------------------------------


def test_the_heat_map_shows_the_byzantine_worker(visit: Open, report: str) -> None:
    page = visit(report)
    first = page.locator("#detection")
    verdict = first.locator(".verdict").inner_text()
    assert f"Worker {SUSPECT} is flagged: faulty beyond chance" in verdict
    assert f"In this simulation worker {SUSPECT} is Byzantine." in verdict
    row = first.locator(".workers tbody tr").first
    assert row.locator("th").inner_text() == str(SUSPECT)
    assert row.locator("td").all_inner_texts()[:2] == ["▲ flagged", "Byzantine"]
    since = int(row.locator("td.number").first.inner_text())
    assert 3 <= since <= 20
    colours = np.array(
        page.evaluate(
            """() => {
          const canvas = document.querySelector('#detection .heat canvas');
          const scale = canvas.width / parseFloat(canvas.style.width);
          const height = (parseFloat(canvas.style.height) - 34) / 10;
          const all = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
          const at = (x, y) => 4 * (Math.floor(y * scale) * canvas.width + Math.floor(x * scale));
          return Array.from({length: 10}, (_, row) => Array.from({length: 8}, (_, place) => {
            const first = at(60 + 50 * place, (row + .5) * height);
            return [...all.slice(first, first + 3)];
          }));
        }"""
        )
    )
    apart = np.abs(colours - ORANGE).sum(axis=2).max(axis=1)
    assert np.flatnonzero(apart < 12).tolist() == [SUSPECT]
    chosen(page, "detection", "phocas:b=3 under crash")
    first.locator(".heat").first.focus()
    for key in ["ArrowDown"] * SUSPECT + ["ArrowRight"]:
        page.keyboard.press(key)
    said = first.locator(".heat + .readout").first.text_content() or ""
    assert said == f"worker {SUSPECT}, flagged, Byzantine, round 2, 100.0% dropped, 30% expected"
    page.keyboard.press("Enter")
    assert first.locator(".detail h3").inner_text() == f"Worker {SUSPECT}"
    assert "Round 2: 100.0%" in first.locator(".detail").inner_text()
    assert re.search(r"1\.weight \[\d+.\d+\]", first.locator(".detail").inner_text())


def test_the_gambler_attack_is_shown_at_its_server(visit: Open, report: str) -> None:
    page = visit(report)
    chosen(page, "detection", "under gambler")
    section = page.locator("#detection")
    assert (
        "Server 2 received values over a million times" in section.locator(".verdict").inner_text()
    )
    links = section.locator(".heat").nth(1)
    box = links.locator("canvas").bounding_box()
    assert box is not None
    height = (box["height"] - 34) / 4
    links.click(position={"x": 60, "y": 2.5 * height})
    detail = section.locator(".detail").inner_text()
    assert "at server 2" in detail
    assert "1.weight" in detail
    links.focus()
    for _ in range(4):
        page.keyboard.press("ArrowUp")
    said = links.locator("xpath=following-sibling::p[1]").first.text_content() or ""
    assert said.startswith("server 0, worker 0")
    assert "million" not in said


def made_up(path: Path, evidence: list[Evidence], final: float, **known: Any) -> None:
    """Add a synthetic run of 20 rounds with the given state of its last round."""
    settings = known.pop("settings")
    rng = np.random.default_rng(0)
    rounds = [a_round(number, 20, rng) for number in range(1, 20)]
    if settings["rule"] == "mean":
        rounds = [replace(each, dropped=np.zeros(20), expected_dropped=0.0) for each in rounds]
    with Results(path) as results:
        run = results.begin(
            make_config({**settings, "rounds": 20, "results": str(path)}),
            {"phocas": "0"},
            {"name": "here"},
            layers=[("w", 10**5)],
            byzantine=known.pop("byzantine"),
        )
        rounds.append(replace(rounds[-1], number=20, **known))
        results.record(run, rounds, [(20, Metrics(1.0, final, 0.9, 0.01))], (), evidence)
        results.end(run, "complete")


def test_a_run_that_learned_is_shown_before_a_lost_one(visit: Open, tmp_path: Path) -> None:
    path = tmp_path / "r.sqlite"
    common: dict[str, Any] = {"byzantine": None, "flagged": ()}
    for rule, final, server, lost in (
        *(("mean", 0.1, 19, 1), ("multi-krum:b=8", 0.1, 19, None)),
        *(("phocas:b=8", 0.91, 0, None), ("heraclius:b=8", 0.93, 0, None)),
    ):
        evidence = [Evidence(i, 0.1, None, 0.4 * (rule != "mean"), 1) for i in range(20)]
        settings = {"rule": rule, "attack": "gambler"}
        known = {"flagged_servers": (server,), "lost": lost, "settings": settings}
        made_up(path, evidence, final, **common, **known)
    page = visit(page_of(path))
    section = page.locator("#detection")
    titles = section.locator("select").first.locator("option").all_inner_texts()
    assert [title.partition(":")[0] for title in titles[:2]] == ["run 4", "run 3"]
    assert (
        "Server 0 received values over a million times" in section.locator(".verdict").inner_text()
    )
    chosen(page, "detection", "model lost in round 1")
    verdict = section.locator(".verdict").inner_text()
    assert verdict.startswith("Model lost in round 1: evidence of later rounds is not counted.")
    assert "▲ round 1" in page.locator("#runs tr[data-run='1']").inner_text()


def test_flags_on_skewed_data_are_by_the_past_of_workers(visit: Open, tmp_path: Path) -> None:
    path = tmp_path / "r.sqlite"
    flagged = {2: 1e6, 6: 1e9, 19: 0.2}  # the odds of worker 19 have fallen since
    evidence = [
        Evidence(i, flagged.get(i, 0.5), 12 if i in flagged else None, 0.3, 1) for i in range(20)
    ]
    settings = {"rule": "phocas:b=6", "attack": "alie:q=4", "split": "dirichlet:alpha=0.1"}
    known: dict[str, Any] = {"flagged": tuple(flagged), "unusual": (7, 19), "settings": settings}
    made_up(path, evidence, 0.9, byzantine=(0, 1, 2, 3), **known)
    made_up(path, evidence, 0.9, byzantine=None, **known)
    page = visit(page_of(path))
    section = page.locator("#detection")
    verdict = section.locator(".verdict")
    told = (
        "Workers 2, 6, 19 are flagged: no longer as in their own past, which data that differ"
        " (dirichlet:alpha=0.1) do not explain."
    )
    truth = "In this simulation workers 0\u20133 are Byzantine; workers 6, 19 are false alarms;"
    assert verdict.inner_text().startswith(f"{told} {truth} not flagged: 0, 1, 3. ")
    assert verdict.locator(".alarm").count() == 0
    rows = {
        int(row.locator("th").inner_text()): row.locator("td").all_inner_texts()
        for row in section.locator(".workers tbody tr").all()
    }
    assert rows[2][:3] == ["▲ flagged", "Byzantine", "1 in 10\u2076"]
    assert rows[19][:3] == ["▲ flagged", "false alarm", "1 in 20,000"]
    assert rows[0][:3] == ["not flagged", "Byzantine", "no evidence"]
    assert {"0", "1", "3"} <= {str(worker) for worker in rows}
    assert "changed" in page.locator("#runs thead").inner_text()
    chosen(page, "detection", "run 2")
    assert verdict.inner_text().startswith(f"{told} The rule is")
    assert "truth" not in section.locator(".workers").inner_text()


def test_a_file_without_dropped_shares_still_shows_its_curves(
    visit: Open, tmp_path: Path, results: Path
) -> None:
    import sqlite3

    older = tmp_path / "older.sqlite"
    older.write_bytes(results.read_bytes())
    with sqlite3.connect(older) as connection:
        for table in ("shares", "pictures", "evidence", "absurd", "layers"):
            connection.execute(f"DROP TABLE {table}")
    connection.close()
    page = visit(page_of(older))
    assert not page.locator("#detection").is_visible()
    assert page.locator("#accuracy .line").count() == 6
    assert "--record-matrix" in page.locator("#matrix").inner_text()


# -- matrix, cost, runs ----------------------------------------------------------------------------


def test_the_matrix_shows_dropped_values(visit: Open, report: str) -> None:
    page = visit(report)
    chosen(page, "matrix", "phocas:b=3 under crash")
    section = page.locator("#matrix")
    section.locator(".heat").focus()
    for key in ["ArrowDown"] * SUSPECT + ["ArrowRight"]:
        page.keyboard.press(key)
    said = section.locator(".readout").text_content() or ""
    assert re.fullmatch(rf"worker {SUSPECT}, column \d+, 1\.weight\[\d+\], NaN: dropped", said), (
        said
    )
    output = section.locator("output")
    assert output.inner_text() == "30"
    section.locator("input[type=range]").press("Home")
    assert output.inner_text() == "10"


def test_cost_is_shown_by_phase_and_equals_the_comparison(visit: Open, report: str) -> None:
    page = visit(report)
    rows = page.locator("#cost tbody tr")
    assert rows.count() == 5
    total = float(rows.first.locator("td.number").first.inner_text())
    parts = re.findall(
        r"([a-z]+) ([0-9.e-]+) ms", rows.first.locator(".unseen").text_content() or ""
    )
    assert [name for name, _ in parts] == [
        "data",
        "gradient",
        "attack",
        "aggregation",
        "update",
        "records",
    ]
    assert sum(float(value) for _, value in parts) == pytest.approx(total, rel=0.02)
    costs = {row.locator("td.number").first.inner_text() for row in rows.all()}
    compared = page.locator(".comparison tbody tr").all()
    assert costs == {row.locator("td.number").nth(2).inner_text() for row in compared}


def test_runs_are_filtered_compared_and_repeated(visit: Open, report: str, results: Path) -> None:
    page = visit(report, permissions=["clipboard-read", "clipboard-write"])
    section = page.locator("#runs")
    rows = section.locator("tbody tr[data-run]")
    assert rows.count() == 10
    section.locator("label", has_text="rule").locator("select").select_option("phocas:b=3")
    assert rows.count() == 4
    section.locator("label", has_text="seed").locator("select").select_option("1")
    assert rows.count() == 2
    section.get_by_label("Search").fill("gambler")
    assert rows.count() == 1
    section.get_by_label("Search").fill("")
    section.locator("input[type=checkbox]").nth(0).check()
    section.locator("input[type=checkbox]").nth(1).check()
    differences = section.locator(".differences").inner_text()
    assert "attack" in differences
    assert "crash" in differences
    assert "gambler" in differences
    section.get_by_role("button", name="Settings of run 7").click()
    section.get_by_role("button", name="Copy").click()
    section.get_by_role("button", name="Copied").wait_for()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == section.locator(".command code").inner_text()
    assert copied.startswith("phocas train ")
    assert "--dataset synthetic:" in copied
    assert "--seed 1" in copied
    skipped = page.locator(".summary").inner_text()
    assert "Rounds were skipped in runs 4, 9" in skipped


# -- the playground --------------------------------------------------------------------------------


def test_the_rules_of_the_playground_are_those_of_python(browser: Browser) -> None:
    rng = np.random.default_rng(0)
    cases = []
    for _ in range(1000):
        m = int(rng.integers(3, 25))
        values = rng.normal(size=m) * 10.0 ** rng.integers(-2, 3)
        if rng.random() < 0.3:
            values = np.round(values)  # values that are equal, and as near as one another
        if rng.random() < 0.3:
            values[: rng.integers(1, m)] *= 1e6
        cases.append((values.tolist(), int(rng.integers(0, (m - 1) // 2 + 1))))
    code = (resources.files("phocas.report.page") / "script" / "rules.js").read_text("utf-8")
    page = browser.new_page()
    found = page.evaluate(
        """async ([code, cases]) => {
          const rules = await import(`data:text/javascript,${encodeURIComponent(code)}`);
          return cases.map(([values, b]) => rules.aggregates(values, b));
        }""",
        [code, cases],
    )
    page.close()
    compared = 0
    for (values, b), answers in zip(cases, found, strict=True):
        column = np.array(values)[:, None]
        rules = {
            "mean": phocas.Mean(),
            "median": phocas.Median(),
            "trimmed-mean": phocas.TrimmedMean(b),
            "phocas": phocas.Phocas(b),
            "krum": phocas.Krum(b) if 2 * b + 2 < len(values) else None,
        }
        size = np.abs(values).max()
        for name, rule in rules.items():
            if rule is None:
                assert answers[name] is None
                continue
            expected = float(rule(column)[0])
            assert answers[name]["value"] == pytest.approx(expected, rel=1e-12, abs=1e-13 * size), (
                name,
                values,
                b,
            )
            compared += 1
    assert compared > 4500


def test_points_are_moved_by_pointer_and_keyboard(visit: Open, report: str) -> None:
    page = visit(report)
    section = page.locator("#playground")
    section.get_by_role("button", name="All honest").click()

    def mean() -> float:
        text = section.locator(".results tr").first.locator("td").first.inner_text()
        return float(text)

    before = mean()
    point = section.locator(".point").nth(4)
    value = float(point.get_attribute("aria-valuenow") or 0)
    point.focus()
    page.keyboard.press("ArrowRight")
    assert mean() == pytest.approx(before + 0.02, abs=2e-3)
    page.keyboard.press("End")
    assert mean() == pytest.approx(before + (10 - value) / 10, abs=2e-2)
    assert section.locator(".point:focus").get_attribute("data-worker") == "4"
    box = point.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 8, box["y"] + 8)
    page.mouse.down()
    page.mouse.move(box["x"] - 300, box["y"] + 8, steps=4)
    page.mouse.up()
    assert mean() < before + (10 - value) / 10 - 0.1
    section.locator("label", has_text="b").last.locator("input").fill("4")
    assert "needs 2b + 2 < m" in section.inner_text()


# -- everyone --------------------------------------------------------------------------------------


def test_the_report_fits_a_phone_in_light_and_dark_mode(visit: Open, report: str) -> None:
    grounds = {}
    for scheme in ("light", "dark"):
        page = visit(report, viewport=PHONE, color_scheme=scheme)
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= PHONE["width"], wide
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        text = page.evaluate("getComputedStyle(document.body).color")
        grounds[scheme] = ground
        assert contrast(ground, text) > 7
        quiet = page.evaluate("getComputedStyle(document.querySelector('.note')).color")
        alarm = page.evaluate("getComputedStyle(document.querySelector('.alarm')).color")
        assert contrast(ground, quiet) > 4.5
        assert contrast(ground, alarm) > 4.5
    assert grounds["light"] != grounds["dark"]
    page = visit(report, color_scheme="light")
    page.get_by_role("button", name="Dark or light").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == grounds["dark"]


def contrast(one: str, two: str) -> float:
    """Return the contrast ratio of WCAG."""

    def luminance(text: str) -> float:
        parts = [int(part) / 255 for part in re.findall(r"\d+", text)[:3]]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))

    light, dark = sorted((luminance(one), luminance(two)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_every_control_has_a_name_and_is_reachable_by_keyboard(visit: Open, report: str) -> None:
    page = visit(report)
    nameless = page.evaluate(
        """[...document.querySelectorAll('button, select, input, [tabindex="0"]')].filter((each) =>
          !(each.getAttribute('aria-label') || each.textContent.trim() || each.labels?.length))
          .map((each) => each.outerHTML)"""
    )
    assert nameless == []
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    seen = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        seen.add(page.evaluate("document.activeElement.closest('section, nav, header')?.id"))
    assert {"sections", "accuracy"} <= seen
    headings = page.locator("h1, h2").all_inner_texts()
    assert headings[0].startswith("phocas")


def test_hostile_names_are_only_text(visit: Open, tmp_path: Path) -> None:
    import sqlite3

    path = tmp_path / "r.sqlite"
    settings = {**SMALL, "rounds": 12, "record_matrix": 4, "attack": f"crash:worker={SUSPECT}"}
    execute(make_config({**settings, "name": HOSTILE, "results": str(path)}))
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE layers SET name = ?", (HOSTILE,))
        connection.execute("UPDATE runs SET rule = ?, message = ?, attack = ?", (HOSTILE,) * 3)
        text = json.dumps({**make_config(settings).model_dump(), HOSTILE: HOSTILE})
        connection.execute("UPDATE runs SET config = ?", (text,))
    connection.close()
    page = visit(page_of(path))
    page.get_by_role("button", name="Settings of run 1").click()
    page.locator("#accuracy .chart").hover(position={"x": 200, "y": 60})
    page.locator("#matrix .heat").focus()
    page.keyboard.press("ArrowRight")
    assert HOSTILE[:20] in page.locator("#runs").inner_text()
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 2


def test_a_file_without_runs_shows_a_command_to_start_one(visit: Open, tmp_path: Path) -> None:
    path = tmp_path / "none.sqlite"
    Results(path).close()
    page = visit(page_of(path))
    assert "No runs yet" in page.inner_text("main")
    assert f"phocas train --rule phocas:b=8 --attack gambler --results {path}" in page.inner_text(
        "main"
    )
    assert page.locator("main > section:visible").count() == 2  # and the playground


def test_the_report_of_a_guard_shows_rank_layer_and_step(
    visit: Open, tmp_path: Path, report: str
) -> None:
    path = tmp_path / "guard.json"
    path.write_text(json.dumps(guard_report()))
    for page in (visit(page_of(path)), visit(report)):
        if page.locator("#guards").is_hidden():
            page.locator("#guard-file").set_input_files(str(path))
        page.locator("#guards .verdict", has_text="Rank 5 is flagged as faulty").wait_for()
        text = page.locator("#guards").inner_text()
        assert f"Rank 5 on node7{HOSTILE[:30]}" in text
        assert "Flagged in step 12" in text
        assert "since step 10" in text
        assert "The first non-finite value came from rank 5 in step 11" in text
        assert "blocks.3.mlp.weight" in text
        assert "hardware: the same addresses again" in text
        assert "128" in text
    page.locator("#guard-file").set_input_files(
        {"name": "x.json", "mimeType": "application/json", "buffer": b'{"schema": 7}'}
    )
    page.get_by_text("x.json cannot be shown: it is no report of a guard").wait_for()


# -- live ------------------------------------------------------------------------------------------


def test_a_new_round_appears_in_the_live_report(visit: Open, tmp_path: Path) -> None:
    path = tmp_path / "r.sqlite"
    rng = np.random.default_rng(0)
    with Results(path) as results:
        run = results.begin(make_config({"results": str(path)}), {}, {})
        results.record(run, [a_round(1, 20, rng)], [(0, Metrics(1, 0.1, 0.2, 0))])
        with served(path) as server:
            page = visit(server.url)
            page.get_by_text("● live").wait_for()
            page.get_by_label("Search").fill("mnist")
            page.locator("#detection select").or_(page.locator("#detection .heat")).first.focus()
            for number in range(2, 12):
                results.record(run, [a_round(number, 20, rng)])
                page.locator("#runs tbody", has_text=f"{number}/500").wait_for()
            assert page.get_by_label("Search").input_value() == "mnist"
            other = results.begin(make_config({"results": str(path), "rule": "mean"}), {}, {})
            page.locator(f'tr[data-run="{other}"]').wait_for()
        page.get_by_text("the server is gone").wait_for()


def test_the_live_report_follows_a_run_to_its_end(visit: Open, tmp_path: Path) -> None:
    path = tmp_path / "r.sqlite"
    Results(path).close()
    settings = {**SMALL, "rounds": 120, "results": str(path), "attack": f"crash:worker={SUSPECT}"}
    text = f"""
from phocas.experiments.config import make_config
from phocas.experiments.runner import execute
execute(make_config({settings!r}), watch=lambda _, done, __: done.number == 60 and input())
"""
    with served(path) as server:
        page = visit(server.url)
        assert "No runs yet" in page.inner_text("main")
        command = [sys.executable, "-c", text]
        with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as process:
            page.locator("#runs .status.running").wait_for()
            process.communicate("\n")
            page.locator("#runs .status.complete").wait_for()
        assert process.returncode == 0
        assert page.locator("main > section:visible").first.get_attribute("id") == "detection"
        assert f"Worker {SUSPECT} is flagged" in page.inner_text("#detection .verdict")
        assert "120/120" in page.inner_text("#runs")


# -- size ------------------------------------------------------------------------------------------


def test_400_runs_of_500_rounds(visit: Open, tmp_path: Path) -> None:
    path = tmp_path / "many.sqlite"
    many_runs(path, 400, 500)
    output = tmp_path / "many.html"
    command = [sys.executable, "-m", "phocas", "results", "report", str(path), "-o", str(output)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    built = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    page = visit(output.as_uri())
    shown = _processor_seconds(page)
    print(f"built in {built:.2f} s, {output.stat().st_size / 1e6:.1f} MB, shown in {shown:.2f} s")
    assert output.stat().st_size <= 12e6
    assert page.locator("#runs tbody tr[data-run]").count() == 400
    lines = page.locator("#accuracy .legend button svg line")
    told = {
        (lines.nth(at).get_attribute("stroke"), lines.nth(at).get_attribute("stroke-dasharray"))
        for at in range(lines.count())
    }
    assert len(told) == lines.count() == 8  # rules with another b as well
    select = page.locator("#runs label", has_text="attack").locator("select")
    select.select_option("gambler")
    print(f"filtered in {_processor_seconds(page) - shown:.2f} s")
    rows = page.locator("#runs tbody tr[data-run]")
    assert rows.count() == rows.filter(has_text="gambler").count() == 70


def _processor_seconds(page: Page) -> float:
    """Return the processor time of the browser's process."""
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")
    metrics = session.send("Performance.getMetrics")["metrics"]
    return float({each["name"]: each["value"] for each in metrics}["ProcessTime"])
