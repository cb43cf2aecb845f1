"""Fakes for tests (a device, a model, a clock, tables, Kafka, Pub/Sub, BigQuery) and checks of what you plug in.

Every name is imported when it is first used: a fake of Kafka needs no model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from luminosity._shared.lazy import lazy_names

if TYPE_CHECKING:
    from luminosity.testing.bigquery.fake import FakeBigQuery
    from luminosity.testing.drift_conformance import check_drift_test
    from luminosity.testing.fake_device import (
        Clock,
        FakeBatch,
        FakeClock,
        FakeDevice,
        FakeDeviceHandler,
        FakeModel,
        FakeOutOfMemory,
    )
    from luminosity.testing.fake_pubsub import FakePubSub
    from luminosity.testing.kafka_broker import KafkaBroker
    from luminosity.testing.scripted_kafka import ScriptedKafka
    from luminosity.testing.tables import FakeTable, equal_table
    from luminosity.testing.transactional.kafka import TransactionalKafka

__all__ = [
    "Clock",
    "FakeBatch",
    "FakeBigQuery",
    "FakeClock",
    "FakeDevice",
    "FakeDeviceHandler",
    "FakeModel",
    "FakeOutOfMemory",
    "FakePubSub",
    "FakeTable",
    "KafkaBroker",
    "ScriptedKafka",
    "TransactionalKafka",
    "check_drift_test",
    "equal_table",
]

if not TYPE_CHECKING:  # so that a type checker reports names that don't exist
    __getattr__, __dir__ = lazy_names(__name__)
