"""What users give as the reference, as blocks of rows by key."""

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

_ARRAY_BYTES = 4 << 20  # what one element of the pipeline's description holds
_MOST_ARRAY_BYTES = 256 << 20


def has_keys(reference: Reference) -> bool:
    """An array or an npy file has none: it is the reference of every key."""
    return isinstance(reference, beam.PCollection) or (_is_path(reference) and not is_npy(os.fspath(reference)))


def check_reference(reference: Reference, reader: Reader) -> None:
    """What can be told before the pipeline is built."""
    if isinstance(reference, beam.PCollection):
        return
    if not _is_path(reference):
        _checked(reference)
    elif not is_npy(os.fspath(reference)) and reader.column is None:
        raise DriftError(f"Found reference={os.fspath(reference)!r} and no column= that says where its vectors are.")
    elif reader.keyed and has_keys(reference):
        raise DriftError(
            f"Found keyed=True and reference={os.fspath(reference)!r}, whose rows have no keys. Say by= which column "
            "is the key, or give the reference as a PCollection of pairs."
        )


class ReferenceRows(beam.PTransform[Any, Any]):
    """From the reference, if it is a PCollection, else from the pipeline.

    ``reader`` is that of the current sample, with the reference's seed.
    """

    def __init__(self, reference: Reference, reader: Reader) -> None:
        super().__init__()
        self._reference = reference
        self._reader = reader if has_keys(reference) else Reader(seed=reader.seed)
        self._columns = reader.columns

    def expand(self, input_or_inputs: Any) -> Any:
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
    rows = as_rows(reference, "The reference")
    if rows.nbytes > _MOST_ARRAY_BYTES:
        raise DriftError(
            f"The reference is an array of {rows.nbytes >> 20:,} MB, expected at most {_MOST_ARRAY_BYTES >> 20}: it is "
            "sent with the pipeline's description. Write it to a file, and give its path."
        )
    return rows


def _pieces(rows: Any) -> Iterator[Any]:
    count = max(1, _ARRAY_BYTES // (rows.shape[1] * rows.itemsize))
    return (rows[start : start + count] for start in range(0, len(rows), count))
