"""A number for each row that depends on its id and a seed alone: not on the machine, the order or the sharding."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np

from luminosity.errors import DriftError

__all__ = ["hash_ids"]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def hash_ids(ids: Any, seed: int) -> Any:
    """64 bits for each id: whole numbers of any size, strings or bytes.

    >>> hash_ids([7, 8], seed=0) == hash_ids([8, 7], seed=0)[::-1]
    array([ True,  True])
    """
    ids = _as_array(ids)
    if ids.ndim != 1:
        raise DriftError(f"Found ids of shape {ids.shape}, expected one for each row.")
    if ids.dtype.kind in "iub":
        return _mixed(ids.astype(np.int64).view(np.uint64), seed)
    if ids.dtype.kind in "USOT":
        return _mixed(np.fromiter((_digest(value) for value in ids), dtype=np.uint64, count=len(ids)), seed)
    raise DriftError(f"Found ids of {ids.dtype}, expected whole numbers, strings or bytes: they must be exact.")


def _as_array(ids: Any) -> Any:
    """Lists item by item where NumPy would lose something: zeros at the end of bytes, digits of large numbers."""
    array = np.asarray(ids)
    if array.ndim == 1 and array is not ids and array.dtype.kind in "USf" and isinstance(ids, (list, tuple)):
        array = np.empty(len(array), dtype=object)
        array[:] = ids
    return array


def _digest(value: Any) -> int:
    if isinstance(value, (int, np.integer)):
        number = int(value)
        if -(2**63) <= number < 2**64:
            return number & 0xFFFFFFFFFFFFFFFF
        value = b"%d" % number  # as that of a UUID
    if not isinstance(value, (str, bytes)):
        raise DriftError(f"Found the id {value!r}, expected a whole number, a string or bytes.")
    data = value.encode() if isinstance(value, str) else value
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


def _mixed(numbers: Any, seed: int) -> Any:
    """SplitMix64 (Steele, Lea and Flood 2014): neighbouring numbers come out unrelated."""
    with np.errstate(over="ignore"):
        mixed = numbers + np.uint64(seed % 2**64) * np.uint64(0xD1342543DE82EF95) + _GOLDEN
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        return mixed ^ (mixed >> np.uint64(31))
