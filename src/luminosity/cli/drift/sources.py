"""A sample for ``lum drift``: files of a table, or NumPy's arrays, as rows of numbers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from luminosity.cli.drift.array_source import Arrays, only_arrays_in
from luminosity.cli.drift.vectors import Vectors, check_numbers, check_usable, vector_columns
from luminosity.drift.pca import PCA
from luminosity.errors import DriftError, OptionError

__all__ = ["Compared", "Sample", "Source", "read_sample", "source_of"]

_ROWS_AT_ONCE = 1 << 16

OnRows = Callable[[int], None]  # rows read so far


@dataclass(frozen=True)
class Sample:
    """``numbers`` says which rows of the source these are, counted from 0 through all of its files."""

    rows: Any
    numbers: Any
    read: int
    skipped: int


class Source(Protocol):
    columns: tuple[str, ...]

    def pieces(self) -> Iterator[tuple[Any, Any, str, int]]:
        """Rows, which of them are null, their file, and the number of the first one in it."""
        ...

    def whole(self) -> Any | None:
        """All rows in one matrix, if they are there without a copy."""
        ...

    def details(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """What else the table says about these rows."""
        ...


@dataclass(frozen=True)
class Compared:
    """Both samples as they were read, and their rows as they are compared: projected, if there are components."""

    sources: tuple[Source, Source]
    samples: tuple[Sample, Sample]
    reference: Any
    current: Any
    pca: PCA | None

    def details(self, side: int) -> Callable[[Sequence[int]], list[dict[str, Any]]]:
        """For a function that knows the compared rows alone."""
        numbers = self.samples[side].numbers
        return lambda rows: self.sources[side].details([int(numbers[row]) for row in rows])


def source_of(pattern: str, columns: Sequence[str]) -> Source:
    if pattern.lower().endswith(".npy"):
        return Arrays(pattern)
    if only_arrays_in(pattern):
        raise DriftError(
            f"{pattern} is a folder with files of NumPy, expected a file, or a folder with files of a table; name its "
            f"files by a pattern in quotes: '{os.path.join(pattern, '*.npy')}'"
        )
    return _Table(pattern, columns)


def read_sample(source: Source, most: int | None, seed: int, skip_missing: bool, on_rows: OnRows) -> Sample:
    """All rows, or ``most`` random ones: those with the smallest random keys so far, so that no more are ever held."""
    random = np.random.default_rng((seed, 5))
    held: list[tuple[Any, Any, Any]] = []
    read = skipped = waiting = 0
    for rows, null, file, first in source.pieces():
        usable = check_usable(rows, null, () if skip_missing else source.columns or ("the array",), file, first)
        chosen = np.flatnonzero(usable)
        held.append((rows if len(chosen) == len(rows) else rows[chosen], chosen + read, random.random(len(chosen))))
        read, skipped, waiting = read + len(rows), skipped + len(rows) - len(chosen), waiting + len(chosen)
        if most is not None and waiting > 2 * most + _ROWS_AT_ONCE:
            held = [_smallest(held, most)]
            waiting = most
        on_rows(read)
    if not held:
        return Sample(np.empty((0, 1)), np.empty(0, np.int64), read, skipped)
    whole = source.whole() if most is None and not skipped else None
    if whole is not None:
        return Sample(whole, np.arange(read), read, skipped)
    rows, numbers, _ = _joined(held) if most is None else _smallest(held, most)
    return Sample(rows, numbers, read, skipped)


def _smallest(held: list[tuple[Any, Any, Any]], most: int) -> tuple[Any, Any, Any]:
    rows, numbers, keys = _joined(held)
    if len(keys) <= most:
        return rows, numbers, keys
    chosen = np.sort(np.argpartition(keys, most)[:most])
    return rows[chosen], numbers[chosen], keys[chosen]


def _joined(held: list[tuple[Any, Any, Any]]) -> tuple[Any, Any, Any]:
    if len(held) == 1:
        return held[0]
    filled = [each for each in held if len(each[1])] or held[:1]
    rows, numbers, keys = (np.concatenate(parts) for parts in zip(*filled, strict=True))
    return rows, numbers, keys


class _Table:
    """Parquet, JSON lines, CSV or Arrow, wherever Beam can read."""

    def __init__(self, pattern: str, columns: Sequence[str]) -> None:
        from luminosity.io.read_table import ReadTable

        self._pattern = pattern
        if not columns:
            columns = _only_vectors(ReadTable(pattern).schema, pattern)
        self._table = ReadTable(pattern, columns)
        check_numbers(self._table.schema, pattern, lambda: ReadTable(pattern).schema)
        self.columns = tuple(columns)

    def pieces(self) -> Iterator[tuple[Any, Any, str, int]]:
        vectors, current, first = Vectors(self.columns), "", 0
        for file, batch in self._table.all():
            if file != current:
                current, first = file, 0
            yield *vectors.of(batch, file, first), file, first
            first += batch.num_rows

    def whole(self) -> None:
        """Batches are what a table is read in."""

    def details(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """The other columns are read only now, up to the last of these rows."""
        from luminosity.io.read_table import ReadTable

        schema = ReadTable(self._pattern).schema
        others = [name for name in schema.names if name not in vector_columns(schema)]
        found: dict[int, dict[str, Any]] = {}
        first, file_first, current = 0, 0, ""
        for file, batch in ReadTable(self._pattern, others or list(self.columns)).all():
            if file != current:
                current, file_first = file, first
            for number in (number for number in numbers if first <= number < first + batch.num_rows):
                row = batch.slice(number - first, 1).to_pylist()[0] if others else {}
                found[number] = {**self._named(file), "row": number - file_first, **row}
            first += batch.num_rows
            if len(found) == len(set(numbers)):
                break
        return [found[number] for number in numbers]

    def _named(self, file: str) -> dict[str, str]:
        """Of one file alone nobody needs the name."""
        return {} if self._pattern.endswith(os.path.basename(file)) else {"file": os.path.basename(file)}


def _only_vectors(schema: Any, pattern: str) -> list[str]:
    found = vector_columns(schema)
    if len(found) != 1:
        which = f"{len(found)} columns of vectors ({', '.join(found)})" if found else "no column of vectors"
        raise OptionError(
            f"{pattern} has {which}; --column says what to compare: one of vectors, or several of numbers; "
            f"there are {', '.join(schema.names)}"
        )
    return found
