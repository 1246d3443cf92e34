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
    """nn.Dropout or nn.Dropout2d with the generator of its thread, not that of the process.

    Args:
        p: probability of zero.
        noise: the generator of each thread.
        whole: whether whole channels become zero, as those of nn.Dropout2d.
    """

    def __init__(self, p: float, noise: Noise, *, whole: bool = False) -> None:
        super().__init__()
        self.p = p
        self.whole = whole
        self.noise = noise

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Zero each value, or channel, with probability p and scale the others by 1 / (1 - p)."""
        if self.noise.generator is None:
            raise RuntimeError("the dropout layers of a worker need its generator: none was set")
        # Contiguous for any layout of the values, so that the mask does not depend on the layout.
        shape = (*values.shape[:2], *[1] * (values.dim() - 2)) if self.whole else values.shape
        mask = torch.empty(shape, dtype=values.dtype, device=values.device)
        return values * fill_mask(mask, self.p, self.noise.generator)


_SEEDED = (nn.Dropout, nn.Dropout2d)  # not their subclasses, which may do anything


def seed_dropout(module: nn.Module, noise: Noise) -> None:
    """Replace every nn.Dropout and nn.Dropout2d inside a module by SeededDropout."""
    for name, child in module.named_children():
        if isinstance(child, nn.Dropout | nn.Dropout2d) and type(child) in _SEEDED:
            whole = type(child) is nn.Dropout2d
            seeded = SeededDropout(child.p, noise, whole=whole) if child.p else nn.Identity()
            setattr(module, name, seeded)
        else:
            seed_dropout(child, noise)
