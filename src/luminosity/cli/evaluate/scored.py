"""The models of ``lum evaluate``: an embedding model and a judge, whose scores become columns of the table."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from luminosity._shared.text import did_you_mean
from luminosity.cli.common.options import check_variable
from luminosity.cli.common.table_options import csv_arguments
from luminosity.errors import EvaluationError, OptionError, WriteError

if TYPE_CHECKING:
    from luminosity.evaluation.settings import Settings
    from luminosity.judging import Judge, ScoreTexts

__all__ = ["SHOWN_OF_MODELS", "add_model_options", "as_wrong_options", "check_metrics", "scored"]

SHOWN_OF_MODELS = ("embed", "judge", "rubric", "scale", "question")  # options that a report names

_OF_JUDGE = ("rubric", "scale", "question", "server", "server_key_env")  # options that need --judge
_SCORED = "scored.parquet"


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for models that score texts."""
    models = parser.add_argument_group("models that score texts, with --task texts")
    models.add_argument(
        "--embed", metavar="MODEL", help="add the cosine of vectors: a folder, a name on the hub, or module:object"
    )
    models.add_argument(
        "--judge",
        metavar="MODEL",
        help="add the scores of a judge: module:object, or what --server calls the model; with --prediction-b, it also "
        "says which text is better",
    )
    models.add_argument("--server", metavar="URL", help="a server with OpenAI's chat API, which knows --judge")
    models.add_argument("--server-key-env", metavar="VARIABLE", help="environment variable with the server's key")
    models.add_argument("--rubric", metavar="TEXT", help="what a good text is; @FILE reads it from a file")
    models.add_argument("--scale", choices=("1-5", "pass/fail"), help="of the judge (default: 1-5)")
    models.add_argument("--question", metavar="COLUMN", help="the questions, which the judge sees, too")
    models.add_argument(
        "--scored", metavar="OUT", help="also write the table with the scores, and with what the judge has said"
    )


@contextmanager
def scored(parsed: argparse.Namespace, settings: Settings) -> Generator[tuple[str, Settings]]:
    """Run the models over the table; yield the table with their scores and the settings that take them.

    Without models, yield the table as it is.
    """
    if parsed.embed is None and parsed.judge is None:
        given = next((name for name in (*_OF_JUDGE, "scored") if getattr(parsed, name) is not None), None)
        if given is not None:
            raise OptionError(f"found --{given.replace('_', '-')} without a model", fix="add --judge MODEL")
        yield parsed.table, settings
        return
    _check(parsed, settings)
    scores = _scores(parsed, settings)
    measures = scores.measures
    ours = {name: (*getattr(settings, name), *measures.get(name, ())) for name in ("measures", "measures_b")}
    with as_wrong_options():
        settings = replace(settings, **ours, preference=measures.get("preference", settings.preference))
        _check_table(parsed, settings, scores)
    with tempfile.TemporaryDirectory(prefix="lum-evaluate-") as folder:
        out = os.path.join(folder, _SCORED) if parsed.scored is None else parsed.scored
        _run(parsed, scores, out)
        yield out, settings


@contextmanager
def as_wrong_options() -> Generator[None]:
    """Within the context, raise errors as ``OptionError``: nothing has run yet, so the command line is wrong."""
    try:
        yield
    except (EvaluationError, WriteError) as error:
        raise OptionError(error.message, fix=error.fix) from None


def check_metrics(parsed: argparse.Namespace, names: Sequence[str]) -> None:
    """Raise unless these are the names of metrics that --at-least and --at-most have."""
    for option in ("at_least", "at_most"):
        for name, _ in getattr(parsed, option):
            if name not in names:
                raise OptionError(
                    f"--{option.replace('_', '-')}: found no metric {name!r}, expected one of {', '.join(names)}",
                    fix=did_you_mean(name, names) or None,
                )


