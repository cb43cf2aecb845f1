"""Chooses the next token of each row from the scores of all tokens, on the device.

This module imports torch, and is imported where a model is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from luminosity.extras import require
from luminosity.inference.handlers.text.slots.settings import RowSettings

__all__ = ["Sampled", "allow_only", "choose"]

torch = require("torch", "torch")

_BITS = 32  # of one number of a mask
_AT_ONCE = 64  # rows whose scores are sorted at once; more only take memory


@dataclass(frozen=True)
class Sampled:
    """The rows whose tokens are drawn, and how; everything is on the device."""

    rows: Any
    temperatures: Any
    top_ks: Any
    top_ps: Any
    draws: Any
    """Numbers from 0 to 1: a line for each step, a column for each row."""
    most: int
    """How many of the likeliest tokens matter; 0 for all."""

    @classmethod
    def of(
        cls, rows: Sequence[int], settings: Sequence[RowSettings], draws: npt.NDArray[np.float64], device: Any
    ) -> Sampled:
        """Move the settings of these rows to the device."""

        def column(values: list[Any], dtype: Any) -> Any:
            return torch.tensor(values, dtype=dtype, device=device)[:, None]

        top_ks = [each.top_k for each in settings]
        most = max(top_ks) if all(top_ks) else 0
        return cls(
            torch.tensor(list(rows), device=device),
            column([each.temperature for each in settings], torch.float32),
            column([each.top_k or 1 << 30 for each in settings], torch.int64),
            column([each.top_p for each in settings], torch.float32),
            torch.from_numpy(draws.astype(np.float32)).to(device),
            most,
        )


def choose(scores: Any, sampled: Sampled | None = None, step: int = 0) -> Any:
    """Return the token of each row: the one with the highest score, or one that is drawn."""
    chosen = scores.argmax(-1)
    if sampled is not None:
        for start in range(0, len(sampled.rows), _AT_ONCE):
            part = slice(start, start + _AT_ONCE)
            chosen[sampled.rows[part]] = _drawn(scores, sampled, part, sampled.draws[step, part])
    return chosen


def _drawn(scores: Any, sampled: Sampled, part: slice, draws: Any) -> Any:
    numbers = scores[sampled.rows[part]].float() / sampled.temperatures[part]
    size = numbers.shape[-1]
    most = min(sampled.most or size, size)
    ordered, tokens = numbers.topk(most) if most < size else numbers.sort(descending=True, stable=True)
    ranks = torch.arange(most, device=scores.device)
    shares = ordered.masked_fill(ranks >= sampled.top_ks[part], -torch.inf).softmax(-1)
    sums = shares.cumsum(-1)
    # A token belongs to the likeliest ones that together have this share if those before it have less.
    kept = shares * (sums - shares < sampled.top_ps[part])
    sums = kept.cumsum(-1)
    places = torch.searchsorted(sums, draws[:, None] * sums[:, -1:], right=True)
    # Rounding may lead behind the last token that is kept.
    places = places.minimum((kept > 0).sum(-1, keepdim=True) - 1)
    return tokens.gather(-1, places)[:, 0]


def allow_only(scores: Any, rows: Sequence[int], masks: npt.NDArray[np.int32]) -> None:
    """Let these rows have only tokens whose bits in their masks are set."""
    words = torch.from_numpy(masks).to(scores.device)
    bits = (words[:, :, None] >> torch.arange(_BITS, dtype=torch.int32, device=scores.device)) & 1
    allowed = bits.flatten(1)[:, : scores.shape[-1]].bool()
    places = torch.tensor(list(rows), device=scores.device)
    scores[places] = scores[places].masked_fill(~allowed, -torch.inf)
