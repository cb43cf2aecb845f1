"""Tests of ``lum enrich`` with real models and processes, and of its error messages."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from sklearn.linear_model import LinearRegression

from luminosity import SearchQdrant, SentenceEmbedder
from luminosity.cli.main import main
from tests.inference.texts import MINILM, save_with_tokenizer, sentences, tiny_bert_config
from tests.warm import run_module

_TEXTS = [text for text in sentences(40) if text]
_HANDLERS = """
import pyarrow as pa
from luminosity import Handler


class Total(Handler):
    output_type = pa.float64()

    def load_model(self):
        return None

    def predict(self, model, batch, inference_args=None):
        return [float(sum(row)) for row in batch]


class Fussy(Handler):
    output_type = pa.int64()

    def load_model(self):
        return None

    def predict(self, model, batch, inference_args=None):
        if any(str(text) == "bad" for text in batch):
            raise ValueError("not this one")
        return [len(str(text)) for text in batch]
"""


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small classifier with random weights."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = tiny_bert_config(id2label={0: "bad", 1: "good"}, label2id={"bad": 0, "good": 1})
    model = transformers.BertForSequenceClassification(config)
    return save_with_tokenizer(model, tmp_path_factory.mktemp("models") / "classifier")


def lum(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    words = ("enrich", *arguments, "--run_dir=off", "--progress=off")
    return run_module("luminosity.cli.main", *words, cwd=folder, env={**os.environ, "HF_HUB_OFFLINE": "1"})


@pytest.mark.alone
@pytest.mark.timeout(600)  # two models are loaded here and two in the command, which takes minutes on a busy machine
def test_vectors_and_labels_become_columns_and_points(tmp_path: Path, classifier: str) -> None:
    table = pa.table({"id": range(len(_TEXTS)), "text": _TEXTS, "other": ["x"] * len(_TEXTS)})
    pq.write_table(table, tmp_path / "in.parquet")

    done = lum(
        "in.parquet",
        "out.parquet",
        *(f"--embed=text={MINILM}", f"--classify=mood:text={classifier}", "--columns=id,text"),
        *("--vector-store=store", "--show=2"),
        folder=tmp_path,
    )

    assert done.returncode == 0, done.stderr
    found = pq.read_table(tmp_path / "out.parquet").sort_by("id")
    assert found.schema.names == ["id", "text", "text_embedding", "mood"]
    assert found["text"].to_pylist() == _TEXTS
    embedder = SentenceEmbedder(MINILM, device="cpu")
    expected = [result.inference for result in embedder.run_inference(_TEXTS[:3], embedder.load_model())]
    np.testing.assert_allclose(found["text_embedding"].to_pylist()[:3], expected, atol=1e-5)
    assert {mood["label"] for mood in found["mood"].to_pylist()} <= {"bad", "good"}
    assert f"{len(_TEXTS)} rows to out.parquet" in done.stdout
    assert "in collection in of store" in done.stdout
    assert "384" in done.stdout  # the length of the vectors that are shown
    assert nearest(tmp_path / "store", "in", found["text_embedding"][5].as_py()) == "5"


def nearest(store: Path, collection: str, vector: list[float]) -> str:
    search = SearchQdrant(store, collection, vector_column="v", using="text_embedding", limit=1)
    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        query = pipeline | beam.Create([pa.record_batch({"v": [vector]})])
        _ = query | search | beam.Map(lambda batch: (store / "found.json").write_text(json.dumps(batch.to_pylist())))
    return json.loads((store / "found.json").read_text())[0]["neighbours"][0]["id"]


def test_a_try_reads_the_first_rows_alone(tmp_path: Path) -> None:
    """Later rows can't be read, in the same file and in the next one."""
    (tmp_path / "handlers.py").write_text(_HANDLERS)
    lines = "a,b,text\n" + "".join(f"{n},{n},t\n" for n in range(500_000))
    (tmp_path / "in-1.csv").write_text(lines + "oh no,1,t\n")
    (tmp_path / "in-2.csv").write_text("something else\n")

    done = lum("in-*.csv", "out.jsonl", "--model=sum:a,b=handlers:Total", "--rows=3", folder=tmp_path)

    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert sorted(row["sum"] for row in rows) == [0.0, 2.0, 4.0]


