"""Tables of what a run did, from the counters of any runner and the events of LuminosityRunner."""

from __future__ import annotations

import textwrap
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
from apache_beam.metrics.metric import MetricResults
from apache_beam.options.pipeline_options import PipelineOptions, StandardOptions
from rich.console import Console
from rich.table import Table

from luminosity import LuminosityRunner, RunEnded, RunStarted
from luminosity.core import InferenceMetrics

Counters = Mapping[str, Mapping[str, int]]  # by model, then by the counter's name
_MICROSECONDS = 1e6


class RunEvents:
    """Collects the events of LuminosityRunner; other runners have none."""

    def __init__(self) -> None:
        self.started: RunStarted | None = None
        self.ended: RunEnded | None = None

    def runner(self, options: PipelineOptions) -> LuminosityRunner | None:
        """Return a LuminosityRunner that reports events if the options name it; otherwise None, and Beam finds it."""
        name = options.view_as(StandardOptions).runner or ""
        return LuminosityRunner(on_event=self._add) if name.endswith(LuminosityRunner.__name__) else None

    def _add(self, event: object) -> None:
        if isinstance(event, RunStarted):
            self.started = event
        elif isinstance(event, RunEnded):
            self.ended = event


def counters_by_model(metrics: MetricResults) -> Counters:
    """Return the counters of each model; every model of Enrich has its own namespace."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for counter in metrics.query()["counters"]:
        if counter.key.metric.name in InferenceMetrics.ALL:
            found[counter.key.metric.namespace][counter.key.metric.name] += counter.result
    return found


def print_models(console: Console, counters: Counters) -> None:
    """Print how fast each model was."""
    table = _table("model", "rows", "rows/s of a worker", "padding", "prepared in", "computed in")
    for model, counts in counters.items():
        seconds = counts[InferenceMetrics.COMPUTE] / _MICROSECONDS
        rows, padded = counts[InferenceMetrics.EXAMPLES], counts[InferenceMetrics.PADDED_COST]
        table.add_row(
            model,
            f"{rows:,}",
            f"{rows / seconds:,.0f}" if seconds else "",
            f"{1 - counts[InferenceMetrics.USEFUL_COST] / padded:.0%}" if padded else "",
            f"{counts[InferenceMetrics.PREPARE] / _MICROSECONDS:.1f} s",
            f"{seconds:.1f} s",
        )
    console.print(table)


def print_pools(console: Console, events: RunEvents) -> None:
    """Print how busy the workers were. Only LuminosityRunner has pools."""
    if events.started is None or events.ended is None:
        return
    workers = {pool.name: pool.workers for pool in events.started.pools}
    table = _table("pool", "workers", "busy", "at work")
    for pool in events.ended.last.pools:
        table.add_row(pool.name, str(workers[pool.name]), f"{pool.busy_fraction:.0%}", f"{pool.busy_seconds:.1f} s")
    console.print(table)


def print_sentiments(console: Console, reviews: Any) -> None:
    """Print how often the sentiment model is right on reviews that it was not trained on."""
    sources = np.asarray(reviews["source"].to_pylist())
    is_right = (reviews["sentiment"].to_numpy() > 0.5) == (reviews["label"].to_numpy() == 1)
    table = _table("reviews of", "rows", "sentiment is right", "languages")
    languages = np.asarray(reviews["language"].to_pylist())
    for source in (*sorted(set(sources)), "all"):
        rows = np.isin(sources, [source]) if source != "all" else np.full(len(sources), True)
        often = Counter(languages[rows].tolist()).most_common(3)
        shown = ", ".join(f"{language} {count:,}" for language, count in often)
        table.add_row(str(source), f"{rows.sum():,}", f"{is_right[rows].mean():.1%}", shown)
    console.print(table)


def print_nearest(console: Console, query: str, found: Any) -> None:
    """Print the reviews that the search found."""
    console.print(f"\nNearest to [bold]{query}[/bold]:")
    for neighbour in found["neighbours"][0].as_py():
        mood = "good" if neighbour["sentiment"] > 0.5 else "bad"
        text = textwrap.shorten(neighbour["text"], console.width - 13, placeholder=" …")
        console.print(f"{neighbour['score']:5.2f}  {mood:4}  {text}", markup=False)


def _table(first: str, *others: str) -> Table:
    table = Table(first)
    for name in others:
        table.add_column(name, justify="right")
    return table
