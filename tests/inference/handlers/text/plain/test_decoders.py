"""Tokenizers and chat templates of language models without transformers: exactly those of transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from luminosity import TextGenerator
from luminosity.inference.handlers.text.plain.chats import can_render
from luminosity.inference.handlers.text.plain.tokenizer import PlainTokenizer, rules_of
from luminosity.inference.handlers.text.pretrained import Pretrained
from tests.inference.prompts.models import save_writer
from tests.inference.texts import sentences

pytestmark = pytest.mark.thorough

TEXTS = [
    *sentences(60), " ", "\n\n1 22  333 4,444.5", "don't  stop", "a\u00a0b", "e\u0301", "中文 和 日本語 👩\u200d👧",
    "<s>a</s>", "<|im_end|>\n", "  leading", "trailing  ", "tab\tand\r\nlines", "<|start_header_id|>", "x" * 70,
]  # fmt: skip
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + "
    "'\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BLOCKS = """{%- set ns = namespace(system='') %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- set ns.system = message.content | trim %}
        {%- continue %}
    {%- endif %}
    {%- if loop.first and message.role != 'user' %}
        {{- raise_exception('a chat begins with the user') }}
    {%- endif %}
    {{- bos_token if loop.first }}[{{ message.role }}] {{ message.content | tojson }} {{ dict(a=1) | tojson(indent=2) }}
    {%- generation %}{% set ns.system = ns.system ~ '!' %}{{ eos_token }}{% endgeneration %}
{%- endfor %}
{{ ns.system }} {{ tools is none }} {{ strftime_now('%Y') | length }} {{ style | default('plain') }}
{%- if add_generation_prompt %}[assistant]{% endif %}"""
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hello  {{ 'x' }} <|im_end|> é\n"}],
    [{"role": "system", "content": " Be short. "}, {"role": "user", "content": "Hi"}],
    [{"role": "user", "content": "One"}, {"role": "assistant", "content": "Two"}, {"role": "user", "content": ""}],
]

Save = Callable[[Path], Any]


def _special(*tokens: str) -> list[tokenizers.AddedToken]:
    return [tokenizers.AddedToken(token, special=True, normalized=False) for token in tokens]


def _trained(before: Any, size: int, alphabet: list[str], **flags: Any) -> Any:
    made: Any = tokenizers.Tokenizer(models.BPE(**flags))
    made.pre_tokenizer = before
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(sentences(40), trainer)
    return made


def _of_bytes(before: Any, first: list[str], **flags: Any) -> Any:
    """Return a tokenizer of bytes whose vocabulary begins with some special tokens, and is without them if empty."""
    trained = _trained(pre_tokenizers.ByteLevel(add_prefix_space=False), 400, pre_tokenizers.ByteLevel.alphabet())
    saved = json.loads(trained.to_str())["model"]
    vocab = {token: number for number, token in enumerate([*first, *saved["vocab"]])}
    made: Any = tokenizers.Tokenizer(models.BPE(vocab, [tuple(pair) for pair in saved["merges"]], **flags))
    made.pre_tokenizer, made.decoder = before, decoders.ByteLevel()
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    return made


def _write(folder: Path, made: Any, family: str, **settings: Any) -> None:
    made.save(str(folder / "tokenizer.json"))
    added = {token["id"]: token for token in json.loads(made.to_str())["added_tokens"]}
    if settings.pop("names_added", True):
        settings["added_tokens_decoder"] = {
            str(number): {name: value for name, value in token.items() if name != "id"}
            for number, token in added.items()
        }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    sizes = {"vocab_size": made.get_vocab_size(), "hidden_size": 32, "max_position_embeddings": 512}
    (folder / "config.json").write_text(json.dumps({"model_type": family, **sizes}))


def save_smollm2(folder: Path) -> None:
    before = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>"]
    made = _of_bytes(before, names)
    made.post_processor = None
    made.add_special_tokens(_special(*names))
    tokens = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    more = {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"], "vocab_size": 404, "add_prefix_space": False}
    settings = {**tokens, **more, "unk_token": "<|endoftext|>", "clean_up_tokenization_spaces": False}
    _write(
        folder, made, "llama", tokenizer_class="GPT2Tokenizer", model_max_length=64, chat_template=CHATML, **settings
    )


def save_llama3(folder: Path) -> None:
    words = QWEN_WORDS.replace(r"\p{N}| ", r"\p{N}{1,3}| ")
    split = pre_tokenizers.Split(tokenizers.Regex(words), "isolated")
    before = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    made = _of_bytes(before, [], ignore_merges=True)
    made.add_special_tokens(_special("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|eot_id|>"))
    begin = "<|begin_of_text|>"
    template = processors.TemplateProcessing(
        single=f"{begin} $A", pair=f"{begin} $A {begin}:1 $B:1", special_tokens=[(begin, made.token_to_id(begin))]
    )
    made.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    settings = {"bos_token": begin, "eos_token": "<|eot_id|>", "clean_up_tokenization_spaces": True}
    _write(
        folder, made, "llama", tokenizer_class="PreTrainedTokenizerFast", model_max_length=131072, chat_template=BLOCKS,
        model_input_names=["input_ids", "attention_mask"], **settings,
    )  # fmt: skip


def save_distilled(folder: Path) -> None:
    """As models have it whose class is Llama's, but whose tokenizer is of bytes."""
    save_llama3(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "LlamaTokenizerFast", "legacy": True, "sp_model_kwargs": {}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def save_qwen(folder: Path, family: str = "qwen2") -> None:
    split = pre_tokenizers.Split(tokenizers.Regex(QWEN_WORDS), "isolated")
    after = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    made = _of_bytes(pre_tokenizers.Sequence([split, after]), [], continuing_subword_prefix="", end_of_word_suffix="")
    made.normalizer = normalizers.NFC()
    made.add_special_tokens(_special("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    made.add_tokens([tokenizers.AddedToken("<think>", special=False, normalized=False)])
    settings = {
        "add_bos_token": False, "add_prefix_space": False, "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": None,
        "errors": "replace", "split_special_tokens": False, "tokenizer_class": "Qwen2Tokenizer",
        "model_max_length": 131072, "chat_template": CHATML, "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    _write(folder, made, family, **settings)


def save_qwen3(folder: Path) -> None:
    save_qwen(folder, "qwen3")
    (folder / "chat_template.jinja").write_text(BLOCKS)


def _of_pieces() -> Any:
    """Return a tokenizer as the first Llamas have it: words with their spaces, and bytes for all other characters."""
    trained = _trained(pre_tokenizers.Metaspace(prepend_scheme="always", split=True), 300, [])
    saved = json.loads(trained.to_str())["model"]
    words = ["<unk>", "<s>", "</s>", *(f"<0x{number:02X}>" for number in range(256)), *saved["vocab"]]
    vocab = {word: number for number, word in enumerate(dict.fromkeys(words))}
    flags = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
    made: Any = tokenizers.Tokenizer(models.BPE(vocab, [tuple(pair) for pair in saved["merges"]], **flags))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]
    )
    made.add_special_tokens(_special("<unk>", "<s>", "</s>"))
    return made


def save_llama2(folder: Path, family: str = "llama") -> None:
    settings = {
        "add_bos_token": True, "add_eos_token": False, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
        "legacy": False, "pad_token": None, "sp_model_kwargs": {}, "model_max_length": 10**30,
        "use_default_system_prompt": False, "tokenizer_class": "LlamaTokenizer", "chat_template": BLOCKS,
    }  # fmt: skip
    _write(folder, _of_pieces(), family, **settings)


def save_mistral(folder: Path) -> None:
    save_llama2(folder, "mistral")


def save_again(folder: Path) -> None:
    """As transformers itself saves a model of bytes, with its chat template in a file."""
    save_writer(folder)


SAVED: list[Save] = [
    save_smollm2, save_llama3, save_distilled, save_qwen, save_qwen3, save_llama2, save_mistral, save_again,
]  # fmt: skip


def check_same(folder: Path) -> PlainTokenizer:
    source = Pretrained(str(folder))
    plain = source.plain()
    assert plain is not None
    ours, whole = plain.tokenizer, source.tokenizer()
    assert rules_of(ours.backend_tokenizer) == rules_of(whole.backend_tokenizer)
    for name in ("model_max_length", "bos_token_id", "cls_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(ours, name) == getattr(whole, name), name
    assert set(ours.all_special_ids) == set(whole.all_special_ids)
    assert ours.special_tokens_map == whole.special_tokens_map
    assert ours.get_added_vocab() == whole.get_added_vocab()
    ids = [encoding.ids for encoding in ours.backend_tokenizer.encode_batch(TEXTS)]
    assert ids == whole(TEXTS)["input_ids"]
    for skips in (False, True):
        assert ours.batch_decode(ids, skip_special_tokens=skips) == whole.batch_decode(ids, skip_special_tokens=skips)
    assert [ours.decode(row) for row in ids] == [whole.decode(row) for row in ids]
    for chat in CHATS:
        for arguments in ({"add_generation_prompt": True}, {"style": {"a": 1}}, {"chat_template": BLOCKS}):
            assert can_render(chat, arguments)
            expected = whole.apply_chat_template(chat, tokenize=False, **arguments)
            assert ours.apply_chat_template(chat, tokenize=False, **arguments) == expected
    config = source.config()
    assert plain.config.vocab_size == config.vocab_size
    assert plain.config.max_position_embeddings == config.max_position_embeddings
    return ours


@pytest.mark.parametrize("save", SAVED)
def test_language_models_are_read_without_transformers(save: Save, tmp_path: Path) -> None:
    save(tmp_path)
    check_same(tmp_path)


def _edit(folder: Path, name: str, **values: Any) -> None:
    content = {**json.loads((folder / name).read_text()), **values}
    (folder / name).write_text(json.dumps({key: value for key, value in content.items() if value != "REMOVED"}))


@pytest.mark.parametrize("save", [save_smollm2, save_llama3, save_qwen, save_llama2, save_mistral])
@pytest.mark.parametrize(
    "change",
    [
        {"tokenizer_class": "REMOVED"},
        {"tokenizer_class": "PreTrainedTokenizerFast"},
        {"tokenizer_class": "LlamaTokenizer"},
        {"tokenizer_class": "Qwen2TokenizerFast"},
        {"tokenizer_class": "GPT2Tokenizer"},
        {"add_prefix_space": True},
        {"add_prefix_space": False},
        {"legacy": True},
        {"add_bos_token": True, "add_eos_token": True},
        {"added_tokens_decoder": "REMOVED"},
        {"eos_token": None},
        {"clean_up_tokenization_spaces": True},
    ],
    ids=str,
)
def test_no_change_gives_other_rules_than_transformers(save: Save, change: dict[str, Any], tmp_path: Path) -> None:
    save(tmp_path)
    _edit(tmp_path, "tokenizer_config.json", **change)
    source = Pretrained(str(tmp_path))
    plain = source.plain()
    if plain is not None:
        whole = source.tokenizer()
        assert rules_of(plain.tokenizer.backend_tokenizer) == rules_of(whole.backend_tokenizer)
        assert plain.tokenizer.special_tokens_map == whole.special_tokens_map
        assert plain.tokenizer.batch_decode([[3, 4, 5]]) == whole.batch_decode([[3, 4, 5]])


LEFT: list[Callable[[Path], Any]] = [
    lambda folder: _edit(folder, "tokenizer_config.json", split_special_tokens=True),
    lambda folder: _edit(folder, "tokenizer_config.json", image_token="<image>"),
    lambda folder: _edit(folder, "tokenizer_config.json", eos_token="<new>"),
    lambda folder: _edit(folder, "tokenizer_config.json", tokenizer_class="BertTokenizer"),
    lambda folder: _edit(folder, "tokenizer_config.json", chat_template=[{"name": "tool_use", "template": "{{ a }}"}]),
    lambda folder: _edit(folder, "config.json", model_type="gemma"),
    lambda folder: _edit(folder, "config.json", vocab_size="REMOVED"),
    lambda folder: (folder / "tokenizer.json").unlink(),
]


@pytest.mark.parametrize("change", LEFT)
def test_what_these_modules_do_not_know_is_left_to_transformers(change: Callable[[Path], Any], tmp_path: Path) -> None:
    save_smollm2(tmp_path)
    change(tmp_path)
    assert Pretrained(str(tmp_path)).plain() is None


def test_an_earlier_transformers_uses_the_file_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from luminosity.inference.handlers.text.plain import decoders as of_models
    from luminosity.inference.handlers.text.plain import tokenizer

    for module in (of_models, tokenizer):
        monkeypatch.setattr(module, "rebuilds_tokenizers", lambda: False)
    for save, is_same in ((save_qwen, True), (save_llama3, False), (save_smollm2, False), (save_llama2, False)):
        folder = tmp_path / save.__name__
        folder.mkdir()
        save(folder)
        plain = Pretrained(str(folder)).plain()
        assert (plain is not None) == is_same, "others clean up texts, or are rebuilt by newer ones alone"
        if plain is not None:
            saved = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
            assert rules_of(plain.tokenizer.backend_tokenizer) == rules_of(saved)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_writer(tmp_path_factory.mktemp("models") / "writer")


@pytest.mark.parametrize(
    ("chat", "arguments"),
    [
        (CHATS[1], {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}),
        (CHATS[1], {"documents": [{"title": "a", "text": "b"}]}),
        ([{"role": "assistant", "content": "a", "reasoning_content": "b"}], {}),
    ],
    ids=["tools", "documents", "reasoning"],
)
def test_other_chats_are_rendered_by_transformers(path: str, chat: Any, arguments: dict[str, Any]) -> None:
    template = "{% for m in messages %}{{ m.thinking }} {{ m.content }}{% endfor %} {{ tools }} {{ documents }}"
    handler = TextGenerator(path, chat_template_args={"chat_template": template, **arguments})

    [found] = handler.prepare([chat]).to_pylist()

    assert isinstance(handler.tokenizer.whole, PlainTokenizer)
    whole = transformers.AutoTokenizer.from_pretrained(path)
    expected = whole.apply_chat_template(chat, chat_template=template, add_generation_prompt=True, **arguments)
    assert found == expected["input_ids"]


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__ }}{{ (1).__class__.mro() }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace(__a__=1) %}",
        "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
        "{{ raise_exception('roles must alternate') }}",
    ],
)
def test_a_template_can_not_reach_beyond_the_messages(path: str, template: str) -> None:
    jinja2 = pytest.importorskip("jinja2")
    handler = TextGenerator(path, chat_template_args={"chat_template": template})
    with pytest.raises(jinja2.exceptions.TemplateError):
        handler.prepare([CHATS[0]])


