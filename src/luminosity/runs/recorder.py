"""The recorder: a subscriber that keeps a small private record of a run up to date."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from luminosity._shared.shared_files import replace_file, who_else_writes
from luminosity.events import Event, MetricView, RunEnded, RunStarted, Snapshot, Subscriber, to_json
from luminosity.runs import journal, log_lines, records
from luminosity.runs.journal import NUMBER, JournalWriter, path_beside
from luminosity.runs.manifest import manifest as manifests
from luminosity.runs.manifest.masking import mask_text
from luminosity.runs.thinning import Happenings, Samples, Thinned, text_of

__all__ = ["Recorder", "recorder"]

_LOGGER = logging.getLogger(__name__)

_MOST_RUNS = 200  # older records are removed, except these two kinds:
_MOST_RUNNING = 200  # records of runs that go on
_MOST_PIPELINES = 50  # the newest records of pipelines that have not run since: they may have failed
_EVERY_S = 1.0  # between snapshots that are recorded; a killed run loses as much
_BYTES_PER_S = 100_000  # of snapshots: very large ones are recorded less often, which bounds the time that it takes
_SAMPLES_EVERY_S = 10.0  # samples of bundles and user metrics change slowly
# Together these keep a record with its journal below 5 MB, of which one snapshot in full and the plan take the rest.
_MOST_SNAPSHOTS = 1000
_MOST_SNAPSHOT_BYTES = 2_000_000
_MOST_HAPPENINGS = 500  # of each of the kinds, of which there are 9
_MOST_HAPPENING_BYTES = 150_000
_MOST_JOURNAL_BYTES = 1_250_000
_TEXTS = ("exception", "failure", "message", "reason", "traceback")  # which user code has a part in
_UNFINISHED = ".unfinished"
_UNFINISHED_FOR_S = 3600.0  # no write takes this long: its process was killed


def recorder(run_dir: str | None, on_request: Callable[[journal.Action], None] | None = None) -> Subscriber | None:
    """Return a recorder that writes to the folder of ``--run_dir``, or None if runs are not recorded.

    ``on_request`` is called on the thread of the recorder if another process asks the run for something.
    """
    try:
        folder = records.folder(run_dir)
    except RuntimeError as error:
        _warn(error)  # the user has no home folder
        return None
    return None if folder is None else Recorder(folder, on_request)


class Recorder:
    """Writes the events of one run to files in ``folder``: the record, and a journal beside it while the run goes on.

    Events are appended to the journal as they come, snapshots once a second. A large journal goes into the record, and
    an empty one replaces it. At the end, the record holds everything, and the journal is removed.

    Of the pipeline's options, only those of the command line are recorded. What looks like a secret is hidden in them,
    and in the texts of failures and logs, see :func:`luminosity.runs.manifest.masking.mask_text`. If writing fails, the
    recorder warns once and stops; the run goes on. The recorder also looks for requests of other processes beside the
    record.
    """

    def __init__(self, folder: Path, on_request: Callable[[journal.Action], None] | None = None) -> None:
        self._folder = folder
        self._on_request = on_request
        self._requests: journal.RequestFile | None = None
        self._path = folder
        self._journal: JournalWriter | None = None
        self._content: dict[str, Any] = {}
        self._number = 0  # of the last event
        self._happenings = Happenings(_MOST_HAPPENINGS, _MOST_HAPPENING_BYTES)
        self._snapshots = Thinned(_MOST_SNAPSHOTS, _MOST_SNAPSHOT_BYTES)
        self._samples = Samples(_SAMPLES_EVERY_S)
        self._newest: dict[str, Any] | None = None  # the last snapshot
        self._metrics: tuple[MetricView, ...] = ()  # of a snapshot that is not recorded
        self._next_at = 0.0  # seconds of the next snapshot to be recorded
        self._is_broken = False

    def __call__(self, event: Event) -> None:
        if self._is_broken:
            return
        try:
            self._take(event)
            self._look_for_requests(event)
        except OSError as error:
            self._is_broken = True
            if self._journal is not None:
                self._journal.close()
            _warn(error)

    def _take(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._begin(event)
            return
        assert self._journal is not None
        if self._content["ended"] is not None:
            return  # the record is complete
        if isinstance(event, Snapshot):
            if event.seconds < self._next_at:
                self._metrics = event.metrics or self._metrics
                return
            line = self._snapshot(event)
        elif isinstance(event, RunEnded):
            self._content["ended"] = self._numbered(event)
            line = text_of(self._content["ended"])
        else:
            data = self._numbered(event)
            line, digest, traceback = self._happenings.add(self._number, data)
            if digest:
                self._journal.append_text(digest, traceback)
        self._journal.append(line)
        if isinstance(event, RunEnded):
            self._write()
            self._journal.remove()
        elif self._journal.size > _MOST_JOURNAL_BYTES:
            self._write()
            self._journal.replace(self._number)

    def _snapshot(self, event: Snapshot) -> str:
        if self._metrics and not event.metrics:
            event = replace(event, metrics=self._metrics)
        self._metrics = ()
        data = self._numbered(event)
        self._samples.thin(data)
        self._snapshots.add(data)
        self._newest = data
        line = text_of(data)
        # Snapshots may come a bit early.
        self._next_at = event.seconds + 0.95 * max(_EVERY_S, len(line) / _BYTES_PER_S)
        return line

    def _numbered(self, event: Event) -> dict[str, Any]:
        self._number += 1
        data = to_json(event)
        masked = {name: mask_text(data[name]) for name in _TEXTS if name in data}
        return {**data, **masked, NUMBER: self._number}

    def _look_for_requests(self, event: Event) -> None:
        if self._requests is None or self._on_request is None:
            return
        if isinstance(event, RunEnded):
            self._requests.remove()
        elif (action := self._requests.take(event.seconds)) is not None:
            self._on_request(action)

    def _begin(self, event: RunStarted) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _warn_of_others(self._folder)
        _prune(self._folder)
        self._path = records.path_of(self._folder, event.run)
        self._requests = journal.RequestFile(self._folder, event.run)
        self._content = {
            "format": records.FORMAT,
            "process": records.this_process(),
            "pipeline": event.pipeline,
            "started": self._numbered(event),
            "ended": None,
        }
        self._write()
        self._journal = JournalWriter(path_beside(self._path))
        self._journal.replace(self._number)

    def _write(self) -> None:
        """Replace the record atomically, so that readers always find a complete one."""
        happenings = self._happenings
        content = text_of(
            {
                **self._content,
                "number": self._number,
                "left_out": sum(happenings.left_out.values()),
                "left_out_of": happenings.left_out,
                "tracebacks": happenings.tracebacks,
            }
        )
        snapshots = self._snapshots.kept
        if self._newest is not None and self._content["ended"] is None:
            # The last one is complete: it is the state of the run until the next one comes.
            is_kept = bool(snapshots) and json.loads(snapshots[-1])[NUMBER] == self._newest[NUMBER]
            snapshots = [*snapshots[: len(snapshots) - is_kept], text_of(self._samples.fill(self._newest))]
        events = f'"happenings":[{",".join(happenings.kept)}],"snapshots":[{",".join(snapshots)}]'
        replace_file(self._path, f"{content[:-1]},{events}}}", is_private=True)


def _prune(folder: Path) -> None:
    """Remove the oldest records, to make room for one more, and files that a killed run left."""
    journal.remove_old(folder)
    for run_id in _old_runs(folder):
        record = records.path_of(folder, run_id)
        for path in (record, manifests.path_of(folder, run_id), path_beside(record), *log_lines.paths_of(record)):
            # Another run may remove it first; in a folder that several users share, it may be another user's.
            with contextlib.suppress(FileNotFoundError, PermissionError):
                path.unlink()
    for path in folder.glob(f"*.json*{_UNFINISHED}"):
        with contextlib.suppress(FileNotFoundError, PermissionError):
            if time.time() - path.stat().st_mtime > _UNFINISHED_FOR_S:
                path.unlink()


def _old_runs(folder: Path) -> Iterator[str]:
    """Yield the runs whose records are to be removed."""
    ids = records.run_ids(folder)
    heads = {run_id: records.head(records.path_of(folder, run_id)) for run_id in ids} if len(ids) >= _MOST_RUNS else {}
    newer = {head.pipeline for run_id in ids[: _MOST_RUNS - 1] if run_id in heads and (head := heads[run_id])}
    running = spared = 0
    for run_id in ids[_MOST_RUNS - 1 :]:
        head = heads[run_id]
        if head is not None and head.is_running and running < _MOST_RUNNING:
            running += 1
            continue
        if head is not None and head.pipeline not in newer and spared < _MOST_PIPELINES:
            newer.add(head.pipeline)
            spared += 1
            continue
        yield run_id


def _warn_of_others(folder: Path) -> None:
    if said := who_else_writes(folder):
        _LOGGER.warning(
            "runs are recorded where others can forge or remove records: %s; expected a folder that only you can write "
            "to: `chmod 700 %s`, or `chmod 1770` to share it with its group, or pass --run_dir=DIR",
            said,
            folder,
        )


def _warn(error: Exception) -> None:
    _LOGGER.warning(
        "this run is not recorded: %s; pass --run_dir=DIR to record runs elsewhere, --run_dir=off to record none", error
    )
