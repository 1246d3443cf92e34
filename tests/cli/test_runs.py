"""``phocas runs --by``, ``phocas show`` and ``phocas plot`` on a file of real runs."""

from __future__ import annotations

import json
import shutil
import statistics
from typing import TYPE_CHECKING

import pytest

from phocas.experiments.config import expand_grid, make_config
from phocas.experiments.recording import host
from phocas.experiments.results import Results
from phocas.experiments.runner import execute
from phocas.provenance import RESULTS_VERSION
from phocas.report.progress import Progress

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import Phocas

GRID = {
    "dataset": "synthetic:train=60,test=20,side=8",
    "model": "softmax",
    "workers": 7,
    "servers": 2,
    "rounds": 6,
    "evaluate_every": 3,
    "results": "phocas.sqlite",
    "grid": [
        {"rule": ["mean", "phocas:b=2"], "attack": "gaussian:q=2", "seed": [0, 1, 2]},
        {"rule": "phocas:b=2", "lr": [0.1, 0.5]},
    ],
}


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight runs, and one that has not come to its end."""
    folder = tmp_path_factory.mktemp("swept")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for config in expand_grid(GRID, "grid"):
            execute(config)
        unended = config.model_copy(update={"seed": 9})
        with Results(folder / "phocas.sqlite") as results:
            results.begin(unended, {}, host())
    return folder


@pytest.fixture
def here(swept: Path, tmp_path: Path) -> Path:
    """The same, in the folder that the command runs in."""
    shutil.copytree(swept, tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_mean_and_deviation_over_seeds(phocas: Phocas, here: Path) -> None:
    groups = json.loads(phocas("results", "list", "--by", "rule,attack", "--json"))
    every = json.loads(phocas("results", "list", "--json"))
    assert [(group["rule"], group["attack"]) for group in groups] == [
        ("mean", "gaussian:q=2"),
        ("phocas:b=2", "gaussian:q=2"),
        ("phocas:b=2", None),
    ]
    for group in groups:
        found = [run for run in every if run["id"] in group["runs"]]
        assert all(run["status"] == "complete" for run in found)
        assert group["seeds"] == sorted({run["seed"] for run in found})
        for name in ("final_accuracy", "best_accuracy", "ms_per_round"):
            values = [run[name] for run in found]
            assert group[name]["mean"] == pytest.approx(statistics.mean(values))
            assert group[name]["deviation"] == pytest.approx(statistics.stdev(values))
    lines = phocas("results", "list", "--by", "rule,attack").splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[1].split()[:4] == ["rule", "attack", "seeds", "final"]
    mean = groups[0]["final_accuracy"]
    cells = ["mean", "gaussian:q=2", "3", f"{mean['mean']:.3f}", f"{mean['deviation']:.3f}"]
    assert lines[2].split()[:5] == cells


def test_rules_are_compared_by_pairs_of_seeds(phocas: Phocas, here: Path) -> None:
    by = ("results", "list", "--by", "rule,attack,q")
    groups = json.loads(phocas(*by, "--versus", "mean", "--json"))
    every = {
        (run["rule"], run["seed"]): run["final_accuracy"]
        for run in json.loads(phocas("results", "list", "--json"))
        if run["attack"]
    }
    assert [group["q"] for group in groups] == [2, 2, None]
    own = groups[1]["difference"]
    wanted = [every["phocas:b=2", seed] - every["mean", seed] for seed in (0, 1, 2)]
    assert own["pairs"] == 3
    assert own["mean"] == pytest.approx(statistics.mean(wanted))
    half = 4.303 * statistics.stdev(wanted) / 3**0.5
    assert (own["low"], own["high"]) == pytest.approx((own["mean"] - half, own["mean"] + half))
    assert groups[0]["difference"]["pairs"] == 0  # the rule itself
    assert groups[2]["difference"] == {
        **dict.fromkeys(("mean", "deviation", "low", "high")),
        "pairs": 0,
    }
    assert f"{own['mean']:+.3f}" in phocas("results", "list", "--by", "rule,q", "--versus", "mean")
    told = phocas(*by, "--versus", "media", status=2)
    assert "unknown rule of these runs 'media'" in told
    assert "--versus has no effect without --by" in phocas(
        "results", "list", "--versus", "mean", status=2
    )


def test_tables_for_a_paper(phocas: Phocas, here: Path) -> None:
    export = ("results", "export", "--format")
    groups = json.loads(phocas("results", "list", "--by", "rule,attack", "--json"))
    mean = groups[0]["final_accuracy"]
    cell = f"{mean['mean']:.3f} ± {mean['deviation']:.3f}"
    lines = phocas(*export, "markdown", "--by", "rule,attack").splitlines()
    assert lines[0] == "| rule | gaussian:q=2 | no attack |"
    assert lines[2] == f"| mean | {cell} |  |"
    assert "3 rows in table.tex" in phocas(*export, "latex", "-o", "table.tex")
    latex = (here / "table.tex").read_text()
    assert latex.startswith("\\begin{tabular}{lrrr}\n\\toprule\nrule & lr &")
    assert f"${cell.replace('±', chr(92) + 'pm')}$" in latex
    one = phocas(*export, "markdown", "--by", "rule", "--value", "ms_per_round", "--run", "1")
    assert one.splitlines()[0] == "| rule | ms per round |"
    assert phocas(*export, "csv") == phocas("results", "export", "--csv", "-")
    for words, message in (
        (("xml",), "unknown format 'xml'"),
        (("latex", "--table", "rounds"), "--table has no effect with --format latex"),
        (("csv", "--by", "rule"), "--by has no effect with --format csv"),
        (("latex", "--value", "accuracy"), "unknown value 'accuracy'"),
        (("parquet",), "needs --output FILE"),
    ):
        assert message in phocas(*export, *words, status=2)


def test_rows_that_mix_more_than_seeds_say_so(phocas: Phocas, here: Path) -> None:
    assert phocas("results", "list", "--by", "rule").splitlines()[-1] == "  --by rule,attack,lr"
    assert "--by" not in phocas("results", "list", "--by", "lr,rule,attack")
    alone = json.loads(phocas("results", "list", "--by", "rule,attack,lr", "--json"))
    assert [group["final_accuracy"]["deviation"] is None for group in alone] == [
        False,
        False,
        True,
        True,
    ]


def test_runs_of_other_lengths_are_distinguished(phocas: Phocas, here: Path) -> None:
    common = {key: value for key, value in GRID.items() if key != "grid"}
    longer = {"rule": "mean", "attack": "gaussian:q=2", "seed": 3, "rounds": 9}
    execute(make_config({**common, **longer}))
    lines = phocas("results", "list", "--by", "rule,attack,lr").splitlines()
    assert lines[-1] == "  --by rule,attack,lr,rounds"
    apart = json.loads(phocas("results", "list", "--by", "rule,attack,rounds", "--json"))
    assert [(each["rounds"], each["seeds"]) for each in apart if each["rule"] == "mean"] == [
        (6, [0, 1, 2]),
        (9, [3]),
    ]
    assert phocas("results", "list").splitlines()[1].split().count("rounds") == 1


def test_runs_to_average_are_chosen_by_status(phocas: Phocas, here: Path) -> None:
    assert (
        phocas("results", "list", "--by", "rule", "--status", "running", "--json").strip() == "[]"
    )
    killed = json.loads(phocas("results", "list", "--by", "rule", "--status", "killed", "--json"))
    assert [group["seeds"] for group in killed] == [[9]]
    nothing = dict.fromkeys(("mean", "deviation", "low", "high"))
    assert killed[0]["final_accuracy"] == nothing
    for words, message in (
        (("--by", "rul"), "unknown setting 'rul'; did you mean 'rule'?"),
        (("--by", "rule", "--status", "ended"), "unknown status 'ended'"),
    ):
        assert message in phocas("results", "list", *words, status=2)


def test_one_run_is_shown(phocas: Phocas, here: Path) -> None:
    known = json.loads(phocas("results", "show", "4", "--json"))
    (listed,) = [run for run in json.loads(phocas("results", "list", "--json")) if run["id"] == 4]
    assert known.items() >= listed.items()
    assert known["settings"] == {
        **{key: GRID[key] for key in ("dataset", "model", "workers", "servers", "rounds")},
        "rule": "phocas:b=2",
        "attack": "gaussian:q=2",
        "evaluate_every": 3,
        "results_version": RESULTS_VERSION,
    }
    with Results(here / "phocas.sqlite", read=True) as results:
        points = results.table("evaluations", 4)
        rounds = results.table("rounds", 4)
    assert known["curve"]["round"] == [point["round"] for point in points] == [0, 3, 6]
    assert known["curve"]["top1"] == pytest.approx([point["top1"] for point in points])
    times = [row["aggregate_ms"] for row in rounds]
    assert known["ms_by_phase"]["aggregate"] == pytest.approx(statistics.median(times))
    assert len(known["dropped"]) == 7
    text = phocas("results", "show", "4")
    assert max(map(len, text.splitlines())) <= 80
    for told in (
        "phocas:b=2 under gaussian:q=2, seed 0",
        "complete, 6 of 6 rounds",
        f"final {known['final_accuracy']:.3f}, best {known['best_accuracy']:.3f}",
        f"torch {known['versions']['torch']}",
        "phocas results export --model 4",
    ):
        assert told in text


def test_the_last_run_is_shown_even_if_it_has_done_nothing(phocas: Phocas, here: Path) -> None:
    text = phocas("results", "show")
    assert text.startswith("run 9  phocas:b=2, seed 9")
    assert "killed, 0 of 6 rounds" in text
    assert "not evaluated yet" in text
    assert "no round is complete" in text
    for words, message in (
        (("77",), "there is no run 77 in phocas.sqlite"),
        (("--results", "nowhere.sqlite"), "there is no results file nowhere.sqlite"),
    ):
        assert message in phocas("results", "show", *words, status=2)


def test_what_went_wrong_is_shown(phocas: Phocas, tmp_path: Path) -> None:
    words = ("--dataset", "synthetic:train=300,test=60,side=8", "--model", "softmax")
    lies = ("--attack", "sign-flip:q=2", "--rule", "krum:b=2", "--num-workers", "9")
    phocas("train", *words, *lies, "--rounds", "40", "--name", "liars", "--quiet")
    text = phocas("results", "show")
    assert text.startswith("run 1  liars: krum:b=2 under sign-flip:q=2, seed 0")
    told = "flagged 0, 1: wrong beyond chance; in this simulation 0, 1 are Byzantine"
    assert told in " ".join(text.split())
    assert "of their values; the median worker" in " ".join(text.split())
    huge = ("--attack", "gaussian:q=3,std=1e38", "--rule", "mean", "--num-workers", "9")
    phocas("train", *words, *huge, "--rounds", "12", "--split", "dirichlet:alpha=0.3", "--quiet")
    known = json.loads(phocas("results", "show", "--json"))
    assert known["skipped_rounds"] > 0
    text = " ".join(phocas("results", "show").split())
    assert f"{known['skipped_rounds']} rounds took no step" in text
    assert known["lost"] < 12
    assert known["byzantine"] == [0, 1, 2]
    lost = f"model lost in round {known['lost']}: evidence of later rounds is not counted"
    assert f"lost {lost}" in text


def test_rows_that_were_turned_down_are_not_called_infinite(
    phocas: Phocas, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {key: GRID[key] for key in ("dataset", "model", "servers", "results")}
    refusing = {"asynchronous": "zeno:validation=30", "attack": "sign-flip:q=6", "rounds": 10}
    config = make_config({**values, **refusing, "workers": 9})
    with monkeypatch.context() as patch:
        patch.delenv("FORCE_COLOR")  # so that there is a line for every round
        execute(config, watch=Progress(config).show)
    errors = capsys.readouterr().err
    assert "skipped: row rejected" in errors
    assert "not finite" not in errors
    known = json.loads(phocas("results", "show", "--json"))
    assert known["nonfinite_rounds"] == 0 < known["turned_down"] == known["skipped_rounds"]
    text = phocas("results", "show")
    assert f"rejected  {known['turned_down']} of 10 rows\n" in text
    assert "NaN or inf" not in text


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (
            {"asynchronous": "zeno:validation=30", "attack": "gaussian:q=2"},
            ("mean, asynchronous zeno:validation=30", "gaussian:q=2"),
        ),
        (
            {"local_steps": 2, "clients": 9, "speeds": "even", "rule": "median"},
            ("median", "local steps 2, clients 9, speeds even"),
        ),
    ],
)
def test_how_rows_become_steps_is_said_of_every_run(
    phocas: Phocas, changed: dict[str, object], told: tuple[str, ...]
) -> None:
    values = {key: GRID[key] for key in ("dataset", "model", "workers", "servers", "results")}
    execute(make_config({**values, **changed, "rounds": 2}))
    (headline, *_), (shown, _) = (
        phocas("results", "list").splitlines(),
        phocas("results", "show").split("\n\n", 1),
    )
    assert headline.endswith(f"softmax, {', '.join(told)}, seed 0")
    for words in told:
        assert words in " ".join(shown.split())


def test_the_virtual_clock_is_shown(phocas: Phocas, here: Path) -> None:
    assert json.loads(phocas("results", "show", "1", "--json"))["virtual"] is None
    assert "virtual" not in phocas("results", "show", "1")
    values = {key: GRID[key] for key in ("dataset", "model", "workers", "servers", "results")}
    speeds = {"speeds": "slow:workers=2,factor=4", "rounds": 40}
    execute(make_config({**values, **speeds, "asynchronous": "mean", "max_staleness": 9}))
    with Results(here / "phocas.sqlite", read=True) as results:
        rows = results.table("virtual", 10)
    refused = sum(row["refused"] for row in rows)
    assert refused > 0
    text = " ".join(phocas("results", "show").split())
    assert f"clock {rows[-1]['seconds']:.4g} virtual seconds; a round's last row" in text
    assert f"(median), at most {max(row['staleness'] for row in rows)}" in text
    assert f"{refused} rows were rejected as staler than 9 steps" in text
    execute(make_config({**values, **speeds, "rule": "median"}))
    assert "virtual seconds\n" in phocas("results", "show")


def test_a_figure_is_drawn(phocas: Phocas, here: Path) -> None:
    assert phocas("results", "plot") == "8 runs, 3 lines, 2 panels: curves.png\n"
    assert (here / "curves.png").read_bytes().startswith(b"\x89PNG")
    words = (
        "results",
        "plot",
        "phocas.sqlite",
        "--by",
        "rule",
        "--lines",
        "attack,lr",
        "--y",
        "loss",
    )
    told = phocas(*words, "--x", "seconds", "-o", "a/one.svg", "-o", "a/one.png")
    assert told == "8 runs, 3 lines, 2 panels: a/one.svg, a/one.png\n"
    assert "loss on the test set" in (here / "a" / "one.svg").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nowhere.sqlite",), "there is no results file nowhere.sqlite"),
        (("--x", "hours"), "unknown axis 'hours'"),
        (("--by", "rule,attack"), "--by takes one setting"),
        (("--lines", "rules"), "did you mean 'rule'"),
        (("--run", "77"), "there is no run 77"),
        (("--run", "9"), "no runs that were evaluated"),
        (("-o", "curves.gif"), "as .png, .svg or .pdf: got curves.gif"),
        (("-o", "."), "must be a file"),
    ],
)
def test_what_cannot_be_drawn(
    phocas: Phocas, here: Path, words: tuple[str, ...], message: str
) -> None:
    line = phocas("results", "plot", *words, status=2)
    assert message in line
    assert len(line.splitlines()) == 1
