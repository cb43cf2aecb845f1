"""Runs a model in its own child process, so that a crash of the model does not end the worker."""

from __future__ import annotations

import multiprocessing
import os
import threading
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from multiprocessing.util import Finalize
from typing import Any

from apache_beam.internal import pickler

from luminosity._shared import descendants
from luminosity.core import resident_bytes
from luminosity.errors import ModelFailed
from luminosity.inference.adapting.wrapping import WrappedHandler
from luminosity.inference.handler import Handler
from luminosity.inference.ipc.pickling import pack_error, unpack_error
from luminosity.inference.memory import model_bytes

__all__ = ["IsolatedHandler"]


class IsolatedHandler(WrappedHandler):
    """Implements ``with_exception_handling(use_subprocess=True)``.

    Batches and predictions cross a process boundary. A crash fails the current batch, and the next batch gets a new
    process; the host splits the failed batch to find the example that crashes.
    """

    _loading: _Child | None = None

    @property
    def sums_costs(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """False: the model's process gets padded batches."""
        return False

    def load_model(self) -> _Child:
        """Start a child process and block until it has loaded the model."""
        if self._loading is not None:
            self._loading.kill()  # a load that timed out may still be running
        _keep_padded(self._inner)
        child = self._loading = _Child(self._inner)
        try:
            child.call("load")
        finally:
            if self._loading is child:
                self._loading = None
        return child

    def should_garbage_collect_on_timeout(self) -> bool:
        """Return True: a child that hangs would block every later batch."""
        return True

    def abandon(self, model: _Child) -> None:
        """Kill the child process."""
        model.kill()

    def warm_up(self, model: _Child) -> None:
        """Do nothing: the child warms up the model after it loads it."""

    def memory(self, model: _Child) -> int | None:
        """Return the bytes that the child's model takes."""
        return model.call("memory")

    def transfer(self, batch: Any) -> Any:
        """Return the batch unchanged: the child moves it to the device."""
        return batch

    def predict(self, model: _Child, batch: Any, inference_args: dict[str, Any] | None = None) -> Any:
        """Send the batch to the child and block until its predictions arrive."""
        return model.call("predict", batch, inference_args)

    def wait(self, outputs: Any) -> None:
        """Do nothing: the child has waited already."""

    def collect(self, outputs: Any) -> Any:
        """Return the outputs unchanged: the child has collected them already."""
        return outputs


def _keep_padded(handler: Any) -> None:
    """Let a model of texts pad its batches: whether it can do without, only the process with the device may ask."""
    while isinstance(handler, WrappedHandler):
        handler = handler.wrapped
    for name in ("packs_rows", "uses_slots"):
        if hasattr(handler, name):
            setattr(handler, name, False)


class _Child:
    """A child process with one model; it is started again after it dies."""

    def __init__(self, handler: Handler[Any, Any, Any]) -> None:
        self._handler = handler
        self._lock = threading.Lock()
        self._process: Any = None
        self._is_killed = False
        """Written before ``_process`` is read, and read after ``_process`` is written: no start misses a kill."""

    def call(self, *request: Any) -> Any:
        """Send a request and return the child's response.

        The requests are ``("load",)``, ``("memory",)`` and ``("predict", batch, inference_args)``.
        """
        with self._lock:
            if self._process is None:
                self._start()
            try:
                self._connection.send(request)
                value, error = self._connection.recv()
            except (EOFError, OSError) as ended:
                self._finish()
                self._process = None
                self._is_killed = False
                raise ModelFailed("the model's process ended while it computed this batch") from ended
        if error is not None:
            raise unpack_error(error)
        return value

    def kill(self) -> None:
        """Kill the process, also while another thread waits for its response or is about to start it."""
        self._is_killed = True
        process = self._process
        if process is not None:
            process.kill()

    def _start(self) -> None:
        # Spawned, not forked: this process has threads, and perhaps an open device.
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, pickler.dumps(self._handler)), name="model")
        process.start()
        theirs.close()  # otherwise the end of the child would not be noticed here
        # Runs when this object is collected, or before the interpreter waits for its children at exit.
        self._finish = Finalize(self, _end, (process, self._connection), exitpriority=10)
        self._process = process
        if self._is_killed:
            process.kill()


def _end(process: Any, connection: Connection) -> None:
    connection.close()
    process.kill()
    process.join()
    descendants.end_left_over()


def _serve(connection: Connection, pickled: bytes) -> None:
    """Load the model and respond to requests until the parent closes the connection."""
    descendants.join_inherited()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    handler: Any = None
    model: Any = None
    while True:
        try:
            what, *arguments = connection.recv()
        except EOFError:
            return
        try:
            if handler is None:
                loading = pickler.loads(pickled)
                model = loading.load_model()
                loading.warm_up(model)
                handler = loading  # only now: the next request repeats a load that failed
            value = _handle(what, handler, model, arguments)
            response = ForkingPickler.dumps((value, None))
        except BaseException as error:
            response = ForkingPickler.dumps((None, pack_error(error)))
        connection.send_bytes(response)


def _handle(what: str, handler: Handler[Any, Any, Any], model: Any, arguments: list[Any]) -> Any:
    if what == "memory":
        known = model_bytes(handler, model)
        return resident_bytes() if known is None else known
    return _predict(handler, model, *arguments) if what == "predict" else None


def _predict(handler: Handler[Any, Any, Any], model: Any, batch: Any, inference_args: dict[str, Any] | None) -> Any:
    outputs = handler.predict(model, handler.transfer(batch), inference_args)
    handler.wait(outputs)
    return handler.collect(outputs)


def _end_with_parent() -> None:
    """Exit when the parent dies: a killed worker can't stop its children, and this one may be computing."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
