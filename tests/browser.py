"""Debian's chromium, for the tests of the HTML report and of the documentation site."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def chromium() -> str | None:
    """Return the path of the browser, or None."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


def browser_installed() -> bool:
    """Return whether playwright and the browser are installed."""
    return importlib.util.find_spec("playwright") is not None and chromium() is not None


@contextmanager
def launched() -> Iterator[Browser]:
    """Start the browser, and close it at the end."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=FLAGS)
        yield browser
        browser.close()
