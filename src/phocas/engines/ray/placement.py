"""The places of processes on the nodes of a Ray cluster."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from phocas.engines.ray.session import node_id, the_ray
from phocas.specs import unknown

_AMOUNTS = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}
_OPTIONS = (*_AMOUNTS, "resources", "label_selector")


class NoRoomError(ValueError):
    """The nodes lack the resources for the processes of one kind."""


@dataclass(frozen=True)
class Node:
    """A node of the cluster that is alive."""

    id: str
    address: str
    resources: Mapping[str, float]
    labels: Mapping[str, str]


def live_nodes() -> list[Node]:
    """Return the nodes that are alive, that of this process first."""
    here = node_id()
    found = [
        Node(
            str(node["NodeID"]),
            str(node["NodeManagerAddress"]),
            node["Resources"],
            node.get("Labels") or {},
        )
        for node in the_ray().nodes()
        if node["Alive"]
    ]
    return sorted(found, key=lambda node: (node.id != here, node.id))


def node_of(actor: Any) -> str | None:
    """Return the id of the node on which an actor runs; None if it does not run."""
    state = importlib.import_module("ray._private.state")  # the public one needs a dashboard
    found = state.actors(actor._actor_id.hex())  # noqa: SLF001 - Ray has no other name for it
    return str(found["Address"]["NodeID"]) if found.get("State") == "ALIVE" else None


def check_resources(owner: str, name: str, value: object) -> dict[str, Any]:
    """Return resources by the names of Ray's options; raise an error if Ray has no such option."""
    if not isinstance(value, Mapping):
        text = f"{owner} needs {name} as a table like {{num_gpus = 1}}: got {value!r}"
        raise ValueError(text)  # noqa: TRY004  which pydantic does not report
    for option, amount in value.items():
        if option not in _OPTIONS:
            raise ValueError(f"{name}: {unknown('resource', str(option), _OPTIONS)}")
        if (option in _AMOUNTS) == isinstance(amount, Mapping):
            kind = "a number" if option in _AMOUNTS else "a table"
            raise ValueError(f"{owner} needs {kind} for {name}.{option}: got {amount!r}")
        amounts = {} if option == "label_selector" else {option: amount}
        for each, number in (amount if option == "resources" else amounts).items():
            if isinstance(number, bool) or not isinstance(number, int | float) or not number >= 0:
                raise ValueError(f"{owner} needs {name}.{each} >= 0: got {number!r}")
    return dict(value)


@dataclass(frozen=True)
class Demand:
    """The resources that Ray reserves for each process of one kind.

    Attributes:
        kind: what the processes are called in errors.
        setting: the name of the setting that has the resources.
        options: Ray's options ``num_cpus``, ``num_gpus``, ``memory``, ``resources`` and
            ``label_selector``.

    >>> options = {"num_gpus": 1, "label_selector": {"a": "!b"}}
    >>> demand = Demand("worker", "worker_resources", options)
    >>> demand.fits(Node("1", "10.0.0.1", {"GPU": 2.0}, {"a": "c"}), {"GPU": 1.0})
    True
    >>> demand.fits(Node("1", "10.0.0.1", {"GPU": 2.0}, {"a": "b"}), {})
    False
    """

    kind: str
    setting: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def amounts(self) -> dict[str, float]:
        """The amount of each resource, by Ray's names of resources."""
        known = {name: self.options.get(option, 0) for option, name in _AMOUNTS.items()}
        found = known | dict(self.options.get("resources", {}))
        return {name: float(amount) for name, amount in found.items() if amount}

    def fits(self, node: Node, taken: Mapping[str, float]) -> bool:
        """Return whether a node has room for one more process, given what is taken there."""
        selector = self.options.get("label_selector", {})
        return all(_selects(text, node.labels.get(key)) for key, text in selector.items()) and all(
            taken.get(name, 0.0) + amount <= node.resources.get(name, 0.0) + 1e-9
            for name, amount in self.amounts.items()
        )

    def on_node(self, node: str) -> dict[str, Any]:
        """Return Ray's options that place an actor on a node, or elsewhere if the node is gone."""
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        there = strategies.NodeAffinitySchedulingStrategy(node, soft=True)
        # Ray places actors without any resource at random: so each asks for one byte.
        return {"num_cpus": 0, "memory": 1, **self.options, "scheduling_strategy": there}


def _selects(text: str, label: str | None) -> bool:
    """Return whether Ray's text selects a label: ``a``, ``!a``, ``in(a,b)``, ``!in(a,b)``."""
    wanted = text.removeprefix("!")
    if wanted.startswith("in(") and wanted.endswith(")"):
        found = label in [each.strip() for each in wanted[3:-1].split(",")]
    else:
        found = label == wanted
    return found != text.startswith("!")


