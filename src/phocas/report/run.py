"""The description of one run on a terminal."""

from __future__ import annotations

import shlex
import statistics
from typing import TYPE_CHECKING, Any

from phocas.experiments.config import make_config
from phocas.experiments.curves import read_cost, read_curve
from phocas.experiments.locks import actual_status, state_path
from phocas.report.tables import (
    about_flags,
    about_loss,
    common,
    listing,
    outcome,
    print_facts,
    said,
)
from phocas.report.terminal import draw_curve

if TYPE_CHECKING:
    from phocas.experiments.results import Results, RunRecord

_LITTLE = 0.005  # of a worker's values
_PLACES = ("results", "data_dir", "name")


def about_run(results: Results, record: RunRecord) -> dict[str, Any]:
    """Return everything known about a run, for the terminal or for JSON."""
    curve = read_curve(results, record.id)
    metrics = {name: getattr(curve, name) for name in ("round", "seconds", "top1", "top3", "loss")}
    if curve.virtual is not None:
        metrics["virtual"] = curve.virtual
    state = state_path(results.path, record.id)
    return {
        **outcome(record),
        "results": str(results.path),
        "state": str(state) if state.exists() else None,
        "status": actual_status(record, results.path),
        "excluded": [str(each) for each in results.exclusions(record.id)],
        "started": record.started,
        "updated": record.updated,
        "settings": changed(record.config),
        "curve": {name: [_plain(each) for each in values] for name, values in metrics.items()},
        "ms_by_phase": read_cost(results, record.id),
        "virtual": _clock(results.table("virtual", record.id)),
        "turned_down": _count_rejected(results, record.id),
        "dropped": [_plain(each.dropped) for each in results.evidence(record.id)],
        "versions": record.versions,
        "host": record.host,
    }


def _count_rejected(results: Results, run: int) -> int:
    """Count the finite rows that an asynchronous policy rejected."""
    rounds = results.table("rounds", run)
    return sum(row["action"] != "applied" and bool(row["finite"]) for row in rounds)


def _clock(rounds: list[dict[str, Any]]) -> dict[str, float | int | None] | None:
    """Return the time of the virtual clock and the staleness of rows, if there is a clock."""
    if not rounds:
        return None
    stale = [row["staleness"] for row in rounds if row["staleness"] is not None]
    return {
        "seconds": max(row["seconds"] for row in rounds),
        "median_staleness": statistics.median_low(stale) if stale else None,
        "most_staleness": max(stale, default=None),
        "refused": sum(row["refused"] for row in rounds),
    }


