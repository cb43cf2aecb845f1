"""A plan for other programs: as JSON, and in the DOT language of Graphviz."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from luminosity.engine.explain.explanation import Break, ExplainedStage, Explanation
from luminosity.engine.explain.text import pool_in_words
from luminosity.engine.resources.machine import LeaseNeeds
from luminosity.engine.resources.pools import Pool

__all__ = ["dot", "plan_json"]

_HEAD = """\
digraph plan {
  rankdir=TB; fontname="sans-serif"; node [shape=box, style="rounded,filled", fillcolor=white, fontname="sans-serif"];
  edge [fontname="sans-serif", fontsize=11];
"""


def dot(plans: Mapping[str, Explanation]) -> str:
    """Return one digraph with a cluster for each pipeline and pool, and an edge for each break."""
    lines = [line for number, item in enumerate(plans.items(), start=1) for line in _dot_pipeline(number, *item)]
    return _HEAD + "".join(f"  {line}\n" for line in lines) + "}\n"


def _dot_pipeline(number: int, title: str, plan: Explanation) -> Iterator[str]:
    yield f"subgraph cluster_{number} {{"
    yield f"  label={_quoted(title)};"
    for index, pool in enumerate(plan.pools):
        yield f"  subgraph cluster_{number}_{index} {{"
        yield f"    label={_quoted(pool_in_words(pool))};"
        for stage in plan.stages:
            if stage.pool is pool:
                yield f"    s{number}_{stage.number} [label={_quoted(*_dot_lines(stage))}];"
        yield "  }"
    for index, a_break in enumerate(plan.breaks):
        reader = f"s{number}_{a_break.reader}"
        if a_break.reader is None:
            reader = f"unread{number}_{index}"
            yield f'  {reader} [label="nothing reads it", style=dashed];'
        style = ", style=dashed" if a_break.is_side_input else ""
        for writer in a_break.writers:
            yield f"  s{number}_{writer} -> {reader} [label={_quoted(a_break.short)}{style}];"
    yield "}"


def _dot_lines(stage: ExplainedStage) -> Iterator[str]:
    yield str(stage.number)
    for step in stage.steps:
        yield f"{step.name} · {step.part}" if step.part else step.name
    if stage.is_stream:
        yield "(stream)"


def _quoted(*lines: str) -> str:
    r"""
    >>> _quoted('say "a"', "b\\c")
    '"say \\"a\\"\\nb\\\\c"'
    """
    escaped = (line.replace("\\", r"\\").replace('"', r"\"").replace("\n", " ") for line in lines)
    return '"' + r"\n".join(escaped) + '"'


def plan_json(plan: Explanation, title: str) -> dict[str, Any]:
    """Return everything that ``lum plan`` prints about a plan, as values of JSON. Sizes are in bytes."""
    machine = plan.machine
    return {
        "pipeline": title,
        "machine": {
            "cores": machine.cores,
            "ram": machine.ram_bytes,
            "devices": list(machine.devices),
            "nodes": [asdict(node.info()) for node in machine.nodes],
        },
        "pools": [_pool(pool) for pool in plan.pools],
        "stages": [_stage(plan, stage) for stage in plan.stages],
        "breaks": [_break(a_break) for a_break in plan.breaks],
        "models": [asdict(model) for model in plan.models],
        "absorbed": list(plan.absorbed),
    }


def _pool(pool: Pool) -> dict[str, Any]:
    fitting = Counter(pool.nodes[: pool.workers])
    waiting = fitting.pop("", 0)
    return {
        "name": pool.name,
        "workers": pool.workers,
        "borrowed_workers": pool.borrowed,
        "cores_per_worker": pool.cores_per_worker,
        "ram_per_worker": pool.ram_per_worker,
        "bundles_per_worker": pool.slots,
        "devices": [list(group) for group in pool.device_groups],
        # On a cluster: what each worker asks for, how many have room on which node, and how many wait for one.
        "asks_for": _asked(pool.lease) if pool.lease is not None else None,
        "workers_by_node": dict(fitting),
        "waiting_workers": waiting,
    }


def _asked(needs: LeaseNeeds) -> dict[str, Any]:
    return {name: value for name, value in asdict(needs).items() if name != "node"}  # each worker has its own


def _stage(plan: Explanation, stage: ExplainedStage) -> dict[str, Any]:
    reads, side_inputs = plan.sources(stage)
    return {
        "number": stage.number,
        "label": stage.label,
        "pool": stage.pool.name,
        "bundles_per_worker": stage.max_active_bundles,
        "asks_for": stage.asks_for,
        "is_source": stage.is_source,
        "is_stream": stage.is_stream,
        "steps": [asdict(step) for step in stage.steps],
        "reads": reads,
        "side_inputs": side_inputs,
        "read_by": plan.readers(stage),
    }


def _break(a_break: Break) -> dict[str, Any]:
    return {
        "writers": list(a_break.writers),
        "reader": a_break.reader,
        "from_steps": list(a_break.from_steps),
        "to_steps": list(a_break.to_steps),
        "is_side_input": a_break.is_side_input,
        "reasons": [{"kind": reason.kind.value, "text": reason.text} for reason in a_break.reasons],
    }
