"""Schemas from a schema registry, and the formats that need them: Avro and Protobuf."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlsplit

import urllib3

from luminosity._shared.text import first_line, shorten
from luminosity.errors import InvalidArgument, KafkaError
from luminosity.io.kafka.client import check_place, read_secret

__all__ = ["AvroFormat", "ProtobufFormat", "SchemaRegistry", "Unreadable"]

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
        """Return the response of the registry, or None if it does not know the thing."""
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
