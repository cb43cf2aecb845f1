"""Examples made ready for a model: prepared, weighed, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from luminosity.inference.blocks import Block, Indices, as_block, rows, take
from luminosity.inference.handler import Handler, limits_of

__all__ = ["Attempt", "Prepared", "Preparer"]


@dataclass(frozen=True)
class Prepared:
    """What the host takes of some examples."""

    examples: Block
    block: Block
    """What was made of them: the same object where nothing was."""
    costs: npt.NDArray[Any]
    weights: npt.NDArray[Any] | None


@dataclass(frozen=True)
class Attempt:
    """What became of examples of which some may not be prepared."""

    prepared: Prepared | None
    """None where nobody could be."""
    places: Indices
    """Of those who could."""
    failed: list[tuple[int, BaseException]]


class Preparer:
    """For one model.

    >>> Preparer(Handler()).prepare(["a", "b"]).costs
    array([1., 1.])
    """

    def __init__(self, handler: Handler[Any, Any, Any]) -> None:
        self._handler = handler
        self._limits = limits_of(handler)

    def attempt(self, examples: Block, caught: tuple[type[BaseException], ...]) -> Attempt:
        """Where preparing them together fails, and the failure is one to catch: who fails alone is at fault."""
        everyone = np.arange(len(examples))
        try:
            return Attempt(self.prepare(examples), everyone, [])
        except caught as error:
            if len(examples) == 1:
                return Attempt(None, everyone[:0], [(0, error)])
        alone = [self.attempt(take(examples, everyone[place : place + 1]), caught) for place in everyone]
        failed = [(place, error) for place, each in enumerate(alone) for _, error in each.failed]
        good = np.delete(everyone, [place for place, _ in failed])
        if not len(good):
            return Attempt(None, good, failed)
        try:
            return Attempt(self.prepare(take(examples, good)), good, failed)
        except caught as error:  # Nobody fails alone, and all do together: arrays of different shapes, for one.
            return Attempt(None, good[:0], [*failed, *((place, error) for place in good.tolist())])

    def prepare(self, examples: Block) -> Prepared:
        prepared = as_block(self._handler.prepare(examples))
        if len(prepared) != len(examples):
            raise ValueError(
                f"{self._handler}.prepare returned {len(prepared)} examples for {len(examples)}; "
                "it must return one for each, in their order"
            )
        return self.weighed(prepared, examples)

    def weighed(self, prepared: Block, examples: Block) -> Prepared:
        """What was prepared of these examples, by this model or by one that prepares alike, with what it costs here."""
        weigh = self._limits.weigh
        weights = None if weigh is None else np.array([weigh(example) for example in rows(examples)], np.float64)
        return Prepared(examples, prepared, self._costs(prepared, examples), weights)

    def _costs(self, prepared: Block, examples: Block) -> npt.NDArray[Any]:
        length = self._limits.length
        found = self._handler.cost(prepared) if length is None else [length(example) for example in rows(examples)]
        costs = np.asarray(found, np.float64)
        if costs.shape != (len(prepared),) or not np.isfinite(costs).all():
            source = f"{type(self._handler).__name__}.cost" if length is None else "batch_length_fn"
            raise ValueError(
                f"{source} returned {costs!r} for {len(prepared)} examples; it must return one finite number for each"
            )
        return costs
