"""Starts a job in a process group of its own, kills all of it at random times, and starts it again."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sqlite3
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq

from luminosity.engine.durable.inspection import inspect
from luminosity.errors import CheckpointError
from luminosity.testing import KafkaBroker
from tests.durability import jobs
from tests.warm import WarmProcess

_ROOT = Path(__file__).resolve().parent.parent.parent
_POLL_S = 0.05
_LONGEST_S = 240.0  # until a start saves its first checkpoint, or a job ends, on a busy machine


class Job:
    """A job whose process is killed and started again. Use it as a context: the last process is killed at its end."""

    def __init__(self, name: str, folder: Path, *options: str) -> None:
        self.name = name
        self.folder = folder
        self.starts = 0
        self._options = options
        self._process: WarmProcess | None = None

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    @property
    def output(self) -> str:
        """What all processes have printed."""
        return (self.folder / "output").read_text(errors="replace")

    def start(self, crash: str = "", **environment: str) -> None:
        """Start a process, as leader of a new group. ``crash`` is a point at which it ends: see ``jobs``."""
        self.starts += 1
        with open(self.folder / "output", "ab") as output:
            output.write(f"--- start {self.starts} {crash}\n".encode())
            output.flush()
            self._process = WarmProcess(
                *("tests.durability.jobs", self.name, str(self.folder), *self._options),
                cwd=_ROOT,
                env={**os.environ, "PYTHONPATH": f"{_ROOT / 'src'}", "CRASH": crash, **environment},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def wait_for(self, condition: Callable[[], Any], what: str) -> None:
        """Wait until a condition holds, or the process has ended. Raises if that takes too long."""
        deadline = time.monotonic() + _LONGEST_S
        while not condition() and self.is_running:
            assert time.monotonic() < deadline, f"waited {_LONGEST_S:.0f} s for {what}:\n{self._situation()}"
            time.sleep(_POLL_S)

    def _situation(self) -> str:
        """Return what tells a job that stands still from a slow one: checkpoint, processes, stacks and output."""
        assert self._process is not None
        saved = f"checkpoint {time.time() - self.saved_at():.1f} s old" if self.saved_at() else "no checkpoint"
        lines = [f"load {os.getloadavg()[0]:.1f}, {saved}, start {self.starts}"]
        with contextlib.suppress(CheckpointError):
            lines += [str(step) for step in inspect(str(self.folder / "checkpoint")).steps]
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self._process.pid)
            for each in (process, *process.children(recursive=True)):
                took, age = each.cpu_times(), time.time() - each.create_time()
                lines.append(f"{each.pid} {each.status()}: {took.user + took.system:.1f} s of {age:.1f} s")
        before = self.output
        self._process.send_signal(signal.SIGUSR1)  # ``jobs`` prints its stacks then
        time.sleep(1)
        return "\n".join([*lines, before[-5_000:], self.output[len(before) :][-10_000:]])

    def wait_for_checkpoint(self) -> None:
        """Wait until this start has saved something."""
        before = time.time()
        self.wait_for(lambda: self.saved_at() > before, "a checkpoint")

    def saved_at(self) -> float:
        """Return when the last checkpoint was saved; 0 if there is none."""
        path = self.folder / "checkpoint" / "checkpoint.sqlite"
        with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(path, timeout=5)) as database:
            found = database.execute("SELECT value FROM meta WHERE key = 'saved_at'").fetchone()
            return float(found[0]) if found else 0.0
        return 0.0

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended."""
        return self._process is not None and self._process.poll() is None

    def wait(self) -> int:
        """Wait for the end of the process, and return its status."""
        assert self._process is not None
        self.wait_for(lambda: False, "the end of the job")
        return self._process.wait()

    def terminate(self) -> int:
        """Send SIGTERM to the process alone, as service managers do, and return its status."""
        assert self._process is not None
        self._process.terminate()
        return self.wait()

    def state(self) -> str:
        """Return the state that the checkpoint has."""
        path = self.folder / "checkpoint" / "checkpoint.sqlite"
        with contextlib.closing(sqlite3.connect(path, timeout=5)) as database:
            return database.execute("SELECT value FROM meta WHERE key = 'state'").fetchone()[0]

    @contextlib.contextmanager
    def stopped(self) -> Generator[None]:
        """Hold all processes of the job while the context lasts, so that the disk does not change."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(self._process.pid, signal.SIGCONT)

    def sleep(self, seconds: float) -> None:
        """Let the job work for a while."""
        time.sleep(seconds)
        assert self.is_running, self.output[-5_000:]

    def kill(self) -> None:
        """Kill the process, its workers and its model host, all at once."""
        if self._process is None:
            return
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            family = psutil.Process(self._process.pid).children(recursive=True)
            os.killpg(self._process.pid, signal.SIGKILL)
            for each in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
            psutil.wait_procs(family, timeout=30)
        self._process.wait()
        self._process = None

    def kill_at_random(self, chance: random.Random, kills: int, spread_s: float) -> int:
        """Start and kill the job some times, each within ``spread_s`` after its first checkpoint.

        Returns how often it was killed; it may have ended before.
        """
        for done in range(kills):
            self.start()
            self.wait_for_checkpoint()
            time.sleep(chance.uniform(0, spread_s))
            if not self.is_running:
                return done
            self.kill()
        return kills


def produce(broker: KafkaBroker, folder: Path, keys: int, per_key: int) -> None:
    """Write all records of the stream: ``keys`` different ones in turn, ``per_key`` times."""
    broker.create_topic("in", 4)
    (folder / "servers").write_text(broker.bootstrap_servers)
    second_ms = 1_000 // jobs.RECORDS_PER_SECOND
    records: list[Any] = [
        {
            "key": str(number % keys),
            "value": b"",
            "timestamp": 1_000_000_000 + number * second_ms,
            "partition": number % 4,
        }
        for number in range(keys * per_key)
    ]
    broker.produce_many("in", records)


def published_rows(table: Path) -> int:
    """Return how many rows the published files of a table have. Files may be added meanwhile."""
    if not table.is_dir():
        return 0
    return sum(pq.read_metadata(path).num_rows for path in table.glob("*.parquet"))
