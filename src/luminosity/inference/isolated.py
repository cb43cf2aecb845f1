"""A model in a process of its own, so that a crash takes no worker with it."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import threading
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from luminosity.inference.handler import Handler
from luminosity.inference.wrapping import WrappedHandler

__all__ = ["IsolatedHandler"]


class IsolatedHandler(WrappedHandler):
    """What `with_exception_handling(use_subprocess=True)` asks for.

    Batches and predictions cross a process boundary. A crash fails the batch under way, and the next batch gets a
    fresh process; the host finds the example that crashes alone.
    """

    def load_model(self) -> _Child:
        child = _Child(self._inner)
        child.call(_load)
        return child

    def should_garbage_collect_on_timeout(self) -> bool:
        """A child that hangs would keep every later batch waiting."""
        return True

    def abandon(self, model: _Child) -> None:
        model.kill()

    def warm_up(self, model: _Child) -> None:
        """Done in the child, where the model is."""

    def memory(self, model: _Child) -> int | None:
        return None

    def transfer(self, batch: Any) -> Any:
        """The child moves it to the device."""
        return batch

    def predict(self, model: _Child, batch: Any, inference_args: dict[str, Any] | None = None) -> Any:
        return model.call(_predict, batch, inference_args)

    def wait(self, outputs: Any) -> None:
        """The child has waited."""

    def collect(self, outputs: Any) -> Any:
        return outputs


class _Child:
    """One process with one model; another one when that has died."""

    def __init__(self, handler: Handler[Any, Any, Any]) -> None:
        self._handler = handler
        self._lock = threading.Lock()
        self._pool = self._start()

    def call(self, function: Any, *arguments: Any) -> Any:
        with self._lock:
            pool = self._pool
        try:
            return pool.submit(function, *arguments).result()
        except BrokenProcessPool as error:
            with self._lock:
                if pool is self._pool:
                    self._pool = self._start()
            raise RuntimeError("The process of the model ended while it computed this batch.") from error

    def kill(self) -> None:
        with self._lock:
            for process in list(self._pool._processes.values()):  # pyright: ignore[reportPrivateUsage]
                process.kill()
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> concurrent.futures.ProcessPoolExecutor:
        # Not forked: this process has threads, and perhaps a device open.
        context = multiprocessing.get_context("spawn")
        return concurrent.futures.ProcessPoolExecutor(1, context, _begin, (_pickled(self._handler),))

    def __del__(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _pickled(handler: Handler[Any, Any, Any]) -> bytes:
    from apache_beam.internal import pickler

    return pickler.dumps(handler)


_in_child: dict[str, Any] = {}


def _begin(pickled: bytes) -> None:
    from apache_beam.internal import pickler

    _in_child["handler"] = pickler.loads(pickled)


def _load() -> None:
    if "model" not in _in_child:
        handler = _in_child["handler"]
        _in_child["model"] = handler.load_model()
        handler.warm_up(_in_child["model"])


def _predict(batch: Any, inference_args: dict[str, Any] | None) -> Any:
    _load()
    handler = _in_child["handler"]
    outputs = handler.predict(_in_child["model"], handler.transfer(batch), inference_args)
    handler.wait(outputs)
    return handler.collect(outputs)
