"""The serving process of a run: found, started, protected, and gone after its last client."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import tempfile
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest

from luminosity._shared import descendants
from luminosity.errors import HostUnavailable
from luminosity.inference.files.locks import try_exclusive
from luminosity.inference.ipc import client, server
from luminosity.inference.ipc import folder as folders
from luminosity.inference.ipc.channel import Channel, ConnectionClosed
from luminosity.inference.ipc.client import connect as connect_to_host
from luminosity.inference.ipc.client import last_output
from luminosity.inference.ipc.folder import HostFolder, remove_abandoned
from luminosity.inference.ipc.pickling import pickle_with_buffers
from luminosity.inference.ipc.server import serve
from luminosity.inference.ipc.sockets import AuthenticationFailed, prove_as_client, prove_as_host
from tests.inference.ipc.ipc_services import echo
from tests.processes import wait_for

_ECHO = "tests.inference.ipc.ipc_services:echo"
_WAIT_S = 60.0
_IDLE_S = 0.3

connect = functools.partial(connect_to_host, idle_seconds=_IDLE_S)


@pytest.fixture
def run_id() -> Iterator[str]:
    made = uuid.uuid4().hex
    yield made
    assert wait_for(lambda: not os.path.exists(HostFolder(made).path), _WAIT_S), "the folder of the host is still there"


@pytest.fixture
def own_temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A short path that only this test uses."""
    with tempfile.TemporaryDirectory(prefix="machine-", dir="/tmp") as path:
        monkeypatch.setattr(tempfile, "tempdir", path)
        yield path


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    one, other = (Channel(end) for end in socket.socketpair())
    with one, other:
        yield one, other


@contextlib.contextmanager
def served_here(run_id: str) -> Iterator[HostFolder]:
    """Run a host in a thread of this process, which starts faster than a process."""
    folder = HostFolder(run_id)
    folder.make()
    stop = threading.Event()
    thread = threading.Thread(target=serve, args=(folder, echo), kwargs={"stop": stop, "idle_seconds": 60})
    thread.start()
    assert wait_for(lambda: os.path.exists(folder.socket), _WAIT_S)
    try:
        yield folder
    finally:
        stop.set()
        thread.join(_WAIT_S)
    assert not thread.is_alive()


def ask(channel: Channel, what: str, argument: Any = None) -> Any:
    channel.send((what, argument))
    return channel.recv(timeout=_WAIT_S)


def sent(pair: tuple[Channel, Channel], message: Any) -> Any:
    """Send a message through the pair, in a thread: sending a large pickle blocks until it is received."""
    thread = threading.Thread(target=pair[0].send, args=(message,))
    thread.start()
    received = pair[1].recv(timeout=_WAIT_S)
    thread.join(_WAIT_S)
    return received


def is_gone(pid: int) -> bool:
    """Return whether the process has ended and is not left as a zombie."""
    return not psutil.pid_exists(pid)


def number_of_descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def _ask_pid_and_wait(run_id: str, start: Any, pids: Any) -> None:
    start.wait(_WAIT_S)
    with connect(run_id, _ECHO) as channel:
        pids.put(ask(channel, "pid"))
        threading.Event().wait(_WAIT_S)


def test_processes_that_come_at_once_get_one_host_and_it_goes_when_all_are_killed(run_id: str) -> None:
    context = multiprocessing.get_context("fork")
    start, pids = context.Event(), context.Queue()
    workers = [context.Process(target=_ask_pid_and_wait, args=(run_id, start, pids)) for _ in range(8)]
    for worker in workers:
        worker.start()
    start.set()
    (pid,) = {pids.get(timeout=_WAIT_S) for _ in workers}
    assert f"-m luminosity.inference.ipc {run_id} {_ECHO}" in " ".join(psutil.Process(pid).cmdline())
    for worker in workers:
        worker.kill()
        worker.join(_WAIT_S)
    assert wait_for(lambda: is_gone(pid), _WAIT_S)


def test_after_a_kill_the_next_gets_a_new_host(run_id: str) -> None:
    with connect(run_id, _ECHO) as channel:
        first = ask(channel, "pid")
        os.kill(first, signal.SIGKILL)
        with pytest.raises(ConnectionClosed):
            channel.recv(timeout=_WAIT_S)
    with connect(run_id, _ECHO) as channel:
        second = ask(channel, "pid")
        assert second != first
        os.kill(second, signal.SIGINT)  # which is not for it
        assert ask(channel, "pid") == second
        os.kill(second, signal.SIGTERM)
        with pytest.raises(ConnectionClosed):
            channel.recv(timeout=_WAIT_S)
    assert wait_for(lambda: is_gone(first) and is_gone(second), _WAIT_S), "a host or its folder is still there"


