"""Find the elements inside encoded blocks without building the user's objects.

The runner never needs an element's value, only where it begins and ends, its key's bytes, and its windows. So it
decodes with Beam's "safe" coders (which leave what only the user's coders understand as bytes) and cuts the encoded
bytes; grouped output is made by joining those cuts, not by encoding again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from apache_beam.coders import coder_impl
from apache_beam.coders.coders import Coder
from apache_beam.runners import pipeline_context
from apache_beam.transforms.core import Windowing
from apache_beam.utils.windowed_value import WindowedValue

from luminosity.engine.plan.graph import Graph, TimerFamily

# Timestamp (8 bytes), one window (4 bytes of count; the global window itself takes none), pane without indices (1).
_GLOBAL_HEADER_BYTES = 13
_BYTES_AFTER_THEIR_LENGTH = frozenset(
    ["beam:coder:bytes:v1", "beam:coder:string_utf8:v1", "beam:coder:length_prefix:v1"]
)


class _NothingCoderImpl(coder_impl.StreamCoderImpl):
    """Stands where a value's coder would: reads and writes nothing, so that only the header is decoded."""

    def encode_to_stream(self, value: Any, stream: Any, nested: bool) -> None:
        pass

    def decode_from_stream(self, stream: Any, nested: bool) -> None:
        return None


class KeyedElement(NamedTuple):
    header: WindowedValue | None  # None: in the global window, timestamp of no interest
    key: bytes
    value: bytes
    encoded: bytes


class TimerRecord(NamedTuple):
    identity: bytes  # key, tag and windows, encoded
    key: bytes
    is_clear: bool
    fire_micros: int
    hold_micros: int
    encoded: bytes


class ElementCodec:
    """Cuts blocks of one PCollection."""

    def __init__(self, codecs: Codecs, coder_id: str) -> None:
        coders = codecs.graph.components.coders
        value_id, window_id = coders[coder_id].component_coder_ids
        self._whole = codecs.safe_impl(coder_id)
        self._window_impl = codecs.impl(window_id)
        self._header = coder_impl.WindowedValueCoderImpl(
            _NothingCoderImpl(), coder_impl.TimestampCoderImpl(), self._window_impl
        )
        self._value = codecs.safe_impl(value_id)
        self.is_global = coders[window_id].spec.urn == "beam:coder:global_window:v1"
        self._key: Any = None
        components = coders[value_id].component_coder_ids
        if coders[value_id].spec.urn == "beam:coder:kv:v1" and len(components) == 2:
            self._key = codecs.skipping_impl(components[0])
            self._keyed_value = codecs.skipping_impl(components[1])

    def offset_after(self, data: bytes, count: int) -> int:
        """Where the element after the first ``count`` begins."""
        stream = coder_impl.create_InputStream(data)
        decode = self._whole.decode_from_stream
        for _ in range(count):
            decode(stream, True)
        return len(data) - stream.size()

    def elements(self, data: bytes) -> Iterator[tuple[WindowedValue, bytes]]:
        """Each element's header (timestamp, windows, pane) and its encoded value."""
        return self._headed(data, self._value)

    def keyed_elements(self, data: bytes, *, with_header: bool = True) -> Iterator[KeyedElement]:
        """Each element with its key and value cut apart; the PCollection is one of key-value pairs."""
        total = len(data)
        stream = coder_impl.create_InputStream(data)
        decode_key = self._key.decode_from_stream
        decode_value = self._keyed_value.decode_from_stream
        skip_header = self.is_global and not with_header
        start = 0
        while start < total:
            header = None
            # The pane's first byte has no index bytes behind it where its upper half is zero.
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
        """Headers, each followed by the value of a key-value pair without its key."""
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
        """Each element's key and value alone, which is quicker; the PCollection is one of key-value pairs."""
        total = len(data)
        stream = coder_impl.create_InputStream(data)
        decode_key, decode_value = self._key.decode_from_stream, self._keyed_value.decode_from_stream
        size, read, decode_header = stream.size, stream.read, self._header.decode_from_stream
        start = 0
        while start < total:
            # The pane's first byte has no index bytes behind it where its upper half is zero.
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
        """Cut one encoded key-value pair in two."""
        stream = coder_impl.create_InputStream(value)
        self._key.decode_from_stream(stream, True)
        cut = len(value) - stream.size()
        return value[:cut], value[cut:]

    def encode_header(self, header: WindowedValue) -> bytes:
        return self._header.encode_nested(header)

    def encode_window(self, window: Any) -> bytes:
        return self._window_impl.encode(window)

    def decode_window(self, encoded: bytes) -> Any:
        return self._window_impl.decode(encoded)


class TimerCodec:
    """Cuts timer messages of one family."""

    def __init__(self, codecs: Codecs, family: TimerFamily) -> None:
        key_id, window_id = codecs.graph.components.coders[family.coder_id].component_coder_ids
        self._key = codecs.impl(key_id)
        self._whole = codecs.impl(family.coder_id)
        self._windows = coder_impl.TupleSequenceCoderImpl(codecs.impl(window_id))

    def records(self, data: bytes) -> Iterator[TimerRecord]:
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
                yield TimerRecord(identity, key, False, fire, hold, encoded)
            start = end


class Codecs:
    """Coders of a plan, made once each."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._context = pipeline_context.PipelineContext(
            graph.components,
            # To cut blocks it is enough to know where a large group's reference ends.
            iterable_state_read=lambda token, coder: (),
        )
        self._elements: dict[str, ElementCodec] = {}

    def elements(self, coder_id: str) -> ElementCodec:
        if coder_id not in self._elements:
            self._elements[coder_id] = ElementCodec(self, coder_id)
        return self._elements[coder_id]

    def timers(self, family: TimerFamily) -> TimerCodec:
        return TimerCodec(self, family)

    def windowing(self, pcollection_id: str) -> Windowing:
        strategy = self.graph.components.pcollections[pcollection_id].windowing_strategy_id
        return self._context.windowing_strategies[strategy]

    def impl(self, coder_id: str) -> Any:
        coder: Coder = self._context.coders[coder_id]
        return coder.get_impl()

    def skipping_impl(self, coder_id: str) -> Any:
        """A coder that finds where a value ends and may make something else of it: bytes need no decoding."""
        safe_id = self.graph.safe_coders.get(coder_id, coder_id)
        if self.graph.components.coders[safe_id].spec.urn in _BYTES_AFTER_THEIR_LENGTH:
            return coder_impl.BytesCoderImpl()
        return self.impl(safe_id)

    def safe_impl(self, coder_id: str) -> Any:
        """The coder that finds the same boundaries without the user's coders."""
        return self.impl(self.graph.safe_coders.get(coder_id, coder_id))
