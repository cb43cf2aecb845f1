"""Sockets that belong to one process, and not to the children it forks."""

from __future__ import annotations

import os
import socket
import weakref

__all__ = ["close_in_children"]

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def close_in_children(connection: socket.socket) -> socket.socket:
    """A forked child would else keep the connection open when this process dies, and nobody would notice."""
    _sockets.add(connection)
    return connection


def _close_all() -> None:
    for connection in list(_sockets):
        connection.close()  # not shut down: that would reach the parent's end, too
    _sockets.clear()


os.register_at_fork(after_in_child=_close_all)
