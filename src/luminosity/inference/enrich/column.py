"""``Column``: a new column of a table, the model that computes it, the order of columns, and the model's inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from apache_beam.ml.inference.base import KeyedModelHandler, MaybeKeyedModelHandler, ModelHandler

from luminosity.errors import InvalidArgument, InvalidType
from luminosity.inference.adapting.adapt import check_handler, without_functions
from luminosity.inference.adapting.columnar import takes_names
from luminosity.inference.blocks import Block
from luminosity.inference.handlers.columns import to_numpy
from luminosity.inference.steps.updates import Updates

__all__ = ["Column", "block_of", "check_number", "decoded", "examples_of", "levels"]

Nulls: TypeAlias = Literal["fail", "keep"]


@dataclass(frozen=True)
class Column:
    """A column that a model adds to a table.

    >>> from luminosity import Handler
    >>> class Lengths(Handler[str, int, None]):
    ...     def load_model(self):
    ...         return None
    ...
    ...     def predict(self, model, batch, inference_args=None):
    ...         return [len(text) for text in batch]
    >>> Column(Lengths(), "text").names
    ('text',)

    Args:
        handler: any ModelHandler, Beam's or ours.
        inputs: what an example of the model is. The name of a column: its value. A sequence of names: a vector of these
            numbers. A mapping of the model's names to columns: a dict.
        output: the Arrow type of the new column, if the handler does not define it or you want another.
        inference_args: passed to every call of the model.
        nulls: what becomes of a row in which an input is null, if the model does not take nulls itself. ``"fail"``: it
            fails, as on any other error. ``"keep"``: the new column is null, too, and the model does not see the row.
        dedupe: whether rows with equal inputs, and equal keys, that a worker sees soon after each other are computed
            once. None does so if the handler is known to give equal predictions (``is_repeatable``).
        key: the column with the key of each row, if ``handler`` is a ``KeyedModelHandler`` with a model for each key.
        watch_model_pattern: files to watch for new versions of the model, as for RunInference.
        watch_registry: whether to follow the alias by which the handler names its model, as for RunInference.
        interval: seconds between two looks for new versions; 360 unless given.
        stop_timestamp: when to stop looking.
    """

    handler: ModelHandler[Any, Any, Any]
    inputs: str | Sequence[str] | Mapping[str, str]
    output: pa.DataType | None = None
    _: KW_ONLY
    inference_args: dict[str, Any] | None = None
    nulls: Nulls = "fail"
    dedupe: bool | None = None
    key: str | None = None
    watch_model_pattern: str | None = None
    watch_registry: bool = False
    interval: float | None = None
    stop_timestamp: Any = None

    def __post_init__(self) -> None:
        check_handler(self.handler)
        _check_takes_rows(self.handler, self.key)
        # A set has no order, which a vector needs.
        is_ordered = isinstance(self.inputs, Sequence | Mapping)  # pyright: ignore[reportUnnecessaryIsInstance]
        names = self.names if is_ordered else ()
        if not names or not all(isinstance(name, str) and name for name in (*names, *self.inputs)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidType(
                f"found inputs={self.inputs!r}, expected the name of a column, a list of names, "
                "or a dict of the model's names to columns"
            )
        if self.output is not None and not isinstance(self.output, pa.DataType):
            raise InvalidType(f"found output={self.output!r}, expected an Arrow type such as pa.float32()")
        if not isinstance(self.dedupe, bool | None):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(f"found dedupe={self.dedupe!r}, expected True, False or None")
        if self.nulls not in get_args(Nulls):
            raise InvalidArgument(f"found nulls={self.nulls!r}, expected one of {', '.join(get_args(Nulls))}")
        _ = self.updates
        self.handler.validate_inference_args(self.inference_args)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the columns that the model takes."""
        if isinstance(self.inputs, str):
            return (self.inputs,)
        return tuple(self.inputs.values() if isinstance(self.inputs, Mapping) else self.inputs)

    @property
    def needed(self) -> tuple[str, ...]:
        """The names of the columns that must be there: those that the model takes, and that of the keys."""
        return self.names if self.key is None else (*self.names, self.key)

    @property
    def updates(self) -> Updates:
        """Where new versions of the model come from."""
        return Updates(None, self.watch_model_pattern, self.watch_registry, self.interval, self.stop_timestamp)


