"""The page of ``lum ui`` in a real browser: every view, live runs, a restarted server, the keyboard, hostile names."""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect

from luminosity.events import BundleStalled, Event, PoolView, RunEnded, Snapshot, StageView, StallView
from luminosity.runs import records
from luminosity.runs.log_lines import LogLine, LogWriter
from luminosity.runs.recorder import Recorder
from tests.operate.page import made_up, one_run
from tests.operate.page.browsing import Served, Tab, free_port, launched, served
from tests.operate.page.drift_made_up import drift_history
from tests.warm import WarmProcess

pytestmark = pytest.mark.alone

expect.set_options(timeout=20_000)

_ID = "20260921T0000{:02}-aaaaa{}"
DONE, FAILED, MANY, STREAM, HOSTILE, FASTER, LIVE = (_ID.format(number, number) for number in range(1, 8))

_PIPELINE = """
import os, time
import apache_beam as beam

GO = {go!r}

def slow(number):
    while number >= 5 and not os.path.exists(GO):
        time.sleep(0.02)
    return number

if __name__ == "__main__":
    with beam.Pipeline() as pipeline:
        pipeline | beam.Create(range(10)) | "Wait for the test" >> beam.Map(slow)
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with launched() as started:
        yield started


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    made_up.record(folder, made_up.batch(DONE, apart_s=2.0))
    made_up.record(folder, made_up.failing(FAILED))
    made_up.record(folder, made_up.many_stages(MANY))
    made_up.record(folder, made_up.stream(STREAM, seconds=300))
    made_up.record(folder, made_up.hostile(HOSTILE))
    made_up.record(folder, made_up.batch(FASTER, speed=1.6, apart_s=2.0))
    return folder


@pytest.fixture(scope="module")
def server(browser: Browser, runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    drift = tmp_path_factory.mktemp("drift")
    report = drift / "report.html"
    report.write_text("<!doctype html><title>The report</title><p>What drifted.")
    drift_history(drift / "reviews.sqlite", report)
    with served(runs, drift=drift) as running:
        yield running


@pytest.fixture
def tab(browser: Browser, server: Served) -> Iterator[Tab]:
    """A page that is signed in. The test fails if its console complains."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    opened = Tab(context.new_page())
    opened.page.goto(server.opening)
    yield opened
    context.close()
    assert opened.complaints == []


@pytest.fixture
def page(tab: Tab) -> Page:
    return tab.page


def names(page: Page, table: str) -> list[str]:
    """Return the first column of a section's table."""
    return page.locator(f"{table} tbody tr:not(.detail) > th").all_inner_texts()


def cell(page: Page, stage: str, column: str) -> Locator:
    return page.locator(f"#stages tr[data-stage='{stage}'] td[data-title='{column}']")


def test_the_list_has_live_runs_first_and_a_filter(page: Page, server: Served) -> None:
    expect(page).to_have_url(server.address("/runs"))  # without the token
    rows = page.locator(".runs tbody tr")
    expect(rows).to_have_count(6)
    assert rows.first.get_attribute("data-run") == STREAM  # the only live one, though not the newest
    page.get_by_role("button", name="Failed").click()
    expect(rows).to_have_count(2)
    page.get_by_role("button", name="All").click()
    page.get_by_role("searchbox").fill("hundred")
    expect(rows).to_have_count(1)
    page.get_by_role("searchbox").fill("no such run")
    expect(page.get_by_text("No run matches the filter.")).to_be_visible()


def test_only_an_accelerator_is_called_a_device(page: Page) -> None:
    ask = """async () => {
        const { computes } = await import("/static/words.js");
        const view = { worker_seconds: 10, device_busy_seconds: 2.9 };
        return ["device", "worker", "server"].map((runs_on) => computes({ ...view, runs_on }));
    }"""
    assert page.evaluate(ask) == [
        " Its device computes 29% of the time.",
        " Its model computes 29% of the time.",
        " Its requests are in flight 29% of the time.",
    ]


