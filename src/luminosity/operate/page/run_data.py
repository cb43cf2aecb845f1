"""Recorded runs and histories of drift as JSON. Files that have not changed are read once.

A record is JSON already. It is passed on as it is, because turning a large record into events and back takes seconds.
A new number of a run is a field of a view in ``luminosity.events.views``: columns of tables come from there.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from luminosity.errors import RecordError
from luminosity.events import InferenceView, StageView
from luminosity.events.numbers import numbers_of
from luminosity.operate.cost.bill import Bill, bill_of
from luminosity.operate.cost.prices import PriceSheet
from luminosity.operate.page.graph_data import StepTree, stage_graph
from luminosity.operate.page.replies import FOREVER, KeptResults, Packed, json_bytes
from luminosity.operate.page.run_list import Asked, RunList
from luminosity.runs import records
from luminosity.runs.records import RUN_ID, Damaged, FileVersion, version_of

__all__ = ["DriftFiles", "Run", "RunFiles"]


_MOST_CHANGES = 500  # between two runs: packages of other machines may all differ
_MOST_WORDS = 500  # characters of a command in a line
_MOST_RUNS = 8  # whole runs that are kept, each up to 10 MB with its packed form
_LIVE_LINE_S = 2.0  # how old the line about a run under way may be
_MOST_SHARE = 0.01  # of a core, for the line about a run whose record is large
_LIVE_RUN_S = 0.5
_REPORT = "/api/drift/report"
_MOST_BYTES = 50_000_000  # of a report
_FOR_BILLS = ("WorkerStarted", "WorkerEnded", "WorkerLost")
Content = dict[str, Any]
# The columns of the page's tables that show a number of a view as it is.
_NUMBERS = {
    name: [asdict(each) for each in numbers_of(view) if each.title]
    for name, view in {"stages": StageView, "models": InferenceView}.items()
}


class Run:
    """One run, ready to be sent."""

    def __init__(self, run_id: str, content: Content, state: str, cost: Content) -> None:
        self.state = state
        self.number: int = content["number"]
        self.started_at = float(content["started"]["started_at"])
        self.arguments = tuple(str(word) for word in content["started"].get("arguments", ()))
        names = ("number", "started", "ended", "happenings", "left_out", "left_out_of", "snapshots")
        parts = {name: content[name] for name in names if name in content}  # older records lack some
        self.steps = StepTree(content["started"])
        graph = {"stages": stage_graph(content["started"]["stages"])}
        if self.steps.is_known:
            graph = {**graph, "steps": self.steps.drawn(()), **self.steps.content()}
        shown = {"numbers": _NUMBERS, "graph": graph}
        self.content = Packed(json_bytes({"id": run_id, "state": state, **parts, "cost": cost, **shown}))


class RunFiles:
    """The folder of records. Its methods may be called on several threads."""

    def __init__(self, folder: Path, prices: PriceSheet) -> None:
        self.folder = folder
        self._prices = prices
        self.lines = RunList(folder, self._line, repr(prices))
        self._runs = KeptResults(self._run, _MOST_RUNS)

    def list(self, asked: Asked | None = None) -> Packed:
        """Return the runs that are asked for, with a line about each."""
        return Packed(json_bytes(self.lines.content(asked or Asked())))

    def run(self, run_id: str) -> Run | Damaged | None:
        """Return one run, or None if it is not recorded."""
        return self._runs.get(self._path(run_id))

    def changes(self, one: str, two: str) -> Content:
        """Return what differs between two runs: code, packages, options, inputs, models, machine; and what is unknown.

        Raises :class:`RecordError` if a run is not recorded.
        """
        found = [self.run(each) for each in (one, two)]
        if not all(isinstance(each, Run) for each in found):
            raise RecordError("found no such run, expected the ids of two runs")
        notes: list[str] = []
        from luminosity.runs.manifest.manifest import Manifest, compare_words, differences_between, load

        manifests: list[Manifest] = []
        for name, run_id in (("A", one), ("B", two)):
            try:
                manifests.append(load(self.folder, run_id))
            except RecordError as error:
                notes.append(f"{name}: {error.message}")
        if len(manifests) == 2:
            differences = differences_between(*manifests)
        else:  # their commands are known all the same
            differences = compare_words(*(each.arguments for each in found if isinstance(each, Run)))
        shown = [asdict(each) for each in differences[:_MOST_CHANGES]]
        return {"changes": shown, "left_out": len(differences) - len(shown), "notes": notes}

    def bill(self, run_id: str) -> Content | None:
        """Return what a run costs so far, or None if its record can't be read."""
        try:
            path = self._path(run_id)
            content, _ = _read(path)
            return self._bill(content, path)
        except records.UNREADABLE:
            return None

    def _path(self, run_id: str) -> Path:
        if not RUN_ID.fullmatch(run_id):
            raise ValueError(f"found {run_id!r}, expected the id of a run")
        return records.path_of(self.folder, run_id)

    def _run(self, path: Path) -> tuple[Run | Damaged, float]:
        try:
            content, state = _read(path)
            return Run(
                path.stem, content, state, self._bill(content, path)
            ), _LIVE_RUN_S if state == "running" else FOREVER
        except records.UNREADABLE as error:
            return records.damaged(path, error), FOREVER

    def _line(self, path: Path) -> tuple[Content | Damaged, float]:
        began = time.monotonic()
        try:
            content = _without_snapshots(path)
            content, state = (content, content["ended"]["state"]) if content is not None else _read(path)
            bill = self._bill(content, path)
            cost = {name: bill[name] for name in ("total", "low", "high", "currency")}
            line = _line(path.stem, content, state, cost)
            took = time.monotonic() - began
            return line, max(_LIVE_LINE_S, took / _MOST_SHARE) if state == "running" else FOREVER
        except records.UNREADABLE as error:
            return records.damaged(path, error), FOREVER

    def _bill(self, content: Content, path: Path) -> Content:
        """Return what a run costs. Only what a bill needs of the record is made into events."""
        ended, snapshots = content["ended"], content["snapshots"]
        slim: Content = {
            **content,
            "started": {**content["started"], "stages": [], "transforms": []},
            "happenings": [event for event in content["happenings"] if event["event"] in _FOR_BILLS],
            "snapshots": [*(map(_slim, snapshots[:-1]) if _needs_snapshots(content) else ())]
            + [_slim(each, "workers") for each in snapshots[-1:]],
            "ended": None if ended is None else {**ended, "last": _slim(ended["last"], "workers"), "metrics": []},
        }
        bill: Bill = bill_of(records.record_of(slim, path), self._prices)
        return asdict(bill)


