"""What users can cause, driven through the real command: one line, status 2, and nothing lost."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phocas.cli import main
from phocas.experiments.config import make_config
from phocas.experiments.results import Results
from phocas.training.trainer import Round

ROOT = Path(__file__).parent.parent.parent
SMALL = ("--dataset", "synthetic:train=60,test=20,side=8", "--model", "softmax", "--rounds", "2")
MODELS = """
import torch

def raises():
    return 1 / 0

def misfit():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(300, 10))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with one of everything that can be wrong."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "binary.toml").write_bytes(bytes(range(256)))
    (tmp_path / "empty.toml").write_text("")
    (tmp_path / "own.py").write_text(MODELS)
    (tmp_path / "broken.py").write_text("def model(:\n")
    (tmp_path / "needy.py").write_text("import nowhere_to_be_found\n")
    (tmp_path / "garbage.sqlite").write_bytes(np.random.default_rng(1).bytes(9000))
    whole = a_results_file(tmp_path / "phocas.sqlite")
    (tmp_path / "short.sqlite").write_bytes(whole[: len(whole) // 2])
    return tmp_path


def a_results_file(path: Path) -> bytes:
    with Results(path) as results:
        for seed, lr in ((0, 0.1), (0, 0.5)):
            config = make_config({"seed": seed, "lr": lr, "results": str(path)})
            run = results.begin(config, {"phocas": "0"}, {"name": "here"})
            results.record(run, [a_round(number) for number in range(1, 40)])
            results.end(run, "complete")
    return path.read_bytes()


def a_round(number: int) -> Round:
    return Round(
        number=number,
        loss=1.0,
        lr=0.1,
        action="applied",
        finite=True,
        gradient_norm=1.0,
        honest_distance=None,
        dropped=np.array([0.25, 0.5]),
        expected_dropped=0.4,
        by_server=None,
        touched=0,
        flagged=(),
        seconds={},
    )


def phocas(*words: str, cwd: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "phocas", *words]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, check=False, timeout=300, **options
    )


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("results list --results folder", "a results file must be a file: got folder"),
        (
            "results list --results garbage.sqlite",
            "garbage.sqlite cannot be used as a results file",
        ),
        ("results list --results short.sqlite", "short.sqlite cannot be used as a results file"),
        ("results list --status xyz", "unknown status 'xyz'; it may be: running, complete"),
        ("results export --csv folder", "the table must be a file: got folder"),
        ("results export", "for a table, or --model RUN"),
        ("results export --model 7", "there is no run 7 in phocas.sqlite"),
        ("results export --model 1", "the model of run 1 is not there any more"),
        ("train --config folder", "folder: is a directory"),
        ("train --config binary.toml", "binary.toml is no TOML: 'utf-8' codec can't decode"),
        ("train --results folder", "the results file must be a file: got folder"),
        ("train --save-model folder", "the model must be a file: got folder"),
        ("train --engine ray --faults folder", "folder: is a directory"),
        ("train --model own:raises", "own.py:5: ZeroDivisionError: division by zero"),
        ("train --model own:misfit", "own:misfit cannot be trained on synthetic"),
        ("train --model own:absent", "own"),
        (
            "train --model broken:model",
            "broken cannot be imported: SyntaxError: invalid syntax (broken.py, line 1)",
        ),
        (
            "train --model needy:model",
            "needy cannot be imported: ModuleNotFoundError: No module named",
        ),
        ("sweep empty.toml", "empty.toml has no [grid]: it is one run"),
        ("demo --output phocas.sqlite", "phocas.sqlite is no folder"),
    ],
)
def test_mistakes_are_one_line_and_status_2(folder: Path, words: str, complaint: str) -> None:
    small = SMALL if words.startswith("train") and "--model" not in words else SMALL[:2]
    more = small if words.startswith("train") else ()
    ended = phocas(*words.split(), *more, cwd=folder)
    lines = [line for line in ended.stderr.splitlines() if not line.startswith("reading ")]
    assert ended.returncode == 2, ended.stderr
    assert len(lines) == 1, ended.stderr
    assert lines[0].startswith("phocas: ")
    assert complaint in lines[0]
    assert not (folder / "phocas-demo").exists()


