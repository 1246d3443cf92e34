"""Names of version 0.2 that still work, each with a warning that gives the new name."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

import phocas
from phocas import CellFilter, Heraclius, Mean, Median, Monitor, parse_rule
from phocas.detection import Detector
from phocas.integrations.guard import options_of
from phocas.integrations.reports import FlaggedRank
from phocas.training import Trainer


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Cleaning", "CellFilter"),
        ("Evaluation", "ShardedAggregation"),
        ("Told", "Bounded"),
        ("Watch", "Monitor"),
    ],
)
def test_former_classes_are_found(old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=rf"phocas\.{old} is .* use phocas\.{new}$"):
        assert getattr(phocas, old) is getattr(phocas, new)


def test_unknown_attribute_is_an_error() -> None:
    with pytest.raises(AttributeError, match="module 'phocas' has no attribute 'Clean'"):
        phocas.Clean  # noqa: B018 - reading it is the test


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("cleaning:b=2|median", CellFilter(2) | Median()),
        ("watch:rule=mean", Monitor(Mean())),
        ("heraclius:b=2,reach=3", Heraclius(2, cutoff=3)),
        ("cell-filter:b=2,reach=3|median", CellFilter(2, cutoff=3) | Median()),
    ],
)
def test_former_names_in_text_are_read(old: str, new: phocas.Rule) -> None:
    with pytest.warns(DeprecationWarning, match="will be removed in version 0.4: use "):
        assert parse_rule(old) == new
    assert parse_rule(str(new)) == new  # what is written has the new names, without a warning


def test_former_parameter_and_attribute() -> None:
    with pytest.warns(DeprecationWarning, match=r"Heraclius\(reach=\) is .*use cutoff=$") as found:
        rule = Heraclius(2, reach=3.0)  # type: ignore[call-arg]
    assert found[0].filename == __file__  # the caller's line, not ours
    assert rule == Heraclius(2, cutoff=3.0)
    with pytest.warns(DeprecationWarning, match=r"use Heraclius\.cutoff$"):
        assert rule.reach == 3.0  # type: ignore[attr-defined]


def test_former_method() -> None:
    rule = phocas.Phocas(2)
    with pytest.warns(DeprecationWarning, match=r"use Rule\.error_bound$"):
        assert rule.spreads(9, 1) == rule.error_bound(9, 1)  # type: ignore[attr-defined]


def test_former_names_are_not_listed() -> None:
    assert "cleaning" not in list(phocas.PRE_AGGREGATORS)
    assert "watch" not in list(phocas.RULES)
    assert not {"Cleaning", "Watch"} & set(phocas.__all__)


def test_renamed_rules_reduce_as_before() -> None:
    rows = np.random.default_rng(0).normal(size=(9, 40))
    with pytest.warns(DeprecationWarning, match="cell-filter"):
        former = parse_rule("cleaning:b=2|nnm:b=2|median")
    assert np.array_equal(former(rows), (CellFilter(2) | phocas.NNM(2) | Median())(rows))


@pytest.mark.parametrize("module", ["ddp", "fsdp", "guard"])
def test_former_class_of_a_flagged_rank(module: str) -> None:
    found = importlib.import_module(f"phocas.integrations.{module}")
    with pytest.warns(DeprecationWarning, match=r"Suspect is .* use .*FlaggedRank$"):
        assert found.Suspect is found.FlaggedRank


def test_former_classes_of_integrations() -> None:
    from phocas.integrations import clients, merging

    with pytest.warns(DeprecationWarning, match=r"Request is .* use .*merging\.MergeRequest$"):
        assert merging.Request is merging.MergeRequest
    with pytest.warns(DeprecationWarning, match=r"Blame is .* use .*clients\.ClientDrops$"):
        assert clients.Blame is clients.ClientDrops


def test_former_names_of_detection() -> None:
    detector = Detector(num_workers=5, b=1)
    with pytest.warns(DeprecationWarning, match=r"use Detector\.flagged$"):
        assert detector.suspects() == ()  # type: ignore[attr-defined]
    with pytest.warns(DeprecationWarning, match=r"use Evidence\.e_value$"):
        assert detector.evidence()[0].odds == 0.0  # type: ignore[attr-defined]
    with pytest.warns(DeprecationWarning, match=r"use FlaggedRank\.onset$"):
        assert FlaggedRank(0, 7, 0.1, 0.1).since == 7  # type: ignore[attr-defined]
    with pytest.warns(DeprecationWarning, match="on_suspect is .* use on_flagged$"):
        assert options_of(on_suspect=print).reactions.on_flagged is print
    with Trainer("mlp", data="synthetic:train=50,test=10", num_workers=3, rule="mean") as trainer:
        with pytest.warns(DeprecationWarning, match=r"use Trainer\.detector$"):
            assert trainer.suspicion is trainer.detector  # type: ignore[attr-defined]
        done = trainer.step()
        with pytest.warns(DeprecationWarning, match=r"use Round\.flagged$"):
            assert done.suspects == done.flagged  # type: ignore[attr-defined]


def test_former_names_of_rules_are_found_in_their_package() -> None:
    with pytest.warns(DeprecationWarning, match=r"use phocas\.rules\.Monitor$") as found:
        assert phocas.rules.Watch is Monitor
    assert found[0].filename == __file__


def test_warning_of_a_text_points_at_the_caller() -> None:
    with pytest.warns(DeprecationWarning, match="'watch'") as found:
        parse_rule("watch:rule=mean")
    assert found[0].filename == __file__


def test_old_and_new_name_together_are_rejected() -> None:
    with pytest.raises(TypeError, match=r"takes cutoff= or its former name reach=: got both"):
        Heraclius(2, cutoff=3.0, reach=4.0)  # type: ignore[call-arg]
    with (
        pytest.warns(DeprecationWarning, match="use cutoff="),
        pytest.raises(ValueError, match="heraclius: cutoff is given twice"),
    ):
        parse_rule("heraclius:b=2,cutoff=3,reach=4")


def test_rule_that_overrides_a_former_method_keeps_its_bound() -> None:
    with pytest.warns(DeprecationWarning, match=r"use Own\.error_bound$"):

        class Own(Median):
            def spreads(self, m: int, q: int) -> float | None:
                return 7.0 * m * q

    assert Own().error_bound(9, 1) == 63.0


def test_former_parameter_of_participation() -> None:
    from phocas.theory import Participation

    with pytest.warns(DeprecationWarning, match=r"use byzantine=$"):
        plan = Participation(clients=10, liars=2, num_workers=5, rounds=3)  # type: ignore[call-arg]
    assert plan.byzantine == 2
