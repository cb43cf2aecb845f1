"""The plain view, progress in lines of text for logs and pipes, and the summary that every view ends with."""

from __future__ import annotations

import io
import sys
from collections import Counter
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from luminosity._shared.kafka_metrics import KafkaMetrics
from luminosity._shared.text import format_bytes
from luminosity.events import Event, MetricView, RunEnded, RunStarted, Snapshot, StageView
from luminosity.runs.views import step_lines, words
from luminosity.runs.views.choice import is_worth_printing

__all__ = ["PlainView", "line", "summary"]

_ENDINGS = {
    "done": ("done in", "bold green"),
    "failed": ("failed after", "bold red"),
    "cancelled": ("cancelled after", "bold yellow"),
    "stopped": ("stopped after", "bold green"),
    "drained": ("drained after", "bold green"),
}
_STOPPED = "stopped after", "bold green"  # a stream has no other end
_SLOWEST = 3  # stages named
_STREAMS = 3  # stages of a stream named: those nearest to the end, which make the results
_METRICS = 20  # lines
_SHOWN_ELSEWHERE = frozenset({KafkaMetrics.READ, KafkaMetrics.WRITE})  # namespaces


def summary(run: RunStarted, ended: RunEnded) -> Group:
    """Return state, failure, time, streams, pools, devices, models, memory, slow stages, and metrics of user code."""
    last = ended.last
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    title = Text(run.title, style="bold")
    how, style = _ENDINGS[ended.state]
    streams = [stage for stage in last.stages if stage.stream is not None]
    if streams and ended.state == "cancelled":
        how, style = _STOPPED
    title.append(f"  {how} {words.duration(ended.seconds)}", style=style)
    if ended.state == "failed":
        table.add_row("failure", Text(ended.failure))
    if run.checkpoint_dir and ended.state in ("stopped", "failed", "cancelled"):
        table.add_row("checkpoint", Text(f"{run.checkpoint_dir}: the next start with it continues"))
    if copied := words.copy(last.checkpoint):
        table.add_row("copy", Text(copied))
    labels = {stage.id: words.shortened(stage.label, _LABEL_CHARACTERS) for stage in run.stages}
    for stage in streams[-_STREAMS:]:
        parts = words.stream_parts(stage, seconds=ended.seconds)
        table.add_row("stream", Text(f"{labels[stage.id]}: {' · '.join(parts)}"))
    for view in step_lines.kafka_of(last):
        table.add_row("kafka", Text(step_lines.sentence(view)))
    for pool in last.pools:
        use = f"{words.percent(pool.busy_fraction)} busy, {words.duration(pool.busy_seconds)} of work"
        table.add_row("pool", Text(f"{pool.name}: {use}"))
    for device in last.devices:
        table.add_row("device", Text(f"{device.id}: {words.percent(device.busy_fraction)} busy"))
    if run.machine.nodes:
        table.add_row("cluster", Text(words.nodes(run.machine.nodes)))
    for version in dict.fromkeys(words.model_version(each) for each in run.models):
        table.add_row("version", Text(version))
    for view in step_lines.models_of(last):
        table.add_row("model", Text(step_lines.sentence(view)))
    table.add_row("memory", Text(", ".join(_memory(ended))))
    slowest = sorted((s for s in last.stages if s.busy_seconds > 0), key=lambda s: s.busy_seconds, reverse=True)
    named = [f"{labels[s.id]} {words.duration(s.busy_seconds)}" for s in slowest[:_SLOWEST]]
    if named:
        table.add_row("slowest", Text(", ".join(named)))
    for kind, text in _metric_lines(ended, _METRICS):
        table.add_row(kind, Text(text))
    return Group(title, table)


def _metric_lines(ended: RunEnded, most: int) -> list[tuple[str, str]]:
    """Return the kind and a line for each metric of user code, at most ``most``, and a line for the others."""
    metrics = [view for view in ended.metrics if view.namespace not in _SHOWN_ELSEWHERE]
    names = Counter((view.step, view.name) for view in metrics)
    lines = [(view.kind, _metric(view, is_full=names[view.step, view.name] > 1)) for view in metrics[:most]]
    hidden = len(metrics) - len(lines) + ended.metrics_left_out
    return [*lines, *([("", f"and {hidden:,} more metrics")] if hidden else [])]


def _metric(view: MetricView, is_full: bool) -> str:
    name = f"{view.namespace}/{view.name}" if is_full else view.name
    if view.kind != "distribution":
        return f"{view.step}: {name} {view.value:,}"
    return f"{view.step}: {name} min {view.min:,}, mean {view.mean:,.4g}, max {view.max:,}, count {view.count:,}"


def _memory(ended: RunEnded) -> list[str]:
    held, processes = ended.last.memory, ended.last.processes
    parts = [f"at most {format_bytes(processes.peak)} in all processes"] if processes.peak else []
    return [
        *parts,
        f"at most {format_bytes(held.peak)} between stages",
        f"{format_bytes(held.spilled) if held.spilled else 'nothing'} spilled to disk",
    ]


