"""Pictures in prompts: what the server gets, and rows whose picture can't be sent."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any, Literal

import apache_beam as beam
import pyarrow as pa
import pytest
from apache_beam.testing.util import assert_that, equal_to

from luminosity import Enrich, Prompt
from luminosity.errors import InvalidArgument, InvalidType
from tests.both_runners import Pipelines
from tests.both_runners import pipelines as pipelines
from tests.both_runners import runner_name as runner_name
from tests.inference.handlers.model_server import Said, Seen, serving
from tests.inference.prompts.chats import in_format, said, talker

image = pytest.importorskip("PIL.Image")


def picture(colour: str = "red", format: str = "PNG", size: int = 8) -> bytes:
    file = io.BytesIO()
    image.new("RGB", (size, size), colour).save(file, format)
    return file.getvalue()


def sees(seen: Seen) -> Said:
    """Answer with the colour of the picture in the last message."""
    text, shown = seen.json["messages"][-1]["content"]
    assert text["type"] == "text"
    head, data = shown["image_url"]["url"].split(",")
    assert head in ("data:image/png;base64", "data:image/jpeg;base64")
    red, _, blue = image.open(io.BytesIO(base64.b64decode(data))).convert("RGB").getpixel((0, 0))
    return said(in_format(seen, "red" if red > blue else "blue"))


def asked(prompt: Prompt, *rows: Any) -> list[Any]:
    return [each.inference for each in prompt.run_inference(rows, prompt.load_model())]


def test_files_and_bytes_come_as_the_server_takes_them(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(picture("blue", "JPEG"))
    with serving(sees) as server:
        prompt = Prompt(talker(server), "Which colour has {name}?", pictures=["photo"], returns=Literal["red", "blue"])
        assert prompt.columns == ("name", "photo")
        photos = [picture(), str(tmp_path / "a.jpg"), {"bytes": None, "path": str(tmp_path / "a.jpg")}]
        photos += [picture("blue", "BMP")]
        found = asked(prompt, *({"name": "it", "photo": photo} for photo in photos))

    assert found == ["red", "blue", "blue", "blue"]
    texts = {seen.json["messages"][-1]["content"][0]["text"] for seen in server.seen}
    assert texts == {"Which colour has it?\n\nAnswer with exactly one of these, and with nothing else: red, blue."}
    assert len(server.seen) == 3, "two rows have the same prompt"


def test_a_template_needs_no_column_if_there_is_a_picture() -> None:
    with serving(sees) as server:
        prompt = Prompt(talker(server), "Which colour?", pictures=["photo"])
        assert asked(prompt, {"photo": picture()}) == ["red"]


def test_a_picture_that_can_not_be_sent_is_a_dead_letter(pipelines: Pipelines, tmp_path: Path) -> None:
    cut = picture(size=64, format="JPEG")[:-40]
    photos = [picture(), cut, b"no picture", picture(format="BMP", size=40), None]
    table = pa.record_batch({"id": [0, 1, 2, 3, 4], "photo": pa.array(photos, pa.binary())})
    with serving(sees) as server, pipelines() as (pipeline, _):
        prompt = Prompt(talker(server), "Which colour?", pictures=["photo"], max_picture_bytes=1200)
        good, bad = pipeline | beam.Create([table]) | Enrich(colour=prompt).with_exception_handling()
        rows = good | beam.FlatMap(lambda batch: batch["colour"].to_pylist())
        assert_that(rows, equal_to(["red"]))
        reasons = bad | "Reasons" >> beam.FlatMap(_reasons)
        assert_that(reasons, equal_to([1, 2, 3, 4]), label="Bad")


def _reasons(batch: Any) -> list[int]:
    words = {1: "decode", 2: "no image", 3: "more than 1.2 kB", 4: "null"}
    rows = batch.to_pylist() if hasattr(batch, "to_pylist") else [batch]
    for row in rows:
        assert words[row["id"]] in row["_reason"], row["_reason"]
    return [row["id"] for row in rows]


def test_mistakes_are_told_before_anything_is_sent() -> None:
    from luminosity import TextGenerator

    with pytest.raises(InvalidArgument, match="which takes texts alone"):
        Prompt(TextGenerator("some/model"), "What is it?", pictures=["photo"])
    with serving(sees) as server:
        prompt = Prompt(talker(server), "Which colour?", pictures=["photo"])
        with pytest.raises(InvalidType, match="takes pictures of 'photo', which holds int64"):
            prompt.check_input_type(pa.struct({"photo": pa.int64()}))
        with pytest.raises(InvalidArgument, match="expected a list of columns"):
            Prompt(talker(server), "Which colour?", pictures="photo")
        with pytest.raises(InvalidArgument, match="can't be read"):
            asked(prompt, {"photo": "no-such-file.png"})
    assert not server.seen
