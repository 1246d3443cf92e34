"""Properties of every attack; a new entry of ATTACKS is tested automatically."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from phocas.attacks import (
    ATTACKS,
    ALittleIsEnough,
    Attack,
    BitFlip,
    ConstantRows,
    Crash,
    Fang,
    Gambler,
    Gaussian,
    InnerProduct,
    LabelFlip,
    Mimic,
    MinMax,
    MinSum,
    Omniscient,
    OptimalALIE,
    OptimalInnerProduct,
    RandomCells,
    SignFlip,
    SilentCorruption,
    Straggler,
    Stuck,
    Touched,
    WorstCase,
    attack_rng,
    blocks,
    parse_attack,
)
from phocas.attacks.memory import WritableMatrix
from phocas.floats import FORMATS
from phocas.rules import Krum, Median, Phocas
from phocas.sharding import shard_bounds

M, D = 11, 257
NAN, INF = float("nan"), float("inf")

EXAMPLES: list[Attack] = [
    Gaussian(q=3),
    Gaussian(q=3, std=2.0, who="resampled"),
    Omniscient(q=3, scale=10.0),
    Omniscient(q=2, who="resampled"),
    BitFlip(columns=100, per_column=3, bits=(6, 14, 15, 16)),
    BitFlip(columns=D, per_column=M, bits=(1,)),
    Gambler(servers=4, server=2, probability=0.05),
    Gambler(servers=1, server=0, probability=1.0, scale=2.0),
    SignFlip(q=4),
    SignFlip(q=4, scale=3.0, who="resampled"),
    InnerProduct(q=4),
    ALittleIsEnough(q=4),
    ALittleIsEnough(q=4, z=-1.5, who="resampled"),
    ALittleIsEnough(q=3, against=Phocas(b=3)),
    OptimalALIE(q=3, against=Phocas(b=3)),
    OptimalALIE(q=3, against=Krum(b=3), evaluations=8, who="resampled"),
    OptimalInnerProduct(q=3, against=Median()),
    Fang(q=3),
    Fang(q=3, stretch=1.5, who="resampled"),
    Fang(q=3, target="krum"),
    Mimic(q=4),
    Mimic(q=4, worker=7),
    Mimic(q=4, warmup=5),
    MinMax(q=3),
    MinMax(q=3, direction="unit"),
    MinSum(q=3, direction="sign", who="resampled"),
    LabelFlip(q=3),
    ConstantRows(q=3, value=NAN),
    ConstantRows(q=3, value=-INF, who="resampled"),
    Crash(worker=5),
    Straggler(q=3),
    Stuck(worker=3, column=201, bits=(15, 1)),
    RandomCells(rate=0.02),
    SilentCorruption(worker=4, round=3, stride=7, first=2, nan=0.1),
    WorstCase(Phocas(b=4), q=3),
    WorstCase(Median(), q=3, objective="descent", who="resampled"),
    WorstCase(Krum(b=3), q=3, budget=40),
    WorstCase(Krum(b=3), q=3, budget=40, model="cells"),
]
IDS = [str(attack) for attack in EXAMPLES]
REST = {
    "worst-case": ",rule=(phocas:b=4)",
    "optimal-alie": ",against=(phocas:b=4)",
    "optimal-ipm": ",against=(phocas:b=4)",
}
ROW_ATTACKS = [name for name, cls in ATTACKS.items() if hasattr(cls, "chosen")]
each = pytest.mark.parametrize("attack", EXAMPLES, ids=IDS)
each_kind = pytest.mark.parametrize("kind", FORMATS)


def tensor(kind: str, seed: int = 1) -> torch.Tensor:
    """Ordinary rows that include zeros, subnormals and large values, in any format."""
    rng = np.random.default_rng(seed)
    values = rng.normal(0.5, 1, (M, D))
    values[rng.random((M, D)) < 0.05] = 0.0
    values[rng.random((M, D)) < 0.02] *= 1e-7
    values[rng.random((M, D)) < 0.02] *= 1e4
    return torch.tensor(values).to(getattr(torch, kind))


def words(G: torch.Tensor | np.ndarray) -> np.ndarray:
    return WritableMatrix(G).words


def corrupt(attack: Attack, G: torch.Tensor | np.ndarray, seed: int = 7) -> Touched:
    kind = str(G.dtype).removeprefix("torch.")
    previous = tensor(kind, seed=2)
    return attack.corrupt(G, rng=attack_rng(seed, 3), round=3, previous=previous)


def test_every_registered_attack_is_tested() -> None:
    assert {type(attack) for attack in EXAMPLES} == set(ATTACKS.values())


@each
@each_kind
def test_untouched_cells_keep_their_bits(attack: Attack, kind: str) -> None:
    G = tensor(kind)
    before = words(G).copy()
    touched = corrupt(attack, G)
    mask = np.asarray(touched)
    assert mask.dtype == bool
    assert mask.shape == (M, D)
    changed = words(G) != before
    assert not (changed & ~mask).any()
    if not isinstance(attack, LabelFlip):
        assert changed.any(), "an attack that changes nothing would pass this test for free"
    assert touched.count == mask.sum()
    assert touched.rows.tolist() == np.flatnonzero(mask.any(axis=1)).tolist()
    assert touched.most_per_column == mask.sum(axis=0).max()


@each
@each_kind
def test_same_seed_and_round_same_corruption_in_any_memory(attack: Attack, kind: str) -> None:
    expected = tensor(kind)
    touched = corrupt(attack, expected)

    transposed = tensor(kind).T.contiguous().T
    wide = torch.zeros(M, 2 * D, dtype=expected.dtype)
    every_second = wide[:, ::2]
    every_second.copy_(tensor(kind))
    others: list[torch.Tensor | np.ndarray] = [transposed, every_second]
    if kind != "bfloat16":
        others.append(tensor(kind).numpy())
    for other in others:
        again = corrupt(attack, other)
        assert np.array_equal(words(other), words(expected))
        assert np.array_equal(again.mask(), touched.mask())
    assert not wide[:, 1::2].any()


@each
@each_kind
def test_server_corrupts_its_columns_as_in_the_whole_matrix(attack: Attack, kind: str) -> None:
    whole, parts, previous = tensor(kind), tensor(kind), tensor(kind, seed=2)
    expected = corrupt(attack, whole).mask()
    masks = []
    for start, stop in [(0, 1), (1, 100), (100, 101), (101, 202), (202, D)]:
        part = parts[:, start:stop]

        def slice_of_it(part: torch.Tensor = part, start: int = start, stop: int = stop) -> Touched:
            return attack.corrupt(
                part,
                rng=attack_rng(7, 3),
                round=3,
                previous=previous[:, start:stop],
                start=start,
                d=D,
            )

        if attack.sharded:
            masks.append(slice_of_it().mask())
        else:
            with pytest.raises(ValueError, match="needs the whole matrix"):
                slice_of_it()
    if attack.sharded:
        assert np.array_equal(words(parts), words(whole))
        assert np.array_equal(np.hstack(masks), expected)


@each
@each_kind
def test_honest_rows_may_have_any_values(attack: Attack, kind: str) -> None:
    hostile = [NAN, INF, -INF, 0.0, -0.0, 1e-45, 6e4, -6e4]
    G = tensor(kind)
    G[4:, :80] = torch.tensor(hostile * 10).to(G.dtype)
    before = words(G).copy()
    mask = corrupt(attack, G).mask()
    assert np.array_equal(words(G)[~mask], before[~mask])


@pytest.mark.parametrize("name", ROW_ATTACKS)
def test_one_honest_row_is_enough(name: str) -> None:
    rest = {"a-little-is-enough": ",z=1"}.get(name, REST.get(name, ""))
    G = tensor("float32")
    honest = words(G)[-1].copy()
    corrupt(parse_attack(f"{name}:q={M - 1}{rest}"), G)
    assert np.array_equal(words(G)[-1], honest)


@each
def test_number_of_threads_changes_no_bit(attack: Attack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK", 100)
    d = 2000
    results = []
    for threads in (1, 2, 5):
        monkeypatch.setattr(blocks, "get_num_threads", lambda threads=threads: threads)
        G = np.random.default_rng(5).normal(1, 1, (M, d)).astype(np.float32)
        attack.corrupt(G, rng=attack_rng(1, 0), round=1, previous=np.zeros_like(G))
        results.append(words(G))
    assert np.array_equal(results[0], results[1])
    assert np.array_equal(results[0], results[2])


@each
def test_spec_text_round_trips(attack: Attack) -> None:
    assert parse_attack(str(attack)) == attack
    assert hash(parse_attack(str(attack))) == hash(attack)


@each
def test_only_label_flip_changes_labels(attack: Attack) -> None:
    labels = np.random.default_rng(0).integers(10, size=(M, 8))
    before = labels.copy()
    touched = attack.corrupt_labels(labels, 10, rng=attack_rng(7, 3), round=3)
    if isinstance(attack, LabelFlip):
        assert np.array_equal(labels[:3], 9 - before[:3])
        assert np.array_equal(labels[3:], before[3:])
        assert touched.rows.tolist() == [0, 1, 2]
    else:
        assert np.array_equal(labels, before)
        assert touched.count == 0


@pytest.mark.parametrize("name", ROW_ATTACKS)
def test_byzantine_returns_the_fixed_workers(name: str) -> None:
    rest = REST.get(name, "")
    fixed = parse_attack(f"{name}:q=4{rest}")
    resampled = parse_attack(f"{name}:q=4,who=resampled{rest}")
    assert fixed.chosen(M, attack_rng(0, 0)).tolist() == [0, 1, 2, 3]  # type: ignore[attr-defined]
    sets = {tuple(resampled.chosen(M, attack_rng(0, t)).tolist()) for t in range(40)}  # type: ignore[attr-defined]
    assert len(sets) > 30
    assert {row for rows in sets for row in rows} == set(range(M))
    assert all(len(set(rows)) == 4 and list(rows) == sorted(rows) for rows in sets)
    labelled = name == "label-flip"
    for attack, expected in ((fixed, 1), (resampled, 5)):
        seen = set()
        for t in range(5):
            G, labels = np.ones((M, 8), np.float32), np.zeros((M, 2), int)
            rng = attack_rng(0, t)
            if labelled:
                touched = attack.corrupt_labels(labels, 3, rng=rng, round=t)
            else:
                touched = attack.corrupt(G, rng=rng, round=t, previous=np.zeros((M, 8), np.float32))
            seen.add(tuple(touched.rows.tolist()))
        assert len(seen) == expected


@pytest.mark.parametrize("name", ROW_ATTACKS)
def test_attacks_with_q_0_change_nothing(name: str) -> None:
    rest = REST.get(name, "")
    G = tensor("float32")
    before = words(G).copy()
    assert corrupt(parse_attack(f"{name}:q=0{rest}"), G).count == 0
    assert np.array_equal(words(G), before)


def test_different_rounds_and_seeds_give_different_corruption() -> None:
    drawn = {attack_rng(seed, t).integers(1 << 60) for seed in range(8) for t in range(8)}
    assert len(drawn) == 64


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gaussian:q=-1", "gaussian needs q >= 0: got q=-1"),
        ("gaussian:q=1.5", "q must be an integer"),
        ("gaussian:q=12", "gaussian needs q <= m: got q=12 with m=11 workers, the largest q is 11"),
        ("omniscient:q=11", "needs q < m, to leave an honest row: got q=11 with m=11"),
        ("gaussian:q=1,std=0", "needs a finite std > 0"),
        ("gaussian:q=1,std=nan", "needs a finite std > 0"),
        ("gaussian:q=1,who=random", "must be one of 'fixed', 'resampled'"),
        ("gaussian", "needs q"),
        ("gausian:q=1", "unknown attack 'gausian'; did you mean 'gaussian'"),
        ("gambler:probability=1.5", "needs 0 <= probability <= 1: got probability=1.5"),
        ("gambler:probability=-0.1", "needs 0 <= probability <= 1"),
        ("gambler:probability=nan", "needs 0 <= probability <= 1"),
        (
            "gambler:server=20",
            "needs server < servers: got server=20 with servers=20, the largest is 19",
        ),
        ("gambler:server=-1", "needs server >= 0"),
        ("gambler:servers=0", "needs servers >= 1"),
        ("random-cells:rate=2", "needs 0 <= rate <= 1"),
        ("bit-flip:bits=0/3", "needs bit >= 1"),
        ("bit-flip:bits=65", "needs bits in 1..64 for float64: got bits=.65,."),
        ("bit-flip:bits=3/3", "needs each bit once"),
        ("bit-flip:columns=300", "needs columns <= d: got columns=300 with d=257"),
        ("bit-flip:columns=9,per_column=12", "needs per_column <= m: got per_column=12 with m=11"),
        ("bit-flip:columns=9,bits=33", "needs bits in 1..32 for float32: got bits=.33,."),
        ("stuck:worker=11", "needs worker < m: got worker=11 with m=11 workers, the largest is 10"),
        ("stuck:worker=0,column=257", "needs column < d: got column=257 with d=257"),
        ("stuck:worker=0,at=2", "needs at = 0 or 1"),
        ("silent-corruption:worker=0,stride=0", "needs stride >= 1"),
        ("silent-corruption:worker=0,nan=-1", "needs 0 <= nan <= 1"),
        ("silent-corruption:worker=0,first=257", "needs first < d: got first=257 with d=257"),
        ("crash:worker=11", "needs worker < m"),
        ("crash:worker=0,round=-1", "needs round >= 0"),
        ("mimic:q=4,worker=5,warmup=3", "needs worker or warmup, not both"),
        ("fang:q=3,stretch=0.5", "needs stretch >= 1"),
        ("fang:q=5,target=krum", r"2q \+ 2 < m against Krum: got q=5 .* the largest q is 4"),
        ("fang:q=3,target=median", "must be one of 'trimmed-mean', 'krum'"),
        ("optimal-alie:q=3", "needs the rule of a run for against=self"),
        ("optimal-alie:q=3,evaluations=0", "evaluations >= 1"),
        ("optimal-ipm:q=3,against=(krum:b=9)", "b=9"),
        ("mimic:q=4,worker=2", "needs an honest worker to copy, 4 <= worker < m: got worker=2"),
        ("min-max:q=2,direction=up", "must be one of 'unit', 'std', 'sign'"),
        ("inner-product:q=2,epsilon=x", "epsilon must be a number"),
    ],
)
def test_invalid_attacks_are_rejected(text: str, message: str) -> None:
    G = tensor("float32")
    before = words(G).copy()
    with pytest.raises(ValueError, match=message):
        corrupt(parse_attack(text), G)
    assert np.array_equal(words(G), before)


@pytest.mark.parametrize(("kind", "bits"), [("float16", 16), ("bfloat16", 16), ("float64", 64)])
def test_bits_must_exist_in_the_dtype(kind: str, bits: int) -> None:
    BitFlip(columns=1, bits=(bits,)).check(M, D, kind)
    if bits < 64:
        with pytest.raises(ValueError, match=rf"1..16 for {kind}.*bits correspond to"):
            BitFlip(columns=1).check(M, D, kind)
        with pytest.raises(ValueError, match=f"1..16 for {kind}"):
            Stuck(worker=0, bits=(17,)).check(M, D, getattr(torch, kind))


def test_known_sizes_are_checked_before_the_run() -> None:
    Gambler().check(20)
    Gambler().check(20, servers=20)
    with pytest.raises(ValueError, match="got servers=20 where there are 4"):
        Gambler().check(20, servers=4)
    with pytest.raises(TypeError, match="integer m"):
        Gaussian(q=1).check(2.5)  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match="one of the dtypes float16, bfloat16, float32, float64: got i"
    ):
        Gaussian(q=1).check(3, 4, np.int32)


@pytest.mark.parametrize("value", [True, "3", None, 1j])
def test_parameters_must_be_numbers(value: object) -> None:
    for cls, field in ((ConstantRows, "value"), (Omniscient, "scale"), (SignFlip, "scale")):
        with pytest.raises(TypeError, match=f"needs a number {field}"):
            cls(1, value)  # type: ignore[arg-type]


def test_inputs_other_than_a_matrix_are_rejected() -> None:
    rng = np.random.default_rng(0)
    attack = Gaussian(q=1)
    frozen = np.zeros((3, 4))
    frozen.flags.writeable = False
    for G, error, message in [
        ([[1.0, 2.0]], TypeError, "NumPy array or torch tensor: got list"),
        (np.zeros(3), ValueError, r"row i from worker i: got shape \(3,\)"),
        (torch.zeros(2, 3, 4), ValueError, r"got shape \(2, 3, 4\)"),
        (np.zeros((3, 4), int), TypeError, "got int64"),
        (np.zeros((3, 4), ">f4"), TypeError, "got >f4"),
        (torch.zeros(3, 4, device="meta"), TypeError, "memory of the CPU: got meta"),
        (frozen, ValueError, "read-only"),
        (np.zeros((0, 4)), ValueError, "m >= 1"),
    ]:
        with pytest.raises(error, match=message):
            attack.corrupt(G, rng=rng)
    with pytest.raises(ValueError, match=r"start \+ columns <= d: got 3 \+ 4 with d=5"):
        attack.corrupt(np.zeros((3, 4)), rng=rng, start=3, d=5)


def test_matrix_without_columns_is_accepted() -> None:
    for attack in EXAMPLES:
        if isinstance(attack, (BitFlip, Stuck)) or "model=cells" in str(attack):
            continue  # these refer to columns that must exist
        G = np.zeros((M, 0), np.float32)
        touched = attack.corrupt(G, rng=attack_rng(0, 0), round=1, previous=G.copy())
        assert touched.count == 0
        assert touched.rows.size == 0
        assert touched.most_per_column == 0


def test_a_tensor_that_requires_a_gradient_is_corrupted_too() -> None:
    G = torch.ones(4, 6, requires_grad=True)
    ConstantRows(q=1, value=5.0).corrupt(G, rng=attack_rng(0, 0))
    assert G[0, 0].item() == 5.0


def test_attacks_do_not_import_torch() -> None:
    code = "import sys, phocas.attacks; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(("d", "servers"), [(10, 4), (3, 5), (0, 2), (2431018, 20), (20, 1)])
def test_shards_are_those_of_array_split(d: int, servers: int) -> None:
    expected = [len(part) for part in np.array_split(np.empty(d), servers)]
    bounds = shard_bounds(d, servers)
    assert [stop - start for start, stop in bounds] == expected
    assert bounds[0][0] == 0
    assert bounds[-1][1] == d
    with pytest.raises(ValueError, match="servers >= 1"):
        shard_bounds(d, 0)


def test_attacks_without_bits_or_integer_labels_are_rejected() -> None:
    for text in ("bit-flip:bits=", "stuck:worker=0,bits="):
        with pytest.raises(ValueError, match="needs at least one bit: got none"):
            parse_attack(text)
    targets = np.zeros((4, 3))
    with pytest.raises(ValueError, match=r"integer labels.*got shape \(4, 3\) of float64"):
        parse_attack("label-flip:q=1").corrupt_labels(targets, 0, rng=np.random.default_rng(0))


def test_gambler_gets_the_number_of_servers_unless_its_spec_sets_it() -> None:
    assert parse_attack("gambler", servers=4) == Gambler(servers=4)
    assert parse_attack("gambler:servers=7", servers=4) == Gambler(servers=7)
    assert parse_attack("crash:worker=1", servers=4) == parse_attack("crash:worker=1")
