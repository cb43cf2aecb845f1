"""Chooses the encoder of a model: with kernels of our own, or with torch's attention, which may pad.

This module imports torch, and is imported where a model is loaded.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from functools import cache
from typing import Any

from luminosity.extras import require
from luminosity.inference.handlers.text.packed.encoder import Encoder, Rows, has_varlen, pool_rows
from luminosity.inference.handlers.text.packed.families import Shape

__all__ = ["attends_without_padding", "encoder_of"]

torch = require("torch", "torch")
_LOGGER = logging.getLogger(__name__)

_LARGEST_HEAD = 256  # numbers of a token in a head that kernels of attention take
# Tokens of the rows with which our kernels are compared: more than one block of keys, large blocks, beyond a window.
_TRIED_ROWS = ((1, 5, 40, 2), (200, 220))
_LEAST_COSINE = 0.9995
_LENGTHS_DIFFER = 0.02  # by which share the lengths of two vectors may differ


def attends_without_padding(shape: Shape, device: Any, dtype: Any) -> bool:
    """Return whether there is attention for rows of different lengths for this model, device and type."""
    if device.type != "cuda" or torch.version.hip is not None or shape.head_size > _LARGEST_HEAD:
        return False
    if torch.cuda.get_device_capability(device) < (8, 0):
        return False
    return _kernels_of(device) is not None or has_varlen(shape, dtype)


def encoder_of(shape: Shape, common: dict[str, Any], layers: list[dict[str, Any]]) -> Encoder:
    """Return an encoder with these weights: with kernels of our own where they run and give the same."""
    device = common["words"].device
    is_free = attends_without_padding(shape, device, common["words"].dtype)
    plain = Encoder(shape, common, layers, pads=not (is_free and has_varlen(shape, common["words"].dtype)))
    kernels = _kernels_of(device) if is_free else None
    if kernels is None:
        return plain
    fused, padded = kernels.FusedEncoder(shape, common, layers), Encoder(shape, common, layers)
    try:
        for lengths in _TRIED_ROWS:
            found, expected = (_vectors(each, lengths, device) for each in (fused, padded))
            if not _is_same(found, expected):
                raise ArithmeticError("they give other vectors than torch")
    except Exception as error:  # whatever a compiler raises: the model runs without them
        _LOGGER.warning("The model runs without our kernels: %s: %s", type(error).__name__, error)
        return plain
    return fused


def _vectors(encoder: Encoder, lengths: Sequence[int], device: Any) -> Any:
    """Return the mean vectors of made-up rows, of so many tokens or as many as the model takes."""
    shape = encoder.shape
    most = shape.positions - 1 - (shape.padding or 0) if shape.positions else max(lengths)
    starts = list(itertools.accumulate((min(length, most) for length in lengths), initial=0))
    ids = torch.arange(starts[-1], dtype=torch.int32, device=device) * 7 % shape.vocabulary
    given = torch.tensor(starts, dtype=torch.int32, device=device)
    rows = Rows.of(given, len(ids), min(max(lengths), most))
    with torch.inference_mode():
        return pool_rows(encoder.states(ids, encoder.positions(ids, rows), rows), rows, ["mean"], encoder.mean)


def _kernels_of(device: Any) -> Any:
    """Return the module of our kernels if Triton runs on this device, else None; a line of the log says why."""
    return _kernels_of_number(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _kernels_of_number(number: int) -> Any:
    device = torch.device("cuda", number)
    try:
        from luminosity.inference.handlers.text.packed import kernels

        kernels.check(device)
    except Exception as error:  # not installed, no C compiler, too old, …
        _LOGGER.warning("Our kernels do not run on %s: %s: %s", device, type(error).__name__, error)
        return None
    return kernels


def _is_same(found: Any, expected: Any) -> bool:
    """Return whether two matrices have the same rows, as far as types of 16 bits allow."""
    if not bool(torch.isfinite(found).all()):
        return False
    cosine = torch.nn.functional.cosine_similarity(found.float(), expected.float(), dim=1)
    lengths = found.float().norm(dim=1) / expected.float().norm(dim=1).clamp(min=1e-12)
    return bool((cosine >= _LEAST_COSINE).all()) and bool(((lengths - 1).abs() <= _LENGTHS_DIFFER).all())
