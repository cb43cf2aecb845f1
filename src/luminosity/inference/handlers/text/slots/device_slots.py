"""The slots on the device: the keys and values of the rows under way, and the step that all of them take together.

This module imports torch, and is imported where a model is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from luminosity.extras import require
from luminosity.inference.handlers.text.slots.choosing import Sampled, allow_only, choose
from luminosity.inference.handlers.text.slots.decoder import (
    Decoder,
    attend_row_by_row,
    attend_without_padding,
)

__all__ = ["EVERY", "Ids", "Prefix", "Slots"]

torch = require("torch", "torch")
functional = require("torch.nn.functional", "torch")

EVERY = 8
"""Steps between two looks at the tokens. Rows that end between them compute some tokens in vain."""
ROUND = 64  # tokens; attention wants lengths that are a multiple of 8
_WIDEST = 16  # bytes of the largest number that torch knows
_LENGTHS = (128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
"""The lengths of context for which a step is recorded; a step takes the least that holds all rows."""
Ids: TypeAlias = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Prefix:
    """The first tokens of several rows, with their keys and values in each layer as (tokens, heads, size)."""

    ids: Ids
    keys: list[Any]
    values: list[Any]


@dataclass(frozen=True)
class _Layout:
    """Where rows lie whose tokens follow each other; keys may be more than queries, by those of a prefix."""

    starts: Any
    key_starts: Any
    longest: int
    longest_keys: int
    spans: list[tuple[tuple[int, int], tuple[int, int]]]
    """The range of each row's queries, and that of its keys."""

    @classmethod
    def of(cls, lengths: Sequence[int], before: int, device: Any) -> _Layout:
        starts = list(accumulate(lengths, initial=0))
        key_starts = list(accumulate((length + before for length in lengths), initial=0))
        on_device, keys_on_device = (
            torch.tensor(each, dtype=torch.int32, device=device) for each in (starts, key_starts)
        )
        spans = list(zip(pairwise(starts), pairwise(key_starts), strict=True))
        return cls(on_device, keys_on_device, max(lengths), max(lengths) + before, spans)


