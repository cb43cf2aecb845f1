"""A plan as text, for terminals of any width, pipes and files, with phrases that pictures share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from rich.console import Console
from rich.table import Table
from rich.text import Text

from luminosity._shared.text import format_size
from luminosity.engine.explain.explanation import Break, ExplainedStage, Explanation
from luminosity.engine.resources.machine import Machine
from luminosity.engine.resources.pools import Pool

__all__ = ["counted", "machine_in_words", "pool_in_words", "print_plan"]

_MOST_NODE_NAMES = 8  # with the same number of workers; more are counted
_ID_CHARACTERS = 8  # of a node's id, as Ray's own tools show
_BOUNDLESS = 10_000  # columns: wider than any table
_DIGEST_CHARACTERS = 19  # enough to tell versions apart
_POOL_STYLES = ("cyan", "yellow", "green", "magenta", "blue", "red")


def counted(number: float, noun: str) -> str:
    """Return a number with its noun in the singular or plural.

    >>> counted(1, "core"), counted(0.5, "core"), counted(3, "stage")
    ('1 core', '0.5 cores', '3 stages')
    """
    return f"{number:.3g} {noun}" if number == 1 else f"{number:.3g} {noun}s"


def ranges(numbers: Iterable[int]) -> str:
    """Return ascending numbers as a list with ranges.

    >>> ranges([1, 2, 4, 5, 6, 9])
    '1, 2, 4-6, 9'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def machine_in_words(machine: Machine) -> str:
    """Return the cores, RAM and accelerators of ``machine``."""
    accelerators = counted(len(machine.devices), "accelerator") if machine.devices else "no accelerators"
    nodes = f"{counted(len(machine.nodes), 'node')} of a cluster with " if machine.nodes else ""
    cores = sum(node.cores for node in machine.nodes) if machine.nodes else machine.cores
    return f"{nodes}{counted(cores, 'core')}, {format_size(machine.ram_bytes)} RAM, {accelerators}"


def share_in_words(pool: Pool) -> str:
    """Return the cores and RAM of each worker of ``pool``."""
    return f"{counted(pool.cores_per_worker, 'core')}, {format_size(pool.ram_per_worker)} RAM"


def devices_in_words(pool: Pool) -> str:
    """Return the devices of ``pool``, worker by worker; on a cluster, which chooses them, what each worker asks for."""
    if pool.lease is not None:
        return f"{replace(pool.lease, cpus=0.0, memory=0).words} each"
    return ", ".join("+".join(group) for group in pool.device_groups)


def places_in_words(pool: Pool, machine: Machine) -> str:
    """Return how many workers of ``pool`` fit on which nodes of a cluster.

    >>> from luminosity.engine.resources.machine import Node
    >>> nodes = tuple(Node(name, f"10.0.0.{name}", 4.0, 1 << 30) for name in "12")
    >>> pool = Pool("cpu", 1.0, 1 << 30, 1, (), 4, (), nodes=("1", "1", "2", ""))
    >>> places_in_words(pool, Machine(8, 2 << 30, (), nodes))
    '2 on 10.0.0.1, 1 on 10.0.0.2, 1 waits for a node'
    """
    fitting = Counter(pool.nodes[: pool.workers])
    waiting = fitting.pop("", 0)
    names = _node_names(machine)
    by_count: dict[int, list[str]] = {}
    for node in machine.nodes:
        if count := fitting[node.id]:
            by_count.setdefault(count, []).append(names[node.id])
    parts: list[str] = []
    for count, on in by_count.items():
        if len(on) > _MOST_NODE_NAMES:
            parts.append(f"{count} on each of {len(on)} nodes")
        else:
            parts += [f"{count} on {name}" for name in on]
    if waiting:
        parts.append(f"{waiting} wait{'s' if waiting == 1 else ''} for a node")
    return ", ".join(parts)


def _node_names(machine: Machine) -> dict[str, str]:
    """Return the address of each node, with the beginning of its id if others have the same address."""
    addresses = Counter(node.address for node in machine.nodes)
    return {
        node.id: node.address if addresses[node.address] == 1 else f"{node.address} ({node.id[:_ID_CHARACTERS]})"
        for node in machine.nodes
    }


def pool_in_words(pool: Pool) -> str:
    """Return the name of ``pool``, its number of workers and their shares."""
    devices = f" with {devices_in_words(pool)}" if pool.device_groups else ""
    each = "each " if pool.workers > 1 else ""
    return f"{pool.name}: {counted(pool.workers, 'worker')}, {each}{share_in_words(pool)}{devices}"


def print_plan(console: Console, plan: Explanation, title: str) -> None:
    """Print the pools, the stages, and the places where fusion breaks."""
    with console.capture() as printed:
        _print(console, plan, title)
    console.file.writelines(f"{line.rstrip()}\n" for line in printed.get().splitlines())  # tables are padded


