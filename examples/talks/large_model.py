"""`large_model=True`: one copy of a model for all workers of a machine.

By default, each CPU worker loads its own copy of a model. This is fastest if the copies fit into memory. If they don't,
`large_model=True` loads one copy in a process that all workers use. Here a sentence encoder of 90 MB stands for a large
model. The same reviews go through it both ways, and Beam's own metrics count how often it was loaded::

    lum run examples/talks/large_model.py --cpu_workers=2
    python examples/talks/large_model.py --runner=FnApiRunner \\
        --direct_num_workers=2 --direct_running_mode=multi_processing

On an accelerator the option has no effect: one process holds the model in any case.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import apache_beam as beam
from _models import MINILM
from _reviews import reviews
from apache_beam.metrics.metric import MetricsFilter
from apache_beam.options.pipeline_options import PipelineOptions

from luminosity import RunInference, SentenceEmbedder


def copies_loaded(texts: Sequence[str], is_large: bool, beam_args: Sequence[str]) -> int:
    pipeline = beam.Pipeline(options=PipelineOptions(beam_args))
    _ = (
        pipeline
        | "Reviews" >> beam.Create(texts)
        | "Spread" >> beam.Reshuffle()
        | "Embed" >> RunInference(SentenceEmbedder(MINILM, max_length=64, large_model=is_large))
    )
    result = pipeline.run()
    result.wait_until_finish()
    loads = MetricsFilter().with_name("load_model_latency_milli_secs")
    return sum(found.committed.count for found in result.metrics().query(loads)["distributions"])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Load a model once, or once per worker.", allow_abbrev=False)
    parser.add_argument("--rows", type=int, default=100, help="reviews to embed (default: 100)")
    arguments, beam_args = parser.parse_known_args(argv)

    texts = [text for text, _ in reviews("rotten_tomatoes", arguments.rows)]
    for is_large in (False, True):
        copies = copies_loaded(texts, is_large, beam_args)
        print(f"large_model={is_large!s:5}  {len(texts)} reviews embedded, copies of the model loaded: {copies}")


if __name__ == "__main__":
    main()
