"""Elements of many bytes, which workers write and read without copying them on the way: blocks of examples."""

from __future__ import annotations

from typing import Any

from apache_beam.coders import coders
from apache_beam.coders.coder_impl import create_InputStream, create_OutputStream
from apache_beam.runners.worker import bundle_processor

from luminosity.engine.data import wire
from luminosity.engine.workers.sdk.channel import LARGE_BYTES
from luminosity.engine.workers.sdk.partitions import SplitOutput

__all__ = ["BlockInput", "BlockOutput"]

_BEGIN_BYTES = 64 << 10  # with what comes before a value: its timestamp, its windows, its pane and its size


class BlockOutput(bundle_processor.DataOutputOperation):
    """Replaces Beam's sink in workers: encoded elements of many bytes are not copied on their way to a file.

    Python stands still while it copies: a process with an accelerator would spend most of its time on it. The coder
    of such elements has a method ``luminosity_parts``, which returns the bytes of ``encode`` in several parts.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._before, coder = _split(self.windowed_coder)
        self._parts: Any = None if coder is None else coder.luminosity_parts
        self.partitions = 0  # into which the output may be split, if it is for a grouping
        self._split: SplitOutput | None = None  # of a bundle that does so

    def set_output_stream(self, output_stream: Any) -> None:
        """Write to this stream until the end of the bundle."""
        super().set_output_stream(output_stream)
        self._split = SplitOutput.of(self.windowed_coder, output_stream, self.partitions)

    def finish(self) -> None:
        """Send what is left of the bundle's output."""
        if self._split is not None:
            self._split.flush()
            self._split = None
        super().finish()

    def process(self, windowed_value: Any) -> None:
        """Encode an element onto the stream."""
        if self._split is not None:
            self._split.add(windowed_value)
            return
        if self._parts is None:
            self.windowed_coder_impl.encode_to_stream(windowed_value, self.output_stream, True)
            self.output_stream.maybe_flush()
            return
        parts = self._parts(windowed_value.value)
        begin = create_OutputStream()
        self._before.encode_to_stream(windowed_value, begin, True)
        begin.write_var_int64(sum(map(len, parts)))
        stream: Any = self.output_stream  # of our channel
        stream.add_parts([begin.get(), *parts])


class BlockInput(bundle_processor.DataInputOperation):
    """Replaces Beam's source in workers: it reads the block that a message refers to.

    An element of many bytes is decoded where it lies in the file. Beam would copy it four times, and Python would
    stand still meanwhile. The ``decode`` of a coder with ``luminosity_parts`` takes any bytes-like object.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._before: Any
        self._coder: Any
        self._before, self._coder = _split(self.windowed_coder)
        # What groups whole blocks, in a bundle that has no steps.
        self._group: Any = getattr(next(iter(self.consumer), None), "group_block", None)

    def process_encoded(self, encoded_windowed_values: bytes) -> None:
        """Process the elements of a message's block."""
        channel: Any = self.get_data_channel()
        if self._group is not None:
            bundle: Any = self.execution_context
            self._group(channel.read(bundle.instruction_id, encoded_windowed_values))
            return
        coder = self._coder
        span = _large_element(encoded_windowed_values)
        if coder is None or span is None:
            context: Any = self.execution_context
            self._process_each(channel.read(context.instruction_id, encoded_windowed_values))
            return
        with self.splitting_lock:
            if self.index == self.stop - 1:
                return
            self.index += 1
        data = wire.mapped(span)
        begin = create_InputStream(bytes(data[:_BEGIN_BYTES]))
        windowed = self._before.decode_from_stream(begin, True)
        size = begin.read_var_int64()
        try:
            value = coder.decode(data[len(data) - size :])
        except Exception as error:
            raise self._undecodable() from error
        self.output(windowed.with_value(value))

    def _process_each(self, encoded: bytes) -> None:
        """Do what Beam does, without looking up the same things for each element."""
        stream = create_InputStream(encoded)
        impl: Any = self.windowed_coder_impl
        decode, output, lock = impl.decode_from_stream, self.output, self.splitting_lock
        while stream.size() > 0:
            with lock:
                if self.index == self.stop - 1:
                    return
                self.index += 1
            try:
                windowed = decode(stream, True)
            except Exception as error:
                raise self._undecodable() from error
            output(windowed)

    def _undecodable(self) -> ValueError:
        """Return the error that Beam raises."""
        where = f"with coder {self.windowed_coder} in step {self.name_context.step_name}"
        return ValueError(f"Error decoding input stream {where}")


def _split(windowed: Any) -> tuple[Any, Any]:
    """Return the coder of what comes before a value, and the value's coder if elements may be encoded in parts."""
    value = windowed.wrapped_value_coder
    before = coders.WindowedValueCoder(coders.SingletonCoder(None), window_coder=windowed.window_coder)
    coder = value.value_coder() if isinstance(value, coders.LengthPrefixCoder) else None
    return before.get_impl(), coder if hasattr(coder, "luminosity_parts") else None


def _large_element(message: bytes) -> wire.FileSpan | None:
    """Return where the only element of a message lies, if it is a large one in a file of this machine."""
    count, span = wire.unpack(message)
    if not isinstance(span, wire.FileSpan) or span.is_packed or count > 1 or span.size < LARGE_BYTES:
        return None
    return span
