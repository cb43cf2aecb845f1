"""Models that need no weights: an embedder that counts words, and generators that write what a test says."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from luminosity import Handler
from luminosity.io.stores.address import StoreAddress
from luminosity.io.stores.kinds import open_store
from luminosity.io.stores.points import Point, point_id
from luminosity.tables.map_table import _row_id

SIZE = 64

REVIEWS = [
    {"text": "The kettle is loud. It wakes the whole house.", "product": "kettle", "rating": 2, "language": "en"},
    {"text": "A quiet kettle with a nice colour.", "product": "kettle", "rating": 5, "language": "en"},
    {"text": "The lid of the kettle leaks.", "product": "kettle", "rating": 1, "language": "en"},
    {"text": "This toaster burns everything.", "product": "toaster", "rating": 1, "language": "en"},
    {"text": "Der Toaster ist toll.", "product": "toaster", "rating": 5, "language": "de"},
]


class WordCounts(Handler[str, Any, None]):
    """A vector with a place for each word."""

    def load_model(self) -> None:
        return None

    def predict(self, model: None, batch: list[str], inference_args: dict[str, Any] | None = None) -> Any:
        return [vector_of(text) for text in batch]


class Scripted(Handler[Any, Any, None]):
    """Writes what a function makes of the prompt's last message."""

    def __init__(self, write: Callable[[str], Any] | str | None) -> None:
        super().__init__()
        self._write = write

    def load_model(self) -> None:
        return None

    def predict(self, model: None, batch: list[Any], inference_args: dict[str, Any] | None = None) -> Any:
        return [self._write(each[-1]["content"]) if callable(self._write) else self._write for each in batch]


def vector_of(text: str) -> np.ndarray:
    vector = np.full(SIZE, 0.01, np.float32)
    for word in re.findall(r"\w+", text.lower()):
        vector[zlib.crc32(word.encode()) % SIZE] += 1
    return vector


def make_store(
    folder: Path, rows: list[dict[str, Any]] | None = None, name: str = "reviews", id: str | None = None
) -> Path:
    """Write rows to a store with the vector ``words``; a field ``tone`` is another vector.

    Points have numbers as ids, or the field ``id``; an empty ``id`` hashes the rows, as :class:`AddRowIds` does.
    """
    rows = REVIEWS if rows is None else rows
    points = [
        Point(
            number if id is None else point_id(row[id] if id else _row_id(row))[0],
            {"words": vector_of(row["text"]).tolist(), **({"tone": row["tone"]} if "tone" in row else {})},
            {field: value for field, value in row.items() if field != "tone"},
        )
        for number, row in enumerate(rows)
    ]
    collection = open_store(StoreAddress(str(folder), name), lambda: None)
    collection.ensure({vector: len(values) for vector, values in points[0].vectors.items()}, "cosine", True)
    collection.write(points, [])
    return folder


def cite_all(prompt: str) -> str:
    """Return a bullet for each row of the prompt."""
    return "\n".join(f"- {text} [{number}]" for number, text in re.findall(r'^\[(\d+)\] "(.*)"$', prompt, re.MULTILINE))


class CitesAll(Scripted):
    """Cites every row."""

    def __init__(self) -> None:
        super().__init__(cite_all)