def _work(family: int, run_id: str, seen: Any) -> None:
    descendants.join(family)
    with connect(run_id, _ECHO) as channel:
        first = ask(channel, "start")
        os.kill(ask(channel, "pid"), signal.SIGKILL)
    wait_for(lambda: is_gone(first), _WAIT_S)
    with connect_to_host(run_id, _ECHO, idle_seconds=_WAIT_S) as channel:
        seen.send((first, ask(channel, "start"), ask(channel, "pid")))


def _run_a_worker(run_id: str, seen: Any) -> None:
    family = descendants.Keeper.shared().family
    worker = multiprocessing.get_context("fork").Process(target=_work, args=(family, run_id, seen))
    worker.start()
    worker.join(_WAIT_S)
    descendants.end_owned_by(family, [worker.pid or 0])
    seen.send("the worker has ended")
    threading.Event().wait(_WAIT_S)


def test_a_host_outlives_its_worker_but_not_the_runner_and_what_it_starts_does_not_outlive_it(run_id: str) -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    runner = context.Process(target=_run_a_worker, args=(run_id, theirs))
    runner.start()
    try:
        assert ours.poll(_WAIT_S)
        of_killed, started, host = ours.recv()
        assert is_gone(of_killed)
        assert ours.poll(_WAIT_S)
        assert ours.recv() == "the worker has ended"
        assert not is_gone(started)
        assert not is_gone(host)
    finally:
        runner.kill()
        runner.join(_WAIT_S)
    assert wait_for(lambda: is_gone(started) and is_gone(host), _WAIT_S)


