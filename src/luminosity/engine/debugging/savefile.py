"""The file that ``--save_failed`` writes and ``lum replay`` reads: a zip of a manifest, protos and encoded elements.

The manifest says what a replay needs of the run's process: its Python, its import path and its modules.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import shlex
import sys
import sysconfig
import tempfile
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from apache_beam.coders import coder_impl
from apache_beam.internal import pickler
from apache_beam.portability.api import beam_fn_api_pb2
from apache_beam.runners import pipeline_context

from luminosity._shared.text import format_bytes
from luminosity.engine.data.state import StateStore
from luminosity.engine.loop.buffers import BufferRun
from luminosity.engine.loop.bundle import Bundle
from luminosity.engine.plan.graph import Graph
from luminosity.engine.workers.failure import Failure
from luminosity.errors import ReplayError

__all__ = ["DESCRIPTOR", "MAIN_CLASSES", "Manifest", "RunProcess", "SavedEntry", "Saver", "read", "write"]

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_FORMAT = "luminosity replay"
_VERSION = 1
_MANIFEST = "manifest.json"
DESCRIPTOR = "descriptor"  # entry: the ProcessBundleDescriptor of the stage
MAIN_CLASSES = "main-classes"  # entry: see workers/worker_files.py


@dataclass(frozen=True)
class RunProcess:
    """The process of a run: where its code lies, and the versions that ran it."""

    python: str  # version
    luminosity: str  # version
    script: str  # empty in a notebook or a shell
    working_directory: str
    import_path: list[str]  # without the folders of installed libraries
    modules: dict[str, str]  # files of the top-level modules that were imported, by name
    pickle_library: str

    @classmethod
    def here(cls, pickle_library: str) -> RunProcess:
        """Return that of this process."""
        script = getattr(sys.modules["__main__"], "__file__", None) or ""
        folders = [os.path.dirname(os.path.abspath(script))] if script else []
        folders += [os.getcwd(), *map(os.path.abspath, sys.path)]
        return cls(
            python=_python(),
            luminosity=importlib.metadata.version("luminosity"),
            script=os.path.abspath(script) if script else "",
            working_directory=os.getcwd(),
            import_path=[p for p in dict.fromkeys(folders) if not p.startswith(_LIBRARIES) and os.path.exists(p)],
            modules=_modules(),
            pickle_library=pickle_library,
        )

    def restore(self) -> None:
        """Make the run's modules importable in this process. Raises :class:`ReplayError` for another Python."""
        if self.python != _python():
            raise ReplayError(
                f"found a file saved by Python {self.python}, expected Python {_python()}",
                fix=f"replay it with Python {self.python}",
            )
        sys.path[:0] = [path for path in self.import_path if path not in sys.path]
        pickler.set_library(self.pickle_library)

    def explain_missing(self, error: ModuleNotFoundError) -> str:
        """Return where the run found a module that is not found here."""
        name = error.name or ""
        home = self.modules.get(name.split(".")[0])
        return f"module {name!r} is not found here; " + (
            f"the run imported {name.split('.')[0]!r} from {home}"
            if home
            else f"the run imported modules from {', '.join(self.import_path)}"
        )


def _python() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def _modules() -> dict[str, str]:
    files = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items()) if "." not in name}
    return {
        name: os.path.abspath(file)
        for name, file in files.items()
        if file and name != "__main__" and name not in sys.stdlib_module_names
    }


@dataclass(frozen=True)
class SavedEntry:
    """An entry of the zip, and its place in the stage."""

    entry: str
    transform_id: str = ""
    name: str = ""  # of a timer family or a side input
    coder_id: str = ""


@dataclass(frozen=True)
class Manifest:
    """The description of a saved bundle, and the list of the file's entries."""

    label: str  # of the stage
    error: str  # type and message of the exception
    exit_code: int | None  # of the worker, if it ended
    element: str  # the beginning of its repr
    count: int  # elements and timers
    surroundings: RunProcess  # the name in the file
    safe_coders: dict[str, str]
    reads: list[SavedEntry]  # encoded elements
    timers: list[SavedEntry]  # encoded timers that were due
    side_inputs: list[SavedEntry]  # all their encoded elements
    state: list[SavedEntry]  # StateRequests that write the state back
    groups: list[SavedEntry]  # encoded values of a large group; the name is its token, in hexadecimal

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Manifest:
        """Read what ``dataclasses.asdict`` returned. Raises KeyError or TypeError for other fields."""
        for name in ("reads", "timers", "side_inputs", "state", "groups"):
            fields[name] = [SavedEntry(**part) for part in fields[name]]
        fields["surroundings"] = RunProcess(**fields["surroundings"])
        return cls(**fields)


