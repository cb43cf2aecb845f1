"""An encoder that computes the tokens of all rows as one long row: only attention knows where a row begins.

This module imports torch, and is imported where a model is loaded.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from luminosity.core import InferenceMetrics
from luminosity.extras import require
from luminosity.inference.handlers.text.packed.families import MPNET_DISTANCES, Shape

__all__ = ["Encoder", "Rows", "distance_numbers", "has_varlen", "mean_of_rows", "pool_rows"]

torch = require("torch", "torch")
functional = require("torch.nn.functional", "torch")

_FARTHEST = 128  # tokens; MPNet treats all that are farther apart alike


def has_varlen(shape: Shape, dtype: Any) -> bool:
    """Return whether torch's own attention for rows of different lengths takes this model."""
    if dtype not in (torch.bfloat16, torch.float16):
        return False
    if shape.names.distances or shape.head_size % 8 or not torch.backends.cuda.is_flash_attention_available():
        return False
    varlen = _varlen()
    return varlen is not None and (not shape.is_rotary or "window_size" in inspect.signature(varlen).parameters)


@cache
def _varlen() -> Any:
    """Return torch's attention for rows of different lengths. Its first call imports a large part of torch."""
    try:
        return require("torch.nn.attention.varlen", "torch").varlen_attn
    except ImportError:  # before torch 2.10
        return None


@dataclass(frozen=True)
class Rows:
    """Where the rows of a batch lie in its long row of tokens, on the device."""

    starts: Any
    """Where each row begins, and the end of the last, as int32."""
    owners: Any
    """The number of each token's row."""
    places: Any
    """The place of each token in its row."""
    longest: int
    are_alike: bool
    """Whether all rows have the same length."""

    @classmethod
    def of(cls, starts: Any, tokens: int, longest: int) -> Rows:
        """Lay out rows that begin at ``starts``. Does not wait for the device."""
        count = starts.shape[0] - 1
        owners = torch.repeat_interleave(
            torch.arange(count, device=starts.device), (starts[1:] - starts[:-1]).long(), output_size=tokens
        )
        places = torch.arange(tokens, device=starts.device) - starts[:-1].long()[owners]
        return cls(starts, owners, places, longest, count * longest == tokens)


