"""A small model of a pipeline, from which the tests make records: elements flow through stages with bounded queues."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from luminosity.events import (
    CheckpointView,
    DeviceView,
    InferenceView,
    MemoryUse,
    PoolView,
    ProcessMemory,
    Snapshot,
    StageView,
    Status,
    StreamView,
    TransformInfo,
    WorkerView,
)

__all__ = ["Flow", "Part"]

_QUEUE = 40_000  # elements at which the writers of a queue are held back
_STARTED_AT = 1_790_000_000.0


@dataclass
class Part:
    """A stage of the model: how many elements a second it takes, and how many come out of each."""

    id: str
    label: str
    pool: str
    reads_from: tuple[str, ...] = ()
    sides: tuple[str, ...] = ()
    per_second: float = 1000.0
    ratio: float = 1.0
    total: float = 0.0  # of a source; 0: it never ends
    is_model: bool = False
    is_stream: bool = False
    done: float = 0.0
    queue: float = 0.0
    busy: float = 0.0
    rate: float = 0.0
    steps: tuple[str, ...] = ()  # whole names; those of the label by default
    is_full: bool = False
    status: Status = "starved"

    @property
    def names(self) -> tuple[str, ...]:
        """The whole names of its steps."""
        return self.steps or tuple(self.label.split(" + "))


@dataclass
class Flow:
    """The state of all stages, moved on by a second at a time."""

    parts: Sequence[Part]
    run: str
    pools: dict[str, int]  # workers
    devices: tuple[str, ...] = ()
    ram: int = 2_000_000_000
    seconds: float = 0.0

    def step(self, seconds: float) -> None:
        """Move every stage on, the last ones first, so that they make room."""
        self.seconds += seconds
        readers = {part.id: [other for other in self.parts if part.id in other.reads_from] for part in self.parts}
        for part in reversed(self.parts):
            wave = 1 + 0.12 * math.sin(self.seconds / 17 + len(part.label))
            most = part.per_second * wave * seconds
            room = min((_QUEUE - reader.queue for reader in readers[part.id]), default=math.inf) / (part.ratio or 1)
            there = part.queue if part.reads_from else (part.total - part.done if part.total else math.inf)
            is_open = all(other.status == "done" for other in self._of(part.sides))
            taken = max(0.0, min(most, there, room)) if is_open else 0.0
            part.is_full = room < most and there > room
            part.queue -= taken if part.reads_from else 0
            part.done += taken
            part.rate = taken / seconds
            part.busy += taken / part.per_second
            for reader in readers[part.id]:
                reader.queue += taken * part.ratio
        for part in self.parts:
            part.status = self._status(part)

    def _of(self, ids: Sequence[str]) -> list[Part]:
        return [part for part in self.parts if part.id in ids]

    def _status(self, part: Part) -> Status:
        inputs = self._of(part.reads_from)
        if part.total and part.done >= part.total - 1e-6:
            return "done"
        if inputs and part.queue < 1 and all(each.status == "done" for each in inputs):
            return "done"
        if any(each.status != "done" for each in self._of(part.sides)):
            return "waiting"
        if part.is_full:
            return "held back"
        if part.rate < 0.5 * part.per_second and inputs:
            return "starved"
        return "busy"

    @property
    def is_done(self) -> bool:
        """Whether every stage is done."""
        return all(part.status == "done" for part in self.parts)

    def snapshot(self) -> Snapshot:
        """Return the state as a run would report it."""
        views = tuple(self._view(part) for part in self.parts)
        left = max((view.seconds_left or 0.0 for view in views), default=0.0)
        pools = tuple(self._pool(name, workers) for name, workers in self.pools.items())
        held = int(sum(part.queue for part in self.parts) * 900)
        used = int(self.ram * (0.6 + 0.35 * (1 - math.exp(-self.seconds / 60)) + 0.03 * math.sin(self.seconds / 9)))
        return Snapshot(
            self.run,
            self.seconds,
            views,
            pools,
            tuple(self._device(number, name) for number, name in enumerate(self.devices)),
            MemoryUse(held, int(held * 1.3) + 1_000_000, 2_150_000_000, 0),
            ProcessMemory(used, int(self.ram * 0.98)),
            left or None,
            tuple(self._workers()),
        )

    def _view(self, part: Part) -> StageView:
        fraction = min(1.0, part.done / part.total) if part.total else None
        busy = part.busy
        readers = [other for other in self.parts if part.id in other.reads_from]
        by: tuple[str, ...] = ()
        status = part.status
        if status == "held back":
            by = tuple(reader.label for reader in readers if reader.queue > _QUEUE * 0.8)
        elif status == "starved":
            by = tuple(other.label for other in self._of(part.reads_from))
        elif status == "waiting":
            by = tuple(other.label for other in self._of(part.sides) if other.status != "done")
        stream = None
        if part.is_stream:
            behind = 0.4 + part.queue / max(part.per_second, 1)
            late = int(part.done / 40_000) if part.label == self.parts[-1].label else 0
            stream = StreamView(_STARTED_AT + self.seconds - behind, behind, False, part.queue or None, late)
        return StageView(
            part.id,
            status,
            by,
            int(part.done),
            part.rate,
            int(part.queue),
            int(part.queue * 900),
            1 if part.rate else 0,
            1 if part.rate else 0,
            busy,
            fraction,
            (part.total - part.done) / part.rate if part.total and part.rate else None,
            (self._inference(part),) if part.is_model and part.done else (),
            stream,
            bundles=int(part.done / 2000) + bool(part.done),
            cpu_seconds=busy * (0.35 if part.is_model else 0.93),
            peak_resident=int(3.1e9 if part.is_model else 2.4e8 + 1e6 * len(part.label) * 3),
            output_bytes=int(part.done * 730),
            step_seconds=_shares(busy, len(part.names)),
            step_elements=tuple(int(part.done * part.ratio) for _ in part.names),
        )

    def transforms(self) -> tuple[TransformInfo, ...]:
        """Return the steps with their composites, as a pipeline's author would have applied them."""
        infos: list[TransformInfo] = []
        places: dict[str, int] = {}

        def place_of(name: str) -> int:
            """Return the place of a transform, after that of the composite around it."""
            if name not in places:
                outer, _, inner = name.rpartition("/")
                inside = place_of(outer) if outer else -1
                places[name] = len(infos)
                infos.append(TransformInfo(inner, inside))
            return places[name]

        for part in self.parts:
            for name in part.names:
                place_of(name)
        for part in self.parts:
            before = {places[other.names[-1]] for other in self._of(part.reads_from)}
            sides = tuple(places[other.names[-1]] for other in self._of(part.sides))
            for number, name in enumerate(part.names):
                reads = tuple(sorted(before)) if number == 0 else (places[part.names[number - 1]],)
                place = places[name]
                infos[place] = replace(infos[place], reads_from=reads, side_inputs_from=sides if number == 0 else ())
        return tuple(infos)

    def _inference(self, part: Part) -> InferenceView:
        done = int(part.done)
        batches = max(1, done // 61)
        return InferenceView(
            f"{part.label}/Infer",
            done,
            batches,
            done * 94,
            done * 103,
            done * 118,
            done * 0.012,
            batches * 0.004,
            batches * 0.002,
            batches * 0.003,
            batches * 0.061,
            batches * 0.001,
            batches * 0.061,
            self.seconds,
            1,
            loads=1,
            load_seconds=3.42,
            model_bytes=438_000_000,
            fixed_seconds=0.0061,
            seconds_per_cost=8.9e-6,
            batch_p50_ms=68.0,
            batch_p99_ms=141.0,
            runs_on="device",
        )

    def _pool(self, name: str, workers: int) -> PoolView:
        own = [part for part in self.parts if part.pool == name]
        busy = sum(part.busy for part in own)
        share = min(0.99, busy / max(self.seconds * workers, 1e-9))
        running = min(workers, sum(1 for part in own if part.rate > 0))
        return PoolView(name, workers, running, workers, min(busy, self.seconds * workers), share)

    def _device(self, number: int, name: str) -> DeviceView:
        models = [part for part in self.parts if part.is_model]
        now = min(0.97, sum(part.rate / part.per_second for part in models) * 0.9 / (1 + number))
        total = 15_800_000_000
        return DeviceView(name, now * 0.9, now, int(5.2e9 + 1.5e9 * now), total, now * 0.92, 0.97, int(6.9e9))

    def _workers(self) -> Iterator[WorkerView]:
        for name, workers in self.pools.items():
            running = tuple(part.id for part in self.parts if part.pool == name and part.rate > 0)
            for number in range(workers):
                at = (running[number % len(running)],) if running else ()
                cpu = self.seconds * (0.9 - 0.1 * number)
                memory = int((3.0e9 if name == "device" else 2.6e8) + 4e7 * number)
                view = WorkerView(f"{name}-{number}", name, 4000 + number, at, cpu, memory, int(memory * 1.1))
                yield replace(view, own=int(memory * 0.8))

    def with_checkpoint(self, every_s: float) -> Snapshot:
        """Return a snapshot of a durable run that writes a checkpoint every so many seconds."""
        count = int(self.seconds / every_s)
        last = count * every_s if count else None
        return replace(self.snapshot(), checkpoint=CheckpointView(count, last, 0.041, 3_400_000 + 90_000 * count))


def _shares(seconds: float, steps: int) -> tuple[float, ...]:
    """Return the times of the steps of a stage: each takes twice as long as the one before it."""
    total = 2**steps - 1
    return tuple(round(0.95 * seconds * 2**step / total, 3) for step in range(steps))
