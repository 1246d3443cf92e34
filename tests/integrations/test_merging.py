"""Files merged by a rule: what the rule says of the same tensors in memory, or a clear refusal."""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers import hostile_values

import phocas
from phocas.cli import main
from phocas.integrations.merging import MergeRequest, merge_files, merged, open_tensors, receipt
from phocas.integrations.merging import merge as merging
from phocas.integrations.merging.tensors import TensorError
from phocas.rules import parse_rule
from phocas.rules.reference import reference

ROOT = Path(__file__).parent.parent.parent
RULES = [
    "mean",
    "phocas:b=2",
    "heraclius:b=2",
    "nnm:b=2|phocas:b=2",
    "geometric-median",
    "krum:b=2",
]

State = dict[str, torch.Tensor]


def states(m: int, dtype: torch.dtype = torch.float32, *, wrong: int = 2) -> list[State]:
    """Return state dicts with awkward sizes, counters and flags; the last ones lie."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for worker in range(m):
        liar = worker >= m - wrong
        state: State = {
            "conv.weight": torch.randn(7, 3, 5, 11, generator=generator).to(dtype),
            "conv.bias": torch.randn(1, generator=generator).to(dtype),
            "empty": torch.zeros(0, 4, dtype=dtype),
            "head": torch.randn(1025, 3, generator=generator).to(dtype),
            "scale": torch.randn((), generator=generator).to(dtype),
            "batches": torch.tensor(-5 if liar else 40, dtype=torch.int64),
            "mask": torch.tensor([True, not liar, liar]),
        }
        if liar:
            values = torch.tensor(hostile_values("float16")).to(dtype)
            for name in ("conv.weight", "head"):
                flat = state[name].view(-1)
                flat[: len(flat) // 10 * 10] = values.repeat(len(flat) // 10)
        found.append(state)
    return found


def write_safetensors(path: Path, state: State) -> None:
    save_file(state, path, metadata={"format": "pt"})


def write_npz(path: Path, state: State) -> None:
    with path.open("wb") as file:  # whatever the path is called
        np.savez(file, allow_pickle=False, **{name: value.numpy() for name, value in state.items()})


def write_compressed(path: Path, state: State) -> None:
    with path.open("wb") as file:
        np.savez_compressed(
            file, allow_pickle=False, **{name: value.numpy() for name, value in state.items()}
        )


def write_legacy(path: Path, state: State) -> None:
    torch.save(state, path, _use_new_zipfile_serialization=False)


def write_torch(path: Path, state: State) -> None:
    torch.save(state, path)


def read(path: Path) -> State:
    found = open_tensors(path)
    if found.format == "safetensors":
        return load_file(path)
    if found.format == "pt":
        loaded: State = torch.load(path, weights_only=True)
        return loaded
    with np.load(path) as archive:
        return {name: torch.from_numpy(archive[name]) for name in archive.files}


WRITERS: dict[str, Callable[[Path, State], None]] = {
    "safetensors": write_safetensors,
    "npz": write_npz,
    "compressed": write_compressed,
    "pt": write_torch,
    "legacy": write_legacy,
}


def written(folder: Path, found: Sequence[State], kind: str = "safetensors") -> list[Path]:
    paths = [folder / f"client-{i}.bin" for i in range(len(found))]
    for path, state in zip(paths, found, strict=True):
        WRITERS[kind](path, state)
    return paths


def same_bits(a: State, b: State) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert value.dtype == b[name].dtype
        assert value.shape == b[name].shape
        assert (
            value.numpy(force=True).tobytes() == b[name].numpy(force=True).tobytes()
            if (value.dtype != torch.bfloat16)
            else torch.equal(value.view(torch.int16), b[name].view(torch.int16))
        )


# -- results ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("rule", ["heraclius:b=2", "nnm:b=2|phocas:b=2"])
def test_files_have_the_bits_of_state_dicts_in_memory(
    tmp_path: Path, kind: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merging, "PART_COLUMNS", 2048)
    found = states(9)
    paths = written(tmp_path, found, kind)
    merge_files(paths, rule, tmp_path / "out")
    order = open_tensors(paths[0]).tensors  # blocks of columns follow the order of the file
    in_order = [{name: state[name] for name in order} for state in found]
    same_bits(read(tmp_path / "out"), parse_rule(rule)(in_order))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_type_and_rule(tmp_path: Path, rule: str, dtype: torch.dtype) -> None:
    found = states(9, dtype)
    paths = written(tmp_path, found)
    merged = merge_files(paths, rule, tmp_path / "out", explain=True, allow_nonfinite=True)
    order = open_tensors(paths[0]).tensors
    why = parse_rule(rule).explain([{name: state[name] for name in order} for state in found])
    same_bits(load_file(tmp_path / "out"), why.value)
    assert merged.dropped is not None
    np.testing.assert_allclose(merged.dropped, why.dropped, atol=1e-12)
    assert (merged.not_finite > 0) == (rule == "mean")


def test_types_may_be_mixed_in_a_file(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    rows = rng.normal(size=(7, 3000))
    rows[6] = 1e5
    found = [
        {
            "a": torch.from_numpy(row[:1000]).to(torch.bfloat16),
            "b": torch.from_numpy(row[1000:2500]).to(torch.float32),
            "c": torch.from_numpy(row[2500:]),
        }
        for row in rows
    ]
    merge_files(written(tmp_path, found), "nnm:b=1|phocas:b=1", tmp_path / "out")
    exact = np.stack(
        [np.concatenate([v.double().numpy() for v in each.values()]) for each in found]
    )
    wanted = reference(phocas.NNM(b=1) | phocas.Phocas(b=1), exact)
    got = load_file(tmp_path / "out")
    assert [got[name].dtype for name in "abc"] == [torch.bfloat16, torch.float32, torch.float64]
    values = np.concatenate([got[name].double().numpy() for name in "abc"])
    np.testing.assert_allclose(values[:1000], wanted[:1000], rtol=2**-8)
    np.testing.assert_allclose(values[1000:], wanted[1000:], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "rule",
    [
        "phocas:b=2",
        "cge:b=2",
        "clipping:radius=0.5|median",
        "centered-clipping:radius=3.0",
        "cell-filter:b=2|nnm:b=2|trimmed-mean:b=2",
        "cell-filter:b=2|clipping:radius=0.5|mean",
        "monitor:rule=phocas:b=2",
    ],
)
def test_updates_relative_to_a_base(tmp_path: Path, rule: str) -> None:
    rng = np.random.default_rng(1)
    base = rng.normal(size=300) * 100
    rows = base + rng.normal(size=(7, 300)) * 0.1
    rows[5:] = -base
    paths = [tmp_path / f"{i}.npy" for i in range(8)]
    for path, row in zip(paths, [*rows, base], strict=True):
        np.save(path, row)
    merge_files(paths[:7], rule, tmp_path / "out.npy", base=paths[7])
    wanted = base + reference(parse_rule(rule), rows - base)
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), wanted, rtol=1e-12)
    without = tmp_path / "without.npy"
    merge_files(paths[:7], rule, without)
    if rule in ("phocas:b=2", "monitor:rule=phocas:b=2"):  # windows move with their values
        assert np.array_equal(np.load(without), np.load(tmp_path / "out.npy"))
    elif rule == "cell-filter:b=2|nnm:b=2|trimmed-mean:b=2":
        np.testing.assert_allclose(np.load(without), wanted)
    else:
        assert not np.allclose(np.load(without), wanted)


@pytest.mark.parametrize("rule", ["phocas:b=2", "multi-krum:b=2", "clipping:radius=2.0|median"])
@pytest.mark.parametrize("based", [False, True])
def test_weights_of_files(tmp_path: Path, rule: str, *, based: bool) -> None:
    rng = np.random.default_rng(6)
    rows = rng.normal(size=(7, 300))
    rows[[1, 4]] = np.nan
    base = np.ones(300)
    paths = [tmp_path / f"{i}.npy" for i in range(8)]
    for path, row in zip(paths, [*rows, base], strict=True):
        np.save(path, row)
    words = ["aggregate", *map(str, paths[:7]), "--rule", rule, "-o", str(tmp_path / "out.npy")]
    words += ["--weights", "30,50,20,10,40,25,15", "--explain"]
    assert run(*words, *(["--base", str(paths[7])] if based else [])) == 0
    weighted = phocas.Weighted(parse_rule(rule), (30, 50, 20, 10, 40, 25, 15))
    wanted = reference(weighted, rows - base * based) + base * based
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), wanted, rtol=1e-6, atol=1e-6)


def test_arrays_of_other_memory_and_byte_order(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    rows = rng.normal(size=(5, 6, 8)).astype(np.float32)
    np.save(tmp_path / "0.npy", rows[0].astype(">f4"))
    for i in range(1, 5):
        np.save(tmp_path / f"{i}.npy", np.asfortranarray(rows[i]) if i % 2 else rows[i])
    paths = [tmp_path / f"{i}.npy" for i in range(5)]
    merge_files(paths, "median", tmp_path / "out.npy")
    out = np.load(tmp_path / "out.npy")
    assert out.dtype == np.dtype(">f4")
    assert np.array_equal(out, np.median(rows, axis=0))


def test_dropped_shares_are_reported_by_tensor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [{"a": torch.full((50,), 1.0 * i), "b": torch.full((70,), 1.0 * i)} for i in range(5)]
    found[3]["b"] = torch.full((70,), 1e9)
    paths = written(tmp_path, found)
    words = ["aggregate", *map(str, paths), "--rule", "phocas:b=1", "-o", str(tmp_path / "out")]
    assert run(*words, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["tensors"]["b"] == [0, 0, 0, 1, 0]
    assert said["tensors"]["a"][3] == 0
    assert said["files"][3]["dropped"] == pytest.approx(70 / 120)
    assert run(*words, "--explain") == 0
    shown = capsys.readouterr().out
    assert "client-3.bin    58.3%" in shown
    assert all(len(line) <= 80 for line in shown.splitlines()[:-1])


def test_state_dict_of_torch_named_safetensors_is_read_by_content(tmp_path: Path) -> None:
    for kind in (write_torch, write_legacy):
        paths = [tmp_path / f"{i}.safetensors" for i in range(3)]
        for i, path in enumerate(paths):
            kind(path, {"a": torch.full((3,), float(i))})
        merge_files(paths, "median", tmp_path / "out.pt")
        assert torch.load(tmp_path / "out.pt")["a"].tolist() == [1.0] * 3


def test_metadata_that_all_files_share_is_kept(tmp_path: Path) -> None:
    for i in range(3):
        about = {"format": "pt", "client": str(i)}
        save_file({"a": torch.ones(3) * i}, tmp_path / f"{i}", metadata=about)
    merge_files([tmp_path / str(i) for i in range(3)], "median", tmp_path / "out")
    assert open_tensors(tmp_path / "out").metadata == {"format": "pt"}


def shards(folder: Path, count: int) -> list[str]:
    """Return files of one name in folders of their own, whose values are the folder's number."""
    paths = [folder / f"client-{i}" / "model-00001-of-00002.safetensors" for i in range(count)]
    for i, path in enumerate(paths):
        path.parent.mkdir()
        save_file({"a": torch.full((5,), float(i))}, path)
    return list(map(str, paths))


