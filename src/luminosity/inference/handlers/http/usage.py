"""The tokens that a server says it has counted for one answer, and their price."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard, cast

from luminosity.core import InferenceMetrics
from luminosity.inference.handler import note

__all__ = ["Prices", "Usage"]


@dataclass(frozen=True)
class Usage:
    """Tokens of one request and its answer.

    >>> Usage.of({"prompt_tokens": 12, "completion_tokens": 5, "total_tokens": 17})
    Usage(prompt_tokens=12, new_tokens=5, cached_tokens=0)
    """

    prompt_tokens: int
    new_tokens: int
    cached_tokens: int = 0
    """Prompt tokens that the server had in its own cache."""

    @classmethod
    def of(cls, usage: Any) -> Usage | None:
        """Return what an answer's ``usage`` says in the words of OpenAI's protocol; None if it says nothing."""
        counts = cast("Mapping[str, Any]", usage) if isinstance(usage, Mapping) else {}
        details = counts.get("prompt_tokens_details")
        cached = cast("Mapping[str, Any]", details).get("cached_tokens") if isinstance(details, Mapping) else 0
        prompt, new = counts.get("prompt_tokens"), counts.get("completion_tokens", 0)
        if not _is_count(prompt) or not _is_count(new):
            return None
        return cls(prompt, new, cached if _is_count(cached) else 0)

    @property
    def tokens(self) -> int:
        """All tokens, of the prompt and new ones."""
        return self.prompt_tokens + self.new_tokens

    def note(self, prices: Prices | None = None) -> None:
        """Add to the counters of the batch that this thread computes."""
        note(InferenceMetrics.PROMPT_TOKENS, self.prompt_tokens)
        note(InferenceMetrics.NEW_TOKENS, self.new_tokens)
        if self.cached_tokens:
            note(InferenceMetrics.CACHED_TOKENS, self.cached_tokens)
        if prices is not None:
            note(InferenceMetrics.COST, prices.nanos(self))


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


@dataclass(frozen=True)
class Prices:
    """What a million tokens cost, in any currency.

    >>> Prices(2.5, 10.0).nanos(Usage(1000, 100))  # 0.0035, in billionths
    3500000
    """

    prompt: float
    new: float
    cached: float | None = None
    """Of prompt tokens that the server had in its cache; None if they cost as much as others."""

    def nanos(self, usage: Usage) -> int:
        """Return the cost of some tokens in billionths of the currency, rounded up."""
        cached = min(usage.cached_tokens, usage.prompt_tokens)
        cost = (usage.prompt_tokens - cached) * self.prompt + usage.new_tokens * self.new
        cost += cached * (self.prompt if self.cached is None else self.cached)
        return math.ceil(cost * 1000)  # a price for a million tokens is that of one in millionths
