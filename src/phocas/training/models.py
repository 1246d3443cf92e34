"""The models of the paper's tables and of the field, and user-defined models.

The paper does not state how its weights are initialised. Its tables use MXNet's terms, so the
default is MXNet's Xavier: uniform within sqrt(6 / (inputs + outputs)), biases 0. On MNIST the mean
without attack then reaches an accuracy of 0.931 in 500 rounds. With torch's own smaller weights,
``init=torch``, it reaches 0.914.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import nn

from phocas.provenance import defined_in
from phocas.settings import at_least
from phocas.specs import (
    Spec,
    Table,
    check_keywords,
    checks,
    count,
    imported_callable,
    keywords_of,
    read_keywords,
    split_place,
    unknown,
    write_spec,
)


class ModelSpec(Spec):
    """A model that has a spec; its output are logits, and the loss applies the softmax."""

    def layers(self, input_shape: Sequence[int], num_classes: int) -> nn.Module:
        """Return a new module for this shape of inputs and this number of classes."""
        raise NotImplementedError


INITS = ("xavier", "torch")


def _init(owner: str, name: str, value: str) -> str:
    if value not in INITS:
        raise ValueError(f"{owner}: {unknown(name, value, INITS)}")
    return value


PRECISIONS = ("fp32", "bf16")


def _precision(owner: str, name: str, value: str) -> str:
    if value not in PRECISIONS:
        raise ValueError(f"{owner}: {unknown(name, value, PRECISIONS)}")
    return value


def _dropout(owner: str, name: str, value: float) -> float:
    number = float(value)
    if not 0 <= number < 1:
        raise ValueError(f"{owner} needs 0 <= {name} < 1: got {name}={number}")
    return number


def _widths(owner: str, name: str, value: Sequence[int]) -> tuple[int, ...]:
    return tuple(count(owner, name, width, minimum=1) for width in value)


@dataclass(frozen=True)
class MLP(ModelSpec):
    """Fully connected layers with ReLU between them, as in the paper's MLP table.

    Args:
        hidden: widths of the hidden layers.
        dropout: probability of dropout after each hidden layer.
        init: initial weights, ``"xavier"`` or ``"torch"``.

    >>> sum(p.numel() for p in MLP().layers((1, 28, 28), 10).parameters())
    118282
    """

    hidden: tuple[int, ...] = field(default=(128, 128), metadata=checks(_widths))
    dropout: float = field(default=0.0, metadata=checks(_dropout))
    init: str = field(default="xavier", metadata=checks(_init))

    name: ClassVar[str] = "mlp"

    def layers(self, input_shape: Sequence[int], num_classes: int) -> nn.Module:
        """Return the layers: for each hidden width linear, ReLU and dropout; a linear one last."""
        stack: list[nn.Module] = [nn.Flatten()]
        width = math.prod(input_shape)
        for hidden in self.hidden:
            stack += [nn.Linear(width, hidden), nn.ReLU()]
            if self.dropout:
                stack.append(nn.Dropout(self.dropout))
            width = hidden
        return _initialise(nn.Sequential(*stack, nn.Linear(width, num_classes)), self.init)


class _InBfloat16(nn.Sequential):
    """Layers whose convolutions and products are computed in bfloat16."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits as 32-bit numbers."""
        with torch.autocast(inputs.device.type, torch.bfloat16):
            for layer in self:
                inputs = layer(inputs)
        return inputs.float()


