"""A script that copies messages from a subscription to a topic, each once by its id, until it is ended."""

from __future__ import annotations

import os
import sys
from typing import Any

import apache_beam as beam
from apache_beam.io.gcp.pubsub import PubsubMessage
from apache_beam.options.pipeline_options import PipelineOptions

from tests.marks import note


def _note_worker(message: Any, at_work: str) -> Any:
    note(at_work, os.getpid())
    return message


def main(subscription: str, topic: str, at_work: str, *options: str) -> None:
    words = ["--runner=luminosity.LuminosityRunner", "--streaming", "--progress=off", "--cpu_workers=2", *options]
    with beam.Pipeline(options=PipelineOptions(list(words))) as pipeline:
        read = beam.io.ReadFromPubSub(subscription=subscription, id_label="id", with_attributes=True)
        noted = pipeline | read | beam.Map(_note_worker, at_work).with_output_types(PubsubMessage)
        write = beam.io.WriteToPubSub(topic, with_attributes=True, publish_with_ordering_key=True)
        _ = noted | "Write" >> write


if __name__ == "__main__":
    main(*sys.argv[1:])
