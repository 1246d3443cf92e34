"""Every path that computes the workers' gradients, compared with plain autograd per worker."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from torch.nn import functional

from phocas.training.dropout import worker_generator
from phocas.training.gradients import Looped, Vectorised, worker_gradients
from phocas.training.gradients.base import WorkerGradients
from phocas.training.gradients.merged import MergedBatchGradients, is_dense
from phocas.training.models import CNN, MLP, Softmax, build_model
from phocas.training.parameters import FlatParameters
from phocas.training.pool import DeterministicPool

if TYPE_CHECKING:
    from collections.abc import Callable

SEED, ROUND = 5, 17


class Residual(nn.Module):
    """A dense model that is not a stack of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.last = nn.Linear(12, 4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = values.flatten(1)
        return self.last(values + torch.tanh(self.first(values)))  # type: ignore[no-any-return]


class Normed(nn.Module):
    """A model whose batch norm changes buffers in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Flatten(), nn.Linear(12, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)
        )

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.body(values)  # type: ignore[no-any-return]


class Noisy(nn.Module):
    """A model that draws from the generator of the process."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(12, 4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.last(functional.dropout(values.flatten(1), 0.5))  # type: ignore[no-any-return]


class Unused(nn.Module):
    """A model with a parameter that has no influence on the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Parameter(torch.ones(3))
        self.last = nn.Linear(12, 4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.last(values.flatten(1))  # type: ignore[no-any-return]


def small_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 5, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.3),
        nn.Dropout2d(0.4),
        nn.Conv2d(5, 4, 3),
        nn.Flatten(),
        nn.Linear(16, 4),
        nn.Dropout(0.1),
    )


def frozen_mlp() -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 4))
    model[1].weight.requires_grad_(False)
    return model


def tied_mlp() -> nn.Module:
    layer = nn.Linear(12, 12)
    return nn.Sequential(nn.Flatten(), layer, nn.ReLU(), layer, nn.Linear(12, 4))


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], type[WorkerGradients]]] = {
    "softmax": (lambda: Softmax().layers((1, 3, 4), 4), (1, 3, 4), MergedBatchGradients),
    "mlp": (lambda: MLP(hidden=(7, 5)).layers((1, 3, 4), 4), (1, 3, 4), MergedBatchGradients),
    "mlp dropout": (
        lambda: MLP(hidden=(7, 5), dropout=0.4).layers((12,), 4),
        (12,),
        MergedBatchGradients,
    ),
    "dropout first": (
        lambda: nn.Sequential(
            nn.Dropout(0.2), nn.Linear(12, 6, bias=False), nn.ReLU(), nn.Linear(6, 4)
        ),
        (12,),
        MergedBatchGradients,
    ),
    "nested": (
        lambda: nn.Sequential(
            nn.Flatten(), nn.Sequential(nn.Linear(12, 6), nn.ReLU()), nn.Linear(6, 4)
        ),
        (3, 4),
        MergedBatchGradients,
    ),
    "residual": (Residual, (3, 4), Vectorised),
    "unused": (Unused, (3, 4), Vectorised),
    "frozen": (frozen_mlp, (3, 4), Vectorised),
    "tied": (tied_mlp, (3, 4), Vectorised),
    "convolutions": (small_cnn, (3, 8, 8), Looped),
    "batch norm": (Normed, (3, 4), Looped),
    "noisy": (Noisy, (3, 4), Looped),
}


def draw(
    shape: tuple[int, ...], num_workers: int, batch_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.rand(num_workers, batch_size, *shape, generator=generator)
    return inputs, torch.randint(0, 4, (num_workers, batch_size), generator=generator)


def run_twin(model: nn.Module, values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Run the layers of a stack in order, drawing dropout masks from the worker's generator."""
    if type(model) is nn.Dropout:
        kept = torch.empty(values.shape).bernoulli_(1 - model.p, generator=generator)
        return values * kept / (1 - model.p)
    if type(model) is nn.Dropout2d:
        kept = torch.empty(*values.shape[:2], 1, 1).bernoulli_(1 - model.p, generator=generator)
        return values * kept / (1 - model.p)
    if type(model) is nn.Sequential:
        for layer in model:
            values = run_twin(layer, values, generator)
        return values
    return model(values)  # type: ignore[no-any-return]


def plain_autograd(
    model: nn.Module,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = functional.cross_entropy,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Differentiate each worker's loss on a fresh copy of the model."""
    rows, losses = [], []
    for i, (batch, target) in enumerate(zip(inputs, targets, strict=True)):
        twin = copy.deepcopy(model).train()
        generator = worker_generator(SEED, ROUND, i)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(generator.initial_seed())
            value = loss(run_twin(twin, batch, generator), target)
        value.backward()  # type: ignore[no-untyped-call]
        rows.append(
            torch.cat(
                [
                    (torch.zeros_like(p) if p.grad is None else p.grad).flatten()
                    for p in twin.parameters()
                    if p.requires_grad
                ]
            )
        )
        losses.append(value.detach())
    return torch.stack(rows), torch.stack(losses)


def compute(
    model: nn.Module,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    threads: int = 1,
    **options: object,
) -> tuple[WorkerGradients, torch.Tensor, torch.Tensor]:
    flat = FlatParameters(model)
    loss = options.pop("loss", functional.cross_entropy)
    with DeterministicPool(threads) as pool:
        way = worker_gradients(model, loss, flat, pool, sample=(inputs, targets), **options)  # type: ignore[arg-type]
        out = torch.full((inputs.shape[0], flat.size), float("nan"))
        losses = way(inputs, targets, out, SEED, ROUND)
    return way, out, losses


@pytest.mark.parametrize("case", CASES)
def test_each_model_uses_its_path_and_agrees_with_autograd(case: str) -> None:
    build, shape, path = CASES[case]
    model = build_model(lambda *_: build(), shape, 4, seed=1)
    inputs, targets = draw(shape, num_workers=7, batch_size=6)
    expected, expected_losses = plain_autograd(model, inputs, targets)
    way, rows, losses = compute(model, inputs, targets)
    assert type(way) is path
    torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(losses, expected_losses)


@pytest.mark.parametrize("case", CASES)
def test_bits_do_not_depend_on_threads(case: str) -> None:
    build, shape, _ = CASES[case]
    inputs, targets = draw(shape, num_workers=25, batch_size=30)
    found = []
    for threads, torch_threads in ((1, 1), (2, 1), (3, 2)):
        before = torch.get_num_threads()
        torch.set_num_threads(torch_threads)
        try:
            model = build_model(lambda *_: build(), shape, 4, seed=1)
            found.append(compute(model, inputs, targets, threads)[1])
            assert torch.get_num_threads() == torch_threads
        finally:
            torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("path", ["merged", "vectorised", "looped"])
def test_forced_paths_agree(path: str) -> None:
    model = build_model("mlp:hidden=9", (3, 4), 4, seed=2)
    inputs, targets = draw((3, 4), 5, 8)
    expected, _ = plain_autograd(model, inputs, targets)
    _, rows, _ = compute(model, inputs, targets, path=path)
    torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("case", ["mlp", "residual", "convolutions"])
def test_sum_is_the_batch_size_times_the_mean(case: str) -> None:
    build, shape, _ = CASES[case]
    inputs, targets = draw(shape, 3, 8)
    model = build_model(lambda *_: build(), shape, 4, seed=1)
    _, mean, mean_losses = compute(model, inputs, targets)
    _, total, sum_losses = compute(model, inputs, targets, reduction="sum")
    torch.testing.assert_close(total, mean * 8, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(sum_losses, mean_losses)


@pytest.mark.parametrize("case", ["mlp dropout", "residual", "convolutions"])
def test_any_loss_is_differentiated(case: str) -> None:
    loss = nn.CrossEntropyLoss(label_smoothing=0.2, weight=torch.tensor([1.0, 2.0, 0.5, 3.0]))
    build, shape, path = CASES[case]
    model = build_model(lambda *_: build(), shape, 4, seed=1)
    inputs, targets = draw(shape, 4, 6)
    expected, expected_losses = plain_autograd(model, inputs, targets, loss)
    way, rows, losses = compute(model, inputs, targets, loss=loss)
    assert type(way) is path
    torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(losses, expected_losses)


def tokens_stack(**options: object) -> nn.Module:
    return nn.Sequential(
        nn.Embedding(9, 5, **options),  # type: ignore[arg-type]
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(20, 6),
        nn.ReLU(),
        nn.Linear(6, 4),
    )


class Tagger(nn.Module):
    """Return scores (n, t, 4) for tokens (n, t)."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(9, 5)
        self.last = nn.Linear(5, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.tokens(tokens)))  # type: ignore[no-any-return]


def by_token(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def draw_tokens(shape: tuple[int, ...] = ()) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(0, 9, (7, 6, 4), generator=generator)
    return tokens, torch.randint(0, 4, (7, 6, *shape), generator=generator)


@pytest.mark.parametrize(
    ("build", "path"),
    [
        (tokens_stack, MergedBatchGradients),
        (lambda: tokens_stack(padding_idx=2), MergedBatchGradients),
        (lambda: tokens_stack(scale_grad_by_freq=True), Looped),
        (lambda: nn.Sequential(nn.EmbeddingBag(9, 6), nn.Tanh(), nn.Linear(6, 4)), None),
    ],
)
def test_token_models_use_their_path_and_agree_with_autograd(
    build: Callable[[], nn.Module], path: type[WorkerGradients] | None
) -> None:
    model = build_model(lambda *_: build(), (4,), 4, seed=1)
    inputs, targets = draw_tokens()
    expected, expected_losses = plain_autograd(model, inputs, targets)
    way, rows, losses = compute(model, inputs, targets)
    assert path is None or type(way) is path
    torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(losses, expected_losses)


@pytest.mark.parametrize("path", ["merged", "vectorised", "looped"])
def test_forced_paths_agree_on_tokens(path: str) -> None:
    stack = nn.Sequential(nn.Embedding(9, 5), nn.Flatten(), nn.Linear(20, 4))
    model = build_model(lambda *_: stack, (4,), 4, seed=1)
    inputs, targets = draw_tokens()
    expected, _ = plain_autograd(model, inputs, targets)
    _, rows, _ = compute(model, inputs, targets, path=path)
    torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("path", ["vectorised", "looped", None])
def test_language_models_agree_with_autograd(path: str | None) -> None:
    model = build_model(lambda *_: Tagger(), (4,), 4, seed=1)
    inputs, targets = draw_tokens((4,))
    expected, expected_losses = plain_autograd(model, inputs, targets, by_token)
    _, rows, losses = compute(model, inputs, targets, loss=by_token, path=path)
    torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(losses, expected_losses)


@pytest.mark.parametrize("path", ["merged", "vectorised", "looped"])
@pytest.mark.parametrize("shape", [(), (4,)])
def test_paths_agree_on_regression(path: str, shape: tuple[int, ...]) -> None:
    model = build_model("mlp:hidden=9", (3, 4), 4, seed=2)
    inputs, _ = draw((3, 4), 5, 8)
    targets = torch.rand(5, 8, *shape, generator=torch.Generator().manual_seed(1))

    def loss(outputs: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(outputs if shape else outputs[:, 0], wanted)

    expected, _ = plain_autograd(model, inputs, targets, loss)
    _, rows, _ = compute(model, inputs, targets, loss=loss, path=path)
    torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("no_amx")
@pytest.mark.parametrize("path", ["merged", "vectorised", "looped", None])
@pytest.mark.parametrize("kind", ["images", "tokens"])
def test_paths_agree_in_bfloat16(path: str | None, kind: str) -> None:
    stack = nn.Sequential(nn.Embedding(9, 5), nn.Flatten(), nn.Linear(20, 4))
    model = build_model("mlp:hidden=9" if kind == "images" else lambda *_: stack, (4,), 4, seed=2)
    inputs, targets = draw((4,), 5, 8) if kind == "images" else draw_tokens()
    exact, _ = plain_autograd(model.bfloat16().float(), inputs, targets)
    model = model.bfloat16()
    flat = FlatParameters(model)
    inputs = inputs.bfloat16() if kind == "images" else inputs
    with DeterministicPool(1) as pool:
        way = worker_gradients(
            model, functional.cross_entropy, flat, pool, sample=(inputs, targets), path=path
        )
        out = torch.empty(len(inputs), flat.size, dtype=torch.bfloat16)
        losses = way(inputs, targets, out, SEED, ROUND)
    assert losses.dtype == torch.float32
    scale = float(exact.abs().max())
    torch.testing.assert_close(out.float(), exact, rtol=0.05, atol=0.02 * scale)


@pytest.fixture
def no_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep oneDNN from using AMX, which a CPU may announce and a sandbox forbid (SIGILL)."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)


def test_the_paper_models_agree_with_autograd() -> None:
    for model, shape in ((MLP(), (1, 28, 28)), (CNN(), (3, 32, 32))):
        module = build_model(model.layers, shape, 10, seed=4)
        inputs, targets = draw(shape, 2, 4)
        expected, _ = plain_autograd(module, inputs, targets)
        _, rows, _ = compute(module, inputs, targets)
        torch.testing.assert_close(rows, expected, rtol=1e-3, atol=1e-5)


def test_dropout_differs_between_workers_rounds_and_seeds() -> None:
    masks = [
        torch.rand(8, generator=worker_generator(*key))
        for key in ((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0))
    ]
    assert len({tuple(mask.tolist()) for mask in masks}) == 4


def test_block_of_workers_gets_the_rows_it_gets_among_all() -> None:
    model = build_model("mlp:hidden=9,dropout=0.3", (12,), 4, seed=2)
    inputs, targets = draw((12,), 6, 8)
    way, rows, _ = compute(model, inputs, targets)
    part = torch.empty(2, rows.shape[1])
    way(inputs[4:], targets[4:], part, SEED, ROUND, first_worker=4)
    torch.testing.assert_close(part, rows[4:])


def test_buffers_become_the_median_over_the_workers() -> None:
    model = build_model(lambda *_: Normed(), (3, 4), 4, seed=1)
    inputs, targets = draw((3, 4), 5, 6)
    inputs[0] = 1e6  # a Byzantine worker's mean of its inputs
    ranges = []
    for batch in inputs:
        twin = copy.deepcopy(model).train()
        twin(batch)
        ranges.append(twin.body[2].running_mean)  # type: ignore[index, union-attr]
    compute(model, inputs, targets)
    mean = model.body[2].running_mean  # type: ignore[index, union-attr]
    torch.testing.assert_close(mean, torch.stack(ranges).median(0).values)
    assert mean.abs().max() < 10


def test_nan_parameters_give_nan_rows_and_no_error() -> None:
    model = build_model("mlp:hidden=9", (12,), 4, seed=2)
    inputs, targets = draw((12,), 3, 8)
    with torch.no_grad():
        model[1].weight.fill_(float("nan"))  # type: ignore[index]
    _, rows, losses = compute(model, inputs, targets)
    expected, _ = plain_autograd(model, inputs, targets)
    assert torch.equal(rows.isnan(), expected.isnan())
    assert losses.isnan().all()


def test_ambiguous_stack_of_layers_is_not_merged() -> None:
    assert is_dense(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), 3)
    assert is_dense(nn.Linear(4, 2), 1)
    assert not is_dense(nn.Linear(4, 2), 2)  # it would act on the last axis only
    assert not is_dense(nn.Sequential(nn.Flatten(2), nn.Linear(4, 2)), 3)
    assert not is_dense(nn.Sequential(nn.Flatten(), nn.Linear(4, 2), nn.ReLU()), 3)
    assert not is_dense(nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), 3)
    hooked = nn.Linear(4, 2)
    hooked.register_forward_hook(lambda _module, _inputs, outputs: outputs * 2)
    assert not is_dense(hooked, 1)


def test_flat_parameters_reject_unsupported_models() -> None:
    with pytest.raises(ValueError, match="at least one parameter"):
        FlatParameters(nn.Flatten())
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(TypeError, match=r"float32.*float64.*bfloat16: got torch.float32, .*64"):
        FlatParameters(mixed)
    half = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16())
    with pytest.raises(TypeError, match=r"got torch.bfloat16, torch.float32"):
        FlatParameters(half)


def test_initial_weights_depend_only_on_the_seed() -> None:
    torch.manual_seed(99)
    state = torch.get_rng_state()
    first, again, other = (build_model("mlp", (1, 28, 28), 10, seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first[1].weight, again[1].weight)  # type: ignore[index]
    assert not torch.equal(first[1].weight, other[1].weight)  # type: ignore[index]


def test_user_defined_models_are_built_and_unknown_ones_rejected() -> None:
    module = build_model("torch.nn:Identity", (3,), 4, seed=0)
    assert isinstance(module, nn.Identity)
    with pytest.raises(ValueError, match="did you mean 'mlp'"):
        build_model("mpl", (3,), 4, seed=0)
    with pytest.raises(ValueError, match="no Python module 'nowhere'"):
        build_model("nowhere:model", (3,), 4, seed=0)
    with pytest.raises(
        ValueError, match=r"unknown name in torch.nn 'Linar'; did you mean 'Linear'"
    ):
        build_model("torch.nn:Linar", (3,), 4, seed=0)
    with pytest.raises(TypeError, match=r"must be a torch.nn.Module"):
        build_model("argparse:Namespace", (3,), 4, seed=0)
    with pytest.raises(ValueError, match="images of"):
        build_model("cnn", (3, 2, 2), 4, seed=0)
    with pytest.raises(ValueError, match="dropout < 1"):
        build_model("mlp:dropout=1", (3,), 4, seed=0)
    with pytest.raises(ValueError, match="cnn: unknown init 'xavir'; did you mean 'xavier'"):
        build_model("cnn:init=xavir", (3, 8, 8), 4, seed=0)
    with pytest.raises(ValueError, match="width >= 1"):
        build_model("cnn:width=0", (3, 8, 8), 4, seed=0)
    with pytest.raises(ValueError, match="cnn: unknown precision 'bf15'; did you mean 'bf16'"):
        build_model("cnn:precision=bf15", (3, 8, 8), 4, seed=0)


def test_bfloat16_changes_gradients_by_its_rounding() -> None:
    """ReLU and pooling choose other values after rounding, so errors grow towards the input."""
    inputs = torch.randn(64, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    targets = torch.arange(64) % 4
    found = []
    for precision in ("fp32", "bf16"):
        model = build_model(f"cnn:width=4,dropout=0,precision={precision}", (3, 8, 8), 4, seed=0)
        logits = model(inputs)
        assert logits.dtype == torch.float32
        loss = nn.functional.cross_entropy(logits, targets)
        found.append(torch.autograd.grad(loss, list(model.parameters())))
    assert {gradient.dtype for gradient in found[1]} == {torch.float32}
    errors = [
        float(torch.linalg.norm(rounded - plain) / torch.linalg.norm(plain))
        for plain, rounded in zip(*found, strict=True)
    ]
    assert 0 < errors[-2] < 0.02  # the last weights
    assert max(errors) < 0.5


def test_initial_weights_are_xavier_or_torchs_default() -> None:
    first = next(build_model("mlp", (784,), 10, seed=0).parameters())
    bound = (6 / (784 + 128)) ** 0.5
    assert 0.99 * bound < float(first.detach().abs().max()) <= bound
    first = next(build_model("mlp:init=torch", (784,), 10, seed=0).parameters())
    assert 0.99 / 28 < float(first.detach().abs().max()) <= 1 / 28
