"""Tests of Beam's sources, sinks and primitives: each one is planned or refused, as the table in the docs says."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import logging
import pkgutil
import re
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.io import iobase
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.portability import common_urns, python_urns
from apache_beam.portability.api import beam_runner_api_pb2
from apache_beam.pvalue import PDone
from apache_beam.runners.portability.fn_api_runner import translations
from apache_beam.runners.worker import bundle_processor

from luminosity.engine.explain.dryrun import DryRunner
from luminosity.engine.plan import support
from luminosity.engine.plan.translate import MOVE_URNS
from luminosity.errors import MissingExtra, UnsupportedPipeline

_PAGE = Path(__file__).parents[3] / "docs" / "moving-over.md"
_TOPIC = "projects/my-project/topics/reviews"
_TABLE = "my-project:data.reviews"
_OWN_URNS = ("primitives", "composites", "deprecated_primitives", "group_into_batches_components", "combine_components")

Apply = Callable[[beam.Pipeline, Any], Any]  # gets a pipeline and the class, applies it


class _Row(typing.NamedTuple):
    text: str


class _UnknownSource(iobase.SourceBase):
    """Not a ``BoundedSource``: it would need a runner that knows it."""

    def is_bounded(self) -> bool:
        return False

    def default_output_coder(self) -> Any:
        return beam.coders.BytesCoder()


class _NoStep(beam.PTransform[Any, Any]):
    def expand(self, input_or_inputs: Any) -> Any:
        return beam.PCollection.from_(input_or_inputs)


class _Unchanged(beam.PTransform[Any, Any]):
    def expand(self, input_or_inputs: Any) -> Any:
        return input_or_inputs


class _ToNowhere(beam.PTransform[Any, Any]):
    def expand(self, input_or_inputs: Any) -> Any:
        return PDone(input_or_inputs.pipeline)


def _read(*args: Any, **kwargs: Any) -> Apply:
    return lambda pipeline, cls: pipeline | cls(*args, **kwargs)


def _each(elements: list[Any], *args: Any, **kwargs: Any) -> Apply:
    return lambda pipeline, cls: pipeline | beam.Create(elements) | cls(*args, **kwargs)


def _rows(*args: Any, **kwargs: Any) -> Apply:
    return lambda p, cls: p | beam.Create([_Row("a")]).with_output_types(_Row) | cls(*args, **kwargs)


def _read_debezium(pipeline: beam.Pipeline, cls: Any) -> Any:
    driver: Any = importlib.import_module("apache_beam.io.debezium").DriverClassName.POSTGRESQL
    return pipeline | cls(driver, "user", "password", "localhost", 1, connection_properties=[])


def _read_several(pipeline: beam.Pipeline, cls: Any) -> Any:
    descriptor: Any = importlib.import_module("apache_beam.io.gcp.pubsub").PubSubSourceDescriptor
    return pipeline | cls([descriptor(_TOPIC)])


def _watch(pipeline: beam.Pipeline, cls: Any) -> Any:
    return pipeline | beam.Create(["a"]) | cls(lambda _: None, 1)


def _count_on(pipeline: beam.Pipeline, cls: Any) -> Any:
    source: Any = importlib.import_module("apache_beam.io.unbounded_source").UnboundedCountingSource
    return pipeline | cls(source(3))


def _parquet(pipeline: beam.Pipeline, cls: Any) -> Any:
    arrow: Any = importlib.import_module("pyarrow")
    return pipeline | beam.Create([{"text": "a"}]) | cls("/tmp/none", arrow.schema([("text", arrow.string())]))


def _write_text(pipeline: beam.Pipeline, cls: Any) -> Any:
    sink: Any = importlib.import_module("apache_beam.io.textio")._TextSink("/tmp/none")
    return pipeline | beam.Create(["a"]) | cls(sink)


def _read_text(pipeline: beam.Pipeline, cls: Any) -> Any:
    source: Any = importlib.import_module("apache_beam.io.avroio")._create_avro_source("/tmp/none*", validate=False)
    return pipeline | cls(source)


_SPANNER = {"project_id": "p", "instance_id": "i", "database_id": "d"}
_SNOWFLAKE = {
    "server_name": "a.snowflakecomputing.com",
    "schema": "s",
    "database": "d",
    "staging_bucket_name": "gs://bucket/",
    "storage_integration_name": "i",
    "username": "u",
    "password": "p",
    "table": "t",
}
_DISPOSITIONS = {"create_disposition": "CREATE_NEVER", "write_disposition": "APPEND", "table_schema": ""}
_JDBC = {"table_name": "t", "driver_class_name": "d", "jdbc_url": "j", "username": "u", "password": "p"}
_KINESIS = {"stream_name": "s", "aws_access_key": "a", "aws_secret_key": "b", "region": "r"}
_STORE = {"project_id": "a", "region": "b", "dataset_id": "c", "dicom_store_id": "d"}
_AVRO = {"type": "record", "name": "row", "fields": [{"name": "text", "type": "string"}]}
_READ_FILE = _read("/tmp/none*", validate=False)
_READ_FILES = _each(["/tmp/none"])

# How each of them is applied, by the names in the table; a name alone stands for all modules.
_APPLY: dict[str, Apply] = {
    "BigQueryBatchFileLoads": _each([{"a": 1}], _TABLE, schema="a:INTEGER", custom_gcs_temp_location="gs://b/x"),
    "DeleteFromDatastore": _each([{}], "p"),
    "DicomSearch": _each([{}]),
    "FlinkStreamingImpulseSource": _read(),
    "FormatToQido": _each([{}]),
    "GenerateSequence": _read(start=0),
    "MatchAll": _READ_FILES,
    "MatchContinuously": _read("/tmp/none*"),
    "MatchFiles": _read("/tmp/none*"),
    "MultipleReadFromPubSub": _read_several,
    "Read": _read_text,
    "ReadAllFiles": _each(["/tmp/none"], True, "auto", 1, 1, lambda path: None),
    "ReadAllFromAvro": _READ_FILES,
    "ReadAllFromAvroContinuously": _read("/tmp/none*"),
    "ReadAllFromBigQuery": _each([{}], gcs_location="gs://b/x"),
    "ReadAllFromParquet": _READ_FILES,
    "ReadAllFromParquetBatched": _READ_FILES,
    "ReadAllFromTFRecord": _READ_FILES,
    "ReadAllFromText": _READ_FILES,
    "ReadAllFromTextContinuously": _read("/tmp/none*"),
    "ReadBigQueryChangeHistory": _read(table=_TABLE),
    "ReadChangeStreamFromSpanner": _read(
        **_SPANNER,
        changeStreamName="c",
        metadataDatabase="m",
        metadataInstance="n",
        inclusiveStartAt="2026-01-01T00:00:00Z",
    ),
    "ReadDataFromKinesis": _read(**_KINESIS),
    "ReadFromAvro": _READ_FILE,
    "ReadFromBigQuery": _read(table=_TABLE, gcs_location="gs://b/x"),
    "ReadFromBigtable": _read("p", "i", "t", expansion_service="localhost:1"),
    "ReadFromCsv": _read("/tmp/none*"),
    "ReadFromDatastore": _read(None),
    "ReadFromDebezium": _read_debezium,
    "ReadFromJdbc": _read(**_JDBC),
    "ReadFromJson": _read("/tmp/none*"),
    "ReadFromKafka": _read({"bootstrap.servers": "localhost:1"}, ["t"]),
    "ReadFromMongoDB": _read(db="d", coll="c"),
    "ReadFromParquet": _READ_FILE,
    "ReadFromParquetBatched": _READ_FILE,
    "ReadFromPubSub": _read(topic=_TOPIC),
    "ReadFromSnowflake": _read(**_SNOWFLAKE, csv_mapper=str),
    "ReadFromSpanner": _read(**_SPANNER, row_type=_Row, sql="select 1"),
    "ReadFromTFRecord": _READ_FILE,
    "ReadFromText": _READ_FILE,
    "ReadFromTextWithFilename": _READ_FILE,
    "ReadFromUnboundedSource": _count_on,
    "ReadMatches": _READ_FILES,
    "ReadStringsFromPubSub": _read(topic=_TOPIC),
    "RequestResponseIO": _each(["a"], None),
    "SDFBoundedSourceReader": _each(["a"]),
    "SpannerDelete": _rows(**_SPANNER, table="t"),
    "SpannerInsert": _rows(**_SPANNER, table="t"),
    "SpannerInsertOrUpdate": _rows(**_SPANNER, table="t"),
    "SpannerReplace": _rows(**_SPANNER, table="t"),
    "SpannerUpdate": _rows(**_SPANNER, table="t"),
    "StorageWriteToBigQuery": _each([{"a": 1}], _TABLE, schema="a:INTEGER"),
    "UploadToDicomStore": _each([{}], _STORE, "bytes"),
    "Watch": _watch,
    "Write": _write_text,
    "WriteImpl": _write_text,
    "WriteStringsToPubSub": _each(["a"], _TOPIC),
    "WriteToAvro": _each([{"text": "a"}], "/tmp/none", _AVRO),
    "WriteToBigQuery": _each([{"a": 1}], _TABLE, schema="a:INTEGER", method="STREAMING_INSERTS"),
    "WriteToBigTable": _each([{}], "p", "i", "t"),
    "WriteToCsv": _rows("/tmp/none"),
    "WriteToDatastore": _each([{}], "p"),
    "WriteToFiles": _each(["a"], "/tmp/none"),
    "WriteToJdbc": _rows(**_JDBC),
    "WriteToJson": _rows("/tmp/none"),
    "WriteToKafka": lambda p, cls: (
        p
        | beam.Create([(b"k", b"v")]).with_output_types(tuple[bytes, bytes])
        | cls({"bootstrap.servers": "localhost:1"}, "t")
    ),
    "WriteToKinesis": _each([b"a"], **_KINESIS, partition_key="k"),
    "WriteToMongoDB": _each([{}], db="d", coll="c"),
    "WriteToParquet": _parquet,
    "WriteToParquetBatched": _parquet,
    "WriteToPubSub": _each([b"a"], _TOPIC),
    "WriteToSnowflake": _each([{}], **_SNOWFLAKE, user_data_mapper=list, **_DISPOSITIONS),
    "WriteToSpanner": _each([{}], **_SPANNER),
    "WriteToTFRecord": _each([b"a"], "/tmp/none"),
    "WriteToText": _each(["a"], "/tmp/none"),
}


def _table() -> Iterator[tuple[str, str, str]]:
    """Yield module, name and outcome of each transform in the page's table."""
    section = _PAGE.read_text().partition("## Sources and sinks")[2].partition("\n## ")[0]
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and cells[0].startswith("`"):
            for name in re.findall(r"`(\w+)`", cells[1]):
                yield cells[0].strip("`"), name, cells[2]


