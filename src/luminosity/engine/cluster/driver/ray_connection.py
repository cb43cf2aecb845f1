"""The connection of this process to a Ray cluster.

All runs of a process share one connection, because Ray allows only one. The last of them closes it, unless the user's
script has made it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Generator
from typing import Any

import grpc

from luminosity.core import usable_cores
from luminosity.engine.cluster.driver.shared_paths import SharedPaths
from luminosity.engine.cluster.shipping import Packed
from luminosity.engine.folders import make_locked
from luminosity.engine.options import check_ray_address
from luminosity.errors import OptionError
from luminosity.extras import require

__all__ = ["RayConnection", "connect"]

_ANSWER_S = 5.0  # for a connection, and for the first answer over it; a head in the same network needs milliseconds
_LONGEST_FOLDER = 35  # of characters: Ray puts sockets below it, whose paths may have 107 bytes
_BREAKPOINT = "PYTHONBREAKPOINT"  # what breakpoint() calls
_lock = threading.RLock()  # held while a connection is made or closed
_connection: _SharedConnection | None = None  # the one that this process has made, if it is open


def _found_on_this_machine() -> str:
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


def _probe(asked: str, address: str) -> None:
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


def _is_at(address: str, found: str) -> bool:
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


class RayConnection:
    """One run's use of the process's connection to Ray. The run closes it; closing it twice does no harm.

    Use it as a context, or call :meth:`close`.
    """

    def __init__(self, shared: _SharedConnection) -> None:
        self._shared = shared
        self._is_open = True
        self.address = shared.address  # of the cluster's head, as HOST:PORT
        self.namespace = shared.namespace  # of Ray, in which the names of the connection's actors live
        self.node_id = shared.node_id  # of the node on which this process runs
        self.host = shared.host  # the address of that node, at which the other nodes reach it
        self.is_local = shared.folder is not None  # whether this process has started the cluster, which ends with it
        self.sent = Packed()  # what the nodes need of this run
        self.paths: SharedPaths | None = None  # what the nodes see of the paths of this run; None if it is only planned
        shared.users += 1

    def close(self) -> None:
        """End the use of the connection; disconnect if no other run of this process uses it. Blocks for that long."""
        with _lock:
            if self._is_open:
                self._is_open = False
                self._shared.release()

    def __enter__(self) -> RayConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _SharedConnection:
    """The connection of this process, with the number of runs that use it."""

    def __init__(self, asked: str, is_ours: bool, folder: _Folder | None) -> None:
        context = require("ray", "ray").get_runtime_context()
        self.asked = asked
        self.is_ours = is_ours
        self.folder = folder
        self.address: str = context.gcs_address
        self.namespace: str = context.namespace
        self.node_id: str = context.get_node_id()
        self.host: str = require("ray.util", "ray").get_node_ip_address()
        self.users = 0

    def release(self) -> None:
        global _connection
        self.users -= 1
        if self.users or not self.is_ours:
            return
        if _connection is self:
            _connection = None
            require("ray", "ray").shutdown()
        if self.folder is not None:
            self.folder.remove()


class _Folder:
    """The private folder of a Ray on this machine. A later run removes it if this process is killed."""

    def __init__(self) -> None:
        root = tempfile.gettempdir()
        if len(root) + len("/luminosity-1234567-abcdefgh") > _LONGEST_FOLDER:
            root = "/tmp"
        self.path, self._lock = make_locked(root, str(os.getpid()))

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def connect(address: str, accelerators: int | None = None) -> RayConnection:
    """Connect this process to the Ray cluster at ``address``: ``auto``, ``local`` or HOST:PORT.

    ``local`` starts a Ray on this machine, with ``accelerators`` if they are given. If the process is connected
    already, by another run or by the user's script, the run shares that connection.

    Raises :class:`OptionError` if there is no such cluster, if this process can't join it, or if the process is
    connected to another one, and :class:`MissingExtra` if Ray is not installed.
    """
    global _connection
    _set_environment(address)
    ray = require("ray", "ray")
    with _lock:
        if _connection is not None and not ray.is_initialized():
            _connection = None  # the script has shut Ray down; the runs that used it fail on their own
        if _connection is not None:
            return _shared(_connection, address)
        if ray.is_initialized():
            return _of_the_script(ray, address)
        _connection = _open(ray, address, accelerators)
        return RayConnection(_connection)


def _set_environment(address: str) -> None:
    """Set what Ray reads when it is imported; what the user has set stays."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if "ray" in sys.modules:
        return
    # A reference to an object that is pickled by anyone but Ray would keep the object for ever: make it an error.
    os.environ.setdefault("RAY_allow_out_of_band_object_ref_serialization", "0")
    if address == "local" and "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"  # otherwise Ray writes a token into the user's home and warns about it
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


