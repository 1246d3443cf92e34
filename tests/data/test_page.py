"""The code on the page about data runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

PAGE = (Path(__file__).parents[2] / "docs/data.md").read_text()
OWN = "## Data of your own"


def test_data_of_your_own() -> None:
    before = torch.get_rng_state()
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE[PAGE.index(OWN) :], re.DOTALL)
    assert len(blocks) == 4
    for block in blocks:
        exec(compile(block, "docs/data.md", "exec"), names)
    torch.set_rng_state(before)


def test_batches_of_a_split() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE[: PAGE.index(OWN)], re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(block.replace('"mnist"', '"synthetic:train=500"'), "docs/data.md", "exec"), names)
    assert np.shape(names["images"]) == (20, 32, 1, 28, 28)
