"""What the engine leaves to see from outside: its processes and its files; and how to kill the former."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil

from tests.marks import notes
from tests.runners import IS_CLUSTER

_FORK_SERVER = "luminosity.engine.workers.forkserver"
_FILE_PREFIX = "luminosity-"
_POLL_S = 0.02

_of_strangers: set[str] = set()  # folders whose process was seen, which may be killed later, as tests beside this do

MOST_KILLS = 3

T = TypeVar("T")


def fork_servers_of(pid: int) -> list[psutil.Process]:
    """The fork servers that process `pid` started."""
    return [child for child in _children(pid) if _is_fork_server(child)]


def workers_of(pid: int) -> list[psutil.Process]:
    """The worker processes that live on behalf of process `pid`: the children of its fork servers and its agents'."""
    owners = [pid, *(_agents() if IS_CLUSTER and pid == os.getpid() else ())]
    return [worker for owner in owners for server in fork_servers_of(owner) for worker in _children(server.pid)]


def _agents() -> list[int]:
    """The agents of this process's runs on a cluster, whose nodes are all on this machine."""
    import ray
    from ray._private import state

    if not ray.is_initialized():
        return []
    actors = state.actors(job_id=ray.JobID.from_hex(ray.get_runtime_context().get_job_id())).values()
    return [each["Pid"] for each in actors if each["ActorClassName"] == "NodeAgent" and each["State"] == "ALIVE"]


def files_of_luminosity(*folders: str | Path) -> set[str]:
    """Everything in the folders (by default shared memory and the temporary folder) that bears our prefix.

    What belongs to a run of somebody else, who uses this machine at the same time, is left out.
    """
    places = [Path(folder) for folder in folders] or [Path("/dev/shm"), Path(tempfile.gettempdir())]
    found = [path for place in places if place.is_dir() for path in place.glob(f"{_FILE_PREFIX}*")]
    # The folder of hosts that workers share is of all runs of a user: a test beside this one may need it now.
    of_all_runs = f"{_FILE_PREFIX}{os.getuid()}"
    return {str(path) for path in found if path.name != of_all_runs and not _is_of_a_stranger(path)}


def files_of_runs(*folders: str | Path) -> set[str]:
    """Those of runs of this process. Without a cluster, the folders of nodes belong to tests beside this one."""
    return {each for each in files_of_luminosity(*folders) if IS_CLUSTER or len(os.path.basename(each).split("-")) < 4}


def files_of(pid: int) -> set[str]:
    """The folders of the runs of one process, which may have ended."""
    return {each for each in files_of_luminosity() if os.path.basename(each).startswith(f"{_FILE_PREFIX}{pid}-")}


def _is_of_a_stranger(path: Path) -> bool:
    """Whether the process that the folder is named for is neither this one nor one of its descendants.

    It must live, or have lived when the folder was seen before. Any run removes the folders of killed ones.

    Folders of a cluster's nodes are named for their run and their node. They count, unless all tests run on a cluster,
    and the node belongs to another one.
    """
    name, *rest = path.name.removeprefix(_FILE_PREFIX).split("-")
    if len(rest) > 1:
        return IS_CLUSTER and rest[0] not in _nodes()
    if not name.isdecimal():
        return False
    try:
        process = psutil.Process(int(name))
        is_stranger = os.getpid() not in [process.pid, *(parent.pid for parent in process.parents())]
    except psutil.NoSuchProcess:
        return str(path) in _of_strangers
    if is_stranger:
        _of_strangers.add(str(path))
    return is_stranger


def _nodes() -> set[str]:
    import ray

    return {node["NodeID"][:8] for node in ray.nodes()}


@contextlib.contextmanager
def waiting_process() -> Iterator[int]:
    """The id of another process that runs, and whose command is known, until the context ends."""
    program = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process.pid
        finally:
            process.communicate(b"\n")


def wait_for(condition: Callable[[], T], timeout_s: float) -> T:
    """Ask until the answer is true or the time is over; the last answer."""
    deadline = time.monotonic() + timeout_s
    while not (answer := condition()) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return answer


@dataclass
class Kills:
    """How many workers were killed so far."""

    count: int = 0


@contextlib.contextmanager
def kill_workers_of(
    pid: int, every_s: float, at_work: Path, seed: int = 0, over: Path | None = None
) -> Iterator[Kills]:
    """Within the context, kill -9 one random worker of process `pid` every so often, and then touch `over`.

    However slow the machine is, the run must be able to end. So only those are killed whose number user code has noted
    in `at_work`: one that dies before it is ready counts as a failed start. And there are no more kills than
    `MOST_KILLS`: with one more, an element might be taken for one that ends its workers.
    """
    kills = Kills()
    stop = threading.Event()
    chooser = random.Random(seed)

    def kill() -> None:
        while kills.count < MOST_KILLS and not stop.wait(every_s):
            known = set(notes(at_work))
            workers = sorted((w for w in workers_of(pid) if str(w.pid) in known), key=lambda worker: worker.pid)
            if not workers:
                continue
            victim = chooser.choice(workers)
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()  # psutil compares the start time: never a stranger that took over the number
                kills.count += 1
        if over is not None:
            over.touch()

    thread = threading.Thread(target=kill, name="kill-workers", daemon=True)
    thread.start()
    try:
        yield kills
    finally:
        stop.set()
        thread.join(timeout=60)


@contextlib.contextmanager
def nothing_left_behind(timeout_s: float = 60) -> Iterator[None]:
    """Fail if files or workers of this process appear within the context and outlive it."""
    files = files_of_runs()
    yield
    wait_for(lambda: not workers_of(os.getpid()), timeout_s)
    assert workers_of(os.getpid()) == [], "worker processes outlive the run"
    wait_for(lambda: files_of_runs() <= files, timeout_s)
    left = files_of_runs() - files
    assert left == set(), f"files outlive the run: {left}"


def _children(pid: int) -> list[psutil.Process]:
    try:
        children = psutil.Process(pid).children()
    except psutil.NoSuchProcess:
        return []
    return [child for child in children if _is_alive(child)]


def _is_alive(process: psutil.Process) -> bool:
    """A zombie is dead: only its exit status waits to be read."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _is_fork_server(process: psutil.Process) -> bool:
    try:
        return any(_FORK_SERVER in argument for argument in process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return False
