"""The work of ``lum drift watch``: reads files for the rounds, waits between them, prints what they found.

The rounds themselves are ``luminosity.drift.watch``.
"""

from __future__ import annotations

import glob
import os
import sys
import time
from collections.abc import Collection, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any

from luminosity.cli.common.exits import DRIFT, FAILED, fail, print_ignoring_closed_pipe
from luminosity.cli.common.table_options import TableReader
from luminosity.cli.drift.sources import open_source, read_keyed_columns, read_keyed_sample, read_sample
from luminosity.cli.drift.table_source import TableSource
from luminosity.drift.registry import drift_test
from luminosity.drift.samples import RowSampler, SampledRows
from luminosity.drift.watch.config import FileWatch, WatchConfig
from luminosity.drift.watch.state import Silence, load_state, only_watch, state_file, state_to_change
from luminosity.drift.watch.watcher import Look, Watcher
from luminosity.errors import DriftError, LuminosityError, OptionError
from luminosity.evaluation.description.describe_table import DescriptionState

__all__ = ["check", "rounds", "silence"]

_LONGEST_SLEEP_S = 60.0  # a clock that was set, or a machine that slept, is noticed after this time


def check(config: WatchConfig) -> int:
    """Print what the configuration means. Targets are not tried; of files, the references must exist."""
    watcher = _watcher(config)
    for watch in config.watches:
        if isinstance(watch, FileWatch):
            for path in (watch.reference, watch.floor):
                if path and "://" not in path and not os.path.exists(path) and not glob.glob(path, recursive=True):
                    raise DriftError(f"{config.path}: watch {watch.name}: there is no file, folder or pattern {path}")
    state = load_state(state_file(config.history))
    periods = watcher.periods()
    level = config.level(periods)
    per_month = config.rounds_per_month(periods)
    lines = [
        f"history {config.history}",
        f"level {level:.3g} for each round of all keys together: {per_month:,.0f} rounds a month "
        + ("with the level given" if config.fixed_level is not None else f"give {level * per_month:.3g} false alarms"),
    ]
    for watch in config.watches:
        keys = len(state.memory(watch.name).keys)
        each = f", {level / keys:.3g} for the smallest p-value of {keys:,} keys" if keys else ""
        lines.append(f"watch {watch.name}: every {config.period(watch, periods)}{each}")
    lines += [f"alerts go to {target.name}" for target in config.targets]
    print_ignoring_closed_pipe("\n".join(lines))
    return 0


def silence(config: WatchConfig, key: str, length: timedelta) -> int:
    """Remember that alerts of a key are not sent for some time."""
    path = state_file(config.history)
    try:
        until = datetime.now(timezone.utc) + length
    except OverflowError:
        raise OptionError("found a time after --for that ends after the year 9999, expected one such as 2h") from None
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with state_to_change(path) as state:
        known = {name for memory in state.watches.values() for name in memory.keys if name}
        if key != "*" and known and key not in known:
            from luminosity._shared.text import did_you_mean, list_some

            raise OptionError(
                f"found no key {key!r} in the history, expected one of {list_some(sorted(known), 10)}, or '*'",
                fix=did_you_mean(key, known) or None,
            )
        state.silences.append(Silence(key, until))
    print_ignoring_closed_pipe(f"no alerts of {'any key' if key == '*' else key} until {until:%Y-%m-%d %H:%M} UTC")
    return 0


def rounds(config: WatchConfig, *, once: bool) -> int:
    """Make one round, or rounds until the process is ended."""
    watcher = _watcher(config)
    with only_watch(watcher.state_path):
        if once:
            return _print(watcher.look(_now()))
        if config.at is not None:
            _wait_until(config.next_round(_now()))
        said: set[str] = set()
        while True:
            began = _now()
            try:
                found = watcher.look(began)
            except LuminosityError as error:  # such as a history that is locked: it may be back in the next round
                fail("drift watch", error, FAILED)
            else:
                _print(found, said)
                said = set(_complaints(found))
            _wait_until(max(config.next_round(began), _now()))


def _watcher(config: WatchConfig) -> Watcher:
    os.makedirs(os.path.dirname(os.path.abspath(config.history)), exist_ok=True)
    return Watcher(config, _read)


def _now() -> datetime:
    return datetime.now(timezone.utc)


def _wait_until(moment: datetime) -> None:
    while (left := (moment - _now()).total_seconds()) > 0:
        time.sleep(min(left, _LONGEST_SLEEP_S))


def _print(found: Look, said: Collection[str] = ()) -> int:
    """Print what a look found, and return the exit code. Complaints that the round before had are not repeated."""
    lines = [f"{alert.kind}: {alert.message}{' (silenced)' if alert.silenced else ''}" for alert in found.alerts]
    lines.append(
        f"{_now():%Y-%m-%d %H:%M} UTC · {found.tests:,} tests · {found.drifting:,} keys drift · "
        f"{found.missing:,} are missing"
    )
    print_ignoring_closed_pipe("\n".join(lines))
    sys.stdout.flush()
    complaints = _complaints(found)
    for complaint in complaints:
        if complaint not in said:
            print(f"lum drift watch: {complaint}", file=sys.stderr)
    if complaints:
        return FAILED
    return DRIFT if found.drifting or found.missing else 0


def _complaints(found: Look) -> list[str]:
    failed = [f"{name}: {reason}" for name, reason in found.failures.items()]
    return [*failed, *(f"an alert is not delivered: {reason}" for reason in found.undelivered)]


def _read(watch: FileWatch, files: Sequence[str], seed: int) -> dict[Any, Any]:
    """Read a sample of each key from files, as the test needs it; without keys, all rows have the key None."""
    reads, states = drift_test(watch.test).reads, dict[Any, DescriptionState]()
    found: dict[Any, list[SampledRows]] = {}
    for file in files:
        if not file.lower().endswith(".npy"):
            from luminosity.beam_fixes.lean_beam import import_beam

            import_beam()
        source = open_source(file, watch.columns, TableReader("drift watch"), watch.by, reads=reads)
        if reads == "columns":
            for key, state in read_keyed_columns(source, watch.by, _ignore).items():
                states.setdefault(key, DescriptionState()).merge(state)
            continue
        if watch.by is None:
            sample = read_sample(source, watch.rows, seed, watch.skip_missing, _ignore)
            found.setdefault(None, []).append(sample)
            continue
        assert isinstance(source, TableSource), "arrays are refused when they are opened with by"
        for key, sample in read_keyed_sample(source, watch.rows, seed, watch.skip_missing, _ignore).items():
            found.setdefault(key, []).append(sample)
    if any(state.rows for state in states.values()):
        return states
    if not any(len(each.rows) for samples in found.values() for each in samples):
        raise DriftError(f"{', '.join(files[:3])}: found no rows to compare, expected at least 2")
    return {key: _together(samples, watch.rows, seed) for key, samples in found.items()}


def _together(samples: list[SampledRows], most: int | None, seed: int) -> SampledRows:
    if len(samples) == 1:
        return samples[0]
    sampler = RowSampler(most, seed=seed)
    for each in samples:
        if len(each.rows):
            sampler.add(each.rows)
    return sampler.sample()


def _ignore(rows: int) -> None:
    """Show no progress: a watch has no reader at its terminal."""