_EVERY_S = 5.0  # few enough lines for a log
_STREAM_AFTER_S = 2.0  # a stream that ends sooner needs no word about how to stop it
_MOST_STAGES = 3  # in one line
_LABEL_CHARACTERS = 40
_MOST_OF_MODELS = 3  # parts about each model
_MOST_OF_KAFKA = 2  # parts about each read or write: lag or dead letters, and times
_WIDTH = 100  # columns of the summary


class PlainView:
    """Prints a line every few seconds, and a summary at the end. Prints nothing for a short run without metrics."""

    def __init__(self) -> None:
        self._run: RunStarted | None = None
        self._next_at = _EVERY_S
        self._is_broken = False
        self._has_told_how_to_stop = False

    def __call__(self, event: Event) -> None:
        try:
            self._take(event)
        except (OSError, ValueError):
            self._is_broken = True  # standard error is closed; the run goes on

    def _take(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._run = event
        if self._run is None or self._is_broken:
            return
        if isinstance(event, Snapshot) and event.seconds >= _STREAM_AFTER_S and not self._has_told_how_to_stop:
            self._has_told_how_to_stop = True
            if text := words.how_to_stop(self._run):
                sys.stderr.write(text + "\n")
                sys.stderr.flush()
        if isinstance(event, Snapshot) and event.seconds >= self._next_at:
            self._next_at = event.seconds + _EVERY_S
            sys.stderr.write(line(self._run, event) + "\n")
            sys.stderr.flush()
        elif isinstance(event, RunEnded) and is_worth_printing(event):
            for text in _lines(summary(self._run, event)):
                sys.stderr.write(text + "\n")
            sys.stderr.flush()


def line(run: RunStarted, snapshot: Snapshot) -> str:
    """Return the progress of a run in one line."""
    stages = snapshot.stages
    labels = {stage.id: words.shortened(stage.label, _LABEL_CHARACTERS) for stage in run.stages}
    with_end = [stage for stage in stages if stage.stream is None]
    is_waiting = any(stage.status != "done" for stage in with_end) or len(with_end) == len(stages)
    busy, slots = sum(pool.busy for pool in snapshot.pools), sum(pool.slots for pool in snapshot.pools)
    # A stream has no end: only stages that have one can be done.
    done = f"{sum(stage.status == 'done' for stage in with_end)} of {len(with_end)} stages done"
    parts = [
        *([done] if is_waiting else []),
        *(_stage(labels[stage.id], stage) for stage in _chosen(stages)[:_MOST_STAGES]),
        f"{busy} of {slots} slots busy",
    ]
    parts += [words.stall(stage.stalls[0]) for stage in stages if stage.stalls]
    parts += [f"pool {pool.name}: {words.waiting(pool)}" for pool in snapshot.pools if pool.waiting]
    if snapshot.seconds_left:
        parts.append(f"about {words.duration(snapshot.seconds_left)} left")
    return f"{run.title} {words.duration(snapshot.seconds)}: {'; '.join(parts)}"


def _chosen(stages: Sequence[StageView]) -> list[StageView]:
    """Return the stages that are worth a place in the line, the most important first.

    The stage with the most work sets the pace. Steps that read or write Kafka tell how far a stream is behind. The
    parts that a library's transform is made of have next to no work.
    """
    active = [s for s in reversed(stages) if s.status != "done" and (s.elements or s.stream is not None)]
    by_work = sorted(active, key=lambda stage: -stage.busy_seconds)
    with_kafka = [stage for stage in reversed(active) if stage.kafka]
    chosen = {stage.id: stage for stage in [*by_work[:1], *with_kafka, *by_work]}
    return list(chosen.values())


def _lines(content: RenderableType) -> list[str]:
    console = Console(file=io.StringIO(), width=_WIDTH, highlight=False, force_terminal=False, force_jupyter=False)
    with console.capture() as captured:
        console.print(content)
    return [text.rstrip() for text in captured.get().splitlines()]


def _stage(label: str, stage: StageView) -> str:
    if stage.stream is not None:
        parts = [f"{label}: {words.stream_parts(stage)[0]}", *words.stream_parts(stage)[1:]]
    else:
        parts = [f"{label}: {words.number(stage.elements)} done"]
        if stage.rate or stage.stalled_seconds:
            parts.append(words.rate(stage.rate) or "0/s")
        if stage.fraction is not None:
            parts.append(words.percent(stage.fraction))
    # A stage that keeps up with its stream is idle most of the time.
    if (
        not stage.stalls
        and stage.status != "busy"
        and (stage.stream is None or stage.status in ("held back", "needs worker"))
    ):
        parts.append(words.status(stage, _LABEL_CHARACTERS))
    if len(stage.inference) == 1:  # figures of several models would need their names: the summary has them
        parts += step_lines.parts(stage.inference[0])[:_MOST_OF_MODELS]
    several = len(stage.kafka) > 1
    for view in stage.kafka[:_MOST_OF_KAFKA]:
        said = step_lines.parts(view)[: 1 if several else _MOST_OF_KAFKA]
        parts += [f"{view.kind} {part}" for part in said] if several else said
    return ", ".join(parts)
