"""Codecs that find the elements inside encoded blocks without building the user's objects.

The runner never needs an element's value, only its bounds, its key's bytes and its windows. So it decodes with Beam's
"safe" coders, which leave values of user types as bytes, and cuts the encoded bytes. Grouped output is made by joining
these pieces, not by encoding again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from apache_beam.coders import coder_impl
from apache_beam.coders.coders import Coder, FastPrimitivesCoder
from apache_beam.runners import pipeline_context
from apache_beam.transforms.core import Windowing
from apache_beam.utils.windowed_value import WindowedValue

from luminosity.engine.plan.graph import Graph, TimerFamily

__all__ = ["Codecs", "ElementCodec", "KeyedElement", "TimerCodec", "TimerRecord"]


# Timestamp (8 bytes), one window (4 bytes of count; the global window itself takes none), pane without indices (1).
_GLOBAL_HEADER_BYTES = 13
_BYTES_AFTER_THEIR_LENGTH = frozenset(
    ["beam:coder:bytes:v1", "beam:coder:string_utf8:v1", "beam:coder:length_prefix:v1"]
)

_ANY = FastPrimitivesCoder()


class _NothingCoderImpl(coder_impl.StreamCoderImpl):
    """Replaces a value's coder: reads and writes nothing, so that only the header is decoded."""

    def encode_to_stream(self, value: Any, stream: Any, nested: bool) -> None:
        pass

    def decode_from_stream(self, stream: Any, nested: bool) -> None:
        return None


class KeyedElement(NamedTuple):
    """A key-value pair, cut but not decoded."""

    header: WindowedValue | None  # None: in the global window, and the caller does not need the timestamp
    key: bytes
    value: bytes
    encoded: bytes


class TimerRecord(NamedTuple):
    """A timer that a worker set or cleared."""

    identity: bytes  # key, tag and windows, encoded
    key: bytes  # encoded as in the elements
    is_clear: bool
    fire_micros: int
    hold_micros: int
    encoded: bytes
    window_micros: int = 0  # the last timestamp of its window


