"""Fakes for tests: a device without hardware, a model for it, a clock that tests move, tables, Kafka, and BigQuery."""

from luminosity.testing.fake_bigquery import FakeBigQuery
from luminosity.testing.fake_device import (
    Clock,
    FakeBatch,
    FakeClock,
    FakeDevice,
    FakeDeviceHandler,
    FakeModel,
    FakeOutOfMemory,
)
from luminosity.testing.kafka_broker import KafkaBroker
from luminosity.testing.scripted_kafka import ScriptedKafka
from luminosity.testing.tables import FakeTable, equal_table

__all__ = [
    "Clock",
    "FakeBatch",
    "FakeBigQuery",
    "FakeClock",
    "FakeDevice",
    "FakeDeviceHandler",
    "FakeModel",
    "FakeOutOfMemory",
    "FakeTable",
    "KafkaBroker",
    "ScriptedKafka",
    "equal_table",
]
