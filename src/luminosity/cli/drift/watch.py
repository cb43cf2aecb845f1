"""``lum drift watch CONFIG``: look for drift again and again, and alert when the state of a key changes.

The rounds themselves are ``luminosity.drift.watch``.
"""

from __future__ import annotations

import argparse
import glob
import os
import sys
import time
from collections.abc import Collection, Sequence
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

from luminosity._shared.text import did_you_mean, list_some, parse_duration
from luminosity.cli.common.exits import DRIFT, FAILED, WRONG_USE, fail, print_ignoring_closed_pipe
from luminosity.cli.common.options import add_command
from luminosity.cli.common.table_options import TableReader
from luminosity.drift.registry import drift_test
from luminosity.engine.process import check_address_space
from luminosity.errors import DriftError, LuminosityError, OptionError

if TYPE_CHECKING:  # these import NumPy and Beam, which takes a second: not for --help
    from luminosity.drift.samples import SampledRows
    from luminosity.drift.watch.config import FileWatch, WatchConfig
    from luminosity.drift.watch.watcher import Look, Watcher

__all__ = ["NAME", "add_to"]

NAME = "drift watch"
_LONGEST_SLEEP_S = 60.0  # a clock that was set, or a machine that slept, is noticed after this time
_DESCRIPTION = """\
Look for drift on a schedule, or in a history that a pipeline with RecordDrift
appends to. Alert by command or webhook when drift of a key begins or ends, when
a key has not been tested for some time, and when it is tested again. CONFIG is a
TOML file. Rounds go on until Ctrl-C.

Exit codes with --once: 0 no key drifts or is missing, 3 one does, 1 a watch
failed or an alert could not be delivered, 2 wrong usage or configuration.
"""
_EPILOG = """\
examples:
  lum drift watch watch.toml              make rounds until Ctrl-C
  lum drift watch watch.toml --once       make one round now, for cron
  lum drift watch watch.toml --check      check the file, show the level
  lum drift watch watch.toml --silence language=de --for 2h
                        keep alerts of this key, and send none for two hours
"""


def add_to(commands: Any) -> None:
    """Add the subcommand ``drift watch`` to the parser of ``lum``."""
    parser = add_command(commands, NAME, "look for drift again and again, and alert on changes", _DESCRIPTION, _EPILOG)
    parser.add_argument("config", metavar="CONFIG", help="the configuration, a TOML file")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--once", action="store_true", help="make one round now, and exit with a code for cron")
    which.add_argument("--check", action="store_true", help="check the configuration and print the level, test nothing")
    which.add_argument("--silence", metavar="KEY", help="send no alerts of this key, or of all with '*'; needs --for")
    parser.add_argument("--for", type=_duration, dest="length", metavar="TIME", help="how long --silence lasts: 2h, 1d")
    parser.set_defaults(command=_watch)


def _watch(parsed: argparse.Namespace) -> int:
    from luminosity.drift.watch.config import read_config

    try:
        if (parsed.silence is None) != (parsed.length is None):
            raise OptionError("found one of --silence and --for, expected both: --silence KEY --for 2h")
        config = read_config(parsed.config)
    except LuminosityError as error:
        return fail(NAME, error, WRONG_USE)
    check_address_space()  # JAX ends the process if it finds too little
    try:
        if parsed.check:
            return _check(config)
        if parsed.silence is not None:
            return _silence(config, parsed.silence, parsed.length)
        return _rounds(config, once=parsed.once)
    except LuminosityError as error:
        return fail(NAME, error, FAILED)


def _duration(text: str) -> timedelta:
    found = parse_duration(text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a time such as 30m, 2h or 1d")
    return found


def _check(config: WatchConfig) -> int:
    """Print what the configuration means. Targets are not tried; of files, the references must exist."""
    from luminosity.drift.watch.config import FileWatch
    from luminosity.drift.watch.state import load_state, state_file

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


def _silence(config: WatchConfig, key: str, length: timedelta) -> int:
    """Remember that alerts of a key are not sent for some time."""
    from luminosity.drift.watch.state import Silence, state_file, state_to_change

    path = state_file(config.history)
    try:
        until = datetime.now(timezone.utc) + length
    except OverflowError:
        raise OptionError("found a time after --for that ends after the year 9999, expected one such as 2h") from None
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with state_to_change(path) as state:
        known = {name for memory in state.watches.values() for name in memory.keys if name}
        if key != "*" and known and key not in known:
            raise OptionError(
                f"found no key {key!r} in the history, expected one of {list_some(sorted(known), 10)}, or '*'",
                fix=did_you_mean(key, known) or None,
            )
        state.silences.append(Silence(key, until))
    print_ignoring_closed_pipe(f"no alerts of {'any key' if key == '*' else key} until {until:%Y-%m-%d %H:%M} UTC")
    return 0


def _rounds(config: WatchConfig, *, once: bool) -> int:
    """Make one round, or rounds until the process is ended."""
    from luminosity.drift.watch.state import only_watch

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
    from luminosity.drift.watch.watcher import Watcher

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
    from luminosity.cli.drift.sources import open_source, read_keyed_columns, read_keyed_sample, read_sample
    from luminosity.cli.drift.table_source import TableSource
    from luminosity.evaluation.description.describe_table import DescriptionState

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
    from luminosity.drift.samples import RowSampler

    if len(samples) == 1:
        return samples[0]
    sampler = RowSampler(most, seed=seed)
    for each in samples:
        if len(each.rows):
            sampler.add(each.rows)
    return sampler.sample()


def _ignore(rows: int) -> None:
    """Show no progress: a watch has no reader at its terminal."""
