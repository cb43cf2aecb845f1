"""Blocks: cut, shared, spilled, and gone with their last reference."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.transforms.window import GlobalWindows

from luminosity import LuminosityRunner
from luminosity.engine.blocks import Block
from luminosity.engine.loop.bundle import slice_blocks
from luminosity.engine.plan.codecs import Codecs, ElementCodec
from luminosity.engine.plan.planner import plan
from luminosity.engine.workers import wire
from luminosity.engine.workers.channel import BlockWriter


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
    return [value[1:] for _, value in codec.elements(block.data())]  # without the length before it


def file_block(folder: Path, data: bytes, count: int) -> Block:
    folder.mkdir(exist_ok=True)
    path = folder / "w1.1"
    path.write_bytes(data)
    return Block.received(wire.pack_span(count, wire.FileSpan(str(path), 0, len(data))), 0)


@pytest.mark.parametrize("is_file", [False, True])
def test_a_block_is_cut_by_element(
    codec_and_encode: tuple[ElementCodec, object], tmp_path: Path, is_file: bool
) -> None:
    codec = codec_and_encode[0]
    data = encoded(codec_and_encode, [b"a", b"bb", b"ccc"])
    block = file_block(tmp_path, data, 3) if is_file else Block.of_bytes(data, 3, 0)
    head, rest = block.cut(codec, 1)
    assert (values(codec, head), head.count) == ([b"a"], 1)
    assert (values(codec, rest), rest.count) == ([b"bb", b"ccc"], 2)
    head.release()
    assert values(codec, rest) == [b"bb", b"ccc"]
    rest.release()
    assert os.listdir(tmp_path) == []


def test_elements_are_found_across_blocks(codec_and_encode: tuple[ElementCodec, object]) -> None:
    codec = codec_and_encode[0]
    letters = [b"a", b"b", b"c", b"d", b"e", b"f"]
    blocks = [Block.of_bytes(encoded(codec_and_encode, letters[i : i + 2]), 2, 0) for i in (0, 2, 4)]
    for start in range(7):
        for stop in range(start, 7):
            taken = slice_blocks(blocks, codec, start, stop)
            assert [v for block in taken for v in values(codec, block)] == letters[start:stop]


def test_a_file_lives_until_its_last_reference(codec_and_encode: tuple[ElementCodec, object], tmp_path: Path) -> None:
    block = file_block(tmp_path, encoded(codec_and_encode, [b"a"]), 1)
    shared = block.share()
    block.release()
    assert values(codec_and_encode[0], shared) == [b"a"]
    shared.release()
    assert os.listdir(tmp_path) == []


def test_a_spilled_file_is_found_by_all_who_share_it(
    codec_and_encode: tuple[ElementCodec, object], tmp_path: Path
) -> None:
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    disk.mkdir()
    block = file_block(memory, encoded(codec_and_encode, [b"a"]), 1)
    shared = block.share()
    block.spill(str(memory), str(disk))
    assert os.listdir(memory) == []
    assert values(codec_and_encode[0], shared) == [b"a"]
    block.release()
    shared.release()
    assert os.listdir(disk) == []


@pytest.fixture
def one_megabyte(tmp_path: Path) -> Iterator[Path]:
    """A folder that takes 1 MB, as shared memory may in a container."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("may not mount a file system here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_where_shared_memory_is_full_blocks_go_to_disk(one_megabyte: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    writer = BlockWriter([str(one_megabyte), str(disk)], "w1")
    spans = []
    for number in range(4):
        _, span = wire.unpack(writer.message(1, bytes([number]) * 400_000))
        assert isinstance(span, wire.FileSpan)
        spans.append(span)
    assert {Path(span.path).parent for span in spans} == {one_megabyte, disk}
    assert [wire.read_span(span)[:1] for span in spans] == [bytes([n]) for n in range(4)]


def test_where_nothing_has_room_the_error_says_so(one_megabyte: Path) -> None:
    writer = BlockWriter([str(one_megabyte)], "w1")
    with pytest.raises(OSError, match="no room for a block of 2000000 bytes") as caught:
        writer.message(1, b"x" * 2_000_000)
    assert caught.value.errno == errno.ENOSPC
    assert os.listdir(one_megabyte) == []
