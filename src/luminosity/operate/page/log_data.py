"""The log lines of a run for the page: searched, in pages from the newest on, and as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from luminosity.operate.page.replies import FOREVER, KeptResults
from luminosity.runs import records
from luminosity.runs.log_lines import LEVELS, MOST_BYTES, LogLine, paths_of, read_lines

__all__ = ["LinesWanted", "LogFiles"]

_MOST_FILES = 6  # whose lines are kept, each up to 2.5 MB
_MOST_SHOWN = 100  # lines of a page
_MOST_NAMES = 300  # steps or workers to choose from
_CONTROLS = {code: " " for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}  # of a terminal


@dataclass(frozen=True)
class LinesWanted:
    """Says which lines a reader wants to see."""

    words: str = ""  # each must occur in a line, in any case
    level: str = ""  # this one or a worse one
    step: str = ""
    worker: str = ""
    until: float | None = None  # seconds of the run
    before: int | None = None  # the number of a line: only older ones

    def takes(self, line: LogLine) -> bool:
        """Return whether a line is wanted, wherever it is."""
        if self.level and LEVELS.index(line.level) < LEVELS.index(self.level):
            return False
        if self.until is not None and line.seconds > self.until:
            return False
        if self.step and not _is_of_step(line, self.step):
            return False
        if self.worker and line.worker != self.worker and (line.worker or f"worker {self.worker} " not in line.message):
            return False
        if not self.words:
            return True
        text = f"{line.message} {line.logger} {line.step} {line.worker} {line.traceback}".lower()
        return all(word in text for word in self.words.lower().split())


def _is_of_step(line: LogLine, step: str) -> bool:
    """Return whether code in a step has logged a line, in a part of it or in its composite; or if a line names it."""
    if not line.step:
        return f"'{step}'" in line.message  # as what the engine says of a retry
    return line.step == step or line.step.startswith(f"{step}/") or step.startswith(f"{line.step}/")


class LogFiles:
    """The log lines beside the records in a folder. Its methods may be called on several threads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = KeptResults(_read, _MOST_FILES)

    def page(self, run_id: str, wanted: LinesWanted) -> dict[str, Any]:
        """Return the newest lines that are wanted, and what the others have to choose from."""
        lines = self._lines(run_id)
        if not lines:
            return {"is_kept": False}
        found = [line for line in reversed(lines) if wanted.takes(line)]
        older = [line for line in found if wanted.before is None or line.number < wanted.before]
        return {
            "is_kept": True,
            "lines": [{k: v for k, v in line._asdict().items() if v != ""} for line in older[:_MOST_SHOWN]],
            "has_older": len(older) > _MOST_SHOWN,
            "found": len(found),
            "newer": len(found) - len(older),
            "dropped": lines[0].number - 1,
            "most_bytes": MOST_BYTES,
            "steps": sorted({line.step for line in lines if line.step})[:_MOST_NAMES],
            "workers": sorted({line.worker for line in lines if line.worker})[:_MOST_NAMES],
        }

    def text(self, run_id: str, wanted: LinesWanted, started_at: float) -> str | None:
        """Return the lines that are wanted as text, the oldest first; None if there are none of this run."""
        lines = self._lines(run_id)
        if not lines:
            return None
        dropped = lines[0].number - 1
        head = [f"# {dropped:,} older lines have gone: a run keeps {MOST_BYTES // 1_000_000} MB"] if dropped else []
        return "\n".join([*head, *_texts(lines, wanted, started_at), ""]).translate(_CONTROLS)

    def _lines(self, run_id: str) -> list[LogLine]:
        """Return all lines of a run. A file that becomes the older one meanwhile counts once."""
        older, younger = paths_of(records.path_of(self._folder, run_id))
        newest = self._files.get(younger) or []
        before = self._files.get(older) or []
        first = newest[0].number if newest else None
        return [*(line for line in before if first is None or line.number < first), *newest]


def _read(path: Path) -> tuple[list[LogLine], float]:
    try:
        return read_lines(path), FOREVER
    except OSError:
        return [], 0.0  # it has gone, or is another user's


def _texts(lines: list[LogLine], wanted: LinesWanted, started_at: float) -> Iterator[str]:
    for line in lines:
        if wanted.takes(line):
            at = datetime.fromtimestamp(started_at + line.seconds, timezone.utc)
            where = " ".join(part for part in (line.worker, line.step, line.logger) if part)
            yield f"{at:%Y-%m-%d %H:%M:%S}.{at.microsecond // 1000:03}Z {line.level.upper():8} {where}: {line.message}"
            if line.traceback:
                yield line.traceback
