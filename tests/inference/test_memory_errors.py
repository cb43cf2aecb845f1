"""Errors that mean "try a smaller batch", and errors that do not."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from luminosity.inference.memory import is_out_of_memory, release_memory
from luminosity.testing import FakeOutOfMemory


def raised(call: Any) -> BaseException:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        call()
    return caught.value


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.empty(10**15),
        lambda: jnp.zeros(10**14).block_until_ready(),
        lambda: np.zeros(10**15),
        lambda: bytearray(10**15),
    ],
)
def test_what_libraries_really_raise(call: Any) -> None:
    assert is_out_of_memory(raised(call))


def a_class(name: str, module: str, base: type[Exception]) -> type[Exception]:
    return type(name, (base,), {"__module__": module})


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("HIP out of memory. Tried to allocate 2.00 GiB"),
        a_class("XlaRuntimeError", "jaxlib.xla_extension", RuntimeError)(
            "RESOURCE_EXHAUSTED: Failed to allocate request for 2.99GiB on device ordinal 0"
        ),
        a_class("ResourceExhaustedError", "tensorflow.python.framework.errors_impl", Exception)(
            "OOM when allocating tensor with shape[64,512]"
        ),
        a_class("RuntimeException", "onnxruntime.capi.onnxruntime_pybind11_state", Exception)(
            "[ONNXRuntimeError] : 6 : ... BFCArena ... Failed to allocate memory for requested buffer of size 8"
        ),
        FakeOutOfMemory("CUDA out of memory (fake)."),
    ],
)
def test_what_devices_raise(error: Exception) -> None:
    assert is_out_of_memory(error)
    wrapped = ValueError("the batch failed")
    wrapped.__cause__ = error
    assert is_out_of_memory(wrapped)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("out of memory"),
        RuntimeError("CUDA error: device-side assert triggered"),
        a_class("XlaRuntimeError", "jaxlib.xla_extension", RuntimeError)("INTERNAL: something"),
        a_class("ResourceExhausted", "google.api_core.exceptions", Exception)("429 RESOURCE_EXHAUSTED: quota exceeded"),
        KeyboardInterrupt(),
    ],
)
def test_what_a_smaller_batch_does_not_cure(error: BaseException) -> None:
    assert not is_out_of_memory(error)


def test_what_was_handled_and_left_behind_does_not_count() -> None:
    def fails() -> None:
        try:
            raise MemoryError
        except MemoryError:
            raise ValueError("something else") from None

    assert not is_out_of_memory(raised(fails))


def test_causes_that_go_round_in_circles_end() -> None:
    first, second = ValueError("one"), ValueError("two")
    first.__cause__, second.__cause__ = second, first
    assert not is_out_of_memory(first)


def test_release_memory_wakes_no_device() -> None:
    before = torch.cuda.is_initialized()  # by another test of this process, if there is a device
    release_memory()
    assert torch.cuda.is_initialized() == before
