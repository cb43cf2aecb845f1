"""Tests of blocks: they can be cut, shared and spilled, and are freed with their last reference."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.transforms.window import GlobalWindows

from luminosity import LuminosityRunner
from luminosity.engine.data import wire
from luminosity.engine.data.blocks import Block, BlockStore
from luminosity.engine.data.shard import Shard
from luminosity.engine.loop.bundle import Bundle, slice_blocks
from luminosity.engine.plan.codecs import Codecs, ElementCodec
from luminosity.engine.plan.planner import plan
from luminosity.engine.spill.quota import Ledger, WriterQuota
from luminosity.engine.workers.sdk.channel import BlockWriter
from luminosity.errors import SpillFailed


@pytest.fixture(scope="module")
def codec_and_encode() -> tuple[ElementCodec, object]:
    pipeline = beam.Pipeline()
    _ = pipeline | beam.Create(["a", "b"]) | beam.Reshuffle() | beam.Map(str.upper)
    environment = LuminosityRunner().default_environment(PipelineOptions([]))
    graph = plan(pipeline.to_runner_api(default_environment=environment))
    codecs = Codecs(graph)
    coder_id = next(r.coder_id for s in graph.stages for r in s.reads if b"Reshuffle" in r.buffer_id)
    return codecs.elements(coder_id), codecs.impl(coder_id)


def encoded(codec_and_encode: tuple[ElementCodec, object], values: list[bytes]) -> bytes:
    impl = codec_and_encode[1]
    return b"".join(impl.encode_nested(GlobalWindows.windowed_value(v)) for v in values)  # type: ignore[attr-defined]


def values(codec: ElementCodec, block: Block) -> list[bytes]:
    return [value[1:] for _, value in codec.elements(block.data())]  # without the length prefix


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BlockStore]:
    """A store in ``tmp_path``. At the end of a test, all files must be removed and all counters be zero."""
    for name in ("memory", "disk"):
        (tmp_path / name).mkdir()
    ledger = Ledger(str(tmp_path / "quota"), limit=10_000_000, writers=2)
    yield BlockStore(str(tmp_path / "disk"), ledger)
    assert ledger.used == 0
    assert files(tmp_path) == []


def files(folder: Path) -> list[str]:
    return [path.name for name in ("memory", "disk") for path in (folder / name).iterdir()]


def writer_of(folder: Path, number: int = 0) -> BlockWriter:
    quota = WriterQuota(str(folder / "quota"), number)
    return BlockWriter(str(folder / "memory"), str(folder / "disk"), quota, f"w{number}")


def file_block(store: BlockStore, folder: Path, data: bytes, count: int) -> Block:
    """Return a block in a file, as a worker writes it, also if it is small."""
    path = folder / "memory" / "w0.1"
    path.write_bytes(data)
    assert WriterQuota(str(folder / "quota"), 0).reserve(len(data))
    return store.received(wire.pack_span(count, wire.FileSpan(str(path), 0, len(data))), 0, 0)


@pytest.mark.parametrize("is_file", [False, True])
@pytest.mark.parametrize("is_spilled", [False, True])
def test_a_block_is_cut_by_element(
    codec_and_encode: tuple[ElementCodec, object], store: BlockStore, tmp_path: Path, is_file: bool, is_spilled: bool
) -> None:
    codec = codec_and_encode[0]
    data = encoded(codec_and_encode, [b"a", b"bb", b"ccc"])
    block = file_block(store, tmp_path, data, 3) if is_file else store.of_bytes(data, 3, 0)
    if is_spilled:
        assert store.spill([block], 1) == len(data)
        assert store.ledger.used == 0
    head, rest = block.cut(codec, 1)
    assert (values(codec, head), head.count) == ([b"a"], 1)
    assert (values(codec, rest), rest.count) == ([b"bb", b"ccc"], 2)
    head.release()
    assert values(codec, rest) == [b"bb", b"ccc"]
    rest.release()


def test_elements_are_found_across_blocks(codec_and_encode: tuple[ElementCodec, object], store: BlockStore) -> None:
    codec = codec_and_encode[0]
    letters = [b"a", b"b", b"c", b"d", b"e", b"f"]
    blocks = [store.of_bytes(encoded(codec_and_encode, letters[i : i + 2]), 2, 0) for i in (0, 2, 4)]
    store.spill(blocks[:2], 10**6)
    for start in range(7):
        for stop in range(start, 7):
            taken = slice_blocks(blocks, codec, start, stop)
            assert [v for block in taken for v in values(codec, block)] == letters[start:stop]
            for block in taken:
                block.release()
    for block in blocks:
        block.release()


@pytest.mark.parametrize(
    ("is_exclusive", "expected"), [(True, [b"ab", b"c", b"de"]), (False, [b"abde", b"c"])], ids=["keys", "any"]
)
def test_an_element_is_cut_out_of_a_bundle_and_keys_stay_in_order(
    codec_and_encode: tuple[ElementCodec, object], store: BlockStore, is_exclusive: bool, expected: list[bytes]
) -> None:
    codec = codec_and_encode[0]
    blocks = [
        store.of_bytes(encoded(codec_and_encode, part), len(part), 0) for part in ([b"a", b"b", b"c"], [b"d", b"e"])
    ]
    stage = cast(Any, SimpleNamespace(codec=lambda _: codec, plan=SimpleNamespace(partitions=0)))
    whole = Bundle(stage, (Shard(["read"], is_exclusive=is_exclusive),), {"read": blocks})
    parts, alone = whole.without_element("read", 2)
    found = [b"".join(v for block in part.inputs["read"] for v in values(codec, block)) for part in parts]
    assert found == expected
    assert found[parts.index(alone)] == b"c"
    for part in parts:
        part.release()


def test_a_file_lives_until_its_last_reference(
    codec_and_encode: tuple[ElementCodec, object], store: BlockStore, tmp_path: Path
) -> None:
    block = file_block(store, tmp_path, encoded(codec_and_encode, [b"a"]), 1)
    shared = block.share()
    block.release()
    assert values(codec_and_encode[0], shared) == [b"a"]
    shared.release()


def test_what_is_spilled_is_found_by_all_who_share_it(
    codec_and_encode: tuple[ElementCodec, object], store: BlockStore, tmp_path: Path
) -> None:
    block = file_block(store, tmp_path, encoded(codec_and_encode, [b"a"]), 1)
    shared = block.share()
    store.spill([block], 1)
    assert files(tmp_path) == ["w0.1.packed"]
    assert values(codec_and_encode[0], shared) == [b"a"]
    _, span = wire.unpack(shared.message())
    assert isinstance(span, wire.FileSpan)
    assert wire.read_span(span) == shared.data()
    block.release()
    shared.release()


def test_small_blocks_are_spilled_together(store: BlockStore, tmp_path: Path) -> None:
    blocks = [store.of_bytes(b"%d" % n * 100, 1, 0) for n in range(50)]
    assert store.spill(blocks, 10**6) == sum(block.size for block in blocks)
    assert len(files(tmp_path)) == 1
    assert [block.data() for block in blocks] == [b"%d" % n * 100 for n in range(50)]
    for block in blocks:
        block.release()


def test_what_a_worker_reads_is_not_moved(store: BlockStore, tmp_path: Path) -> None:
    block = store.received(writer_of(tmp_path).message(1, bytes(2_000_000)), 0, 0)
    waiting = block.share()
    block.pin()
    assert store.spill([waiting], 10**9) == 0
    block.unpin()
    block.release()
    assert store.spill([waiting], 10**9) == 2_000_000
    waiting.release()


def test_no_more_is_spilled_than_is_wanted(store: BlockStore) -> None:
    blocks = [store.of_bytes(bytes(2_000_000), 1, 0) for _ in range(4)]
    assert store.spill(blocks, 3_000_000) == 4_000_000
    assert store.ledger.used == 4_000_000
    for block in blocks:
        block.release()


def test_workers_write_to_disk_when_they_and_the_runner_have_filled_the_budget(
    store: BlockStore, tmp_path: Path
) -> None:
    own = store.of_bytes(bytes(4_000_000), 1, 0)
    writers = [writer_of(tmp_path, 0), writer_of(tmp_path, 1)]
    received = [
        store.received(writers[number % 2].message(1, b"%d" % number * 2_000_000), 0, number % 2) for number in range(5)
    ]
    assert store.ledger.used == 10_000_000
    assert sum(name.endswith(".packed") for name in files(tmp_path)) == 2
    assert [block.data()[:1] for block in received] == [b"0", b"1", b"2", b"3", b"4"]
    assert store.ledger.spilled == 4_000_000
    for block in (own, *received):
        block.release()


def test_what_a_dead_worker_wrote_and_nobody_heard_of_counts_no_more(store: BlockStore, tmp_path: Path) -> None:
    writer = writer_of(tmp_path)
    heard = store.received(writer.message(1, bytes(2_000_000)), 0, 0)
    unheard = wire.unpack(writer.message(1, bytes(3_000_000)))[1]
    assert store.ledger.used == 5_000_000
    assert isinstance(unheard, wire.FileSpan)
    os.unlink(unheard.path)
    store.ledger.writer_lost(0)
    assert store.ledger.used == 2_000_000
    heard.release()


def test_where_shared_memory_is_full_blocks_go_to_disk(store: BlockStore, one_megabyte: Path, tmp_path: Path) -> None:
    writer = BlockWriter(str(one_megabyte), str(tmp_path / "disk"), WriterQuota(str(tmp_path / "quota"), 0), "w1")
    blocks = [store.received(writer.message(1, bytes([n]) * 400_000), 0, 0) for n in range(4)]
    assert len(os.listdir(one_megabyte)) == 2
    assert len(files(tmp_path)) == 2
    assert [block.data()[:1] for block in blocks] == [bytes([n]) for n in range(4)]
    for block in blocks:
        block.release()
    assert os.listdir(one_megabyte) == []


def test_where_nothing_has_room_the_error_says_so(store: BlockStore, one_megabyte: Path, tmp_path: Path) -> None:
    writer = BlockWriter(str(one_megabyte), str(one_megabyte), WriterQuota(str(tmp_path / "quota"), 0), "w1")
    with pytest.raises(SpillFailed, match=r"the disk is full: no room in .*small .*--spill_dir"):
        writer.message(1, os.urandom(2_000_000))
    assert os.listdir(one_megabyte) == []
    block = store.of_bytes(os.urandom(2_000_000), 1, 0)
    with pytest.raises(SpillFailed):
        BlockStore(str(one_megabyte), store.ledger).spill([block], 1)
    assert os.listdir(one_megabyte) == []
    assert len(block.data()) == 2_000_000
    block.release()
