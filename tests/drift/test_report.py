"""The report of a test: what it shows, that it loads nothing, and that no table can inject markup."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from luminosity.drift import RBF, Linear, MMDTestResult, PastTest, Polynomial, RowKernel, mmd_test, write_report
from luminosity.drift.mmd.witness import strongest_kernel
from luminosity.errors import DriftError

_RANDOM = np.random.default_rng(0)
_REFERENCE = _RANDOM.normal(size=(3000, 5)).astype(np.float32)
_CURRENT = np.concatenate([_RANDOM.normal(size=(2500, 5)), _RANDOM.normal(5, 0.3, size=(500, 5))]).astype(np.float32)


class Page(HTMLParser):
    """Collects the tags of a page, what they refer to, and the text between them."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.classes: list[str] = []
        self.references: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(path.read_text())
        assert self._open == [], "every tag is closed"

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        self.classes.append(dict(attrs).get("class", ""))
        self.references += [value for name, value in attrs if name in ("src", "href", "xlink:href", "action")]
        assert not any(name.startswith("on") for name, _ in attrs)
        if tag != "meta":
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self._open or self._open[-1] != "style":
            self.text += f"{data}\n"


@pytest.fixture(scope="module")
def drifted() -> MMDTestResult:
    return mmd_test(_REFERENCE, _CURRENT, [RBF(1.0), RBF(3.0)])


def test_the_report_is_one_page_that_loads_nothing(tmp_path: Path, drifted: MMDTestResult) -> None:
    path = tmp_path / "drift.html"
    tests = [PastTest.of(drifted, reference="r", current=f"c{day}") for day in range(3)]
    write_report(path, drifted, _REFERENCE, _CURRENT, history=tests, settings={"columns": "v"})

    page = Page(path)
    for heading in (
        "Drift",
        "Could it be chance?",
        "What each kernel detects",
        "Both samples",
        "Over time",
        "Settings",
    ):
        assert f"{heading}\n" in page.text
    assert "Settings\n" in page.text
    assert page.references == []
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert not re.search(r"url\(|@import", path.read_text())
    assert path.stat().st_size < 2_000_000
    assert page.classes.count("dot reference") == page.classes.count("dot current") == 2000
    assert page.classes.count("drifted mark") == 2 * 3 + 1  # the statistic and p of each test, and the legend
    assert "none of 1,000 random permutations of the rows" in page.text
    assert "\n3,000\n" in page.text


def test_new_rows_are_shown_with_their_other_columns(tmp_path: Path, drifted: MMDTestResult) -> None:
    """The last 500 rows were moved; rows with equal contents are shown once."""
    requested: list[int] = []

    def of_current(numbers: Any) -> list[dict[str, Any]]:
        requested.extend(numbers)
        return [{"row": number, "text": "same" if number % 2 else f"text {number}"} for number in numbers]

    write_report(
        tmp_path / "drift.html",
        drifted,
        _REFERENCE,
        _CURRENT,
        details=(lambda numbers: [{"row": number, "gone": None, "data": b"1234"} for number in numbers], of_current),
    )
    assert min(requested) >= 2500
    text = Page(tmp_path / "drift.html").text
    assert text.count("\nsame\n") == 1
    assert re.search(r"and \d+ more rows like it", text)
    assert "4 bytes" in text


def test_a_text_is_shown_once_with_its_count(tmp_path: Path) -> None:
    """300 rows have one of three texts, each with its own id; the next rows are shown, too."""
    random = np.random.default_rng(0)
    far = np.repeat(9 + random.normal(size=(3, 4)), 100, axis=0)
    far[7] += 1e-3  # The same text with other numbers, as from a batch of another size.
    current = np.concatenate([random.normal(size=(700, 4)), far])
    texts = [f"review {n} of a quiet month" for n in range(700)] + [
        f"Outage number {n // 100} again" for n in range(300)
    ]

    def details(numbers: Any) -> list[dict[str, Any]]:
        return [{"row": number, "id": f"a-{number}", "text": texts[number]} for number in numbers]

    reference = random.normal(size=(1000, 4))
    write_report(tmp_path / "d.html", mmd_test(reference, current), reference, current, details=(details, details))
    page = Page(tmp_path / "d.html").text
    new = page[page.index("New: rows") : page.index("Gone: rows")]
    assert [new.count(f"Outage number {n} again") for n in range(3)] == [1, 1, 1]
    assert new.count("and 99 more rows like it") == 3
    assert new.count("of a quiet month") == 5


def test_no_table_can_inject_markup(tmp_path: Path, drifted: MMDTestResult) -> None:
    evil = "</td></table><script>alert(1)</script><img src=x onerror=alert(1)>\"'&" + "x" * 5000

    def details(numbers: Any) -> list[dict[str, Any]]:
        return [{evil: evil, "nested": {"a": [evil]}} for _ in numbers]

    tests = [PastTest.of(drifted, reference=evil, current=evil)]
    write_report(
        tmp_path / "drift.html",
        drifted,
        _REFERENCE[:100],
        _CURRENT[-100:],
        names=(evil, evil),
        details=(details, details),
        history=tests,
        settings={evil: evil},
    )
    page = Page(tmp_path / "drift.html")
    assert not {"script", "img"} & set(page.tags)
    assert "<script>alert(1)</script>" in page.text


