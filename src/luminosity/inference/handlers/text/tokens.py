"""Turns texts into token ids, as Arrow arrays: no Python object per token, no padding before the batch is known.

Most words of a text were seen before, so a cache of words saves most of the tokenizer's work.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain, count, islice
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from luminosity.core import WorkerShare
from luminosity.errors import InvalidArgument, InvalidType
from luminosity.extras import require
from luminosity.inference.blocks import Block, rows
from luminosity.inference.handlers.padding import few_lengths, pad_rows
from luminosity.inference.handlers.text.plain.tokenizer import rules_of

__all__ = [
    "Lists",
    "Tokenizer",
    "WordCache",
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
            return _lists(offsets_of(counts, len(counts)), values)
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
        return list_array(lists, np.dtype(np.int32))

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
    return _lists(offsets, values)


def _lists(*arrays: npt.NDArray[Any]) -> Lists:
    """Return an Arrow array of lists, by offsets and values. ``pa.array`` imports pandas, if it is there."""
    kept = (pa.Array.from_buffers(pa.from_numpy_dtype(a.dtype), len(a), [None, pa.py_buffer(a)]) for a in arrays)
    return pa.ListArray.from_arrays(*kept)


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


_DOUBTFUL = "\x0b\x0c\x1c\x1d\x1e\x1f\x85"
"""White space to Python, but not always to the tokenizer, which may remove it and join the text around it."""
_WORD_OR_MARK = re.compile("[A-Za-z0-9]+|.")
_MOST_STRINGS = 200_000  # in a table; with their ids a few tens of MB
_MOST_CHARACTERS = 8_000_000  # of all strings in a table, in case they are long
TokenLists: TypeAlias = tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]
"""The ids of all lists in one array, and the number of ids of each list."""


class WordCache:
    """Caches token ids for tokenizers that split at white space and treat each piece by itself.

    The ids are exactly those of the tokenizer. A new piece is split at its punctuation, and only new words go to the
    tokenizer. Any thread may call ``ids``; a lock protects the cache.
    """

    def __init__(self, backend: Any, before: list[int], after: list[int], room: int | None, added: list[str]) -> None:
        self._backend = backend
        self._before = before
        self._after = after
        self._room = room
        """The number of tokens of a text that are kept, without special tokens; None for all."""
        self._has_added = re.compile("|".join(map(re.escape, added)) or "(?!)", re.IGNORECASE).search
        self._lock = threading.Lock()
        self._words = IdTable(self._tokenize)
        self._pieces = IdTable(lambda pieces: self._words.look_up([self._split_piece(piece) for piece in pieces]))

    @classmethod
    def of(cls, backend: Any, limit: int | None, cut: str) -> WordCache | None:
        """Return a cache for a tokenizer, or None if it may look across white space or cuts texts at their start."""
        recipe = json.loads(backend.to_str())
        if cut != "right" or not _treats_pieces_alone(recipe):
            return None
        framed = backend.encode("a").ids
        inner = backend.encode("a", add_special_tokens=False).ids
        room = None if limit is None else limit - len(framed) + len(inner)
        if len(inner) != 1 or framed.count(inner[0]) != 1 or len(framed) == 1 or (room is not None and room < 1):
            return None
        place = framed.index(inner[0])
        return cls(backend, framed[:place], framed[place + 1 :], room, _added_tokens(recipe))

    def ids(self, texts: Sequence[str]) -> TokenLists:
        """Return the ids of each text, including special tokens."""
        together = "".join(texts)
        doubtful = [each for each in _DOUBTFUL if each in together]
        pieces = [self._split(text, doubtful) for text in texts]
        with self._lock:
            ids, counts = self._pieces.look_up(pieces)
        if self._room is not None and counts.size and counts.max() > self._room:
            places = np.arange(len(ids)) - np.repeat(np.cumsum(counts) - counts, counts)
            ids, counts = ids[places < self._room], np.minimum(counts, self._room)
        return self._framed(ids, counts)

    def _split(self, text: str, doubtful: list[str]) -> list[str]:
        if any(each in text for each in doubtful):
            return [text]
        if self._room is None:
            return text.split()
        pieces = text.split(None, self._room)
        if len(pieces) <= self._room:
            return pieces
        pieces.pop()  # the rest of the text, which is cut off if each piece before it has at least one token
        kept = "".join(pieces)
        return pieces if kept.isascii() and kept.isprintable() else text.split()

    def _split_piece(self, piece: str) -> list[str]:
        if not (piece.isascii() and piece.isprintable()) or self._has_added(piece):
            return [piece]
        return _WORD_OR_MARK.findall(piece)

    def _tokenize(self, words: list[str]) -> TokenLists:
        found = [encoding.ids for encoding in self._backend.encode_batch_fast(words, add_special_tokens=False)]
        lengths = np.fromiter(map(len, found), np.int64, len(found))
        return np.fromiter(chain.from_iterable(found), np.int32, int(lengths.sum())), lengths

    def _framed(self, ids: Any, counts: Any) -> TokenLists:
        counts = counts + len(self._before) + len(self._after)
        ends = np.cumsum(counts)
        framed = np.empty(int(counts.sum()), np.int32)
        is_text = np.ones(len(framed), np.bool_)
        for place, token in enumerate(self._before):
            framed[ends - counts + place], is_text[ends - counts + place] = token, False
        for place, token in enumerate(reversed(self._after), 1):
            framed[ends - place], is_text[ends - place] = token, False
        framed[is_text] = ids
        return framed, counts


def _treats_pieces_alone(recipe: Mapping[str, Any]) -> bool:
    """Return whether a tokenizer works like BERT's: nothing that it does looks across white space."""
    normalizer = recipe["normalizer"] or {}
    normalizers = normalizer["normalizers"] if normalizer.get("type") == "Sequence" else [normalizer]
    return (
        {each.get("type") for each in normalizers} <= {"BertNormalizer", "Lowercase"}
        and (recipe["pre_tokenizer"] or {}).get("type") == "BertPreTokenizer"
        and recipe["model"].get("type") == "WordPiece"
        and (recipe["post_processor"] or {}).get("type") in ("TemplateProcessing", "BertProcessing")
        # Other added tokens may contain white space, or get some when they are normalised.
        and all(token.isascii() and token.isprintable() and " " not in token for token in _added_tokens(recipe))
    )