def test_files_of_one_name_are_reported_by_unique_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = shards(tmp_path, 4)
    shutil.copy(files[1], tmp_path / "alone.safetensors")
    monkeypatch.chdir(tmp_path / "client-0")
    files[0] = Path(files[0]).name  # as seen from here
    words = ["aggregate", *files, "../alone.safetensors", "--rule", "median", "-o", "../out"]
    assert run(*words, "--explain", "--receipt", "../slip") == 0
    shown = capsys.readouterr()
    wanted = [f"client-{i}/model-00001-of-00002.safetensors" for i in range(4)]
    wanted.append("alone.safetensors")
    assert [line.split()[0] for line in shown.out.splitlines()[1:6]] == wanted
    assert [each["name"] for each in json.loads(Path("../slip").read_text())["inputs"]] == wanted
    assert f"{wanted[4]} has the content of {wanted[1]}" in shown.err


# -- values that are not finite --------------------------------------------------------------------


def two_of_five_with_nan(folder: Path) -> list[str]:
    """Return the words of a merge that two files spoil."""
    found = [{"a": torch.full((5,), float(i)), "b": torch.ones(3)} for i in range(5)]
    for bad in (1, 3):
        found[bad]["a"][:2] = torch.nan
    files = map(str, written(folder, found))
    return ["aggregate", *files, "--rule", "trimmed-mean:b=1", "-o", str(folder / "out")]


