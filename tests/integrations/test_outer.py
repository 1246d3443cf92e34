"""Outer steps: real peers run the scenes of outer_ranks.py; hostile messages meet one peer."""

from __future__ import annotations

import runpy
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers import bits
from tests.integrations.outer_ranks import LIAR, STATE, WORLD, flat, network
from tests.integrations.scenes import ROOT, Scene, play

import phocas
from phocas import data
from phocas.integrations.outer import Float32, Int8, OuterStep, TopK
from phocas.integrations.outer.compression import Compression
from phocas.integrations.outer.messages import Update, digest, read_update, write_update
from phocas.integrations.state_bytes import read_state, write_state

COMPRESSIONS = [Float32(), Int8(), TopK(share=0.1)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    script = Path(__file__).parent / "outer_ranks.py"
    return play(script, tmp_path_factory.mktemp("ranks"), 180, world=WORLD)


@pytest.mark.parametrize(
    ("name", "rule", "options"),
    [
        ("averaged", "mean", {"lr": 1.0}),
        ("robust", "trimmed-mean:b=1", {"lr": 0.7, "momentum": 0.9, "nesterov": True}),
    ],
)
def test_peers_take_the_step_of_one_process(
    ranks: Scene, name: str, rule: str, options: dict[str, Any]
) -> None:
    results = ranks(name)
    base = results[0]["first"].requires_grad_()
    twin = torch.optim.SGD([base], **options)
    for step in range(len(results[0]["steps"])):
        local = torch.stack([result["steps"][step]["local"] for result in results])
        base.grad = phocas.parse_rule(rule)(base.detach() - local)
        twin.step()
        for result in results:
            assert bits(result["steps"][step]["now"]) == bits(base.detach())
            assert result["steps"][step]["result"].applied
            assert result["steps"][step]["result"].apart == ()


def test_peers_with_the_same_shard_take_the_step_of_whole_models(ranks: Scene) -> None:
    results = ranks("sharded")
    base = results[0]["first"].requires_grad_()
    twin = torch.optim.SGD([base], lr=0.7, momentum=0.9, nesterov=True)
    for step in range(2):
        replicas = torch.stack([results[rank]["steps"][step]["local"] for rank in (0, 2)])
        assert not torch.equal(*replicas)
        base.grad = phocas.Mean()(base.detach() - replicas)
        twin.step()
        for result in results:
            assert bits(result["steps"][step]["now"]) == bits(base.detach())
            assert "measures whole updates, and peers hold shards" in result["said"]


def test_values_of_the_malicious_peer_are_dropped(ranks: Scene) -> None:
    shares = ranks("robust")[0]["steps"][-1]["result"].shares
    assert max(shares, key=shares.__getitem__) == LIAR


def test_memory_is_the_same_on_all_peers(ranks: Scene) -> None:
    results = ranks("remembering")
    for step in range(3):
        assert len({bits(result[step]["now"]) for result in results}) == 1
        assert bool(results[0][step]["now"].isfinite().all())
        assert list(results[0][step]["result"].rejected) == [LIAR]


@pytest.mark.parametrize("compression", COMPRESSIONS, ids=str)
def test_hostile_bytes_cost_the_row_of_their_sender(ranks: Scene, compression: Compression) -> None:
    results = ranks("hostile")
    for result in results:
        first, second, honest = result[str(compression)]
        assert list(first.rejected) == list(second.rejected) == [LIAR]
        assert "it must be an update" in first.rejected[LIAR]
        assert honest.rejected == {}
        assert all(one.applied for one in (first, second, honest))
    assert len({bits(result[f"{compression} parameters"][0]) for result in results}) == 1


def test_settings_that_cannot_work_are_rejected_by_all_peers(ranks: Scene) -> None:
    for rank, said in enumerate(ranks("rejected")):
        assert "needs 2b < m: got b=3 with m=4" in said["too many"]
        assert "all ranks must be protected alike" in said["unlike"]
        assert "more than half of the peers must have the same parameters" in said["apart"]
        assert "drops values that few peers send" in said["sparse"]
        assert rank > 1 or "got b=1 with m=2" in said["two peers"]


def test_peer_that_joins_receives_the_state_of_most(ranks: Scene) -> None:
    results = ranks("joining")
    for key in ("parameters", "momentum", "after"):
        assert len({bits(result[key]) for result in results}) == 1, key
    assert {result["steps"] for result in results} == {2}
    assert results[0]["peers"] == tuple(range(WORLD))


def test_malicious_peer_that_answers_each_peer_otherwise_blocks_none(ranks: Scene) -> None:
    assert ranks("equivocating") == [STATE] * WORLD


def test_peers_go_on_without_one_that_ended(ranks: Scene) -> None:
    results = ranks("leaving")
    assert len(results) == WORLD - 1
    assert len({bits(result["now"]) for result in results}) == 1
    for result in results:
        assert result["said"].startswith(f"outer step 2: rank {LIAR} has ended or does not")
        assert "call regroup(group)" in result["said"]
        assert result["kept"]
        assert result["peers"] == (0, 1, 3)
    assert "got b=1 with m=2" in results[0]["fewer"]


class Others:
    """Other peers, whose updates are given; ``absent`` of them are not there."""

    def __init__(self, m: int = 5) -> None:
        self.m = m
        self.extra: dict[int, bytes] = {}
        self.sent: list[bytes] = []

    def __call__(self, message: bytes) -> dict[int, bytes]:
        self.sent.append(message)
        return dict.fromkeys(range(self.m), message) | self.extra


def peer(others: Others, rule: str = "trimmed-mean:b=1", **options: Any) -> OuterStep:
    return OuterStep(network(), rule, every=1, exchange=others, **options)


def move(outer: OuterStep, by: float = 0.01) -> None:
    torch.manual_seed(outer.steps)
    with torch.no_grad():
        for parameter in outer.parameters:
            parameter.add_(by * torch.randn(parameter.shape))


def update(outer: OuterStep, row: np.ndarray[Any, Any], **changes: Any) -> bytes:
    given = {"step": outer.steps, "weight": 1.0, "base": digest(outer.base), **changes}
    return write_update(outer.compression, Update(row=row.astype(np.float32), **given))


HOSTILE = {
    "it must be an update: got 0": lambda _, __: b"",
    "it must be an update: got 7": lambda _, m: m[:7],
    "it must have the 1397 values of the model: it has 1398": lambda o, _: update(
        o, np.zeros(1398)
    ),
    "it must be for outer step 1: it is for 5": lambda o, _: update(o, np.zeros(o.d), step=4),
    "its weight must be more than 0": lambda o, _: update(o, np.zeros(o.d), weight=float("nan")),
    "its values must be finite": lambda o, _: update(o, np.full(o.d, np.inf)),
    " bytes: it has ": lambda _, m: m + b"\0",
}


@pytest.mark.parametrize("compression", COMPRESSIONS, ids=str)
@pytest.mark.parametrize("said", HOSTILE)
def test_unusable_update_is_rejected_with_its_sender(said: str, compression: Compression) -> None:
    others = Others()
    outer = peer(others, "nnm:b=1|mean", compress=compression)
    move(outer)
    good = update(outer, np.ones(outer.d))
    others.extra = {4: HOSTILE[said](outer, good)}  # type: ignore[no-untyped-call]
    result = outer.step()
    assert result is not None
    assert list(result.rejected) == [4]
    assert said in result.rejected[4]
    assert result.applied
    assert set(result.shares) == {0, 1, 2, 3}
    assert all(bool(parameter.isfinite().all()) for parameter in outer.parameters)


def test_another_compression_is_rejected() -> None:
    row = Update(0, 1.0, bytes(16), np.zeros(8, np.float32))
    with pytest.raises(ValueError, match="must be compressed by int8"):
        read_update(write_update(Float32(), row), Int8(), 8, 0)


@pytest.mark.parametrize("indices", [[3, 8], [5, 5], [6, 2]])
def test_indices_out_of_range_or_order_are_rejected(indices: list[int]) -> None:
    body = np.array(indices, "<u4").tobytes() + np.ones(2, "<f4").tobytes()
    with pytest.raises(ValueError, match="indices must be ascending and less than 8"):
        TopK(share=0.25).decode(body, 8)


def test_random_bytes_never_crash_a_peer() -> None:
    rng = np.random.default_rng(0)
    for compression in COMPRESSIONS:
        good = write_update(compression, Update(3, 1.0, bytes(16), np.ones(1500, np.float32)))
        for _ in range(200):
            spoilt = bytearray(good)
            for place in rng.integers(len(good), size=rng.integers(1, 40)):
                spoilt[place] = rng.integers(256)
            try:
                found = read_update(bytes(spoilt), compression, 1500, 3)
            except ValueError:
                continue
            assert found.row.shape == (1500,)
            assert np.isfinite(found.row).all()


@pytest.mark.parametrize("d", [1, 1023, 1024, 1025, 3000])
def test_compressed_rows_have_the_stated_size_and_error(d: int) -> None:
    row = np.random.default_rng(d).normal(size=d).astype(np.float32)
    row[0] = 1e30
    for compression in COMPRESSIONS:
        body = compression.encode(row)
        assert len(body) == compression.size(d)
        back = compression.decode(body, d)
        if isinstance(compression, TopK):
            kept = np.flatnonzero(back)
            assert np.abs(row)[kept].min() >= np.abs(np.delete(row, kept)).max(initial=0)
            np.testing.assert_array_equal(back[kept], row[kept])
        for block in range(0, d, 1024):
            part = slice(block, block + 1024)
            unit = 0.5001 / 127 if isinstance(compression, Int8) else 0.0
            if not isinstance(compression, TopK):
                assert np.abs(back - row)[part].max() <= unit * np.abs(row)[part].max()


@pytest.mark.parametrize("compress", ["int8", "top-k:share=0.05"])
def test_error_feedback_sends_everything_in_the_end(compress: str) -> None:
    others = Others()
    outer = peer(others, "mean", compress=compress, optimizer=lambda p: torch.optim.SGD(p, lr=1.0))
    wanted = flat(outer.base)
    for _ in range(30):
        before = flat(outer.base)
        move(outer)
        wanted += flat(outer.parameters) - before
        outer.step()
    # What has not arrived is in the residual, whatever compression has left out in each step.
    torch.testing.assert_close(flat(outer.base) - outer.residual, wanted, rtol=0, atol=1e-5)
    assert 0 < float(outer.residual.norm()) < float((wanted - flat(network().parameters())).norm())


def test_rejected_rows_count_as_byzantine_if_too_few_are_left() -> None:
    others = Others(3)
    outer = peer(others, "trimmed-mean:b=1")
    move(outer)
    others.extra = {2: b"nothing"}
    result = outer.step()
    assert result is not None
    assert result.applied
    assert set(result.shares) == {0, 1, 2}
    assert result.shares[2] == 1


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_too_few_peers_are_said_and_nothing_is_lost(policy: str) -> None:
    others = Others(2)
    outer = peer(others, on_too_few=policy)
    move(outer)
    local = flat(outer.parameters)
    if policy == "stop":
        with pytest.raises(RuntimeError, match=r"outer step 1: 2 of 2 peers .* got b=1 with m=2"):
            outer.step()
    else:
        result = outer.step()
        assert result is not None
        assert not result.applied
        assert "got b=1 with m=2" in result.reason
    assert torch.equal(flat(outer.parameters), local)
    others.m = 5  # three more join
    result = outer.step()
    assert result is not None
    assert result.applied
    assert result.step == 1


def test_aggregate_that_is_not_finite_is_not_applied() -> None:
    others = Others(3)
    outer = peer(others, "mean")
    first = flat(outer.base)
    move(outer)
    others.extra = {
        2: update(outer, np.full(outer.d, 3e38)),
        1: update(outer, np.full(outer.d, 3e38)),
    }
    result = outer.step()
    assert result is not None
    assert result.applied or "not finite" in result.reason
    move(outer, float("nan"))
    others.m, others.extra = 1, {}
    with pytest.raises(RuntimeError, match="0 of 1 peers have a usable update"):
        outer.step()
    assert bool(first.isfinite().all())


def test_claimed_weights_are_bounded() -> None:
    others = Others(5)
    outer = peer(others, "mean", max_share=0.25, weight=1.0)
    move(outer)
    others.extra = {4: update(outer, np.full(outer.d, 1.0), weight=1e12)}
    base = flat(outer.base)
    row = base - flat(outer.parameters)
    outer.optimizer = torch.optim.SGD(outer.base, lr=1.0)
    outer.step()
    expected = base - (0.75 * row + 0.25)
    torch.testing.assert_close(flat(outer.base), expected, rtol=1e-3, atol=1e-4)


def test_peer_with_other_parameters_is_reported() -> None:
    others = Others(5)
    outer = peer(others)
    move(outer)
    others.extra = {3: update(outer, np.zeros(outer.d), base=bytes(16))}
    result = outer.step()
    assert result is not None
    assert result.apart == (3,)
    assert result.applied
    move(outer)
    others.extra = {n: update(outer, np.zeros(outer.d), base=bytes(16)) for n in (1, 2, 3)}
    with pytest.warns(RuntimeWarning, match="are not those of most peers"):
        outer.step()


def test_peer_that_changes_is_flagged_against_its_own_past() -> None:
    others = Others(6)
    outer = peer(others, "trimmed-mean:b=1")
    rng = np.random.default_rng(0)
    way = rng.normal(size=(6, outer.d))
    for step in range(60):
        sign = -10 if step >= 40 else 1
        rows = 0.01 * way + 0.005 * rng.normal(size=way.shape)
        rows[5] *= sign
        others.extra = {n: update(outer, rows[n]) for n in range(6)}
        outer.step()
        if step == 45:
            outer.load_state_dict(outer.state_dict())
    assert outer.flagged() == (5,)


def test_peers_beyond_those_with_a_past_take_outer_steps() -> None:
    peers = [range(256), range(300, 303)]
    outer = OuterStep(
        network(), "median", every=1, exchange=lambda message: dict.fromkeys(peers[0], message)
    )
    for expected in (256, 3, 3):
        result = outer.step()
        assert result is not None
        assert result.applied
        assert len(result.peers) == expected
        peers = peers[-1:]
    assert outer.flagged() == ()


def test_peers_with_data_alike_are_compared_with_one_another() -> None:
    others = Others(6)
    outer = peer(others, "trimmed-mean:b=1", data="alike")
    rng = np.random.default_rng(0)
    for _ in range(25):
        rows = 0.01 * rng.normal(size=(6, outer.d))
        rows[5] *= 3
        others.extra = {n: update(outer, rows[n]) for n in range(6)}
        outer.step()
    assert outer.flagged() == (5,)


@pytest.mark.parametrize("rule", ["centered-clipping:radius=1,start=previous", "trimmed-mean:b=1"])
def test_resumed_peer_has_the_bits_of_one_that_went_on(rule: str, tmp_path: Path) -> None:
    def run(*, resume: bool) -> bytes:
        outer = peer(Others(), rule, compress="int8")
        for step in range(6):
            move(outer)
            outer.step()
            if step == 2 and resume:
                torch.save(outer.state_dict(), tmp_path / "outer.pt")
                torch.save(outer.parameters, tmp_path / "model.pt")
                outer = peer(Others(), rule, compress="int8")
                outer.load_state_dict(torch.load(tmp_path / "outer.pt", weights_only=True))
                for parameter, kept in zip(
                    outer.parameters,
                    torch.load(tmp_path / "model.pt", weights_only=False),
                    strict=True,
                ):
                    parameter.data.copy_(kept)
        return bits(flat(outer.parameters))

    assert run(resume=True) == run(resume=False)


def test_state_of_another_model_is_rejected() -> None:
    outer = peer(Others())
    with pytest.raises(ValueError, match="must be of this model"):
        OuterStep(torch.nn.Linear(3, 2), "mean", every=1, exchange=Others()).load_state_dict(
            outer.state_dict()
        )
    with pytest.raises(ValueError, match="must have history"):
        outer.load_state_dict({"shared": {}, "inner_steps": 0, "residual": torch.zeros(0)})


@pytest.mark.parametrize("spoilt", [b"", b"\1" * 40, b"\xff" * 8 + b"{}"])
def test_spoilt_state_is_rejected(spoilt: bytes) -> None:
    with pytest.raises(ValueError, match="must be whole"):
        read_state(spoilt)
    whole = write_state({"a": torch.arange(5)})
    with pytest.raises(ValueError, match="must be whole"):
        read_state(whole[:-3])


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="no peer is trusted"):
        peer(Others(), "fltrust")
    with pytest.raises(ValueError, match="must have parameters"):
        OuterStep(torch.nn.ReLU(), "mean", every=1, exchange=Others())
    with pytest.raises(ValueError, match="unknown compression 'int9'; did you mean 'int8'"):
        peer(Others(), compress="int9")
    with pytest.raises(ValueError, match="on_too_few"):
        peer(Others(), on_too_few="panic")
    with pytest.raises(ValueError, match="share > 0"):
        TopK(share=0.0)


def test_half_precision_keeps_small_outer_steps() -> None:
    others = Others()
    model = network().bfloat16()
    outer = OuterStep(
        model, "mean", every=1, exchange=others, optimizer=lambda p: torch.optim.SGD(p, lr=1e-3)
    )
    before = flat(model.parameters())
    for _ in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.02)
        outer.step()
    assert outer.base[0].dtype == torch.float32
    assert model[0].weight.dtype == torch.bfloat16
    assert float((flat(outer.base) - before.float()).abs().max()) > 0


@pytest.mark.parametrize(("rule", "learns"), [("mean", False), ("trimmed-mean:b=2", True)])
def test_two_of_eight_malicious_peers_ruin_the_average_alone(rule: str, learns: bool) -> None:
    script = runpy.run_path(str(ROOT / "benchmarks" / "outer.py"))
    dataset = data.load("synthetic")
    accuracy = script["train"](dataset, rule, "float32", script["flipped"], 3)
    assert (accuracy > 0.5) == learns


def test_metrics_are_numbers() -> None:
    outer = peer(Others())
    move(outer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = outer.step()
    assert result is not None
    assert result.metrics()["outer/peers"] == 5
    assert all(isinstance(value, float) for value in result.metrics().values())
