"""A pipeline in a YAML file: read it, check it, build it."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import re
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions

# Registers the options of the runner and of models.
import luminosity.engine.options  # pyright: ignore[reportUnusedImport]
import luminosity.inference.options  # noqa: F401  # pyright: ignore[reportUnusedImport]
from luminosity._shared.text import did_you_mean
from luminosity.beam_yaml.build import build
from luminosity.beam_yaml.source import Source, transforms_of
from luminosity.errors import InvalidArgument, OptionError, RunFailed

__all__ = ["PipelineFile"]


class PipelineFile:
    """A pipeline in Beam's YAML, with its Jinja variables filled in.

    Args:
        path: the file.
        flags: the command line: Beam's ``--jinja_variables`` and ``--jinja_variable_flags``, and options of the
            pipeline. They win over the ``options`` in the file.
    """

    def __init__(self, path: str, flags: Sequence[str] = ()) -> None:
        variables, rest = _jinja_variables(flags)
        self._source = Source.read(path, variables)
        self._spec = self._source.parse()
        self._flags = [*self._file_flags(), *rest]
        _check_flags(rest)

    def run(self) -> Any:
        """Build the pipeline, run it, and return its result when it is done."""
        pipeline = beam.Pipeline(options=PipelineOptions(self._flags, pickle_library="cloudpickle"))
        self.build(pipeline)
        logs_rows = any(each["type"] == "LogForTesting" for each in transforms_of(self._spec["pipeline"]))
        try:
            with _logged_rows_shown() if logs_rows else contextlib.nullcontext():
                result = pipeline.run()
                result.wait_until_finish()
        except RunFailed as error:
            if place := self._place_of_step(str(error)):
                error.__notes__ = [place]  # pyright: ignore[reportAttributeAccessIssue]  # Python 3.10 has no add_note()
            raise
        return result

    def build(self, pipeline: Any) -> Any:
        """Apply the transforms of the file to a pipeline; return the last one's output, if it has one."""
        return build(self._source, self._spec, pipeline)

    def _place_of_step(self, message: str) -> str:
        """Say where the step is that a failed run names, or return an empty string."""
        step = re.search(r"\bstep '([^']+)'", message)
        names = step[1].split("/") if step else ()
        found = None
        for each in transforms_of(self._spec["pipeline"]):
            if (each.get("name") or each["type"]) in names:
                found = each  # the innermost transform is last
        if found is None:
            return ""
        return f"{self._source.place(found['__line__'])}: {found.get('name') or found['type']} is the step that failed"

    def _file_flags(self) -> list[str]:
        """Return the ``options`` of the file as words of a command line."""
        known = _known_options()
        flags: list[str] = []
        for name, value in (self._spec.get("options") or {}).items():
            if name in ("__line__", "__uuid__"):
                continue
            if name not in known:
                raise self._source.error(
                    f"unknown option {str(name)!r}", name, fix=did_you_mean(name, known) or "see lum run --help"
                )
            if isinstance(value, bool):
                flags += [f"--{name}"] if value else []
            elif isinstance(value, list):
                flags += [f"--{name}={each}" for each in value]
            else:
                flags.append(f"--{name}={json.dumps(value) if isinstance(value, Mapping) else value}")
        return flags


@contextlib.contextmanager
def _logged_rows_shown() -> Generator[None]:
    """Within the context, show what LogForTesting logs, unless the process has configured logging.

    It logs to the root logger at level INFO, which Python hides by default. INFO of other loggers is about libraries.
    """
    root = logging.getLogger()
    if root.level != logging.WARNING:
        yield
        return
    logging.basicConfig(format="%(message)s")  # no effect if Beam's imports have logged something
    handlers = list(root.handlers)
    for handler in handlers:
        handler.addFilter(_is_row_or_warning)
    root.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.setLevel(logging.WARNING)
        for handler in handlers:
            handler.removeFilter(_is_row_or_warning)


def _is_row_or_warning(record: logging.LogRecord) -> bool:
    return record.levelno > logging.INFO or record.name == "root"


def _jinja_variables(flags: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the variables for Jinja, from the options that Beam has for them, and the other words."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--jinja_variables", default="{}")
    parser.add_argument("--jinja_variable_flags", default="")
    own, rest = parser.parse_known_args(list(flags))
    try:
        variables = json.loads(own.jinja_variables)
    except ValueError as error:
        raise OptionError(f"--jinja_variables={own.jinja_variables}: {error}; expected a JSON object") from None
    if not isinstance(variables, dict):
        raise OptionError(f"--jinja_variables={own.jinja_variables}: expected a JSON object, such as '{{\"n\": 1}}'")
    named = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    names = [name for name in own.jinja_variable_flags.split(",") if name]
    known = _known_options()
    for name in names:
        if name in known:
            raise OptionError(
                f"--jinja_variable_flags={name}: that is an option of pipelines", fix="pass it in --jinja_variables"
            )
        named.add_argument(f"--{name}", dest=name)
    if not names:
        return variables, rest
    given, rest = named.parse_known_args(rest)
    return {**variables, **{name: value for name, value in vars(given).items() if value is not None}}, rest


def _check_flags(flags: Sequence[str]) -> None:
    """Raise if a word of the command line is no option of a pipeline: no script reads it."""
    parser = _options_parser()
    unknown = parser.parse_known_args(list(flags))[1]
    if unknown:
        name = unknown[0].split("=", 1)[0]
        choices = [f"--{each}" for each in (*_known_options(), "jinja_variables", "jinja_variable_flags")]
        is_help = name in ("-h", "--help")
        advice = "see lum run --help" if is_help else "pass variables of the file in --jinja_variables"
        raise OptionError(
            f"{unknown[0]}: a YAML pipeline has no such option", fix=did_you_mean(name, choices) or advice
        )


def _known_options() -> dict[str, Any]:
    return {action.dest: action for action in _options_parser()._actions}  # pyright: ignore[reportPrivateUsage]


def _options_parser() -> argparse.ArgumentParser:
    parser = _Parser(add_help=False, allow_abbrev=False)
    for kind in {each.__qualname__: each for each in PipelineOptions.__subclasses__()}.values():
        kind._add_argparse_args(parser)  # pyright: ignore
    return parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise InvalidArgument(message)
