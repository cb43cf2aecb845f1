"""Classes that the user's script or notebook defines, defined in workers, too.

Beam pickles functions and DoFns by value, so those of a script work in any process. Elements are pickled by the
standard pickle, which writes only the name ``__main__.Review``; so a worker's ``__main__`` must have that class.

In a process that multiprocessing has spawned, the script is the module ``__mp_main__``, and ``__main__`` is the same.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import sys
from types import ModuleType
from typing import Any

from apache_beam.internal.cloudpickle import cloudpickle

from luminosity.engine.workers import registered_types

__all__ = ["FILE_VARIABLE", "define", "load", "load_in_spawned", "save", "send_by_value"]

FILE_VARIABLE = "LUMINOSITY_MAIN_CLASSES"  # the file of classes, for processes that a worker spawns


_MAIN = "__main__"
_SPAWNED_MAIN = "__mp_main__"
_SPAWNED_MODULE = "luminosity.engine.workers.spawned_main"


def send_by_value() -> None:
    """Let functions and DoFns of the script be pickled by value even if its module is named ``__mp_main__``."""
    main = sys.modules[_MAIN]
    if main.__name__ == _SPAWNED_MAIN:
        cloudpickle.register_pickle_by_value(main)


def save(path: str) -> None:
    """Write the classes of this process's ``__main__``, and registered types, to the private file ``path``."""
    classes = {name: value for name, value in list(vars(sys.modules[_MAIN]).items()) if _is_of_main(value)}
    with open(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "wb") as file:
        pickle.dump((registered_types.pickle_each(classes), registered_types.pickled()), file)


def load(path: str, into: ModuleType | None = None) -> None:
    """Define the classes of a file that :func:`save` wrote in this process: in ``into``, or in ``__main__``."""
    with open(path, "rb") as file:
        define(file.read(), into)


def load_in_spawned(path: str) -> None:
    """Let processes that this process spawns with multiprocessing load the file, too."""
    os.environ[FILE_VARIABLE] = path
    sys.modules[_MAIN].__spec__ = importlib.util.find_spec(_SPAWNED_MODULE)


def define(saved: bytes, into: ModuleType | None = None) -> None:
    """Define the classes of such a file's content in this process."""
    classes, types = pickle.loads(saved)
    main: Any = into or sys.modules[_MAIN]
    sys.modules[_SPAWNED_MAIN] = main
    for name, data in classes.items():
        if (value := registered_types.unpickle(name, data)) is not None:
            setattr(main, name, value)
    for value in list(vars(main).values()):
        if _is_of_main(value):
            _name_nested_classes(value, main)
    registered_types.define(types)


def _is_of_main(value: Any) -> bool:
    return isinstance(value, type) and value.__module__ in (_MAIN, _SPAWNED_MAIN)


def _name_nested_classes(owner: type, main: Any) -> None:
    """Restore the qualified names of nested classes: pickling by value loses them, the standard pickle needs them."""
    for name, value in list(vars(owner).items()):
        if _is_of_main(value) and value.__qualname__ == name and getattr(main, name, None) is not value:
            value.__qualname__ = f"{owner.__qualname__}.{name}"
            _name_nested_classes(value, main)
