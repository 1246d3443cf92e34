"""Write the tables of ``docs/costs.md`` from the results of ``phocas reproduce rare``.

``python -m tools.costs`` replaces the lines between the two marks of the page. A test compares the
page with the results.
"""

from __future__ import annotations

from pathlib import Path

from phocas.experiments.reproduction.rare.study import StudyResults, plan_study
from phocas.report.rare import summary

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/costs.md"
RESULTS = ROOT / "src/phocas/experiments/reproduction/results/rare-paper.jsonl"
BEGIN, END = "<!-- made by python -m tools.costs -->", "<!-- end of what is made -->"


def written(page: str) -> str:
    """Return the text of the page with the tables of the stored results."""
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{PAGE} needs the lines {BEGIN} and {END}")
    lines = summary(plan_study("rare"), StudyResults(RESULTS))
    return "\n".join([before + BEGIN, "", *lines, "", END + after])


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text("utf-8")), "utf-8")
