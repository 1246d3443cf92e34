"""Dropout whose masks depend only on the seed, the round and the worker."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from phocas.seeds import Stream, sequence


def worker_seed(seed: int, round: int, worker: int) -> int:
    """Return the seed of one worker in one round."""
    words = sequence(Stream.DROPOUT, seed, round, worker).generate_state(2)
    return int(words[0]) << 32 | int(words[1])


def worker_generator(
    seed: int, round: int, worker: int, device: torch.device | str = "cpu"
) -> torch.Generator:
    """Return the generator of one worker in one round, on a device."""
    return torch.Generator(device).manual_seed(worker_seed(seed, round, worker))


@contextmanager
def own_randomness(device: torch.device) -> Iterator[None]:
    """Restore torch's generators of the process and the device after the block."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


def generator_states(device: torch.device) -> list[torch.Tensor]:
    """Return the states of the generators that a model on a device may draw from."""
    own = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *own]


def fill_mask(mask: torch.Tensor, p: float, generator: torch.Generator) -> torch.Tensor:
    """Fill a mask with 0 (probability p) or 1 / (1 - p), and return it."""
    return mask.bernoulli_(1 - p, generator=generator).div_(1 - p)


class Noise(threading.local):
    """The generator of the dropout layers, per thread."""

    generator: torch.Generator | None = None


class SeededDropout(nn.Module):
    """nn.Dropout with the generator of its thread instead of that of the process."""

    def __init__(self, p: float, noise: Noise) -> None:
        super().__init__()
        self.p = p
        self.noise = noise

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Zero each value with probability p and scale the others by 1 / (1 - p)."""
        if self.noise.generator is None:
            raise RuntimeError("the dropout layers of a worker need its generator: none was set")
        # Contiguous for any layout of the values, so that the mask does not depend on the layout.
        mask = torch.empty(values.shape, dtype=values.dtype, device=values.device)
        return values * fill_mask(mask, self.p, self.noise.generator)


def seed_dropout(module: nn.Module, noise: Noise) -> None:
    """Replace every nn.Dropout inside a module by SeededDropout."""
    for name, child in module.named_children():
        if type(child) is nn.Dropout:
            setattr(module, name, SeededDropout(child.p, noise) if child.p else nn.Identity())
        else:
            seed_dropout(child, noise)
