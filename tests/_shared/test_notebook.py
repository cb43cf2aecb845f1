"""Names of notebooks, and results of drift tests as HTML; tests/engine/workers/test_notebooks.py has a real kernel."""

from __future__ import annotations

import base64
import re
import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from luminosity._shared.notebook import kernel_shell, notebook_name
from luminosity.drift import OnlineMMD, compare_keys, mmd_test

_RANDOM = np.random.default_rng(0)
X, Y = _RANDOM.normal(size=(2, 60, 2))


def in_shell(monkeypatch: pytest.MonkeyPatch, **attributes: Any) -> None:
    shell = SimpleNamespace(**attributes)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))


@pytest.mark.parametrize(
    ("variables", "environment", "name"),
    [
        ({}, {}, "notebook"),
        ({}, {"JPY_SESSION_NAME": "/home/me/monthly drift.ipynb"}, "monthly drift.ipynb"),
        ({}, {"JPY_SESSION_NAME": "RTC:json:notebook:1234"}, "notebook"),
        ({}, {"PAPERMILL_INPUT_PATH": "jobs/daily.ipynb"}, "daily.ipynb"),
        ({"__vsc_ipynb_file__": "/home/me/code.ipynb"}, {"JPY_SESSION_NAME": "/x/other.ipynb"}, "code.ipynb"),
    ],
)
def test_the_name_of_a_notebook(
    variables: dict[str, str], environment: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("JPY_SESSION_NAME", "PAPERMILL_INPUT_PATH"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    in_shell(monkeypatch, kernel=object(), user_ns=variables)
    assert notebook_name() == name


def test_a_terminal_is_not_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    in_shell(monkeypatch, user_ns={})  # IPython in a terminal has no kernel.
    assert kernel_shell() is None
    assert notebook_name() == ""
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    assert notebook_name() == ""


def picture_of(html: str) -> str:
    (data,) = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', html)
    drawn = base64.b64decode(data).decode()
    ElementTree.fromstring(drawn)  # An image must be whole XML.
    return drawn


def test_a_result_shows_its_verdict_and_histogram() -> None:
    html: Any = mmd_test(X, Y + 1)._repr_html_()  # pyright: ignore[reportPrivateUsage]
    assert re.match(r'<div><b style="color: #c44500">drift</b>: p = ', html)
    assert "60 rows against 60" in html
    assert "<style" not in html  # It would apply to the whole notebook.
    assert "these samples: " in picture_of(html)


def test_a_comparison_by_key_is_a_table() -> None:
    found: Any = compare_keys({"<de>": X, "fr": X}, {"<de>": Y}, by="language")
    html = found._repr_html_()
    assert html.count("<tr>") == 3
    assert "&lt;de&gt;" in html
    assert str(found).splitlines()[:2] == [
        "drift: 1 of 2 values of language drifted",
        "  fr    gone: no rows in the current sample, 60 rows in the reference",
    ]
    gone = found.results["fr"]
    assert "<img" not in gone._repr_html_()


def test_a_detector_shows_how_near_it_is_to_an_alarm() -> None:
    detector: Any = OnlineMMD(_RANDOM.normal(size=(400, 2)), expected_run_time=500, window=20, simulations=100)
    assert "0 rows seen" in detector._repr_html_()
    detector.update(X[:10])
    assert "no drift so far" in detector._repr_html_()
    assert "threshold" in detector._repr_html_()
    detector.update(X + 5)
    assert f"drift detected after {detector.detected_at} rows" in detector._repr_html_()
    assert repr(detector).startswith(f"OnlineMMD(drift at row {detector.detected_at}, rows_seen=70, window=20, ")


def test_ipython_that_another_thread_is_importing_is_no_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))  # as it is before its first lines have run
    assert kernel_shell() is None
    assert notebook_name() == ""