def _shared(connection: _SharedConnection, address: str) -> RayConnection:
    """Return the use of the connection that another run of this process has made."""
    if address != connection.asked and (address == "local" or not _is_at(address, connection.address)):
        raise OptionError(
            f"--ray_address={address}: found another run of this process on a cluster at {connection.address}, "
            "expected the same cluster, since a process can have only one",
            fix="wait for the other run with wait_until_finish(), or run this pipeline in a process of its own",
        )
    return RayConnection(connection)


def _of_the_script(ray: Any, address: str) -> RayConnection:
    """Return the use of the connection that the user's script has made."""
    if ray.util.client.ray.is_connected():
        check_ray_address("ray.init in this script", "ray://")
    found: str = ray.get_runtime_context().gcs_address
    if address == "local" or not _is_at(address, found):
        raise OptionError(
            f"--ray_address={address}: found that this script is connected to Ray at {found} with ray.init, expected "
            "the same cluster, since a process can have only one",
            fix="pass --ray_address=auto to use that connection, or leave out ray.init",
        )
    return RayConnection(_SharedConnection(address, is_ours=False, folder=None))


def _open(ray: Any, address: str, accelerators: int | None) -> _SharedConnection:
    asked = address
    if address == "auto" and (named := os.environ.get("RAY_ADDRESS", "")):
        address = check_ray_address(f"RAY_ADDRESS={named}", named)
    if address == "auto":
        address = _found_on_this_machine()
    folder = None
    options: dict[str, Any] = {"address": address}
    if address == "local":
        folder = _Folder()
        options |= {"num_cpus": usable_cores(), "include_dashboard": False, "_temp_dir": folder.path}
        if accelerators is not None:
            options["num_gpus"] = accelerators
    else:
        _probe(asked, address)
    try:
        with _own_settings():
            ray.init(
                **options,
                namespace=f"luminosity-{secrets.token_hex(8)}",
                log_to_driver=False,  # workers send what they print and log themselves
                logging_level=logging.ERROR,  # warnings of ray.init are about what this module decides
            )
        logging.getLogger("ray").setLevel(logging.WARNING)
        return _SharedConnection(asked, is_ours=True, folder=folder)
    except BaseException as error:
        ray.shutdown()
        if folder is not None:
            folder.remove()
        if isinstance(error, Exception):
            raise _failure(asked, address, error) from error
        raise


def _failure(asked: str, address: str, error: Exception) -> OptionError:
    """Return what to tell the user if ``ray.init`` fails."""
    found = " ".join(f"{error}".split())
    option = f"--ray_address={asked}"
    if "ersion mismatch" in found:
        return OptionError(
            f"{option}: {found}; expected the same versions of Ray and Python in this process and on the cluster",
            fix="install the cluster's version of Ray, and run the script with the cluster's Python",
        )
    if address == "local":
        return OptionError(f"{option}: Ray did not start on this machine: {found}")
    cause = error.__cause__
    more = " ".join(f"{cause}".split()) if cause is not None else ""
    return OptionError(
        f"{option}: this process can't join the Ray cluster: {found}" + (f" ({more})" if more else ""),
        fix="run the script on a node of the cluster, or submit it with `ray job submit`",
    )


@contextlib.contextmanager
def _own_settings() -> Generator[None]:
    """Within the context, the handler of SIGTERM and ``breakpoint`` may change; afterwards they are those from before.

    ``ray.init`` sets a handler that would end the process without cancelling its runs, and lets ``breakpoint()`` of
    this process, and of all that it starts, wait for a debugger of Ray's.
    """
    breakpoint_before = os.environ.get(_BREAKPOINT)
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM) if is_main else None
    try:
        yield
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)
        if breakpoint_before is None:
            os.environ.pop(_BREAKPOINT, None)
        else:
            os.environ[_BREAKPOINT] = breakpoint_before
