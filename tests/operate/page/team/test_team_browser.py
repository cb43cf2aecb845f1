"""A team's page in a real browser, over TLS: sign-in at a provider, an action with the user's name, and signing out."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from luminosity.operate.page.audit import Audit
from luminosity.runs.journal import Action
from luminosity.runs.recorder import Recorder
from tests.operate.page.browsing import Tab, free_port, launched
from tests.operate.page.one_run import RUN, STARTED, happenings, snapshot
from tests.operate.page.team.test_settings import write_certificate
from tests.processes import wait_for
from tests.warm import WarmProcess

pytest.importorskip("joserfc")

from tests.operate.page.team.provider import CLIENT, SECRET, Provider, provider

pytestmark = pytest.mark.alone

_TIMEOUT_S = 60.0
_SETTINGS = """\
url = "{origin}"
users = ["*@example.org"]
actors = ["ana@example.org"]
certificate = "page.crt"
key = "page.key"

[openid]
issuer = "{issuer}"
client_id = "{client}"
client_secret_file = "client-secret"
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with launched() as started:
        yield started


@pytest.fixture
def idp() -> Iterator[Provider]:
    with provider() as found:
        yield found


@contextlib.contextmanager
def served(folder: Path, records: Path, idp: Provider) -> Generator[str]:
    """Run ``lum ui --listen`` over a folder of records; yield the address of its page."""
    port = free_port()
    origin = f"https://localhost:{port}"
    write_certificate(folder)
    (folder / "client-secret").touch(0o600)
    (folder / "client-secret").write_text(SECRET)
    (folder / "team.toml").write_text(_SETTINGS.format(origin=origin, issuer=idp.issuer, client=CLIENT))
    words = ("ui", "--listen", f"127.0.0.1:{port}", "--login", "team.toml", "--run_dir", str(records))
    said = folder / "said.txt"
    with open(said, "w") as output:
        environment = {**os.environ, "LUMINOSITY_DRIFT_DIR": str(folder / "drift")}
        process = WarmProcess("luminosity.cli.main", *words, cwd=folder, env=environment, stdout=output)
    try:
        assert wait_for(lambda: "Ctrl-C" in said.read_text(), _TIMEOUT_S)
        assert f"are at {origin}/runs for who may sign in (*@example.org)" in said.read_text()
        assert "token" not in said.read_text()
        yield origin
    finally:
        process.terminate()
        process.wait(timeout=_TIMEOUT_S)


def test_a_reader_signs_in_acts_and_signs_out(browser: Browser, idp: Provider, tmp_path: Path) -> None:
    records, taken = tmp_path / "runs", list[Action]()
    live = Recorder(records, taken.append)
    for event in [STARTED, *happenings()]:
        live(event)
    with (
        served(tmp_path, records, idp) as origin,
        contextlib.closing(browser.new_context(ignore_https_errors=True)) as context,
    ):
        tab = Tab(context.new_page())
        page = tab.page
        page.goto(f"{origin}/runs/{RUN}")
        expect(page).to_have_url(f"{origin}/runs/{RUN}")  # by way of the provider
        expect(page.locator(".account")).to_contain_text("ana@example.org")
        (cookie,) = context.cookies()
        assert cookie["name"] == "__Host-luminosity"
        assert (cookie["httpOnly"], cookie["secure"], cookie["sameSite"]) == (True, True, "Lax")
        assert page.evaluate("document.cookie") == ""
        page.locator(".run-actions [data-action='stop']").click()
        page.get_by_role("dialog").get_by_role("button", name="Cancel the run").click()
        expect(page.locator(".said")).to_contain_text("The run was asked to end")
        expect(page.locator(".past summary")).to_contain_text("ana@example.org · stop · done")
        live(snapshot(8.0, 260))
        assert taken == ["stop"]
        assert json.loads(Audit(records).path.read_text())["user"] == "ana@example.org"
        page.get_by_role("button", name="Sign out").click()
        expect(page.locator("h1")).to_have_text("You are signed out")
        assert context.cookies() == []

        idp.user = "zoe@example.org"  # who may only read
        page.get_by_role("link", name="Sign in").click()
        expect(page.locator(".account")).to_contain_text("zoe@example.org")
        page.goto(f"{origin}/runs/{RUN}")
        expect(page.locator("#connection")).to_have_text("Live")
        expect(page.locator(".run-actions")).to_be_hidden()
        idp.user = "eve@evil.example"
        page.get_by_role("button", name="Sign out").click()
        page.get_by_role("link", name="Sign in").click()
        expect(page.locator("h1")).to_have_text("You may not read this page")
        assert [line for line in tab.complaints if "status of 4" not in line] == []
