"""Rules on the terminal: a table with guarantees and costs, and the description of one."""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phocas.attacks import ATTACKS, Attack
from phocas.attacks.base import SELF
from phocas.attacks.function import OFFERED
from phocas.experiments.benchmark import published_costs
from phocas.report.tables import WIDTH, print_facts
from phocas.rules import PRE_AGGREGATORS, RULES, Median, PreAggregator, Rule
from phocas.rules.base import Bounded
from phocas.specs import (
    Spec,
    is_place,
    keywords_of,
    place_of,
    split,
    split_arguments,
    split_place,
    unknown,
)

if TYPE_CHECKING:
    from phocas.rules.base import Stage

_INDENT = "    "


@dataclass(frozen=True)
class Description:
    """The parts of a rule's docstring."""

    summary: str
    """The first line."""
    body: tuple[str, ...]
    """The paragraphs without a heading."""
    breakdown: str | None
    """The paragraph after ``Breakdown:``."""
    reference: str | None
    """The paragraph after ``Reference:``."""
    example: str | None
    """The doctest."""


def describe(cls: Any) -> Description:
    """Split a docstring into its first line, its body and the parts with a heading.

    >>> describe(RULES["krum"]).reference.startswith("Blanchard et al.")
    True
    """
    text: str = inspect.getdoc(cls) or str(getattr(cls, "__name__", cls))
    summary, *rest = text.replace("``", "").split("\n\n")
    found: dict[str, str] = {}
    body = []
    for part in rest:
        heading, colon, text = part.partition(":")
        if part.startswith(">>>"):
            found["example"] = part
        elif colon and heading in ("Breakdown", "Reference"):
            found[heading.lower()] = " ".join(text.split())
        else:
            body.append(part)
    return Description(
        " ".join(summary.split()),
        tuple(body),
        found.get("breakdown"),
        found.get("reference"),
        found.get("example"),
    )


def entries(m: int) -> list[dict[str, Any]]:
    """Return the facts about every rule and pre-aggregator, for a table or for JSON."""
    found = []
    for cls in (*RULES.values(), *PRE_AGGREGATORS.values()):
        rule = _example(cls, m)
        found.append(
            {
                "name": cls.name,
                "kind": _kind(cls),
                "parameters": _parameters(cls),
                "summary": describe(cls).summary,
                "told": None if rule is None else str(rule),
                "survives": None if rule is None else dataclasses.asdict(rule.tolerates(m)),
                "cost": published_costs().ratios.get(cls.name),
            }
        )
    return found


def _example(cls: type[Stage], m: int) -> Rule | None:
    """Return a rule with the largest b; if it needs other parameters, that of the cost table."""
    if cls.largest_b(m) < 0:
        return None
    if not _more_than_b(cls.name):
        return read_rule(cls.name, m)
    try:
        return read_rule(published_costs().rules[cls.name], m)
    except (KeyError, ValueError):  # not timed, or with more workers than m
        return None


def print_rules(m: int) -> None:
    """Print every rule with its parameters, guarantee and cost, and a line that describes it."""
    line = "{:<17}  {:<31}  {:<14}  {:>5}".format
    for kind, table in (("rule", RULES), ("pre-aggregator", PRE_AGGREGATORS)):
        print(line(kind, "parameters", f"tolerates of {m}", "cost"))
        for entry in entries(m):
            if entry["kind"] != kind:
                continue
            told = textwrap.shorten(table[entry["name"]].parameters(), 31, placeholder=" ...")
            cost = "" if entry["cost"] is None else f"{entry['cost']:.1f}"
            print(line(entry["name"], told, _survival(entry["survives"]), cost).rstrip())
            print(textwrap.fill(_INDENT + entry["summary"], WIDTH, subsequent_indent=_INDENT))
        print()
    costs = published_costs()
    print_facts(
        {
            "tolerates": (
                f"Byzantine values in every column, or Byzantine rows, of {m} workers, with the"
                " largest b; a pre-aggregator together with the median, buckets of two"
            ),
            "cost": (
                f"CPU time divided by that of torch.mean, {costs.m} x {costs.d:,} values; a"
                " pre-aggregator together with the median"
            ),
            "use": "phocas:b=6, or nnm:b=6|phocas:b=6; phocas rules NAME describes one",
        }
    )


