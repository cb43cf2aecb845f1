"""A Pub/Sub for tests: a gRPC server in this process, which loses connections and delivers again when told to."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from types import TracebackType
from typing import Any, NamedTuple

import grpc

from luminosity.errors import InvalidArgument
from luminosity.extras import require
from luminosity.testing.pubsub_subscription import FakeSubscription

__all__ = ["FakePubSub", "PublishedMessage"]

_WAKE_S = 0.1  # how late a stream notices that its client is gone
_STREAMS = 64  # calls at once; a stream holds one of them
_BATCH = 500  # messages of one response
_BATCH_BYTES = 3_000_000  # of one response: gRPC takes 4 MB
_PUBLISHER, _SUBSCRIBER = "google.pubsub.v1.Publisher", "google.pubsub.v1.Subscriber"
_VARIABLE = "PUBSUB_EMULATOR_HOST"


class PublishedMessage(NamedTuple):
    """A message that a topic has got."""

    data: bytes
    attributes: Mapping[str, str]
    ordering_key: str
    message_id: str
    publish_time: datetime


class FakePubSub:
    """A Pub/Sub for tests: a gRPC server on the loopback that speaks the service's own protocol.

    In the ``with`` block, ``PUBSUB_EMULATOR_HOST`` leads to it: pipelines, Google's clients and ``gcloud`` find it::

        with FakePubSub() as pubsub:
            reviews = pubsub.create_topic("reviews")
            subscription = pubsub.create_subscription("all", reviews, ack_deadline_s=2)
            pubsub.publish(reviews, b"fine", attributes={"id": "7"})
            ...  # a pipeline with ReadFromPubSub(subscription=subscription)
            assert pubsub.unacknowledged(subscription) == 0

    It delivers at least once, keeps messages of an ordering key in order, and delivers a message again whose lease has
    ended. ``lose_connections`` closes the server's sockets, ``repeat`` delivers messages twice, ``fail`` refuses calls,
    and ``delay_s`` holds answers back. ``calls`` counts the calls of each method.

    It has no snapshots, filters, dead letters, push endpoints or schemas. Calls for these are refused by gRPC.

    Args:
        project: the project of names without one.
    """

    def __init__(self, project: str = "project") -> None:
        self._types: Any = require("google.pubsub_v1.types", "pubsub")
        self._empty: Any = require("google.protobuf.empty_pb2", "pubsub").Empty
        self.project = project
        self.calls: Counter[str] = Counter()
        self.delay_s = 0.0
        self._changed = threading.Condition()
        self._topics: dict[str, list[PublishedMessage]] = {}
        self._subscriptions: dict[str, FakeSubscription] = {}
        self._failures: dict[str, list[tuple[grpc.StatusCode, str]]] = {}
        self._ids = itertools.count(1)
        self._port = 0
        self._generation = 0
        self._server: Any = None
        self._environment: str | None = None
        self._start()

    # What a test does

    @property
    def host(self) -> str:
        """The address of the server, for ``PUBSUB_EMULATOR_HOST``: ``127.0.0.1:40001``."""
        return f"127.0.0.1:{self._port}"

    def __enter__(self) -> FakePubSub:
        self._environment = os.environ.get(_VARIABLE)
        os.environ[_VARIABLE] = self.host
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._environment is None:
            os.environ.pop(_VARIABLE, None)
        else:
            os.environ[_VARIABLE] = self._environment
        self.close()

    def close(self) -> None:
        """Stop the server. A second call does nothing."""
        self._stop()

    def create_topic(self, name: str) -> str:
        """Create a topic. Returns its full name."""
        full = self._full("topics", name)
        with self._changed:
            self._topics.setdefault(full, [])
        return full

    def create_subscription(
        self, name: str, topic: str, *, ack_deadline_s: float = 10.0, is_ordered: bool = False
    ) -> str:
        """Create a subscription, which gets what is published from now on. Returns its full name.

        The real service allows deadlines from 10 to 600 seconds; tests can be quicker.
        """
        full = self._full("subscriptions", name)
        with self._changed:
            self._known(self._topics, self._full("topics", topic))
            topic = self._full("topics", topic)
            self._subscriptions[full] = FakeSubscription(full, topic, ack_deadline_s, is_ordered=is_ordered)
        return full

    def delete_subscription(self, subscription: str) -> None:
        """Delete a subscription. Its readers get an error."""
        with self._changed:
            self._subscriptions.pop(self._subscription(subscription).name)
            self._changed.notify_all()

    def publish(
        self,
        topic: str,
        data: bytes,
        *,
        attributes: Mapping[str, str] | None = None,
        ordering_key: str = "",
        publish_time: datetime | None = None,
    ) -> str:
        """Publish a message. Returns its id.

        ``publish_time`` may be in the past, so that a test need not wait for the end of a window.
        """
        message = self._types.PubsubMessage.pb()(data=data, attributes=attributes or {}, ordering_key=ordering_key)
        if publish_time is not None:
            message.publish_time.FromDatetime(publish_time)
        with self._changed:
            return self._add(self._full("topics", topic), [message])[0]

    def messages(self, topic: str) -> list[PublishedMessage]:
        """Return all messages that a topic has got, in order."""
        with self._changed:
            return list(self._known(self._topics, self._full("topics", topic)))

    def unacknowledged(self, subscription: str) -> int:
        """Return how many messages of a subscription are not acknowledged."""
        with self._changed:
            return self._subscription(subscription).unacknowledged

    def deliveries(self, subscription: str) -> tuple[int, int]:
        """Return how many messages a subscription has delivered, and how many of these again."""
        with self._changed:
            found = self._subscription(subscription)
            return found.deliveries, found.redeliveries

    def subscriptions(self) -> list[str]:
        """Return the full names of all subscriptions."""
        with self._changed:
            return sorted(self._subscriptions)

    def repeat(self, subscription: str, every: int) -> None:
        """Deliver each message of this number twice, as the service may do; 0 ends that."""
        with self._changed:
            self._subscription(subscription).repeats_every = every

    def fail(self, method: str, code: grpc.StatusCode, times: int = 1, message: str = "told to fail") -> None:
        """Refuse the next calls of a method, such as ``"Acknowledge"``."""
        with self._changed:
            self._failures.setdefault(method, []).extend([(code, message)] * times)

    def lose_connections(self, for_s: float = 0.0) -> None:
        """Close all connections, and accept none for ``for_s`` seconds. Blocks meanwhile."""
        self._stop()
        time.sleep(for_s)
        self._start()

    # The server

    def _start(self) -> None:
        server: Any = grpc.server(
            ThreadPoolExecutor(_STREAMS, "fake-pubsub"), options=[("grpc.so_reuseport", 1 if self._port else 0)]
        )
        server.add_generic_rpc_handlers((self._handlers(_PUBLISHER), self._handlers(_SUBSCRIBER)))
        self._port = server.add_insecure_port(f"127.0.0.1:{self._port}")
        server.start()
        self._server = server

    def _stop(self) -> None:
        server, self._server = self._server, None
        with self._changed:
            self._generation += 1
            self._changed.notify_all()
        if server is not None:
            server.stop(0).wait(5)

    def _handlers(self, service: str) -> Any:
        types = self._types
        calls: dict[str, tuple[Any, Any, Callable[[Any, Any], Any]]] = {
            "CreateTopic": (types.Topic, types.Topic.pb(), self._create_topic),
            "GetTopic": (types.GetTopicRequest, types.Topic.pb(), self._get_topic),
            "DeleteTopic": (types.DeleteTopicRequest, self._empty, self._delete_topic),
            "Publish": (types.PublishRequest, types.PublishResponse.pb(), self._publish),
        }
        if service == _SUBSCRIBER:
            calls = {
                "CreateSubscription": (types.Subscription, types.Subscription.pb(), self._create_subscription),
                "GetSubscription": (types.GetSubscriptionRequest, types.Subscription.pb(), self._get_subscription),
                "DeleteSubscription": (types.DeleteSubscriptionRequest, self._empty, self._delete_subscription),
                "Pull": (types.PullRequest, types.PullResponse.pb(), self._pull),
                "Acknowledge": (types.AcknowledgeRequest, self._empty, self._acknowledge),
                "ModifyAckDeadline": (types.ModifyAckDeadlineRequest, self._empty, self._modify_ack_deadline),
            }
        handlers: dict[str, Any] = {
            name: grpc.unary_unary_rpc_method_handler(
                self._counted(name, respond), request.pb().FromString, response.SerializeToString
            )
            for name, (request, response, respond) in calls.items()
        }
        if service == _SUBSCRIBER:
            handlers["StreamingPull"] = grpc.stream_stream_rpc_method_handler(
                self._streaming_pull,
                types.StreamingPullRequest.pb().FromString,
                types.StreamingPullResponse.pb().SerializeToString,
            )
        return grpc.method_handlers_generic_handler(service, handlers)

    def _counted(self, name: str, respond: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def handle(request: Any, context: Any) -> Any:
            self._begin(name, context)
            return respond(request, context)

        return handle

    def _begin(self, name: str, context: Any) -> None:
        if self.delay_s:
            time.sleep(self.delay_s)
        with self._changed:
            self.calls[name] += 1
            failures = self._failures.get(name)
            failure = failures.pop(0) if failures else None
        if failure is not None:
            context.abort(*failure)

    # Topics

    def _create_topic(self, request: Any, context: Any) -> Any:
        with self._changed:
            is_new = request.name not in self._topics
            self._topics.setdefault(request.name, [])
        if not is_new:
            context.abort(grpc.StatusCode.ALREADY_EXISTS, f"Topic already exists (resource={request.name})")
        return request

    def _get_topic(self, request: Any, context: Any) -> Any:
        with self._changed:
            is_there = request.topic in self._topics
        if not is_there:
            _not_found(context, request.topic)
        return self._types.Topic.pb()(name=request.topic)

    def _delete_topic(self, request: Any, context: Any) -> Any:
        with self._changed:
            is_there = self._topics.pop(request.topic, None) is not None
        if not is_there:
            _not_found(context, request.topic)
        return self._empty()

    def _publish(self, request: Any, context: Any) -> Any:
        for message in request.messages:
            message.ClearField("publish_time")  # the service decides it
        with self._changed:
            is_there = request.topic in self._topics
            keys = {message.ordering_key for message in request.messages}
            ids = self._add(request.topic, request.messages) if is_there and len(keys) == 1 else []
        if not is_there:
            _not_found(context, request.topic)
        if len(keys) != 1:
            context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                "In a single publish request, all messages must have no ordering key or they must all have the same "
                "ordering key.",
            )
        return self._types.PublishResponse.pb()(message_ids=ids)

    def _add(self, topic: str, messages: Iterable[Any]) -> list[str]:
        """Add messages to a topic and to its subscriptions. The caller holds the lock."""
        published = self._known(self._topics, topic)
        ids: list[str] = []
        for message in messages:
            if not message.HasField("publish_time"):
                message.publish_time.FromDatetime(datetime.now(timezone.utc))
            published_at = message.publish_time.ToDatetime(timezone.utc)
            message.message_id = str(next(self._ids))
            attributes = dict(message.attributes)
            ids.append(message.message_id)
            published.append(
                PublishedMessage(message.data, attributes, message.ordering_key, message.message_id, published_at)
            )
            for subscription in self._subscriptions.values():
                if subscription.topic == topic:
                    subscription.publish(message)
        self._changed.notify_all()
        return ids

    # Subscriptions

    def _create_subscription(self, request: Any, context: Any) -> Any:
        with self._changed:
            has_topic = request.topic in self._topics
            is_new = request.name not in self._subscriptions
            if has_topic and is_new:
                deadline_s = request.ack_deadline_seconds or 10
                self._subscriptions[request.name] = FakeSubscription(
                    request.name, request.topic, deadline_s, is_ordered=request.enable_message_ordering
                )
        if not has_topic:
            _not_found(context, request.topic)
        if not is_new:
            context.abort(grpc.StatusCode.ALREADY_EXISTS, f"Subscription already exists (resource={request.name})")
        return request

    def _get_subscription(self, request: Any, context: Any) -> Any:
        found = self._found(request.subscription, context)
        return self._types.Subscription.pb()(
            name=found.name,
            topic=found.topic,
            ack_deadline_seconds=max(1, round(found.ack_deadline_s)),
            enable_message_ordering=found.is_ordered,
        )

    def _delete_subscription(self, request: Any, context: Any) -> Any:
        self._found(request.subscription, context)
        with self._changed:
            self._subscriptions.pop(request.subscription, None)
            self._changed.notify_all()
        return self._empty()

    def _pull(self, request: Any, context: Any) -> Any:
        found = self._found(request.subscription, context)
        with self._changed:
            leased = found.lease(request.max_messages, context, time.monotonic(), found.ack_deadline_s)
        return self._types.PullResponse.pb()(received_messages=self._received(leased))

    def _acknowledge(self, request: Any, context: Any) -> Any:
        found = self._found(request.subscription, context)
        with self._changed:
            for ack_id in request.ack_ids:
                found.acknowledge(ack_id)
            self._changed.notify_all()
        return self._empty()

    def _modify_ack_deadline(self, request: Any, context: Any) -> Any:
        found = self._found(request.subscription, context)
        with self._changed:
            for ack_id in request.ack_ids:
                found.modify(ack_id, request.ack_deadline_seconds, time.monotonic())
            self._changed.notify_all()
        return self._empty()

    def _streaming_pull(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        self._begin("StreamingPull", context)
        first = next(requests, None)
        if first is None:
            return
        found = self._found(first.subscription, context)
        generation = self._generation
        most = first.max_outstanding_messages or 10_000
        deadline_s = first.stream_ack_deadline_seconds or found.ack_deadline_s
        held: set[str] = set()  # by this stream: what flow control counts
        while context.is_active() and generation == self._generation:
            with self._changed:
                if self._subscriptions.get(found.name) is not found:
                    break
                if len(held) >= most:
                    held = {ack_id for ack_id in held if found.is_leased(ack_id)}
                leased = found.lease(min(_BATCH, most - len(held)), context, time.monotonic(), deadline_s)
                if not leased:
                    expiry = found.next_expiry()
                    wait = _WAKE_S if expiry is None else min(_WAKE_S, max(0.001, expiry - time.monotonic()))
                    self._changed.wait(wait)
            held |= {each.ack_id for each in leased}
            for part in _parts(leased):
                yield self._types.StreamingPullResponse.pb()(received_messages=self._received(part))
        if self._subscriptions.get(found.name) is not found:
            _not_found(context, found.name)
        if generation != self._generation:
            context.abort(grpc.StatusCode.UNAVAILABLE, "The connection is lost")

    def _received(self, leased: Iterable[Any]) -> list[Any]:
        received: Any = self._types.ReceivedMessage.pb()
        return [received(ack_id=each.ack_id, message=each.message, delivery_attempt=0) for each in leased]

    # Names

    def _found(self, name: str, context: Any) -> FakeSubscription:
        with self._changed:
            found = self._subscriptions.get(name)
        if found is None:
            _not_found(context, name)
            raise AssertionError("abort raises")
        return found

    def _subscription(self, name: str) -> FakeSubscription:
        return self._known(self._subscriptions, self._full("subscriptions", name))

    def _full(self, kind: str, name: str) -> str:
        return name if "/" in name else f"projects/{self.project}/{kind}/{name}"

    def _known(self, names: Mapping[str, Any], name: str) -> Any:
        if name not in names:
            there = ", ".join(sorted(names)) or "none"
            raise InvalidArgument(f"found the name {name!r}, expected one that exists: there are {there}")
        return names[name]


def _parts(leased: list[Any]) -> Iterator[list[Any]]:
    """Cut messages into responses that gRPC takes."""
    part: list[Any] = []
    size = 0
    for each in leased:
        bytes_ = each.message.ByteSize()
        if part and size + bytes_ > _BATCH_BYTES:
            yield part
            part, size = [], 0
        part.append(each)
        size += bytes_
    if part:
        yield part


def _not_found(context: Any, name: str) -> None:
    context.abort(grpc.StatusCode.NOT_FOUND, f"Resource not found (resource={name.rpartition('/')[2]}).")
