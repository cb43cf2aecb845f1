"""Turns what users pass as the reference, a PCollection, an array or a path, into rows by key."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, TypeAlias

import apache_beam as beam

from luminosity.drift.rows import as_rows
from luminosity.drift.transforms.elements import Reader
from luminosity.drift.transforms.files import ReadFiles, is_npy
from luminosity.drift.transforms.gather import Gather
from luminosity.errors import DriftError

__all__ = ["Reference", "ReferenceRows", "check_reference", "has_keys"]

Reference: TypeAlias = Any  # a PCollection, an array, or a path of files

_ARRAY_BYTES = 4 << 20  # bytes of an array in one element of the pipeline's description
_MOST_ARRAY_BYTES = 256 << 20  # bytes of an array that is sent with the pipeline's description


def has_keys(reference: Reference) -> bool:
    """Return whether the rows of the reference have keys. An array or ``.npy`` file is the reference of every key."""
    return isinstance(reference, beam.PCollection) or (_is_path(reference) and not is_npy(os.fspath(reference)))


def check_reference(reference: Reference, reader: Reader) -> None:
    """Raise an error for references that are known to be wrong before the pipeline is built."""
    if isinstance(reference, beam.PCollection):
        return
    if not _is_path(reference):
        _checked(reference)
    elif not is_npy(os.fspath(reference)) and reader.column is None:
        raise DriftError(
            f"found reference={os.fspath(reference)!r} without column=", fix="pass column=, the column of vectors"
        )
    elif reader.keyed and has_keys(reference):
        raise DriftError(
            f"found keyed=True and reference={os.fspath(reference)!r}, whose rows have no keys",
            fix="pass by=, the column of keys, or pass the reference as a PCollection of pairs",
        )


class ReferenceRows(beam.PTransform[Any, Any]):
    """Turns the reference into pairs of a key and rows. Applied to the PCollection, or otherwise to the pipeline.

    ``reader`` is the reader of the current sample, with the reference's seed.
    """

    def __init__(self, reference: Reference, reader: Reader) -> None:
        super().__init__()
        self._reference = reference
        self._reader = reader if has_keys(reference) else Reader(seed=reader.seed)
        self._columns = reader.columns

    def expand(self, input_or_inputs: Any) -> Any:
        """Read the reference, unless it is a PCollection, and gather its rows by key."""
        rows = input_or_inputs if isinstance(input_or_inputs, beam.PCollection) else input_or_inputs | self._source()
        return rows | "Gather" >> Gather(self._reader)

    def _source(self) -> Any:
        if _is_path(self._reference):
            return "Read" >> ReadFiles(os.fspath(self._reference), self._columns)
        pieces = list(_pieces(_checked(self._reference)))
        return "Create" >> beam.Create(pieces, reshuffle=len(pieces) > 1)


def _is_path(reference: Any) -> bool:
    return isinstance(reference, str | os.PathLike)


def _checked(reference: Any) -> Any:
    rows = as_rows(reference, "the reference")
    if rows.nbytes > _MOST_ARRAY_BYTES:
        raise DriftError(
            f"the reference is an array of {rows.nbytes >> 20:,} MB, expected at most {_MOST_ARRAY_BYTES >> 20} MB, "
            "because it is sent with the pipeline's description",
            fix="write it to a file, and pass its path",
        )
    return rows


def _pieces(rows: Any) -> Iterator[Any]:
    count = max(1, _ARRAY_BYTES // (rows.shape[1] * rows.itemsize))
    return (rows[start : start + count] for start in range(0, len(rows), count))
