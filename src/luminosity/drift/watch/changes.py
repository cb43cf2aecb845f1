"""Finds out what changed: turns the judged tests of a round into alerts, and remembers the state of each key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from math import isfinite

from luminosity.drift.history import PastTest, utc_text
from luminosity.drift.watch.judge import is_test
from luminosity.drift.watch.state import Alert, AlertKind, KeyState, Silence, WatchMemory

__all__ = ["Changes"]


@dataclass(frozen=True)
class Changes:
    """Compares rounds of one watch with what is remembered of it.

    ``missing_after`` is None if a key that is no longer tested is no reason for an alert.
    """

    watch: str
    memory: WatchMemory
    missing_after: timedelta | None
    silences: Sequence[Silence] = ()

    def round(self, judged: Sequence[PastTest], now: datetime) -> list[Alert]:
        """Take up the tests of a round, and return the alerts that they give: drift, resolved, back."""
        found: list[Alert] = []
        latest = utc_text(now)
        for test in judged:
            state = self.memory.keys.setdefault(test.key, KeyState(since=utc_text(now)))
            is_alert = test.by_detector
            if not (is_test(test) or is_alert or test.verdict == "new"):
                continue  # Nothing was compared.
            # A last test that lies in the future was made before the clock was set back: it says nothing about order.
            if test.time <= state.last_test <= latest:
                continue  # A later window has said more.
            if state.is_missing:
                state.is_missing = False
                found.append(
                    self._alert(test.key, "back", f"there are tests again, after {state.last_test}", now, test)
                )
            state.last_test, state.by_detector = test.time, is_alert
            if test.drift != state.is_drift:
                state.is_drift, state.since = test.drift, test.time
                kind: AlertKind = "drift" if test.drift else "resolved"
                found.append(self._alert(test.key, kind, _message(test), now, test))
        return found

    def overdue(self, now: datetime) -> list[Alert]:
        """Return alerts for keys without a test for too long, and for those whose silence has ended."""
        found: list[Alert] = []
        for key, state in self.memory.keys.items():
            last = datetime.fromisoformat(state.last_test or state.since)
            if self.missing_after is not None and not state.is_missing and now - last > self.missing_after:
                hours = f"{self.missing_after.total_seconds() / 3600:g} hours"
                if not state.by_detector:
                    state.is_missing = True
                    said = f"the last was {state.last_test}" if state.last_test else "there was none yet"
                    found.append(self._alert(key, "missing", f"no test for {hours}; {said}", now))
                elif state.is_drift:
                    state.is_drift, state.since = False, utc_text(now)
                    found.append(self._alert(key, "resolved", f"no alert of the detector for {hours}", now))
            if state.untold and not self._is_silent(key, now):
                is_still = state.is_missing if state.untold == "missing" else state.is_drift
                if is_still:
                    kind: AlertKind = "missing" if state.untold == "missing" else "drift"
                    since = (state.last_test or state.since) if kind == "missing" else state.since
                    found.append(self._alert(key, kind, f"{kind} since {since}; the silence has ended", now))
                state.untold = ""
        return found

    def _alert(self, key: str, kind: AlertKind, message: str, now: datetime, test: PastTest | None = None) -> Alert:
        name = f"{self.watch}, {key}" if key else self.watch
        is_silent = self._is_silent(key, now)
        if is_silent and kind in ("drift", "missing"):
            self.memory.keys[key].untold = kind
        alert = Alert(
            time=utc_text(now),
            watch=self.watch,
            reference=self.memory.reference,
            key=key,
            kind=kind,
            message=f"{name}: {message}",
            silenced=is_silent,
        )
        if test is None:
            return alert
        has_p_value = is_test(test)
        return replace(
            alert,
            p_value=test.p_value if has_p_value else None,
            level=test.level if has_p_value else None,
            mmd2=test.mmd2 if isfinite(test.mmd2) else None,
            effect=test.size if isfinite(test.size) else None,
            effect_name=test.size_name,
            floor_mmd2=test.floor_mmd2,
            window=(test.window_start, test.window_end) if test.window_start and test.window_end else None,
            report=test.report,
        )

    def _is_silent(self, key: str, now: datetime) -> bool:
        return any(each.covers(key, now) for each in self.silences)


def _message(test: PastTest) -> str:
    if test.verdict == "new":
        return f"drift began: the reference has no rows of this key, and there are {test.current_rows:,} now"
    if test.by_detector:
        return f"drift began: MMD² = {test.mmd2:.4g} is above the detector's threshold {test.threshold or 0:.4g}"
    said = f"p = {test.p_value:.4g} at a level of {test.level:.3g}, {test.size_name} = {test.size:.4g}"
    if test.floor_mmd2 is not None:
        said += f" beside {test.floor_mmd2:.4g} of the floor"
    return f"drift began: {said}" if test.drift else f"drift is over: {said}"
