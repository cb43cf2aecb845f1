"""The job that Dataflow would get: environments, hints and accelerators of the right steps, and what is wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apache_beam as beam
import pyarrow as pa
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.portability.api import beam_runner_api_pb2
from apache_beam.transforms.periodicsequence import PeriodicImpulse

from luminosity import Column, Enrich, Handler, ReadTable, RunInference
from luminosity.dataflow.check import CheckedJob, check_hints, check_job
from luminosity.dataflow.job import captured_pipelines, default_image
from luminosity.dataflow.need_checks import check_needs
from luminosity.dataflow.steps import Step
from luminosity.runs.manifest.places import Effects

_ACCELERATOR = "type:nvidia-l4;count:1;install-nvidia-driver"
_URN = "beam:resources:{}:v1"
_IMAGE = "registry.example/shop:1"
_OPTIONS = (
    "--runner=DataflowRunner",
    "--project=shop-1",
    "--region=europe-west4",
    "--temp_location=gs://shop/temp",
    "--job_name=reviews",
)
_OWN_IMAGE = f"--sdk_container_image={_IMAGE}"


class Lengths(Handler[str, int, object]):
    """A model that can use a GPU."""

    accelerators = ("gpu",)

    def __init__(self, *paths: str) -> None:
        super().__init__()
        self._paths = paths

    def load_model(self) -> object:
        return object()

    def predict(self, model: object, batch: list[str], inference_args: dict[str, Any] | None = None) -> list[int]:
        return [len(text) for text in batch]


def check(build: Callable[[beam.Pipeline], Any], *flags: str, options: Any = None) -> CheckedJob:
    """Return the job that a script would send that makes its pipeline with ``build``."""
    words = [*_OPTIONS, *flags]
    with captured_pipelines() as captured:
        pipeline = beam.Pipeline(options=PipelineOptions(words) if options is None else options)
        build(pipeline)
        assert pipeline.run().wait_until_finish() == "DONE"
    (one,) = captured
    return check_job(one, "pipeline.py", words)


def step(accelerator: str = "", image: str = _IMAGE) -> Step:
    hints = {_URN.format("accelerator"): accelerator.encode()} if accelerator else {}
    return Step("Model", "e", image, hints, "", frozenset(), {})


def numbers(pipeline: beam.Pipeline) -> beam.PCollection[int]:
    return pipeline | "Create" >> beam.Create([1, 2], reshuffle=False)


def messages(job: CheckedJob, *, errors: bool = True) -> str:
    return "\n".join(f"{each.steps} {each.message}" for each in job.findings if each.is_error == errors)


def test_hints_and_container_are_those_of_each_step() -> None:
    """Hints of a composite count for its steps, and the largest RAM wins; the same hints are the same environment."""

    class Heavy(beam.PTransform[Any, Any]):
        def expand(self, input_or_inputs: Any) -> Any:
            small = input_or_inputs | "Small" >> beam.Map(str).with_resource_hints(min_ram="1GB")
            return small | "Model" >> beam.Map(len).with_resource_hints(accelerator=_ACCELERATOR)

    def build(pipeline: beam.Pipeline) -> None:
        heavy = numbers(pipeline) | "Heavy" >> Heavy().with_resource_hints(min_ram="4GB")
        also = heavy | "Other" >> beam.Map(str).with_resource_hints(min_ram="4GB")
        _ = also | "Key" >> beam.Map(lambda text: (0, text)) | "Group" >> beam.GroupByKey() | "Last" >> beam.Map(print)

    job = check(build, _OWN_IMAGE)
    proto = beam_runner_api_pb2.Pipeline.FromString(job.pipeline)
    environments = proto.components.environments
    hints = {
        transform.unique_name: dict(environments[transform.environment_id].resource_hints)
        for transform in proto.components.transforms.values()
        if transform.environment_id and not transform.subtransforms
    }
    ram = {_URN.format("min_ram_bytes"): b"4000000000"}
    assert hints["Heavy/Small"] == hints["Other"] == ram
    assert hints["Heavy/Model"] == {**ram, _URN.format("accelerator"): _ACCELERATOR.encode()}
    assert hints["Key"] == hints["Last"] == {}
    used = {each.environment_id for each in proto.components.transforms.values() if each.environment_id}
    assert len(used) == len({str(sorted(each.items())) for each in hints.values()}) == 3

    assert job.job is not None
    (pool,) = job.job["environment"]["workerPools"]
    assert {each["environmentId"] for each in pool["sdkHarnessContainerImages"]} == used
    assert {each["containerImage"] for each in pool["sdkHarnessContainerImages"]} == {_IMAGE}
    for identity in used:
        payload = beam_runner_api_pb2.DockerPayload.FromString(environments[identity].payload)
        assert payload.container_image == _IMAGE
    assert not job.findings


def test_the_job_has_the_fields_of_its_options() -> None:
    service = f"--dataflow_service_options=worker_accelerator={_ACCELERATOR}"
    options = [_OWN_IMAGE, service, "--machine_type=g2-standard-8", "--num_workers=2", "--max_num_workers=9"]
    job = check(numbers, *options, "--labels=team=shop", "--experiments=no_use_multiple_sdk_containers", "--mine=7")
    body = job.job
    assert body is not None
    assert (body["name"], body["type"], body["projectId"]) == ("reviews", "JOB_TYPE_BATCH", "shop-1")
    assert (body["location"], body["labels"]) == ("europe-west4", {"team": "shop"})
    environment = body["environment"]
    assert environment["serviceOptions"] == [f"worker_accelerator={_ACCELERATOR}"]
    assert {"use_runner_v2", "no_use_multiple_sdk_containers"} <= set(environment["experiments"])
    assert "use_multiple_sdk_containers" not in environment["experiments"]
    assert environment["version"] == {"job_type": "FNAPI_BATCH", "major": "8"}
    assert environment["tempStoragePrefix"] == "storage.googleapis.com/shop/temp/reviews"
    (pool,) = environment["workerPools"]
    assert (pool["machineType"], pool["numWorkers"], pool["workerHarnessContainerImage"]) == (
        "g2-standard-8",
        2,
        _IMAGE,
    )
    assert pool["autoscalingSettings"] == {"maxNumWorkers": 9}
    sent = environment["sdkPipelineOptions"]["options"]
    assert sent["pipelineUrl"] == "gs://shop/temp/reviews/pipeline.pb"
    assert sent["mine"] == "7", "options of the script reach the workers"
    assert not job.findings
    assert job == check(
        numbers, *options, "--labels=team=shop", "--experiments=no_use_multiple_sdk_containers", "--mine=7"
    )


@pytest.mark.parametrize(
    ("hint", "flags", "expected"),
    [
        ("count:1", [], ["has no type of accelerator"]),
        ("type:any;count:1;install-nvidia-driver", [], ["has no type of accelerator"]),
        ("type:nvidia-l4;count:1", [], ["does not ask for NVIDIA's driver"]),
        ("type:nvidia-l4;install-nvidia-driver", [], ["has no count"]),
        (_ACCELERATOR, ["--machine_type=n1-standard-4"], ["does not fit the machine type n1-standard-4"]),
        (f"{_ACCELERATOR};machine_type:g2-standard-4", ["--machine_type=n1-standard-4"], []),
        (_ACCELERATOR, [f"--dataflow_service_options=worker_accelerator={_ACCELERATOR}"], ["wants one or the other"]),
        (_ACCELERATOR, ["--flexrs_goal=COST_OPTIMIZED"], ["does not support both"]),
        ("type:tpu-v5-lite-podslice;topology:2x4;count:8", [], []),
    ],
)
def test_accelerators_are_written_as_dataflow_reads_them(hint: str, flags: list[str], expected: list[str]) -> None:
    found = list(check_hints([step(hint)], PipelineOptions(flags)))
    assert [each.is_error for each in found] == [True] * len(expected)
    for finding, words in zip(found, expected, strict=True):
        assert words in finding.message
        assert finding.steps == ("Model",)


def test_hints_that_dataflow_does_not_read() -> None:
    def build(pipeline: beam.Pipeline) -> None:
        many = beam.Map(str).with_resource_hints(cpu_count="4", max_active_bundles_per_worker="2")
        _ = numbers(pipeline) | "Many" >> many
        old = beam.Map(str).with_resource_hints(python_environment=sys.prefix)
        _ = pipeline | "C" >> beam.Create([1]) | "Old" >> old
        _ = pipeline | "D" >> beam.Create([1]) | "Off" >> beam.Map(str).with_resource_hints(accelerator="count:0")

    job = check(build, _OWN_IMAGE)
    assert messages(job).startswith(f"('Old',) the hint python_environment={sys.prefix} names a folder of this machine")
    warnings = messages(job, errors=False)
    assert "('Many',) the hint cpu_count=4 has no effect" in warnings
    assert "('Many',) the hint max_active_bundles_per_worker=2 has no effect" in warnings
    assert "('Off',) the hint accelerator='count:0' keeps a model on the CPU here" in warnings


def test_models_get_no_accelerator_by_themselves() -> None:
    """A limit of bundles that RunInference sets itself is not the user's: it is no finding."""

    def build(pipeline: beam.Pipeline) -> None:
        texts = pipeline | beam.Create(["a"], reshuffle=False)
        _ = texts | "Without" >> RunInference(Lengths())
        _ = texts | "With" >> RunInference(Lengths()).with_resource_hints(accelerator=_ACCELERATOR)

    job = check(build, _OWN_IMAGE)
    assert not job.has_errors
    without, several = job.findings
    assert "on Dataflow they run on the CPU" in without.message
    assert without.steps == ("Without/Infer",)
    assert "a Python process for each core" in several.message
    assert several.steps == ("With/Infer",)
    assert not check(build, _OWN_IMAGE, "--experiments=no_use_multiple_sdk_containers").findings[1:]


