"""Large elements are written in parts, as the same bytes that Beam's sink would write, and read where they lie."""

from __future__ import annotations

import contextlib
import errno
import mmap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from apache_beam.coders import coders
from apache_beam.runners import common
from apache_beam.runners.worker import statesampler
from apache_beam.transforms.window import GlobalWindow, IntervalWindow
from apache_beam.utils.counters import CounterFactory
from apache_beam.utils.windowed_value import WindowedValue

from luminosity.engine.data import wire
from luminosity.engine.workers.sdk.channel import BlockStream, BlockWriter
from luminosity.engine.workers.sdk.large_elements import BlockInput, BlockOutput
from luminosity.inference.steps.messages import BlockCoder, ResultBlock

SMALL, LARGE = 3, 300_000


class Sink(contextlib.AbstractContextManager[BlockOutput]):
    """A sink whose blocks are kept, each with the number of its elements."""

    def __init__(self, coder: Any, **options: Any) -> None:
        self.blocks: list[tuple[int, bytes]] = []
        counters = CounterFactory()
        sampler = statesampler.StateSampler("test", counters)
        self.output = BlockOutput(
            common.NameContext("step"),
            "step",
            {},
            counters,
            sampler,
            coder,
            transform_id="t",
            data_channel_factory=None,
        )
        self.output.set_output_stream(BlockStream(self._keep, lambda: None, **options))

    def _keep(self, count: int, *parts: Any) -> None:
        self.blocks.append((count, b"".join(parts)))

    def __enter__(self) -> BlockOutput:
        return self.output

    def __exit__(self, *_: object) -> None:
        self.output.output_stream.close()


def block(size: int) -> ResultBlock:
    return ResultBlock(["a"] * 2, [0, 0], np.arange(size, dtype=np.uint8), "model")


def coder(value: Any = None, window: Any = None) -> Any:
    prefixed = coders.LengthPrefixCoder(value or BlockCoder())
    return coders.WindowedValueCoder(prefixed, window_coder=window or coders.GlobalWindowCoder())


@pytest.mark.parametrize("sizes", [[SMALL], [LARGE], [SMALL, SMALL, LARGE, LARGE, SMALL]])
@pytest.mark.parametrize("is_eager", [False, True])
def test_the_bytes_are_those_of_beam(sizes: list[int], is_eager: bool) -> None:
    interval = IntervalWindow(0, 10)
    for windowed, window in ((coder(), GlobalWindow()), (coder(window=coders.IntervalWindowCoder()), interval)):
        values = [WindowedValue(block(size), 5_000_000, (window,)) for size in sizes]
        sink = Sink(windowed, is_eager=is_eager)
        with sink as output:
            for value in values:
                output.process(value)
        assert b"".join(data for _, data in sink.blocks) == b"".join(windowed.encode(value) for value in values)
        assert sum(count for count, _ in sink.blocks) == len(values)
        assert sum(len(data) > LARGE for _, data in sink.blocks) == sizes.count(LARGE)


def test_coders_without_parts_are_encoded_by_beam() -> None:
    windowed = coder(coders.BytesCoder())
    values = [WindowedValue(bytes([n]) * LARGE, 0, (GlobalWindow(),)) for n in range(2)]
    sink = Sink(windowed)
    with sink as output:
        for value in values:
            output.process(value)
    assert sink.blocks == [(2, b"".join(map(windowed.encode, values)))]


def test_a_large_array_is_not_copied() -> None:
    large = block(LARGE)
    *_, last = BlockCoder().luminosity_parts(large)
    assert np.shares_memory(np.frombuffer(last, np.uint8), large.values)


@pytest.mark.parametrize(
    "values",
    [
        np.zeros((0, 4), np.float32),
        np.arange(60_000.0).reshape(100, 600),
        np.asfortranarray(np.arange(60_000.0).reshape(100, 600)),
        np.arange(60_000.0).reshape(100, 600)[::2, ::3],
        np.array(["text", None, {}], object),
        [np.arange(10_000), "text", np.arange(20_000)],
    ],
    ids=["empty", "rows", "columns", "every second", "objects", "list"],
)
def test_blocks_come_back_as_they_were(values: Any) -> None:
    found = BlockCoder().decode(BlockCoder().encode(ResultBlock(["a"], [1], values, None)))
    assert found.examples == ["a"]
    pairs = [(found.values, values)] if isinstance(values, np.ndarray) else list(zip(found.values, values, strict=True))
    for one, other in pairs:
        np.testing.assert_array_equal(one, other)
        if isinstance(one, np.ndarray):
            assert one.dtype == other.dtype
            assert one.flags.writeable  # users may change their predictions


