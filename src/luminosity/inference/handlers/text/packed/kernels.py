"""The steps of a packed encoder between its products of matrices, as kernels for CUDA devices, in Triton.

Attention takes the tokens of a batch in blocks of the same size, whichever rows they belong to: short rows share a
block, long ones have many, and no part of a block is padding. The other kernels join steps that torch runs one after
another, each of which would read and write all states. This module imports triton, whose compiler reads the functions
with ``triton.jit``: it knows no annotations but its own.
"""
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportUntypedFunctionDecorator=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import triton
import triton.language as tl

from luminosity.core import InferenceMetrics
from luminosity.extras import require
from luminosity.inference.handlers.text.packed.encoder import Encoder, Rows

__all__ = ["FusedEncoder", "check"]

torch = require("torch", "torch")

_LOG2_E = 1.4426950408889634  # the exponential of a device has the base 2
_LONG = 96  # tokens of a row on average, from which larger blocks are faster
_ROW_NUMBERS = 2048  # which a program of the norm takes; more don't fit its registers
_POOLED_TOKENS = 8  # at a time
_SMALL = 16  # the least size of a block's side


@triton.jit(do_not_specialize=["tokens", "window", "reach"])
def _attend(
    queries, keys, values, starts, owners, biases, out,
    tokens, scale, window, reach, query_stride, key_stride, value_stride,
    heads: tl.constexpr, size: tl.constexpr, has_window: tl.constexpr,
    rows_block: tl.constexpr, keys_block: tl.constexpr, padded: tl.constexpr,
):  # fmt: skip
    """Write the attended values of a block of tokens for one head."""
    first = tl.program_id(0) * rows_block
    head = tl.program_id(1)
    own = first + tl.arange(0, rows_block)
    is_token = own < tokens
    owner = tl.load(owners + own, mask=is_token, other=-1).to(tl.int32)
    last = tl.minimum(first + rows_block, tokens) - 1
    # The keys of the rows that the first and the last token belong to, and of those between.
    begin = tl.load(starts + tl.load(owners + first))
    end = tl.load(starts + tl.load(owners + last) + 1)
    if has_window:
        begin = tl.maximum(begin, first - window)
        end = tl.minimum(end, last + window + 1)
    number = tl.arange(0, padded)
    is_number = number < size
    at = own[:, None].to(tl.int64) * query_stride + head * size + number[None, :]
    query = tl.load(queries + at, mask=is_token[:, None] & is_number[None, :], other=0.0)
    best = tl.full((rows_block,), -1e30, tl.float32)
    total = tl.zeros((rows_block,), tl.float32)
    sums = tl.zeros((rows_block, padded), tl.float32)
    for begin_of_block in range(begin, end, keys_block):
        theirs = begin_of_block + tl.arange(0, keys_block)
        is_key = theirs < end
        their_owner = tl.load(owners + theirs, mask=is_key, other=-2).to(tl.int32)
        mask = is_key[:, None] & is_number[None, :]
        place = theirs[:, None].to(tl.int64)
        offset = head * size + number[None, :]
        key = tl.load(keys + place * key_stride + offset, mask=mask, other=0.0)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        is_seen = owner[:, None] == their_owner[None, :]
        distance = theirs[None, :] - own[:, None]
        if has_window:
            is_seen = is_seen & (distance <= window) & (distance >= -window)
        if biases is not None:
            score += tl.load(biases + head * (2 * reach + 1) + reach + distance, mask=is_seen, other=0.0)
        score = tl.where(is_seen, score, -1e30)
        better = tl.maximum(best, tl.max(score, 1))
        share = tl.where(is_seen, tl.exp2(score - better[:, None]), 0.0)
        kept = tl.exp2(best - better)
        total = total * kept + tl.sum(share, 1)
        value = tl.load(values + place * value_stride + offset, mask=mask, other=0.0)
        sums = sums * kept[:, None] + tl.dot(share.to(value.dtype), value, input_precision="ieee")
        best = better
    found = sums / tl.where(is_token, total, 1.0)[:, None]
    to = own[:, None].to(tl.int64) * (heads * size) + head * size + number[None, :]
    tl.store(out + to, found.to(out.dtype.element_ty), mask=is_token[:, None] & is_number[None, :])


