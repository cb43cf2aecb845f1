"""Watches four languages for 30 made-up days with two drifts and a language that vanishes, and prints the alerts.

``python examples/drift/thirty_days.py FOLDER`` takes some seconds. It does what ``lum drift watch`` does every day,
with its own clock, and with rows that are made up instead of read from files. The tests are real.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path

import numpy as np

from luminosity.drift import SampledRows
from luminosity.drift.watch.config import FileWatch, read_config
from luminosity.drift.watch.watcher import Watcher

CONFIG = """\
history = "drift.sqlite"
every = "1d"
false_alarms = "1 per month"   # of all languages together
min_mmd2 = 0.005               # a smaller drift does not matter
missing_after = "36h"
reports = "off"

[[watch]]
name = "reviews"
reference = "reference"
current = "today"
by = "language"

[[alert]]
command = ["tee", "-a", ALERTS]  # gets each alert as JSON on its standard input
"""
LANGUAGES = ("de", "en", "fr", "it")
ROWS = 80  # of each language and day
FIRST = datetime(2030, 1, 1, 6, tzinfo=timezone.utc)


class MadeUpDays:
    """Makes the rows of each day: ``de`` drifts on days 8 to 12, ``en`` from day 20 on, ``it`` is gone from day 15."""

    def __init__(self) -> None:
        self.day = 1

    def read(self, watch: FileWatch, files: Sequence[str], seed: int) -> dict[str, SampledRows]:
        """Return the rows of each language, for the reference or for today."""
        is_reference = list(files) == [watch.reference]
        random = np.random.default_rng(0 if is_reference else self.day)
        shifts = {"de": 8 <= self.day <= 12, "en": self.day >= 20}
        found: dict[str, SampledRows] = {}
        for language in LANGUAGES:
            shift = 0.7 if shifts.get(language) and not is_reference else 0.0
            rows = random.normal(shift, 1, size=(ROWS, 4)).astype(np.float32)
            if is_reference or not (language == "it" and self.day >= 15):
                found[language] = SampledRows(rows, np.arange(ROWS), ROWS)
        return found


def watch_a_month(folder: Path) -> list[tuple[int, str, str]]:
    """Return the alerts of 30 days: day, kind and key. They are also in ``alerts.jsonl``, as the command got them."""
    config = folder / "watch.toml"
    config.write_text(CONFIG.replace("ALERTS", json.dumps(str(folder / "alerts.jsonl"))), encoding="utf-8")
    days = MadeUpDays()
    found: list[tuple[int, str, str]] = []
    for day in range(1, 31):
        days.day = day
        watcher = Watcher(read_config(str(config)), days.read)  # new each day, as with --once in a crontab
        look = watcher.look(FIRST + timedelta(days=day - 1))
        if look.failures or look.undelivered:
            raise SystemExit(f"day {day}: {look.failures or look.undelivered}")
        found += [(day, alert.kind, alert.key) for alert in look.alerts]
    return found


def main() -> None:
    """Watch a month in the folder that is named, or in a temporary one."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="drift-"))
    folder.mkdir(parents=True, exist_ok=True)
    for day, kind, key in watch_a_month(folder):
        print(f"day {day:2}: {kind:8} {key}")
    print(f"alerts and history are in {folder}")


if __name__ == "__main__":
    main()
