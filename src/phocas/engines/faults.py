"""Scripts of faults: which fault strikes which worker or server in which round.

A script has one fault per line, and comments after ``#``. Rounds count from 1, as in all output:

    kill:round=7,worker=3            # SIGKILL in mid-round
    delay:round=9,worker=2,seconds=5
    nan:round=12,worker=0
    kill:round=15,server=1

``kill``, ``hang``, ``delay`` and ``raise`` strike the process, with all workers in it. The other
faults change one worker's row before the servers get it. Every fault strikes once: if the row is
requested again for the same round, the row is correct. With asynchronous training, not every worker
computes in every round: a fault strikes with the worker's next row.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from phocas.seeds import Stream, generator
from phocas.settings import at_least
from phocas.specs import Spec, Table, checks, count, positive

Slice = npt.NDArray[np.floating]


class InjectedError(RuntimeError):
    """The error that the fault ``raise`` raises in a worker."""


@dataclass(frozen=True)
class Fault(Spec):
    """One fault, of a worker or of a server, in a round (from 1)."""

    round: int = field(metadata=checks(at_least(1)))
    worker: int | None = field(default=None, metadata=checks(count))
    server: int | None = field(default=None, metadata=checks(count))

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.worker is None) == (self.server is None):
            raise ValueError(f"{self.name} needs a worker or a server, and not both: got {self}")


class ProcessFault(Fault):
    """A fault of a whole process, at the beginning of its work in a round."""

    @abstractmethod
    def strike(self) -> None:
        """Apply the fault to the process that calls this method."""


class RowFault(Fault):
    """A fault of one worker's row, applied to each server's slice of the row."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.worker is None:
            raise ValueError(f"{self.name} changes a worker's row: got server={self.server}")

    @abstractmethod
    def change(self, values: Slice, before: Slice | None, start: int) -> Any:
        """Return the values that the worker sends instead of a slice of its row.

        Args:
            values: the slice.
            before: the slice that the worker sent in the round before, if there is one.
            start: the first column of the slice.
        """


@dataclass(frozen=True)
class Kill(ProcessFault):
    """Kill the process with SIGKILL."""

    name: ClassVar[str] = "kill"

    def strike(self) -> None:
        """Send SIGKILL to this process."""
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Hang(ProcessFault):
    """Block the process for ever."""

    name: ClassVar[str] = "hang"

    def strike(self) -> None:
        """Wait for an event that never happens."""
        threading.Event().wait()


@dataclass(frozen=True)
class Delay(ProcessFault):
    """Delay the process by some seconds."""

    seconds: float = field(default=1.0, metadata=checks(positive))

    name: ClassVar[str] = "delay"

    def strike(self) -> None:
        """Sleep."""
        time.sleep(self.seconds)


@dataclass(frozen=True)
class Raise(ProcessFault):
    """Raise an exception in the process of a worker."""

    name: ClassVar[str] = "raise"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.worker is None:
            raise ValueError("raise is a worker's fault; a server that fails is a kill")

    def strike(self) -> None:
        """Raise the error."""
        raise InjectedError(str(self))


@dataclass(frozen=True)
class NaN(RowFault):
    """Send a row of NaN."""

    name: ClassVar[str] = "nan"

    def change(self, values: Slice, *_: object) -> Any:
        """Return a slice of NaN."""
        return np.full_like(values, np.nan)


@dataclass(frozen=True)
class Corrupt(RowFault):
    """Send normal noise of a scale, seeded by the worker, the round and the column."""

    scale: float = field(default=1e3, metadata=checks(positive))

    name: ClassVar[str] = "corrupt"

    def change(self, values: Slice, before: Slice | None, start: int) -> Any:  # noqa: ARG002
        """Return a slice of normal noise."""
        rng = generator(Stream.FAULT, self.round, self.worker or 0, start)
        return (self.scale * rng.standard_normal(values.shape)).astype(values.dtype)


@dataclass(frozen=True)
class WrongShape(RowFault):
    """Send one value too few to every server."""

    name: ClassVar[str] = "shape"

    def change(self, values: Slice, *_: object) -> Any:
        """Return the slice without its last value."""
        return values[:-1]


@dataclass(frozen=True)
class WrongType(RowFault):
    """Send values of another floating-point type."""

    name: ClassVar[str] = "dtype"

    def change(self, values: Slice, *_: object) -> Any:
        """Return the slice as float64 if it is float32, else as float32."""
        return values.astype(np.float32 if values.dtype == np.float64 else np.float64)


