"""Devices that torch has here."""

from __future__ import annotations

import torch


def find_device(owner: str, name: str, value: object) -> torch.device:
    """Return a device after storing a value on it; raise ValueError if that fails."""
    if not isinstance(value, str | torch.device):
        raise TypeError(f"{owner} needs the name of a {name}, such as 'cuda:1': got {value!r}")
    try:
        device = torch.device(value)
        torch.ones(1, device=device).cpu()
    except (RuntimeError, AssertionError, ModuleNotFoundError) as error:
        reason = str(error).splitlines()[0].partition(". ")[0]
        raise ValueError(
            f"{owner} needs a {name} that torch has here: got {str(value)!r}: {reason}"
        ) from None
    return device