@pytest.mark.parametrize("before", [None, b"what was there"])
def test_merge_that_is_not_finite_is_rejected(
    tmp_path: Path, before: bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
    out, slip = tmp_path / "out", tmp_path / "slip"
    if before is not None:
        out.write_bytes(before)
    assert run(*two_of_five_with_nan(tmp_path), "--receipt", str(slip), "--quiet") == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "2 values of the merge are not finite" in said
    assert "NaN or inf are in client-1.bin, client-3.bin" in said
    assert "--allow-nonfinite" in said
    assert (out.read_bytes() if out.exists() else None) == before
    assert not slip.exists()
    assert not list(tmp_path.glob("*.tmp"))


def test_merge_that_is_not_finite_is_written_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slip = tmp_path / "slip"
    words = two_of_five_with_nan(tmp_path)
    assert run(*words, "--receipt", str(slip), "--allow-nonfinite") == 0
    assert "2 values of the merge are not finite" in capsys.readouterr().err
    assert json.loads(slip.read_text())["not_finite"] == 2
    assert torch.isfinite(load_file(tmp_path / "out")["a"]).tolist() == [False] * 2 + [True] * 3


# -- receipts --------------------------------------------------------------------------------------


def test_receipt_of_a_repeated_merge_is_the_same(tmp_path: Path) -> None:
    receipts = []
    for turn, threads in enumerate((1, 2)):
        folder = tmp_path / str(turn)
        folder.mkdir()
        paths = written(folder, states(9))
        phocas.set_num_threads(threads)
        merged = merge_files(paths, "nnm:b=2|heraclius:b=2", folder / "out", digest=True)
        receipts.append(receipt(merged, MergeRequest("nnm:b=2|heraclius:b=2")))
    assert receipts[0] == receipts[1]
    assert receipts[0]["not_finite"] == 0
    assert "multiply-add" in receipts[0]["instructions"]
    assert receipts[0]["output"]["bytes"] == (tmp_path / "0" / "out").stat().st_size


def test_copies_under_other_names_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = written(tmp_path, [*states(3, wrong=0), states(1, wrong=0)[0]])
    out, slip = str(tmp_path / "out"), str(tmp_path / "receipt.json")
    words = ["aggregate", *map(str, paths[:3]), "--rule", "median", "-o", out]
    assert run(*words, str(paths[0]), "--receipt", slip) == 0
    assert "client-0.bin: it counts as two workers" in capsys.readouterr().err
    assert run(*words, str(paths[3]), "--receipt", slip) == 0
    assert "client-3.bin has the content of client-0.bin" in capsys.readouterr().err
    assert json.loads(Path(slip).read_text())["rule"] == "median"


# -- refusals --------------------------------------------------------------------------------------


def run(*words: str) -> int:
    """Run the command in this process and return its status."""
    before = sys.argv
    sys.argv = ["phocas", *words]
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        sys.argv = before
    return 0


def spoil_keys(folder: Path) -> str:
    save_file({"b": torch.ones(3)}, folder / "1")
    return "1 lacks 'a'"


def spoil_more_keys(folder: Path) -> str:
    save_file({"a": torch.ones(4), "b": torch.ones(3)}, folder / "1")
    return "1 has 'b' too"


def spoil_shape(folder: Path) -> str:
    save_file({"a": torch.ones(5)}, folder / "1")
    return "1, key 'a' has the shape (5,), and (4,) in"


def spoil_rank(folder: Path) -> str:
    for i in range(3):
        save_file({"q.lora_A.weight": torch.ones(4 if i else 8, 6)}, folder / str(i))
    return "0 has LoRA matrices: adapter_config.json must be beside it, with r and lora_alpha"


def spoil_type(folder: Path) -> str:
    save_file({"a": torch.ones(4, dtype=torch.float16)}, folder / "1")
    return "1, key 'a' is float16, and float32 in"


def spoil_end(folder: Path) -> str:
    content = (folder / "1").read_bytes()
    (folder / "1").write_bytes(content[:-3])
    return "1 cannot be read: it is cut short, damaged, or holds objects (Error while deserial"


def spoil_header(folder: Path) -> str:
    (folder / "1").write_bytes((folder / "1").read_bytes()[:20])
    return "1 cannot be read: it is cut short"


def spoil_offsets(folder: Path) -> str:
    text = json.dumps({"a": {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]}}).encode()
    (folder / "1").write_bytes(struct.pack("<Q", len(text)) + text + bytes(24))
    return "invalid offset for tensor `a`"


