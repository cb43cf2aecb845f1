"""Tests of many keys: the keys that a sample lacks, and tests that fail, which raise or go to a second output."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Any, TypeAlias

import apache_beam as beam
from apache_beam.pvalue import AsIter
from apache_beam.transforms.window import GlobalWindow, GlobalWindows

from luminosity.errors import DriftError

__all__ = ["FAILED", "Failure", "Failures", "MissingKeys"]

FAILED = "failed"  # the tag of the output for failures

Failure: TypeAlias = tuple[type[DriftError], str, list[str]]
"""What Beam's ``with_exception_handling`` gives: the exception's type, its text and its traceback."""


@dataclass(frozen=True)
class Failures:
    """Says which test failed. ``by`` is the name of keys in messages, or None if there are no keys.

    Failures are raised, unless ``are_returned`` is true.
    """

    by: str | None
    are_returned: bool

    def of(self, error: DriftError, key: Any, window: Any) -> Failure:
        """Return the failure of a key in a window, or raise it."""
        named = DriftError(f"{self._which(key, window)}{error.message}", fix=error.fix)
        if not self.are_returned:
            raise named from error
        return (
            DriftError,
            repr(named),
            traceback.format_exception(type(error), error, error.__traceback__),
        )

    def _which(self, key: Any, window: Any) -> str:
        parts = [] if self.by is None else [f"{self.by}={key!r}"]
        if not isinstance(window, GlobalWindow):
            parts.append(f"the window {window}")
        return f"{' in '.join(parts)}: " if parts else ""


class MissingKeys(beam.PTransform[Any, Any]):
    """Finds the keys that the reference has and the current sample lacks, in each window that has rows.

    Each such key comes with the value ``empty``. Keys are compared by a ``GroupByKey``, because only coders know which
    keys are equal. In the global window, all keys of the reference are missing if the current sample has no rows.
    """

    def __init__(self, of_reference: Any, empty: Any) -> None:
        super().__init__()
        self._of_reference = of_reference
        self._empty = empty

    def expand(self, input_or_inputs: Any) -> Any:
        """Group the keys of both samples in each window, and emit those without a mark of the current sample."""
        marks, empty = tuple[Any, bool], self._empty
        count = beam.CombineGlobally(beam.combiners.CountCombineFn())
        if not isinstance(input_or_inputs.windowing.windowfn, GlobalWindows):
            count = count.without_defaults()
        keys = AsIter(self._of_reference | "ReferenceKeys" >> beam.Keys())
        expected = (
            input_or_inputs
            | "Windows" >> count
            | "Expected" >> beam.FlatMap(lambda _, keys: [(key, False) for key in keys], keys).with_output_types(marks)
        )
        found = input_or_inputs | "Found" >> beam.Map(lambda pair: (pair[0], True)).with_output_types(marks)
        return (
            (expected, found)
            | "Both" >> beam.Flatten()
            | "ByKey" >> beam.GroupByKey()
            | "Missing"
            >> beam.FlatMap(lambda pair: [] if any(pair[1]) else [(pair[0], empty)]).with_output_types(
                tuple[Any, type(empty)]
            )
        )
