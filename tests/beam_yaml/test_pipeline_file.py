"""Tests of pipelines in YAML: our transforms beside Beam's, and what mistakes in a file are told."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.testing.util import assert_that, equal_to

import luminosity
from luminosity import LuminosityRunner
from luminosity.beam_yaml.pipeline_file import PipelineFile
from luminosity.beam_yaml.transforms import TRANSFORMS
from luminosity.cli.main import main
from luminosity.drift import MMDTest
from luminosity.errors import MissingExtra, OptionError, PipelineFileError, RunFailed
from luminosity.evaluation import Describe, Evaluate
from luminosity.extras import require
from luminosity.judging import ScoreTexts
from tests.warm import run_module

_MODELS = "tests.beam_yaml.yaml_models"

_OURS = f"""\
# A comment at the start, which Beam cuts off before it counts lines.

pipeline:
  transforms:
    - type: ReadTable
      name: Reviews
      config: {{path: "{{{{ folder }}}}/reviews.csv"}}
    - type: Filter
      name: Good
      input: Reviews
      config: {{language: python, keep: stars > 3}}
    - type: Enrich
      name: Models
      input: Good
      config:
        columns:
          length: {{model: "{_MODELS}:Lengths", inputs: text}}
          vector: {{model: "{_MODELS}:Vectors", inputs: text}}
    - type: RunInference
      name: Predict
      input: Models
      config: {{model_handler: "{_MODELS}:Untyped", inputs: text}}
    - type: MapToFields
      name: Twice
      input: Predict
      config: {{language: python, append: true, fields: {{twice: length * 2, back: -inference}}}}
    - type: WriteTable
      input: Twice
      config: {{path: "{{{{ folder }}}}/out.jsonl", if_exists: replace}}
    - type: WriteQdrant
      input: Models
      config: {{where: "{{{{ folder }}}}/qdrant", collection: reviews, vectors: vector}}
    - type: MMDTest
      input: {{current: Models, reference: Twice}}
      config: {{column: vector, permutations: 100}}
    - type: WriteToJson
      input: MMDTest
      config: {{path: "{{{{ folder }}}}/drift.json"}}
options:
  cpu_workers: 1
"""

_BEAMS = """\
pipeline:
  type: chain
  transforms:
    - type: Create
      config:
        elements: [{name: a, n: 1}, {name: b, n: 2}, {name: a, n: 3}, {name: a, n: -1}]
    - type: Filter
      config: {language: python, keep: n > 0}
    - type: MapToFields
      config:
        language: javascript
        append: true
        fields: {twice: {callable: "function f(row) {return row.n * 2}", output_type: number}}
    - type: Combine
      config: {group_by: name, combine: {total: {value: twice, fn: sum}}}
    - type: LogForTesting
options:
  yaml_experimental_features: [javascript]
"""


_JAVASCRIPT = PipelineOptions(["--yaml_experimental_features=javascript"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "reviews.csv").write_text("id,text,stars\n1,fine,4\n2,bad,1\n3,good book,5\n")
    (tmp_path / "ours.yaml").write_text(_OURS)
    return tmp_path


def _variables(folder: Path) -> str:
    return f"--jinja_variables={json.dumps({'folder': str(folder)})}"


def _lum(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_module("luminosity.cli.main", *arguments, env={**os.environ, "COLUMNS": "80"})


def _read(pattern: Path) -> list[dict[str, Any]]:
    files = sorted(pattern.parent.glob(f"{pattern.name}*"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_our_transforms_and_beams_take_each_others_rows(folder: Path) -> None:
    PipelineFile(str(folder / "ours.yaml"), [_variables(folder), "--runner=luminosity.LuminosityRunner"]).run()
    columns = ("id", "text", "stars", "length", "vector", "inference", "twice", "back")
    rows = [tuple(row[name] for name in columns) for row in _read(folder / "out.jsonl")]
    assert sorted(rows) == [
        (1, "fine", 4, 4, [4.0, 1.0], -4, 8, 4),
        (3, "good book", 5, 9, [9.0, 1.0], -9, 18, 9),
    ]
    (drift,) = _read(folder / "drift.json")
    assert (drift["drift"], drift["reference_rows"], drift["current_rows"]) == (False, 2, 2)
    assert list((folder / "qdrant").iterdir())


def test_a_file_of_beams_own_transforms_runs_and_shows_its_rows(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(_BEAMS)
    done = _lum("run", str(tmp_path / "own.yaml"), "--cpu_workers=1", "--progress=off")
    assert done.returncode == 0, done.stderr
    logged = [json.loads(line.partition("{")[1] + line.partition("{")[2]) for line in done.stderr.splitlines()]
    assert sorted(logged, key=lambda row: row["name"]) == [{"name": "a", "total": 8}, {"name": "b", "total": 4}]


def test_plan_shows_the_steps_of_a_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(folder / "ours.yaml"), _variables(folder)]) == 0
    shown = capsys.readouterr().out
    assert "ours.yaml" in shown
    assert "Models" in shown
    assert not (folder / "out.jsonl").exists()


def test_failed_rows_are_an_output(folder: Path) -> None:
    (folder / "errors.yaml").write_text(f"""\
