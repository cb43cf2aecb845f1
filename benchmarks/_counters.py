"""What the model hosts of a run tell, to see what it was waiting for."""

from __future__ import annotations

import sys
from typing import Any

from luminosity.core import InferenceMetrics


def print_counters(title: str, metrics: Any) -> None:
    """One line for each step that has a model."""
    steps: dict[str, dict[str, int]] = {}
    for counter in metrics.query()["counters"]:
        steps.setdefault(counter.key.step, {})[counter.key.metric.name] = counter.committed
    for step, found in steps.items():
        if InferenceMetrics.BATCHES in found:
            _print_step(f"{title}, {step}", found)


def _print_step(title: str, found: dict[str, int]) -> None:
    seconds = {name: found.get(name, 0) / 1e6 for name in InferenceMetrics.ALL if name.endswith("micro_secs")}
    padded = found[InferenceMetrics.PADDED_COST]
    print(
        f"{title}: {found[InferenceMetrics.BATCHES]} batches,",
        f"{padded / found[InferenceMetrics.BATCHES]:,.0f} tokens each,",
        f"padding {1 - found[InferenceMetrics.USEFUL_COST] / padded:.0%},",
        f"fill {padded / found[InferenceMetrics.BUDGET_COST]:.0%};",
        ", ".join(f"{name.removesuffix('_micro_secs')} {each:.1f} s" for name, each in sorted(seconds.items())),
        file=sys.stderr,
    )
