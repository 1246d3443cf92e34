"""The pages that are made from the code say all that there is."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from tools.site import catalogue, pictures, public, sources

import phocas
from phocas import PRE_AGGREGATORS, RULES
from phocas.attacks import ATTACKS
from phocas.report.palette import GREY, STYLES

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def rules() -> str:
    return catalogue.rules_page()


@pytest.fixture(scope="module")
def attacks() -> str:
    return catalogue.attacks_page()


def test_every_rule_has_its_words_and_a_picture(rules: str) -> None:
    entries = dict(re.findall(r"^## ([\w-]+)\n(.*?)(?=^## |\Z)", rules, re.DOTALL | re.MULTILINE))
    assert set(entries) == {*RULES, *PRE_AGGREGATORS}
    for name, entry in entries.items():
        assert "<svg" in entry, name
        assert "**Cost.**" in entry, name
        assert ">>>" not in entry, name


def test_every_attack_has_its_words_and_a_picture(attacks: str) -> None:
    entries = re.findall(r"^## ([\w-]+)$", attacks, re.MULTILINE)
    assert entries == list(ATTACKS)
    assert attacks.count("<svg") == len(entries)


def test_pictures_are_whole_and_say_what_they_show(rules: str, attacks: str) -> None:
    drawn = re.findall(r"<svg.*?</svg>", rules + attacks, re.DOTALL)
    drawn += [draw() for draw in pictures.CONCEPTS.values()]
    for picture in drawn:
        assert "\n" not in picture
        assert "nan" not in re.sub(r"<title>.*?</title>|aria-label=\".*?\"", "", picture)
        assert ET.fromstring(picture).get("aria-label")


def test_a_picture_shows_what_the_rule_does() -> None:
    """The mean's result lies on the plain mean, and that of Phocas does not."""
    marks = r'<path class="(mean|result)" d="(\S+ \S+)'
    of_mean = dict(re.findall(marks, pictures.of_rule(phocas.Mean())))
    of_phocas = dict(re.findall(marks, pictures.of_rule(phocas.Phocas(b=2))))
    assert of_mean["mean"] == of_mean["result"] == of_phocas["mean"] != of_phocas["result"]


def test_pictures_have_the_colours_of_the_palette() -> None:
    style = (ROOT / "docs" / "site.css").read_text()
    colours = re.findall(r"--picture-\w+: (#\w+);", style)
    assert len(colours) == 6
    assert set(colours) <= {*(style.colour for style in STYLES.values()), GREY}


def test_rows_after_a_stage_are_those_that_the_next_rule_sees() -> None:
    rows = pictures.cloud()
    stage = phocas.NNM(b=2)
    after = pictures.rows_after(stage, rows)
    np.testing.assert_allclose(phocas.Median()(after), (stage | phocas.Median())(rows))


def test_costs_are_what_the_rule_asks_for() -> None:
    assert catalogue.passes(phocas.Median()) == "one pass: O(m d)"
    assert catalogue.passes(phocas.CGE(b=2)) == "norms, then one pass: O(m d)"
    cleaned = phocas.CellFilter(b=2) | phocas.Krum(b=2)
    assert catalogue.passes(cleaned) == "marks and distances, then one pass: O(m² d)"


def test_every_command_is_on_its_page_with_its_options() -> None:
    page = catalogue.commands_page()
    for command in ("train", "audit", "rules", "results report", "theory plan"):
        assert f"\n## {command}\n" in page
    assert "`--byzantine`" in page
    assert "`--learning-rate`" in page or "`--lr`" in page


def test_every_module_with_a_list_of_names_has_a_page() -> None:
    assert set(public.modules_with_lists()) <= set(public.MODULES) | set(public.INSIDE)
    navigation = (ROOT / "mkdocs.yml").read_text()
    for page in catalogue.reference_pages():
        assert f": {page}\n" in navigation


def test_public_names_are_found_where_they_are_defined() -> None:
    found = {name.name: name for name in public.public_names("phocas")}
    assert set(found) == set(phocas.__all__) - {"__version__"}
    assert found["Krum"].home == "phocas.rules.selection"
    assert found["Krum"].docstring.startswith("Return the row")
    assert found["attacks"].definition is None
    assert {name.name for name in public.public_names("phocas.training")} >= {"Trainer", "Task"}


def test_links_out_of_files_hold_in_the_repository() -> None:
    """Those to headings, and those of the site, are checked by mkdocs."""
    broken = []
    for file in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", file.read_text()):
            made = target.startswith(("reference/", "examples/", "../reference/"))
            if ":" in target or (made and file.is_relative_to(ROOT / "docs")):
                continue
            if not (file.parent / target).exists():
                broken.append(f"{file.name}: {target}")
    assert broken == []


def test_links_are_turned() -> None:
    text = "[a](docs/theory.md#measured) [b](ARCHITECTURE.md) [c](#here) [d](https://e.org/x.md)"
    turned = "[a](../theory.md#measured) [b](../architecture.md) [c](#here) [d](https://e.org/x.md)"
    assert sources.turned(text, "README.md", "deep/readme.md") == turned