class Slots:
    """A number of slots, each for a row of at most ``length`` tokens."""

    def __init__(self, decoder: Decoder, count: int, length: int, *, is_recorded: bool, is_free: bool) -> None:
        """Allocate the slots.

        Args:
            decoder: the model.
            count: how many slots there are.
            length: how many tokens a row may have, at least.
            is_recorded: whether steps are played back from CUDA graphs; else each of their kernels is launched.
            is_free: whether torch's attention for rows of different lengths reads prompts.
        """
        shape, device = decoder.shape, decoder.device
        self.count = count
        self.length = -(-length // ROUND) * ROUND
        self._decoder = decoder
        sizes = (count, shape.kv_heads, self.length, shape.head_size)
        self._keys, self._values = (
            [torch.zeros(sizes, dtype=decoder.dtype, device=device) for _ in range(shape.layers)] for _ in range(2)
        )
        self._tokens, self._positions = (torch.zeros(count, dtype=torch.int64, device=device) for _ in range(2))
        self._scores: Any = torch.zeros((count, shape.vocabulary), dtype=decoder.dtype, device=device)
        self._seen: Any = None
        """Which tokens each row has, once a row needs that."""
        self._history: Any = torch.zeros((EVERY, count), dtype=torch.int64, device=device)
        self._line = torch.zeros(1, dtype=torch.int64, device=device)
        """The line of the history that the next step writes."""
        self._numbers = torch.arange(count, device=device)
        self._places = torch.arange(self.length, device=device)
        self._attend_rows = attend_without_padding if is_free else attend_row_by_row
        self._graphs: dict[int, Any] = {}
        self._end_graph: Any = None
        if is_recorded:
            self._record()

    @property
    def nbytes(self) -> int:
        """The bytes of keys, values and scores."""
        return sum(each.nbytes for each in (*self._keys, *self._values)) + self._scores.nbytes

    def free(self) -> None:
        """Give the memory back; the slots can't be used any more."""
        self._graphs.clear()
        self._end_graph = None
        self._keys.clear()
        self._values.clear()
        self._scores = self._history = self._seen = None

    def prefix_of(self, ids: Ids) -> Prefix:
        """Compute the keys and values of tokens with which several rows begin."""
        keys: list[Any] = []
        values: list[Any] = []
        layout = _Layout.of([len(ids)], 0, self._decoder.device)

        def attend(number: int, queries: Any, new_keys: Any, new_values: Any) -> Any:
            keys.append(new_keys.clone())
            values.append(new_values.clone())
            return self._attend_rows(queries, new_keys, new_values, layout)

        self._decoder.states(self._moved(ids), torch.arange(len(ids), device=self._decoder.device), attend)
        return Prefix(ids, keys, values)

    def read(self, rows: Sequence[Ids], slots: Sequence[int], prefix: Prefix | None = None) -> Any:
        """Compute the keys and values of prompts into slots, and return the scores of their first new tokens.

        All rows begin with the prefix, if there is one, and have at least one more token.
        """
        device, before = self._decoder.device, 0 if prefix is None else len(prefix.ids)
        lengths = [len(row) - before for row in rows]
        layout = _Layout.of(lengths, before, device)
        ids = self._moved(np.concatenate([row[before:] for row in rows]))
        positions = self._moved(np.concatenate([np.arange(before, len(row)) for row in rows]))
        owners = self._moved(np.repeat(np.asarray(slots), lengths))
        chosen = self._moved(np.asarray(slots))
        gathered = None if prefix is None else self._moved(_keys_of_rows(lengths, before))

        def attend(number: int, queries: Any, keys: Any, values: Any) -> Any:
            both: list[Any] = []
            for new, kept, old in (
                (keys, self._keys[number], prefix and prefix.keys[number]),
                (values, self._values[number], prefix and prefix.values[number]),
            ):
                _wide(kept)[owners, :, positions] = _wide(new)
                if old is not None:
                    _wide(kept)[:, :, :before][chosen] = _wide(old).transpose(0, 1)
                    new = functional.embedding(gathered, torch.cat((old, new)).flatten(1)).unflatten(1, old.shape[1:])
                both.append(new)
            return self._attend_rows(queries, both[0], both[1], layout)

        states = self._decoder.states(ids, positions, attend)
        return self._decoder.scores(states[layout.starts[1:].long() - 1])

    def start(self, slots: Sequence[int], tokens: Any, lengths: Sequence[int]) -> None:
        """Let rows go on from their first new tokens; ``lengths`` are those of their prompts."""
        chosen = self._moved(np.asarray(slots))
        self._tokens[chosen] = tokens
        self._positions[chosen] = self._moved(np.asarray(lengths))

    def forget(self, slot: int, ids: Ids) -> None:
        """Remember of a new row only the tokens of its prompt."""
        if self._seen is None:
            self._seen = torch.zeros(self._scores.shape, dtype=torch.bool, device=self._decoder.device)
        self._seen[slot] = False
        self._seen[slot, self._moved(ids)] = True

    def remember(self, slots: Sequence[int]) -> None:
        """Remember the last tokens of these rows."""
        chosen = self._moved(np.asarray(slots))
        self._seen[chosen, self._tokens[chosen]] = True

    def penalise(self, scores: Any, lines: Sequence[int], penalties: Mapping[int, float]) -> None:
        """Make tokens less likely that rows have already; ``lines`` are those of the slots' scores."""
        chosen, places = (self._moved(np.asarray(each)) for each in (list(penalties), lines))
        factors = torch.tensor(list(penalties.values()), dtype=torch.float32, device=scores.device)[:, None]
        found = scores[places].float()
        lower = torch.where(found < 0, found * factors, found / factors)
        scores[places] = torch.where(self._seen[chosen], lower, found).to(scores.dtype)

    def steps(
        self,
        count: int,
        longest: int,
        used: int,
        sampled: Sampled | None = None,
        masks: tuple[Sequence[int], npt.NDArray[np.int32]] | None = None,
        penalties: Mapping[int, float] | None = None,
    ) -> Any:
        """Take some steps and return their tokens: a line for each step, a column for each slot.

        The tokens are on the device, where the steps may still be under way; the next call overwrites them.

        Args:
            count: how many steps, at most ``EVERY``.
            longest: the tokens of the longest row before the first step.
            used: how many slots, from the first on, may hold rows.
            sampled: the rows whose tokens are drawn.
            masks: slots with the bits of the tokens that they may have, for one step.
            penalties: slots whose rows write tokens less likely that they have already, and by how much.
        """
        longest = min(longest + count, self.length)
        used = self.count if self._graphs else used
        self._line.zero_()
        for step in range(count):
            if self._graphs:
                self._graphs[min(each for each in self._graphs if each >= longest)].replay()
            else:
                self._forward(longest, used)
            if penalties:
                self.penalise(self._scores, list(penalties), penalties)
            if masks is not None:
                allow_only(self._scores, *masks)
            if self._end_graph is not None and sampled is None:
                self._end_graph.replay()
            else:
                self._take(choose(self._scores[:used], sampled, step), used)
            if penalties:
                self.remember(list(penalties))
        return self._history[:count]

    def _forward(self, upto: int, used: int) -> None:
        """Compute the scores of the next tokens, with the first ``upto`` places of each slot."""
        positions, numbers = self._positions[:used], self._numbers[:used]
        shape = self._decoder.shape
        group = shape.heads // shape.kv_heads
        is_hidden = self._places[:upto] > positions[:, None]
        mask = torch.zeros(is_hidden.shape, dtype=self._decoder.dtype, device=is_hidden.device)
        mask = mask.masked_fill(is_hidden, -torch.inf)[:, None, None]

        def attend(number: int, queries: Any, keys: Any, values: Any) -> Any:
            kept_keys, kept_values = self._keys[number][:used], self._values[number][:used]
            kept_keys[numbers, :, positions] = keys
            kept_values[numbers, :, positions] = values
            # The heads of a group take the place of several queries, so that keys are read once for all of them.
            grouped = queries.view(used, shape.kv_heads, group, shape.head_size)
            kept = kept_keys[:, :, :upto], kept_values[:, :, :upto]
            return functional.scaled_dot_product_attention(grouped, *kept, attn_mask=mask)

        self._decoder.scores(self._decoder.states(self._tokens[:used], positions, attend), out=self._scores[:used])

    def _take(self, chosen: Any, used: int) -> None:
        """Go on with these tokens."""
        self._tokens[:used].copy_(chosen)
        self._positions[:used].add_(1).clamp_(max=self.length - 1)
        self._history[:, :used].index_copy_(0, self._line, chosen[None])
        self._line.add_(1).remainder_(EVERY)

    def _record(self) -> None:
        """Record a step for each length of context, and what follows it for rows whose tokens are not drawn."""
        pool: Any = None
        for upto in sorted({*(each for each in _LENGTHS if each < self.length), self.length}, reverse=True):
            self._graphs[upto] = graph = self._recorded(lambda upto=upto: self._forward(upto, self.count), pool)
            pool = graph.pool()
        self._end_graph = self._recorded(lambda: self._take(choose(self._scores), self.count), pool)

    def _recorded(self, function: Any, pool: Any) -> Any:
        for _ in range(2):  # libraries prepare themselves during the first calls, which can't be recorded
            function()
        torch.cuda.synchronize(self._decoder.device)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile: only what this one does must not go wrong.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            function()
        return graph

    def _moved(self, values: npt.NDArray[Any]) -> Any:
        return torch.from_numpy(np.ascontiguousarray(values, np.int64)).to(self._decoder.device, non_blocking=True)


def _wide(tensor: Any) -> Any:
    """Return the same memory as fewer and larger numbers, if it can be: to scatter them takes time for each number."""
    bytes_of_last = tensor.shape[-1] * tensor.element_size()
    return tensor if bytes_of_last % _WIDEST else tensor.view(torch.complex128)


def _keys_of_rows(lengths: Sequence[int], before: int) -> npt.NDArray[np.int64]:
    """Return the place of each row's keys, if those of the prefix come first and all other tokens follow.

    >>> _keys_of_rows([1, 2], 2).tolist()
    [0, 1, 2, 0, 1, 3, 4]
    """
    first = np.arange(before)
    starts = list(accumulate(lengths, initial=before))
    return np.concatenate([part for start, end in pairwise(starts) for part in (first, np.arange(start, end))])
