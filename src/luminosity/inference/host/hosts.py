"""The model hosts of this process, one for each device, and the memory budget of each."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

from luminosity._shared.model_sizes import models_ram_bytes
from luminosity.core import WorkerShare
from luminosity.inference.handler import Handler
from luminosity.inference.host.host import ModelHost

__all__ = ["device_of", "host_of", "model_budget"]

_SHARE_OF_DEVICE = 0.9  # the rest is for batches and the libraries' own memory
_GPUS = ("cuda", "gpu")

_lock = threading.Lock()
"""Protects ``_hosts``."""
_hosts: dict[tuple[int, str, int | None], ModelHost] = {}


def host_of(handler: Handler[Any, Any, Any], budget: int | None = None, workers: int = 1) -> ModelHost:
    """Return the host for this handler's device. A forked process gets new hosts: threads don't survive a fork.

    Args:
        handler: its ``device`` names the device.
        budget: the value of ``--model_memory_budget``; pipelines with different values share no host.
        workers: how many processes like this one there are, if known.
    """
    device = device_of(handler)
    key = os.getpid(), device, budget
    with _lock:
        host = _hosts.get(key)
        if host is None or host.broken is not None:
            host = _hosts[key] = ModelHost(budget=model_budget(device, budget, workers), device=device)
        return host


def device_of(handler: Handler[Any, Any, Any]) -> str:
    """Return the handler's device by one name, however the handler spells it: "cpu", "cuda:0", "mps"...

    >>> from luminosity import JaxModelHandler
    >>> device_of(JaxModelHandler(lambda params, x: x, {}, device="gpu:1")), device_of(Handler())
    ('cuda:1', 'cpu')
    """
    name = str(getattr(handler, "device", None) or "cpu").lower()
    kind, _, number = name.partition(":")
    if kind in _GPUS:
        return f"cuda:{number or 0}"
    return kind if not number else name


def model_budget(device: str, requested: int | None, workers: int) -> int | None:
    """Return the bytes for models on this device in one of ``workers`` processes; None for no limit.

    A device belongs to one process; the machine's memory is divided among all.

    >>> model_budget("cpu", 8_000_000_000, workers=2), model_budget("cuda:0", 8_000_000_000, workers=2)
    (4000000000, 8000000000)
    """
    if device == "remote":
        return None
    if device == "cpu":
        total = models_ram_bytes() if requested is None else requested
        return total // max(workers, WorkerShare.current().workers, 1)
    if requested is not None:
        return requested
    memory = _device_bytes(device)
    return None if memory is None else int(memory * _SHARE_OF_DEVICE)


def _device_bytes(device: str) -> int | None:
    """Return the device's memory if a library that is already imported knows it."""
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    number = int(device.partition(":")[2] or 0)
    if device.startswith("cuda") and torch is not None and torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(number).total_memory)
    if device.startswith("cuda") and jax is not None:
        try:
            stats = jax.local_devices(backend="gpu")[number].memory_stats()
        except (RuntimeError, IndexError):
            return None  # JAX has no such device; the model may do without it, or raises its own error.
        return int(stats["bytes_limit"]) if stats else None
    return None
