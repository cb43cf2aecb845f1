"""Keys and values from bytes, and what is said of those that can't be read."""

from __future__ import annotations

import io
import json
import pickle
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import fastavro
import pytest
from google.protobuf.wrappers_pb2 import StringValue

from luminosity import KafkaRecord
from luminosity.errors import KafkaError
from luminosity.io.kafka.deserialize import SchemaRegistry, Unreadable, deserializer
from luminosity.testing import ScriptedKafka
from tests.io.kafka.scripted import Bundle, Log, script, step_of

_REVIEW = {"type": "record", "name": "Review", "fields": [{"name": "stars", "type": "int"}]}
_PAIR = {"type": "record", "name": "Pair", "fields": [{"name": "one", "type": "Review"}]}


def record(value: bytes | None, key: bytes | None = b"k") -> KafkaRecord:
    return KafkaRecord("t", 0, 7, 1000, 1, key, value)


def value_of(value_format: Any, content: bytes | None, registry: SchemaRegistry | None = None) -> Any:
    made = deserializer("bytes", value_format, registry)
    assert made is not None
    return pickle.loads(pickle.dumps(made)).read(record(content)).value


def avro(schema: Any, value: Any, number: int | None = None) -> bytes:
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(schema), value)
    return (b"" if number is None else b"\0" + number.to_bytes(4, "big")) + stream.getvalue()


class Registry(BaseHTTPRequestHandler):
    """A schema registry that knows three schemas, is down at first if told, and wants a password if told."""

    requests: list[str]
    fails: int
    password: str | None

    def do_GET(self) -> None:
        self.requests.append(self.path)
        if self.fails:
            type(self).fails -= 1
            self.send_response(503)
            self.end_headers()
            return
        if self.password is not None and self.headers.get("Authorization") != self.password:
            self.send_response(401)
            self.end_headers()
            return
        answers: dict[str, Any] = {
            "/schemas/ids/1": {"schema": json.dumps(_REVIEW)},
            "/schemas/ids/2": {"schema": "syntax = 'proto3';", "schemaType": "PROTOBUF"},
            "/schemas/ids/3": {
                "schema": json.dumps(_PAIR),
                "references": [{"name": "Review", "subject": "a/b", "version": 4}],
            },
            "/subjects/a%2Fb/versions/4": {"schema": json.dumps(_REVIEW)},
        }
        answer = answers.get(self.path)
        body = json.dumps(answer or {"error_code": 40403}).encode()
        self.send_response(200 if answer else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[type[Registry], str]]:
    handler = type("OwnRegistry", (Registry,), {"requests": [], "fails": 0, "password": None})
    made = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield handler, f"http://127.0.0.1:{made.server_port}"
    made.shutdown()
    made.server_close()
    thread.join()


def test_plain_formats() -> None:
    assert deserializer("bytes", "bytes") is None
    assert value_of("utf8", "schön".encode()) == "schön"
    assert value_of("utf8", b"") == ""
    assert value_of("json", b'{"a": [1, null]}') == {"a": [1, None]}
    assert value_of("json", b"null") is None
    assert value_of(len, b"abc") == 3
    for value_format in ("utf8", "json", len):
        assert value_of(value_format, None) is None, "a tombstone stays one"
    both = deserializer("utf8", "json")
    assert both is not None
    assert both.read(record(b"1", None))[5:7] == (None, 1)
    assert both.read(record(b"1", b"k"))[5:7] == ("k", 1)


@pytest.mark.parametrize(
    ("value_format", "content", "reason"),
    [
        ("utf8", b"ok\xff", "the value is not UTF-8: invalid start byte at byte 2"),
        ("json", b"\xff", "the value is not UTF-8: invalid start byte at byte 0"),
        ("json", b"{a", "the value is not JSON: Expecting property name"),
        ("json", b"", "the value is not JSON: Expecting value"),
        ("json", b"[" * 100_000, "nested too deep"),
        (int, b"x", "the value can't be read: ValueError: invalid literal"),
        (_REVIEW, b"\x80", "the value can't be read: "),
        (_REVIEW, b"\x02\x02", "the value is not Avro of its schema: 1 bytes are left"),
        (_REVIEW, b"", "the value can't be read: "),
        (StringValue, b"\xff", "the value can't be read: DecodeError"),
    ],
)
def test_reasons(value_format: Any, content: bytes, reason: str) -> None:
    with pytest.raises(Unreadable) as caught:
        value_of(value_format, content)
    assert reason in str(caught.value)


def test_a_key_that_can_not_be_read_is_named() -> None:
    made = deserializer("utf8", "bytes")
    assert made is not None
    with pytest.raises(Unreadable, match="the key is not UTF-8"):
        made.read(record(b"1", b"\xff"))


