"""Builds the pipeline of a YAML file, and puts what Beam says about mistakes into the words of the file."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from apache_beam.pvalue import PBegin
from apache_beam.transforms import resources
from apache_beam.transforms.resources import ResourceHint
from apache_beam.yaml.yaml_combine import BUILTIN_COMBINE_FNS
from apache_beam.yaml.yaml_provider import ExternalProvider
from apache_beam.yaml.yaml_transform import YamlTransform, pipeline_as_composite, pipeline_schema
from apache_beam.yaml.yaml_utils import SafeLineLoader
from jsonschema import Draft7Validator
from jsonschema.exceptions import best_match

from luminosity._shared.text import did_you_mean, list_some
from luminosity.beam_yaml.providers import all_providers, needs_java, options_of
from luminosity.beam_yaml.scope import table_scopes
from luminosity.beam_yaml.source import Source, transforms_of
from luminosity.engine.runner import LuminosityRunner
from luminosity.errors import PipelineFileError

__all__ = ["build"]

_LANGUAGE_NAMES = ("generic", "python", "javascript", "java", "sql", "calcite")
_LANGUAGES = re.compile(f"-({'|'.join(_LANGUAGE_NAMES)})$")
_WITH_PLACE = re.compile(
    r'^(?:Invalid transform specification at|Error applying transform) "(?P<name>.*?)" at line (?P<line>\d+): '
    r"(?P<rest>.*)$",
    re.DOTALL,
)
_LINE = re.compile(r"\s*(?:for|in|of|at|around)?\s*(?:at )?\(?(?:\"[^\"]*\" )?(?:at |around )?line (?P<line>\d+)\)?:?")
_UNKNOWN_TYPE = re.compile(r"^Unknown (?:type or missing provider for type|transform type) \'?(?P<name>[^\s\']+)\'?")
_UNKNOWN_LANGUAGE = re.compile(r"^Unknown language (?P<name>\S+)")
_UNKNOWN_INPUT = re.compile(r"^Unknown transform at line (?:\d+|unknown): (?P<name>.*)$")
_UNEXPECTED = re.compile(r"unexpected (?:keyword )?argument '(?P<name>[^']+)'")
_MISSING = re.compile(r"missing \d+ required (?:positional |keyword-only )?arguments?: (?P<names>.*)$")
_UNKNOWN_FUNCTION = re.compile(r"^Unknown CombineFn")
_UNKNOWN_FIELD = re.compile(r"expression: (?P<name>\w+)\. The given input fields are \[(?P<fields>.*?)\]")
_MISSING_KEY = re.compile(r"^(?P<names>'\w+')$")  # the text of a KeyError
_OTHER_NAMES: list[tuple[re.Pattern[str], Callable[[], Iterable[str]]]] = [
    (re.compile(r"Unknown window type (?P<name>\w+)"), lambda: ("global", "fixed", "sliding", "sessions")),
    (re.compile(r"Unknown resource hint: (?P<name>\w+)"), lambda: ResourceHint._name_to_known_hints),  # pyright: ignore
    (re.compile(r"Unknown provider type: (?P<name>\w+)"), lambda: ExternalProvider._provider_types),  # pyright: ignore
]
_EXTRA_KEY = re.compile(r"Additional properties are not allowed \((?P<names>.*?) (?:was|were) unexpected\)")


def build(source: Source, spec: Mapping[str, Any], pipeline: Any) -> Any:
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
        raise _Translator(source, spec, providers).translated(error) from error


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
        language = _config(each).get("language", "generic")
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


class _Mistake(NamedTuple):
    """A mistake in a file, in Beam's words or in ours."""

    message: str
    step: str  # the name of the transform; empty if the message names it
    line: int | None
    fix: str = ""


