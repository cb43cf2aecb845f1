"""Unix sockets of one user, whose two sides prove that they know the run's secret before anything is unpickled.

The host sends ``magic, its nonce``; the client ``its nonce, proof``; the host ``proof``. A proof is an HMAC of both
nonces under the label of its sender, so that neither side can reuse the other's proof. All messages have a fixed size,
and no more than that is read before the proof is checked.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import struct
import time
import weakref

__all__ = [
    "AuthenticationFailed",
    "NoRoom",
    "close_in_children",
    "is_same_user",
    "listen",
    "new_socket",
    "peer_pid",
    "prove_as_client",
    "prove_as_host",
    "turn_away",
]
_BACKLOG = 128  # workers of a machine may all connect at once
_CREDENTIALS = struct.Struct("3i")  # of a process: its id, user, group
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def new_socket() -> socket.socket:
    """Return a new Unix socket, which forked children close."""
    return close_in_children(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))


def listen(path: str) -> socket.socket:
    """Listen at this path, which only the current user may use; an existing socket belonged to a killed process."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    listener = new_socket()
    listener.bind(path)
    os.chmod(path, 0o600)
    listener.listen(_BACKLOG)
    return listener


def is_same_user(connection: socket.socket, uid: int) -> bool:
    """Return whether the process at the other end belongs to the user.

    On systems that can't tell, the mode of the socket's folder protects it.
    """
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(credentials)[1] == uid


def peer_pid(connection: socket.socket) -> int:
    """Return the id of the process at the other end; 0 if the system can't tell, or the connection is closed."""
    if not hasattr(socket, "SO_PEERCRED") or connection.fileno() < 0:
        return 0
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(credentials)[0]


def close_in_children(connection: socket.socket) -> socket.socket:
    """Close the socket in forked children, which would otherwise keep it open after this process has died."""
    _sockets.add(connection)
    return connection


def _close_all() -> None:
    for connection in list(_sockets):
        connection.close()  # Not shut down: that would end the parent's connection, too.
    _sockets.clear()


os.register_at_fork(after_in_child=_close_all)
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