def _read(path: Path) -> tuple[Content, str]:
    """Return a record with what its journal adds, and the state of its run."""
    content = records.whole_contents(path)
    state = _state(content, path)
    if state == "lost":  # its process may have ended after the first reading, and has then written how
        content = records.whole_contents(path)
        state = _state(content, path)
    return content, state


def _without_snapshots(path: Path) -> Content | None:
    """Return the record of a run that has ended without its snapshots, which are the most of it.

    Returns None if it must be read as a whole. The snapshots are its last field; within a text, the quotes of the
    field's name would be escaped.
    """
    head, mark, _ = path.read_bytes().rpartition(b',"snapshots":[')
    try:
        content = json.loads(head + b"}") if mark else {}
    except ValueError:
        return None
    is_plain = content.get("format") == records.FORMAT and content.get("ended") is not None
    return {**content, "snapshots": []} | {"number": 0} if is_plain and not _needs_snapshots(content) else None


def _needs_snapshots(content: Content) -> bool:
    """Return whether a bill needs snapshots, because events about workers are missing."""
    return bool(content["left_out"]) or not _count(content["happenings"], "WorkerStarted")


def _state(content: Content, path: Path) -> str:
    if content["ended"] is not None:
        return content["ended"]["state"]
    return "running" if records.is_alive(content["process"], path) else "lost"


def _slim(snapshot: Content, *more: str) -> Content:
    kept = ("event", "run", "seconds", "pools", *more)  # the last one of a run, within its end, has no "event"
    return {name: snapshot[name] for name in kept if name in snapshot} | {"stages": []}


