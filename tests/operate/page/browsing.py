"""A real browser and a real ``lum ui`` for the tests of the page."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, sync_playwright

from tests.warm import WarmProcess

__all__ = ["Served", "Tab", "chromium", "free_port", "launched", "served"]

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_WAIT_MS = 20_000  # on a busy machine; everything appears within a second on a quiet one


def chromium() -> str:
    """Return the system's browser, or skip the test."""
    found = next((path for name in _NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"needs a browser: found none of {', '.join(_NAMES)}; .ci/browser installs chromium")
    return found


@contextlib.contextmanager
def launched() -> Iterator[Browser]:
    """Start the browser, without a sandbox if this user is root, for whom there is none."""
    with sync_playwright() as playwright:
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=chromium(), args=flags)
        try:
            yield browser
        finally:
            browser.close()


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclass(frozen=True)
class Served:
    """A running server, and the address that opens its page."""

    process: WarmProcess
    opening: str

    def address(self, path: str) -> str:
        """Return the whole address of a path."""
        return self.opening.split("/runs")[0] + path


@contextlib.contextmanager
def served(folder: Path, port: int = 0, drift: Path | None = None, *more: str) -> Iterator[Served]:
    """Run ``lum ui`` over a folder of records, until the block ends."""
    reading, writing = os.pipe()
    environment = {**os.environ, "LUMINOSITY_DRIFT_DIR": str(drift or folder / "no-drift")}
    words = ("ui", "--no-browser", "--port", str(port), "--run_dir", str(folder), *more)
    with open(reading) as output, open(writing, "w") as theirs:
        process = WarmProcess("luminosity.cli.main", *words, cwd=folder, env=environment, stdout=theirs)
        theirs.close()
        try:
            found = None
            while found is None and (line := output.readline()):
                found = re.search(r"http://\S+token=\S+", line)
            assert found is not None, "lum ui ended before it printed its address"
            yield Served(process, found[0])
        finally:
            process.terminate()
            process.wait(timeout=60)


@dataclass
class Tab:
    """A page of the browser, and what its console has complained about."""

    page: Page
    complaints: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.set_default_timeout(_WAIT_MS)
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def _said(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)
