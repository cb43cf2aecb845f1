"""Dead letters: fail the pipeline if there are too many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import apache_beam as beam
from apache_beam import pvalue

from luminosity.errors import HandlerError

__all__ = ["check_threshold"]


def _one(_: Any) -> int:
    return 1


def check_threshold(good: Any, bad: Any, threshold: float, count: Callable[[Any], int] = _one) -> None:
    """Fail the pipeline if more than this share of the examples of a window failed.

    ``count`` returns how many examples an element holds.
    """

    def counted(values: Any, label: str) -> Any:
        return values | label >> beam.Map(count).with_output_types(int)

    total = (
        (counted(good, "CountGood"), counted(bad, "CountBad"))
        | "AllExamples" >> beam.Flatten()
        | "Total" >> beam.CombineGlobally(sum).without_defaults()
    )
    failures = counted(bad, "CountFailures") | "Failures" >> beam.CombineGlobally(sum).without_defaults()
    _ = failures | "CheckThreshold" >> beam.Map(_check, pvalue.AsSingleton(total), threshold)


def _check(bad: int, total: int, threshold: float, window: Any = beam.DoFn.WindowParam) -> None:
    if bad > total * threshold:
        raise HandlerError(
            f"{bad} of {total} examples failed in the window {window!r}: found a share of {bad / total:.3g}, "
            f"expected at most threshold={threshold}"
        )
