"""The model host of a device: what steps and services call; and the hosts of this process, one for each device."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Hashable
from typing import Any

from luminosity._shared.hangs import Wait, stack_text
from luminosity._shared.model_sizes import models_ram_bytes
from luminosity._shared.text import shorten
from luminosity._shared.user_code import is_users
from luminosity.core import WorkerShare
from luminosity.inference.handler import Handler
from luminosity.inference.host.device import LOOK_AGAIN_S, Device
from luminosity.inference.host.device_threads import stacks_at_work
from luminosity.inference.host.interface import Ahead, LaneSettings, LoadStats
from luminosity.inference.host.lane import Lane
from luminosity.inference.host.model import State, drop
from luminosity.inference.host.session import Session

__all__ = ["ModelHost", "device_of", "host_of", "model_budget"]

_LABEL_CHARACTERS = 80  # of a model's name: a handler's repr may be long
_RETRY_LOAD_S = 60.0  # how long after a failure a model may be loaded ahead of its work again
_SHARE_OF_DEVICE = 0.9  # the rest is for batches and the libraries' own memory
_GPUS = ("cuda", "gpu")

_lock = threading.Lock()
"""Protects ``_hosts``."""
_hosts: dict[tuple[int, str, int | None], ModelHost] = {}


class ModelHost:
    """Owns a device's models, gathers examples from all bundles and threads of a process, and runs batches.

    Methods may be called from any thread, without the lock. :mod:`~luminosity.inference.host.device` says how the
    classes of this folder work together.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, budget: int | None = None, device: str = "cpu"
    ) -> None:
        """``budget``: the bytes that all models may take together; None for no limit."""
        self._device = Device(clock, budget, device)
        self._lock = self._device.lock

    @property
    def broken(self) -> BaseException | None:
        """The error that ended a device thread; the host can't be used any more."""
        return self._device.broken

    def enter(self, key: Hashable, make_handler: Callable[[], Handler[Any, Any, Any]], settings: LaneSettings) -> Lane:
        """Return the lane with this key, which the first caller creates. Call :meth:`leave` once for each call."""
        with self._lock:
            lane = self._device.lanes.get(key)
            if lane is None:
                handler = make_handler()
                name = ("lane", key) if settings.model is None else ("model", settings.model)
                model = self._device.scheduler.model(name, handler, settings.clock, settings.family, self._device.now())
                model.label = settings.label or model.label
                lane = Lane(key, handler, model, settings, self._device.lane_changed)
                self._device.add(lane)
            self._device.use(lane)
            return lane

    def leave(self, lane: Lane) -> None:
        """Leave a lane. After the last user has left, the lane and its model are kept for a minute."""
        with self._lock:
            self._device.leave(lane)

    def open(self, step: Any = None) -> Session:
        """Open a session for the calling thread, which closes it; ``step`` is the Beam step it works for."""
        return Session(self._lock, self._device.now, self._device.wait_until, self.describe_wait, step)

    def describe_wait(self, lanes: Collection[Lane]) -> Wait:
        """Return how this host does with the models of these lanes, for a bundle that waits for them. Any thread."""
        models = list(dict.fromkeys(lane.model for lane in list(lanes)))
        loading = [model for model in models if model.state is State.LOADING]
        shown = (loading or models)[:1]
        begun = shown[0].load_begun if loading else self._device.progressed_at
        at_work = stacks_at_work()
        users = [(frame, line) for frames in at_work for frame, line in frames if is_users(frame)]
        return Wait(
            f"the model {shorten(shown[0].label, _LABEL_CHARACTERS)}" if shown else "a model",
            quiet_seconds=max(0.0, self._device.now() - begun),
            is_loading=bool(loading),
            stack="\n\n".join(map(stack_text, at_work)),
            location=f"{users[-1][0].f_code.co_filename}:{users[-1][1]}" if users else "",
        )

    def load(self, lane: Lane) -> None:
        """Block until the lane's model is in memory; raise the error of its load."""
        model = lane.model
        with self._lock:
            failures = model.failures
            model.waiters += 1
            self._device.scheduler.request(model)
            self._lock.notify_all()
            try:
                while not model.is_ready:
                    if model.failures > failures:
                        assert model.error is not None
                        raise model.error
                    self._device.wait(LOOK_AGAIN_S)
            finally:
                if model.failures == failures:  # A failure has reset the count of waiters.
                    model.waiters -= 1

    def size_of(self, lane: Lane) -> int:
        """Return the bytes of the lane's model; 0 if it was never loaded."""
        with self._lock:
            return lane.model.size or 0

    def unload(self, lane: Lane) -> None:
        """Drop the lane's model from memory. The next batch loads it again."""
        with self._lock:
            evicted = self._device.scheduler.retire(lane.model, self._device.now())
        drop(evicted)

    def load_ahead(self, lane: Lane, instead_of: Lane | None = None) -> Ahead:
        """Request a model before there is work for it, and return how far its load is; does not block.

        If the model fits only in place of that of ``instead_of``, it replaces that model once it is loaded, and gets
        the examples that wait for it.
        """
        model = lane.model
        with self._lock:
            if model.is_ready:
                return Ahead.READY
            if model.state is State.ABSENT:
                if model.error is not None and self._device.now() - model.failed_at < _RETRY_LOAD_S:
                    return Ahead.FAILED
                if model.does_not_fit_beside:
                    if instead_of is None:
                        return Ahead.NO_ROOM
                    self._device.scheduler.replace(instead_of, lane)
                model.is_awaited = True
                self._device.scheduler.request(model)
                self._lock.notify_all()
            return Ahead.LOADING

    def take_over(self, old: Lane, new: Lane) -> None:
        """Move the examples of a lane that are not yet cut into batches to another lane."""
        with self._lock:
            old.move_to(new)
            self._lock.notify_all()

    def take_load_stats(self, lanes: list[Lane]) -> list[list[LoadStats]]:
        """Return, for each lane, the loads of its model since the last call."""
        with self._lock:
            return [lane.model.take_load_stats() for lane in lanes]

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` if the state is inconsistent."""
        with self._lock:
            self._device.check_integrity()


def host_of(handler: Handler[Any, Any, Any], budget: int | None = None, workers: int = 1) -> ModelHost:
    """Return the host for this handler's device. A forked process gets new hosts: threads don't survive a fork.

    Args:
        handler: its ``device`` names the device.
        budget: the value of ``--model_memory_budget``; pipelines with different values share no host.
        workers: how many processes like this one there are, if known.
    """
    device = device_of(handler)
    key = os.getpid(), device, budget
    with _lock:
        host = _hosts.get(key)
        if host is None or host.broken is not None:
            host = _hosts[key] = ModelHost(budget=model_budget(device, budget, workers), device=device)
        return host


def device_of(handler: Handler[Any, Any, Any]) -> str:
    """Return the handler's device by one name, however the handler spells it: "cpu", "cuda:0", "mps"...

    >>> from luminosity import JaxModelHandler
    >>> device_of(JaxModelHandler(lambda params, x: x, {}, device="gpu:1")), device_of(Handler())
    ('cuda:1', 'cpu')
    """
    name = str(getattr(handler, "device", None) or "cpu").lower()
    kind, _, number = name.partition(":")
    if kind in _GPUS:
        return f"cuda:{number or 0}"
    return kind if not number else name


def model_budget(device: str, requested: int | None, workers: int) -> int | None:
    """Return the bytes for models on this device in one of ``workers`` processes; None for no limit.

    A device belongs to one process; the machine's memory is divided among all.

    >>> model_budget("cpu", 8_000_000_000, workers=2), model_budget("cuda:0", 8_000_000_000, workers=2)
    (4000000000, 8000000000)
    """
    if device == "remote":
        return None
    if device == "cpu":
        total = models_ram_bytes() if requested is None else requested
        return total // max(workers, WorkerShare.current().workers, 1)
    if requested is not None:
        return requested
    memory = _device_bytes(device)
    return None if memory is None else int(memory * _SHARE_OF_DEVICE)


def _device_bytes(device: str) -> int | None:
    """Return the device's memory if a library that is already imported knows it."""
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    number = int(device.partition(":")[2] or 0)
    if device.startswith("cuda") and torch is not None and torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(number).total_memory)
    if device.startswith("cuda") and jax is not None:
        try:
            stats = jax.local_devices(backend="gpu")[number].memory_stats()
        except (RuntimeError, IndexError):
            return None  # JAX has no such device; the model may do without it, or raises its own error.
        return int(stats["bytes_limit"]) if stats else None
    return None
