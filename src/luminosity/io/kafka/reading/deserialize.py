"""Keys and values from bytes: texts, JSON, Avro, Protobuf, and functions of users."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from luminosity._shared.text import first_line, shorten_repr
from luminosity.errors import InvalidArgument, LuminosityError
from luminosity.io.kafka.reading.registry import AvroFormat, ProtobufFormat, SchemaRegistry, Unreadable
from luminosity.io.kafka.record import KafkaRecord

__all__ = ["Deserializer", "deserializer"]

_REASON = 300  # characters of a reason at most


class Deserializer:
    """Turns the bytes of a record's key and value into objects. None stays None."""

    def __init__(self, key: Callable[[bytes], Any] | None, value: Callable[[bytes], Any] | None) -> None:
        self._key = key
        self._value = value

    def read(self, record: KafkaRecord) -> KafkaRecord:
        """Return the record with its objects. Raises ``Unreadable`` with the reason."""
        key, value = record.key, record.value
        if self._key is not None and key is not None:
            key = _apply(self._key, "key", key)
        if self._value is not None and value is not None:
            value = _apply(self._value, "value", value)
        return record._replace(key=key, value=value)


def deserializer(key: Any, value: Any, registry: SchemaRegistry | None = None) -> Deserializer | None:
    """Return what reads keys and values, or None if both stay bytes.

    >>> read = deserializer("utf8", "json").read
    >>> read(KafkaRecord("reviews", 0, 1, 0, 1, b"id-1", b'{"stars": 5}')).value
    {'stars': 5}
    >>> read(KafkaRecord("reviews", 0, 1, 0, 1, b"id-1", None)).value is None
    True
    """
    formats = _format("key", key, registry), _format("value", value, registry)
    return None if formats == (None, None) else Deserializer(*formats)


def _format(name: str, given: Any, registry: SchemaRegistry | None) -> Callable[[bytes], Any] | None:
    if given == "bytes":
        return None
    if given == "utf8":
        return _utf8
    if given == "json":
        return _json
    if given == "avro":
        if registry is None:
            raise InvalidArgument(
                f"found {name}='avro' without schema_registry=, expected where the schemas are",
                fix="pass schema_registry=, or the schema itself as a dict",
            )
        return AvroFormat(registry, None)
    if isinstance(given, Mapping):
        return AvroFormat(registry, given)
    if isinstance(given, type) and hasattr(given, "FromString"):
        return ProtobufFormat(given, is_framed=registry is not None)
    if callable(given):
        return given
    raise InvalidArgument(
        f"found {name}={shorten_repr(given, 80)}, expected 'bytes', 'utf8', 'json', 'avro', an Avro schema as a dict, "
        "a class of Protobuf messages or a function of bytes"
    )


def _apply(function: Callable[[bytes], Any], name: str, content: bytes) -> Any:
    try:
        return function(content)
    except Unreadable as error:
        raise Unreadable(f"the {name} {error}") from None
    except LuminosityError:
        raise  # A server is at fault, not the record.
    except Exception as error:
        text = first_line(f"{type(error).__name__}: {error}", _REASON)
        raise Unreadable(f"the {name} can't be read: {text}") from error


def _utf8(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise Unreadable(f"is not UTF-8: {error.reason} at byte {error.start}") from None


def _json(content: bytes) -> Any:
    text = _utf8(content)
    try:
        return json.loads(text)
    except ValueError as error:
        raise Unreadable(f"is not JSON: {first_line(str(error), _REASON)}") from None
    except RecursionError:
        raise Unreadable("is not JSON that can be read: it is nested too deep") from None
