"""Both sides prove that they know the run's secret before anything is unpickled.

The host sends ``magic, its nonce``; the client ``its nonce, proof``; the host ``proof``. A proof is an HMAC of both
nonces under the label of its sender, so that neither side can reuse the other's proof. All messages have a fixed size,
and no more than that is read before the proof is checked.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time

__all__ = ["AuthenticationFailed", "NoRoom", "prove_as_client", "prove_as_host", "turn_away"]

_MAGIC = b"lumhost1"
_FULL = b"lum-full"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_TIMEOUT_S = 5.0  # both sides respond at once; a stranger must not occupy a thread for longer


class AuthenticationFailed(ConnectionError):
    """The other side does not know the secret, or speaks another protocol; the message contains no secret."""


class NoRoom(ConnectionError):
    """The host has reached its limit of connections."""


def prove_as_host(connection: socket.socket, secret: bytes, timeout: float = _TIMEOUT_S) -> None:
    """Authenticate both sides, as the host. Raises :class:`AuthenticationFailed`, or ``OSError`` if that breaks off."""
    deadline = time.monotonic() + timeout
    ours = secrets.token_bytes(_NONCE_BYTES)
    _send(connection, _MAGIC + ours, deadline)
    response = _recv(connection, _NONCE_BYTES + _PROOF_BYTES, deadline)
    theirs, proof = response[:_NONCE_BYTES], response[_NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(secret, b"client", ours, theirs)):
        raise AuthenticationFailed("does not know the secret of this run")
    _send(connection, _proof(secret, b"host", ours, theirs), deadline)


def prove_as_client(connection: socket.socket, secret: bytes, timeout: float = _TIMEOUT_S) -> None:
    """Authenticate both sides, as a client. Raises :class:`NoRoom` if the host is full."""
    deadline = time.monotonic() + timeout
    magic = _recv(connection, len(_MAGIC), deadline)
    if magic == _FULL:
        raise NoRoom("the host has reached its limit of connections")
    if magic != _MAGIC:
        raise AuthenticationFailed("speaks another protocol: is it a host of another version?")
    theirs = _recv(connection, _NONCE_BYTES, deadline)
    ours = secrets.token_bytes(_NONCE_BYTES)
    _send(connection, ours + _proof(secret, b"client", theirs, ours), deadline)
    if not hmac.compare_digest(_recv(connection, _PROOF_BYTES, deadline), _proof(secret, b"host", theirs, ours)):
        raise AuthenticationFailed("does not know the secret of this run")


def turn_away(connection: socket.socket) -> None:
    """Tell a client that the host is full; a new connection takes eight bytes without blocking."""
    connection.setblocking(False)
    connection.send(_FULL)


def _proof(secret: bytes, label: bytes, nonce_of_host: bytes, nonce_of_client: bytes) -> bytes:
    return hmac.digest(secret, b"luminosity " + label + b":" + nonce_of_host + nonce_of_client, "sha256")


def _send(connection: socket.socket, data: bytes, deadline: float) -> None:
    connection.settimeout(max(0.001, deadline - time.monotonic()))
    connection.sendall(data)


def _recv(connection: socket.socket, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            received = connection.recv(size - len(data))
        except TimeoutError:
            raise AuthenticationFailed(f"sent {len(data)} bytes of {size}, then nothing") from None
        if not received:
            raise ConnectionResetError("closed the connection before it was authenticated")
        data += received
    return data