@pytest.mark.parametrize("width", [1, 2])
def test_narrow_rows_without_drift(tmp_path: Path, width: int) -> None:
    result = mmd_test(_REFERENCE[:200, :width], _REFERENCE[200:400, :width])
    write_report(tmp_path / "page.html", result, _REFERENCE[:200, :width], _REFERENCE[200:400, :width])
    page = Page(tmp_path / "page.html")
    assert "No drift\n" in page.text
    assert "differ by no more than chance explains" in page.text
    assert ("Histograms of both samples" in (tmp_path / "page.html").read_text()) == (width == 1)


def test_a_result_alone_makes_a_page(tmp_path: Path) -> None:
    """Few rows have no interval, and all of the null's values may be equal."""
    write_report(tmp_path / "page.html", mmd_test([0.0, 0.0], [1.0, 1.0], permutations=19))
    page = Page(tmp_path / "page.html")
    assert "nan" not in page.text.lower()
    assert "Both samples" not in page.text


def test_constant_columns_are_drawn(tmp_path: Path) -> None:
    rows = np.zeros((50, 3))
    write_report(tmp_path / "page.html", mmd_test(rows, rows, RBF(1.0)), rows, rows)
    assert "nan" not in (tmp_path / "page.html").read_text()
    assert not re.search(
        "10[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]", Page(tmp_path / "page.html").text
    )  # Everything is zero: no axis has a power of ten.


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (1e9 + np.linspace(0, 5, 50), "\n0\n1\n2\n3\n4\n5\nvalue, minus 1,000,000,000\n"),
        (1000 + np.linspace(0, 0.5, 50), "\n0\n0.1\n0.2\n0.3\n0.4\n0.5\nvalue, minus 1,000\n"),
        (np.repeat([0.3, 0.1 + 0.2], 25), "\n0.15\n0.2\n0.25\n0.3\n0.35\n0.4\n0.45\nvalue\n"),
        (np.full(50, 5e20), "\n3\n4\n5\n6\n7\nvalue (\N{MULTIPLICATION SIGN} 10²⁰)\n"),
        (1e-25 * np.linspace(0, 5, 50), "\n0\n1\n2\n3\n4\n5\nvalue (\N{MULTIPLICATION SIGN} 10⁻²⁵)\n"),
    ],
)
def test_labels_of_an_axis_differ(tmp_path: Path, values: Any, said: str) -> None:
    rows = values[:, None]
    write_report(tmp_path / "page.html", mmd_test(rows, rows, RBF(float(values[-1]))), rows, rows)
    assert said in re.sub(r"\n+", "\n", Page(tmp_path / "page.html").text)


def test_an_axis_without_spread_is_as_long_as_the_other(tmp_path: Path) -> None:
    """Equal columns differ only by rounding, which must not fill the whole height."""
    rows = np.outer(_REFERENCE[:100, 0], [1, 2, 0.1])
    write_report(tmp_path / "page.html", mmd_test(rows, rows), rows, rows)
    page = (tmp_path / "page.html").read_text()
    places = {float(found) for found in re.findall(r'cy="([\d.]+)" r="2.4"', page)}
    assert max(places) - min(places) < 1


def test_the_strongest_kernel_scores_rows(tmp_path: Path, drifted: MMDTestResult) -> None:
    assert strongest_kernel(drifted) in (RBF(1.0), RBF(3.0))
    small = _REFERENCE[:50], _CURRENT[-50:]
    for kernel in (Linear(), Polynomial(2)):
        assert strongest_kernel(mmd_test(*small, kernel)) == kernel
    own = RowKernel(lambda x, y: x @ y)
    with pytest.raises(DriftError, match="a kernel of your own"):
        write_report(tmp_path / "page.html", mmd_test(*small, own), *small)
    write_report(tmp_path / "page.html", mmd_test(*small, own), *small, kernel=own)


def test_tests_within_seconds_do_not_hide_each_other(tmp_path: Path, drifted: MMDTestResult) -> None:
    """Tests days apart are placed by time; if some follow within seconds, every test gets a step of its own."""

    def places(*hours: float) -> list[float]:
        began = datetime(2030, 1, 1, tzinfo=timezone.utc)
        tests = [
            replace(PastTest.of(drifted, reference="r", current="c"), time=(began + timedelta(hours=each)).isoformat())
            for each in hours
        ]
        write_report(tmp_path / "page.html", drifted, history=tests)
        drawn = (tmp_path / "page.html").read_text().partition("tests over time")[2]
        found = re.findall(r'<circle cx="([\d.]+)" cy="[\d.]+" r="4.5" class="drifted mark"><title>', drawn)
        return [float(each) for each in found[: len(hours)]]

    by_time = places(0, 24, 72)
    assert by_time[2] - by_time[1] == pytest.approx(2 * (by_time[1] - by_time[0]), abs=0.2)
    assert "one step per test" not in Page(tmp_path / "page.html").text
    in_order = np.diff(places(0, 24, 720, 720 + 1 / 600, 720 + 1 / 300))
    assert in_order == pytest.approx([in_order[0]] * 4, abs=0.2)
    text = Page(tmp_path / "page.html").text
    assert "one step per test" in text
    assert len(set(re.findall(r"\d\d Jan \d\d:\d\d:\d\d", text))) == 5
    places(0)
    assert "one step per test" not in Page(tmp_path / "page.html").text


def test_a_path_that_can_not_be_written_is_an_error(tmp_path: Path, drifted: MMDTestResult) -> None:
    with pytest.raises(DriftError, match=r"missing/drift\.html: can't write"):
        write_report(tmp_path / "missing" / "drift.html", drifted)
