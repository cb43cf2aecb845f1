"""The text of a YAML file: Jinja, the parser, and what Beam says about mistakes, in the words of the file."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jinja2
import yaml
from apache_beam.io.filesystems import FileSystems
from apache_beam.transforms.resources import ResourceHint
from apache_beam.yaml.yaml_combine import BUILTIN_COMBINE_FNS
from apache_beam.yaml.yaml_provider import ExternalProvider
from apache_beam.yaml.yaml_transform import expand_jinja, strip_leading_comments
from apache_beam.yaml.yaml_utils import SafeLineLoader

from luminosity._shared.text import did_you_mean, list_some
from luminosity.beam_yaml.providers import options_of
from luminosity.errors import PipelineFileError

__all__ = ["Source", "Translator", "config_of", "transforms_of"]

_TOP = ("pipeline", "providers", "options", "tests")
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


@dataclass(frozen=True)
class Source:
    """A file's text after Jinja, with as many lines before each place as the file has, if Jinja keeps the lines."""

    path: str
    text: str
    has_same_lines: bool

    @classmethod
    def read(cls, path: str, variables: Mapping[str, Any]) -> Source:
        """Read a file and fill in its Jinja variables."""
        try:
            with open(path, encoding="utf-8") as file:
                template = file.read()
        except UnicodeDecodeError as error:
            raise PipelineFileError(
                f"{path}: found bytes that are not UTF-8 at {error.start}, expected UTF-8"
            ) from None
        except OSError as error:
            raise PipelineFileError(f"{path}: {error.strerror}") from None
        body = strip_leading_comments(template)  # as Beam does, which then counts lines from there
        skipped = template[: len(template) - len(body)].count("\n")
        folder = FileSystems.split(path)[0]
        try:
            text = expand_jinja(template, dict(variables), [folder] if folder else [])
        except jinja2.TemplateSyntaxError as error:
            own = error.name is None
            raise PipelineFileError(
                f"{path}:{error.lineno + skipped}: {error.message}" if own else f"{error.name}:{error.lineno}: {error}"
            ) from error
        except jinja2.TemplateNotFound as error:
            raise PipelineFileError(f"{path}: there is no file {error}, which the file includes") from error
        except jinja2.UndefinedError as error:
            line = _template_line(error)
            place = f"{path}:{line + skipped}" if line else path
            name = str(error).partition("'")[2].partition("'")[0]
            near = did_you_mean(name, variables)
            raise PipelineFileError(
                f"{place}: {error.message}", fix=near or f"pass it as in --jinja_variables='{{\"{name}\": ...}}'"
            ) from error
        return cls(path, "\n" * skipped + text, text.count("\n") == body.rstrip("\n").count("\n"))

    def parse(self) -> dict[str, Any]:
        """Return the file's content, with a line in every mapping, as Beam wants it."""
        try:
            spec = yaml.load(self.text, Loader=_Loader)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            words = [error.context, error.problem] if error.context else [error.problem]
            message = ", ".join(word for word in words if word)
            raise PipelineFileError(f"{self.place(mark.line + 1 if mark else None)}: {message}") from error
        except yaml.YAMLError as error:
            raise PipelineFileError(f"{self.path}: {error}") from error
        if not isinstance(spec, dict):
            raise PipelineFileError(f"{self.path}: found {type(spec).__name__}, expected a mapping with pipeline:")
        for key in spec:
            if key not in (*_TOP, "__line__", "__uuid__"):
                raise self.error(
                    f"unknown key {str(key)!r}, expected {', '.join(_TOP)}", key, fix=did_you_mean(str(key), _TOP)
                )
        if not isinstance(spec.get("pipeline"), dict):
            raise PipelineFileError(f"{self.path}: found no pipeline, expected a mapping named pipeline:")
        if not isinstance(spec.get("options") or {}, dict):
            raise PipelineFileError(f"{self.path}: found options: {spec['options']!r}, expected names and values")
        return spec

    def place(self, line: int | None) -> str:
        """Return the file and the line, as editors read it."""
        if line is None:
            return self.path
        return f"{self.path}:{line}" if self.has_same_lines else f"{self.path}, line {line} after Jinja"

    def error(self, message: str, at: Any, fix: str = "") -> PipelineFileError:
        """Return an error at a place of the content: a mapping, or a text of it."""
        line = SafeLineLoader.get_line(at)
        return PipelineFileError(f"{self.place(line if isinstance(line, int) else None)}: {message}", fix=fix or None)


def transforms_of(spec: Any) -> Iterator[dict[str, Any]]:
    """Yield every transform of a pipeline, however deep it lies."""
    if not isinstance(spec, dict):
        return
    if isinstance(spec.get("type"), str):
        yield spec
    for key in ("transforms", "extra_transforms"):
        for each in spec.get(key) or ():
            yield from transforms_of(each)
    for key in ("source", "sink"):
        yield from transforms_of(spec.get(key))


class _Loader(SafeLineLoader):
    """Beam's loader, which notes lines. A key that occurs twice is an error: one of the two would be ignored."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: dict[Any, Any] = {}
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen and key_node.tag != "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(
                    None, None, f"found the key {str(key)!r} twice", key_node.start_mark
                )
            seen[key if isinstance(key, Hashable) else id(key)] = key_node
        return super().construct_mapping(node, deep=deep)


def _template_line(error: BaseException) -> int:
    """Return the line of the template that was rendered last, or 0."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
    return (lines[-1] or 0) if lines else 0


class _Mistake(NamedTuple):
    """A mistake in a file, in Beam's words or in ours."""

    message: str
    step: str  # the name of the transform; empty if the message names it
    line: int | None
    fix: str = ""


class Translator:
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
        line = next((each._line_ for each in config_of(transform) if each == found["name"]), said.line)
        fix = did_you_mean(found["name"], options)
        expected = f", expected {list_some(options, 15)}" if options and not fix else ""
        return _Mistake(f"unknown option {found['name']!r}{expected}", said.step, line, fix)

    def _unknown_function(self, found: re.Match[str], said: _Mistake) -> _Mistake:
        given = SafeLineLoader.strip_metadata(config_of(self._transform(said.step, said.line)).get("combine") or {})
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
        kinds = [kind, f"{kind}-{config_of(transform).get('language', 'generic')}"]
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


def config_of(transform: Mapping[str, Any]) -> dict[Any, Any]:
    """Return the options of a transform."""
    return transform.get("config") or {}


def _line_in(message: str) -> int | None:
    lines = re.findall(r"\b(?:at|around) line (\d+)", message)
    return int(lines[-1]) if lines else None