class Encoder:
    """An encoder of one of the families. ``weights`` are those of :meth:`Weights.load`."""

    def __init__(
        self, shape: Shape, common: dict[str, Any], layers: list[dict[str, Any]], *, pads: bool = True
    ) -> None:
        """``pads``: pad rows inside of attention, else use torch's attention for rows of different lengths."""
        self.shape = shape
        self._common = common
        self._layers = layers
        self._pads = pads

    @property
    def pads(self) -> bool:
        """Whether rows are padded inside of attention."""
        return self._pads

    @property
    def counter(self) -> str:
        """The counter of the rows that are computed in this way."""
        return InferenceMetrics.PADDED_INSIDE if self._pads else InferenceMetrics.BY_TORCH

    def parameters(self) -> Iterator[Any]:
        """Yield all tensors."""
        yield from self._common.values()
        for layer in self._layers:
            yield from layer.values()

    def buffers(self) -> Iterator[Any]:
        """Yield nothing: all tensors are parameters."""
        yield from ()

    def positions(self, ids: Any, rows: Rows) -> Any:
        """Return the position of each token, as the family counts."""
        padding = self.shape.padding
        if padding is None:
            return rows.places
        # A text may contain the padding's token. It has the padding's position, and those after it lose none.
        is_token = (ids != padding).long()
        before = is_token.cumsum(0) - is_token
        counted = before - before[rows.starts[:-1].long()][rows.owners] + 1
        return counted * is_token + padding

    def states(self, ids: Any, positions: Any, rows: Rows) -> Any:
        """Return the last vector of each token."""
        return self._rotary_states(ids, positions, rows) if self.shape.is_rotary else self._states(ids, positions, rows)

    def mean(self, states: Any, rows: Rows) -> Any:
        """Return the mean of each row's states, as float32."""
        return mean_of_rows(states, rows)

    def _states(self, ids: Any, positions: Any, rows: Rows) -> Any:
        linear = functional.linear
        states = self._embedded(ids, positions)
        attention = self._attention(rows)
        for layer in self._layers:
            queries, keys, values = self._heads(linear(states, layer["joined.weight"], layer["joined.bias"]))
            attended = attention(queries, keys, values, None)
            states = self._norm(linear(attended, layer["out.weight"], layer["out.bias"]), layer, "norm", states)
            inside = self._inside(states, layer)
            states = self._norm(linear(inside, layer["down.weight"], layer["down.bias"]), layer, "last", states)
        return states

    def _embedded(self, ids: Any, positions: Any) -> Any:
        embed, common = functional.embedding, self._common
        states = embed(ids, common["words"])
        if "types" in common:
            states = states + common["types"][0]
        if "positions" in common:
            states = states + embed(positions, common["positions"])
        return self._norm(states, common, "norm")

    def _inside(self, states: Any, layer: dict[str, Any]) -> Any:
        return functional.gelu(functional.linear(states, layer["up.weight"], layer["up.bias"]))

    def _rotary_states(self, ids: Any, positions: Any, rows: Rows) -> Any:
        linear = functional.linear
        states = self._embedded(ids, positions)
        attention = self._attention(rows)
        angles = {base: self._angles(positions, base, states.dtype) for base in sorted(set(self.shape.bases))}
        for layer, window, base in zip(self._layers, self.shape.windows, self.shape.bases, strict=True):
            normed = self._norm(states, layer, "norm") if "norm.weight" in layer else states
            queries, keys, values = self._heads(linear(normed, layer["joined.weight"]))
            queries, keys = _rotated(queries, *angles[base]), _rotated(keys, *angles[base])
            states = states + linear(attention(queries, keys, values, window), layer["out.weight"])
            inside, gate = linear(self._norm(states, layer, "last"), layer["up.weight"]).chunk(2, dim=-1)
            states = states + linear(functional.gelu(inside) * gate, layer["down.weight"])
        return self._norm(states, {"norm.weight": self._common["last_norm"]}, "norm")

    def _norm(self, states: Any, weights: dict[str, Any], name: str, other: Any = None) -> Any:
        """Return the norm of the states, or of their sum with others."""
        states = states if other is None else states + other
        weight, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
        return functional.layer_norm(states, (self.shape.width,), weight, bias, self.shape.epsilon)

    def _heads(self, joined: Any) -> Any:
        return joined.view(-1, 3, self.shape.heads, self.shape.head_size).unbind(1)

    def _angles(self, positions: Any, base: float, dtype: Any) -> tuple[Any, Any]:
        size = self.shape.head_size
        steps = torch.arange(0, size, 2, dtype=torch.float32, device=positions.device) / size
        angles = positions.float()[:, None] * (1.0 / base**steps)
        angles = torch.cat((angles, angles), dim=-1)[:, None, :]
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def _attention(self, rows: Rows) -> Any:
        """Return the function that attends within rows: of queries, keys, values and a window."""
        if self._pads:
            places = torch.arange(rows.longest, device=rows.starts.device)
            biases = self._biases(places[:, None] - places).permute(2, 0, 1) if "distances" in self._common else None
            return _PaddedAttention(rows, biases)
        starts, longest, varlen = rows.starts, rows.longest, _varlen()

        def attend(queries: Any, keys: Any, values: Any, window: int | None) -> Any:
            near = {} if window is None else {"window_size": (window, window)}
            found = varlen(queries, keys, values, starts, starts, longest, longest, **near)
            return found.reshape(-1, self.shape.width)

        return attend

    def _biases(self, back: Any) -> Any:
        """Return what MPNet adds for each head to keys that are so many tokens before the query."""
        return self._common["distances"][distance_numbers(back)]