def test_a_handler_of_beams_gives_values_not_results(tmp_path: Path) -> None:
    with open(tmp_path / "line.pkl", "wb") as file:
        pickle.dump(LinearRegression().fit(np.array([[0, 0], [1, 0], [0, 1]]), [10, 12, 11]), file)
    (tmp_path / "handlers.py").write_text(
        "from apache_beam.ml.inference.sklearn_inference import SklearnModelHandlerNumpy\n"
        "line = SklearnModelHandlerNumpy('line.pkl')\n"
    )
    (tmp_path / "in.csv").write_text("a,b\n1,1\n2,0\n")

    done = lum("in.csv", "out.parquet", "--model=price:a,b=handlers:line", folder=tmp_path)

    assert done.returncode == 0, done.stderr
    assert sorted(pq.read_table(tmp_path / "out.parquet")["price"].to_pylist()) == pytest.approx([13.0, 14.0])


def test_rows_that_fail_go_to_the_dead_letters(tmp_path: Path) -> None:
    (tmp_path / "handlers.py").write_text(_HANDLERS)
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ("one", "bad", "three")))

    done = lum("in.jsonl", "out", "--model=text=handlers:Fussy", "--dead-letters=letters.jsonl", folder=tmp_path)

    assert done.returncode == 0, done.stderr
    assert sorted(pq.read_table(tmp_path / "out")["text_prediction"].to_pylist()) == [3, 5]
    [letter] = [json.loads(line) for line in (tmp_path / "letters.jsonl").read_text().splitlines()]
    assert letter["text"] == "bad"
    assert letter["_model"] == "text_prediction"
    assert "not this one" in letter["_reason"]
    assert "1 row, in letters.jsonl" in done.stdout


def test_lines_that_can_not_be_read_go_to_the_dead_letters(tmp_path: Path) -> None:
    (tmp_path / "handlers.py").write_text(_HANDLERS)
    lines = 'id;text\n1;Zürich\n2;"two\nlines"\n3\n4;bad\n'
    (tmp_path / "in.csv").write_bytes(lines.encode("cp1252"))

    done = lum(
        *("in.csv", "out.jsonl", "--model=n:text=handlers:Fussy"),
        *("--encoding=cp1252", "--delimiter=;", "--dead-letters=letters.jsonl"),
        folder=tmp_path,
    )

    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert sorted((row["id"], row["text"]) for row in rows) == [(1, "Zürich"), (2, "two\nlines")]
    letters = [json.loads(line) for line in (tmp_path / "letters.jsonl").read_text().splitlines()]
    found = {(row["id"], row["_model"], row["_file"], row["_line"], row["_text"]) for row in letters}
    assert found == {(4, "n", None, None, None), (None, None, "./in.csv", 5, "3")}
    assert "2 rows, in letters.jsonl (1 line unreadable)" in done.stdout


def test_a_row_that_fails_fails_the_run(tmp_path: Path) -> None:
    (tmp_path / "handlers.py").write_text(_HANDLERS)
    (tmp_path / "in.jsonl").write_text('{"text": "bad"}\n{"text": "good"}\n')

    done = lum("in.jsonl", "out", "--model=text=handlers:Fussy", folder=tmp_path)

    assert done.returncode == 1
    assert "not this one" in done.stderr
    assert "Traceback" not in done.stderr.split("lum enrich:")[0]
    # The rows are one batch, or one for each worker: then the failing row is known.
    assert any(
        hint in done.stderr for hint in ("add --dead-letters PATH to find the row", "row 0 of its batch (text='bad')")
    )
    assert not list(tmp_path.glob("out/*"))


@pytest.mark.parametrize(
    ("lines", "found", "remedy"),
    [
        (
            '{"text": "one"}\n{"text": null}\n',
            "takes 'text', which is null in row ",
            "filter these rows out first, or add --dead-letters PATH\n",
        ),
        (
            '{"text": "x"}\n' * 200_000 + '{"text": "x", "stars": 1}\n',
            "in.jsonl, line 200001: ",
            "correct the line, or add --dead-letters FILE to set such lines aside\n",
        ),
    ],
    ids=["null", "unknown key"],
)
def test_an_error_of_a_worker_ends_with_the_remedy_of_the_command(
    lines: str, found: str, remedy: str, tmp_path: Path
) -> None:
    (tmp_path / "handlers.py").write_text(_HANDLERS)
    (tmp_path / "in.jsonl").write_text(lines)

    done = lum("in.jsonl", "out", "--model=text=handlers:Fussy", folder=tmp_path)

    assert done.returncode == 1
    assert found in done.stderr
    assert done.stderr.endswith(remedy)
    assert "with_exception_handling" not in done.stderr
    assert "schema=" not in done.stderr


