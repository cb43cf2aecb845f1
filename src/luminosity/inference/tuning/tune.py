"""Runs a search, from a handler and rows to trials within a time limit, and explains its results."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from luminosity.core import usable_cores
from luminosity.errors import OptionError
from luminosity.inference.handler import Handler
from luminosity.inference.handlers.text.embedder import SentenceEmbedder
from luminosity.inference.tuning.search import (
    Candidate,
    Search,
    Space,
    Trial,
    difference,
    is_adjustable,
    takes_batch_limit,
)
from luminosity.inference.tuning.trial_runner import CandidateFailed, Survey, TrialRunner

__all__ = ["Choices", "Tuning", "flags", "handler_code", "sentences"]
_DTYPES = ("float32", "bfloat16", "float16")
_LOADING_S = 600.0  # how long the first candidate may take: its model may be large
_WITHOUT_RESULT_S = 60.0  # how long each further candidate may take while none has a result
_PASSES = 20  # a measurement takes this part of the whole time, within these limits:
_LEAST_S, _MOST_S = 0.3, 5.0
_HOPELESS = 4.0  # a candidate that takes this many times as long as the first, including its start, is stopped
_LEAST_PATIENCE_S = 10.0  # no candidate is stopped before this
_WORTH = 0.1  # a candidate below this share of the best rate while it warms up is not measured for longer


@dataclass(frozen=True)
class Choices:
    """The settings that the user wants to try; an empty tuple means all that the machine offers."""

    devices: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    threads: tuple[int, ...] = ()


class Tuning:
    """One search for the best settings."""

    def __init__(self, handler: Handler[Any, Any, Any], examples: list[Any], seconds: float, choices: Choices) -> None:
        if not is_adjustable(handler) and (choices.devices or choices.dtypes):
            flag = "--device" if choices.devices else "--dtype"
            raise OptionError(
                f"{flag} can't be varied: {handler} is not a TorchModelHandler, a JaxModelHandler or a text model's "
                "handler"
            )
        if "int8" in choices.dtypes and not _takes_int8(handler):
            raise OptionError(
                f"--dtype int8: found {handler}, expected a SentenceEmbedder whose model can run in 8 bits, and "
                "onnxruntime",
                fix="leave out int8",
            )
        if "int8" in choices.dtypes and choices.devices and "cpu" not in choices.devices:
            raise OptionError(
                f"--dtype int8: found --device {','.join(choices.devices)}, expected cpu among them, for 8 bits",
                fix="add cpu, or leave out int8",
            )
        self._handler = handler
        self._choices = choices
        self._runner = TrialRunner(handler, examples)
        self._seconds = seconds
        self._measuring_s = min(max(seconds / _PASSES, _LEAST_S), _MOST_S)
        self._durations: list[float] = []
        self._reference: dict[int, Any] | None = None
        self.reference: Candidate | None = None
        """The candidate with whose predictions the others are compared."""
        self.on_begin: Callable[[Candidate], None] = lambda candidate: None
        """Called before each trial, to show progress."""
        self.survey: Survey | None = None
        self.search = Search(Space())
        self.is_out_of_time = False

    @property
    def handler_name(self) -> str:
        """The name of the handler's class."""
        return str(self._handler)

    @property
    def not_varied(self) -> list[str]:
        """Sentences about settings that could not be varied."""
        notes: list[str] = []
        if not is_adjustable(self._handler):
            notes.append(f"{self._handler} takes no device and no dtype, so these were not varied.")
        if not takes_batch_limit(self._handler):
            notes.append(f"{self._handler} has its own batch settings, so smaller batches were not tried.")
        return notes

    def run(self) -> Iterator[Trial]:
        """Yield trials as they are done. Raises ``OptionError`` if the handler can't prepare the rows."""
        self._ends = time.monotonic() + self._seconds
        try:
            self.survey = self._runner.survey(_LOADING_S)
        except CandidateFailed as error:
            raise OptionError(f"{self._handler} can't prepare these rows: {error}") from error
        self.search = Search(self._space(self.survey))
        yield from self.search.run(self._measure)

    def _space(self, survey: Survey) -> Space:
        choices, can_adjust = self._choices, is_adjustable(self._handler)
        return Space(
            choices.devices or survey.devices,
            choices.dtypes or (self._dtypes() if can_adjust else ()),
            choices.threads,
            takes_batch_limit(self._handler),
            survey.ways,
        )

    def _dtypes(self) -> tuple[str, ...]:
        return (*_DTYPES, "int8") if _takes_int8(self._handler) else _DTYPES

    def _measure(self, candidate: Candidate) -> Trial | None:
        patience = self._patience()
        if patience is None:
            self.is_out_of_time = True
            return None
        self.on_begin(candidate)
        begun = time.monotonic()
        worth = _WORTH * self.search.best.rate if self.search.best is not None else 0.0
        try:
            measured, predictions = self._runner.measure(candidate, self._measuring_s, patience, worth)
        except CandidateFailed as error:
            return Trial(candidate, None, str(error))
        finally:
            self._durations.append(time.monotonic() - begun)
        if self._reference is None:
            self._reference, self.reference = predictions, candidate
            return Trial(candidate, measured)
        return Trial(candidate, measured, differs=difference(self._reference, predictions))

    def _patience(self) -> float | None:
        """Return how long the next candidate may take, or None if there is too little time left."""
        if not self._durations:
            return _LOADING_S
        left = self._ends - time.monotonic()
        if self.search.best is None:
            return max(left, _WITHOUT_RESULT_S)
        if left < min(self._durations):
            return None
        return min(max(left, 1.0), max(_LEAST_PATIENCE_S, _HOPELESS * self._durations[0]))


