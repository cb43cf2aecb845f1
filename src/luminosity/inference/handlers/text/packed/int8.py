"""An encoder with 8-bit weights and products of matrices, which ONNX Runtime computes on the CPU.

This module imports torch, and is imported where a model is loaded.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from luminosity._shared.shared_files import text_digest
from luminosity.core import InferenceMetrics
from luminosity.errors import InvalidArgument
from luminosity.extras import require
from luminosity.inference.handlers.text.packed.encoder import Encoder, Rows, distance_numbers
from luminosity.inference.handlers.text.packed.families import Shape
from luminosity.inference.handlers.text.packed.kept_graphs import kept_graph
from luminosity.inference.handlers.text.packed.onnx_graph import Balance, encoder_graph, product_graph
from luminosity.inference.handlers.text.packed.weights import Weights

__all__ = ["Int8Encoder", "graph_of", "int8_encoder_of"]

torch = require("torch", "torch")

_FORMAT = 1  # of the kept files: a change of the graph or of the balance needs another number
_TRIED_ROWS, _TRIED_TOKENS = 32, 24  # made-up rows with which the channels are balanced
_STEP = 7919  # a prime: the ids of made-up rows are spread over the vocabulary
_LARGEST, _LARGEST_WITHOUT_VNNI = 127, 63
_PART_TOKENS = 512  # for each thread: more tokens at once leave the caches of a core
_MOST_PADDED = 4  # times as many places as tokens: attention pads the rows of a part
_FAR = -1e9  # what is added to the scores of padding


def int8_encoder_of(weights: Weights) -> Int8Encoder:
    """Return the encoder, from the user's cache if it is there."""
    largest = _largest_weight()
    status = os.stat(weights.path)
    file = (os.path.realpath(weights.path), status.st_size, status.st_mtime_ns)
    identity = (_FORMAT, largest, *file, weights.shape, weights.prefix, weights.dtype)
    content = kept_graph(text_digest(*map(str, identity)), lambda: graph_of(weights, largest))
    return Int8Encoder(weights, content)


def graph_of(weights: Weights, largest: int | None) -> bytes:
    """Return the model for ONNX Runtime. ``largest``: the largest weight in 8 bits, or None for float32."""
    common, layers = weights.load("cpu", torch.float32)
    with torch.inference_mode():
        recorder = _Recorder(weights.shape, common, layers)
        length = min(_TRIED_TOKENS, weights.shape.positions - 1 - (weights.shape.padding or 0))
        ids = torch.arange(_TRIED_ROWS * length) * _STEP % weights.shape.vocabulary
        rows = Rows.of(torch.arange(0, len(ids) + 1, length, dtype=torch.int32), len(ids), length)
        recorder.states(ids, recorder.positions(ids, rows), rows)
    arrays = [{name: tensor.numpy() for name, tensor in tensors.items()} for tensors in (common, *layers)]
    try:
        return encoder_graph(weights.shape, arrays[0], arrays[1:], recorder.balances[:-1], largest)
    except OverflowError as error:
        raise InvalidArgument(f"found precision='int8' for {weights.path!r}: {error}", fix="leave it out") from error


