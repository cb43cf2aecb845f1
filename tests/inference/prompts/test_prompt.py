"""Prompts as users see them, with a scripted server of chats."""

from __future__ import annotations

import dataclasses
import json
import pickle
import threading
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import apache_beam as beam
import pyarrow as pa
import pytest
from apache_beam.ml.inference.base import KeyedModelHandler, MaybeKeyedModelHandler
from apache_beam.ml.inference.base import RunInference as BeamRunInference
from apache_beam.testing.util import assert_that, equal_to

from luminosity import Column, Enrich, Handler, HttpModelHandler, Prompt, RunInference
from luminosity.core import InferenceMetrics
from luminosity.errors import AnswerError, EndpointError, IncompleteAnswer, InvalidArgument, InvalidType
from luminosity.inference.handler import noting
from luminosity.inference.prompts import asking
from luminosity.inference.prompts.asking import Answered, KnownAnswers
from tests.both_runners import Pipelines, counters
from tests.both_runners import pipelines as pipelines
from tests.both_runners import runner_name as runner_name
from tests.inference.handlers.model_server import serving
from tests.inference.prompts.chats import Counted, last, replying, said, talker

Mood = Literal["good", "bad"]
NO_SERVER = HttpModelHandler.chat("http://localhost:9", "talker")


class Film(NamedTuple):
    text: str
    stars: int


@dataclasses.dataclass
class Review:
    title: str
    stars: int | None
    moods: list[Mood]


def mood_of(messages: list[dict[str, str]]) -> str:
    return "good" if "nice" in last(messages).splitlines()[0] else "bad"


def asked(prompt: Prompt, *rows: Any, **arguments: Any) -> list[Any]:
    return [each.inference for each in prompt.run_inference(rows, prompt.load_model(), arguments)]


