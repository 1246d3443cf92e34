"""Every block of code in README and docs runs, or says above it why it does not run here.

``<!-- not run: why -->`` above a block of Python says where else it is run. Blocks without a
language are transcripts: the commands in them must exist, with their options.
"""

from __future__ import annotations

import doctest
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main

from phocas.cli import application, train
from phocas.experiments.results import Results, latest

ROOT = Path(__file__).parents[2]
SMALL = "synthetic:train=500,test=100"
"""Data of the size of MNIST's, which need not be there to be fetched."""
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/*.md", "examples/*.md", ".github/**/*.md")
    for path in ROOT.glob(pattern)
)
_BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<why>.+?) -->\n\n?)?^```(?P<kind>\w*)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    kind: str
    text: str
    why: str | None


def blocks(page: str) -> list[Block]:
    found = _BLOCK.finditer((ROOT / page).read_text())
    return [Block(each["kind"], each["text"], each["why"]) for each in found]


WITH_PYTHON = [
    page for page in PAGES if any(each.kind == "python" and not each.why for each in blocks(page))
]


@pytest.mark.parametrize("page", WITH_PYTHON)
def test_python_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks of a page after one another; one that begins with a file's name is that file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    names: dict[str, Any] = {"__name__": "__page__"}
    torch.manual_seed(0)
    for block in blocks(page):
        if block.kind != "python" or block.why:
            continue
        file = re.match(r"# (\w+\.py)\n", block.text)
        if file is not None:
            (tmp_path / file[1]).write_text(block.text)
        else:
            text = block.text.replace('"mnist"', f'"{SMALL}"')
            exec(compile(text, page, "exec"), names)
    for written in tmp_path.glob("*.py"):  # other tests have modules of the same names
        sys.modules.pop(written.stem, None)


@pytest.mark.parametrize("page", PAGES)
def test_sessions_are_as_shown(page: str) -> None:
    for block in blocks(page):
        if block.kind == "pycon":
            test = doctest.DocTestParser().get_doctest(block.text, {}, page, page, 0)
            assert doctest.DocTestRunner().run(test).failed == 0


@pytest.mark.parametrize("page", PAGES)
def test_reasons_name_what_runs_the_block_instead(page: str) -> None:
    for block in blocks(page):
        for path in re.findall(r"[\w/]+/[\w/]+\.py", block.why or ""):
            assert (ROOT / path).exists(), f"{page} says that {path} runs a block"


def joined(text: str) -> str:
    """Join the lines of commands that a backslash continues on the next line."""
    return text.replace("\\\n", "")


def known_commands() -> dict[str, set[str]]:
    group: Any = typer.main.get_command(application())
    commands = {**group.commands, "train": train.complete()}
    for name in ("results", "theory"):
        commands |= {f"{name} {each}": inner for each, inner in commands[name].commands.items()}
    return {
        name: {opt for each in command.params for opt in (*each.opts, *each.secondary_opts)}
        | {"-h", "--help"}
        for name, command in commands.items()
    }


def test_commands_that_are_shown_exist_with_their_options() -> None:
    known = known_commands()
    wrong, seen = [], 0
    for page in PAGES:
        for block in blocks(page):
            if block.kind in ("", "sh", "bash", "console"):
                for line in re.findall(
                    r"^(?:\$ )?phocas ([a-z].*)$", joined(block.text), re.MULTILINE
                ):
                    command, *words = shlex.split(line, comments=True)
                    if words and f"{command} {words[0]}" in known:
                        command = f"{command} {words[0]}"
                    seen += 1
                    options = {word.partition("=")[0] for word in words if word.startswith("-")}
                    options = {each for each in options if not re.match(r"-\d", each)}
                    if command not in known or not options <= known[command]:
                        wrong.append(f"{page}: phocas {line}")
    assert seen > 20
    assert wrong == []


@pytest.mark.slow
def test_the_page_for_a_paper_runs_as_it_stands(tmp_path: Path) -> None:
    """Write its files and run its commands in order: 54 runs, a LaTeX table and a PDF figure."""
    for block in blocks("docs/paper.md"):
        file = re.match(r"# (\w+\.\w+)\n", block.text)
        if file is not None:
            (tmp_path / file[1]).write_text(block.text)
        elif not block.kind:
            for line in joined(block.text).splitlines():
                words = [sys.executable, "-m", *shlex.split(line)]
                subprocess.run(words, cwd=tmp_path, check=True, timeout=240)
    table = (tmp_path / "table.tex").read_text()
    assert table.count(r"\pm") == 2 * 3 * 3
    assert r"\texttt{my\_ideas:dnc:b=2,c=1.5}" in table
    assert (tmp_path / "figure.pdf").read_bytes().startswith(b"%PDF")
    with Results(tmp_path / "paper.sqlite", read=True) as results:
        assert len(latest(results.runs())) == 54
