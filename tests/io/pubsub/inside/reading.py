"""What ReadFromPubSub gives: elements, attributes, times, windows, and what it acknowledges."""

from __future__ import annotations

import time
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.io.gcp.pubsub import MultipleReadFromPubSub, PubSubSourceDescriptor, ReadStringsFromPubSub

from luminosity.testing import FakePubSub
from tests.io.pubsub.inside.conftest import AtEnd
from tests.io.pubsub.pipelines import LONG_S, options, run_until, running, texts
from tests.processes import wait_for


def _two_topics(pubsub: FakePubSub, **kwargs: Any) -> tuple[str, str, str]:
    given, out = pubsub.create_topic("given"), pubsub.create_topic("out")
    return given, pubsub.create_subscription("all", given, ack_deadline_s=2, **kwargs), out


def test_messages_are_read_once_and_acknowledged() -> None:
    with FakePubSub() as pubsub:
        given, subscription, out = _two_topics(pubsub)
        pubsub.repeat(subscription, every=3)
        for number in range(500):
            pubsub.publish(given, b"%d" % number)

        def build(pipeline: beam.Pipeline) -> Any:
            return pipeline | beam.io.ReadFromPubSub(subscription=subscription) | beam.io.WriteToPubSub(out)

        with running(build) as result:
            # What is published is committed a moment later.
            assert wait_for(lambda: _counters(result).get("messages_read") == 500, LONG_S)
            assert wait_for(lambda: not pubsub.unacknowledged(subscription), LONG_S)
            _, again = pubsub.deliveries(subscription)
            assert again >= 100
            assert wait_for(lambda: _counters(result)["repeated_messages_dropped"] == again, LONG_S)
            assert _counters(result)["messages_read"] == 500
        assert sorted(texts(pubsub, out), key=int) == [str(number) for number in range(500)]


def _counters(result: Any) -> dict[str, int]:
    return {each.key.metric.name: each.committed for each in result.metrics().query()["counters"]}


def test_nothing_is_acknowledged_before_its_bundle_is_committed(tmp_path: Path) -> None:
    with FakePubSub() as pubsub:
        given, subscription, out = _two_topics(pubsub)
        pubsub.publish(given, b"now")

        def build(pipeline: beam.Pipeline) -> Any:
            return pipeline | beam.io.ReadFromPubSub(subscription=subscription) | beam.io.WriteToPubSub(out)

        pubsub.fail("Acknowledge", _unavailable(), times=3)
        run_until(build, lambda: not pubsub.unacknowledged(subscription))
        assert texts(pubsub, out) == ["now"]
        assert pubsub.calls["Acknowledge"] >= 4


def _unavailable() -> Any:
    import grpc

    return grpc.StatusCode.UNAVAILABLE


def test_attributes_labels_and_times() -> None:
    with FakePubSub() as pubsub:
        given, subscription, out = _two_topics(pubsub)
        for number, time_ in [(1, "1500000000000"), (2, "2017-07-14T02:40:01.5Z"), (1, "1500000000000")]:
            attributes = {"id": str(number), "at": time_}
            pubsub.publish(given, f"message {number}".encode(), attributes=attributes, ordering_key="k")

        def tell(message: Any, timestamp: Any = beam.DoFn.TimestampParam) -> bytes:
            assert message.message_id
            assert message.publish_time
            return f"{message.data.decode()} {message.attributes['id']} {message.ordering_key} {timestamp}".encode()

        def build(pipeline: beam.Pipeline) -> Any:
            read = beam.io.ReadFromPubSub(
                subscription=subscription, id_label="id", with_attributes=True, timestamp_attribute="at"
            )
            return pipeline | read | beam.Map(tell).with_output_types(bytes) | beam.io.WriteToPubSub(out)

        run_until(build, lambda: not pubsub.unacknowledged(subscription) and len(pubsub.messages(out)) > 1)
        assert sorted(texts(pubsub, out)) == [
            "message 1 1 k Timestamp(1500000000)",
            "message 2 2 k Timestamp(1500000001.500000)",
        ]


