"""A step without a model: a function that takes a record batch."""

from __future__ import annotations

import html
import re
from typing import Any

import pyarrow as pa

RecordBatch = Any  # a pyarrow.RecordBatch; pyarrow has no type annotations

_TAG = re.compile(r"<[^>]*>")  # Nearly all tags are line breaks: <br />.


def clean(reviews: RecordBatch) -> RecordBatch:
    """Return the reviews with clean text: no tags, entities replaced by characters, single spaces.

    >>> clean(pa.record_batch({"text": ["Great!<br /><br />Tom &amp; Jerry  at their best"]}))["text"].to_pylist()
    ['Great! Tom & Jerry at their best']
    """
    texts = [clean_text(text) for text in reviews["text"].to_pylist()]
    place = reviews.schema.get_field_index("text")
    return reviews.set_column(place, "text", pa.array(texts, pa.string()))


def clean_text(text: str) -> str:
    """Return one text without tags, entities and repeated spaces."""
    return " ".join(html.unescape(_TAG.sub(" ", text)).split())
