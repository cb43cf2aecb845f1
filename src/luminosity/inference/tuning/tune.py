"""From a handler and rows to trials, within a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from luminosity.errors import OptionError
from luminosity.inference.handler import Handler
from luminosity.inference.tuning.candidates import Candidate, is_adjustable, takes_batch_limit
from luminosity.inference.tuning.laboratory import CandidateFailed, Laboratory, Survey
from luminosity.inference.tuning.search import Search, Space, Trial, difference

__all__ = ["Choices", "Tuning"]

_DTYPES = ("float32", "bfloat16", "float16")
_LOADING_S = 600.0
"""How long the first candidate may take: nothing is known of its model yet."""
_WITHOUT_RESULT_S = 60.0
"""How long each next one may take, while none had a result."""
_PASSES = 20
_LEAST_S, _MOST_S = 0.3, 5.0
_HOPELESS = 4.0
"""A candidate that takes this many times as long as the first, start and all, is given up."""
_LEAST_PATIENCE_S = 10.0
_WORTH = 0.1
"""Of the best rate so far: a candidate that is slower than this when it warms up is not measured for longer."""


@dataclass(frozen=True)
class Choices:
    """What a user leaves to try; empty: whatever there is."""

    devices: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    threads: tuple[int, ...] = ()


class Tuning:
    """One search."""

    def __init__(self, handler: Handler[Any, Any, Any], examples: list[Any], seconds: float, choices: Choices) -> None:
        if not is_adjustable(handler) and (choices.devices or choices.dtypes):
            flag = "--device" if choices.devices else "--dtype"
            raise OptionError(
                f"{flag} can't be varied: {handler} is no TorchModelHandler, JaxModelHandler or handler of a text model"
            )
        self._handler = handler
        self._choices = choices
        self._laboratory = Laboratory(handler, examples)
        self._seconds = seconds
        self._measuring_s = min(max(seconds / _PASSES, _LEAST_S), _MOST_S)
        self._durations: list[float] = []
        self._reference: dict[int, Any] | None = None
        self.reference: Candidate | None = None
        """Whose predictions the others are compared with."""
        self.on_begin: Callable[[Candidate], None] = lambda candidate: None
        """Called before each trial, for who shows how it goes."""
        self.survey: Survey | None = None
        self.search = Search(Space())
        self.is_out_of_time = False

    @property
    def handler_name(self) -> str:
        return str(self._handler)

    @property
    def not_varied(self) -> list[str]:
        """What could not be tried, and why."""
        notes: list[str] = []
        if not is_adjustable(self._handler):
            notes.append(f"{self._handler} takes no device and no dtype, so these were not varied.")
        if not takes_batch_limit(self._handler):
            notes.append(f"{self._handler} has settings of its own for batches, so smaller ones were not tried.")
        return notes

    def run(self) -> Iterator[Trial]:
        self._ends = time.monotonic() + self._seconds
        try:
            self.survey = self._laboratory.survey(_LOADING_S)
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
            measured, predictions = self._laboratory.measure(candidate, self._measuring_s, patience, worth)
        except CandidateFailed as error:
            return Trial(candidate, None, str(error))
        finally:
            self._durations.append(time.monotonic() - begun)
        if self._reference is None:
            self._reference, self.reference = predictions, candidate
            return Trial(candidate, measured)
        return Trial(candidate, measured, differs=difference(self._reference, predictions))

    def _patience(self) -> float | None:
        """How long the next candidate may take; None where the time that is left is too short to try."""
        if not self._durations:
            return _LOADING_S
        left = self._ends - time.monotonic()
        if self.search.best is None:
            return max(left, _WITHOUT_RESULT_S)
        if left < min(self._durations):
            return None
        return min(max(left, 1.0), max(_LEAST_PATIENCE_S, _HOPELESS * self._durations[0]))
