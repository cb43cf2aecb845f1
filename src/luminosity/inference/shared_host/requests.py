"""One request and its answer."""

from __future__ import annotations

from typing import Any

from luminosity.inference.ipc.channel import Channel, ConnectionClosed
from luminosity.inference.ipc.portable_errors import packed, unpacked

__all__ = ["MOST_DEATHS", "UnknownLane", "request", "respond"]

MOST_DEATHS = 5
"""Of hosts in a row that answered nothing: after that it is no accident."""


class UnknownLane(LookupError):
    """A lane that this host never had: it is not the one that was told of it."""


def request(channel: Channel, name: str, *arguments: Any, timeout: float | None = None) -> Any:
    """The host's answer; raises what was raised there."""
    channel.send((name, *arguments))
    answer, error = channel.recv(timeout)
    if error is not None:
        raise unpacked(error)
    return answer


def respond(channel: Channel, served: Any) -> None:
    """Take the next request and do what it names, a method of ``served``; the answer is its value or its error.

    A request that can't be read here, or an answer that can't be written, is an error like others.
    """
    try:
        name, *arguments = channel.recv()
        if name.startswith("_"):
            raise LookupError(f"found the request {name!r}, expected a public one")
        _send(channel, getattr(served, name)(*arguments))
    except ConnectionClosed:
        raise
    except BaseException as error:
        channel.send((None, packed(error)))


def _send(channel: Channel, value: Any) -> None:
    try:
        channel.send((value, None))
    except ConnectionClosed:
        raise
    except Exception as error:
        raise TypeError(
            f"The model returned what can't be sent to another process ({error}); its handler shares it across "
            "processes, so that predictions have to be picklable"
        ) from error
