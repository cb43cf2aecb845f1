"""A table that is followed as a stream: each version once, with its time; kills, other writers, and what is refused."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import apache_beam as beam
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from apache_beam.io.watermark_estimators import ManualWatermarkEstimator
from apache_beam.runners.sdf_utils import RestrictionTrackerView, ThreadsafeRestrictionTracker
from apache_beam.transforms.window import TimestampedValue
from apache_beam.utils.timestamp import Timestamp

from luminosity import ReadDelta
from luminosity.errors import InvalidArgument, TableError
from luminosity.io.lakes.delta_log import DeltaAddress
from luminosity.io.lakes.delta_table import DeltaTable
from luminosity.io.reading.follow import FollowVersions, Seen, SeenTracker
from luminosity.io.reading.named_table import FollowedTable, NewVersion, Part
from tests.io.lakes.places import PLACES, DeltaPlace, Place, place
from tests.marks import notes

__all__ = ["place"]
_LONGEST_S = 120


def _table(read: Any) -> FollowedTable:
    return read._settings.table  # The transform's own, whose parts are read here without a pipeline.


class _Follower:
    """Calls the step again and again, as a runner does, and reads the parts that it emits."""

    def __init__(self, read: Any, where: Any = None) -> None:
        self._read = read
        self._table = _table(read)
        self._step = FollowVersions(self._table, where, poll_s=1)
        self._step.setup()
        self._element = self._table.opened(list(read.files))
        self._seen: Seen = self._step.initial_restriction(self._element)
        self.watermark: Any = ManualWatermarkEstimator(None)

    def look(self) -> list[tuple[list[int], Timestamp]]:
        """Return the rows of each new part, with its time."""
        tracker = ThreadsafeRestrictionTracker(SeenTracker(self._seen))
        emitted = list(self._step.process(self._element, RestrictionTrackerView(tracker), self.watermark))
        (rest,) = [each for each in [tracker.deferred_status()] if each is not None]
        self._seen = rest[0]
        assert tracker.check_done()
        return [(self._rows(each.value), each.timestamp) for each in emitted if isinstance(each, TimestampedValue)]

    def _rows(self, part: Part) -> list[int]:
        from luminosity.io.reading.readers import all_rows
        from luminosity.io.reading.text_lines import raise_unreadable

        found = all_rows([part], self._read._settings, raise_unreadable)
        return [n for _, batch in found for n in batch["n"].to_pylist()]


def _numbers(looked: list[tuple[list[int], Timestamp]]) -> list[list[int]]:
    return [rows for rows, _ in looked]


def test_each_version_is_emitted_once_with_its_time(place: Place) -> None:
    began = time.time()
    place.append(pa.table({"n": [1, 2]}))
    follower = _Follower(place.read(poll_s=1))
    place.append(pa.table({"n": [3]}))
    assert _numbers(follower.look()) == [[1, 2]]
    place.append(pa.table({"n": [4]}))
    looked = follower.look()
    assert _numbers(looked) == [[3], [4]]
    times = [at.seconds() for _, at in looked]
    assert int(began) <= times[0] <= times[1] <= time.time() + 1
    assert follower.look() == []
    reached = follower.watermark.current_watermark()
    place.append(pa.table({"n": [5]}))
    ((_, at),) = follower.look()
    assert at >= reached, "rows are never late"


def test_since_leaves_out_what_was_there(place: Place) -> None:
    place.append(pa.table({"n": [1]}))
    place.append(pa.table({"n": [2]}))
    follower = _Follower(place.read(since=place.versions()[0], poll_s=1))
    assert _numbers(follower.look()) == [[2]]
    place.append(pa.table({"n": [3]}))
    assert _numbers(follower.look()) == [[3]]


def test_an_empty_table_is_followed_from_its_first_rows(place: Place) -> None:
    place.append(pa.table({"n": pa.array([], pa.int64())}))
    follower = _Follower(place.read(poll_s=1))
    assert _numbers(follower.look()) == []
    place.append(pa.table({"n": [7]}))
    assert _numbers(follower.look()) == [[7]]


def test_rows_that_were_replaced_end_the_run(place: Place) -> None:
    place.append(pa.table({"n": [1]}))
    follower = _Follower(place.read(poll_s=1))
    follower.look()
    with beam.Pipeline("FnApiRunner") as pipeline:
        rows = pa.record_batch({"n": [2]})
        _ = pipeline | beam.Create([rows]) | place.write(mode="overwrite", schema=rows.schema)
    with pytest.raises(TableError, match="expected only appended rows"):
        follower.look()


def test_compaction_is_not_read_again_and_partitions_are_left_out(tmp_path: Path) -> None:
    place = DeltaPlace(tmp_path)
    rows = pa.record_batch({"n": [1, 2], "day": [1, 2]})
    with beam.Pipeline("FnApiRunner") as pipeline:
        _ = pipeline | beam.Create([rows]) | place.write(partition_by="day", schema=rows.schema)
    where = pc.field("day") == 2
    follower = _Follower(place.read(["n"], where, poll_s=1), where)
    assert _numbers(follower.look()) == [[2]]
    place.append(pa.table({"n": [3, 4], "day": [1, 2]}))
    place.table.optimize.compact()
    assert _numbers(follower.look()) == [[4]]


def test_versions_that_are_gone_are_told(tmp_path: Path) -> None:
    place = DeltaPlace(tmp_path)
    place.append(pa.table({"n": [1]}))
    follower = _Follower(place.read(poll_s=1))
    follower.look()
    place.append(pa.table({"n": [2]}))
    place.append(pa.table({"n": [3]}))
    place.table.create_checkpoint()
    (place.folder / "_delta_log" / f"{1:020d}.json").unlink()
    with pytest.raises(TableError, match="version 1 is not in the log any more"):
        follower.look()


def test_a_catalog_that_is_away_is_asked_again(tmp_path: Path) -> None:
    class Away(DeltaTable):
        is_away = True

        def newer(self, version: int | None, where: Any) -> list[NewVersion]:
            if Away.is_away:
                raise TableError("the catalog does not answer", may_pass=True)
            return super().newer(version, where)

    place = DeltaPlace(tmp_path)
    place.append(pa.table({"n": [1]}))
    read = place.read(poll_s=1)
    _table(read).__class__ = Away
    follower = _Follower(read)
    follower.look()
    place.append(pa.table({"n": [2]}))
    reached = follower.watermark.current_watermark()
    assert follower.look() == []
    assert follower.watermark.current_watermark() == reached, "rows that were not seen may be older"
    Away.is_away = False
    assert _numbers(follower.look()) == [[2]]


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    place = DeltaPlace(tmp_path)
    place.append(pa.table({"n": [1]}))
    with pytest.raises(InvalidArgument, match="found poll_s=0, expected seconds"):
        place.read(poll_s=0)
    with pytest.raises(InvalidArgument, match="found changes_since= and poll_s="):
        ReadDelta(place.folder, changes_since=0, poll_s=1)
    assert DeltaTable(DeltaAddress.of(str(place.folder), None)).version == 0


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["delta", pytest.param("iceberg", marks=pytest.mark.slow)])
def test_each_row_is_copied_once_though_the_run_is_killed(kind: str, tmp_path: Path) -> None:
    for name in ("source", "copy"):
        (tmp_path / name).mkdir()
    source, copy = PLACES[kind](tmp_path / "source"), PLACES[kind](tmp_path / "copy")
    source.append(pa.table({"n": [0]}))
    written = 1
    for is_last in (False, True):
        job = [sys.executable, "-m", "tests.io.lakes.following", kind, str(tmp_path)]
        run = subprocess.Popen(job)
        try:
            before = written
            deadline = time.monotonic() + _LONGEST_S
            while not (copied := _copied(copy)) or max(copied) < (before + 2 if is_last else before):
                assert run.poll() is None, run.returncode
                assert time.monotonic() < deadline, copied
                source.append(pa.table({"n": [written]}))
                written += 1
                time.sleep(0.2)
            if is_last:
                while len(_copied(copy)) < written:
                    assert run.poll() is None, run.returncode
                    assert time.monotonic() < deadline, written
                    time.sleep(0.2)
        finally:
            run.kill()
            run.wait()
    assert _copied(copy) == list(range(written))
    assert notes(tmp_path / "at_work")


def _copied(place: Place) -> list[int]:
    return [] if place.lake.schema() is None else sorted(place.rows()["n"].to_pylist())
