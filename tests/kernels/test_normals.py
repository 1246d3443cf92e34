"""Normal random numbers: their bits, their distribution, and parts of a row."""

from __future__ import annotations

import math

import numpy as np
import pytest

from phocas.kernels import draw_normals, get_num_threads, normals, set_num_threads

KEY = (0x0123456789ABCDEF, 0x0FEDCBA987654321)


def threefry(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Return the four words of (positions, 4) counters, as defined in the Threefry paper."""
    keys = np.append(key, np.bitwise_xor.reduce(key) ^ np.uint32(normals.PARITY)).astype(np.uint32)
    x = (counter + keys[:4]).astype(np.uint32)
    for number in range(normals.ROUNDS):
        pairs = ((0, 1), (2, 3)) if number % 2 == 0 else ((0, 3), (2, 1))
        for (low, high), turn in zip(pairs, normals.ROTATIONS[number % 8], strict=True):
            x[:, low] += x[:, high]
            x[:, high] = (x[:, high] << np.uint32(turn)) | (x[:, high] >> np.uint32(32 - turn))
            x[:, high] ^= x[:, low]
        if number % 4 == 3:
            injected = number // 4 + 1
            x += keys[[(injected + i) % 5 for i in range(4)]]
            x[:, 3] += np.uint32(injected)
    return x


def twin(size: int, key: tuple[int, int], row: int, start: int) -> np.ndarray:
    """Draw the same numbers with NumPy, in double precision."""
    place = np.arange(start, start + size)
    lane, quarter = place % 16, place // 16 % 4
    counter = place // 64 * 16 + lane
    words = [counter & 0xFFFFFFFF, counter >> 32, np.full(size, row), np.zeros(size, np.int64)]
    key_words = np.array([half for word in key for half in divmod(word, 1 << 32)], np.uint32)
    bits = threefry(np.stack(words, axis=1).astype(np.uint32), key_words)
    first = quarter // 2 * 2
    everyone = np.arange(size)
    length, direction = bits[everyone, first], bits[everyone, first + 1]
    radius = np.sqrt(-2 * np.log((length.astype(np.float64) + 0.5) / 2.0**32))
    angle = (direction << np.uint32(2)).astype(np.int32) * (math.pi / 2) / 2.0**32
    cosine = np.where(direction >> 31, -1, 1) * np.cos(angle)
    swapped = (direction >> 30 & 1).astype(bool) ^ (quarter % 2 == 1)
    drawn: np.ndarray = radius * np.where(swapped, np.sin(angle), cosine)
    return drawn


def test_reference_gives_the_published_bits() -> None:
    """The published result for a counter and a key of zeros and 20 rounds."""
    found = threefry(np.zeros((1, 4), np.uint32), np.zeros(4, np.uint32))
    assert [hex(word) for word in found[0]] == [
        "0x9c6ca96a",
        "0xe17eae66",
        "0xfc10ecd4",
        "0x5256a7d8",
    ]


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize("start", [0, 1, 63, 64, 1000, (1 << 36) - 100])
def test_kernel_agrees_with_the_reference(kind: type[np.floating], start: int) -> None:
    out = np.empty(1000, kind)
    draw_normals(out, KEY, 5, start, 1.0)
    np.testing.assert_allclose(out, twin(1000, KEY, 5, start), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 20_000])
def test_part_of_a_row_has_the_bits_of_the_whole_row(size: int) -> None:
    whole = np.empty(100_000, np.float32)
    draw_normals(whole, KEY, 3, 0, 200.0)
    for start in (0, 1, 64, 777, 65_536):
        part = np.empty(size, np.float32)
        draw_normals(part, KEY, 3, start, 200.0)
        assert np.array_equal(part, whole[start : start + size])


def test_the_bits_do_not_depend_on_threads_or_precision() -> None:
    threads = get_num_threads()
    found = {}
    try:
        for number in (1, 2, 5):
            set_num_threads(number)
            for kind in ("float32", "float64"):
                out: np.ndarray = np.empty(100_001, kind)
                draw_normals(out, KEY, 0, 7, 1.0)
                found[number, kind] = out.astype(np.float32).tobytes()
    finally:
        set_num_threads(threads)
    assert len(set(found.values())) == 1


def test_numbers_are_normal_and_independent() -> None:
    rows = np.empty((4, 1 << 20), np.float32)
    for row, out in enumerate(rows):
        draw_normals(out, KEY, row, 0, 1.0)
    drawn = np.sort(rows.ravel().astype(np.float64))
    size = len(drawn)
    expected = np.array([0.5 * math.erfc(-x / math.sqrt(2)) for x in drawn[::1000]])
    # Kolmogorov-Smirnov: 2.2 / sqrt(n) is exceeded once in ten thousand times.
    assert np.abs(expected - (np.arange(size)[::1000] + 0.5) / size).max() < 2.2 / math.sqrt(size)
    for limit, tail in ((3.0, 2.699796e-3), (4.0, 6.334248e-5)):
        found = (np.abs(drawn) > limit).sum()
        assert abs(found - tail * size) < 4 * math.sqrt(tail * size)
    for power, moment, spread in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((drawn**power).mean() - moment) < 4 * math.sqrt(spread / size)
    values = rows.astype(np.float64)
    for lag in (1, 15, 16, 17, 32, 48, 64):  # lanes, the halves of a pair, groups
        for each in (values, values**2 - 1):
            product = (each[:, lag:] * each[:, :-lag]).mean() / (each**2).mean()
            assert abs(product) < 4 / math.sqrt(size)
    assert np.abs(np.corrcoef(values) - np.eye(4)).max() < 4 / math.sqrt(1 << 20)


def test_different_keys_and_rows_give_different_numbers() -> None:
    seen = set()
    for key in (KEY, (KEY[1], KEY[0]), (KEY[0] ^ 1, KEY[1]), (KEY[0], KEY[1] ^ (1 << 62))):
        for row in (0, 1, 1 << 31):
            out = np.empty(64, np.float32)
            draw_normals(out, key, row, 0, 1.0)
            seen.add(out.tobytes())
    assert len(seen) == 12
