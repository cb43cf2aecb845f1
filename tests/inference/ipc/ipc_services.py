"""The services that the serving process runs for clients in tests."""

from __future__ import annotations

import logging
import os
import subprocess
from typing import Any

from luminosity.inference.ipc.channel import Channel


def echo(channel: Channel) -> None:
    """Respond to requests ``(what, argument)``."""
    while True:
        what, argument = channel.recv()
        channel.send(_respond(what, argument))


def _respond(what: str, argument: Any) -> Any:
    if what == "pid":
        return os.getpid()
    if what == "start":
        return subprocess.Popen(["sleep", "600"], start_new_session=True).pid
    if what == "raise":
        raise ValueError(argument)
    if what == "warn":
        logging.getLogger("tests.host").warning(argument)
    if what == "descriptors":
        return len(os.listdir("/proc/self/fd"))
    return argument
