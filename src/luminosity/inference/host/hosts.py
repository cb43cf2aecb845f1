"""The hosts of this process: one for each device that its handlers name."""

from __future__ import annotations

import os
import threading
from typing import Any

from apache_beam.ml.inference.base import ModelHandler

from luminosity.inference.host.host import ModelHost

__all__ = ["host_of"]

_lock = threading.Lock()
_hosts: dict[tuple[int, str], ModelHost] = {}


def host_of(handler: ModelHandler[Any, Any, Any]) -> ModelHost:
    """The host where this handler's model belongs. A forked process has hosts of its own: threads don't follow."""
    key = os.getpid(), str(getattr(handler, "device", ""))
    with _lock:
        host = _hosts.get(key)
        if host is None or host.broken is not None:
            host = _hosts[key] = ModelHost()
        return host
