"""Which errors mean that a device's memory is full, and how to make room in it."""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Iterator

__all__ = ["forget_frames", "is_out_of_memory", "release_memory"]

# By name and message: no library is imported to look at an error that it may not have raised.
_CLASSES = {"OutOfMemoryError", "ResourceExhaustedError"}  # torch's, on every kind of device, and TensorFlow's
_LIBRARIES = {"torch", "tensorflow", "tensorrt"}
_XLA_CLASSES = {"XlaRuntimeError", "JaxRuntimeError"}
_MESSAGES = (
    "out of memory",  # CUDA, HIP, XPU, MPS; torch before it had a class for it; JAX
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "rocblas_status_memory_error",
    "defaultcpuallocator: not enough memory",
    "defaultcpuallocator: can't allocate memory",
    "failed to allocate memory for requested buffer",  # ONNX Runtime's arena
)
_MOST_CAUSES = 20


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this error, or one that led to it, says that memory was full, so that a smaller batch may succeed.

    A quota of a remote service that is exhausted is something else.

    >>> is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    True
    >>> is_out_of_memory(MemoryError())
    True
    >>> is_out_of_memory(ValueError("the shop is out of memory cards"))
    False
    """
    return any(_says_so(each) for each in _with_causes(error))


def forget_frames(error: BaseException) -> None:
    """Let go of what functions held that have failed, models and batches among it; where they failed is still known."""
    left: list[BaseException | None] = [error]
    seen: set[int] = set()
    while left:
        each = left.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            traceback.clear_frames(each.__traceback__)
            left += [each.__cause__, each.__context__]


def release_memory(collect: bool = True) -> None:
    """Give back what the libraries that are loaded hold in reserve, after a batch did not fit, or a model is gone."""
    if collect:
        gc.collect()  # what only cycles still hold, as of an exception's frames
    torch = sys.modules.get("torch")
    if torch is None:
        return
    for kind in ("cuda", "xpu", "mps"):
        device = getattr(torch, kind, None)
        if device is None:
            continue
        # Asking CUDA whether it is there would wake it up; nothing is held where it never was.
        is_in_use = device.is_initialized() if hasattr(device, "is_initialized") else torch.backends.mps.is_available()
        if is_in_use:
            device.empty_cache()


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    each: BaseException | None = error
    for _ in range(_MOST_CAUSES):
        if each is None:
            return
        yield each
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)


def _says_so(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    library = type(error).__module__.partition(".")[0]
    names = {kind.__name__ for kind in type(error).__mro__}
    if library in _LIBRARIES and names & _CLASSES:
        return True
    message = str(error).lower()
    if names & _XLA_CLASSES and "resource_exhausted" in message:
        return True
    # Libraries raise nothing more special than this; ONNX Runtime's have no base but Exception.
    return (isinstance(error, RuntimeError) or library == "onnxruntime") and any(text in message for text in _MESSAGES)
