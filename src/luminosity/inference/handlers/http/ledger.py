"""What the requests of all workers of a run have taken from the limits that they share, in a file of the run."""

from __future__ import annotations

import contextlib
import math
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from luminosity._shared.model_sizes import RUN_FOLDER_VARIABLE
from luminosity.errors import RemoteModelError

__all__ = ["Ask", "Ledger", "Most", "Refused", "Wait"]

_FILE = "server-limits.sqlite"
_SLOTS = 60  # of a window: what has ended in a slot leaves the window together, so that a file has few rows
_LOOK_AGAIN_S = 0.25  # while requests are under way: each may take less than it might have
_LONGEST_LOCK_S = 60.0  # a turn takes less than a millisecond
_HOLD_S = 1.0  # how long a request that holds a place waits at most: if it is gone, others wait little
_PLACE_S = 5.0  # a request that comes back this much later than it was told to has given up its place
_OVERDUE_S = 30.0  # a request that has not ended this long after its timeout belongs to a process that was killed

_TABLES = """
CREATE TABLE IF NOT EXISTS under_way
    (id INTEGER PRIMARY KEY, account TEXT, ends REAL, tokens INTEGER, nanos INTEGER);
CREATE TABLE IF NOT EXISTS ended
    (account TEXT, slot INTEGER, requests INTEGER, tokens INTEGER, PRIMARY KEY (account, slot));
CREATE TABLE IF NOT EXISTS places
    (name TEXT PRIMARY KEY, account TEXT, since REAL, until REAL);
CREATE TABLE IF NOT EXISTS spent
    (account TEXT PRIMARY KEY, tokens INTEGER, nanos INTEGER);
"""


@dataclass(frozen=True)
class Ask:
    """The most that a request may take: tokens, their cost in billionths, and seconds."""

    tokens: int
    nanos: int
    seconds: float
    name: str = ""
    """Of the request, the same each time that it asks, and of no other; without one, it never gets a place."""
    since: float = math.inf
    """When it asked first, by the ledger's clock."""


@dataclass(frozen=True)
class Most:
    """What is allowed; None for no limit. The first two are of any window of ``window_s`` seconds."""

    requests: int | None = None
    window_tokens: int | None = None
    window_s: float = 60.0
    tokens: int | None = None
    """The budget of tokens of the account."""
    nanos: int | None = None
    """The budget of cost of the account."""
    run_nanos: int | None = None
    """The budget of cost of all accounts together."""


@dataclass(frozen=True)
class Wait:
    """There is no room now; how many seconds to wait before the next try."""

    seconds: float


@dataclass(frozen=True)
class Refused:
    """A budget has no room for the request, and never will: which one, and what is spent of it."""

    budget: str
    spent: int


