"""Prompts in YAML: the model, the type of the answers, and mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest

from luminosity.beam_yaml.pipeline_file import PipelineFile
from luminosity.errors import PipelineFileError
from tests.inference.handlers.model_server import serving
from tests.inference.prompts.chats import last, replying

_FILE = """\
pipeline:
  type: chain
  transforms:
    - type: Create
      config: {elements: [{text: nice}, {text: dull}]}
    - type: Enrich
      config:
        columns:
          mood:
            model:
              type: Prompt
              config: {handler: "chat:URL#talker", template: "Good? {text}", returns: [good, bad]}
    - type: AssertEqual
      config: {elements: [{text: nice, mood: good}, {text: dull, mood: bad}]}
"""


def _run(folder: Path, text: str) -> None:
    (folder / "prompts.yaml").write_text(text)
    PipelineFile(str(folder / "prompts.yaml"), ["--runner=luminosity.LuminosityRunner", "--progress=off"]).run()


def test_a_prompt_is_a_model(tmp_path: Path) -> None:
    with serving(replying(lambda messages: "good" if "nice" in last(messages) else "bad")) as server:
        _run(tmp_path, _FILE.replace("URL", server.url))
    assert len(server.seen) == 2


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("{text}", "{txt}", "the column 'mood' takes 'txt', which is not in the table"),
        ("[good, bad]", "integer", "found the type 'integer', expected choices such as good|bad"),
        ('handler: "chat:URL#talker", ', "", "found a Prompt without handler:, expected the model that answers"),
        ("#talker", "", "found no name of a model, expected URL#MODEL"),
        ("returns:", "retuns:", "unknown option 'retuns'"),
    ],
)
def test_mistakes(old: str, new: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(PipelineFileError) as raised:
        _run(tmp_path, _FILE.replace(old, new).replace("URL", "http://localhost:9"))
    assert message in str(raised.value)