def test_a_run_is_watched_from_its_start_to_its_end(page: Page, server: Served, runs: Path, tmp_path: Path) -> None:
    script, go = tmp_path / "watched.py", tmp_path / "go"
    script.write_text(_PIPELINE.format(go=str(go)))
    words = ("run", str(script), f"--run_dir={runs}", "--cpu_workers=1")
    process = WarmProcess("luminosity.cli.main", *words, cwd=tmp_path, env=dict(os.environ))
    try:
        page.get_by_role("link", name="watched.py").click()
        expect(page.locator(".run-head .pill")).to_have_text("running")
        expect(page.locator("#connection")).to_have_text("Live")
        expect(page.locator("#stages tbody tr")).not_to_have_count(0)
        assert "Wait for the test" in " ".join(names(page, "#stages"))
        page.evaluate("window.isTheSame = true")
        go.touch()
        expect(page.locator(".run-head .pill")).to_have_text("done")
        expect(page.locator("#connection")).to_have_text("")
        expect(page.locator("#stages tbody tr").last.locator("td[data-title='Elements']")).to_have_text("10")
        assert page.evaluate("window.isTheSame")  # without loading the page again
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait(timeout=60)


def test_a_batch_shows_what_is_known_and_nothing_empty(page: Page, server: Served) -> None:
    page.goto(server.address(f"/runs/{DONE}"))
    expect(page.locator(".run-head .pace")).to_contain_text("Embed")
    expect(page.locator("#graph .node")).to_have_count(12)
    assert len(names(page, "#stages")) == 12
    expect(cell(page, "s5", "Padding")).to_have_text("8%")
    expect(cell(page, "s1", "Padding")).to_have_text("\u2013")
    assert "no model" in (cell(page, "s1", "Padding").get_attribute("title") or "")
    expect(page.locator("#models tbody tr")).to_have_count(2)
    expect(page.locator("#counters tbody tr")).to_have_count(4)
    page.get_by_label("also those of Beam and Luminosity").check()
    expect(page.locator("#counters tbody tr")).to_have_count(5)
    assert page.locator(".chart:visible h3").all_inner_texts() == [
        *("Throughput", "Queues", "Workers", "Cost", "Devices", "Memory of devices", "Memory"),
    ]
    expect(page.locator("#stream")).to_be_hidden()
    page.locator("#models .open").first.click()
    expect(page.locator("#models tr.detail")).to_contain_text("compute 61 ms")


def test_a_failed_run_begins_with_its_failure(page: Page, server: Served) -> None:
    page.goto(server.address(f"/runs/{FAILED}"))
    expect(page.get_by_role("alert")).to_have_text(re.compile("failed 4 times: pipeline.BadRow"))
    expect(page.locator("main section").first).to_have_id("failures")
    first = page.locator("#failures .entry").first
    expect(first.locator("pre")).to_contain_text("pipeline.BadRow: row 48113 has no stars")
    expect(first).to_contain_text("at pipeline.py:88")
    expect(first.locator(".at-element")).to_contain_text("'stars': 'five'")
    first.locator("summary").first.click()
    expect(first.locator("pre")).to_be_hidden()
    first.locator("summary").first.click()
    expect(first.locator("pre")).to_be_visible()
    foreign = first.locator("details.foreign")
    expect(foreign).to_have_count(1)
    expect(foreign.locator("summary")).to_have_text("20 frames of Beam, Luminosity or packages")
    expect(foreign.locator("code")).to_be_hidden()
    expect(first.get_by_text("return Review(text=")).to_be_visible()
    foreign.locator("summary").click()
    expect(foreign.locator("code")).to_be_visible()
    expect(page.locator("#graph .node.failed")).to_have_attribute("aria-label", re.compile("^Parse: failed"))
    page.locator("#graph [data-kind='stages']").click()
    expect(page.locator("#graph .node.failed")).to_have_attribute("aria-label", "ReadTable + Parse: failed")
    page.locator("#logs").get_by_role("button", name="Errors").click()
    expect(page.locator("#logs .entry")).to_have_count(1)