_SOME_PADDING, _MUCH_PADDING = 0.005, 0.15  # shares of the work that are worth a sentence, and an explanation
_IDLE = 0.8  # a device that computes less of the time waits for the CPU


def _takes_int8(handler: Handler[Any, Any, Any]) -> bool:
    return isinstance(handler, SentenceEmbedder) and handler.takes_int8


def sentences(best: Trial, trials: list[Trial], survey: Survey) -> Iterator[str]:
    """Yield sentences about what limits the speed."""
    measured = best.measured
    if measured is None:
        return
    if measured.padding > _SOME_PADDING:
        why = ": lengths differ a lot within a batch" if measured.padding > _MUCH_PADDING else ""
        yield f"Padding is {measured.padding:.0%} of the work{why}."
    yield _preparing(best, survey)
    if measured.memory_of == "device" and measured.busy_share < _IDLE:
        yield f"The device computes {measured.busy_share:.0%} of the time: the CPU that feeds it is the limit."
    if measured.out_of_memory:
        yield f"Memory ran out {measured.out_of_memory} times: batches were halved until they fit."
    gain = _gain_by_dtype(best, trials)
    if gain is not None and best.differs is not None:
        yield (
            f"{best.candidate.dtype} is {gain:.1f}x as fast as float32, and predictions differ by at most "
            f"{best.differs.largest:.2g}{_changed(best)}."
        )
    yield from _cosines(trials)


def _cosines(trials: list[Trial]) -> Iterator[str]:
    """Yield how near the vectors in 8 bits are to those that all are compared with."""
    reference = next((trial.candidate.dtype for trial in trials if trial.measured is not None), None)
    for trial in trials:
        differs = trial.differs
        if trial.candidate.dtype == "int8" and differs is not None and differs.mean_cosine is not None:
            yield (
                f"On {differs.rows:,} of your rows, the cosine of int8 vectors to those of {reference} is "
                f"{differs.mean_cosine:.4f} on average and {differs.least_cosine:.4f} at least."
            )
            return


def _gain_by_dtype(best: Trial, trials: list[Trial]) -> float | None:
    """Compare two trials that differ only in the dtype."""
    rates = {trial.candidate: trial.rate for trial in trials if trial.rate}
    for candidate, rate in rates.items():
        other = replace(candidate, dtype=best.candidate.dtype)
        if candidate.dtype == "float32" and other != candidate and other in rates:
            return rates[other] / rate
    return None


def _preparing(best: Trial, survey: Survey) -> str:
    ratio = survey.prepared_per_second / best.rate
    rate = f"One core prepares {survey.prepared_per_second:,.0f} rows/s"
    if best.candidate.device in (None, "cpu"):
        cores = best.candidate.workers * (best.candidate.threads or 1)
        share = 1 / (1 + ratio * cores)
        if share < 0.01:
            return "Preparing takes less than 1% of the cores' time."
        return f"{rate}: preparing takes {share:.0%} of the cores' time, the model the rest."
    if ratio >= 1:
        return f"{rate}, {ratio:.1f}x what the model takes: one CPU worker feeds it."
    needed = math.ceil(1 / ratio)
    enough = "" if needed < usable_cores() else f"; this machine has {usable_cores()} cores, so preparing is the limit"
    return f"{rate}: it takes {needed} CPU workers to feed the model{enough}."


def _changed(best: Trial) -> str:
    differs = best.differs
    return f"; {differs.changed} of {differs.rows} have another label or text" if differs and differs.changed else ""


def handler_code(name: str, first_argument: str, best: Candidate) -> str:
    """Return the code that creates the handler in a pipeline.

    >>> handler_code("SentenceEmbedder", "'models/mini'", Candidate("cpu", "bfloat16", max_batch_size=32))
    "SentenceEmbedder('models/mini', device='cpu', dtype='bfloat16', max_batch_size=32)"
    """
    kind = "precision" if best.dtype == "int8" else "dtype"
    settings = {"device": best.device, kind: best.dtype, "max_batch_size": best.max_batch_size}
    given = [f"{key}={value!r}" for key, value in settings.items() if value is not None]
    given += ["compile=True"] if best.way == "compiled" else []
    return f"{name}({', '.join([first_argument, *given])})"


def flags(best: Candidate) -> list[str]:
    """Return the pipeline's flags, if they differ from its defaults: a worker with one thread for each core."""
    if best.threads is None or (best.threads == 1 and best.workers == usable_cores()):
        return []
    return [f"--cpu_workers={best.workers}", f"--model_threads={best.threads}"]
