"""The share of failures up to which a pipeline goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import apache_beam as beam
from apache_beam import pvalue

__all__ = ["check_threshold"]


def _one(_: Any) -> int:
    return 1


def check_threshold(good: Any, bad: Any, threshold: float, count: Callable[[Any], int] = _one) -> None:
    """Fail the pipeline when more than this share of examples failed, window by window.

    `count` tells how many an element stands for.
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
        raise ValueError(
            f"{bad} of {total} examples failed in the window {window!r}: a share of {bad / total:.3g}, "
            f"and threshold={threshold} was given"
        )
