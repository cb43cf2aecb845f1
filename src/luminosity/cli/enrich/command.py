"""``lum enrich IN OUT --embed text=MODEL …``: a table in, a table out, no pipeline to write."""

from __future__ import annotations

import argparse
import difflib
import sys
from typing import Any

from luminosity.cli.advice import as_options
from luminosity.cli.enrich.columns import KINDS, parse_request
from luminosity.cli.exits import INTERRUPTED, cancel_runs, treat_sigterm_as_ctrl_c
from luminosity.engine.workers.launcher import warm_up
from luminosity.errors import LuminosityError, OptionError, RunFailed
from luminosity.lean_beam import import_beam

_FAILED = 1
_WRONG_USE = 2

_DESCRIPTION = """\
Read a table, add a column to it for each model, and write it. Tables are
Parquet, JSON lines, CSV or Arrow files, one or many, on any file system that
Beam knows; names and patterns tell which. A model is a folder, an address, or
a name on the Hugging Face hub. Models use an accelerator where there is one.
"""
_EPILOG = """\
What else begins with -- is the runner's: --cpu_workers=4, --progress=plain and
the others that `lum run --help` lists.

examples:
  lum enrich in.parquet out.parquet --embed text=models/minilm
                        adds text_embedding
  lum enrich 'in/*.jsonl.gz' out --embed title_vector:title=models/minilm \\
      --embed text=models/minilm --classify mood:text=models/sentiment
                        adds title_vector, text_embedding and mood
  lum enrich in.csv out.parquet --model score:age,income=my_models:handler
                        any handler, of my_models.py
  lum enrich in.parquet try.parquet --embed text=MODEL --rows 100 --show
                        a try with the first rows
  lum enrich in.parquet out --embed text=MODEL --vector-store store
                        and into Qdrant, here without a server
"""
_ARGUMENTS = {
    "if_exists='replace'": "--if-exists replace",
    "if_exists='append'": "--if-exists append",
    "Enrich(...).with_exception_handling()": "--dead-letters PATH",
    "with_exception_handling()": "--dead-letters PATH",
    "columns= names": "--columns names",
}
_TEXTS: dict[str, Any] = {
    "usage": "lum enrich IN OUT [--embed [NAME:]COLUMN=MODEL] [--classify [NAME:]COLUMN=MODEL] [options]",
    "description": _DESCRIPTION,
    "epilog": _EPILOG,
    "formatter_class": argparse.RawDescriptionHelpFormatter,
}


def add_to(commands: Any) -> None:
    parser = commands.add_parser("enrich", help="run models over a table, no pipeline to write", **_TEXTS)
    _add_options(parser)


def enrich(words: list[str]) -> int:
    """``words`` has options of the runner, too, which argparse alone would refuse."""
    parser = argparse.ArgumentParser(prog="lum enrich", allow_abbrev=False, **_TEXTS)
    _add_options(parser)
    parsed, rest = parser.parse_known_args(words)
    treat_sigterm_as_ctrl_c()
    try:
        return _run(parsed, rest)
    except RunFailed as error:
        return _say(as_options(str(error), _ARGUMENTS), _FAILED)
    except LuminosityError as error:
        return _say(as_options(str(error), _ARGUMENTS), _WRONG_USE)
    except KeyboardInterrupt:
        cancel_runs()
        return _say("interrupted", INTERRUPTED)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("table", metavar="IN", help="the table's file, folder or pattern")
    parser.add_argument("out", metavar="OUT", help="a folder, or a file where it ends like one: out.parquet")
    for option, named in KINDS.items():
        parser.add_argument(
            f"--{option}",
            action="append",
            default=[],
            metavar="[NAME:]COLUMN=MODEL",
            help={
                "embed": f"add vectors of texts; the column is NAME, or COLUMN_{named}",
                "classify": f"add labels with scores of texts; NAME, or COLUMN_{named}",
                "model": f"add what any handler says, MODULE:OBJECT; of several columns: A,B; NAME, or COLUMN_{named}",
            }[option],
        )
    parser.add_argument("--columns", metavar="C,...", help="what to read and keep of the table (default: all columns)")
    parser.add_argument("--rows", type=_count, metavar="N", help="for a try: the first N rows alone")
    parser.add_argument("--show", type=_count, nargs="?", const=5, metavar="N", help="print N rows of OUT (default: 5)")
    parser.add_argument(
        "--if-exists",
        choices=("fail", "replace", "append"),
        default="fail",
        help="what to do where OUT is there already (default: fail)",
    )
    parser.add_argument(
        "--dead-letters",
        metavar="PATH",
        help="where rows go that a model fails on, with the model and the reason (default: the run fails)",
    )
    parser.add_argument(
        "--vector-store", metavar="WHERE", help="write vectors to Qdrant, too: a server's address, or a folder"
    )
    parser.add_argument("--collection", metavar="NAME", help="of the vector store (default: the table's name)")
    parser.add_argument(
        "--id", metavar="COLUMN", help="the ids for the store (default: id, or else a hash of what the row holds)"
    )


def _run(parsed: argparse.Namespace, rest: list[str]) -> int:
    if not parsed.vector_store and (parsed.collection or parsed.id):
        raise OptionError("--collection and --id are of a vector store: give --vector-store, too")
    asked = [parse_request(option, text) for option in KINDS for text in getattr(parsed, option)]
    sys.argv = ["lum enrich", *rest]  # what the run is called, and where its workers look for --debug
    warm_up("auto")  # the worker's imports run beside those that follow
    import_beam()
    from luminosity.cli.enrich.job import Job, run

    _check_known(rest)
    return run(Job.of(parsed, asked), rest)


def _check_known(options: list[str]) -> None:
    """Beam takes options that it does not know, with a warning at most."""
    from apache_beam.options.pipeline_options import PipelineOptions

    from luminosity import LuminosityOptions, ModelOptions

    parser: Any = argparse.ArgumentParser(add_help=False, allow_abbrev=False, conflict_handler="resolve")
    for kind in {*PipelineOptions.__subclasses__(), LuminosityOptions, ModelOptions}:
        kind._add_argparse_args(parser)  # pyright: ignore[reportPrivateUsage]  # There is no other way to ask.
    unknown = parser.parse_known_args(options)[1]
    if not unknown:
        return
    if not unknown[0].startswith("-"):
        raise OptionError(f"found {unknown[0]!r} beside IN and OUT; quote a pattern, so that the shell leaves it alone")
    _add_options(parser)
    flags = [flag for flag in parser._option_string_actions if flag.startswith("--")]
    alike = difflib.get_close_matches(unknown[0].partition("=")[0], flags, n=1)
    raise OptionError(f"{unknown[0]}: no such option{f'; did you mean {alike[0]}?' if alike else ''}")


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from 1")
    return int(text)


def _say(message: str, status: int) -> int:
    print(f"lum enrich: {message}", file=sys.stderr)
    return status
