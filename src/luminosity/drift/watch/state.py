"""What ``lum drift watch`` remembers between its rounds: a JSON file beside the history.

The file makes alerts come once: a watch that is started again knows what it has said before. One process at a time
changes it, under a lock.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Generator
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, cast

from luminosity._shared.shared_files import locked, replace_file, try_lock, unlock
from luminosity.errors import DriftError

__all__ = [
    "MOST_ALERTS",
    "Alert",
    "AlertKind",
    "KeyState",
    "Silence",
    "WatchMemory",
    "WatchState",
    "drift_folder",
    "load_state",
    "only_watch",
    "state_file",
    "state_to_change",
]

AlertKind: TypeAlias = Literal["drift", "resolved", "missing", "back"]

MOST_ALERTS = 1000  # of the newest alerts that are kept: a page and a person look at fewer
_MOST_FILES = 20_000  # names of tested files that are remembered, the newest
_LOCK_WAIT_S = 30.0  # longer than writing the file takes, short enough to notice a second watch
_VERSION = 1
_Record = TypeVar("_Record")


@dataclass(frozen=True)
class Alert:
    """A change of a key's state.

    ``kind`` is ``"drift"`` if drift begins, ``"resolved"`` if a test finds no drift again, ``"missing"`` if there was
    no test for too long, ``"back"`` if there is a test again. ``silenced`` alerts are kept and not sent.
    """

    time: str
    watch: str
    reference: str
    key: str
    kind: AlertKind
    message: str
    p_value: float | None = None
    level: float | None = None
    mmd2: float | None = None
    floor_mmd2: float | None = None
    effect: float | None = None
    effect_name: str = ""
    window: tuple[str, str] | None = None
    report: str | None = None
    silenced: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain values for JSON."""
        return asdict(self)


@dataclass
class KeyState:
    """The state of one key: whether its last test found drift, and when that was."""

    is_drift: bool = False
    is_missing: bool = False
    since: str = ""
    last_test: str = ""
    untold: str = ""  # the kind of an alert that a silence held back
    by_detector: bool = False  # the last row was an alert of DetectDrift, which says nothing when drift is over


@dataclass
class WatchMemory:
    """What is remembered of one watch: its keys, the rows and files it has seen, its fixed bandwidths."""

    reference: str = ""  # as the rows of the history name it
    keys: dict[str, KeyState] = field(default_factory=dict[str, KeyState])
    cursor: int = 0
    files: list[str] = field(default_factory=list[str])
    bandwidths: dict[str, float] = field(default_factory=dict[str, float])
    last_round: str = ""


@dataclass(frozen=True)
class Silence:
    """A time in which alerts of a key are kept and not sent. The key ``*`` means all keys."""

    key: str
    until: datetime
    start: datetime | None = None

    def covers(self, key: str, time: datetime) -> bool:
        """Return whether alerts of the key are silenced at this time."""
        return self.key in ("*", key) and (self.start is None or self.start <= time) and time < self.until


@dataclass
class WatchState:
    """Everything in the file. ``pending`` are alerts that could not be delivered yet, with the name of each target."""

    watches: dict[str, WatchMemory] = field(default_factory=dict[str, WatchMemory])
    alerts: list[Alert] = field(default_factory=list[Alert])
    silences: list[Silence] = field(default_factory=list[Silence])
    pending: list[tuple[str, Alert]] = field(default_factory=list[tuple[str, Alert]])

    def memory(self, name: str) -> WatchMemory:
        """Return what is remembered of a watch, which is nothing for a new one."""
        return self.watches.setdefault(name, WatchMemory())


def drift_folder() -> Path:
    """Return the default folder of histories: ``$LUMINOSITY_DRIFT_DIR``, or ``~/.luminosity/drift``."""
    chosen = os.environ.get("LUMINOSITY_DRIFT_DIR", "")
    return Path(chosen).expanduser() if chosen else Path.home() / ".luminosity" / "drift"


