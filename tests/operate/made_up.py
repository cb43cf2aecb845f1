"""Made-up records of runs, for tests of bills and advice."""

from __future__ import annotations

from luminosity.events import (
    DeviceInfo,
    DeviceView,
    InferenceView,
    MachineInfo,
    PoolInfo,
    PoolView,
    Resources,
    RunEnded,
    RunStarted,
    Snapshot,
    StageInfo,
    StageView,
    WorkerEnded,
    WorkerStarted,
    WorkerView,
)
from luminosity.runs.records import Record

GIB = 1 << 30
MACHINE = MachineInfo(4, 32 * GIB, (DeviceInfo("gpu:0", "Tesla T4", 16 * GIB),))
SMALL = MachineInfo(2, 24 * GIB)
NOTHING_ASKED = Resources()
T4 = "type:nvidia-tesla-t4;count:1"


def run_of(
    name: str = "talk.py",
    *,
    run: str = "20260301T101500-4f2a9c",
    seconds: float = 3600.0,
    peaks: tuple[int, int, int] = (2 * GIB, 20 * GIB, 3 * GIB),
    busy: tuple[float, float, float] = (900.0, 3000.0, 1500.0),
    cpu: float = 0.5,
    asked_ram: tuple[int, int, int] = (4 * GIB, 16 * GIB, 8 * GIB),
    cores: int = 0,
    device: DeviceView | None = None,
    inference: tuple[InferenceView, ...] = (),
    model_step: str = "Infer",
    pools_mode: str = "hints",
) -> Record:
    """A run with three pools of one worker each: I/O, preprocessing, an accelerator. ``cpu``: seconds in a second."""
    names = ("cpu io", "cpu large", "device")
    steps = (("Read/Impulse", "Read/Lines", "Write"), ("Prepare",), (model_step,))
    hints = tuple(
        Resources(ram, cores, T4 if pool == "device" else "") for pool, ram in zip(names, asked_ram, strict=True)
    )
    pools = tuple(
        PoolInfo(
            pool,
            1,
            1,
            ("gpu:0",) if pool == "device" else (),
            cores_per_worker=1.0,
            ram_per_worker=hint.ram or 8 * GIB,
            asked=hint,
        )
        for pool, hint in zip(names, hints, strict=True)
    )
    stages = tuple(
        StageInfo(f"s{i}", each[0], pool, steps=each, asked=hint)
        for i, (pool, each, hint) in enumerate(zip(names, steps, hints, strict=True))
    )
    started = RunStarted(run, 0.0, name, 1.7e9, stages, pools, 0, machine=MACHINE, pools_mode=pools_mode)

    def snapshot(at: float) -> Snapshot:
        part = at / seconds
        views = tuple(
            StageView(
                f"s{i}",
                "busy",
                busy_seconds=work * part,
                cpu_seconds=work * part * cpu,
                peak_resident=peak,
                inference=inference if i == 2 else (),
            )
            for i, (work, peak) in enumerate(zip(busy, peaks, strict=True))
        )
        workers = tuple(
            WorkerView(f"w{i}", pool, running=(f"s{i}",), cpu_seconds=at * cpu, peak_resident=peak)
            for i, (pool, peak) in enumerate(zip(names, peaks, strict=True))
        )
        devices = (device or DeviceView("gpu:0", busy_fraction=0.4),)
        return Snapshot(run, at, views, tuple(PoolView(pool, 1) for pool in names), devices, workers=workers)

    up = tuple(WorkerStarted(run, 0.0, f"w{i}", pool, 100 + i) for i, pool in enumerate(names))
    snapshots = tuple(snapshot(seconds * i / 10) for i in range(11))
    return Record(started, up, 0, snapshots, RunEnded(run, seconds, "done", snapshots[-1]), is_alive=False)


def run_of_one_pool(
    *,
    workers: int = 2,
    seconds: float = 20.0,
    start: float = 1.0,
    cpu: float = 0.9,
    burst: float = 0.0,
    peak: int = GIB // 8,
    asked: Resources = NOTHING_ASKED,
    bundles: int = 100,
    machine: MachineInfo = SMALL,
    devices: tuple[str, ...] = (),
) -> Record:
    """A run of one pool, whose workers are always busy from their start.

    ``cpu``: seconds of a worker in a second, on average; for four seconds ``burst`` more, for the next ones less.
    """
    run, each = "20260301T101500-0e0001", seconds - start
    cores = asked.cores or min(1.0, machine.cores / workers)
    name = "device" if devices else "cpu"
    pool = PoolInfo(name, workers, 1, devices, cores, asked.ram or machine.ram // workers, asked)
    stage = StageInfo("s0", "Call", name, steps=("Call",), asked=asked)
    started = RunStarted(run, 0.0, "one.py", 1.7e9, (stage,), (pool,), 0, machine=machine, pools_mode="hints")

    def snapshot(at: float) -> Snapshot:
        worked = max(0.0, at - start)
        view = StageView(
            "s0",
            "busy",
            elements=round(1000 * at / seconds),
            busy_seconds=workers * worked,
            cpu_seconds=workers * worked * cpu,
            peak_resident=peak,
            bundles=bundles,
        )
        bursts = burst * (4 - abs((at - seconds / 10) % 8 - 4))
        views = tuple(
            WorkerView(f"w{i}", name, running=("s0",), cpu_seconds=worked * cpu + bursts, peak_resident=peak)
            for i in range(workers)
        )
        return Snapshot(run, at, (view,), (PoolView(name, workers),), workers=views)

    up = tuple(WorkerStarted(run, start, f"w{i}", name, 100 + i) for i in range(workers))
    # Each worker takes 0.1 CPU seconds to start.
    down = tuple(WorkerEnded(run, seconds, f"w{i}", name, each, each * cpu + 0.1, peak) for i in range(workers))
    snapshots = tuple(snapshot(seconds * i / 10) for i in range(1, 11))
    return Record(started, (*up, *down), 0, snapshots, RunEnded(run, seconds, "done", snapshots[-1]), is_alive=False)