def _line(run_id: str, content: Content, state: str, cost: Content) -> Content:
    started, ended, happenings = content["started"], content["ended"], content["happenings"]
    last = ended["last"] if ended is not None else content["snapshots"][-1] if content["snapshots"] else {}
    stages = last.get("stages", [])
    is_running = state == "running"
    is_stream = any(stage.get("is_stream", False) for stage in started["stages"])
    done, total = _elements(stages, state, is_stream)
    return {
        "id": run_id,
        "name": started.get("job") or started["name"],
        "folder": "" if started.get("job") else started.get("folder", ""),
        "script": started["name"],
        "user": started.get("user", ""),
        "arguments": " ".join(map(str, started.get("arguments", ())))[:_MOST_WORDS],
        "state": state,
        "started_at": started["started_at"],
        "seconds": (ended or last).get("seconds", 0.0),
        "elements": done,
        "elements_total": total,
        "rate": max((stage.get("rate", 0.0) for stage in stages), default=0.0) if is_running else 0.0,
        "seconds_left": last.get("seconds_left") if is_running else None,
        "failure": ended.get("failure", "") if ended is not None else "",
        "is_stream": is_stream,
        "retries": max(_count(happenings, "BundleRetried"), sum(stage.get("retries", 0) for stage in stages)),
        "warnings": sum(
            event.get("left_out") or event.get("count", 1) for event in happenings if event["event"] == "LogMessage"
        ),
        "cost": cost,
    }


def _elements(stages: list[Content], state: str, is_stream: bool) -> tuple[int, int | None]:
    """Return how many elements are done, and about how many there are, None if that is not known.

    As ``elementsOf`` of the page: in a run that is not done, the stage that has most before it decides, not the source,
    which may have read everything already.
    """
    most = max((stage.get("elements", 0) for stage in stages), default=0)
    if state in ("done", "drained"):
        return most, most
    if is_stream:
        return most, None
    if stages and all(stage["status"] == "done" for stage in stages):
        return most, most
    under_way = [stage for stage in stages if stage["status"] != "done" and stage.get("elements")]
    if known := [stage for stage in under_way if stage.get("fraction")]:
        last = min(known, key=lambda stage: stage["fraction"])
        return last["elements"], max(last["elements"], round(last["elements"] / last["fraction"]))
    busiest = max(under_way, key=lambda stage: stage.get("busy_seconds", 0.0), default={"elements": 0})
    return busiest["elements"], None


def _count(events: Iterable[Content], kind: str) -> int:
    return sum(event["event"] == kind for event in events)


class DriftFiles:
    """Histories of drift: those in the default folder, and those that the user names.

    Only reports that a history names can be read: they are asked for by a digest of their path, which is looked up.
    """

    def __init__(self, paths: Sequence[str] = ()) -> None:
        self._paths = [os.path.abspath(path) for path in paths]
        self._lock = threading.Lock()
        self._versions: dict[str, tuple[FileVersion | None, FileVersion | None]] | None = None
        self._content = Packed(b"")
        self._digest = ""
        self._reports: dict[str, str] = {}

    @property
    def paths(self) -> tuple[str, ...]:
        """The files of the histories that there are now."""
        from luminosity.drift.watch.page_data import default_histories

        return tuple(dict.fromkeys([*self._paths, *default_histories()]))

    def data(self, known: str = "") -> Packed | None:
        """Return the series of all histories, with the address of the report behind each point, and the alerts.

        Returns None if ``known`` is the ``digest`` in them: nothing has changed since then.
        """
        with self._lock:
            self._look()
            return None if known == self._digest else self._content

    def report(self, digest: str) -> bytes | None:
        """Return a report, or None if no history names it, or if it is gone."""
        with self._lock:
            self._look()
            path = self._reports.get(digest)
        if path is None:
            return None
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return None
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            is_page = stat.S_ISREG(status.st_mode) and status.st_size <= _MOST_BYTES
            return file.read(_MOST_BYTES) if is_page else None

    def _look(self) -> None:
        """Read the histories again if a file has changed."""
        from luminosity.drift.watch.page_data import drift_data
        from luminosity.drift.watch.state import state_file

        paths = self.paths
        versions = {path: (version_of(path), version_of(state_file(path))) for path in paths}
        if versions == self._versions:
            return
        found = drift_data(paths)
        reports: dict[str, str] = {}
        for row in [row for series in found["histories"] for row in series["rows"]] + found["alerts"]:
            row["report"] = _address(row, reports)
        self._versions, self._reports = versions, reports
        self._digest = hashlib.sha256(json_bytes(found)).hexdigest()
        self._content = Packed(json_bytes({**found, "digest": self._digest}))


def _address(row: dict[str, Any], reports: dict[str, str]) -> str | None:
    """Return the address of a row's report, which is added to ``reports``; None if it has none."""
    path = row.get("report")
    if not path or not os.path.isabs(path) or not path.lower().endswith((".html", ".htm")):
        return None
    digest = hashlib.sha256(os.fsencode(path)).hexdigest()
    reports[digest] = path
    return f"{_REPORT}?id={digest}"
