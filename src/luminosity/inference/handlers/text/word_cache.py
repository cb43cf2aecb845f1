"""Tokenises by looking words up in a cache: most words of a text were seen before."""

from __future__ import annotations

import json
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, count, islice
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["WordCache"]


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
