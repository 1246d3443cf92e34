"""Results belong to their code: a change of user-defined code gives another run."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import phocas
import phocas.experiments.config
import phocas.training.task
from phocas.cli import main
from phocas.engines.local import LocalSettings
from phocas.experiments.config import RunConfig, expand_grid, make_config
from phocas.experiments.results import Results
from phocas.experiments.runner import execute
from phocas.experiments.sweep import Ended, Message, attempts, sweep
from phocas.provenance import code_of
from phocas.training.task import Task
from phocas.training.trainer import Trainer

TINY = {
    "dataset": "synthetic:train=200,test=50,side=8",
    "model": "mlp:hidden=8",
    "workers": 7,
    "servers": 1,
    "rounds": 8,
    "batch_size": 8,
    "evaluate_every": 4,
    "threads": 1,
}

SOURCE = """
from dataclasses import dataclass

import numpy as np
import torch

from phocas import NNM, Median, TrimmingRule, Window
from phocas.attacks import RowAttack
from phocas.data import Split, load
from phocas.engines.asynchronous import Even
from phocas.engines.asynchronous.policies import AsynchronousMean
from phocas.training.schedules import Schedule

READY = NNM(b=1) | Median()
CUT = 1


@dataclass(frozen=True)
class Inner(TrimmingRule):
    def window(self, m):
        return Window(trim=CUT)


def middle(rows):
    return np.median(rows, axis=0)


@dataclass(frozen=True)
class Sevens(RowAttack):
    q: int
    who: str = "fixed"

    def fill(self, scene, rows):
        scene.matrix.write(rows, np.array(7.0))


@dataclass(frozen=True)
class Whole(Split):
    def parts(self, labels, num_workers, rng):
        return np.array_split(np.arange(len(labels)), num_workers)


@dataclass(frozen=True)
class Halved(Schedule):
    def __call__(self, round):
        return 0.5


@dataclass(frozen=True)
class Alone(AsynchronousMean):
    pass


@dataclass(frozen=True)
class Same(Even):
    pass


def data():
    return load("synthetic:train=200,test=50,side=8")


def net(input_shape, num_classes):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, num_classes))


class Descent(torch.optim.SGD):
    pass
"""


class Module:
    """A user-defined module in the working directory, edited between processes."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.path = Path(f"{name}.py")

    def write(self, source: str) -> None:
        """Write the source and remove the imported module, as in a new process."""
        self.path.write_text(source)
        self.forget()

    def edit(self, old: str, new: str) -> None:
        source = self.path.read_text()
        assert old in source
        self.write(source.replace(old, new))

    def forget(self) -> None:
        sys.modules.pop(self.name, None)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Provide modules by name, and remove all of them when the test ends."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # edits within one second have one date
    made: list[Module] = []

    def make(name: str, source: str = SOURCE) -> Module:
        made.append(Module(name))
        made[-1].write(source)
        return made[-1]

    yield make
    for module in made:
        module.forget()


Own = Callable[..., Module]


def config(**changed: Any) -> RunConfig:
    return make_config({**TINY, "rule": "mine:Inner:b=1", "results": "r.sqlite", **changed})


def train(*words: str) -> str:
    """Run the real command in a process of its own, and return everything that it prints."""
    settings = [f"--{key.replace('_', '-')}={value}" for key, value in TINY.items()]
    command = [sys.executable, "-m", "phocas", "train", *settings, "--rule=mine:Inner:b=1", *words]
    return subprocess.check_output(command, stderr=subprocess.STDOUT, text=True)


def test_changed_rule_starts_a_new_run_on_the_command_line(own: Own) -> None:
    module = own("mine")
    train("--quiet")
    module.edit("CUT = 1", "CUT = 3")
    screen = train("--quiet", "--rounds=12")
    assert "run 2 is in phocas.sqlite" in screen
    assert "run 2 has the settings of run 1 and other code: mine " in screen
    with Results(Path("phocas.sqlite"), read=True) as results:
        records = results.runs()
        losses = [[row["loss"] for row in results.table("rounds", each.id)] for each in records]
    assert [record.origin for record in records] == [None, None]
    assert [len(each) for each in losses] == [8, 12]
    assert losses[0][:1] == losses[1][:1]  # the loss of the same initial model
    assert losses[0][1:] != losses[1][1:8]


