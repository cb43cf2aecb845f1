"""The page shows a real pipeline as its author wrote it: composites that open, the time of steps, and what changed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from luminosity.runs import records
from tests.operate.page import made_up
from tests.operate.page.browsing import Served, Tab, launched, served
from tests.warm import WarmProcess

pytestmark = pytest.mark.alone

expect.set_options(timeout=20_000)

_PIPELINE = """
import sys, time
import apache_beam as beam

class Enrich(beam.PTransform):
    def expand(self, rows):
        return rows | "Trim the text of each review" >> beam.Map(lambda n: n) | "Embed" >> beam.Map(slow)

def slow(number):
    begin = time.perf_counter()
    while time.perf_counter() - begin < {seconds}:
        pass
    return number

if __name__ == "__main__":
    with beam.Pipeline() as pipeline:
        rows = pipeline | "Read reviews" >> beam.Create(range(200)) | beam.Reshuffle()
        rows | "Enrich reviews" >> Enrich() | "Write reviews" >> beam.io.WriteToText("reviews")
"""
_FAST, _SLOW = 0.001, 0.004


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with launched() as started:
        yield started


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs of a pipeline, of which the second one has other code and other options."""
    folder, work = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("work")
    script = work / "reviews.py"
    for seconds, option in ((_FAST, "--cpu_workers=1"), (_SLOW, "--cpu_workers=2")):
        script.write_text(_PIPELINE.format(seconds=seconds))
        words = (
            "run",
            str(script),
            f"--run_dir={folder}",
            option,
            "--api_key=sk-0123456789abcdef",
            "--job_name=nightly",
        )
        process = WarmProcess("luminosity.cli.main", *words, cwd=work, env=dict(os.environ))
        assert process.wait(timeout=120) == 0
    return folder


@pytest.fixture(scope="module")
def server(browser: Browser, runs: Path) -> Iterator[Served]:
    with served(runs) as running:
        yield running


