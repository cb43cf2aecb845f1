"""A plan as JSON, for other programs."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from luminosity.engine.explain.explanation import Break, ExplainedStage, Explanation
from luminosity.engine.resources.nodes import LeaseNeeds
from luminosity.engine.resources.pools import Pool

__all__ = ["plan_json"]


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
