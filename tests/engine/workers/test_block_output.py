"""Large elements go to a stream in parts, as the same bytes that Beam's sink would write."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
from apache_beam.coders import coders
from apache_beam.runners import common
from apache_beam.runners.worker import statesampler
from apache_beam.transforms.window import GlobalWindow, IntervalWindow
from apache_beam.utils.counters import CounterFactory
from apache_beam.utils.windowed_value import WindowedValue

from luminosity.engine.workers.sdk.channel import BlockOutput, BlockStream
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
