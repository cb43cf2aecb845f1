"""TestStream: elements, watermarks and processing time as a test lists them, one event at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from apache_beam.portability.api import beam_runner_api_pb2
from apache_beam.transforms.window import GlobalWindow
from apache_beam.utils.timestamp import Timestamp
from apache_beam.utils.windowed_value import WindowedValue

from luminosity.engine.data.blocks import Block, BlockStore
from luminosity.engine.data.clock import ManualClock
from luminosity.engine.data.watermarks import MAX, MIN
from luminosity.engine.plan.codecs import Codecs
from luminosity.engine.plan.graph import TestStream

__all__ = ["TestStreams"]

_Event = beam_runner_api_pb2.TestStreamPayload.Event
_ONLY_TAG = "None"  # as Beam names the output of a TestStream without tags


@dataclass
class _Output:
    """Where the events of one tag go."""

    coder_id: str
    deliver: Callable[[Block], None]
    set_watermark: Callable[[int], None]


@dataclass
class _Stream:
    """A TestStream with the events that are still to come."""

    plan: TestStream
    events: deque[_Event]
    outputs: dict[str, _Output] = field(default_factory=dict[str, _Output])


class TestStreams:
    """All TestStreams of a run. Only the loop's thread uses it, whenever nothing else is left to do."""

    def __init__(self, plans: Sequence[TestStream], codecs: Codecs, blocks: BlockStore, clock: ManualClock) -> None:
        self._codecs = codecs
        self._blocks = blocks
        self._clock = clock
        self._streams = [_Stream(plan, deque(plan.payload.events)) for plan in plans]

    def connect(self, buffer_id: bytes, deliver: Callable[[Block], None], set_watermark: Callable[[int], None]) -> None:
        """Let the events of one output go to its buffer, if the buffer belongs to a TestStream."""
        for stream in self._streams:
            for tag, (output_buffer_id, coder_id) in stream.plan.outputs.items():
                if output_buffer_id == buffer_id:
                    set_watermark(MIN)
                    stream.outputs[tag] = _Output(coder_id, deliver, set_watermark)

    def play(self) -> bool:
        """Play one event of each TestStream. Returns whether there was one."""
        streams = [stream for stream in self._streams if stream.outputs]
        self._streams = [stream for stream in streams if stream.events]
        for stream in streams:
            if stream.events:
                self._play(stream, stream.events.popleft())
            else:
                self._end(stream)
        return bool(streams)

    def advance_clock_to(self, micros: int) -> None:
        """Move the processing time forward, once all events have been played."""
        self._clock.advance(max(0, micros - self._clock.micros()))

    def _play(self, stream: _Stream, event: _Event) -> None:
        kind = event.WhichOneof("event")
        if kind == "element_event":
            if (output := stream.outputs.get(event.element_event.tag or _ONLY_TAG)) is not None:
                output.deliver(self._block(stream, output, event.element_event.elements))
        elif kind == "watermark_event":
            if (output := stream.outputs.get(event.watermark_event.tag or _ONLY_TAG)) is not None:
                output.set_watermark(min(MAX, event.watermark_event.new_watermark * 1000))
        elif kind == "processing_time_event":
            self._clock.advance(event.processing_time_event.advance_duration * 1000)

    def _end(self, stream: _Stream) -> None:
        for output in stream.outputs.values():
            output.set_watermark(MAX)

    def _block(
        self,
        stream: _Stream,
        output: _Output,
        elements: Iterable[beam_runner_api_pb2.TestStreamPayload.TimestampedElement],
    ) -> Block:
        """Return the elements as a worker would have sent them."""
        decode = self._codecs.impl(stream.plan.payload.coder_id).decode
        encode = self._codecs.impl(output.coder_id).encode_nested
        encoded: list[bytes] = []
        hold = MAX
        for element in elements:
            micros = element.timestamp * 1000
            value = WindowedValue(decode(element.encoded_element), Timestamp(micros=micros), (GlobalWindow(),))
            encoded.append(encode(value))
            hold = min(hold, micros)
        return self._blocks.of_bytes(b"".join(encoded), len(encoded), hold)
