"""Finds and ends the processes that a worker or a model host has started, also those that try to get away.

A step may start processes: a pool, a server, a daemon in a session of its own. They end with the process that started
them, its owner. An owner can't be found from the list of parents, since a process whose parent ends gets another
parent. So owners mark themselves, and the kernel passes the mark on to every process that they start, whatever it
executes, closes or forgets: the mark is a resource limit, the time that a process with real-time scheduling may compute
without a pause. Its soft value becomes a number of some ten thousand years, which contains the owner's process id and
the number of its family. A family is what one runner has started.

The keeper of a family is a small process that ends all of it when the runner has ended, however it ended. It is this
file as a script, ``descendants.py PIPE PID FAMILY``, in an interpreter that imports nothing else.

A system without such limits (macOS, gVisor) has process groups instead. There a process that leaves the group of its
owner is not found.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection

__all__ = [
    "Ending",
    "Keeper",
    "can_mark",
    "end_group",
    "end_left_over",
    "end_owned_by",
    "end_started",
    "fork_lock",
    "join",
    "join_inherited",
    "left_over",
]

_PID_BITS = 22  # the kernel's largest process id is 4,194,304
_FAMILY_BITS = 40
_IS_MARK = 1 << (_PID_BITS + _FAMILY_BITS)
_GRACE_S = 2.0  # between SIGTERM and SIGKILL: a server needs about a second to stop
_GIVE_UP_S = 2.0  # after SIGKILL, for a process that can't be ended now, such as one of another user
_POLL_S = 0.01  # short beside the end of a process

# Hold this from the moment a pipe to a new process is made until its other end is closed here. A process that the user
# forks on another thread meanwhile would inherit that end and keep it open, and ``subprocess`` waits until one such
# pipe of its own is closed.
fork_lock = threading.RLock()
os.register_at_fork(before=fork_lock.acquire, after_in_parent=fork_lock.release, after_in_child=fork_lock.release)


@functools.cache
def can_mark() -> bool:
    """Return whether this system lets processes mark themselves, and lets them see the marks of others."""
    try:
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_RTTIME)
        resource.setrlimit(resource.RLIMIT_RTTIME, (soft, hard))
        resource.prlimit(os.getpid(), resource.RLIMIT_RTTIME)
        return hard == resource.RLIM_INFINITY and os.path.exists(f"/proc/{os.getpid()}/stat")
    except (ImportError, AttributeError, OSError, ValueError):
        return False


def join(family: int) -> None:
    """Make this process an owner of the family: what it starts from now on ends when it has ended.

    Where processes can't be marked, it becomes the leader of a process group.
    """
    if can_mark():
        import resource

        mark = _IS_MARK | family << _PID_BITS | os.getpid()
        resource.setrlimit(resource.RLIMIT_RTTIME, (mark, resource.RLIM_INFINITY))
        return
    with contextlib.suppress(PermissionError):  # it leads a session already
        os.setpgid(0, 0)


def join_inherited() -> None:
    """Make this process an owner of the family of the process that started it, if that has one."""
    family = _inherited_family()
    if family is not None:
        join(family)


def _inherited_family() -> int | None:
    """Return the family of the process that started this one; None if it has none."""
    found = _mark_of(os.getpid()) if can_mark() else None
    return None if found is None else found[0]


def _mark_of(pid: int) -> tuple[int, int] | None:
    """Return the family and the owner of a process, or None."""
    import resource

    try:
        value = resource.prlimit(pid, resource.RLIMIT_RTTIME)[0]
    except PermissionError:
        value = _limit_of_another_user(pid) if os.geteuid() == 0 else 0
    except OSError:  # it has ended
        return None
    if value < _IS_MARK:
        return None
    return (value ^ _IS_MARK) >> _PID_BITS, value & ((1 << _PID_BITS) - 1)


def _limit_of_another_user(pid: int) -> int:
    """Return the limit of a process to which root in a container has no other access, although it may kill it."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/limits") as lines:
        for line in lines:
            if line.startswith("Max realtime timeout"):
                soft = line.split()[3]
                return int(soft) if soft.isdecimal() else 0
    return 0


