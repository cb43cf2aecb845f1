"""Each pattern of examples/talks runs once, and prints what its README says."""

from __future__ import annotations

import doctest
import importlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.testing.util import assert_that, equal_to

from tests.warm import run_module

pytestmark = pytest.mark.thorough

TALKS = Path(__file__).parent.parent / "examples" / "talks"
RUNNERS = {
    "Luminosity": ["--runner=luminosity.LuminosityRunner", "--progress=off", "--run_dir=off", "--debug"],
    "FnApiRunner": ["--runner=FnApiRunner"],
}
WITH_WORKERS = ["--runner=luminosity.LuminosityRunner", "--progress=off", "--run_dir=off", "--cpu_workers=2"]

Run = Callable[..., str]


@pytest.fixture(autouse=True)
def talks_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the examples importable, as for a script in their folder; workers look there, too."""
    monkeypatch.syspath_prepend(str(TALKS))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(params=RUNNERS)
def on(request: pytest.FixtureRequest) -> list[str]:
    """Return the options of a runner in this process, which has imported the examples' libraries already."""
    return RUNNERS[request.param]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    def run(name: str, *arguments: str) -> str:
        importlib.import_module(name).main(arguments)
        return capfd.readouterr().out

    return run


@pytest.fixture(scope="module")
def sentiment_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TALKS))
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield importlib.import_module("_models").train_sentiment(tmp_path_factory.mktemp("sentiment"), rows=500)


def percent(what: str, printed: str) -> list[int]:
    return [int(number) for number in re.findall(rf"(\d+)% {what}", printed)]


def test_lum_run_runs_an_example_as_users_do() -> None:
    script = str(TALKS / "linear_regression.py")
    done = run_module("luminosity.cli.main", "run", script, "--rows=100", "--cpu_workers=1")
    assert done.returncode == 0, done.stderr
    assert "      0       151        206" in done.stdout
    assert "Of 100 patients, predictions are off by" in done.stdout


def test_linear_regression(run: Run, on: list[str]) -> None:
    printed = run("linear_regression", *on)
    assert "      1        75         68" in printed
    assert "Of 442 patients, predictions are off by 43 on average." in printed


def test_a_model_per_key(run: Run, on: list[str]) -> None:
    printed = run("model_per_key", *on, "--rows=200")
    imdb, imdb_elsewhere, tomatoes_elsewhere, tomatoes = percent("right", printed)
    assert imdb > 75
    assert tomatoes > 65
    assert imdb_elsewhere != tomatoes, "both models saw these reviews, and are not the same"
    assert tomatoes_elsewhere != imdb


def test_resource_hints(run: Run, on: list[str]) -> None:
    printed = run("resource_hints", *on)
    right = re.search(r"(\d+) of 800 digits read right; processes that held the model: 1", printed)
    assert right is not None, printed
    assert int(right[1]) > 650


def test_a_jax_kernel(run: Run, on: list[str]) -> None:
    right = re.search(r"(\d+) of 300 digits read right", run("jax_rbf_kernel", *on, "--rows=300"))
    assert right is not None
    assert int(right[1]) > 270


def test_both_sentiments_give_the_same_answers(run: Run, on: list[str], sentiment_model: str) -> None:
    printed = run("sentiment_compare", *on, f"--model={sentiment_model}", "--rows=60")
    assert "59 of 59 labels are the same; scores differ by at most" in printed
    assert "dead letters by hand: [30], with RunInference: [30]" in printed
    by_hand, ours = [
        [int(number) for number in re.findall(r"\d+", line)]
        for line in printed.splitlines()
        if line.startswith(("by hand", "RunInference"))
    ]
    lines, code, comments, blanks, complexity = by_hand
    assert lines == code + comments + blanks
    assert ours[1] * 10 < code
    assert ours[4] * 10 < complexity


