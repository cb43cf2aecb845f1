"""Alerts come when the state of a key changes, once, and no others."""

from __future__ import annotations

import json
import re
import socket
import threading
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import luminosity.drift.watch.deliver as deliver
from luminosity.cli.main import main
from luminosity.drift import DriftHistory, PastTest, SampledRows
from luminosity.drift.mmd_drift import MMDDrift
from luminosity.drift.result import DETECTOR, utc_text
from luminosity.drift.watch.config import read_config
from luminosity.drift.watch.page_data import drift_data
from luminosity.drift.watch.rounds import SMALL, RoundSettings, compare_round, judge
from luminosity.drift.watch.state import Alert, Silence, WatchMemory
from luminosity.drift.watch.watcher import Changes, Watcher
from luminosity.errors import DriftError

_NOW = datetime(2030, 1, 1, tzinfo=timezone.utc)
_TEST = PastTest(_NOW.isoformat(), "r", "c", "v", "rbf", 0.5, None, 0.5, 0.5, 0.05, False, 10, 20)


def test_a_month_with_two_drifts_and_a_key_that_vanishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "examples" / "drift")
    from thirty_days import watch_a_month  # pyright: ignore[reportMissingImports]

    assert watch_a_month(tmp_path) == [
        (8, "drift", "language=de"),
        (13, "resolved", "language=de"),
        (16, "missing", "language=it"),
        (20, "drift", "language=en"),
    ]
    told = [json.loads(line) for line in (tmp_path / "alerts.jsonl").read_text().splitlines()]
    assert [(alert["kind"], alert["key"][-2:]) for alert in told] == [
        ("drift", "de"),
        ("resolved", "de"),
        ("missing", "it"),
        ("drift", "en"),
    ]
    found = drift_data([tmp_path / "drift.sqlite"])
    states = {series["key"][-2:]: series["state"] for series in found["histories"]}
    assert states == {"de": "ok", "en": "drift", "fr": "ok", "it": "missing"}
    of_french = next(series["rows"] for series in found["histories"] if series["key"] == "language=fr")
    assert len(of_french) == 30
    assert len({row["bandwidth"] for row in of_french}) == 1, "the bandwidth of a key is fixed"


def test_holm_and_the_smallest_effect() -> None:
    tests = [replace(_TEST, key=key, p_value=p) for key, p in {"a": 0.001, "b": 0.02, "c": 0.03, "d": 0.9}.items()]
    judged = judge(tests, 0.06)
    assert [(test.drift, round(test.level, 4)) for test in judged] == [
        (True, 0.015),
        (True, 0.02),
        (True, 0.03),
        (False, 0.06),
    ]
    assert [test.drift for test in judge(tests, 0.06, keys=40)] == [True, False, False, False]
    assert judge([replace(_TEST, p_value=0.001, mmd2=0.004)], 0.05, min_effect=0.005)[0].verdict == SMALL
    gone = replace(_TEST, verdict="gone", p_value=0.0, drift=True)
    assert judge([gone, replace(_TEST, p_value=0.04)], 0.05)[1].drift, "a key that is gone is no test"


def test_silence_holds_alerts_back_and_tells_what_is_still_so_afterwards() -> None:
    memory = WatchMemory("r")
    changes = Changes("w", memory, timedelta(hours=5), [Silence("k", _NOW + timedelta(hours=2))])
    drifted = replace(_TEST, key="k", drift=True, verdict="drift")
    assert [alert.silenced for alert in changes.round([drifted], _NOW)] == [True]
    assert changes.overdue(_NOW + timedelta(hours=1)) == []
    (later,) = changes.overdue(_NOW + timedelta(hours=3))
    assert (later.kind, later.silenced) == ("drift", False)
    assert changes.overdue(_NOW + timedelta(hours=4)) == []
    assert [alert.kind for alert in changes.overdue(_NOW + timedelta(hours=6))] == ["missing"]
    again = replace(_TEST, key="k", time=(_NOW + timedelta(hours=7)).isoformat())
    assert [alert.kind for alert in changes.round([again], _NOW + timedelta(hours=7))] == ["back", "resolved"]
    assert changes.round([drifted], _NOW + timedelta(hours=8)) == [], "an older window says nothing new"


def test_a_silenced_key_is_missing_since_its_last_test() -> None:
    changes = Changes("w", WatchMemory("r"), timedelta(hours=5), [Silence("", _NOW + timedelta(hours=9))])
    later = _NOW + timedelta(hours=1)
    assert changes.round([_TEST], _NOW) + changes.round([replace(_TEST, time=utc_text(later))], later) == []
    assert [alert.silenced for alert in changes.overdue(_NOW + timedelta(hours=8))] == [True]
    (told,) = changes.overdue(_NOW + timedelta(hours=10))
    assert told.message == f"w: missing since {utc_text(later)}; the silence has ended"


