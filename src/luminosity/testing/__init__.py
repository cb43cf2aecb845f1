"""Fakes for tests: a device without hardware, a model for it, a clock that tests move, tables, and a Kafka broker."""

from luminosity.testing.equal_table import equal_table
from luminosity.testing.fake_device import (
    Clock,
    FakeBatch,
    FakeClock,
    FakeDevice,
    FakeDeviceHandler,
    FakeModel,
    FakeOutOfMemory,
)
from luminosity.testing.fake_table import FakeTable
from luminosity.testing.kafka_broker import KafkaBroker

__all__ = [
    "Clock",
    "FakeBatch",
    "FakeClock",
    "FakeDevice",
    "FakeDeviceHandler",
    "FakeModel",
    "FakeOutOfMemory",
    "FakeTable",
    "KafkaBroker",
    "equal_table",
]
