"""The transforms of Luminosity as YAML takes them: every argument is a plain value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import apache_beam as beam
import pyarrow as pa
from apache_beam.typehints.row_type import RowTypeConstraint

from luminosity import (
    AddRowIds,
    Enrich,
    ReadTable,
    SearchVectors,
    WriteLance,
    WriteTable,
    WriteVectors,
)
from luminosity._shared.text import did_you_mean
from luminosity.beam_yaml.arguments import (
    HANDLERS,
    Fields,
    OnTable,
    as_rows,
    check_keys,
    column_of,
    current_and_reference,
    fields_of_table,
    needs_columns,
    output_type_of,
    remember_fields,
    takes_arguments_of,
    type_of,
)
from luminosity.beam_yaml.evaluating import describe, evaluate, score_texts
from luminosity.drift import RBF, Aggregate, Laplacian, Linear, MMDTest, Polynomial
from luminosity.errors import InvalidArgument
from luminosity.inference.enrich.table_steps import check_schema
from luminosity.tables.row_maker import RowMaker
from luminosity.tables.types import row_hint

__all__ = ["TRANSFORMS"]

_KERNELS = ("rbf", "laplacian", "linear", "polynomial", "aggregate")
_RESULT_FIELDS = {
    "drift": bool,
    "p_value": float,
    "mmd2": float,
    "statistic": float,
    "level": float,
    "reference_rows": int,
    "current_rows": int,
}


@takes_arguments_of(ReadTable, without=("where",), pattern=None, path=None)
def read_table(arguments: dict[str, Any]) -> beam.PTransform[Any, Any]:
    """Reads the files of a table: Parquet, JSON lines, CSV or Arrow.

    Args:
        pattern: files, or a list of patterns; a folder means all table files in it.
        path: the same as pattern, as Beam's own transforms call it.
        schema: the columns and their types, by name, such as ``{text: string, stars: int8}``.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    if ("pattern" in given) == ("path" in given):
        raise InvalidArgument("expected the files to read, as pattern: or path:, one of them")
    pattern = given.pop("pattern", None) or given.pop("path", "")
    if "schema" in given:
        given["schema"] = _schema(given["schema"])
    read = ReadTable(pattern, **given)
    fields = {field.name: field.type for field in read.schema}
    return OnTable(read, lambda table, _: remember_fields(table, fields))


def enrich(columns: Mapping[str, Any], error_handling: Mapping[str, Any] | None = None) -> beam.PTransform[Any, Any]:
    """Adds a column for each model.

    Args:
        columns: for each new column a mapping with model, inputs, and optionally output and inference_args.
        error_handling: ``output`` names the output with the rows on which a model failed.
    """
    if not isinstance(columns, Mapping) or not columns:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"found columns: {columns!r}, expected a mapping of new columns to their models")
    made = {name: column_of(name, spec) for name, spec in columns.items()}
    return _enrich(made, error_handling)


def run_inference(
    model_handler: Any,
    inputs: Any = None,
    inference_tag: str = "inference",
    inference_args: dict[str, Any] | None = None,
    output: Any = None,
    error_handling: Mapping[str, Any] | None = None,
) -> beam.PTransform[Any, Any]:
    """Adds the prediction of a model to each row.

    Args:
        model_handler: a name such as ``embed:MODEL`` or ``module:object``, or a handler's type and config. The types
            of Beam's own RunInference work as they do there.
        inputs: the column, or columns, that the model takes.
        inference_tag: the name of the new column.
        inference_args: passed to every call of the model.
        output: the type of the new column, if the handler does not define it.
        error_handling: ``output`` names the output with the rows on which the model failed.
    """
    if _is_beams(model_handler):
        return _beams_run_inference(model_handler, inputs, inference_tag, inference_args, output, error_handling)
    if inputs is None and not (isinstance(model_handler, Mapping) and model_handler.get("type") == "Prompt"):
        raise InvalidArgument("expected inputs:, the column or columns that the model takes")
    spec = {"model": model_handler, "inputs": inputs, "output": output, "inference_args": inference_args}
    return _enrich({inference_tag: column_of(inference_tag, spec)}, error_handling)


@takes_arguments_of(AddRowIds)
def add_row_ids(arguments: dict[str, Any]) -> beam.PTransform[Any, Any]:
    """Adds a column of ids, computed from the values of each row."""
    new = _with_fields({arguments["name"]: pa.string()})
    return OnTable(AddRowIds(**arguments), new, needs_columns(*(arguments["columns"] or ())))


