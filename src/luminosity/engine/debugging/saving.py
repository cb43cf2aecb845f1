"""Saves a failed bundle for a replay: its input, and the side inputs, state and groups that it reads."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field

from apache_beam.coders import coder_impl
from apache_beam.portability.api import beam_fn_api_pb2
from apache_beam.runners import pipeline_context

from luminosity._shared.text import format_bytes
from luminosity.engine.data.state import StateStore
from luminosity.engine.debugging import savefile
from luminosity.engine.debugging.savefile import Manifest, Part, Surroundings
from luminosity.engine.loop.buffers import BufferRun
from luminosity.engine.loop.bundle import Bundle
from luminosity.engine.plan.graph import Graph
from luminosity.engine.workers.failure import Failure

__all__ = ["Saver"]


@dataclass
class _Entries:
    """The entries of the file. Their data is read when the file is written, since side inputs may be large."""

    all: list[tuple[str, Iterable[bytes]]] = field(default_factory=list[tuple[str, Iterable[bytes]]])

    def add(self, entry: str, data: Iterable[bytes]) -> str:
        self.all.append((entry, data))
        return entry


class Saver:
    """Writes the file of a run, in place of an older one. Called on the loop's thread."""

    def __init__(
        self,
        path: str,
        graph: Graph,
        state: StateStore,
        buffers: dict[bytes, BufferRun],
        main_classes: str,
        pickle_library: str,
    ) -> None:
        self._path = path
        self._graph = graph
        self._state = state
        self._buffers = buffers
        self._main_classes = main_classes
        self._pickle_library = pickle_library

    def save(self, bundle: Bundle, failure: Failure, exit_code: int | None) -> str:
        """Write the file. Returns a line for the error message that says where it is, or why it could not be written.

        Call it when the bundle's attempt has ended and before another bundle gets its keys.
        """
        try:
            size = self._write(bundle, failure, exit_code)
        except Exception as error:
            # The failure itself is more important to the user.
            return f"can't save it to {self._path}: {type(error).__name__}: {error}"
        replay = f"{self._path} ({format_bytes(size)}): `lum replay {shlex.quote(self._path)}` runs"
        if bundle.pieces == 1:
            return f"Saved to {replay} it alone."
        return f"None of the bundle's {bundle.pieces} elements fails alone. All are saved to {replay} them together."

    def _write(self, bundle: Bundle, failure: Failure, exit_code: int | None) -> int:
        stage = bundle.stage.plan
        entries = _Entries()
        descriptor = self._graph.descriptor(stage, "in-process")
        entries.add(savefile.DESCRIPTOR, [descriptor.SerializeToString()])
        with open(self._main_classes, "rb") as file:
            entries.add(savefile.MAIN_CLASSES, [file.read()])
        manifest = Manifest(
            label=failure.step or stage.label,
            error=failure.exception,
            exit_code=exit_code,
            element=failure.element,
            count=bundle.pieces,
            surroundings=Surroundings.here(self._pickle_library),
            safe_coders=self._graph.safe_coders,
            reads=self._reads(bundle, entries),
            timers=[
                Part(entries.add(f"timers/{i}", [timer.encoded for timer in timers]), *family)
                for i, (family, timers) in enumerate(bundle.timers.items())
            ],
            side_inputs=self._side_inputs(bundle, entries),
            state=self._cells(bundle, entries),
            groups=self._groups(bundle, entries),
        )
        return savefile.write(self._path, manifest, entries.all)

    def _reads(self, bundle: Bundle, entries: _Entries) -> list[Part]:
        return [
            Part(entries.add(f"reads/{i}", [block.data() for block in blocks]), read_id)
            for i, (read_id, blocks) in enumerate(bundle.inputs.items())
        ]

    def _side_inputs(self, bundle: Bundle, entries: _Entries) -> list[Part]:
        parts: list[Part] = []
        known: dict[bytes, str] = {}  # several steps may read the same buffer
        for side_input in bundle.stage.plan.side_inputs:
            buffer = self._graph.buffers[side_input.buffer_id]
            if buffer.id not in known:
                known[buffer.id] = entries.add(f"side_inputs/{len(known)}", self._buffers[buffer.id].side_input_data())
            coder_id = buffer.output_coder_id or buffer.coder_id
            parts.append(Part(known[buffer.id], side_input.transform_id, side_input.tag, coder_id))
        return parts

    def _cells(self, bundle: Bundle, entries: _Entries) -> list[Part]:
        if not bundle.stage.plan.is_stateful:
            return []
        keys = {timer.key for timers in bundle.timers.values() for timer in timers}
        for read_id, blocks in bundle.inputs.items():
            codec = bundle.stage.codec(read_id)
            keys |= {element.key for block in blocks for element in codec.keyed_elements(block.data())}
        parts: list[Part] = []
        for i, (key, data) in enumerate(self._state.cells_of(bundle.stage.plan.steps, keys)):
            request = beam_fn_api_pb2.StateRequest(state_key=beam_fn_api_pb2.StateKey.FromString(key))
            request.append.data = data
            parts.append(Part(entries.add(f"state/{i}", [request.SerializeToString()])))
        return parts

    def _groups(self, bundle: Bundle, entries: _Entries) -> list[Part]:
        return [
            Part(entries.add(f"groups/{token.hex()}", self._state.group_data(token)), name=token.hex())
            for token in self._tokens(bundle)
        ]

    def _tokens(self, bundle: Bundle) -> list[bytes]:
        """Return the tokens of the large groups that the bundle's elements refer to."""
        tokens: dict[bytes, None] = {}

        def found(token: bytes, coder: coder_impl.CoderImpl) -> tuple[()]:
            tokens[token] = None
            return ()

        context = pipeline_context.PipelineContext(self._graph.components, iterable_state_read=found)
        for read in bundle.stage.plan.reads:
            coder_id = self._graph.safe_coders.get(read.coder_id, read.coder_id)
            coder = context.coders[coder_id].get_impl()
            for block in bundle.inputs.get(read.transform_id, ()):
                stream = coder_impl.create_InputStream(block.data())
                while stream.size() > 0:
                    coder.decode_from_stream(stream, True)
        return list(tokens)
