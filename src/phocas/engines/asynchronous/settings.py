"""The settings of training without waiting, which every engine that can do it has."""

from __future__ import annotations

from dataclasses import dataclass

from phocas.engines.asynchronous.policies import parse_policy
from phocas.engines.asynchronous.policy import Policy
from phocas.settings import Settings, at_least, setting


@dataclass(frozen=True, kw_only=True)
class AsynchronousSettings(Settings):
    """Whether anybody waits, and if not, what is done with rows."""

    asynchronous: Policy | str | None = setting(
        None, "nobody waits: buffers=15, zeno:validation=128, kardam:b=6 or mean"
    )
    max_staleness: int = setting(
        1000, "steps after which a row comes too late, where nobody waits", at_least(0)
    )

    def policy(self) -> Policy | None:
        """Return what is done with rows that come alone, or None where rounds are waited for."""
        said = self.asynchronous
        return parse_policy(said) if isinstance(said, str) else said
