"""Places that a run reads and writes, and their digests."""

from __future__ import annotations

import glob
import os
from dataclasses import dataclass
from typing import Literal

from luminosity.runs.manifest.files import COLUMNAR, LINES, digest_files, digest_lines, files_of, is_local, suffix_of

__all__ = ["Effects", "Kind", "Place", "Sealed", "base_of", "seal"]

Kind = Literal["files", "qdrant", "lance", "postgres", "model"]

_CONTENT_LIMIT = 8 << 20  # bytes of a table whose rows are hashed at the end of a run: a tenth of a second


@dataclass(frozen=True)
class Place:
    """Something that a step reads or writes: files, a store, or a model."""

    step: str
    path: str  # local paths are absolute; may be a pattern
    kind: Kind = "files"
    name: str = ""  # of the collection in a store, or the version of a model
    digest: str = ""  # if it is known already
    is_relative: bool = False  # whether the step has it as a relative path


@dataclass(frozen=True)
class Effects:
    """What a pipeline reads and writes, as far as its plan tells."""

    reads: tuple[Place, ...] = ()
    writes: tuple[Place, ...] = ()
    models: tuple[Place, ...] = ()
    unknown: tuple[str, ...] = ()  # steps that may read or write something that the plan does not name
    seeds: tuple[tuple[str, str], ...] = ()  # that steps show, by name


@dataclass(frozen=True)
class Sealed:
    """A place with the digest of what is there."""

    step: str
    path: str
    kind: Kind = "files"
    name: str = ""
    digest: str = ""  # of the bytes; empty if it is not known
    files: int = 0
    size: int = 0
    is_sampled: bool = False  # whether only a part of large files was read
    rows: int | None = None  # of a small table
    content: str = ""  # the digest of its rows, in any order
    note: str = ""  # why there is no digest


def base_of(path: str) -> str:
    """Return the folder to which the names of a place's files are relative.

    >>> base_of("/data/in/*.csv"), base_of("/data/part-*")
    ('/data/in', '/data')
    """
    if os.path.isdir(path):
        return path
    path = os.path.dirname(path)
    while glob.has_magic(path):
        path = os.path.dirname(path)
    return path


def seal(place: Place, *, since: float = 0.0, in_full: bool = False, with_content: bool = False) -> Sealed:
    """Return a place with its digest. Raises nothing: a note says why there is none.

    ``since`` leaves out older files. ``with_content`` also hashes the rows of a table, if it is small or if
    ``in_full`` is set.
    """
    known = Sealed(place.step, place.path, place.kind, place.name)
    if place.digest:
        return Sealed(place.step, place.path, place.kind, place.name, place.digest)
    if not is_local(place.path):
        return _noted(known, "not on this machine")
    path = os.path.join(place.path, place.name) if place.kind == "qdrant" else place.path
    try:
        files = files_of(path, since)
        if not files:
            return _noted(known, "no such file")
        found = digest_files(files, base_of(path), in_full=in_full)
    except OSError as error:
        return _noted(known, f"can't be read: {error.strerror or error}")
    rows, content = None, ""
    if with_content and place.kind == "files" and (in_full or found.size <= _CONTENT_LIMIT):
        rows, content = _content(files, base_of(path))
    return Sealed(
        place.step,
        place.path,
        place.kind,
        place.name,
        found.digest,
        found.files,
        found.size,
        found.is_sampled,
        rows,
        content,
    )


def _content(files: list[str], base: str) -> tuple[int | None, str]:
    """Return the number of rows and the digest of a table; nothing if the files are not a table after all."""
    suffixes = {suffix_of(file) for file in files}
    try:
        if suffixes <= {*LINES}:
            return digest_lines(files)
        if not suffixes <= {*COLUMNAR}:
            return None, ""
        from luminosity.runs.manifest.contents import content_digest, read_files  # imports pyarrow

        table = read_files(files, base)
        return table.num_rows, content_digest(table)
    except (OSError, ValueError, TypeError, RuntimeError):  # also Arrow's errors; the bytes have a digest in any case
        return None, ""


def _noted(sealed: Sealed, note: str) -> Sealed:
    return Sealed(sealed.step, sealed.path, sealed.kind, sealed.name, note=note)
