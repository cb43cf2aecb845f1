"""The summary of a run, shown when it has ended."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text

from luminosity._text import format_bytes
from luminosity.engine.monitor.views import inference, words
from luminosity.events import RunEnded, RunStarted

__all__ = ["summary"]


_ENDINGS = {"done": "done in", "failed": "failed after", "cancelled": "cancelled after"}
_STYLES = {"done": "bold green", "failed": "bold red", "cancelled": "bold yellow"}
_SLOWEST = 3  # stages named
_LABEL_CHARACTERS = 40


def summary(run: RunStarted, ended: RunEnded) -> Group:
    """Return state, time, pools, devices, models, memory, the slowest stages, and the reason of a failure."""
    last = ended.last
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    title = Text(run.name, style="bold")
    title.append(f"  {_ENDINGS[ended.state]} {words.duration(ended.seconds)}", style=_STYLES[ended.state])
    if ended.state == "failed":
        table.add_row("failure", Text(ended.failure))
    for pool in last.pools:
        use = f"{words.percent(pool.busy_fraction)} busy, {words.duration(pool.busy_seconds)} of work"
        table.add_row("pool", Text(f"{pool.name}: {use}"))
    for device in last.devices:
        table.add_row("device", Text(f"{device.id}: {words.percent(device.busy_fraction)} busy"))
    for view in inference.of(last):
        table.add_row("model", Text(inference.sentence(view)))
    table.add_row("memory", Text(", ".join(_memory(ended))))
    slowest = sorted((s for s in last.stages if s.busy_seconds > 0), key=lambda s: s.busy_seconds, reverse=True)
    labels = {stage.id: words.shortened(stage.label, _LABEL_CHARACTERS) for stage in run.stages}
    named = [f"{labels[s.id]} {words.duration(s.busy_seconds)}" for s in slowest[:_SLOWEST]]
    if named:
        table.add_row("slowest", Text(", ".join(named)))
    return Group(title, table)


def _memory(ended: RunEnded) -> list[str]:
    held, processes = ended.last.memory, ended.last.processes
    parts = [f"at most {format_bytes(processes.peak)} in all processes"] if processes.peak else []
    return [
        *parts,
        f"at most {format_bytes(held.peak)} between stages",
        f"{format_bytes(held.spilled) if held.spilled else 'nothing'} spilled to disk",
    ]
