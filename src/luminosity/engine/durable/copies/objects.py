"""The objects of a copy: changes of a checkpoint with their checksum, and the names that objects have.

An object that does not match its checksum is refused before anything in it is read.
"""

from __future__ import annotations

import hashlib
import json
import marshal
import re
from dataclasses import dataclass, field
from typing import NamedTuple

from luminosity.engine.durable.store import StoredContent, Transaction
from luminosity.engine.spill.files import pack, unpack
from luminosity.errors import CheckpointDamaged

__all__ = [
    "LEASE",
    "Changes",
    "CopiedFile",
    "Manifest",
    "Writer",
    "base_of",
    "damaged",
    "decode",
    "encode",
    "group_file",
]

LEASE = "lease.json"
_MAGIC = b"lumcopy1"
_DIGEST_BYTES = hashlib.sha256().digest_size
_GROUPS = "groups"  # the owner of rows that name the files of large groups
_ROW_BYTES = 100  # of memory, for a row beside its key and value
_NAME = re.compile(
    r"(?P<kind>manifest|base|segment|file)-(?P<epoch>\d{6})(?P<token>[0-9a-f]{8})(?:-(?P<base>\d{4,}))?(?:-(?P<rest>.+))?"
)
_PATH = re.compile(r"blocks/[0-9]+/[A-Za-z0-9_][A-Za-z0-9_.-]*")  # of a file of blocks, below the checkpoint folder


class CopiedFile(NamedTuple):
    """A file of blocks in a copy."""

    object: str
    size: int
    digest: str


class Writer(NamedTuple):
    """The one who wrote an object: a start of a run. A later one has a higher epoch."""

    epoch: int
    token: str  # eight random hexadecimal digits

    def __str__(self) -> str:
        return f"{self.epoch:06}{self.token}"

    @classmethod
    def of_object(cls, name: str) -> Writer | None:
        """Return the writer of an object; None if the name is not one of an object.

        >>> Writer.of_object("segment-0000020011aabb-0001-00000007")
        Writer(epoch=2, token='0011aabb')
        """
        found = _NAME.fullmatch(name)
        return cls(int(found["epoch"]), found["token"]) if found else None

    def manifest(self, base: int) -> str:
        """Return the name of the manifest of a base."""
        return f"manifest-{self}-{base:04}"

    def part(self, base: int, part: int) -> str:
        """Return the name of a part of a base."""
        return f"base-{self}-{base:04}-{part:05}"

    def segment(self, base: int, number: int) -> str:
        """Return the name of a segment, by its number since the base."""
        return f"segment-{self}-{base:04}-{number:08}"

    def file(self, path: str) -> str:
        """Return the name of the object with a file of blocks."""
        return f"file-{self}-0000-{path.removeprefix('blocks/').replace('/', '.')}"


@dataclass
class Changes:
    """What a segment or a part of a base changes: several transactions, of which only the result is left."""

    rows: dict[tuple[str, bytes], bytes | None] = field(default_factory=dict[tuple[str, bytes], bytes | None])
    cleared: set[str] = field(default_factory=set[str])
    contents: dict[int, StoredContent] = field(default_factory=dict[int, StoredContent])
    dropped: set[int] = field(default_factory=set[int])
    meta: dict[str, str] = field(default_factory=dict[str, str])
    files: dict[str, CopiedFile] = field(default_factory=dict[str, CopiedFile])  # by path: those that are referred to
    size: int = 0  # in memory, about

    @property
    def is_empty(self) -> bool:
        """Whether nothing has changed."""
        return not (self.rows or self.cleared or self.contents or self.dropped or self.meta)

    def add(self, later: Transaction | Changes) -> None:
        """Add what happened after these changes."""
        for owner in later.cleared:
            for row in [row for row in self.rows if row[0] == owner]:
                self.size -= _row_size(row, self.rows.pop(row))
        self.cleared |= later.cleared
        for row, value in later.rows.items():
            self.put(row, value)
        for number in later.dropped:
            if (content := self.contents.pop(number, None)) is None:
                self.dropped.add(number)
            else:
                self.size -= _content_size(content)
        for content in later.contents.values() if isinstance(later, Changes) else later.contents:
            self.put_content(content)
        self.meta.update(later.meta)

    def put(self, row: tuple[str, bytes], value: bytes | None) -> None:
        """Write or, with None, remove a row."""
        if row in self.rows:
            self.size -= _row_size(row, self.rows[row])
        self.rows[row] = value
        self.size += _row_size(row, value)

    def put_content(self, content: StoredContent) -> None:
        """Add the data of a block."""
        self.contents[content.id] = content
        self.size += _content_size(content)

    def new_paths(self) -> dict[int | bytes, str]:
        """Return the files of new contents, by their numbers, and those of large groups, by their tokens."""
        found: dict[int | bytes, str] = {c.id: c.path for c in self.contents.values() if c.path is not None}
        for (owner, key), value in self.rows.items():
            if owner == _GROUPS and value is not None:
                found[key] = group_file(value)
        return found

    def apply_to(self, live: dict[int | bytes, str]) -> None:
        """Change the files that are referred to, as :meth:`new_paths` returns them."""
        for number in self.dropped:
            live.pop(number, None)
        if _GROUPS in self.cleared:
            for key in [key for key in live if isinstance(key, bytes)]:
                del live[key]
        for (owner, key), value in self.rows.items():
            if owner == _GROUPS and value is None:
                live.pop(key, None)
        live.update(self.new_paths())

    def transaction(self) -> Transaction:
        """Return the changes as a checkpoint folder takes them."""
        return Transaction(0, self.rows, self.cleared, list(self.contents.values()), sorted(self.dropped), self.meta)


