"""The columns that ``lum enrich`` adds: their names, inputs and models, parsed and checked."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from luminosity._shared.text import did_you_mean, list_some
from luminosity.errors import OptionError

if TYPE_CHECKING:
    from luminosity.inference.enrich.column import Column, Nulls

__all__ = ["DEFAULT_SUFFIXES", "METAVARS", "ColumnRequest", "check_requests", "no_column", "parse_request"]

DEFAULT_SUFFIXES: Mapping[str, str] = {
    "embed": "embedding",
    "classify": "class",
    "embed-images": "embedding",
    "classify-images": "class",
    "xgboost": "prediction",
    "lightgbm": "prediction",
    "model": "prediction",
}
"""For each option, the suffix of a new column's default name: text_embedding for --embed text=MODEL."""

METAVARS: Mapping[str, str] = dict.fromkeys(("xgboost", "lightgbm"), "[NAME:]COLUMN,...=FILE")
"""How the help shows the values of options, unless as those of a model of one column."""

_FORMS = {
    "embed": "[NAME:]COLUMN=MODEL, such as text=models/minilm",
    "classify": "[NAME:]COLUMN=MODEL, such as mood:text=models/sentiment",
    "embed-images": "[NAME:]COLUMN=MODEL, such as path=models/clip",
    "classify-images": "[NAME:]COLUMN=MODEL, such as path=models/vit",
    "xgboost": "[NAME:]COLUMN[,COLUMN...]=FILE, such as score:age,income=model.json",
    "lightgbm": "[NAME:]COLUMN[,COLUMN...]=FILE, such as score:age,income=model.txt",
    "model": "[NAME:]COLUMN[,COLUMN...]=MODULE:OBJECT, such as score:age,income=my_models:handler",
}
_OF_SEVERAL = ("xgboost", "lightgbm", "model")  # options whose models take several columns
_SHOWN_COLUMNS = 20  # in a message, which stays readable
_SHOWN_NAMES = 5  # of files in a folder
_SUGGESTIONS = 3


@dataclass(frozen=True)
class ColumnRequest:
    """A new column, as the command line asks for it."""

    option: str
    name: str
    inputs: tuple[str, ...]
    model: str

    @property
    def files(self) -> tuple[str, ...]:
        """Files and folders that what the column holds depends on, if they are on this machine."""
        return () if self.option == "model" else (self.model.partition("#")[0],)

    @property
    def is_vector(self) -> bool:
        """Whether the column holds vectors, which a vector store can keep."""
        return self.option.startswith("embed")

    def __str__(self) -> str:
        return f"--{self.option} {','.join(self.inputs)}={self.model}"

    @property
    def renaming(self) -> str:
        """How to give the column another name."""
        return f"--{self.option} NAME:{','.join(self.inputs)}={self.model}"

    @property
    def output(self) -> Any:
        """The Arrow type of the column, about; None if it is known only when the model has run."""
        import pyarrow as pa

        labels = pa.struct({"label": pa.string(), "score": pa.float32()})
        kinds = {"embed": pa.list_(pa.float32()), "classify": labels}
        return kinds.get(self.option.removesuffix("-images"))

    def column(self, nulls: Nulls = "fail") -> Column:
        """Return the column for ``Enrich``. This imports the model handler, but loads no model."""
        from luminosity import Column
        from luminosity.inference.model_names import named_handler  # it imports Beam

        handler = named_handler(self.model if self.option == "model" else f"{self.option}:{self.model}")
        return Column(handler, self.inputs[0] if len(self.inputs) == 1 else list(self.inputs), nulls=nulls)


def parse_request(option: str, text: str) -> ColumnRequest:
    """Parse the value of an option.

    >>> parse_request("embed", "text=models/minilm")
    ColumnRequest(option='embed', name='text_embedding', inputs=('text',), model='models/minilm')
    >>> parse_request("model", "score:age,income=my_models:handler").inputs
    ('age', 'income')
    >>> parse_request("embed", "models/minilm")
    Traceback (most recent call last):
    luminosity.errors.OptionError: --embed models/minilm: expected [NAME:]COLUMN=MODEL, such as text=models/minilm
    """
    left, equals, model = text.partition("=")
    name, colon, columns = left.rpartition(":")
    inputs = tuple(part.strip() for part in columns.split(","))
    is_wrong = (
        not (equals and model and all(inputs))
        or (colon and not name)
        or (option not in _OF_SEVERAL and len(inputs) > 1)
    )
    if is_wrong:
        raise OptionError(f"--{option} {text}: expected {_FORMS[option]}")
    if option != "model":
        model = os.path.expanduser(model)  # The shell does not expand a ~ that follows a =.
        _check_folder(option, text, model.partition("#")[0])
    return ColumnRequest(option, name or f"{'_'.join(inputs)}_{DEFAULT_SUFFIXES[option]}", inputs, model)


def _check_folder(option: str, text: str, model: str) -> None:
    """Raise if a model is a path that does not exist. A name on the hub has at most one slash."""
    parent = os.path.dirname(model)
    is_path = model.startswith((".", "/")) or model.count("/") > 1 or bool(parent and os.path.isdir(parent))
    if not is_path or "://" in model or os.path.exists(model):
        return
    while parent and not os.path.isdir(parent):
        parent = os.path.dirname(parent)
    name = os.path.relpath(model, parent or ".").split("/")[0]
    names = sorted(os.listdir(parent or "."))
    suggestion = did_you_mean(name, names)
    there = "" if suggestion else f"; {parent or '.'} contains {list_some(names, _SHOWN_NAMES) or 'nothing'}"
    raise OptionError(f"--{option} {text}: there is no folder {model}{there}", fix=suggestion or None)


def check_requests(requests: Sequence[ColumnRequest], existing: Sequence[str]) -> None:
    """Raise unless the table's columns include all inputs, and none has the name of a new column."""
    if not requests:
        raise OptionError(
            f"no model is given, expected {', '.join(f'--{option}' for option in DEFAULT_SUFFIXES)} or --prompt, such "
            "as --embed text=MODEL"
        )
    new = [each.name for each in requests]
    for each in requests:
        if new.count(each.name) > 1 or each.name in existing:
            reason = "two models would add it" if new.count(each.name) > 1 else "the table has it already"
            raise OptionError(
                f"{each}: can't add the column {each.name!r}, because {reason}",
                fix=f"give it another name: {each.renaming}",
            )
        for column in each.inputs:
            if column not in existing and column not in new:
                raise no_column(str(each), column, [*existing, *new])


def no_column(option: str, name: str, existing: Sequence[str]) -> OptionError:
    """Return the error for an option that names a column that does not exist.

    >>> str(no_column("--id texts", "texts", ["id", "text"]))
    "--id texts: there is no column 'texts'; did you mean 'text'?"
    >>> str(no_column("--id speed", "speed", ["id", "text"]))
    "--id speed: there is no column 'speed', expected one of id, text"
    """
    suggestion = did_you_mean(name, existing, most=_SUGGESTIONS)
    expected = "" if suggestion else f", expected one of {list_some(existing, _SHOWN_COLUMNS)}"
    return OptionError(f"{option}: there is no column {name!r}{expected}", fix=suggestion or None)