def test_a_clock_that_was_set_back_does_not_hide_drift() -> None:
    changes = Changes("w", WatchMemory("r"), None)
    assert changes.round([replace(_TEST, time=utc_text(_NOW + timedelta(days=900)))], _NOW + timedelta(days=900)) == []
    drifted = replace(_TEST, time=utc_text(_NOW), drift=True, verdict="drift")
    assert [alert.kind for alert in changes.round([drifted], _NOW)] == ["drift"]
    earlier = replace(_TEST, time=utc_text(_NOW - timedelta(days=1)))
    assert changes.round([earlier], _NOW) == [], "a later window has said more"


def test_a_webhook_that_speaks_no_http_is_a_failed_delivery() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65_536)
                connection.sendall(b"what?\r\n\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        target = deliver.webhook_target(f"http://127.0.0.1:{server.getsockname()[1]}/", None, {}, 10.0, 0)
        reason = target.send(Alert("t", "w", "r", "k", "drift", "drift began"))
        thread.join(10)
    assert reason == "the server's answer is no HTTP (BadStatusLine)"


def test_rows_of_a_pipeline_are_rounds_by_window(tmp_path: Path) -> None:
    """The newest window waits for its keys; old drift that is over, and repeated rows, give no alert."""
    (tmp_path / "w.toml").write_text(
        'history = "d.sqlite"\nlevel = 0.01\nevery = "1m"\nmissing_after = "50h"\n'
        '[[watch]]\nname = "w"\nreference = "r"\n'
    )
    history = DriftHistory(tmp_path / "d.sqlite")

    def rows(day: int, **p_values: float) -> list[PastTest]:
        start, end = (_NOW + timedelta(days=day - 1)).isoformat(), (_NOW + timedelta(days=day)).isoformat()
        window = {"time": end, "window_start": start, "window_end": end, "once": end, "recorded_at": end}
        return [replace(_TEST, key=key, p_value=p_value, **window) for key, p_value in p_values.items()]

    def look(day: float) -> list[tuple[str, str]]:
        watcher = Watcher(read_config(str(tmp_path / "w.toml")), lambda *_: {})
        assert watcher.periods() == {"w": timedelta(days=1)}
        return [(alert.kind, alert.key) for alert in watcher.look(_NOW + timedelta(days=day)).alerts]

    history.append(*rows(1, a=0.001, b=0.5), *rows(2, a=0.5, b=0.001))
    assert look(2.1) == [("drift", "b")]
    history.append(*rows(3, a=0.5))
    assert look(3) == [], "b is still to come"
    history.append(*rows(3, b=0.5), *rows(2, b=0.5))
    assert look(3) == [("resolved", "b")]
    assert look(3) == []
    alert = replace(
        _TEST, key="s", time=(_NOW + timedelta(days=4)).isoformat(), drift=True, settings={"kind": DETECTOR}
    )
    history.append(alert, *rows(4, a=0.5))
    assert look(4.5) == [("drift", "s")]
    assert look(5.5) == [("missing", "b")]
    assert look(6.2) == [("missing", "a"), ("resolved", "s")]
    history.append(*(replace(each, settings={"permutations": 50}) for each in rows(7, a=0.5)))
    found = Watcher(read_config(str(tmp_path / "w.toml")), lambda *_: {}).look(_NOW + timedelta(days=8))
    assert "the tests have 50 permutations, expected at least 100" in found.failures["w"]
    assert ("back", "a") in [(alert.kind, alert.key) for alert in found.alerts]


def test_drift_counts_beyond_the_floor_alone(tmp_path: Path) -> None:
    """A generator as far from the real sample as held-out real rows are has not drifted."""
    random = np.random.default_rng(0)

    def sample(shift: float) -> dict[None, SampledRows]:
        return {None: SampledRows(random.normal(shift, 1, size=(150, 4)), np.arange(150), 150)}

    real, held_out = sample(0), sample(0.4)
    test = MMDDrift.from_options({"bandwidth": (2.0,), "components": 0}, 0.01)
    settings = RoundSettings(test=test, names=("r", "c"), columns="v", level=0.01, now=_NOW)
    (alone,) = compare_round(real, sample(0.4), None, settings=settings).tests
    (beside,) = compare_round(real, sample(0.4), held_out, settings=settings).tests
    with_reports = replace(settings, reports=str(tmp_path / "reports"))
    (worse,) = compare_round(real, sample(1), held_out, settings=with_reports).tests
    assert [test.drift for test in (alone, beside, worse)] == [True, False, True]
    assert alone.floor_mmd2 is None
    assert worse.mmd2 > 2 * (worse.floor_mmd2 or 0) > 0
    assert "Drift" in Path(worse.report or "").read_text()


def test_a_webhook_is_retried_and_secrets_stay_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deliver, "_FIRST_PAUSE_S", 0.0)
    monkeypatch.setenv("MY_TOKEN", "Bearer s3cret")
    statuses, bodies = [503, 200, 301, 500, 500], list[tuple[str | None, dict[str, object]]]()

    class Server(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            bodies.append((self.headers["Authorization"], json.loads(body)))
            self.send_response(statuses[len(bodies) - 1])
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        (tmp_path / "w.toml").write_text(
            '[[watch]]\nname = "w"\nreference = "r"\n[[alert]]\n'
            f'webhook = "http://127.0.0.1:{server.server_port}/path-s3cret"\nretries = 1\n'
            'headers = { Authorization = "$MY_TOKEN" }\n'
        )
        (target,) = read_config(str(tmp_path / "w.toml")).targets
        alert = Alert("t", "w", "r", "k", "drift", "drift began")
        answers = [target.send(alert) for _ in range(3)]
        server.shutdown()
    assert answers[0] is None
    assert answers[1] == "the server answered with status 301"
    assert answers[2] == "the server answered with status 500, 2 times"
    assert [header for header, _ in bodies] == ["Bearer s3cret"] * 5
    assert bodies[0][1]["message"] == "drift began"
    assert "s3cret" not in repr((target, answers))


def test_a_command_that_fails_is_tried_again_in_the_next_round(tmp_path: Path) -> None:
    config = (
        'history = "d.sqlite"\n[[watch]]\nname = "w"\nreference = "r"\nkeys = ["k"]\n[[alert]]\ncommand = ["COMMAND"]\n'
    )
    (tmp_path / "w.toml").write_text(config.replace("COMMAND", "false"))

    def look(hours: float) -> list[str]:
        watcher = Watcher(read_config(str(tmp_path / "w.toml")), lambda *_: {})
        return watcher.look(_NOW + timedelta(hours=hours)).undelivered

    assert look(0) == []
    assert look(25) == ["command false: exited with code 1"], "the expected key was never tested"
    assert look(26) == ["command false: exited with code 1"]
    (tmp_path / "w.toml").write_text(config.replace("COMMAND", "true"))
    assert look(27) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("evry = '1h'", r"w\.toml:1: unknown key 'evry' in the configuration; did you mean 'every'"),
        ("every = 'often'", r"w\.toml:1: found every='often', expected a time such as '15m'"),
        (
            "level = 0.1\nfalse_alarms = '1 per month'",
            r"w\.toml:2: found both false_alarms and level|w\.toml:1: found both",
        ),
        ("false_alarms = 'few'", r"w\.toml:1: found false_alarms='few', expected a rate such as '1 per month'"),
        ("every = '1h'\nat = '06:30'", r"w\.toml:2: found at beside another every"),
        ("[[alert]]\ncommand = ['no-such-program']", r"w\.toml:2: there is no program 'no-such-program'"),
        ("[[alert]]\nwebhook_env = 'NOT_SET_HERE'", r"w\.toml:2: found no environment variable NOT_SET_HERE"),
        (
            "[[alert]]\nwebhook = 'https://h/'\nheaders = { Authorization = 'Bearer s3cret' }",
            r"the header Authorization in the configuration, expected it in an environment variable",
        ),
        ("[[alert]]\nwebhook = 'http://h:port/'", r"w\.toml:2: .*that is no http or https address"),
        ("[[alert]]\nwebhook = 'http://[::1/'", r"w\.toml:2: .*that is no http or https address"),
        ("[[alert]]\nwebhook = 'http://h/a b'", r"w\.toml:2: .*that is no http or https address"),
        ("[[silence]]\nkey = 'k'", r"w\.toml:1: found a silence without an end"),
        (
            "[[silence]]\nfrom = 2030-01-02T00:00:00Z\nuntil = 2030-01-01T00:00:00Z",
            r"w\.toml:3: found a silence that ends before it begins",
        ),
        (
            "[[watch]]\nname = 'w'\nreference = 'a'\ncurrent = 'b'\ncolum = 'v'",
            r":5: .*'colum'.* did you mean 'column'",
        ),
        ("[[watch]]\nname = 'w'", r"w\.toml:1: found a watch without reference"),
        ("every = ", r"w\.toml: .*expected TOML"),
    ],
)
def test_mistakes_in_the_configuration_are_named(tmp_path: Path, text: str, message: str) -> None:
    more = "" if "[[watch]]" in text else "\n[[watch]]\nname = 'w'\nreference = 'r'\n"
    (tmp_path / "w.toml").write_text(text + more)
    with pytest.raises(DriftError, match=message) as raised:
        read_config(str(tmp_path / "w.toml"))
    assert "s3cret" not in str(raised.value)


