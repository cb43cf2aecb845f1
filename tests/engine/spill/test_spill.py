"""Tests of data beyond the memory budget: sorted runs, tables, maps on disk, and pipelines with a small budget."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.transforms import window
from apache_beam.transforms.userstate import BagStateSpec
from hypothesis import given, settings
from hypothesis import strategies as st

from luminosity.engine.data.blocks import BlockStore
from luminosity.engine.data.complete_side_input import SideInputData
from luminosity.engine.data.state import StateStore
from luminosity.engine.loop.spill_policy import SpillPolicy
from luminosity.engine.spill import files
from luminosity.engine.spill.diskmap import DiskMap
from luminosity.engine.spill.files import SpillFile, StoredChunk
from luminosity.engine.spill.quota import Ledger, WriterQuota
from luminosity.engine.spill.table import GroupTable
from luminosity.errors import OptionError, SpillFailed
from tests.processes import files_of
from tests.runners import collect, new_pipeline, run

_SMALL_BUDGET = "--memory_budget=2MB"


def table_in(folder: Path, limit: int = 10**9) -> tuple[GroupTable, Ledger]:
    ledger = Ledger(str(folder / f"quota{random.random()}"), limit, writers=0)
    return GroupTable(partial(SpillFile, str(folder)), ledger, min), ledger


@given(st.binary(max_size=2000), st.integers(1, 50))
def test_a_frame_holds_any_bytes(data: bytes, times: int) -> None:
    assert files.unpack(files.pack(data * times)) == data * times


def test_a_frame_that_was_cut_short_is_noticed() -> None:
    with pytest.raises(EOFError):
        files.unpack(files.pack(bytes(1000))[:-1])


def test_a_file_of_frames_is_gone_with_its_last_reference(tmp_path: Path) -> None:
    file = SpillFile(str(tmp_path))
    chunks = [file.append(b"%d" % number * 1000) for number in range(10)]
    file.share()
    file.release()
    assert [chunk.read() for chunk in chunks] == [b"%d" % number * 1000 for number in range(10)]
    assert [chunk.size for chunk in chunks] == [1000] * 10
    file.release()
    assert list(tmp_path.iterdir()) == []


_pairs = st.lists(st.tuples(st.sampled_from([b"", b"a", b"ab", b"b", b"c" * 300]), st.binary(max_size=50)), max_size=60)


@settings(max_examples=60, deadline=None)
@given(_pairs, st.sets(st.integers(0, 60)), st.integers(1, 3000))
def test_a_table_gives_what_it_got_in_the_order_of_its_coming_wherever_it_was_spilled(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[bytes, bytes]], spill_at: set[int], wanted: int
) -> None:
    folder = tmp_path_factory.mktemp("table")
    table, ledger = table_in(folder)
    expected: dict[bytes, list[bytes]] = {}
    for index, (key, value) in enumerate(pairs):
        table.add_all([(key, value)])
        table.add_time(key, index)
        expected.setdefault(key, []).append(value)
        if index in spill_at:
            table.spill(wanted)
    entries = {entry.id: entry for entry in table.take()}
    assert {key: b"".join(entry.read()) for key, entry in entries.items()} == {
        key: b"".join(values) for key, values in expected.items()
    }
    assert {key: entry.count for key, entry in entries.items()} == {k: len(v) for k, v in expected.items()}
    first = {key: index for index, (key, _) in reversed(list(enumerate(pairs)))}
    assert {key: entry.time for key, entry in entries.items()} == first
    assert ledger.used == 0
    assert [path.name for path in folder.iterdir() if path.name.startswith("spill")] == []


def test_many_runs_are_merged_into_one(tmp_path: Path) -> None:
    table, _ = table_in(tmp_path)
    for number in range(200):
        table.add_all([(b"%d" % key, b"%d," % number) for key in range(20)])
        table.spill(10**9)
        assert len(list(tmp_path.glob("spill.*"))) <= 65
    entries = list(table.take())
    assert [entry.id for entry in entries] == sorted(b"%d" % key for key in range(20))
    values = b"".join(b"%d," % number for number in range(200))
    assert [b"".join(entry.read()) for entry in entries] == [values] * 20


def test_a_large_group_that_was_spilled_stays_on_disk(tmp_path: Path) -> None:
    table, ledger = table_in(tmp_path)
    for _ in range(30):  # one group in large pieces, one in many small ones
        table.add_all([(b"large", bytes(100_000)), (b"in pieces", bytes(10_000))])
        table.spill(10**9)
    for entry in table.take():
        assert all(isinstance(chunk, StoredChunk) for chunk in entry.chunks)
        assert sum(len(piece) for piece in entry.read()) == (3_000_000 if entry.id == b"large" else 300_000)
    assert ledger.used == 0


def test_a_table_may_be_spilled_while_it_is_taken(tmp_path: Path) -> None:
    table, ledger = table_in(tmp_path)
    table.add_all((b"%d" % key, b"x") for key in range(1000))
    groups = table.take()
    taken = [next(groups).id for _ in range(10)]
    table.spill(10**9)
    assert table.memory_bytes == 0
    taken += [group.id for group in groups]
    assert sorted(taken) == sorted(b"%d" % key for key in range(1000))
    assert ledger.used == 0


def test_a_map_on_disk(tmp_path: Path) -> None:
    with_parts = DiskMap(str(tmp_path), "map")
    with_parts.put((b"%04d" % n, n, [b"%d" % n, bytes(5)]) for n in range(3000))
    with_parts.put([(b"0001", 7, [b"new"])])
    with_parts.remove(b"0002")
    assert b"".join(part.read() for part in with_parts.parts(b"2999")) == b"2999" + bytes(5)
    assert with_parts.parts(b"0002") == []
    assert [number for _, number in with_parts.with_prefix(b"2")] == list(range(2000, 3000))
    assert [key for key, _ in with_parts.with_prefix(b"")][:3] == [b"0000", b"0001", b"0003"]
    with_parts.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("writers", [3, 1500])
def test_memory_is_counted_for_few_and_for_many_writers(tmp_path: Path, writers: int) -> None:
    path = str(tmp_path / "quota")
    ledger = Ledger(path, limit=10_000, writers=writers)
    first, last = WriterQuota(path, 0), WriterQuota(path, writers - 1)
    assert first.reserve(1000)
    assert last.reserve(2000)
    ledger.hold(500)
    ledger.received(0, 1000)
    assert ledger.used == ledger.peak == 3500
    assert not last.reserve(6501)
    ledger.writer_lost(writers - 1)
    ledger.free(500)
    ledger.gone(1000)
    assert (ledger.used, ledger.peak) == (0, 3500)


def test_room_is_made_again_after_something_large_was_out_of_reach(tmp_path: Path) -> None:
    ledger = Ledger(None, limit=10_000_000, writers=0)
    store = BlockStore(str(tmp_path), ledger)
    policy = SpillPolicy(store, StateStore(str(tmp_path), ledger), [])
    waiting = SideInputData(None, str(tmp_path), ledger)  # type: ignore[arg-type]  # no element is decoded
    policy.side_inputs.append(waiting)
    large, small = store.of_bytes(bytes(50_000_000), 1, 0), store.of_bytes(bytes(8_900_000), 1, 0)
    policy.check()
    large.release()
    policy.check()
    for _ in range(20):
        waiting.add(store.of_bytes(bytes(1_000_000), 1, 0))
        policy.check()
    assert ledger.used <= 11_000_000
    small.release()
    waiting.release()
    assert ledger.used == 0


def test_a_write_that_failed_harms_no_later_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = SpillFile(str(tmp_path))
    first = file.append(b"first" * 1000)
    pwrite = os.pwrite

    def half_then_full(descriptor: int, data: Any, offset: int) -> int:
        pwrite(descriptor, bytes(data)[:10], offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", half_then_full)
    with pytest.raises(SpillFailed):
        file.append(b"lost" * 1000)
    monkeypatch.undo()
    second = file.append(b"second" * 1000)
    assert (first.read(), second.read()) == (b"first" * 1000, b"second" * 1000)
    file.release()


def values_of(number: int) -> Iterable[tuple[str, bytes]]:
    """Yield 300 values, a third of them with the same key."""
    for index in range(300):
        yield "hot" if index % 3 == 0 else f"key{index}", number.to_bytes(2, "big") + bytes(998)


def digest(key: str, values: Iterable[bytes]) -> tuple[str, int, list[int]]:
    numbers = [int.from_bytes(value[:2], "big") for value in values]
    return key, len(numbers), sorted(set(numbers))


@pytest.mark.parametrize("windows", ["global", "fixed", "sliding", "sessions"])
def test_groups_larger_than_the_budget_come_out_whole(tmp_path: Path, windows: str) -> None:
    window_fn = {
        "global": window.GlobalWindows(),
        "fixed": window.FixedWindows(10),
        "sliding": window.SlidingWindows(10, 5),
        "sessions": window.Sessions(5),
    }[windows]

    def build(pipeline: beam.Pipeline) -> Any:
        return (
            pipeline
            | beam.Create(range(40))
            | beam.FlatMap(values_of)
            | beam.Map(lambda pair: window.TimestampedValue(pair, int.from_bytes(pair[1][:2], "big") // 20 * 20))
            | beam.WindowInto(window_fn)
            | beam.GroupByKey()
            | beam.MapTuple(digest)
        )

    pipeline = new_pipeline(_SMALL_BUDGET, f"--spill_dir={tmp_path / 'spill'}")
    found = collect(build, tmp_path, pipeline)
    halves = [list(range(20)), list(range(20, 40))]
    parts = {"global": [list(range(40))], "fixed": halves, "sliding": [*halves, *halves], "sessions": halves}[windows]
    keys = {"hot": 100, **{f"key{index}": 1 for index in range(300) if index % 3}}
    expected = [(key, times * len(part), part) for key, times in keys.items() for part in parts]
    assert sorted(found) == sorted(expected)


class Remember(beam.DoFn):
    """Yields, for each element, the number of elements of its key so far."""

    _SEEN = BagStateSpec("seen", beam.coders.BytesCoder())

    def process(
        self,
        element: tuple[int, bytes],
        seen: Any = beam.DoFn.StateParam(_SEEN),  # noqa: B008
    ) -> Iterable[tuple[int, int]]:
        seen.add(element[1])
        yield element[0], sum(1 for _ in seen.read())


def test_state_larger_than_the_budget(tmp_path: Path) -> None:
    def build(pipeline: beam.Pipeline) -> Any:
        elements = [(key, bytes(8000)) for _ in range(3) for key in range(400)]
        return pipeline | beam.Create(elements) | beam.ParDo(Remember())

    found = collect(build, tmp_path, new_pipeline(_SMALL_BUDGET))
    assert sorted(found) == sorted((key, count) for key in range(400) for count in (1, 2, 3))


@pytest.mark.parametrize("view", ["list", "dict", "multimap"])
def test_a_side_input_larger_than_the_budget(tmp_path: Path, view: str) -> None:
    def build(pipeline: beam.Pipeline) -> Any:
        pairs = pipeline | "pairs" >> beam.Create(range(3000)) | beam.Map(lambda n: (n, n.to_bytes(2, "big") * 1000))
        main = pipeline | "main" >> beam.Create([0, 1500, 2999])
        if view == "list":
            return main | beam.Map(lambda n, all_: sum(len(v) for k, v in all_ if k != n), beam.pvalue.AsIter(pairs))
        if view == "dict":
            return main | beam.Map(lambda n, d: d[n] == n.to_bytes(2, "big") * 1000, beam.pvalue.AsDict(pairs))
        return main | beam.Map(lambda n, m: [len(value) for value in m[n]], beam.pvalue.AsMultiMap(pairs))

    found = collect(build, tmp_path, new_pipeline(_SMALL_BUDGET))
    assert found == [{"list": 2999 * 2000, "dict": True, "multimap": [2000]}[view]] * 3


def test_what_was_spilled_is_gone_after_the_run(tmp_path: Path) -> None:
    spill, before = tmp_path / "made" / "for it", files_of(os.getpid())
    run(
        lambda p: p | beam.Create(range(40)) | beam.FlatMap(values_of) | beam.GroupByKey() | beam.MapTuple(digest),
        _SMALL_BUDGET,
        f"--spill_dir={spill}",
    )
    assert list(spill.iterdir()) == []
    assert files_of(os.getpid()) <= before


@pytest.mark.parametrize("size", ["lots", "-1GB", "0", "1kB", "5 apples"])
def test_a_budget_that_is_no_size_is_refused(size: str) -> None:
    with pytest.raises(OptionError, match="512MB"):
        run(lambda p: p | beam.Create([1]), f"--memory_budget={size}")


def test_a_spill_folder_that_can_not_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    before = files_of(os.getpid())
    below_a_file = f"found a file at {tmp_path}/file, expected a folder"
    for folder, reason in (
        (tmp_path / "file" / "folder", below_a_file),
        ("/proc/none", ".*expected a writable folder"),
        ("/proc", ".*expected a writable folder"),
    ):
        with pytest.raises(OptionError, match=f"--spill_dir={folder}: {reason}"):
            run(lambda p: p | beam.Create([1]), f"--spill_dir={folder}")
    assert files_of(os.getpid()) <= before
