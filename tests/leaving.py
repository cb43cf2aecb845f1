"""A pipeline whose step starts processes in every way and leaves them, in a script of its own.

``LEAVING`` names the folder for its notes: ``started`` has the process ids, ``users`` the process of the script itself.
"""

from __future__ import annotations

from pathlib import Path

import psutil

from tests.marks import notes

WAYS = 8  # to start a process, below

SCRIPT = """
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor

import apache_beam as beam

from tests.leaving import running
from tests.marks import first_time, note

SLEEP = ["sleep", "600"]
FOLDER = os.environ["LEAVING"]


def start_all(started):
    kept = [ProcessPoolExecutor(1), multiprocessing.Pool(1), multiprocessing.Process(target=time.sleep, args=(600,))]
    kept[2].start()
    note(started, kept[0].submit(os.getpid).result())
    note(started, kept[1].apply(os.getpid))
    note(started, kept[2].pid)
    note(started, subprocess.Popen(SLEEP).pid)
    note(started, subprocess.Popen(["env", "-i", *SLEEP], start_new_session=True).pid)
    note(started, subprocess.check_output("sleep 600 >/dev/null & echo $!", shell=True, text=True).strip())
    if os.fork() == 0:  # a daemon
        os.setsid()
        if os.fork() == 0:
            note(started, os.getpid())
            time.sleep(600)
        os._exit(0)
    return kept


class Leave(beam.DoFn):
    def process(self, pid, ending):
        started = os.path.join(FOLDER, "started")
        if first_time(os.path.join(FOLDER, "first")):
            note(started, pid)
            self.kept = start_all(started)
            if ending == "finished":  # in another worker
                while len(running(FOLDER)) < 8:
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
            if ending != "failed":
                time.sleep(600)
            raise ValueError("enough")
        if ending == "failed":
            raise ValueError("enough")
        yield f"{len(running(FOLDER))} are left"
        self.kept = start_all(started)


if __name__ == "__main__":
    pipeline = beam.Pipeline()
    own, _ = pipeline | beam.Create([0]) | beam.Map(lambda _: os.getpid()).with_exception_handling(
        use_subprocess=True, timeout=60
    )
    own | beam.Reshuffle() | beam.ParDo(Leave(), os.environ["ENDING"]) | beam.Map(print)
    result = pipeline.run()
    users = os.path.join(FOLDER, "users")
    if not os.environ["ENDING"].startswith("SIGKILL"):
        note(users, subprocess.Popen(SLEEP, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid)
    elif os.fork() == 0:  # a process of the script, which holds all of the runner's pipes but the output
        for number in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
        note(users, os.getpid())
        time.sleep(600)
        os._exit(0)
    result.wait_until_finish()
"""


def running(folder: Path | str, name: str = "started") -> list[int]:
    """Return which of the processes that are noted in a folder still run."""
    return [pid for pid in map(int, notes(Path(folder) / name)) if _is_running(pid)]


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