def _is_running(pid: int) -> bool:
    """Return whether a process runs. One that has ended stays in the list until its parent has asked for its end."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    return False


def _owners(family: int) -> dict[int, int]:
    """Return the running processes of a family, each with its owner. An owner owns itself."""
    if not can_mark():
        return {}
    found: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal() and (mark := _mark_of(int(name))) is not None and mark[0] == family:
            pid = int(name)
            if _is_running(pid):
                found[pid] = mark[1]
    return found


def left_over(family: int) -> dict[int, int]:
    """Return the processes whose owner has ended, with that owner."""
    found = _owners(family)
    return {pid: owner for pid, owner in found.items() if found.get(owner) != owner}


class Ending:
    """Ends the processes of an owner: SIGTERM for each, and SIGKILL for those that are there after some time.

    Processes that start meanwhile, as those of a pool do, are ended with the others.
    """

    def __init__(self) -> None:
        """Start the clock."""
        self._asked: set[int] = set()
        self._begun = time.monotonic()

    def step(self, found: Collection[int]) -> bool:
        """Send signals to the processes that are left, and return whether there is nothing more to do.

        If there is, call it again soon, with those that are left then.
        """
        passed = time.monotonic() - self._begun
        for pid in found:
            if passed >= _GRACE_S or pid not in self._asked:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGTERM if passed < _GRACE_S else signal.SIGKILL)
        self._asked.update(found)
        return not found or passed >= _GRACE_S + _GIVE_UP_S


def _end(find: Callable[[], Collection[int]]) -> list[int]:
    ending = Ending()
    while not ending.step(found := find()):
        time.sleep(_POLL_S)
    return list(found)


def end_owned_by(family: int, owners: Collection[int]) -> list[int]:
    """End owners, what they have started, and what owners have left that have ended before.

    Blocks for some seconds at most; returns what can't be ended.
    """

    def find() -> list[int]:
        found = _owners(family)
        return [pid for pid, owner in found.items() if owner in owners or found.get(owner) != owner]

    return _end(find)


def end_left_over() -> None:
    """End the processes of this process's family whose owner has ended. Blocks for some seconds at most."""
    family = _inherited_family()
    if family is not None:
        end_owned_by(family, ())


def end_started() -> None:
    """End what this process has started. Blocks for some seconds at most."""
    family = _inherited_family()
    if family is None:
        return
    own = os.getpid()
    tracker = sys.modules.get("multiprocessing.resource_tracker")
    # It ignores SIGTERM, and ends with this process after it has removed what others have left.
    kept = {own, tracker and getattr(tracker, "_resource_tracker")._pid}  # noqa: B009
    _end(lambda: [pid for pid, owner in _owners(family).items() if owner == own and pid not in kept])


def end_group(pid: int) -> None:
    """Kill what is left of the process group of an owner that has ended, where processes can't be marked."""
    if not can_mark():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


class Keeper:
    """A family and its keeper. Use :meth:`shared`."""

    _shared: Keeper | None = None
    _lock = threading.Lock()

    @classmethod
    def shared(cls) -> Keeper:
        """Return the keeper of this process. The first call starts it, and does not wait for it."""
        with cls._lock:
            if cls._shared is None or cls._shared._owner != os.getpid():  # this may be a fork of another runner
                cls._shared = cls()
            return cls._shared

    def __init__(self) -> None:
        """Start the keeper."""
        self.family = int.from_bytes(os.urandom(_FAMILY_BITS // 8), "big")
        self._owner = os.getpid()
        if not can_mark():
            return
        import subprocess  # the keeper itself does not need it

        with fork_lock:
            read_end, self._lifeline = os.pipe()  # open until this process has ended
            try:
                process = subprocess.Popen(
                    [sys.executable, "-I", "-S", __file__, str(read_end), str(self._owner), str(self.family)],
                    cwd="/",
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                    pass_fds=[read_end],
                )
            except BaseException:
                os.close(self._lifeline)
                raise
            finally:
                os.close(read_end)
        threading.Thread(target=process.wait, name="luminosity-keeper", daemon=True).start()


def _keep(pipe: int, runner: int, family: int) -> None:
    """Wait until the pipe closes or the runner has ended, then end the family."""
    if os.fork():
        os._exit(0)  # the keeper is not a child of the runner: Ray kills the children of an actor's process
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends soon after the runner
    join(family)  # it must not count as a process of the worker in which the runner may be
    waiting = select.poll()
    waiting.register(pipe, 0)  # the kernel tells of its end
    # Processes that the runner has forked hold the pipe, too.
    with contextlib.suppress(OSError, AttributeError):
        waiting.register(os.pidfd_open(runner), select.POLLIN)
    if os.path.exists(f"/proc/{runner}"):
        waiting.poll()
    _end(lambda: _owners(family).keys() - {os.getpid()})


if __name__ == "__main__":
    _keep(*map(int, sys.argv[1:4]))
