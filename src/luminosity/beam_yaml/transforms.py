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
from luminosity.beam_yaml.evaluating import describe, evaluate
from luminosity.beam_yaml.models import HANDLERS, check_keys, column_of, output_type_of, type_of
from luminosity.beam_yaml.tables import (
    Fields,
    OnTable,
    as_rows,
    current_and_reference,
    fields_of_table,
    needs_columns,
    remember_fields,
)
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


def read_table(
    pattern: str | Sequence[str] | None = None,
    path: str | Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    schema: Mapping[str, Any] | None = None,
    format: str | None = None,
    rows_per_batch: int | None = None,
    delimiter: str | None = None,
    encoding: str | None = None,
    decimal_point: str | None = None,
    newlines_in_values: bool | None = None,
    null_values: Sequence[str] | None = None,
) -> beam.PTransform[Any, Any]:
    """Reads the files of a table: Parquet, JSON lines, CSV or Arrow.

    Args:
        pattern: files, or a list of patterns; a folder means all table files in it.
        path: the same as pattern, as Beam's own transforms call it.
        columns: the columns to read; all unless given.
        schema: the columns and their types, by name, such as ``{text: string, stars: int8}``.
        format: parquet, jsonl, csv or arrow, for files whose names do not tell.
        rows_per_batch: the most rows of a batch.
        delimiter: the character between the values of CSV; found in the file unless given.
        encoding: the encoding of CSV; found in the file unless given.
        decimal_point: the character before the fraction of numbers in CSV.
        newlines_in_values: whether values of CSV contain line breaks.
        null_values: the texts that mean null in CSV.
    """
    if (pattern is None) == (path is None):
        raise InvalidArgument("expected the files to read, as pattern: or path:, one of them")
    given: dict[str, Any] = {
        "columns": columns,
        "schema": _schema(schema),
        "format": format,
        "rows_per_batch": rows_per_batch,
        "delimiter": delimiter,
        "encoding": encoding,
        "decimal_point": decimal_point,
        "newlines_in_values": newlines_in_values,
        "null_values": null_values,
    }
    read = ReadTable(pattern or path or "", **{name: value for name, value in given.items() if value is not None})
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
    if inputs is None:
        raise InvalidArgument("expected inputs:, the column or columns that the model takes")
    spec = {"model": model_handler, "inputs": inputs, "output": output, "inference_args": inference_args}
    return _enrich({inference_tag: column_of(inference_tag, spec)}, error_handling)


def add_row_ids(name: str = "id", columns: Sequence[str] | None = None) -> beam.PTransform[Any, Any]:
    """Adds a column of ids, computed from the values of each row.

    Args:
        name: the new column.
        columns: the columns to compute the id from; all unless given.
    """
    return OnTable(AddRowIds(name, columns), _with_fields({name: pa.string()}), needs_columns(*(columns or ())))


def write_table(
    path: str,
    partition_by: str | Sequence[str] | None = None,
    rows_per_file: int | None = None,
    if_exists: Any = "fail",
    format: Any = None,
    compression: str | None = None,
    schema: Mapping[str, Any] | None = None,
    allow_empty: bool = False,
) -> beam.PTransform[Any, Any]:
    """Writes rows to files. Its output has a row with the column ``file`` for each.

    Args:
        path: a folder, or one file if it has the suffix of a format.
        partition_by: columns whose values become folders.
        rows_per_file: the most rows of a file.
        if_exists: fail, replace or append.
        format: parquet, jsonl, csv or arrow.
        compression: the compression of the format.
        schema: the columns and their types, by name.
        allow_empty: write a table without rows, too, instead of failing.
    """
    write = WriteTable(
        path,
        partition_by,
        rows_per_file,
        if_exists,
        format=format,
        compression=compression,
        schema=_schema(schema),
        allow_empty=allow_empty,
    )
    folders = [partition_by] if isinstance(partition_by, str) else partition_by or ()
    return OnTable(write, _to_rows("Files", "file", str), needs_columns(*folders))


def write_lance(
    path: str, mode: Any = "append", key: str | None = None, rows_per_file: int = 100_000, allow_empty: bool = False
) -> beam.PTransform[Any, Any]:
    """Writes rows to a Lance dataset.

    Args:
        path: the dataset; it ends in ``.lance``.
        mode: append, overwrite or merge.
        key: the column that identifies rows, for merge.
        rows_per_file: about the number of rows of a file.
        allow_empty: let overwrite leave a dataset without rows.
    """
    return OnTable(WriteLance(path, mode=mode, key=key, rows_per_file=rows_per_file, allow_empty=allow_empty))


