"""The summary of a run, shown when it has ended."""

from __future__ import annotations

from collections import Counter

from rich.console import Group
from rich.table import Table
from rich.text import Text

from luminosity._shared.kafka_metrics import KafkaMetrics
from luminosity._shared.text import format_bytes
from luminosity.events import MetricView, RunEnded, RunStarted
from luminosity.runs.views import inference, kafka, words

__all__ = ["is_worth_printing", "summary"]


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
_LABEL_CHARACTERS = 40
_SUMMARY_AFTER_S = 2.0  # shorter runs need none
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
    labels = {stage.id: words.shortened(stage.label, _LABEL_CHARACTERS) for stage in run.stages}
    for stage in streams[-_STREAMS:]:
        parts = words.stream_parts(stage, seconds=ended.seconds)
        table.add_row("stream", Text(f"{labels[stage.id]}: {' · '.join(parts)}"))
    for view in kafka.of(last):
        table.add_row("kafka", Text(kafka.sentence(view)))
    for pool in last.pools:
        use = f"{words.percent(pool.busy_fraction)} busy, {words.duration(pool.busy_seconds)} of work"
        table.add_row("pool", Text(f"{pool.name}: {use}"))
    for device in last.devices:
        table.add_row("device", Text(f"{device.id}: {words.percent(device.busy_fraction)} busy"))
    if run.machine.nodes:
        table.add_row("cluster", Text(words.nodes(run.machine.nodes)))
    for version in dict.fromkeys(words.model_version(each) for each in run.models):
        table.add_row("version", Text(version))
    for view in inference.of(last):
        table.add_row("model", Text(inference.sentence(view)))
    table.add_row("memory", Text(", ".join(_memory(ended))))
    slowest = sorted((s for s in last.stages if s.busy_seconds > 0), key=lambda s: s.busy_seconds, reverse=True)
    named = [f"{labels[s.id]} {words.duration(s.busy_seconds)}" for s in slowest[:_SLOWEST]]
    if named:
        table.add_row("slowest", Text(", ".join(named)))
    for kind, text in _metric_lines(ended, _METRICS):
        table.add_row(kind, Text(text))
    return Group(title, table)


def is_worth_printing(ended: RunEnded) -> bool:
    """Return whether a run has taken long, or its code has counted something: otherwise its results say enough."""
    return ended.seconds >= _SUMMARY_AFTER_S or any(not view.of_library for view in ended.metrics)


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
