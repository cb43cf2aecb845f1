"""What is known of stages, pools, models and the machine when a run starts."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DeviceInfo", "MachineInfo", "ModelVersion", "NodeInfo", "PoolInfo", "Resources", "StageInfo"]


@dataclass(frozen=True)
class Resources:
    """What resource hints ask for. An empty field asks for nothing."""

    ram: int = 0  # bytes, with the hint min_ram
    cores: float = 0.0  # with the hint cpu_count
    accelerator: str = ""  # such as "type:nvidia-tesla-t4;count:1"


@dataclass(frozen=True)
class StageInfo:
    """A stage: fused steps, which run together in one worker."""

    id: str
    label: str  # unique within the run
    pool: str
    reads_from: tuple[str, ...] = ()  # ids of stages
    side_inputs_from: tuple[str, ...] = ()
    is_stream: bool = False  # whether its input may never end
    steps: tuple[str, ...] = ()  # whole names of the pipeline's steps in it, in order
    asked: Resources = Resources()  # what the resource hints of its steps ask for
    reads_groups: bool = False  # of a GroupByKey: in a batch, it starts when the stages that it reads from are done


@dataclass(frozen=True)
class PoolInfo:
    """A pool: worker processes with the same resources."""

    name: str
    workers: int  # at most
    slots: int  # bundles that one worker runs at once
    devices: tuple[str, ...] = ()
    cores_per_worker: float = 0.0  # this and the following: a worker's share of the machine; 0 if not known
    ram_per_worker: int = 0
    asked: Resources = Resources()  # what the resource hints of its steps ask for
    python: str = ""  # the folder of its Python environment, if it has its own


@dataclass(frozen=True)
class DeviceInfo:
    """An accelerator of the machine."""

    id: str  # such as gpu:0
    name: str = ""  # as its driver names it, such as "Tesla T4"
    memory: int = 0  # bytes; 0 if not known


@dataclass(frozen=True)
class NodeInfo:
    """A node of the cluster on which a run started."""

    id: str
    address: str = ""
    cores: float = 0.0
    ram: int = 0  # bytes
    accelerators: float = 0.0
    accelerator_type: str = ""
    object_store: int = 0  # bytes
    is_driver: bool = False  # whether the process that runs the pipeline is there


@dataclass(frozen=True)
class MachineInfo:
    """The machine of a run, or the sum of a cluster's nodes."""

    cores: int = 0  # that the run may use
    ram: int = 0  # bytes that the run may use
    devices: tuple[DeviceInfo, ...] = ()
    nodes: tuple[NodeInfo, ...] = ()  # of the cluster; empty on one machine


@dataclass(frozen=True)
class ModelVersion:
    """The version of a registered model that a step starts with."""

    step: str
    name: str  # as the handler names it, such as models:/sentiment@champion
    version: str
    path: str  # where the registry keeps its files
    digest: str = ""  # empty if it is not known before a worker has loaded the model
