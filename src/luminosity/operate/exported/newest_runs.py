"""The newest run of each pipeline in a folder of records, and when its runs last ended."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from luminosity.engine.monitor import records
from luminosity.engine.monitor.records import Damaged, Record

__all__ = ["NewestRuns", "PipelineRuns"]

_SUCCESSES = ("done", "drained")


@dataclass(frozen=True)
class PipelineRuns:
    """The recorded runs of one pipeline."""

    pipeline: str  # the name of its script
    newest: Record
    running: int  # runs that go on now
    last_end: float | None  # this and the following: seconds since 1970; None if no recorded run has ended so far
    last_success: float | None


@dataclass(frozen=True)
class _Ended:
    """What stays known of a run that is over."""

    pipeline: str
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
        """Return the runs of each pipeline, the pipeline with the newest run first."""
        newest: dict[str, Record] = {}
        running: dict[str, int] = {}
        ends: dict[str, list[tuple[float, bool]]] = {}
        known, kept, going_on, unreadable = self._ended, self._newest, self._going_on, self._unreadable
        self._ended, self._newest, self._going_on, self._unreadable = {}, {}, set(), {}
        self.not_read = read = 0
        for run_id in records.run_ids(self._folder):
            path = records.path_of(self._folder, run_id)
            stamp = records.version_of(path)
            seen = known.get(run_id)
            if seen is not None and seen[0] == stamp and (seen[1].pipeline in newest or run_id in kept):
                record, ended = kept.get(run_id), seen[1]
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
                running[record.started.name] = running.get(record.started.name, 0) + 1
            else:
                self._ended[run_id] = stamp, ended
                ends.setdefault(ended.pipeline, []).append((ended.ended_at, ended.state in _SUCCESSES))
            if record is not None and record.started.name not in newest:
                if run_id not in kept and run_id not in going_on:
                    whole = records.load(path)
                    record = whole if isinstance(whole, Record) else record
                newest[record.started.name] = record
                if ended is not None:
                    self._newest[run_id] = record
                else:
                    self._going_on.add(run_id)
        self.damaged = len(self._unreadable)
        return [
            PipelineRuns(
                pipeline,
                record,
                running.get(pipeline, 0),
                max((at for at, _ in ends.get(pipeline, ())), default=None),
                max((at for at, is_success in ends.get(pipeline, ()) if is_success), default=None),
            )
            for pipeline, record in newest.items()
        ]


def _ended(record: Record) -> _Ended | None:
    """Return what stays known of a run, or None if it goes on."""
    if record.state == "running":
        return None
    last = record.last
    # Nothing says when a lost run was killed, but it has done something until its last snapshot.
    ended_at = record.started.started_at + last.seconds if last is not None else record.started.started_at
    return _Ended(record.started.name, record.state, ended_at)
