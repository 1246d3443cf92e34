"""Every page of the built site in a real browser: nothing is cut off, missing or downloaded."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.browser import browser_installed, launched

if "BUILT_SITE" not in os.environ or not browser_installed():
    pytest.skip(
        "THE SITE IS NOT TRIED IN A BROWSER: BUILT_SITE is not set, or there is no playwright or no"
        " chromium here; make docs builds the site and installs them where it can",
        allow_module_level=True,
    )

from playwright.sync_api import Page
from tools.site.maths import PAGES as WITH_FORMULAS

SITE = Path(os.environ["BUILT_SITE"]).resolve()
LAPTOP = {"width": 1280, "height": 800}
PHONE = {"width": 390, "height": 844}
LAYOUT = Path(__file__).with_name("layout.js").read_text("utf-8")
PAGES = sorted(
    str(path.relative_to(SITE)) for path in SITE.rglob("*.html") if path.name != "404.html"
)


@dataclass
class Tab:
    """A tab of the browser, and what its pages requested and logged."""

    page: Page
    requests: list[str]
    messages: list[str]

    def defects(self, url: str) -> list[str]:
        """Open a page, and return its defects at both sizes of the window."""
        self.requests.clear()
        self.messages.clear()
        found = []
        self.page.set_viewport_size(LAPTOP)
        self.page.goto(url)
        found += [f"1280 px: {each}" for each in self.page.evaluate(LAYOUT, arg=True)]
        self.page.set_viewport_size(PHONE)
        found += [f"390 px: {each}" for each in self.page.evaluate(LAYOUT, arg=False)]
        elsewhere = [
            each for each in self.requests if not each.startswith(("file:", "data:", "blob:"))
        ]
        return found + self.messages + [f"requested: {each}" for each in elsewhere]


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    with launched() as browser:
        page = browser.new_page()
        page.set_default_timeout(120_000)
        tab = Tab(page, [], [])
        page.on("request", lambda request: tab.requests.append(request.url))
        page.on("console", lambda said: tab.messages.append(f"{said.type}: {said.text}"))
        page.on("pageerror", lambda error: tab.messages.append(str(error)))
        yield tab


def test_formulas_are_typeset(tab: Tab) -> None:
    for name in WITH_FORMULAS:
        tab.page.goto((SITE / name).with_suffix(".html").as_uri())
        assert tab.page.locator(".md-content math").count() > 0, name


@pytest.mark.parametrize("name", PAGES)
def test_every_page_fits_a_laptop_and_a_phone(tab: Tab, name: str) -> None:
    assert tab.defects((SITE / name).as_uri()) == []


@pytest.mark.parametrize(
    ("content", "defect"),
    [
        (f"<p>{'x' * 400}</p>", "390 px: the page is"),
        (f"<pre style='overflow: hidden'>{'x' * 400}</pre>", '390 px: <pre> "xxx'),
        (f"<pre style='overflow: auto'>{'x' * 400}</pre>", '1280 px: <pre> "xxx'),
        (
            "<img src='data:image/png;base64,' alt=''>",
            "1280 px: data:image/png;base64, is not shown",
        ),
        ("<p>with $m - b$ workers</p>", "1280 px: a formula is not typeset: with $m - b$"),
        ("<h2>One</h2><h2>Two</h2><p>x</p>", '1280 px: the section <h2> "One" is empty'),
        ("<img src='http://127.0.0.1:9/x.png' alt=''>", "requested: http://127.0.0.1:9/x.png"),
    ],
)
def test_a_defect_is_found(tab: Tab, tmp_path: Path, content: str, defect: str) -> None:
    path = tmp_path / "page.html"
    path.write_text(f"<!doctype html><div class='md-content'>{content}</div>")
    assert [each for each in tab.defects(path.as_uri()) if each.startswith(defect)]
