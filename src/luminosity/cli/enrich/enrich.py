"""The command line of ``lum enrich``: its options, and how the command ends."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from luminosity._shared.text import did_you_mean
from luminosity.beam_fixes.lean_beam import import_beam
from luminosity.cli.common.exits import FAILED, WRONG_USE, cancel_runs, fail
from luminosity.cli.common.options import HelpFormatter, count
from luminosity.cli.common.table_options import add_csv_options
from luminosity.cli.enrich.columns import DEFAULT_SUFFIXES, METAVARS, parse_request
from luminosity.cli.enrich.prompts import add_prompt_options, prompt_requests
from luminosity.engine.reporting.run_names import RunName
from luminosity.engine.workers.launcher import warm_up
from luminosity.errors import LuminosityError, OptionError, RunFailed

__all__ = ["add_to", "enrich"]

_SHOWN_ROWS = 5  # by --show without a number

_DESCRIPTION = """\
Read a table, add a column to it for each model, and write the result.

Tables are Parquet, JSON lines, CSV, TSV or Arrow files, one or many, on any file
system that Beam knows; their names tell the format. A model is a folder, an
address, or a name on the Hugging Face hub. Models run on an accelerator if the
machine has one.
"""
_EPILOG = """\
OUT has the rows of IN in another order: workers finish batches in any order,
and none waits for another. If the order matters, keep a column with an id, and
sort OUT by it.

All other options starting with -- go to the runner: --cpu_workers=4,
--progress=plain and the others that `lum run --help` lists.

examples:
  lum enrich in.parquet out.parquet --embed text=models/minilm
                        add the column text_embedding
  lum enrich 'in/*.jsonl.gz' out --embed title_vector:title=models/minilm \\
      --embed text=models/minilm --classify mood:text=models/sentiment
                        add title_vector, text_embedding and mood
  lum enrich photos/ out.parquet --embed-images path=models/clip
                        add vectors of the images in a folder
  lum enrich in.csv out.parquet --model score:age,income=my_models:handler
                        run any model handler, here one from my_models.py
  lum enrich in.parquet out.parquet --prompt 'label=Classify: {text}' \\
      --returns 'label=good|bad' --prompt-model http://localhost:8000#llama
                        ask a model about each row
  lum enrich in.parquet try.parquet --embed text=MODEL --rows 100 --show
                        try it on the first 100 rows, and print some
  lum enrich in.parquet out.parquet --embed text=MODEL --resume
                        continue a run that was interrupted
  lum enrich in.parquet out --embed text=MODEL --vector-store store
                        also write to Qdrant, here without a server
