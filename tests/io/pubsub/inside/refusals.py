"""What is told before a run starts: a wrong name, no service, no credentials, no --streaming."""

from __future__ import annotations

import socket
from typing import Any

import apache_beam as beam
import grpc
import pytest

from luminosity.errors import PubSubError, UnsupportedPipeline
from luminosity.io.pubsub import client, for_beam
from luminosity.testing import FakePubSub
from tests.io.pubsub.pipelines import options


def _read(**kwargs: Any) -> Any:
    return beam.Pipeline(options=options()) | beam.io.ReadFromPubSub(**kwargs)


def test_a_read_without_streaming_says_what_beam_says() -> None:
    with FakePubSub() as pubsub:
        pipeline = beam.Pipeline(options=options(is_streaming=False))
        with pytest.raises(UnsupportedPipeline, match=r"only available in streaming mode.*--streaming"):
            _ = pipeline | beam.io.ReadFromPubSub(topic=pubsub.create_topic("given"))


def test_a_subscription_that_is_not_there() -> None:
    with FakePubSub(), pytest.raises(PubSubError, match=r"found no subscription projects/project/subscriptions/none"):
        _read(subscription="projects/project/subscriptions/none")


def test_a_topic_that_is_not_there() -> None:
    with FakePubSub():
        with pytest.raises(
            PubSubError,
            match=r"found no topic projects/project/topics/none at the servers of Pub/Sub's emulator.*create",
        ):
            _read(topic="projects/project/topics/none")
        written = beam.Pipeline(options=options()) | beam.Create([b"a"])
        with pytest.raises(PubSubError, match=r"found no topic projects/project/topics/none"):
            _ = written | beam.io.WriteToPubSub("projects/project/topics/none")


def test_a_service_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv(client.EMULATOR, f"127.0.0.1:{unused.getsockname()[1]}")
        monkeypatch.setattr(for_beam, "_CHECK_S", 1.0)
        with pytest.raises(PubSubError, match=r"did not answer within 1 s: UNAVAILABLE.*PUBSUB_EMULATOR_HOST"):
            _read(topic="projects/project/topics/any")


def test_who_may_not_look_may_still_read() -> None:
    with FakePubSub() as pubsub:
        given = pubsub.create_topic("given")
        pubsub.fail("GetTopic", grpc.StatusCode.PERMISSION_DENIED)
        assert _read(topic=given) is not None


def test_missing_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    for name in (client.EMULATOR, "GOOGLE_APPLICATION_CREDENTIALS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("NO_GCE_CHECK", "true")  # no machine of Google's is asked
    with pytest.raises(PubSubError, match=r"found no credentials.*gcloud auth application-default login"):
        _read(topic="projects/project/topics/any")
