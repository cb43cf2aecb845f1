"""What a record keeps of a long run: snapshots spread evenly over its time, and the first and last of other events.

Everything is kept as JSON text, so that writing a record is putting texts together.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from dataclasses import dataclass
from typing import Any

from luminosity.runs.journal import take_traceback

__all__ = ["Happenings", "Samples", "Thinned", "text_of"]

_SAMPLES = ("bundle_seconds", "bundle_elements", "step_seconds", "step_elements")
_LEAST_SNAPSHOTS = 150  # points that a chart needs: larger snapshots lose details

# What snapshots keep of their parts, in full and in short, if a record has no room for all.
_LEAST_OF_STAGE = frozenset(("id", "status", "by", "elements", "rate", "queued", "running", "busy_seconds", "stalls"))
_OF_STAGE = _LEAST_OF_STAGE | {"queued_bytes", "workers", "cpu_seconds", "stream", "inference", "kafka"}
_OF_WORKER = frozenset(("worker", "pool", "cpu_seconds", "resident"))
_LEAST_OF_NODE = frozenset(("id", "workers", "utilization"))
_FIELDS = {
    "stages": (_OF_STAGE, _LEAST_OF_STAGE),
    "workers": (_OF_WORKER, frozenset[str]()),
    "nodes": (_LEAST_OF_NODE, _LEAST_OF_NODE),
}
_INFERENCE = frozenset(
    (
        "step",
        "prompt_tokens",
        "new_tokens",
        "cost",
        "cached_answers",
        "inferences",
        "batches",
        "useful_cost",
        "padded_cost",
        "loads",
    )
) | {
    "device_busy_seconds",
    "requests",
    "retries",
    "runs_on",
    "throttled",
    "hedges",
    "worker_seconds",
    "batch_p50_ms",
    "batch_p99_ms",
    "first_token_p50_ms",
    "first_token_p99_ms",
}
_MOST_LEVEL = 2


def text_of(data: dict[str, Any]) -> str:
    """Return ``data`` as one line of JSON, in ASCII."""
    return json.dumps(data, separators=(",", ":"))


class Samples:
    """Takes what is large and changes slowly out of most snapshots: samples of bundles, metrics, times of steps."""

    def __init__(self, every_s: float = 0.0) -> None:
        self._every_s = every_s
        self._next_at = 0.0
        self._stages: dict[str, dict[str, Any]] = {}
        self._metrics: list[Any] | None = None

    def note(self, snapshot: dict[str, Any]) -> None:
        """Remember what is large in ``snapshot``."""
        self._metrics = snapshot.get("metrics", self._metrics)
        for stage in snapshot["stages"]:
            held = self._stages.setdefault(stage["id"], {})
            held.update((name, stage[name]) for name in _SAMPLES if name in stage)

    def thin(self, snapshot: dict[str, Any]) -> None:
        """Remember what is large in ``snapshot``, and take it out if it was kept a short time ago."""
        self.note(snapshot)
        if snapshot["seconds"] >= self._next_at:
            self._next_at = snapshot["seconds"] + self._every_s
            snapshot.update(self.fill(snapshot))  # what was taken out of others since then must not be lost
            return
        snapshot.pop("metrics", None)
        for stage in snapshot["stages"]:
            for name in _SAMPLES:
                stage.pop(name, None)

    def fill(self, snapshot: dict[str, Any]) -> dict[str, Any]:
        """Return ``snapshot`` with the newest of what was taken out of others."""
        filled = {**snapshot, "stages": [{**self._stages.get(s["id"], {}), **s} for s in snapshot["stages"]]}
        if self._metrics is not None:
            filled.setdefault("metrics", self._metrics)
        return filled


class Thinned:
    """Snapshots of a run as JSON texts, spread evenly over its time, within a number and a number of bytes.

    If the snapshots are so large that only few would fit, all of them keep less of each stage and worker.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._apart_s = 0.0
        self._level = 0  # of details left out
        self._bytes = 0
        self._times: list[float] = []
        self.kept: list[str] = []

    def add(self, snapshot: dict[str, Any]) -> None:
        """Keep ``snapshot`` if enough time has passed since the last one; drop every other one when full."""
        seconds = snapshot["seconds"]
        if self._times and seconds < self._times[-1] + self._apart_s:
            return
        text = self._short(snapshot)
        self._times.append(seconds)
        self.kept.append(text)
        self._bytes += len(text)
        while len(self.kept) > 1 and (len(self.kept) > self._most or self._bytes > self._most_bytes):
            del self.kept[1::2], self._times[1::2]
            self._bytes = sum(map(len, self.kept))
            if len(self._times) > 1:
                # Snapshots may come a bit early.
                self._apart_s = 0.9 * (self._times[-1] - self._times[0]) / (len(self._times) - 1)

    def _short(self, snapshot: dict[str, Any]) -> str:
        text = text_of(_shortened(snapshot, self._level))
        while len(text) > self._most_bytes / _LEAST_SNAPSHOTS and self._level < _MOST_LEVEL:
            self._level += 1
            text = text_of(_shortened(snapshot, self._level))
            self.kept = [text_of(_shortened(json.loads(each), self._level)) for each in self.kept]
            self._bytes = sum(map(len, self.kept))
        return text


