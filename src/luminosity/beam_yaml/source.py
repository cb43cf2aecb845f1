"""The text of a YAML file: Jinja, the parser, and the lines of the file in errors."""

from __future__ import annotations

import traceback
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jinja2
import yaml
from apache_beam.io.filesystems import FileSystems
from apache_beam.yaml.yaml_transform import expand_jinja, strip_leading_comments
from apache_beam.yaml.yaml_utils import SafeLineLoader

from luminosity._shared.text import did_you_mean
from luminosity.errors import PipelineFileError

__all__ = ["Source", "transforms_of"]

_TOP = ("pipeline", "providers", "options", "tests")


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
