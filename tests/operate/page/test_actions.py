"""Actions of the page: who may act, on which runs, and what is written down. The application is called in-process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from luminosity.operate.page import audit
from luminosity.operate.page.app import Sources, app_of
from luminosity.operate.page.audit import Audit
from luminosity.operate.web_server import bind
from luminosity.runs.journal import Action
from luminosity.runs.recorder import Recorder
from tests.operate.page.asking import ACCESS, COOKIE, TOKEN, Answer, ask
from tests.operate.page.one_run import RUN, STARTED, ended, happenings, snapshot

_ACT = f"/api/runs/{RUN}/act"
_PAGE = {
    "host": "127.0.0.1:4747",
    "origin": "http://127.0.0.1:4747",
    "sec-fetch-site": "same-origin",
    "cookie": COOKIE,
    "content-type": "application/json",
    "authorization": f"Bearer {ACCESS.action_token}",
}
_STOP = {"action": "stop", "confirmed": RUN}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def taken() -> list[Action]:
    """The requests that the run has got."""
    return []


@pytest.fixture
def live(folder: Path, taken: list[Action]) -> Recorder:
    """The recorder of a run under way, in this process."""
    return _run(folder, taken)


def _run(folder: Path, taken: list[Action], checkpoint: str = "") -> Recorder:
    recorder = Recorder(folder, taken.append)
    for event in [replace(STARTED, checkpoint_dir=checkpoint), *happenings()]:
        recorder(event)
    return recorder


@pytest.fixture
def app(folder: Path) -> Any:
    return app_of(Sources(folder, can_act=True), ACCESS)


def act(app: Any, asked: Any = None, target: str = _ACT, method: str = "POST", **change: str) -> Answer:
    """Ask as the page does, but for what is changed; an empty header is left out."""
    headers = {**_PAGE, **{name.replace("_", "-"): value for name, value in change.items()}}
    body = asked if isinstance(asked, bytes) else json.dumps(_STOP if asked is None else asked).encode()
    return ask(app, target, {name: value for name, value in headers.items() if value}, method, body=body)


def written(folder: Path) -> list[dict[str, str]]:
    path = Audit(folder).path
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_run_is_asked_to_end_and_that_is_written_down(
    app: Any, folder: Path, live: Recorder, taken: list[Action]
) -> None:
    assert ask(app, f"/api/runs/{RUN}/actions").json == {"actions": ["stop"], "why": "", "done": []}
    answer = act(app)
    assert answer.status == 200
    assert answer.json["message"] == "The run was asked to end. It has no checkpoint."
    assert "access-control-allow-origin" not in answer.headers
    assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
    live(snapshot(8.0, 260))
    assert taken == ["stop"]
    (line,) = written(folder)
    assert line.items() >= {"run": RUN, "action": "stop", "title": "reviews.py"}.items()
    assert line["result"].startswith("done: ")
    assert line["user"]
    assert line["at"]
    assert Audit(folder).path.stat().st_mode & 0o777 == 0o600
    assert ask(app, f"/api/runs/{RUN}/actions").json["done"] == [line]
    assert act(app, authorization=f"Bearer {TOKEN}", cookie="").status == 200  # a script with the token itself


def test_a_durable_run_can_be_drained(app: Any, folder: Path, taken: list[Action], tmp_path: Path) -> None:
    recorder = _run(folder, taken, str(tmp_path / "checkpoint"))
    assert ask(app, f"/api/runs/{RUN}/actions").json["actions"] == ["stop", "drain", "save"]
    assert act(app, {"action": "drain", "confirmed": RUN}).status == 200
    recorder(snapshot(8.0, 260))
    assert taken == ["drain"]


@pytest.mark.parametrize(
    ("status", "change"),
    [
        (401, {"authorization": ""}),  # the cookie alone, which browsers send by themselves
        (401, {"authorization": "Bearer wrong"}),
        (401, {"authorization": f"Basic {ACCESS.action_token}"}),
        (401, {"authorization": f"Bearer {ACCESS.cookie_value}"}),
        (401, {"authorization": "", "target": f"{_ACT}?token={TOKEN}"}),  # in the address, where it is logged
        (401, {"authorization": "", "cookie": f"{COOKIE}; token={ACCESS.action_token}"}),
        (403, {"origin": ""}),
        (403, {"origin": "null"}),
        (403, {"origin": "http://example.org"}),
        (403, {"origin": "http://127.0.0.1:8888"}),
        (403, {"sec_fetch_site": "cross-site"}),
        (403, {"sec_fetch_site": "same-site"}),
        (403, {"sec_fetch_site": "none"}),
        (421, {"host": "rebound.example.org:4747", "origin": "http://rebound.example.org:4747"}),
        (415, {"content_type": "application/x-www-form-urlencoded"}),
        (415, {"content_type": "text/plain"}),  # the kinds that a form of another site can send
        (415, {"content_type": "multipart/form-data"}),
        (415, {"content_type": ""}),
        (405, {"method": "GET"}),
        (405, {"method": "PUT"}),
        (405, {"method": "OPTIONS"}),
    ],
)
def test_only_this_page_acts(
    app: Any, folder: Path, live: Recorder, taken: list[Action], status: int, change: dict[str, Any]
) -> None:
    answer = act(app, **change)
    assert answer.status == status
    assert "expected" in answer.json["error"]
    assert "access-control-allow-origin" not in answer.headers
    live(snapshot(8.0, 260))
    assert taken == []
    assert written(folder) == []


def test_a_form_of_another_site_does_nothing(app: Any, live: Recorder, taken: list[Action]) -> None:
    form = {"origin": "http://example.org", "sec_fetch_site": "cross-site", "authorization": ""}
    answer = act(app, b"action=stop", content_type="application/x-www-form-urlencoded", **form)
    assert answer.status == 403
    live(snapshot(8.0, 260))
    assert taken == []


def test_a_page_that_only_reads_takes_no_action(folder: Path, live: Recorder, taken: list[Action]) -> None:
    app = app_of(Sources(folder), ACCESS)
    answer = act(app)
    assert answer.status == 403
    assert "only reads" in answer.json["error"]
    assert ask(app, f"/api/runs/{RUN}/actions").json == {"actions": [], "why": "This page only reads.", "done": []}
    opened = ask(app, f"/runs?token={TOKEN}", {"host": "localhost:4747"})
    assert opened.headers["location"] == "/runs"
    live(snapshot(8.0, 260))
    assert taken == []


def test_the_token_for_actions_goes_only_to_who_has_the_token(app: Any) -> None:
    opened = ask(app, f"/runs?token={TOKEN}", {"host": "localhost:4747"})
    assert opened.headers["location"] == f"/runs#act={ACCESS.action_token}"
    for target in ("/runs?token=wrong", f"/runs?token={ACCESS.once()}"):  # with the cookie; others may have seen it
        assert ask(app, target).headers["location"] == "/runs"
    assert ACCESS.action_token not in ask(app, "/runs").body.decode()


def test_a_browser_of_this_user_acts_with_a_token_that_counts_once(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with bind(port=0) as listener:
        listener.listen()
        with socket.create_connection(listener.getsockname()) as client:
            ends = {"client": client.getsockname(), "server": listener.getsockname()}
            host = {"host": "localhost:4747"}
            opened = ask(app, f"/runs?token={ACCESS.once()}", host, **ends)
            assert opened.headers["location"] == f"/runs#act={ACCESS.action_token}"
            monkeypatch.setattr(os, "geteuid", lambda: 12_345)  # as if the connection were another user's
            opened = ask(app, f"/runs?token={ACCESS.once()}", host, **ends)
            assert (opened.status, opened.headers["location"]) == (303, "/runs")
            monkeypatch.undo()
            elsewhere = ends | {"client": ("10.0.0.7", ends["client"][1])}
            assert ask(app, f"/runs?token={ACCESS.once()}", host, **elsewhere).headers["location"] == "/runs"
        opened = ask(app, f"/runs?token={ACCESS.once()}", host, client=("127.0.0.1", 1), server=ends["server"])
        assert opened.headers["location"] == "/runs"  # no such connection


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b"[" * 4_000,
        b'"stop"',
        {},
        {"action": "stop"},  # without a confirmation
        {"action": "stop", "confirmed": "20260301T101500-000000"},  # of another run
        {"action": "stop", "confirmed": True},
        {"action": "kill", "confirmed": RUN},
        {"action": ["stop"], "confirmed": RUN},
        {"action": "stop", "confirmed": RUN, "signal": "9"},
    ],
)
def test_another_request_is_refused(app: Any, live: Recorder, taken: list[Action], body: Any) -> None:
    assert act(app, body).status == 400
    live(snapshot(8.0, 260))
    assert taken == []


def test_a_large_request_is_refused(app: Any, live: Recorder) -> None:
    assert act(app, b" " * 5_000).status == 413


@pytest.mark.parametrize("run", ["..%2f..%2fetc", "last", f"{RUN}.json", "20260301T101500-000000", "", "%00"])
def test_another_run_is_not_found(app: Any, folder: Path, live: Recorder, run: str) -> None:
    assert act(app, target=f"/api/runs/{run}/act").status == 404
    assert act(app, target="/api/runs/../../etc/passwd/act").status == 405  # no address of an action
    assert not [path for path in folder.parent.rglob("*.request*") if path.parent != folder]


def test_runs_that_are_over_or_not_own_take_no_action(
    app: Any, folder: Path, live: Recorder, taken: list[Action], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / f"{RUN}.json"
    whole = json.loads(path.read_text())
    began = whole["process"]["began"]
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        pid_of = {
            "another process has its number": {"pid": other.pid, "began": began},
            "of which nobody knows when it began": {"pid": other.pid, "began": ""},
            "on another machine": {"host": "elsewhere"},
            "of another user": {"pid": 1},
        }
        for change in pid_of.values():
            path.write_text(json.dumps(whole | {"process": whole["process"] | change}))
            answer = act(app)
            assert answer.status == 409
            assert "expected" in answer.json["error"]
        other.communicate(b"\n")
    path.write_text(json.dumps(whole))
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 12_345)
        assert act(app).status in (403, 503)  # neither the run nor the file for what is written down is own
    path.rename(folder / "elsewhere")
    path.symlink_to(folder / "elsewhere")
    assert act(app).status == 403
    path.unlink()
    (folder / "elsewhere").rename(path)
    live(ended())
    answer = act(app)
    assert (answer.status, taken) == (409, [])
    assert "is failed, expected one that runs" in answer.json["error"]
    assert [line["result"].partition(":")[0] for line in written(folder)][-1] == "refused"
    path.write_text("{")
    assert act(app).status == 409


@pytest.mark.parametrize("name", ["", "../x", "/tmp/x", "a/b", "..", ".hidden", "x\0", "x\n", "-x", "a" * 101, "é"])
def test_hostile_names_of_savepoints_are_refused(app: Any, folder: Path, tmp_path: Path, name: str) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    _run(folder, [], str(checkpoint))
    answer = act(app, {"action": "save", "confirmed": RUN, "name": name})
    assert answer.status == 400
    assert "expected up to 100 letters" in answer.json["error"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "runs"]
    assert list(checkpoint.iterdir()) == []


def test_a_run_without_a_checkpoint_has_no_savepoints(app: Any, folder: Path, live: Recorder, tmp_path: Path) -> None:
    for action in ("save", "drain"):
        answer = act(app, {"action": action, "confirmed": RUN, "name": "x"})
        assert answer.status == 409
        assert "--checkpoint_dir" in answer.json["error"]
    _run(folder, [], str(tmp_path / "gone"))
    assert "no run at work" in act(app, {"action": "save", "confirmed": RUN, "name": "x"}).json["error"]


def test_the_audit_file_is_bounded_and_without_it_nothing_is_done(
    app: Any, folder: Path, live: Recorder, taken: list[Action], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "_MOST_BYTES", 4_000)
    monkeypatch.setattr(audit, "_KEPT_BYTES", 2_000)
    book = Audit(folder)
    for number in range(100):
        book.write(RUN, "stop", f"done: {number}", name="x" * 10_000)
        assert book.path.stat().st_size <= 4_000
    lines = written(folder)
    assert lines[-1]["result"] == "done: 99"
    assert 3 <= len(lines) < 20
    assert book.lines(RUN)[0]["result"] == "done: 99"
    assert book.lines("20260301T101500-000000") == []
    book.path.unlink()
    book.path.symlink_to(folder / "elsewhere")
    assert act(app).status == 503
    live(snapshot(8.0, 260))
    assert taken == []
    assert not (folder / "elsewhere").exists()
