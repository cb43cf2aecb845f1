"""From the vectors of a text's tokens to one vector, in the ways that sentence-transformers has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from luminosity.extras import require

__all__ = ["POOLING_MODES", "check_modes", "pool"]

POOLING_MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")


def check_modes(modes: Sequence[str]) -> None:
    """
    >>> check_modes(["average"])
    Traceback (most recent call last):
    ValueError: pooling is 'average', expected some of cls, max, mean, mean_sqrt_len_tokens, weightedmean, lasttoken
    """
    for mode in modes:
        if mode not in POOLING_MODES:
            raise ValueError(f"pooling is {mode!r}, expected some of {', '.join(POOLING_MODES)}")


def pool(vectors: Any, mask: Any, modes: Sequence[str]) -> Any:
    """One float32 vector per text, those of several modes side by side.

    `vectors` are texts by tokens by features; `mask` is true for the tokens that count, of which each text has one.
    """
    torch = require("torch", "torch")
    return torch.cat([_pooled(vectors, mask, mode) for mode in modes], dim=-1)


def _pooled(vectors: Any, mask: Any, mode: str) -> Any:
    torch = require("torch", "torch")
    if mode == "cls":
        return _at(vectors, mask.int().argmax(dim=1))
    if mode == "lasttoken":
        last = mask.shape[1] - 1 - mask.flip(1).int().argmax(dim=1)
        return _at(vectors, last)
    if mode == "max":
        return vectors.masked_fill(~mask.unsqueeze(-1), float("-inf")).amax(dim=1).float()
    weights = mask.float()
    if mode == "weightedmean":
        weights = weights * torch.arange(1, mask.shape[1] + 1, device=mask.device)
        # Positions are large numbers, which 16 bits can't hold.
        return (vectors.float() * weights.unsqueeze(-1)).sum(dim=1) / weights.sum(dim=1, keepdim=True).clamp(min=1)
    total = (vectors * mask.unsqueeze(-1)).sum(dim=1, dtype=torch.float32)
    count = weights.sum(dim=1, keepdim=True).clamp(min=1)
    return total / (count if mode == "mean" else count.sqrt())


def _at(vectors: Any, places: Any) -> Any:
    """Each text's vector at its place."""
    texts = require("torch", "torch").arange(len(vectors), device=vectors.device)
    return vectors[texts, places].float()
