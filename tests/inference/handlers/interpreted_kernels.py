"""Runs the kernels of the packed encoder in Triton's interpreter, and prints what it found as JSON."""
# pyright: reportPrivateUsage=false

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch

from luminosity.inference.handlers.text.packed import choice, kernels
from luminosity.inference.handlers.text.packed.choice import encoder_of
from luminosity.inference.handlers.text.packed.encoder import pool_rows
from tests.inference.handlers.test_packed import CONFIGS, packed, rows_of, saved

_CPU = torch.device("cpu")


def errors_of(kind: str) -> list[float]:
    """The largest error of a state and of a mean, and the spread of the states."""
    with tempfile.TemporaryDirectory() as folder:
        saved(kind, Path(folder))
        packing = packed(Path(folder))
        plain = packing.encoder()
        fused = kernels.FusedEncoder(packing.weights.shape, *packing.weights.load(_CPU, torch.float32))
    ids, rows = rows_of([1, 2, 40, 7])
    found, expected = (each.states(ids, each.positions(ids, rows), rows) for each in (fused, plain))
    means = (fused.mean(found, rows) - pool_rows(found, rows, ["mean"])).abs().max()
    return [float((found - expected).abs().max()), float(means), float(expected.std())]


def chosen_with(fault: str) -> str:
    """The class that is used for MPNet, whose padded attention is the only other, if the kernels have this fault."""
    right = kernels.FusedEncoder._inside

    def wrong(self: Any, states: Any, layer: Any) -> Any:
        if fault == "no compiler":
            raise RuntimeError("no C compiler was found")
        return right(self, states, layer) * {"none": 1.0, "other vectors": 0.5, "not numbers": torch.nan}[fault]

    kernels.FusedEncoder._inside = wrong  # pyright: ignore[reportAttributeAccessIssue]
    try:
        with tempfile.TemporaryDirectory() as folder:
            saved("mpnet", Path(folder))
            packing = packed(Path(folder))
            found = encoder_of(packing.weights.shape, *packing.weights.load(_CPU, torch.float32))
        ids, rows = rows_of([3, 9])
        assert found.states(ids, found.positions(ids, rows), rows).shape == (12, 48)
    finally:
        kernels.FusedEncoder._inside = right
    return f"{type(found).__name__} {found.counter}"


def main() -> None:
    """Print the errors of each family, and which class is used with which fault."""
    with torch.inference_mode():
        kernels.check(_CPU)
        errors = {kind: errors_of(kind) for kind in CONFIGS}
        choice.attends_without_padding = lambda *_: True  # as on a device
        choice._kernels_of = lambda _: kernels
        chosen = {fault: chosen_with(fault) for fault in ("none", "other vectors", "not numbers", "no compiler")}
    print(json.dumps({"errors": errors, "chosen": chosen}))


if __name__ == "__main__":
    main()
