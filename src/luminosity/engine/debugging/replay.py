"""Replays: run the elements that ``--save_failed`` saved, alone and in this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from apache_beam.coders import coder_impl
from apache_beam.options.value_provider import RuntimeValueProvider
from apache_beam.portability.api import beam_fn_api_pb2, beam_runner_api_pb2
from apache_beam.runners.worker import bundle_processor

from luminosity.engine.data import wire
from luminosity.engine.data.blocks import BlockStore
from luminosity.engine.data.complete_side_input import SideInputData
from luminosity.engine.data.event_time import MAX
from luminosity.engine.data.state import StateStore
from luminosity.engine.debugging import savefile
from luminosity.engine.plan.codecs import Codecs
from luminosity.engine.plan.graph import Graph
from luminosity.engine.resources.hints import python_environment
from luminosity.engine.resources.python_environments import python_of
from luminosity.engine.spill.quota import Ledger
from luminosity.engine.workers import worker_files
from luminosity.engine.workers.failure import original
from luminosity.engine.workers.in_process import InProcessWorker
from luminosity.errors import LuminosityError, ReplayError

__all__ = ["Output", "Replay"]


_RESTORING = "restoring"
_BUNDLE = "replayed"
_NOWHERE = os.devnull  # the memory has no limit, so nothing is spilled


@dataclass(frozen=True)
class Output:
    """The elements that one step passed to the next steps."""

    step: str
    values: list[Any]


class Replay:
    """A saved bundle, ready to run.

    Making one changes this process: its import path, its pickler, and the classes of its ``__main__``.
    """

    def __init__(self, path: str) -> None:
        self.manifest, self._entries = savefile.read(path)
        self._descriptor = beam_fn_api_pb2.ProcessBundleDescriptor.FromString(self._entries[savefile.DESCRIPTOR])
        _refuse_other_python(self._descriptor, path)
        self.manifest.surroundings.restore()
        RuntimeValueProvider.set_runtime_options({})  # the options of the run are not saved
        worker_files.define(self._entries[savefile.MAIN_CLASSES])
        self._codecs = Codecs(_graph(self._descriptor, self.manifest.safe_coders))
        self._blocks = BlockStore(_NOWHERE, Ledger(None, limit=1 << 62, writers=0))
        self._state = StateStore(_NOWHERE, self._blocks.ledger)
        self._groups = {bytes.fromhex(part.name): self._entries[part.entry] for part in self.manifest.groups}
        self._sent: dict[str, list[bytes]] = {}

    def run(self) -> list[Output]:
        """Run the bundle on the caller's thread and return its output. Raises what user code raises."""
        self._restore_state()
        worker = InProcessWorker({self._descriptor.id: self._descriptor}, self._handle, wire.pack_bytes, self._take)
        request = beam_fn_api_pb2.InstructionRequest(instruction_id=_BUNDLE)
        request.process_bundle.process_bundle_descriptor_id = self._descriptor.id
        self._state.begin(_BUNDLE)
        raised = None
        try:
            worker.run(request, self._input())
        except (LuminosityError, KeyboardInterrupt):
            raise
        except BaseException as error:
            raised = original(error)
        finally:
            worker.shut_down()
        if isinstance(raised, ModuleNotFoundError) and str(raised) not in self.manifest.error:
            raise ReplayError(self.manifest.surroundings.explain_missing(raised)) from raised
        if raised is not None:
            raise raised  # outside of the except block, so that it keeps its own context
        return list(self._outputs())

    def _restore_state(self) -> None:
        self._state.begin(_RESTORING)
        for part in self.manifest.state:
            request = beam_fn_api_pb2.StateRequest.FromString(self._entries[part.entry])
            request.instruction_id = _RESTORING
            self._state.handle(request)
        self._state.commit(_RESTORING)
        for part in self.manifest.side_inputs:
            codec, encoded = self._codecs.elements(part.coder_id), self._entries[part.entry]
            data = SideInputData(codec, _NOWHERE, self._blocks.ledger)
            data.add(self._blocks.of_bytes(encoded, sum(1 for _ in codec.elements(encoded)), MAX))
            self._state.add_side_input(part.transform_id, part.name, data.read)

    def _handle(self, request: beam_fn_api_pb2.StateRequest) -> beam_fn_api_pb2.StateResponse:
        """Answer a request for a large group, to which elements refer by a token, or for any other state."""
        if request.state_key.HasField("runner"):
            get = beam_fn_api_pb2.StateGetResponse(data=self._groups[request.state_key.runner.key])
            return beam_fn_api_pb2.StateResponse(id=request.id, get=get)
        return self._state.handle(request)

    def _input(self) -> beam_fn_api_pb2.Elements:
        elements = beam_fn_api_pb2.Elements()
        for part in self.manifest.reads:
            data = wire.pack_bytes(0, self._entries[part.entry])
            elements.data.add(instruction_id=_BUNDLE, transform_id=part.transform_id, data=data)
        for part in self.manifest.timers:
            elements.timers.add(
                instruction_id=_BUNDLE,
                transform_id=part.transform_id,
                timer_family_id=part.name,
                timers=self._entries[part.entry],
            )
        return elements

    def _take(self, elements: beam_fn_api_pb2.Elements) -> None:
        for data in elements.data:
            if data.data:
                _, content = wire.unpack(data.data)
                assert isinstance(content, bytes)  # wire.pack_bytes packed it
                self._sent.setdefault(data.transform_id, []).append(content)

    def _outputs(self) -> Iterator[Output]:
        transforms = self._descriptor.transforms
        givers = {
            pcollection: name if tag in ("None", "") else f"{name} ({tag})"
            for name, transform in transforms.items()
            for tag, pcollection in transform.outputs.items()
        }
        for name, transform in transforms.items():
            if transform.spec.urn == bundle_processor.DATA_OUTPUT_URN:
                port = beam_fn_api_pb2.RemoteGrpcPort.FromString(transform.spec.payload)
                step = givers.get(next(iter(transform.inputs.values())), name)
                yield Output(step, self._decoded(port.coder_id, b"".join(self._sent.get(name, ()))))

    def _decoded(self, coder_id: str, data: bytes) -> list[Any]:
        coder = self._codecs.impl(coder_id)
        stream = coder_impl.create_InputStream(data)
        values: list[Any] = []
        while stream.size() > 0:
            values.append(coder.decode_from_stream(stream, True).value)
        return values


def _refuse_other_python(descriptor: beam_fn_api_pb2.ProcessBundleDescriptor, path: str) -> None:
    """Raise :class:`ReplayError` if a step ran in another Python environment than that of this process."""
    for environment_id in dict.fromkeys(each.environment_id for each in descriptor.transforms.values()):
        if environment_id in descriptor.environments:
            found = python_environment(descriptor.environments[environment_id])
            if found:
                raise ReplayError(
                    f"{path}: found a step that runs in the Python environment {found}, expected one of {sys.prefix}",
                    fix=f"replay it there: {python_of(found)} -m luminosity.cli.main replay {path}",
                )


def _graph(descriptor: beam_fn_api_pb2.ProcessBundleDescriptor, safe_coders: dict[str, str]) -> Graph:
    """Return a plan that has only coders."""
    components = beam_runner_api_pb2.Components(
        coders=dict(descriptor.coders.items()),
        pcollections=dict(descriptor.pcollections.items()),
        windowing_strategies=dict(descriptor.windowing_strategies.items()),
        environments=dict(descriptor.environments.items()),
    )
    return Graph((), {}, components, safe_coders)