def _walked() -> Iterator[tuple[str, str]]:
    """Yield module and name of each public transform of Beam's I/O, also of modules whose libraries are missing."""
    for found in pkgutil.walk_packages(beam.io.__path__, "apache_beam.io."):
        if re.search(r"_test$|_tests?\.|\.tests?$|test_utils|_pipeline$|\.clients", found.name) or found.ispkg:
            continue
        module = found.name.removeprefix("apache_beam.io.")
        try:
            loaded = importlib.import_module(found.name)
        except ImportError:
            yield from ((module, name) for name in _named_in_source(found.name))
            continue
        for name, value in vars(loaded).items():
            if getattr(value, "__module__", "") != found.name or name.startswith("_"):
                continue
            is_transform = inspect.isclass(value) and issubclass(value, beam.PTransform)
            if is_transform or (inspect.isfunction(value) and re.match(r"(Read|Write)[A-Z]", name)):
                yield module, name


def _named_in_source(module: str) -> Iterator[str]:
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    known = {"PTransform"}
    for node in ast.parse(Path(spec.origin).read_text()).body:
        if isinstance(node, ast.ClassDef) and any(
            re.search(rf"\b({'|'.join(known)})\b", ast.unparse(b)) for b in node.bases
        ):
            known.add(node.name)
            if not node.name.startswith("_"):
                yield node.name


