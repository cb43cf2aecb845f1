"""What a loaded model takes: as its library tells, else as the process has grown."""

from __future__ import annotations

import os
import resource
import sys
from typing import Any

from luminosity.inference.handler import Handler

__all__ = ["memory_of", "resident_bytes"]

_STATM = "/proc/self/statm"


def memory_of(handler: Handler[Any, Any, Any], model: Any) -> int | None:
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
