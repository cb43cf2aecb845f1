"""Prepares examples for a model and computes their costs and weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from luminosity.errors import HandlerError
from luminosity.inference.blocks import Block, Indices, as_block, rows, take
from luminosity.inference.handler import Handler, limits_of

__all__ = ["Attempt", "Prepared", "Preparer"]


@dataclass(frozen=True)
class Prepared:
    """Prepared examples, as the host needs them."""

    examples: Block
    block: Block
    """The prepared examples; the same object as ``examples`` if preparing changed nothing."""
    costs: npt.NDArray[Any]
    weights: npt.NDArray[Any] | None


@dataclass(frozen=True)
class Attempt:
    """The result of preparing examples of which some may fail."""

    prepared: Prepared | None
    """None if all examples failed."""
    places: Indices
    """The places of the examples that were prepared."""
    failed: list[tuple[int, BaseException]]
    """The places of the examples that failed, with their errors."""


class Preparer:
    """Prepares examples for one model.

    >>> Preparer(Handler()).prepare(["a", "b"]).costs
    array([1., 1.])
    """

    def __init__(self, handler: Handler[Any, Any, Any]) -> None:
        self._handler = handler
        self._limits = limits_of(handler)

    def attempt(self, examples: Block, caught: tuple[type[BaseException], ...]) -> Attempt:
        """Prepare examples; if that raises an error to catch, prepare each alone to find those at fault."""
        everything = np.arange(len(examples))
        try:
            return Attempt(self.prepare(examples), everything, [])
        except caught as error:
            if len(examples) == 1:
                return Attempt(None, everything[:0], [(0, error)])
        alone = [self.attempt(take(examples, everything[place : place + 1]), caught) for place in everything]
        failed = [(place, error) for place, each in enumerate(alone) for _, error in each.failed]
        good = np.delete(everything, [place for place, _ in failed])
        if not len(good):
            return Attempt(None, good, failed)
        try:
            return Attempt(self.prepare(take(examples, good)), good, failed)
        except caught as error:  # They fail only together, such as arrays of different shapes.
            return Attempt(None, good[:0], [*failed, *((place, error) for place in good.tolist())])

    def prepare(self, examples: Block) -> Prepared:
        """Prepare all examples; raise the error of the handler's ``prepare``."""
        prepared = as_block(self._handler.prepare(examples))
        if len(prepared) != len(examples):
            raise HandlerError(
                f"{self._handler}.prepare returned {len(prepared)} prepared examples for {len(examples)} examples",
                fix="return one for each example, in their order",
            )
        return self.weighed(prepared, examples)

    def weighed(self, prepared: Block, examples: Block) -> Prepared:
        """Add costs and weights to examples that this model, or one that prepares alike, has prepared."""
        weigh = self._limits.weigh
        weights = None if weigh is None else np.array([weigh(example) for example in rows(examples)], np.float64)
        return Prepared(examples, prepared, self._costs(prepared, examples), weights)

    def _costs(self, prepared: Block, examples: Block) -> npt.NDArray[Any]:
        length = self._limits.length
        found = self._handler.cost(prepared) if length is None else [length(example) for example in rows(examples)]
        costs = np.asarray(found, np.float64)
        if costs.shape != (len(prepared),) or not np.isfinite(costs).all():
            source = f"{type(self._handler).__name__}.cost" if length is None else "batch_length_fn"
            raise HandlerError(
                f"{source} returned {costs!r} for {len(prepared)} examples", fix="return one finite number for each"
            )
        return costs