class ElementCodec:
    """Cuts blocks of one PCollection into elements."""

    def __init__(self, codecs: Codecs, coder_id: str) -> None:
        coders = codecs.graph.components.coders
        value_id, window_id = coders[coder_id].component_coder_ids
        self._whole = codecs.safe_impl(coder_id)
        self._window_impl = codecs.impl(window_id)
        self._header = coder_impl.WindowedValueCoderImpl(
            _NothingCoderImpl(), coder_impl.TimestampCoderImpl(), self._window_impl
        )
        self._value = codecs.safe_impl(value_id)
        self._decoding = codecs, value_id
        self.is_global = coders[window_id].spec.urn == "beam:coder:global_window:v1"
        self._key: Any = None
        components = coders[value_id].component_coder_ids
        if coders[value_id].spec.urn == "beam:coder:kv:v1" and len(components) == 2:
            self._key = codecs.skipping_impl(components[0])
            self._keyed_value = codecs.skipping_impl(components[1])

    def offset_after(self, data: bytes, count: int) -> int:
        """Return the offset behind the first ``count`` elements."""
        stream = coder_impl.create_InputStream(data)
        decode = self._whole.decode_from_stream
        for _ in range(count):
            decode(stream, True)
        return len(data) - stream.size()

    def elements(self, data: bytes) -> Iterator[tuple[WindowedValue, bytes]]:
        """Yield each element's header (timestamp, windows, pane) and its encoded value."""
        return self._headed(data, self._value)

    def whole_elements(self, data: bytes) -> Iterator[tuple[WindowedValue, bytes, int]]:
        """Yield each element's header, the whole encoded element with its header, and where its value starts."""
        total = len(data)
        stream = coder_impl.create_InputStream(data)
        start = 0
        while start < total:
            header = self._header.decode_from_stream(stream, True)
            value_start = total - stream.size()
            self._value.decode_from_stream(stream, True)
            end = total - stream.size()
            yield header, data[start:end], value_start - start
            start = end

    def keyed_elements(self, data: bytes, *, with_header: bool = True) -> Iterator[KeyedElement]:
        """Yield each element with its key and value. Only for PCollections of key-value pairs."""
        total = len(data)
        stream = coder_impl.create_InputStream(data)
        decode_key = self._key.decode_from_stream
        decode_value = self._keyed_value.decode_from_stream
        skip_header = self.is_global and not with_header
        start = 0
        while start < total:
            header = None
            # If the upper half of the pane's first byte is zero, no index bytes follow it.
            if skip_header and data[start + _GLOBAL_HEADER_BYTES - 1] < 16:
                stream.read(_GLOBAL_HEADER_BYTES)
            else:
                header = self._header.decode_from_stream(stream, True)
            key_start = total - stream.size()
            decode_key(stream, True)
            value_start = total - stream.size()
            decode_value(stream, True)
            end = total - stream.size()
            yield KeyedElement(header, data[key_start:value_start], data[value_start:end], data[start:end])
            start = end

    def headed_values(self, data: bytes) -> Iterator[tuple[WindowedValue, bytes]]:
        """Yield header and value from data that has headers and values without their keys."""
        return self._headed(data, self._keyed_value)

    def _headed(self, data: bytes, value_impl: Any) -> Iterator[tuple[WindowedValue, bytes]]:
        total = len(data)
        stream = coder_impl.create_InputStream(data)
        while stream.size() > 0:
            header = self._header.decode_from_stream(stream, True)
            start = total - stream.size()
            value_impl.decode_from_stream(stream, True)
            yield header, data[start : total - stream.size()]

    def key_value_pairs(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield each element's key and value without its header, which is faster. Only for key-value pairs."""
        total = len(data)
        stream = coder_impl.create_InputStream(data)
        decode_key, decode_value = self._key.decode_from_stream, self._keyed_value.decode_from_stream
        size, read, decode_header = stream.size, stream.read, self._header.decode_from_stream
        start = 0
        while start < total:
            # If the upper half of the pane's first byte is zero, no index bytes follow it.
            if self.is_global and data[start + _GLOBAL_HEADER_BYTES - 1] < 16:
                read(_GLOBAL_HEADER_BYTES)
            else:
                decode_header(stream, True)
            key_start = total - size()
            decode_key(stream, True)
            value_start = total - size()
            decode_value(stream, True)
            start = total - size()
            yield data[key_start:value_start], data[value_start:start]

    def key_and_value(self, value: bytes) -> tuple[bytes, bytes]:
        """Return the key and the value of one encoded key-value pair."""
        stream = coder_impl.create_InputStream(value)
        self._key.decode_from_stream(stream, True)
        cut = len(value) - stream.size()
        return value[:cut], value[cut:]

    def key_of(self, value: bytes) -> bytes | None:
        """Return the encoded key of one element, or None if it is no pair.

        Without type hints a step's output has a coder for any type. Then the element is decoded, which is slow.
        """
        if self._key is not None:
            return self.key_and_value(value)[0]
        codecs, value_id = self._decoding
        impl = codecs.impl(value_id)
        if not isinstance(impl, coder_impl.FastPrimitivesCoderImpl):
            return None
        decoded: Any = impl.decode_nested(value)
        return _ANY.encode(decoded[0]) if type(decoded) is tuple and len(decoded) == 2 else None

    def encode_header(self, header: WindowedValue) -> bytes:
        """Return timestamp, windows and pane, encoded."""
        return self._header.encode_nested(header)

    def encode_window(self, window: Any) -> bytes:
        """Return one window, encoded."""
        return self._window_impl.encode(window)

    def decode_window(self, encoded: bytes) -> Any:
        """Return the window that :meth:`encode_window` encoded."""
        return self._window_impl.decode(encoded)


class TimerCodec:
    """Cuts the timer messages of one family."""

    def __init__(self, codecs: Codecs, family: TimerFamily, element_coder_id: str) -> None:
        coders = codecs.graph.components.coders
        _, window_id = coders[family.coder_id].component_coder_ids
        # Keys of timers and of elements may be encoded differently. To find the shard, both must be the same bytes.
        value_id, _ = coders[element_coder_id].component_coder_ids
        self._key = codecs.impl(coders[value_id].component_coder_ids[0])
        self._whole = codecs.impl(family.coder_id)
        self._windows = coder_impl.TupleSequenceCoderImpl(codecs.impl(window_id))

    def records(self, data: bytes) -> Iterator[TimerRecord]:
        """Yield each timer of a message."""
        total = len(data)
        stream = coder_impl.create_InputStream(data)
        start = 0
        while start < total:
            timer = self._whole.decode_from_stream(stream, True)
            end = total - stream.size()
            encoded = data[start:end]
            key = self._key.encode_nested(timer.user_key)
            windows = self._windows.encode_nested(timer.windows)
            identity = b"".join((key, timer.dynamic_timer_tag.encode(), b"\0", windows))
            if timer.clear_bit:
                yield TimerRecord(identity, key, True, 0, 0, encoded)
            else:
                fire, hold = timer.fire_timestamp.micros, timer.hold_timestamp.micros
                last = max(window.max_timestamp().micros for window in timer.windows)
                yield TimerRecord(identity, key, False, fire, hold, encoded, last)
            start = end


class Codecs:
    """The coders and codecs of a plan, each made once."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._context = pipeline_context.PipelineContext(
            graph.components,
            # To cut blocks, only the end of a reference to a large group is needed, not its values.
            iterable_state_read=lambda token, coder: (),
        )
        self._elements: dict[str, ElementCodec] = {}

    def elements(self, coder_id: str) -> ElementCodec:
        """Return the codec of elements with this windowed coder."""
        if coder_id not in self._elements:
            self._elements[coder_id] = ElementCodec(self, coder_id)
        return self._elements[coder_id]

    def timers(self, family: TimerFamily, element_coder_id: str) -> TimerCodec:
        """Return the codec of the timers of ``family``, whose keys come with elements of the windowed coder."""
        return TimerCodec(self, family, element_coder_id)

    def windowing(self, pcollection_id: str) -> Windowing:
        """Return the windowing strategy of a PCollection."""
        strategy = self.graph.components.pcollections[pcollection_id].windowing_strategy_id
        return self._context.windowing_strategies[strategy]

    def impl(self, coder_id: str) -> Any:
        """Return Beam's implementation of a coder, which decodes to the user's objects."""
        coder: Coder = self._context.coders[coder_id]
        return coder.get_impl()

    def skipping_impl(self, coder_id: str) -> Any:
        """Return a coder that finds the end of a value but may decode it to something else, which is faster."""
        safe_id = self.graph.safe_coders.get(coder_id, coder_id)
        if self.graph.components.coders[safe_id].spec.urn in _BYTES_AFTER_THEIR_LENGTH:
            return coder_impl.BytesCoderImpl()
        return self.impl(safe_id)

    def safe_impl(self, coder_id: str) -> Any:
        """Return the coder that finds the same bounds without the user's coders."""
        return self.impl(self.graph.safe_coders.get(coder_id, coder_id))
