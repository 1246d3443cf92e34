"""Exclusion of federated clients by evidence, and the state of a server that is restarted."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phocas import CenteredClipping, Mean, TrimmedMean
from phocas.detection.exclusion import AfterEvidence
from phocas.integrations.client_history import ClientHistory
from phocas.integrations.client_replies import Client, usable
from phocas.integrations.clients import Terms
from phocas.integrations.merging.tensors import in_memory
from phocas.integrations.server_state import read_state, write_state

NAMES = [f"site-{number}" for number in range(9)]
D = 60
BASE = np.random.default_rng(5).normal(size=D)
KINDS = 10 * np.random.default_rng(6).normal(size=(len(NAMES), D))
"""The mean update of each client: their data differ."""


@pytest.fixture(autouse=True, scope="module")
def _few() -> Iterator[None]:
    """Let states be small: of twenty clients, not of a thousand."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("phocas.integrations.client_history.MOST_CLIENTS", 20)
        yield


def tensors(values: Any) -> dict[str, Any]:
    values = np.asarray(values, np.float32)
    return {"a": in_memory("a", values[:20], "a"), "b": in_memory("b", values[20:], "b")}


def replies(turn: int, who: Iterable[int], fault: Callable[[Any], Any], since: int) -> list[Any]:
    """Return the replies of some clients; client 3 is faulty from a round on."""
    rng = np.random.default_rng(turn)
    rows = KINDS + rng.normal(size=KINDS.shape)
    if turn >= since:
        rows[3] = fault(rows[3])
    return [Client(NAMES[i], None, tensors(BASE + rows[i]), 1.0) for i in who]


def spoilt(row: Any) -> Any:
    return np.full_like(row, np.nan)


def run(
    terms: Terms, turns: Iterable[int], fault: Callable[[Any], Any] = np.negative, since: int = 60
) -> tuple[list[tuple[int, list[str], list[str]]], list[str], Any]:
    """Return by round who took part and who was aggregated, all lines of the log, the last result.

    In each round seven of the nine clients take part.
    """
    found, lines, result = [], [], None
    for turn in turns:
        who = np.random.default_rng(1000 + turn).choice(len(NAMES), 7, replace=False)
        model = tensors(BASE)
        terms.begin(model)
        clients = replies(turn, sorted(who.tolist()), fault, since)
        kept = terms.history.admitted(clients, terms.rule)
        values, _ = terms.aggregate(kept, model, turn, lambda _, parts: np.concatenate(parts))
        result = None if values is None else np.concatenate([*values.values()])
        terms.history.observe(kept, model)
        lines += terms.end_round()
        found.append((turn, [c.name for c in clients], [c.name for c in kept]))
    return found, lines, result


def test_client_that_changes_is_excluded_readmitted_and_excluded_again() -> None:
    terms = Terms(TrimmedMean(b=1), exclude="evidence:rounds=10")
    found, lines, _ = run(terms, range(200))
    left_out = [turn for turn, there, kept in found if there != kept]
    assert all(set(there) - set(kept) <= {"site-3"} for _, there, kept in found)
    excluded = "excluded for 10 rounds, false alarm probability 0.001: site-3"
    assert lines[:3] == [excluded, "readmitted after 10 rounds: site-3", excluded]
    assert set(lines) == {*lines[:2]}
    first = min(left_out)
    assert 60 + 8 < first < 60 + 40
    assert 3 < len([turn for turn in left_out if turn < first + 10]) <= 10


def test_client_is_excluded_for_good_or_never() -> None:
    found, lines, _ = run(Terms(TrimmedMean(b=1), exclude="evidence"), range(120))
    last = [kept for turn, _, kept in found if turn > 105]
    assert not any("site-3" in kept for kept in last)
    assert lines == ["excluded for good, false alarm probability 0.001: site-3"]
    never = Terms(TrimmedMean(b=1))
    found, lines, _ = run(never, range(120))
    assert all(there == kept for _, there, kept in found)
    assert lines == []
    assert never.history.flagged() == ["site-3"]


def test_smaller_false_alarm_probability_needs_more_evidence() -> None:
    rounds = []
    for probability in ("0.1", "0.001", "1e-9"):
        terms = Terms(TrimmedMean(b=1), exclude=f"evidence:false_alarm={probability}")
        found, _, _ = run(terms, range(60), spoilt, since=0)
        rounds.append(next(turn for turn, there, kept in found if there != kept))
    assert rounds == sorted(set(rounds))


@pytest.mark.parametrize("stop", [20, 75])
def test_restarted_server_continues_with_the_same_bits(stop: int, tmp_path: Path) -> None:
    rule = CenteredClipping("median", 2, "previous")
    options: Any = {"exclude": "evidence:rounds=12", "state": tmp_path / "state.npz"}
    run(Terms(rule, **options), range(stop))
    _, _, result = run(Terms(rule, **options), range(stop, stop + 20))
    whole = Terms(rule, exclude="evidence:rounds=12")
    _, _, wanted = run(whole, range(stop + 20))
    assert result.tobytes() == wanted.tobytes()
    told, arrays = whole.history.state()
    found = read_state(tmp_path / "state.npz", identity())
    assert found is not None
    assert found[0] == told
    for name, array in arrays.items():
        assert found[1][f"history/{name}"].tobytes() == array.tobytes()