def test_the_table_names_every_source_and_sink_of_beam() -> None:
    assert sorted({(module, name) for module, name, _ in _table()}) == sorted(set(_walked()))


@pytest.mark.parametrize(("module", "name", "outcome"), [pytest.param(*row, id=".".join(row[:2])) for row in _table()])
def test_a_source_or_sink_does_what_the_table_says(module: str, name: str, outcome: str) -> None:
    apply = _APPLY[name]
    if outcome.startswith("runs"):
        assert _stages(apply, module, name) > 0
    elif outcome.startswith("refused"):
        with pytest.raises(UnsupportedPipeline, match=rf"{name}.*, at {re.escape(__file__)}:\d+") as caught:
            _stages(apply, module, name)
        assert caught.value.fix is not None
    else:
        assert outcome.startswith("needs")
        try:
            assert _stages(apply, module, name) > 0
        except UnsupportedPipeline:
            raise
        except Exception as error:  # the library is missing: Beam itself says so, in one way or another
            logging.getLogger(__name__).debug("%s: %r", name, error)


def _stages(apply: Apply, module: str, name: str) -> int:
    """Return how many stages a pipeline with this transform has, in a plan that starts nothing."""
    transform = getattr(importlib.import_module(f"apache_beam.io.{module}"), name)
    return _planned(lambda pipeline: apply(pipeline, transform))


