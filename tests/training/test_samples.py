"""Users' data: every kind gives the same batches, and unsupported data is rejected."""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils import data as torch_data

from phocas.data import Dataset, OwnData, load, parse_split
from phocas.training import Trainer
from phocas.training.samples import Samples
from phocas.training.sources import Arrays, Items

RNG = np.random.default_rng(0)
INPUTS = RNG.standard_normal((60, 5)).astype(np.float32)
TARGETS = np.arange(60) % 3
INDICES = np.array([[3, 59, 4, 3], [0, 10, 20, 30]])


class Squares(torch_data.Dataset[Any]):
    """A data set without a list of targets, which counts how often it is read."""

    def __init__(self, size: int = 60, noise: float = 0.0) -> None:
        self.size = size
        self.noise = noise
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        self.read.append(number)
        value = torch.from_numpy(INPUTS[number])
        return value + self.noise * torch.randn(5), int(TARGETS[number])


class Listed(Squares):
    """The same data set with its targets, as in torchvision."""

    targets = TARGETS.tolist()


class Endless(torch_data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from zip(INPUTS, TARGETS, strict=True)


def tensors() -> torch_data.TensorDataset:
    return torch_data.TensorDataset(torch.from_numpy(INPUTS), torch.from_numpy(TARGETS))


def plain_collate(items: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.stack([item[0] for item in items]), torch.tensor([item[1] for item in items])


KINDS: dict[str, Any] = {
    "arrays": lambda: (INPUTS, TARGETS),
    "lists": lambda: (INPUTS.tolist(), TARGETS.tolist()),
    "tensors": lambda: (torch.from_numpy(INPUTS), torch.from_numpy(TARGETS)),
    "foreign bytes": lambda: (INPUTS.astype(">f4"), TARGETS.astype(">i2")),
    "read only": lambda: (np.frombuffer(INPUTS.tobytes(), "f4").reshape(60, 5), TARGETS),
    "wider": lambda: (INPUTS.astype(np.float64), TARGETS.astype(np.uint16)),
    "TensorDataset": tensors,
    "items": Squares,
    "subset of tensors": lambda: torch_data.Subset(tensors(), range(60)),
    "subset of items": lambda: torch_data.Subset(Squares(), range(60)),
    "concatenated": lambda: torch_data.ConcatDataset(
        [torch_data.Subset(tensors(), range(20)), torch_data.Subset(tensors(), range(20, 60))]
    ),
    "loader": lambda: torch_data.DataLoader(Squares(), batch_size=7, shuffle=True),
    "loader of tensors": lambda: torch_data.DataLoader(tensors()),
    "loader with collate": lambda: torch_data.DataLoader(Squares(), collate_fn=plain_collate),
    "one a worker": lambda: [
        (INPUTS[:20], TARGETS[:20]),
        torch_data.Subset(tensors(), range(20, 35)),
        torch_data.Subset(Squares(), range(35, 60)),
    ],
    "mapping": lambda: {"train": tensors(), "test": Squares()},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_data_gives_the_same_batches(kind: str) -> None:
    samples = Samples(KINDS[kind](), None if kind == "mapping" else KINDS[kind]())
    inputs, targets = samples.draw(INDICES)
    assert torch.equal(inputs, torch.from_numpy(INPUTS[INDICES]))
    assert torch.equal(targets, torch.from_numpy(TARGETS[INDICES]))
    assert (inputs.dtype, targets.dtype) == (torch.float32, torch.int64)
    assert (len(samples), samples.shape, samples.num_classes) == (60, (5,), 3)
    parts = [samples.test_batch(part) for part in samples.test_parts(17)]
    assert torch.equal(torch.cat([part[0] for part in parts]), torch.from_numpy(INPUTS))
    again = pickle.loads(pickle.dumps(samples.without_test()))
    assert torch.equal(again.draw(INDICES)[0], inputs)
    with pytest.raises(ValueError, match="evaluation needs test samples: pass test="):
        again.test_parts(5)


def test_tensors_are_not_copied() -> None:
    values = torch.zeros(4, 2)
    for kind in ((values, torch.arange(4)), torch_data.TensorDataset(values, torch.arange(4))):
        samples = Samples(kind)
        assert isinstance(samples.train, Arrays)
        values[3] = 7
        assert samples.draw(np.array([[3]]))[0].tolist() == [[[7, 7]]]
        values[3] = 0


@pytest.mark.parametrize("kind", ["int8", "uint8", "uint16", "int32", "int64", "uint32"])
def test_integers_stay_integers(kind: str) -> None:
    tokens = np.arange(12).reshape(4, 3).astype(kind)
    samples = Samples((tokens, np.zeros(4)), dtype=torch.float64)
    inputs, targets = samples.draw(np.array([[1, 2]]))
    assert inputs.dtype == torch.int64
    assert inputs.tolist() == [[[3, 4, 5], [6, 7, 8]]]
    assert targets.dtype == torch.float64
    assert samples.num_classes == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_floats_get_the_dtype_of_the_model(dtype: torch.dtype) -> None:
    values = torch.linspace(0, 1, 12)
    for kind in (torch.float16, torch.bfloat16, torch.float64, torch.bool):
        inputs, targets = Samples((values.to(kind)[:, None], values), dtype=dtype).draw(
            INDICES % 12
        )
        assert inputs.dtype == targets.dtype == dtype
        assert torch.equal(
            inputs[..., 0], values.to(kind).to(dtype)[torch.from_numpy(INDICES % 12)]
        )


def test_bytes_of_images_are_scaled_with_one_data_set_per_worker_too() -> None:
    sets: list[Dataset] = [load(f"synthetic:train=20,test=5,side=8,seed={k}") for k in range(3)]
    samples = Samples(sets, sets[0])
    inputs, _ = samples.draw(np.array([[0, 19], [20, 21], [40, 59]]))
    expected = np.stack([each.floats(each.train_images) for each in sets])
    assert np.array_equal(inputs[0].numpy(), expected[0][[0, 19]])
    assert np.array_equal(inputs[1].numpy(), expected[1][[0, 1]])
    assert np.array_equal(inputs[2].numpy(), expected[2][[0, 19]])
    assert samples.num_classes == 10
    assert np.array_equal(
        samples.test_batch(np.arange(5))[0].numpy(), sets[0].floats(sets[0].test_images)
    )


def test_one_data_set_per_worker_is_the_split() -> None:
    data = [(INPUTS[:20], TARGETS[:20]), (INPUTS[20:25], TARGETS[20:25])]
    samples = Samples(data)
    rng = np.random.default_rng(0)
    parts = samples.assign(None, 2, rng)
    assert [part.tolist() for part in parts] == [list(range(20)), list(range(20, 25))]
    with pytest.raises(ValueError, match="for each of the 3 workers: got 2"):
        samples.assign(None, 3, rng)
    with pytest.raises(ValueError, match="is a split already: leave split='partition' out"):
        samples.assign(parse_split("partition"), 2, rng)


def test_targets_are_read_only_for_splits_that_need_them() -> None:
    data = Squares()
    samples = Samples(data)
    assert isinstance(samples.train, Items)
    for split in ("iid", "partition"):
        samples.assign(parse_split(split), 4, np.random.default_rng(0))
    assert data.read == []
    parts = samples.assign(parse_split("by-label"), 3, np.random.default_rng(0))
    assert sorted(data.read) == list(range(60))
    assert sorted(set(TARGETS[part].tolist()).pop() for part in parts) == [0, 1, 2]
    listed = Listed()
    Samples(listed).assign(parse_split("by-label"), 3, np.random.default_rng(0))
    Samples(torch_data.Subset(listed, range(30))).assign(
        parse_split("dirichlet:alpha=1"), 3, np.random.default_rng(0)
    )
    assert listed.read == []
    with pytest.raises(TypeError, match="by-label needs one whole number a sample"):
        Samples((INPUTS, INPUTS)).assign(parse_split("by-label"), 3, np.random.default_rng(0))


def test_random_transforms_depend_only_on_the_batch() -> None:
    samples = Samples(Squares(noise=1.0))
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = samples.draw(INDICES)[0]
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(samples.draw(INDICES)[0], first)
    assert torch.equal(samples.draw(INDICES[1:])[0][0], first[1])  # as a remote worker draws it
    assert not torch.equal(first[0, 0], first[0, 3])  # the same sample twice
    assert not torch.equal(first[0], samples.draw(INDICES[:, ::-1])[0][0].flip(0))


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (None, TypeError, "got None"),
        (5, TypeError, "must be a phocas Dataset, .*: got int"),
        ("mnist.npz", TypeError, "got str"),
        (INPUTS, TypeError, "got ndarray"),
        ((INPUTS, TARGETS, TARGETS), TypeError, "got tuple"),
        ((INPUTS, TARGETS[:5]), ValueError, "60 inputs and 5 targets"),
        ((INPUTS[:0], TARGETS[:0]), ValueError, "0 inputs and 0 targets"),
        ((np.float32(1), np.float32(1)), ValueError, "along the first axis"),
        ((tensors(), tensors()), ValueError, "part of TensorDataset"),
        (([[1, 2], [3]], [0, 1]), ValueError, "inhomogeneous"),
        ((np.array(["a", "b"]), np.arange(2)), TypeError, "holds <U1"),
        ([], ValueError, "at least one data set in its list"),
        ([INPUTS, TARGETS], TypeError, r"data\[0\] must be .*: got ndarray"),
        ([tensors(), (INPUTS[:, :4], TARGETS)], ValueError, r"number 1 has inputs \(4,\)"),
        ([tensors(), (INPUTS, INPUTS[:, 0])], ValueError, "number 1 has .* targets"),
        ({"train": tensors()}, ValueError, "'train' and 'test' and no other: got 'train'"),
        (Endless(), TypeError, "got an IterableDataset; read it into a list"),
        (torch_data.DataLoader(Endless()), TypeError, "got an IterableDataset"),
        (torch_data.Subset(tensors(), []), ValueError, "empty Subset"),
        (Squares(0), ValueError, "Squares is empty"),
        (
            torch_data.DataLoader(
                tensors(), sampler=torch_data.WeightedRandomSampler([1.0] * 60, 60)
            ),
            ValueError,
            "WeightedRandomSampler would have no effect",
        ),
        (
            torch_data.DataLoader(tensors(), sampler=torch_data.SubsetRandomSampler([1, 2])),
            ValueError,
            "SubsetRandomSampler would have no effect; pass a data set with",
        ),
    ],
)
def test_unsupported_data_is_rejected(data: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Samples(data)


def test_items_other_than_pairs_are_rejected_when_read() -> None:
    singles = torch_data.TensorDataset(torch.ones(4, 2))
    with pytest.raises(TypeError, match=r"must be a pair \(input, target\)"):
        Samples(singles).draw(np.array([[0, 1]]))
    with pytest.raises(ValueError, match="standardise needs a phocas Dataset"):
        Samples((INPUTS, TARGETS), standardise=True)
    images: Dataset = load("synthetic:train=20,test=5,side=8")
    bytes_ = (images.test_images, images.test_labels)
    with pytest.raises(ValueError, match=r"standardise needs a phocas Dataset, .* test is tuple"):
        Samples(images, bytes_, standardise=True)
    with pytest.raises(TypeError, match="test must have inputs of the kind that data has"):
        Samples(images, bytes_)
    with pytest.raises(ValueError, match="given twice"):
        Samples({"train": tensors(), "test": tensors()}, tensors())


@pytest.mark.parametrize("kind", ["items", "one a worker", "loader"])
def test_trainer_gives_the_same_bits_for_every_kind_of_data(kind: str) -> None:
    vectors = []
    for data in (KINDS[kind](), KINDS[kind]() if kind == "one a worker" else KINDS["arrays"]()):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
        with Trainer(
            model,
            functional.cross_entropy,
            data,
            num_workers=3,
            rule="median",
            attack="gaussian:q=1",
            test=(INPUTS, TARGETS),
        ) as trainer:
            done = list(trainer.rounds(5))
            vectors.append(trainer.server.vector.clone())
            assert all(np.isfinite(each.loss) for each in done)
    assert torch.equal(*vectors)


@pytest.fixture
def no_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep oneDNN from using AMX, which a CPU may announce and a sandbox forbid (SIGILL)."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)


class LanguageModel(nn.Module):
    """A model that predicts the next token from the previous one."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.last = nn.Linear(8, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.last(self.tokens(tokens))  # type: ignore[no-any-return]


def test_a_language_model_trains_on_tokens_under_attack() -> None:
    starts = np.random.default_rng(3).integers(0, 11, 200)
    text = ((starts[:, None] + 3 * np.arange(7)) % 11).astype(np.uint16)

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    torch.manual_seed(0)
    with Trainer(
        LanguageModel(),
        loss,
        (text[:, :-1], text[:, 1:]),
        num_workers=7,
        rule="phocas:b=2",
        attack="gaussian:q=2",
        lr=2.0,
        test=(text[:, :-1], text[:, 1:]),
    ) as trainer:
        for _ in trainer.rounds(60):
            pass
        found = trainer.evaluate()
    assert found.loss < 0.3
    assert found.top1 is None
    assert found.top3 is None


@pytest.mark.usefixtures("no_amx")
def test_a_bfloat16_model_trains_under_attack() -> None:
    data: Dataset = load("synthetic:train=400,test=120,side=8,noise=20")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10)).bfloat16()
    with Trainer(
        model, data=data, num_workers=10, rule="phocas:b=3", attack="omniscient:q=3", lr=1.0
    ) as trainer:
        done = list(trainer.rounds(80))
        found = trainer.evaluate()
        assert trainer.server.rows.dtype == trainer.server.vector.dtype == torch.bfloat16
    assert all(each.action == "applied" for each in done)
    assert found.top1 is not None
    assert found.top1 > 0.75
    assert done[-1].flagged == (0, 1, 2)


def test_model_that_takes_no_integers_is_rejected_with_a_reason() -> None:
    pictures = np.zeros((20, 4), np.uint8)
    with pytest.raises(TypeError, match="if these are quantities, give them as floats"):
        Trainer(nn.Linear(4, 2), data=(pictures, TARGETS[:20] % 2), num_workers=3, rule="median")


def test_user_defined_data_is_loaded_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_data.py").write_text(
        "import numpy as np, torch\n"
        "def pair(size, classes=2):\n"
        "    return np.ones((size, 3), 'f4'), np.arange(size) % classes\n"
        "class Items(torch.utils.data.Dataset):\n"
        "    def __init__(self, size=4):\n"
        "        self.size = size\n"
        "    def __len__(self):\n"
        "        return self.size\n"
        "    def __getitem__(self, i):\n"
        "        return torch.full((3,), float(i)), i % 2\n"
        "def nothing():\n"
        "    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    mine = importlib.import_module("my_data")
    spec = OwnData.of(mine.pair, {"size": "30", "classes": "3"})
    assert str(spec) == "my_data:pair:size=30,classes=3"
    assert Samples(load(spec)).num_classes == 3
    assert len(Samples(load(OwnData.of(mine.Items, {"size": "9"})))) == 9
    assert len(Samples(load(mine.Items))) == 4
    with pytest.raises(ValueError, match=r"my_data:pair: missing a required argument: 'size'"):
        load(mine.pair)
    with pytest.raises(ValueError, match=r"my_data:Items:sise=3: .*'sise'"):
        load(OwnData.of(mine.Items, {"sise": "3"}))
    with pytest.raises(ValueError, match="my_data:nothing must return a data set"):
        load(mine.nothing)
