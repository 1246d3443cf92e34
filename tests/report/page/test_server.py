"""The server of the live HTML report over real HTTP."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.report.page.scenes import SMALL, embedded_data, guard_report

from phocas.experiments.config import make_config
from phocas.experiments.results import Results
from phocas.experiments.runner import execute
from phocas.files import write_atomically
from phocas.report.page.server import PageServer

SECONDS = 120  # for an answer that takes milliseconds where nothing else runs


@pytest.fixture
def results(tmp_path: Path) -> Path:
    path = tmp_path / "results.sqlite"
    execute(make_config({**SMALL, "rounds": 5, "results": str(path)}))
    return path


@pytest.fixture
def server(results: Path) -> Iterator[PageServer]:
    yield from running(results)


def running(path: Path) -> Iterator[PageServer]:
    with PageServer(path) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(
    server: PageServer, path: str, method: str = "GET", headers: dict[str, str] | None = None
) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(server.server_name, server.server_port, timeout=SECONDS)
    connection.request(method, path, headers=headers or {})
    return connection.getresponse()


def events(response: http.client.HTTPResponse) -> Iterator[tuple[str, str, Any]]:
    found: dict[str, str] = {}
    while line := response.readline().decode():
        name, colon, value = line.rstrip("\n").partition(": ")
        if colon and name:
            found[name] = value
        elif "event" in found:
            yield found["id"], found["event"], json.loads(found["data"])
            found = {}


def test_the_report_is_served_with_a_strict_security_policy(server: PageServer) -> None:
    response = ask(server, "/")
    page = response.read().decode()
    assert response.status == 200
    assert [run["done"] for run in embedded_data(page)["runs"]] == [5]
    assert 'data-source="stream"' in page
    said = response.headers["Content-Security-Policy"]
    assert said.startswith("default-src 'none'; script-src 'sha256-")
    assert "frame-ancestors 'none'" in said
    assert "unsafe" not in said
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert response.headers["Cache-Control"] == "no-store"
    assert "Python" not in response.headers["Server"]


@pytest.mark.parametrize(
    "path",
    [
        "/results.sqlite",
        "/../results.sqlite",
        "//etc/passwd",
        "/..%2f..%2fetc/passwd",
        "/events/../x",
        "/index.html",
        "file:///etc/passwd",
        "/favicon.ico",
    ],
)
def test_other_paths_are_not_found(server: PageServer, path: str) -> None:
    response = ask(server, path)
    assert response.status == 404
    assert response.read() == b"Not Found\n"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"])
def test_methods_other_than_get_are_rejected(server: PageServer, method: str) -> None:
    before = server.feed.path.read_bytes()
    assert ask(server, "/", method).status == 501
    assert server.feed.path.read_bytes() == before


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("evil.example", 403),
        ("evil.example:8765", 403),
        ("", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost:1234", 200),
        ("[::1]:8765", 200),
    ],
)
def test_requests_for_a_foreign_host_are_rejected(
    server: PageServer, host: str, status: int
) -> None:
    assert ask(server, "/", headers={"Host": host}).status == status


def test_malformed_requests_do_not_stop_the_server(server: PageServer) -> None:
    for text in (b"\x00\xff\xfe\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET " + b"a" * 70000, b""):
        with socket.create_connection(
            (server.server_name, server.server_port), timeout=SECONDS
        ) as raw:
            raw.sendall(text)
            raw.shutdown(socket.SHUT_WR)
            raw.recv(100)
    assert ask(server, "/").status == 200


def test_a_change_is_sent_to_all_listeners(server: PageServer) -> None:
    page = embedded_data(ask(server, "/").read().decode())
    streams = [events(ask(server, f"/events?after={page['version']}")) for _ in range(10)]
    with Results(server.feed.path) as results:
        run = results.begin(make_config({"results": str(server.feed.path)}), {}, {})
    for stream in streams:
        _, kind, changed = next(stream)
        assert (kind, changed["runs"][0]["id"]) == ("changed", run)
        assert "command" in changed["runs"][0]


def test_late_and_returning_listeners_get_all_data(server: PageServer) -> None:
    for after in ("", "?after=", "?after=0-0", "?after=%00", "?path=/etc/passwd"):
        _, kind, data = next(events(ask(server, f"/events{after}")))
        assert (kind, len(data["runs"])) == ("whole", 1)
    version, _, _ = next(events(ask(server, "/events")))
    response = ask(server, "/events", headers={"Last-Event-ID": version})
    assert response.status == 200  # and there is nothing to tell
    assert response.readline() == b"retry: 1000\n"
    _, kind, _ = next(events(ask(server, "/events", headers={"Last-Event-ID": "old-7"})))
    assert kind == "whole"


def test_the_number_of_streams_is_bounded(
    server: PageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phocas.report.page.server._STREAMS", 2)
    monkeypatch.setattr("phocas.report.page.server._ALIVE_SECONDS", 0.05)
    first, second = ask(server, "/events"), ask(server, "/events")
    assert (first.status, second.status) == (200, 200)
    assert ask(server, "/events").status == 503
    assert ask(server, "/").status == 200
    first.close()
    deadline = time.monotonic() + SECONDS
    while ask(server, "/events").status == 503:
        assert time.monotonic() < deadline


def test_a_missing_file_is_reported_until_it_returns(server: PageServer) -> None:
    stream = events(ask(server, "/events"))
    assert next(stream)[1] == "whole"
    kept = server.feed.path.read_bytes()
    for name in ("", "-wal", "-shm"):
        server.feed.path.with_name(server.feed.path.name + name).unlink(missing_ok=True)
    _, kind, words = next(stream)
    assert kind == "problem"
    assert "there is no results file" in words
    write_atomically(server.feed.path, kept)
    assert next(stream)[1:] == ("problem", None)


def test_changes_of_a_guard_report_are_sent(tmp_path: Path) -> None:
    path = tmp_path / "guard.json"
    path.write_text(json.dumps(guard_report()))
    for server in running(path):
        stream = events(ask(server, "/events"))
        assert next(stream)[2]["guards"][0]["steps"] == 120
        partial = path.with_suffix(".part")
        partial.write_text(json.dumps({**guard_report(), "steps": 121}))
        partial.replace(path)
        _, kind, changed = next(stream)
        assert (kind, changed["guards"][0]["steps"]) == ("changed", 121)


def test_a_port_in_use_is_rejected(server: PageServer) -> None:
    with pytest.raises(ValueError, match=r"port \d+: Address already in use; --port 0 takes"):
        PageServer(server.feed.path, port=server.server_port)
