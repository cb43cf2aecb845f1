"""Models of Beam's RunInference that workers share: where their files lie, and which ones a worker loads itself.

Beam holds the models of a ``KeyedModelHandler`` in one process, whatever their size, and the other workers call them
through a proxy. A call takes 20 ms and more, and only one process computes. So each worker loads small models itself.
Workers also count the bytes of large batches by a sample.

Two things change in ``MultiProcessShared``, on which Beam shares models. The files that lead to the shared objects of
``RunInference`` lie in the run's private folder: in the machine's temporary folder, a run would meet the model manager
of another run, or the address of a manager that has ended. Objects that user code shares stay where they are, because
other processes may share them, too. And an exception of a shared object carries the traceback of its process, because
multiprocessing sends only the exception.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

from apache_beam.utils import multi_process_shared

from luminosity._shared.model_sizes import LocalShare, ModelSizes, return_free_memory
from luminosity.core import WorkerShare, resident_bytes

__all__ = ["FOLDER_VARIABLE", "count_bytes_of_samples", "keep_files_in", "keep_small_models_here"]

_BASE = "apache_beam.ml.inference.base"
FOLDER_VARIABLE = "LUMINOSITY_SHARED_OBJECTS"  # the folder, for processes that a worker spawns
OTHER_PROCESS = "in the process of the model:\n"  # begins a note or a message that holds another process's traceback
_COUNTED = 64  # examples of a batch
_BEAMS_MODULES = "apache_beam.ml.inference."
_SHARED: Any = multi_process_shared.MultiProcessShared
_initialize: Callable[..., None] = _SHARED.__init__
_PROXY: Any = multi_process_shared._SingletonProxy  # pyright: ignore[reportPrivateUsage]
_get_attribute: Callable[[Any, str], Any] = _PROXY.__getattr__
_call: Callable[..., Any] = _PROXY.singletonProxy_call__


def keep_small_models_here(budget: int | None) -> None:
    """Let Beam's RunInference load small models of keys in this worker. Call it before any step is unpickled.

    The fork server has imported Beam's module already. If this process is a spawned one, the module is not there, and
    Beam's behaviour stays: importing it takes longer than a worker takes to start.

    Args:
        budget: the value of ``--model_memory_budget`` in bytes, or None.
    """
    base: Any = sys.modules.get(_BASE)
    if base is None:
        return

    class SmallModelsDoFn(base._RunInferenceDoFn):
        """Beam's step; it is unpickled in place of Beam's because it has the same name in Beam's module."""

        def setup(self) -> None:
            keyed = _models_shared_by_default(base, self._model_handler)
            if keyed is not None and not self._load_model_at_runtime and not self.use_model_manager:
                _keep_here(base, keyed, self._model_tag, budget)
            super().setup()

    SmallModelsDoFn.__name__ = SmallModelsDoFn.__qualname__ = base._RunInferenceDoFn.__name__
    SmallModelsDoFn.__module__ = _BASE
    base._RunInferenceDoFn = SmallModelsDoFn


def _models_shared_by_default(base: Any, handler: Any) -> Any | None:
    """Return the handler of many models, if they are shared only because Beam shares all models of keys."""
    while isinstance(handler, base._PreProcessingModelHandler | base._PostProcessingModelHandler):
        handler = handler._base
    if not isinstance(handler, base.KeyedModelHandler) or handler._single_model:
        return None
    if type(handler).share_model_across_processes is not base.KeyedModelHandler.share_model_across_processes:
        return None
    asks = any(each.share_model_across_processes() for each in handler._id_to_mh_map.values())
    return None if asks else handler


def _keep_here(base: Any, handler: Any, tag: str, budget: int | None) -> None:
    """Let the handler load its models in this process."""
    share, sizes = WorkerShare.current(), ModelSizes.of_run()
    if sizes is None or share.devices:
        return
    handler.share_model_across_processes = partial(bool, False)
    if share.workers > 1:
        share_here = LocalShare.of_process(budget)
        handler.load_model = partial(_make_manager, base, handler._id_to_mh_map, tag, sizes, share_here)


def _make_manager(base: Any, handlers: dict[Any, Any], tag: str, sizes: ModelSizes, share: LocalShare) -> Any:
    own = base._ModelHandlerManager(handlers)
    return _SmallModelManager(own, handlers, tag, sizes, share, partial(_connect, base, handlers, tag))


def _connect(base: Any, handlers: dict[Any, Any], tag: str) -> Any:
    """Return the manager that holds the models of all workers, as Beam does it."""
    make = partial(base._ModelHandlerManager, handlers)
    return base.multi_process_shared.MultiProcessShared(make, tag=f"{tag}_shared", always_proxy=True).acquire()


