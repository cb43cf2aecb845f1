"""``lum state DIR STEP``: show the state and timers that a checkpoint has of a step."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any, cast

from luminosity._shared.text import shorten
from luminosity.cli.common.options import add_command, at_least
from luminosity.cli.common.output import output_console
from luminosity.runs.views import words

if TYPE_CHECKING:
    from luminosity.engine.durable.stored_state import Kept

__all__ = ["add_to", "state"]

_ROWS = 50
_LONGEST_OF_OTHERS = 36  # characters that a column beside the values takes of a line
_LEAST_OF_VALUES = 20  # what is shown of a value on a narrow terminal; --json has all
_GAP = 2  # between columns
_DESCRIPTION = """\
Show the state and timers that the checkpoint of a run has of a step. Without
STEP, list the steps that have any. Works while a run uses the folder, and
changes nothing.
"""
_EPILOG = """\
A value whose coder only the pipeline's own program has, such as a pickled
object, is shown as its number of bytes: nothing is unpickled. Accumulators of a
combining state are listed as they are stored, before they are combined.

exit codes:
  0  there is such a step, or the folder has no step with state
  2  there is no such step, or no checkpoint

examples:
  lum state work/checkpoint                       list the steps
  lum state work/checkpoint Count                 show the first 50 cells
  lum state work/checkpoint Count --key=apples    those of one key
  lum state work/checkpoint Count --json          all of them, a line of JSON each
"""


def add_to(commands: Any) -> None:
    """Add this command to the subparsers of ``lum``."""
    parser = add_command(commands, "state", "show the state that a checkpoint has", _DESCRIPTION, _EPILOG)
    parser.add_argument("folder", metavar="DIR", help="the checkpoint folder")
    parser.add_argument("step", metavar="STEP", nargs="?", help="the name of a step, or its unique end")
    parser.add_argument("--key", metavar="KEY", help="show this key alone; keys that are no text are given as JSON")
    parser.add_argument(
        "--limit",
        type=lambda text: at_least(1, text),
        metavar="N",
        help=f"show at most this many cells (default: {_ROWS}, and all with --json)",
    )
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each cell and timer")
    parser.set_defaults(command=_command)


def _command(parsed: argparse.Namespace) -> int:
    return state(parsed.folder, parsed.step, parsed.key, parsed.limit, parsed.json)


def state(
    folder: str, step: str | None = None, key: str | None = None, limit: int | None = None, as_json: bool = False
) -> int:
    """Print the state and timers of a step, or the steps that have any; return the exit code.

    Raises :class:`CheckpointError` if the folder has no checkpoint, or nothing of the step.
    """
    from luminosity.engine.durable.stored_state import kept_by, steps_with_state  # they import Beam

    if step is None:
        names = steps_with_state(folder)
        if as_json:
            print(json.dumps(names))
        else:
            print("\n".join(names) or "no step has state or timers")
        return 0
    found = (each for each in kept_by(folder, step) if key is None or _is_key(each.key, key))
    if as_json:
        for each in itertools.islice(found, limit):
            print(json.dumps(_plain(each), ensure_ascii=False))
        return 0
    _print_table(found, limit or _ROWS)
    return 0


def _is_key(key: Any, wanted: str) -> bool:
    return str(key) == wanted or (not isinstance(key, str) and json.dumps(_value(key)) == _normal(wanted))


def _normal(text: str) -> str | None:
    try:
        return json.dumps(json.loads(text))
    except ValueError:
        return None


def _print_table(found: Iterator[Kept], limit: int) -> None:
    from rich.table import Table
    from rich.text import Text

    rows = list(itertools.islice(found, limit))
    if not rows:
        print("no state or timers of this key")
        return
    columns = {
        "key": [_text(each.key) for each in rows],
        "window": [_window_text(each) for each in rows],
        "name": [each.name for each in rows],
        "kind": [each.kind for each in rows],
        "value": [_value_text(each) for each in rows],
    }
    used = {name: texts for name, texts in columns.items() if any(texts) or name == "value"}
    console = output_console()
    table = Table(box=None, pad_edge=False)
    room = console.width
    for name, texts in used.items():
        if name == "value":
            table.add_column(name, no_wrap=True)
        else:
            width = min(_LONGEST_OF_OTHERS, max(map(len, [name, *texts])))
            table.add_column(name, overflow="fold", min_width=width)
            room -= width + _GAP
    used["value"] = [shorten(text, max(_LEAST_OF_VALUES, room)) for text in used["value"]]
    for cells in zip(*used.values(), strict=True):
        table.add_row(*map(Text, cells))
    console.print(table)
    if left := sum(1 for _ in found):
        print(f"and {words.number(left)} more: choose with --key, or show more with --limit")


def _text(value: Any) -> str:
    from luminosity.engine.durable.stored_values import Undecoded

    if isinstance(value, str | Undecoded):
        return str(value)
    if isinstance(value, list) and any(isinstance(each, Undecoded) for each in cast("list[Any]", value)):
        return ", ".join(map(_text, cast("list[Any]", value)))
    return json.dumps(_value(value), ensure_ascii=False)


def _value_text(kept: Kept) -> str:
    return f"fires at {_moment(kept.value)}" if kept.kind.endswith("timer") else _text(kept.value)


def _window_text(kept: Kept) -> str:
    if kept.window is None:
        return ""
    if not isinstance(kept.window, tuple):
        return str(kept.window)
    start, end = kept.window
    return f"{_moment(start)} + {words.duration(end - start)}"


def _moment(seconds: float) -> str:
    try:
        return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}" + (
            f"{seconds % 1:.3f}"[1:] if seconds % 1 else ""
        )
    except (ValueError, OverflowError, OSError):  # the end of time
        return f"{seconds:g} s"


def _plain(kept: Kept) -> dict[str, Any]:
    return {
        "step": kept.step,
        "key": _value(kept.key),
        "window": _value(kept.window),
        "name": kept.name,
        "kind": kept.kind,
        "value": _value(kept.value),
    }


def _value(value: Any) -> Any:
    """Return a value that JSON has: bytes as hexadecimal digits, sets as sorted lists, keys of dicts as texts."""
    from luminosity.engine.durable.stored_values import Undecoded

    match value:
        case Undecoded():
            return {"bytes": value.data.hex(), "coder": value.coder}
        case bytes():
            return {"bytes": value.hex()}
        case dict():
            return {key if isinstance(key, str) else str(key): _value(each) for key, each in value.items()}
        case set():
            return sorted(map(_value, value), key=repr)
        case tuple() | list():
            return [_value(each) for each in value]
        case float() if value != value or abs(value) == float("inf"):
            return str(value)
        case _:
            return value
