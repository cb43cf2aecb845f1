"""Examples made ready for a model: prepared, weighed, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from luminosity.inference.blocks import Block, as_block
from luminosity.inference.handler import Handler, limits_of

__all__ = ["Prepared", "Preparer"]


@dataclass(frozen=True)
class Prepared:
    """What the host takes of some examples."""

    block: Block
    costs: npt.NDArray[Any]
    weights: npt.NDArray[Any] | None


class Preparer:
    """For one model.

    >>> Preparer(Handler()).prepare(["a", "b"]).costs
    array([1., 1.])
    """

    def __init__(self, handler: Handler[Any, Any, Any]) -> None:
        self._handler = handler
        self._limits = limits_of(handler)

    def prepare(self, examples: list[Any]) -> Prepared:
        prepared = as_block(self._handler.prepare(examples))
        if len(prepared) != len(examples):
            raise ValueError(
                f"{self._handler}.prepare returned {len(prepared)} examples for {len(examples)}; "
                "it must return one for each, in their order"
            )
        weigh = self._limits.weigh
        weights = None if weigh is None else np.array([weigh(example) for example in examples], np.float64)
        return Prepared(prepared, self._costs(prepared, examples), weights)

    def _costs(self, prepared: Block, examples: Sequence[Any]) -> npt.NDArray[Any]:
        length = self._limits.length
        found = self._handler.cost(prepared) if length is None else [length(example) for example in examples]
        costs = np.asarray(found, np.float64)
        if costs.shape != (len(prepared),) or not np.isfinite(costs).all():
            source = f"{type(self._handler).__name__}.cost" if length is None else "batch_length_fn"
            raise ValueError(
                f"{source} returned {costs!r} for {len(prepared)} examples; it must return one finite number for each"
            )
        return costs
