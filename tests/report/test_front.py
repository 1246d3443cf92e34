"""The front of rules: the positions of its names."""

from __future__ import annotations

from itertools import combinations

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from phocas.report.front import _names


def test_names_cover_neither_each_other_nor_a_mark() -> None:
    canvas = Figure(figsize=(5, 4), layout="constrained")
    FigureCanvasAgg(canvas)
    axes = canvas.subplots()
    places = {f"a rule of length {i}": (0.9 + 0.02 * (i % 2), 0.5 + 0.01 * i) for i in range(6)}
    for place in places.values():
        axes.plot(*place, "o")
    axes.set(xlim=(0, 1), ylim=(0, 1))
    canvas.draw_without_rendering()
    _names(axes, places)
    boxes = [text.get_window_extent() for text in axes.texts]
    assert [text.get_text() for text in axes.texts] == sorted(places, reverse=True)
    points = [axes.transData.transform(place) for place in places.values()]
    marks = [Bbox.from_bounds(x - 3, y - 3, 6, 6) for x, y in points]
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
    assert not any(box.overlaps(mark) for box in boxes for mark in marks)
    assert all(axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1 for box in boxes)