def read_rule(text: str, m: int, b: int | None = None) -> Rule:
    """Read a rule; a step without b gets ``b``, or the largest that m workers allow.

    Pre-aggregators alone are followed by the median.

    >>> print(read_rule("nnm|phocas", 20), read_rule("nnm", 20, b=6))
    nnm:b=9|phocas:b=9 nnm:b=6|median
    """
    steps = _steps(text)
    if _kind_of(steps[-1]) == "pre-aggregator":
        steps.append(Median.name)
    lacking = [_lacks_b(step) for step in steps]
    if b is not None and not any(lacking):
        raise ValueError(f"--b is for a rule without b: got {text} and b={b}")

    def told(number: int) -> Rule:
        words = [
            f"{step}{':' if _bare(step) else ','}b={number}" if lacks else step
            for step, lacks in zip(steps, lacking, strict=True)
        ]
        rule = RULES.parse("|".join(words))
        rule.check(m)
        return rule

    if b is not None or not any(lacking):
        return told(b or 0)
    for number in range((m - 1) // 2, 0, -1):
        try:
            return told(number)
        except ValueError:
            continue
    return told(0)


def about(text: str, m: int, b: int | None = None) -> dict[str, Any]:
    """Return the description of a rule: its steps, and its guarantee with m workers."""
    steps = _steps(text)
    needs = [need for step in steps for need in _more_than_b(step)]
    rule = None if needs else read_rule(text, m, b)
    classes = [_found(step) for step in steps]
    return {
        "rule": text if rule is None else str(rule),
        "workers": m,
        "steps": [
            {
                "name": cls.spelling() if _is_stage(cls) else place_of(cls),
                "kind": _kind(cls),
                "aliases": list(cls.aliases) if _is_stage(cls) else [],
                "parameters": _parameters(cls),
                "largest_b": cls.largest_b(m) if _is_stage(cls, Bounded) else None,
                "condition": cls.condition if _is_stage(cls, Bounded) else None,
                "cost": published_costs().ratios.get(getattr(cls, "name", "")),
                **dataclasses.asdict(describe(cls)),
            }
            for cls in classes
        ],
        "needs": needs,
        "promise": None if rule is None else _promise(rule, m),
    }


def print_rule(known: dict[str, Any]) -> None:
    """Print what :func:`about` returns."""
    for step in known["steps"]:
        _print_text(step, step["kind"])
        print_facts(
            {
                "parameters": _listed(step["parameters"]),
                "b": _limits(step, known["workers"]),
                "also": ", ".join(step["aliases"]),
                "breakdown": step["breakdown"] or "",
                "reference": step["reference"] or "",
                "cost": _said_cost(step),
            }
        )
        print()
    _print_promise(known)


def _wrapped(paragraph: str) -> str:
    """Wrap prose; indented lines, as of formulas, are wrapped one by one."""
    if "\n " not in f"\n{paragraph}":
        return textwrap.fill(paragraph, WIDTH)
    lines: list[str] = []
    for line in paragraph.splitlines():
        if paragraph.startswith("Args:") and line.startswith(2 * _INDENT):
            lines[-1] += f" {line.strip()}"  # the sentence about a parameter goes on
        else:
            lines.append(line)
    margins = [" " * (len(line) - len(line.lstrip())) + _INDENT for line in lines]
    return "\n".join(
        textwrap.fill(line, WIDTH, subsequent_indent=margin)
        for line, margin in zip(lines, margins, strict=True)
    )


def _print_promise(known: dict[str, Any]) -> None:
    m, promise = known["workers"], known["promise"]
    if promise is None:
        needs = ", ".join(known["needs"])
        print_facts({"guarantee": f"depends on {needs}, which {known['rule']} does not give"})
        return
    print(f"{known['rule']} with {m} workers")
    distances = ", ".join(
        f"{each['spreads']:.2f} with {each['wrong']} Byzantine"
        for each in promise["distances"]
        if each["spreads"] is not None
    )
    print_facts(
        {
            "tolerates": _survives(promise["survives"]),
            "distance": (
                f"from the honest mean at most, in standard deviations (RMS): {distances}"
                if distances and promise["proven"]
                else ""
            ),
            "proof": "" if promise["proven"] else "none: the rule only claims what it tolerates",
            "theorem": (
                f"Delta = {promise['delta']:.3g} with {promise['most']} Byzantine, in units of the"
                " variance V"
                if promise["delta"] is not None
                else ""
            ),
            "drops": f"{promise['expected_dropped']:.0%} of the values of an honest worker",
            "servers": promise["servers"],
            "weights": "supported" if promise["weighable"] else "not supported",
        }
    )


def _promise(rule: Rule, m: int) -> dict[str, Any]:
    survives = rule.tolerates(m)
    most = max(survives.rows, survives.values)
    servers = "one server needs all columns"
    if not rule.whole:
        servers = (
            "each column on its own: servers exchange nothing"
            if rule.columnwise
            else "servers exchange measurements of rows; the result is that of one server"
        )
    return {
        "survives": dataclasses.asdict(survives),
        "most": most,
        "proven": rule.proven or not most,
        "distances": [{"wrong": q, "spreads": rule.error_bound(m, q)} for q in sorted({0, most})],
        "delta": rule.bound(m, most),
        "expected_dropped": rule.expected(m),
        "columnwise": rule.columnwise,
        "whole": rule.whole,
        "weighable": rule.weighable,
        "servers": servers,
    }


def _steps(text: str) -> list[str]:
    return [step.strip() for step in split(text, "|")]


def _found(step: str) -> Any:
    """Return what a step names: a class, or the user's class or function."""
    name = step.partition(":")[0].strip()
    found = PRE_AGGREGATORS.find(step) if name in PRE_AGGREGATORS else None
    if found is None and name not in RULES and ":" not in step:
        raise ValueError(unknown("rule", name, [*RULES, *PRE_AGGREGATORS]))
    found = RULES.find(step) if found is None else found
    return type(found) if isinstance(found, Rule) else found


def _is_stage(found: Any, base: type = Spec) -> bool:
    return isinstance(found, type) and issubclass(found, base)


def _kind(found: Any) -> str:
    return "pre-aggregator" if _is_stage(found, PreAggregator) else "rule"


def _kind_of(step: str) -> str:
    return _kind(_found(step))


def _missing(step: str) -> set[str]:
    """Return the required parameters that the text of a step does not give.

    If the text names a rule object of the user, there are none.
    """
    place = split_place(step)
    arguments = step.partition(":")[2]
    if place is not None and place[0].partition(":")[0] not in {*RULES, *PRE_AGGREGATORS}:
        if isinstance(RULES.find(step), Rule):
            return set()
        arguments = step[len(place[0]) + 1 :]
    given = split_arguments(arguments, step)
    required = [each for each in _parameters(_found(step)) if "default" not in each]
    return {each["name"] for each in required} - set(given)


def _bare(step: str) -> bool:
    """Return whether a step has no arguments yet."""
    return ":" not in step or is_place(step)


def _lacks_b(step: str) -> bool:
    return "b" in _missing(step)


def _more_than_b(step: str) -> list[str]:
    return sorted(_missing(step) - {"b"})


def _parameters(cls: Any) -> list[dict[str, Any]]:
    """Return the parameters of a class or function; those without a default are required."""
    if not _is_stage(cls):
        return _keywords(cls, ("rng",), {"b": 0, "columnwise": False})
    return [
        {"name": field.name}
        if field.default is dataclasses.MISSING
        else {"name": field.name, "default": field.default}
        for field in dataclasses.fields(cls)
    ]


def _keywords(
    function: Any,
    hidden: Collection[str],
    more: Mapping[str, Any],
    defaults: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Return the parameters of a user's function, and those of the class that wraps it."""
    takes = {name: each for name, each in keywords_of(function).items() if name not in hidden}
    found = {name: each.default for name, each in takes.items()} | dict(defaults or {})
    found = {name: found[name] for name in takes} | {
        name: inspect.Parameter.empty if default is None else default
        for name, default in more.items()
        if name not in takes
    }
    return [
        {"name": name} if default is inspect.Parameter.empty else {"name": name, "default": default}
        for name, default in found.items()
    ]


def about_attack(text: str) -> dict[str, Any]:
    """Return the description of an attack of the table, or of the user's own.

    >>> about_attack("alie")["name"], about_attack("alie:q=3")["parameters"][0]
    ('a-little-is-enough', {'name': 'q'})
    """
    found = ATTACKS.find(text)
    found = type(found) if isinstance(found, Attack) else found
    mine = _is_stage(found)
    hidden = [name for name in OFFERED if name not in ("q", "rule")]
    return {
        "name": found.spelling() if mine else place_of(found),
        "aliases": list(found.aliases) if mine else [],
        "parameters": _parameters(found)
        if mine
        else _keywords(found, hidden, {"q": None, "who": "fixed"}, {"rule": SELF}),
        **dataclasses.asdict(describe(found)),
    }


def print_attack(known: dict[str, Any]) -> None:
    """Print what :func:`about_attack` returns."""
    _print_text(known, "attack")
    print_facts(
        {
            "parameters": _listed(known["parameters"]),
            "also": ", ".join(known["aliases"]),
            "reference": known["reference"] or "",
            "use": f"--attack {_use(known)}",
        }
    )


def _use(known: dict[str, Any]) -> str:
    required = [f"{each['name']}=..." for each in known["parameters"] if "default" not in each]
    return str(known["name"]) + (":" + ",".join(required) if required else "")


def _print_text(known: dict[str, Any], kind: str) -> None:
    article = "an" if kind == "attack" else "a"
    print(f"{known['name']}: {article} {kind}")
    print(textwrap.fill(known["summary"], WIDTH))
    for paragraph in known["body"]:
        print(f"\n{_wrapped(paragraph)}")
    print()


def _listed(parameters: list[dict[str, Any]]) -> str:
    given = [
        each["name"] + (f"={each['default']}" if "default" in each else "") for each in parameters
    ]
    return ", ".join(given) or "none"


def _survival(survives: dict[str, int] | None) -> str:
    if survives is None:
        return ""
    if survives["values"]:
        return f"{survives['values']} values"
    return f"{survives['rows']} rows" if survives["rows"] else "nothing"


def _survives(survives: dict[str, int]) -> str:
    if not any(survives.values()):
        return "nothing"
    return (
        f"{survives['rows']} Byzantine rows, and {survives['values']} Byzantine values in every"
        " column"
    )


def _limits(step: dict[str, Any], m: int) -> str:
    if step["condition"] is None:
        return ""
    if step["largest_b"] < 0:
        return f"{step['condition']}: no b is small enough for {m} workers"
    return f"{step['condition']}: at most {step['largest_b']} of {m} workers"


def _said_cost(step: dict[str, Any]) -> str:
    costs = published_costs()
    if step["cost"] is None:
        return "not measured: phocas bench --rule RULE measures it"
    return (
        f"{step['cost']:.2f} times torch.mean (processor time of {costs.rules[step['name']]},"
        f" {costs.m} x {costs.d:,}, {costs.machine['cpu']})"
    )
