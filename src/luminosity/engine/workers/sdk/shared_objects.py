"""Beam's ``MultiProcessShared`` in workers, on which Beam shares models and its model manager between processes.

Two things change. The files that lead to the shared objects of Beam's ``RunInference`` lie in the run's private folder:
in the machine's temporary folder, a run would meet the model manager of another run, or the address of a manager that
has ended. Objects that user code shares stay where they are, because other processes may share them, too. And an
exception of a shared object carries the traceback of its process, because multiprocessing sends only the exception.
"""

from __future__ import annotations

import functools
import inspect
import sys
import traceback
from collections.abc import Callable
from typing import Any

from apache_beam.utils import multi_process_shared

__all__ = ["FOLDER_VARIABLE", "OTHER_PROCESS", "keep_files_in"]

FOLDER_VARIABLE = "LUMINOSITY_SHARED_OBJECTS"  # the folder, for processes that a worker spawns
OTHER_PROCESS = "in the process of the model:\n"  # begins a note or a message that holds another process's traceback

_BEAMS_MODULES = "apache_beam.ml.inference."
_SHARED: Any = multi_process_shared.MultiProcessShared
_initialize: Callable[..., None] = _SHARED.__init__
_PROXY: Any = multi_process_shared._SingletonProxy  # pyright: ignore[reportPrivateUsage]
_get_attribute: Callable[[Any, str], Any] = _PROXY.__getattr__
_call: Callable[..., Any] = _PROXY.singletonProxy_call__


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
