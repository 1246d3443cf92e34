"""What a release must be, as far as it can be told without building one (``make dist``)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tools import release
from tools.prose import too_long, wrapped

import phocas

ROOT = Path(__file__).parents[2]


def test_the_version_stands_in_one_place() -> None:
    assert release.declared_version() == phocas.__version__
    assert not re.search(r'^version = "', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)


def test_a_tag_is_the_version_and_the_version_has_a_date() -> None:
    release.check_tag(f"v{phocas.__version__}")
    with pytest.raises(SystemExit, match="the tag must be v"):
        release.check_tag("v9.9.9")


def test_every_extra_is_tried() -> None:
    assert release.untried() == set()


def test_files_that_are_left_out_are_noticed() -> None:
    page, toml = "phocas/report/page/page.html", "phocas/experiments/reproduction/mnist.toml"
    missing = release.missing_from(["phocas/__init__.py"])
    assert page in missing
    assert toml in missing
    assert release.missing_from([*missing, "phocas/__init__.py"]) == []


def test_workflows_call_targets_that_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    checks = (ROOT / ".github/workflows/checks.yml").read_text()
    (listed,) = re.findall(r"target: \[(.*)\]", checks)
    targets = listed.split(", ") + re.findall(r"make ([a-z-]+)", checks + "make test")
    for script in (".github/workflows/release.yml", ".ci/run"):
        targets += re.findall(
            r"^[ \-a-z:]*make ([a-z-]+)$", (ROOT / script).read_text(), re.MULTILINE
        )
    assert {"docs", "dist", "test"} <= set(targets)
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_long_prose_is_found_and_wrapped_and_code_is_left_alone() -> None:
    long = "word " * 30
    page = f"# {long}\n\n{long}\n\n- {long}\n\n  {long}\n\n```\n{long}\n```\n\n| {long} |\n"
    assert len(too_long(page)) == 3
    again = wrapped(page)
    assert too_long(again) == []
    assert again.split() == page.split()
    assert wrapped(again) == again
    assert f"```\n{long}\n```" in again
    assert f"# {long}" in again
    assert "\n  word" in again