class TestAnswers:
    def test_rows_of_every_kind_become_values_of_a_type(self) -> None:
        answer = {"title": "A", "stars": None, "moods": ["good"]}
        with serving(replying(lambda _: json.dumps(answer))) as server:
            prompt = Prompt(talker(server), "Read {text} ({stars})", returns=Review)
            found = asked(prompt, {"text": "a", "stars": 1}, beam.Row(text="b", stars=2), Film("c", 3))

        assert found == [Review("A", None, ["good"])] * 3
        contents = [last(seen.json["messages"]).splitlines()[0] for seen in server.seen]
        assert contents == ["Read a (1)", "Read b (2)", "Read c (3)"]
        wanted = server.seen[0].json["response_format"]["json_schema"]
        assert (wanted["name"], wanted["strict"]) == ("Review", True)
        assert wanted["schema"]["required"] == ["title", "stars", "moods"]
        assert prompt.output_type == pa.struct(
            [("title", pa.string()), ("stars", pa.int64()), ("moods", pa.list_(pa.string()))]
        )

    def test_the_value_of_the_only_column_is_a_row_too(self) -> None:
        with serving(replying(mood_of)) as server:
            assert asked(Prompt(talker(server), "{text}", returns=Mood), "nice", "dull") == ["good", "bad"]
            with pytest.raises(
                InvalidType, match=r"found an example of type str, expected a row with the columns a, b"
            ):
                Prompt(talker(server), "{a} {b}").prepare(["x"])

    def test_an_answer_that_can_not_be_read_is_asked_for_again_with_the_reason(self) -> None:
        def reply(messages: list[dict[str, str]]) -> str:
            return "4" if len(messages) > 1 else "four"

        with serving(lambda seen: said(reply(seen.json["messages"]))) as server:
            assert asked(Prompt(talker(server), "Count {text}", returns=int), {"text": "x"}) == [4]

        assert [len(seen.json["messages"]) for seen in server.seen] == [1, 3]
        first, second, third = server.seen[1].json["messages"]
        assert first["content"].startswith("Count x\n\nAnswer with an integer")
        assert second == {"role": "assistant", "content": "four"}
        assert third["role"] == "user"
        assert "found a text that is not JSON (Expecting value, line 1), expected an integer" in third["content"]

    def test_the_last_answer_that_can_not_be_read_is_in_the_error(self) -> None:
        with serving(lambda seen: said("maybe so")) as server:
            prompt = Prompt(talker(server), "{text}", returns=Mood, retries=2)
            with pytest.raises(
                AnswerError, match=r"the model answered 'maybe so': found another text, expected exactly"
            ):
                asked(prompt, {"text": "x"})

        assert len(server.seen) == 3

    def test_an_answer_that_was_cut_is_not_asked_for_again(self) -> None:
        with serving(lambda seen: said("go", "length")) as server:
            prompt = Prompt(talker(server), "{text}", returns=Mood)
            with pytest.raises(IncompleteAnswer, match=r"answered with a text that it cut .* 'go'"):
                asked(prompt, {"text": "x"})

        assert len(server.seen) == 1

    def test_other_servers_than_those_that_know_the_format_may_answer_as_they_like(self) -> None:
        with serving(lambda seen: said(' "Good."\n')) as server:
            assert asked(Prompt(talker(server), "{text}", returns=Mood), {"text": "x"}) == ["good"]

    def test_half_a_character_is_asked_for_again_and_fails_its_row_alone(self) -> None:
        def reply(messages: list[dict[str, str]]) -> str:
            return "fine" if messages[0]["content"] == "x" else "half \ud83d"

        with serving(lambda seen: said(reply(seen.json["messages"]))) as server:
            prompt = Prompt(talker(server), "{text}")
            [good, bad] = prompt.predict(prompt.load_model(), prompt.prepare([{"text": "x"}, {"text": "y"}]))

        assert (good.value, good.error) == ("fine", None)
        assert isinstance(bad.error, AnswerError)
        assert "found half of a character" in str(bad.error)
        assert len(server.seen) == 3

    def test_texts_need_no_format(self) -> None:
        with serving(lambda seen: said("  Hello there. ")) as server:
            assert asked(Prompt(talker(server), "{text}"), {"text": "x"}) == ["Hello there."]

        assert "response_format" not in server.seen[0].json
        assert server.seen[0].json["messages"] == [{"role": "user", "content": "x"}]

    def test_it_explains_the_answer_unless_told_not_to(self) -> None:
        with serving(replying(mood_of)) as server:
            for explain in (True, False):
                asked(Prompt(talker(server), "{text}", returns=Mood, system="Be brief", explain=explain), {"text": "x"})

        explained, plain = (seen.json["messages"] for seen in server.seen)
        assert last(explained) == "x\n\nAnswer with exactly one of these, and with nothing else: good, bad."
        assert plain == [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "x"}]

    def test_examples_stand_between_the_system_and_the_question(self) -> None:
        with serving(replying(mood_of)) as server:
            examples = [({"text": "fine"}, "good"), ({"text": "poor"}, "bad")]
            prompt = Prompt(talker(server), "Rate {text}", returns=Mood, system="Be brief", examples=examples)
            asked(prompt, {"text": "x"})

        messages = server.seen[0].json["messages"]
        assert [each["role"] for each in messages] == ["system", "user", "assistant", "user", "assistant", "user"]
        assert [each["content"] for each in messages[1:5]] == ["Rate fine", "good", "Rate poor", "bad"]

    def test_examples_that_show_every_choice_need_no_explanation(self) -> None:
        shown = [({"text": "fine"}, "good"), ({"text": "poor"}, "bad")]
        with serving(replying(mood_of)) as server:
            for examples in (shown, shown[:1]):
                prompt = Prompt(talker(server), "{text}", returns=Mood, system="S", examples=examples)
                asked(prompt, {"text": "x"})

        contents = [[each["content"] for each in seen.json["messages"]] for seen in server.seen]
        assert contents[0] == ["S", "fine", "good", "poor", "bad", "x"]
        assert [contents[1][0], *contents[1][2:]] == ["S", "good", "x"]
        assert contents[1][1].startswith("fine\n\nAnswer with ")

    def test_it_can_be_pickled(self) -> None:
        prompt = pickle.loads(pickle.dumps(Prompt(NO_SERVER, "{text}", returns=Review)))

        assert prompt.columns == ("text",)
        assert prompt.output_type.field("stars").type == pa.int64()


