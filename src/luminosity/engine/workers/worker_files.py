"""Files that the runner writes for its workers: classes of the user's script or notebook, and models to load ahead.

Beam pickles functions and DoFns by value, so those of a script work in any process. Elements are pickled by the
standard pickle, which writes only the name ``__main__.Review``; so a worker's ``__main__`` must have that class.

In a process that multiprocessing has spawned, the script is the module ``__mp_main__``, and ``__main__`` is the same.

A row's coder refers to its type by an id, and to a logical type by a URN; registries of the process map them to
classes. A worker without those would make up a class for the row, without the user's methods, and fail on the logical
type.

Models are loaded on a thread when a worker starts for them alone. Beam sets a step up with its first bundle. By then
other workers have started, read and prepared elements, while the device would have had nothing to do for seconds.
"""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import pickle
import sys
import threading
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from apache_beam.internal import cloudpickle_pickler, pickler
from apache_beam.internal.cloudpickle import cloudpickle
from apache_beam.portability import common_urns
from apache_beam.portability.api import beam_runner_api_pb2
from apache_beam.typehints.schema_registry import SCHEMA_REGISTRY
from apache_beam.typehints.schemas import LogicalType

from luminosity.core import LOADS_MODELS

__all__ = [
    "FILE_VARIABLE",
    "define",
    "load",
    "load_in_spawned",
    "save",
    "save_models",
    "send_by_value",
    "start_loading",
]

_LOGGER = logging.getLogger(__name__)
FILE_VARIABLE = "LUMINOSITY_MAIN_CLASSES"  # the file of classes, for processes that a worker spawns
_MAIN = "__main__"
_SPAWNED_MAIN = "__mp_main__"
_SPAWNED_MODULE = "luminosity.engine.workers.spawned_main"
_LOGICAL_TYPES: Any = getattr(LogicalType, "_known_logical_types")  # noqa: B009  # Beam's saved sessions use it, too


def send_by_value() -> None:
    """Let functions and DoFns of the script be pickled by value even if its module is named ``__mp_main__``."""
    main = sys.modules[_MAIN]
    if main.__name__ == _SPAWNED_MAIN:
        cloudpickle.register_pickle_by_value(main)


def save(path: str) -> None:
    """Write the classes of this process's ``__main__``, and registered types, to the private file ``path``."""
    classes = {name: value for name, value in list(vars(sys.modules[_MAIN]).items()) if _is_of_main(value)}
    with open(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "wb") as file:
        pickle.dump((_pickle_each(classes), _pickled_types()), file)


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
        if (value := _unpickle(name, data)) is not None:
            setattr(main, name, value)
    for value in list(vars(main).values()):
        if _is_of_main(value):
            _name_nested_classes(value, main)
    _define_types(types)


def _is_of_main(value: Any) -> bool:
    return isinstance(value, type) and value.__module__ in (_MAIN, _SPAWNED_MAIN)


def _name_nested_classes(owner: type, main: Any) -> None:
    """Restore the qualified names of nested classes: pickling by value loses them, the standard pickle needs them."""
    for name, value in list(vars(owner).items()):
        if _is_of_main(value) and value.__qualname__ == name and getattr(main, name, None) is not value:
            value.__qualname__ = f"{owner.__qualname__}.{name}"
            _name_nested_classes(value, main)


class _RowTypes(dict[str, tuple[type, Any]]):
    """Row types by id. The user's types are unpickled when they are first looked up, since that may import much."""

    def __init__(self, known: dict[str, tuple[type, Any]], pickled: dict[str, bytes]) -> None:
        super().__init__(known)
        self._pickled = pickled

    def __contains__(self, schema_id: object) -> bool:
        return self.get(str(schema_id)) is not None

    def __getitem__(self, schema_id: str) -> tuple[type, Any]:
        self._define(schema_id)
        return super().__getitem__(schema_id)

    def get(self, schema_id: str, default: Any = None) -> Any:
        """Return a type and its schema, unpickled if needed."""
        self._define(schema_id)
        return super().get(schema_id, default)

    def _define(self, schema_id: str) -> None:
        if schema_id in self._pickled and not super().__contains__(schema_id):
            row_type: Any = _unpickle(schema_id, self._pickled[schema_id])
            if row_type is not None:
                self[schema_id] = row_type, None


