"""Both sides prove that they know the run's secret, before a byte of theirs is unpickled.

The host says ``magic, its nonce``; the client ``its nonce, proof``; the host ``proof``. A proof is an HMAC of both
nonces under the label of who gives it, so that what one side said is of no use to the other. All have a fixed size:
more than that is never read from a stranger.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time

__all__ = ["AuthenticationFailed", "NoRoom", "is_same_user", "prove_as_client", "prove_as_host", "turn_away"]

_MAGIC = b"lumhost1"
_FULL = b"lum-full"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_TIMEOUT_S = 5.0
_CREDENTIALS = struct.Struct("3i")  # of a process: its number, user, group


class AuthenticationFailed(ConnectionError):
    """The other side is not who it should be; the message may be shown to anybody."""


class NoRoom(ConnectionError):
    """The host has as many connections as it takes."""


def is_same_user(connection: socket.socket, uid: int) -> bool:
    """Whether the process at the other end belongs to the user; where the system can't tell, the folder's mode does."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(credentials)[1] == uid


def prove_as_host(connection: socket.socket, secret: bytes, timeout: float = _TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout
    ours = secrets.token_bytes(_NONCE_BYTES)
    _send(connection, _MAGIC + ours, deadline)
    answer = _recv(connection, _NONCE_BYTES + _PROOF_BYTES, deadline)
    theirs, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(secret, b"client", ours, theirs)):
        raise AuthenticationFailed("does not know the secret of this run")
    _send(connection, _proof(secret, b"host", ours, theirs), deadline)


def prove_as_client(connection: socket.socket, secret: bytes, timeout: float = _TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout
    magic = _recv(connection, len(_MAGIC), deadline)
    if magic == _FULL:
        raise NoRoom("the host has as many connections as it takes")
    if magic != _MAGIC:
        raise AuthenticationFailed("speaks another protocol: is it a host of another version?")
    theirs = _recv(connection, _NONCE_BYTES, deadline)
    ours = secrets.token_bytes(_NONCE_BYTES)
    _send(connection, ours + _proof(secret, b"client", theirs, ours), deadline)
    if not hmac.compare_digest(_recv(connection, _PROOF_BYTES, deadline), _proof(secret, b"host", theirs, ours)):
        raise AuthenticationFailed("does not know the secret of this run")


def turn_away(connection: socket.socket) -> None:
    """Say that there is no room; a new connection takes eight bytes without waiting."""
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
