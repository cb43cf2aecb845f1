"""What WriteToPubSub publishes: batches, attributes, ordering keys, and what happens if the service refuses."""

from __future__ import annotations

from typing import Any

import apache_beam as beam
import grpc
import pytest
from apache_beam.io.gcp.pubsub import PubsubMessage, WriteStringsToPubSub

from luminosity.testing import FakePubSub
from tests.io.pubsub.pipelines import options, texts


def _publish(elements: list[Any], *transforms: Any, streaming: bool = False) -> None:
    with beam.Pipeline(options=options(is_streaming=streaming)) as pipeline:
        made: Any = pipeline | beam.Create(elements)
        for each in transforms:
            made = made | each


def test_a_batch_is_published_in_few_calls() -> None:
    with FakePubSub() as pubsub:
        out = pubsub.create_topic("out")
        _publish([b"%d" % number for number in range(5_000)], beam.io.WriteToPubSub(out))
        assert sorted(map(int, texts(pubsub, out))) == [*range(5_000)]
        assert pubsub.calls["Publish"] < 100


def test_strings_are_published_as_bytes() -> None:
    with FakePubSub() as pubsub:
        out = pubsub.create_topic("out")
        _publish(["grün"], WriteStringsToPubSub(out))
        assert texts(pubsub, out) == ["grün"]


def test_ids_and_times_are_attributes() -> None:
    with FakePubSub() as pubsub:
        out = pubsub.create_topic("out")
        stamped = beam.Map(lambda message: beam.window.TimestampedValue(message, 1_500_000_000))
        write = beam.io.WriteToPubSub(out, with_attributes=True, id_label="id", timestamp_attribute="at")
        messages = [PubsubMessage(b"a", {"kind": "x"}), PubsubMessage(b"b", {})]
        _publish(messages, stamped.with_output_types(PubsubMessage), write)
        found = sorted(pubsub.messages(out))
        assert [message.data for message in found] == [b"a", b"b"]
        assert found[0].attributes["kind"] == "x"
        assert {message.attributes["at"] for message in found} == {"1500000000000"}
        assert len({message.attributes["id"] for message in found}) == 2


def test_messages_of_a_key_keep_their_order() -> None:
    with FakePubSub() as pubsub:
        out = pubsub.create_topic("out")
        each = beam.FlatMap(
            lambda key: [PubsubMessage(b"%d" % n, {}, ordering_key=key) for n in range(3_000)]
        ).with_output_types(PubsubMessage)
        write = beam.io.WriteToPubSub(out, with_attributes=True, publish_with_ordering_key=True)
        _publish(["a", "b"], each, write)
        for key in "ab":
            numbers = [int(m.data) for m in pubsub.messages(out) if m.ordering_key == key]
            assert numbers == [*range(3_000)]


def test_lost_connections_and_refusals_that_pass_lose_nothing() -> None:
    with FakePubSub() as pubsub:
        out = pubsub.create_topic("out")
        pubsub.fail("Publish", grpc.StatusCode.UNAVAILABLE, times=3)
        pubsub.fail("Publish", grpc.StatusCode.RESOURCE_EXHAUSTED, times=2)
        _publish([b"%d" % number for number in range(100)], beam.io.WriteToPubSub(out))
        assert sorted(map(int, texts(pubsub, out))) == [*range(100)]


def test_a_refusal_fails_the_run() -> None:
    with FakePubSub() as pubsub:
        out = pubsub.create_topic("out")
        pubsub.fail("Publish", grpc.StatusCode.PERMISSION_DENIED, times=99, message="not yours")
        with pytest.raises(RuntimeError, match="Pub/Sub refuses a request: PERMISSION_DENIED: not yours"):
            _publish([b"1"], beam.io.WriteToPubSub(out))
        assert pubsub.messages(out) == []


def test_an_element_of_another_type_fails_the_run() -> None:
    with FakePubSub() as pubsub:
        out = pubsub.create_topic("out")
        with pytest.raises(RuntimeError, match="expected: PubsubMessage"):
            _publish(
                [1], beam.Map(lambda n: n).with_output_types(Any), beam.io.WriteToPubSub(out, with_attributes=True)
            )
