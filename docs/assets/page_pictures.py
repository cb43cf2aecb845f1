"""Takes the pictures of the page in docs/operate.md, from made-up records: ``python docs/assets/page_pictures.py``.

Run it in the repository's root, with Chromium installed.
"""

from __future__ import annotations

import io
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page

_ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(_ROOT))

from tests.operate.page import made_up, made_up_large  # noqa: E402
from tests.operate.page.browsing import Served, launched, served  # noqa: E402
from tests.operate.page.drift_made_up import drift_history  # noqa: E402

__all__: list[str] = []

_WIDTH = 1280
_MOST_BYTES = 150_000  # of a picture
_ID = "20260921T0000{:02}-aaaaa{}"
_DONE, _FASTER, _LIVE, _CLUSTER, _STREAM = (_ID.format(number, number) for number in (1, 2, 3, 4, 5))


_PAST = (  # other runs in the list: the script, and the speed of its slow step
    *(("films.py", 1.0 + 0.05 * (number % 3)) for number in range(15)),
    ("films.py", 0.45),
    *(("prices.py", 1.2 + 0.06 * (number % 4)) for number in range(12)),
)


@dataclass(frozen=True)
class Picture:
    """A part of a page: from the top of one element to the bottom of another."""

    name: str
    path: str
    first: str
    last: str
    click: str = ""  # what to choose before


_PICTURES = (
    Picture("page-run", f"/runs/{_LIVE}", "body", "#steps", ".node[aria-label^='Embed:']"),
    Picture("page-jobs", "/runs", "body", ".jobs", "[data-view='jobs']"),
    Picture("page-charts", f"/runs/{_LIVE}", "#timeline", "#models"),
    Picture("page-actions", f"/runs/{_STREAM}", "body", ".facts"),
    Picture("page-nodes", f"/runs/{_CLUSTER}", "#timeline", "#nodes"),
    Picture("page-compare", f"/compare?a={_DONE}&b={_FASTER}", "body", "#compare-steps"),
    Picture("page-drift", "/drift", "#reference-0", ".cards"),
)


def main() -> None:
    """Write the pictures into docs/."""
    with tempfile.TemporaryDirectory() as folder:
        runs, drift = Path(folder) / "runs", Path(folder) / "drift"
        drift.mkdir()
        made_up.record(runs, made_up.batch(_DONE))
        made_up.record(runs, made_up.batch(_FASTER, speed=1.6))
        made_up.record(runs, made_up.batch(_LIVE, upto=95))
        for number, (name, speed) in enumerate(_PAST, start=10):
            made_up.record(runs, made_up.batch(_ID.format(number, number % 10), speed=speed, name=name, apart_s=4.0))
        made_up.record(runs, made_up.stream(_STREAM, seconds=300))
        made_up.record(runs, made_up_large.cluster(_CLUSTER, workers=32, nodes=8))
        drift_history(drift / "reviews.sqlite")
        with launched() as browser, served(runs, drift=drift) as server:
            for picture in _PICTURES:
                _write(picture, _shot(browser, server, picture))


def _shot(browser: Browser, server: Served, picture: Picture) -> bytes:
    page: Page = browser.new_page(viewport={"width": _WIDTH, "height": 900}, color_scheme="light")
    page.goto(server.opening)
    page.goto(server.address(picture.path))
    if picture.click:
        page.locator(picture.click).first.click()
    page.locator(picture.last).first.wait_for()
    if picture.first == "#timeline":
        page.get_by_role("slider").nth(1).focus()  # one cursor points into all charts
        for _ in range(25):
            page.keyboard.press("ArrowLeft")
    page.wait_for_timeout(800)  # charts are drawn a moment after the tables
    top, end = (page.locator(where).first.bounding_box() for where in (picture.first, picture.last))
    assert top is not None
    assert end is not None
    above = max(0.0, top["y"] + page.evaluate("scrollY") - (12 if picture.first != "body" else 0))
    below = end["y"] + end["height"] + page.evaluate("scrollY") + 16
    shot = page.screenshot(full_page=True, clip={"x": 0, "y": above, "width": _WIDTH, "height": below - above})
    page.close()
    return shot


def _write(picture: Picture, shot: bytes) -> None:
    path = _ROOT / "docs" / f"{picture.name}.webp"
    for quality in (88, 80, 70, 60):
        content = io.BytesIO()
        Image.open(io.BytesIO(shot)).convert("RGB").save(content, "webp", quality=quality, method=6)
        if content.tell() <= _MOST_BYTES:
            break
    path.write_bytes(content.getvalue())
    print(f"{path.relative_to(_ROOT)}: {content.tell():,} bytes")


if __name__ == "__main__":
    main()
