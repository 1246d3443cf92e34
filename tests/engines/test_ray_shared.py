"""Memory that processes share: found by those of this machine, and by nobody else."""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from phocas.engines.ray.shared import Offer

D = 1500  # no whole page

pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="the system has no files without a name"
)

OTHER = """
import pickle, sys
import numpy as np
place = pickle.loads(bytes.fromhex(sys.argv[1]))
memory = place.find(1, 3)
assert memory.rows.shape == (2, 1500) and memory.parameters.shape == (4, 1500)
memory.rows[:] = memory.parameters[2] * np.array([[1], [10]])
try:
    memory.parameters[0, 0] = 1
except ValueError as error:
    print(error)
"""


def test_another_process_reads_parameters_and_writes_rows() -> None:
    offer = Offer(np.zeros(D, np.float32), slots=4, num_workers=5)
    offer.memory.rows[:] = -1
    offer.memory.parameters[2] = np.arange(D)
    told = pickle.dumps(offer.place).hex()
    done = subprocess.run(
        [sys.executable, "-c", OTHER, told], check=True, capture_output=True, text=True
    )
    assert "read-only" in done.stdout
    expected = np.full((5, D), -1.0)
    expected[1:3] = np.arange(D) * np.array([[1], [10]])
    assert np.array_equal(offer.memory.rows, expected)
    assert np.array_equal(offer.memory.parameters[2], np.arange(D))


def test_other_memory_is_not_mapped() -> None:
    offer = Offer(np.zeros(D, np.uint16), slots=2, num_workers=2)
    place = offer.place
    assert place.find(0, 2) is not None
    other = Offer(np.zeros(D, np.uint16), slots=2, num_workers=2)
    assert replace(place, file=other.place.file).find(0, 2) is None
    assert replace(place, num_workers=1).find(0, 1) is None
    assert replace(place, process=1 << 30).find(0, 2) is None
    found = place.find(0, 2)
    offer.close()
    assert place.find(0, 2) is None
    assert found is not None
    found.rows[1] = 7
    assert np.all(offer.memory.rows[1] == 7)  # who has it keeps it


def test_memory_is_freed_with_its_last_user() -> None:
    def held() -> list[str]:
        links = [
            str(entry.readlink()) for entry in Path("/proc/self/fd").glob("*") if entry.is_symlink()
        ]
        return [link for link in links if "memfd:phocas" in link]

    gc.collect()  # the memory of other tests
    before = held()
    offer = Offer(np.zeros(D), slots=1, num_workers=1)
    assert len(held()) > len(before)
    del offer
    gc.collect()
    assert held() == before


LIMITED = """
import resource
import numpy as np
from phocas.engines.ray.shared import Offer
offer = Offer(np.zeros(1500), slots=1, num_workers=1)
place = offer.place
print(place.find(0, 1) is not None)
resource.setrlimit(resource.RLIMIT_FSIZE, (place.size - 1, place.size - 1))
print(Offer.if_possible(np.zeros(1500), 1, 1))
resource.setrlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20))
print(place.find(0, 1))
"""


def test_missing_support_for_shared_memory_gives_none() -> None:
    command = [sys.executable, "-c", LIMITED]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["True", "None", "None"]
