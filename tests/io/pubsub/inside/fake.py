"""The fake itself, as Google's own client sees it: leases, order, streams, refusals."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.api_core.exceptions import (  # pyright: ignore[reportMissingImports]
    AlreadyExists,
    NotFound,
    ServiceUnavailable,
)
from google.cloud import pubsub  # pyright: ignore[reportMissingImports]

from luminosity.errors import InvalidArgument
from luminosity.testing import FakePubSub
from tests.processes import wait_for


def _pull(client: Any, subscription: str) -> list[Any]:
    return list(client.pull(subscription=subscription, max_messages=10, retry=None).received_messages)


def test_a_message_comes_again_until_it_is_acknowledged() -> None:
    with FakePubSub() as fake, pubsub.SubscriberClient() as client:
        topic = fake.create_topic("topic")
        subscription = fake.create_subscription("all", topic, ack_deadline_s=0.2)
        fake.publish(topic, b"one", attributes={"a": "b"})
        (first,) = _pull(client, subscription)
        assert (first.message.data, dict(first.message.attributes)) == (b"one", {"a": "b"})
        assert _pull(client, subscription) == []
        (again,) = wait_for(lambda: _pull(client, subscription), 20)
        assert again.message.message_id == first.message.message_id
        client.acknowledge(subscription=subscription, ack_ids=[again.ack_id])
        assert fake.unacknowledged(subscription) == 0
        assert fake.deliveries(subscription) == (2, 1)


def test_what_is_given_back_comes_at_once_with_all_that_follows_in_its_key() -> None:
    with FakePubSub() as fake, pubsub.SubscriberClient() as client:
        topic = fake.create_topic("topic")
        subscription = fake.create_subscription("all", topic, is_ordered=True)
        for number in range(3):
            fake.publish(topic, b"%d" % number, ordering_key="key")
        pulled = _pull(client, subscription)
        assert [each.message.data for each in pulled] == [b"0", b"1", b"2"]
        client.acknowledge(subscription=subscription, ack_ids=[pulled[2].ack_id])
        client.modify_ack_deadline(subscription=subscription, ack_ids=[pulled[1].ack_id], ack_deadline_seconds=0)
        client.acknowledge(subscription=subscription, ack_ids=[pulled[0].ack_id])
        assert [each.message.data for each in _pull(client, subscription)] == [b"1", b"2"]


def _stream(subscription: str, found: list[bytes]) -> Any:
    def take(message: Any) -> None:
        found.append(message.data)
        message.ack()

    return pubsub.SubscriberClient().subscribe(subscription, take)


def test_googles_streams_and_publishers_work() -> None:
    with FakePubSub() as fake:
        topic = fake.create_topic("topic")
        subscription = fake.create_subscription("all", topic)
        found: list[bytes] = []
        stream = _stream(subscription, found)
        publisher = pubsub.PublisherClient()
        publisher.publish(topic, b"before").result(timeout=20)
        assert wait_for(lambda: found == [b"before"], 20)
        stream.cancel()
        fake.lose_connections(for_s=0.2)
        publisher.publish(topic, b"after").result(timeout=20)
        stream = _stream(subscription, found)
        assert wait_for(lambda: b"after" in found, 20)
        stream.cancel()
        assert [message.data for message in fake.messages(topic)] == [b"before", b"after"]


def test_refusals() -> None:
    with FakePubSub() as fake, pubsub.SubscriberClient() as client:
        subscription = fake.create_subscription("all", fake.create_topic("topic"))
        with pytest.raises(AlreadyExists), pubsub.PublisherClient() as publisher:
            publisher.create_topic(name="projects/project/topics/topic")
        with pytest.raises(NotFound):
            _pull(client, "projects/project/subscriptions/none")
        fake.fail("Pull", grpc.StatusCode.UNAVAILABLE, message="told so")
        with pytest.raises(ServiceUnavailable, match="told so"):
            _pull(client, subscription)
        assert _pull(client, subscription) == []
        with pytest.raises(InvalidArgument, match="there are projects/project/topics/topic"):
            fake.publish("other", b"")
