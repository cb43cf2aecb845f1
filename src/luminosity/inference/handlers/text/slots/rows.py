"""A row under way: its prompt, its new tokens, and when its text ends."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from luminosity.inference.handlers.text.slots.settings import Answer, Matcher, RowSettings

__all__ = ["Decode", "Row", "cut_behind"]

Decode: TypeAlias = Callable[[list[int]], str]
"""Returns the text of tokens."""


def cut_behind(text: str, stops: tuple[str, ...]) -> str | None:
    """Return the text up to the end of the stop string that comes first; None if it has none.

    >>> cut_behind("one. two. three", ("two", "one."))
    'one.'
    """
    ends = [place + len(stop) for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else None


class Row:
    """A prompt, and the tokens that follow it."""

    def __init__(
        self, ids: npt.NDArray[np.int32], settings: RowSettings, decode: Decode, matcher: Matcher | None = None
    ) -> None:
        self.ids = ids
        self.settings = settings
        self.matcher = matcher
        self.future: Future[Any] = Future()
        self.tokens: list[int] = []
        self.slot = -1
        self._came = time.monotonic()
        self._first_token_s: float | None = None
        self._decode = decode
        seed = settings.seed if settings.seed is not None else int.from_bytes(os.urandom(8), "little")
        self._random = np.random.default_rng(seed) if settings.is_sampled else None

    @property
    def most(self) -> int:
        """How many tokens the row may have in all."""
        return len(self.ids) + self.settings.limit

    @property
    def length(self) -> int:
        """How many tokens the row has now."""
        return len(self.ids) + len(self.tokens)

    @property
    def left(self) -> int:
        """How many tokens may follow."""
        return self.settings.limit - len(self.tokens)

    def draw(self, count: int) -> npt.NDArray[np.float64]:
        """Return the numbers that choose the next tokens; they depend on the row's seed and place alone."""
        assert self._random is not None
        return self._random.random(count)

    def take(self, tokens: list[int]) -> Answer | None:
        """Take the next tokens, and return the answer if the text ends with one of them."""
        settings = self.settings
        if self._first_token_s is None:
            self._first_token_s = time.monotonic() - self._came
        for token in tokens:
            self.tokens.append(token)
            if self.matcher is not None and token not in settings.ends:
                self.matcher.accept(token)
            if settings.stops and cut_behind(self._decode(self.tokens), settings.stops) is not None:
                return self._answer(is_cut=False, stops=settings.stops)
            if token in settings.ends or (self.matcher is not None and self.matcher.stopped):
                return self._answer(is_cut=False)
            if not self.left:
                return self._answer(is_cut=True)
        return None

    def _answer(self, is_cut: bool, stops: tuple[str, ...] = ()) -> Answer:
        return Answer(self.tokens, len(self.ids), is_cut, stops, first_token_s=self._first_token_s)
