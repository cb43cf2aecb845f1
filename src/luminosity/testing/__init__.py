"""Fakes for tests: a device without hardware, a model for it, a clock that tests move, and tables."""

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

__all__ = [
    "Clock",
    "FakeBatch",
    "FakeClock",
    "FakeDevice",
    "FakeDeviceHandler",
    "FakeModel",
    "FakeOutOfMemory",
    "FakeTable",
    "equal_table",
]
