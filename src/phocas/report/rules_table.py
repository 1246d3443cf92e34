"""Rules on the terminal: a table with guarantees and costs, and the description of one."""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phocas.experiments.benchmark import published_costs
from phocas.report.tables import WIDTH, print_facts
from phocas.rules import PRE_AGGREGATORS, RULES, Median, Pipeline, Rule
from phocas.rules.base import Bounded
from phocas.specs import split, split_arguments, unknown

if TYPE_CHECKING:
    from phocas.rules.base import Stage

_INDENT = "    "


@dataclass(frozen=True)
class Description:
    """The parts of a docstring."""

    summary: str
    body: tuple[str, ...]
    breakdown: str | None
    reference: str | None
    example: str | None


def describe(cls: type) -> Description:
    """Split a docstring into its first line, its body and the parts with a heading.

    >>> describe(RULES["krum"]).reference.startswith("Blanchard et al.")
    True
    """
    text = inspect.getdoc(cls) or cls.__name__
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
        rule = _told(cls, m)
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


def _told(cls: type[Stage], m: int) -> Rule | None:
    """Return the rule with the largest b; with other required parameters, as it was timed."""
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
            told = table[entry["name"]].parameters()
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
            f"{step}{',' if ':' in step else ':'}b={number}" if lacks else step
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
    classes = [_class(step) for step in steps] if rule is None else _classes(rule, len(steps))
    return {
        "rule": text if rule is None else str(rule),
        "workers": m,
        "steps": [
            {
                "name": cls.spelling(),
                "kind": _kind(cls),
                "aliases": list(cls.aliases),
                "parameters": _parameters(cls),
                "largest_b": cls.largest_b(m) if issubclass(cls, Bounded) else None,
                "condition": cls.condition if issubclass(cls, Bounded) else None,
                "cost": published_costs().ratios.get(cls.name),
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
        print(f"{step['name']}: a {step['kind']}")
        print(textwrap.fill(step["summary"], WIDTH))
        for paragraph in step["body"]:
            print(f"\n{_wrapped(paragraph)}")
        print()
        given = [
            each["name"] + (f"={each['default']}" if "default" in each else "")
            for each in step["parameters"]
        ]
        print_facts(
            {
                "parameters": ", ".join(given) or "none",
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
    lines = []
    for line in paragraph.splitlines():
        margin = " " * (len(line) - len(line.lstrip())) + _INDENT
        lines.append(textwrap.fill(line, WIDTH, subsequent_indent=margin))
    return "\n".join(lines)


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
                if distances
                else ""
            ),
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


def _classes(rule: Rule, number: int) -> list[type[Stage]]:
    """Return the classes of the first steps; a median that was added is left out."""
    steps = (*rule.stages, rule.rule) if isinstance(rule, Pipeline) else (rule,)
    return [type(step) for step in steps[:number]]


def _class(step: str) -> type[Stage]:
    name = step.partition(":")[0].strip()
    for table in (RULES, PRE_AGGREGATORS):
        if name in table:
            found: type[Stage] = table[name]
            return found
    raise ValueError(unknown("rule", name, [*RULES, *PRE_AGGREGATORS]))


def _is_ours(step: str) -> bool:
    name = step.partition(":")[0].strip()
    return name in RULES or name in PRE_AGGREGATORS


def _kind(cls: type[Stage]) -> str:
    return "rule" if issubclass(cls, Rule) else "pre-aggregator"


def _kind_of(step: str) -> str:
    return _kind(_class(step)) if _is_ours(step) else "rule"


def _missing(step: str) -> set[str]:
    """Return the required parameters that a step of this package lacks."""
    if not _is_ours(step):
        return set()
    cls = _class(step)
    given = split_arguments(step.partition(":")[2], cls.name)
    return {each["name"] for each in _parameters(cls) if "default" not in each} - set(given)


def _lacks_b(step: str) -> bool:
    return "b" in _missing(step)


def _more_than_b(step: str) -> list[str]:
    return sorted(_missing(step) - {"b"})


def _parameters(cls: type[Stage]) -> list[dict[str, Any]]:
    """Return the parameters of a step; those without a default are required."""
    return [
        {"name": field.name}
        if field.default is dataclasses.MISSING
        else {"name": field.name, "default": field.default}
        for field in dataclasses.fields(cls)  # type: ignore[arg-type]  # every Spec is a dataclass
    ]


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
