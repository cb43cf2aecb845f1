"""Compiles a function of a CUDA device on a thread, while batches run without; what is compiled is kept on disk."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
import threading
import time
from collections.abc import Callable
from typing import Any

from luminosity.extras import require

__all__ = ["InBackground", "is_same", "prepare_cache"]
_LOGGER = logging.getLogger(__name__)

_WORTH_S = 30.0  # compiling takes 12 to 20 s of some cores, and makes batches a fifth faster
_WORTH_AGAIN_S = 5.0  # what is on the disk takes some seconds
_COMPILER_PROCESSES = 2  # torch starts one a core; each imports torch, and the workers need the cores
_LEAST_GAIN = 0.02  # of the time of a batch; else the compiled code is not used
_TIMED = 5  # runs of each
_FIRST_CALLS = 8  # the budget of batches still grows
# Of a batch that runs compiled. Torch compiles sizes of 0 and 1 apart, and small batches don't matter.
_LEAST_TOKENS = 1024
_LEAST_COSINE = 0.9995
_LENGTHS_DIFFER = 0.02  # by which share the lengths of a vector may differ
_CACHE_BYTES = 2_000_000_000
_OUR_FOLDER = "TORCHINDUCTOR_CACHE_DIR"


class InBackground:
    """Calls a function as it is until a compiled one is ready and has given the same result for a real batch.

    One thread calls it. The compiled function never compiles again: sizes that it does not know run as before.
    """

    def __init__(self, function: Callable[..., Any], key: str, compile: Callable[[Any], Any] | None = None) -> None:
        """``key`` names everything that the compiled code depends on; ``compile`` is torch's own unless given."""
        self._function = function
        self._done = _mark_of(key)
        self._compile = compile or _compile
        self._run: Callable[..., Any] | None = None
        self._thread: threading.Thread | None = None
        self._calls = 0
        self._begun = time.monotonic()
        self.is_compiled = False
        """Whether the last call ran compiled."""

    def __call__(self, tokens: int, *inputs: Any) -> Any:
        """Return the function's result for a batch of so many tokens."""
        self._calls += 1
        if not self._calls % _FIRST_CALLS and self._thread is None and tokens >= _LEAST_TOKENS and self._is_worth_it():
            self._thread = threading.Thread(target=self._prepare, args=(inputs,), name="model-compiles", daemon=True)
            self._thread.start()
        self.is_compiled = self._run is not None and tokens >= _LEAST_TOKENS
        if self._run is not None and self.is_compiled:
            return self._run(*inputs)
        return self._function(*inputs)

    def join(self, seconds: float) -> bool:
        """Wait until the compiled function is ready or refused, and return whether it is used."""
        if self._thread is not None:
            self._thread.join(seconds)
        return self._run is not None

    def _is_worth_it(self) -> bool:
        was_compiled_before = self._done is not None and os.path.exists(self._done)
        return time.monotonic() - self._begun >= (_WORTH_AGAIN_S if was_compiled_before else _WORTH_S)

    def _prepare(self, inputs: tuple[Any, ...]) -> None:
        torch = require("torch", "torch")
        begun = time.monotonic()
        try:
            device = inputs[0].device  # a thread begins with the first one
            with (
                torch.inference_mode(),
                torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext(),
            ):
                compiled, run = self._compile(self._function)
                compiled(*inputs)
                if not is_same(run(*inputs), self._function(*inputs)):
                    _LOGGER.warning("The compiled model differs from the model, and is not used.")
                    return
                if not _is_faster(run, self._function, inputs):
                    _LOGGER.info("The compiled model is not faster, and is not used.")
                    return
        except Exception as error:  # whatever a compiler may raise: the model runs without it
            _LOGGER.warning("The model could not be compiled, and runs without: %s: %s", type(error).__name__, error)
            return
        self._run = run
        _LOGGER.info("The model was compiled in %.1f s.", time.monotonic() - begun)
        if self._done is not None:
            with contextlib.suppress(OSError), open(self._done, "w", encoding="utf-8"):
                pass


def _compile(function: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return a function that compiles for all sizes when it is first called, and one that never compiles."""
    torch = require("torch", "torch")
    dynamo = require("torch._dynamo", "torch")
    inductor = require("torch._inductor.config", "torch")
    inductor.compile_threads = min(inductor.compile_threads, _COMPILER_PROCESSES)

    def forward(self: Any, *inputs: Any) -> Any:
        return self.function(*inputs)

    # Numbers that belong to a module are constants in the compiled code; others would be variables.
    module = type("Compiled", (torch.nn.Module,), {"forward": forward})()
    module.function = function
    return torch.compile(module, dynamic=True), dynamo.run(module)


def _is_faster(run: Callable[..., Any], function: Callable[..., Any], inputs: tuple[Any, ...]) -> bool:
    """Return whether the compiled function saves time on a GPU; other batches that run meanwhile disturb both alike."""
    torch = require("torch", "torch")
    if not torch.cuda.is_available():
        return True
    best = {run: float("inf"), function: float("inf")}
    for each in (run, function) * _TIMED:
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        each(*inputs)
        ended.record()
        ended.synchronize()
        best[each] = min(best[each], begun.elapsed_time(ended))
    return best[run] < best[function] * (1 - _LEAST_GAIN)


def is_same(found: Any, expected: Any) -> bool:
    """Return whether two matrices have the same rows, as far as types of 16 bits allow."""
    torch = require("torch", "torch")
    if found.shape != expected.shape or not bool(torch.isfinite(found).all()):
        return False
    cosine = torch.nn.functional.cosine_similarity(found.float(), expected.float(), dim=1)
    lengths = found.float().norm(dim=1) / expected.float().norm(dim=1).clamp(min=1e-12)
    return bool((cosine >= _LEAST_COSINE).all()) and bool(((lengths - 1).abs() <= _LENGTHS_DIFFER).all())


def prepare_cache() -> None:
    """Keep compiled code in a folder of this user, unless the environment names one. Call it before torch compiles."""
    if os.environ.get(_OUR_FOLDER):
        return
    root = os.environ.get("XDG_CACHE_HOME", "")
    root = root if os.path.isabs(root) else os.path.expanduser("~/.cache")
    folder = os.path.join(root, "luminosity", "compiled")
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        status = os.stat(folder)
    except OSError as error:
        _LOGGER.info("Compiled code is not kept: %s", error)
        return
    # Loading compiled code runs it, so nobody else may write there.
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        _LOGGER.warning("Compiled code is not kept: others can write to %s.", folder)
        return
    _bound(folder)
    os.environ[_OUR_FOLDER] = folder


def _bound(folder: str) -> None:
    """Remove the files that were used longest ago, until the rest is small enough."""
    found: list[tuple[float, int, str]] = []
    for parent, _, names in os.walk(folder):
        for path in (os.path.join(parent, name) for name in names):
            with contextlib.suppress(OSError):
                status = os.stat(path)
                found.append((max(status.st_atime, status.st_mtime), status.st_size, path))
    held = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if held <= _CACHE_BYTES:
            return
        with contextlib.suppress(OSError):
            os.unlink(path)
            held -= size


def _mark_of(key: str) -> str | None:
    """Return the path of the file that says that this was compiled before; None if nothing is kept."""
    folder = os.environ.get(_OUR_FOLDER)
    return None if not folder else os.path.join(folder, f"luminosity-{hashlib.sha256(key.encode()).hexdigest()[:24]}")
