"""A pipeline in a YAML file: read it, check it, build it, run it."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import re
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.pvalue import PBegin
from apache_beam.transforms import resources
from apache_beam.yaml.yaml_transform import YamlTransform, pipeline_as_composite, pipeline_schema
from apache_beam.yaml.yaml_utils import SafeLineLoader
from jsonschema import Draft7Validator
from jsonschema.exceptions import best_match

# Registers the options of the runner and of models.
import luminosity.engine.options  # pyright: ignore[reportUnusedImport]
import luminosity.inference.options  # noqa: F401  # pyright: ignore[reportUnusedImport]
from luminosity._shared.text import did_you_mean, list_some
from luminosity.beam_yaml.providers import all_providers, needs_java, table_scopes
from luminosity.beam_yaml.source import Source, Translator, config_of, transforms_of
from luminosity.engine.runner import LuminosityRunner
from luminosity.errors import InvalidArgument, OptionError, PipelineFileError, RunFailed

__all__ = ["PipelineFile"]

_EXTRA_KEY = re.compile(r"Additional properties are not allowed \((?P<names>.*?) (?:was|were) unexpected\)")


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
        return _build(self._source, self._spec, pipeline)

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


def _build(source: Source, spec: Mapping[str, Any], pipeline: Any) -> Any:
    """Apply the transforms of a parsed file to a pipeline; return the last one's output, if it has one."""
    _validate(source, spec)
    providers: Mapping[str, Iterable[Any]] = {}
    try:
        providers = all_providers(source.path, spec.get("providers") or [])
        if hints := spec["pipeline"].get("resource_hints"):
            pipeline._current_transform().resource_hints.update(
                resources.parse_resource_hints(SafeLineLoader.strip_metadata(hints))
            )
        transform = YamlTransform(pipeline_as_composite(spec["pipeline"]), providers)
        if isinstance(pipeline.runner, LuminosityRunner):
            _check_languages(source, spec, providers)
            python = {name: [each for each in every if not needs_java(each)] for name, every in providers.items()}
            transform._providers = python  # pyright: ignore[reportPrivateUsage]  # Beam prefers Java where it is
        with table_scopes():
            return transform.expand(PBegin(pipeline))
    except PipelineFileError:
        raise
    except Exception as error:
        raise Translator(source, spec, providers).translated(error) from error


def _validate(source: Source, spec: Mapping[str, Any]) -> None:
    """Check the shape of the file with Beam's own schema."""
    validator = Draft7Validator(pipeline_schema("generic"))
    error = best_match(validator.iter_errors(spec))
    if error is None:
        return
    at: Any = spec
    place: Any = spec
    for step in error.absolute_path:
        at = at[step]
        if SafeLineLoader.get_line(at) != "unknown":
            place = at
    kind = f"{place['type']}: " if isinstance(place, dict) and isinstance(place.get("type"), str) else ""
    extra = _EXTRA_KEY.search(error.message)
    if extra:
        known = [name for name in error.schema.get("properties", {}) if not name.startswith("__")]
        keys = [name for name in re.findall(r"'([^']+)'", extra["names"]) if name not in known]
        line = next((key for key in place if key in keys), place) if isinstance(place, dict) else place
        raise source.error(
            f"{kind}unknown key {keys[0]!r}, expected {list_some(known, 12)}",
            line,
            fix=did_you_mean(keys[0], known) or ("put the options of a transform under config:" if kind else ""),
        )
    raise source.error(f"{kind}{_short(error)}", place)


def _check_languages(source: Source, spec: Mapping[str, Any], providers: Mapping[str, Iterable[Any]]) -> None:
    """Raise for a transform that only Java has, before Beam starts a service for it."""
    for each in transforms_of(spec["pipeline"]):
        language = config_of(each).get("language", "generic")
        found = [*providers.get(each["type"], ()), *providers.get(f"{each['type']}-{language}", ())]
        if found and all(needs_java(provider) for provider in found):
            what = each["type"] if each["type"] in providers else f"{each['type']} in {language}"
            raise source.error(
                f"Beam runs {what} in Java, and LuminosityRunner runs Python only",
                each,
                fix="write the step with language: python, or in a provider of your own",
            )


def _short(error: Any) -> str:
    where = ".".join(str(step) for step in error.absolute_path) or "the file"
    if error.validator in ("required", "type"):
        what = "a mapping" if isinstance(error.instance, dict) else repr(error.instance)
        expected = (
            f"expected {error.validator_value}"
            if error.validator == "type"
            else error.message.replace("is a required property", "is missing")
        )
        return expected if error.validator == "required" else f"found {where}: {what}, {expected}"
    if error.validator == "not":
        return f"{where}: a chain connects its transforms itself; remove this key, or use type: composite"
    return f"{where}: {error.message}"


@contextlib.contextmanager
def _logged_rows_shown() -> Generator[None]:
    """Within the context, show what LogForTesting logs, unless the process has configured logging.

    It logs to the root logger at level INFO, which Python hides by default. INFO of other loggers is about libraries.
    """
    root = logging.getLogger()
    if root.level != logging.WARNING:
        yield
        return
    logging.basicConfig(format="%(message)s")
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
