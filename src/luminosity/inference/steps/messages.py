"""What moves between the steps."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from apache_beam import coders
from apache_beam.coders import coder_impl

from luminosity.inference.adapting.model_set import THE_MODEL
from luminosity.inference.blocks import Block, size

__all__ = ["Failed", "PreparedBlock", "ResultBlock", "at_fault", "described", "earliest"]

_EXAMPLE_CHARACTERS = 100


@dataclass(frozen=True)
class Failed:
    """An example that can't be predicted, with the failure as Beam's dead letters hold it."""

    example: Any
    timestamp: Any
    error: tuple[type[BaseException], str, list[str]]


@dataclass(frozen=True)
class PreparedBlock:
    """Examples of one window, ready for the model."""

    examples: list[Any]
    timestamps: list[Any]
    prepared: Block | None
    """None: the examples as they are."""
    costs: npt.NDArray[Any] = field(default_factory=lambda: np.empty(0))
    weights: npt.NDArray[Any] | None = None
    failed: tuple[Failed, ...] = ()
    seconds: float = 0.0
    """What preparing it took."""
    model: Hashable = THE_MODEL
    """Whose examples they are, where a transform has many models."""


@dataclass(frozen=True)
class ResultBlock:
    """Predictions of one window by one model."""

    examples: list[Any]
    timestamps: list[Any]
    values: Block
    model_id: str | None
    failed: tuple[Failed, ...] = ()
    model: Hashable = THE_MODEL


def at_fault(example: Any, count: int) -> str:
    """What to say of a batch of so many that failed, and had this example in it.

    >>> at_fault("a", 1), at_fault("a", 7)
    ("'a'", "one of a batch of 7 that has 'a' in it; with_exception_handling() tells which")
    """
    text = repr(example)
    text = text if len(text) <= _EXAMPLE_CHARACTERS else text[: _EXAMPLE_CHARACTERS - 1] + "…"
    if count == 1:
        return text
    return f"one of a batch of {count} that has {text} in it; with_exception_handling() tells which"


def described(error: BaseException) -> tuple[type[BaseException], str, list[str]]:
    """A failure as Beam's `with_exception_handling` tells it."""
    return type(error), repr(error), traceback.format_exception(type(error), error, error.__traceback__)


def earliest(timestamps: Iterable[Any]) -> Any:
    """The first of these times. Most of them are one and the same object, and comparing is slow."""
    return min({id(timestamp): timestamp for timestamp in timestamps}.values())


class BlockCoder(coders.Coder):
    """Pickles. Beam asks for the size of some elements, and it should not have to encode a whole block for that."""

    def _create_impl(self) -> coder_impl.CallbackCoderImpl:
        return coder_impl.CallbackCoderImpl(self.encode, self.decode, self.estimate_size)

    def encode(self, value: Any) -> bytes:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)

    def decode(self, encoded: bytes) -> Any:
        return pickle.loads(encoded)

    def estimate_size(self, value: Any) -> int:
        examples = size(value.examples)
        rest = value.prepared if isinstance(value, PreparedBlock) else value.values
        return examples + (0 if rest is None else size(rest)) + 16 * len(value.timestamps)

    def is_deterministic(self) -> bool:
        return False


coders.registry.register_coder(PreparedBlock, BlockCoder)
coders.registry.register_coder(ResultBlock, BlockCoder)
