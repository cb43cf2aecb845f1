"""From scores of tokens to entities: all tokens of a batch at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["STRATEGIES", "Entities", "entities_of", "words_of"]

STRATEGIES = ("none", "simple", "first", "max", "average")

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Entities:
    """Stretches of texts, one per place in each array, text by text and from left to right."""

    text: Ints
    """The number of the text it is in."""
    start: Ints
    end: Ints
    label: Ints
    score: Floats

    def where(self, chosen: npt.NDArray[np.bool_]) -> Entities:
        return Entities(self.text[chosen], self.start[chosen], self.end[chosen], self.label[chosen], self.score[chosen])


def words_of(text: Ints, start: Ints, end: Ints, goes_on: npt.NDArray[np.bool_], scores: Floats, how: str) -> Entities:
    """Tokens with their best labels; all but "none" and "simple" agree on one label for the tokens of a word.

    `goes_on` is true for a token that continues the word of the token before it.
    """
    if how in ("none", "simple") or not len(text):
        return Entities(text, start, end, scores.argmax(axis=1), scores.max(axis=1, initial=0))
    first = np.flatnonzero(~goes_on | _changes(text))
    last = np.append(first[1:], len(text)) - 1
    if how == "average":
        scores = np.add.reduceat(scores, first, axis=0) / (last - first + 1)[:, np.newaxis]
    else:
        scores = scores[first if how == "first" else _best_token(scores, first, last)]
    return Entities(text[first], start[first], end[last], scores.argmax(axis=1), scores.max(axis=1))


def entities_of(words: Entities, labels: Sequence[str]) -> tuple[Entities, list[str]]:
    """Neighbours of one kind joined, unless a label's B- says that one begins; and the kinds' names."""
    kinds = sorted({_kind(label) for label in labels})
    kind_of = np.array([kinds.index(_kind(label)) for label in labels])
    begins = np.array([label.startswith("B-") for label in labels])
    if not len(words.text):
        return words, kinds
    kind = kind_of[words.label]
    first = np.flatnonzero(_changes(words.text) | _changes(kind) | begins[words.label])
    last = np.append(first[1:], len(kind)) - 1
    score = np.add.reduceat(words.score, first) / (last - first + 1)
    return Entities(words.text[first], words.start[first], words.end[last], kind[first], score), kinds


def _kind(label: str) -> str:
    """
    >>> _kind("B-PER"), _kind("I-PER"), _kind("O")
    ('PER', 'PER', 'O')
    """
    return label[2:] if label.startswith(("B-", "I-")) else label


def _changes(values: Ints) -> npt.NDArray[np.bool_]:
    """Where a value differs from the one before it; the first one does.

    >>> _changes(np.array([1, 1, 2]))
    array([ True, False,  True])
    """
    return np.concatenate([[True], values[1:] != values[:-1]])


def _best_token(scores: Floats, first: Ints, last: Ints) -> Ints:
    """Of each word, the token whose best score is the greatest, the earlier one if equal."""
    word = np.repeat(np.arange(len(first)), last - first + 1)
    order = np.lexsort((np.arange(len(scores)), -scores.max(axis=1), word))
    return order[first]
