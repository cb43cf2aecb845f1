"""Splits and compares the embedded reviews of ``pipeline.py``: is drift detected only if it exists?

::

    python examples/drift/splits.py embedded

Halves of one source must differ no more often than the level of the test says: one time in 20. Two sources must differ,
and the rows that differ most must make sense to a reader. In between, some rows of the other source are mixed in.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import sources
from rich.console import Console
from rich.table import Table

from luminosity.drift import PCA, MMDTestResult, mmd_test, prepare_samples, witness

COMPONENTS = 50  # an embedding has 384 numbers
SPLITS = 100  # of each source
SHARES = (0.05, 0.1, 0.15, 0.2)  # shares of rows that come from the other source
SHOWN = 3  # rows of each sample
MOST_CHARACTERS = 160  # characters of a text that are printed

Array = Any  # a NumPy array of floats


@dataclass(frozen=True)
class Source:
    """The reviews of one source, with a row of ``embeddings`` for each text."""

    name: str
    texts: list[str]
    embeddings: Array


def load(folder: Path) -> dict[str, Source]:
    """Read the reviews that ``pipeline.py`` wrote."""
    table = pyarrow.parquet.read_table(folder)  # Names of folders tell the source: source=imdb.
    of_row = np.asarray(table["source"].to_pylist())
    texts = np.asarray(table["text"].to_pylist(), dtype=object)
    embeddings = np.stack(table["embedding"].to_numpy())
    names = sorted(set(of_row.tolist()))
    return {name: Source(name, texts[of_row == name].tolist(), embeddings[of_row == name]) for name in names}


def flagged_splits(source: Source, splits: int, seed: int = 0) -> int:
    """Count how often the test reports drift between two random halves of one source."""
    rows = PCA.fit(source.embeddings, COMPONENTS).transform(source.embeddings)
    return _flagged(rows, rows[:0], 0.0, splits, seed)


def flagged_mixtures(source: Source, other: Source, share: float, splits: int, seed: int = 0) -> int:
    """Count the same with a share of the second half replaced by rows of another source."""
    return _flagged(*project(source, other), share, splits, seed)


def _flagged(rows: Array, others: Array, share: float, splits: int, seed: int) -> int:
    random = np.random.default_rng(seed)
    half = len(rows) // 2
    mixed_in = round(half * share)
    found = 0
    for _ in range(splits):
        order = random.permutation(len(rows))
        chosen = random.permutation(len(others))[:mixed_in]
        current = np.concatenate([rows[order[half + mixed_in :]], others[chosen]])
        found += mmd_test(rows[order[:half]], current).drift
    return found


def compare(reference: Source, current: Source) -> MMDTestResult:
    """Test whether two sources differ."""
    return mmd_test(*project(reference, current))


def project(reference: Source, current: Source) -> tuple[Array, Array]:
    """Project both sources onto their common principal components."""
    samples = prepare_samples(reference.embeddings, current.embeddings, components=COMPONENTS)
    return samples.reference, samples.current


def most_typical(reference: Source, current: Source, count: int = SHOWN) -> tuple[list[str], list[str]]:
    """Return the texts of each source that are most typical of it."""
    of_reference, of_current = witness(*project(reference, current))
    first, last = np.argsort(of_reference)[:count], np.argsort(-of_current)[:count]
    return [reference.texts[row] for row in first], [current.texts[row] for row in last]


def main(argv: Sequence[str] | None = None) -> None:
    """Print how often sources differ from themselves, from mixtures, and from each other."""
    parser = argparse.ArgumentParser(description="Compare embedded reviews with themselves and with each other.")
    parser.add_argument("folder", type=Path, help="the folder that pipeline.py wrote")
    parser.add_argument("--splits", type=int, default=SPLITS, help=f"splits of each source (default: {SPLITS})")
    arguments = parser.parse_args(argv)
    console = Console(highlight=False)
    found = load(arguments.folder)

    whole = Table("one source against itself", "rows of a half", "splits", "flagged")
    for source in found.values():
        flagged = flagged_splits(source, arguments.splits)
        whole.add_row(source.name, f"{len(source.texts) // 2:,}", str(arguments.splits), str(flagged))
    console.print(whole)

    current = found[sources.ROTTEN_TOMATOES]
    mixed = Table(f"rows of {current.name} in the second half of {sources.IMDB_CUT}", "splits", "flagged")
    for share in SHARES:
        flagged = flagged_mixtures(found[sources.IMDB_CUT], current, share, arguments.splits)
        mixed.add_row(f"{share:.0%}", str(arguments.splits), str(flagged))
    console.print(mixed)

    for reference in (found[sources.IMDB], found[sources.IMDB_CUT]):
        console.print(
            f"\n[bold]{reference.name} against {current.name}[/bold]: {compare(reference, current)}", soft_wrap=True
        )
        for source, texts in zip((reference, current), most_typical(reference, current), strict=True):
            console.print(f"most typical of {source.name}:")
            for text in texts:
                console.print(
                    " ", textwrap.shorten(text, MOST_CHARACTERS, placeholder=" …"), markup=False, soft_wrap=True
                )


if __name__ == "__main__":
    main()