class _SmallModelManager:
    """Stands for Beam's manager: loads small models in this process, and has Beam's shared manager load the others.

    Beam calls ``load`` before each use of a model, and finds the model by the tag that it returns. Methods may be
    called from any thread.
    """

    def __init__(
        self, own: Any, handlers: dict[Any, Any], tag: str, sizes: ModelSizes, share: LocalShare, connect: Any
    ) -> None:
        self._own = own  # Beam's manager of the models in this process
        self.update_model_handler = own.update_model_handler
        self._handlers = handlers
        self._name = tag
        self._sizes = sizes
        self._share = share
        self._connect = connect
        self._lock = threading.RLock()
        self._small: set[Any] = set()
        self._shared: Any = None
        self._most = 0

    def load(self, key: Any) -> Any:
        with self._lock:
            stats = self._own.load(key) if key in self._small else self._load_if_small(key)
            return self._shared_manager().load(key) if stats is None else stats

    def increment_max_models(self, increment: int) -> None:
        with self._lock:
            self._own.increment_max_models(increment)
            self._most += increment
            if self._shared is not None:
                self._shared.increment_max_models(increment)

    def _load_if_small(self, key: Any) -> Any | None:
        """Load a model for the first time; return None if it is not small."""
        name = self._name, key

        def load_small() -> Any:
            self._small.add(key)
            return self._own.load(key)

        return self._sizes.load_if_small(
            name, self._kind_of(key), self._share, load=load_small, measure=lambda: self._measure(key, name)
        )

    def _measure(self, key: Any, name: Any) -> Any | None:
        before = resident_bytes()
        stats = self._own.load(key)
        size = max(resident_bytes() - before, 0)
        self._sizes.add(name, self._kind_of(key), size)
        if self._share.take(name, size):
            self._small.add(key)
            return stats
        handle, model = self._own._proxy_map.pop(self._own._tag_map.pop(key))
        handle.release(model)
        del handle, model
        return_free_memory()
        return None

    def _kind_of(self, key: Any) -> str:
        return type(self._handlers[key]).__name__

    def _shared_manager(self) -> Any:
        if self._shared is None:
            self._shared = self._connect()
            if self._most:
                self._shared.increment_max_models(self._most)
        return self._shared


def count_bytes_of_samples() -> None:
    """Let Beam's RunInference count the bytes of a large batch by some of its examples.

    Beam pickles the whole batch for this metric, which takes a third of the time of a quick model. Handlers with a
    ``get_num_bytes`` of their own keep it. Spawned workers, which have not imported Beam's module, keep Beam's.
    """
    base: Any = sys.modules.get(_BASE)
    if base is None or getattr(base.ModelHandler.get_num_bytes, "counts_samples", False):
        return
    count_all = base.ModelHandler.get_num_bytes

    @functools.wraps(count_all)
    def get_num_bytes(handler: Any, batch: Any) -> int:
        if not isinstance(batch, list | tuple) or len(batch) <= _COUNTED:
            return count_all(handler, batch)
        some = batch[:: -(-len(batch) // _COUNTED)]
        return count_all(handler, some) * len(batch) // len(some)

    vars(get_num_bytes)["counts_samples"] = True
    base.ModelHandler.get_num_bytes = get_num_bytes


def keep_files_in(folder: str) -> None:
    """Let shared objects of ``RunInference`` that this process makes or looks for keep their files in ``folder``."""

    @functools.wraps(_initialize)
    def initialize(shared: Any, *args: Any, **kwargs: Any) -> None:
        caller: str = sys._getframe(1).f_globals.get("__name__", "")  # pyright: ignore[reportPrivateUsage]
        if caller.startswith(_BEAMS_MODULES):
            kwargs.setdefault("path", folder)
        _initialize(shared, *args, **kwargs)

    _SHARED.__init__ = initialize


def _with_traceback(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function``, but its exceptions get a note with the traceback, which is pickled with them."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            trace = "".join(traceback.format_exception(error))
            vars(error)["__notes__"] = [*getattr(error, "__notes__", ()), OTHER_PROCESS + trace]
            raise

    return call


def _get_with_traceback(proxy: Any, name: str) -> Any:
    found = _get_attribute(proxy, name)
    return _with_traceback(found) if inspect.isroutine(found) else found


_PROXY.__getattr__ = _get_with_traceback
_PROXY.singletonProxy_call__ = _with_traceback(_call)
