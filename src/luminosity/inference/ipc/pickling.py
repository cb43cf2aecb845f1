"""Messages as bytes, with the large parts of arrays apart."""

from __future__ import annotations

import io
import pickle
from typing import Any

from apache_beam.internal.cloudpickle import cloudpickle

__all__ = ["pickled"]

_SCRIPT = b"__main__"
_APART_FROM = 8 << 10
"""Bytes of a buffer; a copy of less costs less than to keep account of it."""


def pickled(message: Any, apart_from: float = _APART_FROM) -> tuple[bytes, list[pickle.PickleBuffer]]:
    """Plain pickle, unless the message has classes of the user's script: the other process has another script.

    Buffers of so many bytes and more are given apart.

    >>> data, buffers = pickled({"rows": [1, 2]})
    >>> pickle.loads(data)
    {'rows': [1, 2]}
    """
    buffers: list[pickle.PickleBuffer] = []

    def is_within(buffer: pickle.PickleBuffer) -> bool:
        with memoryview(buffer) as view:
            if view.nbytes < apart_from:
                return True
        buffers.append(buffer)
        return False

    try:
        data = pickle.dumps(message, protocol=5, buffer_callback=is_within)
        if _SCRIPT not in data:
            return data, buffers
    except (pickle.PicklingError, AttributeError):
        pass  # A class that pickle does not find by its name; the other pickler takes its definition along.
    buffers.clear()
    file = io.BytesIO()
    cloudpickle.Pickler(file, protocol=5, buffer_callback=is_within).dump(message)
    return file.getvalue(), buffers