def test_the_command_makes_rounds_over_new_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    random = np.random.default_rng(0)
    Path("w.toml").write_text(
        'history = "d.sqlite"\nevery = "1d"\nsettle = "0.000001s"\n[[watch]]\nname = "w"\nreference = "reference.npy"\n'
        'new_files = "in/*.npy"\n'
    )

    def lum(*options: str) -> tuple[int, str]:
        code = main(["drift", "watch", "w.toml", *options])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    assert lum("--check")[1].strip().endswith("reference.npy")
    np.save("reference.npy", random.normal(size=(80, 4)).astype("float32"))
    code, said = lum("--check")
    assert code == 0
    assert "level 0.0333 for each round of all keys together: 30 rounds a month give 1 false alarms" in said
    assert lum("--once")[0] == 0
    np.save("in/day1.npy", random.normal(1, 1, size=(80, 4)).astype("float32"))
    code, said = lum("--once")
    assert (code, said.count("drift: w: drift began")) == (3, 1)
    code, said = lum("--once")
    assert (code, "0 tests · 1 keys drift" in said) == (3, True), "the file is tested once"
    assert lum("--silence", "*", "--for", "2h")[0] == 0
    np.save("in/day2.npy", random.normal(0, 1, size=(80, 4)).astype("float32"))
    code, said = lum("--once")
    assert (code, "resolved: w: drift is over" in said, "(silenced)" in said) == (0, True, True)
    assert len(DriftHistory("d.sqlite").last(str(tmp_path / "reference.npy"))) == 2
    Path("in/day3.npy").write_text("nothing")
    code, said = lum("--once")
    assert code == 1
    assert "day3.npy" in said
    assert lum("--silence", "*")[0] == 2


