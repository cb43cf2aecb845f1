"""The configuration of ``lum drift watch``: a TOML file, checked as a whole before anything runs."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any, TypeAlias

from luminosity._shared.text import parse_duration
from luminosity._shared.toml_tables import TomlTable, read_toml
from luminosity.drift.contract import DriftTest
from luminosity.drift.registry import DEFAULT_TEST, drift_test, options_by_name
from luminosity.drift.result import MMD
from luminosity.drift.watch.deliver import Target, command_target, webhook_target
from luminosity.drift.watch.state import Silence, drift_folder
from luminosity.errors import DriftError, OptionError

__all__ = ["ANY_LEVEL", "FileWatch", "HistoryWatch", "Watch", "WatchConfig", "read_config"]

_MONTH_S = 30 * 86_400.0  # the month of an error budget
_MOST_LEVEL = 0.5  # a budget that allows more false alarms than rounds is no test
_BUDGET = re.compile(r"(\d+(?:\.\d+)?)\s+(?:per|a)\s+(day|week|month|year)")
_PERIODS_S = {"day": 86_400.0, "week": 7 * 86_400.0, "month": _MONTH_S, "year": 365 * 86_400.0}
_SHORTEST_EVERY = timedelta(seconds=1)
_LEAST_MISSING = timedelta(hours=24)  # the default of missing_after is not below a day
_MISSING_ROUNDS = 2.5  # and not below this many rounds: one that fails is not yet a key that vanished
_DAY = timedelta(days=1)
ANY_LEVEL = 0.5  # of a test with its options: a round chooses the level, and the permutations for it
_CLOCK = re.compile(r"([01]\d|2[0-3]):([0-5]\d)")


@dataclass(frozen=True)
class ErrorBudget:
    """How many false alarms all rounds together may give in some time, on average."""

    alarms: float
    seconds: float

    def level(self, rounds_per_month: float) -> float:
        """Return the level of each round. Holm's method keeps it for all keys of a round together.

        >>> round(ErrorBudget(1, _MONTH_S).level(720), 6)
        0.001389
        """
        per_month = self.alarms * _MONTH_S / self.seconds
        return min(_MOST_LEVEL, per_month / max(rounds_per_month, 1e-9))


_DEFAULT_BUDGET = ErrorBudget(1, _MONTH_S)


@dataclass(frozen=True, kw_only=True)
class HistoryWatch:
    """A watch of rows that a pipeline with ``RecordDrift`` appends to the history."""

    name: str
    reference: str
    min_effect: float
    missing_after: timedelta | None
    window: timedelta | None  # how long windows are, and so how often there is a round
    keys: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class FileWatch:
    """A watch that tests files in each round: all files of ``current``, or with ``only_new`` those not tested yet."""

    name: str
    reference: str
    current: str
    only_new: bool
    floor: str | None
    columns: tuple[str, ...]
    by: str | None
    test: str
    options: Mapping[str, Any]  # of the test
    rows: int | None
    skip_missing: bool
    min_effect: float
    missing_after: timedelta | None
    keys: tuple[str, ...] = ()


Watch: TypeAlias = HistoryWatch | FileWatch


@dataclass(frozen=True)
class WatchConfig:
    """The content of a configuration."""

    path: str
    history: str
    every: timedelta
    at: tuple[int, int] | None  # hour and minute, UTC, of a daily round
    budget: ErrorBudget | None
    fixed_level: float | None
    settle: timedelta
    seed: int
    reports: str | None
    watches: tuple[Watch, ...]
    targets: tuple[Target, ...]
    silences: tuple[Silence, ...]

    def rounds_per_month(self, periods: dict[str, timedelta] | None = None) -> float:
        """Return how many rounds all watches together have. ``periods`` are lengths of windows that were seen."""
        seen = periods or {}
        return sum(_MONTH_S / max(1.0, self.period(watch, seen).total_seconds()) for watch in self.watches)

    def period(self, watch: Watch, seen: dict[str, timedelta]) -> timedelta:
        """Return the time between two rounds of a watch."""
        if isinstance(watch, FileWatch):
            return self.every
        return watch.window or seen.get(watch.name) or self.every

    def level(self, periods: dict[str, timedelta] | None = None) -> float:
        """Return the level of each round: the one that was given, or what the error budget allows."""
        if self.fixed_level is not None:
            return self.fixed_level
        assert self.budget is not None
        return self.budget.level(self.rounds_per_month(periods))

    def next_round(self, now: datetime) -> datetime:
        """Return when the next round begins: at multiples of ``every``, or at the time of day."""
        if self.at is not None:
            today = now.replace(hour=self.at[0], minute=self.at[1], second=0, microsecond=0)
            return today if today > now else today + _DAY
        return now + self.every


def read_config(path: str) -> WatchConfig:
    """Read and check a configuration. Errors name file and line, what was found and what was expected."""
    table = read_toml(path, lambda message, fix: DriftError(message, fix=fix))
    folder = os.path.dirname(os.path.abspath(path))
    stem = os.path.splitext(os.path.basename(path))[0]
    history = table.text("history")
    every, at = _schedule(table)
    budget, level = _false_alarms(table)
    default = _Defaults(table.text("test", DEFAULT_TEST) or DEFAULT_TEST, _min_effect(table, None))
    missing_after = table.duration("missing_after", never=True) or max(_LEAST_MISSING, _MISSING_ROUNDS * every)
    reports = table.text("reports")
    place = os.path.join(folder, os.path.expanduser(history)) if history else str(drift_folder() / f"{stem}.sqlite")
    settle = table.duration("settle") or timedelta(minutes=1)
    seed = int(table.number("seed", 0, 2**31, is_whole=True) or 0)
    watches = tuple(_watch(each, folder, default, missing_after) for each in table.tables("watch"))
    if not watches:
        raise table.error("watch", "found no watch, expected at least one table [[watch]]")
    _check_names(table, watches)
    targets = tuple(_target(each) for each in table.tables("alert"))
    silences = tuple(_silence(each) for each in table.tables("silence"))
    table.finish("the configuration")
    return WatchConfig(
        path=path,
        history=place,
        every=every,
        at=at,
        budget=budget,
        fixed_level=level,
        settle=settle,
        seed=seed,
        reports=None if reports == "off" else _path(folder, reports) if reports else f"{place}.reports",
        watches=watches,
        targets=targets,
        silences=silences,
    )


def _schedule(table: TomlTable) -> tuple[timedelta, tuple[int, int] | None]:
    every = table.duration("every") or (_DAY if "at" in table else timedelta(hours=1))
    if every < _SHORTEST_EVERY:
        raise table.error("every", "found less than a second, expected at least every = '1s'")
    at = table.text("at")
    if at is None:
        return every, None
    match = _CLOCK.fullmatch(at)
    if match is None:
        raise table.error("at", f"found at={at!r}, expected a time of day in UTC, such as '06:30'")
    if every != _DAY:
        raise table.error("at", "found at beside another every than '1d', expected at for one round a day")
    return every, (int(match[1]), int(match[2]))


def _false_alarms(table: TomlTable) -> tuple[ErrorBudget | None, float | None]:
    chosen = table.choose(("false_alarms", "level"))
    if chosen == "level":
        return None, table.number("level", 0, 0.5)
    text = table.text("false_alarms")
    if text is None:
        return _DEFAULT_BUDGET, None
    match = _BUDGET.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise table.error("false_alarms", f"found false_alarms={text!r}, expected a rate such as '1 per month'")
    return ErrorBudget(float(match[1]), _PERIODS_S[match[2]]), None


@dataclass(frozen=True)
class _Defaults:
    """What the configuration says for watches that do not say it themselves."""

    test: str
    min_effect: float | None


def _min_effect(table: TomlTable, test: str | None) -> float | None:
    """Return the least effect that matters: ``min_effect``, or ``min_mmd2`` where the test is MMD."""
    chosen = table.choose(("min_effect", "min_mmd2"))
    if chosen is None:
        return None
    if chosen == "min_mmd2" and test not in (None, MMD):
        raise table.error("min_mmd2", f"found min_mmd2 beside test = {test!r}, expected min_effect", "use min_effect")
    return table.number(chosen, 0, 2)


def _kind(table: TomlTable, name: str) -> type[DriftTest]:
    try:
        return drift_test(name)
    except DriftError as error:
        raise table.error("test", error.message, error.fix.command if error.fix else "") from None


def _watch(table: TomlTable, folder: str, default: _Defaults, missing_after: timedelta) -> Watch:
    name = table.text("name")
    reference = table.text("reference")
    if name is None or reference is None:
        missing = "name" if name is None else "reference"
        raise table.error(missing, f"found a watch without {missing}, expected name and reference in each [[watch]]")
    missing = table.duration("missing_after", never=True) or missing_after
    missing_after_or_never = None if missing == timedelta.max else missing
    keys = table.texts("keys")
    source = table.choose(("current", "new_files"))
    test = table.text("test")
    if source is None:
        if test is not None:
            raise table.error("test", "found test in a watch of the history, whose rows name their test themselves")
        least = _min_effect(table, None)
        watch: Watch = HistoryWatch(
            name=name,
            reference=reference,
            min_effect=(default.min_effect if least is None else least) or 0.0,
            missing_after=missing_after_or_never,
            window=table.duration("window"),
            keys=keys,
        )
        table.finish("a watch of the history; one that tests files has current or new_files")
        return watch
    current, floor = table.text(source), table.text("floor")
    name_of_test = test or default.test
    least = _min_effect(table, name_of_test)
    options, rows, skip_missing = _options(table, _kind(table, name_of_test), has_floor=floor is not None)
    watch = FileWatch(
        name=name,
        reference=_path(folder, reference),
        current=_path(folder, current or ""),
        only_new=source == "new_files",
        floor=_path(folder, floor) if floor else None,
        columns=table.texts("column"),
        by=table.text("by"),
        test=name_of_test,
        options=options,
        rows=rows,
        skip_missing=skip_missing,
        min_effect=(default.min_effect if least is None else least) or 0.0,
        missing_after=missing_after_or_never,
        keys=keys,
    )
    if watch.only_new and "://" in watch.current:
        raise table.error("new_files", f"found new_files={current!r}, expected files on this machine")
    table.finish("a watch of files")
    return watch


def _options(table: TomlTable, test: type[DriftTest], *, has_floor: bool) -> tuple[dict[str, Any], int | None, bool]:
    """Return the options of the test, the number of random rows, and whether rows with missing values are left out."""
    options: dict[str, Any] = {}
    for name, by_test in options_by_name().items():
        value = table.value(name)
        if value is None:
            continue
        if test.name not in by_test:
            raise table.error(name, f"found {name}, which the test {test.name!r} does not have", f"remove {name}")
        try:
            options[name] = by_test[test.name].checked(value)
        except ValueError as error:
            raise table.error(name, f"found {name}={value!r}, {error}") from None
    try:
        test.from_options(options, ANY_LEVEL)
    except OptionError as error:
        raise table.error(next(iter(options), "test"), error.message, error.fix.command if error.fix else "") from None
    rows = table.number("rows", 2, 10**9, is_whole=True)
    skip_missing = table.flag("skip_missing")
    for name, is_given in (("rows", rows is not None), ("skip_missing", skip_missing)):
        if is_given and test.reads != "rows":
            said = f"found {name}, but the test {test.name!r} reads all rows, missing values included"
            raise table.error(name, said, f"remove {name}")
    if has_floor and not test.has_floor:
        raise table.error("floor", f"found floor, which the test {test.name!r} does not have", "remove floor")
    return options, None if rows is None else int(rows), skip_missing


def _path(folder: str, path: str) -> str:
    return path if "://" in path else os.path.join(folder, os.path.expanduser(path))


def _check_names(table: TomlTable, watches: tuple[Watch, ...]) -> None:
    names = [watch.name for watch in watches]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise table.error("watch", f"found two watches with the name {twice!r}, expected a name of its own for each")


def _target(table: TomlTable) -> Target:
    kind = table.choose(("command", "webhook", "webhook_env"))
    if kind is None:
        raise table.error("command", "found an alert without command, webhook or webhook_env, expected one of them")
    command, address = table.texts("command"), table.text("webhook")
    variable, headers = table.text("webhook_env"), table.mapping("headers")
    timeout = table.duration("timeout") or timedelta(seconds=10)
    retries = table.number("retries", 0, 10, is_whole=True)
    table.finish("an alert")
    if timeout > timedelta(minutes=5):
        raise table.error("timeout", f"found a timeout of {timeout}, expected at most 5m")
    try:
        if kind == "command":
            if headers or retries is not None:
                raise table.error("headers", "found headers or retries beside command, expected them beside a webhook")
            return command_target(command, timeout.total_seconds())
        return webhook_target(
            address, variable, headers, timeout.total_seconds(), 2 if retries is None else int(retries)
        )
    except DriftError as error:
        if error.message.startswith(("found", "there")):
            raise table.error(kind, error.message, error.fix.command if error.fix else "") from None
        raise


def _silence(table: TomlTable) -> Silence:
    key, start = table.text("key", "*") or "*", table.moment("from")
    chosen = table.choose(("until", "for"))
    until, length = table.moment("until"), table.text("for")
    table.finish("a silence")
    if chosen == "for":
        parsed = parse_duration(length or "")
        if start is None or parsed is None:
            raise table.error("for", "found for without from, or no time, expected from and for, such as for = '2h'")
        try:
            until = start + parsed
        except OverflowError:
            raise table.error("for", f"found for={length!r}, expected an end before the year 10000") from None
    if until is None:
        raise table.error("until", "found a silence without an end, expected until, or from and for")
    if start is not None and until <= start:
        raise table.error("until", "found a silence that ends before it begins, expected until to be after from")
    return Silence(key, until.astimezone(timezone.utc), start)
