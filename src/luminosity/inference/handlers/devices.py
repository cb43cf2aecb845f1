"""Which device a torch model runs on, and in which number format."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

from luminosity.core import WorkerShare
from luminosity.extras import require

__all__ = ["choose_device", "dtype_named", "module_bytes"]

_LOGGER = logging.getLogger(__name__)


def choose_device(asked: str) -> Any:
    """The torch device for "auto", "cpu", "gpu", "cuda:1", ...: upper or lower case, as Beam's handlers take them.

    "auto" is the GPU where this process has one. A GPU that is asked for and not there is the CPU, with a warning.

    >>> choose_device("CPU")
    device(type='cpu')
    """
    torch = require("torch", "torch")
    name = asked.lower()
    if name == "auto":
        return torch.device("cuda" if _usable_gpus() else "cpu")
    device = torch.device("cuda" if name == "gpu" else name)
    if device.type == "cuda" and (device.index or 0) >= _usable_gpus():
        _warn_of_missing_gpu(asked, _usable_gpus())
        return torch.device("cpu")
    return device


def dtype_named(name: Any) -> Any:
    """The torch dtype of this name, or None for none.

    >>> dtype_named("bfloat16")
    torch.bfloat16
    """
    if name is None:
        return None
    torch = require("torch", "torch")
    dtype = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype is {name!r}, expected the name of a torch dtype, such as 'float32' or 'bfloat16'")
    return dtype


def module_bytes(module: Any) -> int:
    """What a module's parameters and buffers take; weights that are tied count once."""
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


@cache
def _usable_gpus() -> int:
    """How many GPUs this process can use; asked once, since the first use of one starts its driver."""
    share = WorkerShare.current()
    if share.pool and not share.devices:
        return 0  # a worker for the CPU: the driver is not even started
    torch = require("torch", "torch")
    if not torch.cuda.is_available():
        return 0
    try:
        torch.empty(1, device="cuda")
    except RuntimeError as error:
        _LOGGER.warning("torch sees a GPU and can't use it: %s", error)
        return 0
    return torch.cuda.device_count()


@cache
def _warn_of_missing_gpu(asked: str, found: int) -> None:
    _LOGGER.warning(
        "A model asks for the device %r, and this process can use %d GPUs: it runs on the CPU. On a machine with "
        "a GPU, look at CUDA_VISIBLE_DEVICES, at the installed build of torch, and at the step's resource hints.",
        asked,
        found,
    )
