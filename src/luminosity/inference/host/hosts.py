"""The hosts of this process: one for each device that its handlers name."""

from __future__ import annotations

import os
import threading
from typing import Any

from luminosity.inference.handler import Handler
from luminosity.inference.host.budgets import device_of, model_budget
from luminosity.inference.host.host import ModelHost

__all__ = ["host_of"]

_lock = threading.Lock()
_hosts: dict[tuple[int, str, int | None], ModelHost] = {}


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
