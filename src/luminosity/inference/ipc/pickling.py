"""Messages as bytes, with the large buffers of arrays apart; errors with their traceback as text."""

from __future__ import annotations

import io
import math
import pickle
import traceback
from typing import Any

from apache_beam.internal.cloudpickle import cloudpickle

__all__ = ["PortableError", "pack_error", "pickle_with_buffers", "unpack_error"]
_SCRIPT = b"__main__"
_APART_FROM = 8 << 10  # bytes of a buffer; copying less is cheaper than a separate buffer


def pickle_with_buffers(message: Any, apart_from: float = _APART_FROM) -> tuple[bytes, list[pickle.PickleBuffer]]:
    """Return the pickled message, and apart from it the buffers of at least ``apart_from`` bytes.

    This is plain pickle, unless the message has classes of the user's script, which the other process does not
    import: cloudpickle then includes their definitions.

    >>> data, buffers = pickle_with_buffers({"rows": [1, 2]})
    >>> pickle.loads(data)
    {'rows': [1, 2]}
    """
    buffers: list[pickle.PickleBuffer] = []

    def is_inline(buffer: pickle.PickleBuffer) -> bool:
        with memoryview(buffer) as view:
            if view.nbytes < apart_from:
                return True
        buffers.append(buffer)
        return False

    try:
        data = pickle.dumps(message, protocol=5, buffer_callback=is_inline)
        if _SCRIPT not in data:
            return data, buffers
    except (pickle.PicklingError, AttributeError):
        pass  # Pickle does not find a class by its name.
    buffers.clear()
    file = io.BytesIO()
    cloudpickle.Pickler(file, protocol=5, buffer_callback=is_inline).dump(message)
    return file.getvalue(), buffers


class PortableError(Exception):
    """Wraps an error inside a message: it is pickled as the packed error and unpickled as the error itself."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self._packed = pack_error(error)

    def __reduce__(self) -> tuple[Any, ...]:
        return unpack_error, (self._packed,)


def pack_error(error: BaseException) -> bytes:
    """Return the error as bytes; an error that can't be pickled becomes a ``RuntimeError`` with its class and text."""
    trace = "".join(traceback.format_exception(error))
    try:
        packed, _ = pickle_with_buffers((error, trace), apart_from=math.inf)
        pickle.loads(packed)  # Some errors can be pickled and not unpickled: their __init__ needs other arguments.
    except Exception:
        packed = pickle.dumps((RuntimeError(f"{type(error).__name__}: {error}"), trace))
    return packed


def unpack_error(packed: bytes) -> BaseException:
    """Return the error that was packed; its cause holds the traceback of the other process.

    >>> unpack_error(pack_error(ValueError("seven")))
    ValueError('seven')
    """
    error, trace = pickle.loads(packed)
    error.__cause__ = RuntimeError(f"in the process of the model:\n{trace}")
    return error
