"""Memory that models take: measure it, recognise errors that mean it is full, and release it."""

from __future__ import annotations

import gc
import logging
import sys
import traceback
from collections.abc import Iterator
from typing import Any

from luminosity.inference.handler import Handler

__all__ = [
    "forget_frames",
    "is_out_of_memory",
    "make_room_after",
    "model_bytes",
    "release_memory",
]

_LOGGER = logging.getLogger(__name__)

# Errors are recognised by name and message, so that no library has to be imported.
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
_MOST_CAUSES = 20  # a chain of causes may be a loop


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether this error or one of its causes means that memory was full: a smaller batch may succeed.

    An exhausted quota of a remote service does not count.

    >>> is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    True
    >>> is_out_of_memory(MemoryError())
    True
    >>> is_out_of_memory(ValueError("the shop is out of memory cards"))
    False
    """
    return any(_says_so(each) for each in _with_causes(error))


def forget_frames(error: BaseException) -> None:
    """Clear the local variables of an error's frames, such as models and batches; the traceback stays readable."""
    left: list[BaseException | None] = [error]
    seen: set[int] = set()
    while left:
        each = left.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            traceback.clear_frames(each.__traceback__)
            left += [each.__cause__, each.__context__]


def release_memory(collect: bool = True) -> None:
    """Release the memory that imported libraries hold in reserve; ``collect`` runs the garbage collector first."""
    if collect:
        gc.collect()  # Frees cycles, such as an exception and its frames.
    torch = sys.modules.get("torch")
    if torch is None:
        return
    for kind in ("cuda", "xpu", "mps"):
        device = getattr(torch, kind, None)
        if device is None:
            continue
        # Querying CUDA would initialise it; an uninitialised device holds nothing.
        is_in_use = device.is_initialized() if hasattr(device, "is_initialized") else torch.backends.mps.is_available()
        if is_in_use:
            device.empty_cache()


def make_room_after(error: BaseException) -> bool:
    """Release memory if the error means that it was full; return whether a smaller batch may fit now."""
    try:
        if not is_out_of_memory(error):
            return False
        release_memory()
    except Exception:
        # A device that can't release memory can't compute a smaller batch, either.
        _LOGGER.exception("Could not release memory after a batch failed.")
        return False
    return True


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
    # Other libraries raise plain RuntimeErrors; those of ONNX Runtime derive from Exception only.
    return (isinstance(error, RuntimeError) or library == "onnxruntime") and any(text in message for text in _MESSAGES)


def model_bytes(handler: Handler[Any, Any, Any], model: Any) -> int | None:
    """Return the bytes of this model's parameters, or None if they can't be counted.

    >>> from luminosity import Handler
    >>> import torch
    >>> model_bytes(Handler(), torch.nn.Linear(10, 10, bias=False)), model_bytes(Handler(), "a model of its own kind")
    (400, None)
    """
    known = handler.memory(model)
    if known is not None:
        return known
    # If the model came from one of these libraries, the library is already imported.
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None and hasattr(torch, "nn") and isinstance(model, torch.nn.Module):
        tensors: Any = (*model.parameters(), *model.buffers())
        return sum(tensor.nbytes for tensor in tensors)
    if jax is not None and hasattr(jax, "tree"):
        leaves: list[Any] = jax.tree.leaves(model)
        if leaves and all(isinstance(leaf, jax.Array) for leaf in leaves):
            return sum(leaf.nbytes for leaf in leaves)
    return None