def test_what_workers_do_not_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (model := tmp_path / "model").mkdir()
    (tmp_path / "in.csv").write_text("text\na\n")

    def build(pipeline: beam.Pipeline) -> None:
        table = pipeline | "Read" >> ReadTable("in.csv")
        done = table | "Enrich" >> Enrich(length=Column(Lengths(str(model)), "text", pa.int64()))
        _ = done | "Send" >> beam.Map(print, "http://localhost:8080/v1", "kafka.example:9092", "text/plain", "/v1")
        _ = done | "Lines" >> beam.Map(str) | "Write" >> beam.io.WriteToText("lines")

    job = check(build)
    errors = messages(job)
    assert "these steps need Luminosity" in errors
    assert f"import {__name__} from this machine" in errors
    assert "('Send',) these steps connect to a server on this machine (localhost)" in errors
    assert f"('Read',) reads {tmp_path / 'in.csv'}" in errors
    assert f"('Write',) writes to {tmp_path / 'lines'}-*-of-*" in errors
    (path,) = [each.message for each in job.findings if "found the path" in each.message]
    assert str(model) in path

    errors = messages(check(build, _OWN_IMAGE))
    assert "Luminosity" not in errors
    assert __name__ not in errors
    assert f"('Read',) reads {tmp_path / 'in.csv'}" in errors, "an image has no data"


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (default_image(), ""),
        (f"apache/beam_python3.7_sdk:{beam.__version__}", "says Python 3.7"),
        ("registry.example/shop-python3.7", "says Python 3.7"),
        (default_image().rpartition(":")[0] + ":2.30.0", "has Beam 2.30.0"),
    ],
)
def test_the_image_has_this_python_and_this_beam(image: str, expected: str) -> None:
    found = list(check_needs([step(image=image)], Effects(), PipelineOptions([])))
    assert [each.is_error for each in found] == [True] * bool(expected)
    assert expected in "".join(each.message for each in found)


