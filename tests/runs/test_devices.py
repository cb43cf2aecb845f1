"""Tests of the sampling of accelerators, with a made-up driver."""

from __future__ import annotations

from types import SimpleNamespace

from luminosity.runs.sampling import DeviceSampler, DeviceUse


class DriverError(Exception):
    pass


class Driver:
    """Knows one device, which reports the given percentages and bytes one after another; None is an error."""

    NVMLError = DriverError

    def __init__(self, *samples: tuple[int, int] | None, is_there: bool = True) -> None:
        self._samples = list(samples)
        self._is_there = is_there
        self.is_open = False

    def nvmlInit(self) -> None:
        if not self._is_there:
            raise DriverError
        self.is_open = True

    def nvmlShutdown(self) -> None:
        self.is_open = False

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index != 0:
            raise DriverError
        return index

    def nvmlDeviceGetMemoryInfo(self, _: int) -> SimpleNamespace:
        sample = self._samples[0]
        if sample is None:
            self._samples.pop(0)
            raise DriverError
        return SimpleNamespace(used=sample[1], total=1000)

    def nvmlDeviceGetUtilizationRates(self, _: int) -> SimpleNamespace:
        sample = self._samples.pop(0)
        assert sample is not None
        return SimpleNamespace(gpu=sample[0])


def test_mean_and_peak_are_those_of_all_samples_and_stay_when_the_device_is_gone() -> None:
    driver = Driver((50, 300), (100, 700), (0, 200), None)
    sampler = DeviceSampler(["gpu:0", "gpu:1", "declared:0"], driver)
    with sampler.opened():
        assert driver.is_open
        for _ in range(3):
            sampler.sample()
        assert sampler.uses == {"gpu:0": DeviceUse(0.0, 200, 1000, 0.5, 1.0, 700)}
        sampler.sample()
    assert sampler.uses == {"gpu:0": DeviceUse(None, None, None, 0.5, 1.0, 700)}
    assert not driver.is_open


def test_a_driver_that_does_not_start_reports_nothing() -> None:
    sampler = DeviceSampler(["gpu:0"], Driver(is_there=False))
    with sampler.opened():
        sampler.sample()
    assert sampler.uses == {}