def write(path: str, manifest: Manifest, entries: Iterable[tuple[str, Iterable[bytes]]]) -> int:
    """Write the file atomically, readable only by this user, and return its size."""
    handle, unfinished = tempfile.mkstemp(prefix=f".{os.path.basename(path)}.", dir=os.path.dirname(path) or ".")
    try:
        with os.fdopen(handle, "wb") as file:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
                head = {"format": _FORMAT, "version": _VERSION, **asdict(manifest)}
                archive.writestr(_MANIFEST, json.dumps(head, indent=1))
                for name, chunks in entries:
                    with archive.open(name, "w", force_zip64=True) as entry:
                        for chunk in chunks:
                            entry.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        size = os.path.getsize(unfinished)
        os.replace(unfinished, path)
        return size
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(unfinished)
        raise


def read(path: str) -> tuple[Manifest, dict[str, bytes]]:
    """Return the manifest and all entries. Raises :class:`ReplayError` if the file is damaged or something else."""
    try:
        with zipfile.ZipFile(path) as archive:
            return _manifest(archive), {name: archive.read(name) for name in archive.namelist()}
    except ReplayError:
        raise
    except OSError as error:
        raise ReplayError(f"{path}: {error.strerror or error}") from error
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise ReplayError(f"{path}: {error}; expected a complete file that --save_failed wrote") from error


def _manifest(archive: zipfile.ZipFile) -> Manifest:
    fields = json.loads(archive.read(_MANIFEST))
    if fields.pop("format") != _FORMAT:
        raise ReplayError(
            f"{archive.filename}: found a manifest of another format, expected a file that --save_failed wrote"
        )
    version = fields.pop("version")
    if version != _VERSION:
        writer = fields.get("surroundings", {}).get("luminosity", "another version")
        raise ReplayError(
            f"{archive.filename}: found version {version} of the format, expected {_VERSION}",
            fix=f"replay it with Luminosity {writer}, which wrote it",
        )
    return Manifest.from_json(fields)


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
        entries.add(DESCRIPTOR, [descriptor.SerializeToString()])
        with open(self._main_classes, "rb") as file:
            entries.add(MAIN_CLASSES, [file.read()])
        manifest = Manifest(
            label=failure.step or stage.label,
            error=failure.exception,
            exit_code=exit_code,
            element=failure.element,
            count=bundle.pieces,
            surroundings=RunProcess.here(self._pickle_library),
            safe_coders=self._graph.safe_coders,
            reads=self._reads(bundle, entries),
            timers=[
                SavedEntry(entries.add(f"timers/{i}", [timer.encoded for timer in timers]), *family)
                for i, (family, timers) in enumerate(bundle.timers.items())
            ],
            side_inputs=self._side_inputs(bundle, entries),
            state=self._cells(bundle, entries),
            groups=self._groups(bundle, entries),
        )
        return write(self._path, manifest, entries.all)

    def _reads(self, bundle: Bundle, entries: _Entries) -> list[SavedEntry]:
        return [
            SavedEntry(entries.add(f"reads/{i}", [block.data() for block in blocks]), read_id)
            for i, (read_id, blocks) in enumerate(bundle.inputs.items())
        ]

    def _side_inputs(self, bundle: Bundle, entries: _Entries) -> list[SavedEntry]:
        parts: list[SavedEntry] = []
        known: dict[bytes, str] = {}  # several steps may read the same buffer
        for side_input in bundle.stage.plan.side_inputs:
            buffer = self._graph.buffers[side_input.buffer_id]
            if buffer.id not in known:
                known[buffer.id] = entries.add(f"side_inputs/{len(known)}", self._buffers[buffer.id].side_input_data())
            coder_id = buffer.output_coder_id or buffer.coder_id
            parts.append(SavedEntry(known[buffer.id], side_input.transform_id, side_input.tag, coder_id))
        return parts

    def _cells(self, bundle: Bundle, entries: _Entries) -> list[SavedEntry]:
        if not bundle.stage.plan.is_stateful:
            return []
        keys = {timer.key for timers in bundle.timers.values() for timer in timers}
        for read_id, blocks in bundle.inputs.items():
            codec = bundle.stage.codec(read_id)
            keys |= {element.key for block in blocks for element in codec.keyed_elements(block.data())}
        parts: list[SavedEntry] = []
        for i, (key, data) in enumerate(self._state.cells_of(bundle.stage.plan.steps, keys)):
            request = beam_fn_api_pb2.StateRequest(state_key=beam_fn_api_pb2.StateKey.FromString(key))
            request.append.data = data
            parts.append(SavedEntry(entries.add(f"state/{i}", [request.SerializeToString()])))
        return parts

    def _groups(self, bundle: Bundle, entries: _Entries) -> list[SavedEntry]:
        return [
            SavedEntry(entries.add(f"groups/{token.hex()}", self._state.group_data(token)), name=token.hex())
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