def test_log_lines_are_searched_turned_and_reached_from_a_failure(page: Page, server: Served, runs: Path) -> None:
    run = _ID.format(8, 8)
    made_up.record(runs, made_up.failing(run))
    writer = LogWriter(records.path_of(runs, run), most_bytes=100_000)
    for number in range(1_000):
        writer.write(LogLine(number / 100, "info", f"row {number}", "my.code", f"cpu-{number % 3}", "Parse"))
    writer.write(LogLine(10.5, "error", made_up.ATTACK, "my.code", "cpu-1", "Embed", "Traceback …\nValueError: boom"))
    writer.close()
    page.goto(server.address(f"/runs/{run}"))
    entries = page.locator("#logs .entry")
    expect(entries).to_have_count(100)
    expect(entries.first.locator(".entry-title")).to_have_text(made_up.ATTACK)
    expect(page.locator("#logs .pages")).to_contain_text(re.compile(r"older lines have gone: a run keeps 5 MB"))
    page.get_by_role("button", name="Older").click()
    expect(entries.first).to_contain_text("row 900")
    expect(page.locator("#logs .pages")).to_contain_text("101 to 200 of")
    page.get_by_role("button", name="Newer").click()
    expect(entries.first).to_contain_text("onerror")
    page.get_by_label("Search messages").fill("ROW 987")
    expect(entries).to_have_count(1)
    page.get_by_label("Worker", exact=True).select_option("cpu-1")
    expect(page.locator("#logs .pages")).to_contain_text("No line matches.")
    page.get_by_label("Worker", exact=True).select_option("cpu-0")
    expect(entries).to_have_count(1)
    with page.expect_download() as downloaded:
        page.get_by_role("link", name="Download").click()
    assert downloaded.value.suggested_filename == f"{run}.log"
    assert downloaded.value.path().read_text().count("row 987") == 1
    page.locator("#failures").get_by_role("button", name="Log lines up to it").first.click()
    expect(page.get_by_label("Step", exact=True)).to_have_value("Parse")
    expect(page.get_by_label("Search messages")).to_have_value("")
    chosen = page.locator("#logs").get_by_role("button", name="Up to")
    expect(chosen).to_be_visible()
    chosen.click()
    expect(chosen).to_be_hidden()
    page.get_by_label("Step", exact=True).select_option("")
    page.locator("#logs").get_by_role("button", name="Errors").click()
    expect(entries).to_have_count(1)


def test_a_hundred_stages_can_be_sorted_and_folded_away(page: Page, server: Served) -> None:
    page.goto(server.address(f"/runs/{MANY}"))
    expect(page.locator("#graph .node")).to_have_count(100)
    page.get_by_role("button", name="Fit the graph to the page").click()
    pane = page.locator("#graph .pane")
    assert pane.evaluate("(pane) => pane.scrollWidth <= pane.clientWidth + 1")
    head = page.locator("#stages thead th").filter(has_text="Time")
    head.get_by_role("button").click()
    expect(head).to_have_attribute("aria-sort", "descending")
    times = page.locator("#stages td[data-title='Time']").all_inner_texts()
    seconds = [sum(int(n) * (60 if unit == "min" else 1) for n, unit in re.findall(r"(\d+) (min|s)", t)) for t in times]
    assert 25 <= len(seconds) < 60  # of a hundred
    assert seconds == sorted(seconds, reverse=True)
    page.get_by_role("button", name="Hide the graph").click()
    expect(pane).to_be_hidden()
    page.reload()
    expect(page.get_by_role("button", name="Show the graph")).to_be_visible()  # the browser remembers it
    expect(pane).to_be_hidden()


