"""Keys and values from bytes: texts, JSON, Avro and Protobuf, with or without a schema registry, and functions.

A new format is a name in ``_format``, which returns the function that reads it. Writers have no formats:
``outgoing.py`` takes bytes, texts and functions that return them.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote, urlsplit

import urllib3

from luminosity._shared.text import first_line, shorten, shorten_repr
from luminosity.errors import InvalidArgument, KafkaError, LuminosityError
from luminosity.io.kafka.client import check_place, read_secret
from luminosity.io.kafka.record import KafkaRecord

__all__ = ["Deserializer", "SchemaRegistry", "Unreadable", "deserializer"]

_TIMEOUT_S = 5.0  # of a request
_RETRIES = urllib3.Retry(3, backoff_factor=0.2, status_forcelist=(429, 500, 502, 503, 504), raise_on_status=False)
_MOST_SCHEMAS = 1_000  # that are kept
_MOST_REFERENCES = 100  # of one schema, and of those it refers to
_FRAME = 5  # bytes before a value: a zero, and the schema's number in four


class Unreadable(Exception):
    """A record whose key or value can't be read. The message is the reason; it never leaves the step."""


class SchemaRegistry:
    """Fetches schemas by number, and keeps them. It travels with the pipeline, without what it has fetched.

    >>> SchemaRegistry("http://registry:8081")
    SchemaRegistry('http://registry:8081')

    Args:
        url: the address of the registry.
        auth: where ``user:password`` is, as ``"env:NAME"`` or ``"file:PATH"``; None if it is not needed.
    """

    def __init__(self, url: str, auth: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
            # The address is not shown: it may have a password.
            raise InvalidArgument(
                "found an address in schema_registry= that is not like https://registry:8081",
                fix="pass user and password with schema_registry_auth=",
            )
        if auth is not None:
            check_place("schema_registry_auth=", auth)
        self._url = url.rstrip("/")
        self._auth = auth
        self._http: Any = None
        self._avro: dict[int, Any] = {}

    @classmethod
    def of(cls, url: str | None, auth: str | None) -> SchemaRegistry | None:
        """Return the registry that the arguments of ``ReadKafka`` name, if they do."""
        if url is None and auth is not None:
            raise InvalidArgument("found schema_registry_auth= without schema_registry=, expected both or neither")
        return None if url is None else cls(url, auth)

    def __repr__(self) -> str:
        return f"SchemaRegistry({self._url!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {"_url": self._url, "_auth": self._auth, "_http": None, "_avro": {}}

    def avro_schema(self, number: int) -> Any:
        """Return an Avro schema, parsed. Raises ``Unreadable`` if there is none of this number."""
        found = self._avro.get(number)
        if found is None:
            import fastavro

            answer = self._get(f"/schemas/ids/{number}")
            if answer is None:
                raise Unreadable(f"has the schema {number}, which the registry does not know")
            if (kind := answer.get("schemaType", "AVRO")) != "AVRO":
                raise Unreadable(f"has the schema {number}, which is {kind}, expected AVRO")
            named: dict[str, Any] = {}
            self._add_references(answer, named, set())
            found = fastavro.parse_schema(json.loads(answer["schema"]), named)
            if len(self._avro) >= _MOST_SCHEMAS:
                del self._avro[next(iter(self._avro))]
            self._avro[number] = found
        return found

    def _add_references(self, answer: Any, named: dict[str, Any], seen: set[tuple[str, int]]) -> None:
        import fastavro

        for reference in answer.get("references") or ():
            key = reference["subject"], reference["version"]
            if key in seen:
                continue
            seen.add(key)
            if len(seen) > _MOST_REFERENCES:
                raise KafkaError(f"found a schema with more than {_MOST_REFERENCES} references at {self._url}")
            other = self._get(f"/subjects/{quote(key[0], safe='')}/versions/{key[1]}")
            if other is None:
                raise Unreadable(f"has a schema that refers to version {key[1]} of {key[0]}, which does not exist")
            self._add_references(other, named, seen)
            fastavro.parse_schema(json.loads(other["schema"]), named)

    def _get(self, path: str) -> Any:
        """Return the response of the registry, or None if it does not know the path."""
        if self._http is None:
            self._http = urllib3.PoolManager(timeout=_TIMEOUT_S, retries=_RETRIES)
        headers = {"Accept": "application/vnd.schemaregistry.v1+json"}
        if self._auth is not None:
            headers.update(urllib3.make_headers(basic_auth=read_secret("schema_registry_auth=", self._auth)))
        try:
            response = self._http.request("GET", self._url + path, headers=headers)
        except urllib3.exceptions.HTTPError as error:
            reason = first_line(str(error), 200)
            raise KafkaError(f"the schema registry {self._url} can't be reached: {reason}", may_pass=True) from None
        if response.status == 404:
            return None
        if response.status != 200:
            body = shorten(response.data.decode(errors="replace"), 200)
            raise KafkaError(
                f"the schema registry {self._url} answered with {response.status}: {body}",
                may_pass=response.status >= 500 or response.status == 429,
            )
        try:
            return json.loads(response.data)
        except ValueError:
            raise KafkaError(f"the schema registry {self._url} answered with something that is not JSON") from None


class AvroFormat:
    """Reads Avro: with the number of its schema before it, or, without a registry, with a schema that is given."""

    def __init__(self, registry: SchemaRegistry | None, schema: Mapping[str, Any] | None) -> None:
        import fastavro

        self._registry = registry
        try:
            self._schema: Any = None if schema is None else fastavro.parse_schema(dict(schema))
        except Exception as error:  # fastavro raises many
            reason = first_line(f"{type(error).__name__}: {error}", 200)
            raise InvalidArgument(f"found a dict that is not an Avro schema: {reason}") from None

    def __call__(self, content: bytes) -> Any:
        """Return the object that the bytes describe, with the fields of the given schema, if there is one."""
        import fastavro

        if self._registry is None:
            writer, reader, stream = self._schema, None, io.BytesIO(content)
        else:
            writer, reader = self._registry.avro_schema(_framed(content)), self._schema
            stream = io.BytesIO(content)
            stream.seek(_FRAME)
        found = fastavro.schemaless_reader(stream, writer, reader)
        if left := len(content) - stream.tell():
            raise Unreadable(f"is not Avro of its schema: {left} bytes are left")
        return found


class ProtobufFormat:
    """Reads messages of one Protobuf class; with a registry, each has the number of its schema before it."""

    def __init__(self, message: type, *, is_framed: bool) -> None:
        self._message = message
        self._is_framed = is_framed

    def __call__(self, content: bytes) -> Any:
        """Return the message that the bytes describe."""
        if self._is_framed:
            _framed(content)
            count, at = _varint(content, _FRAME)  # which message of the schema it is, as a list of numbers
            for _ in range(count):
                _, at = _varint(content, at)
            content = content[at:]
        return self._message.FromString(content)  # type: ignore[attr-defined]


def _framed(content: bytes) -> int:
    """Return the schema's number, which precedes the value."""
    if len(content) < _FRAME or content[0] != 0:
        start = content[:_FRAME].hex(" ") or "nothing"
        raise Unreadable(f"begins with {start}, expected 00 and the number of a schema")
    return int.from_bytes(content[1:_FRAME], "big")


def _varint(content: bytes, at: int) -> tuple[int, int]:
    """Return a number in zigzag encoding, and where it ends."""
    number = shift = 0
    while True:
        if at >= len(content) or shift > 28:
            raise Unreadable("has no list of message numbers after its schema's number")
        byte = content[at]
        number |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return (number >> 1) ^ -(number & 1), at


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
