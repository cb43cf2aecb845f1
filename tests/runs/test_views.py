"""Tests of views: frames of every size, plain lines, and a terminal to which the program prints as well."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

from luminosity.events import (
    DeviceView,
    Event,
    InferenceView,
    KafkaView,
    MemoryUse,
    MetricView,
    PartitionLag,
    PoolInfo,
    PoolView,
    ProcessMemory,
    RunEnded,
    RunStarted,
    Snapshot,
    StageInfo,
    StageView,
    Status,
    StreamView,
    Subscriber,
)
from luminosity.runs.views.choice import LateView, view_for
from luminosity.runs.views.frame import frame
from luminosity.runs.views.live import LiveView, Terminal, _Above
from luminosity.runs.views.plain import PlainView, line, summary
from tests.runners import IS_REFERENCE

pytestmark = pytest.mark.skipif(IS_REFERENCE, reason="tests what only the engine does")

_STATUSES: dict[str, tuple[Status, tuple[str, ...]]] = {
    "Read": ("done", ()),
    "Decode": ("held back", ("Embed",)),
    "Embed": ("busy", ()),
    "Compare + Format + Pair + Write": ("starved", ("Embed",)),
    "Lookup": ("needs worker", ("cpu",)),
    "Join": ("waiting", ("Lookup",)),
}


def a_run(labels: list[str]) -> RunStarted:
    stages = tuple(StageInfo(f"s{n}", label, "cpu") for n, label in enumerate(labels))
    return RunStarted("r", 0.0, "pipeline.py", 0.0, stages, (PoolInfo("cpu", 4, 1),), queue_limit=64 << 20)


def a_snapshot(seconds: float, stages: tuple[StageView, ...], devices: int = 1) -> Snapshot:
    return Snapshot(
        "r",
        seconds,
        stages,
        pools=(PoolView("cpu", 4, 3, 4, 220.0, 0.66),),
        devices=tuple(DeviceView(f"gpu:{n}", 0.97, 0.81, 61 << 30, 141 << 30) for n in range(devices)),
        memory=MemoryUse(85 << 20, 110 << 20, 2 << 30, 3 << 30),
        processes=ProcessMemory(12 << 30, 14 << 30),
        seconds_left=107.0,
    )


RUN = a_run(list(_STATUSES))
SNAPSHOT = a_snapshot(
    83.0,
    tuple(
        StageView(f"s{n}", status, by, 1_234_567, 10_234.0, 200_000, 70 << 20, 2, 2, 60.0, 0.5, 44.0)
        for n, (status, by) in enumerate(_STATUSES.values())
    ),
)
ENDED = RunEnded("r", 190.0, "done", SNAPSHOT)


def drawn(picture: RenderableType, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(picture)
    return console.export_text().splitlines()


@pytest.mark.parametrize("width", [60, 80, 100, 120, 160, 250])
def test_a_picture_fits_and_says_who_waits_for_whom(width: int) -> None:
    lines = drawn(frame(RUN, SNAPSHOT, width, 24), width)
    assert all(len(text) <= width for text in lines)
    assert len(lines) == 2 + len(_STATUSES) + 4  # none is wrapped
    text = "\n".join(lines)
    for words in (
        "held back by Embed",
        "starved by Embed",
        "needs worker: cpu",
        "waits for Lookup",
        "busy",
        "1,234,567",
    ):
        assert words in text
    assert lines[0] == "pipeline.py  1 min 23 s, about 1 min 47 s left"
    assert "device gpu:0: busy 97% so far" in text
    assert "65.5 GB of 151 GB" in text
    assert "89.1 MB of 2.15 GB between stages" in text


def test_a_wide_picture_says_more_than_a_narrow_one() -> None:
    heads = [drawn(frame(RUN, SNAPSHOT, width, 24), width)[1].split() for width in (60, 80, 160)]
    assert heads[0] == ["stage", "elements", "rate", "status"]
    assert set(heads[0]) < set(heads[1]) < set(heads[2])


@pytest.mark.parametrize("devices", [1, 16])
def test_many_stages_on_a_small_terminal(devices: int) -> None:
    statuses: list[Status] = ["done"] * 12 + ["busy"] * 3 + ["starved"] * 10 + ["waiting"] * 5
    stages = tuple(StageView(f"s{n}", status) for n, status in enumerate(statuses))
    run = a_run([f"A step with a name that is long, number {n}" for n in range(30)])
    lines = drawn(frame(run, a_snapshot(83.0, stages, devices), 80, 24), 80)
    assert len(lines) <= 24
    text = "\n".join(lines)
    assert text.count("busy") >= 3
    assert all(f"number {n}" in text or f"{n} " in text for n in (12, 13, 14))
    assert "and 12 done" in text


def test_a_summary_fits_and_says_what_took_long() -> None:
    lines = drawn(summary(RUN, ENDED), 60)
    assert all(len(text) <= 60 for text in lines)
    assert lines[0].strip() == "pipeline.py  done in 3 min 10 s"
    text = " ".join(" ".join(lines).split())
    assert "cpu: 66% busy, 3 min 40 s of work" in text
    assert "at most 15 GB in all processes, at most 115 MB between stages, 3.22 GB spilled to disk" in text
    assert "slowest Read 1 min 0 s" in text


def test_a_plain_line_has_the_figures_of_one_model_but_not_of_several_without_names() -> None:
    model = InferenceView("Embed", inferences=20, batches=2)
    stage = StageView("s2", "busy", (), 20, 2.0, 0, 0, 1, 1, 60.0)
    one, several = (
        line(RUN, a_snapshot(83.0, (replace(stage, inference=models),))) for models in ((model,), (model, model))
    )
    assert "batches 10 rows" in one
    assert "batches" not in several


def test_a_plain_line_says_how_far_it_is() -> None:
    text = line(RUN, SNAPSHOT)
    assert text.startswith("pipeline.py 1 min 23 s: 1 of 6 stages done; ")
    assert "Lookup: 1,234,567 done, 10,234/s, 50%, needs worker: cpu" in text
    assert text.endswith("3 of 4 slots busy; about 1 min 47 s left")


STREAM_RUN = replace(
    a_run(["Tick", "Read + Parse", "Count + Write"]),
    stages=tuple(
        StageInfo(f"s{n}", label, "cpu", is_stream=n > 0) for n, label in enumerate(("Tick", "Read + Parse", "Count"))
    ),
)


LAGS = (PartitionLag("t[7]", 800), PartitionLag("t[1]", 400))


def stream_at(seconds: float, *, behind: float | None = 2.14) -> Snapshot:
    source = StreamView(1000.0, behind, backlog=1204.0) if behind is not None else StreamView()
    stages = (
        StageView("s0", "done", elements=1, fraction=1.0),
        StageView("s1", "busy", elements=12_345, rate=1004.2, stream=source),
        StageView("s2", "starved", ("Read + Parse",), elements=40, rate=0.5, stream=replace(source, dropped_late=12)),
    )
    return replace(a_snapshot(seconds, stages), seconds_left=None)


@pytest.mark.parametrize("width", [60, 80, 100, 120, 160, 250])
def test_a_stream_has_a_rate_and_a_lag_but_no_end(width: int) -> None:
    lines = drawn(frame(STREAM_RUN, stream_at(83.0), width, 24), width)
    assert all(len(text) <= width for text in lines)
    heads = lines[1].split()
    assert heads[:4] == ["stage", "elements", "rate", "behind"]
    assert not {"done", "left"} & set(heads)
    assert ("late" in heads, "backlog" in heads) == (width >= 100, width >= 90)
    assert lines[0] == "pipeline.py  1 min 23 s"
    assert "1,004/s" in lines[2]  # the stage that has ended is left out
    assert "2.1 s" in lines[2]
    assert lines[3].endswith("idle")  # as usual between two windows


KAFKA = (
    KafkaView("Read reviews", "read", 12_345, 9_876_543, 101.5, 81_200.0, 0, 0, 12.0, 1450.0, 1204, 1000, LAGS),
    KafkaView("Publish", "write", 12_000, 987_654, 99.5, 8_120.0, 3, p50_ms=90.0, p99_ms=200.0),
)


def with_kafka(seconds: float) -> Snapshot:
    source, *others = stream_at(seconds).stages[1:]
    return replace(stream_at(seconds), stages=(stream_at(seconds).stages[0], replace(source, kafka=KAFKA), *others))


@pytest.mark.parametrize("width", [66, 80, 100, 160])
def test_steps_with_kafka_have_lines_that_fit(width: int) -> None:
    lines = drawn(frame(STREAM_RUN, with_kafka(83.0), width, 24), width)
    assert all(len(text) <= width for text in lines)
    read, write = (text for text in lines if text.startswith("kafka"))
    assert read.startswith("kafka Read reviews: lag 1,204 · age p50 12 ms, p99 1.4 s")
    assert write.startswith("kafka Publish: 3 dead letters · latency p50 90 ms, p99")
    assert ("102/s" in read, "t[7] 800" in read) == (width >= 80, width >= 160)


def test_a_summary_says_once_what_steps_with_kafka_did() -> None:
    ended = RunEnded("r", 100.0, "cancelled", with_kafka(100.0))
    counted = MetricView("counter", "Read/Read/Process", "ReadKafka", "records_read", of_library=True, value=12_345)
    text = " ".join(" ".join(drawn(summary(STREAM_RUN, replace(ended, metrics=(counted,))), 100)).split())
    assert "kafka Read reviews: 12,345 records, 9.88 MB · 102/s, 81.2 kB/s · age p50 12 ms" in text
    assert "lag 1,204 in 1,000 partitions · most in t[7] 800, t[1] 400 · no dead letters" in text
    assert "records_read" not in text


def test_a_plain_line_has_the_lag_of_a_read() -> None:
    source, *others = stream_at(83.0).stages[1:]
    snapshot = replace(stream_at(83.0), stages=(replace(source, kafka=KAFKA[:1]), *others))
    assert "lag 1,204, age p50 12 ms, p99 1.4 s" in line(STREAM_RUN, snapshot)


def test_a_stream_without_data_says_so_and_a_pipeline_without_streams_has_no_such_columns() -> None:
    assert "no data yet" in drawn(frame(STREAM_RUN, stream_at(83.0, behind=None), 80, 24), 80)[2]
    assert "behind" not in drawn(frame(RUN, SNAPSHOT, 250, 24), 250)[1]


def test_a_plain_line_of_a_stream_has_no_percent_and_no_stages_done() -> None:
    assert line(STREAM_RUN, stream_at(83.0)) == (
        "pipeline.py 1 min 23 s: Count: 40 elements, 0.5/s, 2.1 s behind, backlog 1,204, 12 late; "
        "Read + Parse: 12,345 elements, 1,004/s, 2.1 s behind, backlog 1,204; 3 of 4 slots busy"
    )


def test_stages_with_an_end_beside_a_stream_are_counted_until_they_are_done() -> None:
    snapshot = stream_at(83.0)
    waiting = replace(snapshot, stages=(replace(snapshot.stages[0], status="busy"), *snapshot.stages[1:]))
    assert "0 of 1 stages done" in line(STREAM_RUN, waiting)


@pytest.mark.parametrize("view", [LiveView, PlainView])
def test_a_stream_says_once_how_to_stop_it(
    monkeypatch: pytest.MonkeyPatch, view: Callable[[], LiveView | PlainView]
) -> None:
    terminal = a_terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", "120")
    shown = view()
    for event in (STREAM_RUN, *(stream_at(float(second)) for second in range(1, 12))):
        shown(event)
    shown(RunEnded("r", 12.0, "cancelled", stream_at(12.0)))
    assert terminal.getvalue().count("or you press Ctrl-C") == 1
    assert "stopped after 12 s" in terminal.getvalue()


@pytest.mark.parametrize("view", [LiveView, PlainView])
def test_a_short_stream_says_nothing(monkeypatch: pytest.MonkeyPatch, view: Callable[[], LiveView | PlainView]) -> None:
    terminal = a_terminal(monkeypatch)
    shown = view()
    for event in (STREAM_RUN, stream_at(0.9), RunEnded("r", 0.95, "done", stream_at(0.95))):
        shown(event)
    assert terminal.getvalue() == ""


@pytest.mark.parametrize(
    ("state", "words"), [("cancelled", "stopped after"), ("failed", "failed after"), ("done", "done in")]
)
def test_the_summary_of_a_stream_has_its_counts_and_its_average_rate(state: Any, words: str) -> None:
    lines = drawn(summary(STREAM_RUN, RunEnded("r", 100.0, state, stream_at(100.0))), 100)
    assert lines[0].strip() == f"pipeline.py  {words} 1 min 40 s"
    streams = [" ".join(text.split()) for text in lines if text.startswith("stream")]
    assert streams == [
        "stream Read + Parse: 12,345 elements · 123/s · 2.1 s behind · backlog 1,204",
        "stream Count: 40 elements · 0.4/s · 2.1 s behind · backlog 1,204 · 12 late",
    ]


class _FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def a_terminal(monkeypatch: pytest.MonkeyPatch) -> _FakeTerminal:
    """Replace standard error. Not a fixture: pytest replaces standard error between fixtures and the test."""
    fake = _FakeTerminal()
    monkeypatch.setattr(sys, "stderr", fake)
    monkeypatch.setenv("TERM", "xterm")
    return fake


def at(seconds: float) -> Snapshot:
    return a_snapshot(seconds, SNAPSHOT.stages)


def made(view: Subscriber | None) -> type[object]:
    """Return the class of the view that a run of some seconds gets."""
    return type(view.make() if isinstance(view, LateView) else view)


@pytest.mark.parametrize(("mode", "expected"), [("auto", LiveView), ("plain", PlainView), ("off", type(None))])
def test_a_terminal_gets_the_view_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, mode: str, expected: type[object]
) -> None:
    a_terminal(monkeypatch)
    assert made(view_for(mode)) is expected


def test_without_a_terminal_lines_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert made(view_for("auto")) is PlainView


def test_a_dumb_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    a_terminal(monkeypatch)
    monkeypatch.setenv("TERM", "dumb")
    assert made(view_for("auto")) is PlainView


def test_a_view_is_made_when_it_may_show_something() -> None:
    taken: list[list[Event]] = []

    def make() -> Subscriber:
        taken.append([])
        return taken[-1].append

    short, counting, long = LateView(make), LateView(make), LateView(make)
    ended = RunEnded("r", 1.5, "done", at(1.5))
    for event in (RUN, at(0.2), at(0.9), ended):
        short(event)
    assert taken == []
    counted = replace(ended, seconds=0.5, metrics=(metric("rows"),))
    for event in (RUN, at(0.2), counted):
        counting(event)
    for event in (RUN, at(0.9), at(1.0), at(1.5), ended):
        long(event)
    assert taken == [[RUN, counted], [RUN, at(1.0), at(1.5), ended]]


@pytest.mark.parametrize("view", [LiveView, PlainView])
def test_a_short_run_says_nothing(monkeypatch: pytest.MonkeyPatch, view: Callable[[], LiveView | PlainView]) -> None:
    terminal = a_terminal(monkeypatch)
    shown = view()
    for event in (RUN, at(0.2), at(0.9), RunEnded("r", 0.95, "done", at(0.95))):
        shown(event)
    assert terminal.getvalue() == ""


def metric(name: str, step: str = "Parse", kind: Any = "counter", **values: Any) -> MetricView:
    return MetricView(kind, step, "mine", name, **values)


@pytest.mark.parametrize("view", [LiveView, PlainView])
def test_what_the_code_of_a_short_run_counts_is_shown(
    monkeypatch: pytest.MonkeyPatch, view: Callable[[], LiveView | PlainView]
) -> None:
    terminal = a_terminal(monkeypatch)
    shown = view()
    of_library = metric("rows_read", of_library=True, value=3)
    for metrics in ((of_library,), (metric("words", value=12_345), of_library)):
        for event in (RUN, RunEnded("r", 0.95, "done", at(0.95), metrics=metrics)):
            shown(event)
    assert terminal.getvalue().count("done in") == 1
    assert "counter  Parse: words 12,345\n" in terminal.getvalue()


def test_metrics_are_lines_of_the_summary() -> None:
    metrics = (
        metric("words", value=3),
        MetricView("counter", "Parse", "other", "words", value=4),
        metric("length", kind="distribution", value=10, count=4, min=1, max=5_000),
        metric("open", kind="gauge", value=-1),
        *(metric(f"n{number}", "Late") for number in range(30)),
    )
    ended = replace(ENDED, metrics=metrics, metrics_left_out=100)
    console = Console(file=io.StringIO(), width=100, force_terminal=False)
    with console.capture() as captured:
        console.print(summary(RUN, ended))
    lines = [" ".join(line.split()) for line in captured.get().splitlines()]
    at_words = lines.index("counter Parse: mine/words 3")
    assert lines[at_words + 1 : at_words + 4] == [
        "counter Parse: other/words 4",
        "distribution Parse: length min 1, mean 2.5, max 5,000, count 4",
        "gauge Parse: open -1",
    ]
    assert lines[-1] == "and 114 more metrics"


def test_plain_lines_come_every_few_seconds_with_a_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = a_terminal(monkeypatch)
    view = PlainView()
    for event in (RUN, *(at(tenth / 10) for tenth in range(160)), ENDED):
        view(event)
    lines = terminal.getvalue().splitlines()
    assert [text.split(":")[0] for text in lines[:3]] == ["pipeline.py 5.0 s", "pipeline.py 10 s", "pipeline.py 15 s"]
    assert lines[3] == "pipeline.py  done in 3 min 10 s"


def test_what_is_printed_just_when_the_view_ends_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = a_terminal(monkeypatch)
    view = Terminal()
    view.take()
    proxy = sys.stderr
    assert isinstance(proxy, _Above)
    printing = threading.Thread(target=print, args=("kept",), kwargs={"file": proxy})
    with proxy._lock:  # it has begun to print, and comes no further before the view has ended
        printing.start()
        printing.join(0.2)
        view.give_back()
    printing.join(50)
    assert terminal.getvalue().count("kept\n") == 1


def test_while_one_run_has_the_terminal_another_writes_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = a_terminal(monkeypatch)
    first, second = LiveView(), LiveView()
    first(RUN)
    second(RUN)
    first(at(1.5))
    assert sys.stderr is not terminal  # what is written to it comes out above the picture
    for seconds in (1.5, 6.0):
        second(at(seconds))
    assert terminal.getvalue().count("pipeline.py 6.0 s: 1 of 6 stages done") == 1
    first(ENDED)
    assert sys.stderr is terminal
    second(ENDED)
    assert terminal.getvalue().count("done in 3 min 10 s") == 2
    third = LiveView()
    third(RUN)
    third(at(1.5))
    assert sys.stderr is not terminal  # the terminal was given back
    third(ENDED)


def test_log_handlers_and_prints_come_out_above_the_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = a_terminal(monkeypatch)
    handler = logging.StreamHandler(terminal)
    logger = logging.getLogger("test_views")
    logger.addHandler(handler)
    view = LiveView()
    try:
        view(RUN)
        view(at(1.5))
        logger.warning("from a logger")
        sys.stderr.write("half a line, ")
        sys.stderr.write("and its end\nand a half that never ends")
        view(ENDED)
        assert handler.stream is terminal
    finally:
        logger.removeHandler(handler)
    plain = terminal.getvalue()
    for text in ("from a logger\n", "half a line, and its end\n", "and a half that never ends\n"):
        assert plain.count(text) == 1


@pytest.mark.parametrize("view", [LiveView, PlainView])
def test_a_terminal_that_is_gone_ends_the_view_alone(
    monkeypatch: pytest.MonkeyPatch, view: Callable[[], LiveView | PlainView]
) -> None:
    terminal = a_terminal(monkeypatch)
    shown = view()
    shown(RUN)
    shown(at(1.5))
    terminal.close()
    for event in (at(6.0), at(12.0), ENDED):
        shown(event)
    assert sys.stderr is terminal


_SCRIPT = """
import sys, time
import apache_beam as beam
from luminosity import LuminosityRunner

