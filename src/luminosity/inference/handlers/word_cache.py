"""Tokenising by looking words up: most words of a text were seen before."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from luminosity.inference.handlers.id_table import IdTable, TokenLists

__all__ = ["WordCache"]

_DOUBTFUL = "\x0b\x0c\x1c\x1d\x1e\x1f\x85"
"""White space to Python, but not always to the tokenizer, which may take it out and join what is around it."""
_WORD_OR_MARK = re.compile("[A-Za-z0-9]+|.")


class WordCache:
    """For tokenizers that split at white space and then treat each piece by itself; the ids are exactly theirs.

    A piece that is new is split at its punctuation, and only words that are new go to the tokenizer.
    """

    def __init__(self, backend: Any, before: list[int], after: list[int], room: int | None, added: list[str]) -> None:
        self._backend = backend
        self._before = before
        self._after = after
        self._room = room
        """How many tokens of a text itself are kept."""
        self._has_added = re.compile("|".join(map(re.escape, added)) or "(?!)", re.IGNORECASE).search
        self._lock = threading.Lock()
        self._words = IdTable(self._tokenize)
        self._pieces = IdTable(lambda pieces: self._words.look_up([self._split_piece(piece) for piece in pieces]))

    @classmethod
    def of(cls, backend: Any, limit: int | None, cut: str) -> WordCache | None:
        """None for a tokenizer that is not known to treat pieces by themselves, or that cuts texts at their front."""
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
        """The ids of each text, special tokens included."""
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
        pieces.pop()  # The rest of the text; it is cut off, where each piece before it has a token at least.
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
    """Whether this is BERT's way: nothing that it does looks across white space."""
    normalizer = recipe["normalizer"] or {}
    normalizers = normalizer["normalizers"] if normalizer.get("type") == "Sequence" else [normalizer]
    return (
        {each.get("type") for each in normalizers} <= {"BertNormalizer", "Lowercase"}
        and (recipe["pre_tokenizer"] or {}).get("type") == "BertPreTokenizer"
        and recipe["model"].get("type") == "WordPiece"
        and (recipe["post_processor"] or {}).get("type") in ("TemplateProcessing", "BertProcessing")
        # Others may hold white space, or get some when they are normalised.
        and all(token.isascii() and token.isprintable() and " " not in token for token in _added_tokens(recipe))
    )


def _added_tokens(recipe: Mapping[str, Any]) -> list[str]:
    return [token["content"] for token in recipe["added_tokens"]]