class Manifest(NamedTuple):
    """Names the parts of a base. The segments since then are found by their numbers."""

    version: int  # of the checkpoint's format
    folder: str  # the id of the checkpoint folder
    run: str  # the identity of the run
    base: int
    parts: int
    segments: int  # so many there must be

    def pack(self, name: str) -> bytes:
        """Return the manifest as an object."""
        return _sealed(name, json.dumps(self._asdict()).encode())

    @classmethod
    def unpack(cls, address: str, name: str, data: bytes) -> Manifest:
        """Return what an object says. Raises :class:`CheckpointDamaged` if it is damaged."""
        try:
            return cls(**json.loads(_opened(address, name, data)))
        except (TypeError, ValueError) as error:
            if isinstance(error, CheckpointDamaged):
                raise
            raise damaged(address, name, f"was written by another release ({error})") from error


def base_of(name: str) -> int:
    """Return the number of the base that an object belongs to.

    >>> base_of("segment-0000020011aabb-0012-00000007"), base_of("manifest-0000020011aabb-0012")
    (12, 12)
    """
    found = _NAME.fullmatch(name)
    return int(found["base"] or 0) if found else 0


def encode(name: str, before: str, changes: Changes) -> tuple[bytes, str]:
    """Return changes as an object, and its digest. ``before`` is the digest of the object before this one."""
    fields = (
        before,
        [(owner, key, value) for (owner, key), value in changes.rows.items()],
        sorted(changes.cleared),
        [(c.id, c.data, c.path, c.base, c.size, bool(c.is_packed)) for c in changes.contents.values()],
        sorted(changes.dropped),
        dict(changes.meta),
        {path: tuple(file) for path, file in changes.files.items()},
    )
    data = _sealed(name, pack(marshal.dumps(fields)))
    return data, _digest(data)


def decode(address: str, name: str, data: bytes, before: str) -> tuple[Changes, str]:
    """Return the changes in an object, and its digest. Raises :class:`CheckpointDamaged` if it is damaged."""
    body = _opened(address, name, data)
    try:
        found, rows, cleared, contents, dropped, meta, files = marshal.loads(unpack(body))
        changes = Changes(
            {(owner, key): value for owner, key, value in rows},
            set(cleared),
            {fields[0]: StoredContent(*fields) for fields in contents},
            set(dropped),
            meta,
            {path: CopiedFile(*file) for path, file in files.items()},
        )
        paths = [*changes.files, *changes.new_paths().values()]
    except (EOFError, TypeError, ValueError) as error:
        raise damaged(address, name, f"was written by another release ({error})") from error
    if found != before:
        raise damaged(address, name, "does not continue the object before it")
    for path in paths:
        if not _PATH.fullmatch(path):
            raise damaged(address, name, f"names {path!r}, expected a file of blocks")
    for file in changes.files.values():
        if Writer.of_object(file.object) is None or "/" in file.object:
            raise damaged(address, name, f"names {file.object!r}, expected an object of a copy")
    return changes, _digest(data)


def group_file(row: bytes) -> str:
    """Return the file that the row of a large group names."""
    return str(marshal.loads(row)[0])


def damaged(address: str, name: str, found: str) -> CheckpointDamaged:
    """Return the error for an object that is missing or is not what was written."""
    return CheckpointDamaged(
        f"the copy in {address} is damaged: {name} {found}",
        fix="restore from another copy, or choose a new --checkpoint_dir without --restore_from to begin again",
    )


def _sealed(name: str, body: bytes) -> bytes:
    return _MAGIC + hashlib.sha256(name.encode() + b"\0" + body).digest() + body


def _opened(address: str, name: str, data: bytes) -> bytes:
    start = len(_MAGIC) + _DIGEST_BYTES
    body = data[start:]
    if data[: len(_MAGIC)] != _MAGIC or len(data) < start:
        raise damaged(address, name, "is no object of a copy that this release reads")
    if hashlib.sha256(name.encode() + b"\0" + body).digest() != data[len(_MAGIC) : start]:
        raise damaged(address, name, "is not what was written")
    return body


def _digest(data: bytes) -> str:
    return data[len(_MAGIC) : len(_MAGIC) + _DIGEST_BYTES].hex()


def _row_size(row: tuple[str, bytes], value: bytes | None) -> int:
    return _ROW_BYTES + len(row[1]) + len(value or b"")


def _content_size(content: StoredContent) -> int:
    return _ROW_BYTES + len(content.data or b"")
