"""Memory that models take: measure it, recognise errors that mean it is full, and release it."""

from __future__ import annotations

import gc
import os
import resource
import sys
import traceback
from collections.abc import Iterator
from typing import Any

from luminosity.inference.handler import Handler

__all__ = ["forget_frames", "is_out_of_memory", "model_bytes", "release_memory", "resident_bytes"]


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

_STATM = "/proc/self/statm"


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


def model_bytes(handler: Handler[Any, Any, Any], model: Any) -> int | None:
    """The bytes of this model's parameters; None where nothing tells.

    >>> from luminosity import Handler
    >>> import torch
    >>> memory_of(Handler(), torch.nn.Linear(10, 10, bias=False)), memory_of(Handler(), "a model of its own kind")
    (400, None)
    """
    told = handler.memory(model)
    if told is not None:
        return told
    # A model of a library is there only if the library is.
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None and hasattr(torch, "nn") and isinstance(model, torch.nn.Module):
        tensors: Any = (*model.parameters(), *model.buffers())
        return sum(tensor.nbytes for tensor in tensors)
    if jax is not None and hasattr(jax, "tree"):
        leaves: list[Any] = jax.tree.leaves(model)
        if leaves and all(isinstance(leaf, jax.Array) for leaf in leaves):
            return sum(leaf.nbytes for leaf in leaves)
    return None


def resident_bytes() -> int:
    """The memory this process has now; where the system does not tell, the most it ever had."""
    if os.path.exists(_STATM):
        with open(_STATM) as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