class Ledger:
    """Reserves what each request may take before it is sent, and corrects that when the request has ended.

    All processes of a run on a machine share the file: the limits hold for all of them together. A limit on a window
    holds as the server sees it, whenever in its time a request arrives: the request counts from its reservation until a
    whole window after its end. If a process is killed, its requests under way count as if they took all they might
    have. A request that has waited for a whole window holds a place, to which younger ones yield: a large one would
    never find room among many small ones.

    >>> ledger = Ledger(":memory:", clock=lambda: 0.0)
    >>> first = ledger.take("small", Ask(tokens=10, nanos=0, seconds=5.0), Most(requests=1))
    >>> ledger.take("small", Ask(tokens=10, nanos=0, seconds=5.0), Most(requests=1))
    Wait(seconds=0.25)
    """

    def __init__(self, path: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock  # of the machine: the same in all of its processes
        self._lock = threading.Lock()
        """Threads of a process take turns."""
        self._path = path
        with self._explained():
            self._database = sqlite3.connect(path, _LONGEST_LOCK_S, isolation_level=None, check_same_thread=False)
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = OFF")  # the file need not outlive the machine
            self._database.executescript(_TABLES)

    @classmethod
    def of_run(cls) -> Ledger:
        """Return the ledger of this worker's run; that of this process alone if it is not a worker of the engine."""
        folder = os.environ.get(RUN_FOLDER_VARIABLE)
        path = os.path.join(folder, _FILE) if folder and os.path.isdir(folder) else ":memory:"
        with _lock:
            key = os.getpid(), path
            if key not in _of_runs:
                _of_runs.clear()  # A forked process has its own, and a process serves one run at a time.
                _of_runs[key] = cls(path)
            return _of_runs[key]

    @classmethod
    def in_folder(cls, folder: str) -> Ledger:
        """Return the ledger in a folder that outlives runs. Its times are of this machine until it starts anew."""
        path = os.path.join(folder, _FILE)
        with _lock:
            key = os.getpid(), path
            if key not in _of_folders:
                os.makedirs(folder, 0o700, exist_ok=True)
                _of_folders[key] = cls(path)
                _of_folders[key]._forget_other_boots()
            return _of_folders[key]

    def _forget_other_boots(self) -> None:
        with self._turn():
            self._run("CREATE TABLE IF NOT EXISTS boot (id TEXT)")
            if self._run("SELECT id FROM boot").fetchone() != (boot := (_boot_id(),)):
                for table in ("under_way", "ended", "places", "spent", "boot"):
                    self._run(f"DELETE FROM {table}")
                self._run("INSERT INTO boot VALUES (?)", *boot)

    def give_back(self, number: int) -> None:
        """End a reservation of which nothing was taken: no request was sent."""
        with self._turn():
            self._run("DELETE FROM under_way WHERE id = ?", number)

    def take(self, account: str, ask: Ask, most: Most) -> int | Wait | Refused:
        """Reserve what a request may take. Return the reservation's number, how long to wait, or why there is none."""
        with self._turn():
            now = self._clock()
            self._end_overdue(now, most.window_s)
            if (found := self._over_budget(account, ask, most)) is not None:
                return found
            self._run("DELETE FROM places WHERE until < ? OR name = ?", now, ask.name)
            if self._has_older(account, ask):
                return Wait(_LOOK_AGAIN_S)
            if (seconds := self._until_room(account, ask, most, now)) > 0:
                if ask.name and now - ask.since > most.window_s:
                    seconds = min(seconds, _HOLD_S)
                    place = ask.name, account, ask.since, now + seconds + _PLACE_S
                    self._run("INSERT INTO places VALUES (?, ?, ?, ?)", *place)
                return Wait(seconds)
            ends = now + ask.seconds + _OVERDUE_S
            row = account, ends, ask.tokens, ask.nanos
            made = self._run("INSERT INTO under_way (account, ends, tokens, nanos) VALUES (?, ?, ?, ?)", *row)
            assert made.lastrowid is not None
            return made.lastrowid

    def settle(self, number: int, tokens: int, nanos: int, window_s: float) -> None:
        """End a reservation with what the request really took."""
        with self._turn():
            found = self._run("SELECT account FROM under_way WHERE id = ?", number).fetchone()
            if found is not None:  # otherwise it was taken for overdue, and counts as more than this already
                self._end(number, found[0], self._clock(), tokens, nanos, window_s)

    def spent(self, account: str) -> tuple[int, int]:
        """Return the tokens of an account and their cost in billionths, without those under way."""
        with self._turn():
            return self._sums("spent", account)

    def _over_budget(self, account: str, ask: Ask, most: Most) -> Wait | Refused | None:
        tokens, nanos = self._sums("spent", account)
        open_tokens, open_nanos = self._sums("under_way", account)
        budgets = [
            ("max_total_tokens", tokens, open_tokens, ask.tokens, most.tokens),
            ("max_cost", nanos, open_nanos, ask.nanos, most.nanos),
        ]
        if most.run_nanos is not None:
            run = self._sums("spent")[1], self._sums("under_way")[1]
            budgets.append(("--max_cost", *run, ask.nanos, most.run_nanos))
        known = [each for each in budgets if each[-1] is not None]
        for name, spent, _, asked, limit in known:
            if spent + asked > (limit or 0):
                return Refused(name, spent)
        is_full = any(spent + pending + asked > (limit or 0) for _, spent, pending, asked, limit in known)
        return Wait(_LOOK_AGAIN_S) if is_full else None

    def _has_older(self, account: str, ask: Ask) -> bool:
        """Return whether another request holds a place and has waited for longer than this one."""
        asked = "SELECT 1 FROM places WHERE account = ? AND (since, name) < (?, ?) LIMIT 1"
        return self._run(asked, account, ask.since, ask.name).fetchone() is not None

    def _until_room(self, account: str, ask: Ask, most: Most, now: float) -> float:
        """Return the seconds until the window has room, if no other request takes it; 0 if it has."""
        limits = math.inf if most.requests is None else most.requests, most.window_tokens or math.inf
        if limits == (math.inf, math.inf):
            return 0.0
        width = most.window_s / _SLOTS
        self._forget_ended(account, now, most.window_s)
        asked = "SELECT COUNT(*), IFNULL(SUM(tokens), 0) FROM under_way WHERE account = ?"
        requests, tokens = self._run(asked, account).fetchone()
        is_alone = not requests
        slots = self._run(
            "SELECT slot, requests, tokens FROM ended WHERE account = ? ORDER BY slot", account
        ).fetchall()
        requests += 1 + sum(each[1] for each in slots)
        tokens += ask.tokens + sum(each[2] for each in slots)
        until = 0.0
        for slot, fewer, less in slots:
            if requests <= limits[0] and tokens <= limits[1]:
                break
            requests, tokens = requests - fewer, tokens - less
            until = slot * width + most.window_s - now
        if requests > limits[0] or tokens > limits[1]:
            return _LOOK_AGAIN_S
        return until if is_alone else min(until, _LOOK_AGAIN_S)

    def _forget_ended(self, account: str, now: float, window_s: float) -> None:
        first = (now - window_s) / (window_s / _SLOTS)  # the slots up to here have left the window
        self._run("DELETE FROM ended WHERE account = ? AND slot <= ?", account, first)

    def _end_overdue(self, now: float, window_s: float) -> None:
        overdue = self._run("SELECT id, account, ends, tokens, nanos FROM under_way WHERE ends < ?", now).fetchall()
        for number, account, ends, tokens, nanos in overdue:
            self._end(number, account, ends, tokens, nanos, window_s)

    def _end(self, number: int, account: str, now: float, tokens: int, nanos: int, window_s: float) -> None:
        self._run("DELETE FROM under_way WHERE id = ?", number)
        self._forget_ended(account, now, window_s)
        slot = math.ceil(now / (window_s / _SLOTS))
        self._run(
            "INSERT INTO ended VALUES (?, ?, 1, ?) ON CONFLICT DO UPDATE SET requests = requests + 1, "
            "tokens = tokens + excluded.tokens",
            *(account, slot, tokens),
        )
        self._run(
            "INSERT INTO spent VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET tokens = tokens + excluded.tokens, "
            "nanos = nanos + excluded.nanos",
            *(account, tokens, nanos),
        )

    def _sums(self, table: str, account: str | None = None) -> tuple[int, int]:
        """Return the tokens and the cost in a table, of an account or of all."""
        where = "" if account is None else " WHERE account = ?"
        asked = f"SELECT IFNULL(SUM(tokens), 0), IFNULL(SUM(nanos), 0) FROM {table}{where}"
        return self._run(asked, *([] if account is None else [account])).fetchone()

    def _run(self, statement: str, *values: Any) -> sqlite3.Cursor:
        return self._database.execute(statement, values)

    @contextlib.contextmanager
    def _turn(self) -> Generator[None]:
        """Hold the file alone: what is read stays true until it is changed."""
        with self._explained(), self._lock:
            self._run("BEGIN IMMEDIATE")
            try:
                yield
                self._run("COMMIT")
            except BaseException:
                if self._database.in_transaction:  # SQLite has ended it itself after some errors
                    self._run("ROLLBACK")
                raise

    @contextlib.contextmanager
    def _explained(self) -> Generator[None]:
        """Turn errors of the file into ``RemoteModelError``: to go on without it would mean to exceed limits."""
        try:
            yield
        except (sqlite3.Error, OverflowError) as error:  # no room, locked for too long, or a number that is too large
            raise RemoteModelError(
                f"the limits of a run are kept in {self._path}, which can't be used: {error}"
            ) from error


def _boot_id() -> str:
    """Return what differs each time that the machine starts, when its clock begins anew."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:  # not on Linux: a file of another start is then taken for one of this
        return ""


_lock = threading.Lock()
"""Protects ``_of_runs`` and ``_of_folders``."""
_of_runs: dict[tuple[int, str], Ledger] = {}
_of_folders: dict[tuple[int, str], Ledger] = {}
