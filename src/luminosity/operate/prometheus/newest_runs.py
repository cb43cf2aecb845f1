"""The newest run of each pipeline in a folder of records, and when its runs last ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from luminosity.events import WorkerEnded, WorkerLost, WorkerStarted
from luminosity.runs import records
from luminosity.runs.records import Damaged, Record

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


class NewestRuns:
    """Reads the records in a folder. Keeps what can't change, so that a look reads few files again.

    Not thread-safe.
    """

    def __init__(self, folder: Path, read_at_once: int | None = None) -> None:
        """Make a reader. A look reads at most ``read_at_once`` records that are new to it, the next look reads more."""
        self._folder = folder
        self._read_at_once = read_at_once
        self._ended: dict[str, tuple[object, _Ended]] = {}  # by run, with the state of the file
        self._newest: dict[str, Record] = {}  # by run, those of the last look that are over
        self._going_on: set[str] = set()  # the others of the last look
        self._unreadable: dict[str, object] = {}  # by run, the state of the file
        self.damaged = 0  # records that the last look could not read
        self.not_read = 0  # records that the last look has left for the next one

    def look(self) -> list[PipelineRuns]:
        """Return the runs of each pipeline, the pipeline with the newest run first.

        A run that an older version has recorded, by the name of its script alone, counts as one of the pipeline with
        the newest run of that name.
        """
        newest: dict[Pipeline, Record] = {}
        by_name: dict[str, Pipeline] = {}  # the pipeline with the newest run of a script of this name
        running: dict[Pipeline, list[Record]] = {}
        ends: dict[Pipeline, list[_Ended]] = {}
        known, kept, going_on, unreadable = self._ended, self._newest, self._going_on, self._unreadable
        self._ended, self._newest, self._going_on, self._unreadable = {}, {}, set(), {}
        self.not_read = read = 0
        for run_id in records.run_ids(self._folder):
            path = records.path_of(self._folder, run_id)
            stamp = records.version_of(path)
            seen = known.get(run_id)
            past = seen[1] if seen is not None and seen[0] == stamp else None
            if past is not None and (run_id in kept or _pipeline(past.pipeline, past.name, by_name) in newest):
                record, ended = kept.get(run_id), past
            elif run_id in unreadable and unreadable[run_id] == stamp:
                self._unreadable[run_id] = stamp
                continue
            elif self._read_at_once is not None and read >= self._read_at_once and seen is None:
                self.not_read += 1
                continue
            else:
                read += 1
                loaded = records.load(path, only_last=run_id not in going_on)
                if isinstance(loaded, Damaged):
                    if stamp is not None:  # otherwise it was just removed for being old
                        self._unreadable[run_id] = stamp
                    continue
                record, ended = loaded, _ended(loaded)
            if ended is None:
                assert record is not None
                pipeline = _pipeline(record.started.pipeline, record.started.name, by_name)
                running.setdefault(pipeline, []).append(record)
            else:
                pipeline = _pipeline(ended.pipeline, ended.name, by_name)
                self._ended[run_id] = stamp, ended
                ends.setdefault(pipeline, []).append(ended)
            if record is not None and pipeline not in newest:
                if run_id not in kept and run_id not in going_on:
                    whole = records.load(path)
                    record = whole if isinstance(whole, Record) else record
                by_name.setdefault(record.started.name, pipeline)
                if ended is not None:
                    record = self._newest[run_id] = kept.get(run_id) or _slim(record)
                else:
                    self._going_on.add(run_id)
                newest[pipeline] = record
        self.damaged = len(self._unreadable)
        return [
            PipelineRuns(
                record,
                tuple(running.get(pipeline, ())),
                max((each.ended_at for each in ends.get(pipeline, ())), default=None),
                max((each.ended_at for each in ends.get(pipeline, ()) if each.state in _SUCCESSES), default=None),
                max(
                    (Failure(each.run, each.ended_at) for each in ends.get(pipeline, ()) if each.state in _FAILURES),
                    key=lambda failure: failure.at,
                    default=None,
                ),
                str(self._folder.absolute()),
            )
            for pipeline, record in newest.items()
        ]


def _pipeline(found: Pipeline, script: str, by_name: Mapping[str, Pipeline]) -> Pipeline:
    """Return the pipeline of a run: as its record says, or if that has no more than the script's name, by this name."""
    return by_name.get(script, found) if found == (script, "") else found


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
