"""The page about costs has the tables of the stored results."""

from __future__ import annotations

import pytest
from tools.costs import PAGE, RESULTS, written


def test_page_has_the_tables_of_the_stored_results() -> None:
    page = PAGE.read_text("utf-8")
    assert written(page) == page, "python -m tools.costs writes the page"
    assert page.count("| Mean (`mean`) | 1.00 |") == 1


def test_results_are_small_enough_for_the_repository() -> None:
    every = list(RESULTS.parent.iterdir())
    assert sum(path.stat().st_size for path in every) < 800_000
    assert {path.suffix for path in every} <= {".jsonl", ".xz"}
    assert {path.suffix for path in (PAGE.parent / "reproduction/rare").iterdir()} == {
        ".png",
        ".md",
    }


def test_page_without_marks_is_rejected() -> None:
    with pytest.raises(ValueError, match="needs the lines <!-- made by"):
        written("# What robustness costs\n")
