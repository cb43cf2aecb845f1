"""The new columns that ``lum enrich`` is asked for: their names, what they are made of, and by which model."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from luminosity.cli.model_names import named_handler
from luminosity.errors import OptionError

if TYPE_CHECKING:
    from luminosity.inference.enrich.column import Column

__all__ = ["KINDS", "ColumnRequest", "check", "parse_request"]

KINDS: Mapping[str, str] = {"embed": "embedding", "classify": "class", "model": "prediction"}
"""By option: what a column is called after the one that it is made of, where it is given no name."""

_FORMS = {
    "embed": "[NAME:]COLUMN=MODEL, such as text=models/minilm",
    "classify": "[NAME:]COLUMN=MODEL, such as mood:text=models/sentiment",
    "model": "[NAME:]COLUMN[,COLUMN...]=MODULE:OBJECT, such as score:age,income=my_models:handler",
}


@dataclass(frozen=True)
class ColumnRequest:
    """One new column, as the command line says it."""

    option: str
    name: str
    inputs: tuple[str, ...]
    model: str

    @property
    def is_vector(self) -> bool:
        return self.option == "embed"

    def column(self) -> Column:
        from luminosity import Column

        handler = named_handler(self.model if self.option == "model" else f"{self.option}:{self.model}")
        return Column(handler, self.inputs[0] if len(self.inputs) == 1 else list(self.inputs))


def parse_request(option: str, text: str) -> ColumnRequest:
    """
    >>> asked_for("embed", "text=models/minilm")
    Asked(option='embed', name='text_embedding', inputs=('text',), model='models/minilm')
    >>> asked_for("model", "score:age,income=my_models:handler").inputs
    ('age', 'income')
    >>> asked_for("embed", "models/minilm")
    Traceback (most recent call last):
    luminosity.errors.OptionError: --embed models/minilm: expected [NAME:]COLUMN=MODEL, such as text=models/minilm
    """
    target, equals, model = text.partition("=")
    name, colon, columns = target.rpartition(":")
    inputs = tuple(part.strip() for part in columns.split(","))
    is_wrong = not (equals and model and all(inputs)) or (colon and not name) or (option != "model" and len(inputs) > 1)
    if is_wrong:
        raise OptionError(f"--{option} {text}: expected {_FORMS[option]}")
    if option != "model":
        model = os.path.expanduser(model)  # a shell leaves a ~ alone that follows a =
        _check_folder(option, text, model)
    return ColumnRequest(option, name or f"{'_'.join(inputs)}_{KINDS[option]}", inputs, model)


def _check_folder(option: str, text: str, model: str) -> None:
    """What can't be a name on the hub must be there. A name has at most one slash."""
    parent = os.path.dirname(model)
    is_path = model.startswith((".", "/")) or model.count("/") > 1 or bool(parent and os.path.isdir(parent))
    if not is_path or "://" in model or os.path.exists(model):
        return
    while parent and not os.path.isdir(parent):
        parent = os.path.dirname(parent)
    there = sorted(os.listdir(parent or "."))
    alike = difflib.get_close_matches(os.path.relpath(model, parent or ".").split("/")[0], there, n=1)
    hint = f"; did you mean {os.path.join(parent, alike[0])}?" if alike else ""
    raise OptionError(f"--{option} {text}: there is no folder {model}{hint}")


def check(asked: Sequence[ColumnRequest], there: Sequence[str]) -> None:
    """Before anything is loaded: whether the table has what models take, and room for what they give."""
    if not asked:
        raise OptionError("no model is named; expected --embed, --classify or --model, such as --embed text=MODEL")
    new = [each.name for each in asked]
    for each in asked:
        if new.count(each.name) > 1 or each.name in there:
            whose = "two models have it" if new.count(each.name) > 1 else "the table has one of that name"
            raise OptionError(
                f"--{each.option} … adds a column {each.name!r}, and {whose}; "
                f"name it otherwise: --{each.option} NAME:{','.join(each.inputs)}={each.model}"
            )
        for column in each.inputs:
            if column not in there and column not in new:
                raise OptionError(
                    f"--{each.option} {','.join(each.inputs)}={each.model}: there is no column {column!r}; "
                    f"{near(column, [*there, *new])}"
                )


def near(name: str, there: Sequence[str]) -> str:
    """
    >>> near("texts", ["id", "text"]), near("speed", ["id", "text"])
    ("did you mean 'text'?", 'expected one of id, text')
    """
    alike = difflib.get_close_matches(name, there, n=3)
    return f"did you mean {' or '.join(map(repr, alike))}?" if alike else f"expected one of {', '.join(there)}"
