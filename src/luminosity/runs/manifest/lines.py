"""Text files as rows: each line is one. Nothing is imported that takes time."""

from __future__ import annotations

import gzip
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence

__all__ = ["COLUMNAR", "LINES", "digest_lines", "header_and_lines", "suffix_of"]

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
