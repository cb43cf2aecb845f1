"""TestStream: elements, watermarks and processing time as a test or a service lists them, one event at a time."""

from __future__ import annotations

import enum
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import grpc
from apache_beam.portability.api import beam_interactive_api_pb2, beam_interactive_api_pb2_grpc, beam_runner_api_pb2
from apache_beam.transforms.window import GlobalWindow
from apache_beam.utils.timestamp import Timestamp
from apache_beam.utils.windowed_value import WindowedValue

from luminosity.engine.data.blocks import Block, BlockStore
from luminosity.engine.data.event_time import MAX, MIN
from luminosity.engine.data.world import ManualClock, StartThread, Task
from luminosity.engine.plan.codecs import Codecs
from luminosity.engine.plan.graph import TestStream
from luminosity.errors import RunFailed

__all__ = ["Played", "TestStreams"]

_LOGGER = logging.getLogger(__name__)

_Event = beam_runner_api_pb2.TestStreamPayload.Event
_ONLY_TAG = "None"  # as Beam names the output of a TestStream without tags
_LISTED_MICROS = 1000  # a pipeline lists its events in milliseconds
_SERVED_MICROS = 1  # a service sends them in microseconds, as Beam's own recordings of streams are written
_READ_AHEAD = 1000  # events of a service that wait to be played; each may hold many elements
_PUT_TIMEOUT_S = 0.2  # how late a reader notices that the run has ended while the queue is full
_CLOSE_TIMEOUT_S = 5.0  # for the reader's thread to end after its call was cancelled


class Played(enum.Enum):
    """How far the TestStreams of a run got."""

    EVENT = enum.auto()  # an event, or the end of a stream, was played
    WAITING = enum.auto()  # a service has not sent its next event yet
    ENDED = enum.auto()  # all events have been played


class _ServiceEvents:
    """The events that a ``TestStreamService`` sends. A thread reads them; the loop's thread takes them."""

    def __init__(self, plan: TestStream, start_thread: StartThread) -> None:
        self._start_thread = start_thread
        self._name = plan.name
        self._url = plan.payload.endpoint.url
        self._tags = sorted(plan.outputs)
        self._events: queue.Queue[_Event | RunFailed | None] = queue.Queue(_READ_AHEAD)
        self._is_closed = threading.Event()
        self._channel: grpc.Channel | None = None
        self._thread: Task | None = None

    def start(self, wake: Callable[[], None]) -> None:
        """Begin to read. The reader's thread calls ``wake`` after each event."""
        self._channel = grpc.insecure_channel(self._url, options=[("grpc.max_receive_message_length", -1)])
        stub = beam_interactive_api_pb2_grpc.TestStreamServiceStub(self._channel)
        call = stub.Events(beam_interactive_api_pb2.EventsRequest(output_ids=self._tags))
        self._thread = self._start_thread(lambda: self._read(call, wake), f"events of {self._url}")

    def take(self) -> _Event | None:
        """Return the next event, or None at the end. Raises queue.Empty if it has not arrived, without waiting."""
        event = self._events.get_nowait()
        if isinstance(event, RunFailed):
            raise event
        return event

    def close(self) -> None:
        """End the call and its thread."""
        self._is_closed.set()
        if self._channel is not None:
            self._channel.close()  # cancels the call
        if self._thread is not None:
            self._thread.join(_CLOSE_TIMEOUT_S)

    def _read(self, call: Iterable[_Event], wake: Callable[[], None]) -> None:
        has_begun = False
        end: RunFailed | None = None
        try:
            for event in call:
                has_begun = True
                self._put(event, wake)
        except grpc.RpcError as error:
            code = error.code() if isinstance(error, grpc.Call) else None
            if code == grpc.StatusCode.CANCELLED or (has_begun and code == grpc.StatusCode.UNAVAILABLE):
                # A service that is stopped ends its streams, as on Beam's runner.
                if not self._is_closed.is_set():
                    _LOGGER.warning("step %r: the service %s stopped; its stream ends here", self._name, self._url)
            else:
                details = error.details() if isinstance(error, grpc.Call) else str(error)
                end = RunFailed(
                    f"step {self._name!r}: found no events at {self._url}, expected a TestStreamService: {details}",
                    fix="start the service before the run, and pass its address as TestStream(endpoint=...)",
                )
        finally:
            self._put(end, wake)

    def _put(self, event: _Event | RunFailed | None, wake: Callable[[], None]) -> None:
        while not self._is_closed.is_set():
            try:
                self._events.put(event, timeout=_PUT_TIMEOUT_S)
            except queue.Full:
                continue
            wake()
            return


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
    listed: deque[_Event]
    service: _ServiceEvents | None = None
    outputs: dict[str, _Output] = field(default_factory=dict[str, _Output])

    @property
    def micros(self) -> int:
        """Return the unit of its timestamps and durations in microseconds."""
        return _LISTED_MICROS if self.service is None else _SERVED_MICROS

    def take(self) -> _Event | None:
        """Return the next event, or None at the end. Raises queue.Empty if it has not arrived, without waiting."""
        if self.service is not None:
            return self.service.take()
        return self.listed.popleft() if self.listed else None


