"""The same pipeline with its model in the workers, and with its model on a server.

A model that many pipelines need, or that needs its own machine, runs on a server. Only the handler changes:
SentenceEmbedder computes in the worker, HttpModelHandler sends requests, with retries, many at once, and as many texts
in each as fit. The server is `lum serve`, which this script starts on this machine and stops again; any server with
OpenAI's API would do::

    lum run examples/talks/remote_model.py
    lum run examples/talks/remote_model.py --url=http://gpu-1:8000 --name=all-MiniLM-L6-v2
    python examples/talks/remote_model.py --runner=FnApiRunner

At the end, the vectors of both are compared.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import apache_beam as beam
import numpy as np
import numpy.typing as npt
from _models import MINILM
from _reviews import reviews
from apache_beam.ml.inference.base import KeyedModelHandler, ModelHandler, PredictionResult
from apache_beam.options.pipeline_options import PipelineOptions

from luminosity import HttpModelHandler, RunInference, SentenceEmbedder

START_S = 120
STOP_S = 20


@contextlib.contextmanager
def server(name: str) -> Generator[str]:
    """Start `lum serve`, yield its address when the model is loaded, and stop it at the end."""
    command = [sys.executable, "-m", "luminosity.cli.main", "serve", f"embed:{MINILM}", "--name", name, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    give_up = threading.Timer(START_S, process.kill)
    give_up.start()
    try:
        assert process.stdout is not None
        first_line = process.stdout.readline()
        give_up.cancel()
        if " at " not in first_line:
            sys.exit("lum serve did not start")
        yield first_line.rpartition(" at ")[2].strip()
    finally:
        give_up.cancel()
        process.terminate()
        process.wait(STOP_S)


def write_vectors(results: list[tuple[int, PredictionResult]], path: str) -> None:
    vectors: list[Any] = [result.inference for _, result in sorted(results, key=lambda pair: pair[0])]
    np.save(path, np.stack(vectors))


def embed(
    handler: ModelHandler[str, Any, Any], texts: Sequence[str], beam_args: Sequence[str]
) -> npt.NDArray[np.float32]:
    """Run the pipeline, which does not depend on where the model is."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vectors.npy"
        with beam.Pipeline(options=PipelineOptions(beam_args)) as pipeline:
            _ = (
                pipeline
                | "Reviews" >> beam.Create(list(enumerate(texts)))
                | "Embed" >> RunInference(KeyedModelHandler(handler))
                | "Gather" >> beam.combiners.ToList()
                | "Write" >> beam.Map(write_vectors, str(path))
            )
        return np.load(path)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Embed reviews here and on a server.", allow_abbrev=False)
    parser.add_argument("--rows", type=int, default=100, help="reviews to embed (default: 100)")
    parser.add_argument("--url", help="a server that is already running (default: start one)")
    parser.add_argument("--name", default="minilm", help="the server's name of the model (default: minilm)")
    arguments, beam_args = parser.parse_known_args(argv)

    texts = [text for text, _ in reviews("rotten_tomatoes", arguments.rows)]
    start = time.monotonic()
    here = embed(SentenceEmbedder(MINILM), texts, beam_args)
    print(f"local   {len(here)} vectors of {here.shape[1]} numbers in {time.monotonic() - start:.1f} s")
    with contextlib.nullcontext(arguments.url) if arguments.url else server(arguments.name) as url:
        start = time.monotonic()
        there = embed(HttpModelHandler.embeddings(url, arguments.name), texts, beam_args)
    print(f"remote  {len(there)} vectors of {there.shape[1]} numbers in {time.monotonic() - start:.1f} s")
    print(f"The largest difference between two numbers is {np.abs(here - there).max():.1g}.")


if __name__ == "__main__":
    main()
