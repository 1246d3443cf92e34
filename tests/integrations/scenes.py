"""What the scripts of ranks have in common: scenes that every rank plays, and what came of them.

A scene's result goes to FOLDER/scene.rank.pt, for a test to compare over ranks and with the rule on
one process. Ranks meet in a file and talk over loopback.
"""

import os
import re
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import phocas
from phocas.attacks import SilentCorruption, attack_rng

ROOT = Path(__file__).parents[2]
WORLD = 4
LIAR = 2
HANG_TIMEOUT = 10  # s, in which all ranks turn up where one gets little of the processor
DEATH_TIMEOUT = 120

Play: TypeAlias = Callable[[int], Any]
Scene: TypeAlias = Callable[[str], list[Any]]


def environment() -> dict[str, str]:
    """Return what the process of a rank needs to know."""
    given = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), str(ROOT), given]))
    return {
        **os.environ,
        "PYTHONPATH": path,
        "PYTHONWARNINGS": "error::FutureWarning",
        "GLOO_SOCKET_IFNAME": "lo",
        "OPENBLAS_NUM_THREADS": "1",  # a process without threads can be forked
        # For bfloat16 oneDNN takes AMX, which some virtual machines announce and do not have.
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
    }


def play(
    script: Path,
    folder: Path,
    seconds: float = 900,
    *which: str,
    world: int = WORLD,
    code: int = 0,
) -> Scene:
    """Run a script of scenes on so many ranks; return what looks up the results of a scene.

    Every rank must end with the code.
    """
    with subprocess.Popen(
        [sys.executable, str(script), str(folder), *which],
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            _, errors = process.communicate(timeout=seconds)
        finally:
            with suppress(ProcessLookupError):  # where all ranks have ended
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == code, errors

    def results(name: str) -> list[Any]:
        found = [
            torch.load(path, weights_only=False)
            for rank in range(world)
            if (path := folder / f"{name}.{rank}.pt").exists()
        ]
        assert found, f"no scene of this name: {name}"
        for result in found:
            assert not isinstance(result, str), result
        return found

    return results


def start_ranks(world: int = WORLD) -> int:
    """Fork a process for each rank, and return the rank of this one.

    Ranks share what the script has imported, which takes seconds. The first process ends with them,
    with their code if it is the same for all.
    """
    import torch._dynamo.backends.debugging  # noqa: F401 - for any optimizer, and torch.compile

    processes = []
    for rank in range(world):
        process = os.fork()
        if process == 0:
            return rank
        processes.append(process)
    codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]
    if len(set(codes)) > 1 or codes[0] < 0:
        sys.exit(f"ranks ended with {codes}")
    sys.exit(codes[0])


def act(scenes: dict[str, Play], rank: int, folder: Path, world: int = WORLD) -> None:
    """Join the others and play all scenes in turn."""
    torch.set_num_threads(1)
    phocas.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        f"file://{folder}/meet",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=DEATH_TIMEOUT),
    )
    for name, run in scenes.items():
        try:
            result = run(rank)
        except Exception:  # noqa: BLE001 - it fails the test of this scene alone
            result = traceback.format_exc()
        torch.save(result, folder / f"{name}.{rank}.pt")


def scene(scenes: dict[str, Play]) -> Callable[[Play], Play]:
    """Return what adds a function to the scenes that are played."""

    def add(run: Play) -> Play:
        scenes[run.__name__] = run
        return run

    return add


def outcome(call: Callable[[], Any]) -> dict[str, str]:
    """Return the message of a call that must fail."""
    try:
        call()
    except RuntimeError as error:
        return {"said": str(error)}
    return {"said": "finished"}


def check_hung(results: list[Any], where: str = "") -> None:
    """Check that a rank that hangs raised on the others after the timeout of their group."""
    honest = [result for rank, result in enumerate(results) if rank != LIAR]
    for result in honest:
        assert where in result["said"]
        assert result["failure"] in result["said"]
        assert re.search("Timed out|closed", result["said"])
    # The first to give up closes its connections, which the others may see before their timeout.
    assert any(f"Timed out waiting {HANG_TIMEOUT}000ms" in result["said"] for result in honest)


def check_dead(results: list[Any], where: str = "") -> None:
    """Check that a rank that died raised on the others without their timeout."""
    assert len(results) == WORLD - 1
    for result in results:
        assert where in result["said"]
        assert "closed" in result["said"] or "reset" in result["said"]


class Tokens(nn.Module):
    """A head on the mean of a few tokens' vectors, of which most tokens are rare."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.tokens = nn.Embedding(512, 16)
        self.head = nn.Linear(16, 30)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        words = (512 * inputs.abs().clamp(max=0.99) ** 4).long()
        return self.head(self.tokens(words).mean(dim=1))  # type: ignore[no-any-return]


def dense_network() -> nn.Module:
    """Return a network of two layers, some of whose units are off."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 30))


def warned(run: Callable[[], Any]) -> list[str]:
    """Return the warnings of phocas in a call, in all threads."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(each.message) for each in caught if each.category is RuntimeWarning]


def check_rare(results: list[Any]) -> None:
    """See that one rank warned once of rare tokens under a rule, and nobody of anything else."""
    (said,) = [text for result in results for text in result["rare"]]
    assert said.startswith("tokens.weight: the gradients are mostly zero on most ranks")
    assert "watch(model, b=1)" in said
    for result in results:
        assert result["kept"] == result["watched"] == result["dense"] == []


def rejection(call: Callable[[], Any]) -> str:
    try:
        call()
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def with_patched(place: Any, name: str, value: Any, run: Callable[[], Any]) -> Any:
    """Make this rank lie in one place of its own memory."""
    kept = getattr(place, name)
    setattr(place, name, value)
    try:
        return run()
    finally:
        setattr(place, name, kept)


class Fault:
    """A device that corrupts the gradient of one weight, from a step on."""

    def __init__(self, begin: int, seed: int = 0, stride: int = 16) -> None:
        self.attack = SilentCorruption(worker=0, round=begin, stride=stride, first=3)
        self.seed = seed
        self.step = 0
        self.struck = 0


class _Corrupted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, fault: Fault) -> torch.Tensor:
        ctx.fault = fault
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        fault: Fault = ctx.fault
        wrong = grad.clone().view(1, -1)
        rng = attack_rng(fault.seed, fault.step)
        fault.struck += fault.attack.corrupt(wrong, rng=rng, round=fault.step).count
        return wrong.view_as(grad), None


class FaultyLinear(nn.Linear):
    """A linear layer whose weight's gradient goes through a faulty device, if there is one."""

    fault: Fault | None = None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if self.fault is not None:
            weight = _Corrupted.apply(weight, self.fault)  # type: ignore[no-untyped-call]  # torch has it so
        return functional.linear(inputs, weight, self.bias)
