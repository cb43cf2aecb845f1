"""Calls of Pub/Sub, with the credentials of the environment, and what its errors mean."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any, Final
from urllib.parse import quote

import grpc

from luminosity.errors import MissingExtra, PubSubError
from luminosity.extras import install_command, require
from luminosity.io.outage import OutageLog

__all__ = ["EMULATOR", "MAX_OUTAGE_S", "Connection", "Service", "describe", "is_transient", "until_answered"]

EMULATOR: Final = "PUBSUB_EMULATOR_HOST"
MAX_OUTAGE_S: Final = 300.0  # as for Kafka: an outage may last for minutes, but not go unnoticed
_CALL_S = 20.0  # how long a call may take before it is made again
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0  # between attempts
_LARGEST_MESSAGE = 32 * 1024 * 1024  # a pull brings several messages of up to 10 MB
_PUBLISHER, _SUBSCRIBER = "/google.pubsub.v1.Publisher/", "/google.pubsub.v1.Subscriber/"
_TRANSIENT = frozenset(
    {
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.UNKNOWN,
    }
)


class Service:
    """Where Pub/Sub is: Google's, or an emulator. It travels with the pipeline, without credentials."""

    def __init__(self, emulator: str | None) -> None:
        self.emulator = emulator

    @classmethod
    def of_environment(cls) -> Service:
        """Return the service that ``PUBSUB_EMULATOR_HOST`` names, or Google's.

        Raises ``MissingExtra`` if the library is not installed.
        """
        _library()
        return cls(os.environ.get(EMULATOR) or None)

    @property
    def name(self) -> str:
        """What messages call the service."""
        return f"the servers of Pub/Sub's emulator at {self.emulator}" if self.emulator else "the servers of Pub/Sub"

    def connect(self) -> Connection:
        """Return a connection, which the caller closes."""
        return Connection(self)


class Connection:
    """A channel to Pub/Sub. Several threads may use it."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.types = _library()
        if service.emulator:
            limits = [
                ("grpc.max_receive_message_length", _LARGEST_MESSAGE),
                ("grpc.max_send_message_length", _LARGEST_MESSAGE),
                ("grpc.max_reconnect_backoff_ms", 1_000),  # how late the end of an outage is noticed
            ]
            self._client = None
            self._channel: Any = grpc.insecure_channel(service.emulator, options=limits)
        else:
            self._client, self._channel = _authorised()
        self._empty = require("google.protobuf.empty_pb2", "pubsub").Empty

    def close(self) -> None:
        """Close the channel."""
        (self._client or self._channel).close()

    # Calls. Each of them is made once, and raises grpc.RpcError.

    def topic(self, name: str, timeout_s: float = _CALL_S) -> Any:
        """Return a topic."""
        request = self.types.GetTopicRequest.pb()(topic=name)
        return self._call(_PUBLISHER + "GetTopic", request, self.types.Topic.pb(), f"topic={name}", timeout_s)

    def subscription(self, name: str, timeout_s: float = _CALL_S) -> Any:
        """Return a subscription."""
        request = self.types.GetSubscriptionRequest.pb()(subscription=name)
        answer = self.types.Subscription.pb()
        return self._call(_SUBSCRIBER + "GetSubscription", request, answer, f"subscription={name}", timeout_s)

    def create_subscription(self, name: str, topic: str, ack_deadline_s: int, expires_s: int | None) -> None:
        """Create a subscription that keeps the order of keys. Without a reader it expires after ``expires_s``."""
        made = self.types.Subscription.pb()(
            name=name, topic=topic, ack_deadline_seconds=ack_deadline_s, enable_message_ordering=True
        )
        if expires_s is not None:
            made.expiration_policy.ttl.seconds = expires_s
        self._call(_SUBSCRIBER + "CreateSubscription", made, self.types.Subscription.pb(), f"name={name}")

    def delete_subscription(self, name: str, timeout_s: float = _CALL_S) -> None:
        """Delete a subscription."""
        request = self.types.DeleteSubscriptionRequest.pb()(subscription=name)
        self._call(_SUBSCRIBER + "DeleteSubscription", request, self._empty, f"subscription={name}", timeout_s)

    def publish(self, topic: str, messages: list[Any]) -> None:
        """Publish messages, all of the same ordering key, in their order."""
        request = self.types.PublishRequest.pb()(topic=topic, messages=messages)
        self._call(_PUBLISHER + "Publish", request, self.types.PublishResponse.pb(), f"topic={topic}")

    def acknowledge(self, subscription: str, ack_ids: list[str]) -> None:
        """Acknowledge messages."""
        request = self.types.AcknowledgeRequest.pb()(subscription=subscription, ack_ids=ack_ids)
        self._call(_SUBSCRIBER + "Acknowledge", request, self._empty, f"subscription={subscription}")

    def modify_deadline(self, subscription: str, ack_ids: list[str], seconds: int) -> None:
        """Let messages come again after some seconds; 0 lets them come at once."""
        request = self.types.ModifyAckDeadlineRequest.pb()(
            subscription=subscription, ack_ids=ack_ids, ack_deadline_seconds=seconds
        )
        self._call(_SUBSCRIBER + "ModifyAckDeadline", request, self._empty, f"subscription={subscription}")

    def streaming_pull(self, requests: Iterator[Any], subscription: str) -> Any:
        """Return the call that yields responses until it is cancelled or the connection is lost."""
        call = self._channel.stream_stream(
            _SUBSCRIBER + "StreamingPull",
            request_serializer=self.types.StreamingPullRequest.pb().SerializeToString,
            response_deserializer=self.types.StreamingPullResponse.pb().FromString,
        )
        return call(requests, metadata=_routing(f"subscription={subscription}"))

    def _call(self, method: str, request: Any, answer: Any, routed_by: str, timeout_s: float = _CALL_S) -> Any:
        call = self._channel.unary_unary(
            method, request_serializer=type(request).SerializeToString, response_deserializer=answer.FromString
        )
        return call(request, timeout=timeout_s, metadata=_routing(routed_by))


def _library() -> Any:
    """Return the types of the service's messages."""
    try:
        return require("google.pubsub_v1.types", "pubsub")
    except MissingExtra as error:
        if error.name is not None and not error.name.startswith(("google.pubsub_v1", "google.cloud", "google")):
            raise
        raise MissingExtra(
            "google-cloud-pubsub is not installed, but the pipeline reads from or writes to Pub/Sub",
            fix=f"install the extra pubsub of luminosity: {install_command('pubsub')}",
            name=error.name or "google.pubsub_v1",
        ) from None


