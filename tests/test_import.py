"""What it costs to have the package: what it imports, memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import phocas


def python(code: str, *options: str) -> str:
    done = subprocess.run(
        [sys.executable, *options, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_is_light() -> None:
    loaded = python("import sys, phocas; print(*sys.modules)").split()
    heavy = {"torch", "ray", "flwr", "typer", "rich", "pydantic", "matplotlib", "plotly", "scipy"}
    assert "phocas" in loaded
    assert not heavy & set(loaded)


def test_aggregating_arrays_imports_nothing_more() -> None:
    code = (
        "import sys, numpy as np, phocas;"
        "phocas.aggregate(np.ones((7, 9)), 'nnm:b=1|krum:b=1'); print(*sys.modules)"
    )
    assert "torch" not in python(code).split()


def test_import_loads_few_modules() -> None:
    """Their number stands for the time: 79 besides those of numpy and llvmlite, 0.1 s."""
    code = "import sys, numpy, llvmlite.binding; before = set(sys.modules); import phocas;"
    loaded = python(code + "print(*(set(sys.modules) - before))").split()
    assert len(loaded) <= 110


def test_a_plain_run_does_without_the_compiler_of_torch() -> None:
    """Which torch imports for any optimizer, and which takes longer than torch itself."""
    code = (
        "import sys; from phocas.training import Trainer;"
        "trainer = Trainer('mlp', data='synthetic:train=60,test=20', rule='median', num_workers=3);"
        "list(trainer.rounds(2)); trainer.evaluate(); print(*sys.modules)"
    )
    loaded = python(code).split()
    assert "torch" in loaded
    assert not {"torch._dynamo", "sympy"} & set(loaded)


def test_every_public_name_exists() -> None:
    import phocas

    assert sorted(phocas.__all__) == sorted(set(phocas.__all__))
    for name in phocas.__all__:
        assert hasattr(phocas, name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule", ["phocas:b=6", "median", "krum:b=6", "nnm:b=6|phocas:b=6", "geometric-median"]
)
def test_no_copy_of_the_matrix(rule: str) -> None:
    """Peak memory above input and output is at most 64 MB for a contiguous (20, 10M) input."""
    code = f"""
import resource
import numpy as np, phocas
small = np.ones((20, 1000), np.float32)
phocas.aggregate(small, {rule!r})
rows = np.random.default_rng(0).random((20, 10_000_000), dtype=np.float32)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
value = phocas.aggregate(rows, {rule!r})
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print((after - before) * 1024 - value.nbytes)
"""
    assert int(python(code)) <= 64 << 20


def test_no_copy_of_a_smaller_matrix() -> None:
    code = """
import resource
import numpy as np, phocas
phocas.aggregate(np.ones((20, 1000), np.float32), "phocas:b=6")
rows = np.ones((20, 1_500_000), np.float32)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
value = phocas.aggregate(rows, "phocas:b=6")
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print((after - before) * 1024 - value.nbytes)
"""
    assert int(python(code)) <= 32 << 20


def test_rooms_that_need_more_load_when_asked_for() -> None:
    program = (
        "import sys, phocas; assert 'torch' not in sys.modules;"
        "phocas.integrations.ddp.protect; assert 'torch' in sys.modules;"
        "phocas.integrations.fsdp.protect, phocas.integrations.watch"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = phocas.nothing


def test_a_command_says_what_to_install_before_it_runs(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None; sys.argv = ['phocas', 'reproduce', 'mnist'];"
        "from phocas.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == "phocas: this command needs matplotlib: pip install 'phocas[report]'\n"
    assert list(tmp_path.iterdir()) == []
