"""``lum ui`` and ``lum run --ui`` as processes, with requests over the loopback."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest

from luminosity.operate.web_server import TOKEN_FILE, Access
from luminosity.runs.recorder import Recorder
from tests.operate.page.one_run import RUN, STARTED, ended, happenings
from tests.processes import wait_for
from tests.warm import WarmProcess

pytestmark = pytest.mark.alone  # looks at processes that are left

_TIMEOUT_S = 60.0


@dataclass
class Server:
    process: WarmProcess
    port: int
    token: str

    def ask(self, target: str, method: str = "GET", **headers: str) -> http.client.HTTPResponse:
        """Send one request with these headers, of which Host is the only usual one; return the response."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_TIMEOUT_S)
        connection.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
        for name, value in ({"Host": f"127.0.0.1:{self.port}"} | headers).items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        return connection.getresponse()

    @property
    def cookie(self) -> str:
        access = Access(self.token, self.port)
        return f"{access.cookie_name}={access.cookie_value}"


@contextlib.contextmanager
def _started(folder: Path, stream: str, *words: str) -> Iterator[tuple[WarmProcess, str]]:
    """Start a command of ``lum``; yield its process and the first line that it writes to a stream; end it."""
    said = folder / f"{stream}.txt"
    with open(said, "w") as file:
        process = WarmProcess(
            *("luminosity.cli.main", *words),
            cwd=folder,
            env={**os.environ, "LUMINOSITY_DRIFT_DIR": str(folder / "drift")},
            stdout=file if stream == "stdout" else None,
            stderr=file if stream == "stderr" else None,
        )
    try:
        assert wait_for(lambda: "\n" in said.read_text(), _TIMEOUT_S)
        yield process, said.read_text().partition("\n")[0]
    finally:
        process.terminate()
        process.wait(timeout=_TIMEOUT_S)


@contextlib.contextmanager
def served(folder: Path, port: int = 0) -> Iterator[Server]:
    words = ("ui", "--no-browser", "--port", str(port), "--run_dir", str(folder))
    with _started(folder.parent, "stdout", *words) as (process, said):
        match = re.search(r"at http://127\.0\.0\.1:(\d+)/runs\?token=([\w-]+)$", said)
        assert match is not None
        yield Server(process, int(match[1]), match[2])


def _next_event(response: http.client.HTTPResponse) -> tuple[str, str]:
    """Return the number and the kind of the next event that has a number."""
    number = ""
    while line := response.readline().decode():
        name, _, value = line.rstrip().partition(": ")
        if name == "id":
            number = value
        elif number and name == "data":
            return number, json.loads(value)["event"]
    raise AssertionError("the stream has ended")


