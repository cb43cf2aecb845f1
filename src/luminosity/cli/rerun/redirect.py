"""Rewrites a command line so that it writes to new places."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from luminosity.errors import OptionError
from luminosity.runs.manifest.files import files_of, is_local
from luminosity.runs.manifest.masking import MASK

__all__ = ["Redirected", "copy_inputs", "redirect", "with_secrets"]

_AFTER_PREFIX = ("-", "_", ".", "*")  # what may follow the prefix that a sink of Beam's was given
# The old ones would continue, or be replaced. There is no copy to restore from, and the run begins.
_NEW_FOLDERS = {
    "--checkpoint_dir": "checkpoint_dir",
    "--checkpoint_copy": "checkpoint_copy",
    "--restore_from": "checkpoint_copy",
    "--save_failed": "save_failed",
}


@dataclass(frozen=True)
class Redirected:
    """A command line with other outputs."""

    words: tuple[str, ...]
    moved: dict[str, str]  # old paths to new ones
    unnamed: tuple[str, ...]  # outputs that no word of the command names

    def new_path(self, path: str) -> str:
        """Return where something is now that was at ``path``."""
        for old, new in sorted(self.moved.items(), key=lambda each: -len(each[0])):
            if path.startswith(old):
                return new + path[len(old) :]
        return path


def redirect(
    words: Sequence[str], folder: str, outputs: Sequence[str], inputs: Sequence[str], into: str, since: float
) -> Redirected:
    """Let every word that names an output name a path in ``into`` instead.

    A word names an output if it is its path, a folder around it, or its beginning. Words that name other files which
    have changed ``since`` the run began are outputs, too, but for ``inputs``. ``folder`` is where the command runs.
    """
    first = 2 if words[0] == "lum" else 1  # the words before are no paths
    values = {value: os.path.abspath(os.path.join(folder, value)) for word in words[first:] for value in _values(word)}
    script = next((path for path in values.values() if path.endswith((".py", ".yaml", ".yml"))), "")
    fixed = (folder + os.sep, script)  # paths around these are no outputs
    candidates = {path for path in values.values() if path != script and not any(_is_in(each, path) for each in fixed)}
    moved: dict[str, str] = {}
    unnamed: list[str] = []
    for output in outputs:
        naming = [path for path in candidates if _names(path, output)]
        if naming and is_local(output):
            path = max(naming, key=len)
            moved.setdefault(path, _new(path, into, moved))
        else:
            unnamed.append(output)
    read = [path for path in candidates if any(_is_in(each, path) or each == path for each in inputs)]
    for path in sorted(candidates.difference(read)):
        if (
            os.path.exists(path)
            and not any(_is_in(path, old) or path == old for old in moved)
            and files_of(path, since)
        ):
            moved[path] = _new(path, into, moved)
    renamed = {value: moved[path] for value, path in values.items() if path in moved}
    changed = [_rewritten(word, renamed, into) for word in words[first:]]
    return Redirected((*words[:first], *changed), moved, tuple(unnamed))


def copy_inputs(paths: Sequence[str], redirected: Redirected, outputs: Sequence[str]) -> None:
    """Copy inputs that lie in folders which have moved: the command looks for them in the new ones."""
    for path in paths:
        for file in files_of(path) if is_local(path) else ():
            new = redirected.new_path(file)
            if new != file and not any(file == output or _is_in(file, output) for output in outputs):
                os.makedirs(os.path.dirname(new), exist_ok=True)
                shutil.copy2(file, new)


def with_secrets(words: Sequence[str], more: Sequence[str], run: str) -> list[str]:
    """Return the command with ``more`` options, which replace those whose values were not recorded.

    Raises :class:`OptionError` if a secret is still missing.
    """
    given = {word.partition("=")[0] for word in more}
    kept: list[str] = []
    for word in words:
        if MASK in word and word.partition("=")[0] in given:
            continue
        if word == MASK and kept and kept[-1] in given:
            kept.pop()
            continue
        kept.append(word)
    for before, word in zip(["", *kept], kept, strict=False):
        if MASK in word:
            name = before if word == MASK else word.partition("=")[0]
            raise OptionError(
                f"the command of run {run} has a secret in {name}, and secrets are not recorded",
                fix=f"give it again: lum rerun {run} -- {name}=VALUE",
            )
    return [*kept, *more]


def _values(word: str) -> Iterator[str]:
    """Yield the texts in a word that may be paths."""
    value = word.partition("=")[2] if word.startswith("-") else word
    if value.startswith("{"):
        yield from (each for each in _json(value).values() if isinstance(each, str) and each)
    elif value:
        yield value


def _rewritten(word: str, renamed: dict[str, str], into: str) -> str:
    name, has_value, value = word.partition("=")
    if not word.startswith("-"):
        name, has_value, value = "", "", word
    elif name in _NEW_FOLDERS and has_value:
        return f"{name}={os.path.join(into, _NEW_FOLDERS[name])}"
    if value.startswith("{"):
        content = _json(value)
        changed = {each: renamed.get(path, path) if isinstance(path, str) else path for each, path in content.items()}
        value = json.dumps(changed) if changed != content else value
    return f"{name}{has_value}{renamed.get(value, value)}"


def _json(text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _names(path: str, output: str) -> bool:
    return output == path or _is_in(output, path) or (output.startswith(path) and output[len(path)] in _AFTER_PREFIX)


def _is_in(path: str, folder: str) -> bool:
    return path.startswith(folder.rstrip(os.sep) + os.sep)


def _new(path: str, into: str, moved: dict[str, str]) -> str:
    name = os.path.basename(path.rstrip(os.sep))
    number = 1
    new = os.path.join(into, name)
    while new in moved.values():
        number += 1
        new = os.path.join(into, f"{number}-{name}")
    return new
