"""One frame of the live view, for a terminal of any size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rich.cells import set_cell_size
from rich.console import Group
from rich.text import Text

from luminosity._shared.text import format_bytes
from luminosity.events import DeviceView, NodeView, PoolView, RunStarted, Snapshot, StageView, Status, StreamView
from luminosity.runs.views import step_lines, words

__all__ = ["frame"]


_STYLES: dict[Status, str] = {
    "busy": "green",
    "held back": "magenta",
    "needs worker": "cyan",
    "starved": "yellow",
    "waiting": "blue",
    "done": "dim",
}
# If there is no room for all stages, those with the first states are shown.
_IMPORTANCE: tuple[Status, ...] = ("busy", "held back", "needs worker", "starved", "waiting", "done")
_GAP = "  "
_LEAST_STATUS = 20  # columns
_MOST_RESOURCES = 6  # lines for pools and devices
_MOST_MODELS = 4  # lines
_MOST_KAFKA = 4  # lines
_MOST_STALLS = 3  # lines


@dataclass(frozen=True)
class _Column:
    name: str
    width: int
    least_screen: int  # columns of the narrowest terminal that shows it
    text: Callable[[StageView], str]
    of_streams: bool | None = None  # whether only stages of a stream have it, or only the others; None: all have it
    least_with_streams: int = 0  # columns of the narrowest terminal that shows it beside the columns of streams


_COLUMNS = (
    _Column("elements", 9, 0, lambda s: words.number(s.elements)),
    _Column("rate", 9, 0, lambda s: words.rate(s.rate) or ("0/s" if s.stalled_seconds else "")),
    _Column("behind", 11, 0, lambda s: _behind(s.stream), of_streams=True),
    _Column("backlog", 7, 90, lambda s: _backlog(s.stream), of_streams=True),
    _Column("late", 5, 100, lambda s: _late(s.stream), of_streams=True),
    _Column("queued", 9, 76, lambda s: words.number(s.queued) if s.queued else "", least_with_streams=110),
    _Column("bytes", 8, 100, lambda s: format_bytes(s.queued_bytes) if s.queued_bytes else "", least_with_streams=130),
    _Column("workers", 7, 120, lambda s: str(s.workers) if s.workers else "", least_with_streams=140),
    _Column("done", 4, 90, lambda s: words.percent(s.fraction) if s.fraction is not None else "", of_streams=False),
    _Column(
        "about left",
        11,
        140,
        lambda s: words.duration(s.seconds_left) if s.seconds_left is not None else "",
        of_streams=False,
    ),
)


def _behind(stream: StreamView | None) -> str:
    return words.behind(stream).removesuffix(" behind") if stream is not None else ""


def _late(stream: StreamView | None) -> str:
    return words.amount(stream.dropped_late) if stream is not None and stream.dropped_late else ""


def _backlog(stream: StreamView | None) -> str:
    return words.amount(stream.backlog) if stream is not None and stream.backlog is not None else ""


def frame(run: RunStarted, snapshot: Snapshot, width: int, height: int) -> Group:
    """Return a frame that fits into ``width`` columns and ``height`` lines. The last line is left for the cursor."""
    resources = [
        *_stalls(snapshot.stages),
        *step_lines.lines(step_lines.kafka_of(snapshot), width, _MOST_KAFKA),
        *step_lines.lines(step_lines.models_of(snapshot), width, _MOST_MODELS),
        *_resources(snapshot, width),
    ]
    room = max(1, height - len(resources) - 5)  # title, column heads, a line for those left out, memory, the cursor
    shown, hidden = _choose(_without_setup(snapshot.stages), room)
    lines = [_title(run, snapshot, width), *_table(run, shown, width)]
    if hidden:
        lines.append(Text(_counts(hidden), style="dim", no_wrap=True, overflow="ellipsis"))
    lines += [Text(line, no_wrap=True, overflow="ellipsis") for line in (*resources, _memory(snapshot))]
    return Group(*lines, Text())


def _stalls(stages: Sequence[StageView]) -> list[str]:
    """Return a line for each stage with a bundle that takes long; if there are many, the last line counts the rest."""
    lines = [words.stall(stage.stalls[0]) for stage in stages if stage.stalls]
    if len(lines) > _MOST_STALLS:
        lines = [*lines[: _MOST_STALLS - 1], f"and {len(lines) - _MOST_STALLS + 1} more stages that take long"]
    return lines


def _memory(snapshot: Snapshot) -> str:
    held, processes = snapshot.memory, snapshot.processes
    limit = f" of {format_bytes(held.limit)}" if held.limit else ""
    parts = [f"{format_bytes(held.used)}{limit} between stages"]
    if processes.used:
        parts.append(f"{format_bytes(processes.used)} in processes")
    if held.objects:
        parts.append(f"{format_bytes(held.objects)} in object stores")
    if held.spilled:
        parts.append(f"{format_bytes(held.spilled)} spilled")
    copied = words.copy(snapshot.checkpoint)
    return f"memory: {', '.join(parts)}{f'; copy: {copied}' if copied else ''}"


def _title(run: RunStarted, snapshot: Snapshot, width: int) -> Text:
    left = snapshot.seconds_left
    ending = f"  {words.duration(snapshot.seconds)}" + (f", about {words.duration(left)} left" if left else "")
    title = Text(words.shortened(run.title, max(8, width - len(ending))), style="bold", no_wrap=True)
    return title.append(ending, style="not bold")


def _without_setup(stages: Sequence[StageView]) -> Sequence[StageView]:
    """Leave out stages that have ended while a stream goes on: they prepared it, and say nothing any more."""
    is_going_on = any(stage.stream is not None and stage.status != "done" for stage in stages)
    return [stage for stage in stages if stage.status != "done"] if is_going_on else stages


def _choose(stages: Sequence[StageView], room: int) -> tuple[list[StageView], list[StageView]]:
    """Return the stages to show, in the pipeline's order, and the others."""
    if len(stages) <= room:
        return list(stages), []
    by_importance = sorted(stages, key=lambda stage: (not stage.stalls, _IMPORTANCE.index(stage.status)))
    chosen = {stage.id for stage in by_importance[:room]}
    return [s for s in stages if s.id in chosen], [s for s in stages if s.id not in chosen]


