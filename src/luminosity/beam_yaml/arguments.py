"""Arguments and inputs of transforms in YAML: models and types by name, tables or rows as each transform needs them.

Transforms of Luminosity work with tables (``pyarrow.RecordBatch`` elements), Beam's own with rows that have a schema. A
YAML file does not say which is which, so inputs are converted where the two meet.
"""

from __future__ import annotations

import inspect
import re
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import apache_beam as beam
import pyarrow as pa
from apache_beam.ml.inference.base import ModelHandler
from apache_beam.pvalue import PBegin
from apache_beam.typehints.row_type import RowTypeConstraint

import luminosity
from luminosity._shared.text import did_you_mean, list_some
from luminosity.errors import InvalidArgument, OptionError
from luminosity.inference.enrich.column import Column
from luminosity.inference.enrich.column_models import ColumnModels
from luminosity.inference.model_names import named_handler
from luminosity.inference.prompts.named_types import type_named
from luminosity.inference.prompts.prompt import Prompt
from luminosity.tables.rows import RowsFromTable, TableFromRows
from luminosity.tables.types import fields_of, row_hint

__all__ = [
    "HANDLERS",
    "Fields",
    "OnTable",
    "as_rows",
    "as_table",
    "check_keys",
    "column_of",
    "current_and_reference",
    "fields_of_table",
    "handler_of",
    "needs_columns",
    "output_type_of",
    "remember_fields",
    "takes_arguments_of",
    "type_of",
]

HANDLERS = (
    "HttpModelHandler",
    "ImageClassifier",
    "ImageEmbedder",
    "Prompt",
    "SentenceEmbedder",
    "Summarizer",
    "TextClassifier",
    "TextGenerator",
    "TokenClassifier",
)
"""Our handlers whose arguments can be written in YAML."""
_Make = Callable[[dict[str, Any]], beam.PTransform[Any, Any]]
_DESCRIBED = re.compile(r"^( +)(\w+): (.*(?:\n\1 +\S.*)*)", re.MULTILINE)  # an argument in a docstring
_COLUMN_OPTIONS = ("nulls", "dedupe", "watch_model_pattern", "watch_registry", "interval", "stop_timestamp")
_COLUMN_KEYS = ("model", "inputs", "output", "inference_args", *_COLUMN_OPTIONS)
_EXPECTED = f"a name such as embed:MODEL or module:object, or type: (one of {', '.join(HANDLERS)}) and config:"


def handler_of(spec: Any) -> ModelHandler[Any, Any, Any]:
    """Return the handler that ``spec`` describes: a text such as ``embed:MODEL``, or a mapping with type and config."""
    if isinstance(spec, str):
        try:
            return named_handler(spec)
        except OptionError as error:
            raise InvalidArgument(error.message, fix=error.fix) from None
    if not isinstance(spec, Mapping) or "type" not in spec:
        raise InvalidArgument(f"found a model that is {spec!r}, expected {_EXPECTED}")
    check_keys(spec, ("type", "config"), "a model")
    kind = spec["type"]
    if kind not in HANDLERS:
        raise InvalidArgument(
            f"found a model of type {kind!r}, expected one of {', '.join(HANDLERS)}",
            fix=did_you_mean(kind, HANDLERS) or "write model: module:object for a handler of your own",
        )
    config = dict(spec.get("config") or {})
    if kind == "Prompt":
        config |= _prompt_values(config)
    try:
        return getattr(luminosity, kind)(**config)
    except TypeError as error:
        raise InvalidArgument(f"{kind}: {error}") from None


def column_of(name: str, spec: Any) -> Column:
    """Return the new column that ``spec`` describes."""
    if not isinstance(spec, Mapping):
        raise InvalidArgument(f"found {name}: {spec!r}, expected a mapping with model: and inputs:")
    check_keys(spec, _COLUMN_KEYS, f"the column {name!r}")
    if "model" not in spec:
        raise InvalidArgument(f"the column {name!r} has no model:, expected model: and inputs:")
    handler = handler_of(spec["model"])
    inputs = spec.get("inputs")
    if inputs is None and isinstance(handler, Prompt):
        inputs = {each: each for each in handler.columns}  # the template names them
    if inputs is None:
        raise InvalidArgument(f"the column {name!r} has no inputs:, expected model: and inputs:")
    output = None if spec.get("output") is None else type_of(spec["output"])
    options = {name: spec[name] for name in _COLUMN_OPTIONS if name in spec}
    return Column(handler, inputs, output, inference_args=spec.get("inference_args"), **options)


