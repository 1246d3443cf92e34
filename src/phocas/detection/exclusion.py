"""The exclusion of clients that no longer act as in their own past."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

from phocas.detection.detector import FALSE_ALARM
from phocas.specs import Spec, Table, checks, count, number

Name = TypeVar("Name", int, str)


def _chance(owner: str, parameter: str, value: object) -> float:
    """Return a number that is greater than 0 and less than 1; raise ValueError for others."""
    found = number(owner, parameter, value)
    if not 0 < found < 1:
        raise ValueError(f"{owner} needs 0 < {parameter} < 1: got {parameter}={found:g}")
    return found


@dataclass(frozen=True)
class Never(Spec):
    """Exclude no client."""

    name: ClassVar[str] = "never"


@dataclass(frozen=True)
class AfterEvidence(Spec):
    """Exclude a client once there is strong evidence that it no longer acts as in its own past.

    Args:
        rounds: the number of rounds for which a client is excluded; None excludes it for good. A
            client that is readmitted keeps its past, and the evidence against it starts from zero.
        false_alarm: the probability that any honest client is ever excluded, in 100,000 rounds.

    >>> EXCLUSIONS.parse("evidence:rounds=20")
    AfterEvidence(rounds=20, false_alarm=0.001)
    """

    name: ClassVar[str] = "evidence"
    rounds: int | None = field(default=None, metadata=checks(partial(count, minimum=1)))
    false_alarm: float = field(default=FALSE_ALARM, metadata=checks(_chance))


EXCLUSIONS: Table[Any] = Table("policy of exclusion", (Never, AfterEvidence))


class Exclusions(Generic[Name]):
    """The clients that are excluded, and the rounds since when.

    Args:
        policy: when clients are excluded.

    >>> excluded = Exclusions(AfterEvidence(rounds=1))
    >>> excluded.judge([("site-3", 1e7), ("site-4", 1.0)], clients=20)
    ['excluded for 1 round, false alarm probability 0.001: site-3']
    >>> excluded.end_round(acquit=lambda name: None), list(excluded.since)
    ([], ['site-3'])
    >>> excluded.end_round(acquit=lambda name: None), list(excluded.since)
    (['readmitted after 1 round: site-3'], [])
    """

    def __init__(self, policy: Never | AfterEvidence | None = None) -> None:
        self.policy = policy or Never()
        self.round = 0
        """The number of rounds that have ended."""
        self.since: dict[Name, int] = {}
        """The excluded clients, first excluded first, and the round of their exclusion."""

    def judge(self, e_values: Iterable[tuple[Name, float]], clients: int) -> list[str]:
        """Exclude clients by the evidence after a round, and return lines for the log.

        Args:
            e_values: clients that took part, and the e-value of each.
            clients: the number of clients that the detector compares, over which the false alarm
                probability is divided.
        """
        if not isinstance(self.policy, AfterEvidence):
            return []
        chance, rounds = self.policy.false_alarm, self.policy.rounds
        enough = clients / chance
        found = [name for name, e in e_values if e >= enough and name not in self.since]
        self.since.update(dict.fromkeys(found, self.round))
        until = "for good" if rounds is None else f"for {_rounds(rounds)}"
        said = f"excluded {until}, false alarm probability {chance:g}: {listed(found)}"
        return [said] if found else []

    def end_round(self, acquit: Callable[[Name], object]) -> list[str]:
        """Count a round, readmit the clients whose exclusion ends, and return lines for the log.

        Args:
            acquit: discards the evidence against a client.
        """
        self.round += 1
        rounds: int = getattr(self.policy, "rounds", None) or 0
        over = [n for n, since in self.since.items() if rounds and self.round - since > rounds]
        for name in over:
            del self.since[name]
            acquit(name)
        return [f"readmitted after {_rounds(rounds)}: {listed(over)}"] if over else []


def _rounds(number: int) -> str:
    return "1 round" if number == 1 else f"{number} rounds"


def listed(names: Iterable[int | str]) -> str:
    """Return names with commas between them."""
    return ", ".join(str(name) for name in names)