def test_strangers_are_refused_and_pages_survive_a_restart(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    recorder = Recorder(folder)
    for event in [STARTED, *happenings()]:
        recorder(event)
    with served(folder) as server:
        opened = server.ask(f"/runs?token={server.token}")
        assert opened.status == 303
        assert re.fullmatch(r"/runs#act=[\w-]{43}", opened.getheader("Location") or "")
        cookie = (opened.getheader("Set-Cookie") or "").partition(";")[0]
        assert server.ask("/api/runs", Cookie=cookie).status == 200
        assert server.ask("/api/runs").status == 401
        assert server.ask("/api/runs", Cookie=cookie, Host="rebound.example.org").status == 421
        assert server.ask("/api/runs", Cookie=cookie, Origin="http://example.org").status == 403
        assert server.ask("/api/runs", "POST", Cookie=cookie).status == 405
        assert server.ask(f"/api/runs/{RUN}/act", "POST", Cookie=cookie).status == 403
        for target in ("/static/../access.py", "/static/%2e%2e/access.py", "/static/..%2faccess.py", "/static/%00"):
            assert server.ask(target, Cookie=cookie).status == 404
        upgrade = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec_WebSocket_Key": "x", "Cookie": cookie}
        assert server.ask("/api/runs", **upgrade).status < 500  # no WebSocket is opened

        events = server.ask(f"/api/runs/{RUN}/events?after=5", Cookie=cookie)
        assert _next_event(events) == ("6", "Snapshot")
        server.process.send_signal(signal.SIGINT)  # while a client waits for events
        assert server.process.wait(timeout=_TIMEOUT_S) == 0

    recorder(ended())
    with served(folder, server.port) as restarted:
        events = restarted.ask(f"/api/runs/{RUN}/events?after=5", Cookie=cookie, Last_Event_ID="6")
        assert _next_event(events) == ("7", "RunEnded")
        assert b'event: state\ndata: {"state":"failed"}' in events.read()  # it ends
        again = restarted.ask(f"/api/runs/{RUN}/events?after=5", Cookie=cookie, Last_Event_ID="7")
        assert again.status == 204


_SAVING = """
import os, sys, time
from types import SimpleNamespace
from luminosity.cli.main import main
from luminosity.engine.durable.upkeep import saving
from luminosity.runs import run_ids

def save(folder, name):  # as a large checkpoint
    open("saving", "w").close()
    while not os.path.exists("go on"):
        time.sleep(0.02)
    return SimpleNamespace(savepoint=SimpleNamespace(name=name, folder=folder, sizes=lambda: (1, 1)))

saving.save, run_ids.is_at_work = save, lambda folder: True
sys.exit(main(["ui", "--no-browser", "--port=0", "--run_dir=runs"]))
"""


def test_ctrl_c_while_a_savepoint_is_saved_waits_for_it(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "runs")
    recorder(replace(STARTED, checkpoint_dir=str(tmp_path / "checkpoint")))
    (tmp_path / "script.py").write_text(_SAVING)
    with _started(tmp_path, "stdout", "run", "script.py") as (process, line):
        match = re.search(r"127\.0\.0\.1:(\d+)/runs\?token=([\w-]+)$", line)
        assert match is not None
        origin = f"http://127.0.0.1:{match[1]}"
        headers = {"Authorization": f"Bearer {match[2]}", "Origin": origin, "Content-Type": "application/json"}
        connection = http.client.HTTPConnection("127.0.0.1", int(match[1]), timeout=_TIMEOUT_S)
        body = json.dumps({"action": "save", "confirmed": RUN, "name": "x"})
        connection.request("POST", f"/api/runs/{RUN}/act", body, headers)
        assert wait_for((tmp_path / "saving").exists, _TIMEOUT_S)
        process.send_signal(signal.SIGINT)
        answer = connection.getresponse()
        assert answer.status == 503
        assert "save goes on to its end" in json.loads(answer.read())["error"]
        assert process.poll() is None
        (tmp_path / "go on").touch()
        assert process.wait(timeout=_TIMEOUT_S) == 0
    (written,) = (tmp_path / "runs").glob("page-actions-*.jsonl")
    results = [json.loads(line)["result"] for line in written.read_text().splitlines()]
    assert results[0] == "begun"
    assert results[1].startswith("done: Saved x")


_SCRIPT = """
import os, sys, time
open("started", "w").close()
while not os.path.exists("go on"):
    time.sleep(0.05)
sys.exit(3)
"""


def test_read_only_is_about_the_page(tmp_path: Path) -> None:
    with _started(tmp_path, "stderr", "run", "--read-only", "script.py") as (process, line):
        assert "found --read-only without --ui" in line
        assert process.wait(timeout=_TIMEOUT_S) == 2


@pytest.mark.parametrize("is_killed", [False, True])
def test_the_page_beside_a_run_ends_with_it(tmp_path: Path, is_killed: bool) -> None:
    (tmp_path / "script.py").write_text(_SCRIPT)
    of_page = ("--ui", "--read-only") if is_killed else ("--ui",)
    words = ("run", *of_page, "script.py", "--run_dir=runs")
    with _started(tmp_path, "stderr", *words) as (process, line):
        token = (tmp_path / "runs" / TOKEN_FILE).read_text()
        match = re.search(r"is at http://127\.0\.0\.1:(\d+)/runs\?token=TOKEN", line)
        assert match is not None, line
        assert token not in line  # the output may be a log
        server = Server(process, int(match[1]), token)
        assert server.ask("/api/runs", Cookie=server.cookie).status == 200
        place = server.ask(f"/runs?token={token}").getheader("Location") or ""
        assert place.startswith("/runs#act=") is not is_killed
        children = psutil.Process(process.pid).children()
        (page,) = [each for each in children if "luminosity.operate.page.beside" in each.cmdline()]
        assert token not in " ".join(page.cmdline())
        assert token not in page.environ().values()
        if is_killed:
            process.kill()
            process.wait(timeout=_TIMEOUT_S)
        else:
            (tmp_path / "go on").touch()
            assert process.wait(timeout=_TIMEOUT_S) == 3
        assert psutil.wait_procs([page], timeout=_TIMEOUT_S)[1] == []
        with pytest.raises(ConnectionRefusedError):
            server.ask("/api/runs", Cookie=server.cookie)
