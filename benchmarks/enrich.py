"""Compare three text models in one Enrich with the sum of each model alone, fed with ideal batches.

The models have the shape and the tokenizer of MiniLM: the embedder itself, and two classifiers with random weights.
The time is the difference between a long and a short run, divided by the difference in rows, so start-up does not
matter. Enrich's time includes tokenising, the time of the models alone does not; tokenising is measured separately.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import _measure
import apache_beam as beam
import numpy as np
import pyarrow as pa
from _lengths import LONGEST
from _texts import MODEL, Texts
from apache_beam.metrics import Metrics
from apache_beam.options.pipeline_options import PipelineOptions

os.environ["HF_HUB_OFFLINE"] = "1"

_ROWS = 1500
_SHORT = 6  # The short run has this fraction of the rows of the long one.
_COLUMNS = ("semantic", "mood", "topic")


@contextmanager
def handlers() -> Iterator[dict[str, Any]]:
    """Make the embedder, and classifiers in a temporary folder."""
    import torch
    from transformers import AutoConfig, AutoTokenizer, BertForSequenceClassification

    from luminosity import SentenceEmbedder, TextClassifier

    made: dict[str, Any] = {"semantic": SentenceEmbedder(MODEL)}
    with tempfile.TemporaryDirectory() as folder:
        for name in _COLUMNS[1:]:
            torch.manual_seed(0)
            path = Path(folder, name)
            BertForSequenceClassification(AutoConfig.from_pretrained(MODEL, num_labels=3)).save_pretrained(path)
            AutoTokenizer.from_pretrained(MODEL).save_pretrained(path)
            made[name] = TextClassifier(path, max_length=LONGEST)
        yield made


def texts(rows: int, tokenizer: Any) -> list[str]:
    return Texts.read(tokenizer.whole.backend_tokenizer).make("skewed", rows)


def enrich(runner: Callable[[], Any]) -> dict[str, float]:
    with handlers() as made:
        lines = texts(_ROWS, made["semantic"].tokenizer)
        short, _ = run(runner(), made, lines[: _ROWS // _SHORT])
        long, counted = run(runner(), made, lines)
    more = _ROWS - _ROWS // _SHORT
    return {
        "ms/row": 1000 * (long - short) / more,
        "padding %": 100 * (1 - counted["useful_cost"] / counted["padded_cost"]),
        "times read": counted["rows_read"] / _ROWS,
        "times tokenised": counted["rows_prepared"] / _ROWS,
    }


def run(runner: Any, made: dict[str, Any], lines: list[str]) -> tuple[float, dict[str, int]]:
    from luminosity import Column, Enrich

    pipeline = beam.Pipeline(runner, PipelineOptions(["--progress=off"]))
    table = pipeline | beam.Create([pa.record_batch({"text": lines})]) | "Read" >> beam.Map(counted_rows)
    enriched = table | Enrich(**{name: Column(handler, "text") for name, handler in made.items()})
    _measure.check_count_and_sum(enriched | beam.FlatMap(lambda batch: [1] * batch.num_rows), len(lines), len(lines))
    begun = time.perf_counter()
    result = pipeline.run()
    result.wait_until_finish()
    seconds = time.perf_counter() - begun
    counted: dict[str, int] = {}
    for each in result.metrics().query()["counters"]:
        counted[each.key.metric.name] = counted.get(each.key.metric.name, 0) + each.committed
    return seconds, counted


def counted_rows(table: Any) -> Any:
    Metrics.counter("benchmark", "rows_read").inc(table.num_rows)
    return table


def bare() -> dict[str, float]:
    """Measure each model alone: all rows tokenised and sorted by length, with the best of several batch budgets."""
    with handlers() as made:
        lines = texts(_ROWS, made["semantic"].tokenizer)
        # The tokenizer remembers words: the short run of the other side has seen these rows, too.
        made["semantic"].prepare(lines[: _ROWS // _SHORT])
        begun = time.perf_counter()
        prepared = made["semantic"].prepare(lines)
        measured = {"tokenising, ms/row": 1000 * (time.perf_counter() - begun) / _ROWS}
        seconds = {name: computing(handler, prepared) for name, handler in made.items()}
    return {**measured, **{f"{name}, ms/row": 1000 * each / _ROWS for name, each in seconds.items()}}


def computing(handler: Any, prepared: Any) -> float:
    model = handler.load_model()
    lengths = np.asarray(handler.cost(prepared))
    order = np.argsort(-lengths)

    def compute(budget: int, rows: np.ndarray) -> float:
        begun, start = time.perf_counter(), 0
        while start < len(rows):
            count = max(1, budget // int(lengths[rows[start]]))
            batch = handler.transfer(handler.collate(prepared.take(pa.array(rows[start : start + count]))))
            handler.collect(handler.predict(model, batch))
            start += count
        return time.perf_counter() - begun

    sample = order[:: _ROWS // 300]
    compute(512, sample)
    best = min((512, 1024, 2048, 4096), key=lambda budget: compute(budget, sample))
    return compute(best, order)


def report(results: _measure.Results) -> None:
    _measure.print_table(results)
    alone = sum(results["each model alone"][f"{name}, ms/row"] for name in _COLUMNS)
    print(f"the sum of the models alone: {alone:.2f} ms/row")
    for runner in ("Luminosity", "FnApiRunner"):
        one = results[f"Enrich on {runner}"]
        _measure.print_figure(f"of the sum of the models alone, on {runner}", one["ms/row"] / alone, at_most=1.06)
        _measure.print_figure(f"times texts were read, on {runner}", one["times read"], at_most=1)
        _measure.print_figure(f"times texts were tokenised, on {runner}", one["times tokenised"], at_most=1)


def luminosity_runner() -> Any:
    from luminosity import LuminosityRunner

    return LuminosityRunner()


if __name__ == "__main__":
    sides: dict[str, _measure.Side] = {
        "each model alone": bare,
        "Enrich on Luminosity": lambda: enrich(luminosity_runner),
        "Enrich on FnApiRunner": lambda: enrich(_measure.FnApiRunner),
    }
    _measure.main(sides, report)
