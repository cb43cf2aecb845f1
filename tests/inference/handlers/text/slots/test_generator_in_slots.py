"""``TextGenerator`` with its model in slots, on the CPU: the same texts as with transformers, and what it counts."""

from __future__ import annotations

from typing import Any

import apache_beam as beam
import pytest
from apache_beam.testing.util import assert_that, equal_to

from luminosity import RunInference, TextGenerator
from luminosity.core import InferenceMetrics, computed_by
from luminosity.inference.continuous import ContinuousModel
from luminosity.inference.handler import noting
from tests.both_runners import Pipelines, counters
from tests.inference.texts import save_with_tokenizer, sentences

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Make a Llama with MiniLM's words."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=30522,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=101,
        eos_token_id=102,
        pad_token_id=0,
        initializer_range=0.5,
    )
    return save_with_tokenizer(transformers.LlamaForCausalLM(config), tmp_path_factory.mktemp("models") / "llama")


def generator(path: str, is_in_slots: bool = True, **options: Any) -> TextGenerator:
    handler = TextGenerator(path, device="CPU", max_new_tokens=8, **options)
    handler.slot_devices = ("cpu",) if is_in_slots else ()
    return handler


def texts(handler: TextGenerator, examples: list[Any], **inference_args: Any) -> list[str]:
    model = handler.load_model()
    handler.warm_up(model)
    try:
        results: list[Any] = list(handler.run_inference(examples, model, inference_args))
        return [result.inference for result in results]
    finally:
        if isinstance(model, ContinuousModel):
            model.close()


def test_the_texts_are_those_of_transformers(path: str) -> None:
    stop = texts(generator(path, is_in_slots=False), sentences(1))[0].split()[2]
    examples = [
        *sentences(9),
        {"prompt": "one two", "max_new_tokens": 3},
        {"prompt": sentences(3)[2], "stop_strings": stop},
    ]

    found = texts(generator(path), examples)

    assert found == texts(generator(path, is_in_slots=False), examples)
    assert len(set(found)) > 6


def test_the_model_is_in_slots_only_where_it_can_be(path: str) -> None:
    assert isinstance(generator(path).load_model(), ContinuousModel)
    for other in (
        generator(path, is_in_slots=False),
        generator(path, dtype="bfloat16"),
        generator(path, generation_args={"num_beams": 2}),
        generator(path, load_model_args={"attn_implementation": "eager"}),
    ):
        assert other.slot_plan is None
    assert TextGenerator(path, device="CPU").slot_plan is None, "only if the handler says so"


def test_arguments_that_the_slots_do_not_know_go_to_transformers(path: str) -> None:
    handler = generator(path)
    beams = {"num_beams": 2, "do_sample": False}

    assert handler.submits({"temperature": 0.5})
    assert not handler.submits(beams)
    assert texts(handler, ["one two"], **beams) == texts(generator(path, is_in_slots=False), ["one two"], **beams)


def test_what_is_counted(path: str) -> None:
    handler = generator(path, generation_args={"eos_token_id": None})
    model = handler.load_model()
    with noting() as notes:
        handler.run_inference(["one two", {"prompt": "three", "max_new_tokens": 2}], model)
    assert (handler.memory(model) or 0) > 30522 * 32 * 4
    model.close()

    first_tokens = [name for name in notes if name.startswith(InferenceMetrics.FIRST_TOKEN)]
    assert sum(notes.pop(name) for name in first_tokens) == 2
    assert notes == {
        InferenceMetrics.IN_SLOTS: 2,
        InferenceMetrics.PROMPT_TOKENS: 4 + 3,
        InferenceMetrics.NEW_TOKENS: 8 + 2,
        InferenceMetrics.CUT_TEXTS: 2,
    }
    assert computed_by(notes) == "in slots"


def test_in_a_pipeline_with_dead_letters(path: str, pipelines: Pipelines) -> None:
    expected = texts(generator(path, is_in_slots=False), ["one two", "three"])
    with pipelines() as (pipeline, run):
        examples = pipeline | beam.Create(["one two", 7, "three"])
        good, bad = examples | RunInference(generator(path)).with_exception_handling()
        assert_that(good | beam.Map(lambda result: result.inference), equal_to(expected), "good")
        assert_that(bad.failed_inferences | beam.Map(lambda letter: letter[0]), equal_to([[7]]), "bad")
    found = counters(run.result)
    assert found["slot_rows"] == found["batches"] == 2
    assert found["prompt_tokens"] == 4 + 3
