"""Actions of the page in a real browser, on real runs: each is confirmed, done, and shown."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from luminosity.runs import records
from tests.operate.page.browsing import Served, Tab, launched, served
from tests.processes import wait_for
from tests.warm import WarmProcess

pytestmark = pytest.mark.alone

expect.set_options(timeout=30_000)

_TIMEOUT_S = 60.0
_STREAM = """
import apache_beam as beam
from apache_beam.transforms.periodicsequence import PeriodicImpulse

if __name__ == "__main__":
    with beam.Pipeline() as pipeline:
        pipeline | PeriodicImpulse(fire_interval=0.05) | "Key" >> beam.Map(lambda at: (1, at)) | beam.Reshuffle()
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with launched() as started:
        yield started


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def server(browser: Browser, folder: Path) -> Iterator[Served]:
    with served(folder) as running:
        yield running


@contextlib.contextmanager
def opened(browser: Browser, address: str) -> Generator[Page]:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    try:
        tab = Tab(context.new_page())
        tab.page.goto(address)
        yield tab.page
        said = [line for line in tab.complaints if "status of 4" not in line]  # a refusal is told by the page as well
        assert said == []
    finally:
        context.close()


@contextlib.contextmanager
def running(folder: Path, tmp_path: Path, *words: str) -> Generator[tuple[str, WarmProcess]]:
    """Start a stream; yield the id of its run, and its process."""
    (tmp_path / "endless.py").write_text(_STREAM)
    before = set(records.run_ids(folder))
    words = ("run", "endless.py", "--streaming", f"--run_dir={folder}", "--cpu_workers=1", "--progress=off", *words)
    process = WarmProcess("luminosity.cli.main", *words, cwd=tmp_path, env=dict(os.environ))
    try:
        assert wait_for(lambda: set(records.run_ids(folder)) - before, _TIMEOUT_S)
        (run,) = set(records.run_ids(folder)) - before
        yield run, process
    finally:
        process.kill()
        process.wait(timeout=_TIMEOUT_S)


def confirm(page: Page, action: str, button: str) -> None:
    page.locator(f".run-actions [data-action='{action}']").click()
    page.get_by_role("dialog").get_by_role("button", name=button).click()


def test_a_savepoint_is_saved_and_a_stream_drained(
    browser: Browser, server: Served, folder: Path, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    with running(folder, tmp_path, f"--checkpoint_dir={checkpoint}") as (run, process):
        with opened(browser, server.opening) as page:
            expect(page).to_have_url(server.address("/runs"))  # without any token
            page.goto(server.address(f"/runs/{run}"))
            expect(page.locator("#stream .pace")).to_contain_text("checkpoint")
            wait_for(lambda: re.search("^[1-9]", page.locator("#stream .pace").inner_text()), _TIMEOUT_S)
            page.locator(".run-actions [data-action='save']").click()
            name = page.get_by_label("Name of the savepoint")
            expect(name).to_be_focused()
            name.fill("../outside")
            page.get_by_role("button", name="Save it").click()
            expect(page.get_by_role("dialog").get_by_role("alert")).to_contain_text("found the name '../outside'")
            name.fill("from-the-page")
            name.press("Enter")
            expect(page.locator(".said")).to_contain_text("Saved from-the-page")
            assert [path.name for path in (checkpoint / "savepoints").iterdir()] == ["from-the-page"]
            expect(page.locator(".past summary")).to_contain_text("save from-the-page · done: Saved")
            confirm(page, "drain", "Drain the run")
            expect(page.locator(".run-head .pill")).to_have_text("drained")
            expect(page.locator(".run-actions")).to_be_hidden()
        assert process.wait(timeout=_TIMEOUT_S) == 0


def test_a_durable_run_is_stopped_and_another_one_cancelled(
    browser: Browser, server: Served, folder: Path, tmp_path: Path
) -> None:
    with opened(browser, server.opening) as page:
        expect(page.locator("h1")).to_have_text("Runs")
        with running(folder, tmp_path, f"--checkpoint_dir={tmp_path / 'checkpoint'}") as (run, process):
            page.goto(server.address(f"/runs/{run}"))
            confirm(page, "stop", "Stop the run")
            expect(page.locator(".run-head .pill")).to_have_text("stopped")
            process.wait(timeout=_TIMEOUT_S)
        with running(folder, tmp_path) as (run, process):
            page.goto(server.address(f"/runs/{run}"))
            actions = page.locator(".run-actions button")
            expect(actions).to_have_text("Cancel …")
            actions.click()
            expect(page.get_by_role("dialog")).to_contain_text("It has no checkpoint")
            page.get_by_role("button", name="Not now").click()
            expect(page.get_by_role("dialog")).to_be_hidden()
            expect(page.locator(".past")).to_be_hidden()  # nothing was done
            confirm(page, "stop", "Cancel the run")
            expect(page.locator(".run-head .pill")).to_have_text("cancelled")
            process.wait(timeout=_TIMEOUT_S)


def test_without_its_token_and_with_read_only_a_page_reads(
    browser: Browser, server: Served, folder: Path, tmp_path: Path
) -> None:
    with running(folder, tmp_path) as (run, process):
        with opened(browser, server.opening) as page:
            page.evaluate("localStorage.clear()")  # as a browser that has the cookie alone
            page.goto(server.address(f"/runs/{run}"))
            page.locator(".run-actions button").click()
            expect(page.get_by_role("dialog").get_by_role("alert")).to_contain_text("open the address that `lum ui`")
            expect(page.get_by_role("button", name="Cancel the run")).to_be_disabled()
            page.keyboard.press("Escape")
            page.evaluate("localStorage.setItem('action-token', 'of-another-server')")
            confirm(page, "stop", "Cancel the run")
            expect(page.get_by_role("dialog").get_by_role("alert")).to_contain_text("open the address that `lum ui`")
        with served(folder, 0, None, "--read-only") as other, opened(browser, other.opening) as page:
            page.goto(other.address(f"/runs/{run}"))
            expect(page.locator("#connection")).to_have_text("Live")
            expect(page.locator(".run-actions")).to_be_hidden()
        assert process.poll() is None