@pytest.fixture
def page(browser: Browser, server: Served) -> Iterator[Page]:
    """A page that is signed in. The test fails if its console complains."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    opened = Tab(context.new_page())
    opened.page.goto(server.opening)
    yield opened.page
    context.close()
    assert opened.complaints == []


def boxes(page: Page) -> list[str]:
    found = page.locator("#graph .node")
    return [str(found.nth(index).get_attribute("aria-label")).partition(":")[0] for index in range(found.count())]


def test_composites_are_folded_and_open_with_a_click(page: Page, server: Served, runs: Path) -> None:
    page.goto(server.address(f"/runs/{records.run_ids(runs)[0]}"))
    expect(page.locator("#graph .node")).to_have_count(4)
    folded = ["Read reviews", "Reshuffle", "Enrich reviews", "Write reviews"]
    assert boxes(page) == folded
    page.locator("#graph .node[aria-label^='Enrich reviews:']").click()
    expect(page.locator("#graph .node")).to_have_count(5)
    assert boxes(page) == ["Read reviews", "Reshuffle", "Trim the text of each review", "Embed", "Write reviews"]
    cut = page.locator("#graph .node[aria-label^='Trim']")
    expect(cut.locator(".label")).to_have_text(re.compile("^Tri.*….*each review$"))  # the end stays
    expect(cut.locator("title")).to_have_text(re.compile("^Enrich reviews/Trim the text of each review"))
    rows = page.locator("#steps tbody tr")
    expect(rows).to_have_count(6)  # the table opens with the graph
    page.locator("#graph .frame-head").click()
    expect(page.locator("#graph .node")).to_have_count(4)
    page.locator("#steps tr[data-step='Write reviews'] button.open").click()
    expect(page.locator("#graph .frame-head")).to_have_count(3)  # Write and WriteImpl open with it
    assert "FinalizeWrite" in boxes(page)
    page.locator("#steps tr[data-step='Write reviews'] button.open").click()
    expect(page.locator("#graph .node")).to_have_count(4)
    page.locator("#graph [data-kind='stages']").click()
    expect(page.locator("#graph .node[aria-label^='Write reviews (FinalizeWrite):']")).to_have_count(1)


def test_the_slow_step_is_named(page: Page, server: Served, runs: Path) -> None:
    page.goto(server.address(f"/runs/{records.run_ids(runs)[0]}"))
    expect(page.locator(".run-head .pace")).to_contain_text(
        re.compile(r"Enrich reviews/Embed: \d+% of the steps' time of the stage")
    )
    page.locator("#steps thead button", has_text="Time").click()
    first = page.locator("#steps tbody tr").first
    expect(first).to_have_attribute("data-step", "Enrich reviews")
    expect(first.locator("td[data-title='Elements']")).to_have_text("200")
    expect(page.locator("#steps tr[data-step='Reshuffle']")).to_contain_text("between stages")
    first.locator(".in-stages button").first.click()
    expect(page.locator("#stages tr.detail")).to_have_count(1)
    expect(page.locator("#stages .step-names")).to_contain_text("Enrich reviews/Embed")


def test_the_list_knows_arguments_without_secrets_and_groups_by_job(page: Page, runs: Path) -> None:
    rows = page.locator(".runs tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.first.locator(".arguments")).to_contain_text("--cpu_workers=2 --api_key=***")
    for path in runs.iterdir():
        assert "0123456789abcdef" not in path.read_text(errors="replace"), path.name
    page.get_by_role("searchbox").fill("cpu_workers=1")
    expect(rows).to_have_count(1)
    page.get_by_role("button", name="By job").click()
    job = page.locator(".jobs tbody tr")
    expect(job.locator("td[data-title='Runs']")).to_have_text("1")
    page.get_by_role("searchbox").fill("")
    expect(job.locator("td[data-title='Runs']")).to_have_text("2")
    expect(job.locator("td[data-title='Duration'] .bar")).to_have_count(2)
    expect(job.locator("td[data-title='Pace'] a")).to_have_count(0)  # two runs say nothing of a pace
    job.get_by_role("button", name="nightly").click()
    expect(rows).to_have_count(2)
    expect(page.locator(".of-job")).to_contain_text("Runs of nightly")


def test_two_runs_say_which_steps_and_what_changed(page: Page, server: Served, runs: Path) -> None:
    slow, fast = records.run_ids(runs)
    page.goto(server.address(f"/compare?a={fast}&b={slow}"))
    changes = page.locator("#compare-changes")
    expect(changes.locator("tr", has_text="--cpu_workers")).to_have_text("option--cpu_workers12")
    expect(changes.locator("tr", has_text="reviews.py")).to_contain_text("code")
    first = page.locator("#compare-steps tbody tr").first
    expect(first.locator("th")).to_have_text("Enrich reviews/Embed")
    expect(first.locator(".change")).to_contain_text("more")
    page.locator("#compare-steps").get_by_role("button", name="Time for an element").click()
    expect(first.locator("th")).to_have_text("Enrich reviews/Embed")


def test_hostile_steps_stay_text_when_they_open(browser: Browser, tmp_path: Path) -> None:
    run = "20260921T000005-aaaaa5"
    made_up.record(tmp_path, made_up.hostile(run))
    context = browser.new_context()
    with served(tmp_path) as running:
        tab = Tab(context.new_page())
        tab.page.goto(running.opening)
        tab.page.get_by_role("button", name="By job").click()
        expect(tab.page.locator(".jobs tbody")).to_contain_text("<script>document.title='broken into'</script>")
        tab.page.goto(running.address(f"/runs/{run}"))
        expect(tab.page.locator("#steps")).to_contain_text("<script>document.title='broken into'</script>")
        expect(tab.page.locator(".at-element")).to_contain_text("<img src=x onerror=")
        assert tab.page.title().endswith("· Luminosity")
        assert tab.page.locator("main img, main script").count() == 0
        assert tab.complaints == []
    context.close()