@dataclass(frozen=True)
class CNN(ModelSpec):
    """Four convolutions and three linear layers, as in the paper's CNN table.

    Args:
        dropout: probability of dropout.
        width: channels of the first two convolutions; the other two have twice as many, and the
            hidden linear layers have 16 times as many units. The paper's width is 32.
        init: initial weights, ``"xavier"`` or ``"torch"``.
        precision: ``"fp32"``, or ``"bf16"`` for convolutions and products in bfloat16. Weights and
            gradients have 32 bits in any case.

    >>> sum(p.numel() for p in CNN().layers((3, 32, 32), 10).parameters())
    2431018
    >>> sum(p.numel() for p in CNN(width=16).layers((3, 32, 32), 10).parameters())
    609562
    """

    dropout: float = field(default=0.2, metadata=checks(_dropout))
    width: int = field(default=32, metadata=checks(at_least(1)))
    init: str = field(default="xavier", metadata=checks(_init))
    precision: str = field(default="fp32", metadata=checks(_precision))

    name: ClassVar[str] = "cnn"

    def layers(self, input_shape: Sequence[int], num_classes: int) -> nn.Module:
        """Return the layers of the paper's table; height and width are halved twice."""
        channels, height, width = _sides(self.name, input_shape, 4)
        few, many, hidden = self.width, 2 * self.width, 16 * self.width
        features = many * (height // 4) * (width // 4)
        kind = nn.Sequential if self.precision == "fp32" else _InBfloat16
        stack = kind(
            nn.Conv2d(channels, few, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(few, few, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(self.dropout),
            nn.Conv2d(few, many, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(many, many, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(self.dropout),
            nn.Flatten(),
            nn.Linear(features, hidden),
            nn.ReLU(),
            nn.Dropout(self.dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Dropout(self.dropout),
            nn.Linear(hidden, num_classes),
        )
        return _initialise(stack, self.init)


@dataclass(frozen=True)
class Softmax(ModelSpec):
    """Softmax regression: one linear layer on the flattened input.

    Args:
        init: initial weights, ``"xavier"`` or ``"torch"``.
    """

    init: str = field(default="xavier", metadata=checks(_init))

    name: ClassVar[str] = "softmax"

    def layers(self, input_shape: Sequence[int], num_classes: int) -> nn.Module:
        """Return the layers: flatten, linear."""
        stack = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), num_classes))
        return _initialise(stack, self.init)


def _sides(owner: str, input_shape: Sequence[int], least: int) -> tuple[int, int, int]:
    """Return channels, height and width of images; raise if a side is too short."""
    if len(input_shape) != 3 or min(input_shape[1:]) < least:
        raise ValueError(
            f"{owner} needs images of (channels, height, width) with sides of at least {least}:"
            f" got inputs of shape {tuple(input_shape)}"
        )
    channels, height, width = input_shape
    return channels, height, width


@dataclass(frozen=True)
class BucketingCNN(ModelSpec):
    """The CNN of Karimireddy, He, Jaggi (ICLR 2022): two convolutions, two linear layers, dropout.

    Args:
        init: initial weights, ``"xavier"`` or ``"torch"``.

    >>> sum(p.numel() for p in BucketingCNN().layers((1, 28, 28), 10).parameters())
    1199882
    """

    init: str = field(default="torch", metadata=checks(_init))

    name: ClassVar[str] = "cnn-bucketing"

    def layers(self, input_shape: Sequence[int], num_classes: int) -> nn.Module:
        """Return conv 32, conv 64, pool, dropout2d 0.25, linear 128, dropout 0.5, linear."""
        channels, height, width = _sides(self.name, input_shape, 6)
        stack = nn.Sequential(
            nn.Conv2d(channels, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.MaxPool2d(2),
            nn.Dropout2d(0.25),
            nn.Flatten(),
            nn.Linear(64 * ((height - 4) // 2) * ((width - 4) // 2), 128),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(128, num_classes),
        )
        return _initialise(stack, self.init)


@dataclass(frozen=True)
class ByzFLCNN(ModelSpec):
    """The ``cnn_mnist`` of ByzFL's benchmark: two convolutions with pooling, two linear layers.

    Args:
        init: initial weights, ``"xavier"`` or ``"torch"``.

    >>> sum(p.numel() for p in ByzFLCNN().layers((1, 28, 28), 10).parameters())
    431080
    """

    init: str = field(default="torch", metadata=checks(_init))

    name: ClassVar[str] = "cnn-byzfl"

    def layers(self, input_shape: Sequence[int], num_classes: int) -> nn.Module:
        """Return twice conv (20, 50 channels), ReLU and pool, then linear 500, ReLU, linear."""
        channels, height, width = _sides(self.name, input_shape, 16)
        sides = [((side - 4) // 2 - 4) // 2 for side in (height, width)]
        stack = nn.Sequential(
            nn.Conv2d(channels, 20, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(20, 50, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(50 * math.prod(sides), 500),
            nn.ReLU(),
            nn.Linear(500, num_classes),
        )
        return _initialise(stack, self.init)


class _ResidualBlock(nn.Module):
    """Two normalised convolutions beside a shortcut, which has a convolution if shapes differ."""

    def __init__(self, before: int, after: int, stride: int, groups: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, padding=1, bias=False),
            nn.GroupNorm(groups, after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            nn.GroupNorm(groups, after),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or before != after:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.GroupNorm(groups, after)
            )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.path(inputs) + self.shortcut(inputs))


@dataclass(frozen=True)
class ResNet18(ModelSpec):
    """ResNet-18 for small images, with group norm: batch norm would mix workers' samples.

    Args:
        width: channels of the first stage; the other three have 2, 4 and 8 times as many. 64 is
            the usual size, for a GPU; 8 or 16 is a size for a CPU.
        groups: number of groups of each normalisation; it divides the width.
        init: initial weights, ``"xavier"`` or ``"torch"``.

    >>> sum(p.numel() for p in ResNet18().layers((3, 32, 32), 10).parameters())
    11173962
    >>> sum(p.numel() for p in ResNet18(width=8).layers((3, 32, 32), 10).parameters())
    176402
    """

    width: int = field(default=64, metadata=checks(at_least(1)))
    groups: int = field(default=8, metadata=checks(at_least(1)))
    init: str = field(default="torch", metadata=checks(_init))

    name: ClassVar[str] = "resnet18"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width % self.groups:
            raise ValueError(
                f"{self.name} needs groups that divide width: got groups={self.groups} with"
                f" width={self.width}"
            )

    def layers(self, input_shape: Sequence[int], num_classes: int) -> nn.Module:
        """Return the layers: conv, eight residual blocks in four stages, mean pooling, linear."""
        channels = _sides(self.name, input_shape, 8)[0]
        stack: list[nn.Module] = [
            nn.Conv2d(channels, self.width, 3, padding=1, bias=False),
            nn.GroupNorm(self.groups, self.width),
            nn.ReLU(),
        ]
        before = self.width
        for stage in range(4):
            after = self.width << stage
            stack.append(_ResidualBlock(before, after, 2 if stage else 1, self.groups))
            stack.append(_ResidualBlock(after, after, 1, self.groups))
            before = after
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, num_classes)]
        return _initialise(nn.Sequential(*stack, *head), self.init)


MODELS: Table[ModelSpec] = Table("model", [MLP, CNN, Softmax, BucketingCNN, ByzFLCNN, ResNet18])

Builder = Callable[[Sequence[int], int], nn.Module]


def check_model_text(text: str) -> str:
    """Return a model's normalised spec, or raise ValueError; no module is imported.

    >>> check_model_text("MLP: hidden=64"), check_model_text("package.module:net:width=16")
    ('mlp:hidden=64', 'package.module:net:width=16')
    """
    name = text.strip().partition(":")[0]
    if name in MODELS:
        return str(MODELS.parse(text))
    place = split_place(text)
    if place is None:
        raise ValueError(unknown("model", name, MODELS) + ", or module:callable of your own")
    return write_spec(place[0], place[1])


def parse_model(text: str) -> Builder:
    """Parse a model's spec, such as ``mlp:hidden=64/64``, or a user's ``module:callable``.

    The callable receives ``input_shape`` and ``num_classes`` if it has parameters of these names,
    and what the text gives: ``module:callable:width=16``. It returns a ``torch.nn.Module``; a
    module's class is such a callable. The working directory is searched for the module, too.
    """
    place = None if text.strip().partition(":")[0] in MODELS else split_place(text)
    if place is None:
        return MODELS.parse(check_model_text(text)).layers
    return UserModel(imported_callable(place[0]), place[1])


class UserModel:
    """A callable of the user's that makes a model, with the text of its arguments."""

    def __init__(self, target: Callable[..., nn.Module], arguments: Mapping[str, str]) -> None:
        self.target = target
        self.given = read_keywords(target, arguments)
        self.takes = keywords_of(target, skip=0)
        check_keywords(target, self.given, ("input_shape", "num_classes"), skip=0)

    def __call__(self, input_shape: Sequence[int], num_classes: int) -> nn.Module:
        """Return a new module."""
        offered = {"input_shape": tuple(input_shape), "num_classes": num_classes}
        offered = {key: value for key, value in offered.items() if key in self.takes}
        return self.target(**(offered | self.given))


def build_model(
    model: str | Builder, input_shape: Sequence[int], num_classes: int, seed: int
) -> nn.Module:
    """Build a model whose initial weights depend only on the seed."""
    builder = parse_model(model) if isinstance(model, str) else model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = builder(input_shape, num_classes)
    if not isinstance(module, nn.Module):
        place = defined_in(getattr(builder, "target", builder))
        raise TypeError(
            f"{place}: a model must be a torch.nn.Module: {model!r} gave {type(module).__name__}"
        )
    return module


def _initialise(stack: nn.Sequential, init: str) -> nn.Sequential:
    for layer in stack:
        if init == "xavier" and isinstance(layer, (nn.Linear, nn.Conv2d)):
            nn.init.xavier_uniform_(layer.weight)
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)
    return stack