def spoil_long_header(folder: Path) -> str:
    (folder / "1").write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    return "header too large"


def spoil_array_header(folder: Path) -> str:
    """NumPy raises tokenize.TokenError for it, which is no ValueError."""
    text = b"{'descr': '<f4', 'fortran_order': False, 'shape': (3,"
    (folder / "1").write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text)
    return "the header of the array cannot be parsed"


def spoil_twice(folder: Path) -> str:
    entry = '"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}'
    text = ("{" + entry + "," + entry + "}").encode()
    (folder / "1").write_bytes(struct.pack("<Q", len(text)) + text + bytes(16))
    return "two of its tensors have the same name"


def spoil_small_floats(folder: Path) -> str:
    save_file({"a": torch.ones(4).to(torch.float8_e4m3fn)}, folder / "1")
    return "it is F8_E4M3"


def spoil_zip(folder: Path) -> str:
    np.savez(folder / "1.npz", a=np.ones(400, np.float32))
    (folder / "1").write_bytes((folder / "1.npz").read_bytes()[:900])
    return "1 cannot be read: it is cut short"


def spoil_array(folder: Path) -> str:
    np.save(folder / "1.npy", np.ones(400, np.float32))
    (folder / "1").write_bytes((folder / "1.npy").read_bytes()[:900])
    return "the array must end at byte 1728: it ends at byte 900"


