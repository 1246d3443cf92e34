"""The ray engine on several hosts: network namespaces with addresses of their own.

A host has a link to a bridge, which a test slows down or cuts, and processes, which it kills.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed: pip install 'phocas[ray]'", allow_module_level=True)

BRIDGE = "phocas-br"
PATIENCE = 300.0  # seconds until a test gives up

# Other tests of this process keep their Ray on loopback, by variables that hosts must not see.
ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")} | {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "OMP_NUM_THREADS": "1",
}

DRIVER = """
import json, sys
import numpy as np, torch
from torch.nn import functional
from phocas.data import load
from phocas.engines.ray import RaySettings
from phocas.training import Trainer
from phocas.training.models import build_model

sys.path.insert(0, sys.argv[2])
from test_ray import AbsentOrStale

data = load("synthetic:train=400,test=120,side=8,noise=20")
options = dict(num_workers=6, num_servers=3, batch_size=16, rule="phocas:b=2", lr=0.1)

def make(engine, **more):
    model = build_model("mlp:hidden=16", data.shape, 10, seed=3)
    return Trainer(model, functional.cross_entropy, data, engine=engine, **options, **more)

def say(**what):
    print(json.dumps(what), flush=True)

engine = RaySettings(address=sys.argv[1], processes=6, deadline=5.0, failure_domain="node")
missing = []
with make(engine) as trainer:
    from phocas.engines.ray.session import node_address, node_id
    assert node_address() == sys.argv[1].split(":")[0], node_address()
    say(ready=[host.node for host in trainer.cluster.hosts.hosts], here=node_id(),
        servers=[process.node for process in trainer.cluster.servers.processes])
    for line in sys.stdin:
        if line.strip() == "end":
            break
        done = trainer.step()
        missing.append(done.missing)
        say(round=done.number, missing=done.missing, news=done.news, action=done.action,
            seconds=sum(done.seconds.values()))
    found = trainer.server.vector.clone()
absent = AbsentOrStale(tuple(missing), worker=0, late=-1)
with make("local", attack=absent) as local:
    list(local.rounds(len(missing)))
    say(same=bool(torch.equal(local.server.vector, found)))
"""


def run(*command: str) -> None:
    """Run a command as root; raise if it fails."""
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)


class Host:
    """A host: a namespace with the address 10.199.0.number."""

    def __init__(self, number: int) -> None:
        self.name, self.link = f"phocas-{number}", f"phocas-v{number}"
        self.address = f"10.199.0.{number}"
        self.inside = ("ip", "netns", "exec", self.name)
        run("ip", "netns", "add", self.name)
        run("ip", "link", "add", self.link, "type", "veth", "peer", "eth0", "netns", self.name)
        run("ip", "link", "set", self.link, "master", BRIDGE, "up")
        run(*self.inside, "ip", "address", "add", f"{self.address}/24", "dev", "eth0")
        run(*self.inside, "ip", "link", "set", "eth0", "up")
        run(*self.inside, "ip", "link", "set", "lo", "up")
        # Ray asks for the way to the outside to find the address of a driver.
        run(*self.inside, "ip", "route", "add", "default", "dev", "eth0")

    def ray_start(self, head: Host, directory: Path) -> None:
        """Start the Ray node of this host."""
        where = ["--head", "--port=6379", f"--temp-dir={directory}", "--include-dashboard=false"]
        if head is not self:
            where = [f"--address={head.address}:6379"]
        for _ in range(3):  # on a busy machine Ray gives up before its node has started
            done = subprocess.run(
                [*self.inside, sys.executable, "-c", "from ray.scripts.scripts import main; main()",
                 "start", *where, f"--node-ip-address={self.address}", "--num-cpus=2",
                 f"--object-store-memory={128 << 20}", "--disable-usage-stats"],
                env=ENVIRONMENT, check=False, timeout=120, capture_output=True,
                text=True,
            )  # fmt: skip
            if done.returncode == 0:
                return
            self.kill()
        raise RuntimeError(done.stdout + done.stderr)

    def kill(self) -> None:
        """Kill all processes of this host."""
        found = subprocess.run(
            ["ip", "netns", "pids", self.name], capture_output=True, text=True, check=True
        )
        for process in map(int, found.stdout.split()):
            try:
                if Path(f"/proc/{process}/ns/net").samefile("/proc/self/ns/net"):
                    raise RuntimeError(f"process {process} is not of host {self.name}")
                os.kill(process, signal.SIGKILL)
            except (ProcessLookupError, FileNotFoundError):  # it has ended meanwhile
                continue

    def cut(self, *, back: bool = False) -> None:
        """Cut the link of this host, or restore it."""
        run("ip", "link", "set", self.link, "up" if back else "down")

    def slow(self, *, back: bool = False) -> None:
        """Make the link of this host slow, or fast again."""
        if back:
            run("tc", "qdisc", "del", "dev", self.link, "root")
        else:
            limits = ("rate", "500kbit", "burst", "16kbit", "latency", "500ms")
            run("tc", "qdisc", "add", "dev", self.link, "root", "tbf", *limits)


def clean() -> None:
    """Remove what a run that was killed has left."""
    for number in (1, 2, 3):
        subprocess.run(["ip", "netns", "del", f"phocas-{number}"], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", f"phocas-v{number}"], check=False, capture_output=True)
    subprocess.run(["ip", "link", "del", BRIDGE], check=False, capture_output=True)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    """Three hosts with a Ray node each; the first is the head."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("NOT TESTED: several hosts need the commands ip and tc (iproute2)")
    clean()
    try:
        run("ip", "link", "add", BRIDGE, "type", "bridge")
        run("ip", "link", "set", BRIDGE, "up")
        made = [Host(number) for number in (1, 2, 3)]
    except subprocess.CalledProcessError as error:
        clean()
        pytest.skip(
            f"NOT TESTED: several hosts need root and network namespaces: {error.stderr.strip()}"
        )
    directory = Path("/tmp") / f"phocas-ray-{os.getpid()}"
    try:
        for host in made:
            host.ray_start(made[0], directory)
        yield made
    finally:
        for host in made:
            host.kill()
        clean()
        shutil.rmtree(directory, ignore_errors=True)


