"""The tokens that a server says it has counted for one answer, and their price."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeGuard, cast

from luminosity._shared.toml_tables import read_toml
from luminosity.core import InferenceMetrics
from luminosity.errors import InvalidArgument
from luminosity.inference.handler import note

__all__ = ["GivenPrices", "Prices", "Usage"]

GivenPrices: TypeAlias = "Prices | tuple[float, ...] | str | os.PathLike[str] | None"
"""What a user gives as prices: numbers, or the path of a TOML file."""


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
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


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
    currency: str = ""
    """For messages."""

    def __post_init__(self) -> None:
        for name in ("prompt", "new", "cached"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise InvalidArgument(f"found the price {name}={value!r} of a million tokens, expected 0 or more")

    @classmethod
    def of(cls, given: GivenPrices, model: str) -> Prices | None:
        """Return the prices of a model: of a TOML file, or the numbers for prompts and new tokens.

        >>> Prices.of((2.5, 10), "small")
        Prices(prompt=2.5, new=10, cached=None, currency='')
        """
        if given is None or isinstance(given, Prices):
            return given
        if isinstance(given, str | os.PathLike):
            return _read_prices(os.fspath(given), model)
        unchecked: Any = given
        numbers = unchecked if isinstance(unchecked, tuple | list) else ()
        if len(numbers) not in (2, 3) or not all(isinstance(each, int | float) for each in numbers):
            raise InvalidArgument(
                f"found prices={given!r}, expected two numbers, what a million tokens of prompts and a million new "
                "tokens cost, or the path of a TOML file"
            )
        return cls(*numbers)

    def scaled(self, factor: float) -> Prices:
        """Return the prices times a factor.

        >>> Prices(2.5, 10.0).scaled(0.5)
        Prices(prompt=1.25, new=5.0, cached=None, currency='')
        """
        cached = None if self.cached is None else self.cached * factor
        return Prices(self.prompt * factor, self.new * factor, cached, self.currency)

    def nanos(self, usage: Usage) -> int:
        """Return the cost of some tokens in billionths of the currency, rounded up."""
        cached = min(usage.cached_tokens, usage.prompt_tokens)
        cost = (usage.prompt_tokens - cached) * self.prompt + usage.new_tokens * self.new
        cost += cached * (self.prompt if self.cached is None else self.cached)
        return math.ceil(cost * 1000)  # a price for a million tokens is that of one in millionths


def _read_prices(path: str, model: str) -> Prices:
    """Return the prices of a model in a file with a table ``[[model]]`` for each."""

    def error(message: str, fix: str | None) -> InvalidArgument:
        return InvalidArgument(message, fix=fix)

    whole = read_toml(path, error)
    currency = whole.text("currency", "") or ""
    found: dict[str, Prices] = {}
    for table in whole.tables("model"):
        name = table.text("name")
        prices = {each: table.number(each, -1e-9, 1e9) for each in ("prompt", "new", "cached")}
        table.finish("a table [[model]]")
        if name is None or prices["prompt"] is None or prices["new"] is None:
            raise table.error("name", "found a model without a name or a price, expected name, prompt and new")
        found[name] = Prices(prices["prompt"], prices["new"], prices["cached"], currency)
    whole.finish("a file of prices")
    if model not in found:
        raise InvalidArgument(
            f"{path} has no prices of the model {model!r}, but of {', '.join(map(repr, found)) or 'none'}",
            fix=f'add a table: [[model]] with name = "{model}", prompt and new, the prices of a million tokens',
        )
    return found[model]