class TestPipelines:
    def test_a_column_of_a_table(self, pipelines: Pipelines) -> None:
        table = pa.record_batch({"text": ["nice", "dull", "nice too"], "n": [1, 2, 3]})
        with serving(replying(mood_of)) as server, pipelines() as (pipeline, _):
            found = pipeline | beam.Create([table]) | Enrich(mood=Prompt(talker(server), "{text}", returns=Mood))
            rows = found | beam.FlatMap(lambda batch: batch.to_pylist())
            expected = [{"text": "nice", "n": 1, "mood": "good"}, {"text": "dull", "n": 2, "mood": "bad"}]
            assert_that(rows, equal_to([*expected, {"text": "nice too", "n": 3, "mood": "good"}]))

    def test_a_column_with_other_names_and_one_that_takes_another(self, pipelines: Pipelines) -> None:
        table = pa.record_batch({"body": ["nice", "dull"]})
        with serving(replying(mood_of)) as server, pipelines() as (pipeline, _):
            mood = Column(Prompt(talker(server), "{text}", returns=Mood), {"text": "body"})
            again = Prompt(talker(server), "nice {mood}?", returns=Mood)
            found = pipeline | beam.Create([table]) | Enrich(mood=mood, again=again)
            rows = found | beam.FlatMap(lambda batch: batch.select(["mood", "again"]).to_pylist())
            assert_that(rows, equal_to([{"mood": "good", "again": "good"}, {"mood": "bad", "again": "good"}]))

    def test_rows_of_run_inference(self, pipelines: Pipelines) -> None:
        script = replying(lambda _: '{"title": "A", "stars": 5, "moods": []}')
        with serving(script) as server, pipelines() as (pipeline, _):
            rows = pipeline | beam.Create([{"text": "a"}, {"text": "b"}])
            found = rows | RunInference(Prompt(talker(server), "{text}", returns=Review))
            values = found | beam.Map(lambda result: (result.example["text"], result.inference, result.model_id))
            assert_that(values, equal_to([(text, Review("A", 5, []), "talker") for text in "ab"]))

    def test_beams_own_run_inference(self) -> None:
        with serving(replying(mood_of)) as server, beam.Pipeline("FnApiRunner") as pipeline:
            rows = pipeline | beam.Create([{"text": "nice"}, {"text": "dull"}])
            found = rows | BeamRunInference(Prompt(talker(server), "{text}", returns=Mood))
            assert_that(found | beam.Map(lambda result: result.inference), equal_to(["good", "bad"]))

    def test_rows_without_an_answer_become_dead_letters(self, pipelines: Pipelines) -> None:
        def reply(messages: list[dict[str, str]]) -> str:
            return "no idea" if messages[0]["content"].startswith("odd") else mood_of(messages)

        table = pa.record_batch({"text": ["nice", "odd", None, "dull"]})
        with serving(replying(reply)) as server, pipelines() as (pipeline, _):
            enrich = Enrich(mood=Prompt(talker(server), "{text}", returns=Mood)).with_exception_handling()
            good, bad = pipeline | beam.Create([table]) | enrich
            letters = bad | "Letters" >> beam.FlatMap(lambda batch: batch.to_pylist())
            reasons = letters | beam.Map(lambda row: (row["text"], row["_model"], row["_reason"].split(":")[0]))
            assert_that(reasons, equal_to([("odd", "mood", "AnswerError"), (None, "mood", "ValueError")]))
            rows = good | "Rows" >> beam.FlatMap(lambda batch: batch["mood"].to_pylist())
            assert_that(rows, equal_to(["good", "bad"]), label="Good")

    def test_dead_letters_of_run_inference(self, pipelines: Pipelines) -> None:
        script = replying(lambda messages: "?" if "odd" in messages[0]["content"] else "good")
        with serving(script) as server, pipelines() as (pipeline, _):
            rows = pipeline | beam.Create([{"text": "nice"}, {"text": "odd"}, {"text": None}])
            step = RunInference(Prompt(talker(server), "{text}", returns=Mood)).with_exception_handling()
            good, bad = rows | step
            assert_that(good | beam.Map(lambda result: result.inference), equal_to(["good"]))
            failed = bad.failed_inferences | beam.Map(lambda letter: letter[0][0]["text"])
            assert_that(failed, equal_to(["odd", None]), label="Bad")

    def test_nulls_can_be_kept(self, pipelines: Pipelines) -> None:
        table = pa.record_batch({"text": pa.array(["nice", None], pa.string())})
        with serving(replying(mood_of)) as server, pipelines() as (pipeline, _):
            prompt = Prompt(talker(server), "{text}", returns=Mood, nulls="keep")
            found = pipeline | beam.Create([table]) | Enrich(mood=prompt)
            assert_that(found | beam.FlatMap(lambda batch: batch["mood"].to_pylist()), equal_to(["good", None]))

        assert len(server.seen) == 1

    @pytest.mark.parametrize("runner_name", ["luminosity.LuminosityRunner"])
    def test_equal_prompts_are_asked_once_by_all_workers(self, pipelines: Pipelines) -> None:
        texts = [f"nice {number % 600}" for number in range(1000)]
        counted = Counted(mood_of)
        with serving(counted) as server, pipelines("--cpu_workers=2") as (pipeline, run):
            tables = [pa.record_batch({"text": texts[start : start + 100]}) for start in range(0, 1000, 100)]
            found = pipeline | beam.Create(tables) | Enrich(mood=Prompt(talker(server), "{text}", returns=Mood))
            assert_that(found | beam.FlatMap(lambda batch: batch["mood"].to_pylist()), equal_to(["good"] * 1000))

        assert len(server.seen) == 600
        assert set(counted.counts.values()) == {1}
        found_counters = counters(run.result)
        assert found_counters[InferenceMetrics.REPEATED_PROMPTS] == 400
        assert found_counters[InferenceMetrics.REQUESTS] == 600

    @pytest.mark.parametrize("runner_name", ["luminosity.LuminosityRunner"])
    def test_the_budget_of_a_run_holds_in_the_process_of_all_workers(self, pipelines: Pipelines) -> None:
        def costly(seen: Any) -> Any:
            answer = said("good")
            answer.body["usage"] = {"prompt_tokens": 10, "completion_tokens": 1, "total_tokens": 11}
            return answer

        with serving(costly) as server, pipelines("--cpu_workers=2", "--max_cost=0.01") as (pipeline, _):
            handler = talker(server, prices=(10.0, 20.0), parameters={"max_tokens": 2})
            rows = [{"text": f"nice {number}"} for number in range(300)]
            step = RunInference(Prompt(handler, "{text}")).with_exception_handling()
            _, failed = pipeline | beam.Create(rows) | beam.Reshuffle() | step
            reasons = failed.failed_inferences | beam.Map(lambda letter: "--max_cost=0.01" in letter[1][1])
            assert_that(reasons | beam.Distinct(), equal_to([True]))

        assert 0 < len(server.seen) <= 83, "each costs 0.00012 at least"