def spoil_objects(folder: Path) -> str:
    np.save(folder / "1.npy", np.array([{}], object), allow_pickle=True)
    (folder / "1.npy").rename(folder / "1")
    return "1, key 'array' cannot be read: it is cut short, damaged, or holds objects"


class Bomb:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return Path.touch, (self.target,)


def spoil_pickle(folder: Path) -> str:
    torch.save({"a": Bomb(folder / "burst")}, folder / "1")
    return "holds objects, which are never unpickled"


def spoil_plain_pickle(folder: Path) -> str:
    (folder / "1").write_bytes(pickle.dumps({"a": Bomb(folder / "burst")}))
    return "holds objects, which are never unpickled"


def spoil_named_pickle(folder: Path) -> str:
    """Torch reads what is called so by another library, whose errors are its own."""
    (folder / "1.safetensors").write_bytes(pickle.dumps({"a": Bomb(folder / "burst")}))
    return "1.safetensors cannot be read as tensors alone"


def spoil_named_zip(folder: Path) -> str:
    torch.save({"a": Bomb(folder / "burst")}, folder / "1.safetensors")
    return "1.safetensors cannot be read as tensors alone"


def spoil_pipe(folder: Path) -> str:
    (folder / "1").unlink()
    os.mkfifo(folder / "1")
    return "1 must be a regular file: it is a pipe or a device"


def spoil_folder(folder: Path) -> str:
    (folder / "1").unlink()
    (folder / "1").mkdir()
    return "1 must have a file of tensors: it has none"


def spoil_list(folder: Path) -> str:
    torch.save([torch.ones(4)], folder / "1")
    return "1 must be a mapping of names to tensors: got list"