def _print(console: Console, plan: Explanation, title: str) -> None:
    summary = f"{counted(len(plan.stages), 'stage')} in {counted(len(plan.pools), 'pool')}"
    console.print(Text.assemble((title, "bold"), f": {summary}, on {machine_in_words(plan.machine)}. Nothing was run."))
    if plan.streams:
        which = f"stage {ranges(plan.streams)} is" if len(plan.streams) == 1 else f"stages {ranges(plan.streams)} are"
        console.print(Text(f"It has no end: {which} a stream. A run goes on until its sources end, or you stop it."))
    stages = _stages(plan)
    if console.measure(stages, options=console.options.update_width(_BOUNDLESS)).maximum > console.width:
        stages = _stacked_stages(plan)
    tables = (
        ("Pools", _pools(plan)),
        ("Nodes", _places(plan)),
        ("Stages", stages),
        ("Models", _models(plan)),
        ("Breaks", _breaks(plan)),
    )
    for heading, table in tables:
        if table.row_count:
            console.print()
            console.print(Text(heading, "bold"))
            console.print(table)
    if plan.absorbed:
        names = ", ".join(f"'{name}'" for name in plan.absorbed)
        console.print(
            Text(
                f"\nSteps without a break of their own, because the break next to them does their work: {names}", "dim"
            )
        )


def _pools(plan: Explanation) -> Table:
    has_devices = any(pool.device_groups for pool in plan.pools) and not plan.machine.nodes
    table = _table("pool", "workers", "each with", *(["devices"] if has_devices else []), "bundles at once", "stages")
    for pool in plan.pools:
        devices = [devices_in_words(pool)] if has_devices else []
        bundles = str(pool.workers * pool.slots)
        stages = ranges(stage.number for stage in plan.stages if stage.pool is pool)
        table.add_row(_pool(plan, pool), str(pool.workers), share_in_words(pool), *devices, bundles, stages)
    return table


def _places(plan: Explanation) -> Table:
    """Return which pool fits where; an empty table for a plan of one machine."""
    table = _table("pool", "each worker asks for", "room now", "in all")
    for pool in plan.pools:
        if pool.lease is not None:
            where = places_in_words(pool, plan.machine)
            table.add_row(_pool(plan, pool), pool.lease.words, where, str(pool.workers))
    return table


def _stages(plan: Explanation) -> Table:
    table = _table("", "steps", "pool", "reads", "read by")
    table.columns[0].justify = "right"
    for stage in plan.stages:
        table.add_row(
            Text(str(stage.number), "bold"),
            _steps(stage),
            _pool(plan, stage.pool),
            _sources(plan, stage),
            ranges(plan.readers(stage)),
        )
    return table


def _stacked_stages(plan: Explanation) -> Table:
    """Return the stages for a terminal that is too narrow for columns."""
    table = _table("", "")
    table.show_header = False
    table.columns[0].justify = "right"
    for stage in plan.stages:
        reads = f"{'' if stage.is_source or stage.is_stream else 'reads '}{_sources(plan, stage)}"
        read_by = f"; read by {ranges(plan.readers(stage))}" if plan.readers(stage) else ""
        heading = Text.assemble(_pool(plan, stage.pool), (f": {reads}{read_by}", "dim"))
        table.add_row(Text(str(stage.number), "bold"), heading)
        table.add_row("", _steps(stage))
    return table


def _steps(stage: ExplainedStage) -> Text:
    lines = [Text.assemble(step.name, (f" · {step.part}" if step.part else "", "dim")) for step in stage.steps]
    return Text("\n").join(lines) if lines else Text("passes on what it reads", "dim")


def _sources(plan: Explanation, stage: ExplainedStage) -> str:
    main, side = plan.sources(stage)
    parts = ["source"] if stage.is_source else []
    parts += ["stream"] if stage.is_stream else []
    parts += [ranges(main)] if main else []
    parts += [f"side input {ranges(side)}"] if side else []
    return ", ".join(parts)


def _models(plan: Explanation) -> Table:
    """Return the versions of registered models."""
    table = _table("model", "version", "digest", "step", "files")
    for model in plan.models:
        table.add_row(Text(model.name), model.version, model.digest[:_DIGEST_CHARACTERS], model.step, Text(model.path))
    return table


def _breaks(plan: Explanation) -> Table:
    table = _table("", "")
    table.show_header = False
    table.columns[0].justify = "right"
    for a_break in plan.breaks:
        if not a_break.inside:
            readers = "nothing" if a_break.reader is None else str(a_break.reader)
            table.add_row(Text(f"{ranges(a_break.writers)} → {readers}", "bold"), _reasons(a_break))
    for step in dict.fromkeys(a_break.inside for a_break in plan.breaks if a_break.inside):
        stages = {n for b in plan.breaks if b.inside == step for n in (*b.writers, b.reader) if n is not None}
        text = f"'{step}' waits for side inputs that it makes itself (--all shows which)"
        table.add_row(Text(ranges(sorted(stages)), "bold"), Text(text, "dim"))
    return table


def _reasons(a_break: Break) -> Text:
    first, *others = a_break.reasons
    return Text("\n").join([Text(first.text), *(Text(f"also: {reason.text}") for reason in others)])


def _pool(plan: Explanation, pool: Pool) -> Text:
    return Text(pool.name, _POOL_STYLES[plan.pools.index(pool) % len(_POOL_STYLES)])


def _table(*headings: str) -> Table:
    table = Table(*headings, box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    for column in table.columns:
        column.overflow = "fold"
    return table