class TestStreams:
    """All TestStreams of a run. Only the loop's thread uses it, whenever nothing else is left to do."""

    def __init__(
        self,
        plans: Sequence[TestStream],
        codecs: Codecs,
        blocks: BlockStore,
        clock: ManualClock,
        start_thread: StartThread,
    ) -> None:
        self._codecs = codecs
        self._blocks = blocks
        self._clock = clock
        self._streams = [
            _Stream(
                plan,
                deque(plan.payload.events),
                _ServiceEvents(plan, start_thread) if plan.payload.endpoint.url else None,
            )
            for plan in plans
        ]

    def start(self, wake: Callable[[], None]) -> None:
        """Connect to the services that send events. Another thread calls ``wake`` when there may be an event."""
        for stream in self._streams:
            if stream.service is not None:
                stream.service.start(wake)

    def close(self) -> None:
        """End the connections to services. Blocks until their threads have ended, for a few seconds at most."""
        for stream in self._streams:
            if stream.service is not None:
                stream.service.close()

    def connect(self, buffer_id: bytes, deliver: Callable[[Block], None], set_watermark: Callable[[int], None]) -> None:
        """Let the events of one output go to its buffer, if the buffer belongs to a TestStream."""
        for stream in self._streams:
            for tag, (output_buffer_id, coder_id) in stream.plan.outputs.items():
                if output_buffer_id == buffer_id:
                    set_watermark(MIN)
                    stream.outputs[tag] = _Output(coder_id, deliver, set_watermark)

    def play(self) -> Played:
        """Play one event of each TestStream that has one."""
        played = Played.ENDED
        for stream in [stream for stream in self._streams if stream.outputs]:
            try:
                event = stream.take()
            except queue.Empty:
                played = Played.WAITING if played == Played.ENDED else played
                continue
            played = Played.EVENT
            if event is None:
                self._end(stream)
            else:
                self._play(stream, event)
        return played

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
                output.set_watermark(min(MAX, event.watermark_event.new_watermark * stream.micros))
        elif kind == "processing_time_event":
            self._clock.advance(event.processing_time_event.advance_duration * stream.micros)

    def _end(self, stream: _Stream) -> None:
        for output in stream.outputs.values():
            output.set_watermark(MAX)
        if stream.service is not None:
            stream.service.close()
        self._streams.remove(stream)

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
            micros = element.timestamp * stream.micros
            value = WindowedValue(decode(element.encoded_element), Timestamp(micros=micros), (GlobalWindow(),))
            encoded.append(encode(value))
            hold = min(hold, micros)
        return self._blocks.of_bytes(b"".join(encoded), len(encoded), hold)
