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

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ended: dict[str, tuple[object, _Ended]] = {}  # by run, with the state of the file
        self._newest: dict[str, Record] = {}  # by run, those of the last look that are over
        self.damaged = 0  # records that the last look could not read

    def look(self) -> list[PipelineRuns]:
        """Return the runs of each pipeline, the pipeline with the newest run first."""
        newest: dict[str, Record] = {}
        running: dict[str, int] = {}
        ends: dict[str, list[tuple[float, bool]]] = {}
        known, kept = self._ended, self._newest
        self._ended, self._newest = {}, {}
        self.damaged = 0
        for run_id in records.run_ids(self._folder):
            path = records.path_of(self._folder, run_id)
            stamp = _stamp(path)
            seen = known.get(run_id)
            if seen is not None and seen[0] == stamp and (seen[1].pipeline in newest or run_id in kept):
                record, ended = kept.get(run_id), seen[1]
            else:
                loaded = records.load(path)
                if isinstance(loaded, Damaged):
                    self.damaged += path.exists()  # it may just have been removed for being old
                    continue
                record, ended = loaded, _ended(loaded)
            if ended is None:
                assert record is not None
                running[record.started.name] = running.get(record.started.name, 0) + 1
            else:
                self._ended[run_id] = stamp, ended
                ends.setdefault(ended.pipeline, []).append((ended.ended_at, ended.state in _SUCCESSES))
            if record is not None and record.started.name not in newest:
                newest[record.started.name] = record
                if ended is not None:
                    self._newest[run_id] = record
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


def _stamp(path: Path) -> object:
    """Return what changes when the file is written again."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
