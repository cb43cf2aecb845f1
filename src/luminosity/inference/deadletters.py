"""Dead letters: fail the pipeline if there are too many."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import apache_beam as beam
from apache_beam.transforms.trigger import DefaultTrigger
from apache_beam.transforms.window import GlobalWindows

from luminosity.errors import HandlerError, InvalidArgument

__all__ = ["check_threshold"]


def _one(_: Any) -> int:
    return 1


def check_threshold(good: Any, bad: Any, threshold: float, count: Callable[[Any], int] = _one) -> None:
    """Fail the pipeline if more than this share of the examples of a window failed.

    ``count`` returns how many examples an element holds.
    """

    windowing = good.windowing
    is_global = isinstance(windowing.windowfn, GlobalWindows) and isinstance(windowing.triggerfn, DefaultTrigger)
    if is_global and not good.is_bounded:
        raise InvalidArgument(
            f"found threshold={threshold} in a stream that has no windows, expected windows to count failures in",
            fix="apply beam.WindowInto(FixedWindows(60)) first, or leave threshold out",
        )
    counts = beam.Map(lambda element: (0, count(element))).with_output_types(tuple[int, int])
    failures = beam.Map(lambda element: (count(element),) * 2).with_output_types(tuple[int, int])
    _ = (
        (good | "CountGood" >> counts, bad | "CountBad" >> failures)
        | "AllExamples" >> beam.Flatten()
        | "Total" >> beam.CombineGlobally(_sums).without_defaults()
        | "CheckThreshold" >> beam.Map(_check, threshold)
    )


def _sums(counts: Iterable[tuple[int, int]]) -> tuple[int, int]:
    failed, total = 0, 0
    for each in counts:
        failed, total = failed + each[0], total + each[1]
    return failed, total


def _check(counts: tuple[int, int], threshold: float, window: Any = beam.DoFn.WindowParam) -> None:
    bad, total = counts
    if bad > total * threshold:
        raise HandlerError(
            f"{bad} of {total} examples failed in the window {window!r}: found a share of {bad / total:.3g}, "
            f"expected at most threshold={threshold}"
        )
