"""Tests of ``lum enrich --resume``: which run is continued, what is refused, and that no row is computed twice."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import qdrant_edge
from apache_beam.metrics import monitoring_infos

from luminosity.cli.enrich import resume
from luminosity.cli.enrich.columns import parse_request
from luminosity.cli.enrich.prompts import prompt_requests
from luminosity.cli.enrich.resume import Command, ResumableRun, find_run, places
from luminosity.cli.main import main
from luminosity.core import InferenceMetrics
from luminosity.engine.durable.inspection import saved_counters
from luminosity.engine.durable.store import CheckpointFolder, Transaction
from luminosity.engine.loop.metrics import RunMetrics
from luminosity.errors import CheckpointError
from luminosity.io.reading.find_files import find_files
from luminosity.io.reading.readers import RowCount
from tests.inference.texts import save_with_tokenizer, tiny_bert_config
from tests.marks import notes
from tests.runners import IS_REFERENCE

_ROWS = 400
_HANDLER = """
import glob
import os
import signal
import time

import pyarrow as pa
from luminosity import Handler
from luminosity.engine.durable.inspection import saved_counters
from tests.marks import first_time, note


def wait_for_saved_rows():
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for folder in glob.glob(".luminosity-enrich-*/*/checkpoint"):
            if (saved_counters(folder, {{"examples"}}) or {{}}).get("length", {{}}).get("examples", 0):
                return
        time.sleep(0.05)


class Lengths(Handler):
    output_type = pa.int64()

    def load_model(self):
        return None

    def predict(self, model, batch, inference_args=None):
        for text in batch:
            note("computed", text)
            if text == "{last}" and not os.path.exists("fixed"):
                wait_for_saved_rows()
                {end}
        return [len(text) for text in batch]