def slow(n):
    time.sleep(0.05)
    print("worker says", n, flush=True)
    return n

print("no end of this line, ", end="", flush=True)
with beam.Pipeline(runner=LuminosityRunner()) as pipeline:
    pipeline | beam.Create(range(60)) | beam.Reshuffle() | "Slow" >> beam.Map(slow)
print("the end", sys.stdout.isatty())
"""


def test_a_real_run_on_a_real_terminal(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    process = subprocess.Popen(
        [sys.executable, str(script), "--cpu_workers=1"], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    output = _read_all(ours)
    assert process.wait(timeout=60) == 0
    assert "\x1b[?25l" not in output  # the cursor is never hidden, so nothing can leave it hidden
    assert "elements" in output
    assert "starved" in output or "busy" in output
    assert [output.count(f"worker says {n}\r\n") for n in range(60)] == [1] * 60
    assert "script.py  done in" in output.replace("\x1b[0m", "").replace("\x1b[1m", "").replace("\x1b[1;32m", "")
    assert output.endswith("the end True\r\n")


def _read_all(descriptor: int) -> str:
    parts: list[bytes] = []
    with contextlib.suppress(OSError):  # that is how a terminal ends
        while part := os.read(descriptor, 65536):
            parts.append(part)
    os.close(descriptor)
    return b"".join(parts).decode()


def test_a_plain_line_names_the_step_that_sets_the_pace_and_the_lag_of_kafka() -> None:
    labels = ("Read", "Embed", "Publish", "Table (GlobalNothing)", "Table (Remove)", "Table (GlobalFiles)")
    run = replace(RUN, stages=tuple(StageInfo(str(n), label, "cpu") for n, label in enumerate(labels)))
    reads = KafkaView("Read", "read", 100, lag=1204, partitions=4)
    writes = KafkaView("Publish", "write", 50, dead_letters=3)
    stages = [StageView(str(n), "busy", elements=7, stream=StreamView()) for n in range(len(labels))]
    stages[0] = replace(stages[0], kafka=(reads,), busy_seconds=2.0)
    stages[1] = replace(stages[1], busy_seconds=50.0)
    stages[2] = replace(stages[2], kafka=(writes,), busy_seconds=1.0)
    text = line(run, a_snapshot(83.0, tuple(stages)))
    assert "Table" not in text
    assert text.index("Embed: ") < text.index("Read: ") < text.index("lag 1,204") < text.index("Publish: ")
    assert "3 dead letters" in text