def write_vectors(
    where: str,
    vectors: str | Mapping[str, str],
    collection: str | None = None,
    id: str = "id",
    payload: Sequence[str] | None = None,
    distance: Any = "cosine",
    create: bool = True,
    if_exists: Any = "append",
    allow_empty: bool = False,
    batch_size: int = 1_000,
    timeout: float = 120.0,
    api_key_env: str | None = None,
) -> beam.PTransform[Any, Any]:
    """Writes rows to a vector store as points. Its output has the column ``rows``: the number of rows of each write.

    Args:
        where: a server's address, a folder in which Qdrant's engine keeps the collection, or a Lance dataset.
        vectors: the column of the vector, or a mapping of vector names to columns.
        collection: the name of the collection; a Lance dataset needs none.
        id: the column of ids.
        payload: the columns to keep beside the vectors; all others unless given.
        distance: cosine, dot, euclid or manhattan.
        create: create the collection if it does not exist.
        if_exists: what to do if the collection exists: append, replace or fail.
        allow_empty: let replace leave a collection without points.
        batch_size: the most points of one write.
        timeout: seconds to retry while a server fails.
        api_key_env: the environment variable that holds the server's key.
    """
    write = WriteVectors(
        where,
        collection,
        vectors=vectors,
        id=id,
        payload=payload,
        distance=distance,
        create=create,
        if_exists=if_exists,
        allow_empty=allow_empty,
        batch_size=batch_size,
        timeout=timeout,
        api_key_env=api_key_env,
    )
    named = [vectors] if isinstance(vectors, str) else list(vectors.values())
    return OnTable(write, _to_rows("Counts", "rows", int), needs_columns(id, *named, *(payload or ())))


def search_vectors(
    where: str,
    vector_column: str,
    collection: str | None = None,
    using: str | None = None,
    limit: int = 5,
    with_payload: Sequence[str] = (),
    output: str = "neighbours",
    score_threshold: float | None = None,
    filter: Mapping[str, Any] | None = None,
    batch_size: int = 256,
    timeout: float = 120.0,
    api_key_env: str | None = None,
) -> beam.PTransform[Any, Any]:
    """Adds the nearest points of a vector store to each row.

    Args:
        where: a server's address, a folder that WriteQdrant wrote, or a Lance dataset.
        vector_column: the column of the vectors to search for.
        collection: the name of the collection; a Lance dataset needs none.
        using: the name of the vector to compare with.
        limit: the most neighbours of a row.
        with_payload: the columns of the points to return.
        output: the new column.
        score_threshold: leave out neighbours below this score.
        filter: the value of a column, a list of values, or bounds such as ``{gte: 4}``.
        batch_size: the most searches of one request.
        timeout: seconds to retry while a server fails.
        api_key_env: the environment variable that holds the server's key.
    """
    search = SearchVectors(
        where,
        collection,
        vector_column=vector_column,
        using=using,
        limit=limit,
        with_payload=with_payload,
        output=output,
        score_threshold=score_threshold,
        filter=filter,
        batch_size=batch_size,
        timeout=timeout,
        api_key_env=api_key_env,
    )
    return OnTable(search, _with_fields({output: None}), needs_columns(vector_column))


def mmd_test(
    reference: str | None = None,
    column: str | Sequence[str] | None = None,
    kernel: str = "rbf",
    bandwidth: float | Sequence[float] | None = None,
    id: str | None = None,
    by: str | None = None,
    permutations: int = 1000,
    level: float = 0.05,
    seed: int = 0,
    pca: int | None = None,
) -> beam.PTransform[Any, Any]:
    """Tests whether rows come from the same distribution as a reference. Its output has a row for each test.

    Args:
        reference: a path of Parquet or ``.npy`` files. Leave it out if the reference is an input named ``reference``.
        column: the column of vectors, or several columns of numbers that form a vector together.
        kernel: rbf, laplacian, linear, polynomial or aggregate.
        bandwidth: for rbf and laplacian: the distance at which rows count as similar, or several.
        id: the column with the rows' ids.
        by: the column with keys; there is one test for each key.
        permutations: how many random permutations the statistic is compared with.
        level: the false-alarm rate.
        seed: the seed of bins and permutations.
        pca: compare this many principal components.
    """
    if column is None:
        raise InvalidArgument("expected column:, the column of vectors, or a list of columns of numbers")
    settings = {"column": column, "id": id, "by": by, "permutations": permutations, "level": level, "seed": seed}
    return _MMDTest(reference, {"kernel": _kernel(kernel, bandwidth), "pca": pca, **settings})


TRANSFORMS: Mapping[str, Callable[..., beam.PTransform[Any, Any]]] = {
    "AddRowIds": add_row_ids,
    "Describe": describe,
    "Enrich": enrich,
    "Evaluate": evaluate,
    "MMDTest": mmd_test,
    "ReadTable": read_table,
    "RunInference": run_inference,
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
        from luminosity.drift import MMDTest

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
    from luminosity.drift import RBF, Aggregate, Laplacian, Linear, Polynomial

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
