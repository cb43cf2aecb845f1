"""Runs a search: from a handler and rows to trials, within a time limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from luminosity.errors import OptionError
from luminosity.inference.handler import Handler
from luminosity.inference.tuning.candidates import Candidate, is_adjustable, takes_batch_limit
from luminosity.inference.tuning.search import Search, Space, Trial, difference
from luminosity.inference.tuning.trial_runner import CandidateFailed, Survey, TrialRunner

__all__ = ["Choices", "Tuning"]

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
            choices.dtypes or (_DTYPES if can_adjust else ()),
            choices.threads,
            takes_batch_limit(self._handler),
        )

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