def test_hosts_that_are_killed_before_they_are_ready_are_started_again(
    run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[int] = []

    class FirstTwoAreKilled(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            if len(killed) < 2:
                killed.append(self.pid)
                self.kill()

    monkeypatch.setattr(client.subprocess, "Popen", FirstTwoAreKilled)
    with connect(run_id, _ECHO) as channel:
        assert ask(channel, "pid") not in killed
    assert len(killed) == 2


def test_a_forked_child_does_not_keep_the_connection(pair: tuple[Channel, Channel]) -> None:
    context = multiprocessing.get_context("fork")
    waiting, leave = context.Pipe(duplex=False)
    child = context.Process(target=waiting.poll, args=(_WAIT_S,))
    child.start()
    assert sent(pair, "still there") == "still there"
    pair[0].close()
    with pytest.raises(ConnectionClosed):
        pair[1].recv(timeout=_WAIT_S)
    leave.send(True)
    child.join(_WAIT_S)
    assert child.exitcode == 0


def test_two_runs_do_not_meet_and_an_error_ends_one_connection(run_id: str, caplog: Any) -> None:
    other = uuid.uuid4().hex
    with served_here(run_id), served_here(other):
        with connect(run_id, _ECHO) as one, connect(run_id, _ECHO) as two, connect(other, _ECHO) as three:
            one.send(("raise", "an error of the talk"))
            with pytest.raises(ConnectionClosed):
                one.recv(timeout=_WAIT_S)
            assert ask(two, "echo", 2) == 2
            assert ask(three, "echo", 3) == 3
        assert HostFolder(run_id).secret() != HostFolder(other).secret()
    assert "an error of the talk" in caplog.text


def test_a_host_that_cannot_start_says_why() -> None:
    run_id = uuid.uuid4().hex
    with pytest.raises(HostUnavailable, match=r"(?s)exited with code 1 .*No module named 'tests.no_such'"):
        connect(run_id, "tests.no_such:talk")
    HostFolder(run_id).remove()


class Bomb:
    """Leaves a mark when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


def _stranger(folder: HostFolder) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(_WAIT_S)
    connection.connect(folder.socket)
    return connection


def _is_refused(connection: socket.socket) -> bool:
    """Check that the host sends only its greeting of 40 bytes, and then disconnects."""
    received = b""
    with connection, contextlib.suppress(ConnectionResetError):
        while data := connection.recv(4096):
            received += data
    return len(received) == 40


def test_strangers_are_refused_and_hold_nobody_up(run_id: str, tmp_path: Path, caplog: Any) -> None:
    with served_here(run_id) as folder:
        silent = [_stranger(folder) for _ in range(5)]
        for said in (b"GET / HTTP/1.1\r\n\r\n" * 10, pickle.dumps(Bomb(str(tmp_path / "exploded"))) * 10):
            connection = _stranger(folder)
            connection.sendall(said)
            assert _is_refused(connection)
        with _stranger(folder) as connection, pytest.raises(ConnectionError):
            prove_as_client(connection, b"guessed")
        with connect(run_id, _ECHO) as channel:
            assert ask(channel, "echo", "hello") == "hello"
        for connection in silent:
            connection.close()
        secret = folder.secret()
    assert not (tmp_path / "exploded").exists()
    assert caplog.text.count("does not know the secret") == 1
    assert secret.hex() not in caplog.text


def test_a_host_takes_no_more_strangers_than_it_can_bear(run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_MOST_UNAUTHENTICATED", 2)
    monkeypatch.setattr(server, "prove_as_host", functools.partial(prove_as_host, timeout=_WAIT_S))
    with served_here(run_id) as folder:
        silent = [_stranger(folder) for _ in range(2)]
        for connection in silent:
            assert len(connection.recv(40, socket.MSG_WAITALL)) == 40
        # The last attempt before the timeout may be too short to receive the reason.
        assert wait_for(lambda: "limit of connections" in _refusal(run_id), _WAIT_S)
        for connection in silent:
            connection.close()
        with connect(run_id, _ECHO) as channel:
            assert ask(channel, "echo", "hello") == "hello"


def _refusal(run_id: str) -> str:
    with pytest.raises(HostUnavailable) as caught:
        connect(run_id, _ECHO, timeout=0.1)
    return str(caught.value)


def test_what_only_linux_has_is_not_needed(run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.delattr(socket, "SO_PEERCRED", raising=False)
    with served_here(run_id), connect(run_id, _ECHO) as channel:
        array = np.arange(100_000)
        assert np.array_equal(ask(channel, "echo", array), array)


@pytest.mark.parametrize("answers", ["zeros", "what the client said"])
def test_a_false_host_is_refused(answers: str) -> None:
    here, there = socket.socketpair()

    def lie() -> None:
        there.sendall(b"lumhost1" + bytes(32))
        proof = there.recv(64, socket.MSG_WAITALL)[32:]
        there.sendall(bytes(32) if answers == "zeros" else proof)

    liar = threading.Thread(target=lie)
    liar.start()
    with here, there:
        with pytest.raises(AuthenticationFailed, match="does not know the secret"):
            prove_as_client(here, b"secret", _WAIT_S)
        liar.join(_WAIT_S)


def test_silence_is_not_waited_for() -> None:
    here, there = socket.socketpair()
    with here, there, pytest.raises(AuthenticationFailed, match="0 bytes of 64"):
        prove_as_host(here, b"secret", timeout=0.05)


def test_arrays_and_warnings_come_from_a_host_that_goes_with_its_client(run_id: str, caplog: Any, capfd: Any) -> None:
    with connect(run_id, _ECHO) as channel:
        pid = ask(channel, "pid")
        ask(channel, "warn", "the model is odd")
        assert ("tests.host", logging.WARNING, "the model is odd") in caplog.record_tuples
        assert "the model is odd" in last_output(run_id)
        array = np.random.default_rng(0).random(50_000_000 // 8)
        fixed = array[:20_000].copy()
        fixed.flags.writeable = False
        column = pa.array(range(100_000))
        back, back_fixed, back_column = ask(channel, "echo", (array, fixed, column))
        assert np.array_equal(back, array)
        assert back_column.equals(column)
        assert (back.flags.writeable, back_fixed.flags.writeable) == (True, False)
        back += 1  # and no other array sees it
        assert np.array_equal(ask(channel, "echo", array), array)
        before, theirs = number_of_descriptors(), ask(channel, "descriptors")
        kept = [ask(channel, "echo", np.full(20_000, n)) for n in range(300)]
        # Other threads of this process may open or close descriptors meanwhile.
        assert number_of_descriptors() < before + 100, "mapped memory keeps a descriptor open"
        assert ask(channel, "descriptors") == theirs
        assert [int(values.sum()) for values in kept] == [20_000 * n for n in range(300)]
    assert wait_for(lambda: is_gone(pid), _WAIT_S)
    assert capfd.readouterr().out == ""


def test_memory_is_freed_with_the_last_array(pair: tuple[Channel, Channel]) -> None:
    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:luminosity")

    gc.collect()  # What other tests have left behind.
    before = mappings()
    first, second = sent(pair, (np.zeros(50_000), pa.array(range(50_000))))
    assert mappings() == before + 1
    del first
    assert mappings() == before + 1
    assert second[49_999].as_py() == 49_999
    del second
    assert mappings() == before


@pytest.mark.parametrize(
    "message",
    [
        None,
        np.arange(10),
        [np.arange(n) for n in range(200)],
        "x" * 3_000_000,
        [np.ones((100, 100, 10)).transpose(2, 0, 1), np.ones((200, 200))[::2], np.empty(0), b"abc"],
        pa.table({"a": ["some"] * 50_000}),
    ],
    ids=["none", "small", "many", "long pickle", "strides", "table"],
)
def test_messages_arrive_as_they_were(pair: tuple[Channel, Channel], message: Any) -> None:
    np.testing.assert_equal(sent(pair, message), message)


def test_small_arrays_are_writable(pair: tuple[Channel, Channel]) -> None:
    back = sent(pair, np.arange(10))
    back[0] = 5
    assert back[0] == 5


def test_a_message_that_does_not_pickle_does_no_harm(pair: tuple[Channel, Channel]) -> None:
    with pytest.raises(TypeError, match="lock"):
        pair[0].send(threading.Lock())
    assert sent(pair, 1) == 1


def test_many_small_arrays_travel_within_the_message(pair: tuple[Channel, Channel]) -> None:
    small, large = [np.full(384, n, np.float32) for n in range(300)], np.ones(100_000)
    _, apart = pickle_with_buffers([*small, large])
    assert [buffer.raw().nbytes for buffer in apart] == [large.nbytes]
    back = sent(pair, [*small, large])
    assert all((one == other).all() for one, other in zip(back, [*small, large], strict=True))
    back[0][0] = 5  # like any other array


def test_where_nothing_comes_a_timeout_says_so(pair: tuple[Channel, Channel]) -> None:
    with pytest.raises(TimeoutError):
        pair[0].recv(timeout=0.01)
    assert sent(pair, 1) == 1


def test_closing_wakes_who_waits(pair: tuple[Channel, Channel]) -> None:
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            pair[1].recv()
        except ConnectionClosed as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    pair[1].close()
    thread.join(_WAIT_S)
    assert len(caught) == 1
    with pytest.raises(ConnectionClosed):
        pair[0].recv(timeout=_WAIT_S)
    for use in (lambda: pair[1].recv(), lambda: pair[1].recv(timeout=1), lambda: pair[1].send(1)):
        with pytest.raises(ConnectionClosed):
            use()


@pytest.mark.parametrize("level", ["base", "path"])
def test_a_folder_that_others_may_use_is_refused(own_temporary: str, level: str) -> None:
    folder = HostFolder("ab")
    folder.make()
    os.chmod(getattr(folder, level), 0o750)
    with pytest.raises(HostUnavailable, match=r"found drwxr-x---.*only user"):
        connect("ab", _ECHO)


def test_a_link_is_no_folder(own_temporary: str, tmp_path: Path) -> None:
    os.symlink(tmp_path, HostFolder("ab").base)
    with pytest.raises(HostUnavailable, match="found lrwx"):
        connect("ab", _ECHO)


def test_names_of_runs_stay_within_their_folder() -> None:
    with pytest.raises(ValueError, match="hexadecimal"):
        HostFolder("../ab")


def test_a_long_temporary_folder_is_not_used(own_temporary: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", own_temporary + "/long" * 20)
    assert HostFolder("ab").path.startswith("/tmp/luminosity-")


def test_what_killed_hosts_left_is_removed(own_temporary: str, monkeypatch: pytest.MonkeyPatch) -> None:
    abandoned = HostFolder("aa")
    abandoned.make()
    with served_here("bb") as living:
        remove_abandoned(living.base)
        assert os.path.exists(abandoned.path), "a folder that may just be created was removed"
        monkeypatch.setattr(folders, "_YOUNG_S", -1.0)
        remove_abandoned(living.base)
        assert os.path.exists(living.path)
    assert not os.path.exists(living.base)


def test_a_folder_is_made_while_another_host_removes_the_upper_one(
    own_temporary: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, look = HostFolder("ab"), os.lstat
    os.mkdir(folder.base, 0o700)

    def look_too_late(path: str) -> os.stat_result:
        monkeypatch.undo()
        os.rmdir(folder.base)
        return look(path)

    monkeypatch.setattr(os, "lstat", look_too_late)
    folder.make()
    assert os.path.isdir(folder.path)


def test_who_clears_up_is_not_in_the_way_of_a_host_that_is_being_started(own_temporary: str) -> None:
    folder = HostFolder("ab")
    folder.make()
    with try_exclusive(folder.lock):  # as a process that starts a host does
        folder.remove_if_dead(0)
        assert not os.path.exists(folder.alive), "the host would take the lock for that of another host"
    folder.remove_if_dead(0)
    assert not os.path.exists(folder.base)