@takes_arguments_of(WriteTable)
def write_table(arguments: dict[str, Any]) -> beam.PTransform[Any, Any]:
    """Writes rows to files. Its output has a row with the column ``file`` for each.

    Args:
        schema: the columns and their types, by name.
    """
    arguments["schema"] = _schema(arguments["schema"])
    folders = arguments["partition_by"] or ()
    needed = needs_columns(*([folders] if isinstance(folders, str) else folders))
    return OnTable(WriteTable(**arguments), _to_rows("Files", "file", str), needed)


@takes_arguments_of(WriteLance)
def write_lance(arguments: dict[str, Any]) -> beam.PTransform[Any, Any]:
    """Writes rows to a Lance dataset."""
    return OnTable(WriteLance(**arguments))


@takes_arguments_of(WriteVectors, without=("api_key",))
def write_vectors(arguments: dict[str, Any]) -> beam.PTransform[Any, Any]:
    """Writes rows to a vector store as points. Its output has the column ``rows``: the number of rows of each write."""
    write, vectors = WriteVectors(**arguments), arguments["vectors"]
    named = [vectors] if isinstance(vectors, str) else list(vectors.values())
    needed = needs_columns(arguments["id"], *named, *(arguments["payload"] or ()))
    return OnTable(write, _to_rows("Counts", "rows", int), needed)


@takes_arguments_of(SearchVectors, without=("api_key",))
def search_vectors(arguments: dict[str, Any]) -> beam.PTransform[Any, Any]:
    """Adds the nearest points of a vector store to each row."""
    new = _with_fields({arguments["output"]: None})
    return OnTable(SearchVectors(**arguments), new, needs_columns(arguments["vector_column"]))


@takes_arguments_of(MMDTest, without=("keyed", "bins", "precision"), reference=None, kernel="rbf", bandwidth=None)
def mmd_test(arguments: dict[str, Any]) -> beam.PTransform[Any, Any]:
    """Tests whether rows come from the same distribution as a reference. Its output has a row for each test.

    Args:
        reference: a path of Parquet or ``.npy`` files. Leave it out if the reference is an input named ``reference``.
        column: the column of vectors, or several columns of numbers that form a vector together.
        kernel: rbf, laplacian, linear, polynomial or aggregate.
        bandwidth: for rbf and laplacian: the distance at which rows count as similar, or several.
    """
    if arguments["column"] is None:
        raise InvalidArgument("expected column:, the column of vectors, or a list of columns of numbers")
    reference, kernel, bandwidth = (arguments.pop(name) for name in ("reference", "kernel", "bandwidth"))
    return _MMDTest(reference, {**arguments, "kernel": _kernel(kernel, bandwidth)})


TRANSFORMS: Mapping[str, Callable[..., beam.PTransform[Any, Any]]] = {
    "AddRowIds": add_row_ids,
    "Describe": describe,
    "Enrich": enrich,
    "Evaluate": evaluate,
    "MMDTest": mmd_test,
    "ReadTable": read_table,
    "RunInference": run_inference,
    "ScoreTexts": score_texts,
    "SearchQdrant": search_vectors,
    "SearchVectors": search_vectors,
    "WriteLance": write_lance,
    "WriteQdrant": write_vectors,
    "WriteTable": write_table,
    "WriteVectors": write_vectors,
}
"""What a YAML file may name as ``type``, beside the transforms of Beam."""


class _MMDTest(beam.PTransform[Any, Any]):
    """``MMDTest`` with the reference as a path, or as the input named ``reference``."""

    def __init__(self, reference: str | None, settings: Mapping[str, Any]) -> None:
        super().__init__()
        self._reference = reference
        self._settings = settings

    def expand(self, input_or_inputs: Any) -> Any:
        table, reference = current_and_reference(input_or_inputs, self._reference)
        columns, key, row_id = (self._settings[name] for name in ("column", "by", "id"))
        named = [columns] if isinstance(columns, str) else columns
        if (known := fields_of_table(table)) is not None:
            needs_columns(*named, *(each for each in (key, row_id) if each is not None))(known)
        results = table | MMDTest(reference, **self._settings)
        fields: dict[str, Any] = {**({} if key is None else {key: Any}), **_RESULT_FIELDS}
        row_type = RowTypeConstraint.from_fields(list(fields.items()))
        return results | "Rows" >> beam.Map(_result_row, key).with_output_types(row_type)


def _result_row(result: Any, key_name: str | None) -> beam.Row:
    key = {}
    if key_name is not None:
        value, result = result
        key = {key_name: value}
    return beam.Row(**key, **{name: kind(getattr(result, name)) for name, kind in _RESULT_FIELDS.items()})