def spoil_nested(folder: Path) -> str:
    torch.save({"a": torch.ones(4), "epoch": 3}, folder / "1")
    return "1, key 'epoch' must be a dense tensor: got int"


def spoil_content(folder: Path) -> str:
    (folder / "1").write_text("hello, this is no tensor")
    return "1 must be .safetensors, .npz, .npy or .pt by its content"


def spoil_nothing(folder: Path) -> str:
    (folder / "1").write_bytes(b"")
    return "1 must be .safetensors, .npz, .npy or .pt by its content"


def spoil_presence(folder: Path) -> str:
    (folder / "1").unlink()
    return "1: no such file or directory"


SPOILERS = [value for name, value in sorted(globals().items()) if name.startswith("spoil_")]


@pytest.mark.parametrize("spoil", SPOILERS)
def test_bad_files_are_rejected_by_name(
    tmp_path: Path, spoil: Callable[[Path], str], capsys: pytest.CaptureFixture[str]
) -> None:
    for i in range(3):
        save_file({"a": torch.ones(4)}, tmp_path / str(i))
    complaint = spoil(tmp_path)
    named = tmp_path / "1.safetensors"
    files = [str(tmp_path / "0"), str(named if named.exists() else tmp_path / "1")]
    files.append(str(tmp_path / "2"))
    status = run("aggregate", *files, "--rule", "median", "-o", str(tmp_path / "out"))
    said = capsys.readouterr().err
    assert status == 2
    assert said.count("\n") == 1
    assert complaint in said
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "burst").exists()
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["0", "1", "--rule", "phocas:b=1"], "Phocas needs 2b < m: got b=1 with m=2"),
        (
            ["0", "1", "2", "--rule", "median", "-o", "1"],
            "the output must not be one of the inputs",
        ),
        (["0", "1", "--rule", "median", "--base", "2", "-o", "2"], "must not be one of the inputs"),
        (["0", "1", "--rule", "median", "-o", "."], "the output must be a file"),
        (
            ["0", "1", "2", "--rule", "median", "--weights", "1,2", "--max-share", "0.4"],
            "weights must be one for each of 3 files: got 2",
        ),
        (
            ["0", "1", "2", "--rule", "median", "-o", "out.npz"],
            "the output must be named .safetensors, like the format of the first file",
        ),
        (["0", "1", "--rule", "median", "--receipt", "0"], "the receipt must be a file of its own"),
        (
            ["0", "1", "2", "--rule", "median", "--weights", "1,1,1", "--max-share", "0.5"],
            "got 1 worker with max_share=0.5, the largest max_share is 0.4999",
        ),
    ],
)
def test_bad_requests_are_rejected(
    tmp_path: Path,
    words: list[str],
    complaint: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for i in range(3):
        save_file({"a": torch.ones(4)}, tmp_path / str(i))
    before = (tmp_path / "1").read_bytes()
    assert run("aggregate", *words, *([] if "-o" in words else ["-o", "out"])) == 2
    assert complaint in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))
    assert (tmp_path / "1").read_bytes() == before


@pytest.mark.parametrize("kind", WRITERS)
def test_damaged_bytes_are_read_or_rejected(tmp_path: Path, kind: str) -> None:
    """Whatever the bytes are, a file has tensors of the size they say, or a refusal."""
    path = tmp_path / "file"
    WRITERS[kind](path, {"a": torch.arange(40.0), "b": torch.ones(2, 3)})
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for turn in range(300):
        damaged = bytearray(whole[: rng.integers(1, len(whole))] if turn % 3 == 0 else whole)
        for place in rng.integers(
            0, min(len(damaged), 700 if turn % 2 else 1 << 30), size=turn % 5
        ):
            damaged[place] = rng.integers(0, 256)
        path.write_bytes(damaged)
        try:
            for tensor in open_tensors(path).tensors.values():
                assert tensor.open().shape == (tensor.columns,)
        except TensorError:
            refused += 1
    assert refused > 100


# -- processes -------------------------------------------------------------------------------------