class _PaddedAttention:
    """Attention for devices and types without one for rows of different lengths: only here rows are padded."""

    def __init__(self, rows: Rows, biases: Any) -> None:
        self._rows = rows
        self._count = rows.starts.shape[0] - 1
        self._slots = None if rows.are_alike else rows.owners * rows.longest + rows.places
        self._biases = biases
        self._masks: dict[int | None, Any] = {}

    def __call__(self, queries: Any, keys: Any, values: Any, window: int | None) -> Any:
        """Return the attended values, a row for each token."""
        padded = [self._padded(each) for each in (queries, keys, values)]
        if window not in self._masks:
            self._masks[window] = self._mask(window, queries.dtype)
        found = functional.scaled_dot_product_attention(*padded, attn_mask=self._masks[window]).transpose(1, 2)
        found = found.reshape(self._count * self._rows.longest, -1)
        return found if self._slots is None else found[self._slots]

    def _padded(self, tokens: Any) -> Any:
        """Return the heads of all rows, with zeros behind the shorter ones."""
        shape = (self._count, self._rows.longest, *tokens.shape[1:])
        if self._slots is None:
            return tokens.reshape(shape).transpose(1, 2)
        flat = tokens.new_zeros((self._count * self._rows.longest, *tokens.shape[1:]))
        return flat.index_copy_(0, self._slots, tokens).view(shape).transpose(1, 2)

    def _mask(self, window: int | None, dtype: Any) -> Any:
        rows = self._rows
        places = torch.arange(rows.longest, device=rows.starts.device)
        allowed = None
        if self._slots is not None:
            allowed = (places < (rows.starts[1:] - rows.starts[:-1])[:, None])[:, None, None, :]
        if window is not None:
            near = (places[:, None] - places[None, :]).abs() <= window
            # A query behind its row's end, which nobody reads, must still see something.
            allowed = near if allowed is None else (allowed & near) | (places[:, None] == places[None, :])
        if self._biases is None:
            return allowed
        biases = self._biases.to(dtype)[None]
        return biases if allowed is None else biases.masked_fill(~allowed, torch.finfo(dtype).min)


def _rotated(heads: Any, cosines: Any, sines: Any) -> Any:
    numbers = heads.float()
    first, second = numbers.chunk(2, dim=-1)
    return (numbers * cosines + torch.cat((-second, first), dim=-1) * sines).to(heads.dtype)


def distance_numbers(back: Any) -> Any:
    """Return MPNet's number of the distance to keys that are so many tokens before the query."""
    half, exact = MPNET_DISTANCES // 2, MPNET_DISTANCES // 4
    far = back.abs()
    # Near distances have a number each, the others share numbers by their logarithm.
    logarithm = torch.log(far.float() / exact) / math.log(_FARTHEST / exact) * (half - exact)
    shared = (exact + logarithm.clamp(min=0).long()).clamp(max=half - 1)
    return torch.where(far < exact, far, shared) + (back < 0).long() * half


def mean_of_rows(states: Any, rows: Rows) -> Any:
    """Return the mean of each row's states, as float32."""
    return _pooled(states, rows, "mean")


def pool_rows(states: Any, rows: Rows, modes: Sequence[str], mean: Callable[[Any, Rows], Any] = mean_of_rows) -> Any:
    """Return one float32 vector per row; the vectors of several modes are concatenated."""
    found = [mean(states, rows) if mode == "mean" else _pooled(states, rows, mode) for mode in modes]
    return found[0] if len(found) == 1 else torch.cat(found, dim=-1)


def _pooled(states: Any, rows: Rows, mode: str) -> Any:
    starts = rows.starts
    count = starts.shape[0] - 1
    if mode == "cls":
        return states[starts[:-1].long()].float()
    if mode == "lasttoken":
        return states[starts[1:].long() - 1].float()
    states = states.float()
    sums = torch.zeros((count, states.shape[1]), dtype=torch.float32, device=states.device)
    if mode == "max":
        owners = rows.owners[:, None].expand_as(states)
        return sums.scatter_reduce_(0, owners, states, "amax", include_self=False)
    lengths = (starts[1:] - starts[:-1]).float()[:, None]
    if mode == "weightedmean":
        sums.index_add_(0, rows.owners, states * (rows.places + 1)[:, None])
        return sums / (lengths * (lengths + 1) / 2)
    sums.index_add_(0, rows.owners, states)
    return sums / (lengths if mode == "mean" else lengths.sqrt())
