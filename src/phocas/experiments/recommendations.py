"""Which rule for which workers and failures: the table of docs/choosing.md and `phocas advise`.

Every line has measured numbers and the command that repeats them. A test compares the lines with
the stored results and with the page.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from phocas.detection.own_past import WorkerData

PIPELINE = "cell-filter:b={b}|nnm:b={b}|trimmed-mean:b={b}"
MEASURED_B = 8
"""The b of the rules that were measured with 20 workers, of which 6 were Byzantine."""


@dataclass(frozen=True)
class Recommendation:
    """A rule for one kind of workers and failures, with its numbers."""

    data: WorkerData
    """Whether the workers' data are alike or differ."""
    failures: str
    """The failures against which the rule is recommended, in a few words."""
    about: str
    """What these failures are, for the page."""
    rule: str
    """The rule, with ``{b}`` for the number of Byzantine workers that it tolerates."""
    clean: str
    """The accuracy without failures."""
    lowest: str
    """The lowest accuracy under the attacks of the study."""
    cost: str
    """Processor time, divided by that of the mean."""
    repeat: str
    """The study of ``phocas reproduce``, or the script that repeats the numbers."""
    momentum: bool | None = None
    """Whether workers keep a momentum of 0.9; None: not measured with it, or it does not matter."""
    weights: bool = False
    """Whether workers have weights."""
    b: int = MEASURED_B
    """The b of the measurement."""

    @property
    def command(self) -> str:
        """Return the command that repeats the numbers."""
        script = self.repeat.endswith(".py")
        return f"python {self.repeat}" if script else f"phocas reproduce {self.repeat}"

    def rule_with(self, b: int) -> str:
        """Return the text of the rule with a given b."""
        return self.rule.format(b=b)


RECOMMENDATIONS = (
    Recommendation(
        data="alike",
        failures="none",
        about="none, but you want to see which workers deviate",
        rule="monitor:rule=heraclius:b={b}",
        clean="0.934, as the mean",
        lowest="no protection",
        cost="1.0, with dropped shares",
        repeat="choosing",
    ),
    Recommendation(
        data="alike",
        failures="faults",
        about="**faults**: flipped bits, dying hosts, crashes, rows of noise; also **language"
        " models and mixtures of experts**",
        rule="heraclius:b={b}",
        clean="0.932",
        lowest="0.932 under these; 0.699 under an attack that adapts (min-max)",
        cost="1.3",
        repeat="choosing",
        momentum=False,
    ),
    Recommendation(
        data="alike",
        failures="faults",
        about="the same",
        rule="heraclius:b={b}",
        clean="0.934",
        lowest="0.934 under these; 0.847 (min-max)",
        cost="1.3",
        repeat="choosing-momentum",
        momentum=True,
    ),
    Recommendation(
        data="alike",
        failures="any",
        about="**faults and adversaries**, or unknown",
        rule=PIPELINE,
        clean="0.934",
        lowest="**0.904** (ALIE)",
        cost="1.3 to 1.4 times that of `nnm|trimmed-mean`",
        repeat="choosing-momentum",
        momentum=True,
    ),
    Recommendation(
        data="alike",
        failures="any",
        about="the same",
        rule=PIPELINE,
        clean="0.930",
        lowest="0.878 (ALIE)",
        cost="1.3 to 1.4 times that of `nnm|trimmed-mean`, 1.7 to 1.8 with 1% of the cells wrong",
        repeat="choosing",
        momentum=False,
    ),
    Recommendation(
        data="alike",
        failures="adversaries",
        about="**adversaries**, whole rows",
        rule="nnm:b={b}|trimmed-mean:b={b}",
        clean="0.930",
        lowest="0.882 (ALIE); 0.097 with wrong cells",
        cost="3.5",
        repeat="choosing",
        momentum=False,
    ),
    Recommendation(
        data="alike",
        failures="the paper's",
        about="cells or rows, with the paper's guarantee and nothing else",
        rule="trimmed-mean:b={b}",
        clean="0.919",
        lowest="0.702 (min-max)",
        cost="1.2",
        repeat="choosing",
        momentum=False,
    ),
    Recommendation(
        data="differ",
        failures="any",
        about="adversaries, broken clients; [equal or normalised work](federated.md)",
        rule="nnm:b={b}|trimmed-mean:b={b}",
        clean="0.859 to 0.870, FedAvg 0.880",
        lowest="0.855",
        cost="not measured",
        repeat="benchmarks/skewed_clients.py",
        b=2,
    ),
    Recommendation(
        data="differ",
        failures="any",
        about="a few silos, one of them large: `max_share = 0.3`",
        rule="nnm:b={b}|trimmed-mean:b={b}",
        clean="error 0.03, weighted mean 0.00",
        lowest="error 0.06, weighted mean 519",
        cost="not measured",
        repeat="benchmarks/silos.py",
        weights=True,
        b=1,
    ),
)


def recommended(data: WorkerData, *, momentum: bool) -> tuple[Recommendation, ...]:
    """Return the lines for workers whose data are alike or differ, with or without momentum.

    Args:
        data: whether the data of the workers are alike.
        momentum: whether the workers keep a momentum.

    >>> [each.failures for each in recommended("alike", momentum=True)]
    ['none', 'faults', 'any']
    """
    return tuple(
        each for each in RECOMMENDATIONS if each.data == data and each.momentum in (None, momentum)
    )


def page_lines() -> Iterator[str]:
    """Yield the lines of the table in docs/choosing.md."""
    head = ["data", "possible failures", "momentum", "weights", "rule", "without failures"]
    head += ["lowest accuracy here", "cost", "repeat"]
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    momentum = {None: "either", True: "0.9", False: "none"}
    for each in RECOMMENDATIONS:
        cells = (
            each.data,
            each.about,
            momentum[each.momentum],
            "yes" if each.weights else "no",
            f"`{each.rule_with(each.b)}`",
            each.clean,
            each.lowest,
            each.cost,
            f"`{each.repeat}`",
        )
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
