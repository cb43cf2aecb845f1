"""A message of Pub/Sub as a reader passes it on: its bytes, its event time, and what tells it from others."""

from __future__ import annotations

import hashlib
from typing import Any, Final, NamedTuple

from apache_beam.transforms.window import GlobalWindow
from apache_beam.utils.timestamp import MIN_TIMESTAMP, Timestamp

from luminosity._shared.text import shorten_repr
from luminosity.errors import PubSubError

__all__ = ["DIGEST_BYTES", "SHARDS", "MessageReader", "Received"]

DIGEST_BYTES: Final = 16  # of an id: two that are equal by chance would lose a message
SHARDS: Final = 64  # keys of the step that drops repeated messages, and so the most cores for the steps behind it
_MIN_MICROS = MIN_TIMESTAMP.micros
_MAX_MICROS = GlobalWindow().max_timestamp().micros


class Received(NamedTuple):
    """A message that has come."""

    ack_id: str
    shard: int  # the same for all messages of an ordering key, and for a repeated message
    digest: bytes  # of its id
    micros: int  # its event time
    payload: bytes  # what the transform emits


class MessageReader:
    """Turns messages into what ``ReadFromPubSub`` emits. It travels with the pipeline."""

    def __init__(self, id_label: str | None, timestamp_attribute: str | None, *, with_attributes: bool) -> None:
        self._id_label = id_label
        self._timestamp_attribute = timestamp_attribute
        self._with_attributes = with_attributes

    def read(self, ack_id: str, message: Any) -> Received:
        """Return a message, a ``google.pubsub.v1.PubsubMessage``, as it is passed on.

        Raises ``PubSubError`` if the attribute with its time can't be read.
        """
        attributes = message.attributes
        identity = attributes.get(self._id_label) if self._id_label is not None else None
        # The two kinds of ids do not mix: an attribute may be equal to the id of another message.
        text = f"id {message.message_id}" if identity is None else f"label {identity}"
        digest = hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()
        sharded_by = hashlib.blake2b(message.ordering_key.encode()).digest() if message.ordering_key else digest
        payload = message.SerializeToString() if self._with_attributes else message.data
        return Received(ack_id, sharded_by[0] % SHARDS, digest, self._micros(message), payload)

    def _micros(self, message: Any) -> int:
        name = self._timestamp_attribute
        if name is None or name not in message.attributes:
            time = message.publish_time
            return time.seconds * 1_000_000 + time.nanos // 1_000
        text = message.attributes[name]
        try:
            micros = int(text) * 1_000
        except ValueError:
            try:
                time = Timestamp.from_rfc3339(text)
                time = time.to_precision(Timestamp.MICROS_PRECISION, allow_lossy_conversion=True)
                micros = int(time.micros)
            except (ValueError, OverflowError):
                micros = None
        if micros is None or not _MIN_MICROS <= micros <= _MAX_MICROS:
            raise PubSubError(
                f"message {message.message_id}: found {shorten_repr(text, 60)} in the attribute {name!r}, expected "
                "milliseconds since 1970 or a time such as 2015-10-29T23:41:41.123Z",
                fix="mend what publishes, or leave timestamp_attribute= out; acknowledge the message to leave it out",
            )
        return micros