def _prompt_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a prompt takes that YAML can't write: the handler, and the type of the answers."""
    if "handler" not in config:
        raise InvalidArgument("found a Prompt without handler:, expected the model that answers")
    found: dict[str, Any] = {"handler": handler_of(config["handler"])}
    if "returns" in config:
        found["returns"] = type_named(config["returns"])
    return found


def output_type_of(column: Column) -> pa.DataType | None:
    """Return the type of a new column, or None if only the model knows it."""
    return ColumnModels("", column).output_type


def type_of(name: Any) -> pa.DataType:
    """Return the Arrow type of a name such as ``int8`` or ``string``; a list of one name is the type of lists.

    >>> type_of("float32"), type_of(["float32"])
    (DataType(float), ListType(list<item: float>))
    """
    if isinstance(name, list) and len(name) == 1:
        return pa.list_(type_of(name[0]))
    try:
        return pa.type_for_alias(name)
    except (TypeError, ValueError):
        raise InvalidArgument(
            f"found the type {name!r}, expected a name such as bool, int64, float32, string or timestamp[us], "
            "or a list with one name"
        ) from None


def check_keys(spec: Mapping[str, Any], known: tuple[str, ...], owner: str) -> None:
    """Raise if a mapping has keys that it can't have."""
    for key in spec:
        if key not in known:
            raise InvalidArgument(
                f"found {key!r} in {owner}, expected {', '.join(known)}", fix=did_you_mean(str(key), known) or None
            )


def takes_arguments_of(
    transform: type[beam.PTransform[Any, Any]], without: tuple[str, ...] = (), **other: Any
) -> Callable[[_Make], Callable[..., beam.PTransform[Any, Any]]]:
    """Let a function be called with the arguments that a transform has in Python; it gets all of them, with defaults.

    Names, types, defaults and descriptions are those of the transform, but for arguments ``without`` which YAML has to
    do, since it can't write their values, and for ``other`` ones or other defaults. The docstring of the function may
    describe arguments in the words of YAML.
    """
    parameters = dict(list(inspect.signature(transform.__init__).parameters.items())[1:])
    for name in without:
        del parameters[name]
    for name, default in other.items():
        before = parameters.get(name, inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY))
        parameters[name] = before.replace(default=default)
    taken = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters.values()]

    def decorate(make: _Make) -> Callable[..., beam.PTransform[Any, Any]]:
        def made(**given: Any) -> beam.PTransform[Any, Any]:
            if unknown := [name for name in given if name not in parameters]:
                raise TypeError(f"{transform.__name__} got an unexpected keyword argument {unknown[0]!r}")
            if missing := [each.name for each in taken if each.default is each.empty and each.name not in given]:
                raise TypeError(f"missing {len(missing)} required arguments: {_listed(missing)}")
            return make({each.name: given.get(each.name, each.default) for each in taken})

        made.__name__, made.__doc__ = make.__name__, _described(make, transform, list(parameters))
        made.__signature__ = inspect.Signature(taken, return_annotation=beam.PTransform)  # pyright: ignore
        return made

    return decorate


def _listed(names: list[str]) -> str:
    """Return names as Python lists them in its errors.

    >>> _listed(["a", "b"]), _listed(["a", "b", "c"])
    ("'a' and 'b'", "'a', 'b', and 'c'")
    """
    *first, last = map(repr, names)
    return f"{', '.join(first)}{',' * (len(first) > 1)} and {last}" if first else last


def _described(make: _Make, transform: type, names: list[str]) -> str:
    """Return the function's docstring with a description of each argument: its own, or that of the transform."""
    said = {
        match[2]: " ".join(match[3].split())
        for each in (transform, transform.__init__, make)
        for match in _DESCRIBED.finditer((inspect.getdoc(each) or "").partition("Args:\n")[2])
    }
    short = (make.__doc__ or "").partition("\n")[0]
    return f"{short}\n\nArgs:\n" + "".join(f"    {name}: {said[name]}\n" for name in names if name in said)


Fields = Mapping[str, pa.DataType | None]
"""The columns of a table. None stands for a type that is known only when the pipeline runs."""
# A pipeline that is no longer used takes its collections with it.
_FIELDS: weakref.WeakKeyDictionary[Any, Fields] = weakref.WeakKeyDictionary()
_ROWS: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


