"""What ``LuminosityRunner`` runs for Beam's ``ReadFromPubSub`` and ``WriteToPubSub``."""

from __future__ import annotations

import atexit
import logging
import time
import uuid
from typing import Any

import apache_beam as beam
import grpc
from apache_beam.io.gcp import pubsub
from apache_beam.options.pipeline_options import GoogleCloudOptions, StandardOptions

from luminosity.core import usable_cores
from luminosity.errors import MissingExtra, PubSubError, UnsupportedPipeline
from luminosity.io.pubsub.client import EMULATOR, Connection, Service, describe, is_transient
from luminosity.io.pubsub.deduplicate import DropRepeated
from luminosity.io.pubsub.publish import Label, Publish, PublishSettings
from luminosity.io.pubsub.puller import Source
from luminosity.io.pubsub.read_step import NameSources, ReadSettings, ReadSubscription
from luminosity.io.pubsub.received import MessageReader
from luminosity.runner_options import LuminosityOptions

__all__ = ["read_from_pubsub", "write_to_pubsub"]

_BEAMS: Any = pubsub
_LOGGER = logging.getLogger(__name__)

_CHECK_S = 5.0  # how long the service may take to answer when a pipeline is built
_DELETE_S = 5.0  # how long an ending script waits for its temporary subscription to be deleted
_MOST_READERS = 4  # each has a stream and a slot of a worker


def read_from_pubsub(read: Any, pipeline_begin: Any) -> Any:
    """Return the messages of Beam's source of Pub/Sub: bytes, or serialized messages if it has their attributes.

    Raises ``UnsupportedPipeline`` without ``--streaming``, as other runners do, and ``PubSubError`` if the service says
    that the subscription or the topic can't be read.
    """
    source, pipeline = read.source, pipeline_begin.pipeline
    options = pipeline.options
    service = Service.of_environment()
    if not options.view_as(StandardOptions).streaming:
        raise UnsupportedPipeline(
            "Pub/Sub I/O is only available in streaming mode", fix="use the --streaming flag, as on other runners"
        )
    runs_here = bool(getattr(pipeline.runner, "runs_on_this_machine", False))
    is_durable = options.view_as(LuminosityOptions).checkpoint_dir is not None
    subscription = source.full_subscription
    if runs_here:
        _check(service, source.full_topic, subscription)
        if not is_durable:
            _LOGGER.warning(
                "%s: messages are acknowledged when this run has them. If its process is killed, those that it has "
                "read and not written yet are lost; pass --checkpoint_dir to keep them",
                subscription or source.full_topic,
            )
    if subscription is None:
        project = options.view_as(GoogleCloudOptions).project or source.project
        subscription = f"projects/{project}/subscriptions/luminosity-{uuid.uuid4().hex}"
        if runs_here and not is_durable:
            atexit.register(_delete, service, subscription)
    settings = ReadSettings(
        service,
        source.full_topic,
        subscription,
        MessageReader(source.id_label, source.timestamp_attribute, with_attributes=source.with_attributes),
        f"luminosity-{uuid.uuid4().hex[:12]}",
        keeps_subscription=is_durable,
    )
    name: Any = beam.ParDo(NameSources(settings, min(_MOST_READERS, usable_cores())))
    receive: Any = beam.ParDo(ReadSubscription(settings))
    once: Any = beam.ParDo(DropRepeated())
    sources = pipeline_begin | "Impulse" >> beam.Impulse() | "Sources" >> name.with_output_types(Source)
    packed = sources | "Receive" >> receive.with_output_types(tuple[int, bytes])
    return packed | "DropRepeated" >> once.with_output_types(bytes)


def write_to_pubsub(write: Any, messages: Any) -> Any:
    """Publish the elements that Beam's ``WriteToPubSub`` gets, in batches.

    Raises ``PubSubError`` if the service says that the topic does not exist.
    """
    service = Service.of_environment()
    if getattr(messages.pipeline.runner, "runs_on_this_machine", False):
        _check(service, write.full_topic, None)
    # Beam's own step, which checks the elements and reports the lineage.
    if write.with_attributes:
        to_message: Any = _BEAMS._AddMetricsAndMap(write.message_to_proto_str, write.project, write.topic_name)
        named, taken = "ToProtobufX", _BEAMS.PubsubMessage
    else:
        to_message = _BEAMS._AddMetricsAndMap(write.bytes_to_proto_str, write.project, write.topic_name)
        named, taken = "ToProtobufY", bytes | str
    settings = PublishSettings(service, write.full_topic, write.id_label, write.timestamp_attribute)
    convert: Any = beam.ParDo(to_message)
    made = messages | named >> convert.with_input_types(taken).with_output_types(bytes)
    if write.id_label is not None or write.timestamp_attribute is not None:
        label: Any = beam.ParDo(Label(settings))
        made = made | "Label" >> label.with_output_types(bytes)
        if write.id_label is not None and not write.publish_with_ordering_key:
            # A bundle that is run again gets the same ids, so that readers can drop what was published before. It
            # would mix the messages of a key.
            made = made | "KeepIds" >> beam.Reshuffle()
    return made | "Publish" >> beam.ParDo(Publish(settings))


def _check(service: Service, topic: str | None, subscription: str | None) -> None:
    """Raise ``PubSubError`` if the service lacks the topic or subscription, or does not answer."""
    connection = service.connect()
    try:
        _ask(connection, topic, subscription)
    except grpc.RpcError as error:
        code: Any = error.code() if isinstance(error, grpc.Call) else None
        what = subscription or topic
        if code == grpc.StatusCode.NOT_FOUND:
            kind = "subscription" if subscription else "topic"
            raise PubSubError(
                f"found no {kind} {what} at {service.name}, expected one that exists",
                fix=f"create it with gcloud pubsub {kind}s create {what}, or mend its name",
            ) from None
        if is_transient(error):
            raise PubSubError(
                f"{service.name} did not answer within {_CHECK_S:.0f} s: {describe(error)}",
                fix=f"check the network, or the address in {EMULATOR}",
            ) from None
        if code == grpc.StatusCode.UNAUTHENTICATED:
            raise PubSubError(
                f"{service.name} refuse the credentials: {describe(error)}",
                fix="run gcloud auth application-default login",
            ) from None
        # Who may read or publish need not have the right to look.
        _LOGGER.info("can't look whether %s exists: %s", what, describe(error))
    finally:
        connection.close()


def _ask(connection: Connection, topic: str | None, subscription: str | None) -> None:
    """Ask for one of them, and again for some seconds if the service does not answer."""
    until = time.monotonic() + _CHECK_S
    while True:
        left = max(0.1, until - time.monotonic())
        try:
            if subscription is not None:
                connection.subscription(subscription, left)
            elif topic is not None:
                connection.topic(topic, left)
            return
        except grpc.RpcError as error:
            if not is_transient(error) or time.monotonic() + 0.2 > until:
                raise
            time.sleep(0.2)


def _delete(service: Service, subscription: str) -> None:
    """Delete a temporary subscription. Called when the script ends."""
    connection: Connection | None = None
    try:
        connection = service.connect()
        connection.delete_subscription(subscription, _DELETE_S)
    except (grpc.RpcError, MissingExtra, PubSubError) as error:
        is_gone = isinstance(error, grpc.Call) and error.code() == grpc.StatusCode.NOT_FOUND
        if not is_gone:  # it is if the run has not begun
            _LOGGER.warning(
                "the temporary subscription %s was not deleted (%s); Pub/Sub removes it after a day without readers",
                subscription,
                describe(error) if isinstance(error, grpc.RpcError) else error,
            )
    finally:
        if connection is not None:
            connection.close()
