"""Unix sockets of one process and one user."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import weakref

__all__ = ["close_in_children", "is_same_user", "listen", "new_socket", "peer_pid"]

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
