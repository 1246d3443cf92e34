"""Attacks made of a user's function of the honest rows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from phocas.attacks.base import SELF, HonestRows, RowAttack, RunRule, Scene, Setting, Who
from phocas.provenance import defined_in
from phocas.rules import RULES, Rule
from phocas.specs import (
    build,
    check_keywords,
    keywords_of,
    normalise,
    place_of,
    read_keywords,
    write_spec,
)

OFFERED = ("own", "q", "rng", "round", "rule")
"""Parameters that a function of an attack receives if it has them, besides its own options."""
_FIELDS = ("q", "rule", "who")


@dataclass(frozen=True)
class FunctionAttack(RowAttack):
    """An attack by q workers whose rows a function computes from the honest rows.

    The function gets the honest rows, an array of shape (m - q, d) that it cannot change, and its
    own ``options``. If it has parameters of these names, it also gets ``own``, the q rows that the
    Byzantine workers would send if they were honest; ``q``; ``rng``, the generator of the round;
    ``round``; and ``rule``, the rule under attack. It returns d values, which all q workers send,
    or q rows.

    Args:
        function: returns the Byzantine values.
        q: number of Byzantine workers; None: the function's default for q.
        options: the function's other parameters by name.
        rule: the rule under attack, for a function with that parameter; ``"self"`` is the rule of
            the run.
        who: which workers are Byzantine; ``"fixed"``: workers 0 to q - 1; ``"resampled"``: q
            workers drawn in every round.

    >>> import numpy as np
    >>> from phocas.attacks import FunctionAttack, attack_rng
    >>> def opposite(honest, factor=1.0):
    ...     return -factor * honest.mean(axis=0)
    >>> rows = np.array([[9.0], [1.0], [3.0]])
    >>> attack = FunctionAttack(opposite, q=1, options={"factor": 10})
    >>> attack.corrupt(rows, rng=attack_rng(7, 0)).rows, rows.tolist()
    (array([0]), [[-20.0], [1.0], [3.0]])
    """

    name: ClassVar[str] = "function"
    function: Callable[..., Any]
    q: int | None = None  # type: ignore[assignment]  # an int after __post_init__
    options: Mapping[str, Any] | tuple[tuple[str, Any], ...] = ()
    rule: RunRule | None = None
    who: Who = "fixed"
    needs_honest = True

    def __post_init__(self) -> None:
        """Check the function and its parameters."""
        if not callable(self.function):
            raise TypeError(
                f"FunctionAttack needs a function of honest rows: got {self.function!r}"
            )
        place, takes = place_of(self.function), keywords_of(self.function)
        if self.q is None:
            q = takes["q"].default if "q" in takes else inspect.Parameter.empty
            if q is inspect.Parameter.empty:
                raise ValueError(
                    f"{place} needs q: write {place}:q=..., or FunctionAttack(..., q=)"
                )
            normalise(self, q=q)
        if "rule" not in takes and self.rule is not None:
            raise ValueError(f"{place} has no parameter rule: got rule={self.rule}")
        if "rule" in takes:
            rule = SELF if self.rule is None else self.rule
            normalise(self, rule=rule if rule == SELF else RULES.of(rule, place))
        normalise(self, options=tuple(sorted(dict(self.options).items())))
        check_keywords(self.function, dict(self.options), OFFERED)
        super().__post_init__()

    def __str__(self) -> str:
        given = {"q": self.q, **dict(self.options)}
        given |= {"rule": self.rule} if isinstance(self.rule, Rule) else {}
        given |= {"who": self.who} if self.who != "fixed" else {}
        return write_spec(place_of(self.function), given)

    @classmethod
    def adapt(cls, function: Callable[..., Any], arguments: Mapping[str, str]) -> FunctionAttack:
        """Return the attack for a function and the text of its arguments."""
        own = {key: text for key, text in arguments.items() if key in _FIELDS}
        options = {key: text for key, text in arguments.items() if key not in own}
        return build(cls, own, function=function, options=read_keywords(function, options))

    @property
    def sharded(self) -> bool:
        """Return False: the function gets whole rows."""
        return False

    def problems(self, setting: Setting) -> Iterator[str]:
        """Yield the messages of a row attack; raise ValueError if the rule rejects m workers."""
        yield from super().problems(setting)
        if isinstance(self.rule, Rule):
            self.rule.check(setting.m)

    def fill(self, scene: Scene, rows: np.ndarray) -> None:
        """Write what the function returns."""
        matrix, takes = scene.matrix, keywords_of(self.function)
        offered = {"q": len(rows), "rng": scene.rng, "round": scene.round, "rule": self.rule}
        given = {key: value for key, value in offered.items() if key in takes}
        if "own" in takes:
            given["own"] = _read_only(matrix.read(rows))
        honest = _read_only(HonestRows(matrix, rows).read())
        values = np.asarray(self.function(honest, **given, **dict(self.options)))
        shapes = ((matrix.d,), (len(rows), matrix.d))
        if values.shape not in shapes or values.dtype.kind not in "fiu":
            raise ValueError(
                f"{defined_in(self.function)}: {place_of(self.function)} must return numbers of"
                f" shape {shapes[0]} or {shapes[1]}: got {values.dtype} of shape {values.shape}"
            )
        for row, sent in zip(rows, np.broadcast_to(values, shapes[1]), strict=True):
            matrix.write([row], sent)


def _read_only(values: np.ndarray) -> np.ndarray:
    view = values.view()
    view.flags.writeable = False
    return view
