"""An exactly-once sink as its steps know it, and what must hold before a run begins."""

from __future__ import annotations

import logging
import re
import uuid
from typing import Any

from luminosity.errors import Fix, InvalidArgument
from luminosity.io.kafka.client import KafkaClient
from luminosity.io.kafka.exactly_once.transactions import (
    ShardProducer,
    check_transactions,
    foreign,
    saved_progress,
    shard_id,
)
from luminosity.runs.run_ids import run_identity

__all__ = ["ExactlyOnce"]

_LOGGER = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")  # what Kafka takes as a name, with room for the number of a shard
_MOST_SHARDS = 100  # each is a connection of its own, and a transaction for each bundle that has records of it
_CHECK_S = 5.0  # how long brokers may take to answer when a pipeline is built


class ExactlyOnce:
    """What the steps of an exactly-once write need to know. It travels with the pipeline."""

    def __init__(self, client: KafkaClient, topic: str, name: str, shards: int, delivery_timeout_s: float) -> None:
        self.client = client
        self.topic = topic
        self.name = name
        self.shards = shards
        self.delivery_timeout_s = delivery_timeout_s
        self.run = ""  # the identity of the run, which its checkpoint keeps
        self.start = uuid.uuid4().hex[:8]  # the process that builds the pipeline: each start is another one

    @classmethod
    def of(cls, client: KafkaClient, topic: Any, name: str, shards: int, delivery_timeout_s: float) -> ExactlyOnce:
        """Check the arguments of the transform, and return them."""
        if not _NAME.fullmatch(name):
            raise InvalidArgument(
                f"found exactly_once={name!r}, expected 1 to 200 letters, digits, '.', '_' and '-': it names "
                "transactions and consumer groups"
            )
        if not isinstance(topic, str):
            raise InvalidArgument(
                f"found exactly_once={name!r} without a topic that is the same for all records, expected topic= as a "
                "text",
                fix="use a WriteKafka for each topic, each with a name of its own",
            )
        if not 1 <= shards <= _MOST_SHARDS:
            raise InvalidArgument(f"found shards={shards}, expected 1 to {_MOST_SHARDS}")
        return cls(client, topic, name, shards, delivery_timeout_s)

    def check(self, pipeline: Any) -> None:
        """Raise if it is impossible in this pipeline, or if another run has the name. Asks the brokers, too."""
        identity = run_identity(pipeline)
        if identity.run is None:
            raise InvalidArgument(
                f"found exactly_once={self.name!r} without a checkpoint, expected one: after a crash it says which "
                "number each record has",
                fix=Fix(
                    "run it with LuminosityRunner and the option --checkpoint_dir=DIR, or leave out exactly_once=",
                    command="add --checkpoint_dir=DIR",
                ),
            )
        self.run = str(identity.run)
        if identity.number(f"exactly once {self.client.servers} {self.name}"):
            raise InvalidArgument(
                f"found exactly_once={self.name!r} twice in the pipeline, expected a name for each WriteKafka: each "
                "would end the transactions of the other"
            )
        if not getattr(pipeline.runner, "runs_on_this_machine", False):
            return
        check_transactions(self.client, self.name, self.topic, self.delivery_timeout_s, _CHECK_S)
        knows = False
        for shard in range(self.shards):
            saved, _ = saved_progress(self.client, shard_id(self.name, shard), self.topic, _CHECK_S)
            if saved is not None and saved.run != self.run:
                raise foreign(self.name, saved.run)
            knows = knows or saved is not None
        if identity.is_resumed and not knows:
            _LOGGER.warning(
                "Kafka has no records of exactly_once=%r, though the run continues from a checkpoint: what was written "
                "since then with another name, or so long ago that brokers have forgotten it, comes again",
                self.name,
            )

    def open(self, shard: int) -> ShardProducer:
        """Open the producer of a shard, which fences all others."""
        return ShardProducer(self.client, self.name, shard, self.topic, self.run, self.delivery_timeout_s)
