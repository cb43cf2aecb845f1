"""Beam's own examples with Pub/Sub run unchanged."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest

from luminosity.testing import FakePubSub
from tests.io.pubsub.pipelines import LONG_S, script, texts
from tests.processes import wait_for

_EXAMPLES = "apache_beam.examples"
_OURS = ["--runner=luminosity.LuminosityRunner", "--progress=off", "--cpu_workers=2"]


@pytest.mark.parametrize("source", ["topic", "subscription"])
def test_streaming_wordcount(source: str) -> None:
    with FakePubSub() as pubsub:
        given, out = pubsub.create_topic("given"), pubsub.create_topic("out")
        name = given
        if source == "subscription":
            name = pubsub.create_subscription("all", given, ack_deadline_s=2)
        arguments = [f"--input_{source}={name}", f"--output_topic={out}", *_OURS]
        with script(f"{_EXAMPLES}.streaming_wordcount", *arguments):
            assert wait_for(pubsub.subscriptions, LONG_S)
            begin = datetime.now(timezone.utc).replace(second=0, microsecond=0) - timedelta(minutes=10)
            for number in range(30):
                pubsub.publish(given, b"to be or", publish_time=begin + timedelta(seconds=number))
            assert wait_for(lambda: len(pubsub.messages(out)) >= 6, LONG_S)
        assert sorted(texts(pubsub, out)) == ["be: 15", "be: 15", "or: 15", "or: 15", "to: 15", "to: 15"]


def test_the_pipeline_of_beams_integration_test() -> None:
    with FakePubSub() as pubsub:
        given, out = pubsub.create_topic("given"), pubsub.create_topic("out")
        subscription = pubsub.create_subscription("all", given, ack_deadline_s=2)
        for number in range(2):
            attributes = {"id": str(number // 2), "at": "1500000000000"}
            pubsub.publish(given, b"data", attributes=attributes)
        code = (
            "import sys; from apache_beam.io.gcp.pubsub_it_pipeline import run_pipeline; "
            "run_pipeline(sys.argv[1:], True, 'id', 'at')"
        )
        arguments = [f"--input_subscription={subscription}", f"--output_topic={out}", *_OURS]
        with script("", code, *arguments):
            assert wait_for(lambda: not pubsub.unacknowledged(subscription) and pubsub.messages(out), LONG_S)
        (message,) = pubsub.messages(out)
        assert message.data == b"data-seen"
        assert message.attributes["processed"] == "IT"
        assert message.attributes["at_out"].startswith("2017-07-14T02:40:00")
        assert message.attributes["at"] == "1500000000000"
        assert message.attributes["id"] != "0"
