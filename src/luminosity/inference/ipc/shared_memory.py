"""Memory that is handed to another process through a descriptor."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import weakref
from collections.abc import Sequence

__all__ = ["ALIGNMENT", "aligned", "filled", "mapped"]

ALIGNMENT = 64
"""Where each buffer may begin: what pyarrow wishes for, and more than numpy does."""

_FAILED = ctypes.c_void_p(-1).value
_WRITE_BYTES = 1 << 30  # the kernel takes no more than 2 GiB at once

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.munmap.restype = ctypes.c_int
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def aligned(size: int) -> int:
    """
    >>> aligned(0), aligned(1), aligned(64)
    (0, 64, 64)
    """
    return -(-size // ALIGNMENT) * ALIGNMENT


def filled(buffers: Sequence[memoryview]) -> int:
    """The descriptor of new memory that holds the buffers, each where an aligned place comes next."""
    descriptor = _new()
    try:
        os.ftruncate(descriptor, sum(aligned(buffer.nbytes) for buffer in buffers))
        offset = 0
        for buffer in buffers:
            _write(descriptor, buffer, offset)
            offset += aligned(buffer.nbytes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def mapped(descriptor: int, size: int) -> memoryview:
    """The memory behind the descriptor, which the caller closes; freed when the last view of it is gone.

    Python's own mmap would keep a descriptor open for each mapping, and a process may have but a thousand or so.
    It is shared and not copied when written to: who sent it has forgotten it.
    """
    if (found := os.fstat(descriptor).st_size) < size:
        raise ValueError(f"expected {size} bytes of shared memory, found {found}")
    address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
    if address == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"can't map {size} bytes of shared memory: {os.strerror(code)}")
    array = (ctypes.c_char * size).from_address(address)
    weakref.finalize(array, _libc.munmap, address, size).atexit = False
    return memoryview(array).cast("B")


def _new() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("luminosity")  # closed on exec
    descriptor, path = tempfile.mkstemp(prefix="luminosity-")
    os.unlink(path)
    return descriptor


def _write(descriptor: int, buffer: memoryview, offset: int) -> None:
    while buffer.nbytes:
        written = os.pwrite(descriptor, buffer[:_WRITE_BYTES], offset)
        buffer, offset = buffer[written:], offset + written
