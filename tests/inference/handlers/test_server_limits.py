"""Limits and budgets of HttpModelHandler: what the server sees never exceeds them, whichever process asks."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.ml.inference.base import KeyedModelHandler
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.testing.util import assert_that

from luminosity import HttpModelHandler, RunInference
from luminosity.errors import BudgetReached, InvalidArgument, RemoteModelError
from luminosity.inference.handlers.http import ledger, limits
from luminosity.inference.handlers.http.ledger import Ask, Ledger, Most, Refused, Wait
from luminosity.inference.handlers.http.usage import Prices, Usage
from luminosity.testing import FakeClock
from tests.both_runners import Pipelines, counters
from tests.inference.handlers.model_server import ModelServer, Said, Seen, serving

WORDS = [f"word {number}" for number in range(60)]


@pytest.fixture(autouse=True)
def _own_ledger() -> None:
    """Forget what other tests of this process have spent."""
    ledger._of_runs.clear()


def answer(seen: Seen) -> Said:
    """Answer with as many tokens as the prompt has letters, and five new ones."""
    text = seen.json["messages"][-1]["content"]
    choice = {"message": {"content": text.upper()}, "finish_reason": "stop"}
    return Said({"choices": [choice], "usage": {"prompt_tokens": len(text), "completion_tokens": 5}})


def tokens_of(seen: Seen) -> int:
    return len(seen.json["messages"][-1]["content"]) + 5


def talker(server: ModelServer, max_tokens: int = 5, window_s: float | None = None, **options: Any) -> HttpModelHandler:
    handler = HttpModelHandler.chat(server.url, "talker", parameters={"max_tokens": max_tokens}, **options)
    if window_s is not None:
        handler._limits = dataclasses.replace(handler._limits, window_s=window_s)
    return handler


def most_in_a_window(events: list[tuple[float, int]], window_s: float) -> tuple[int, int]:
    """Return the most requests, and the most tokens, that arrived in any window."""
    events = sorted(events)
    windows = [[tokens for at, tokens in events if begin <= at < begin + window_s] for begin, _ in events]
    return max(map(len, windows)), max(map(sum, windows))


class TestLedger:
    @pytest.mark.parametrize("seed", range(8))
    def test_no_window_of_the_server_has_more_than_allowed(self, seed: int) -> None:
        """Requests reach the server at any moment between their reservation and their end, and take less or all."""
        dice, clock = random.Random(seed), FakeClock()
        book = Ledger(":memory:", clock.monotonic)
        most = Most(requests=20, window_tokens=900)
        under_way: list[tuple[float, int, int]] = []
        arrived: list[tuple[float, int]] = []
        sent = 0
        while sent < 200:
            ended = [each for each in under_way if each[0] <= clock.monotonic()]
            under_way = [each for each in under_way if each not in ended]
            for _, number, tokens in ended:
                book.settle(number, tokens, 0, most.window_s)
            found = book.take("server", Ask(asked := dice.randint(1, 300), 0, 60.0), most)
            if isinstance(found, int):
                seconds, tokens = dice.choice([0.1, 3.0, 50.0]) * dice.random(), dice.randint(0, asked)
                under_way.append((clock.monotonic() + seconds, found, tokens))
                arrived.append((clock.monotonic() + seconds * dice.random(), tokens))
                sent += 1
            else:
                assert isinstance(found, Wait)
                assert found.seconds > 0
                clock.advance(min(found.seconds, 1.0))

        requests, tokens = most_in_a_window(arrived, most.window_s)
        assert (requests <= 20, tokens <= 900) == (True, True)
        assert requests > 10, "the limit is not far from what is used"

    def test_processes_share_the_file(self, tmp_path: Path) -> None:
        clock = FakeClock()
        one, other = (Ledger(str(tmp_path / "shared"), clock.monotonic) for _ in range(2))
        most = Most(requests=2)
        number = one.take("server", Ask(1, 0, 5.0), most)
        assert isinstance(number, int)
        assert isinstance(other.take("server", Ask(1, 0, 5.0), most), int)
        assert isinstance(one.take("server", Ask(1, 0, 5.0), most), Wait)
        assert isinstance(one.take("another", Ask(1, 0, 5.0), most), int)
        other.settle(number, 1, 0, most.window_s)
        clock.advance(59)
        assert isinstance(one.take("server", Ask(1, 0, 5.0), most), Wait)
        clock.advance(3)
        assert isinstance(one.take("server", Ask(1, 0, 5.0), most), int)

    def test_requests_of_a_killed_process_count_as_if_they_took_all(self, tmp_path: Path) -> None:
        clock = FakeClock()
        Ledger(str(tmp_path / "shared"), clock.monotonic).take("server", Ask(100, 7, 5.0), Most())
        survivor = Ledger(str(tmp_path / "shared"), clock.monotonic)
        most = Most(tokens=150)
        assert survivor.take("server", Ask(60, 0, 5.0), most) == Wait(0.25), "it may still end with less"
        clock.advance(36)
        assert survivor.take("server", Ask(60, 0, 5.0), most) == Refused("max_total_tokens", 100)
        assert survivor.spent("server") == (100, 7)

    def test_threads_never_exceed_a_budget_together(self) -> None:
        book = Ledger(":memory:")
        most = Most(tokens=1000)
        spent: list[int] = []

        def spend() -> None:
            while not isinstance(found := book.take("server", Ask(30, 0, 5.0), most), Refused):
                if isinstance(found, int):
                    book.settle(found, 10, 0, most.window_s)
                    spent.append(10)

        threads = [threading.Thread(target=spend) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert 970 < sum(spent) <= 1000, "what was reserved and not taken is free again"

    def test_what_has_left_the_window_is_forgotten_without_limits_on_it(self) -> None:
        clock = FakeClock()
        book = Ledger(":memory:", clock.monotonic)
        for _ in range(300):
            number = book.take("server", Ask(1, 0, 5.0), most := Most(tokens=1000))
            assert isinstance(number, int)
            book.settle(number, 1, 0, most.window_s)
            clock.advance(1.0)
        assert book._run("SELECT COUNT(*) FROM ended").fetchone()[0] <= 61
        assert book.spent("server") == (300, 0)

    def test_a_large_request_gets_its_turn_among_small_ones(self) -> None:
        clock = FakeClock()
        book = Ledger(":memory:", clock.monotonic)
        most = Most(window_tokens=1000)
        large = Ask(1000, 0, 5.0, "large", clock.monotonic())
        found, small = book.take("server", Ask(100, 0, 5.0), most), 1
        assert isinstance(found, int)
        book.settle(found, 100, 0, most.window_s)
        while not isinstance(book.take("server", large, most), int):
            name = f"small {small}"
            if isinstance(found := book.take("server", Ask(100, 0, 5.0, name, clock.monotonic()), most), int):
                book.settle(found, 100, 0, most.window_s)
                small += 1
            clock.advance(1.0)
            assert small < 100, "the large one starves"
        assert 10 <= small <= 30
        assert not book._run("SELECT * FROM places").fetchall()

    def test_a_place_vanishes_with_its_request(self) -> None:
        clock = FakeClock()
        book = Ledger(":memory:", clock.monotonic)
        most = Most(requests=1)
        now = clock.monotonic()
        gone, new = (Ask(1, 0, 500.0, name, since) for name, since in (("gone", now), ("new", now + 99)))
        first = book.take("server", Ask(1, 0, 500.0, "first", now), most)
        assert isinstance(first, int)
        clock.advance(100)
        assert book.take("server", gone, most) == Wait(0.25)
        book.settle(first, 1, 0, 60.0)
        assert book._has_older("server", new)
        assert not book._has_older("another server", new)
        clock.advance(62)
        assert isinstance(book.take("server", new, most), int)

    def test_errors_of_the_file_are_explained(self, tmp_path: Path) -> None:
        book = Ledger(str(tmp_path / "shared"))
        book._run("DROP TABLE under_way")
        with pytest.raises(RemoteModelError, match=r"shared, which can't be used: no such table"):
            book.take("server", Ask(1, 0, 5.0), Most(tokens=1000))
        (tmp_path / "damaged").write_bytes(b"no database, but long enough to be one" * 100)
        with pytest.raises(RemoteModelError, match="damaged, which can't be used"):
            Ledger(str(tmp_path / "damaged"))


class TestInRuns:
    def test_workers_share_limits_of_requests_and_tokens(self, pipelines: Pipelines) -> None:
        arrived: list[tuple[float, int]] = []

        def script(seen: Seen) -> Said:
            arrived.append((time.monotonic(), tokens_of(seen)))
            return answer(seen)

        with serving(script) as server:
            handler = talker(server, requests_per_minute=20, tokens_per_minute=220, window_s=1.0)
            with pipelines() as (pipeline, ran):
                _ = pipeline | beam.Create(WORDS) | beam.Reshuffle() | RunInference(handler)

        requests, tokens = most_in_a_window(arrived, 1.0)
        assert (len(arrived), requests <= 20, tokens <= 220) == (60, True, True)
        assert counters(ran.result)["limit_wait_micro_secs"] > 0

    def test_beyond_the_budget_rows_are_dead_letters(self, pipelines: Pipelines) -> None:
        with serving(answer) as server:
            handler = talker(server, max_cost=0.001, prices=(10.0, 20.0))  # 170 to 180 millionths for a row
            with pipelines() as (pipeline, ran):
                examples = pipeline | beam.Create(WORDS) | beam.Reshuffle()
                _, failed = examples | RunInference(handler).with_exception_handling()
                assert_that(failed.failed_inferences, _check_over_budget)

        spent = sum(Prices(10.0, 20.0).nanos(Usage(tokens_of(seen) - 5, 5)) for seen in server.posts)
        assert 0 < spent <= 1_000_000
        assert counters(ran.result)["cost_nanos"] == spent

    def test_without_dead_letters_the_run_fails_and_says_what_is_spent(self) -> None:
        with serving(answer) as server:
            handler = talker(server, max_total_tokens=200)
            pipeline = beam.Pipeline("luminosity.LuminosityRunner")
            _ = pipeline | beam.Create(WORDS) | RunInference(handler)
            with pytest.raises(Exception, match=r"max_total_tokens=200 of .* is reached: \d+ tokens spent") as raised:
                pipeline.run().wait_until_finish()
            assert "cache=FOLDER" in str(raised.value)

        assert 0 < sum(map(tokens_of, server.posts)) <= 200

    def test_the_budget_of_a_run(self, pipelines: Pipelines) -> None:
        with serving(answer) as server:
            handler = talker(server, prices=(10.0, 20.0))
            with pipelines("--max_cost=0.001") as (pipeline, _):
                _, failed = pipeline | beam.Create(WORDS) | RunInference(handler).with_exception_handling()
                assert_that(failed.failed_inferences, lambda letters: _check_over_budget(letters, "--max_cost"))

        assert 0 < len(server.posts) < 8
        limits.use_run_budget(None)  # of this process, in which Beam's runner runs


def _check_over_budget(letters: list[Any], name: str = "max_cost") -> None:
    assert len(letters) > 50
    for _, (kind, message, _) in letters:
        assert kind is BudgetReached
        assert f"the budget {name}=0.001 of http://127.0.0.1" in message


def ask(handler: HttpModelHandler, *examples: Any) -> list[Any]:
    return [result.inference for result in handler.run_inference(examples, handler.load_model())]


class TestAnswersWithoutUsage:
    def test_an_answer_without_usage_counts_as_all_that_it_may_have_taken(self) -> None:
        def script(seen: Seen) -> Said:
            said = answer(seen)
            del said.body["usage"]
            return said

        with serving(script) as server:
            handler = talker(server, max_total_tokens=300)
            assert ask(handler, "hello") == ["HELLO"]
            all_of_it = len(server.posts[0].body) + 5
            for _ in range(300 // all_of_it - 1):
                ask(handler, "hello")
            with pytest.raises(BudgetReached):
                ask(handler, "hello")

    @pytest.mark.parametrize("usage", [None, {"prompt_tokens": 10**30, "completion_tokens": 5}])
    def test_its_cost_is_noted_as_the_budget_counts_it(self, pipelines: Pipelines, usage: Any) -> None:
        def script(seen: Seen) -> Said:
            said = answer(seen)
            return Said({**said.body, "usage": usage})

        with serving(script) as server, pipelines() as (pipeline, ran):
            results = pipeline | beam.Create(["hello"]) | RunInference(talker(server, prices=(1.0, 2.0)))
            assert_that(results, lambda found: None)
        assert counters(ran.result)["cost_nanos"] == (len(server.posts[0].body) + 2 * 5) * 1000

    def test_an_answer_is_kept_although_its_claim_can_not_be_ended(self, caplog: pytest.LogCaptureFixture) -> None:
        def script(seen: Seen) -> Said:
            Ledger.of_run()._run("DROP TABLE spent")
            return answer(seen)

        with serving(script) as server:
            assert ask(talker(server, max_total_tokens=300), "hello") == ["HELLO"]
        assert "no such table: spent. Requests count as if they had taken all" in caplog.text

    def test_refusals_cost_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("luminosity.inference.handlers.http.retries._FIRST_S", 0.001)
        left = [429] * 5 + [503] * 5
        with serving(lambda seen: Said(b"", left.pop()) if left else answer(seen)) as server:
            assert ask(talker(server, max_total_tokens=300), "hello") == ["HELLO"]

        assert Ledger.of_run().spent(f"{server.url} talker") == (10, 0)

    def test_a_server_that_restarts_gets_the_request_again_and_no_attempt_counts(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with serving(answer) as server:
            port = server.http.server_address[1]
            handler = talker(server, max_total_tokens=300)
            assert ask(handler, "hello") == ["HELLO"]
        waits: list[float] = []
        with contextlib.ExitStack() as stack:

            def start_again(seconds: float) -> None:
                waits.append(seconds)
                if len(waits) == 3:
                    stack.enter_context(serving(answer, port=port))

            times = SimpleNamespace(monotonic=time.monotonic, sleep=start_again)
            monkeypatch.setattr("luminosity.inference.handlers.http.remote_model.time", times)
            assert ask(handler, "hello again") == ["HELLO AGAIN"]

        assert len(waits) == 3
        assert Ledger.of_run().spent(f"http://127.0.0.1:{port} talker") == (5 + 11 + 2 * 5, 0)

    def test_an_answer_that_broke_off_may_have_cost_all(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def script(seen: Seen) -> Said:
            return dataclasses.replace(answer(seen), breaks_off=seen.number == 0)

        monkeypatch.setattr("luminosity.inference.handlers.http.retries._FIRST_S", 0.001)
        with serving(script) as server:
            assert ask(talker(server, max_total_tokens=1000), "hello") == ["HELLO"]

        all_of_it = len(server.posts[0].body) + 5
        assert Ledger.of_run().spent(f"{server.url} talker") == (all_of_it + 10, 0)


class TestMistakes:
    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"requests_per_minute": 0}, "found requests_per_minute=0, expected more than 0"),
            ({"requests_per_minute": 0.5}, "found requests_per_minute=0.5, expected a whole number"),
            ({"tokens_per_minute": "500"}, "found tokens_per_minute='500', expected a whole number"),
            ({"max_total_tokens": True}, "found max_total_tokens=True, expected a whole number"),
            ({"max_cost": float("inf"), "prices": (1, 2)}, "found max_cost=inf, expected more than 0, and at most"),
            ({"max_cost": float("nan"), "prices": (1, 2)}, "found max_cost=nan, expected more than 0"),
            ({"max_cost": 1.0}, "found max_cost without prices"),
            ({"prices": (1, "2")}, "expected two numbers"),
            ({"prices": (1, -2)}, "the price new=-2"),
            ({"prices": "nowhere.toml"}, "nowhere.toml can't be read"),
        ],
    )
    def test_arguments(self, options: dict[str, Any], words: str) -> None:
        with pytest.raises(InvalidArgument, match=words):
            HttpModelHandler.chat("http://localhost", "talker", **options)

    def test_a_limit_of_tokens_needs_max_tokens_before_the_run(self) -> None:
        handler = HttpModelHandler.chat("http://localhost", "talker", tokens_per_minute=1000)
        with pytest.raises(InvalidArgument, match="tokens_per_minute without max_tokens"):
            handler.validate_inference_args(None)
        handler.validate_inference_args({"max_completion_tokens": 5})

    @pytest.mark.parametrize("number", [-1, 0, True])
    def test_a_number_that_is_no_limit_of_an_answer(self, number: int) -> None:
        handler = HttpModelHandler.chat(
            "http://localhost", "talker", max_total_tokens=1000, parameters={"max_tokens": number}
        )
        with pytest.raises(InvalidArgument, match="max_total_tokens without max_tokens"):
            handler.validate_inference_args(None)

    def test_a_protocol_without_tokens(self) -> None:
        handler = HttpModelHandler.kserve("http://localhost", "resnet", max_total_tokens=1000)
        with pytest.raises(InvalidArgument, match="does not count tokens"):
            handler.validate_inference_args(None)

    def test_a_request_that_is_larger_than_the_limit(self) -> None:
        with serving(answer) as server:
            handler = talker(server, tokens_per_minute=100)
            assert ask(handler, 300 * "a") == [300 * "A"], "300 bytes are likely 75 tokens: it goes alone"
            with pytest.raises(RemoteModelError, match=r"about 1\d\d tokens .* more than tokens_per_minute=100"):
                ask(handler, 400 * "a")

    def test_a_cluster_has_no_shared_limits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LUMINOSITY_NODE_FOLDER", "/tmp")
        handler = HttpModelHandler.chat("http://localhost", "talker", requests_per_minute=5)
        with pytest.raises(InvalidArgument, match="found requests_per_minute on a cluster"):
            handler.load_model()

    def test_max_cost_of_a_run_needs_prices_before_the_run(self) -> None:
        pipeline = beam.Pipeline(options=PipelineOptions(["--max_cost=2"]))
        handler = KeyedModelHandler(HttpModelHandler.chat("http://localhost", "talker"))
        with pytest.raises(InvalidArgument, match=r"found --max_cost=2, but no prices .* of http://localhost talker"):
            _ = pipeline | beam.Create([(1, "a")]) | RunInference(handler)

    def test_max_cost_of_a_run_needs_max_tokens(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(limits._run_budget, "max_cost", 1.0)
        with serving(answer) as server:
            handler = HttpModelHandler.chat(server.url, "talker", prices=(1, 1))
            with pytest.raises(InvalidArgument, match="found --max_cost without max_tokens"):
                ask(handler, "hello")
        assert not server.posts


class TestPriceFiles:
    def test_a_model_has_its_prices(self, tmp_path: Path) -> None:
        path = tmp_path / "prices.toml"
        path.write_text('currency = "EUR"\n[[model]]\nname = "talker"\nprompt = 2\nnew = 8.5\ncached = 0.5\n')
        assert Prices.of(path, "talker") == Prices(2, 8.5, 0.5, "EUR")
        assert Prices(2, 8.5, 0.5).nanos(Usage(1000, 10, 400)) == 1000 * (600 * 2 + 10 * 8.5 + 400 * 0.5)
        with pytest.raises(InvalidArgument, match="no prices of the model 'walker', but of 'talker'"):
            Prices.of(path, "walker")

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ('[[model]]\nname = "talker"\nprompt = "two"\n', r"prices.toml:3: found prompt='two'"),
            ('[[model]]\nname = "talker"\nprompt = 2\n', r"prices.toml:2: .*expected name, prompt and new"),
            ('[[model]]\nname = "talker"\nprompt = 2\nold = 3\n', r"prices.toml:4: unknown key 'old'"),
        ],
    )
    def test_mistakes_in_a_file(self, tmp_path: Path, text: str, words: str) -> None:
        path = tmp_path / "prices.toml"
        path.write_text(text)
        with pytest.raises(InvalidArgument, match=words):
            Prices.of(str(path), "talker")
