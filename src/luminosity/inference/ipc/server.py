"""The server's side: a thread for each client, until the last one has left.

How the server exits without losing a client that is just connecting: it takes the folder's lock, which a client holds
while it starts a server; checks that no connection waits to be accepted; closes its socket and removes the folder. A
client that connected between these last two steps sees its connection end before it was authenticated, and tries
again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import TypeAlias

from luminosity.inference.files.locks import try_exclusive
from luminosity.inference.ipc.channel import Channel, ConnectionClosed, LogValues
from luminosity.inference.ipc.folder import HostFolder, limit_file, remove_abandoned
from luminosity.inference.ipc.sockets import (
    AuthenticationFailed,
    close_in_children,
    is_same_user,
    listen,
    prove_as_host,
    turn_away,
)

__all__ = ["ServeClient", "serve"]

_LOGGER = logging.getLogger(__name__)

_TICK_S = 0.1  # how late a stop or an idle server is noticed at most
_MOST_CONNECTIONS = 1024  # each has a thread
_MOST_UNAUTHENTICATED = 64  # strangers must not use up the connections
_JOIN_S = 5.0  # how long a stopped server waits for its threads

ServeClient: TypeAlias = Callable[[Channel], None]


def serve(
    folder: HostFolder,
    serve_client: ServeClient,
    *,
    idle_seconds: float = 2.0,
    first_seconds: float = 30.0,
    stop: threading.Event | None = None,
    take_log_values: Callable[[], list[LogValues]] = list,
) -> None:
    """Serve the clients of this folder's run; return at once if another process already does.

    Args:
        folder: where clients find this process.
        serve_client: runs in a thread for each client, until it returns or its channel raises ``ConnectionClosed``.
        idle_seconds: return after this time without a client.
        first_seconds: the same before the first client.
        stop: return when this is set, without waiting for clients.
        take_log_values: returns log records for the clients.
    """
    with try_exclusive(folder.alive) as is_server:
        if not is_server:
            return
        remove_abandoned(folder.base)
        with open(folder.alive) as mark, listen(folder.socket) as listener:
            server = _Server(folder, serve_client, listener, mark.fileno(), take_log_values)
            server.run(idle_seconds, first_seconds, stop or threading.Event())


class _Server:
    def __init__(
        self,
        folder: HostFolder,
        serve_client: ServeClient,
        listener: socket.socket,
        mark: int,
        take_log_values: Callable[[], list[LogValues]],
    ) -> None:
        self._folder = folder
        self._serve_client = serve_client
        self._listener = listener
        self._mark = mark
        """The descriptor of the file ``alive``; if the path leads to another file, the folder is not ours."""
        self._take_log_values = take_log_values
        self._secret = folder.secret()
        self._lock = threading.Lock()
        """Protects the four attributes below."""
        self._threads: dict[socket.socket, threading.Thread] = {}
        self._unauthenticated: set[socket.socket] = set()
        self._had_clients = False
        self._idle_since = time.monotonic()
        self._warned: set[str] = set()

    def run(self, idle_seconds: float, first_seconds: float, stop: threading.Event) -> None:
        while not stop.is_set():
            if select.select([self._listener], [], [], _TICK_S)[0]:
                self._accept()
            elif self._is_idle(idle_seconds if self._had_clients else first_seconds) and self._leave():
                return
            limit_file(self._folder.output)
        self._end()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            self._warn_once(f"the model host can't accept a connection: {error.strerror or error}")
            time.sleep(_TICK_S)
            return
        close_in_children(connection)
        if not is_same_user(connection, os.getuid()):
            self._warn_once("the model host refused a connection of another user")
            connection.close()
            return
        if not self._start_thread(connection):
            with connection, contextlib.suppress(OSError):
                turn_away(connection)

    def _start_thread(self, connection: socket.socket) -> bool:
        with self._lock:
            if len(self._threads) >= _MOST_CONNECTIONS or len(self._unauthenticated) >= _MOST_UNAUTHENTICATED:
                return False
            thread = threading.Thread(target=self._serve, args=(connection,), name="luminosity-client", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # The system gives no more threads.
                self._warn_once(f"the model host can't serve a connection: {error}")
                return False
            self._threads[connection] = thread
            self._unauthenticated.add(connection)
            return True

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                if self._is_client(connection):
                    with Channel(connection, self._take_log_values) as channel:
                        self._serve_client(channel)
        except ConnectionClosed:
            _LOGGER.debug("a client of the model host disconnected")
        except Exception:
            _LOGGER.exception("the model host ends the connection to a client, because of an error")
        finally:
            with self._lock:
                self._unauthenticated.discard(connection)
                del self._threads[connection]
                self._idle_since = time.monotonic()

    def _is_client(self, connection: socket.socket) -> bool:
        try:
            prove_as_host(connection, self._secret)
        except AuthenticationFailed as error:
            self._warn_once(f"the model host refused a connection: the other side {error}")
            return False
        except OSError as error:
            _LOGGER.debug("a connection to the model host ended early: %s", error)
            return False
        with self._lock:
            self._unauthenticated.discard(connection)
            self._had_clients = True
        return True

    def _is_idle(self, seconds: float) -> bool:
        with self._lock:
            return not self._threads and time.monotonic() - self._idle_since >= seconds

    def _leave(self) -> bool:
        """Close the socket and remove the folder; return False if a client is just connecting."""
        try:
            with try_exclusive(self._folder.lock) as is_ours:
                if not is_ours or select.select([self._listener], [], [], 0)[0]:
                    return False
                self._listener.close()
                if os.path.samestat(os.stat(self._folder.alive), os.fstat(self._mark)):
                    self._folder.remove()
        except FileNotFoundError:
            _LOGGER.debug("another process removed the folder of the model host")
        return True

    def _end(self) -> None:
        """Stop without waiting for the clients and their requests."""
        with self._lock:
            threads = list(self._threads.items())
        for connection, _ in threads:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + _JOIN_S
        for _, thread in threads:
            thread.join(max(0, deadline - time.monotonic()))
        if not self._leave():  # A client that is just connecting starts the next server in this folder.
            self._listener.close()

    def _warn_once(self, message: str) -> None:
        _LOGGER.log(logging.DEBUG if message in self._warned else logging.WARNING, "%s", message)
        self._warned.add(message)
