"""The cache of compiled kernels across processes; a damaged cache only costs time."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import phocas
from phocas.kernels import jit

SCRIPT = """
import sys
import numpy as np
import phocas
from phocas.kernels import jit
compiled = []
original = jit.compile_text
def counted(text, target):
    compiled.append(text)
    return original(text, target)
jit.compile_text = counted
rows = np.random.default_rng(0).normal(size=(20, 3000)).astype(np.float32)
value = phocas.aggregate(rows, "nnm:b=6|phocas:b=6")
print(len(compiled), sum(text.count("\\n") for text in compiled), float(value.sum()))
"""


def run(cache: Path | str, script: str = SCRIPT, **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "PHOCAS_CACHE": str(cache),
            **environment,
        },
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout.split()


def test_second_process_compiles_nothing(tmp_path: Path) -> None:
    first = run(tmp_path)
    files = sorted((tmp_path / "kernels").iterdir())
    assert int(first[0]) == len(files) > 2
    assert all(file.suffix == ".o" for file in files)  # no temporary file is left
    assert (tmp_path / "kernels").stat().st_mode & 0o077 == 0
    second = run(tmp_path)
    assert int(second[0]) == 0
    assert second[2] == first[2]


def test_damaged_cache_files_are_replaced(tmp_path: Path) -> None:
    first = run(tmp_path)
    files = sorted((tmp_path / "kernels").iterdir())
    good = {file: file.read_bytes() for file in files}
    files[0].write_bytes(good[files[0]][:-7])  # truncated
    files[1].write_bytes(b"")
    files[2].write_bytes(b"not mine at all" * 100)
    flipped = bytearray(good[files[3]])
    flipped[len(flipped) // 2] ^= 1
    files[3].write_bytes(flipped)
    again = run(tmp_path)
    assert int(again[0]) == 4
    assert again[2] == first[2]
    assert {file: file.read_bytes() for file in files} == good
    assert int(run(tmp_path)[0]) == 0


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="files have no owner here")
def test_cache_files_writable_by_others_are_not_executed(tmp_path: Path) -> None:
    run(tmp_path)
    file = min((tmp_path / "kernels").iterdir())
    file.chmod(0o666)
    assert jit._read(file) is None
    assert int(run(tmp_path)[0]) == 1
    assert file.stat().st_mode & 0o022 == 0


def test_read_only_cache_folder_only_disables_the_cache(tmp_path: Path) -> None:
    obstacle = tmp_path / "file"
    obstacle.write_text("in the way")
    first = run(obstacle)
    assert int(first[0]) > 2
    assert run(obstacle)[2] == first[2]
    assert run("/proc/nowhere")[2] == first[2]
    # A folder is in the place of a cache file.
    run(tmp_path)
    file = min((tmp_path / "kernels").iterdir())
    file.unlink()
    file.mkdir()
    assert run(tmp_path)[2] == first[2]
    assert not [f for f in (tmp_path / "kernels").iterdir() if f.suffix != ".o"]


def test_missing_home_folder_only_disables_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PHOCAS_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def homeless(_: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", homeless)
    # 23 rows are used in no other test of float64, so the kernel is not compiled yet.
    rows = np.arange(46.0).reshape(23, 2)
    np.testing.assert_array_equal(phocas.TrimmedMean(b=4)(rows), [22.0, 23.0])


def test_cache_folder_follows_environment_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHOCAS_CACHE", "/a")
    assert jit.cache_folder() == Path("/a/kernels")
    monkeypatch.setenv("PHOCAS_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert jit.cache_folder() == Path("/b/phocas/kernels")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert jit.cache_folder() == Path.home() / ".cache/phocas/kernels"


def test_cached_code_is_bound_to_its_name(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    file = tmp_path / "x.o"
    jit._write(file, b"code")
    assert file.read_bytes() == hashlib.sha256(b"x.o" + b"code").digest() + b"code"
    assert jit._read(file) == b"code"
    assert jit._read(tmp_path / "missing") is None
    assert jit._read(file.rename(tmp_path / "y.o")) is None


def test_cached_code_under_another_name_is_compiled_again(tmp_path: Path) -> None:
    script = SCRIPT.replace("nnm:b=6|phocas:b=6", "{rule}")
    median = run(tmp_path, script.replace("{rule}", "median"))
    known = set((tmp_path / "kernels").iterdir())
    mean = run(tmp_path, script.replace("{rule}", "mean"))
    (added,) = set((tmp_path / "kernels").iterdir()) - known
    assert mean[2] != median[2]
    for file in known:
        file.write_bytes(added.read_bytes())
    again = run(tmp_path, script.replace("{rule}", "median"))
    assert int(again[0]) == len(known)
    assert again[2] == median[2]


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="folders have no owner here")
@pytest.mark.parametrize("mode", [0o770, 0o1777])
def test_cache_folder_writable_by_others_is_not_used(tmp_path: Path, mode: int) -> None:
    first = run(tmp_path)
    folder = tmp_path / "kernels"
    before = {file: file.read_bytes() for file in folder.iterdir()}
    folder.chmod(mode)
    again = run(tmp_path)
    assert again[0] == first[0]
    assert again[2] == first[2]
    assert {file: file.read_bytes() for file in folder.iterdir()} == before


def test_symbolic_links_in_the_cache_are_not_followed(tmp_path: Path) -> None:
    first = run(tmp_path)
    folder = tmp_path / "kernels"
    # A cache file that is a symbolic link, though its target is valid.
    file = min(folder.iterdir())
    file.symlink_to(file.rename(tmp_path / "elsewhere"))
    assert jit._read(file) is None
    assert int(run(tmp_path)[0]) == 1
    assert not file.is_symlink()
    # A cache folder that is a symbolic link.
    other = tmp_path / "other"
    other.mkdir()
    (other / "kernels").symlink_to(folder)
    assert run(other)[0] == first[0]
    # A temporary name that is a symbolic link is not written through.
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (folder / f"z.o.{os.getpid()}.tmp").symlink_to(victim)
    jit._write(folder / "z.o", b"code")
    assert victim.read_text() == "mine"


@pytest.mark.parametrize(("m", "lines"), [(20, 1200), (128, 8000)])
def test_first_use_compiles_little(tmp_path: Path, m: int, lines: int) -> None:
    """The time of the first use grows with the lines of LLVM IR: 0.3 s for 20 rows, 2 s for 128."""
    script = SCRIPT.replace("size=(20", f"size=({m}").replace("nnm:b=6|", "")
    kernels, written, _ = run(tmp_path, script)
    assert int(kernels) == 2
    assert 100 < int(written) < lines
