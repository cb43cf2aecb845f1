"""Chat templates without transformers: Jinja in a sandbox, with the names that templates of models use."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, ClassVar, cast

from luminosity.extras import require

__all__ = ["can_render", "render_chat"]

_MESSAGE_KEYS = {"content", "role"}  # transformers rewrites others, such as those of tools and of reasoning
_OF_TRANSFORMERS = {
    "continue_final_message",
    "conversation",
    "documents",
    "max_length",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "sanitize_control_tokens",
    "tokenize",
    "tokenizer_kwargs",
    "tools",
    "truncation",
}
"""Arguments of ``apply_chat_template`` that are no variables of the template."""
_MOST_TEMPLATES = 32  # compiled ones in a process: a pipeline has a few


def can_render(messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> bool:
    """Return whether :func:`render_chat` gives what ``apply_chat_template`` of transformers gives.

    >>> can_render([{"role": "user", "content": "Hello"}], {"enable_thinking": False})
    True
    >>> can_render([{"role": "user", "content": "Hello"}], {"tools": []})
    False
    """
    template = arguments.get("chat_template", "{")
    return (
        isinstance(template, str)
        and "{" in template  # others are names of templates
        and not arguments.keys() & _OF_TRANSFORMERS
        and all(message.keys() <= _MESSAGE_KEYS for message in messages)
        and _is_plain([arguments, *messages])
    )


def render_chat(
    template: str, messages: Sequence[Mapping[str, Any]], tokens: Mapping[str, str], arguments: Mapping[str, Any]
) -> str:
    """Return the text of a chat.

    Args:
        template: the model's template.
        messages: those for which :func:`can_render` is true.
        tokens: the special tokens by their names, such as ``bos_token``.
        arguments: the variables of the template; ``chat_template`` is another template.
    """
    given = {name: value for name, value in arguments.items() if name != "chat_template"}
    variables = {"add_generation_prompt": False, "tools": None, "documents": None, **tokens, **given}
    listed = [dict(message) for message in messages]
    return _compiled(arguments.get("chat_template", template)).render(messages=listed, **variables)


def _is_plain(value: Any) -> bool:
    """Return whether a value is of the types that JSON has: a template can do nothing with it but read it."""
    if isinstance(value, Mapping):
        return all(isinstance(name, str) and _is_plain(each) for name, each in cast("Any", value).items())
    if isinstance(value, list):
        return all(_is_plain(each) for each in cast("list[Any]", value))
    return value is None or type(value) in (bool, float, int, str)


@lru_cache(_MOST_TEMPLATES)
def _compiled(template: str) -> Any:
    jinja2 = require("jinja2", "transformers")
    sandbox, extensions = (require(f"jinja2.{name}", "transformers") for name in ("sandbox", "ext"))

    class Generation(extensions.Extension):
        """``{% generation %}``: marks what an assistant wrote, for those who train models."""

        tags: ClassVar = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    class Namespace(jinja2.utils.Namespace):
        """Variables that a loop may set; none of them can be one of Python's own."""

        def __init__(*arguments: Any, **values: Any) -> None:
            self, *others = arguments
            given = dict(*others, **values)
            for name in given:
                check_name(name)
            jinja2.utils.Namespace.__init__(self, given)

        def __setitem__(self, name: str, value: Any) -> None:
            check_name(name)
            super().__setitem__(name, value)

    def check_name(name: str) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a chat template sets {name!r}, which begins with an underscore")

    def fail(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)  # Jinja's own escapes what HTML needs

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, extensions.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals.update(
        dict=lambda *arguments, **values: dict(*arguments, **values),
        namespace=Namespace,
        raise_exception=fail,
        strftime_now=lambda form: datetime.now().strftime(form),
    )
    return environment.from_string(template)
