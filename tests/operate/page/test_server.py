"""The server of the page: who gets what, and the events of a run; the application is called in this process."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from luminosity.drift.history import DriftHistory
from luminosity.drift.result import PastTest
from luminosity.errors import OptionError
from luminosity.events import BundleRetried, LogMessage, RunEnded, Snapshot, StageView, WorkerLost
from luminosity.operate.cost.prices import load_prices
from luminosity.operate.page import app as page_app
from luminosity.operate.page import event_stream
from luminosity.operate.page.app import Sources, app_of
from luminosity.operate.page.event_stream import Streams
from luminosity.operate.page.run_data import RunFiles
from luminosity.operate.web_server import TOKEN_FILE, Access, bind, token_of
from luminosity.runs.recorder import Recorder
from tests.operate.page.asking import ACCESS, COOKIE, SIGNED_IN, TOKEN, ask
from tests.operate.page.one_run import RUN, STARTED, ended, happenings, snapshot

_TIMEOUT_S = 60.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def live(folder: Path) -> Recorder:
    """The recorder of a run under way."""
    recorder = Recorder(folder)
    for event in [STARTED, *happenings()]:
        recorder(event)
    return recorder


@pytest.fixture(autouse=True)
def _no_drift_of_this_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LUMINOSITY_DRIFT_DIR", str(tmp_path / "drift"))


@pytest.fixture
def app(folder: Path) -> Any:
    return app_of(Sources(folder), ACCESS)


@pytest.mark.parametrize(
    ("status", "change", "method"),
    [
        (200, {}, "GET"),
        (200, {}, "HEAD"),
        (200, {"host": "localhost:9000", "origin": "http://localhost:9000"}, "GET"),  # a forwarded port
        (200, {"host": "[::1]:4747", "sec-fetch-site": "same-origin"}, "GET"),
        (200, {"cookie": "", "authorization": f"Bearer {TOKEN}"}, "GET"),
        (421, {"host": "rebound.example.org:4747"}, "GET"),
        (421, {"host": "127.0.0.1.example.org"}, "GET"),
        (421, {"host": "10.0.0.7:4747"}, "GET"),
        (421, {"host": ""}, "GET"),
        (405, {}, "POST"),
        (405, {}, "DELETE"),
        (405, {}, "OPTIONS"),
        (403, {"origin": "http://example.org"}, "GET"),
        (403, {"origin": "http://127.0.0.1:8888"}, "GET"),
        (403, {"origin": "null"}, "GET"),
        (403, {"sec-fetch-site": "cross-site"}, "GET"),
        (403, {"sec-fetch-site": "same-site"}, "GET"),  # another port of this machine
        (401, {"cookie": ""}, "GET"),
        (401, {"cookie": f"{ACCESS.cookie_name}={TOKEN}"}, "GET"),  # the token is not the cookie
        (401, {"cookie": f"luminosity-ui-4748={Access(TOKEN, 4748).cookie_value}"}, "GET"),
        (401, {"cookie": f"{ACCESS.cookie_name}=\u00e9"}, "GET"),
        (401, {"cookie": "", "authorization": "Bearer wrong"}, "GET"),
    ],
)
def test_only_this_user_on_this_machine_reads(app: Any, status: int, change: dict[str, str], method: str) -> None:
    for target in ("/api/runs", "/api/drift"):
        answer = ask(app, target, SIGNED_IN | change, method)
        assert answer.status == status
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"
        assert TOKEN not in answer.body.decode()
        if status not in (200, 405):
            assert "expected" in answer.json["error"]


def test_a_token_becomes_a_cookie_and_leaves_the_address(app: Any) -> None:
    nobody = {"host": "localhost:4747"}
    answer = ask(app, f"/compare?a={RUN}&token={TOKEN}&b=x", nobody)
    assert (answer.status, answer.headers["location"]) == (303, f"/compare?a={RUN}&b=x")
    assert answer.headers["set-cookie"] == f"{COOKIE}; Path=/; HttpOnly; SameSite=Strict"
    assert ask(app, f"//example.org/x?token={TOKEN}", nobody).headers["location"] == "/example.org/x"
    access = Access(TOKEN, 4747)
    app, once = app_of(Sources(Path("nowhere")), access), access.once()
    assert [ask(app, f"/runs?token={once}", nobody).status for _ in range(2)] == [303, 401]
    for target in ("/runs", "/runs?token=wrong", f"/runs?token={TOKEN}&token=wrong", "/static/style.css", "/nothing"):
        answer = ask(app, target, nobody)
        assert answer.status == 401
        assert b"lum ui" in answer.body
        assert "set-cookie" not in answer.headers


@pytest.mark.parametrize(
    "target",
    [
        "/static/",
        "/static/../access.py",
        "/static/..%2faccess.py",
        "/static/%2fetc%2fpasswd",
        "/static/.",
        "/static/..",
        "/static/\0",
        "/static/index.html\0.js",
        "/static//etc/passwd",
        "/api/runs/../../etc/passwd",
        "/api/runs/..",
        "/api/runs/last",
        f"/api/runs/{RUN}.json",
        f"/api/runs/{RUN}\n",
        "/api/runs/20260301T101500-000000",
        "/api/runs/20260301T101500-000000/events",
        "/api/drift/report",
        "/api/drift/report?id=../../etc/passwd",
        "/openapi.json",
        "/runs/",
    ],
)
def test_other_paths_are_not_found(app: Any, live: Recorder, target: str) -> None:
    answer = ask(app, target)
    assert answer.status == 404
    assert answer.json["error"].startswith("found no")


def test_only_files_of_the_page_are_served(app: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "static"
    page.mkdir()
    monkeypatch.setattr(page_app, "FOLDER", page)
    assert "index.html" in ask(app, "/runs").json["error"]
    for name in ("index.html", "main.js", "style.css", "icon.svg", "notes.txt"):
        (page / name).write_text(name)
    (tmp_path / "outside.js").write_text("secret")
    (page / "link.js").symlink_to(tmp_path / "outside.js")
    (page / "folder.js").mkdir()
    for name, kind in {"main.js": "text/javascript", "style.css": "text/css", "icon.svg": "image/svg+xml"}.items():
        answer = ask(app, f"/static/{name}")
        assert (answer.status, answer.body.decode()) == (200, name)
        assert answer.headers["content-type"].startswith(kind)
    for name in ("notes.txt", "link.js", "folder.js", "../outside.js", "MAIN.JS"):
        assert ask(app, f"/static/{name}").status == 404
    for target in ("/runs", f"/runs/{RUN}", "/compare", "/drift"):
        assert ask(app, target).body == b"index.html"
    assert ask(app, "/").headers["location"] == "/runs"


@pytest.mark.parametrize(
    "target",
    [
        *(f"/api/runs?{query}" for query in ("limit=x", "limit=-1", "limit=1e9", "group=everything")),
        *(f"/api/runs/{RUN}/graph?open={places}" for places in ("x", "-1", "1,2,..", "1" * 40, ",".join("7" * 2_000))),
        *(f"/api/compare?{query}" for query in ("", f"a={RUN}", f"a={RUN}&b=../../etc/passwd", f"a={RUN}&b={RUN}%00")),
    ],
)
def test_other_questions_than_those_of_the_page_are_refused(app: Any, live: Recorder, target: str) -> None:
    answer = ask(app, target)
    assert answer.status == 400
    assert "expected" in answer.json["error"]


def test_what_changed_is_asked_of_runs_that_are_there(app: Any, live: Recorder) -> None:
    assert ask(app, f"/api/compare?a={RUN}&b=20260101T000000-000000").status == 404
    same = ask(app, f"/api/compare?a={RUN}&b={RUN}").json
    assert same["changes"] == []
    assert len(same["notes"]) == 2  # these runs have no manifests
    assert ask(app, f"/api/runs/{RUN}/graph?open=3,7").json["nodes"] == []
    assert ask(app, "/api/runs/20260101T000000-000000/graph").status == 404


def test_runs_and_one_run(app: Any, folder: Path, live: Recorder) -> None:
    (folder / "20260301T101500-000000.json").write_text("{")
    found = ask(app, "/api/runs").json
    (line,) = found["runs"]
    assert line["cost"].pop("total") > 0
    assert line | {"cost": None} == {
        "id": RUN,
        "name": "reviews.py",
        "folder": "",
        "script": "reviews.py",
        "user": "",
        "arguments": "",
        "state": "running",
        "started_at": 1_790_000_000.0,
        "seconds": 4.0,
        "elements": 250,
        "elements_total": None,
        "rate": 75.0,
        "seconds_left": None,
        "failure": "",
        "is_stream": False,
        "retries": 1,
        "warnings": 4,
        "cost": None,
    }
    assert [each["file"] for each in found["damaged"]] == ["20260301T101500-000000.json"]
    assert ask(app, "/api/runs/20260301T101500-000000").status == 500

    run = ask(app, f"/api/runs/{RUN}").json
    assert (run["id"], run["state"], run["number"], run["ended"]) == (RUN, "running", 6, None)
    assert [each["event"] for each in run["happenings"]] == ["WorkerStarted", "BundleRetried", "LogMessage"]
    assert run["happenings"][1]["traceback"] == "Traceback …"
    assert [each["seconds"] for each in run["snapshots"]] == [2.0, 4.0]
    assert [pool["pool"] for pool in run["cost"]["pools"]] == ["cpu"]

    live(ended())
    run = ask(app, f"/api/runs/{RUN}").json
    (line,) = ask(app, "/api/runs").json["runs"]
    assert (line["state"], line["elements"], line["rate"], line["retries"]) == ("failed", 300, 0.0, 1)
    assert line["cost"]["total"] == run["cost"]["total"] > 0
    assert (run["state"], run["number"], run["ended"]["failure"]) == ("failed", 7, "ValueError: no stars")
    assert ask(app, "/api/runs").json["runs"][0]["failure"] == "ValueError: no stars"


def test_a_record_of_another_form_hides_no_other_run(app: Any, folder: Path, live: Recorder) -> None:
    live(ended())
    whole = json.loads((folder / f"{RUN}.json").read_text())
    wrong = {
        "20260301T101500-000001": whole
        | {"ended": whole["ended"] | {"last": whole["ended"]["last"] | {"stages": ["s0"]}}},
        "20260301T101500-000002": whole | {"happenings": ["x"]},
        "20260301T101500-000003": whole | {"ended": None, "process": whole["process"] | {"pid": 10**30}},
    }
    for run_id, content in wrong.items():
        (folder / f"{run_id}.json").write_text(json.dumps(content, separators=(",", ":")))
    (folder / "20260301T101500-000004.json").write_text("[" * 100_000)
    (folder / "20260301T101500-000005.json").write_text(json.dumps(whole))  # a copy opens as itself
    found = ask(app, "/api/runs").json
    assert [line["id"] for line in found["runs"]] == [RUN, "20260301T101500-000005"]
    assert len(found["damaged"]) == 4
    assert ask(app, "/api/runs/20260301T101500-000005").json["id"] == "20260301T101500-000005"


def test_large_runs_are_packed_and_read_once(app: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(folder)
    for event in [STARTED, *(snapshot(2.0 * number, number) for number in range(200)), ended()]:
        recorder(event)
    plain = ask(app, f"/api/runs/{RUN}")
    assert ask(app, "/api/runs").json["runs"][0]["elements"] == 300
    monkeypatch.setattr("luminosity.runs.records.contents", None)  # a second reading would fail
    packed = ask(app, f"/api/runs/{RUN}", SIGNED_IN | {"accept-encoding": "br, gzip"})
    assert packed.headers["content-encoding"] == "gzip"
    assert gzip.decompress(packed.body) == plain.body
    assert len(packed.body) < len(plain.body) / 4
    assert ask(app, "/api/runs").json["runs"][0]["elements"] == 300


def _events(body: bytes) -> list[tuple[str, str]]:
    """Return the events of a stream: their name or number, and the kind of event or the data."""
    found: list[tuple[str, str]] = []
    for block in body.decode().split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.splitlines())
        if "data" in fields:
            data = json.loads(fields["data"])
            found.append((fields.get("id") or fields["event"], data.get("event") or data.get("state") or ""))
    return found


def test_events_have_numbers_and_resume(
    app: Any, folder: Path, live: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "_POLL_S", 0.01)
    target = f"/api/runs/{RUN}/events"
    answer = ask(app, f"{target}?after=3", until=lambda body: b"event: state" in body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.body.startswith(b"retry: 1000\n\n")
    assert _events(answer.body) == [
        ("4", "LogMessage"),
        ("5", "Snapshot"),
        ("6", "Snapshot"),
        ("state", "running"),
    ]
    # Another server, as after a restart; the header of a browser that connects again counts.
    restarted = app_of(Sources(folder), ACCESS)
    live(ended())
    resumed = ask(restarted, f"{target}?after=3", SIGNED_IN | {"last-event-id": "6"})
    assert _events(resumed.body) == [("7", "RunEnded"), ("state", "failed"), ("cost", "")]
    assert ask(restarted, f"{target}?after=7").status == 204
    assert ask(restarted, f"{target}?after=x").status == 400
    assert ask(restarted, f"{target}?after=3", method="HEAD").body == b""


def test_a_client_with_other_numbers_reads_the_run_again(app: Any, live: Recorder) -> None:
    answer = ask(app, f"/api/runs/{RUN}/events?after=900", until=lambda body: b"event: state" in body)
    assert _events(answer.body) == [("reload", ""), ("state", "running")]


def test_connections_are_limited_and_end_when_the_server_stops(folder: Path, live: Recorder) -> None:
    streams = Streams(most=1)
    app = app_of(Sources(folder), ACCESS, streams)
    target = f"/api/runs/{RUN}/events"
    with streams.opened():
        assert ask(app, target).status == 503
    streams.stop()
    assert _events(ask(app, target).body)[-1] == ("state", "running")  # ends by itself, after what it knows


def test_a_client_that_reads_nothing_is_let_go(folder: Path, live: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "_SEND_S", 0.01)
    streams = Streams(most=1)
    stream = event_stream.EventStream(streams, RunFiles(folder, load_prices()), RUN, 0)

    async def call() -> None:
        async def never(*_: Any) -> Any:
            await asyncio.Event().wait()

        async def send(message: Any) -> None:
            if message["type"] != "http.response.start":
                await never()

        await asyncio.wait_for(stream({"method": "GET"}, never, send), _TIMEOUT_S)

    asyncio.run(call())
    assert not streams.is_full


def test_drift_with_the_reports_that_histories_name(folder: Path, tmp_path: Path) -> None:
    report, secret = tmp_path / "report.html", tmp_path / "secret.txt"
    report.write_text("<p>drift</p>")
    secret.write_text("secret")
    (tmp_path / "link.html").symlink_to(secret)
    test = PastTest(
        *("2026-03-01T00:00:00.000+00:00", "old.parquet", "new.parquet", "x", "gaussian", 0.5, 0.1, 0.2, 0.01, 0.05),
        drift=True,
        reference_rows=10,
        current_rows=10,
        report=str(report),
    )
    history = tmp_path / "drift.sqlite"
    others = [replace(test, report=str(path)) for path in (secret, tmp_path / "link.html", tmp_path / "gone.html")]
    DriftHistory(history).append(test, *others, replace(test, report=""))
    app = app_of(Sources(folder, (str(history),)), ACCESS)
    found = ask(app, "/api/drift").json
    assert ask(app, f"/api/drift?known={found['digest']}").status == 204  # a page asks often
    assert ask(app, "/api/drift?known=other").json == found
    (series,) = found["histories"]
    addresses = [row["report"] for row in series["rows"]]
    answer = ask(app, addresses[0])
    assert answer.body == b"<p>drift</p>"
    assert answer.headers["content-security-policy"].startswith("sandbox; default-src 'none'")
    assert [addresses[1], addresses[4]] == [None, None]
    assert [ask(app, address).status for address in addresses[2:4]] == [404, 404]  # a link, and a file that is gone


def test_passwords_in_failures_and_logs_are_hidden(app: Any, live: Recorder) -> None:
    said = "can't connect to postgres://ana:pa55word@db/x?token=pa55word with the key sk-pa55word0123456789"
    live(BundleRetried(RUN, 4.5, "infer", said, tries=1, elements=1, traceback=f"Traceback:\n{said}"))
    live(LogMessage(RUN, 4.6, "error", said, traceback=said))
    live(WorkerLost(RUN, 4.7, "w0", "cpu", said, bundles=1))
    live(replace(ended(), failure=said, traceback=said))
    for target in ("/api/runs", f"/api/runs/{RUN}", f"/api/runs/{RUN}/events?after=6", "/metrics"):
        answer = ask(app, target)
        assert answer.status == 200
        assert b"pa55word" not in answer.body
    assert b"can't connect to postgres://***@db/x?token=***" in ask(app, f"/api/runs/{RUN}").body


def test_a_run_that_is_not_done_counts_what_went_through_its_slowest_step(app: Any, folder: Path) -> None:
    write = Recorder(folder)
    read = StageView("s0", "done", elements=40_000)
    infer = StageView("s1", "busy", elements=23_600, fraction=0.59)
    last = Snapshot(RUN, 5.0, (read, infer), ())
    for event in (STARTED, last, RunEnded(RUN, 5.0, "failed", last)):
        write(event)
    (line,) = ask(app, "/api/runs").json["runs"]
    assert (line["elements"], line["elements_total"]) == (23_600, 40_000)


def test_metrics_for_prometheus(app: Any, live: Recorder) -> None:
    scraper = {"host": "localhost:4747", "authorization": f"Bearer {TOKEN}"}
    answer = ask(app, "/metrics", scraper)
    assert answer.headers["content-type"].startswith("text/plain")
    assert 'luminosity_stage_elements_total{folder="",pipeline="reviews.py",' in answer.body.decode()
    answer = ask(app, "/metrics", scraper | {"accept": "application/openmetrics-text;version=1.0.0"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert ask(app, "/metrics", {"host": "localhost:4747"}).status == 401


def test_the_token_is_kept_private(folder: Path) -> None:
    token = token_of(folder)
    path = folder / TOKEN_FILE
    assert path.stat().st_mode & 0o777 == 0o600
    assert token_of(folder) == token
    path.chmod(0o644)  # others may have read it
    assert token_of(folder) != token
    path.unlink()
    path.symlink_to("elsewhere")
    assert len(token_of(folder)) == 43
    assert not path.is_symlink()


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.7", "example.org", "::", "", "127.0.0.1:80"])
def test_other_machines_are_refused(host: str) -> None:
    with pytest.raises(OptionError, match="expected localhost"):
        bind(host)


def test_replies_do_not_wait_for_acknowledgements() -> None:
    with bind(port=0) as listener:
        listener.listen()
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_the_page_learns_its_columns_from_the_fields_of_views(app: Any, live: Recorder) -> None:
    columns = ask(app, f"/api/runs/{RUN}").json["numbers"]
    assert columns["stages"][0].items() >= {"field": "elements", "title": "Elements", "unit": "count"}.items()
    assert {each["field"] for each in columns["models"]} == {
        "inferences",
        "out_of_memory",
        "batch_p50_ms",
        "batch_p99_ms",
        "first_token_p50_ms",
        "first_token_p99_ms",
    }
    units = {each["unit"] for described in columns.values() for each in described}
    table = (page_app.FOLDER / "table.js").read_text().partition("const UNITS = {")[2].partition("}")[0]
    assert all(unit in table for unit in units)  # the page has words for each of them
