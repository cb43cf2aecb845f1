"""What the steps of one transform share: their settings, and the blocks that move between them."""

from __future__ import annotations

import itertools
import operator
import pickle
import struct
import time
import traceback
from array import array
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from apache_beam import coders
from apache_beam.coders import coder_impl

from luminosity._shared.text import shorten_repr
from luminosity.inference.adapting.adapt import THE_MODEL
from luminosity.inference.blocks import Block, size
from luminosity.inference.files.local import use_cache
from luminosity.inference.host.interface import Clock
from luminosity.inference.options import ModelCacheConfig
from luminosity.inference.registry.resolved import ResolvedModel
from luminosity.inference.run_settings import RunSettings
from luminosity.inference.steps.carried import Examples, as_list, carried
from luminosity.inference.steps.versions import RegistryWatch, Watch
from luminosity.inference.threads import limit_threads

__all__ = [
    "BlockCoder",
    "Failed",
    "PreparedBlock",
    "ResultBlock",
    "StepSettings",
    "at_fault",
    "by_identity",
    "describe_failure",
    "earliest",
]

_BUFFER_BYTES = 16 << 10  # of an array, from which its buffer is not in the pickle
_SIZES = struct.Struct("=QQ")  # of an encoded block: the number of buffers, the bytes of the pickle
_EXAMPLE_CHARACTERS = 100  # enough to recognise an example in a message


@dataclass(frozen=True)
class StepSettings:
    """How the steps of one transform run its models; pickled with them."""

    step_id: str
    """Unique for each transform, so that no two share batches."""
    model_tag: str
    """Transforms with the same tag share models."""
    metrics_namespace: str
    inference_args: dict[str, Any] | None = None
    clock: Clock = time
    load_late: bool = False
    """Load the model with the first batch, because its path comes with the data, or a timeout covers the load."""
    caught: tuple[type[BaseException], ...] = ()
    """Errors that become dead letters."""
    timeout: float | None = None
    use_subprocess: bool = False

    updates_may_lag: bool = False
    """Whether the old version is used while a new one is loading; False if each window names its version."""
    watch: Watch | RegistryWatch | None = None
    registered: Mapping[Hashable, ResolvedModel] = field(default_factory=dict[Hashable, ResolvedModel])
    """The versions that models of a registry start with, by the name of the model in its ``ModelSet``."""
    is_stream: bool = False
    """Whether the input may never end, so that examples must not wait for others."""
    model_cache: ModelCacheConfig = field(default_factory=ModelCacheConfig)
    threads: int | None = None
    memory_budget: int | None = None
    """The value of ``--model_memory_budget``, in bytes."""
    workers: int | None = None
    """How many processes of a machine run this step, if that is known when the pipeline is built."""
    run: RunSettings = field(default_factory=RunSettings)
    """Options that the shared host must know, too."""
    run_id: str = ""
    """Names the run; processes of one machine find their shared host by it."""

    def set_up_process(self) -> None:
        """Limit the threads of this process and choose its model cache; call it before anything is computed."""
        limit_threads(self.threads)
        use_cache(self.model_cache)
        self.run.use()


@dataclass(frozen=True)
class Failed:
    """An example that failed, with the error as Beam's dead letters hold it."""

    example: Any
    timestamp: Any
    error: tuple[type[BaseException], str, list[str]]


@dataclass(frozen=True)
class PreparedBlock:
    """Examples of one window, ready for the model."""

    examples: Examples
    timestamps: list[Any]
    prepared: Block | None
    """None if preparing changes nothing: the examples themselves."""
    costs: npt.NDArray[Any] = field(default_factory=lambda: np.empty(0))
    weights: npt.NDArray[Any] | None = None
    failed: tuple[Failed, ...] = ()
    seconds: float = 0.0
    """How long preparing it took."""
    model: Hashable = THE_MODEL
    """The name of the model, if a transform has many."""

    def luminosity_user_data(self) -> list[Any]:
        """Return the examples, for error messages."""
        return as_list(self.examples)


@dataclass(frozen=True)
class ResultBlock:
    """Predictions of one model for examples of one window."""

    examples: Examples
    timestamps: list[Any]
    values: Block
    model_id: str | None
    failed: tuple[Failed, ...] = ()
    model: Hashable = THE_MODEL

    def luminosity_user_data(self) -> list[Any]:
        """Return the examples, for error messages."""
        return as_list(self.examples)