def _pickled_types() -> dict[str, dict[str, bytes]]:
    """Return the registered types, for :func:`define` in a worker."""
    # Copied in one step: another thread may be building a pipeline.
    row_types: list[tuple[str, tuple[type, Any]]] = list(SCHEMA_REGISTRY.by_id.items())
    urns: list[str] = list(_LOGICAL_TYPES._custom_urns)
    return {
        "row types": _pickle_each({i: t for i, (t, _) in row_types if not _is_made_up(t) and not _is_replaced(t)}),
        "logical types": _pickle_each({urn: _LOGICAL_TYPES.by_urn[urn] for urn in urns}),
    }


def _define_types(types: dict[str, dict[str, bytes]]) -> None:
    """Register the types that :func:`_pickled_types` returned in another process."""
    registry: Any = SCHEMA_REGISTRY
    registry.by_id = _RowTypes(registry.by_id, types["row types"])
    for urn, data in types["logical types"].items():
        logical_type: Any = _unpickle(urn, data)
        if logical_type is not None:
            _LOGICAL_TYPES.add(urn, logical_type)


def _pickle_each(values: dict[str, Any]) -> dict[str, bytes]:
    """Pickle each value, and leave out those that can't be: if one is needed, the worker's own error names it."""
    found: dict[str, bytes] = {}
    for name, value in values.items():
        try:
            found[name] = cloudpickle_pickler.dumps(value)
        except Exception as error:
            _LOGGER.debug("%s can't be sent to workers: %s", name, error)
    return found


def _unpickle(name: str, data: bytes) -> Any:
    """Return the value, or None if it can't be unpickled here."""
    try:
        return cloudpickle_pickler.loads(data)
    except Exception as error:
        _LOGGER.debug("%s can't be defined here: %s", name, error)
        return None


def _is_made_up(row_type: type) -> bool:
    """Return whether Beam made the class, for rows without one; workers make their own."""
    return row_type.__module__ == "apache_beam.typehints.schemas"


def _is_replaced(row_type: type) -> bool:
    """Return whether a notebook's cell has defined the class again since; the registry keeps all versions."""
    if row_type.__module__ != "__main__" or row_type.__qualname__ != row_type.__name__:
        return False
    return vars(sys.modules["__main__"]).get(row_type.__name__, row_type) is not row_type


def save_models(path: str, stages: Iterable[Iterable[beam_runner_api_pb2.PTransform]], *, is_device: bool) -> bool:
    """Write the DoFns of a pool's stages that load models to the private file ``path``.

    Returns False, and writes nothing, if there are none, or if the pool has no device and a stage without a model: its
    workers may never need the models.
    """
    found = [[_dofn(transform) for transform in stage if _loads_models(transform)] for stage in stages]
    payloads = [payload for stage in found for payload in stage] if is_device or all(found) else []
    if payloads:
        with open(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "wb") as file:
            pickle.dump(payloads, file)
    return bool(payloads)


def _loads_models(transform: beam_runner_api_pb2.PTransform) -> bool:
    return LOADS_MODELS in transform.annotations and transform.spec.urn == common_urns.primitives.PAR_DO.urn


def _dofn(transform: beam_runner_api_pb2.PTransform) -> bytes:
    return beam_runner_api_pb2.ParDoPayload.FromString(transform.spec.payload).do_fn.payload


def start_loading(path: str) -> None:
    """Call ``load_ahead`` of the DoFns in a file that :func:`save_models` wrote, on a thread. Does not wait."""
    threading.Thread(target=_load_models, args=(path,), name="luminosity-load-ahead", daemon=True).start()


def _load_models(path: str) -> None:
    gc.disable()  # libraries make little garbage while they are imported; looking for it takes a tenth of the time
    try:
        with open(path, "rb") as file:
            payloads = pickle.load(file)
        for payload in payloads:
            pickler.loads(payload)[0].load_ahead()
    except Exception:
        # The same error arises when Beam sets the step up, and is reported then with the step's name.
        _LOGGER.debug("could not load models ahead of the first element", exc_info=True)
    finally:
        gc.freeze()  # imported objects stay: later collections need not look at them
        gc.enable()