class _Translator:
    """Turns Beam's errors about a file into ours: the place first, the mistake, and what was probably meant."""

    def __init__(self, source: Source, spec: Mapping[str, Any], providers: Mapping[str, Iterable[Any]]) -> None:
        self._source = source
        self._transforms = list(transforms_of(spec["pipeline"]))
        self._providers = providers
        self._kinds: dict[re.Pattern[str], Callable[[re.Match[str], _Mistake], _Mistake]] = {
            _UNKNOWN_TYPE: self._unknown_type,
            _UNKNOWN_INPUT: self._unknown_input,
            _UNEXPECTED: self._unknown_option,
            _UNKNOWN_LANGUAGE: _unknown_language,
            _MISSING: _missing,
            _MISSING_KEY: _missing,
            _UNKNOWN_FUNCTION: self._unknown_function,
            _UNKNOWN_FIELD: _unknown_field,
        }  # in the order in which they are looked for

    def translated(self, error: Exception) -> PipelineFileError:
        """Return the error with the file and the line in front."""
        if isinstance(error, RecursionError):
            return self._circle()
        message, name, line = str(error), "", None
        while place := _WITH_PLACE.match(message):
            message, name, line = place["rest"], place["name"], int(place["line"])
        for pattern, say in self._kinds.items():
            if found := pattern.search(message):
                said = say(found, _Mistake(message, name, line))
                break
        else:
            said = _other(message, name, line)
        label = f"{said.step}: " if said.step else ""
        return PipelineFileError(f"{self._source.place(said.line)}: {label}{said.message}", fix=said.fix or None)

    def _unknown_type(self, found: re.Match[str], said: _Mistake) -> _Mistake:
        known = sorted({_LANGUAGES.sub("", each) for each in self._providers} | {"chain", "composite"})
        fix = did_you_mean(found["name"], known) or "define it under providers:"
        return _Mistake(f"unknown transform {found['name']!r}", "", _line_in(said.message) or said.line, fix)

    def _unknown_input(self, found: re.Match[str], said: _Mistake) -> _Mistake:
        names = [str(each[key]) for each in self._transforms for key in ("name", "type") if key in each]
        fix = did_you_mean(found["name"], names) or f"name one of {list_some(dict.fromkeys(names), 8)}"
        return _Mistake(f"unknown input {found['name']!r}", said.step, _line_in(said.message) or said.line, fix)

    def _unknown_option(self, found: re.Match[str], said: _Mistake) -> _Mistake:
        transform = self._transform(said.step, said.line)
        options = self._options(transform)
        line = next((each._line_ for each in _config(transform) if each == found["name"]), said.line)
        fix = did_you_mean(found["name"], options)
        expected = f", expected {list_some(options, 15)}" if options and not fix else ""
        return _Mistake(f"unknown option {found['name']!r}{expected}", said.step, line, fix)

    def _unknown_function(self, found: re.Match[str], said: _Mistake) -> _Mistake:
        given = SafeLineLoader.strip_metadata(_config(self._transform(said.step, said.line)).get("combine") or {})
        names = [each.get("fn") if isinstance(each, dict) else each for each in given.values()]
        names = [name.get("type") if isinstance(name, dict) else name for name in names]  # Beam has written it in full
        wrong = [name for name in names if isinstance(name, str) and name not in BUILTIN_COMBINE_FNS]
        known = sorted(BUILTIN_COMBINE_FNS)
        what = f"unknown function {wrong[0]!r}" if wrong else "unknown function"
        fix = did_you_mean(wrong[0], known) if wrong else ""
        return _Mistake(f"{what}, expected {list_some(known, 15)}", said.step, said.line, fix)

    def _circle(self) -> PipelineFileError:
        """Return the error for transforms that take each other's outputs, at the first of them."""
        named = {str(each.get("name") or each["type"]): each for each in self._transforms}
        for start in named:
            path = [start]
            while (after := _first_input(named[path[-1]])) in named and after not in path:
                path.append(after)
            if after == start:
                return self._source.error(f"a circle of inputs: {' ← '.join([*path, start])}", named[start])
        return PipelineFileError(f"{self._source.path}: found transforms that take each other's outputs in a circle")

    def _transform(self, name: str, line: int | None) -> dict[str, Any]:
        return next(
            (
                each
                for each in self._transforms
                if each["__line__"] == line and name in (each.get("name"), each["type"])
            ),
            {},
        )

    def _options(self, transform: dict[str, Any]) -> list[str]:
        kind = transform.get("type", "")
        kinds = [kind, f"{kind}-{_config(transform).get('language', 'generic')}"]
        return [option for each in kinds for option in options_of(self._providers.get(each, ()), each)]


def _unknown_language(found: re.Match[str], said: _Mistake) -> _Mistake:
    fix = did_you_mean(found["name"], _LANGUAGE_NAMES) or f"name one of {', '.join(_LANGUAGE_NAMES)}"
    return _Mistake(f"unknown language {found['name']!r}", said.step, _line_in(said.message) or said.line, fix)


def _missing(found: re.Match[str], said: _Mistake) -> _Mistake:
    return said._replace(message=f"missing {found['names']}")


def _unknown_field(found: re.Match[str], said: _Mistake) -> _Mistake:
    return said._replace(fix=did_you_mean(found["name"], re.findall(r"'([^']*)'", found["fields"])))


def _other(message: str, step: str, line: int | None) -> _Mistake:
    found = _line_in(message)
    if found is not None:
        line, message = found, _LINE.sub("", message)
    for pattern, choices in _OTHER_NAMES:
        if unknown := pattern.search(message):
            return _Mistake(message.rstrip("."), step, line, did_you_mean(unknown["name"], choices()))
    return _Mistake(message, step, line)


def _first_input(transform: dict[str, Any]) -> str:
    given = transform.get("input")
    if isinstance(given, dict):
        given = next((value for key, value in given.items() if not key.startswith("__")), "")
    return str(given[0] if isinstance(given, list) and given else given or "").partition(".")[0]


def _config(transform: dict[str, Any]) -> dict[Any, Any]:
    return transform.get("config") or {}


def _line_in(message: str) -> int | None:
    lines = re.findall(r"\b(?:at|around) line (\d+)", message)
    return int(lines[-1]) if lines else None
