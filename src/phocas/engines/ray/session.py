"""Connect to a Ray cluster, or start one on the loopback interface of this machine."""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import phocas
from phocas.engines import EngineError

CONNECT_SECONDS = 5.0
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",  # the engine reports exceptions of workers itself
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # the future default; Ray warns without it
    # Even with log_to_driver=False, Ray prints messages of its nodes on stdout, which may be JSON.
    # This skips every line. The engine reports deaths of processes itself.
    "RAY_DEDUP_LOGS_SKIP_REGEX": "^",
}
# Ray binds to all interfaces, and replaces 127.0.0.1 by the outer address of the machine, unless
# clusters are disabled. The setting has the names of other systems, but works on all of them
# (checked with `ss -tlnp`, Ray 2.55.1).
_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


class RayUnreachableError(EngineError, ConnectionError):
    """No Ray cluster was found at the address, or Ray did not start."""


class RayNotInstalledError(EngineError, ImportError):
    """Ray, an optional dependency, is not installed."""


def the_ray() -> Any:
    """Return the module ``ray``; raise RayNotInstalledError if it is missing."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise RayNotInstalledError(
            "the ray engine needs Ray: pip install 'phocas[ray]', or use --engine local"
        ) from error


def node_address() -> str:
    """Return the address of this node, as other nodes reach it."""
    return str(the_ray().util.get_node_ip_address())


def node_id() -> str:
    """Return the id of the node on which this process runs."""
    return str(the_ray().get_runtime_context().get_node_id())


def first_line(error: BaseException) -> str:
    """Return the first line of the text of an error, or of its cause in another process."""
    told = str(getattr(error, "cause", None) or error)
    return (told.strip().splitlines() or [""])[0][:200]


def check_version(version: str) -> None:
    """Raise EngineError unless this process has the trainer's version of phocas."""
    if version != phocas.__version__:
        raise EngineError(
            f"node {node_address()} has phocas {phocas.__version__}, and the trainer has {version}:"
            " install the same version everywhere"
        )


class Session:
    """A connection to Ray. :meth:`close` shuts Ray down if this session started it."""

    def __init__(
        self,
        address: str | None = None,
        *,
        cores: int | None = None,
        store_bytes: int | None = None,
    ) -> None:
        for name, value in (_QUIET if address else _QUIET | _LOOPBACK).items():
            os.environ.setdefault(name, value)
        self.ray = the_ray()
        self.ours = not self.ray.is_initialized()
        if not self.ours:
            return
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        if address is None:
            options |= {
                "address": "local",  # not another one that runs on this machine
                "num_cpus": cores,
                "object_store_memory": store_bytes,
                "include_dashboard": False,
                "_node_ip_address": "127.0.0.1",
            }
        else:
            options["address"] = reachable(address)
        with _own_signals():
            try:
                self.ray.init(**options)
            except Exception as error:  # Ray raises Exception itself if a node starts too slowly
                why = str(error).strip().partition("\n")[0] or type(error).__name__
                raise RayUnreachableError(
                    f"Ray did not start on this machine: {why.rstrip('.')}; try again, use fewer"
                    " servers or processes, or use --engine local"
                    if address is None
                    else f"Ray at {address} rejected the connection: {why}"
                ) from error

    @property
    def cores(self) -> int:
        """The number of cores of all nodes."""
        return max(1, int(self.ray.cluster_resources().get("CPU", 1)))

    def close(self) -> None:
        """Disconnect, and shut Ray down if this session started it."""
        if self.ours and self.ray.is_initialized():
            self.ray.shutdown()


def reachable(address: str) -> str:
    """Return the host:port of a Ray head node; raise RayUnreachableError if it does not answer.

    ``auto`` is the address in RAY_ADDRESS, or that of a node on this machine.
    """
    if address.startswith("ray://"):
        raise RayUnreachableError(
            f"the engine runs on a node of the cluster, not through a Ray client: got {address};"
            " start it on a node, with --address auto"
        )
    found = _look_up() if address == "auto" else address
    host, colon, port = found.rpartition(":")
    if not colon or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise RayUnreachableError(f"an address is auto or host:port: got {address!r}")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS):
            pass
    except OSError as error:
        asked = f"{address} (that is {found})" if found != address else address
        raise RayUnreachableError(
            f"no Ray at {asked}: connecting to {host} port {port} gave {error!r} within"
            f" {CONNECT_SECONDS:.0f} s; start one with: ray start --head --port={port}"
        ) from None
    if not _answers(found):
        raise RayUnreachableError(
            f"something listens at {found}, but it does not answer as a Ray head node does within"
            f" {CONNECT_SECONDS:.0f} s; if its nodes have RAY_AUTH_MODE=token, set that and their"
            " RAY_AUTH_TOKEN here too"
        )
    return found


def _look_up() -> str:
    services = importlib.import_module("ray._private.services")
    found = os.environ.get("RAY_ADDRESS") or services.find_bootstrap_address(None)
    if not found:
        nodes = sorted(services.find_gcs_addresses())
        found = nodes[0] if nodes else None
    if not found:
        raise RayUnreachableError(
            "--address auto found no Ray: RAY_ADDRESS is not set and no node runs on this machine;"
            " start one with: ray start --head, or leave --address out"
        )
    return str(found)


def _answers(address: str) -> bool:
    """Return True if a Ray head node answers within seconds, and not another program."""
    raylet = importlib.import_module("ray._raylet")
    answer: list[bool] = []

    def ask() -> None:
        try:
            client = raylet.GcsClient(address=address)
            client.internal_kv_get(b"CLUSTER_METADATA", b"cluster", timeout=CONNECT_SECONDS)
            answer.append(True)
        except Exception:  # noqa: BLE001 - any error means that no head node answers
            answer.append(False)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(CONNECT_SECONDS)
    return answer == [True]


@contextmanager
def _own_signals() -> Iterator[None]:
    """Restore the caller's signal handlers after a block: those of Ray end the process at once."""
    if threading.current_thread() is not threading.main_thread() or sys.platform == "win32":
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            if callable(handler):
                signal.signal(number, handler)
