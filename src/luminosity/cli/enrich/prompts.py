"""The columns that ``lum enrich --prompt`` adds: their templates, types and model, parsed and checked."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from luminosity._shared.text import did_you_mean, list_some
from luminosity.cli.common.options import check_variable
from luminosity.cli.enrich.columns import ColumnRequest
from luminosity.errors import InvalidArgument, InvalidType, OptionError

if TYPE_CHECKING:
    from luminosity.inference.enrich.column import Column, Nulls

__all__ = ["PromptRequest", "add_prompt_options", "prompt_requests"]

_FORM = "expected NAME=TEMPLATE, such as 'label=Is this review good or bad? {text}'"


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of prompts."""
    parser.add_argument(
        "--prompt",
        action="append",
        default=[],
        metavar="NAME=TEMPLATE",
        help="add the column NAME with a model's answers to a prompt, which has columns in braces: "
        "'label=Classify: {text}'",
    )
    parser.add_argument(
        "--returns",
        action="append",
        default=[],
        metavar="NAME=TYPE",
        help="what the answers in the column NAME are: choices such as good|bad, text, int, float, bool, or the path "
        "of a JSON schema (default: text)",
    )
    parser.add_argument(
        "--prompt-model",
        metavar="MODEL",
        help="the model that answers prompts: a folder, a name on the Hugging Face hub, a GGUF file, module:object, or "
        "URL#MODEL of a server with OpenAI's chat API, such as http://localhost:8000#llama-3.1-8b",
    )
    parser.add_argument(
        "--prompt-key-env", metavar="VARIABLE", help="environment variable with the key of the server of --prompt-model"
    )
    parser.add_argument(
        "--prompt-cache",
        metavar="FOLDER",
        help="keep the answers in this folder, so that no later command computes or pays for them again",
    )


@dataclass(frozen=True)
class PromptRequest(ColumnRequest):
    """A new column of a model's answers."""

    template: str = ""
    returns: str = "text"
    key_env: str | None = None
    cache: str | None = None

    def __str__(self) -> str:
        return f"--prompt {self.name}={self.template}"

    @property
    def renaming(self) -> str:
        """How to give the column another name."""
        return f"--prompt OTHER={self.template}"

    @property
    def files(self) -> tuple[str, ...]:
        """The model, and the JSON schema of the answers if a file has it."""
        named = [self.model, *([self.returns] if self.returns.endswith(".json") else [])]
        return tuple(map(os.path.expanduser, named))

    @property
    def output(self) -> Any:
        """The Arrow type of the column."""
        return self._prompt.output_type

    def column(self, nulls: Nulls = "fail") -> Column:
        """Return the column for ``Enrich``; the model is not loaded."""
        from luminosity import Column

        return Column(self._prompt, {each: each for each in self.inputs}, nulls=nulls)

    @cached_property
    def _prompt(self) -> Any:
        from luminosity import Prompt
        from luminosity.inference.model_names import generator_named
        from luminosity.inference.prompts.named_types import type_named

        handler = generator_named(self.model, self.key_env)
        try:
            returns = type_named(self.returns)
        except InvalidArgument as error:
            raise OptionError(f"--returns {self.name}={self.returns}: {error.message}", fix=error.fix) from None
        try:
            return Prompt(handler, self.template, returns=returns, cache=self.cache)
        except (InvalidArgument, InvalidType) as error:
            raise OptionError(f"{self}: {error.message}", fix=error.fix) from None


def prompt_requests(parsed: argparse.Namespace) -> list[PromptRequest]:
    """Return the columns that the options of prompts ask for. Raises ``OptionError`` for a mistake in them."""
    from luminosity.inference.prompts.template import Template

    templates = _by_name("--prompt", parsed.prompt)
    types = _by_name("--returns", parsed.returns)
    for name in types:
        if name not in templates:
            expected = list_some(templates, 20) or "a column of --prompt"
            raise OptionError(
                f"--returns {name}={types[name]}: found no --prompt {name}=..., expected {expected}",
                fix=did_you_mean(name, templates) or None,
            )
    _check_model(parsed)
    found: list[PromptRequest] = []
    for name, text in templates.items():
        try:
            columns = Template(text).columns
        except InvalidArgument as error:
            raise OptionError(f"--prompt {name}={text}: {error.message}", fix=error.fix) from None
        settings = text, types.get(name, "text"), parsed.prompt_key_env, parsed.prompt_cache
        found.append(PromptRequest("prompt", name, columns, parsed.prompt_model, *settings))
    return found


def _check_model(parsed: argparse.Namespace) -> None:
    if parsed.prompt and not parsed.prompt_model:
        raise OptionError(
            "found --prompt without a model", fix="add --prompt-model with a folder, a name on the hub or URL#MODEL"
        )
    for option in ("--prompt-model", "--prompt-key-env", "--prompt-cache"):
        if not parsed.prompt and getattr(parsed, option[2:].replace("-", "_")):
            raise OptionError(f"found {option} without --prompt", fix="add --prompt NAME=TEMPLATE")
    check_variable("--prompt-key-env", parsed.prompt_key_env)


def _by_name(option: str, texts: Sequence[str]) -> dict[str, str]:
    """Return the value of each column. Raises if one is given twice: it is not known which of them counts."""
    found: dict[str, str] = {}
    for text in texts:
        name, value = _pair(option, text)
        if name in found:
            fix = f"give it another name: --prompt OTHER={value}" if option == "--prompt" else "leave out one of them"
            raise OptionError(f"found {option} {name}=... twice, expected one for each column", fix=fix)
        found[name] = value
    return found


def _pair(option: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (equals and name.strip() and value.strip()):
        form = _FORM if option == "--prompt" else "expected NAME=TYPE, such as 'label=good|bad'"
        raise OptionError(f"{option} {text}: {form}")
    return name.strip(), value
