"""The list of runs: a line about each, searched, filtered, and grouped by job with a short history.

Reading thousands of records takes long. So the lines of runs that have ended are kept in a file beside the records, and
a list reads a bounded part of what it does not know yet, the newest runs first.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from luminosity._shared.shared_files import is_own_file, replace_file
from luminosity.operate.page.replies import FOREVER, json_bytes
from luminosity.runs import records
from luminosity.runs.records import Damaged, FileVersion, version_of

__all__ = ["MOST_SHOWN", "Asked", "RunList", "jobs_of"]

_FORMAT = 1  # of the file with lines; increases when lines get other fields
_MOST_SHEETS = 4  # price sheets whose lists are kept: one takes some 10 MB with ten thousand runs
_MOST_READS = 100  # records that one list reads; the next list goes on
_MOST_BYTES = 60_000_000  # of these records
_MOST_KEPT = 20_000  # lines
_SAVE_EVERY_S = 10.0  # unless all runs are known: then at once
MOST_SHOWN = 1_000  # lines in one answer
_MOST_JOBS = 200
_MOST_HISTORY = 20  # runs of a job
_MOST_BEFORE = 10  # runs with which the newest one is compared
_LEAST_BEFORE = 2
_SLOWER, _FASTER = 1.25, 0.8  # smaller differences are those between two equal runs
_LEAST_S = 1.0  # a difference that matters
_GROUPS = {"running": "running", "failed": "failed", "done": "done", "drained": "done"}  # by state; others are "other"
Content = dict[str, Any]


@dataclass(frozen=True)
class Asked:
    """What a reader wants to see of the list."""

    words: str = ""  # each must occur in a line, in any case
    group: str = ""  # running, done, failed or other
    job: str = ""  # the name of a job or script
    folder: str | None = None  # of the script
    limit: int = 200

    def takes(self, line: Content) -> bool:
        """Return whether a line is to be shown, whatever its state."""
        if self.job and (line["name"] != self.job or (self.folder is not None and line["folder"] != self.folder)):
            return False
        if not self.words:
            return True
        text = " ".join(str(line.get(name) or "") for name in ("name", "folder", "id", "user", "arguments", "failure"))
        return all(word in text.lower() for word in self.words.lower().split())


class RunList:
    """The lines about the runs in a folder. Its methods may be called on several threads."""

    def __init__(
        self, folder: Path, line_of: Callable[[Path], tuple[Content | Damaged, float]], prices: str = ""
    ) -> None:
        """``line_of`` reads a record, and says for how many seconds its line counts.

        ``prices`` names those of the costs.
        """
        self._folder = folder
        self._line_of = line_of
        self._lock = threading.Lock()
        self._known: dict[str, tuple[FileVersion, float, Content | Damaged]] = {}
        self._prices = hashlib.sha256(prices.encode()).hexdigest()[:16]
        self._path = folder / f"runs-{os.getuid()}-{self._prices}.cache.json"
        self._is_loaded = False
        self._unsaved = 0
        self._saved_at = 0.0
        self.reads = 0  # of records, so far

    def content(self, asked: Asked) -> Content:
        """Return the runs that are asked for, those under way first, then the newest; and how many there are."""
        with self._lock:
            found, unread = self._all()
        lines = [each for each in found if isinstance(each, dict)]
        damaged = [{"file": each.path.name, "reason": each.reason} for each in found if isinstance(each, Damaged)]
        taken = [line for line in lines if asked.takes(line)]
        counts = Counter(_GROUPS.get(line["state"], "other") for line in taken)
        if asked.group:
            taken = [line for line in taken if _GROUPS.get(line["state"], "other") == asked.group]
        taken.sort(key=lambda line: line["state"] != "running")
        return {
            "folder": str(self._folder),
            "total": len(lines),
            "live": sum(line["state"] == "running" for line in lines),
            "unread": unread,
            "matches": len(taken),
            "groups": counts,
            "runs": taken[: min(asked.limit, MOST_SHOWN)],
            "jobs": jobs_of(taken),
            "damaged": damaged,
        }

    def _all(self) -> tuple[list[Content | Damaged], int]:
        """Return what is known of all runs, the newest first, and how many are still to be read."""
        if not self._is_loaded:
            self._load()
        now, before, size, unread = time.monotonic(), self.reads, 0, 0
        found: list[Content | Damaged] = []
        ids = records.run_ids(self._folder)
        within = os.path.join(self._folder, "")  # texts: ten thousand paths take longer to make than to look up
        for run_id in ids:
            held = self._known.get(run_id)
            is_enough = self.reads - before >= _MOST_READS or size > _MOST_BYTES
            if held is None and is_enough:
                unread += 1
                continue
            version = version_of(f"{within}{run_id}.json")
            if version is None:
                continue  # it was removed just now
            if held is not None and held[0] == version and now < held[1]:
                found.append(held[2])
            elif is_enough:
                unread += 1
            else:
                size += version[2]
                self.reads += 1
                line, seconds = self._line_of(records.path_of(self._folder, run_id))
                self._known[run_id] = (version, time.monotonic() + seconds, line)
                self._unsaved += seconds == FOREVER and isinstance(line, dict)
                found.append(line)
        for run_id in self._known.keys() - set(ids[:_MOST_KEPT]):
            del self._known[run_id]
        self._save(is_complete=not unread)
        return found, unread

    def _load(self) -> None:
        self._is_loaded = True
        try:
            with open(self._path, "rb") as file:
                if not is_own_file(file.fileno()):
                    return  # in a shared folder, another user could write anything
                content = json.loads(file.read())
            if content["format"] == _FORMAT:
                for run_id, (version, line) in content["lines"].items():
                    self._known[run_id] = (tuple(version), FOREVER, dict(line))
        except FileNotFoundError:
            return  # no list was made yet
        except records.UNREADABLE:
            self._known.clear()  # the records are read again

    def _save(self, *, is_complete: bool) -> None:
        now = time.monotonic()
        if not self._unsaved or not (is_complete or now - self._saved_at > _SAVE_EVERY_S):
            return
        self._unsaved, self._saved_at = 0, now
        lines = {
            run_id: (version, line)
            for run_id, (version, until, line) in self._known.items()
            if until == FOREVER and isinstance(line, dict) and line["state"] != "lost"
        }
        # In a folder that this user can't write to, the next start reads the records again.
        with contextlib.suppress(OSError):
            replace_file(self._path, json_bytes({"format": _FORMAT, "lines": lines}), is_private=True, has_writers=True)
            self._remove_others()

    def _remove_others(self) -> None:
        """Remove lists with other prices, those that were not written for longest: each price sheet has its own."""
        others = [path for path in self._folder.glob(f"runs-{os.getuid()}-*.cache.json") if path != self._path]
        others.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
        for path in others[_MOST_SHEETS - 1 :]:
            path.unlink()


def jobs_of(lines: Iterable[Content]) -> list[Content]:
    """Return the jobs of these runs, the newest first, each with its last runs and whether the newest one is slower.

    ``lines`` are those under way first, then the newest.
    """
    by_job: dict[tuple[str, str], list[Content]] = defaultdict(list)
    for line in lines:
        by_job[line["name"], line["folder"]].append(line)
    return [_job(name, folder, runs) for (name, folder), runs in list(by_job.items())[:_MOST_JOBS]]


def _job(name: str, folder: str, runs: Sequence[Content]) -> Content:
    ordered = sorted(runs, key=lambda line: line["id"], reverse=True)
    ratio, compared = _pace(ordered)
    return {
        "name": name,
        "folder": folder,
        "runs": len(ordered),
        "states": Counter(_GROUPS.get(line["state"], "other") for line in ordered),
        "newest": ordered[0],
        "ratio": ratio,
        "compared": compared,
        "history": [_point(line) for line in ordered[:_MOST_HISTORY]][::-1],
    }


def _point(line: Content) -> Content:
    fields = ("id", "state", "started_at", "seconds", "elements")
    return {**{name: line[name] for name in fields}, "cost": line["cost"]["total"]}


def _pace(runs: Sequence[Content]) -> tuple[float | None, int]:
    """Return how many times longer an element took in the newest run that is done than in those before, and how many.

    None if it is not known, or about the same. ``runs`` are the newest first.
    """
    done = [run for run in runs if run["state"] == "done" and run["seconds"] and not run["is_stream"]]
    before = done[1 : 1 + _MOST_BEFORE]
    if len(before) < _LEAST_BEFORE:
        return None, len(before)
    has_counts = all(run["elements"] for run in (done[0], *before))

    def cost_of(run: Content) -> float:
        return run["seconds"] / run["elements"] if has_counts else run["seconds"]

    usual = median(map(cost_of, before))
    ratio = cost_of(done[0]) / usual
    expected = done[0]["seconds"] / ratio  # for as many elements
    if _FASTER < ratio < _SLOWER or abs(done[0]["seconds"] - expected) < _LEAST_S:
        return None, len(before)
    return round(ratio, 2), len(before)