def test_a_run_that_hangs_says_where(page: Page, server: Served, runs: Path) -> None:
    write = Recorder(runs)
    stall = StallView("infer", 42.0, worker="w3", pid=4711, place="job.py:12")
    busy = one_run.snapshot(50.0, 250)
    write(one_run.STARTED)
    write(replace(busy, stages=(busy.stages[0], replace(busy.stages[1], stalls=(stall,)))))
    write(BundleStalled(one_run.RUN, 50.0, "step 'infer' has worked on one element for 42 s", stall, "File job.py"))
    page.goto(server.address(f"/runs/{one_run.RUN}"))
    said = "infer is stalled: it has done nothing for 42 s in worker w3 (pid 4711), at job.py:12."
    expect(page.locator(".run-head .pace")).to_have_text(said)
    expect(cell(page, "s1", "Status")).to_contain_text("stalled for 42 s")
    expect(cell(page, "s1", "Rate")).to_have_text("0/s")
    expect(page.locator("#failures")).to_contain_text("Step infer did nothing for 42 s")
    expect(page.locator("main section").first).to_have_id("stuck")
    stuck = page.locator("#stuck .entry")
    expect(stuck.locator(".entry-title")).to_have_text("infer has worked on one element for 42 s")
    expect(stuck).to_contain_text("worker w3 (pid 4711) · at job.py:12")
    expect(stuck.locator("pre")).to_have_text("File job.py")
    lines = LogWriter(records.path_of(runs, one_run.RUN))
    for number in range(2):  # a live run shows lines as they come
        lines.write(LogLine(number, "info", f"line {number}"))
        expect(page.locator("#logs .entry").first).to_contain_text(f"line {number}")
    lines.close()
    write(replace(one_run.ended(), state="cancelled", failure=""))
    expect(page.locator(".run-head .pill")).to_have_text("cancelled")
    expect(stuck.locator(".entry-title")).to_have_text("infer had worked on one element for 42 s when the run ended")
    expect(page.locator(".run-head .pace")).to_contain_text("infer was stalled when the run ended")


def test_a_stream_shows_lag_backlog_late_data_and_checkpoints(page: Page, server: Served) -> None:
    page.goto(server.address(f"/runs/{STREAM}"))
    stream = page.locator("#stream")
    expect(stream).to_contain_text(re.compile(r"(29|30) checkpoints, the last one .* ago"))
    assert len(names(page, "#stream")) == 4
    assert stream.locator(".chart:visible h3").all_inner_texts() == ["Watermark lag", "Backlog"]
    expect(page.locator(".run-head .pill")).to_have_text("running")
    expect(page.locator(".run-head .facts")).not_to_contain_text("Time left")
    expect(page).to_have_title("watch.py · Luminosity")  # no share of a work without an end


def test_two_runs_are_compared_with_what_differs_first(page: Page) -> None:
    compare = page.locator(".action")
    expect(compare).to_be_disabled()
    page.locator(f"tr[data-run='{DONE}'] input").check()
    page.locator(f"tr[data-run='{FASTER}'] input").check()
    compare.click()
    expect(page.locator(".pace")).to_have_text(
        re.compile(r"B processed .*/s, A .*/s: B is 1\.\d. faster\. B took 1 min \d+ s, A 2 min \d+ s\.")
    )
    expect(page.locator("#compare-run tbody tr").first).to_contain_text("Rate")
    expect(page.locator("#compare-steps tbody tr").first).to_have_text(re.compile("Embed.*37% less"))
    page.locator("#compare-steps").get_by_role("button", name="Memory").click()
    expect(page.locator("#compare-steps")).to_contain_text("12 rows are alike, within 2%")
    page.get_by_role("button", name="Swap A and B").click()
    expect(page.locator(".pace")).to_contain_text("slower")
    page.go_back()
    expect(page.locator(".pace")).to_contain_text("faster")


