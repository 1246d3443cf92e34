"""Sharded checkpoints, LoRA adapters, files that are left out, and receipts that are verified."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.integrations.test_merging import read, run, same_bits, states, written

from phocas.integrations.merging import merge as merging
from phocas.integrations.merging import merge_files
from phocas.integrations.merging.adapters import factored
from phocas.integrations.merging.sources import open_source
from phocas.rules import parse_rule
from phocas.rules.reference import reference

State = dict[str, torch.Tensor]


def save_shards(folder: Path, state: State, cuts: Sequence[int]) -> Path:
    """Write a checkpoint as Hugging Face does, with a new shard before each cut."""
    folder.mkdir()
    names = sorted(state)
    bounds = [0, *cuts, len(names)]
    places: dict[str, str] = {}
    for number in range(len(cuts) + 1):
        part = names[bounds[number] : bounds[number + 1]]
        file = f"model-{number + 1:05}-of-{len(cuts) + 1:05}.safetensors"
        save_file({name: state[name] for name in part}, folder / file, {"format": "pt"})
        places |= dict.fromkeys(part, file)
    size = sum(tensor.nbytes for tensor in state.values())
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": places}))
    return index


def rejected(capsys: pytest.CaptureFixture[str], folder: Path, *words: Any) -> str:
    """Run the command; check that it prints one line and writes nothing; return the line."""
    before = sorted(folder.rglob("*"))
    assert run("aggregate", *map(str, words), "--quiet") == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert sorted(folder.rglob("*")) == before
    return said


# -- sharded checkpoints ---------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["heraclius:b=2", "nnm:b=2|phocas:b=2"])
def test_shards_are_merged_as_one_checkpoint(tmp_path: Path, rule: str) -> None:
    """Folders, an index, other shards and a whole file: the rule sees the same rows."""
    found = states(9)
    paths = [save_shards(tmp_path / str(i), found[i], [2, 5]).parent for i in range(7)]
    paths[1] /= "model.safetensors.index.json"
    paths.append(save_shards(tmp_path / "7", found[7], [4]).parent)
    paths.append(written(tmp_path, found[8:])[0])
    merged = merge_files(paths, rule, tmp_path / "out")
    out = tmp_path / "out"
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index == json.loads((paths[0] / "model.safetensors.index.json").read_text())
    assert sorted(path.name for path in merged.outputs) == sorted(
        path.name for path in out.iterdir()
    )
    values = {name: load_file(out / file)[name] for name, file in index["weight_map"].items()}
    order = open_source(paths[0]).tensors
    in_order = [{name: state[name] for name in order} for state in found]
    same_bits(values, {name: parse_rule(rule)(in_order)[name] for name in values})
    assert open_source(out).metadata == {"format": "pt"}


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def wrong_shard(index: Path) -> str:
    (index.parent / "model-00002-of-00002.safetensors").unlink()
    return "names the shard model-00002-of-00002.safetensors, which is missing"


def wrong_location(index: Path) -> str:
    edit(index, lambda c: c["weight_map"].update(a="model-00002-of-00002.safetensors"))
    return "has 'a', and model.safetensors.index.json places it in model-00002-of-00002"


def lacks_a_tensor(index: Path) -> str:
    edit(index, lambda c: c["weight_map"].pop("a"))
    return "has 'a', and model.safetensors.index.json does not list it"


def invents_a_tensor(index: Path) -> str:
    edit(index, lambda c: c["weight_map"].update(d="model-00001-of-00002.safetensors"))
    return "places 'd' in model-00001-of-00002.safetensors, which lacks it"


def has_a_tensor_in_two_shards(index: Path) -> str:
    state = {"a": torch.ones(3), "c": torch.ones(3)}
    save_file(state, index.parent / "model-00002-of-00002.safetensors")
    return "model-00002-of-00002.safetensors has 'a', and model.safetensors.index.json places it in"


def lists_a_tensor_twice(index: Path) -> str:
    text = index.read_text().replace('"weight_map": {', '"weight_map": {"a": "x", ')
    index.write_text(text)
    return "two of its tensors have the same name"


def wrong_size(index: Path) -> str:
    edit(index, lambda c: c["metadata"].update(total_size=1))
    return "says total_size 1: the tensors have 36 bytes"


def leads_out_of_its_folder(index: Path) -> str:
    edit(index, lambda c: c["weight_map"].update(a="../0/model-00001-of-00002.safetensors"))
    return "shards must be .safetensors in the folder of the index"


def is_no_index(index: Path) -> str:
    index.write_text("[]")
    return "must have a weight_map"


def is_no_json(index: Path) -> str:
    index.write_text("[" * 100_000)
    return "cannot be read"


def has_another_shape(index: Path) -> str:
    save_file({"c": torch.ones(2, 2)}, index.parent / "model-00002-of-00002.safetensors")
    edit(index, lambda c: c["metadata"].pop("total_size"))
    return "key 'c' has the shape (2, 2), and (3,) in"


def has_two_indices(index: Path) -> str:
    (index.parent / "other.safetensors.index.json").write_text("{}")
    return "must have one file of tensors, or one index"


def has_a_pickle_as_a_shard(index: Path) -> str:
    torch.save({"c": torch.ones(3)}, index.parent / "model-00002-of-00002.safetensors")
    return "must be .safetensors by its content"


LIES = [
    wrong_shard,
    wrong_location,
    lacks_a_tensor,
    invents_a_tensor,
    has_a_tensor_in_two_shards,
    lists_a_tensor_twice,
    wrong_size,
    leads_out_of_its_folder,
    is_no_index,
    is_no_json,
    has_another_shape,
    has_two_indices,
    has_a_pickle_as_a_shard,
]


@pytest.mark.parametrize("lie", LIES)
def test_index_with_wrong_entries_is_rejected(
    tmp_path: Path, lie: Callable[[Path], str], capsys: pytest.CaptureFixture[str]
) -> None:
    state = {name: torch.ones(3) for name in "abc"}
    indices = [save_shards(tmp_path / str(i), state, [2]) for i in range(3)]
    complaint = lie(indices[1])
    words = [*(index.parent for index in indices), "--rule", "median", "-o", tmp_path / "out"]
    assert complaint in rejected(capsys, tmp_path, *words)


@pytest.mark.parametrize("name", ["out.safetensors", "file", "full"])
def test_output_of_shards_is_a_new_folder(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "model.safetensors").write_text("old")
    folders = [save_shards(tmp_path / str(i), {"a": torch.ones(3)}, []).parent for i in range(3)]
    words = [*folders, "--rule", "median", "-o", tmp_path / name]
    assert "the output must be a" in rejected(capsys, tmp_path, *words)


def test_shards_that_are_not_finite_leave_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {"a": torch.ones(3), "b": torch.full((3,), torch.nan)}
    folders = [save_shards(tmp_path / str(i), state, [1]).parent for i in range(3)]
    said = rejected(capsys, tmp_path, *folders, "--rule", "median", "-o", tmp_path / "out")
    assert "3 values of the merge are not finite" in said


# -- LoRA adapters ---------------------------------------------------------------------------------

CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["q", "conv"],
}
SHAPES = {"model.q": ((24, 20), "weight"), "model.conv": ((6, 5, 3, 3), "weight")}


def save_adapter(
    folder: Path, r: int, seed: int, dtype: torch.dtype = torch.float32, **config: Any
) -> Path:
    """Write an adapter of two modules as PEFT does, with an embedding and a saved head."""
    folder.mkdir()
    rng = torch.Generator().manual_seed(seed)
    rank = config.get("rank_pattern", {}).get("q", r)
    state = {
        "base_model.model.q.lora_A.weight": torch.randn(rank, 20, generator=rng).to(dtype),
        "base_model.model.q.lora_B.weight": torch.randn(24, rank, generator=rng).to(dtype),
        "base_model.model.conv.lora_A.weight": torch.randn(r, 5, 3, 3, generator=rng),
        "base_model.model.conv.lora_B.weight": torch.randn(6, r, 1, 1, generator=rng),
        "base_model.model.embed.lora_embedding_A": torch.randn(r, 11, generator=rng),
        "base_model.model.embed.lora_embedding_B": torch.randn(7, r, generator=rng),
        "base_model.model.head.weight": torch.randn(3, 4, generator=rng),
    }
    save_file(state, folder / "adapter_model.safetensors", {"format": "pt"})
    content = {**CONFIG, "r": r, **config}
    (folder / "adapter_config.json").write_text(json.dumps(content))
    return folder


def products(folder: Path) -> dict[str, Any]:
    """Return what each module adds to its weight, as PEFT computes it, and the saved head."""
    state = load_file(folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    found: dict[str, Any] = {"head": state["base_model.model.head.weight"].numpy()}
    for module, end in (("q", "A.weight"), ("conv", "A.weight"), ("embed", "embedding_A")):
        a = state[f"base_model.model.{module}.lora_{end}"].double().flatten(1)
        b = state[f"base_model.model.{module}.lora_{end.replace('A', 'B', 1)}"].double().flatten(1)
        alpha = config.get("alpha_pattern", {}).get(module, config["lora_alpha"])
        scale = alpha / (a.shape[0] ** 0.5 if config.get("use_rslora") else a.shape[0])
        found[module] = (scale * b @ a).numpy()
    return found


def truncated(matrix: Any, rank: int) -> Any:
    u, s, v = np.linalg.svd(matrix, full_matrices=False)
    return (u[:, :rank] * s[:rank]) @ v[:rank]


@pytest.mark.parametrize("rule", ["median", "nnm:b=1|trimmed-mean:b=1", "krum:b=1"])
@pytest.mark.parametrize("rank", [None, 2, 40])
def test_adapters_of_different_ranks_are_merged_as_products(
    tmp_path: Path, rule: str, rank: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merging, "PART_COLUMNS", 64)  # several parts of a product, cut in rows
    folders = [
        save_adapter(tmp_path / "0", 4, 0),
        save_adapter(tmp_path / "1", 2, 1, use_rslora=True),
        save_adapter(tmp_path / "2", 8, 2, alpha_pattern={"q": 3}),
        save_adapter(tmp_path / "3", 4, 3, rank_pattern={"q": 5}, lora_alpha=1.5),
        save_adapter(tmp_path / "4", 1, 4),
    ]
    merged = merge_files(folders, rule, tmp_path / "out", rank=rank)
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert merged.rank == config["r"] == config["lora_alpha"] == (rank or 4)
    assert sorted(config["target_modules"]) == sorted(CONFIG["target_modules"])
    rows = [products(folder) for folder in folders]
    flat = np.stack([np.concatenate([row[n].ravel() for n in rows[0]]) for row in rows])
    whole = reference(parse_rule(rule), flat)
    found = products(tmp_path / "out")
    lost, first = 0.0, 0
    for name, example in rows[0].items():
        wanted = whole[first : first + example.size].reshape(example.shape)
        first += example.size
        best = wanted if name == "head" else truncated(wanted, rank or 4)
        np.testing.assert_allclose(found[name], best, rtol=0, atol=2e-5 * np.abs(wanted).max())
        lost += np.square(wanted - best).sum() if name != "head" else 0.0
    total = np.square(whole).sum() - np.square(rows[0]["head"] * 0 + found["head"]).sum()
    assert merged.kept == pytest.approx(1 - lost / total, abs=1e-4)


def test_configuration_has_what_most_adapters_agree_on(tmp_path: Path) -> None:
    """A malicious first adapter cannot name another base model, or choose the rank."""
    folders = [
        save_adapter(tmp_path / "0", 9, 0, base_model_name_or_path="evil", extra=1),
        save_adapter(tmp_path / "1", 4, 1, base_model_name_or_path="good", bias="none"),
        save_adapter(
            tmp_path / "2", 4, 2, base_model_name_or_path="good", target_modules=["conv", "q"]
        ),
    ]
    merge_files(folders, "median", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "good"
    assert config["target_modules"] == ["conv", "q"]
    assert config["r"] == 4
    assert "extra" not in config
    assert "bias" not in config


def test_types_of_the_first_adapter_are_kept(tmp_path: Path) -> None:
    kinds = [torch.bfloat16, torch.float32, torch.float16]
    folders = [save_adapter(tmp_path / str(i), 2, 0, kind) for i, kind in enumerate(kinds)]
    merge_files(folders, "median", tmp_path / "out")
    state = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert state["base_model.model.q.lora_A.weight"].dtype == torch.bfloat16
    assert state["base_model.model.conv.lora_A.weight"].shape == (2, 5, 3, 3)
    got, wanted = products(tmp_path / "out")["q"], products(folders[1])["q"]
    assert np.abs(got - wanted).max() < 0.05 * np.abs(wanted).max()


def test_products_are_not_all_in_memory_at_once(tmp_path: Path) -> None:
    """Six layers of 2 MB and eight clients have 96 MB of products."""
    folders = []
    for i in range(8):
        folder = tmp_path / str(i)
        folder.mkdir()
        state = {
            f"{layer}.lora_{letter}.weight": torch.randn(*shape)
            for layer in range(6)
            for letter, shape in (("A", (1 + i % 2, 1024)), ("B", (512, 1 + i % 2)))
        }
        save_file(state, folder / "adapter_model.safetensors")
        text = json.dumps({**CONFIG, "r": 1 + i % 2})
        (folder / "adapter_config.json").write_text(text)
        folders.append(folder)
    tracemalloc.start()
    try:
        merge_files(folders, "median", tmp_path / "out")
        assert tracemalloc.get_traced_memory()[1] < 48 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(1, 1), (7, 300), (300, 7), (120, 90)])
@pytest.mark.parametrize("scale", [1.0, 1e30, 1e-30])
def test_factors_are_the_nearest_of_their_rank(
    dtype: str, shape: tuple[int, int], scale: float
) -> None:
    matrix = np.random.default_rng(0).normal(size=shape).astype(dtype) * np.dtype(dtype).type(scale)
    for rank in (1, 3, 12):
        b, a = factored(matrix, rank)
        assert (b.shape, a.shape, b.dtype) == ((shape[0], rank), (rank, shape[1]), matrix.dtype)
        exact = matrix.astype(np.float64)
        best = np.linalg.norm(exact - truncated(exact, rank))
        got = np.linalg.norm(exact - b.astype(np.float64) @ a.astype(np.float64))
        assert got <= best * 1.001 + 1e-5 * np.linalg.norm(exact)


def test_factors_of_zeros_and_of_nan() -> None:
    assert not np.any(factored(np.zeros((4, 5)), 2)[0])
    b, a = factored(np.full((4, 5), np.inf), 2)
    assert np.isnan(b).all()
    assert np.isnan(a).all()


def drop_config(folder: Path) -> str:
    (folder / "adapter_config.json").unlink()
    return "needs adapter_config.json beside it, with r and lora_alpha"


def configured(complaint: str, **config: Any) -> Callable[[Path], str]:
    def spoil(folder: Path) -> str:
        edit(folder / "adapter_config.json", lambda content: content.update(config))
        return complaint

    return spoil


def stored(complaint: str, change: Callable[[State], object]) -> Callable[[Path], str]:
    def spoil(folder: Path) -> str:
        path = folder / "adapter_model.safetensors"
        state = load_file(path)
        change(state)
        save_file(state, path)
        return complaint

    return spoil


Q = "base_model.model.q"


@pytest.mark.parametrize(
    "spoil",
    [
        drop_config,
        configured("must be the configuration of a LoRA adapter", peft_type="LOHA"),
        configured("says rank 3 for 'base_model.model.conv': it has rank 4", r=3),
        configured("lora_alpha must be a number: got None", lora_alpha=None),
        configured("lora_alpha must be finite: got inf", lora_alpha=float("inf")),
        configured("lora_alpha must be finite", lora_alpha=10**400),
        configured("adapters with use_dora cannot be merged", use_dora=True),
        configured("change the base model", init_lora_weights="pissa_niter_4"),
        configured("alpha_pattern must have names of modules", alpha_pattern={"(a+)+": 1}),
        configured("rank_pattern must have names of modules", rank_pattern=3),
        stored("and lacks 'base_model.model.q.lora_B", lambda s: s.pop(f"{Q}.lora_B.weight")),
        stored(
            "must be a matrix A or B of LoRA",
            lambda s: s.update({f"{Q}.lora_magnitude_vector": torch.ones(3)}),
        ),
        stored(
            "must have matrices A (r, inputs) and B (outputs, r)",
            lambda s: s.update({f"{Q}.lora_B.weight": torch.ones(24, 3)}),
        ),
        stored("has two tensors for", lambda s: s.update({Q: torch.ones(3)})),
        stored(
            "has the shape (25, 20), and (24, 20) in",
            lambda s: s.update({f"{Q}.lora_B.weight": torch.ones(25, 4)}),
        ),
    ],
)
def test_bad_adapter_is_rejected(
    tmp_path: Path, spoil: Callable[[Path], str], capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [save_adapter(tmp_path / str(i), 4, i) for i in range(3)]
    complaint = spoil(folders[1])
    words = [*folders, "--rule", "median", "-o", tmp_path / "out"]
    assert complaint in rejected(capsys, tmp_path, *words)


def test_rank_is_for_adapters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = written(tmp_path, states(3, wrong=0))
    words = [*paths, "--rule", "median", "-o", tmp_path / "out", "--rank", 2]
    assert "a rank is for LoRA adapters: got rank=2" in rejected(capsys, tmp_path, *words)
    folders = [save_adapter(tmp_path / str(i), 4, i) for i in range(3)]
    words = [*folders, "--rule", "median", "-o", tmp_path / "out", "--rank", 0]
    assert "rank >= 1: got rank=0" in rejected(capsys, tmp_path, *words)


# -- files that are left out -----------------------------------------------------------------------


def bad_files(folder: Path, good: Path) -> list[Path]:
    """Return files that cannot be merged, each for another reason."""
    (folder / "short").write_bytes(good.read_bytes()[:-3])
    (folder / "text").write_text("no tensors")
    save_file({"other": torch.ones(3)}, folder / "keys")
    os.mkfifo(folder / "pipe")
    (folder / "empty").mkdir()
    return [folder / name for name in ("short", "text", "keys", "pipe", "empty", "missing")]


def test_bad_files_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = states(5, wrong=1)
    paths = written(tmp_path, found)
    bad = bad_files(tmp_path, paths[0])
    words = [*bad[:3], *paths[:2], *bad[3:], *paths[2:], "--rule", "trimmed-mean:b=2"]
    weights = "9,9,9,1,2,9,9,9,3,4,5"
    options = ["--weights", weights, "--max-share", "0.24", "-o", tmp_path / "out", "--skip-bad"]
    assert run("aggregate", *map(str, [*words, *options]), "--quiet") == 0
    said = capsys.readouterr().err.splitlines()
    assert len(said) == len(bad)
    assert all(line.startswith("left out: ") for line in said)
    assert all(str(path) in line for path, line in zip(bad, said, strict=True))
    order = open_source(paths[0]).tensors
    rule = parse_rule("trimmed-mean:b=2").weighted([1, 2, 3, 4, 5], 0.24)
    same_bits(read(tmp_path / "out"), rule([{n: state[n] for n in order} for state in found]))


def test_rule_must_hold_for_the_files_that_are_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = written(tmp_path, states(5, wrong=0))
    bad = bad_files(tmp_path, paths[0])[:2]
    words = [*paths[:4], *bad, "--rule", "phocas:b=2", "-o", tmp_path / "out", "--skip-bad"]
    said = rejected(capsys, tmp_path, *words)
    assert "Phocas needs 2b < m: got b=2 with m=4" in said
    assert "left out:" in said
    assert str(bad[1]) in said
    assert "no file can be merged" in rejected(capsys, tmp_path, *bad, *words[6:])


# -- receipts --------------------------------------------------------------------------------------


def test_receipt_is_verified_and_changes_are_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = written(tmp_path, states(9))
    bad = bad_files(tmp_path, paths[0])
    out, slip = tmp_path / "out.safetensors", tmp_path / "receipt.json"
    words = ["aggregate", *map(str, [*paths, *bad]), "--skip-bad", "--quiet", "-o", str(out)]
    rule = ["--rule", "nnm:b=2|phocas:b=2"]
    assert run(*words, *rule, "--receipt", str(slip)) == 0
    content = json.loads(slip.read_text())
    assert [entry["name"] for entry in content["left_out"]] == [path.name for path in bad]
    assert "cut short" in content["left_out"][0]["why"]
    assert str(tmp_path) not in slip.read_text()
    capsys.readouterr()
    before = sorted(tmp_path.iterdir())

    def verify(*more: str) -> tuple[int, list[str]]:
        status = run(*words, *more, "--verify", str(slip))
        said = capsys.readouterr().err.splitlines()
        return status, [line for line in said if not line.startswith("left out")]

    assert verify(*rule) == (0, [])
    assert sorted(tmp_path.iterdir()) == before
    status, said = verify("--rule", "median")
    assert status == 1
    assert "the receipt has rule 'nnm:b=2|phocas:b=2': got 'median'" in said[0]
    whole = out.read_bytes()
    out.write_bytes(whole[:-1] + b"?")
    assert verify(*rule) == (
        1,
        [f"differs: {out} has another content than the output of the receipt"],
    )
    out.write_bytes(whole)
    (tmp_path / "text").write_text("other words")
    assert verify(*rule)[1] == [
        "differs: text is left out, and has another content than text in the receipt"
    ]
    (tmp_path / "text").write_text("no tensors")
    state = load_file(paths[3])
    state["scale"] += 1
    save_file(state, paths[3], metadata={"format": "pt"})
    status, said = verify(*rule)
    assert status == 1
    assert said[0].startswith("differs: client-3.bin is merged, and has another content")
    out.unlink()
    assert verify(*rule)[1][-1] == f"differs: {out}: there is no such output"


def test_receipts_of_folders_are_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shards = [
        save_shards(tmp_path / str(i), state, [3]).parent
        for i, state in enumerate(states(5, wrong=0))
    ]
    adapters = [save_adapter(tmp_path / f"a{i}", 1 + i, i) for i in range(5)]
    for number, folders in enumerate((shards, adapters)):
        out, slip = tmp_path / f"out{number}", tmp_path / f"{number}.json"
        words = ["aggregate", *map(str, folders), "--rule", "median", "-o", str(out), "--quiet"]
        assert run(*words, "--receipt", str(slip)) == 0
        assert run(*words, "--verify", str(slip)) == 0
        name = "adapter_config.json" if number else "model.safetensors.index.json"
        path = folders[2] / name
        path.write_text(path.read_text() + "\n")
        capsys.readouterr()
        assert run(*words, "--verify", str(slip)) == 1
        assert f"{folders[2].name} is merged, and has another content" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["no JSON", "[]", "{}", '{"inputs": [3], "output": {}}'])
def test_receipt_that_is_none_is_rejected(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = written(tmp_path, states(3, wrong=0))
    (tmp_path / "slip").write_text(text)
    words = [*paths, "--rule", "median", "-o", tmp_path / "out", "--verify", tmp_path / "slip"]
    assert "must be a receipt" in rejected(capsys, tmp_path, *words)


def test_verification_writes_no_receipt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["x", "--rule", "median", "-o", "y", "--verify", "z", "--receipt", "r"]
    assert "leave --receipt out" in rejected(capsys, tmp_path, *words)
