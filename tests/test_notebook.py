"""What notebooks and editors show, and answers to usual spellings."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest

import phocas
from phocas.training import Trainer

mpl.use("agg")


def test_notebooks_show_rules_and_explanations() -> None:
    rule = phocas.NNM(b=1) | phocas.Phocas(b=1)
    assert repr(rule) == "NNM(b=1) | Phocas(b=1)"
    assert eval(repr(rule), vars(phocas)) == rule
    assert "<caption>nnm:b=1|phocas:b=1</caption>" in rule._repr_html_()
    why = phocas.Phocas(b=1).explain(np.array([[1.0], [2.0], [6.0], [900.0]]))
    assert "<tr><td>3</td><td>1</td><td>0.75</td></tr>" in why._repr_html_()
    axes = why.plot()
    assert [bar.get_height() for bar in axes.patches] == [0, 0, 0, 1]
    assert why.plot(axes) is axes
    axes.figure.clear()


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("Krum", {"f": 2}, r"unknown parameter of Krum 'f'; did you mean 'b'\?"),
        ("attacks.SignFlip", {"f": 2}, r"of SignFlip 'f'; did you mean 'q'\?"),
        ("MultiKrum", {"b": 1, "selct": 2}, r"did you mean 'select'\?"),
    ],
)
def test_usual_spellings_are_answered_with_the_right_one(
    name: str, given: dict[str, Any], words: str
) -> None:
    with pytest.raises(TypeError, match=words):
        attrgetter(name)(phocas)(**given)
    with pytest.raises(ValueError, match=r"unknown parameter of krum 'f'; did you mean 'b'\?"):
        phocas.parse_rule("krum:f=2")
    with pytest.raises(AttributeError, match="write ALittleIsEnough"):
        attrgetter("attacks.ALIE")(phocas)


def test_usual_calls_are_answered_with_the_right_ones() -> None:
    rows = np.ones((5, 3))
    with pytest.raises(TypeError, match=r"write a rule after it, \(NNM\(b=1\) \| Median\(\)\)"):
        phocas.NNM(b=1)(rows)
    data = "synthetic:train=100,test=20"
    with Trainer("softmax", data=data, rule="median", num_workers=5) as trainer:
        for name in ("train", "fit"):
            with pytest.raises(AttributeError, match=r"write trainer\.run\(100\)"):
                getattr(trainer, name)
        assert not hasattr(trainer, "other")