class OnTable(beam.PTransform[Any, Any]):
    """Applies a transform of Luminosity to tables, or to rows, which it gathers into a table first.

    Args:
        inner: the transform.
        check: gets the columns of the input, if they are known; raises if some are missing.
        finish: gets the result and the columns of the input, None if they are not known. It notes the columns of the
            result, and returns it in a form that other transforms of a YAML file can take.
    """

    def __init__(
        self,
        inner: beam.PTransform[Any, Any],
        finish: Callable[[Any, Fields | None], Any] | None = None,
        check: Callable[[Fields], None] | None = None,
    ) -> None:
        super().__init__()
        self._inner = inner
        self._check = check
        self._finish = finish

    def with_resource_hints(self, **kwargs: Any) -> OnTable:
        """Give the hints to the transform itself, which knows which of its steps they are for."""
        self._inner = self._inner.with_resource_hints(**kwargs)
        return self

    def default_label(self) -> str:
        """Return the label of the transform itself."""
        return self._inner.label

    def expand(self, input_or_inputs: Any) -> Any:
        """Convert the input, apply the transform, and finish its result."""
        is_root = isinstance(input_or_inputs, PBegin)
        table = input_or_inputs if is_root else as_table(input_or_inputs)
        fields = None if is_root else fields_of_table(table)
        if self._check is not None and fields is not None:
            self._check(fields)
        result = table | self._inner
        return result if self._finish is None else self._finish(result, fields)


def as_table(pcoll: Any, label: str = "Table") -> Any:
    """Return a collection as a table: unchanged, or its rows gathered into record batches."""
    if _is_table(pcoll):
        return pcoll
    return remember_fields(pcoll | label >> TableFromRows(), fields_of(pcoll.element_type))


def as_rows(pcoll: Any, label: Callable[[], str]) -> Any:
    """Return a collection unchanged, or the rows of a table, with a schema as far as its columns are known.

    A table becomes rows once, however many transforms take them. ``label`` names the step that does it.
    """
    if not _is_table(pcoll):
        return pcoll
    if pcoll not in _ROWS:
        _ROWS[pcoll] = _rows(pcoll, label())
    return _ROWS[pcoll]


def _rows(pcoll: Any, label: str) -> Any:
    fields = fields_of_table(pcoll)
    if fields is None:
        return pcoll | label >> RowsFromTable(beam.Row)
    known = {name: kind for name, kind in fields.items() if kind is not None}
    if len(known) == len(fields):
        return pcoll | label >> RowsFromTable(beam.Row, schema=pa.schema(list(known.items())))
    rows = pcoll | label >> RowsFromTable(beam.Row)
    hints = dict(row_hint(pa.schema(list(known.items())))._fields)
    rows.element_type = RowTypeConstraint.from_fields([(name, hints.get(name, Any)) for name in fields])
    return rows


def _is_table(pcoll: Any) -> bool:
    return pcoll.element_type is pa.RecordBatch or pcoll in _FIELDS  # Beam forgets the types of several outputs


def fields_of_table(table: Any) -> Fields | None:
    """Return the columns of a table, or None if they are not known before the pipeline runs."""
    return _FIELDS.get(table)


def remember_fields(table: Any, fields: Fields | None) -> Any:
    """Note the columns of a table, if they are known, for the transforms that take it; return the table."""
    if fields is not None:
        _FIELDS[table] = dict(fields)
    return table


def current_and_reference(inputs: Any, reference: str | None) -> tuple[Any, Any]:
    """Return the table to compare, and what it is compared with: a table, or the path in ``reference``.

    The reference is an option of a step, or its input named ``reference``. Raises if it is neither or both.
    """
    current, found = inputs, reference
    if isinstance(inputs, Mapping):
        named = dict(inputs)
        if set(named) != {"current", "reference"}:
            raise InvalidArgument(f"found the inputs {', '.join(named)}, expected current and reference")
        found, current = as_table(named["reference"], "Reference"), named["current"]
    if found is None or (reference is not None and found is not reference):
        raise InvalidArgument("expected either reference: a path, or an input named reference")
    return as_table(current), found


def needs_columns(*names: str) -> Callable[[Fields], None]:
    """Return a function that raises if a table lacks one of these columns."""

    def check(fields: Fields) -> None:
        for name in names:
            if name not in fields:
                raise InvalidArgument(
                    f"there is no column {name!r}, expected one of {list_some(fields, 20)}",
                    fix=did_you_mean(name, fields) or None,
                )

    return check
