"""``lum enrich --prompt``: answers of a server as columns, and mistakes that are told before anything runs."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from luminosity.cli.main import main
from tests.cli.test_enrich import lum
from tests.inference.handlers.model_server import serving
from tests.inference.prompts.chats import last, replying

SCHEMA = {"type": "object", "properties": {"stars": {"type": "integer"}}, "required": ["stars"]}


def _answer(messages: list[dict[str, str]]) -> str:
    question = last(messages).splitlines()[0]
    if question.startswith("Rate"):
        return json.dumps({"stars": len(question)})
    return "good" if "nice" in question else "bad"


def test_labels_and_facts_become_columns(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["nice", "dull", "nice"], "id": [1, 2, 3]}), tmp_path / "in.parquet")
    (tmp_path / "rating.json").write_text(json.dumps(SCHEMA))
    with serving(replying(_answer)) as server:
        asked = ["--prompt", "label=Good or bad? {text}", "--returns", "label=good|bad"]
        asked += ["--prompt", "rating=Rate {text} {{1 to 5}}", "--returns", "rating=rating.json"]
        model = ["--prompt-model", f"{server.url}#talker"]
        done = lum("in.parquet", "out.parquet", *asked, *model, "--cpu_workers=2", folder=tmp_path)

    assert done.returncode == 0, done.stderr
    table = pq.read_table(tmp_path / "out.parquet")
    rows = sorted(table.select(["id", "label", "rating"]).to_pylist(), key=lambda row: row["id"])
    assert [row["label"] for row in rows] == ["good", "bad", "good"]
    assert [row["rating"] for row in rows] == [{"stars": len("Rate nice {1 to 5}")}] * 3
    assert len(server.seen) == 4, "the third row repeats the first"
    assert {seen.json["temperature"] for seen in server.seen} == {0}


def test_a_second_command_finds_the_answers_in_the_cache(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["nice", "dull", "nice"]}), tmp_path / "in.parquet")
    with serving(replying(_answer)) as server:
        asked = ["--prompt", "label=Good or bad? {text}", "--prompt-model", f"{server.url}#talker"]
        for out in ("a.parquet", "b.parquet"):
            done = lum("in.parquet", out, *asked, "--prompt-cache", "answers", "--cpu_workers=1", folder=tmp_path)
            assert done.returncode == 0, done.stderr

    assert len(server.seen) == 2
    tables = [sorted(pq.read_table(tmp_path / out).to_pylist(), key=str) for out in ("a.parquet", "b.parquet")]
    assert tables[0] == tables[1]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--prompt", "Classify {text}"], "expected NAME=TEMPLATE, such as 'label="),
        (["--prompt", "a={text}"], "found --prompt without a model; add --prompt-model with a folder"),
        (["--prompt-model", "m"], "found --prompt-model without --prompt; add --prompt"),
        (["--prompt-cache", "answers"], "found --prompt-cache without --prompt; add --prompt"),
        (["--prompt", "a={text", "--prompt-model", "URL"], "--prompt a={text: found a single '{' in the template"),
        (["--prompt", "a=text", "--prompt-model", "URL"], "--prompt a=text: found no column in the template"),
        (["--prompt", "a={txt}", "--prompt-model", "URL"], "there is no column 'txt'; did you mean 'text'?"),
        (
            ["--prompt", "a={text}", "--prompt", "a=Is {text} nice?", "--prompt-model", "URL"],
            "found --prompt a=... twice, expected one for each column; give it another name: --prompt OTHER=Is {text}",
        ),
        (
            ["--prompt", "a={text}", "--prompt-model", "URL", "--returns", "a=int", "--returns", "a=bool"],
            "found --returns a=... twice, expected one for each column; leave out one of them",
        ),
        (
            ["--prompt", "text={text}", "--prompt-model", "URL"],
            "the table has it already; give it another name: --prompt",
        ),
        (
            ["--prompt", "a={text}", "--prompt-model", "http://localhost:9"],
            "expected URL#MODEL, such as http://localhost",
        ),
        (
            ["--prompt", "a={text}", "--prompt-model", "localhost:9#talker"],
            "found no http:// or https:// before the address, expected URL#MODEL; write http://localhost:9#talker",
        ),
        (
            ["--prompt", "a={text}", "--prompt-model", "URL", "--returns", "a=good|bad|good"],
            "--returns a=good|bad|good: found the choice 'good' several times in 'good|bad|good'",
        ),
        (
            ["--prompt", "a={text}", "--prompt-model", "URL", "--returns", "a=folder.json"],
            "--returns a=folder.json: can't read 'folder.json', expected a file with a JSON schema: Is a directory",
        ),
        (
            ["--prompt", "a={text}", "--prompt-model", "URL", "--returns", "a"],
            "expected NAME=TYPE, such as 'label=good",
        ),
        (
            ["--prompt", "label={text}", "--prompt-model", "URL", "--returns", "labels=int"],
            "--returns labels=int: found no --prompt labels=..., expected label; did you mean 'label'?",
        ),
        (
            ["--prompt", "a={text}", "--prompt-model", "URL", "--returns", "a=integer"],
            "--returns a=integer: found the type 'integer', expected choices such as good|bad",
        ),
        (
            ["--prompt", "a={text}", "--prompt-model", "URL", "--returns", "a=nowhere.json"],
            "--returns a=nowhere.json: found no file 'nowhere.json' with a JSON schema",
        ),
        (
            ["--prompt", "a={text}", "--prompt-model", "URL", "--returns", "a=open.json"],
            "the answer is an object whose properties have any name, expected named ones",
        ),
        (
            ["--prompt", "a={text}", "--prompt-model", "URL", "--prompt-key-env", "NO_SUCH_KEY"],
            "--prompt-key-env NO_SUCH_KEY: the environment variable is not set; export NO_SUCH_KEY=... first",
        ),
    ],
)
def test_mistakes_are_named_before_anything_runs(
    words: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.table({"text": ["nice"]}), "in.parquet")
    Path("folder.json").mkdir()
    Path("open.json").write_text('{"type": "object"}')
    words = ["http://localhost:9#talker" if word == "URL" else word for word in words]

    code = main(["enrich", "in.parquet", "out.parquet", *words, "--run_dir=off"])

    assert (code, told in capsys.readouterr().err) == (2, True)
    assert not Path("out.parquet").exists()
