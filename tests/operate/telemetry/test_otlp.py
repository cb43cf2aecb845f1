"""Tests of traces and metrics by OTLP, with a real collector on loopback."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from opentelemetry.proto.trace.v1.trace_pb2 import Status
from prometheus_client.parser import text_string_to_metric_families

from luminosity import HttpModelHandler, LuminosityRunner, RunInference
from luminosity.errors import MissingExtra, OptionError, StepFailed
from luminosity.events import (
    BundleRetried,
    BundleStalled,
    LogMessage,
    ModelLoaded,
    StallView,
    WorkerLost,
    WorkerStarted,
)
from luminosity.operate.prometheus.catalog import CATALOG
from luminosity.operate.prometheus.exporter import metrics_text
from luminosity.operate.telemetry.otlp_sender import OtlpSender
from luminosity.operate.telemetry.settings import TelemetrySettings
from luminosity.runs.recorder import Recorder
from tests.inference.handlers.model_server import Said, Seen, embeddings, serving
from tests.operate.exported_runs import STARTED_AT, ended, rich_events, run_id, snapshot, started
from tests.operate.telemetry.collector import Collector, attributes

SECRET = "row-value-4711"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with Collector() as found:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", found.address)
        yield found


def options(folder: Path, *more: str) -> PipelineOptions:
    given = ["--telemetry=otlp", "--cpu_workers=1", "--progress=off", f"--run_dir={folder}", "--job_name=squares"]
    return PipelineOptions([*given, *more])


def fails(value: str) -> str:
    raise ValueError(f"can't take {value}")


def test_a_run_sends_its_spans_and_the_metrics_that_prometheus_gets(
    collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team=reviews")
    monkeypatch.setenv("TRACEPARENT", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
    with beam.Pipeline(runner=LuminosityRunner(), options=options(tmp_path)) as pipeline:
        _ = pipeline | beam.Create(range(100)) | "Square" >> beam.Map(lambda n: n * n) | beam.Reshuffle()
    spans = collector.spans()
    (run,) = [span for span in spans if span.name == "run squares"]
    assert run.trace_id.hex() == "0af7651916cd43dd8448eb211c80319c"
    assert run.parent_span_id.hex() == "b7ad6b7169203331"
    assert {span.trace_id for span in spans} == {run.trace_id}
    assert attributes(run.attributes)["luminosity.state"] == "done"
    assert {span.status.code for span in spans} == {Status.STATUS_CODE_UNSET}
    stages = [span for span in spans if span.name.startswith("stage ")]
    assert {span.parent_span_id for span in stages} == {run.span_id}
    (stage,) = [span for span in stages if "Square" in attributes(span.attributes)["luminosity.steps"]]
    bundles = [span for span in spans if span.parent_span_id == stage.span_id]
    assert {span.name for span in bundles} == {"bundles"}
    for name in ("luminosity.bundles", "luminosity.elements"):
        assert sum(attributes(each.attributes)[name] for each in bundles) == attributes(stage.attributes)[name] > 0
    assert [attributes(span.attributes)["luminosity.pool"] for span in spans if span.name == "worker"] == ["cpu"]
    for span in spans:
        assert run.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= run.end_time_unix_nano

    by_prometheus = {family.name for family in text_string_to_metric_families(metrics_text(tmp_path))}
    sent = collector.metrics()
    assert sent.keys() == by_prometheus
    (state,) = [p for p in sent["luminosity_run_state"].gauge.data_points if p.as_double == 1]
    assert attributes(state.attributes) == {"pipeline": "squares", "folder": "", "state": "done"}
    assert {each["service.name"] for each in collector.resources()} == {"luminosity"}
    assert {headers["x-team"] for _, headers, _ in collector.requests} == {"reviews"}


def test_a_failed_run_has_an_error_without_the_value(collector: Collector, tmp_path: Path) -> None:
    with (
        pytest.raises(StepFailed, match=SECRET),
        beam.Pipeline(runner=LuminosityRunner(), options=options(tmp_path)) as pipeline,
    ):
        _ = pipeline | beam.Create([SECRET]) | "Fail" >> beam.Map(fails)
    spans = collector.spans()
    (run,) = [span for span in spans if span.name == "run squares"]
    assert run.status.code == Status.STATUS_CODE_ERROR
    assert run.status.message.startswith("step 'Fail' failed: ValueError (at ")
    (event,) = run.events
    found = attributes(event.attributes)
    assert (event.name, found["exception.type"], found["luminosity.step"]) == ("exception", "ValueError", "Fail")
    assert found["exception.stacktrace"].splitlines()[-1].endswith("in fails")
    stages = [span for span in spans if span.name.startswith("stage ") and span.status.code]
    assert [attributes(span.attributes)["luminosity.retries"] for span in stages] == [4]
    (bundles,) = [span for span in spans if span.parent_span_id == stages[0].span_id and span.status.code]
    assert {each.name for each in bundles.events} == {"exception"}
    (state,) = [p for p in collector.metrics()["luminosity_run_state"].gauge.data_points if p.as_double == 1]
    assert attributes(state.attributes)["state"] == "failed"
    assert not any(SECRET.encode() in body for _, _, body in collector.requests)


@pytest.mark.parametrize("status", [None, 401])
def test_a_collector_that_takes_nothing_is_told_once_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, status: int | None
) -> None:
    with Collector(status or 200) as found, socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # without a listener, connections are refused
        place = found.address if status else f"http://me:word@127.0.0.1:{nobody.getsockname()[1]}"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", place)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        with (
            caplog.at_level(logging.WARNING),
            beam.Pipeline(runner=LuminosityRunner(), options=options(tmp_path)) as pipeline,
        ):
            _ = pipeline | beam.Create(range(10)) | beam.Map(str)
        assert bool(found.requests) == bool(status)
    (told,) = [each.getMessage() for each in caplog.records if "opentelemetry" in each.name or "telemetry" in each.name]
    assert "127.0.0.1" in told
    assert ("401" if status else "refused") in told
    assert "word" not in told


def test_a_server_gets_the_trace_and_requests_are_counted(collector: Collector, tmp_path: Path) -> None:
    def busy_at_first(seen: Seen) -> Said:
        return Said(status=503) if seen.number == 0 else embeddings(seen)

    runner = LuminosityRunner()
    with serving(busy_at_first) as server, beam.Pipeline(runner=runner, options=options(tmp_path)) as pipeline:
        handler = HttpModelHandler.embeddings(server.url, "small")
        _ = pipeline | beam.Create(["a", "b"]) | RunInference(handler)
    (run,) = [span for span in collector.spans() if span.name == "run squares"]
    (told,) = {seen.headers["traceparent"] for seen in server.seen}
    version, *ids, flags = told.split("-")
    assert (version, ids, int(flags, 16) & 1) == ("00", [run.trace_id.hex(), run.span_id.hex()], 1), "it is sampled"
    found = [attributes(span.attributes) for span in collector.spans() if span.name == "bundles"]
    assert sum(each.get("luminosity.requests", 0) for each in found) == len(server.seen)
    assert sum(each.get("luminosity.requests_again", 0) for each in found) == 1
    assert sum(each.get("luminosity.inferences", 0) for each in found) == 2


def test_many_bundles_share_spans_and_nothing_is_left_out(collector: Collector, tmp_path: Path) -> None:
    sender, half_a_day, seen = OtlpSender(TelemetrySettings.of(), str(tmp_path)), 12 * 3600, snapshot(1, 0.0)
    sender(started(1))
    for second in range(5, half_a_day + 1, 5):
        views = (replace(each, status="busy", running=1, bundles=second * 100) for each in seen.stages)
        seen = replace(seen, seconds=float(second), stages=tuple(views))
        sender(seen)
    sender(replace(ended(1, float(half_a_day)), last=seen))
    for label in ("Read", 'Embed "x"\\y'):
        found = [attributes(span.attributes) for span in collector.spans() if span.name == "bundles"]
        counts = [each["luminosity.bundles"] for each in found if each["luminosity.stage"] == label]
        assert sum(counts) == half_a_day * 100
        assert 100 < len(counts) < 400


def test_what_happens_on_the_way_is_an_event_of_its_span(collector: Collector, tmp_path: Path) -> None:
    run, stall = run_id(1), StallView("Read", 70.0, worker="w2", pid=1)
    sender = OtlpSender(TelemetrySettings.of(), str(tmp_path))
    events = (
        WorkerStarted(run, 0.5, "w1", "cpu", 11),
        WorkerStarted(run, 0.5, "w2", "cpu", 12),
        snapshot(1, 1.0),
        BundleRetried(run, 1.5, "Read", f"ValueError: {SECRET}", 1, 9, f"ValueError: {SECRET}", "jobs.py:3"),
        WorkerLost(run, 2.0, "w1", "cpu", "was killed with --api_key=hunter22", bundles=3),
        BundleStalled(run, 3.0, f"does nothing with {SECRET}", stall, SECRET),
        ModelLoaded(run, 4.0, "Read", "embed:small", "w2", "gpu:0", 2.5, 90),
        LogMessage(run, 5.0, "warning", SECRET),
    )
    for event in (started(1), *events, ended(1, 10.0)):
        sender(event)
    spans = collector.spans()
    workers = {attributes(span.attributes)["luminosity.worker"]: span for span in spans if span.name == "worker"}
    assert workers["w1"].status.code == Status.STATUS_CODE_ERROR
    assert workers["w1"].end_time_unix_nano == int((STARTED_AT + 2.0) * 1e9)
    (lost,) = workers["w1"].events
    assert attributes(lost.attributes)["luminosity.bundles"] == 3
    assert workers["w2"].status.code == Status.STATUS_CODE_UNSET
    (stage,) = [span for span in spans if span.name == "stage Read"]
    assert [event.name for event in stage.events] == ["bundle stalled", "model loaded"]
    assert attributes(stage.events[0].attributes)["luminosity.worker"] == "w2"
    (failed,) = [span for span in spans if span.name == "bundles" and span.status.code == Status.STATUS_CODE_ERROR]
    (retried,) = failed.events
    found = attributes(retried.attributes)
    assert (found["exception.type"], found["luminosity.tries"]) == ("ValueError", 1)
    sent = b"".join(body for _, _, body in collector.requests)
    assert SECRET.encode() not in sent
    assert b"hunter22" not in sent


def test_metrics_are_those_of_prometheus(collector: Collector, tmp_path: Path) -> None:
    """A made-up run has every metric of a run."""
    record, sender = Recorder(tmp_path), OtlpSender(TelemetrySettings.of(), str(tmp_path))
    for event in rich_events(2):
        record(event)
        sender(event)
    expected: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for family in text_string_to_metric_families(metrics_text(tmp_path)):
        for sample in family.samples:
            if sample.labels.get("what") is None:
                expected[sample.name, frozenset(sample.labels.items())] = sample.value
    found: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for name, metric in collector.metrics().items():
        assert metric.description == CATALOG[name].meaning
        for point in metric.histogram.data_points:
            labels = frozenset(attributes(point.attributes).items())
            found[f"{name}_sum", labels], found[f"{name}_count", labels] = point.sum, point.count
        for point in (*metric.gauge.data_points, *metric.sum.data_points):
            labels = frozenset(attributes(point.attributes).items())
            found[f"{name}_total" if metric.sum.data_points else name, labels] = point.as_double
            if metric.sum.data_points:
                assert (metric.sum.is_monotonic, point.start_time_unix_nano) == (True, int(STARTED_AT * 1e9))
    found = {key: value for key, value in found.items() if key[0] != "luminosity_export_left_out"}
    assert found == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
        ("OTEL_TRACES_EXPORTER", "zipkin"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "soon"),
    ],
)
def test_settings_that_cannot_hold_are_refused(name: str, value: str) -> None:
    with pytest.raises(OptionError, match=f"{name}={value}: expected"):
        TelemetrySettings.of({name: value})


def test_a_missing_library_is_named_before_the_run_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    pipeline = beam.Pipeline(runner=LuminosityRunner(), options=options(tmp_path))
    _ = pipeline | beam.Create([1])
    with pytest.raises(MissingExtra, match="pip install"):
        pipeline.run()
    assert not list(tmp_path.iterdir()), "no record of a run"