@triton.jit
def _normed(states, mask, is_number, number, weight, bias, epsilon, width: tl.constexpr):
    """Return float32 states with the mean 0 and the variance 1, times weights."""
    centred = tl.where(mask, states - tl.sum(states, 1)[:, None] / width, 0.0)
    variance = tl.sum(centred * centred, 1)[:, None] / width
    found = centred * tl.rsqrt(variance + epsilon)
    found *= tl.load(weight + number, mask=is_number, other=0.0).to(tl.float32)[None, :]
    if bias is not None:
        found += tl.load(bias + number, mask=is_number, other=0.0).to(tl.float32)[None, :]
    return found


@triton.jit(do_not_specialize=["tokens"])
def _norm_of_sum(
    first, second, weight, bias, out, tokens, epsilon,
    width: tl.constexpr, rows_block: tl.constexpr, padded: tl.constexpr,
):  # fmt: skip
    """Write the norm of the first states, or of their sum with the second."""
    token = tl.program_id(0).to(tl.int64) * rows_block + tl.arange(0, rows_block)
    number = tl.arange(0, padded)
    is_number = number < width
    mask = (token < tokens)[:, None] & is_number[None, :]
    at = token[:, None] * width + number[None, :]
    states = tl.load(first + at, mask=mask, other=0.0).to(tl.float32)
    if second is not None:
        states += tl.load(second + at, mask=mask, other=0.0).to(tl.float32)
    found = _normed(states, mask, is_number, number, weight, bias, epsilon, width)
    tl.store(out + at, found.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def _embed(
    ids, places, words, positions, types, weight, bias, out,
    tokens, epsilon, width: tl.constexpr, rows_block: tl.constexpr, padded: tl.constexpr,
):  # fmt: skip
    """Write the norm of the sum of the vectors of each token's word, position and type."""
    token = tl.program_id(0).to(tl.int64) * rows_block + tl.arange(0, rows_block)
    number = tl.arange(0, padded)
    is_number = number < width
    is_token = token < tokens
    mask = is_token[:, None] & is_number[None, :]
    word = tl.load(ids + token, mask=is_token, other=0).to(tl.int64)
    states = tl.load(words + word[:, None] * width + number[None, :], mask=mask, other=0.0).to(tl.float32)
    if positions is not None:
        place = tl.load(places + token, mask=is_token, other=0).to(tl.int64)
        states += tl.load(positions + place[:, None] * width + number[None, :], mask=mask, other=0.0).to(tl.float32)
    if types is not None:
        states += tl.load(types + number, mask=is_number, other=0.0).to(tl.float32)[None, :]
    found = _normed(states, mask, is_number, number, weight, bias, epsilon, width)
    tl.store(out + token[:, None] * width + number[None, :], found.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _mean(states, starts, out, width: tl.constexpr, tokens_block: tl.constexpr, padded: tl.constexpr):
    """Write the mean of the states of one row."""
    row = tl.program_id(0)
    begin, end = tl.load(starts + row).to(tl.int64), tl.load(starts + row + 1).to(tl.int64)
    number = tl.arange(0, padded)
    is_number = number < width
    sums = tl.zeros((padded,), tl.float32)
    for first in range(begin, end, tokens_block):
        token = first + tl.arange(0, tokens_block)
        mask = (token < end)[:, None] & is_number[None, :]
        sums += tl.sum(
            tl.load(states + token[:, None] * width + number[None, :], mask=mask, other=0.0).to(tl.float32), 0
        )
    tl.store(out + row.to(tl.int64) * width + number, sums / (end - begin).to(tl.float32), mask=is_number)


class FusedEncoder(Encoder):
    """An encoder whose steps between the products of matrices are these kernels."""

    @property
    def counter(self) -> str:
        """The counter of the rows that are computed in this way."""
        return InferenceMetrics.BY_KERNELS

    @property
    def pads(self) -> bool:
        """Whether rows are padded inside of attention."""
        return False

    def states(self, ids: Any, positions: Any, rows: Rows) -> Any:
        """Return the last vector of each token."""
        with _on(ids.device):
            return super().states(ids, positions, rows)

    def _embedded(self, ids: Any, positions: Any) -> Any:
        common, shape = self._common, self.shape
        out = common["words"].new_empty((len(ids), shape.width))
        blocks = _blocks(len(ids), shape.width)
        _embed[blocks.grid](
            ids, positions, common["words"], common.get("positions"), common.get("types"), common["norm.weight"],
            common.get("norm.bias"), out, len(ids), shape.epsilon, shape.width, blocks.rows, blocks.padded,
            num_warps=blocks.warps,
        )  # fmt: skip
        return out

    def _norm(self, states: Any, weights: dict[str, Any], name: str, other: Any = None) -> Any:
        shape = self.shape
        out = torch.empty_like(states)
        blocks = _blocks(len(states), shape.width)
        _norm_of_sum[blocks.grid](
            states, other, weights[f"{name}.weight"], weights.get(f"{name}.bias"), out, len(states), shape.epsilon,
            shape.width, blocks.rows, blocks.padded, num_warps=blocks.warps,
        )  # fmt: skip
        return out

    def _inside(self, states: Any, layer: dict[str, Any]) -> Any:
        if states.dtype != torch.bfloat16 or not states.is_cuda:
            return super()._inside(states, layer)
        # With GELU's approximation by a hyperbolic tangent: its error is an eighth of bfloat16's rounding.
        return torch._addmm_activation(layer["up.bias"], states, layer["up.weight"].t(), use_gelu=True)

    def _attention(self, rows: Rows) -> Any:
        shape = self.shape
        reach = rows.longest - 1
        biases = None
        if "distances" in self._common:
            distances = torch.arange(-reach, reach + 1, device=rows.starts.device)
            biases = (self._biases(-distances).float() * _LOG2_E).t().contiguous()

        def attend(queries: Any, keys: Any, values: Any, window: int | None) -> Any:
            tokens = len(queries)
            out = queries.new_empty((tokens, shape.width))
            padded = max(_SMALL, triton.next_power_of_2(shape.head_size))
            is_long = tokens >= _LONG * (len(rows.starts) - 1) and padded <= 64
            rows_block = 128 if is_long else 32 if padded <= 32 else 64
            _attend[(triton.cdiv(tokens, rows_block), shape.heads)](
                queries, keys, values, rows.starts, rows.owners, biases, out, tokens, _LOG2_E * shape.head_size**-0.5,
                window or 0, reach, queries.stride(0), keys.stride(0), values.stride(0), shape.heads,
                shape.head_size, window is not None, rows_block, 32, padded,
                num_warps=2 if rows_block == 32 else 4, num_stages=2,
            )  # fmt: skip
            return out

        return attend

    def mean(self, states: Any, rows: Rows) -> Any:
        """Return the mean of each row's states, as float32."""
        count, width = len(rows.starts) - 1, self.shape.width
        out = torch.empty((count, width), dtype=torch.float32, device=states.device)
        with _on(states.device):
            _mean[(count,)](states, rows.starts, out, width, _POOLED_TOKENS, triton.next_power_of_2(width), num_warps=4)
        return out


def _on(device: Any) -> AbstractContextManager[Any]:
    """Launch kernels on this device: Triton's go to the process's current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class _Blocks(NamedTuple):
    """How tokens are given to the programs of a kernel that reads whole vectors."""

    grid: tuple[int]
    rows: int
    padded: int
    warps: int


def _blocks(tokens: int, width: int) -> _Blocks:
    padded = triton.next_power_of_2(width)
    rows = max(1, _ROW_NUMBERS // padded)
    return _Blocks((triton.cdiv(tokens, rows),), rows, padded, 2 if padded <= 512 else 4)


def check(device: Any) -> None:
    """Raise unless Triton compiles for this device and its result is right."""
    states = torch.arange(3.0 * _SMALL, device=device).reshape(3, _SMALL).sin()
    weight = torch.full((_SMALL,), 2.0, device=device)
    found, blocks = torch.empty_like(states), _blocks(3, _SMALL)
    with _on(states.device):
        _norm_of_sum[blocks.grid](
            states, states, weight, None, found, 3, 1e-6, _SMALL, blocks.rows, blocks.padded, num_warps=blocks.warps
        )
    expected = torch.nn.functional.layer_norm(2 * states, (_SMALL,), weight, eps=1e-6)
    if not bool((found - expected).abs().max() < 1e-4):
        raise ArithmeticError("a kernel of Triton gives another result than torch")