pipeline:
  transforms:
    - type: ReadTable
      config: {{path: {folder}/reviews.csv}}
    - type: Enrich
      input: ReadTable
      config:
        columns: {{back: {{model: "{_MODELS}:Untyped", inputs: text}}}}
        error_handling: {{output: failed}}
    - type: MapToFields
      name: Good
      input: Enrich
      config: {{fields: {{text: text}}}}
    - type: MapToFields
      name: Bad
      input: Enrich.failed
      config:
        language: python
        fields: {{text: element.text, model: model, why: "msg.splitlines()[0]"}}
    - type: AssertEqual
      input: Good
      config: {{elements: [{{text: fine}}, {{text: good book}}]}}
    - type: AssertEqual
      name: AssertBad
      input: Bad
      config: {{elements: [{{text: bad, model: back, why: "ValueError: found 'bad'"}}]}}
""")
    PipelineFile(str(folder / "errors.yaml"), ["--runner=luminosity.LuminosityRunner", "--cpu_workers=1"]).run()


_EVALUATED = """\
pipeline:
  transforms:
    - type: ReadTable
      name: Read
      config: {path: "{{ folder }}/reviews.csv"}
    - type: MapToFields
      name: Guess
      input: Read
      config: {language: python, append: true, fields: {good: stars > 3, guess: len(text) > 3, other: len(text) > 0}}
    - type: Evaluate
      input: Guess
      config: {label: good, prediction: guess, prediction_b: other, slices: [text], resamples: 100}
    - type: Describe
      name: Described
      input: Guess
      config: {columns: [stars, text], reference: "{{ folder }}/before.csv"}
    - type: Describe
      name: Compared
      input: {current: Read, reference: Guess}
    - type: WriteToJson
      name: WriteMetrics
      input: Evaluate
      config: {path: "{{ folder }}/metrics.json"}
    - type: WriteTable
      name: WriteColumns
      input: Described
      config: {path: "{{ folder }}/columns.jsonl"}
    - type: WriteToJson
      name: WriteChanges
      input: Compared
      config: {path: "{{ folder }}/changes.json"}
"""


def test_tables_are_evaluated_and_described(folder: Path) -> None:
    (folder / "before.csv").write_text("stars\n1\n1\n2\n")
    (folder / "evaluate.yaml").write_text(_EVALUATED)
    flags = [_variables(folder), "--runner=luminosity.LuminosityRunner", "--cpu_workers=1"]
    with pytest.raises(PipelineFileError, match="Described: there is no column 'text', expected one of stars"):
        PipelineFile(str(folder / "evaluate.yaml"), flags).build(beam.Pipeline())
    (folder / "before.csv").write_text("stars,text\n1,bad\n1,bad\n2,bad\n")
    PipelineFile(str(folder / "evaluate.yaml"), flags).run()

    metrics = {(row["by"], row["slice"], row["model"], row["metric"]): row for row in _read(folder / "metrics.json")}
    whole = metrics[None, None, "first", "accuracy"]
    assert (whole["value"], whole["rows"], whole["reason"]) == (1.0, 3, None)
    assert 0 < whole["low"] < whole["high"] == 1
    assert metrics[None, None, "second", "accuracy"]["value"] == pytest.approx(2 / 3)
    assert metrics[None, None, "second minus first", "accuracy"]["value"] == pytest.approx(-1 / 3)
    assert metrics["text", "bad", "second", "accuracy"]["value"] == 0
    undefined = metrics["text", "bad", "first", "recall"]
    assert (undefined["value"], undefined["reason"]) == (None, "no row has the label True")

    assert metrics[None, None, "first", "kappa"]["value"] == 1

    columns = _read(folder / "columns.jsonl")
    assert [row["column"] for row in columns] == ["text", "stars"] or columns[0]["distance"] == columns[1]["distance"]
    (stars,) = [row for row in columns if row["column"] == "stars"]
    assert (stars["median"], stars["missing"], stars["distinct"]) == (4, 0, 3)
    assert stars["distance"] == pytest.approx(2 / 3)
    assert stars["change"] == "median 1, now 4"
    changes = {row["column"]: row["change"] for row in _read(folder / "changes.json")}
    assert changes["guess"] == "the column is gone"
    assert changes["stars"] == "median 4, now 4"


_TEXTS = """\
pipeline:
  type: chain
  transforms:
    - type: Create
      config:
        elements:
          - {expected: a good film, first: a bad film, second: a good film, stars: 2, more: 4}
          - {expected: "yes", first: "yes", second: "no", stars: 5, more: 1}
    - type: ScoreTexts
      config:
        label: expected
        prediction: first
        prediction_b: second
        judge: {model: "yaml_judge:Judge", rubric: It is good, scale: pass/fail}
    - type: Evaluate
      config:
        label: expected
        prediction: first
        prediction_b: second
        task: texts
        measures: [stars, judge]
        measures_b: [more, judge_b]
        preference: preference
    - type: WriteToJson
      config: {path: "{{ folder }}/metrics.json"}
