"""The formats of messages between the runner and its workers: blocks of elements, writes to state and its keys.

A block's message has the number of elements, and their bytes or where these are stored.

Imported by worker processes, so it stays small.
"""

from __future__ import annotations

import marshal
import mmap
import os
import struct
import zlib
from collections.abc import Mapping
from typing import NamedTuple

from apache_beam.portability.api import beam_fn_api_pb2

from luminosity.engine.spill import files

__all__ = [
    "BLOCK_BYTES",
    "LETTERS",
    "PASSING_PREFIXES",
    "REPORT",
    "SOURCE_PREFIX",
    "SPLIT_SUFFIX",
    "STATE_SNAPSHOT",
    "STATE_WRITES",
    "USAGE",
    "FileSpan",
    "ObjectSpan",
    "StateKeys",
    "in_partition",
    "key_hash",
    "mapped",
    "object_key",
    "pack_bytes",
    "pack_group",
    "pack_object",
    "pack_snapshot",
    "pack_span",
    "pack_tokens",
    "pack_usage",
    "pack_writes",
    "read",
    "read_span",
    "shard_index",
    "unpack",
    "unpack_snapshot",
    "unpack_tokens",
    "unpack_usage",
    "unpack_writes",
    "unwrap",
]
SOURCE_PREFIX = "source"  # of the instruction ids of bundles whose first output is sent at once
# The same, and of other bundles, in which elements are passed by at which a step fails.
PASSING_PREFIXES = (f"{SOURCE_PREFIX}passing", "bundlepassing")
SPLIT_SUFFIX = ".split"  # of the instruction ids of bundles whose output for groupings is split by key
LETTERS = "luminosity:letters"  # the key of letters about elements that were passed by, in the data of a response
BLOCK_BYTES = 1 << 20  # a block ends here: large enough to amortize its file, small enough to share work out
STATE_SNAPSHOT = b"luminosity:state_snapshot:"  # and a shard's index: the runner's key of the cells of that shard
STATE_WRITES = b"luminosity:state_writes"  # the runner's key to which workers append batches of writes
REPORT = "luminosity:report"  # the key of what a bundle does, among the monitoring data about its progress
USAGE = "luminosity:usage"  # the key of what a bundle has used, among the monitoring data of its response
key_hash = zlib.crc32  # of an encoded key: a key's shard is the remainder, as in :func:`shard_index`
_HEADER = struct.Struct("<BI")  # kind, number of elements
_USAGE = struct.Struct("<dQI")  # CPU seconds, bytes of resident memory, id of the process
_SPAN = struct.Struct("<QQ")  # start, size
_BYTES, _PLAIN_FILE, _PACKED_FILE, _OBJECT, _PARTITION, _GROUP = range(6)


class FileSpan(NamedTuple):
    """A range of the encoded elements in a file, which may be packed (compressed)."""

    path: str
    start: int
    size: int
    is_packed: bool = False


class ObjectSpan(NamedTuple):
    """A range of the encoded elements in an object of a cluster's store."""

    key: str  # the worker that made it, and its number there
    first: int  # the first element
    size: int  # of all elements of the span in bytes, about


def pack_bytes(count: int, data: bytes) -> bytes:
    """Return a message that contains the elements."""
    return _HEADER.pack(_BYTES, count) + data


def pack_span(count: int, span: FileSpan) -> bytes:
    """Return a message that refers to elements in a file."""
    kind = _PACKED_FILE if span.is_packed else _PLAIN_FILE
    return _HEADER.pack(kind, count) + _SPAN.pack(span.start, span.size) + span.path.encode()


def pack_object(count: int, span: ObjectSpan) -> bytes:
    """Return a message that refers to elements in an object."""
    return _HEADER.pack(_OBJECT, count) + _SPAN.pack(span.first, span.size) + span.key.encode()