def _kernel(name: str, bandwidth: float | Sequence[float] | None) -> Any:
    if name not in _KERNELS:
        raise InvalidArgument(
            f"found kernel: {name}, expected one of {', '.join(_KERNELS)}", fix=did_you_mean(name, _KERNELS) or None
        )
    if name not in ("rbf", "laplacian"):
        if bandwidth is not None:
            raise InvalidArgument(f"found bandwidth: with kernel: {name}, expected it only with rbf and laplacian")
        return {"linear": Linear, "polynomial": Polynomial, "aggregate": Aggregate}[name]()
    kind = RBF if name == "rbf" else Laplacian
    return [kind(each) for each in (bandwidth if isinstance(bandwidth, Sequence) else [bandwidth])]


def _enrich(columns: Mapping[str, Any], error_handling: Mapping[str, Any] | None) -> beam.PTransform[Any, Any]:
    step = Enrich(**columns)
    new: Fields = {name: output_type_of(column) for name, column in columns.items()}

    def check(fields: Fields) -> None:
        schema = pa.schema([(name, kind or pa.bool_()) for name, kind in fields.items()])  # only names matter here
        check_schema(schema, columns)

    if error_handling is None:
        return OnTable(step, _with_fields(new), check)
    check_keys(error_handling, ("output", "threshold"), "error_handling")
    if "output" not in error_handling:
        raise InvalidArgument("expected output: in error_handling:, the name of the output with the failed rows")
    step.with_exception_handling(threshold=error_handling.get("threshold", 1))
    finish_good = _with_fields(new)
    return OnTable(
        step,
        lambda both, fields: {
            "good": finish_good(both[0], fields),
            error_handling["output"]: _failed_rows(both[1], fields),
        },
        check,
    )


def _failed_rows(table: Any, fields: Fields | None) -> Any:
    """Return failed rows in the form that Beam's own transforms give them: the element and a message."""
    known = fields is not None and all(kind is not None for kind in fields.values())
    element: Any = row_hint(pa.schema(list((fields or {}).items()))) if known else Any
    row_type = RowTypeConstraint.from_fields([("element", element), ("msg", str), ("model", str)])
    return table | "Failed" >> beam.FlatMap(_failed).with_output_types(row_type)


def _failed(batch: pa.RecordBatch) -> list[beam.Row]:
    names = [name for name in batch.schema.names if name not in ("_model", "_reason")]
    elements = RowMaker(beam.Row).rows(batch.select(names))
    reasons, models = batch["_reason"].to_pylist(), batch["_model"].to_pylist()
    return [
        beam.Row(element=element, msg=reason, model=model)
        for element, reason, model in zip(elements, reasons, models, strict=True)
    ]


def _with_fields(new: Fields) -> Callable[[Any, Fields | None], Any]:
    """Return a function that notes the columns of a table to which ``new`` were added."""
    return lambda table, fields: remember_fields(table, None if fields is None else {**fields, **new})


def _is_beams(spec: Any) -> bool:
    """Return whether Beam's RunInference knows the handler. Its module is slow to import: look only for other types."""
    if not isinstance(spec, Mapping) or spec.get("type") in HANDLERS:
        return False
    from apache_beam.yaml.yaml_ml import ModelHandlerProvider

    return spec.get("type") in ModelHandlerProvider.handler_types


def _beams_run_inference(
    model_handler: Any, inputs: Any, inference_tag: str, inference_args: Any, output: Any, error_handling: Any
) -> beam.PTransform[Any, Any]:
    from apache_beam.yaml.yaml_ml import run_inference as beams

    for name, value in (("inputs", inputs), ("output", output), ("error_handling", error_handling)):
        if value is not None:
            raise InvalidArgument(
                f"found {name}:, which {model_handler['type']} of Beam does not take",
                fix="use preprocess: and postprocess: in its config",
            )
    return beam.ptransform_fn(
        lambda pcoll: as_rows(pcoll, lambda: "Rows") | beams(model_handler, inference_tag, inference_args)
    )()


def _to_rows(label: str, name: str, kind: type) -> Callable[[Any, Fields | None], Any]:
    to_rows = beam.Map(lambda value: beam.Row(**{name: value}))
    row_type = RowTypeConstraint.from_fields([(name, kind)])
    return lambda values, _: values | label >> to_rows.with_output_types(row_type)


def _schema(fields: Mapping[str, Any] | None) -> pa.Schema | None:
    if fields is None:
        return None
    if not isinstance(fields, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"found schema: {fields!r}, expected the types of columns by name")
    return pa.schema([(name, type_of(kind)) for name, kind in fields.items()])
