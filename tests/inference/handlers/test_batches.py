"""Requests in files: each is answered, and what was sent is found again, whatever happens to the process."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import apache_beam as beam
import pytest
from apache_beam.testing.util import assert_that, equal_to

from luminosity import HttpModelHandler, Prompt, RunInference
from luminosity.core import InferenceMetrics
from luminosity.errors import BudgetReached, IncompleteAnswer, InvalidArgument, RemoteModelError
from luminosity.inference.handler import noting
from luminosity.inference.handlers.http.batches import journal as batch_journal
from luminosity.inference.handlers.http.batches import model as batch_model
from luminosity.inference.handlers.http.batches.journal import BatchJournal
from tests.both_runners import Pipelines, counters
from tests.both_runners import pipelines as pipelines
from tests.both_runners import runner_name as runner_name
from tests.inference.handlers.batch_server import BatchServer, completion
from tests.inference.handlers.model_server import ModelServer, serving

TEXTS = [f"text {number}" for number in range(20)]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"_QUIET_S": 0.05, "_FIRST_POLL_S": 0.02, "_LONGEST_POLL_S": 0.1}.items():
        monkeypatch.setattr(batch_model, name, value)


def handler_of(server: ModelServer, folder: Path | None, **options: Any) -> HttpModelHandler:
    return HttpModelHandler.chat(server.url, "talker", completion_window="24h", cache=folder, **options)


@contextlib.contextmanager
def loaded(handler: HttpModelHandler) -> Iterator[Any]:
    model = handler.load_model()
    try:
        yield model
    finally:
        model.close()


def asked(handler: HttpModelHandler, *texts: str) -> list[str]:
    with loaded(handler) as model:
        return [each.inference for each in handler.run_inference(texts, model)]


class TestAnswers:
    def test_many_requests_are_one_file_and_their_answers_are_kept(self, tmp_path: Path) -> None:
        script = BatchServer()
        with serving(script) as server, noting() as notes:
            handler = handler_of(server, tmp_path, prices=(2.0, 10.0))
            assert asked(handler, *TEXTS, *TEXTS[:5]) == [text.upper() for text in [*TEXTS, *TEXTS[:5]]]
            assert handler.model_id == "talker-2"
            assert (len(script.batches), script.answered.total()) == (1, 20)
            assert notes[InferenceMetrics.REQUESTS] == 20
            assert notes[InferenceMetrics.CACHED_ANSWERS] == 5
            assert notes[InferenceMetrics.COST] == 20 * (10 * 2000 + 2 * 10_000) // 2, "half of the price"
            assert asked(handler_of(server, tmp_path), *TEXTS) == [text.upper() for text in TEXTS]
            # A handler without files finds them, too: the requests are the same.
            online = HttpModelHandler.chat(server.url, "talker", cache=tmp_path)
            [found] = online.run_inference(["text 3"], online.load_model())
            assert found.inference == "TEXT 3"

        assert script.answered.total() == 20
        assert len(script.files) == 2, "one with requests, one with answers"

    def test_a_file_has_at_most_so_many_requests(self, tmp_path: Path) -> None:
        script = BatchServer()
        with serving(script) as server:
            assert len(asked(handler_of(server, tmp_path, max_batch_size=8), *TEXTS)) == 20
        sizes = [script.files[each["input_file_id"]].count(b"\n") for each in script.batches.values()]
        assert sizes == [8, 8, 4]

    def test_requests_that_fail_for_the_moment_go_with_another_file(self, tmp_path: Path) -> None:
        failures = {"text 1": [(500, {"error": {"message": "oops"}})], "text 2": [(0, None)]}
        script = BatchServer(fail=lambda text: failures[text].pop() if failures.get(text) else None)
        with serving(script) as server, noting() as notes:
            assert asked(handler_of(server, tmp_path), *TEXTS) == [text.upper() for text in TEXTS]
        assert len(script.batches) == 2
        assert set(script.answered.values()) == {1}
        assert notes[InferenceMetrics.RETRIES] == 2

    def test_each_request_that_fails_says_why(self, tmp_path: Path) -> None:
        said = {
            "text 1": (400, {"error": {"message": "too long"}}),
            "text 2": (429, {"error": {"message": "too many"}}),
            "text 3": (200, completion("Te", "length")),
            "text 4": (0, None),
        }
        script = BatchServer(fail=said.get)
        with serving(script) as server:
            handler = handler_of(server, tmp_path)
            with loaded(handler) as model:
                found = [model.submit([{"role": "user", "content": text}], {}) for text in TEXTS[:5]]
                reasons = [str(_error(handler, each)) for each in found]
        assert reasons[0] == "None"
        assert "answered 400: too long" in reasons[1]
        assert "answered 429: too many. Sent in 3 batches." in reasons[2]
        assert "a text that it cut" in reasons[3]
        assert "gave no answer: it took too long" in reasons[4]

    def test_a_cut_answer_is_not_asked_again(self, tmp_path: Path) -> None:
        script = BatchServer(fail=lambda text: (200, completion("Te", "length")))
        with serving(script) as server:
            for _ in range(2):
                with pytest.raises(IncompleteAnswer):
                    asked(handler_of(server, tmp_path), "text")
        assert len(script.batches) == 1

    def test_a_budget_holds(self, tmp_path: Path) -> None:
        with serving(BatchServer()) as server:
            handler = handler_of(server, tmp_path, max_total_tokens=50, parameters={"max_tokens": 2})
            with pytest.raises(BudgetReached, match="max_total_tokens=50"):
                asked(handler, "text")

    def test_what_has_no_meaning_is_refused(self, tmp_path: Path) -> None:
        def refused(words: str, **options: Any) -> None:
            with pytest.raises(InvalidArgument, match=words):
                HttpModelHandler.chat("http://localhost:9", "m", **{"completion_window": "24h", **options})

        refused("requests_per_minute", requests_per_minute=5)
        refused("without stream=True", stream=True)
        refused("expected a time that the server knows", completion_window="soon")
        with pytest.raises(InvalidArgument, match=r"without a folder.*pass cache=FOLDER, or run with --checkpoint_dir"):
            HttpModelHandler.chat("http://localhost:9", "m", completion_window="24h").load_model()


def _error(handler: HttpModelHandler, future: Any) -> Any:
    try:
        found = handler.collect([future.result(60)])
    except RemoteModelError as error:
        return error
    return getattr(found, "errors", {}).get(0)


class TestRestart:
    def test_a_batch_that_was_sent_is_found_again(self, tmp_path: Path) -> None:
        script = BatchServer()
        script.is_held = True
        with serving(script) as server:
            with loaded(handler_of(server, tmp_path)) as model:
                futures = [model.submit([{"role": "user", "content": text}], {}) for text in TEXTS]
                _wait_until(lambda: bool(script.asked))
            assert all(future.cancelled() for future in futures)
            script.is_held = False
            # Other rows come with some of them, in another order.
            again = [*reversed(TEXTS), "new"]
            assert asked(handler_of(server, tmp_path), *again) == [text.upper() for text in again]

        assert set(script.answered.values()) == {1}
        assert len(script.batches) == 2, "the second one has the new row alone"

    def test_a_batch_whose_making_was_not_confirmed_is_found_by_its_name(self, tmp_path: Path) -> None:
        script = BatchServer()
        script.breaks_off_after_making = 1
        with serving(script) as server:
            assert asked(handler_of(server, tmp_path), *TEXTS) == [text.upper() for text in TEXTS]
        assert (len(script.batches), set(script.answered.values())) == (1, {1})

    def test_a_process_that_was_killed_while_it_made_a_batch(self, tmp_path: Path) -> None:
        """The file of the dead process has a batch without a name of the server, which the server has made."""
        script = BatchServer()
        script.is_held = True
        with serving(script) as server:
            with loaded(handler_of(server, tmp_path)) as model:
                model.submit([{"role": "user", "content": "text"}], {})
                _wait_until(lambda: bool(script.asked))
            journal = BatchJournal(str(tmp_path))
            journal._database.execute("UPDATE batches SET id = NULL")
            journal.close()
            script.is_held = False
            assert asked(handler_of(server, tmp_path), "text") == ["TEXT"]
        assert (len(script.batches), script.answered.total()) == (1, 1)

    def test_a_batch_that_was_never_sent_is_sent(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(batch_model, "_LONGEST_WAIT_S", 0.2)
        script = BatchServer()
        with serving(script) as server:
            handler = handler_of(server, tmp_path)
            with loaded(handler) as model:
                _, key, _ = model._remote.asked_of([{"role": "user", "content": "text"}], {})
            journal = BatchJournal(str(tmp_path))
            assert journal.begin([key]).new == [key]
            journal.close()
            assert asked(handler, "text") == ["TEXT"]
        assert script.answered.total() == 1

    def test_the_folder_beside_a_checkpoint(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(batch_journal._checkpoint, "folder", str(tmp_path / "run"))
        with serving(BatchServer()) as server:
            assert asked(handler_of(server, None), "text") == ["TEXT"]
        assert (tmp_path / "run-batches" / "batches.sqlite").exists()


def _wait_until(is_so: Any) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def run(url: str, folder: str) -> None:
    """Ask for all texts, in a process that may be killed."""
    handler = HttpModelHandler.chat(url, "talker", completion_window="24h", cache=folder)
    model = handler.load_model()
    print(json.dumps([each.inference for each in handler.run_inference(TEXTS, model)]), flush=True)
    model.close()


def test_kill_9_pays_for_nothing_twice(tmp_path: Path) -> None:
    script = BatchServer()
    script.is_held = True
    code = "import sys; from tests.inference.handlers.test_batches import run; run(*sys.argv[1:])"
    with serving(script) as server:
        command = [sys.executable, "-c", code, server.url, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as first:
            try:
                _wait_until(lambda: bool(script.asked) or first.poll() is not None)
            finally:
                first.send_signal(signal.SIGKILL)
        script.is_held = False
        again = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)

    assert json.loads(again.stdout.splitlines()[-1]) == [text.upper() for text in TEXTS]
    assert (len(script.batches), set(script.answered.values())) == (1, {1})


class TestPipelines:
    @pytest.mark.parametrize("runner_name", ["luminosity.LuminosityRunner"])
    def test_dead_letters_have_the_reason_of_their_line(self, pipelines: Pipelines, tmp_path: Path) -> None:
        script = BatchServer(fail=lambda text: (400, {"error": {"message": "odd"}}) if text == "text 7" else None)
        with serving(script) as server, pipelines("--cpu_workers=1") as (pipeline, result):
            step = RunInference(handler_of(server, tmp_path)).with_exception_handling()
            good, bad = pipeline | beam.Create(TEXTS) | step
            expected = [text.upper() for text in TEXTS if text != "text 7"]
            assert_that(good | beam.Map(lambda each: each.inference), equal_to(expected))
            reasons = bad.failed_inferences | beam.Map(lambda each: (each[0][0], "answered 400: odd" in each[1][1]))
            assert_that(reasons, equal_to([("text 7", True)]), label="Bad")
        assert counters(result.result)[InferenceMetrics.REQUESTS] >= 19
        assert max(script.answered.values()) == 1

    @pytest.mark.parametrize("runner_name", ["luminosity.LuminosityRunner"])
    def test_a_prompt_sends_its_rows_in_files(self, pipelines: Pipelines, tmp_path: Path) -> None:
        script = BatchServer(fail=lambda text: (200, completion("good" if "3" in text else "bad")))
        with serving(script) as server, pipelines("--cpu_workers=1") as (pipeline, _):
            prompt = Prompt(handler_of(server, tmp_path), "{text}", returns=Literal["good", "bad"])
            rows = pipeline | beam.Create([{"text": text} for text in TEXTS])
            found = rows | RunInference(prompt) | beam.Map(lambda each: each.inference)
            assert_that(found, equal_to(["good" if "3" in text else "bad" for text in TEXTS]))
        assert len(script.batches) < 5