def unpack(message: bytes) -> tuple[int, bytes | FileSpan | ObjectSpan]:
    """Return the number of elements of a message, and their bytes, or the file or object that has them.

    >>> unpack(pack_bytes(2, b"ab"))
    (2, b'ab')
    >>> unpack(pack_span(7, FileSpan("/dev/shm/b", 5, 10)))
    (7, FileSpan(path='/dev/shm/b', start=5, size=10, is_packed=False))
    >>> unpack(pack_object(7, ObjectSpan("w1.2", 5, 10)))
    (7, ObjectSpan(key='w1.2', first=5, size=10))
    """
    *_, message = unwrap(message)
    kind, count = _HEADER.unpack_from(message)
    if kind == _BYTES:
        return count, message[_HEADER.size :]
    start, size = _SPAN.unpack_from(message, _HEADER.size)
    if kind == _OBJECT:
        return count, ObjectSpan(message[_HEADER.size + _SPAN.size :].decode(), start, size)
    return count, FileSpan(message[_HEADER.size + _SPAN.size :].decode(), start, size, kind == _PACKED_FILE)


def in_partition(index: int, message: bytes) -> bytes:
    """Return a block's message that says in which partition of a grouping its keys are."""
    return _HEADER.pack(_PARTITION, index) + message


def pack_group(token: bytes, value_bytes: int, message: bytes) -> bytes:
    """Return the message of a block that is one large group, whose values are in a file of which ``token`` tells."""
    return _HEADER.pack(_GROUP, len(token)) + value_bytes.to_bytes(8, "little") + token + message


def unwrap(message: bytes) -> tuple[int, bytes, int, bytes]:
    """Return the partition of a block's message, or -1; the token and the bytes of its large group; and the rest.

    >>> unwrap(in_partition(3, pack_bytes(1, b"a")))[:3]
    (3, b'', 0)
    >>> unwrap(pack_group(b"f:1:2", 70_000, pack_bytes(1, b"a")))[:3]
    (-1, b'f:1:2', 70000)
    """
    kind, number = _HEADER.unpack_from(message)
    start = _HEADER.size
    if kind == _PARTITION:
        return number, b"", 0, message[start:]
    if kind == _GROUP:
        token_end = start + 8 + number
        size = int.from_bytes(message[start : start + 8], "little")
        return -1, message[start + 8 : token_end], size, message[token_end:]
    return -1, b"", 0, message


def read(message: bytes) -> bytes:
    """Return the encoded elements of a message. Reads the file if the message refers to one."""
    _, content = unpack(message)
    if isinstance(content, ObjectSpan):
        raise ValueError(f"object {content.key} can be read by a worker of a cluster alone")
    return content if isinstance(content, bytes) else read_span(content)


def object_key(message: bytes) -> str:
    """Return the key of the object that a message refers to; empty if it refers to none."""
    return message[_HEADER.size + _SPAN.size :].decode() if message and message[0] == _OBJECT else ""


def read_span(span: FileSpan) -> bytes:
    """Return the encoded elements of a span."""
    if span.is_packed:
        return files.read_file(span.path)[span.start : span.start + span.size]
    with open(span.path, "rb", buffering=0) as file:
        file.seek(span.start)
        data = file.read(span.size)
        while len(data) < span.size:  # a single read returns at most 2 GiB
            more = file.read(span.size - len(data))
            if not more:
                raise EOFError(f"{span.path} ends {span.size - len(data)} bytes before byte {span.start + span.size}")
            data += more
    return data


def mapped(span: FileSpan) -> memoryview:
    """Return the bytes of a span that is not packed where the file has them. Nothing is read before it is used."""
    with open(span.path, "rb", buffering=0) as file:
        if (size := os.fstat(file.fileno()).st_size) < span.start + span.size:
            raise EOFError(f"{span.path} ends at byte {size}, before byte {span.start + span.size}")
        try:
            whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError:  # some file systems of networks map no files
            return memoryview(read_span(span))
    return memoryview(whole)[span.start : span.start + span.size]


def shard_index(key: bytes, shards: int) -> int:
    """Return which of ``shards`` has an encoded key."""
    return key_hash(key) % shards


