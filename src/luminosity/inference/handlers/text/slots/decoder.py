"""A language model of Llama's kind: the layers, for tokens of any rows; only attention knows where a row begins.

This module imports torch, and is imported where a model is loaded.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, TypeAlias

from luminosity.extras import require
from luminosity.inference.handlers.text.slots.families import DecoderShape

__all__ = ["Attend", "Decoder", "attend_row_by_row", "attend_without_padding", "has_varlen"]

torch = require("torch", "torch")
functional = require("torch.nn.functional", "torch")

Attend: TypeAlias = Callable[[int, Any, Any, Any], Any]
"""Attends in the layer with this number: gets the queries, keys and values of tokens, as (tokens, heads, size)."""


class Decoder:
    """The layers of a model. ``common`` and ``layers`` are those of :meth:`DecoderWeights.load`."""

    def __init__(self, shape: DecoderShape, common: dict[str, Any], layers: list[dict[str, Any]]) -> None:
        self.shape = shape
        self._common = common
        self._layers = layers
        self._frequencies = _frequencies(shape).to(common["words"].device)

    @property
    def device(self) -> Any:
        """The device of the weights."""
        return self._common["words"].device

    @property
    def dtype(self) -> Any:
        """The type of the weights."""
        return self._common["words"].dtype

    def parameters(self) -> Iterator[Any]:
        """Yield all tensors; a matrix that is used twice comes once."""
        yield from {id(tensor): tensor for tensor in self._common.values()}.values()
        for layer in self._layers:
            yield from layer.values()

    def states(self, ids: Any, positions: Any, attend: Attend) -> Any:
        """Return the last vector of each token."""
        shape, linear = self.shape, functional.linear
        turned = shape.heads + shape.kv_heads
        states = functional.embedding(ids, self._common["words"])
        cosines, sines = self._angles(positions, states.dtype)
        for number, layer in enumerate(self._layers):
            normed = self._norm(states, layer["norm"])
            joined = linear(normed, layer["joined.weight"], layer.get("joined.bias"))
            heads = joined.view(-1, turned + shape.kv_heads, shape.head_size)
            first = heads[:, :turned]
            if shape.has_head_norms:
                queries, keys = first.split([shape.heads, shape.kv_heads], 1)
                norms = self._norm(queries, layer["queries_norm"]), self._norm(keys, layer["keys_norm"])
                first = torch.cat(norms, dim=1)
            queries, keys = _turned(first, cosines, sines).split([shape.heads, shape.kv_heads], 1)
            attended = attend(number, queries, keys, heads[:, turned:]).reshape(-1, shape.heads * shape.head_size)
            states = states + linear(attended, layer["out.weight"], layer.get("out.bias"))
            normed = self._norm(states, layer["last"])
            gate, inside = linear(normed, layer["up.weight"], layer.get("up.bias")).chunk(2, dim=-1)
            states = states + linear(functional.silu(gate) * inside, layer["down.weight"], layer.get("down.bias"))
        return states

    def scores(self, states: Any, out: Any = None) -> Any:
        """Return the score of each token of the vocabulary for these vectors; ``out`` takes them."""
        return torch.matmul(self._norm(states, self._common["norm"]), self._common["head"].t(), out=out)

    def _norm(self, states: Any, weight: Any) -> Any:
        return functional.rms_norm(states, weight.shape, weight, self.shape.epsilon)

    def _angles(self, positions: Any, dtype: Any) -> tuple[Any, Any]:
        angles = positions.float()[:, None] * self._frequencies
        return angles.cos()[:, None].to(dtype), angles.sin()[:, None].to(dtype)


def _turned(heads: Any, cosines: Any, sines: Any) -> Any:
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)


def _frequencies(shape: DecoderShape) -> Any:
    """Return by how much each pair of numbers is turned from one position to the next."""
    turning, size = shape.turning, shape.head_size
    plain = 1.0 / (turning.base ** (torch.arange(0, size, 2, dtype=torch.int64).float() / size))
    if not turning.high:
        return plain / turning.factor
    waves = 2 * math.pi / plain
    share = (turning.positions / waves - turning.low) / (turning.high - turning.low)
    between = (1 - share) * plain / turning.factor + share * plain
    stretched = torch.where(waves > turning.positions / turning.low, plain / turning.factor, between)
    return torch.where(waves < turning.positions / turning.high, plain, stretched)


@cache
def _varlen() -> Any:
    """Return torch's attention for rows of different lengths. Its first call imports a large part of torch."""
    try:
        return require("torch.nn.attention.varlen", "torch").varlen_attn
    except ImportError:  # before torch 2.10
        return None


def has_varlen(device: Any, dtype: Any, head_size: int) -> bool:
    """Return whether torch has causal attention for rows of different lengths here."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16) or head_size % 8:
        return False
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    is_built = torch.backends.cuda.is_flash_attention_available()
    return is_built and _varlen() is not None and "window_size" in inspect.signature(_varlen()).parameters


def attend_without_padding(queries: Any, keys: Any, values: Any, layout: Any) -> Any:
    """Attend within rows that lie one after the other; a row's queries are those of its last keys."""
    group = queries.shape[1] // keys.shape[1]
    if group > 1:
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    rows = layout.starts, layout.key_starts, layout.longest, layout.longest_keys
    # No key behind the query: the last query of a row stands at its last key.
    return _varlen()(queries.contiguous(), keys.contiguous(), values.contiguous(), *rows, window_size=(-1, 0))


def attend_row_by_row(queries: Any, keys: Any, values: Any, layout: Any) -> Any:
    """Do the same one row after the other, on any device and with any type."""
    found: list[Any] = []
    for (start, end), (first, last) in layout.spans:
        places = torch.arange(first, last, device=keys.device)
        seen = places[None, :] <= places[last - first - (end - start) :, None]
        row = (each.transpose(0, 1)[None] for each in (queries[start:end], keys[first:last], values[first:last]))
        attended = functional.scaled_dot_product_attention(*row, attn_mask=seen, enable_gqa=True)
        found.append(attended[0].transpose(0, 1))
    return torch.cat(found)