PROGRAM = """
import re, sys
from typing import Literal
from luminosity import Prompt, TextGenerator

handler = TextGenerator(sys.argv[1], device="CPU", max_new_tokens=12, generation_args={"do_sample": False})
handler.slot_devices = ("cpu",)
rows = [{"text": "good"}, {"text": "<|im_end|>"}]
for prompt in (Prompt(handler, "{text}"), Prompt(handler, "{text}", returns=Literal["good", "bad"])):
    model = prompt.load_model()
    prompt.warm_up(model)
    print([each.inference for each in prompt.run_inference(rows, model)])
    model.inner.close()
assert "torch" in sys.modules and "transformers" not in sys.modules, sorted(sys.modules)
"""


def test_a_generation_in_slots_does_not_import_transformers(path: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, path], capture_output=True, text=True, timeout=300)

    assert done.returncode == 0, done.stderr
    free, limited = map(eval, done.stdout.splitlines())
    assert set(limited) <= {"good", "bad"}
    handler = TextGenerator(path, device="CPU", max_new_tokens=12, generation_args={"do_sample": False})
    handler.reads_tokenizer_json = False
    chats = [[{"role": "user", "content": text}] for text in ("good", "<|im_end|>")]
    expected: list[Any] = list(handler.run_inference(chats, handler.load_model()))
    assert free == [each.inference.strip() for each in expected]
