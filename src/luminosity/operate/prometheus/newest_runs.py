"""The newest run of each pipeline in a folder of records, and when its runs last ended."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

from luminosity.events import WorkerEnded, WorkerLost, WorkerStarted
from luminosity.runs import records
from luminosity.runs.records import Record

__all__ = ["Failure", "NewestRuns", "Pipeline", "PipelineRuns"]

_SUCCESSES = ("done", "drained")
_FAILURES = ("failed", "lost")

Pipeline: TypeAlias = tuple[str, str]  # see ``RunStarted.pipeline``


@dataclass(frozen=True)
class Failure:
    """A run that did not succeed."""

    run: str
    at: float  # seconds since 1970


@dataclass(frozen=True)
class PipelineRuns:
    """The recorded runs of one pipeline."""

    newest: Record
    running: tuple[Record, ...]  # runs that go on now, the newest first
    last_end: float | None  # this and the following: seconds since 1970; None if no recorded run has ended so far
    last_success: float | None
    last_failure: Failure | None  # the last run that failed, or whose process was killed
    run_dir: str  # the folder of the records

    @property
    def pipeline(self) -> str:
        """The name of the job, or else of the script."""
        return self.newest.started.pipeline[0]

    @property
    def folder(self) -> str:
        """The folder of the script; empty for a job, and for a run that an older version has recorded."""
        return self.newest.started.pipeline[1]

    @property
    def is_pressing(self) -> bool:
        """Whether a run goes on, or has failed since the newest one started."""
        has_failed = self.last_failure is not None and self.last_failure.at >= self.newest.started.started_at
        return bool(self.running) or has_failed


@dataclass(frozen=True)
class _Ended:
    """What stays known of a run that is over."""

    pipeline: Pipeline
    name: str  # of the script
    run: str
    state: str
    ended_at: float  # seconds since 1970


@dataclass
class _Known:
    """What a look has found out, by run."""

    ended: dict[str, tuple[object, _Ended]] = field(default_factory=dict[str, tuple[object, _Ended]])
    """With the state of the file."""
    newest: dict[str, Record] = field(default_factory=dict[str, Record])
    """The newest runs of their pipelines that are over."""
    going_on: set[str] = field(default_factory=set[str])
    """The newest runs of their pipelines that are not over."""
    unreadable: dict[str, object] = field(default_factory=dict[str, object])
    """The state of the file."""


class _Look:
    """The pipelines that a look has found so far. Runs come the newest first."""

    def __init__(self) -> None:
        self.newest: dict[Pipeline, Record] = {}
        self.by_name: dict[str, Pipeline] = {}  # the pipeline with the newest run of a script of this name
        self.running: dict[Pipeline, list[Record]] = {}
        self.ends: dict[Pipeline, list[_Ended]] = {}

    def pipeline(self, found: Pipeline, script: str) -> Pipeline:
        """Return the pipeline of a run: as its record says, or if that has only the script's name, by this name."""
        return self.by_name.get(script, found) if found == (script, "") else found

    def runs(self, pipeline: Pipeline, run_dir: str) -> PipelineRuns:
        """Return the runs of one pipeline."""
        ends = self.ends.get(pipeline, ())
        failures = [Failure(each.run, each.ended_at) for each in ends if each.state in _FAILURES]
        return PipelineRuns(
            self.newest[pipeline],
            tuple(self.running.get(pipeline, ())),
            max((each.ended_at for each in ends), default=None),
            max((each.ended_at for each in ends if each.state in _SUCCESSES), default=None),
            max(failures, key=lambda failure: failure.at, default=None),
            run_dir,
        )


