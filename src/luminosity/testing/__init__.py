"""Fakes for tests: a device without hardware, a model for it, a clock that moves when told."""

from luminosity.testing.device import (
    Clock,
    FakeBatch,
    FakeClock,
    FakeDevice,
    FakeDeviceHandler,
    FakeModel,
    FakeOutOfMemory,
)

__all__ = ["Clock", "FakeBatch", "FakeClock", "FakeDevice", "FakeDeviceHandler", "FakeModel", "FakeOutOfMemory"]
