"""The folder of ``--dead_letters``: elements at which a step failed on every attempt, and that were passed by."""

from __future__ import annotations

import json
import logging
from collections import Counter

from luminosity._shared.text import format_bytes
from luminosity.engine.debugging.letter_files import LetterFiles
from luminosity.errors import Fix, StepFailed

__all__ = ["DeadLetters"]

_LOGGER = logging.getLogger(__name__)

_FULL = "mend the step that fails; --dead_letters is for few elements"


class DeadLetters:
    """Writes letters, as lines of JSON, on the loop's thread."""

    def __init__(self, folder: str) -> None:
        self._files = LetterFiles(folder, "letters")

    def write(self, lines: bytes) -> Counter[str]:
        """Write the letters of a bundle that is about to be committed. Return their number by step.

        They are on the disk when this returns. So a crash loses no letter of a committed bundle; if the bundle is
        repeated after it, its letters are there twice, with the same ids.
        """
        files, letters = self._files, [json.loads(line) for line in lines.splitlines()]
        steps = Counter(letter["step"] for letter in letters)
        most = steps.most_common(1)[0][0]
        if not files.has_room(lines):
            raise StepFailed(
                f"step {most!r} fails at too many elements: {files.folder} has {format_bytes(files.bytes)} of dead "
                "letters of this run",
                fix=Fix(_FULL, command=_FULL),
            )
        try:
            files.append(lines)
        except OSError as error:
            raise StepFailed(
                f"the dead letters of step {most!r} can't be written to {files.folder}: {error.strerror or error}",
                fix=Fix("make room, or pass another folder", command="make room, or use another --dead_letters"),
            ) from error
        for step, count in steps.items():
            _LOGGER.warning(
                "step %r failed at %d %s on every attempt; passed by, see %s: %s",
                step,
                count,
                "element" if count == 1 else "elements",
                files.path,
                next(letter["exception"] for letter in letters if letter["step"] == step),
            )
        return steps