def state_file(history: str | os.PathLike[str]) -> str:
    """Return the path of the state that belongs to a history.

    >>> state_file("drift.sqlite")
    'drift.sqlite.watch.json'
    """
    return f"{os.fspath(history)}.watch.json"


def load_state(path: str | os.PathLike[str]) -> WatchState:
    """Read a state; a file that does not exist is an empty state. Fields of newer versions are ignored."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        return WatchState()
    except (OSError, UnicodeDecodeError) as error:
        raise DriftError(f"{path}: can't read the state of a watch; {error}") from None
    try:
        return _state(json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DriftError(
            f"{path}: found no state of a watch ({error}), expected the file that lum drift watch writes",
            fix="move the file away; alerts for what drifts now then come once more",
        ) from None


@contextlib.contextmanager
def state_to_change(path: str | os.PathLike[str]) -> Generator[WatchState]:
    """Read a state and write it back at the end of the block, unless that raises. Other processes wait meanwhile."""
    lock = f"{os.fspath(path)}.lock"
    descriptor = _open_lock(lock)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, descriptor)
        try:
            stack.enter_context(locked(descriptor, _LOCK_WAIT_S))
        except TimeoutError as error:
            raise DriftError(f"{lock}: another process has held this lock for {_LOCK_WAIT_S:.0f} s") from error
        state = load_state(path)
        yield state
        _save(path, state)


@contextlib.contextmanager
def only_watch(path: str | os.PathLike[str]) -> Generator[None]:
    """Be the only watch of a state during the block. Raises ``DriftError`` if there is another one."""
    lock = f"{os.fspath(path)}.running"
    descriptor = _open_lock(lock)
    try:
        if not try_lock(descriptor):
            raise DriftError(
                f"{lock}: another lum drift watch uses this history now, expected one watch for each history",
                fix="stop the other one, or name another history in the configuration",
            )
        try:
            yield
        finally:
            unlock(descriptor)
    finally:
        os.close(descriptor)


def _open_lock(path: str) -> int:
    try:
        return os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    except OSError as error:
        raise DriftError(f"{path}: can't keep the state of a watch there; {error}") from None


def _save(path: str | os.PathLike[str], state: WatchState) -> None:
    content = {
        "version": _VERSION,
        "watches": {
            name: {**asdict(memory), "files": memory.files[-_MOST_FILES:]} for name, memory in state.watches.items()
        },
        "alerts": [alert.as_dict() for alert in state.alerts[-MOST_ALERTS:]],
        "silences": [
            {
                "key": each.key,
                "until": each.until.isoformat(),
                **({"start": each.start.isoformat()} if each.start else {}),
            }
            for each in state.silences
        ],
        "pending": [[target, alert.as_dict()] for target, alert in state.pending[-MOST_ALERTS:]],
    }
    try:
        replace_file(path, json.dumps(content, indent=1), is_synced=True)
    except OSError as error:
        raise DriftError(f"{path}: can't write the state of a watch; {error}") from None


def _state(content: dict[str, Any]) -> WatchState:
    return WatchState(
        watches={
            name: _known(
                WatchMemory,
                memory | {"keys": {key: _known(KeyState, each) for key, each in memory.get("keys", {}).items()}},
            )
            for name, memory in cast("dict[str, Any]", content["watches"]).items()
        },
        alerts=[_alert(each) for each in content.get("alerts", [])],
        silences=[
            Silence(
                each["key"],
                datetime.fromisoformat(each["until"]),
                datetime.fromisoformat(each["start"]) if "start" in each else None,
            )
            for each in content.get("silences", [])
        ],
        pending=[(target, _alert(each)) for target, each in content.get("pending", [])],
    )


def _alert(values: dict[str, Any]) -> Alert:
    window = values.get("window")
    return _known(Alert, values | {"window": tuple(window) if window else None})


def _known(kind: type[_Record], values: dict[str, Any]) -> _Record:
    """Return a record from the fields that this version knows."""
    names = {each.name for each in fields(cast("Any", kind))}
    return kind(**{name: value for name, value in values.items() if name in names})