@dataclass(frozen=True)
class Stale(RowFault):
    """Send the row of the round before again."""

    name: ClassVar[str] = "stale"

    def change(self, values: Slice, before: Slice | None, start: int) -> Any:  # noqa: ARG002
        """Return the slice of the round before, or zeros in the first round."""
        return np.zeros_like(values) if before is None else before


def strike(faults: Iterable[Fault]) -> None:
    """Apply process faults (kill, hang, delay, raise) to the process that calls this function."""
    for fault in faults:
        if isinstance(fault, ProcessFault):
            fault.strike()


FAULTS: Table[Fault] = Table(
    "fault", [Kill, Hang, Delay, Raise, NaN, Corrupt, WrongShape, WrongType, Stale]
)


class FaultScript:
    """The faults of a run. :meth:`take` returns each of them once.

    >>> script = FaultScript.parse("kill:round=7,worker=3  # in mid-round")
    >>> script.take(7, workers=range(2, 4))
    [Kill(round=7, worker=3, server=None)]
    >>> script.take(7, workers=range(2, 4))
    []
    """

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self.faults = list(faults)
        self._waiting = list(self.faults)

    @property
    def struck(self) -> list[Fault]:
        """The faults that :meth:`take` has returned."""
        return [fault for fault in self.faults if fault not in self._waiting]

    @classmethod
    def of(cls, faults: FaultScript | str | Sequence[str]) -> FaultScript:
        """Return a new script with the faults of another one, or of a text."""
        return cls(faults.faults) if isinstance(faults, FaultScript) else cls.parse(faults)

    @classmethod
    def parse(cls, text: str | Sequence[str]) -> FaultScript:
        """Read a script; errors name the line."""
        lines = text.splitlines() if isinstance(text, str) else text
        faults = []
        for number, line in enumerate(lines, 1):
            content = line.partition("#")[0].strip()
            if content:
                try:
                    faults.append(FAULTS.parse(content))
                except (ValueError, TypeError) as error:
                    raise ValueError(f"line {number}: {error}") from None
        return cls(faults)

    def check(self, num_workers: int, num_servers: int) -> None:
        """Raise ValueError for faults of workers or servers that do not exist."""
        for fault in self.faults:
            for who, number, limit in (
                ("worker", fault.worker, num_workers),
                ("server", fault.server, num_servers),
            ):
                if number is not None and number >= limit:
                    raise ValueError(f"{who}s are 0 to {limit - 1}: got {fault}")

    def take(
        self,
        round: int,
        *,
        workers: Iterable[int] = (),
        server: int | None = None,
        late: bool = False,
    ) -> list[Fault]:
        """Return the faults that strike in a round, each only once.

        Args:
            round: the round, from 1.
            workers: the workers that are asked.
            server: the server that is asked.
            late: whether to return faults of earlier rounds, too.
        """
        who = set(workers)
        found = [
            fault
            for fault in self._waiting
            if (fault.round == round or (late and fault.round < round))
            and (fault.worker in who if fault.worker is not None else fault.server == server)
        ]
        self._waiting = [fault for fault in self._waiting if fault not in found]
        return found

    def __str__(self) -> str:
        return "\n".join(map(str, self.faults))


def random_script(
    rng: np.random.Generator,
    *,
    rounds: int,
    num_workers: int,
    most: int,
    kinds: Sequence[str] = ("delay", "raise", "nan", "corrupt", "shape", "dtype", "stale"),
    seconds: float = 1.0,
) -> FaultScript:
    """Draw a script with 0 to ``most`` faults per round, each of another worker."""
    unknown_kinds = [kind for kind in kinds if kind not in FAULTS]
    if unknown_kinds:
        FAULTS.parse(unknown_kinds[0])
    faults: list[Fault] = []
    for number in range(1, count("random_script", "rounds", rounds) + 1):
        struck = rng.permutation(num_workers)[: rng.integers(0, most + 1)]
        for worker in struck.tolist():
            kind = FAULTS[kinds[int(rng.integers(len(kinds)))]]
            faults.append(
                Delay(number, worker, seconds=seconds) if kind is Delay else kind(number, worker)
            )
    return FaultScript(faults)