class Run:
    """A training run on the first host, which takes a round when it is asked to."""

    def __init__(self, hosts: list[Host], errors: Path) -> None:
        self._errors = errors
        with errors.open("w") as to:
            self.process = subprocess.Popen(
                [*hosts[0].inside, sys.executable, "-c", textwrap.dedent(DRIVER),
                 f"{hosts[0].address}:6379", str(Path(__file__).parent)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=to, text=True,
                env=ENVIRONMENT,
            )  # fmt: skip
        self.rounds: list[dict[str, Any]] = []
        said = self._line()
        self.nodes, self.servers, self.here = said["ready"], said["servers"], said["here"]

    def _line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self._errors.read_text()
        found: dict[str, Any] = json.loads(line)
        return found

    def _ask(self, text: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{text}\n")
        self.process.stdin.flush()
        return self._line()

    def step(self) -> dict[str, Any]:
        """Take a round."""
        self.rounds.append(self._ask("round"))
        return self.rounds[-1]

    def news(self, since: int) -> list[str]:
        """Return the news of the rounds since one of them."""
        return [line for done in self.rounds[since:] for line in done["news"]]

    def until(
        self, *texts: str, since: int, rounds: int | None = None, whole: bool = False
    ) -> list[str]:
        """Take rounds until all texts were in the news, and all rows are there; return the news.

        Args:
            texts: parts of lines.
            since: the first round whose news count.
            rounds: the largest number of rounds; by default the run may take minutes.
            whole: whether the last round must have all rows.
        """
        begun, first = time.monotonic(), len(self.rounds)
        while (
            len(self.rounds) - first < (rounds or 1 << 30) and time.monotonic() - begun < PATIENCE
        ):
            done, news = self.step(), self.news(since)
            if all(any(text in line for line in news) for text in texts) and not (
                whole and done["missing"]
            ):
                return news
        raise AssertionError(
            f"expected {texts}, all rows {whole}: got {self.news(since)}, {self.rounds[-1]}"
        )

    def end(self) -> bool:
        """End the run; return whether the local engine has the same bits."""
        return bool(self._ask("end")["same"])


def test_training_survives_a_slow_link_a_cut_link_and_a_killed_host(
    hosts: list[Host], tmp_path: Path
) -> None:
    run_ = Run(hosts, tmp_path / "errors.txt")
    try:
        assert len(set(run_.nodes)) == 3
        assert all(run_.nodes.count(node) == 2 for node in run_.nodes)
        assert run_.nodes[0] == run_.servers[0] == run_.here
        assert len(set(run_.servers)) == 3
        for _ in range(3):
            assert run_.step()["missing"] == []
        hosts[2].slow()
        for _ in range(3):
            assert run_.step()["missing"] == []
        hosts[2].slow(back=True)
        cut = len(run_.rounds)
        hosts[2].cut()
        news = run_.until("its copy takes over", "is late", since=cut, rounds=2)
        # By the missing signs of life, after ``deadline``, and not after ``server_deadline``.
        taken = [line for line in news if "its copy takes over" in line]
        assert all("gave no sign of life" in line for line in taken)
        lost = run_.rounds[-1]["missing"]
        assert lost in ([1, 4], [2, 5])  # one node's
        for _ in range(3):
            assert run_.step()["missing"] == lost
        hosts[2].cut(back=True)
        run_.until("is back", "process of its own again", since=cut, whole=True)
        killed = len(run_.rounds)
        hosts[1].kill()
        news = run_.until(
            "its copy takes over", "died, and is started again", since=killed, rounds=2
        )
        taken = [line for line in news if "its copy takes over" in line]
        assert not any("did not answer" in line for line in taken)
        # Said once, when processes run on other hosts instead: perhaps after the cut already.
        run_.until("failure_domain=node does not hold any more", since=cut)
        print(*run_.news(cut), sep="\n")
        longest = [max(done["seconds"] for done in part) for part in
                   (run_.rounds[cut:killed], run_.rounds[killed:])]  # fmt: skip
        print("longest rounds in seconds:", *(f"{seconds:.1f}" for seconds in longest))
        assert all(done["action"] == "applied" for done in run_.rounds)
        assert all(len(done["missing"]) <= 2 for done in run_.rounds)
        assert run_.end()
    finally:
        with run_.process:  # closes its pipes
            run_.process.kill()
