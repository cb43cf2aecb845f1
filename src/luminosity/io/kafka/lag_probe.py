"""Asks the broker for the ends of partitions, outside the pipeline: how much waits, also while nothing is read."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from luminosity.errors import LuminosityError
from luminosity.extras import require
from luminosity.io.kafka.consumer import ConsumerSettings
from luminosity.io.kafka.offsets import ErrorLog

__all__ = ["LagProbe"]

_LOGGER = logging.getLogger(__name__)

_TIMEOUT_S = 1.0  # a number that comes later is not that of now
_END = -1  # Kafka's number, in the place of a timestamp


class LagProbe:
    """A connection for the ends of partitions. One thread at a time may use it, which closes it."""

    def __init__(self, settings: ConsumerSettings) -> None:
        """Make a probe, which connects with the first question."""
        self._settings = settings
        self._consumer: Any = None

    def ends(self, partitions: Iterable[str]) -> dict[str, int]:
        """Return the ends of partitions such as ``reviews[3]``. Those that no broker tells within a second are missing.

        The readers say so in the log if brokers are away.
        """
        kafka = require("confluent_kafka", "kafka")
        asked = [(name, *name[:-1].rpartition("[")[::2]) for name in partitions]
        try:
            if self._consumer is None:
                self._consumer = self._settings.client.consumer(self._settings.settings(), ErrorLog())
            wanted = [kafka.TopicPartition(topic, int(number), _END) for _, topic, number in asked]
            found = self._consumer.offsets_for_times(wanted, timeout=_TIMEOUT_S)
        except (kafka.KafkaException, LuminosityError):  # also a secret that only workers have
            _LOGGER.debug("can't ask for the ends of partitions", exc_info=True)
            return {}
        ends = {(each.topic, str(each.partition)): each.offset for each in found if each.error is None}
        return {name: ends[topic, number] for name, topic, number in asked if ends.get((topic, number), -1) >= 0}

    def close(self) -> None:
        """Close the connection."""
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None
