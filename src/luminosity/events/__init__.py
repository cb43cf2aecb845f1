"""The events of a run, as plain data: one stream for all views, records and subscribers.

The first event of a run is :class:`RunStarted`, the last one :class:`RunEnded`. About five times a second a
:class:`Snapshot` reports the state of all stages and pools. Events can be turned into JSON and back.
"""

from __future__ import annotations

from luminosity.events.events import (
    BundleRetried,
    BundleStalled,
    CheckpointDone,
    Event,
    LogMessage,
    ModelLoaded,
    RunEnded,
    RunStarted,
    Snapshot,
    Subscriber,
    WorkerEnded,
    WorkerLost,
    WorkerStarted,
)
from luminosity.events.infos import DeviceInfo, MachineInfo, ModelVersion, NodeInfo, PoolInfo, Resources, StageInfo
from luminosity.events.json_form import from_json, is_known, to_json
from luminosity.events.views import (
    CheckpointView,
    DeviceView,
    InferenceView,
    KafkaView,
    MemoryUse,
    MetricView,
    NodeView,
    PartitionLag,
    PoolView,
    ProcessMemory,
    StageView,
    StallView,
    Status,
    StreamView,
    WorkerView,
)

__all__ = [
    "BundleRetried",
    "BundleStalled",
    "CheckpointDone",
    "CheckpointView",
    "DeviceInfo",
    "DeviceView",
    "Event",
    "InferenceView",
    "KafkaView",
    "LogMessage",
    "MachineInfo",
    "MemoryUse",
    "MetricView",
    "ModelLoaded",
    "ModelVersion",
    "NodeInfo",
    "NodeView",
    "PartitionLag",
    "PoolInfo",
    "PoolView",
    "ProcessMemory",
    "Resources",
    "RunEnded",
    "RunStarted",
    "Snapshot",
    "StageInfo",
    "StageView",
    "StallView",
    "Status",
    "StreamView",
    "Subscriber",
    "WorkerEnded",
    "WorkerLost",
    "WorkerStarted",
    "WorkerView",
    "from_json",
    "is_known",
    "to_json",
]