def identity(**changed: Any) -> dict[str, Any]:
    model = {"a": ["float32", 20], "b": ["float32", 40]}
    return {"seed": 0, "data": "differ", "model": model, **changed}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return the state of a server that has excluded a client."""
    path = tmp_path_factory.mktemp("whole") / "state.npz"
    terms = Terms(TrimmedMean(b=1), exclude="evidence", state=path)
    run(terms, range(30), spoilt, since=0)
    assert terms.history.excluded() == ["site-3"]
    return path.read_bytes()


def damage(path: Path, kind: str) -> None:
    content = path.read_bytes()
    if kind == "short":
        path.write_bytes(content[: len(content) // 2])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "bit":
        middle = content.index(b"own_past.npy") + 2000
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :])
    elif kind == "array":
        np.savez(path, rows=np.ones(3))
    elif kind == "text":
        path.write_text("clients: 3")
    elif kind == "version":
        told, arrays = read_state(path, identity()) or ({}, {})
        write_state(path, identity(), {**told, "format": "other"}, arrays)
    elif kind == "folder":
        path.unlink()
        path.mkdir()
    elif kind in ("seed", "model"):
        told, arrays = read_state(path, identity()) or ({}, {})
        other: Any = {"seed": 4, "model": {"a": ["float32", 60]}}[kind]
        write_state(path, identity(**{kind: other}), told, arrays)
    else:
        told, arrays = read_state(path, identity()) or ({}, {})
        changes: dict[str, dict[str, Any]] = {
            "twice": {"clients": ["site-1", "site-1"], "excluded": []},
            "unknown": {"excluded": [["site-77", 3]]},
            "round": {"round": "three"},
            "shape": {},
        }
        told |= changes[kind]
        if kind == "shape":
            arrays["history/own_counts"] = arrays["history/own_counts"][:5]
        write_state(path, identity(), told, arrays)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("short", "is damaged or another file"),
        ("empty", "is damaged or another file"),
        ("bit", "is damaged or another file"),
        ("array", "is damaged or another file"),
        ("text", "is damaged or another file"),
        ("version", "is of another version of phocas"),
        ("folder", "state must be a file: got"),
        ("seed", r"belongs to another federation \(seed differ"),
        ("model", r"belongs to another federation \(model differ"),
        ("twice", r"client site-1 appears twice"),
        ("unknown", "a client is excluded that has no past"),
        ("round", "is damaged or another file"),
        ("shape", "is damaged or another file"),
    ],
)
def test_bad_state_is_rejected_and_nothing_is_written(
    kind: str, words: str, whole: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "state.npz"
    path.write_bytes(whole)
    damage(path, kind)
    before = path.read_bytes() if path.is_file() else b""
    terms = Terms(TrimmedMean(b=1), exclude="evidence", state=path)
    with pytest.raises(RuntimeError, match=words) as caught:
        terms.begin(tensors(BASE))
    assert "\n" not in str(caught.value)
    assert terms.history.excluded() == []
    assert (path.read_bytes() if path.is_file() else b"") == before


def test_state_that_cannot_be_written_does_not_end_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terms = Terms(Mean(), state=tmp_path / "state.npz")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("phocas.integrations.clients.write_state", full)
    _, lines, _ = run(terms, range(2))
    assert lines == ["the state cannot be written: [Errno 28] No space left on device"] * 2


def test_clients_with_other_names_than_in_the_state_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "state.npz"
    run(Terms(Mean(), state=path), range(2))
    terms = Terms(Mean(), state=path)
    terms.begin(tensors(BASE))
    strangers: list[Any] = [Client("new", None, tensors(BASE + 1), 1.0)]
    terms.history.observe(strangers, tensors(BASE))
    (line,) = terms.end_round()
    assert line == "no client of this round is in the state: do clients keep their names?"


def test_exclusion_leaves_the_rule_enough_rows_and_more_than_half() -> None:
    history: ClientHistory[str] = ClientHistory(exclude=AfterEvidence())
    clients = replies(0, range(9), np.negative, since=9)
    history.exclusions.since = dict.fromkeys(["site-5", "site-2", "site-7", "site-1", "site-0"], 0)
    for rule, left_out in ((Mean(), 4), (TrimmedMean(b=2), 4), (TrimmedMean(b=3), 2)):
        kept = [client.name for client in history.admitted(clients, rule)]
        assert kept == [name for name in NAMES if name not in history.excluded()[:left_out]]
    assert history.admitted(clients[:1], Mean()) == clients[:1]


def test_client_with_two_replies_in_a_round_is_left_out() -> None:
    lines: list[str] = []
    sent = [("b", 1), ("a", 2), ("b", 3), ("c", 4)]
    clients = usable(sent, lambda _: (tensors(BASE), 1.0, 1.0), lines.append)
    assert [client.name for client in clients] == ["a", "c"]
    assert set(lines) == {"b is left out: it must reply once in a round: it replied 2 times"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"exclude": "evidense"}, "unknown policy of exclusion 'evidense'; did you mean"),
        ({"exclude": "evidence:rounds=0"}, "evidence needs rounds >= 1: got rounds=0"),
        ({"exclude": "evidence:false_alarm=1"}, "needs 0 < false_alarm < 1: got false_alarm=1"),
        ({"exclude": "evidence", "data": "alike"}, "exclude=evidence needs data='differ'"),
    ],
)
def test_bad_policies_are_rejected(options: Any, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        Terms(Mean(), **options)
