"""What one guard knows and does, whoever carries the gradients."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.integrations.scenes import environment

from phocas.integrations.guard import Ledger, Reactions, Suspect
from phocas.integrations.reports import as_text
from phocas.integrations.witness import Segment, Witness, within
from phocas.rules import Heraclius

NAMES = ["a.weight", "a.bias"]
M, WIDTH = 4, 4096


def ledger(reactions: Reactions | None = None, rank: int = 0) -> Ledger:
    return Ledger(Heraclius(b=1), NAMES, ["host"] * M, rank, reactions or Reactions())


def step(book: Ledger, witnesses: list[Witness], seed: int, wrong: slice | None) -> None:
    """Let every witness see its columns, in which worker 2 is wrong somewhere."""
    told = []
    for number, witness in enumerate(witnesses):
        rng = torch.Generator().manual_seed(1000 * seed + number)
        rows = torch.randn(M, WIDTH, generator=rng)
        if wrong is not None:
            rows[2, wrong] = 1e30
        whole = (Segment(0, 0, WIDTH - 64, number * WIDTH), Segment(1, WIDTH - 64, WIDTH))
        witness.see(rows, whole, number)
        witness.bet()
        told.append(witness.testimony().view(torch.float64).clone().numpy())
        witness.end()
    lost = np.tile([0.0, 0.0, 0.0 if wrong is None else 0.1 * WIDTH, 0.0], (M, 1))
    book.hear(np.array(told), lost, M * WIDTH)
    for witness in witnesses:
        book.instruct(witness)


def played(book: Ledger, begin: int, steps: int) -> Ledger:
    witnesses = [book.witness(0) for _ in range(M)]
    for number in range(steps):
        step(book, witnesses, number, slice(5, 3000, 32) if number >= begin else None)
    return book


def test_a_report_has_layers_addresses_and_stride() -> None:
    book = played(ledger(), begin=6, steps=12)
    report = book.report()
    (suspect,) = report["suspects"]
    assert (suspect["rank"], suspect["since"], suspect["grounds"]) == (2, 9, ["addresses"])
    assert list(suspect["layers"]) == ["a.weight"]
    places = suspect["places"]["a.weight"]
    assert places["kind"] == "hardware"
    assert places["stride"] == 32
    assert places["since"] == 7
    assert places["addresses"] == [5 + number * WIDTH for number in range(M)]
    assert places["share"] == pytest.approx(94 / (WIDTH - 64), rel=0.1)
    assert places["others"] < 0.001
    assert json.loads(json.dumps(report)) == report
    text = as_text(report)
    assert "rank 2 on host: named in step 9" in text
    assert "same addresses, stride 32: hardware" in text
    assert max(map(len, text.splitlines())) <= 80
    assert str(book.suspect(2)).startswith("rank 2: since step 9, a.weight, 2.3% of its values")


@pytest.mark.parametrize("begin", range(80, 84))
def test_most_quiet_steps_are_passed_over_and_a_late_fault_is_named_in_time(begin: int) -> None:
    book = ledger()
    witnesses = [book.witness(0) for _ in range(M)]
    seen = []
    for number in range(begin + 40):
        seen.append({witness.awake for witness in witnesses})
        step(book, witnesses, number, slice(5, 3000, 32) if number >= begin else None)
    assert all(len(one) == 1 for one in seen)  # ranks look at the same steps
    looked = [one == {True} for one in seen]
    assert all(looked[:64])
    assert sum(looked[64:80]) == 4
    (suspect,) = book.report()["suspects"]
    assert suspect["rank"] == 2
    assert suspect["since"] <= begin + 1 + 3 + 2  # it is seen in the fourth, then in each
    assert sum(looked[-16:]) == 4  # who is named is known


def test_a_rank_that_is_wrong_in_steps_that_are_passed_over_is_looked_at() -> None:
    """It knows which steps these are, but not that others notice what is thrown away."""
    book = ledger()
    witnesses = [book.witness(0) for _ in range(M)]
    for number in range(120):
        passed = number >= 70 and number % 4 != 0
        step(book, witnesses, number, slice(5, 3000, 32) if passed else None)
    assert [suspect["rank"] for suspect in book.report()["suspects"]] == [2]


def test_what_ranks_say_was_thrown_away_may_be_nonsense() -> None:
    book = ledger()
    told = np.zeros((M, book.witness(0).told.size))
    told[:, M:] = np.nan
    lost = np.array([[np.nan] * M, [np.inf] * M, [-np.inf] * M, [0.0, 10.0, 1e300, 5.0]])
    book.hear(told, lost[[0, 2, 3, 3]], 100)
    np.testing.assert_allclose(book.suspicion.shares(), [0.0, 0.2, 1.0, 0.1])
    book.hear(told, lost, 100)
    assert (book.suspicion.shares() <= 1.0).all()


def test_reactions_come_once_and_in_order(tmp_path: Path) -> None:
    told: list[Suspect] = []
    log = tmp_path / "suspects.jsonl"
    for rank in (0, 2):
        played(ledger(Reactions.of(told.append, log, None), rank), begin=1, steps=8)
    assert [suspect.rank for suspect in told] == [2, 2]  # on each of two ranks
    (line,) = log.read_text().splitlines()  # by the lowest that is not suspect
    assert json.loads(line)["places"]["a.weight"]["stride"] == 32
    with pytest.raises(FileNotFoundError, match="a folder that exists"):
        Reactions.of(None, tmp_path / "nowhere" / "log", None)
    with pytest.raises(ValueError, match="1 to 255: got 0"):
        Reactions.of(None, None, 0)


def test_the_exit_code_is_that_of_the_process(tmp_path: Path) -> None:
    program = (
        "from tests.integrations.test_guard import ledger, played, Reactions\n"
        f"played(ledger(Reactions.of(print, {str(tmp_path / 'log')!r}, 77)), begin=1, steps=8)\n"
        "print('went on')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 77, done.stderr
    assert done.stdout.startswith("rank 2: since step 4, a.weight")
    assert "went on" not in done.stdout
    assert done.stderr == "phocas: rank 0 ends, for rank 2 is suspect\n"
    assert json.loads((tmp_path / "log").read_text())["rank"] == 2


def test_addresses_of_a_shard_are_those_of_the_parameter() -> None:
    """Cut (6, 8, 5) into four along each dimension that allows it, and look values up."""
    whole = torch.arange(6 * 8 * 5)
    for shape, cut in [((8, 30), 0), ((6, 8, 5), 1), ((30, 8), 1)]:
        tail = int(np.prod(shape[cut:]))
        for rank, part in enumerate(whole.view(shape).chunk(4, dim=cut)):
            flat = part.reshape(-1)
            crosswise = {"run": tail // 4, "jump": tail} if cut else {}
            first = rank * (tail // 4 if cut else len(flat))
            segment = Segment(0, 10, 10 + len(flat), first, **crosswise)
            columns = np.arange(len(flat))
            assert segment.address(columns).tolist() == flat.tolist()
            (later,) = within([segment], 13, 40)
            assert (later.begin, later.end) == (0, 27)
            assert later.address(np.arange(27)).tolist() == flat[3:30].tolist()
    assert within([Segment(0, 5, 5), Segment(1, 5, 9)], 0, 5) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30, -1e30])
def test_what_is_absurd_is_found_in_every_type(dtype: torch.dtype, value: float) -> None:
    witness = Witness(M, 1, 0)
    rows = torch.randn(M, 300, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows[1, 100:200:10] = value
    witness.see(rows, [Segment(0, 0, 300)], 0)
    (found,) = witness.findings
    assert (found.worker, found.wild, found.address) == (1, 10, 100)
    assert found.absurd