class Source:
    """A source whose elements are kept."""

    def __init__(self, coder: Any, *, stop: float = float("inf")) -> None:
        self.elements: list[Any] = []
        counters = CounterFactory()
        sampler = statesampler.StateSampler("test", counters)
        channel = SimpleNamespace(read=lambda _, message: wire.read(message))
        self.input: Any = BlockInput(
            common.NameContext("step"), "step", {"out": []}, counters, sampler, coder, transform_id="t",
            data_channel_factory=lambda _: channel,
        )  # fmt: skip
        self.input.execution_context = SimpleNamespace(instruction_id="i")
        self.input.output = self.elements.append
        self.input.stop = stop


def written(values: list[Any], windowed: Any, folder: Path, *, has_room: bool = True) -> list[bytes]:
    """Return the messages of these elements, written by the sink of a worker."""
    quota: Any = SimpleNamespace(reserve=lambda *_: has_room, give_back=lambda _: None)
    writer = BlockWriter(str(folder), str(folder), quota, "w")
    messages: list[bytes] = []
    sink = Sink(windowed)
    sink.output.set_output_stream(
        BlockStream(lambda count, *parts: messages.append(writer.message(count, *parts)), lambda: None)
    )
    with sink as output:
        for value in values:
            output.process(value)
    return messages


@pytest.mark.parametrize("has_room", [True, False], ids=["in memory", "packed on the disk"])
@pytest.mark.parametrize("windows", [1, 3])
def test_elements_come_back_with_their_windows_and_times(windows: int, has_room: bool, tmp_path: Path) -> None:
    intervals = tuple(IntervalWindow(10 * n, 10 * n + 10) for n in range(windows))
    windowed = coder(window=coders.IntervalWindowCoder())
    values = [WindowedValue(block(size), 5_000_000 + size, intervals) for size in (SMALL, LARGE, LARGE, SMALL)]
    source = Source(windowed)
    for message in written(values, windowed, tmp_path, has_room=has_room):
        source.input.process_encoded(message)
    assert [(each.timestamp, each.windows, each.pane_info) for each in source.elements] == [
        (each.timestamp, each.windows, each.pane_info) for each in values
    ]
    for found, value in zip(source.elements, values, strict=True):
        assert found.value.examples == value.value.examples
        np.testing.assert_array_equal(found.value.values, value.value.values)
        assert found.value.values.flags.writeable


def test_a_large_element_is_read_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    windowed = coder()
    [message] = written([WindowedValue(block(LARGE), 0, (GlobalWindow(),))], windowed, tmp_path)
    monkeypatch.setattr(wire, "read_span", lambda _: pytest.fail("the file is copied"))
    source = Source(windowed)
    source.input.process_encoded(message)
    for file in tmp_path.iterdir():
        file.unlink()
    assert source.elements[0].value.values.sum() == block(LARGE).values.sum()


def test_a_file_system_that_maps_no_files_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENODEV, "no such device")

    windowed = coder()
    [message] = written([WindowedValue(block(LARGE), 0, (GlobalWindow(),))], windowed, tmp_path)
    monkeypatch.setattr(mmap, "mmap", refuse)
    source = Source(windowed)
    source.input.process_encoded(message)
    np.testing.assert_array_equal(source.elements[0].value.values, block(LARGE).values)


def test_a_split_bundle_stops_before_a_large_element(tmp_path: Path) -> None:
    windowed = coder()
    values = [WindowedValue(block(LARGE), 0, (GlobalWindow(),)) for _ in range(3)]
    source = Source(windowed, stop=2)
    for message in written(values, windowed, tmp_path):
        source.input.process_encoded(message)
    assert (len(source.elements), source.input.index) == (2, 1)


def test_a_file_that_is_too_short_is_an_error(tmp_path: Path) -> None:
    windowed = coder()
    [message] = written([WindowedValue(block(LARGE), 0, (GlobalWindow(),))], windowed, tmp_path)
    [file] = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(EOFError, match="ends at byte"):
        Source(windowed).input.process_encoded(message)
