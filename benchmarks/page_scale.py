"""Measures in Chromium how long the page of a large run takes: 500 stages, 1,000 workers on 50 nodes, and a month.

    python benchmarks/page_scale.py          # about a minute

The records are made up (``tests/operate/page/made_up_large.py``) and go on while the page is open. A page is there when
its tables are; an update is one snapshot more. Times of the browser's main thread are its CPU time, so that they count
on a busy machine, too.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import _measure
from playwright.sync_api import CDPSession, Page

_ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(_ROOT))

from luminosity.events import Event, Snapshot  # noqa: E402
from luminosity.runs.recorder import Recorder  # noqa: E402
from tests.operate.page import made_up_large  # noqa: E402
from tests.operate.page.browsing import Served, launched, served  # noqa: E402

_ID = "20260921T0000{:02}-aaaaa{}"
_UPDATES = 5  # while the page is open
_WAIT_MS = 60_000
_RUNS = {
    "500 stages": made_up_large.many_stages,
    "1,000 workers": made_up_large.cluster,
    "a month": made_up_large.month,
}


def _split(events: list[Event]) -> tuple[list[Event], list[Event]]:
    """Return the events up to the last snapshots, and these."""
    last = [place for place, event in enumerate(events) if isinstance(event, Snapshot)][-_UPDATES]
    return events[:last], [event for event in events[last:] if isinstance(event, Snapshot)]


def _busy_s(session: CDPSession) -> float:
    """Return the CPU time that the browser's main thread has taken for this page."""
    found = {each["name"]: each["value"] for each in session.send("Performance.getMetrics")["metrics"]}
    return found["TaskDuration"]


def _measured(page: Page, server: Served, name: str, run: str, later: list[Event], recorder: Recorder) -> None:
    address = server.address(f"/runs/{run}")
    asked = time.perf_counter()
    answer = page.request.get(f"{server.address('/api/runs/')}{run}")
    _measure.print_figure(f"{name}: the server's first answer, s", time.perf_counter() - asked, at_most=2.0)
    _measure.print_figure(f"{name}: its size, MB", len(answer.body()) / 1e6)
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    before, asked = _busy_s(session), time.perf_counter()
    page.goto(address)
    page.locator("#workers tbody tr").first.wait_for(timeout=_WAIT_MS)
    _measure.print_figure(f"{name}: until the page is there, s", time.perf_counter() - asked, at_most=3.0)
    page.wait_for_timeout(2_000)
    _measure.print_figure(f"{name}: main thread busy for it, s", _busy_s(session) - before, at_most=3.0)
    _measure.print_figure(f"{name}: elements of the page", page.evaluate("document.querySelectorAll('*').length"))
    before = _busy_s(session)
    for event in later:
        recorder(event)
        page.wait_for_timeout(1_200)
    update = 1e3 * (_busy_s(session) - before) / len(later)
    _measure.print_figure(f"{name}: main thread for an update, ms", update, at_most=350.0)


def main() -> None:
    """Print what was measured."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        runs: list[tuple[str, str, list[Event], Recorder]] = []
        for number, (name, make) in enumerate(_RUNS.items(), start=1):
            run = _ID.format(number, number)
            first, last = _split(list(make(run)))
            recorder = Recorder(folder)
            for event in first:
                recorder(event)
            runs.append((name, run, last, recorder))
        with launched() as browser, served(folder) as server:
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.goto(server.opening)
            for name, run, later, recorder in runs:
                _measured(page, server, name, run, later, recorder)


if __name__ == "__main__":
    main()
