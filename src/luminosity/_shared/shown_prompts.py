"""Some prompts of a run with their answers, which ``--show_prompts`` prints at the end; they go into no log."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
from collections import Counter
from collections.abc import Iterable

from luminosity._shared.model_sizes import RUN_FOLDER_VARIABLE
from luminosity._shared.text import shorten

__all__ = ["keep_prompt", "print_prompts", "prompts_wanted", "text_of_prompts", "use_shown_prompts"]

_FILE = "shown-prompts.jsonl"
_MOST_CHARACTERS = 2000  # of a prompt or an answer: wider than any terminal
_settings = {"count": 0}
_lock = threading.Lock()
_kept = Counter[tuple[int, str, str]]()
"""How many prompts of each kind this process has kept, by the process, the run's folder and the kind."""


def use_shown_prompts(count: int | None) -> None:
    """Set the value of ``--show_prompts`` for this process."""
    _settings["count"] = count or 0


def prompts_wanted(kind: str) -> int:
    """Return how many more prompts of a kind this process should keep; ``kind`` is their template."""
    folder = os.environ.get(RUN_FOLDER_VARIABLE)
    if not _settings["count"] or not folder or not os.path.isdir(folder):
        return 0
    with _lock:
        return max(0, _settings["count"] - _kept[os.getpid(), folder, kind])


def keep_prompt(kind: str, prompt: str, answer: str) -> None:
    """Keep a prompt and its answer in a file of the run until its end."""
    folder = os.environ[RUN_FOLDER_VARIABLE]
    with _lock:
        _kept[os.getpid(), folder, kind] += 1
    texts = [text[:_MOST_CHARACTERS].encode("utf-8", "replace").decode() for text in (kind, prompt, answer)]
    line = json.dumps([_settings["count"], *texts]) + "\n"
    with contextlib.suppress(OSError):  # a full disk must not fail a run for what is only shown
        file = os.open(os.path.join(folder, _FILE), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(file, line.encode())  # at once: other processes append, too
        finally:
            os.close(file)


def text_of_prompts(folder: str) -> list[str]:
    """Return the prompts that the processes of a run have kept, in lines of the terminal's width; remove their file."""
    width = shutil.get_terminal_size().columns
    path = os.path.join(folder, _FILE)
    kept: dict[str, list[tuple[str, str]]] = {}
    with contextlib.suppress(FileNotFoundError):
        with open(path, encoding="utf-8") as file:
            for count, kind, prompt, answer in _lines(file):
                some = kept.setdefault(kind, [])
                some += [(prompt, answer)] if len(some) < count else []
        os.unlink(path)
    said: list[str] = []
    for found in kept.values():
        for prompt, answer in found:
            said += [_line("prompt: ", prompt, width), _line("answer: ", answer, width)]
    return said


def print_prompts(said: Iterable[str]) -> None:
    """Print to standard output, not to a log. A closed pipe or a full disk is none of the run's business."""
    with contextlib.suppress(OSError):
        print("\n".join(said), flush=True)


def _lines(file: Iterable[str]) -> Iterable[tuple[int, str, str, str]]:
    for line in file:
        with contextlib.suppress(ValueError):  # of a process that was killed while it wrote
            yield tuple(json.loads(line))


def _line(name: str, text: str, width: int) -> str:
    """Return a text on one line, with its end cut.

    >>> _line("answer: ", "good\\n film", 16)
    'answer: good fi…'
    """
    return name + shorten(" ".join(text.split()), max(1, width - len(name)))