"""


_JUDGE = """\
from luminosity import Handler


class Judge(Handler[object, str, None]):
    def load_model(self):
        return None

    def predict(self, model, batch, inference_args=None):
        asked = [messages[0]["content"] for messages in batch]
        return ["tie" if "first answer" in each else "pass" if "good film" in each else "well" for each in asked]
"""


def test_texts_of_two_models_are_judged_and_evaluated(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "yaml_judge.py").write_text(_JUDGE)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    (folder / "texts.yaml").write_text(_TEXTS)
    flags = [_variables(folder), "--runner=luminosity.LuminosityRunner", "--cpu_workers=1"]
    PipelineFile(str(folder / "texts.yaml"), flags).run()

    rows = {(row["model"], row["metric"]): row["value"] for row in _read(folder / "metrics.json")}
    assert (rows["first", "rouge1"], rows["second", "rouge1"]) == (pytest.approx(5 / 6), 0.5)
    assert (rows["first", "stars"], rows["second minus first", "stars"]) == (3.5, -1)
    assert rows["win rate of the second", "exact_match"] == 0.5
    assert (rows["first", "judge"], rows["win rate of the second", "preference"]) == (1, 0.5)
    wrong = (folder / "texts.yaml").read_text().replace("rubric: It is good, ", "")
    (folder / "texts.yaml").write_text(wrong)
    with pytest.raises(PipelineFileError, match="expected a mapping with model: and rubric:"):
        PipelineFile(str(folder / "texts.yaml"), flags).build(beam.Pipeline())


def _mistake(folder: Path, old: str, new: str, *flags: str) -> str:
    """Return the message for the file with one mistake, without the folder."""
    assert old in _OURS
    path = folder / "wrong.yaml"
    path.write_text(_OURS.replace(old, new, 1))
    with pytest.raises((PipelineFileError, OptionError)) as raised:
        PipelineFile(str(path), [_variables(folder), *flags]).build(beam.Pipeline())
    return str(raised.value).replace(f"{folder}/", "")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("type: ReadTable", "type: ReadTabel", "5: unknown transform 'ReadTabel'; did you mean 'ReadTable'?"),
        ("type: MapToFields", "type: MapToField", "23: unknown transform 'MapToField'; did you mean 'MapToFields'?"),
        ("{path:", "{paht:", "7: Reviews: unknown option 'paht'; did you mean 'path'?"),
        ("keep: stars", "kep: stars", "11: Good: unknown option 'kep'; did you mean 'keep'?"),
        ("if_exists:", "if_exist:", "29: WriteTable: unknown option 'if_exist'; did you mean 'if_exists'?"),
        ("input: Good", "input: Goood", "14: unknown input 'Goood'; did you mean 'Good'?"),
        ("language: python", "language: pyhton", "8: unknown language 'pyhton'; did you mean 'python'?"),
        ("      input: Good\n", "      input: Good\n      input: Good\n", "15: found the key 'input' twice"),
        ("cpu_workers", "cpu_worker", "40: unknown option 'cpu_worker'; did you mean 'cpu_workers'?"),
        (", vectors: vector}", "}", "30: WriteQdrant: missing 'vectors'"),
        ('where: "{{ folder }}/qdrant", ', "", "30: WriteQdrant: missing 'where'"),
        (
            'where: "{{ folder }}/qdrant", collection: reviews, vectors: vector',
            "",
            "30: WriteQdrant: missing 'where' and 'vectors'",
        ),
        ("{{ folder }}/out", "{{ foldr }}/out", "29: 'foldr' is undefined; did you mean 'folder'?"),
        ("{{ folder }}/out", "{{ folder }/out", "29: unexpected '}'"),
        ('path: "{{', 'path: "{%', "7: Encountered unknown tag 'folder'."),
    ],
)
def test_a_mistake_has_its_line_and_a_suggestion(folder: Path, old: str, new: str, message: str) -> None:
    assert _mistake(folder, old, new) == f"wrong.yaml:{message}"


@pytest.mark.parametrize(
    ("old", "new", "start", "end"),
    [
        ("  transforms:", "  transfroms:", "wrong.yaml:4: unknown key 'transfroms'", "did you mean 'transforms'?"),
        ("      input: Good", "      inputs: Good", "wrong.yaml:14: Enrich: unknown key 'inputs'", "'input'?"),
        ("options:", "optoins:", "wrong.yaml:39: unknown key 'optoins'", "did you mean 'options'?"),
        ("keep: stars > 3}", "keep: stars > 3", "wrong.yaml:12: while parsing a flow mapping", ""),
        (":Lengths", ":Length", "wrong.yaml:12: Models: ", "has no 'Length'; did you mean 'Lengths'?"),
        ("if_exists: replace", "if_exists: replac", "wrong.yaml:27: WriteTable: found if_exists='replac'", ""),
        ("inputs: text", "inputs: txt", "wrong.yaml:12: Models: the column 'length' takes 'txt'", "'text'?"),
        ("s: vector}", "s: vectro}", "wrong.yaml:30: WriteQdrant: there is no column 'vectro'", "'vector'?"),
        ("column: vector, p", "kernel: rfb, column: vector, p", "wrong.yaml:33: MMDTest: found kernel: rfb", "'rbf'?"),
    ],
)
def test_a_mistake_has_its_line(folder: Path, old: str, new: str, start: str, end: str) -> None:
    message = _mistake(folder, old, new)
    assert message.startswith(start)
    assert message.endswith(end)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("fn: sum", "fn: smu", "unknown function 'smu', expected all, any, "),
        ("type: LogForTesting", "{type: LogForTesting, resource_hints: {acelerator: x}}", "'accelerator'?"),
        ("type: LogForTesting", "{type: WindowInto, config: {windowing: {type: fixd}}}", "did you mean 'fixed'?"),
        (
            "type: LogForTesting",
            "{type: WindowInto, config: {windowing: {type: fixed}}}",
            ":16: WindowInto: missing 'size'",
        ),
        ("type: LogForTesting", "{type: MapToFields, config: {fields: {n: totall}}}", "did you mean 'total'?"),
        ("  type: chain\n", "", ":6: Missing inputs for transform"),
    ],
)
def test_beams_own_words_get_a_place_and_a_suggestion(old: str, new: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(_BEAMS.replace(old, new))
    with pytest.raises(PipelineFileError) as raised:
        PipelineFile(str(path)).build(beam.Pipeline(options=_JAVASCRIPT))
    assert message in str(raised.value)
    assert str(raised.value).startswith(f"{path}:")


def test_a_circle_of_inputs_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "circle.yaml"
    step = "    - {{type: Filter, name: {}, input: {}, config: {{language: python, keep: n}}}}\n"
    path.write_text("pipeline:\n  transforms:\n" + step.format("A", "B") + step.format("B", "A"))
    with pytest.raises(PipelineFileError) as raised:
        PipelineFile(str(path)).build(beam.Pipeline())
    assert str(raised.value) == f"{path}:3: a circle of inputs: A ← B ← A"


@pytest.mark.parametrize(
    ("transform", "not_in_yaml"),
    [
        (luminosity.AddRowIds, set()),
        (Describe, set()),
        (Evaluate, set()),
        (ScoreTexts, set()),
        (MMDTest, {"keyed", "bins", "precision"}),
        (luminosity.ReadTable, {"where"}),
        (luminosity.SearchQdrant, {"api_key"}),
        (luminosity.WriteLance, set()),
        (luminosity.WriteQdrant, {"api_key"}),
        (luminosity.WriteTable, set()),
    ],
)
def test_yaml_has_the_arguments_of_python(transform: Any, not_in_yaml: set[str]) -> None:
    python = set(inspect.signature(transform.__init__).parameters) - {"self"}
    yaml = TRANSFORMS[transform.__name__]
    assert python - set(inspect.signature(yaml).parameters) == not_in_yaml
    described = [name for name in inspect.signature(yaml).parameters if f"\n    {name}: " in (yaml.__doc__ or "")]
    assert described == list(inspect.signature(yaml).parameters)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ("type: Sql", "Beam runs Sql in Java, and LuminosityRunner runs Python only"),
        ("{type: Filter, config: {language: java, keep: 'n > 1'}}", "Beam runs Filter in java in Java, and Lum"),
    ],
)
def test_steps_in_java_are_refused(step: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "java.yaml"
    path.write_text(_BEAMS.replace("type: LogForTesting", step))
    with pytest.raises(PipelineFileError) as raised:
        PipelineFile(str(path)).build(beam.Pipeline(LuminosityRunner()))
    assert str(raised.value).startswith(f"{path}:16: {message}")


def test_an_option_that_no_pipeline_has_is_refused(folder: Path) -> None:
    assert _mistake(folder, "1", "1", "--cpu_worker=2") == (
        "--cpu_worker=2: a YAML pipeline has no such option; did you mean '--cpu_workers'?"
    )


def test_a_failing_step_is_found_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "fails.yaml"
    path.write_text(_BEAMS.replace("keep: n > 0", "keep: n / 0 > 0"))
    with pytest.raises(RunFailed) as raised:
        PipelineFile(str(path), ["--runner=luminosity.LuminosityRunner", "--cpu_workers=1"]).run()
    assert raised.value.__notes__ == [f"{path}:7: Filter is the step that failed"]


@pytest.mark.parametrize("command", ["run", "plan"])
def test_a_mistake_ends_the_command_with_code_2(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("luminosity.cli.run.warm_up", lambda *_: None)  # it is for a process of its own
    (tmp_path / "wrong.yaml").write_text(_BEAMS.replace("type: Filter", "type: Fliter"))
    assert main([command, str(tmp_path / "wrong.yaml")]) == 2
    message = f"{tmp_path}/wrong.yaml:7: unknown transform 'Fliter'; did you mean 'Filter'?"
    assert capsys.readouterr().err == f"lum {command}: {message}\n"


def test_single_variables_come_from_flags(folder: Path) -> None:
    flags = ["--jinja_variable_flags=folder", f"--folder={folder}"]
    pipeline = beam.Pipeline()
    PipelineFile(str(folder / "ours.yaml"), flags).build(pipeline)
    assert any("Reviews" in label for label in pipeline.applied_labels)


def test_transforms_that_a_file_defines_in_yaml_take_tables(folder: Path) -> None:
    path = folder / "provider.yaml"
    path.write_text(f"""\