@dataclass(frozen=True)
class Domains:
    """The parts of a cluster that fail together.

    Attributes:
        kind: ``process``, ``node``, or a label of nodes such as ``rack``.
    """

    kind: str

    def part(self, node: Node) -> str:
        """Return the part that a node belongs to; a node without the label is a part itself."""
        return node.id if self.kind in {"process", "node"} else node.labels.get(self.kind, node.id)

    def of(self, node: str) -> str:
        """Return the part that a node belongs to, given its id."""
        return next((self.part(each) for each in live_nodes() if each.id == node), node)

    def pick(
        self,
        nodes: Sequence[Node],
        demand: Demand,
        placed: Sequence[tuple[str, Demand]],
        wanted: int,
        avoid: Collection[str] = (),
    ) -> str:
        """Return the node for one more process: the parts in turns, and their nodes in turns.

        Args:
            nodes: the nodes.
            demand: the resources of the process.
            placed: the nodes of other processes, and the resources of these.
            wanted: the number of processes of this kind.
            avoid: nodes to use only if there are no others.

        Raises:
            NoRoomError: no node has room.
        """
        taken: dict[str, dict[str, float]] = {node.id: {} for node in nodes}
        used, parts = Counter[str](), Counter[str]()
        known = {node.id: self.part(node) for node in nodes}
        for node, other in placed:
            if node in known:
                for name, amount in other.amounts.items():
                    taken[node][name] = taken[node].get(name, 0.0) + amount
                alike = other.kind == demand.kind
                used[node] += alike
                parts[known[node]] += alike
        free = [node.id for node in nodes if demand.fits(node, taken[node.id])]
        if not free:
            raise _no_room(nodes, demand, wanted, sum(used.values()))
        return min(free, key=lambda node: (node in avoid, parts[known[node]], used[node]))

    def spread(self, rows: Sequence[int], allowed: int, demand: Demand) -> list[str]:
        """Return a node for each worker process.

        Args:
            rows: the number of rows of each process.
            allowed: the number of rows that may be missing.
            demand: the resources of each process.

        Raises:
            NoRoomError: the nodes have no room for all processes.
            ValueError: the loss of one part would cost more rows than allowed, or there is only
                one part, whose loss would cost the parameters.
        """
        nodes = live_nodes()
        chosen: list[str] = []
        for _ in rows:
            placed = [(each, demand) for each in chosen]
            chosen.append(self.pick(nodes, demand, placed, len(rows)))
        known = {node.id: self.part(node) for node in nodes}
        lost = dict.fromkeys(known.values(), 0)
        for node, count in zip(chosen, rows, strict=True):
            lost[known[node]] += count
        if self.kind != "process" and (len(lost) < 2 or max(lost.values()) > allowed):
            raise ValueError(
                f"the loss of one {self.kind} must cost at most {allowed} of {sum(rows)} rows and"
                f" no parameter: got {len(lost)} of them, with {max(lost.values())} rows in"
                f" {len(rows)} processes on one; add nodes or processes, choose a rule that"
                " tolerates more missing rows, or failure_domain=process"
            )
        return chosen

    def unmet(
        self,
        nodes: Sequence[Node],
        rows: Sequence[tuple[str, int]],
        allowed: int,
        copies: Sequence[tuple[str, str] | None],
    ) -> str:
        """Return what the loss of one part would cost beyond the guarantee; "" if nothing.

        Args:
            nodes: the nodes that are alive.
            rows: the node and the number of rows of each worker process.
            allowed: the number of rows that may be missing.
            copies: the node of each server and the node of its copy; None if it has no copy.

        >>> nodes = [Node(name, name, {}, {}) for name in "abc"]
        >>> Domains("node").unmet(nodes, [("a", 2), ("b", 2)], 2, [("a", "b")])
        ''
        >>> Domains("node").unmet(nodes, [("a", 2), ("a", 2)], 2, [("c", "c")])
        '4 of 4 rows, of which 2 may be missing, and 1 of 1 servers with their copies'
        """
        if self.kind == "process":
            return ""
        known = {node.id: self.part(node) for node in nodes}
        lost = Counter[str]()
        for node, count in rows:
            if node in known:
                lost[known[node]] += count
        most = max(lost.values(), default=0)
        costs = []
        if most > allowed:
            total = sum(count for _, count in rows)
            costs.append(f"{most} of {total} rows, of which {allowed} may be missing")
        pairs = [pair for pair in copies if pair is not None]
        alone = sum(known.get(server, server) == known.get(copy, copy) for server, copy in pairs)
        if alone:
            costs.append(f"{alone} of {len(copies)} servers with their copies")
        return ", and ".join(costs)


def _no_room(nodes: Sequence[Node], demand: Demand, wanted: int, placed: int) -> NoRoomError:
    names = sorted(demand.amounts)
    labels = sorted(demand.options.get("label_selector", {}))
    has = [
        ", ".join(
            [f"{name} {node.resources.get(name, 0.0):g}" for name in names]
            + [f"{label}={node.labels.get(label, '')}" for label in labels]
        )
        for node in nodes
    ]
    listed = "; ".join(f"{node.address}: {each}" for node, each in zip(nodes, has, strict=True))
    return NoRoomError(
        f"the nodes must have room for {wanted} {demand.kind} processes with {demand.setting} ="
        f" {dict(demand.options)} each: got room for {placed} ({listed}); ask for less, start fewer"
        " processes, or add nodes"
    )
