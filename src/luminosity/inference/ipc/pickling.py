"""Messages as bytes, with the large buffers of arrays apart."""

from __future__ import annotations

import io
import pickle
from typing import Any

from apache_beam.internal.cloudpickle import cloudpickle

__all__ = ["pickle_with_buffers"]

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