def test_runs_with_different_inputs_are_compared_by_their_rates(browser: Browser, tmp_path: Path) -> None:
    context = browser.new_context()
    for run, elements, seconds in ((DONE, 80_000, 57.0), (FASTER, 10_000, 10.0)):
        views = (StageView("s0", "done", elements=elements), StageView("s1", "done", elements=elements))
        last = Snapshot(run, seconds, views, (PoolView("cpu", workers=1, slots=1),))
        write = Recorder(tmp_path)
        write(replace(one_run.STARTED, run=run))
        write(RunEnded(run, seconds, "done", last))
    views = (StageView("s0", "done", elements=40_000), StageView("s1", "busy", elements=23_600, fraction=0.59))
    last = Snapshot(FAILED, 5.0, views, (PoolView("cpu", workers=1, slots=1),))
    write = Recorder(tmp_path)
    write(replace(one_run.STARTED, run=FAILED))
    write(RunEnded(FAILED, 5.0, "failed", last))
    with served(tmp_path) as running:
        tab = Tab(context.new_page())
        tab.page.goto(running.opening)
        tab.page.goto(running.address(f"/compare?a={DONE}&b={FASTER}"))
        expect(tab.page.locator(".pace")).to_have_text(
            "B processed 1,000/s, A 1,404/s: B is 1.4\N{MULTIPLICATION SIGN} slower. Their inputs differ: B had 10,000 "
            "elements, A 80,000, so their times and costs can't be compared."
        )
        tab.page.goto(running.address(f"/runs/{FAILED}"))
        expect(tab.page.locator(".run-head .facts")).to_contain_text("23,600")
        expect(tab.page.locator(".run-head .facts")).to_contain_text("of about 40,000")
        assert tab.complaints == []
    context.close()


def test_runs_that_did_not_finish_are_not_called_faster(page: Page, server: Served) -> None:
    page.goto(server.address(f"/compare?a={FAILED}&b={STREAM}"))
    expect(page.locator(".pace")).to_have_text(
        "A did not finish (failed after 39 s). B still runs; this is what was known after 5 min 0 s. "
        "Their times can't be compared."
    )


def test_a_killed_run_and_damaged_records_are_explained(browser: Browser, tmp_path: Path) -> None:
    context = browser.new_context()
    tab = Tab(context.new_page())
    with served(tmp_path) as running:
        tab.page.goto(running.opening)
        expect(tab.page.locator(".empty")).to_contain_text(f"No run is recorded in {tmp_path} yet.")
        made_up.record(tmp_path, made_up.batch(LIVE, upto=20))
        path = tmp_path / f"{LIVE}.json"
        path.write_text(path.read_text().replace('"began":"', '"began":"0'))  # as if its process was another one
        (tmp_path / f"{DONE}.json").write_text("{")
        tab.page.goto(running.address("/runs"))
        expect(tab.page.locator(".damaged")).to_have_text(re.compile("^1 record can't be read"))
        (tmp_path / f"{FAILED}.json").write_text("[]")
        expect(tab.page.locator(".damaged")).to_have_text(re.compile("^2 records can't be read"))
        tab.page.get_by_role("link", name="reviews.py").click()
        expect(tab.page.locator(".run-head .pill")).to_have_text("lost")
        expect(tab.page.get_by_role("alert")).to_contain_text("it was killed, or the machine stopped")
        assert tab.complaints == []
        tab.page.goto(running.address(f"/runs/{DONE}"))
        expect(tab.page.locator("main")).to_contain_text(f"{DONE}.json is damaged: Expecting property name")
    context.close()


