"""Large runs and live drift in a real browser: a cluster's nodes, many stages, narrow pages, drift that begins."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from luminosity.drift import DriftHistory
from tests.operate.page import drift_made_up, made_up, made_up_large
from tests.operate.page.browsing import Served, Tab, launched, served

pytestmark = pytest.mark.alone

expect.set_options(timeout=20_000)

_ID = "20260921T0000{:02}-aaaaa{}"
STAGES, CLUSTER = (_ID.format(number, number) for number in (1, 2))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with launched() as started:
        yield started


@pytest.fixture(scope="module")
def drift(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drift")
    DriftHistory(folder / "stream.sqlite").append(*drift_made_up.days(False, False, first=0))
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, drift: Path) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("runs")
    made_up.record(folder, made_up_large.many_stages(STAGES, 150, upto=20.0))
    made_up.record(folder, made_up_large.cluster(CLUSTER, workers=200, nodes=20, seconds=205.0))
    with served(folder, drift=drift) as running:
        yield running


@pytest.fixture
def page(browser: Browser, server: Served) -> Iterator[Page]:
    """A page that is signed in. The test fails if its console complains."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    tab = Tab(context.new_page())
    tab.page.goto(server.opening)
    yield tab.page
    context.close()
    assert tab.complaints == []


def test_a_cluster_shows_its_nodes_and_where_each_worker_is(page: Page, server: Served) -> None:
    page.goto(server.address(f"/runs/{CLUSTER}"))
    nodes = page.locator("#nodes tbody tr")
    expect(nodes).to_have_count(20)
    expect(page.locator(".run-head .facts")).not_to_contain_text("% done")  # a stage that goes on: unknown
    lost = page.locator("#nodes tr").filter(has=page.get_by_text("node-10", exact=True))
    expect(lost.locator("td[data-title='When']")).to_have_text("1.0 s to 2 min 0 s, from 3 min 20 s")
    expect(lost.locator("td[data-title='Lost']")).to_have_text("10")
    expect(lost.locator("td[data-title='Blocks']")).to_have_text("200 MB")
    expect(lost.locator("td[data-title='Devices']")).to_have_text("2 \N{MULTIPLICATION SIGN} L4, 55%, 13 GB")
    chart = page.locator("#timeline .chart").filter(has=page.get_by_role("heading", name="Nodes", exact=True))
    expect(chart.locator(".mark.went title")).to_have_text("2 min 0 s: node-10 went")
    page.get_by_role("button", name="Show the workers of node-0", exact=True).click()
    workers = page.locator("#workers tbody tr")
    expect(workers).to_have_count(10)
    first = workers.first
    expect(first.locator("td[data-title='Host']")).to_have_text("node-0")
    expect(first.locator("td[data-title='Process']")).to_have_text("20000")
    page.get_by_role("button", name="On node-0").click()
    expect(workers).to_have_count(25)
    page.get_by_label("Filter workers").fill("w59 node-19")
    expect(workers).to_have_count(1)
    expect(workers.first.locator("td[data-title='Process']")).to_have_attribute(
        "title", "a worker of a cluster says it with its first bundle, and the record keeps it for some of many workers"
    )


def test_of_many_stages_some_are_shown_with_those_that_matter(page: Page, server: Served) -> None:
    page.goto(server.address(f"/runs/{STAGES}"))
    rows = page.locator("#stages tbody tr")
    expect(page.locator("#stages tbody .state.held, #stages tbody .state.busy").first).to_be_attached()
    more = page.locator("#stages").get_by_role("button", name="Show 100 more of 150")
    shown = rows.count()
    assert 25 <= shown < 60
    more.click()
    expect(rows).to_have_count(shown + 100, timeout=20_000)
    page.locator("#graph [data-kind='stages']").click()
    page.locator("#graph .node").last.dispatch_event("click")  # a stage whose row is not there yet
    expect(page.locator("#stages tr.detail")).to_have_count(1)
    expect(page.locator("#stages button.open:focus")).to_have_attribute("aria-expanded", "true")


def test_names_on_narrow_pages_take_few_lines_and_keep_their_ends(browser: Browser, server: Served) -> None:
    context = browser.new_context(viewport={"width": 360, "height": 800})
    tab = Tab(context.new_page())
    tab.page.goto(server.opening)
    tab.page.goto(server.address(f"/runs/{STAGES}"))
    name = tab.page.locator("#stages tbody th").first
    expect(name).to_have_text("Read 1 for eve…hree languages (s0_0)", use_inner_text=True)
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= 360
    lines = "th.querySelector('.on-narrow').getClientRects().length"
    assert max(tab.page.locator("#stages tbody th").evaluate_all(f"(all) => all.map((th) => {lines})")) <= 4
    tab.page.goto(server.address(f"/runs/{CLUSTER}"))
    expect(tab.page.locator("#nodes tbody tr").first).to_be_visible()
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= 360
    context.close()
    assert tab.complaints == []


def test_drift_that_begins_and_ends_is_said_once_each(page: Page, server: Served, drift: Path) -> None:
    page.goto(server.address("/drift"))
    news = page.locator(".news .entry")
    points = page.locator(".card figure").first.locator(".steady, .drifted")
    expect(points).to_have_count(2)
    expect(news).to_have_count(0)
    page.evaluate("document.querySelector('.card').isTheSame = true")
    history = DriftHistory(drift / "stream.sqlite")
    history.append(*drift_made_up.days(True, True, first=2))
    expect(points).to_have_count(4)
    expect(news).to_have_count(1)
    expect(news.first).to_contain_text("drift began")
    expect(page.locator(".card .pill")).to_have_text("drift")
    expect(page).to_have_title("(1) Drift · Luminosity")
    history.append(*drift_made_up.days(True, False, first=4))
    expect(points).to_have_count(6)
    expect(news).to_have_count(2)
    expect(news.first).to_contain_text("drift is over")
    assert page.evaluate("document.querySelector('.card').isTheSame")  # what the reader points at stays
    page.get_by_role("button", name="Read").click()
    expect(page.locator(".news")).to_be_hidden()
    expect(page.locator("#alerts .entry")).to_have_count(2)
