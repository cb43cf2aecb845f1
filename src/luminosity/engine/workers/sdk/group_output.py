"""How Beam's worker makes the parts of groupings: outputs that may be split, and what groups a partition.

:func:`register` lets it do so.
"""

from __future__ import annotations

import functools
import json
from typing import Any

from apache_beam.portability.api import beam_fn_api_pb2, beam_runner_api_pb2
from apache_beam.runners import common
from apache_beam.runners.worker import bundle_processor

from luminosity.engine.data.group_rules import rule_of
from luminosity.engine.plan.codecs import Codecs
from luminosity.engine.plan.graph import PARTITIONS, Graph
from luminosity.engine.plan.partitions import GROUP_ANNOTATION, GROUP_URN
from luminosity.engine.workers.sdk.large_elements import BlockOutput
from luminosity.engine.workers.sdk.partitions import PartitionTable

__all__ = ["GroupOutput", "register"]

_Port = beam_fn_api_pb2.RemoteGrpcPort
_Factory: Any = bundle_processor.BeamTransformFactory


class GroupOutput(BlockOutput):
    """Groups the blocks of one partition, and sends the groups at the end of the bundle."""

    def use(self, descriptor: beam_fn_api_pb2.ProcessBundleDescriptor, annotation: bytes) -> None:
        """Take over what the plan says about the grouping. Call it before the first bundle."""
        options: dict[str, Any] = json.loads(annotation)
        components = beam_runner_api_pb2.Components(
            coders=dict(descriptor.coders.items()),
            environments=dict(descriptor.environments.items()),
            pcollections=dict(descriptor.pcollections.items()),
            windowing_strategies=dict(descriptor.windowing_strategies.items()),
        )
        codecs = Codecs(Graph((), {}, components, options["safe_coders"]))
        self._rule = rule_of(
            codecs.elements(options["written"]),
            codecs.elements(options["read"]),
            codecs.windowing(options["pcollection"]),
        )
        self._memory_part: int = options["memory_part"]
        self._table: PartitionTable | None = None

    def group_block(self, data: bytes) -> None:
        """Group the encoded elements of a block."""
        try:
            if self._table is None:
                stream: Any = self.output_stream
                self._table = PartitionTable(self._rule, stream, self._memory_part)
            self._table.add(data)
        except BaseException:
            self._close()
            raise

    def finish(self) -> None:
        """Send the groups."""
        try:
            if self._table is not None:
                self._table.send()
        finally:
            self._close()
        super().finish()

    def _close(self) -> None:
        if self._table is not None:
            self._table.close()
            self._table = None


def _make_sink(factory: Any, transform_id: str, transform: Any, port: Any, consumers: Any) -> Any:
    sink: Any = bundle_processor.create_sink_runner(factory, transform_id, transform, port, consumers)
    sink.partitions = int(transform.annotations.get(PARTITIONS, b"0"))
    return sink


def _make_group_output(factory: Any, transform_id: str, transform: Any, port: Any, consumers: Any) -> GroupOutput:
    output = GroupOutput(
        common.NameContext(transform.unique_name, transform_id),
        transform.unique_name,
        consumers,
        factory.counter_factory,
        factory.state_sampler,
        factory.get_coder(port.coder_id),
        transform_id=transform_id,
        data_channel_factory=functools.partial(factory.data_channel_factory.create_data_channel, port),
    )
    output.use(factory.descriptor, transform.annotations[GROUP_ANNOTATION])
    return output


def register() -> None:
    """Let Beam's worker in this process make these parts."""
    _Factory.register_urn(bundle_processor.DATA_OUTPUT_URN, _Port)(_make_sink)
    _Factory.register_urn(GROUP_URN, _Port)(_make_group_output)