def _added_tokens(recipe: Mapping[str, Any]) -> list[str]:
    return [token["content"] for token in recipe["added_tokens"]]


class IdTable:
    """Maps strings to their token ids.

    Strings are numbered as they come, and all new ones are learned in one call, so that no Python code runs per token.
    A full table is cleared.

    >>> table = IdTable(lambda new: (np.array([len(each) for each in new], np.int32), np.ones(len(new), np.int64)))
    >>> ids, counts = table.look_up([["one", "three"], [], ["one"]])
    >>> ids.tolist(), counts.tolist()
    ([3, 5, 3], [2, 0, 1])
    """

    def __init__(self, learn: Callable[[list[str]], TokenLists]) -> None:
        self._learn = learn
        self._clear()

    def look_up(self, lists: Sequence[Sequence[str]]) -> TokenLists:
        """Return the joined ids of the strings of each list."""
        if len(self._numbers) > _MOST_STRINGS or self._characters > _MOST_CHARACTERS:
            self._clear()
        sizes = np.fromiter(map(len, lists), np.int64, len(lists))
        try:
            strings = chain.from_iterable(lists)
            numbers = np.fromiter(map(self._numbers.__getitem__, strings), np.int64, int(sizes.sum()))
            self._add_new()
        except BaseException:
            self._clear()  # some strings have numbers, but no ids yet
            raise
        lengths = self._lengths[numbers]
        ends = np.cumsum(lengths)
        places = np.repeat(self._starts[numbers] - ends + lengths, lengths)
        places += np.arange(len(places))
        list_ends = np.concatenate([[0], ends])[np.cumsum(sizes)]
        return self._ids[places], np.diff(list_ends, prepend=0)

    def _add_new(self) -> None:
        new = len(self._numbers) - len(self._lengths)
        if not new:
            return
        strings = list(islice(reversed(self._numbers), new))[::-1]
        ids, lengths = self._learn(strings)
        self._starts = np.concatenate([self._starts, len(self._ids) + np.cumsum(lengths) - lengths])
        self._lengths = np.concatenate([self._lengths, lengths])
        self._ids = np.concatenate([self._ids, ids])
        self._characters += sum(map(len, strings))

    def _clear(self) -> None:
        self._numbers: dict[str, int] = defaultdict(count().__next__)
        self._characters = 0
        self._ids: npt.NDArray[Any] = np.empty(0, np.int32)
        self._starts = np.empty(0, np.int64)
        self._lengths = np.empty(0, np.int64)