class NewestRuns:
    """Reads the records in a folder. Keeps what can't change, so that a look reads few files again.

    Not thread-safe.
    """

    def __init__(self, folder: Path, read_at_once: int | None = None) -> None:
        """Make a reader. A look reads at most ``read_at_once`` records that are new to it, the next look reads more."""
        self._folder = folder
        self._read_at_once = math.inf if read_at_once is None else read_at_once
        self._known = _Known()  # of the last look
        self._read = 0  # records that the last look has read
        self.damaged = 0  # records that the last look could not read
        self.not_read = 0  # records that the last look has left for the next one

    def look(self) -> list[PipelineRuns]:
        """Return the runs of each pipeline, the pipeline with the newest run first.

        A run that an older version has recorded, by the name of its script alone, counts as one of the pipeline with
        the newest run of that name.
        """
        before, self._known, look = self._known, _Known(), _Look()
        self.not_read = self._read = 0
        for run_id in records.run_ids(self._folder):
            path = records.path_of(self._folder, run_id)
            stamp = records.version_of(path)
            found = self._find(run_id, path, stamp, before, look)
            if found is not None:
                self._take(run_id, stamp, *found, before, look)
        self.damaged = len(self._known.unreadable)
        return [look.runs(pipeline, str(self._folder.absolute())) for pipeline in look.newest]

    def _find(
        self, run_id: str, path: Path, stamp: object, before: _Known, look: _Look
    ) -> tuple[Record | None, _Ended | None] | None:
        """Return the record of a run, which is None if it is not needed, and how it ended; None to leave it out."""
        seen = before.ended.get(run_id)
        past = seen[1] if seen is not None and seen[0] == stamp else None
        if past is not None and (run_id in before.newest or look.pipeline(past.pipeline, past.name) in look.newest):
            return before.newest.get(run_id), past
        if run_id in before.unreadable and before.unreadable[run_id] == stamp:
            self._known.unreadable[run_id] = stamp
            return None
        if self._read >= self._read_at_once and seen is None:
            self.not_read += 1
            return None
        self._read += 1
        loaded = records.load(path, only_last=run_id not in before.going_on)
        if isinstance(loaded, Record):
            return loaded, _ended(loaded)
        if stamp is not None:  # otherwise it was just removed for being old
            self._known.unreadable[run_id] = stamp
        return None

    def _take(
        self, run_id: str, stamp: object, record: Record | None, ended: _Ended | None, before: _Known, look: _Look
    ) -> None:
        """Take one run into account."""
        if ended is None:
            assert record is not None
            pipeline = look.pipeline(record.started.pipeline, record.started.name)
            look.running.setdefault(pipeline, []).append(record)
        else:
            pipeline = look.pipeline(ended.pipeline, ended.name)
            self._known.ended[run_id] = stamp, ended
            look.ends.setdefault(pipeline, []).append(ended)
        if record is None or pipeline in look.newest:
            return
        if run_id not in before.newest and run_id not in before.going_on:
            whole = records.load(records.path_of(self._folder, run_id))
            record = whole if isinstance(whole, Record) else record
        look.by_name.setdefault(record.started.name, pipeline)
        if ended is not None:
            record = self._known.newest[run_id] = before.newest.get(run_id) or _slim(record)
        else:
            self._known.going_on.add(run_id)
        look.newest[pipeline] = record


def _slim(record: Record) -> Record:
    """Return what metrics need of a run that is over: a record may be large, and there may be one for each pipeline."""
    counted = next((each for each in reversed(record.snapshots) if each.metrics), None)
    snapshots = tuple(
        each
        if each is record.last
        else replace(each, stages=(), devices=(), workers=(), nodes=(), metrics=each.metrics if each is counted else ())
        for each in record.snapshots
    )
    happenings = tuple(e for e in record.happenings if isinstance(e, WorkerStarted | WorkerEnded | WorkerLost))
    return replace(record, snapshots=snapshots, happenings=happenings)


def _ended(record: Record) -> _Ended | None:
    """Return what stays known of a run, or None if it goes on."""
    if record.state == "running":
        return None
    last = record.last
    # Nothing says when a lost run was killed, but it has done something until its last snapshot.
    ended_at = record.started.started_at + last.seconds if last is not None else record.started.started_at
    started = record.started
    return _Ended(started.pipeline, started.name, started.run, record.state, ended_at)
