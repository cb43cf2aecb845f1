"""``lum evaluate``: the verdict, exit codes, JSON and the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from luminosity.cli.main import main
from tests.inference.handlers.model_server import Said, Seen, serving


@pytest.fixture
def table(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    label = random.integers(2, size=400)
    score = np.clip(label * 0.5 + random.random(400) / 2, 0, 1)
    names = np.array(["ham", "spam"])
    mood = pa.StructArray.from_arrays([names[(score > 0.4).astype(int)], score], names=["label", "score"])
    path = tmp_path / "test.parquet"
    columns = {"label": names[label], "mood": mood, "other": names[label], "by": random.choice(["x", "<y>"], 400)}
    pq.write_table(pa.table({**columns, "number": score, "query": np.arange(400) // 10}), path)
    return path


def test_the_verdict_is_one_line(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(
        ["evaluate", str(table), "--label", "label", "--prediction", "mood.label", "--at-least", "accuracy=0.5"]
    )
    printed = capsys.readouterr().out
    assert code == 0
    assert printed.startswith("met: accuracy 0.895 (0.8")
    assert " · 400 rows · " in printed
    assert printed.count("\n") == 1


def test_a_requirement_that_is_not_met_exits_with_3(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["evaluate", str(table), "--label", "label", "--prediction", "mood.label", "--slice", "by"]
    assert main([*command, "--at-least", "accuracy=0.999", "--at-least", "recall=0.1"]) == 3
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("not met: accuracy 0.895 is below 0.999 · ")
    assert lines[1] == "by by:"
    assert {line.split()[0] for line in lines[2:]} == {"x", "<y>"}
    assert main([*command, "--at-most", "accuracy=0.1", "--each-slice"]) == 3
    assert "by=<y>: accuracy 0." in capsys.readouterr().out


def test_the_positive_class_is_named_and_a_score_of_the_other_class_noted(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.html"
    command = ["evaluate", str(table), "--label", "label", "--prediction", "mood.label", "--score", "mood.score"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert " · positive class 'spam' (--positive chooses another) · " in printed
    assert "note:" not in printed
    assert main([*command, "--positive", "ham", "--report", str(report)]) == 0
    line, note, _ = capsys.readouterr().out.split("\n", 2)
    assert " · positive class 'ham' · 400 rows" in line
    assert note.startswith("note: an AUC of 0 means that")
    assert "ranks 'spam' above the positive class 'ham'" in note
    assert note.endswith("set positive='spam' (--positive spam)")
    assert "positive class</dt><dd>ham" in report.read_text()
    assert main([*command, "--positive", "ham", "--resamples", "0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["positive"] == "ham"
    assert "--positive spam" in found["notes"][0]
    assert main([*command[:-2], "--positive", "ham"]) == 0
    assert "note:" not in capsys.readouterr().out, "there is no score"


def test_json_and_report(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.html"
    command = ["evaluate", str(table), "--label", "label", "--prediction", "mood.label", "--score", "mood.score"]
    second = ["--prediction-b", "other", "--score-b", "number", "--slice", "by", "--slice", "by,query"]
    assert main([*command, *second, "--json", "--report", str(report), "--at-least", "auc=0.9"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passed"] is True
    assert found["rows"] == 400
    assert found["metrics_b"]["accuracy"]["value"] == 1
    assert found["differences"]["accuracy"]["low"] > 0
    assert {each["value"] for each in found["slices"]["by"]} == {"x", "<y>"}
    page = report.read_text()
    assert "All requirements are met." in page
    assert "&lt;y&gt;" in page
    assert "<y>" not in page
    assert "<small>(" in page
    for title in ("Metrics", "The second model against the first", "Confusion matrix", "Classes", "Scores", "By by"):
        assert f"<h2>{title}</h2>" in page
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "nan" not in page.lower().replace("finance", "")


def test_numbers_and_rankings(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "numbers.html"
    command = ["evaluate", str(table), "--label", "number", "--prediction", "mood.score", "--report", str(report)]
    assert main(command) == 0
    assert "mae 0 (0 to 0), rmse 0 (0 to 0), r2 1 (1 to 1)" in capsys.readouterr().out
    assert "5% of the rows have a smaller error" in report.read_text()
    command = ["evaluate", str(table), "--label", "number", "--score", "mood.score", "--query", "query", "--k", "3"]
    assert main([*command, "--report", str(report)]) == 0
    assert "recall@3 0.3 (" in capsys.readouterr().out
    assert "among the first 3 rows of a query" in report.read_text()


def test_texts_of_two_prompts_are_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, report = tmp_path / "texts.jsonl", tmp_path / "texts.html"
    rows = [("a good film", "a bad film", "a good film", 2, 4, 1), ("yes", "yes", "no", 5, None, -1)]
    names = ("expected", "first", "second", "stars", "more", "better")
    path.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    command = ["evaluate", str(path), "--task", "texts", "--label", "expected", "--prediction", "first"]
    assert main([*command, "--measure", "stars", "--resamples", "0", "--at-least", "rougeL=0.9"]) == 3
    assert capsys.readouterr().out.startswith("not met: rougeL 0.8333 is below 0.9 · normalised_match 0.5, similarity")

    command += ["--prediction-b", "second", "--measure", "stars", "--measure-b", "more", "--preference", "better"]
    assert main([*command, "--resamples", "0", "--report", str(report)]) == 0
    _, note, *lines = capsys.readouterr().out.splitlines()
    assert note == "note: 1 of 2 rows have no number in 'more', and its mean leaves them out"
    table = {line.split()[0]: line.split()[1:] for line in lines if line.startswith("  ")}
    assert table["first"] == ["second", "difference", "win", "tie", "loss", "win", "rate"]
    assert table["exact_match"] == ["0.5", "0.5", "0", "1", "0", "1", "0.5"]
    assert table["stars"] == ["3.5", "4", "0.5", "1", "0", "0", "1"]
    assert table["preference"] == ["1", "0", "1", "0.5"]
    page = report.read_text()
    for title in ("Metrics", "The second model against the first", "Row by row"):
        assert f"<h2>{title}</h2>" in page
    assert "F1 of the words that both texts have in the same order" in page
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["outcomes"]["stars"]["wins"] == 1
    assert found["settings"]["measures"] == ["stars"]


def _judged(seen: Seen) -> Said:
    """Give long texts a 5, prefer them, and say something else about "x"."""
    prompt = seen.json["messages"][0]["content"]
    texts = json.loads(prompt[prompt.index("{") : prompt.index("\n}\n") + 2])
    if "answer" not in texts:
        verdict = "first" if len(texts["first answer"]) > len(texts["second answer"]) else "second"
    else:
        verdict = "I can't tell" if texts["answer"] == "x" else "5" if len(texts["answer"]) > 6 else "1"
    return Said({"model": "m", "choices": [{"message": {"content": verdict}, "finish_reason": "stop"}]})


def test_a_judge_on_a_server_scores_the_texts_of_two_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out, rubric = tmp_path / "texts.jsonl", tmp_path / "scored.parquet", tmp_path / "rubric.txt"
    rows = [
        ("who", "ann lee", "ann", "it was ann lee"),
        ("when", "1999", "in 1999", "1998"),
        ("why", "money", "x", "y"),
    ]
    names = ("question", "expected", "old", "new")
    path.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    rubric.write_text("Long is good.")
    command = ["evaluate", str(path), "--task", "texts", "--label", "expected", "--prediction", "old"]
    command += ["--prediction-b", "new", "--judge", "m", "--rubric", f"@{rubric}", "--question", "question"]
    with serving(_judged) as server:
        assert main([*command, "--server", server.url, "--scored", str(out), "--json", "--resamples", "0"]) == 0
        prompts = [seen.json["messages"][0]["content"] for seen in server.posts]
    found = json.loads(capsys.readouterr().out)
    assert (found["metrics"]["judge"]["value"], found["metrics_b"]["judge"]["value"]) == (3, pytest.approx(7 / 3))
    assert "1 of 3 rows have no number in 'judge', and its mean leaves them out" in found["notes"]
    preference = found["outcomes"]["preference"]
    assert preference["wins"] + preference["losses"] == 3
    assert len(prompts) == 9
    assert all(prompt.startswith("Rubric: Long is good.") for prompt in prompts)
    scored = {row["question"]: row for row in pq.read_table(out).to_pylist()}
    assert {name: (row["judge"], row["judge_b"]) for name, row in scored.items()} == {
        "who": (1, 5),
        "when": (5, 1),
        "why": (None, 1),
    }
    assert scored["why"]["judge_said"] == "I can't tell"

    people = tmp_path / "people.parquet"
    table = pq.read_table(out)
    pq.write_table(table.append_column("people", pa.array([1, 5, 5])), people)
    command = ["evaluate", str(people), "--label", "people", "--prediction", "judge_b", "--json"]
    assert main(command) == 0
    assert "kappa_quadratic" not in json.loads(capsys.readouterr().out)["metrics"], "there are only two classes"


JUDGE = ["--prediction", "other", "--judge", "m"]
WRONG = [
    (["--prediction", "mood.labl"], "found no column 'labl', expected one of label, score; did you mean 'label'?"),
    (["--prediction", "nothing"], "nothing"),
    (["--prediction", "other", "--at-least", "acuracy=1"], "found no metric 'acuracy'"),
    (["--prediction", "number"], "holds double"),
    (["--prediction", "other", "--measure", "number"], "expected both; add --task texts"),
    (JUDGE, "found --judge without --task texts, expected both"),
    ([*JUDGE, "--task", "texts"], "found --judge without --rubric, expected both; add --rubric TEXT"),
    ([*JUDGE, "--task", "texts", "--dead-letters", "d.jsonl"], "found --judge and --dead-letters"),
    (
        [*JUDGE, "--task", "texts", "--rubric", "@nowhere", "--server", "http://h:1"],
        "--rubric @nowhere: can't read the file",
    ),
    ([*JUDGE, "--task", "texts", "--rubric", "x"], "--judge m: found no --server that knows the model"),
    (
        [*JUDGE, "--task", "texts", "--rubric", "x", "--judge", "http://h:1#m"],
        "found an address, expected the name of a model; use --judge m --server http://h:1",
    ),
    (
        [*JUDGE, "--task", "texts", "--rubric", "x", "--server", "http://h:1#l"],
        "found '#' in the address, expected the name of the model in --judge; use --judge l --server http://h:1",
    ),
    ([*JUDGE, "--task", "texts", "--rubric", "x", "--server", ""], "--server is empty; perhaps a shell variable"),
    (
        [*JUDGE, "--task", "texts", "--rubric", "x", "--server", "http://h:1", "--server-key-env", "NO_SUCH_KEY"],
        "--server-key-env NO_SUCH_KEY: the environment variable is not set; export NO_SUCH_KEY=... first",
    ),
    (["--prediction", "other", "--scale", "1-5"], "found --scale without a model; add --judge MODEL"),
    ([], "found neither --prediction nor --score"),
    (["--prediction", "other", "--each-slice"], "expected --slice and --at-least or --at-most"),
    (["--prediction", "other", "--report", "/nowhere/at/all.html"], "expected the name of a file in a folder"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_errors(
    options: list[str],
    message: str,
    table: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(table.parent)
    assert main(["evaluate", str(table), "--label", "label", *options]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("lum evaluate: ")
    assert message in said.err
    assert list(table.parent.iterdir()) == [table], "nothing is left behind"


TABLE = ["--prediction", "old", "--prediction-b", "new"]
UNPAID = [
    (["--prediction", "odl"], "found no column 'odl', expected one of question, expected, old"),
    ([*TABLE, "--question", "qestion"], "found no column 'qestion', expected one of question, expected"),
    (["--prediction", "stars"], "the column 'stars' holds int64, expected texts"),
    ([*TABLE, "--slice", "contry"], "found no column 'contry'"),
    ([*TABLE, "--measure", "stars"], "found 0 measures_b for 1 measures"),
    (["--prediction", "old", "--measure", "strs"], "found no column 'strs'"),
    (["--prediction", "old", "--measure", "question"], "the column 'question' holds string, expected numbers"),
    (["--prediction", "old", "--measure", "judge"], "expected at most 16 different columns"),
    ([*TABLE, "--at-least", "juge=3"], "--at-least: found no metric 'juge', expected one of exact_match"),
    ([*TABLE, "--at-most", "cosine=1"], "--at-most: found no metric 'cosine'"),
    ([*TABLE, "--scored", "texts.parquet"], "exists"),
    ([*TABLE, "--scored", "texts.parquet/out.parquet"], "texts.parquet"),
    ([*TABLE, "--rubric", " "], "found an empty rubric"),
    ([*TABLE, "--label", "judge_said"], "the table has a column 'judge_said' already"),
]


@pytest.mark.parametrize(("options", "message"), UNPAID)
def test_mistakes_are_told_before_the_judge_is_asked(
    options: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    rows: dict[str, list[Any]] = {name: ["a text"] for name in ("question", "expected", "old", "new")} | {"stars": [1]}
    if "judge_said" in options:
        rows["judge_said"] = ["5"]
    pq.write_table(pa.table(rows), "texts.parquet")
    with serving(_judged) as server:
        command = ["evaluate", "texts.parquet", "--task", "texts", "--label", "expected", "--judge", "m"]
        assert main([*command, "--server", server.url, "--rubric", "Be brief.", *options]) == 2
        assert not server.seen
    said = capsys.readouterr()
    assert (said.out, message in said.err) == ("", True), said.err
    assert [path.name for path in tmp_path.iterdir()] == ["texts.parquet"]


def test_slices_and_requirements_may_be_of_the_scores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "texts.parquet"
    pq.write_table(pa.table({"expected": ["a", "b"], "old": ["a long text", "short"]}), path)
    command = ["evaluate", str(path), "--task", "texts", "--label", "expected", "--prediction", "old", "--judge", "m"]
    command += ["--rubric", "Long is good.", "--slice", "judge", "--at-least", "judge=2", "--json", "--resamples", "0"]
    with serving(_judged) as server:
        assert main([*command, "--server", server.url]) == 0
    slices = json.loads(capsys.readouterr().out)["slices"]
    assert len(slices["judge"]) == 2, slices


@pytest.mark.parametrize("text", ["accuracy", "=1", "accuracy=high", "accuracy=nan"])
def test_a_requirement_needs_a_number(text: str, table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["evaluate", str(table), "--label", "label", "--prediction", "other", "--at-least", text])
    assert "such as accuracy=0.9" in capsys.readouterr().err


def test_a_missing_value_names_the_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "test.jsonl"
    path.write_text('{"label": "a", "prediction": "a"}\n{"label": "b", "prediction": null}\n')
    command = ["evaluate", str(path), "--label", "label", "--prediction", "prediction"]
    assert main(command) == 1
    assert "add --skip-missing" in capsys.readouterr().err
    assert main([*command, "--skip-missing"]) == 0
    assert "1 rows · 1 rows with missing values skipped" in capsys.readouterr().out