def test_runs_and_show_distinguish_versions_of_code(
    own: Own, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = own("mine")
    first = execute(config())
    module.edit("CUT = 1", "CUT = 1  # a comment")  # the whole source counts
    second = execute(config())
    codes = [record.config["code"] for record in (first, second)]
    assert len(set(codes)) == second.id == 2

    def screen(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["phocas", *words, "--results", "r.sqlite"])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
        return capsys.readouterr().out

    lines = screen("results", "list").splitlines()
    assert [code in line for code, line in zip(codes, lines[-2:], strict=True)] == [True, True]
    assert codes[0] in " ".join(screen("results", "show", "1").split())
    table = screen("results", "list", "--by", "rule,code")
    assert all(code in table for code in codes)


def test_unchanged_code_resumes_and_changed_code_does_not(own: Own) -> None:
    module = own("mine")
    stopped = execute(config(), should_stop=lambda: True)
    assert (stopped.status, stopped.rounds_done) == ("interrupted", 1)
    module.edit("CUT = 1", "CUT = 2")
    said: list[str] = []
    other = execute(config(), tell=said.append)
    assert (other.id, other.status, other.origin) == (2, "complete", None)
    assert len(said) == 1
    assert "other code" in said[0]
    module.edit("CUT = 2", "CUT = 1")
    said.clear()
    resumed = execute(config(), tell=said.append)
    assert (resumed.id, resumed.status) == (1, "complete")
    assert said == ["continuing run 1 from round 1"]
    module.forget()
    longer = execute(config(rounds=12), tell=said.append)
    assert longer.origin == "run 1, round 8"
    assert "other code" not in " ".join(said)


def test_runs_of_older_versions_are_recognised(own: Own) -> None:
    own("mine")
    configs = [config(), config(rule="median")]
    for each in configs:
        execute(each)
    with sqlite3.connect("r.sqlite") as connection:  # as an older phocas wrote them
        for number, each in enumerate(configs, 1):
            connection.execute(
                "UPDATE runs SET identity = ?, config = ? WHERE id = ?",
                (each.settings_digest(), each.model_dump_json(), number),
            )
    connection.close()
    said: list[str] = []
    assert execute(configs[1], tell=said.append).id == 2
    assert execute(configs[0], tell=said.append).id == 3
    assert "run 2 in r.sqlite is complete already" in said[0]
    assert said[1].startswith("run 3 has the settings of run 1 and other code: mine ")
    assert said[1].endswith(", was not recorded")


def test_sweep_reruns_changed_code_and_rejects_changes_during_it(own: Own) -> None:
    module = own("mine")
    grid = {**TINY, "results": "r.sqlite", "grid": {"rule": ["median", "mine:Inner:b=1"]}}
    configs = expand_grid(grid, "grid")
    assert "mine" not in sys.modules  # a configuration contains only the module's name
    first, old = (execute(each) for each in configs)
    assert attempts(configs) == [first, old]
    module.edit("CUT = 1", "CUT = 2")
    assert attempts(configs) == [first, None]
    module.path.write_text(SOURCE.replace("CUT = 1", "CUT = 0"))  # edited after the import
    news: list[Message] = []
    assert sweep(configs, processes=1, watch=news.append) == [first, None]
    ended = [each for each in news if isinstance(each, Ended)]
    assert [each.status for each in ended] == ["complete", "failed"]
    assert "your code was changed while the sweep ran (mine " in str(ended[1].error)
    module.forget()
    new = execute(configs[1])
    assert (new.id, new.status) == (3, "complete")
    assert attempts(configs) == [first, new]


@pytest.mark.parametrize(
    "changed",
    [
        {"rule": "mine:Inner:b=1"},
        {"rule": "mine:middle:b=1"},
        {"rule": "mine:READY"},
        {"rule": "nnm:b=1|mine:Inner:b=1"},
        {"rule": "monitor:rule=(mine:Inner:b=1)"},
        {"attack": "mine:Sevens:q=1"},
        {"attack": "worst-case:rule=(mine:Inner:b=1),q=1"},
        {"split": "mine:Whole"},
        {"schedule": "mine:Halved"},
        {"dataset": "mine:data"},
        {"model": "mine:net"},
        {"optimizer": "mine:Descent"},
        {"local_steps": 2, "server_optimizer": "mine:Descent"},
        {"asynchronous": "mine:Alone"},
        {"speeds": "mine:Same"},
    ],
)
def test_identity_covers_every_user_defined_part(own: Own, changed: dict[str, Any]) -> None:
    module = own("mine")
    built = make_config({**TINY, **({} if "rule" in changed else {"rule": "median"}), **changed})
    assert "mine" not in sys.modules
    first = built.identity()
    assert set(built.code()) == {"mine"}
    assert first == built.identity() != built.settings_digest()
    module.path.write_text(SOURCE + "\n# edited\n")
    assert built.identity() == first  # the loaded code has not changed
    module.forget()
    assert built.identity() != first


def test_identity_covers_the_module_that_defines_a_class(own: Own) -> None:
    own("front", "from inside import Inner\n")
    inside = own("inside")
    own("child", "from inside import Inner\n\n\nclass Heir(Inner):\n    pass\n")
    for rule, modules in {
        "front:Inner:b=1": {"front", "inside"},
        "child:Heir:b=1": {"child", "inside"},
    }.items():
        named = config(rule=rule)
        before = named.code()
        assert set(before) == modules
        inside.edit("CUT = 1", "CUT = 11")
        for name in modules:
            sys.modules.pop(name, None)
        after = named.code()
        assert {name for name in modules if before[name] != after[name]} == {"inside"}


def test_identity_covers_modules_that_are_imported(own: Own) -> None:
    Path("pack/deep").mkdir(parents=True)
    own("pack/__init__", "")
    own("pack/deep/__init__", "")
    modules = {
        "pack.rule": "from .deep.numbers import CUT\nimport helper\nimport json\n" + SOURCE,
        "pack.deep.numbers": "from ..last import CUT as CUT\n",
        "pack.last": "CUT = 3\n",
        "helper": "import numpy\n\n\ndef unused():\n    import late\n",
    }
    for name, source in modules.items():
        own(name.replace(".", "/"), source)

    def code() -> dict[str, str]:
        for name in ("pack", "pack.deep", *modules):
            sys.modules.pop(name, None)
        return config(rule="pack.rule:Inner:b=1").code()

    before = code()
    assert set(before) == {
        *modules,
        "pack",
        "pack.deep",
    }  # and not numpy, nor what was never imported
    Path("pack/last.py").write_text("CUT = 4\n")
    after = code()
    assert {name for name in before if before[name] != after[name]} == {"pack.last"}
    for name in ("pack", "pack.deep", *modules):
        sys.modules.pop(name, None)


def test_code_that_cannot_be_imported_does_not_match_recorded_code(own: Own) -> None:
    module = own("mine")
    execute(config())
    with sqlite3.connect("r.sqlite") as connection:
        connection.execute("UPDATE runs SET identity = ?", (config().settings_digest(),))
    connection.close()
    module.write("1 / 0\n")
    assert attempts([config()]) == [None]
    with pytest.raises(ValueError, match="mine cannot be imported: ZeroDivisionError"):
        execute(config())


BUILT_IN: dict[str, dict[str, Any]] = {
    "af79226fbe18a576": {},
    "d604f21254bc5775": {
        "rule": "nnm:b=3|trimmed-mean:b=3",
        "attack": "gaussian:q=3",
        "split": "dirichlet:alpha=0.5",
        "local_steps": 2,
        "server_optimizer": "nesterov:lr=0.7",
        "schedule": "cosine:rounds=50",
    },
    "79156e847a6acb15": {"engine": "ray", "asynchronous": "buffers=15", "rule": "phocas:b=3"},
}


def test_another_version_of_results_is_another_run_and_nothing_else_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def task() -> Task:
        data = "synthetic:train=50,test=9"
        return Task.make("softmax", data=data, rule="median", num_workers=5)

    assert make_config({}).identity() not in BUILT_IN
    assert make_config({}).recorded()["results_version"] == 2
    assert task().identity() != "a3157fbb7280ecba"
    for place in (phocas.experiments.config, phocas.training.task):
        monkeypatch.setattr(place, "RESULTS_VERSION", 1)
    for identity, values in BUILT_IN.items():
        built = make_config(values)
        assert (built.identity(), built.code()) == (identity, {})
        assert built.recorded() == built.model_dump()
    assert (task().identity(), task().code) == ("a3157fbb7280ecba", {})


def trainer(**settings: Any) -> Trainer:
    values = {"data": "synthetic:train=200,test=50,side=8", "rule": "median", "num_workers": 7}
    return Trainer(settings.pop("model", "softmax"), **{**values, **settings})


@pytest.mark.parametrize(
    "settings",
    [
        {"rule": "mine:Inner:b=1"},
        {"model": "mine:net"},
        {"data": "mine:data"},
        {"split": "mine:Whole"},
        {"engine": LocalSettings(asynchronous="mine:Alone"), "rule": "mean"},
    ],
)
def test_trainer_rejects_a_checkpoint_of_other_code(own: Own, settings: dict[str, Any]) -> None:
    module = own("mine")
    with trainer(**settings) as first:
        list(first.rounds(2))
        first.save("state.safetensors")
    module.forget()
    with trainer(**settings) as same:
        same.load("state.safetensors")
        assert same.rounds_done == 2
    module.edit("CUT = 1", "CUT = 2")
    with (
        trainer(**settings) as other,
        pytest.raises(
            ValueError,
            match=r"was saved with other code \(mine \w{8}; now mine \w{8}\): restore that code",
        ),
    ):
        other.load("state.safetensors")
    assert other.rounds_done == 0
    if settings.get("rule") != "mine:Inner:b=1":  # which then tolerates another b
        with trainer(**settings) as forced:
            forced.load("state.safetensors", other_code=True)
            assert forced.rounds_done == 2


def test_checkpoint_without_code_digests_is_loaded_with_a_warning(own: Own) -> None:
    own("mine")
    with trainer(rule="mine:Inner:b=1") as first:
        first.code = None  # type: ignore[assignment] # as an older phocas wrote it
        first.save("state.safetensors")
    with (
        trainer(rule="mine:Inner:b=1") as second,
        pytest.warns(UserWarning, match=r"does not say with which code .* now \(mine \w{8}\)"),
    ):
        second.load("state.safetensors")


NOTEBOOK = """
from dataclasses import dataclass

import torch

from phocas import TrimmingRule, Window

SCALE = 2.0
unrelated = 1


TABLE = {1: (2, 3)}


class Shift:
    def amount(self):
        return 4.0


SHIFT = Shift()


def helper(x):
    return x * SCALE + TABLE[1][0] + SHIFT.amount()


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.last = torch.nn.Linear(64, 10)

    def forward(self, images):
        return self.last(helper(images.flatten(1)))


@dataclass(frozen=True)
class Mine(TrimmingRule):
    def window(self, m):
        return Window(trim=min(self.b, 1)) if m in {3, 5, 7, "x"} else Window()
"""


def run_cell(source: str) -> dict[str, Any]:
    """Run source that has no file, as a notebook or an interactive session does."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, "<cell>", "exec"), names)
    return names


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("SCALE = 2.0", "SCALE = 2.0  # a comment\n\n", True),
        ("unrelated = 1", "unrelated = 2\n\n\ndef another():\n    return 5\n", True),
        ("SCALE = 2.0", "SCALE = 3.0", False),
        ("TABLE = {1: (2, 3)}", "TABLE = {1: (2, 4)}", False),
        ("return 4.0", "return 5.0", False),
        ("x * SCALE", "x + SCALE", False),
        ("Linear(64, 10)", "Linear(64, 10, bias=False)", False),
        ("min(self.b, 1)", "min(self.b, 2)", False),
        ('"x"}', '"y"}', False),
    ],
)
def test_code_without_a_source_is_identified_by_its_bytecode(
    old: str, new: str, same: bool
) -> None:
    before, after = run_cell(NOTEBOOK), run_cell(NOTEBOOK.replace(old, new))
    first, second = (code_of([names["Net"](), names["Mine"](b=1)]) for names in (before, after))
    assert set(first) == set(second) == {"__main__:Net", "__main__:Mine"}
    assert (first == second) is same


def test_trainer_of_a_notebook_saves_and_loads(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    for source, message in (
        (NOTEBOOK, None),
        (NOTEBOOK + "\nrounds = 20\n", None),
        (NOTEBOOK.replace("SCALE = 2.0", "SCALE = 3.0"), "was saved with other code"),
    ):
        names = run_cell(source)
        with trainer(model=names["Net"](), rule=names["Mine"](b=1)) as made:
            if not path.exists():
                made.save(path)
            elif message is None:
                made.load(path)
            else:
                with pytest.raises(ValueError, match=message):
                    made.load(path)


def test_digests_without_a_source_are_the_same_in_every_process() -> None:
    start, _, rule = NOTEBOOK.replace("import torch\n", "").partition("class Net")
    program = (
        f"{start}{rule[rule.index('@dataclass') :]}\n"
        "import functools, json\nfrom phocas.provenance import code_of\n"
        "own = [Mine(b=1), functools.partial(helper, 2), lambda x: x + SCALE]\n"
        "print(json.dumps(code_of(own)))"
    )
    found = [
        subprocess.check_output(
            [sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": seed}, text=True
        )
        for seed in ("1", "2")
    ]
    assert found[0] == found[1]
    assert set(json.loads(found[0])) == {"__main__:Mine", "__main__:helper", "__main__:<lambda>"}


def test_parts_of_the_package_have_no_code_digest() -> None:
    data = (np.zeros((9, 4), np.float32), np.zeros(9, np.int64))
    wrapped = torch.utils.data.TensorDataset(torch.zeros(3, 2))
    assert (
        code_of([torch.nn.Linear(2, 2), phocas.Phocas(b=1), data, wrapped, np.median, "mlp"]) == {}
    )


def test_user_defined_data_is_found_inside_containers(own: Own) -> None:
    own("sets", "import torch\n\n\nclass Mine(torch.utils.data.Dataset):\n    pass\n")
    import sets  # type: ignore[import-not-found]

    held = torch.utils.data.Subset(sets.Mine(), [0])
    assert set(code_of([{"train": [held]}])) == {"sets"}
