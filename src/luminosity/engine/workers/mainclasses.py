"""Classes that the user's script or notebook defines, made known to workers.

Beam pickles functions and DoFns by value, so those of a script work anywhere. Elements are pickled by the standard
pickle, which only writes down ``__main__.Review``; so a worker's ``__main__`` must have that class.
"""

from __future__ import annotations

import logging
import os
import pickle
import sys

from apache_beam.internal import cloudpickle_pickler

_LOGGER = logging.getLogger("luminosity")


def save(path: str) -> None:
    """Write the classes that this process's ``__main__`` defines, each by itself, to the private file ``path``."""
    pickled: dict[str, bytes] = {}
    for name, value in list(vars(sys.modules["__main__"]).items()):
        if isinstance(value, type) and value.__module__ == "__main__":
            try:
                pickled[name] = cloudpickle_pickler.dumps(value)
            except Exception as error:
                # It may never be needed; where it is, the worker's own error names it.
                _LOGGER.debug("%s can't be sent to workers: %s", name, error)
    with open(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "wb") as file:
        pickle.dump(pickled, file)


def load(path: str) -> None:
    """Define them in this process's ``__main__``."""
    with open(path, "rb") as file:
        define(file.read())


def define(saved: bytes) -> None:
    """The same, of such a file's content."""
    pickled: dict[str, bytes] = pickle.loads(saved)
    main = sys.modules["__main__"]
    for name, data in pickled.items():
        try:
            setattr(main, name, cloudpickle_pickler.loads(data))
        except Exception as error:
            _LOGGER.debug("%s can't be defined here: %s", name, error)
