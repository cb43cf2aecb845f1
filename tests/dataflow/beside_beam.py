"""Describes one pipeline twice, as a job of Dataflow: with Beam's own runner, and with this package.

Needs the libraries of ``apache-beam[gcp]``, which Beam's runner imports. Both work without a network: Beam writes a
template to a local file. Prints both jobs, and the environments of all steps of both pipelines, as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.portability.api import beam_runner_api_pb2

from luminosity import Handler, RunInference
from luminosity.dataflow.check import check_job
from luminosity.dataflow.job import captured_pipelines

ACCELERATOR = "type:nvidia-l4;count:1;install-nvidia-driver"


class Lengths(Handler[str, int, object]):
    """A small model."""

    def load_model(self) -> object:
        return object()

    def predict(self, model: object, batch: list[str], inference_args: dict[str, Any] | None = None) -> list[int]:
        return [len(text) for text in batch]


def run(options: PipelineOptions) -> None:
    pipeline = beam.Pipeline(options=options)
    texts = pipeline | "Texts" >> beam.Create(["a", "b"])
    found = texts | "Model" >> RunInference(Lengths()).with_resource_hints(accelerator=ACCELERATOR)
    total = found | "Number" >> beam.Map(lambda one: one.inference) | "Sum" >> beam.CombineGlobally(sum)
    side = beam.pvalue.AsSingleton(total)
    pairs = texts | "Pair" >> beam.Map(lambda text, total: (text, total), side).with_resource_hints(min_ram="4GB")
    _ = pairs | "Group" >> beam.GroupByKey() | "Print" >> beam.Map(print)
    pipeline.run()


def environments(serialized: bytes) -> dict[str, Any]:
    """Return the container, the hints and the capabilities of each step."""
    components = beam_runner_api_pb2.Pipeline.FromString(serialized).components
    found: dict[str, Any] = {}
    for transform in components.transforms.values():
        if transform.environment_id:
            environment = components.environments[transform.environment_id]
            image = beam_runner_api_pb2.DockerPayload.FromString(environment.payload).container_image
            hints = {urn: value.decode() for urn, value in sorted(environment.resource_hints.items())}
            found[transform.unique_name] = [image, hints, sorted(environment.capabilities), transform.environment_id]
    return found


def main(folder: Path) -> None:
    flags = [
        "--runner=DataflowRunner",
        "--project=shop-1",
        "--region=europe-west4",
        "--temp_location=gs://shop/temp",
        f"--staging_location={folder / 'staged'}",
        "--job_name=reviews",
        "--sdk_container_image=registry.example/shop:1",
        "--machine_type=g2-standard-8",
        "--max_num_workers=9",
        "--labels=team=shop",
        "--dataflow_service_options=enable_prime",
        "--dataflow_endpoint=http://localhost:1",  # so that Beam accepts a local folder; nothing is sent
        "--no_auth",
        *sys.argv[2:],
    ]
    (folder / "staged").mkdir()
    template = folder / "template.json"
    run(PipelineOptions([*flags, f"--template_location={template}"]))
    with captured_pipelines() as captured:
        run(PipelineOptions(flags))
    job = check_job(captured[0], "reviews.py", flags)
    print(
        json.dumps(
            {
                "beam": json.loads(template.read_text()),
                "ours": job.job,
                "environments of beam": environments((folder / "staged" / "pipeline.pb").read_bytes()),
                "environments of ours": environments(job.pipeline),
            },
            default=str,
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