def at_fault(example: Any, count: int) -> str:
    """Return how to name the cause of a failed batch of ``count`` examples, of which this is the first.

    >>> at_fault("a", 1), at_fault("a", 7)
    ("'a'", "one of a batch of 7 with 'a'; use with_exception_handling() to find it")
    """
    text = shorten_repr(example, _EXAMPLE_CHARACTERS)
    if count == 1:
        return text
    return f"one of a batch of {count} with {text}; use with_exception_handling() to find it"


def describe_failure(error: BaseException) -> tuple[type[BaseException], str, list[str]]:
    """Return an error as Beam's ``with_exception_handling`` describes it."""
    return type(error), repr(error), traceback.format_exception(type(error), error, error.__traceback__)


def earliest(timestamps: Sequence[Any]) -> Any:
    """Return the first timestamp. Most are the same object, and comparing them is slow, so compare each once."""
    return timestamps[0] if _are_one(timestamps) else min(by_identity(timestamps).values())


def _are_one(values: Sequence[Any]) -> bool:
    """Return whether all values are the same object."""
    return bool(values) and all(map(operator.is_, values, itertools.repeat(values[0])))


def by_identity(timestamps: Sequence[Any]) -> dict[int, Any]:
    """Return the different objects among timestamps by their ids."""
    return dict(zip(map(id, timestamps), timestamps, strict=True))


def _copied(buffer: memoryview) -> npt.NDArray[np.uint8]:
    """Return a copy that can be written to. Other threads may run while numpy copies."""
    return np.frombuffer(buffer, np.uint8).copy()


class BlockCoder(coders.Coder):
    """Pickles blocks, and estimates their size without pickling, because Beam asks for it often.

    An encoded block is the pickle, without the buffers of its arrays, and after it these buffers.
    """

    def _create_impl(self) -> coder_impl.CallbackCoderImpl:
        return coder_impl.CallbackCoderImpl(self.encode, self.decode, self.estimate_size)

    def encode(self, value: Any) -> bytes:
        """Pickle a block."""
        return b"".join(self.luminosity_parts(value))

    def luminosity_parts(self, value: Any) -> list[bytes | memoryview]:
        """Return an encoded block in parts, of which the large ones are the block's own memory.

        The runner writes them to shared memory one after the other, so that nothing is copied in this process.
        """
        buffers: list[memoryview] = []

        def stays_inside(buffer: pickle.PickleBuffer) -> bool:
            raw = buffer.raw()
            if raw.nbytes >= _BUFFER_BYTES:
                buffers.append(raw)
            return raw.nbytes < _BUFFER_BYTES

        if isinstance(value, PreparedBlock | ResultBlock):
            times = value.timestamps[:1] if _are_one(value.timestamps) else value.timestamps
            value = replace(value, examples=carried(value.examples), timestamps=times)
        pickled = pickle.dumps(value, pickle.HIGHEST_PROTOCOL, buffer_callback=stays_inside)
        sizes = array("Q", [len(buffers), len(pickled), *map(len, buffers)])
        return [sizes.tobytes(), pickled, *buffers]

    def decode(self, encoded: bytes | memoryview) -> Any:
        """Unpickle a block. Arrays can be written to if they could be before."""
        count, size = _SIZES.unpack_from(encoded)
        sizes = struct.unpack_from(f"={count}Q", encoded, _SIZES.size)
        view, start = memoryview(encoded), _SIZES.size + 8 * count
        ends = list(itertools.accumulate([size, *sizes], initial=start))
        pickled, *buffers = (view[begin:end] for begin, end in itertools.pairwise(ends))
        block = pickle.loads(pickled, buffers=map(_copied, buffers))
        if isinstance(block, PreparedBlock | ResultBlock) and len(block.timestamps) < len(block.examples):
            return replace(block, timestamps=block.timestamps * len(block.examples))  # all are the same object
        return block

    def estimate_size(self, value: Any) -> int:
        """Return the approximate bytes of a block."""
        examples = size(value.examples)
        rest = value.prepared if isinstance(value, PreparedBlock) else value.values
        return examples + (0 if rest is None else size(rest)) + 16 * len(value.timestamps)

    def is_deterministic(self) -> bool:
        """Return False: equal blocks may be pickled differently."""
        return False


coders.registry.register_coder(PreparedBlock, BlockCoder)
coders.registry.register_coder(ResultBlock, BlockCoder)
