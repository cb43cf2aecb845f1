"""A model in a process of its own, so that a crash takes no worker with it."""

from __future__ import annotations

import multiprocessing
import os
import threading
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from multiprocessing.util import Finalize
from typing import Any

from apache_beam.internal import pickler

from luminosity.inference.adapting.wrapping import WrappedHandler
from luminosity.inference.handler import Handler
from luminosity.inference.ipc.portable_errors import pack_error, unpack_error
from luminosity.inference.memory import model_bytes, resident_bytes

__all__ = ["IsolatedHandler"]


class IsolatedHandler(WrappedHandler):
    """What `with_exception_handling(use_subprocess=True)` asks for.

    Batches and predictions cross a process boundary. A crash fails the batch under way, and the next batch gets a
    fresh process; the host finds the example that crashes alone.
    """

    _loading: _Child | None = None

    def load_model(self) -> _Child:
        if self._loading is not None:
            self._loading.kill()  # Only a load that was given up is still under way when the next begins.
        child = self._loading = _Child(self._inner)
        try:
            child.call("load")
        finally:
            if self._loading is child:
                self._loading = None
        return child

    def should_garbage_collect_on_timeout(self) -> bool:
        """A child that hangs would keep every later batch waiting."""
        return True

    def abandon(self, model: _Child) -> None:
        model.kill()

    def warm_up(self, model: _Child) -> None:
        """Done in the child, where the model is."""

    def memory(self, model: _Child) -> int | None:
        """Of the child, which is there for this model alone."""
        return model.call("memory")

    def transfer(self, batch: Any) -> Any:
        """The child moves it to the device."""
        return batch

    def predict(self, model: _Child, batch: Any, inference_args: dict[str, Any] | None = None) -> Any:
        return model.call("predict", batch, inference_args)

    def wait(self, outputs: Any) -> None:
        """The child has waited."""

    def collect(self, outputs: Any) -> Any:
        return outputs


class _Child:
    """One process with one model; another one when that has died."""

    def __init__(self, handler: Handler[Any, Any, Any]) -> None:
        self._handler = handler
        self._lock = threading.Lock()
        self._process: Any = None
        self._is_killed = False
        """Set before the process is looked at, and looked at after a process is set: a start does not miss it."""

    def call(self, *request: Any) -> Any:
        """What the child answers to `("load",)` or `("predict", batch, inference_args)`."""
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
                raise RuntimeError("The process of the model ended while it computed this batch.") from ended
        if error is not None:
            raise unpack_error(error)
        return value

    def kill(self) -> None:
        """End the process under whoever waits for its answer, or is about to start it."""
        self._is_killed = True
        process = self._process
        if process is not None:
            process.kill()

    def _start(self) -> None:
        # Not forked: this process has threads, and perhaps a device open.
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, pickler.dumps(self._handler)), name="model")
        process.start()
        theirs.close()  # So that its end is seen here.
        # When this object is forgotten, and before the interpreter at its end waits for its children.
        self._finish = Finalize(self, _end, (process, self._connection), exitpriority=10)
        self._process = process
        if self._is_killed:
            process.kill()


def _end(process: Any, connection: Connection) -> None:
    connection.close()
    process.kill()
    process.join()


def _serve(connection: Connection, pickled: bytes) -> None:
    """The child's whole life."""
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
                handler = loading  # Not before: a load that failed is to be done again.
            value = _answer(what, handler, model, arguments)
            answer = ForkingPickler.dumps((value, None))
        except BaseException as error:
            answer = ForkingPickler.dumps((None, pack_error(error)))
        connection.send_bytes(answer)


def _answer(what: str, handler: Handler[Any, Any, Any], model: Any, arguments: list[Any]) -> Any:
    if what == "memory":
        told = model_bytes(handler, model)
        return resident_bytes() if told is None else told
    return _predict(handler, model, *arguments) if what == "predict" else None


def _predict(handler: Handler[Any, Any, Any], model: Any, batch: Any, inference_args: dict[str, Any] | None) -> Any:
    outputs = handler.predict(model, handler.transfer(batch), inference_args)
    handler.wait(outputs)
    return handler.collect(outputs)


def _end_with_parent() -> None:
    """A worker that is killed takes nobody with it; and its child may be computing, for how long nobody knows."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