def _planned(build: Callable[[beam.Pipeline], Any]) -> int:
    runs: list[Any] = []
    pipeline = beam.Pipeline(DryRunner(runs, "LuminosityRunner"), PipelineOptions(["--streaming"]))
    build(pipeline)
    pipeline.run()
    return len(runs[0].prepared.graph.stages)


def test_pubsub_names_the_library_that_is_missing() -> None:
    with pytest.raises(MissingExtra, match=r"google-cloud-pubsub is not installed.*pip install '(google|\.)"):
        _planned(lambda pipeline: pipeline | "Reviews" >> beam.io.ReadFromPubSub(topic=_TOPIC))
    with pytest.raises(MissingExtra, match=r"extra pubsub of luminosity: pip install"):
        _planned(lambda pipeline: pipeline | beam.Create([b"a"]) | beam.io.WriteToPubSub(_TOPIC))


def _urns() -> list[str]:
    groups = [getattr(common_urns, name) for name in _OWN_URNS]
    return sorted({each.urn for group in groups for each in vars(group).values() if hasattr(each, "urn")})


@pytest.mark.parametrize("urn", [*_urns(), python_urns.PICKLED_TRANSFORM, "custom:transform:v1", ""])
def test_a_primitive_that_neither_the_loop_nor_a_worker_runs_is_refused(urn: str) -> None:
    """Otherwise its readers would get nothing, and the run would succeed."""
    pipeline = beam_runner_api_pb2.Pipeline()
    step = pipeline.components.transforms["step"]
    step.unique_name, step.spec.urn, step.outputs["out"] = "Step", urn, "numbers"
    pipeline.components.pcollections["numbers"].unique_name = "numbers"
    runs_in_worker = urn in bundle_processor.BeamTransformFactory._known_urns  # pyright: ignore[reportPrivateUsage]
    runs_in_loop = urn in MOVE_URNS | translations.KNOWN_COMPOSITES | {
        common_urns.primitives.IMPULSE.urn,
        common_urns.primitives.TEST_STREAM.urn,
    }
    if urn in support.RUNS:
        assert runs_in_worker or runs_in_loop
        support.check(pipeline)
    else:
        named = "a primitive of its own" if urn in ("", python_urns.PICKLED_TRANSFORM) else re.escape(urn)
        with pytest.raises(UnsupportedPipeline, match=rf"step 'Step' leaves its work to the runner \({named}\)"):
            support.check(pipeline)


def test_a_source_without_an_end_is_refused_as_a_primitive() -> None:
    pipeline = beam_runner_api_pb2.Pipeline()
    step = pipeline.components.transforms["step"]
    step.unique_name, step.spec.urn = "Step", common_urns.deprecated_primitives.READ.urn
    read = beam_runner_api_pb2.ReadPayload(is_bounded=beam_runner_api_pb2.IsBounded.UNBOUNDED)
    step.spec.payload = read.SerializeToString()
    with pytest.raises(UnsupportedPipeline, match=r"'Step'.*without an end"):
        support.check(pipeline)


def test_a_source_of_an_unknown_kind_is_refused_by_its_class() -> None:
    with pytest.raises(UnsupportedPipeline, match=r"Read \(.*_UnknownSource.*BoundedSource"):
        _planned(lambda pipeline: pipeline | beam.io.Read(_UnknownSource()))


def test_a_transform_without_steps_runs_only_if_it_returns_its_input(caplog: pytest.LogCaptureFixture) -> None:
    assert _planned(lambda pipeline: pipeline | beam.Create([1]) | _Unchanged() | beam.Map(str)) == 1
    with pytest.raises(UnsupportedPipeline, match=r"_NoStep \('Mine', at .*test_sources.py.*expand\(\)"):
        _planned(lambda pipeline: pipeline | beam.Create([1]) | "Mine" >> _NoStep() | beam.Map(str))
    with caplog.at_level(logging.WARNING):
        _planned(lambda pipeline: pipeline | beam.Create([1]) | "Sink" >> _ToNowhere())
    assert "'Sink': its expand() applied no step" in caplog.text


def test_an_expansion_service_that_does_not_answer_is_named() -> None:
    with pytest.raises(UnsupportedPipeline, match="localhost:1 does not answer; use a transform that is written in"):
        _planned(lambda pipeline: pipeline | beam.ExternalTransform("beam:other:v1", b"", "localhost:1"))