def _check_takes_rows(handler: ModelHandler[Any, Any, Any], key: str | None) -> None:
    """Raise if the handler has settings without a meaning for the rows of a table."""
    keyed: Any = without_functions(handler)
    # Beam has no public way to tell.
    has_models = isinstance(keyed, KeyedModelHandler) and not getattr(keyed, "_single_model")  # noqa: B009
    if has_models and key is None:
        raise InvalidArgument(
            "found a KeyedModelHandler, but not which column has the keys", fix="pass Column(..., key='COLUMN')"
        )
    if key is not None and not has_models:
        raise InvalidArgument(
            f"found key={key!r} with {type(keyed).__name__}, expected a KeyedModelHandler that maps keys to models",
            fix="leave out key=, or pass KeyedModelHandler([KeyModelMapping(keys, handler), ...])",
        )
    if isinstance(keyed, KeyedModelHandler | MaybeKeyedModelHandler) and not has_models:
        raise InvalidArgument(
            f"found a {type(keyed).__name__} with one model, which needs no keys: a row keeps its other columns",
            fix="pass the handler inside it to Column",
        )
    if handler.should_skip_batching():
        raise InvalidArgument(
            "found with_no_batching(), with which each element is a batch; here it is a row",
            fix="leave with_no_batching() out",
        )


def levels(columns: Mapping[str, Column]) -> list[list[str]]:
    """Group the names of columns into levels: a column takes only columns of earlier levels.

    >>> from luminosity import Handler
    >>> class Model(Handler):
    ...     def predict(self, model, batch, inference_args=None): ...
    >>> levels({"topic": Column(Model(), "vector"), "vector": Column(Model(), "text"), "mood": Column(Model(), "text")})
    [['vector', 'mood'], ['topic']]
    """
    left = dict(columns)
    found: list[list[str]] = []
    while left:
        ready = [name for name, column in left.items() if not any(each in left for each in column.needed)]
        if not ready:
            raise _circle(left)
        found.append(ready)
        for name in ready:
            del left[name]
    return found


def _circle(left: Mapping[str, Column]) -> InvalidArgument:
    path = [next(iter(left))]
    while path[-1] not in path[:-1]:
        path.append(next(each for each in left[path[-1]].needed if each in left))
    path = path[path.index(path[-1]) :]
    if len(path) == 2:
        return InvalidArgument(
            f"the column {path[0]!r} takes itself", fix="give the new column a name that the table does not have yet"
        )
    return InvalidArgument("found columns that take each other: " + " takes ".join(map(repr, path)))


def block_of(table: pa.RecordBatch, column: Column) -> Block:
    """Return the inputs for a new column, without a Python object for each row.

    >>> from luminosity import JaxModelHandler
    >>> handler = JaxModelHandler(lambda params, batch: batch, ())
    >>> table = pa.record_batch({"a": [1, 2], "b": [0.5, 1.5]})
    >>> block_of(table, Column(handler, ["a", "b"])).tolist()
    [[1.0, 0.5], [2.0, 1.5]]
    >>> block_of(table, Column(handler, {"x": "b"})).schema.names
    ['x']
    """
    inputs = column.inputs
    if isinstance(inputs, str):
        values = decoded(table.column(inputs))
        if pa.types.is_struct(values.type) or not takes_names(column.handler):
            return values
    if not isinstance(inputs, Mapping) and takes_names(column.handler):
        inputs = {name: name for name in column.names}
    if isinstance(inputs, Mapping):
        arrays = [decoded(table.column(name)) for name in inputs.values()]
        return pa.RecordBatch.from_arrays(arrays, names=list(inputs))
    return _matrix(inputs, [decoded(table.column(name)) for name in inputs])


def examples_of(block: Block) -> list[Any]:
    """Return the inputs as a list of examples, for handlers that don't take columns.

    >>> examples_of(pa.array(["a", "b"])), examples_of(np.array([[1, 2], [3, 4]]))
    (['a', 'b'], [array([1, 2]), array([3, 4])])
    """
    if isinstance(block, pa.Array) and _is_vectors(block.type) and not block.flatten().null_count:
        return list(to_numpy(block))
    return list(block) if isinstance(block, np.ndarray) else block.to_pylist()


def _matrix(names: Sequence[str], columns: Sequence[Any]) -> npt.NDArray[Any]:
    arrays: list[npt.NDArray[Any]] = []
    for name, column in zip(names, columns, strict=True):
        check_number(name, column.type)
        arrays.append(to_numpy(column))
    matrix = np.empty((len(arrays[0]), len(arrays)), np.result_type(*arrays))
    for place, array in enumerate(arrays):
        matrix[:, place] = array
    return matrix


def check_number(name: str, kind: pa.DataType) -> None:
    """Raise unless a column of this type can be part of a vector."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        raise InvalidType(
            f"the column {name!r} holds {kind}, expected numbers, because a list of columns becomes a vector",
            fix="pass a dict of the model's names to columns, which may have any type",
        )


def decoded(column: Any) -> Any:
    """Return the column's values without dictionary encoding."""
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def _is_vectors(kind: pa.DataType) -> bool:
    if not pa.types.is_fixed_size_list(kind):
        return False
    value: pa.DataType = kind.value_type
    return pa.types.is_integer(value) or pa.types.is_floating(value) or _is_vectors(value)
