"""Requests to the shared host and their responses, as both sides see them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from luminosity.errors import InvalidType
from luminosity.inference.ipc.channel import Channel, ConnectionClosed
from luminosity.inference.ipc.pickling import pack_error, unpack_error
from luminosity.inference.options import ModelCacheConfig

__all__ = ["LaneSpec", "UnknownLane", "request", "respond"]


class UnknownLane(LookupError):
    """The shared host does not know a lane: it was started after a worker had entered that lane."""


@dataclass(frozen=True)
class LaneSpec:
    """All that the shared host must know to create a lane."""

    key: Hashable
    pickled: bytes
    """The handler and its ``LaneSettings``."""
    memory_budget: int | None
    threads: int | None
    model_cache: ModelCacheConfig


def request(channel: Channel, name: str, *arguments: Any, timeout: float | None = None) -> Any:
    """Send a request and return the response; raise the error that was raised in the shared host.

    Raises ``ConnectionClosed`` if the shared host dies meanwhile, ``TimeoutError`` after ``timeout`` seconds.
    """
    channel.send((name, *arguments))
    value, error = channel.recv(timeout)
    if error is not None:
        raise unpack_error(error)
    return value


def respond(channel: Channel, service: Any) -> None:
    """Receive the next request, call the public method of ``service`` that it names, and send its value or error.

    A request that can't be unpickled and a value that can't be pickled are sent as errors, too. Raises
    ``ConnectionClosed`` when the client has disconnected.
    """
    try:
        name, *arguments = channel.recv()
        if name.startswith("_"):
            raise LookupError(f"found the request {name!r}, expected the name of a public method")
        _send(channel, getattr(service, name)(*arguments))
    except ConnectionClosed:
        raise
    except BaseException as error:
        channel.send((None, pack_error(error)))


def _send(channel: Channel, value: Any) -> None:
    try:
        channel.send((value, None))
    except ConnectionClosed:
        raise
    except Exception as error:
        raise InvalidType(
            f"found a prediction that can't be sent to another process: {error}",
            fix="return picklable predictions, or leave out large_model=True, so that each worker loads the model",
        ) from error
