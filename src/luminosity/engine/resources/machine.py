"""The machine's hardware: cores, memory, accelerators."""

from __future__ import annotations

import contextlib
import glob
import os
from dataclasses import dataclass
from typing import Any

from luminosity.core import machine_ram_bytes, usable_cores
from luminosity.events import DeviceInfo, MachineInfo

__all__ = ["Machine", "detect_accelerators", "visibility"]


@dataclass(frozen=True)
class Machine:
    """The hardware that the workers of a run share."""

    cores: int
    ram_bytes: int
    devices: tuple[str, ...]  # "gpu:0", "tpu:1"; "declared:0" for one that --accelerators declares

    @classmethod
    def detect(cls, declared_accelerators: int | None = None) -> Machine:
        """Return this machine, with the accelerators it has or with as many as are declared."""
        if declared_accelerators is None:
            devices = detect_accelerators()
        else:
            found = detect_accelerators()
            devices = found[:declared_accelerators]
            devices += tuple(f"declared:{i}" for i in range(len(devices), declared_accelerators))
        return cls(usable_cores(), machine_ram_bytes(), devices)

    def info(self) -> MachineInfo:
        """Return what events show of the machine. Asks the devices' driver for their names and memory."""
        return MachineInfo(self.cores, self.ram_bytes, _device_infos(self.devices))


def detect_accelerators() -> tuple[str, ...]:
    """Return the ids of NVIDIA devices, found through their driver, or of TPU chips, found by their device files.

    ``CUDA_VISIBLE_DEVICES`` limits the NVIDIA devices.
    """
    return _gpus() or _tpus()


def _gpus() -> tuple[str, ...]:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()  # there is no driver, so there are no devices
    try:
        indices = [str(i) for i in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()
    # If only some devices are visible to this process, its workers get no others.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        indices = [v.strip() for v in visible.split(",") if v.strip() not in ("", "-1")]
    return tuple(f"gpu:{i}" for i in indices)


def _device_infos(devices: tuple[str, ...]) -> tuple[DeviceInfo, ...]:
    """Return what the driver of NVIDIA devices knows of these devices; of others only their ids are known."""
    infos = {device: DeviceInfo(device) for device in devices}
    if any(device.startswith("gpu:") for device in devices):
        import pynvml

        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            try:
                for device in devices:
                    kind, _, number = device.partition(":")
                    if kind == "gpu":
                        infos[device] = _gpu_info(device, number)
            finally:
                pynvml.nvmlShutdown()
    return tuple(infos.values())


def _gpu_info(device: str, number: str) -> DeviceInfo:
    import pynvml

    try:
        by_index, by_uuid = pynvml.nvmlDeviceGetHandleByIndex, pynvml.nvmlDeviceGetHandleByUUID
        handle = by_index(int(number)) if number.isdigit() else by_uuid(number)
        name: Any = pynvml.nvmlDeviceGetName(handle)
        memory = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    except pynvml.NVMLError:
        return DeviceInfo(device)  # a part of a device may not know its memory
    return DeviceInfo(device, name.decode(errors="replace") if isinstance(name, bytes) else str(name), memory)


def _tpus() -> tuple[str, ...]:
    chips = glob.glob("/dev/accel[0-9]*") or glob.glob("/dev/vfio/[0-9]*")
    return tuple(f"tpu:{i}" for i in range(len(chips)))


def visibility(devices: tuple[str, ...]) -> dict[str, str]:
    """Return the environment variables that make only these devices visible to a process.

    >>> visibility(("gpu:1",))["CUDA_VISIBLE_DEVICES"], visibility(())["CUDA_VISIBLE_DEVICES"]
    ('1', '')
    """
    ids = ",".join(device.split(":", 1)[1] for device in devices)
    if any(device.startswith("tpu:") for device in devices):
        return {"TPU_VISIBLE_CHIPS": ids, "CUDA_VISIBLE_DEVICES": ""}
    # By default JAX takes most of a device's memory for itself, but other models share the device.
    return {"CUDA_VISIBLE_DEVICES": ids, "TPU_VISIBLE_CHIPS": "", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
