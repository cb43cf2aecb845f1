"""What this machine has: cores, memory, accelerators."""

from __future__ import annotations

import glob
import os
from dataclasses import dataclass

from luminosity.core import machine_ram_bytes, usable_cores


@dataclass(frozen=True)
class Machine:
    cores: int
    ram_bytes: int
    devices: tuple[str, ...]  # "gpu:0", "tpu:1"; "declared:0" where --accelerators says so

    @classmethod
    def detect(cls, declared_accelerators: int | None = None) -> Machine:
        """The machine as it is, or with as many accelerators as are declared."""
        if declared_accelerators is None:
            devices = detect_accelerators()
        else:
            found = detect_accelerators()
            devices = found[:declared_accelerators]
            devices += tuple(f"declared:{i}" for i in range(len(devices), declared_accelerators))
        return cls(usable_cores(), machine_ram_bytes(), devices)


def detect_accelerators() -> tuple[str, ...]:
    """NVIDIA devices through their driver, TPU chips by their device files."""
    return _gpus() or _tpus()


def _gpus() -> tuple[str, ...]:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()  # no driver, so no devices
    try:
        indices = [str(i) for i in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()
    # Where only some devices were handed to this process, its workers get no others.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        indices = [v.strip() for v in visible.split(",") if v.strip() not in ("", "-1")]
    return tuple(f"gpu:{i}" for i in indices)


def _tpus() -> tuple[str, ...]:
    chips = glob.glob("/dev/accel[0-9]*") or glob.glob("/dev/vfio/[0-9]*")
    return tuple(f"tpu:{i}" for i in range(len(chips)))


def visibility(devices: tuple[str, ...]) -> dict[str, str]:
    """The environment by which a process sees these devices and no others.

    >>> visibility(("gpu:1",))["CUDA_VISIBLE_DEVICES"], visibility(())["CUDA_VISIBLE_DEVICES"]
    ('1', '')
    """
    ids = ",".join(device.split(":", 1)[1] for device in devices)
    if any(device.startswith("tpu:") for device in devices):
        return {"TPU_VISIBLE_CHIPS": ids, "CUDA_VISIBLE_DEVICES": ""}
    # JAX would else take most of a device's memory for itself, and other models share the process's device.
    return {"CUDA_VISIBLE_DEVICES": ids, "TPU_VISIBLE_CHIPS": "", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