def _authorised() -> tuple[Any, Any]:
    """Return Google's own client, which knows credentials, and its channel."""
    exceptions = require("google.auth.exceptions", "pubsub")
    try:
        client = require("google.pubsub_v1.services.subscriber", "pubsub").SubscriberClient()
    except exceptions.GoogleAuthError as error:
        raise PubSubError(
            f"found no credentials for Google Cloud: {error}",
            fix=f"run gcloud auth application-default login, or set {EMULATOR} to the address of an emulator",
        ) from None
    return client.transport, client.transport.grpc_channel


def _routing(text: str) -> list[tuple[str, str]]:
    name, _, value = text.partition("=")
    return [("x-goog-request-params", f"{name}={quote(value, safe='')}")]


def is_transient(error: grpc.RpcError) -> bool:
    """Return whether the same call may succeed later."""
    return _code(error) in _TRANSIENT


def describe(error: grpc.RpcError) -> str:
    """Return what a call failed with, in one line."""
    details = error.details() if isinstance(error, grpc.Call) else None
    code = _code(error)
    return f"{code.name if code is not None else type(error).__name__}: {' '.join((details or '').split())[:300]}"


def _code(error: grpc.RpcError) -> grpc.StatusCode | None:
    return error.code() if isinstance(error, grpc.Call) else None


def until_answered(
    call: Callable[[], Any],
    outage: OutageLog,
    max_outage_s: float = MAX_OUTAGE_S,
    should_stop: Callable[[], bool] = lambda: False,
) -> Any:
    """Make a call again until the service answers. Blocks for ``max_outage_s`` at most.

    Raises ``PubSubError`` if it refuses, or does not answer for so long; ``grpc.RpcError`` if ``should_stop()``.
    """
    pause = _FIRST_PAUSE_S
    while True:
        try:
            result = call()
        except grpc.RpcError as error:
            if not is_transient(error):
                raise PubSubError(f"Pub/Sub refuses a request: {describe(error)}") from None
            outage.note_silence(describe(error))
            if outage.seconds() > max_outage_s:
                raise PubSubError(
                    f"Pub/Sub has not answered for {outage.seconds():.0f} s: {describe(error)}",
                    fix="check the network, and the address and the credentials of the service",
                ) from None
            if should_stop():
                raise
            time.sleep(pause)
            pause = min(_LONGEST_PAUSE_S, 2 * pause)
        else:
            outage.note_answer()
            return result
