"""Ask questions about reviews, and get answers with citations.

::

    python examples/reviews/ask.py "What do people say about the landscapes?"
    python examples/reviews/ask.py --store=enriched/store "Is it scary?" --filter=source=imdb
    python examples/reviews/ask.py --measure=200

Without ``--store``, a store of some reviews is made first; ``pipeline.py --out=enriched`` makes a larger one. The
models come from Python packages and run on the CPU, offline; ``--server`` and ``--model`` name a better one. It is
plain Beam and runs on any runner. Options that ``--help`` does not list go to Beam.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import apache_beam as beam
import dataset
import pyarrow as pa
from apache_beam.options.pipeline_options import PipelineOptions
from cleaning import clean
from pipeline import COLLECTION, MOST_TOKENS, embedder_path

from luminosity import Column, Enrich, HttpModelHandler, MapTable, SentenceEmbedder, WriteQdrant
from luminosity.answering import Answer, Answerer, Ask

ROWS = 300
QUESTIONS = ["What do people say about the landscapes?", "Is there a film with a surprising ending?"]
COLUMNS = ["source", "label"]
RAREST, MOST_FREQUENT = 2, 0.02  # words of a question: in at least two reviews, and in at most 2% of them


def make_store(store: Path, rows: int, beam_args: Sequence[str]) -> None:
    """Embed some reviews and write them to a store."""
    reviews = dataset.load(rows, 0).shown
    embedder = SentenceEmbedder(embedder_path(), max_length=MOST_TOKENS, normalize=True)
    with beam.Pipeline(options=PipelineOptions(list(beam_args))) as pipeline:
        _ = (
            pipeline
            | beam.Create(reviews.to_batches())
            | MapTable(clean)
            | Enrich(semantic=Column(embedder, "text"))
            | WriteQdrant(store, COLLECTION, vectors={"semantic": "semantic"})
        )


def ask(store: Path, questions: Sequence[str], options: dict[str, Any], out: Path, beam_args: Sequence[str]) -> None:
    """Answer questions in a pipeline, and write the answers as JSON lines."""
    embed = {"semantic": SentenceEmbedder(embedder_path(), max_length=MOST_TOKENS, normalize=True)}
    with beam.Pipeline(options=PipelineOptions(list(beam_args))) as pipeline:
        _ = (
            pipeline
            | beam.Create(questions)
            | Ask(store, COLLECTION, embed=embed, columns=COLUMNS, **options)
            | beam.Map(_as_json)
            | beam.io.WriteToText(str(out), num_shards=1, shard_name_template="")
        )


def questions_from(reviews: Sequence[str], count: int) -> list[str]:
    """Return questions made from reviews: each is about the two rarest words of a review that another one has, too."""
    words = [set(re.findall(r"[a-z]{5,12}", review.lower())) for review in reviews]
    often = Counter(word for each in words for word in each)
    most = max(RAREST, MOST_FREQUENT * len(reviews))
    questions: list[str] = []
    for each in words:
        rare = sorted((often[word], word) for word in each if RAREST <= often[word] <= most)[:2]
        if len(rare) == 2:
            questions.append(f"What do the reviews say about {rare[0][1]} and {rare[1][1]}?")
        if len(questions) == count:
            break
    return questions


def measure(store: Path, count: int, rows: int, options: dict[str, Any]) -> Iterator[Answer]:
    """Answer questions made from the store's reviews, in this process, and print the shares after each batch."""
    reviews = dataset.load(rows, 0).shown
    texts = clean(pa.RecordBatch.from_pydict({"text": reviews["text"].to_pylist()})).column("text").to_pylist()
    embed = {"semantic": SentenceEmbedder(embedder_path(), max_length=MOST_TOKENS, normalize=True)}
    total: Counter[str] = Counter()
    began = time.monotonic()
    with Answerer(store, COLLECTION, embed=embed, columns=COLUMNS, **options) as answerer:
        for answer in answerer.answers(questions_from(texts, count)):
            numbers = {row.number for row in answer.rows}
            total["questions"] += 1
            total[answer.outcome] += 1
            total["citations_shown"] += len(answer.citations)
            total["resolved"] += sum(number in numbers for number in answer.citations)
            total["citations_removed"] += answer.citations_removed
            total["citations_unsupported"] += answer.citations_unsupported
            total["all_resolve"] += answer.is_answered and set(answer.citations) == numbers
            yield answer
            print(json.dumps({**total, "seconds": round(time.monotonic() - began)}), flush=True)


def _as_json(answer: Answer) -> str:
    return json.dumps(answer.as_dict())


def _filters(texts: Sequence[str]) -> dict[str, Any]:
    pairs = (text.partition("=") for text in texts)
    return {name: int(value) if value.isdigit() else value for name, _, value in pairs}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Ask questions about movie reviews.", allow_abbrev=False)
    parser.add_argument("questions", nargs="*", help="questions (default: two examples)")
    parser.add_argument("--store", type=Path, help="a store that pipeline.py wrote (default: a new one)")
    parser.add_argument("--rows", type=int, default=ROWS, help=f"reviews of a new store (default: {ROWS})")
    parser.add_argument("--filter", action="append", default=[], help="a column's value: source=imdb, label=1")
    parser.add_argument("--k", type=int, default=4, help="reviews in a prompt (default: 4)")
    parser.add_argument("--server", help="a server with OpenAI's chat API (default: a small model of a package)")
    parser.add_argument("--model", default="default", help="the server's name of the model")
    parser.add_argument("--quotes", action="store_true", help="quote reviews if the model cites none")
    parser.add_argument("--out", type=Path, help="file for the answers as JSON lines")
    parser.add_argument("--measure", type=int, help="ask this many questions made from the reviews, and count")
    arguments, beam_args = parser.parse_known_args(sys.argv[1:] if argv is None else argv)

    store = arguments.store or Path(tempfile.mkdtemp(prefix="reviews-")) / "store"
    if arguments.store is None:
        make_store(store, arguments.rows, beam_args)
        print(f"store  {store}")
    options: dict[str, Any] = {
        "k": arguments.k,
        "context_tokens": 70 * arguments.k,
        "most_bullets": 3,
        "most_follow_ups": 2,
        "quotes": arguments.quotes,
        "filters": _filters(arguments.filter),
    }
    if arguments.server:
        options["generator"] = HttpModelHandler.chat(arguments.server, arguments.model)
    out = arguments.out or store.parent / "answers.jsonl"
    if arguments.measure:
        with out.open("w") as file:
            for answer in measure(store, arguments.measure, arguments.rows, options):
                file.write(_as_json(answer) + "\n")
                file.flush()
        return
    ask(store, arguments.questions or QUESTIONS, options, out, beam_args)
    for line in out.read_text().splitlines():
        answer = json.loads(line)
        print(f"\n{answer['question']}\n{answer['text']}")


if __name__ == "__main__":
    main()