def python(*words: str, **options: Any) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    return subprocess.Popen(
        [sys.executable, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        **options,
    )


def test_arrays_are_merged_without_torch(tmp_path: Path) -> None:
    """Loading torch takes longer than merging gigabytes."""
    paths = written(tmp_path, [{"w": torch.full((5,), float(i))} for i in range(5)])
    code = "import sys; sys.modules['torch'] = None;from phocas.cli import main; main()"
    words = ["aggregate", *map(str, paths), "--rule", "median", "-o", "out"]
    with python("-c", code, *words, "--explain", "--receipt", "told", cwd=tmp_path) as process:
        _, said = process.communicate()
    assert (process.returncode, said) == (0, "")
    assert load_file(tmp_path / "out")["w"].tolist() == [2.0] * 5


WAITS = """
import sys
from pathlib import Path
from phocas.integrations.merging import merge_files, merge
merge.PART_COLUMNS = 1024

def wait(done, size):
    if done > size // 2:
        print("half", flush=True)
        sys.stdin.readline()

merge_files([Path(f"client-{i}.bin") for i in range(9)], "phocas:b=2", Path("out"), progress=wait)
"""


@pytest.mark.parametrize("before", [None, b"what was there"])
def test_killed_merge_leaves_no_partial_file(tmp_path: Path, before: bytes | None) -> None:
    written(tmp_path, states(9))
    if before is not None:
        (tmp_path / "out").write_bytes(before)
    with python("-c", WAITS, cwd=tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "half\n"
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert ((tmp_path / "out").read_bytes() if before else None) == before
    assert before or not (tmp_path / "out").exists()
    assert not list(tmp_path.glob("*.tmp"))


def test_full_disk_is_reported_in_one_line_and_leaves_no_file(tmp_path: Path) -> None:
    paths = written(tmp_path, states(9))

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, 5_000))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    words = ["-m", "phocas", "aggregate", *map(str, paths), "--rule", "phocas:b=2", "-o", "out"]
    with python(*words, cwd=tmp_path, preexec_fn=limit) as process:
        _, said = process.communicate()
    assert process.returncode == 2
    assert said == "phocas: out: file too large\n"
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob("*.tmp"))


MEASURED = """
import sys
from phocas.cli import main
from phocas.integrations.merging import merged
merged.HELD_BYTES = int(sys.argv.pop(1))
try:
    main()
finally:
    with open("/proc/self/status") as file:
        print([line.split()[1] for line in file if line.startswith("VmHWM")][0])
"""


def peak_of_merge(folder: Path, size: int, held: int) -> int:
    """Return the peak resident memory of a merge of 8 files of a size, mapped files included."""
    block = np.random.default_rng(0).normal(size=size // 16).astype(np.float32)
    paths = [folder / f"{size}-{i}.safetensors" for i in range(8)]
    for i, path in enumerate(paths):
        save_file({f"t{k}": torch.from_numpy(block + np.float32(i)) for k in range(4)}, path)

    def limit() -> None:  # private memory
        resource.setrlimit(resource.RLIMIT_DATA, (300 << 20, 300 << 20))

    out = folder / f"{size}.safetensors"
    words = ["aggregate", *map(str, paths), "--rule", "nnm:b=2|phocas:b=2", "-o", str(out)]
    with python("-c", MEASURED, str(held), *words, "--quiet", preexec_fn=limit) as process:
        told, said = process.communicate()
    assert process.returncode == 0, said
    assert np.allclose(load_file(out)["t3"].numpy(), block + 3.5, atol=1.5)
    return int(told.split()[-1]) << 10


@pytest.mark.skipif(sys.platform != "linux", reason="pages are released on Linux")
def test_mapped_files_stay_out_of_memory(tmp_path: Path) -> None:
    """Eight files of 32 MB take less than a quarter of their size more than tiny ones."""
    tiny = peak_of_merge(tmp_path, 1 << 16, 16 << 20)
    assert peak_of_merge(tmp_path, 32 << 20, 16 << 20) - tiny < 64 << 20


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="pages are released on Linux")
def test_four_gigabytes_within_one_gigabyte_of_memory(tmp_path: Path) -> None:
    assert peak_of_merge(tmp_path, 500 << 20, merged.HELD_BYTES) < 1 << 30
