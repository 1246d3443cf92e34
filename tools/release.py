"""Build a release, and test it in empty environments.

``python -m tools.release`` builds the source distribution and the wheel into ``dist`` and checks
their contents. Then it installs the wheel with each extra into empty environments, and runs it
there.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import venv
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]

BARE = """
import sys
import numpy as np
import phocas

assert "site-packages" in phocas.__file__, phocas.__file__
rows = np.ones((5, 2000), np.float32)
rows[0] = np.nan
assert (phocas.Phocas(b=1)(rows) == 1).all()
assert (phocas.NNM(b=1) | phocas.Heraclius(b=1)).explain(rows).dropped[0] == 1
assert "torch" not in sys.modules
"""

TRAIN = (
    "train --rule phocas:b=2 --dataset synthetic:train=500,test=100 --num-workers 6 --num-servers 2"
    " --rounds 3 --results runs.sqlite --quiet"
)

_TRACKED = "from phocas.experiments.trackers import open_tracker; open_tracker('{}')"


@dataclass(frozen=True)
class Trial:
    """An extra, and the Python code and commands that must work after its installation."""

    extra: str
    python: str
    commands: tuple[str, ...] = ()


@dataclass(frozen=True)
class Environment:
    """An empty environment, and the extras that are installed into it one by one."""

    constraints: str
    trials: tuple[Trial, ...]


ENVIRONMENTS = (
    Environment(
        "constraints.txt",
        (
            Trial(
                "",
                BARE,
                ("--version", "rules", "attacks", "theory bounds --num-workers 20 --byzantine 6"),
            ),
            Trial(
                "train", "import phocas.training.trainer", (TRAIN, "report runs.sqlite -o it.html")
            ),
            Trial("report", "import phocas.report.figures", ("reproduce mnist --dry-run",)),
            Trial("ray", "import ray, phocas.engines.ray.cluster"),
            Trial("gpu", "import phocas.kernels.triton"),
            Trial("wandb", _TRACKED.format("wandb")),
        ),
    ),
    Environment(
        "constraints.txt",
        (
            Trial(
                "adapters",
                "import phocas.integrations.lightning, phocas.integrations.transformers",
            ),
            Trial(
                "tensorboard", _TRACKED.format("tensorboard"), (f"{TRAIN} --track tensorboard:tb",)
            ),
            Trial("mlflow", _TRACKED.format("mlflow")),
        ),
    ),
    Environment(
        "constraints-flower.txt",
        (
            Trial("flower", "from phocas.integrations.flower import RobustStrategy"),
            Trial("nvflare", "from phocas.integrations.nvflare import RobustAggregator"),
        ),
    ),
)
"""Extras that need torch share an environment. Each extra is tested before the next is installed.

Two environments are built at a time, the longest first: pip keeps one core busy.
"""

DEVELOPERS = {"dev", "docs", "dist", "browser", "all"}
"""Extras for developers, and ``all``, which only names other extras: these are not tested."""


def untried() -> set[str]:
    """Return the extras that no environment tests."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tried = {trial.extra for each in ENVIRONMENTS for trial in each.trials}
    return set(project["optional-dependencies"]) - DEVELOPERS - tried


def declared_version() -> str:
    """Return ``__version__`` of the package, without importing it."""
    tree = ast.parse((ROOT / "src/phocas/__init__.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__":
            return str(ast.literal_eval(node.value))
    raise LookupError("src/phocas/__init__.py must say __version__")


def missing_from(names: list[str]) -> list[str]:
    """Return the files of the package that are not among the names in a distribution."""
    package = ROOT / "src"
    files = [
        path.relative_to(package).as_posix()
        for path in sorted((package / "phocas").rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    ]
    return [file for file in files if not any(name.endswith(file) for name in names)]


def build() -> Path:
    """Build both distributions, check that they are complete, and return the wheel."""
    for old in (ROOT / "dist").glob("phocas-*"):
        old.unlink()
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    version = declared_version()
    wheel = ROOT / f"dist/phocas-{version}-py3-none-any.whl"
    source = ROOT / f"dist/phocas-{version}.tar.gz"
    with zipfile.ZipFile(wheel) as archive, tarfile.open(source) as sources:
        for file, names in ((wheel, archive.namelist()), (source, sources.getnames())):
            missing = missing_from(names)
            if missing:
                raise SystemExit(f"{file.name} must hold all of the package: it lacks {missing}")
            print(f"{file.name}: {len(names)} files, {file.stat().st_size / 1e6:.2f} MB")
    return wheel


def try_out(wheel: Path, environment: Environment) -> None:
    """Install the wheel with each extra, and run the trials in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        _try_in(Path(folder), wheel, environment)


def _try_in(folder: Path, wheel: Path, environment: Environment) -> None:
    started = time.monotonic()
    venv.create(folder / "venv")
    binaries = folder / "venv/bin"
    for trial in environment.trials:
        wanted = f"{wheel}[{trial.extra}]" if trial.extra else str(wheel)
        # This pip, without compiling: a new pip and byte code would take seconds and are used once.
        pip = [sys.executable, "-m", "pip", "--python", str(binaries / "python"), "install"]
        pip += ["--quiet", "--no-compile", "--disable-pip-version-check"]
        pip += ["-c", str(ROOT / environment.constraints)]
        subprocess.run([*pip, wanted], check=True)
        runs = [[str(binaries / "python"), "-c", trial.python]]
        runs += [[str(binaries / "phocas"), *command.split()] for command in trial.commands]
        for run in runs:
            done = subprocess.run(run, cwd=folder, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"{run} failed with {trial.extra!r}:\n{done.stdout}{done.stderr}")
        seconds = time.monotonic() - started
        print(f"installed with [{trial.extra}] and used, {len(runs)} ways: {seconds:.0f} s")


def check_tag(tag: str) -> None:
    """Exit with an error if the tag is not the version, or the changelog has no date for it."""
    version = declared_version()
    if tag != f"v{version}":
        raise SystemExit(f"the tag must be v{version}, as in src/phocas/__init__.py: got {tag}")
    heading = rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$"
    if not re.search(heading, (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE):
        raise SystemExit(f"CHANGELOG.md must have a heading ## [{version}] - and its date")


def main() -> None:
    """Build and test every extra, or check a tag."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tag", help="only check that this tag matches the version")
    tag = parser.parse_args().tag
    if tag is not None:
        check_tag(tag)
        return
    if untried():
        raise SystemExit(f"every extra must be tried: tools/release.py lacks {sorted(untried())}")
    wheel = build()
    with ThreadPoolExecutor(max_workers=2) as lanes:
        for done in [lanes.submit(try_out, wheel, each) for each in ENVIRONMENTS]:
            done.result()


if __name__ == "__main__":
    main()