def test_drift_shows_each_key_with_its_threshold_and_opens_the_report(page: Page, server: Served) -> None:
    page.goto(server.address("/drift"))
    cards = page.locator(".card")
    expect(cards).to_have_count(5)
    assert cards.locator("h3").all_inner_texts()[:3] == ["all rows", "language=de", "language=sv"]  # the worst first
    assert cards.locator(".pill").all_inner_texts() == ["drift", "drift", "no recent test", "no drift", "no drift"]
    german = cards.nth(1)
    expect(german.locator("figure")).to_have_count(2)
    expect(german.locator(".threshold")).to_have_count(2)
    expect(german.locator("figure").first.locator(".drifted")).to_have_count(11)
    expect(page.locator("#alerts .entry:visible")).to_have_count(4)
    with page.expect_popup() as opened:
        german.locator("figure").first.locator("a").last.click()
    expect(opened.value).to_have_title("The report")


def test_the_page_goes_on_when_the_server_was_restarted(browser: Browser, tmp_path: Path) -> None:
    events = made_up.batch(LIVE, upto=400)
    recorder, port = Recorder(tmp_path), free_port()
    feed(recorder, itertools.islice(events, 30))
    context = browser.new_context()
    tab = Tab(context.new_page())
    with served(tmp_path, port) as first:
        tab.page.goto(first.opening)
        tab.page.goto(first.address(f"/runs/{LIVE}"))
        expect(tab.page.locator("#connection")).to_have_text("Live")
        before = cell(tab.page, "s1", "Elements").inner_text()
        tab.page.evaluate("window.isTheSame = true")
    expect(tab.page.locator("#connection")).to_have_text("Reconnecting …")
    feed(recorder, itertools.islice(events, 40))
    with served(tmp_path, port):
        expect(tab.page.locator("#connection")).to_have_text("Live")
        expect(cell(tab.page, "s1", "Elements")).not_to_have_text(before)
        assert tab.page.evaluate("window.isTheSame")
        feed(recorder, made_up.ended(LIVE))
        expect(tab.page.locator(".run-head .pill")).to_have_text("done")
        assert tab.page.locator(".facts dt").all_inner_texts() == [
            "Time",
            "Elements",
            "Cost",
            "Memory",
            "Failed attempts",
        ]
    context.close()
    assert [text for text in tab.complaints if "ERR_CONNECTION_REFUSED" not in text] == []


def feed(recorder: Recorder, events: Iterator[Event]) -> None:
    for event in events:
        recorder(event)


def test_everything_can_be_reached_by_keyboard(page: Page, server: Served) -> None:
    expect(page.locator(".runs tbody tr")).not_to_have_count(0)
    page.keyboard.press("Tab")
    expect(page.locator(":focus")).to_have_text("Skip to the content")
    page.keyboard.press("Enter")
    for _ in range(20):  # over the filter to the first run
        page.keyboard.press("Tab")
        if page.locator("tbody a:focus").count():
            break
    page.keyboard.press("Enter")
    expect(page.locator(".run-head h1")).to_have_text("watch.py")
    page.goto(server.address(f"/runs/{DONE}"))
    page.locator("#graph [data-kind='stages']").click()
    page.locator("#graph .node[tabindex='0']").focus()
    before = page.locator("#graph .node:focus").get_attribute("aria-label")
    page.keyboard.press("ArrowDown")
    assert page.locator("#graph .node:focus").get_attribute("aria-label") != before
    page.keyboard.press("Enter")  # opens the stage's row in the table
    expect(page.locator("#stages tr.detail")).to_have_count(1)
    expect(page.locator("#stages button.open:focus")).to_have_attribute("aria-expanded", "true")
    page.keyboard.press("Enter")
    expect(page.locator("#stages tr.detail")).to_have_count(0)
    chart = page.get_by_role("slider").first
    chart.focus()
    page.keyboard.press("ArrowLeft")
    expect(chart).to_have_attribute("aria-valuetext", re.compile(r"2 min \d+ s: .*Embed"))
    readouts = [text for text in page.locator("#timeline .chart:visible .readout").all_inner_texts() if text]
    assert len(readouts) == 7  # one cursor points into all charts
    page.keyboard.press("Escape")
    expect(page.locator("#timeline .readout").first).to_have_text("")