class TestRepeatedPrompts:
    def test_a_temperature_asks_each(self) -> None:
        with serving(replying(mood_of)) as server:
            asked(Prompt(talker(server, parameters={"temperature": 0.7}), "{text}"), *[{"text": "x"}] * 3)
            assert len(server.seen) == 3
            asked(Prompt(talker(server, parameters={"temperature": 0}), "{text}"), *[{"text": "x"}] * 3)
            assert len(server.seen) == 4
            asked(Prompt(talker(server), "{text}"), *[{"text": "x"}] * 3, temperature=1)
            assert len(server.seen) == 7

    def test_a_prompt_that_another_thread_asks_is_waited_for(self) -> None:
        known, began, may_end = KnownAnswers(), threading.Event(), threading.Event()
        found: list[Any] = []

        def slow(places: list[int]) -> list[Answered]:
            began.set()
            assert may_end.wait(60)
            return [Answered("slow")] * len(places)

        first = threading.Thread(target=lambda: found.append(known.answers([b"a"], slow)))
        first.start()
        assert began.wait(60)
        second = threading.Thread(
            target=lambda: found.append(known.answers([b"b", b"a"], lambda places: [Answered("own")] * len(places)))
        )
        second.start()
        may_end.set()
        first.join(60)
        second.join(60)

        assert sorted(([each.value for each in answers] for answers in found), key=len) == [["slow"], ["own", "slow"]]

    def test_a_thread_that_takes_long_is_waited_for_while_it_lives(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(asking, "_WAIT_S", 0.01)
        known, began, may_end, asks = KnownAnswers(), threading.Event(), threading.Event(), list[str]()

        def ask(name: str) -> Callable[[list[int]], list[Answered]]:
            def ask(places: list[int]) -> list[Answered]:
                asks.append(name)
                began.set()
                assert name == "second" or may_end.wait(60)
                return [Answered(name, size=4)] * len(places)

            return ask

        first = threading.Thread(target=known.answers, args=([b"a"], ask("first")))
        first.start()
        assert began.wait(60)
        timer = threading.Timer(0.1, may_end.set)
        timer.start()
        [waited] = known.answers([b"a"], ask("second"))
        first.join(60)
        timer.join(60)

        assert (waited.value, asks) == ("first", ["first"])

    def test_an_answer_that_comes_too_late_is_not_counted_twice(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(asking, "_WAIT_S", 0)
        known = KnownAnswers(most=10, most_characters=10)

        def slow(places: list[int]) -> list[Answered]:
            other = threading.Thread(target=known.answers, args=([b"a"], lambda _: [Answered("other", size=6)]))
            other.start()
            other.join(60)
            return [Answered("slow", size=6)]

        known.answers([b"a"], slow)
        [again] = known.answers([b"a"], lambda places: [Answered("asked again")])

        assert again.value == "other", "12 characters would not have been kept"

    def test_a_prompt_whose_request_failed_is_asked_again(self) -> None:
        known = KnownAnswers()

        def fail(places: list[int]) -> list[Answered]:
            raise ConnectionError("lost")

        with pytest.raises(ConnectionError):
            known.answers([b"a"], fail)
        with noting() as notes:
            [again, _] = known.answers([b"a", b"a"], lambda places: [Answered("here")])

        assert again.value == "here"
        assert notes == {InferenceMetrics.REPEATED_PROMPTS: 1}

    def test_only_the_newest_answers_are_kept(self) -> None:
        known, asks = KnownAnswers(most=2, most_characters=10), list[int]()

        def ask(places: list[int]) -> list[Answered]:
            asks.append(len(places))
            return [Answered("x", size=4)] * len(places)

        for key in (b"a", b"b", b"a", b"c", b"a", b"b"):
            known.answers([key], ask)

        assert len(asks) == 4, "b was forgotten for c"
        known.answers([b"d"], lambda places: [Answered("long", size=9)])
        assert [known.answers([b"d"], ask)[0].value, len(asks)] == ["long", 4]


class TestMistakes:
    def test_before_anything_runs(self) -> None:
        table = pa.schema([("text", pa.string()), ("photo", pa.binary())])
        with pytest.raises(InvalidArgument, match=r"takes 'txt', which is not in the table; .* did you mean 'text'\?"):
            Enrich(mood=Prompt(NO_SERVER, "{txt}")).check(table)
        with pytest.raises(InvalidType, match=r"the template takes 'photo', which holds binary, expected text"):
            Enrich(mood=Prompt(NO_SERVER, "{photo}")).check(table)
        with pytest.raises(InvalidArgument, match=r"takes 'text', which is no column; there are title"):
            Enrich(mood=Column(Prompt(NO_SERVER, "{text}"), {"title": "text"})).check(table)
        with pytest.raises(InvalidType, match=r"expected mood=Column\(handler, inputs\) or mood=Prompt\("):
            Enrich(mood=NO_SERVER)  # type: ignore[arg-type]

    def test_a_row_without_the_column(self) -> None:
        with pytest.raises(
            InvalidArgument, match=r"takes 'text', which is no column; there are txt; did you mean 'txt'"
        ):
            Prompt(NO_SERVER, "{text}").prepare([{"txt": "a"}])

    def test_rows_with_a_schema_are_checked_when_the_pipeline_is_built(self) -> None:
        pipeline = beam.Pipeline("FnApiRunner")
        rows = pipeline | beam.Create([Film("a", 1)]).with_output_types(Film)
        with pytest.raises(InvalidArgument, match=r"takes 'title', which is no column; there are text, stars"):
            _ = rows | RunInference(Prompt(NO_SERVER, "{title}"))

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"retries": -1}, "found retries=-1, expected 0 or more"),
            ({"nulls": "drop"}, "found nulls='drop', expected 'fail' or 'keep'"),
            ({"answer_column": "x"}, "found answer_column='x' without examples="),
            ({"examples": []}, "found 0 examples, expected 1 to 100"),
            ({"examples": [("a", "b")]}, r"found the example \('a', 'b'\), expected a pair of a row and its answer"),
            ({"examples": [({"text": "a"}, "fair")]}, "the answer of an example is 'fair': found another text"),
            ({"examples": [({"txt": "a"}, "good")]}, "the template takes 'text', which is no column"),
            ({"examples": "shots.txt"}, r"found the examples 'shots.txt', expected a file that ends in .parquet"),
            ({"examples": "nowhere.csv", "answer_column": "x"}, "found no file 'nowhere.csv' with examples"),
            ({"examples": pa.table({"text": ["a"], "mood": ["good"]})}, "found no answer_column= for a table of"),
            (
                {"examples": pa.table({"text": ["a"], "mood": ["good"]}), "answer_column": "moods"},
                "found answer_column='moods' for .* did you mean 'mood'",
            ),
        ],
    )
    def test_arguments(self, arguments: dict[str, Any], message: str) -> None:
        with pytest.raises((ValueError, OSError), match=message):
            Prompt(NO_SERVER, "{text}", returns=Mood, **arguments)

    def test_handlers_with_functions_or_keys(self) -> None:
        for handler in (NO_SERVER.with_preprocess_fn(str), NO_SERVER.with_postprocess_fn(str)):
            with pytest.raises(InvalidArgument, match=r"HttpModelHandler has functions .*with_preprocess_fn or .* Pro"):
                Prompt(handler, "{text}", returns=Mood)
        for keyed in (KeyedModelHandler(NO_SERVER), MaybeKeyedModelHandler(NO_SERVER).with_preprocess_fn(str)):
            with pytest.raises(InvalidArgument, match=r"with keys, .*; put the KeyedModelHandler around the Prompt"):
                Prompt(keyed, "{text}", returns=Mood)

    def test_handlers_that_answer_no_texts(self) -> None:
        class Numbers(Handler[Any, int, None]):
            def load_model(self) -> None: ...

            def predict(self, model: None, batch: Any, inference_args: Any = None) -> list[int]:
                return [1] * len(batch)

        with pytest.raises(ValueError, match=r"found an answer of type int from Numbers, expected a text"):
            asked(Prompt(Numbers(), "{text}"), {"text": "a"})
        with pytest.raises(TypeError, match="found the class Numbers, expected an instance"):
            Prompt(Numbers, "{text}")  # type: ignore[arg-type]
        with pytest.raises(InvalidType, match=r"found HttpModelHandler, whose predictions are list"):
            Prompt(HttpModelHandler.embeddings("http://localhost:9", "small"), "{text}", returns=Mood)

    def test_a_missing_key_is_told_before_the_run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("TALKER_KEY", raising=False)
        handler = HttpModelHandler.chat("http://localhost:9", "talker", api_key_env="TALKER_KEY")
        pipeline = beam.Pipeline("luminosity.LuminosityRunner")
        rows = pipeline | beam.Create([pa.record_batch({"text": ["a"]})])
        with pytest.raises(
            EndpointError, match=r"TALKER_KEY, which api_key_env names, is not set .* export TALKER_KEY="
        ):
            _ = rows | Enrich(mood=Prompt(handler, "{text}"))

    def test_a_file_of_examples(self, tmp_path: Any) -> None:
        path = tmp_path / "shots.csv"
        path.write_text("text,mood\nfine,good\npoor,bad\n")
        with serving(replying(mood_of)) as server:
            asked(Prompt(talker(server), "{text}", returns=Mood, examples=path, answer_column="mood"), {"text": "x"})

        assert [each["content"] for each in server.seen[0].json["messages"][:4]] == ["fine", "good", "poor", "bad"]