def test_a_traceback_can_be_had(folder: Path) -> None:
    words = ("train", *SMALL[:2], "--model", "own:raises")
    assert "shows the traceback" in phocas(*words, cwd=folder).stderr
    asked = phocas("--traceback", *words, cwd=folder)
    assert asked.returncode == 1
    assert "Traceback" in asked.stderr


def test_a_full_disk_is_one_line_and_the_run_goes_on_later(tmp_path: Path) -> None:
    def limit() -> None:  # no file grows past this: what a full disk does, for one process
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))

    more = ("--model", "mlp:hidden=200", "--rounds", "30", "--checkpoint-rounds", "5", "--quiet")
    words = ("train", *SMALL, *more)
    full = phocas(*words, cwd=tmp_path, preexec_fn=limit)
    assert full.returncode == 2, full.stderr
    assert len(full.stderr.splitlines()) == 1
    assert "ile too large" in full.stderr or "disk" in full.stderr
    later = phocas(*words, "--json", cwd=tmp_path)
    assert json.loads(later.stdout)["status"] == "complete"


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A folder that other users reach; each session of pytest closes its folders to them."""
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        yield Path(place)


def test_results_are_read_where_nothing_can_be_written(reachable: Path) -> None:
    code = """
import os, sys
from phocas.cli import main
def run():
    try:
        main()
    except SystemExit as ended:
        return ended.code or 0
sys.argv = ["phocas", *sys.argv[1:]]
run()  # loads all that it needs
os.chmod(".", 0o555)
if os.geteuid() == 0:
    os.setegid(65534)
    os.seteuid(65534)
try:
    open("new", "w")
    sys.exit("the folder can be written to")
except PermissionError:
    pass
sys.exit(run())
"""
    a_results_file(reachable / "phocas.sqlite")
    for words in (
        ("results", "list", "--json"),
        ("results", "export", "--csv", "-", "--table", "rounds"),
    ):
        ended = subprocess.run(
            [sys.executable, "-c", code, *words],
            cwd=reachable,
            capture_output=True,
            text=True,
            check=False,
        )
        reachable.chmod(0o755)
        assert ended.returncode == 0, ended.stderr
        lines = ended.stdout.splitlines()
        assert lines[: len(lines) // 2] == lines[len(lines) // 2 :]
        assert "0.5" in lines[0] or len(lines) == 2 * (1 + 2 * 39)


def test_results_file_with_any_bit_flipped_is_read_or_reported(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    whole = (folder / "phocas.sqlite").read_bytes()
    rng = np.random.default_rng(3)
    refused = 0
    for place in [*range(0, 100, 7), *rng.integers(0, len(whole), 80)]:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << int(rng.integers(8))
        (folder / "damaged.sqlite").write_bytes(damaged)
        for words in (
            ["results", "list"],
            ["results", "export", "--csv", "-", "--table", "rounds"],
        ):
            argv = ["phocas", *words, "--results", "damaged.sqlite"]
            monkeypatch.setattr(sys, "argv", argv)
            with pytest.raises(SystemExit) as ended:
                main()
            errors = capsys.readouterr().err
            if ended.value.code:
                assert ended.value.code == 2
                assert errors.startswith("phocas: ")
                assert "damaged.sqlite" in errors
                refused += 1
    assert refused > 10


def test_the_example_of_ddp_says_that_it_needs_torchrun(tmp_path: Path) -> None:
    example = str(ROOT / "examples" / "ddp_mnist.py")
    environment = {key: value for key, value in os.environ.items() if key != "RANK"}
    ended = subprocess.run(
        [sys.executable, example],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert ended.returncode == 2
    assert "start it by torchrun" in ended.stderr
    assert "Traceback" not in ended.stderr