def changed(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a run that differ from the defaults, without names and folders.

    >>> changed({"rule": "mean", "lr": 0.1, "results": "my.sqlite"})
    {'rule': 'mean'}
    """
    defaults = make_config({}).model_dump()
    return {
        key: value
        for key, value in config.items()
        if key not in _PLACES and value != defaults.get(key)
    }


def print_run(known: dict[str, Any]) -> None:
    """Print what :func:`about_run` returns, in 80 columns."""
    config = known["config"]
    under = f" under {known['attack']}" if known["attack"] else ""
    name = f"{known['name']}: " if known["name"] else ""
    method = common([config], but=("name", "dataset", "model", "attack", "seed"))
    print_facts({f"run {known['id']}": f"{name}{method}{under}, seed {known['seed']}"})
    print()
    workers = f"{config['workers']} workers, {config['servers']} servers"
    settings = [said(known["settings"], key) for key in known["settings"] if key != "faults"]
    suspects = known["suspects"]
    facts = {
        "status": _status(known),
        "trained": f"{known['model']} on {known['dataset']}, {workers}",
        "settings": "; ".join(settings) or "all defaults",
        "accuracy": _accuracies(known),
        "time": _times(known),
        "clock": _virtual(known),
        "lost": "" if known["lost"] is None else about_loss(known["lost"]),
        "flagged": about_flags(suspects, config, known["byzantine"]) if suspects else "none",
        "excluded": ", ".join(known["excluded"]),
        "unusual": listing(tuple(each for each in known["unusual"] if each not in suspects)),
        "servers": (
            f"{listing(tuple(known['suspect_servers']))} get wrong values"
            if known["suspect_servers"]
            else ""
        ),
        "dropped": _dropped(known),
        "faults": "; ".join(config.get("faults") or []),
        "NaN or inf": _not_finite(known),
        "rejected": (
            f"{known['turned_down']} of {known['rounds_done']} rows" if known["turned_down"] else ""
        ),
        "versions": ", ".join(f"{name} {version}" for name, version in known["versions"].items()),
        "host": ", ".join(str(value) for value in known["host"].values()),
        "model": _model(known),
    }
    print_facts(facts)
    points = known["curve"]
    drawn = draw_curve(points["round"], [_number(each) for each in points["top1"]])
    if len(points["round"]) > 1 and drawn:
        judged = "validation samples" if known["config"].get("validation") else "test set"
        print(f"\ntop-1 accuracy on the {judged}, by round")
        print("\n".join(drawn))


def _status(known: dict[str, Any]) -> str:
    text = f"{known['status']}, {known['rounds_done']} of {known['rounds']} rounds"
    if known["message"]:
        text += f"; {known['message']}"
    if known["origin"]:
        text += f"; resumed from {known['origin']}"
    return f"{text}; started {known['started']}"


def _accuracies(known: dict[str, Any]) -> str:
    top1 = known["curve"]["top1"]
    if known["final_accuracy"] is None or not top1:
        return "not evaluated yet"
    best = known["curve"]["round"][top1.index(max(each for each in top1 if each is not None))]
    text = f"final {known['final_accuracy']:.3f}, best {known['best_accuracy']:.3f} in round {best}"
    if known["final_top3"] is not None:
        text += f"; top-3 {known['final_top3']:.3f}"
    if known["test_accuracy"] is not None:
        text += f"; on the test set {known['test_accuracy']:.3f}"
    return text


def _times(known: dict[str, Any]) -> str:
    phases = {name: ms for name, ms in known["ms_by_phase"].items() if ms}
    if known["ms_per_round"] is None or not phases:
        return "no round is complete"
    parts = sorted(phases.items(), key=lambda item: -item[1])
    told = ", ".join(f"{name} {ms:.2g}" for name, ms in parts)
    return f"{known['ms_per_round']:.1f} ms per round (median); by phase: {told}"


def _virtual(known: dict[str, Any]) -> str:
    clock = known["virtual"]
    if clock is None:
        return ""
    kind = "virtual" if known["config"].get("engine", "local") == "local" else "real"
    text = f"{clock['seconds']:.4g} {kind} seconds"
    if clock["most_staleness"] is not None:
        text += (
            f"; a round's last row was {clock['median_staleness']} steps stale (median), at most"
            f" {clock['most_staleness']}"
        )
    if clock["refused"]:
        text += f"; {clock['refused']} rows were rejected as staler than"
        text += f" {known['config']['max_staleness']} steps"
    return text


def _dropped(known: dict[str, Any]) -> str:
    """Return the workers with the largest dropped shares, beside the median worker."""
    shares = [share or 0.0 for share in known["dropped"]]
    if not shares or max(shares) < _LITTLE:
        return ""
    usual = sorted(shares)[len(shares) // 2]
    most = sorted(range(len(shares)), key=lambda worker: -shares[worker])[:3]
    told = ", ".join(f"worker {worker} {shares[worker]:.0%}" for worker in most)
    return f"{told} of their values; the median worker {usual:.0%}"


def _not_finite(known: dict[str, Any]) -> str:
    if not known["nonfinite_rounds"]:
        return ""
    skipped = known["skipped_rounds"] - known["turned_down"]
    return f"{known['nonfinite_rounds']} aggregates; {skipped} rounds took no step"


def _model(known: dict[str, Any]) -> str:
    if known["state"] is None:
        return ""
    command = ["phocas", "results", "export", "--model", str(known["id"])]
    if known["results"] != "phocas.sqlite":
        command += ["--results", known["results"]]
    return shlex.join(command)


def _plain(value: float) -> float | int | None:
    """Return a value for JSON: integers without a fraction, NaN and inf as null."""
    found = float(value)
    if found.is_integer():
        return int(found)
    return found if abs(found) < float("inf") else None


def _number(value: float | None) -> float:
    return float("nan") if value is None else value