@pytest.mark.parametrize("path", ["/runs", f"/runs/{HOSTILE}", f"/compare?a={HOSTILE}&b={DONE}"])
def test_names_and_messages_are_never_markup(page: Page, server: Served, path: str) -> None:
    page.goto(server.address(path))
    expect(page.locator("main")).to_contain_text("<script>document.title='broken into'</script>")
    assert page.title().endswith("· Luminosity")
    assert page.locator("main img, main script").count() == 0


def test_narrow_pages_do_not_scroll_sideways(browser: Browser, server: Served) -> None:
    context = browser.new_context(viewport={"width": 360, "height": 800}, color_scheme="dark")
    tab = Tab(context.new_page())
    tab.page.goto(server.opening)
    for path in ("/runs", f"/runs/{STREAM}", f"/runs/{HOSTILE}", f"/compare?a={DONE}&b={FASTER}", "/drift"):
        tab.page.goto(server.address(path))
        expect(tab.page.locator("main h1")).to_be_visible()
        expect(tab.page.locator("main tbody tr:visible, main .card").first).to_be_visible()
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= 360, path
    context.close()
    assert tab.complaints == []


_MANY_SNAPSHOTS = """async () => {
    const { RunState } = await import("/static/run_state.js");
    const started = { stages: [{ id: "s1", label: "Read" }], pools: [] };
    const run = new RunState({ id: "r", state: "running", number: 0, started, snapshots: [] });
    for (let second = 1; second <= 20000; second += 1) {
        run.apply({ event: "Snapshot", seconds: second, stages: [{ id: "s1", elements: 7 * second }] }, second);
        run.apply({ event: "LogMessage", seconds: second, level: "warning", message: "again" }, second);
    }
    const times = run.points.map((point) => point.t);
    const rates = run.throughput(0).slice(1).map(([, rate]) => Math.round(rate));
    return {
        points: times.length, first: times[0], last: times.at(-1), rates: [...new Set(rates)],
        widest: Math.max(...times.slice(1).map((time, index) => time - times[index])),
        happenings: run.happenings.length, leftOut: Object.values(run.leftOutOf).reduce((a, b) => a + b, 0),
    };
}"""


def test_a_page_of_a_long_run_keeps_a_bounded_history(page: Page) -> None:
    found = page.evaluate(_MANY_SNAPSHOTS)
    assert 1000 <= found["points"] <= 2000
    assert (found["first"], found["last"]) == (1, 20_000)
    assert found["rates"] == [7]  # the mean between two points, though many between them are gone
    assert found["widest"] <= 40  # seconds between two points: they are evenly spread
    assert (found["happenings"], found["leftOut"]) == (2000, 18_000)


def test_the_page_loads_the_run_again_if_the_server_asks_for_it(tab: Tab, server: Served) -> None:
    loads: list[str] = []
    streams: list[str] = []

    def answer(route: Route) -> None:
        streams.append(route.request.url)
        if len(streams) == 1:
            route.fulfill(content_type="text/event-stream", body="event: reload\ndata: {}\n\n")
        else:
            route.continue_()

    tab.page.on(
        "request", lambda request: loads.append(request.url) if request.url.endswith(f"/api/runs/{STREAM}") else None
    )
    tab.page.route("**/events?*", answer)
    tab.page.goto(server.address(f"/runs/{STREAM}"))
    tab.page.locator("#stages .open").first.click()
    deadline = time.monotonic() + 20
    while len(streams) < 2 and time.monotonic() < deadline:
        tab.page.wait_for_timeout(50)
    assert (len(loads), len(streams)) == (2, 2)
    expect(tab.page.locator("#connection")).to_have_text("Live")
    expect(tab.page.locator("#stages tr.detail")).to_have_count(1)  # what the reader has opened stays open
