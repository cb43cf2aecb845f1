"""The hosts of this process: one for each device that its handlers name."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

from luminosity.core import WorkerShare, machine_ram_bytes
from luminosity.inference.handler import Handler
from luminosity.inference.host.host import ModelHost

__all__ = ["device_of", "host_of", "model_budget"]


_lock = threading.Lock()
_hosts: dict[tuple[int, str, int | None], ModelHost] = {}

_PART_OF_DEVICE = 0.9
_PART_OF_RAM = 0.5
_GPUS = ("cuda", "gpu")


def host_of(handler: Handler[Any, Any, Any], asked: int | None = None, workers: int = 1) -> ModelHost:
    """The host where this handler's model belongs. A forked process has hosts of its own: threads don't follow.

    Args:
        handler: its `device` tells where.
        asked: what `--model_memory_budget` says; pipelines that differ in it share no host.
        workers: how many processes like this one there are, as far as is known.
    """
    device = device_of(handler)
    key = os.getpid(), device, asked
    with _lock:
        host = _hosts.get(key)
        if host is None or host.broken is not None:
            host = _hosts[key] = ModelHost(budget=model_budget(device, asked, workers), device=device)
        return host


def device_of(handler: Handler[Any, Any, Any]) -> str:
    """The device of this handler's model by one name, however the handler puts it: "cpu", "cuda:0", "mps"...

    >>> from luminosity import JaxModelHandler
    >>> device_of(JaxModelHandler(lambda params, x: x, {}, device="gpu:1")), device_of(Handler())
    ('cuda:1', 'cpu')
    """
    name = str(getattr(handler, "device", None) or "cpu").lower()
    kind, _, number = name.partition(":")
    if kind in _GPUS:
        return f"cuda:{number or 0}"
    return kind if not number else name


def model_budget(device: str, asked: int | None, workers: int) -> int | None:
    """The bytes for models on this device in this process, one of so many; None: no limit.

    A device belongs to one process; the machine's memory to all.

    >>> model_budget("cpu", asked=8_000_000_000, workers=2), model_budget("cuda:0", asked=8_000_000_000, workers=2)
    (4000000000, 8000000000)
    """
    if device == "remote":
        return None
    if device == "cpu":
        total = int(machine_ram_bytes() * _PART_OF_RAM) if asked is None else asked
        return total // max(workers, WorkerShare.current().workers, 1)
    if asked is not None:
        return asked
    memory = _device_bytes(device)
    return None if memory is None else int(memory * _PART_OF_DEVICE)


def _device_bytes(device: str) -> int | None:
    """Of the device as a library that this process has loaded knows it; models on it belong to one."""
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    number = int(device.partition(":")[2] or 0)
    if device.startswith("cuda") and torch is not None and torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(number).total_memory)
    if device.startswith("cuda") and jax is not None:
        try:
            stats = jax.local_devices(backend="gpu")[number].memory_stats()
        except (RuntimeError, IndexError):
            return None  # JAX has no such device. The model may do without, or will say so itself.
        return int(stats["bytes_limit"]) if stats else None
    return None
