"""Sampling of accelerators: asks their driver for load and memory, and keeps mean and peak over the run."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import Any

__all__ = ["DeviceSampler", "DeviceUse"]


@dataclass(frozen=True)
class DeviceUse:
    """The load and memory of a device at one moment, and over all samples so far."""

    utilization: float | None  # None if the driver does not answer now
    memory_used: int | None
    memory_total: int | None
    mean_utilization: float
    peak_utilization: float
    peak_memory: int


class DeviceSampler:
    """Samples devices. Only one thread calls it; ``uses`` may be read from any thread."""

    def __init__(self, devices: Iterable[str], driver: Any = None) -> None:
        """``driver`` is a module as ``pynvml``, which is used if it is None and there is a GPU among ``devices``."""
        self.uses: dict[str, DeviceUse] = {}
        self._gpus = [device for device in devices if device.startswith("gpu:")]
        self._driver = driver
        self._sums: dict[str, tuple[int, float]] = {}  # samples of each device, and their utilization summed up
        self._handles: dict[str, Any] = {}

    @contextlib.contextmanager
    def opened(self) -> Generator[None]:
        """Open the driver, which is asked only for those devices that it knows."""
        if not self._gpus:
            yield
            return
        if self._driver is None:
            import pynvml

            self._driver = pynvml
        driver = self._driver
        try:
            driver.nvmlInit()
        except driver.NVMLError:
            yield
            return
        try:
            for device in self._gpus:
                number = device.split(":", 1)[1]
                with contextlib.suppress(driver.NVMLError):
                    self._handles[device] = (
                        driver.nvmlDeviceGetHandleByIndex(int(number))
                        if number.isdigit()
                        else driver.nvmlDeviceGetHandleByUUID(number)
                    )
            yield
        finally:
            self._handles = {}
            driver.nvmlShutdown()

    def sample(self) -> None:
        """Ask the driver for all devices, and update ``uses``."""
        self.uses = {**self.uses, **{device: use for device in self._handles if (use := self._use(device)) is not None}}

    def _use(self, device: str) -> DeviceUse | None:
        handle, before = self._handles[device], self.uses.get(device)
        try:
            memory = self._driver.nvmlDeviceGetMemoryInfo(handle)
            percent: Any = self._driver.nvmlDeviceGetUtilizationRates(handle).gpu
        except self._driver.NVMLError:
            # A partition of a device has no utilization, and a device may be gone. What was seen of it stays.
            if before is None:
                return None
            return DeviceUse(None, None, None, before.mean_utilization, before.peak_utilization, before.peak_memory)
        utilization = percent / 100
        count, total = self._sums.get(device, (0, 0.0))
        count, total = self._sums[device] = count + 1, total + utilization
        return DeviceUse(
            utilization,
            int(memory.used),
            int(memory.total),
            mean_utilization=round(total / count, 4),
            peak_utilization=max(utilization, before.peak_utilization if before else 0.0),
            peak_memory=max(int(memory.used), before.peak_memory if before else 0),
        )