def test_a_watch_tests_columns(tmp_path: Path) -> None:
    """The test is named in the configuration, min_effect goes with it, and options of another test are refused."""
    text = 'history = "h.sqlite"\nlevel = 0.05\ntest = "columns"\n'
    watch = '[[watch]]\nname = "w"\nreference = "r.parquet"\ncurrent = "c.parquet"\n'
    (tmp_path / "w.toml").write_text(f"{text}min_effect = 0.2\n{watch}")
    random = np.random.default_rng(0)

    def look(shift: float, hour: int) -> list[tuple[str, str, str]]:
        def read(_: Any, files: Any, seed: int) -> dict[None, Any]:
            is_reference = files[0].endswith("r.parquet")
            return {None: {"age": random.normal(0 if is_reference else shift, 1, 300), "same": [1] * 300}}

        config = read_config(str(tmp_path / "w.toml"))
        found = Watcher(config, read).look(_NOW + timedelta(hours=hour))
        assert found.failures == {}
        return [(alert.kind, alert.effect_name, alert.message.partition(",")[0]) for alert in found.alerts]

    assert look(0.25, 0) == [], "a small difference does not matter"
    assert [each[:2] for each in look(1, 1)] == [("drift", "distance")]
    assert [each[:2] for each in look(0, 2)] == [("resolved", "distance")]
    rows = DriftHistory(str(tmp_path / "h.sqlite")).last(str(tmp_path / "r.parquet"))
    assert [row.verdict for row in rows] == ["drift too small to matter", "drift", "no drift"]
    assert [row.report is not None for row in rows] == [False, True, False]
    (series,) = drift_data([str(tmp_path / "h.sqlite")])["histories"]
    assert [(row["test"], row["effect_name"], row["mmd2"]) for row in series["rows"]] == [
        ("columns", "distance", None)
    ] * 3
    for line, said in (
        ("min_mmd2 = 0.1", "found min_mmd2 beside test = 'columns', expected min_effect; use min_effect"),
        ("bandwidth = 2", "found bandwidth, which the test 'columns' does not have; remove bandwidth"),
        ("rows = 10", "found rows, but the test 'columns' reads all rows"),
        ('floor = "f.parquet"', "found floor, which the test 'columns' does not have"),
        ('test = "colums"', "found no drift test 'colums', expected one of mmd, columns"),
    ):
        (tmp_path / "w.toml").write_text(f"{text}{watch}{line}\n")
        with pytest.raises(DriftError, match=re.escape(said)):
            read_config(str(tmp_path / "w.toml"))
