"""Blocks back into rows, each with its own time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import apache_beam as beam
from apache_beam import pvalue
from apache_beam.transforms.window import WindowedValue

from luminosity.inference.blocks import rows
from luminosity.inference.model_set import ModelSet
from luminosity.inference.steps.messages import ResultBlock

__all__ = ["FAILED", "ResultsDoFn"]

FAILED = "failed"


class ResultsDoFn(beam.DoFn):
    """Runs on CPU workers, so that the device's process handles blocks alone."""

    def __init__(self, models: ModelSet, drop_example: bool) -> None:
        self._models = models
        self._drop_example = drop_example

    def process(self, block: ResultBlock, window: Any = beam.DoFn.WindowParam) -> Iterator[Any]:
        handler = self._models.handlers[block.model]
        windows, flatten, result = (window,), handler.should_skip_batching(), handler.result
        for example, timestamp, value in zip(block.examples, block.timestamps, rows(block.values), strict=True):
            predicted = result(example, value, block.model_id, self._drop_example)
            if flatten:
                for each in predicted:
                    yield WindowedValue(each, timestamp, windows)
            else:
                yield WindowedValue(predicted, timestamp, windows)
        for failed in block.failed:
            letter = failed.example if flatten else [failed.example], failed.error
            yield pvalue.TaggedOutput(FAILED, WindowedValue(letter, failed.timestamp, windows))
