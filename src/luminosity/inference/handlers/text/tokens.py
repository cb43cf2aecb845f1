"""Turns texts into token ids, as Arrow arrays: no Python object per token, and no padding before the batch is known."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Hashable, Iterable, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from luminosity.core import WorkerShare
from luminosity.errors import InvalidArgument, InvalidType
from luminosity.extras import require
from luminosity.inference.blocks import Block, rows
from luminosity.inference.handlers.padding import few_lengths, pad_rows
from luminosity.inference.handlers.text.plain_tokenizer import rules_of
from luminosity.inference.handlers.text.word_cache import WordCache

__all__ = [
    "Lists",
    "Tokenizer",
    "flat_values",
    "is_same_tokenizer",
    "list_array",
    "offsets_of",
    "pad_tokens",
    "texts_of",
    "token_counts",
]

Lists: TypeAlias = Any
"""An Arrow ``ListArray``; pyarrow has no type that could be named here."""

_INT32 = np.dtype(np.int32)


def is_same_tokenizer(one: Any, other: Any) -> bool:
    """Return whether two tokenizers of transformers make the same ids of every text."""
    if one.is_fast and other.is_fast:
        return rules_of(one.backend_tokenizer) == rules_of(other.backend_tokenizer)
    return type(one) is type(other) and one.get_vocab() == other.get_vocab()


class Tokenizer:
    """A tokenizer that cuts texts at ``limit`` tokens and never pads.

    ``whole`` is the tokenizer of transformers, or a :class:`PlainTokenizer` that stands for it.
    """

    def __init__(self, tokenizer: Any, limit: int | None, cut: str = "right") -> None:
        # Workers with one core each would only compete with the tokenizer's own threads.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true" if WorkerShare.current().cores >= 2 else "false")
        self.whole = tokenizer
        self.limit = limit
        self._cut = cut
        self._fast: Any = tokenizer.backend_tokenizer if tokenizer.is_fast else None
        if self._fast is None:
            tokenizer.truncation_side = cut
            return
        self._fast.no_padding()
        self._fast.no_truncation()
        if limit is not None:
            self._fast.enable_truncation(limit, direction=cut)

    def ids(self, texts: Sequence[str], special: bool = True) -> Lists:
        """Return the token ids of each text."""
        if self._fast is None:
            cut = {"truncation": True, "max_length": self.limit} if self.limit is not None else {}
            return self._never_empty(self.whole(list(texts), add_special_tokens=special, **cut)["input_ids"])
        if special and self._words is not None:
            values, counts = self._words.ids(texts)
            return pa.ListArray.from_arrays(pa.array(offsets_of(counts, len(counts))), pa.array(values))
        # Call the backend directly: the tokenizer around it spends a third of the time on masks and dicts.
        encodings = self._fast.encode_batch_fast(texts, add_special_tokens=special)
        return self._never_empty([encoding.ids for encoding in encodings])

    @cached_property
    def _words(self) -> WordCache | None:
        return WordCache.of(self._fast, self.limit, self._cut)

    @property
    def rules(self) -> Hashable | None:
        """Equal for tokenizers that make the same ids of every text; None if the rules are not known."""
        if self._fast is None:
            return None
        digest = hashlib.sha256(json.dumps(rules_of(self._fast), sort_keys=True).encode()).hexdigest()
        return digest, self.limit, self._cut, self._beginning

    def lower_case(self) -> None:
        """Convert texts to lower case before they are tokenised. Call it before the first text."""
        normalizers = require("tokenizers.normalizers", "transformers")
        if self._fast is None:
            raise InvalidArgument(
                f"found {type(self.whole).__name__}, expected a fast tokenizer, which can convert to lower case"
            )
        after = [self._fast.normalizer] if self._fast.normalizer is not None else []
        self._fast.normalizer = normalizers.Sequence([normalizers.Lowercase(), *after])

    def encodings(self, texts: Sequence[str]) -> list[Any]:
        """Return the ids, character offsets, words and special tokens of each text."""
        if self._fast is None:
            raise InvalidArgument(
                f"found {type(self.whole).__name__}, expected a fast tokenizer, which knows character offsets"
            )
        return self._fast.encode_batch(texts)

    def _never_empty(self, lists: list[list[int]]) -> Lists:
        """Give a text without tokens the token that starts a text: models can't take an empty one."""
        if not all(lists):
            lists = [ids or [self._beginning] for ids in lists]
        return list_array(lists, _INT32)

    @property
    def _beginning(self) -> int:
        whole = self.whole
        candidates = (whole.bos_token_id, whole.cls_token_id, whole.eos_token_id, whole.pad_token_id, 0)
        return next(token for token in candidates if token is not None)


def texts_of(block: Block, expected: str = "str") -> list[str]:
    """Return the block as a list of str. Raises ``InvalidType`` for anything else."""
    texts = block if isinstance(block, list) else list(rows(block))
    for kind in set(map(type, texts)):
        if not issubclass(kind, str):
            raise InvalidType(
                f"found an example of type {kind.__name__}, expected {expected}",
                fix="convert elements to texts with beam.Map, or a table's column with MapTable",
            )
    return texts


def list_array(lists: Sequence[Sequence[Any]], dtype: np.dtype[Any]) -> Lists:
    """Return lists of numbers as an Arrow array of lists.

    >>> list_array([[1, 2], [3]], np.dtype(np.int32)).to_pylist()
    [[1, 2], [3]]
    """
    offsets = offsets_of(map(len, lists), len(lists))
    values = np.fromiter(chain.from_iterable(lists), dtype, int(offsets[-1]))
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


def offsets_of(lengths: Iterable[int], count: int) -> npt.NDArray[np.int32]:
    """Return the offsets of an Arrow array of ``count`` lists with these lengths."""
    offsets = np.zeros(count + 1, np.int32)
    np.cumsum(np.fromiter(lengths, np.int32, count), out=offsets[1:])
    return offsets


def token_counts(tokens: Lists) -> npt.NDArray[np.int32]:
    """Return the number of tokens of each text.

    >>> token_counts(pa.array([[1, 2], [3]], pa.list_(pa.int32())))
    array([2, 1], dtype=int32)
    """
    return np.diff(tokens.offsets.to_numpy())


def flat_values(lists: Lists) -> npt.NDArray[Any]:
    """Return the values of all lists in one array, without values that a slice has left out."""
    return lists.flatten().to_numpy(zero_copy_only=False)


def pad_tokens(
    tokens: Lists, pad_id: int, side: str = "right", few: bool = False, limit: int | None = None
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
    """Return the ids as one matrix, and a mask that is true for tokens.

    >>> ids, mask = pad_tokens(pa.array([[1, 2], [3]], pa.list_(pa.int32())), 0)
    >>> ids.tolist(), mask.tolist()
    ([[1, 2], [3, 0]], [[True, True], [True, False]])
    """
    counts = token_counts(tokens)
    width = int(counts.max())
    if few:
        width = max(width, min(few_lengths(width), limit or few_lengths(width)))
    return pad_rows(flat_values(tokens).astype(np.int32, copy=False), counts, width, pad_id, side)