def test_a_stream_is_one_without_being_told() -> None:
    def build(pipeline: beam.Pipeline) -> None:
        _ = pipeline | PeriodicImpulse() | "Big" >> beam.Map(str).with_resource_hints(min_ram="4GB")

    job = check(build, _OWN_IMAGE)
    assert (job.is_streaming, job.has_errors) == (True, False)
    assert "without --streaming" in messages(job, errors=False)
    assert job.job is not None
    assert job.job["type"] == "JOB_TYPE_STREAMING"
    assert "enable_streaming_engine" in job.job["environment"]["experiments"]
    job = check(build, _OWN_IMAGE, "--streaming", "--autoscaling_algorithm=NONE")
    assert "without autoscaling" in messages(job)
    assert not messages(job, errors=False)


def test_options_that_are_missing_wrong_or_without_effect() -> None:
    job = check(numbers, options=PipelineOptions([]))
    assert job.job is None
    errors = messages(job)
    for words in ("did not reach the pipeline", "no --project", "no --region", "no --temp_location"):
        assert words in errors
    assert "names the runner" in messages(job, errors=False)
    job = check(
        numbers, "--project=17", "--temp_location=/tmp/x", "--job_name=Reviews", "--cpu_workers=2", "--model_threads=3"
    )
    errors = messages(job)
    for words in ("--project=17 is not an id", "--temp_location=/tmp/x is not a folder", "--job_name=Reviews is not"):
        assert words in errors
    warnings = messages(job, errors=False)
    assert "--cpu_workers is an option of LuminosityRunner" in warnings
    assert "model_threads" not in warnings, "options of models work on every runner"