providers:
  - type: python
    config: {{}}
    transforms: {{Shout: "lambda: beam.Map(lambda row: beam.Row(text=row.text.upper()))"}}
pipeline:
  type: chain
  transforms:
    - type: ReadTable
      config: {{pattern: {folder}/reviews.csv}}
    - type: Shout
""")
    with beam.Pipeline("FnApiRunner") as pipeline:
        texts = PipelineFile(str(path)).build(pipeline)
        assert_that(texts | beam.Map(lambda row: row.text), equal_to(["FINE", "BAD", "GOOD BOOK"]))


def test_beams_slow_modules_are_imported_only_where_they_are_used(folder: Path) -> None:
    code = (
        "import sys; from luminosity.beam_yaml.pipeline_file import PipelineFile; import apache_beam as beam;"
        f"PipelineFile({str(folder / 'ours.yaml')!r}, [{_variables(folder)!r}]).build(beam.Pipeline());"
        "print([name for name in ('torch', 'transformers', 'apache_beam.yaml.yaml_ml') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280, check=False)
    assert done.stdout == "[]\n", done.stderr


def test_a_missing_library_names_the_extra() -> None:
    with pytest.raises(MissingExtra, match=r"install the extra yaml of luminosity: pip install 'apache-beam\[yaml\]"):
        require("no_such_library", "yaml")