class _Recorder(Encoder):
    """Sees the numbers of the channels after each norm."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.balances: list[Balance] = []

    def _norm(self, states: Any, weights: dict[str, Any], name: str, other: Any = None) -> Any:
        found = super()._norm(states, weights, name, other)
        least, most = found.amin(dim=0), found.amax(dim=0)
        # The root shares the differences between channels between states and weights.
        spread = ((most - least) / 2).clamp(min=1e-3).sqrt()
        self.balances.append(Balance(((most + least) / 2).numpy(), spread.numpy()))
        return found


class Int8Encoder(Encoder):
    """Computes the states of tokens with a session of ONNX Runtime."""

    def __init__(self, weights: Weights, content: bytes) -> None:
        super().__init__(weights.shape, {}, [])
        self._nbytes = len(content)
        self._session = _session(content)
        self._inputs = {each.name for each in self._session.get_inputs()}

    @property
    def counter(self) -> str:
        """The counter of the rows that are computed in this way."""
        return InferenceMetrics.INT8

    def parameters(self) -> Iterator[Any]:
        """Yield a tensor without memory, of the size of the weights, which the session has."""
        yield torch.empty(self._nbytes, dtype=torch.uint8, device="meta")

    def states(self, ids: Any, positions: Any, rows: Rows) -> Any:
        """Return the last vector of each token."""
        starts = rows.starts.numpy()
        found: list[Any] = []
        for begin, end in itertools.pairwise(_parts(starts, _PART_TOKENS * torch.get_num_threads())):
            tokens = slice(starts[begin], starts[end])
            given = {"ids": ids[tokens].int().numpy(), "positions": positions[tokens].int().numpy()}
            given |= _layout(np.diff(starts[begin : end + 1]), self.shape)
            wanted = {name: np.ascontiguousarray(given[name]) for name in self._inputs}
            found.append(self._session.run(None, wanted)[0])
        return torch.from_numpy(found[0] if len(found) == 1 else np.concatenate(found))


def _parts(starts: Any, most: int) -> list[int]:
    """Return the rows with which parts of at most so many tokens begin, and the end of the last.

    A long row is not in one part with many short ones, which attention would pad.

    >>> _parts(np.array([0, 3, 5, 9, 10]), 5)
    [0, 2, 4]
    """
    found, longest = [0], 0
    for row, length in enumerate(np.diff(starts).tolist()):
        longest = max(longest, length)
        is_full = starts[row + 1] - starts[found[-1]] > most or (row + 1 - found[-1]) * longest > _MOST_PADDED * most
        if is_full and row > found[-1]:
            found.append(row)
            longest = length
    return [*found, len(starts) - 1]


def _layout(lengths: Any, shape: Shape) -> dict[str, Any]:
    """Return where the heads of tokens lie in padded rows, and back, and what is added to scores."""
    count, longest, heads = len(lengths), int(lengths.max()), shape.heads
    is_token = np.arange(longest) < lengths[:, np.newaxis]
    slots = np.flatnonzero(is_token)
    tokens = np.zeros(count * longest, np.int32)
    tokens[slots] = np.arange(len(slots), dtype=np.int32)
    rows, places = np.divmod(slots[:, np.newaxis], longest)
    each = np.arange(heads, dtype=np.int32)
    mask = np.where(is_token, np.float32(0), np.float32(_FAR))[:, np.newaxis, np.newaxis]
    found = {
        # Heads lie one after the other: of each token those of its query, its key and its value.
        "queries": tokens.reshape(count, 1, longest) * np.int32(3 * heads) + each[:, np.newaxis],
        "back": ((rows * heads + each) * longest + places).astype(np.int32),
        "mask": np.broadcast_to(mask, (count, 1, longest, longest)),
    }
    if shape.names.distances:
        line = torch.arange(longest)
        found["distances"] = distance_numbers(line[:, None] - line).int().numpy()
    return found


def _session(content: bytes) -> Any:
    """Return a session with as many threads as torch has in this process."""
    runtime = require("onnxruntime", "onnx")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    # Threads that wait for work would take the cores from the processes that tokenise.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.enable_mem_pattern = False  # most batches have sizes that were not there before
    # The graph is made of the fastest operators; more than basic rewriting could bring others.
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    return runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


@cache
def _largest_weight() -> int:
    """Return the largest weight in 8 bits whose products this machine adds without an overflow.

    Machines without VNNI add two products in 16 bits, which are too few for the largest weights.
    """
    rows, weight = np.full((16, 64), 255, np.uint8), np.full((64, 32), _LARGEST, np.int8)
    found = _session(product_graph(rows, weight)).run(None, {})[0]
    return _LARGEST if bool((found == 255 * _LARGEST * 64).all()) else _LARGEST_WITHOUT_VNNI