def test_where_every_row_fails_there_is_nothing_to_show(tmp_path: Path) -> None:
    (tmp_path / "handlers.py").write_text(_HANDLERS)
    (tmp_path / "in.jsonl").write_text('{"text": "bad"}\n')

    done = lum("in.jsonl", "out", "--model=text=handlers:Fussy", "--dead-letters=bad.csv", "--show", folder=tmp_path)

    assert done.returncode == 1, done.stderr
    assert (
        "no row was written to out; check in.jsonl, or look at bad.csv for the reason; add --allow-empty" in done.stderr
    )
    said = [line.split() for line in done.stdout.splitlines()]
    assert ["written", "nothing"] in said
    assert ["failed", "1", "row,", "in", "bad.csv"] in said


def test_a_table_is_kept_where_every_row_fails(tmp_path: Path) -> None:
    """The old table stays, the dead letters tell why; with --allow-empty, the old table goes."""
    (tmp_path / "handlers.py").write_text(_HANDLERS)
    (tmp_path / "in.jsonl").write_text('{"text": "bad"}\n')
    (tmp_path / "bad.jsonl").write_text('{"text": "of an earlier run"}\n')
    (tmp_path / "out.jsonl").write_text('{"text": "old"}\n')
    words = ["in.jsonl", "out.jsonl", "--model=text=handlers:Fussy", "--dead-letters=bad.jsonl", "--if-exists=replace"]

    done = lum(*words, folder=tmp_path)

    assert done.returncode == 1
    assert "no row was written to out.jsonl; out.jsonl is as it was before" in done.stderr
    assert (tmp_path / "out.jsonl").read_text() == '{"text": "old"}\n'
    assert "not this one" in (tmp_path / "bad.jsonl").read_text()

    done = lum(*words, "--allow-empty", folder=tmp_path)

    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["in.csv", "out"], "no model is given, expected --embed, --classify, --embed-images"),
        (["no.csv", "out", "--embed=text=M"], "no table file matches no.csv"),
        (["in.csv", "out", "--embed=texts=M"], "--embed texts=M: there is no column 'texts'; did you mean 'text'?"),
        (["in.csv", "out", "--embed=M"], "--embed M: expected [NAME:]COLUMN=MODEL, such as text=models/minilm"),
        (["in.csv", "out", "--embed=a,b=M"], "--embed a,b=M: expected [NAME:]COLUMN=MODEL"),
        (["in.csv", "out", "--embed=stars:text=M"], "can't add the column 'stars', because the table has it already"),
        (
            ["in.csv", "out", "--embed=stars=M"],
            "the column 'stars_embedding' takes 'stars': found int64, expected text",
        ),
        (
            ["in.csv", "out.csv", "--classify=text=M"],
            "column 'text_class' is struct<label: string, score: float>, which CSV can't hold; write Parquet or JSON",
        ),
        (
            ["in.csv", "out.parquet.gz", "--embed=text=M"],
            "is not compressed as a whole, only its columns are; leave out the last suffix\n",
        ),
        (
            ["in.csv", "a.jsonl", "--embed=text=M", "--if-exists=append"],
            "a.jsonl: found the name of one file, expected a folder for appending",
        ),
        (["in.csv", "out", "--embed=text=./N"], "there is no folder ./N"),
        (
            ["in.csv", "out", "--embed=text=M", "--embed=text=L"],
            "can't add the column 'text_embedding', because two models would",
        ),
        (["in.csv", "out", "--embed=text=M", "--columns=stars"], "there is no column 'text', expected one of stars"),
        (["in.csv", "out", "--embed=text=M", "--columns=star"], "did you mean 'stars'?"),
        (
            ["in.csv", "out", "--embed=text=M", "--cpu_worker=2"],
            "there is no option --cpu_worker; did you mean '--cpu_workers'?",
        ),
        (["in.csv", "out", "more", "--embed=text=M"], "found 'more' beside IN and OUT"),
        (
            ["in.csv", "out", "--embed=text=M", "--id=stars"],
            "found --collection or --id without a vector store; add --vector-store",
        ),
        (
            ["in.csv", "out", "--classify=text=M", "--vector-store=s"],
            "--vector-store: found no vectors to keep; add some with --embed",
        ),
        (["in.csv", "out", "--embed=text=M", "--vector-store=s", "--id=star"], "did you mean 'stars'?"),
        (
            ["in.csv", "out", "--embed=text=M", "--vector-store=http://127.0.0.1:9"],
            "no server responds at http://127.0.0.1:9",
        ),
        (
            ["in.csv", "there.jsonl", "--embed=text=M"],
            "there.jsonl exists already; add --if-exists replace, or choose another name\n",
        ),
        (
            ["in.csv", "out", "--embed=text=M", "--dead-letters=./out"],
            "--dead-letters ./out: found OUT, expected another table",
        ),
        (
            ["in.csv", "out", "--embed=text=M", "--dead-letters=out/dead"],
            "found one table inside the other, expected two separate paths; put the dead letters beside OUT",
        ),
        (
            ["in.csv", "./in.csv", "--embed=text=M", "--if-exists=replace", "--rows=1"],
            "OUT would replace IN, and --rows leaves a part of it out, which would be lost; choose another OUT",
        ),
        (["in.csv", ".", "--embed=text=M", "--if-exists=replace", "--columns=text"], "and --columns leaves a part"),
        (["in.csv", "bad/out", "--embed=text=M", "--dead-letters=bad"], "found one table inside the other"),
        (["in.csv", "out", "--model=text=my_modles:m"], "no module 'my_modles', neither"),
        (["in.csv", "out", "--model=text=my_modles:m"], "did you mean 'my_models'?"),
        (["in.csv", "out", "--model=text=mymod:language"], f"installed nor in {os.sep}"),
        (
            ["latin.csv", "out", "--embed=text=M"],
            r"perhaps they are cp1252; the line is 'K\xf6ln'; add --encoding cp1252",
        ),
        (["empty.csv", "out", "--embed=text=M", "--allow-empty"], "empty.csv is empty, expected a header; check"),
        (
            ["in.csv", "out", "--embed=text=M", "--columns=stars, txt"],
            "can't read the column 'txt': ./in.csv does not have it; did you mean 'text'?\n",
        ),
        (
            ["in.csv", "out", "--model=text=json:dumbs"],
            "the module json has no 'dumbs'; did you mean 'dumps' or 'dump'?",
        ),
        (
            ["broken.csv", "out", "--embed=text=M"],
            "./broken.csv, line 3: found 1 value, expected 2 as in the header; the line is '2'; correct the line",
        ),
        (
            ["in.jsonl", "out", "--embed=text=M", "--delimiter=;"],
            "found --delimiter, which is for CSV, but no CSV file\n",
        ),
        (
            ["in.csv", "out", "--embed=text=M", "--encoding=utf9"],
            "found encoding='utf9', expected an encoding that Python knows, such as 'cp1252' or 'utf-16'",
        ),
        (["in.csv", "notes.txt/out", "--embed=text=M"], "/notes.txt, expected a folder; choose another path"),
        (["in.csv", "out", "--embed=text=M", "--dead-letters=in.csv/bad.csv"], "/in.csv, expected a folder"),
        (["in.csv", "out", "--embed=text=M", "--vector-store=notes.txt"], "/notes.txt, expected a folder"),
        (["notes.txt", "out", "--embed=text=M"], "optionally followed by .gz, .bz2, .zst, .lz4\n"),
    ],
)
def test_mistakes_are_named_before_anything_runs(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("luminosity.cli.enrich.enrich.warm_up", lambda _: None)
    pyarrow.csv.write_csv(pa.table({"text": ["fine"], "stars": [4]}), "in.csv")
    Path("notes.txt").write_text("no table\n")
    Path("there.jsonl").touch()
    Path("in.jsonl").write_text('{"text": "fine"}\n')
    Path("broken.csv").write_text("id,text\n1,fine\n2\n")
    Path("latin.csv").write_bytes(b"text\nK\xf6ln\n")
    Path("empty.csv").touch()
    Path("my_models.py").touch()
    before = sorted(os.listdir())

    code = main(["enrich", *arguments])

    error = capsys.readouterr().err
    assert code == 2
    assert error.startswith("lum enrich: ")
    assert message in error
    assert sorted(os.listdir()) == before


def test_a_store_that_is_not_installed_is_missed_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("luminosity.cli.enrich.enrich.warm_up", lambda _: None)
    monkeypatch.setitem(sys.modules, "qdrant_edge", None)
    pyarrow.csv.write_csv(pa.table({"text": ["fine"]}), "in.csv")

    assert main(["enrich", "in.csv", "out", "--embed=text=M", "--vector-store=store"]) == 2

    assert (
        "lum enrich: qdrant_edge is not installed; install the extra qdrant of luminosity: pip install 'qdrant-client"
        in capsys.readouterr().err
    )
    assert os.listdir() == ["in.csv"]
