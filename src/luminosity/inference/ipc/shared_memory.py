"""Memory that is passed to another process through a file descriptor."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import weakref
from collections.abc import Sequence

from luminosity.errors import InvalidArgument

__all__ = ["align", "fill_memory", "map_memory"]

_ALIGNMENT = 64  # bytes; pyarrow recommends it for the beginning of each buffer, and numpy needs less
_FAILED = ctypes.c_void_p(-1).value
_WRITE_BYTES = 1 << 30  # the kernel writes at most 2 GiB at once

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.munmap.restype = ctypes.c_int
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def align(size: int) -> int:
    """Return the size rounded up to where the next buffer may begin.

    >>> align(0), align(1), align(64)
    (0, 64, 64)
    """
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def fill_memory(buffers: Sequence[memoryview]) -> int:
    """Copy the buffers, each aligned, into new memory and return its descriptor, which the caller closes."""
    descriptor = _new()
    try:
        os.ftruncate(descriptor, sum(align(buffer.nbytes) for buffer in buffers))
        offset = 0
        for buffer in buffers:
            _write(descriptor, buffer, offset)
            offset += align(buffer.nbytes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def map_memory(descriptor: int, size: int) -> memoryview:
    """Map the memory behind the descriptor, which the caller closes; it is freed with the last view of it.

    Python's own ``mmap`` keeps a descriptor open for each mapping, and a process may have only about a thousand. The
    mapping is shared, not copied on write: the sender does not use the memory any more.
    """
    if (found := os.fstat(descriptor).st_size) < size:
        raise InvalidArgument(f"found {found} bytes of shared memory, expected {size}")
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
