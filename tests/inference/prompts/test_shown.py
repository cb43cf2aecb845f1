"""``--show_prompts`` and ``lum enrich --prompt ... --show``: some prompts and answers, printed once at the end."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import apache_beam as beam
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from luminosity import Enrich, Prompt
from luminosity.errors import OptionError
from tests.cli.test_enrich import lum
from tests.inference.handlers.model_server import serving
from tests.inference.prompts.chats import last, replying, talker
from tests.runners import IS_REFERENCE

pytestmark = pytest.mark.skipif(IS_REFERENCE, reason="an option of our runner")


def _reply(messages: list[dict[str, str]]) -> str:
    return f"A film:\n{last(messages).upper()}"


def test_some_prompts_are_printed_cut_at_the_width_and_not_logged(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    caplog.set_level(logging.DEBUG)
    texts = [f"number {number} {'x' * 100}" for number in range(50)]
    with serving(replying(_reply)) as server:
        options = PipelineOptions(["--progress=off", "--cpu_workers=2", "--show_prompts=3"])
        with beam.Pipeline("luminosity.LuminosityRunner", options) as pipeline:
            tables = [pa.record_batch({"text": texts[start : start + 10]}) for start in range(0, 50, 10)]
            prompt = Prompt(talker(server), "Read this: {text}", system="Be brief.")
            _ = pipeline | beam.Create(tables) | Enrich(told=prompt)

    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    assert all(line.startswith("prompt: Read this: number ") for line in lines[::2])
    assert all(line.startswith("answer: A film: READ THIS: NUMBER ") for line in lines[1::2])
    assert {len(line) for line in lines} == {40}
    assert "Read this: number" not in caplog.text


def test_nothing_is_kept_without_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(replying(_reply)) as server:
        options = PipelineOptions(["--progress=off", "--cpu_workers=1"])
        with beam.Pipeline("luminosity.LuminosityRunner", options) as pipeline:
            table = pa.record_batch({"text": ["a"]})
            _ = pipeline | beam.Create([table]) | Enrich(told=Prompt(talker(server), "Read {text}"))

    assert "prompt:" not in capsys.readouterr().out


def test_enrich_shows_them_with_the_rows(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["nice", "dull"]}), tmp_path / "in.parquet")
    with serving(replying(lambda messages: "good" if "nice" in last(messages) else "?")) as server:
        asked = ["--prompt", "label=Is it {text}?", "--returns", "label=good|bad", "--dead-letters", "bad.jsonl"]
        model = ["--prompt-model", f"{server.url}#talker"]
        done = lum("in.parquet", "out.parquet", *asked, *model, "--show=5", "--cpu_workers=1", folder=tmp_path)

    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    place = next(place for place, line in enumerate(lines) if line.startswith("prompt: Is it nice?"))
    assert lines[place + 1] == "answer: good"
    assert any(line.startswith("answer: AnswerError: the model answered '?'") for line in lines)


@pytest.mark.parametrize("value", ["0", "many", "-1"])
def test_a_number_that_makes_no_sense(value: str) -> None:
    table: Any = pa.record_batch({"text": ["a"]})
    with (
        pytest.raises(OptionError, match="expected a whole number from 1"),
        beam.Pipeline("luminosity.LuminosityRunner", PipelineOptions([f"--show_prompts={value}"])) as pipeline,
        serving(replying(_reply)) as server,
    ):
        _ = pipeline | beam.Create([table]) | Enrich(told=Prompt(talker(server), "Read {text}"))