def _shortened(snapshot: dict[str, Any], level: int) -> dict[str, Any]:
    short = {name: value for name, value in snapshot.items() if name != "metrics"}
    if level == 0:
        short["stages"] = [{k: v for k, v in stage.items() if k not in _SAMPLES} for stage in snapshot["stages"]]
        return short
    for name, kept in _FIELDS.items():
        if name in short:
            fields = kept[level - 1]
            short[name] = [{k: v for k, v in each.items() if k in fields} for each in short[name]] if fields else []
    for stage in short["stages"]:
        if "inference" in stage:
            stage["inference"] = [{k: v for k, v in view.items() if k in _INFERENCE} for view in stage["inference"]]
        if "kafka" in stage:
            stage["kafka"] = [{k: v for k, v in view.items() if k != "lags"} for view in stage["kafka"]]
    return short


class Happenings:
    """Events other than snapshots: of each kind the first ones and the last ones, within a number and bytes.

    Equal tracebacks of one kind are kept once.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        """``most`` events and ``most_bytes`` bytes of each kind, one half for the first ones and one for the last."""
        self._most = most // 2
        self._most_bytes = most_bytes // 2
        self._kinds: dict[str, _Kind] = {}

    def add(self, number: int, data: dict[str, Any]) -> tuple[str, str, str]:
        """Keep an event; return its JSON text, and digest and text of its traceback, which are empty if it has none.

        Changes ``data``: it then refers to its traceback.
        """
        digest = traceback = ""
        if data.get("traceback"):
            digest = hashlib.sha256(data["traceback"].encode()).hexdigest()[:16]
            traceback = take_traceback(data, digest)
        text = text_of(data)
        kind = self._kinds.setdefault(data["event"], _Kind(self._most, self._most_bytes))
        kind.add(_Kept(number, text, digest), traceback)
        return text, digest, traceback

    @property
    def left_out(self) -> dict[str, int]:
        """The numbers of events that are not kept, by kind."""
        return {name: kind.left_out for name, kind in self._kinds.items() if kind.left_out}

    @property
    def kept(self) -> list[str]:
        """The texts of the events that are kept, in order."""
        events = [event for kind in self._kinds.values() for event in (*kind.first, *kind.last)]
        return [event.text for event in sorted(events, key=lambda event: event.number)]

    @property
    def tracebacks(self) -> dict[str, str]:
        """The tracebacks to which the kept events refer, by digest."""
        return {digest: shared.text for kind in self._kinds.values() for digest, shared in kind.tracebacks.items()}


@dataclass
class _Kept:
    number: int
    text: str
    digest: str


@dataclass
class _Shared:
    text: str
    uses: int = 0


class _Kind:
    """The events of one kind."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._bytes = 0  # of the ones that are added now: first of the first ones, then of the last ones
        self._has_first = False  # whether the first ones are complete
        self.first: list[_Kept] = []
        self.last: deque[_Kept] = deque()
        self.tracebacks: dict[str, _Shared] = {}
        self.left_out = 0

    def add(self, event: _Kept, traceback: str) -> None:
        size = len(event.text)
        if event.digest:
            if event.digest not in self.tracebacks:
                size += len(json.dumps(traceback))
            shared = self.tracebacks.setdefault(event.digest, _Shared(traceback))
            shared.uses += 1
        if not self._has_first and (len(self.first) == self._most or self._bytes + size > self._most_bytes):
            self._has_first = True
            self._bytes = 0
        self._bytes += size
        if not self._has_first:
            self.first.append(event)
            return
        self.last.append(event)
        while len(self.last) > self._most or self._bytes > self._most_bytes:
            self._drop(self.last.popleft())

    def _drop(self, event: _Kept) -> None:
        self.left_out += 1
        self._bytes -= len(event.text)
        if event.digest:
            shared = self.tracebacks[event.digest]
            shared.uses -= 1
            if not shared.uses:
                self._bytes -= len(json.dumps(shared.text))
                del self.tracebacks[event.digest]
