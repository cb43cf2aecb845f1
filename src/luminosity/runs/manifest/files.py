"""Digests of files and folders, whose cost is bounded unless you ask for all bytes.

The first 32 MB of a place are read in full, file by file in the order of their names. Of every file beyond that, three
pieces of 64 kB are read: its beginning, its middle and its end. The size of every file counts in any case. So a digest
takes less than a tenth of a second for most inputs, however large they are, and misses only a change in the middle of a
large file that keeps its size.
"""

from __future__ import annotations

import glob
import gzip
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from luminosity._shared.shared_files import file_digest

__all__ = [
    "COLUMNAR",
    "LINES",
    "FileDigest",
    "digest_files",
    "digest_lines",
    "files_of",
    "header_and_lines",
    "is_local",
    "suffix_of",
]
_IN_FULL = 32 << 20  # bytes of a place that are read in full: about 50 ms
_PIECE = 64 << 10  # bytes of each piece of a larger file
_MOST_FILES = 10_000  # of a place; more are counted, but not read
_TEMPORARY = (".", "_")  # names of files that no reader of tables looks at begin like this


@dataclass(frozen=True)
class FileDigest:
    """The digest of all files of a place."""

    digest: str  # "sha256:…"
    files: int
    size: int
    is_sampled: bool  # whether some bytes were not read


def is_local(path: str) -> bool:
    """Return whether a path is one of this machine's own file system."""
    return "://" not in path


def files_of(path: str, since: float = 0.0) -> list[str]:
    """Return the files that a path means, sorted: a file, all files in a folder, or those that match a pattern.

    Leaves out files that were last changed before ``since``, in seconds since 1970, and hidden files in folders.
    """
    found: list[str] = []
    for each in [path] if os.path.exists(path) else glob.glob(path, recursive=True):
        if os.path.isdir(each):
            for folder, folders, names in os.walk(each):
                folders[:] = sorted(name for name in folders if not name.startswith("."))
                found += [os.path.join(folder, name) for name in names if not name.startswith(_TEMPORARY)]
        else:
            found.append(each)
    return sorted(each for each in {*found} if os.path.isfile(each) and os.path.getmtime(each) >= since)


def digest_files(files: Sequence[str], base: str = "", *, in_full: bool = False) -> FileDigest:
    """Return one digest for files: that of a single file's bytes, otherwise of all digests, sizes and names.

    Names are relative to ``base``. Raises ``OSError`` if a file can't be read.
    """
    left = _IN_FULL
    lines: list[str] = []
    size = 0
    is_sampled = len(files) > _MOST_FILES and not in_full
    for number, file in enumerate(files):
        length = os.path.getsize(file)
        size += length
        if in_full or length <= left:
            left -= length
            one = file_digest(file)
        elif number < _MOST_FILES:
            one, is_sampled = _sampled(file, length), True
        else:
            one = ""
        if len(files) == 1:
            return FileDigest(f"sha256:{one}", 1, size, is_sampled)
        lines.append(f"{one}  {length}  {os.path.relpath(file, base) if base else os.path.basename(file)}\n")
    whole = hashlib.sha256("".join(lines).encode(errors="surrogateescape")).hexdigest()
    return FileDigest(f"sha256:{whole}", len(files), size, is_sampled)


def _sampled(path: str, size: int) -> str:
    digest = hashlib.sha256(str(size).encode())
    with open(path, "rb") as file:
        for position in (0, max(0, size // 2 - _PIECE // 2), max(0, size - _PIECE)):
            file.seek(position)
            digest.update(file.read(_PIECE))
    return digest.hexdigest()


LINES = (".csv", ".tsv", ".jsonl", ".ndjson", ".txt")
"""The names of text files end like this."""
COLUMNAR = (".parquet", ".arrow", ".feather")
"""The names of files with typed columns end like this."""
_WITH_HEADER = (".csv", ".tsv")
_SHARD = re.compile(r"-\d+-of-\d+$")
_HASH_BYTES = 16  # of one line


def suffix_of(path: str) -> str:
    """Return the suffix that tells the format of a file.

    >>> suffix_of("out/part-0.csv.gz"), suffix_of("out-00000-of-00001")
    ('.csv', '.txt')
    """
    stem, suffix = os.path.splitext(path.lower())
    if not suffix and _SHARD.search(path):
        return ".txt"  # what Beam's WriteToText writes if it is given no suffix
    return os.path.splitext(stem)[1] if suffix == ".gz" else suffix


def header_and_lines(path: str) -> tuple[bytes | None, list[bytes]]:
    """Read a text file; its header is None if the format has none."""
    with gzip.open(path, "rb") if path.lower().endswith(".gz") else open(path, "rb") as file:
        lines = file.read().splitlines()
    if suffix_of(path) not in _WITH_HEADER:
        return None, lines
    return (lines[0] if lines else b""), lines[1:]


def digest_lines(files: Sequence[str]) -> tuple[int, str]:
    """Return the number of rows of text files, and a digest that does not depend on their order."""
    hashes = sorted(_hashes(files))
    return len(hashes), f"lines:{hashlib.sha256(b''.join(hashes)).hexdigest()}"


def _hashes(files: Iterable[str]) -> Iterator[bytes]:
    for file in files:
        header, lines = header_and_lines(file)
        begin = hashlib.blake2b(digest_size=_HASH_BYTES)
        begin.update(header + b"\n" if header is not None else b"")
        for line in lines:
            hashed = begin.copy()
            hashed.update(line)
            yield hashed.digest()