lengths = Lengths()
"""


class _Changes:
    def __init__(self) -> None:
        self.rows: dict[tuple[str, bytes], bytes | None] = {}

    def put(self, owner: str, key: bytes, value: bytes) -> None:
        self.rows[owner, key] = value

    remove = remove_all = refer = None


def save_rows(run: ResumableRun, rows: int) -> None:
    """Write a checkpoint that has the results of some rows of each column."""
    metrics, changes = RunMetrics(), _Changes()
    for column in run.command.columns:
        counter = monitoring_infos.int64_user_counter(column, InferenceMetrics.EXAMPLES, rows, ptransform="Infer")
        metrics.add("stage", [counter])
    metrics.save(changes, lambda stage: f"metrics/{stage}")  # pyright: ignore[reportArgumentType]
    folder = CheckpointFolder(run.checkpoint_dir)
    folder.write(Transaction(1, changes.rows, meta={"saved_at": "1.0", "state": "running"}))
    folder.close()


def command(folder: Path, **options: Any) -> Command:
    """Return the command that adds a column to a table in ``folder``."""
    table = folder / "in.csv"
    if not table.exists():
        table.write_text("text\na\n")
    given = {"table": str(table), "out": str(folder / "out.parquet"), "embed": ["text=hub/model"], **options}
    parsed = argparse.Namespace(resume=False, show=None, checkpoint=True, if_exists="fail", prompt=[], returns=[])
    vars(parsed).update({"prompt_model": None, "prompt_key_env": None, "prompt_cache": None, **given})
    requests = [parse_request("embed", text) for text in given["embed"]] + prompt_requests(parsed)
    return Command.of(parsed, requests, find_files([str(table)], None))


def interrupted(folder: Path, rows: int, **options: Any) -> ResumableRun:
    """Return a run that was interrupted when it had saved some rows."""
    run = find_run(command(folder, **options), [str(folder)], resume=False)
    run.begin()
    save_rows(run, rows)
    return run


def test_the_run_of_the_same_command_is_continued(tmp_path: Path) -> None:
    first = interrupted(tmp_path, 70)
    found = find_run(command(tmp_path, show=3), [str(tmp_path)], resume=True)
    assert (found.folder, found.is_resumed, found.rows_done) == (first.folder, True, 70)
    assert saved_counters(found.checkpoint_dir, {"other"}) == {}
    found.begin()
    found.remove()
    assert [path.name for path in tmp_path.iterdir()] == ["in.csv"]


def test_nothing_to_continue_is_a_run_from_the_start(tmp_path: Path) -> None:
    found = find_run(command(tmp_path), [str(tmp_path)], resume=True)
    assert (found.is_resumed, found.is_requested, found.earlier) == (False, True, None)
    found.begin()  # killed before its first checkpoint
    assert not find_run(command(tmp_path), [str(tmp_path)], resume=True).is_resumed


def test_a_run_that_begins_again_keeps_the_one_that_got_further_until_its_end(tmp_path: Path) -> None:
    first = interrupted(tmp_path, 70)
    again = find_run(command(tmp_path), [str(tmp_path)], resume=False)
    assert again.earlier is not None
    assert again.folder != first.folder
    again.begin()
    save_rows(again, 20)
    assert again.rows_saved() == 70
    assert find_run(command(tmp_path), [str(tmp_path)], resume=True).folder == first.folder
    save_rows(again, 90)
    found = find_run(command(tmp_path), [str(tmp_path)], resume=True)
    assert found.folder == again.folder
    found.begin()
    assert not first.folder.exists()


def test_another_command_is_refused_with_what_differs(tmp_path: Path) -> None:
    interrupted(tmp_path, 70)
    other = command(tmp_path, if_exists="replace", rows=5, embed=["text=hub/model", "b:text=hub/other"])
    with pytest.raises(CheckpointError) as caught:
        find_run(other, [str(tmp_path)], resume=True)
    assert caught.value.message.splitlines()[1:] == [
        "  --embed was text=hub/model, and is text=hub/model, b:text=hub/other now",
        "  --if-exists was fail, and is replace now",
        "  --rows was not given, and is 5 now",
    ]
    assert str(caught.value).endswith("To fix this: repeat its command, or leave out --resume to begin again")


def test_a_changed_table_or_model_is_refused(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "weights").write_text("1")
    given = {"embed": [f"text={model}"]}
    interrupted(tmp_path, 70, **given)
    (model / "weights").write_text("22")
    (model / "new").write_text("")
    (tmp_path / "in.csv").write_text("text\nb\nc\n")
    with pytest.raises(CheckpointError) as caught:
        find_run(command(tmp_path, **given), [str(tmp_path)], resume=True)
    assert caught.value.message.splitlines()[1:] == [
        f"  {tmp_path}/in.csv has changed since",
        f"  {tmp_path}/model/new was not there then",
        f"  {tmp_path}/model/weights has changed since",
    ]


def test_a_changed_schema_of_answers_is_refused(tmp_path: Path) -> None:
    schema = tmp_path / "answer.json"
    schema.write_text('{"type": "integer"}')
    (tmp_path / "good|bad").write_text("no schema")
    given: dict[str, Any] = {"embed": [], "prompt": ["stars=Rate {text}", "mood=How is {text}?"], "prompt_model": "m"}
    given["returns"] = [f"stars={schema}", f"mood={tmp_path}/good|bad"]
    interrupted(tmp_path, 70, **given)
    assert find_run(command(tmp_path, **given), [str(tmp_path)], resume=True).is_resumed
    schema.write_text('{"type": "number"}')
    (tmp_path / "good|bad").write_text("other")
    with pytest.raises(CheckpointError) as caught:
        find_run(command(tmp_path, **given), [str(tmp_path)], resume=True)
    assert caught.value.message.splitlines()[1:] == [f"  {schema} has changed since"]


def test_of_many_files_only_a_digest_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "_MOST_FILES", 0)
    before = command(tmp_path)
    assert len(before.files) == 1
    assert not before.differences(command(tmp_path))
    (tmp_path / "in.csv").write_text("text\nb\nc\n")
    assert [each.endswith("has changed since") for each in before.differences(command(tmp_path))] == [True]


def test_a_run_at_work_is_neither_continued_nor_removed(tmp_path: Path) -> None:
    first = interrupted(tmp_path, 70)
    holder = CheckpointFolder(first.checkpoint_dir)
    try:
        with pytest.raises(CheckpointError, match="is at work and can't be continued"):
            find_run(command(tmp_path), [str(tmp_path)], resume=True)
        again = find_run(command(tmp_path), [str(tmp_path)], resume=False)
        again.begin()
        again.remove()
        assert first.folder.exists()
    finally:
        holder.close()


def test_checkpoints_lie_beside_the_table_or_in_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    home = "/home/someone/.luminosity/enrich"
    assert places(str(tmp_path / "new" / "out"), None) == [str(tmp_path / "new"), home]
    assert places(f"{tmp_path}/out/", None)[0] == str(tmp_path)
    assert places("gs://bucket/out", None) == [home]
    assert places("/dev/null/out", None) == [home]
    assert places(str(tmp_path / "out"), "/scratch") == ["/scratch", str(tmp_path), home]


def test_rows_in_words() -> None:
    assert resume.rows_of(5, RowCount(4, is_exact=False)) == "5 rows"
    assert resume.rows_of(5, RowCount(1000, is_exact=True)) == "5 of 1,000 rows"


def prepare(folder: Path, end: str) -> list[str]:
    """Write a table and a handler that ends the run at its last row. Returns the command."""
    texts = [f"text {number}" for number in range(_ROWS)]
    pq.write_table(pa.table({"text": texts}), folder / "in.parquet", row_group_size=20)
    (folder / "lengths_handler.py").write_text(_HANDLER.format(last=texts[-1], end=end))
    return [
        *("enrich", "in.parquet", "out.parquet", "--model", "length:text=lengths_handler:lengths"),
        *("--dead-letters", "bad.jsonl", "--cpu_workers=2", "--checkpoint_interval=50ms", "--run_dir=off"),
    ]


def lum(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).resolve().parent.parent.parent
    return subprocess.run(
        [sys.executable, "-m", "luminosity.cli.main", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}"},
        capture_output=True,
        text=True,
        timeout=280,
        start_new_session=True,
    )


def check_result(folder: Path, computed_before: int) -> None:
    """Raise unless the table is exact, the last start has computed only a part of it, and nothing else is left."""
    rows = pq.read_table(folder / "out.parquet").to_pylist()
    assert sorted((row["text"], row["length"]) for row in rows) == sorted(
        (text, len(text)) for text in (f"text {number}" for number in range(_ROWS))
    )
    computed = notes(folder / "computed")
    assert len(set(computed)) == _ROWS
    assert len(computed) - computed_before < _ROWS
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".luminosity")]


@pytest.mark.skipif(IS_REFERENCE, reason="tests what only the engine does")
@pytest.mark.alone  # It loads a model in three processes.
@pytest.mark.timeout(600)
def test_a_killed_run_goes_on_with_the_rows_that_are_left(tmp_path: Path) -> None:
    """Also in the vector store: each row is one point."""
    import transformers

    words = prepare(tmp_path, 'os.killpg(os.getpgid(0), signal.SIGKILL) if first_time("killed") else None')
    tiny = save_with_tokenizer(transformers.BertModel(tiny_bert_config()), tmp_path / "tiny")
    words += [f"--embed=vector:text={tiny}", "--vector-store=store"]
    assert lum(tmp_path, *words).returncode == -9
    before = len(notes(tmp_path / "computed"))
    again = lum(tmp_path, *words, "--resume")
    assert again.returncode == 0, again.stderr
    assert again.stderr.startswith("lum enrich: continuing: "), again.stderr
    assert f" of {_ROWS} rows are done\n" in again.stderr
    check_result(tmp_path, before)
    rows = pq.read_table(tmp_path / "out.parquet", columns=["text", "vector"]).to_pylist()
    assert points(tmp_path / "store") == {row["text"]: pytest.approx(unit(row["vector"]), abs=1e-5) for row in rows}


def unit(vector: list[float]) -> list[float]:
    """Return the vector with length 1, as a store keeps it."""
    return (np.array(vector) / np.linalg.norm(vector)).tolist()


def points(store: Path) -> dict[str, list[float]]:
    """Return the vectors of all points, by their text. Raises if two points have the same."""
    shard = qdrant_edge.EdgeShard.load(str(store / "in"))
    request = qdrant_edge.ScrollRequest(limit=10 * _ROWS, with_payload=True, with_vector=True)
    found = [(record.payload["text"], record.vector["vector"]) for record in shard.scroll(request)[0]]
    assert len(dict(found)) == len(found)
    return dict(found)


@pytest.mark.skipif(IS_REFERENCE, reason="tests what only the engine does")
@pytest.mark.timeout(600)
def test_a_failed_run_says_how_to_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = prepare(tmp_path, "raise MemoryError('no room')")
    monkeypatch.chdir(tmp_path)
    words.remove("--dead-letters")
    words.remove("bad.jsonl")
    failed = lum(tmp_path, *words)
    assert failed.returncode == 1
    last = failed.stderr.splitlines()[-1]
    assert last.startswith("lum enrich: ")
    assert last.endswith(f" of {_ROWS} rows are done and kept; repeat the command with --resume to continue")
    assert main([*words, "--resume", "--rows=7"]) == 2
    assert "--rows was not given, and is 7 now\n" in capsys.readouterr().err
    (tmp_path / "fixed").touch()
    before = len(notes(tmp_path / "computed"))
    again = lum(tmp_path, *words, "--resume")
    assert again.returncode == 0, again.stderr
    check_result(tmp_path, before)


@pytest.mark.parametrize("option", ["--checkpoint_dir=c", "--no-checkpoint", "--debug", "--restart"])
def test_options_that_exclude_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    words = prepare(tmp_path, "pass")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main([*words, "--resume", option]) == 2
    assert f"--resume and {option.partition('=')[0]}: expected only one of them" in capsys.readouterr().err
