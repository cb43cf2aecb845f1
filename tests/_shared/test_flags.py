"""Tests of the flags' descriptions: parsers, help texts and pages show the same flags in the same words."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest
from apache_beam.options.pipeline_options import GoogleCloudOptions, PipelineOptions

from luminosity import LuminosityOptions, ModelOptions
from luminosity._shared.flags import MODEL_FLAGS, RUNNER_FLAGS, Flag, add_arguments, help_text, markdown_table

_ROOT = Path(__file__).parents[2]
_TABLE = re.compile(r"<!-- flags -->\n+(.*?)\n*<!-- /flags -->", re.DOTALL)
_PAGES = {"docs/options.md": "", "README.md": "docs/"}


@pytest.mark.parametrize("page", _PAGES)
def test_the_table_of_a_page_shows_the_flags_as_they_are(page: str) -> None:
    tables = _TABLE.findall((_ROOT / page).read_text())
    assert tables or page == "README.md", f"{page} has no table between <!-- flags --> and <!-- /flags -->"
    for table in tables:
        assert table == markdown_table((*RUNNER_FLAGS, *MODEL_FLAGS), _PAGES[page]).strip()


@pytest.mark.parametrize("flag", [*RUNNER_FLAGS, *MODEL_FLAGS], ids=lambda flag: flag.name)
def test_the_page_that_a_flag_names_exists(flag: Flag) -> None:
    assert not flag.page or (_ROOT / "docs" / flag.page).is_file()


@pytest.mark.parametrize("flags", [RUNNER_FLAGS, MODEL_FLAGS])
def test_help_fits_a_terminal_of_80_columns(flags: tuple[Flag, ...]) -> None:
    text = help_text(flags)
    assert max(map(len, text.splitlines())) < 80
    assert [flag.usage in text for flag in flags] == [True] * len(flags)


@pytest.mark.parametrize(("options", "flags"), [(LuminosityOptions, RUNNER_FLAGS), (ModelOptions, MODEL_FLAGS)])
def test_options_take_all_flags_and_no_others(options: type[PipelineOptions], flags: tuple[Flag, ...]) -> None:
    ours = [flag for flag in flags if not flag.is_beams]
    given = [f"--{flag.name}" if isinstance(flag.initial, bool) else f"--{flag.name}=x" for flag in ours]
    parsed = PipelineOptions(given).view_as(options).get_all_options(drop_default=True)
    expected = {flag.name: True if isinstance(flag.initial, bool) else ["x"] if flag.is_list else "x" for flag in ours}
    assert parsed == expected
    assert all(getattr(PipelineOptions([]).view_as(options), flag.name) == flag.initial for flag in ours)


def test_flags_that_beam_has_are_described_but_not_added_again() -> None:
    (flag,) = [flag for flag in RUNNER_FLAGS if flag.is_beams]
    parsed = PipelineOptions([f'--{flag.name}={{"a": "b"}}']).view_as(GoogleCloudOptions)
    assert getattr(parsed, flag.name) == {"a": "b"}


def test_percent_signs_do_not_confuse_argparse() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser, [Flag("share", "N", "how much, such as 90%")])
    assert "such as 90%" in parser.format_help()