"""
_COLUMN_HELP = {
    "embed": "add a column of vectors of texts, named NAME or COLUMN_{suffix}",
    "classify": "add a column of labels and scores of texts, named NAME or COLUMN_{suffix}",
    "embed-images": "add a column of vectors of images, whose paths or contents COLUMN has; named NAME or "
    "COLUMN_{suffix}",
    "classify-images": "add a column of labels and scores of images, named NAME or COLUMN_{suffix}",
    "xgboost": "add a column with the predictions of a model of XGBoost on columns (A,B), whose names are its "
    "features; FILE#predict_proba, #raw or #leaf gives these; named NAME or COLUMN_{suffix}",
    "lightgbm": "the same with a model of LightGBM",
    "model": "add a column with the output of any model handler, given as MODULE:OBJECT, on one or several columns "
    "(A,B); named NAME or COLUMN_{suffix}",
}
_TEXTS: dict[str, Any] = {
    "usage": "lum enrich IN OUT [--embed [NAME:]COLUMN=MODEL] [--classify [NAME:]COLUMN=MODEL] [options]",
    "description": _DESCRIPTION,
    "epilog": _EPILOG,
    "formatter_class": HelpFormatter,
}


def add_to(commands: Any) -> None:
    """Add the command to the parser of ``lum``, for its help."""
    parser = commands.add_parser("enrich", help="run models over a table, without writing a pipeline", **_TEXTS)
    _add_options(parser)


def enrich(words: list[str]) -> int:
    """Run the command and return its exit code; ``words`` may include options of the runner."""
    parser = argparse.ArgumentParser(prog="lum enrich", allow_abbrev=False, **_TEXTS)
    _add_options(parser)
    parsed, rest = parser.parse_known_args(words)
    try:
        return _run(parsed, rest)
    except LuminosityError as error:
        return fail("enrich", error, WRONG_USE)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("table", metavar="IN", help="the table to read: a file, a folder, or a quoted pattern")
    parser.add_argument("out", metavar="OUT", help="the table to write: a folder, or a file such as out.parquet")
    for option, suffix in DEFAULT_SUFFIXES.items():
        parser.add_argument(
            f"--{option}",
            action="append",
            default=[],
            metavar=METAVARS.get(option, "[NAME:]COLUMN=MODEL"),
            help=_COLUMN_HELP[option].format(suffix=suffix),
        )
    add_prompt_options(parser)
    parser.add_argument(
        "--nulls",
        choices=("fail", "keep"),
        default="fail",
        help="what becomes of a row whose input is null, if the model takes no nulls: it fails, or gets a null "
        "(default: fail)",
    )
    parser.add_argument("--columns", metavar="C,...", help="read and keep only these columns of IN (default: all)")
    add_csv_options(parser)
    parser.add_argument("--rows", type=count, metavar="N", help="process only the first N rows")
    parser.add_argument(
        "--show",
        type=count,
        nargs="?",
        const=_SHOWN_ROWS,
        metavar="N",
        help=f"print the first N rows of OUT at the end, and N prompts with their answers (default: {_SHOWN_ROWS})",
    )
    parser.add_argument(
        "--if-exists",
        choices=("fail", "replace", "append"),
        default="fail",
        help="what to do if OUT exists (default: fail)",
    )
    parser.add_argument(
        "--allow-empty",
        action="store_true",
        help="write an empty table if no row is left (default: keep OUT as it was, and fail)",
    )
    parser.add_argument(
        "--dead-letters",
        metavar="PATH",
        help="write rows that a model fails on, and lines that can't be read, to this table, with the reason "
        "(default: the run fails; if each file of IN is a row: OUT-dead-letters)",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue the run of the same command that was interrupted or has failed; begin if there is none",
    )
    parser.add_argument(
        "--no-checkpoint",
        dest="checkpoint",
        action="store_false",
        help="keep nothing from which --resume could continue (default: a hidden folder beside OUT)",
    )
    _add_store_options(parser)


def _add_store_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--vector-store",
        metavar="WHERE",
        help="also write to a vector store: the address of a Qdrant server or of a Postgres database, a folder for "
        "Qdrant's engine, or a Lance dataset; adds points, whatever --if-exists says",
    )
    parser.add_argument("--collection", metavar="NAME", help="collection in the vector store (default: the name of IN)")
    parser.add_argument(
        "--id",
        metavar="COLUMN",
        help="column of ids for the vector store (default: id if IN has it, otherwise a hash of the row)",
    )


def _given(parsed: argparse.Namespace, option: str) -> list[str]:
    return getattr(parsed, option.replace("-", "_"))


def _run(parsed: argparse.Namespace, rest: list[str]) -> int:
    if not parsed.vector_store and (parsed.collection or parsed.id):
        raise OptionError("found --collection or --id without a vector store", fix="add --vector-store WHERE")
    requests = [parse_request(option, text) for option in DEFAULT_SUFFIXES for text in _given(parsed, option)]
    requests += prompt_requests(parsed)
    # The run is named after the first word, and workers look there for --debug.
    sys.argv = [RunName.of_enrich(parsed.out), *rest]
    warm_up("auto")  # Workers import their modules while this process imports its own.
    import_beam()
    from luminosity.cli.enrich.pipeline import Job, advise, run

    _check_known(rest)
    job = Job.of(parsed, requests, rest)
    try:
        return run(job, rest)
    except KeyboardInterrupt:
        cancel_runs()
        advice = advise(job)
        raise KeyboardInterrupt(f"; {advice}" if advice else "") from None
    except LuminosityError as error:
        code = fail("enrich", error, FAILED if isinstance(error, RunFailed) else WRONG_USE)
        advice = advise(job)
        if advice and isinstance(error, RunFailed):
            fail("enrich", advice, code)
        return code


def _check_known(options: list[str]) -> None:
    """Raise for options that neither this command nor the runner has: Beam only warns about them."""
    from apache_beam.options.pipeline_options import PipelineOptions

    from luminosity import LuminosityOptions, ModelOptions

    parser: Any = argparse.ArgumentParser(add_help=False, allow_abbrev=False, conflict_handler="resolve")
    for kind in {*PipelineOptions.__subclasses__(), LuminosityOptions, ModelOptions}:
        kind._add_argparse_args(parser)  # pyright: ignore[reportPrivateUsage]  # Beam has no public way.
    unknown = parser.parse_known_args(options)[1]
    if not unknown:
        return
    if not unknown[0].startswith("-"):
        raise OptionError(
            f"found {unknown[0]!r} beside IN and OUT, expected only these two",
            fix="quote a pattern, so that the shell does not expand it",
        )
    _add_options(parser)
    flags = [flag for flag in parser._option_string_actions if flag.startswith("--")]
    name = unknown[0].partition("=")[0]
    raise OptionError(f"there is no option {name}", fix=did_you_mean(name, flags) or None)