def test_each_sentiment_reports_for_itself(capfd: pytest.CaptureFixture[str], sentiment_model: str) -> None:
    job, ours = importlib.import_module("_sentiment_job"), importlib.import_module("sentiment")
    job.main(ours.classify, [*RUNNERS["Luminosity"], f"--model={sentiment_model}", "--rows=20"])
    printed = capfd.readouterr().out
    assert "of 19 reviews like their film" in printed
    assert "dead letter: review 10:" in printed


class Flaky:
    """Replaces the predictions of the transform by hand: too little memory, a brief failure, a bad text."""

    def __init__(self, largest: int) -> None:
        self.largest = largest
        self.sizes: list[int] = []
        self.failed_once = False

    def predict(self, batch: list[Any]) -> list[list[float]]:
        self.sizes.append(len(batch))
        if len(batch) > self.largest:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
        if not self.failed_once:
            self.failed_once = True
            raise RuntimeError("the device is busy")
        if any(waiting.text == "poison" for waiting in batch):
            raise ValueError("can't read this")
        return [[0.25, 0.75] for _ in batch]


def test_the_transform_by_hand_keeps_what_it_promises(sentiment_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    by_hand = importlib.import_module("sentiment_by_hand")
    flaky = Flaky(largest=8)
    monkeypatch.setattr(by_hand.ClassifySentiment, "_predict", lambda _, batch: flaky.predict(batch))
    monkeypatch.setattr(by_hand, "FIRST_WAIT_S", 0.01)
    rows = [(number, "poison" if number == 17 else f"review {number}") for number in range(100)]
    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        good, dead = by_hand.classify(pipeline | beam.Create(rows), sentiment_model)
        assert_that(good, equal_to([(number, "positive", 0.75) for number in range(100) if number != 17]), label="good")
        assert_that(dead, equal_to([(17, "can't read this")]), label="dead")
    assert max(flaky.sizes) == 32
    assert 8 in flaky.sizes


def test_lines_are_counted_as_scc_does() -> None:
    counter = importlib.import_module("_count_lines")
    assert doctest.testmod(counter).failed == 0
    found = counter.count('"""One\n\nfor two."""\n\nx = [a for a in b if a or c]  # while\ny = """if\n\nelse"""\n')
    assert found == counter.Count(lines=8, code=4, comments=2, blanks=2, complexity=3)


def test_the_table_of_patterns_has_every_example() -> None:
    listed = set(re.findall(r"\(([a-z_]+\.py)\)", (TALKS / "README.md").read_text()))
    assert listed == {path.name for path in TALKS.glob("[a-z]*.py")}


@pytest.mark.slow
def test_large_model_loads_one_copy_for_all_workers(run: Run) -> None:
    printed = run("large_model", *WITH_WORKERS)
    copies, shared = [
        int(count) for count in re.findall(r"100 reviews embedded, copies of the model loaded: (\d+)", printed)
    ]
    assert 1 <= copies <= 2, "as many as workers that got reviews"
    assert shared == 1


@pytest.mark.slow
def test_a_remote_model_answers_as_the_local_one(run: Run) -> None:
    printed = run("remote_model", *RUNNERS["Luminosity"], "--rows=20")
    assert printed.count("20 vectors of 384 numbers") == 2
    apart = re.search(r"difference between two numbers is (\S+)\.$", printed, re.MULTILINE)
    assert apart is not None
    assert float(apart[1]) < 1e-5


@pytest.mark.slow
def test_several_models_say_what_they_cost(run: Run, on: list[str]) -> None:
    printed = run("several_models", *on, "--rows=40")
    costs = {line.split()[0]: [int(number) for number in line.split()[2:]] for line in printed.splitlines()[1:5]}
    assert costs == {
        "branches": [40, 120, 3],
        "sequence": [40, 120, 3],
        "pipelines": [120, 120, 3],
        "Enrich": [40, 40, 3],
    }
    apart = re.search(r"differ by more than (\S+)\.$", printed, re.MULTILINE)
    assert apart is not None
    assert float(apart[1]) < 1e-5
