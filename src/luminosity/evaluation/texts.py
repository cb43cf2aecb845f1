"""How much a text is like the expected one: matches, similarity of characters, and ROUGE, for each row.

Every function is of one pair of texts, so the result does not depend on how rows are distributed. rapidfuzz computes
what is slow in Python: the similarity of characters and the longest common subsequences of ROUGE-L.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from luminosity import extras
from luminosity.errors import EvaluationError
from luminosity.evaluation.columns import is_text

__all__ = [
    "SHARES",
    "TEXT_METRICS",
    "check_library",
    "normalised",
    "rouge_n",
    "text_metrics",
    "texts_of",
]

TEXT_METRICS = ("exact_match", "normalised_match", "similarity", "rouge1", "rouge2", "rougeL")
SHARES = ("exact_match", "normalised_match")  # means of 0 and 1
_EXTRA = "evaluation"
_APOSTROPHES = re.compile("['\u2018\u2019\u02bc]")
# A sign or a mark directly before a digit belongs to the number: -5 is not 5, and 3.5 is not 35.
_NUMBER_MARKS = re.compile(r"[-.,:/]\d")


def check_library() -> None:
    """Raise an error that says how to install rapidfuzz if it is not there."""
    extras.check("rapidfuzz", _EXTRA)


def normalised(text: str) -> str:
    """Return a text in which only words and numbers are left, in one case, with a space between them.

    The text is brought into Unicode's form NFKC and case-folded. Apostrophes are removed; every other punctuation mark
    (Unicode's categories P) becomes a space, except ``%``, and ``-``, ``.``, ``,``, ``:`` and ``/`` directly before a
    digit. White space becomes one space, and none at both ends.

    >>> normalised("  The film-maker's LAST word: “Yes!”"), normalised("about -3.5 %, or 1,000")
    ('the film makers last word yes', 'about -3.5 % or 1,000')
    """
    text = _APOSTROPHES.sub("", unicodedata.normalize("NFKC", text).casefold())
    if text.isalnum():
        return text
    kept = {match.start() for match in _NUMBER_MARKS.finditer(text)}
    marks = (
        " " if unicodedata.category(each)[0] == "P" and each != "%" and at not in kept else each
        for at, each in enumerate(text)
    )
    return " ".join("".join(marks).split())


def rouge_n(expected: Sequence[str], found: Sequence[str], n: int) -> float | None:
    """Return the F1 of the sequences of ``n`` words that two texts share; None if the expected text has none.

    >>> rouge_n("the cat sat on the mat".split(), "the cat lay on the mat".split(), 2)
    0.6
    >>> rouge_n(["yes"], ["yes"], 2) is None
    True
    """
    wanted, there = (Counter(zip(*(words[at:] for at in range(n)), strict=False)) for words in (expected, found))
    in_all = wanted.total()
    return 2 * (wanted & there).total() / (in_all + there.total()) if in_all else None


def _rouge_l(expected: Sequence[str], found: Sequence[str], common: Any) -> float | None:
    """Return the F1 of the longest common subsequence of words; None if the expected text has no words."""
    return 2 * common(expected, found) / (len(expected) + len(found)) if expected else None


def text_metrics(expected: Sequence[str], found: Sequence[str]) -> tuple[Any, Any]:
    """Return a row of ``TEXT_METRICS`` for each pair of texts, and a mask of those that are not defined (and 0).

    >>> values, is_missing = text_metrics(["A cat.", "two words"], ["a cat", "two"])
    >>> values.round(2).tolist()
    [[0.0, 1.0, 0.73, 1.0, 1.0, 1.0], [0.0, 0.0, 0.5, 0.67, 0.0, 0.67]]
    """
    fuzz: Any = extras.require("rapidfuzz.fuzz", _EXTRA)
    common: Any = extras.require("rapidfuzz.distance.LCSseq", _EXTRA).similarity
    values = np.full((len(expected), len(TEXT_METRICS)), np.nan)
    for at, (wanted, text) in enumerate(zip(expected, found, strict=True)):
        plain, other = normalised(wanted), normalised(text)
        words, others = plain.split(), other.split()
        rouge = rouge_n(words, others, 1), rouge_n(words, others, 2), _rouge_l(words, others, common)
        values[at] = [wanted == text, plain == other, fuzz.ratio(wanted, text) / 100] + [
            np.nan if each is None else each for each in rouge
        ]
    is_missing = np.isnan(values)
    return np.where(is_missing, 0.0, values), is_missing


def texts_of(column: Any, name: str) -> tuple[list[str], Any]:
    """Return the texts of a column, and a mask of those that are null (and empty here)."""
    if not (is_text(column.type) or pa.types.is_null(column.type)):
        raise EvaluationError(f"the column {name!r} holds {column.type}, expected texts", fix="cast it to texts")
    is_missing = column.is_null().to_numpy(zero_copy_only=False)
    return [each or "" for each in column.to_pylist()], is_missing