def test_avro_without_a_registry() -> None:
    assert value_of(_REVIEW, avro(_REVIEW, {"stars": 5})) == {"stars": 5}


def test_avro_with_a_registry_asks_once_for_each_schema(server: tuple[type[Registry], str]) -> None:
    handler, url = server
    handler.fails = 1
    read = deserializer("bytes", "avro", SchemaRegistry(url))
    assert read is not None
    for stars in range(3):
        assert read.read(record(avro(_REVIEW, {"stars": stars}, 1))).value == {"stars": stars}
    assert handler.requests == ["/schemas/ids/1"] * 2, "one that failed, and one that did not"
    pair = avro({**_PAIR, "fields": [{"name": "one", "type": _REVIEW}]}, {"one": {"stars": 4}}, 3)
    assert read.read(record(pair)).value == {"one": {"stars": 4}}
    wanted = {**_REVIEW, "fields": [*_REVIEW["fields"], {"name": "text", "type": "string", "default": "-"}]}
    assert value_of(wanted, avro(_REVIEW, {"stars": 1}, 1), SchemaRegistry(url)) == {"stars": 1, "text": "-"}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "begins with nothing, expected 00 and the number"),
        (b"{}", "begins with 7b 7d, expected 00 and the number"),
        (b"\0\0\0\0\x09x", "has the schema 9, which the registry does not know"),
        (b"\0\0\0\0\x02x", "has the schema 2, which is PROTOBUF"),
        (b"\0\0\0\0\x01", "can't be read"),
    ],
)
def test_what_a_registry_can_not_help(server: tuple[type[Registry], str], content: bytes, reason: str) -> None:
    with pytest.raises(Unreadable, match=reason):
        value_of("avro", content, SchemaRegistry(server[1]))


def test_a_registry_that_is_at_fault_is_no_dead_letter(
    server: tuple[type[Registry], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    handler, url = server
    handler.password = "Basic bWU6aHVzaA=="
    content = avro(_REVIEW, {"stars": 5}, 1)
    with pytest.raises(KafkaError, match="answered with 401") as caught:
        value_of("avro", content, SchemaRegistry(url))
    assert not caught.value.may_pass
    monkeypatch.setenv("REGISTRY", "me:hush")
    registry = SchemaRegistry(url, "env:REGISTRY")
    assert value_of("avro", content, registry) == {"stars": 5}
    assert "hush" not in repr(registry)
    assert b"hush" not in pickle.dumps(registry)


def test_protobuf_with_and_without_a_registry() -> None:
    content = StringValue(value="fine").SerializeToString()
    assert value_of(StringValue, content).value == "fine"
    registry = SchemaRegistry("http://127.0.0.1:9")  # not asked: the class is known
    for numbers in (b"\0", b"\x02\x00", b"\x04\x02\x06"):  # the first message; one number; two numbers
        assert value_of(StringValue, b"\0\0\0\0\x07" + numbers + content, registry).value == "fine"
    with pytest.raises(Unreadable, match="no list of message numbers"):
        value_of(StringValue, b"\0\0\0\0\x07", registry)


def test_dead_letters_have_the_record_and_the_reason(kafka: ScriptedKafka) -> None:
    script(kafka, {("t", 0): Log(range(3), value="{x")})
    step = step_of(kafka, stop="now", value="json", key="utf8", keeps_unreadable=True)
    bundle = Bundle(step, step.initial_restriction(0))
    letters = [output.value.value for output in bundle.outputs]
    assert [(letter.offset, letter.key, letter.value) for letter, _ in letters] == [(n, b"k", b"{x") for n in range(3)]
    assert all(reason.startswith("the value is not JSON") for _, reason in letters)
    assert bundle.rest is None


def test_without_dead_letters_the_error_has_the_coordinates(kafka: ScriptedKafka) -> None:
    step = step_of(script(kafka, {("t", 0): Log([4], first=4, value="{x")}), stop="now", value="json")
    with pytest.raises(KafkaError, match=r"t\[0\] offset 4: the value is not JSON: .*call .with_exception_handling"):
        Bundle(step, step.initial_restriction(0))


def test_a_function_for_the_time_sees_the_value(kafka: ScriptedKafka) -> None:
    script(kafka, {("t", 0): Log(range(1), value='{"at": 12.5}'), ("t", 1): Log(range(1), value="{}")})
    step = step_of(kafka, stop="now", value="json", timestamps=lambda record: record.value["at"], keeps_unreadable=True)
    bundle = Bundle(step, step.initial_restriction(0))
    good, bad = sorted(bundle.outputs, key=lambda output: hasattr(output, "tag"))
    assert good.timestamp.micros == 12_500_000
    assert bad.value.value[1] == "the function timestamps= raised KeyError: 'at'"
