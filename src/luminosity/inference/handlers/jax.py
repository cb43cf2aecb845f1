"""``JaxModelHandler``: a model written in JAX, a pure function with its parameters, over batches of few shapes."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Collection, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from apache_beam.ml.inference.base import PredictionResult
from typing_extensions import Self, Unpack

from luminosity._shared.accelerators import accelerators_of_device
from luminosity.errors import HandlerError, InvalidArgument
from luminosity.extras import require
from luminosity.inference.blocks import Block
from luminosity.inference.files.local import check_exists, local_copy
from luminosity.inference.handler import Handler, HandlerOptions
from luminosity.inference.handlers import padding
from luminosity.inference.handlers.columns import (
    Array,
    Column,
    Columns,
    lengths,
    pad_ragged,
    to_columns,
    to_numpy,
    to_tree,
)

__all__ = ["JaxModelHandler", "load_parameters"]

Tree: TypeAlias = Any
"""An array, or dicts, tuples and lists of arrays: what JAX calls a pytree."""
# safetensors' names of types. Its loader for numpy does not know the narrow ones, which numpy itself lacks.
_TYPES = {
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
    "BF16": "bfloat16",
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}


@dataclass(frozen=True, eq=False)
class JaxModel:
    """Parameters on their device.

    A class, because Beam needs a weak reference to a model, which dicts and tuples don't allow.
    """

    params: Tree


class JaxModelHandler(Handler[Any, PredictionResult, JaxModel]):
    """Runs ``fn(params, batch)`` on padded batches, so that JAX compiles only few shapes.

    >>> import numpy as np
    >>> handler = JaxModelHandler(lambda params, batch: batch @ params["weights"], {"weights": np.array([1.0, 10.0])})
    >>> results = handler.run_inference([[1, 2], [3, 4], [5, 6]], handler.load_model())
    >>> [float(result.inference) for result in results]
    [21.0, 43.0, 65.0]

    Examples are arrays, numbers or lists of numbers, or dicts or tuples of those. All have one type and, unless ragged,
    one shape. A prediction is one row of the output of ``fn``.

    Args:
        fn: a pure function of the parameters and a batch. Its output, an array or a tree of arrays, has a row for each
            row of the batch. The ``inference_args`` of RunInference are its keyword arguments.
        params: a tree of arrays; or a function that returns one, called in the worker; or the path of an ``.npz`` or
            ``.safetensors`` file, on any file system that Beam knows, which gives a dict of arrays. Use a function or a
            file for large parameters: a tree is sent to every worker with the handler.
        ragged: whether the first dimension differs between examples; for dicts, the names of the arrays whose first
            dimension differs. All ragged arrays of one example must have the same length.
        lengths: the lengths to which ragged arrays are padded, instead of powers of two; beyond the last, multiples of
            it.
        rows: the numbers of rows to which batches are padded, instead of powers of two and the values halfway between
            them.
        masked: call ``fn(params, batch, mask)``. The mask is true for examples and false for padding. Its shape is
            ``(rows,)``, or ``(rows, length)`` for ragged arrays.
        pad_value: fills the end of ragged arrays and padded rows.
        dtype: the type to which floating-point parameters and inputs are converted, such as "bfloat16".
        device: the device, such as "cpu" or "gpu:1". The default is JAX's first device.
        static_args: the names of inference_args that are not numbers or arrays, or that decide shapes. ``fn`` is
            compiled again for each of their values.
        example: an example to run once after the model is loaded.
        output_type: the Arrow type of one prediction, for a table's column.
        options: those of Beam's ``ModelHandler``: ``max_batch_size``, ``large_model``, ``env_vars`` and so on.
    """

    columnar = True

    def __init__(
        self,
        fn: Callable[..., Tree],
        params: Tree | Callable[[], Tree] | str | os.PathLike[str],
        *,
        ragged: bool | Collection[str] = False,
        lengths: Sequence[int] | None = None,
        rows: Sequence[int] | None = None,
        masked: bool = False,
        pad_value: float = 0,
        dtype: str | None = None,
        device: str | None = None,
        static_args: Sequence[str] = (),
        example: Any = None,
        output_type: Any = None,
        **options: Unpack[HandlerOptions],
    ) -> None:
        super().__init__(**options)
        if lengths is not None and not ragged:
            raise InvalidArgument(
                f"found lengths={lengths!r} for examples of one shape, expected ragged=True with it",
                fix="pass ragged=True",
            )
        self._fn = fn
        self._params = os.fspath(params) if isinstance(params, os.PathLike) else _without_devices(params)
        self._ragged = ragged
        self._padding = Padding(rows, lengths, pad_value)
        self._masked = masked
        self._dtype = dtype
        self._device = device
        self._static_args = tuple(static_args)
        self._example = example
        self.output_type = output_type
        self.compilations = 0
        """How often ``fn`` was compiled in this process."""

    def adjusted(self, device: str | None = None, dtype: str | None = None) -> Self:
        """Return a copy for another device or with another dtype; None keeps the current one."""
        other = copy(self)
        other._device = device or self._device
        other._dtype = dtype or self._dtype
        return other

    @property
    def model_id(self) -> str | None:
        """The path of the file of parameters, or None if they are not in a file."""
        return self._params if isinstance(self._params, str) else None

    def check_files(self) -> None:
        """Raise if the file of parameters is not on this machine."""
        if isinstance(self._params, str):
            check_exists(self._params)

    def update_model_path(self, model_path: str | None = None) -> None:
        """Switch to another file of parameters."""
        if model_path is not None:
            self._params = model_path

    def load_model(self) -> JaxModel:
        """Read the parameters from their file or function, convert them to ``dtype`` and put them on the device."""
        jax = require("jax", "jax")
        params = self._params
        if isinstance(params, str):
            params = load_parameters(params)
        elif inspect.isroutine(params) or isinstance(params, functools.partial):
            params = params()
        return JaxModel(jax.device_put(jax.tree.map(self._cast, params), self._place()))

    @property
    def accelerators(self) -> tuple[str, ...] | None:
        """A GPU or a TPU, unless the handler names its device."""
        return ("gpu", "tpu") if self._device is None else accelerators_of_device(self._device)

    @property
    def device(self) -> str:
        """The device on which this process computes."""
        if self._device is not None:
            return self._device
        first = require("jax", "jax").local_devices()[0]
        return f"{first.platform}:{first.id}"

    def memory(self, model: JaxModel) -> int:
        """Return the bytes of the parameters."""
        return sum(leaf.nbytes for leaf in require("jax", "jax").tree.leaves(model.params))

    def warm_up(self, model: JaxModel) -> None:
        """Run the model once on ``example``, if there is one, to compile it."""
        if self._example is not None:
            outputs = self.predict(model, self.transfer(self.collate(self.prepare([self._example]))))
            self.wait(outputs)

    def prepare(self, block: Block) -> Columns:
        """Turn the examples into Arrow columns."""
        return to_columns(block, self._ragged)

    def cost(self, prepared: Columns) -> npt.NDArray[Any]:
        """Return the length of each ragged example, or 1 for each example of one shape."""
        found = lengths(prepared)
        return np.ones(len(prepared)) if found is None else found

    def collate(self, prepared: Columns) -> Padded:
        """Pad the examples to one of few shapes, with a mask if ``masked``."""
        return self._padding.pad(prepared, self._masked, self._cast)

    def transfer(self, batch: Padded) -> Padded:
        """Put the padded batch and its mask on the device."""
        values, mask = require("jax", "jax").device_put((batch.values, batch.mask), self._place())
        return replace(batch, values=values, mask=mask)

    def predict(self, model: JaxModel, batch: Padded, inference_args: dict[str, Any] | None = None) -> Padded:
        """Start the computation and return before the device is done."""
        inputs = (batch.values, batch.mask) if self._masked else (batch.values,)
        values = self._compiled(model.params, *inputs, **(inference_args or {}))
        return replace(batch, values=values, mask=None)  # free the inputs' memory on the device

    def wait(self, outputs: Padded) -> None:
        """Block until the device has computed the outputs."""
        require("jax", "jax").block_until_ready(outputs.values)

    def collect(self, outputs: Padded) -> Block:
        """Return the rows of the array that ``fn`` returned, or trees of such rows."""
        leaves, structure = require("jax", "jax").tree.flatten(outputs.values)
        rows, padded_rows = outputs.rows, outputs.padded_rows
        for leaf in leaves:
            if not np.shape(leaf) or len(leaf) != padded_rows:
                raise HandlerError(
                    f"the model returned an array of shape {np.shape(leaf)} for a batch of {padded_rows} rows, "
                    "expected a row for each of them"
                )
        arrays = [np.asarray(leaf)[:rows] for leaf in leaves]
        if structure == require("jax", "jax").tree.structure(0):
            return arrays[0]
        return [structure.unflatten(row) for row in zip(*arrays, strict=True)]

    def validate_inference_args(self, inference_args: dict[str, Any] | None) -> None:
        """Raise if an argument is a text and not one of ``static_args``."""
        for name, value in (inference_args or {}).items():
            if isinstance(value, str) and name not in self._static_args:
                raise InvalidArgument(
                    f"found the text {value!r} in inference_args[{name!r}], expected a number or an array",
                    fix=f"pass static_args=[{name!r}], which may be anything",
                )

    def get_metrics_namespace(self) -> str:
        """Return the namespace for the metrics of JAX models."""
        return "BeamML_JAX"

    @functools.cached_property
    def _compiled(self) -> Callable[..., Tree]:
        """Compiled in the process that computes. New parameters of the same shapes need no new compilation."""

        @functools.wraps(self._fn)
        def traced(*args: Any, **kwargs: Any) -> Tree:
            self.compilations += 1  # JAX calls this function only to compile it
            return self._fn(*args, **kwargs)

        return require("jax", "jax").jit(traced, static_argnames=self._static_args)

    def __getstate__(self) -> dict[str, Any]:
        return {**{k: v for k, v in self.__dict__.items() if k != "_compiled"}, "compilations": 0}

    def _place(self) -> Any:
        jax = require("jax", "jax")
        platform, _, index = (self._device or "").partition(":")
        devices = jax.local_devices(backend=platform or None)
        if int(index or 0) >= len(devices):
            raise InvalidArgument(
                f"found device={self._device!r}, expected one of the {len(devices)} device(s) of {platform or 'JAX'}"
            )
        return devices[int(index or 0)]

    def _cast(self, leaf: Any) -> Any:
        if self._dtype is None or not hasattr(leaf, "dtype"):
            return leaf
        jnp = require("jax.numpy", "jax")
        return leaf.astype(self._dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf


def _without_devices(params: Tree) -> Tree:
    """Convert JAX's arrays to numpy's, so that a worker without the model can unpickle them without an accelerator."""
    if "jax" not in sys.modules or inspect.isroutine(params) or isinstance(params, str | functools.partial):
        return params
    return require("jax", "jax").device_get(params)


def load_parameters(path: str) -> dict[str, Any]:
    """Return the arrays of an ``.npz`` or ``.safetensors`` file by name. Neither format can run code."""
    if path.endswith(".npz"):
        with np.load(local_copy(path), allow_pickle=False) as arrays:
            return dict(arrays)
    if path.endswith(".safetensors"):
        return _safetensors(Path(local_copy(path)).read_bytes(), path)
    raise InvalidArgument(f"found the path {path!r}, expected one that ends in .npz or .safetensors")


def _safetensors(content: bytes, path: str) -> dict[str, Any]:
    dtype = require("jax.numpy", "jax").dtype
    arrays: dict[str, Any] = {}
    for name, array in require("safetensors", "jax").deserialize(content):
        if array["dtype"] not in _TYPES:
            raise InvalidArgument(
                f"found an array of type {array['dtype']} in {path!r}, expected one of {', '.join(_TYPES)}"
            )
        arrays[name] = np.frombuffer(array["data"], dtype(_TYPES[array["dtype"]])).reshape(array["shape"])
    return arrays


@dataclass(frozen=True)
class Padded:
    """A batch whose last rows may be padding."""

    values: Any
    """An array, or a dict or tuple of arrays, as the examples are."""
    mask: Any
    """True for examples: of shape (rows,), or (rows, length) for ragged arrays; None unless requested."""
    rows: int
    """The number of examples."""
    padded_rows: int
    """The number of rows including padding."""

    @property
    def nbytes(self) -> int:
        """The size of the values in bytes."""
        values = self.values
        arrays = values.values() if isinstance(values, dict) else values if isinstance(values, tuple) else (values,)
        return sum(array.nbytes for array in arrays)


@dataclass(frozen=True)
class Padding:
    """Settings of padding. Lengths default to powers of two, rows to powers of two and the values halfway between them.

    >>> from luminosity.inference.handlers.columns import to_columns
    >>> batch = Padding().pad(to_columns([[7], [8, 9, 9]], ragged=True), masked=True)
    >>> batch.values.tolist(), batch.mask.tolist()[0], batch.rows
    ([[7, 0, 0, 0], [8, 9, 9, 0]], [True, False, False, False], 2)
    """

    rows: Sequence[int] | None = None
    lengths: Sequence[int] | None = None
    value: float = 0

    def __post_init__(self) -> None:
        for option, given in (("rows", self.rows), ("lengths", self.lengths)):
            if given is not None:
                padding.check_sizes(given, option)

    def pad(
        self, columns: Columns, masked: bool = False, convert: Callable[[Array], Array] = lambda values: values
    ) -> Padded:
        """Return the examples as one batch; ``convert`` changes the type of the numbers before they are padded."""
        count, found = len(columns), lengths(columns)
        rows = padding.next_half_step(count) if self.rows is None else padding.next_of(self.rows, count)
        length = 0 if found is None else self._padded_length(int(found.max(initial=0)))

        def padded(column: Column) -> Array:
            is_ragged = pa.types.is_large_list(column.type)
            values = pad_ragged(column, length, self.value) if is_ragged else to_numpy(column)
            return _with_rows(convert(values), rows, self.value)

        mask = None
        if masked:
            here = np.ones(count, bool) if found is None else np.arange(length) < found[:, None]
            mask = _with_rows(here, rows, False)
        return Padded(to_tree(columns, padded), mask, count, rows)

    def _padded_length(self, needed: int) -> int:
        return padding.next_power(needed) if self.lengths is None else padding.next_of(self.lengths, needed)


def _with_rows(values: Array, rows: int, value: float) -> Array:
    if len(values) == rows:
        return values
    padded = np.full((rows, *values.shape[1:]), value, values.dtype)
    padded[: len(values)] = values
    return padded