def pack_tokens(shards: int, tokens: Mapping[int, bytes], expired_ms: int | None = None) -> bytes:
    """Return the tokens of a bundle's shards by their index, out of ``shards`` shards.

    Windows of its state that end at ``expired_ms`` or earlier have expired, if it is not None.

    >>> unpack_tokens(pack_tokens(8, {3: b"17"}, 60_000))
    (8, {3: b'17'}, 60000)
    """
    return marshal.dumps((shards, dict(tokens), expired_ms))


def unpack_tokens(data: bytes) -> tuple[int, dict[int, bytes], int | None]:
    """Return what :func:`pack_tokens` packed."""
    return marshal.loads(data)


def pack_writes(cells: Mapping[bytes, tuple[bool, list[bytes]]]) -> bytes:
    """Return a batch of writes: for each encoded ``StateKey``, whether to clear the cell first, and what to append.

    >>> unpack_writes(pack_writes({b"k": (True, [b"1", b"2"])}))
    {b'k': (True, [b'1', b'2'])}
    """
    return marshal.dumps(dict(cells))


def unpack_writes(data: bytes) -> dict[bytes, tuple[bool, list[bytes]]]:
    """Return the writes of a batch. The same Python runs on both sides, so its own fast format will do."""
    return marshal.loads(data)


def pack_snapshot(is_complete: bool, cells: Mapping[bytes, bytes]) -> bytes:
    """Return cells by their encoded ``StateKey``s. If they are complete, all other cells of the shard are empty.

    >>> unpack_snapshot(pack_snapshot(True, {b"k": b"12"}))
    (True, {b'k': b'12'})
    """
    return marshal.dumps((is_complete, dict(cells)))


def unpack_snapshot(data: bytes) -> tuple[bool, dict[bytes, bytes]]:
    """Return what :func:`pack_snapshot` packed."""
    return marshal.loads(data)


def pack_usage(cpu_seconds: float, resident: int, pid: int) -> bytes:
    """Return what a bundle has used: CPU seconds, the worker's resident memory in bytes, and the id of its process."""
    return _USAGE.pack(cpu_seconds, resident, pid)


def unpack_usage(message: bytes) -> tuple[float, int, int]:
    """Return what :func:`pack_usage` got, or zeros for an empty message: the worker has not measured."""
    return _USAGE.unpack(message) if message else (0.0, 0, 0)


_KEY_TAG = 0x22  # what comes before the length of the field ``key``, the last one of a state key
_LONGEST_KEY = 0x7F  # bytes, so that its length takes one byte


class StateKeys:
    """Reads the fields of encoded ``StateKey``s of user state. Use it in one thread.

    Most cells that come one after the other have the same step, name, window and length of their keys, so their encoded
    keys begin with the same bytes, and what follows is the user's key. So only the first of them is decoded.

    >>> state_key = beam_fn_api_pb2.StateKey()
    >>> state_key.bag_user_state.key = b"a"
    >>> StateKeys().read(state_key.SerializeToString())
    b'a'
    """

    def __init__(self) -> None:
        self._prefix = b""
        self._size = -1  # of the encoded keys that begin with the prefix
        self.step = ""  # of the key that was read last
        self.window = b""  # of the key that was read last, encoded

    def read(self, cell_key: bytes) -> bytes:
        """Return the encoded key of the user's element. Sets :attr:`step` and :attr:`window`."""
        if len(cell_key) == self._size and cell_key.startswith(self._prefix):
            return cell_key[len(self._prefix) :]
        state_key = beam_fn_api_pb2.StateKey.FromString(cell_key)
        user_state = getattr(state_key, str(state_key.WhichOneof("type")))
        self.step, self.window = user_state.transform_id, user_state.window
        key: bytes = user_state.key
        # The prefix contains the lengths of all fields, so whatever begins with it has the same fields.
        is_last = len(key) <= _LONGEST_KEY and cell_key.endswith(bytes((_KEY_TAG, len(key))) + key)
        self._size = len(cell_key) if is_last else -1
        self._prefix = cell_key[: len(cell_key) - len(key)]
        return key
