"""Files that appear whole or not at all, with and without a name until they do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from phocas import files
from phocas.files import write_atomically, written_atomically

BOTH = pytest.mark.parametrize("named", [False, True])


@pytest.fixture(autouse=True)
def _where_files_need_names(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if request.node.callspec.params["named"]:
        monkeypatch.setattr(files, "_NUMBERED", tmp_path / "nowhere")


@BOTH
def test_what_was_there_stays_until_all_is_written(tmp_path: Path, *, named: bool) -> None:
    path, keep = tmp_path / "deep" / "result", tmp_path / "deep" / "before"
    write_atomically(path, b"old")
    with written_atomically(path, keep=keep) as file:
        file.write(b"new" * 100_000)
        file.flush()
        assert path.read_bytes() == b"old"
        assert len(list(path.parent.iterdir())) == 1 + (named or sys.platform != "linux")
        file.seek(0)
        assert file.read(3) == b"new"
    assert path.read_bytes() == b"new" * 100_000
    assert keep.read_bytes() == b"old"
    assert sorted(path.parent.iterdir()) == [keep, path]


def fail(path: Path, error: BaseException) -> None:
    with written_atomically(path) as file:
        file.write(b"new")
        raise error


@BOTH
@pytest.mark.parametrize("kind", [RuntimeError, OSError, KeyboardInterrupt])
def test_an_error_leaves_what_was_there(
    tmp_path: Path, kind: type[BaseException], *, named: bool
) -> None:
    del named
    path = tmp_path / "result"
    path.write_bytes(b"old")
    with pytest.raises(kind) as caught:
        fail(path, kind(28, "full"))
    assert [each.read_bytes() for each in tmp_path.iterdir()] == [b"old"]
    if isinstance(caught.value, OSError):
        assert caught.value.filename == str(path)


@BOTH
def test_what_another_process_of_this_number_left_is_replaced(
    tmp_path: Path, *, named: bool
) -> None:
    del named
    (tmp_path / f"result.{os.getpid()}.tmp").write_bytes(b"half of something longer")
    write_atomically(tmp_path / "result", b"whole")
    assert [each.read_bytes() for each in tmp_path.iterdir()] == [b"whole"]


@BOTH
def test_permissions_of_a_file_follow_the_umask(tmp_path: Path, *, named: bool) -> None:
    code = (
        "import os, sys; from pathlib import Path; from phocas import files; os.umask(0o027);"
        f"files._NUMBERED = Path({str(files._NUMBERED)!r});"
        "files.write_atomically(Path('result'), b'x')"
    )
    del named
    paths = os.pathsep.join(sys.path)
    subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        check=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert (tmp_path / "result").stat().st_mode & 0o777 == 0o640