def test_windows_close_when_older_messages_are_acknowledged() -> None:
    with FakePubSub() as pubsub:
        given, subscription, out = _two_topics(pubsub)
        begin = datetime.now(timezone.utc).replace(second=0, microsecond=0) - timedelta(minutes=10)
        for number in range(60):
            pubsub.publish(given, b"word", publish_time=begin + timedelta(seconds=number % 30))

        def build(pipeline: beam.Pipeline) -> Any:
            words = pipeline | beam.io.ReadFromPubSub(subscription=subscription)
            counts = words | beam.WindowInto(beam.window.FixedWindows(10)) | beam.combiners.Count.PerElement()
            lines = counts | beam.MapTuple(lambda word, count: b"%s %d" % (word, count)).with_output_types(bytes)
            return lines | beam.io.WriteToPubSub(out)

        run_until(build, lambda: len(pubsub.messages(out)) >= 3)
        assert texts(pubsub, out) == ["word 20"] * 3


def test_a_topic_gets_a_subscription_of_the_run_only(at_end: AtEnd) -> None:
    with FakePubSub() as pubsub:
        given, _, out = _two_topics(pubsub)
        pipeline = beam.Pipeline(options=options())
        read = pipeline | ReadStringsFromPubSub(topic=given)  # pyright: ignore[reportArgumentType]
        _ = read | beam.Map(str.encode) | beam.io.WriteToPubSub(out)
        assert len(pubsub.subscriptions()) == 1, "building a pipeline makes nothing"
        result: Any = pipeline.run()
        try:
            assert wait_for(lambda: len(pubsub.subscriptions()) == 2, LONG_S)
            pubsub.publish(given, b"fine")
            assert wait_for(lambda: texts(pubsub, out) == ["fine"], LONG_S)
        finally:
            result.cancel()
        (delete,) = at_end.calls
        delete()
        assert len(pubsub.subscriptions()) == 1


def test_several_sources_at_once() -> None:
    with FakePubSub() as pubsub:
        given, subscription, out = _two_topics(pubsub)
        other = pubsub.create_subscription("other", given, ack_deadline_s=2)
        pubsub.publish(given, b"to both")

        def build(pipeline: beam.Pipeline) -> Any:
            sources = [PubSubSourceDescriptor(subscription), PubSubSourceDescriptor(other)]
            return pipeline | MultipleReadFromPubSub(sources) | beam.io.WriteToPubSub(out)

        run_until(build, lambda: len(pubsub.messages(out)) >= 2)
        assert texts(pubsub, out) == ["to both", "to both"]


def test_a_time_that_can_not_be_read_ends_the_run() -> None:
    with FakePubSub() as pubsub:
        given, subscription, _ = _two_topics(pubsub)
        pubsub.publish(given, b"bad", attributes={"at": "tomorrow"})
        pipeline = beam.Pipeline(options=options())
        _ = pipeline | beam.io.ReadFromPubSub(subscription=subscription, timestamp_attribute="at") | beam.Map(len)
        with pytest.raises(RuntimeError, match="found 'tomorrow' in the attribute 'at'"):
            pipeline.run().wait_until_finish()
        assert pubsub.unacknowledged(subscription) == 1


def test_an_idle_reader_does_not_end(caplog: pytest.LogCaptureFixture) -> None:
    with FakePubSub() as pubsub:
        given, subscription, out = _two_topics(pubsub)

        def build(pipeline: beam.Pipeline) -> Any:
            return pipeline | beam.io.ReadFromPubSub(subscription=subscription) | beam.io.WriteToPubSub(out)

        began = time.monotonic()

        def publish_late() -> bool:
            if time.monotonic() - began > 3 and not pubsub.messages(given):
                pubsub.publish(given, b"late")
            return texts(pubsub, out) == ["late"]

        run_until(build, publish_late)
        assert "pass --checkpoint_dir to keep them" in caplog.text
