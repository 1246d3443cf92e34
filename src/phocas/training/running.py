"""A run of a trainer in Python: rounds with evaluations and progress, and what they gave."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

from phocas.notebook import html_table
from phocas.specs import count

if TYPE_CHECKING:
    import os

    from phocas.training.evaluation import Metrics
    from phocas.training.trainer import Round, Trainer

_SECONDS = 0.1  # between two updates of the line that shows the progress


@dataclass(frozen=True, eq=False, repr=False)
class TrainingRun:
    """The rounds of :meth:`Trainer.run`, and the evaluations between them.

    >>> from phocas.training import Trainer
    >>> with Trainer("softmax", data="synthetic:train=500,test=100", num_workers=10, lr=0.5,
    ...              rule="phocas:b=3") as trainer:
    ...     done = trainer.run(20, evaluate_every=10)
    >>> len(done.rounds), list(done.evaluations), done.accuracy > 0.5
    (20, [0, 10, 20], True)
    """

    rounds: list[Round] = field(default_factory=list)
    """The rounds, in order."""
    evaluations: dict[int, Metrics] = field(default_factory=dict)
    """The evaluations by the number of the round; 0 is before the first round."""
    number: int | None = None
    """The number of the run in the results file, if there is one."""
    test: Metrics | None = None
    """The evaluation of the test samples at the end, if the others are of validation samples."""

    @property
    def accuracy(self) -> float | None:
        """Return the accuracy of the last evaluation, if there is one."""
        return next((each.top1 for each in reversed(self.evaluations.values())), None)

    def __repr__(self) -> str:
        last = f"loss {self.rounds[-1].loss:.4g}" if self.rounds else "no rounds"
        accuracy = "" if self.accuracy is None else f", accuracy {self.accuracy:.3f}"
        kept = "" if self.number is None else f", run {self.number} of the results"
        return f"<TrainingRun: {len(self.rounds)} rounds, {last}{accuracy}{kept}>"

    def _repr_html_(self) -> str:
        """Return the evaluations as a small HTML table, which notebooks show."""
        shown = list(self.evaluations.items())
        shown = shown[:: max(1, len(shown) // 10)] + shown[-1:]
        rows = [(number, each.loss, each.top1) for number, each in dict(shown).items()]
        return html_table(["round", "loss", "accuracy"], rows, repr(self)[1:-1])


def run(
    trainer: Trainer,
    rounds: int,
    results: str | os.PathLike[str] | None,
    name: str | None,
    evaluate_every: int,
    progress: bool | None,
) -> TrainingRun:
    """Run further rounds; see :meth:`Trainer.run`."""
    last = trainer.rounds_done + count("run", "rounds", rounds, 1)
    count("run", "evaluate_every", evaluate_every, 1)
    samples = trainer.task.samples
    evaluated = samples.test is not None or samples.validation is not None
    with ExitStack() as stack:
        recorder = None
        if results is not None:
            # A layer above writes results: ``pyproject.toml`` lists this exception.
            from phocas.experiments.recording import recorded_run  # noqa: PLC0415

            recorder = stack.enter_context(
                recorded_run(trainer, Path(results), last, evaluate_every, name)
            )
        done = TrainingRun(number=None if recorder is None else recorder.run)
        show = stack.enter_context(_Line(last, progress))
        if evaluated and trainer.rounds_done == 0:
            done.evaluations[0] = trainer.evaluate()
            if recorder is not None:
                recorder.evaluations.append((0, done.evaluations[0]))
        while trainer.rounds_done < last:
            number = trainer.rounds_done + 1
            due = number % evaluate_every == 0 or number == last
            one = trainer.step(detailed=due)
            done.rounds.append(one)
            evaluation = None
            if evaluated and (due or one.action == "stopped"):
                evaluation = done.evaluations[number] = trainer.evaluate()
            if recorder is not None:
                recorder.keep(one, evaluation)
            show.update(one, done.accuracy)
            if one.action == "stopped":
                break
        if samples.validation is None or samples.test is None:
            return done
        metrics = trainer.evaluate(test=True)
        if recorder is not None:
            recorder.results.record_test(recorder.run, metrics)
        return TrainingRun(done.rounds, done.evaluations, done.number, metrics)


class _Line:
    """One line on stderr that shows the progress, on a terminal and in a notebook."""

    def __init__(self, last: int, shown: bool | None) -> None:
        self._last = last
        self._shown = shown
        if shown is None:
            self._shown = sys.stderr.isatty() or "ipykernel" in sys.modules
        self._began = self._wrote = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def update(self, done: Round, accuracy: float | None) -> None:
        """Show a round, unless the line is younger than a tenth of a second."""
        now = time.monotonic()
        if not self._shown or (now - self._wrote < _SECONDS and done.number < self._last):
            return
        self._wrote = now
        filled = 20 * done.number // self._last
        known = "" if accuracy is None else f"  accuracy {accuracy:.3f}"
        line = (
            f"\r{'#' * filled:.<20} round {done.number}/{self._last}  loss {done.loss:.4g}{known}"
            f"  {now - self._began:.0f} s"
        )
        sys.stderr.write(f"{line:<80}")
        sys.stderr.flush()

    def __exit__(self, *_: object) -> None:
        if self._shown:
            sys.stderr.write("\n")
