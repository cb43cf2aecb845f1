"""A step without a model: a function of a whole table's part."""

from __future__ import annotations

import html
import re
from typing import Any

import pyarrow as pa

RecordBatch = Any  # pyarrow's: it has no types to name

_TAG = re.compile(r"<[^>]*>")  # nearly all are line breaks: <br />


def clean(reviews: RecordBatch) -> RecordBatch:
    """Text without tags, with entities as the characters they stand for, and with single spaces.

    >>> clean(pa.record_batch({"text": ["Great!<br /><br />Tom &amp; Jerry  at their best"]}))["text"].to_pylist()
    ['Great! Tom & Jerry at their best']
    """
    texts = [clean_text(text) for text in reviews["text"].to_pylist()]
    place = reviews.schema.get_field_index("text")
    return reviews.set_column(place, "text", pa.array(texts, pa.string()))


def clean_text(text: str) -> str:
    return " ".join(html.unescape(_TAG.sub(" ", text)).split())
