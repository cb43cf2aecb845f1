"""Decodes what a checkpoint has of state and timers, without the pipeline's program and without unpickling anything."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from apache_beam.coders import coder_impl, coders

__all__ = ["Undecoded", "ValueReader", "key_of", "window_of"]

_PLAIN_CODERS: dict[str, Callable[[], coders.Coder]] = {
    "string_utf8": coders.StrUtf8Coder,
    "bytes": coders.BytesCoder,
    "varint": coders.VarIntCoder,
    "double": coders.FloatCoder,
    "bool": coders.BooleanCoder,
    "interval_window": coders.IntervalWindowCoder,
}
_STRUCTURES: dict[str, Callable[[list[coder_impl.CoderImpl]], coder_impl.CoderImpl]] = {
    "kv": coder_impl.TupleCoderImpl,
    "tuple": coder_impl.TupleCoderImpl,
    "iterable": lambda parts: coder_impl.IterableCoderImpl(*parts),
    "nullable": lambda parts: coder_impl.NullableCoderImpl(*parts),
    "length_prefix": lambda parts: coder_impl.LengthPrefixCoderImpl(*parts),
}
_PRIMITIVES = "FastPrimitivesCoder"  # Beam's coder for types that it does not know
_NONE, _INT, _FLOAT, _BYTES, _TEXT, _LIST, _TUPLE, _DICT, _SET, _BOOL = range(10)  # how it marks the types it knows
_INTERVALS = ("fixed_windows", "sliding_windows", "session_windows", "SlidingWindows", "Sessions", "FixedWindows")
_TOKEN = re.compile(r"[^(),]+|[(),]")


@dataclass(frozen=True)
class Undecoded:
    """Bytes of a coder that only the pipeline's own program can read, such as pickled objects."""

    data: bytes
    coder: str

    def __str__(self) -> str:
        """Return what a table shows."""
        return f"<{len(self.data):,} bytes of {self.coder}>"


class ValueReader:
    """Reads values of one coder, which is named by its structure, such as ``kv(string_utf8,varint)``."""

    def __init__(self, coder: str) -> None:
        self._coder = coder
        self._impl = _impl_of(coder)

    def values(self, data: bytes) -> Iterator[Any]:
        """Yield the values that follow each other in ``data``; all of it as one :class:`Undecoded` if it can't be."""
        if self._impl is None:
            yield Undecoded(data, self._coder)
            return
        stream = coder_impl.create_InputStream(data)
        found: list[Any] = []
        try:
            while stream.size() > 0:
                found.append(self._impl.decode_from_stream(stream, True))
        except (_NeedsProgram, ValueError, IndexError, EOFError, UnicodeDecodeError):
            yield Undecoded(data, self._coder)
            return
        yield from found


def key_of(data: bytes, coder: str) -> Any:
    """Return the key of a cell or timer; :class:`Undecoded` if it can't be decoded."""
    found = list(ValueReader(coder).values(data))
    return found[0] if len(found) == 1 else Undecoded(data, coder)


def window_of(data: bytes, windows: str) -> tuple[float, float] | Undecoded | None:
    """Return the start and end of a window in seconds since 1970. None is the global window.

    ``windows`` describes the window function, as the shape of a pipeline does.
    """
    if not data:
        return None
    if not windows.startswith(_INTERVALS):
        return Undecoded(data, windows)
    found = key_of(data, "interval_window")
    return found if isinstance(found, Undecoded) else (float(found.start), float(found.end))


_SIMPLE: dict[int, Callable[[Any, bool], Any]] = {
    _INT: lambda stream, _: stream.read_var_int64(),
    _FLOAT: lambda stream, _: stream.read_bigendian_double(),
    _BYTES: lambda stream, nested: stream.read_all(nested),
    _TEXT: lambda stream, nested: stream.read_all(nested).decode(),
    _BOOL: lambda stream, _: bool(stream.read_byte()),
}
_SEVERAL: dict[int, Callable[[list[Any]], Any]] = {_LIST: list, _TUPLE: tuple, _SET: set}


class _NeedsProgram(Exception):
    """A value has a type of the pipeline's program."""


class _PrimitiveImpl(coder_impl.StreamCoderImpl):
    """Reads what Beam's coder for unknown types writes, if it has no types of a program: those would be unpickled."""

    def decode_from_stream(self, stream: Any, nested: bool) -> Any:
        kind = stream.read_byte()
        if kind == _NONE:
            return None
        if kind == _DICT:
            flat = self._several(stream, 2)
            return dict(zip(flat[::2], flat[1::2], strict=True))
        if kind in _SIMPLE:
            return _SIMPLE[kind](stream, nested)
        if kind in _SEVERAL:
            return _SEVERAL[kind](self._several(stream))
        raise _NeedsProgram

    def _several(self, stream: Any, each: int = 1) -> list[Any]:
        count = each * stream.read_var_int64()
        return [self.decode_from_stream(stream, True) for _ in range(count)]


def _impl_of(coder: str) -> coder_impl.CoderImpl | None:
    """Return what reads values of a coder; None if that needs the pipeline's program."""
    tokens = _TOKEN.findall(coder)
    found = _parse(tokens)
    return found if not tokens else None


def _parse(tokens: list[str]) -> coder_impl.CoderImpl | None:
    """Take the first coder from the front of ``tokens``. If it is not known, tokens are left over."""
    name = tokens.pop(0)
    if tokens[:1] != ["("]:
        if name == _PRIMITIVES:
            return _PrimitiveImpl()
        return _PLAIN_CODERS[name]().get_impl() if name in _PLAIN_CODERS else None
    if name not in _STRUCTURES:
        return None
    parts: list[coder_impl.CoderImpl] = []
    while tokens.pop(0) != ")":
        part = _parse(tokens)
        if part is None or not tokens:
            return None
        parts.append(part)
    return _STRUCTURES[name](parts)