def _check(parsed: argparse.Namespace, settings: Settings) -> None:
    for name in ("embed", "judge", "server", "scored"):
        if getattr(parsed, name) is not None and not getattr(parsed, name).strip():
            raise OptionError(f"--{name} is empty; perhaps a shell variable is not set")
    option = "--embed" if parsed.judge is None else "--judge"
    if settings.task != "texts":
        raise OptionError(f"found {option} without --task texts, expected both", fix="add --task texts")
    if parsed.dead_letters is not None:
        raise OptionError(f"found {option} and --dead-letters, expected one of them", fix="leave out --dead-letters")
    if parsed.judge is None and (given := next((n for n in _OF_JUDGE if getattr(parsed, n) is not None), None)):
        raise OptionError(f"found --{given.replace('_', '-')} without --judge, expected both", fix="add --judge MODEL")
    if parsed.judge is not None and parsed.rubric is None:
        raise OptionError("found --judge without --rubric, expected both", fix="add --rubric TEXT")
    if parsed.server_key_env is not None and parsed.server is None:
        raise OptionError("found --server-key-env without --server, expected both", fix="add --server URL")
    check_variable("--server-key-env", parsed.server_key_env)
    if parsed.judge is not None:
        _check_server(parsed.judge, parsed.server)
    if parsed.preference is not None and parsed.judge is not None and parsed.prediction_b is not None:
        raise OptionError("found --preference and --judge, which compares the texts itself, expected one of them")


def _check_server(judge: str, server: str | None) -> None:
    """Raise if the address of a server is not in --server, or has the name of a model."""
    url, sign, name = (judge if server is None else server).partition("#")
    if server is None and not judge.startswith("chat:") and "://" in judge:
        name = name or "MODEL"
        raise OptionError(
            f"--judge {judge}: found an address, expected the name of a model", fix=f"use --judge {name} --server {url}"
        )
    if server is not None and sign:
        raise OptionError(
            f"--server {server}: found '#' in the address, expected the name of the model in --judge",
            fix=f"use --judge {name or judge} --server {url}",
        )
    if server is None and ":" not in judge:
        raise OptionError(
            f"--judge {judge}: found no --server that knows the model, and no ':' of module:object",
            fix="add --server URL",
        )


def _check_table(parsed: argparse.Namespace, settings: Settings, scores: ScoreTexts) -> None:
    """Raise for what would fail only after the models have run over the table, which takes time or money."""
    import pyarrow as pa

    from luminosity import ReadTable, WriteTable
    from luminosity.evaluation.evaluate_table import check_table

    check_metrics(parsed, settings.text_metrics)
    (csv,) = csv_arguments(parsed, parsed.table)
    schema = ReadTable(parsed.table, **csv).schema
    scores.check(schema)
    schema = pa.schema([*schema, *scores.new_columns.items()])
    check_table(schema, settings)
    if parsed.scored is not None:
        WriteTable(parsed.scored).check(schema)


def _scores(parsed: argparse.Namespace, settings: Settings) -> ScoreTexts:
    """Return the transform that adds the scores. No model is loaded."""
    from luminosity import SentenceEmbedder
    from luminosity.inference.model_names import named_handler
    from luminosity.judging import ScoreTexts

    embedder: Any = None
    if parsed.embed is not None:
        is_name = ":" in parsed.embed and not os.path.exists(parsed.embed)
        embedder = named_handler(parsed.embed) if is_name else SentenceEmbedder(os.path.expanduser(parsed.embed))
    assert settings.prediction is not None, "checked by Settings"
    return ScoreTexts(
        settings.label,
        settings.prediction,
        prediction_b=settings.prediction_b,
        embedder=embedder,
        judge=None if parsed.judge is None else _judge(parsed),
        skip_missing=settings.skip_missing,
        seed=settings.seed,
    )


def _run(parsed: argparse.Namespace, scores: ScoreTexts, out: str) -> None:
    """Write the table with the scores to ``out``."""
    import apache_beam as beam
    from apache_beam.options.pipeline_options import PipelineOptions

    from luminosity import LuminosityRunner, ReadTable, WriteTable

    (csv,) = csv_arguments(parsed, parsed.table)
    pipeline = beam.Pipeline(runner=LuminosityRunner(), options=PipelineOptions([]))
    table = pipeline | "Read" >> ReadTable(parsed.table, **csv)
    _ = table | "Score" >> scores | "Write" >> WriteTable(out)
    pipeline.run().wait_until_finish()


def _judge(parsed: argparse.Namespace) -> Judge:
    from luminosity import HttpModelHandler
    from luminosity.inference.model_names import named_handler
    from luminosity.judging import Judge

    rubric: str = parsed.rubric
    if rubric.startswith("@"):
        try:
            with open(rubric[1:], encoding="utf-8") as file:
                rubric = file.read()
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(f"--rubric {rubric}: can't read the file: {error}") from None
    if parsed.server is None:
        handler = named_handler(parsed.judge)
    else:
        key = parsed.server_key_env
        handler = HttpModelHandler.chat(
            parsed.server, parsed.judge, parameters={"temperature": 0}, api_key_env=key, allow_incomplete=True
        )
    return Judge(handler, rubric, scale=parsed.scale or "1-5", question=parsed.question)