def _counts(stages: Sequence[StageView]) -> str:
    counts = Counter(stage.status for stage in stages)
    return "and " + ", ".join(f"{counts[status]} {status}" for status in reversed(_IMPORTANCE) if counts[status])


def _table(run: RunStarted, stages: Sequence[StageView], width: int) -> list[Text]:
    """Return the lines of the table. Not rich's Table, which takes several times as long, five times a second."""
    labels = {stage.id: stage.label for stage in run.stages}
    has_streams = any(stage.stream is not None for stage in stages)
    columns = [
        column
        for column in _COLUMNS
        if width >= max(column.least_screen, column.least_with_streams if has_streams else 0)
        and _has_content(column, stages)
    ]
    room = width - sum(column.width + len(_GAP) for column in columns) - len(_GAP)
    label_width = max(min(max(map(len, labels.values()), default=0), room - _LEAST_STATUS, room // 2), 8)
    status_width = max(room - label_width, 8)

    def row(label: str, numbers: Iterable[str], status: str, style: str, status_style: str) -> Text:
        cells = (text.rjust(column.width) for text, column in zip(numbers, columns, strict=True))
        beginning = _GAP.join((set_cell_size(label, label_width), *cells))
        ending = set_cell_size(status, status_width).rstrip()
        return Text(no_wrap=True).append(beginning + _GAP, style).append(ending, status_style)

    lines = [row("stage", (column.name for column in columns), "status", "dim", "dim")]
    for stage in stages:
        label = words.shortened(labels[stage.id], label_width)
        numbers = (column.text(stage) for column in columns)
        style = "dim" if stage.status == "done" else ""
        lines.append(row(label, numbers, words.status(stage, status_width), style, _style(stage)))
    return lines


def _style(stage: StageView) -> str:
    return "bold red" if stage.stalled_seconds else _STYLES[stage.status]


def _has_content(column: _Column, stages: Sequence[StageView]) -> bool:
    if column.of_streams is None:
        return True
    streams = [stage.stream for stage in stages if stage.stream is not None]
    if column.name == "late":
        return any(stream.dropped_late for stream in streams)
    # Beside a stream, stages that have ended say nothing: the setup of its source, for example.
    return bool(streams) if column.of_streams else not streams or any(_has_an_end(stage) for stage in stages)


def _has_an_end(stage: StageView) -> bool:
    return stage.stream is None and stage.status != "done"


def _resources(snapshot: Snapshot, width: int) -> list[str]:
    """Return a line for each pool, device and node; if there are many, the last line counts the rest."""
    lines = [_pool(pool) for pool in snapshot.pools] + [_device(device, width) for device in snapshot.devices]
    lines += [_node(node) for node in snapshot.nodes]
    if len(lines) > _MOST_RESOURCES:
        lines = [*lines[: _MOST_RESOURCES - 1], f"and {len(lines) - _MOST_RESOURCES + 1} more pools, devices and nodes"]
    return lines


def _pool(pool: PoolView) -> str:
    line = f"pool {pool.name}: {pool.busy} of {pool.slots} busy, {words.percent(pool.busy_fraction)} so far"
    return f"{line}, {words.waiting(pool)}" if pool.waiting else line


def _node(node: NodeView) -> str:
    parts = [f"node {words.node(node)}: {node.workers} worker{'' if node.workers == 1 else 's'}"]
    if node.utilization is not None:
        parts.append(f"CPU {words.percent(node.utilization)}")
    if node.ram_total:
        parts.append(f"{format_bytes(node.ram_used)} of {format_bytes(node.ram_total)}")
    return ", ".join(parts)


def _device(device: DeviceView, width: int) -> str:
    parts = [f"device {device.id}: busy {words.percent(device.busy_fraction)} so far"]
    if device.utilization is not None and width >= 76:
        parts.append(f"computes {words.percent(device.utilization)} now")
    if device.memory_used is not None and device.memory_total is not None:
        parts.append(f"{format_bytes(device.memory_used)} of {format_bytes(device.memory_total)}")
    return ", ".join(parts)
