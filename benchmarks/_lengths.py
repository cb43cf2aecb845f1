"""How long the texts of benchmarks are, in tokens."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

__all__ = ["FRAME", "LONGEST", "WORKLOADS"]

LONGEST = 256  # where encoders cut a text off
FRAME = 2  # the tokens around every text, [CLS] and [SEP]

_Lengths = npt.NDArray[np.int64]


def _equal(tokens: int) -> Callable[[np.random.Generator, int], _Lengths]:
    return lambda _, rows: np.full(rows, tokens)


def _skewed(generator: np.random.Generator, rows: int) -> _Lengths:
    """Many short, few long, as people write them: half have at most 28 tokens, the mean is 38."""
    return np.clip(generator.lognormal(mean=3.335, sigma=0.8, size=rows), FRAME + 1, LONGEST).astype(np.int64)


WORKLOADS = {"32 tokens": _equal(32), "128 tokens": _equal(128), "skewed": _skewed}
"""How many tokens texts have, special ones included; some less where the last word does not fit."""
