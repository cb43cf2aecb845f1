"""Addresses of Ray clusters: where the one of this machine is, and whether a cluster answers at all.

``ray.init`` waits for minutes if nothing answers, so what it would find is checked first.
"""

from __future__ import annotations

import os
import socket
from typing import Any

import grpc

from luminosity.errors import OptionError
from luminosity.extras import require

__all__ = ["found_on_this_machine", "is_at", "probe"]

_ANSWER_S = 5.0  # for a connection, and for the first answer over it; a head in the same network needs milliseconds


def found_on_this_machine() -> str:
    """Return the address of the Ray of this node. It may be that of a Ray that has crashed, which left a file."""
    services = require("ray._private.services", "ray")  # ray.init looks there, too, but waits minutes for a crashed one
    try:
        return services.canonicalize_bootstrap_address("auto")
    except ConnectionError as error:
        raise OptionError(
            "--ray_address=auto: found no running Ray on this machine, expected a node of a Ray cluster",
            fix="run the script on a node of the cluster, pass --ray_address=HOST:PORT, or --ray_address=local to "
            "start a Ray on this machine",
        ) from error


def probe(asked: str, address: str) -> None:
    """Raise :class:`OptionError` if nothing, or something else than Ray's head, answers at HOST:PORT."""
    host, _, port = address.rpartition(":")
    expected = "expected the head of a Ray cluster"
    fix = "check the address with `ray status` on a node of the cluster; the head's port is 6379 unless it says another"
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
    except OSError as error:
        found = error.strerror or str(error) or type(error).__name__
        raise OptionError(
            f"--ray_address={asked}: nothing answers at {address} ({found}), {expected}", fix=fix
        ) from error
    if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
        return  # only Ray knows the certificates
    # No proxy: Ray does not use one, either.
    channel = grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)])
    try:
        grpc.channel_ready_future(channel).result(timeout=_ANSWER_S)
    except grpc.FutureTimeoutError as error:
        message = f"--ray_address={asked}: found a server at {address} that does not speak gRPC, {expected}"
        raise OptionError(message, fix=fix) from error
    finally:
        channel.close()


def is_at(address: str, found: str) -> bool:
    """Return whether ``address`` names the cluster at ``found``."""
    if address in ("auto", found):
        return True
    host, _, port = address.rpartition(":")
    found_host, _, found_port = found.rpartition(":")
    if port != found_port:
        return False
    try:
        return bool(_ips(host) & _ips(found_host))
    except OSError:
        return False


def _ips(host: str) -> set[Any]:
    local = {"127.0.0.1", "::1"}
    found = {each[4][0] for each in socket.getaddrinfo(host.strip("[]"), None)}
    # A head that was started with a loopback address is found under this machine's own one, too.
    return found | {each[4][0] for each in socket.getaddrinfo(socket.gethostname(), None)} if found & local else found
