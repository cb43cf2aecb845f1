"""What rows in slots ask for: seeds, stop strings, masks, limits, long prompts, too little memory, failures."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from luminosity.errors import ModelDied
from luminosity.inference.handlers.text.packed.families import Unfit
from luminosity.inference.handlers.text.slots import device_slots
from luminosity.inference.handlers.text.slots import model as model_module
from luminosity.inference.handlers.text.slots.device_slots import Slots
from luminosity.inference.handlers.text.slots.model import SlotModel
from luminosity.inference.handlers.text.slots.settings import Answer, settings_of
from tests.inference.handlers.text.slots.models import VOCABULARY, alone, answers, made, prompts, slot_model

_SAMPLED: dict[str, Any] = {"do_sample": True, "max_new_tokens": 12, "eos_token_id": None, "temperature": 2.0}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    """Make a Llama with random weights."""
    return made("llama3", tmp_path_factory.mktemp("model") / "llama")


def test_a_seed_gives_the_same_answer_whoever_the_neighbours_are(pair: tuple[Any, str]) -> None:
    _, path = pair
    asked = prompts([9, 30, 4, 60, 17])
    own = [{**_SAMPLED, "seed": number, "top_k": 40, "top_p": 0.95} for number in range(5)]
    together, apart = slot_model(path, count=5), slot_model(path, count=1)
    found = answers(together, asked, own)
    [again] = answers(apart, asked[2:3], own[2:3])
    [other] = answers(apart, asked[2:3], [{**own[2], "seed": 7}])
    for model in (together, apart):
        model.close()

    assert again.tokens == found[2].tokens
    assert other.tokens != found[2].tokens


def test_tokens_are_drawn_as_often_as_they_are_likely(pair: tuple[Any, str]) -> None:
    import torch

    model, path = pair
    prompt = prompts([12])[0]
    with torch.no_grad():
        scores = model(torch.tensor([prompt])).logits[0, -1] / 4.0
    likely = scores.topk(6)
    shares = likely.values.softmax(-1)
    kept = int((shares.cumsum(-1) - shares < 0.8).sum())
    expected = (shares[:kept] / shares[:kept].sum()).tolist()
    own = {"do_sample": True, "max_new_tokens": 1, "temperature": 4.0, "top_k": 6, "top_p": 0.8, "eos_token_id": None}
    slots = slot_model(path, count=32)
    found = answers(slots, [prompt] * 2000, [{**own, "seed": number} for number in range(2000)])
    slots.close()

    counts = np.bincount([answer.tokens[0] for answer in found], minlength=VOCABULARY)
    assert set(np.flatnonzero(counts)) == set(likely.indices[:kept].tolist())
    # The seeds are fixed, and so are the counts.
    assert np.abs(counts[likely.indices[:kept].numpy()] / 2000 - expected).max() < 0.05


def test_a_stop_string_ends_its_row_alone(pair: tuple[Any, str]) -> None:
    model, path = pair
    asked = prompts([9, 30])
    expected = [alone(model, prompt, 20, eos_token_id=None) for prompt in asked]
    stop = f"{expected[0][4]} {expected[0][5]}"
    slots = slot_model(path)
    found = answers(
        slots, asked, [{"max_new_tokens": 20, "eos_token_id": None, "stop_strings": [stop, "none"]}, _greedy(20)]
    )
    slots.close()

    assert found[0].tokens == expected[0][:6]
    assert found[0].stops == (stop, "none")
    assert found[1].tokens == expected[1]


def _greedy(limit: int) -> dict[str, Any]:
    return {"max_new_tokens": limit, "eos_token_id": None}


def test_rows_repeat_themselves_less(pair: tuple[Any, str]) -> None:
    model, path = pair
    asked = prompts([9, 30, 5, 12, 40])
    penalties = [3.0, 1.0, 1.5, 3.0, 1.2]
    more = {"eos_token_id": None}
    expected = [
        alone(model, ids, 24, repetition_penalty=each, **more) for ids, each in zip(asked, penalties, strict=True)
    ]
    slots = slot_model(path, count=2)
    found = answers(slots, asked, [{**_greedy(24), "repetition_penalty": each} for each in penalties])
    slots.close()

    assert [answer.tokens for answer in found] == expected
    assert expected[0] != alone(model, asked[0], 24, **more)


class OnlyEven:
    """Lets a row write even tokens, at most five of them."""

    def __init__(self) -> None:
        self.accepted: list[int] = []

    @property
    def stopped(self) -> bool:
        return len(self.accepted) == 5

    def fill(self, mask: npt.NDArray[np.int32]) -> None:
        mask[:] = 0x55555555

    def accept(self, token: int) -> None:
        self.accepted.append(token)


def test_masks_limit_what_a_row_writes(pair: tuple[Any, str]) -> None:
    _, path = pair
    matchers: list[OnlyEven] = []

    def make() -> OnlyEven:
        matchers.append(OnlyEven())
        return matchers[-1]

    slots = slot_model(path, make_matcher=make)
    found = answers(slots, prompts([9, 30, 5]), [_greedy(20), {**_SAMPLED, "seed": 1}, _greedy(3)])
    slots.close()

    assert [answer.tokens for answer in found] == [matcher.accepted for matcher in matchers]
    assert [len(answer.tokens) for answer in found] == [5, 5, 3]
    assert all(token % 2 == 0 for answer in found for token in answer.tokens)
    assert [answer.is_cut for answer in found] == [False, False, True]


def test_rows_longer_than_the_slots_get_slots_of_their_own(pair: tuple[Any, str]) -> None:
    model, path = pair
    lengths = (200, 9, 300, 420)
    asked = prompts(lengths)
    expected = [alone(model, prompt, 40, eos_token_id=None) for prompt in asked]
    slots = slot_model(path, length=128)
    found = answers(slots, asked, [_greedy(40)] * 4)
    slots.close()

    assert [answer.tokens for answer in found] == expected


def test_rows_beyond_the_window_go_to_transformers(tmp_path: Path) -> None:
    model, path = made("mistral", tmp_path / "mistral")

    def fallback(ids: list[int], arguments: Mapping[str, Any]) -> Answer:
        return Answer(alone(model, ids, arguments["max_new_tokens"]), len(ids), False, is_of_slots=False)

    asked = prompts([60, 120])
    slots = slot_model(path, fallback=fallback)
    found = answers(slots, asked, [{"max_new_tokens": 20}] * 2)
    slots.close()

    assert [answer.tokens for answer in found] == [alone(model, prompt, 20) for prompt in asked]
    assert [answer.is_of_slots for answer in found] == [True, False]


def test_fewer_slots_when_memory_is_short(pair: tuple[Any, str], monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    model, path = pair
    tried: list[int] = []

    class Large(Slots):
        def __init__(self, decoder: Any, count: int, length: int, **options: Any) -> None:
            tried.append(count)
            if count > 2:
                raise torch.OutOfMemoryError("out of memory")
            super().__init__(decoder, count, length, **options)

    monkeypatch.setattr("tests.inference.handlers.text.slots.models.Slots", Large)
    slots = slot_model(path, count=8)
    asked = prompts([9, 30, 5])
    found = answers(slots, asked, [_greedy(6)] * 3)
    slots.close()

    assert tried == [8, 4, 2]
    assert slots.capacity == 4
    assert [answer.tokens for answer in found] == [alone(model, prompt, 6, eos_token_id=None) for prompt in asked]


def test_prompts_are_read_in_smaller_parts_when_memory_is_short(
    pair: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    model, path = pair
    read = Slots.read

    def large(self: Slots, rows: Any, *others: Any) -> Any:
        if len(rows) > 1 or len(rows[0]) == 50:
            raise torch.OutOfMemoryError("out of memory")
        return read(self, rows, *others)

    monkeypatch.setattr(Slots, "read", large)
    slots = slot_model(path)
    asked = prompts([9, 50, 5, 12])
    futures = [slots.submit(prompt, _greedy(6)) for prompt in asked]
    with pytest.raises(torch.OutOfMemoryError):
        futures.pop(1).result(60)
    found = [future.result(60).tokens for future in futures]
    slots.close()

    assert found == [alone(model, prompt, 6, eos_token_id=None) for prompt in (asked[0], *asked[2:])]


def test_all_fail_if_a_step_fails_and_later_ones_too(pair: tuple[Any, str], monkeypatch: pytest.MonkeyPatch) -> None:
    _, path = pair

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("an illegal memory access")

    slots = slot_model(path)
    monkeypatch.setattr(Slots, "steps", broken)
    futures = [slots.submit(prompt, _greedy(6)) for prompt in prompts([9, 50])]
    for future in futures:
        with pytest.raises(ModelDied, match="an illegal memory access"):
            future.result(60)
    with pytest.raises(ModelDied):
        slots.submit([5], None)
    slots.close()


def test_a_closed_model_cancels_what_is_left(pair: tuple[Any, str], monkeypatch: pytest.MonkeyPatch) -> None:
    _, path = pair
    stepping, go_on = threading.Event(), threading.Event()
    steps = Slots.steps

    def slow(self: Slots, *arguments: Any) -> Any:
        stepping.set()
        assert go_on.wait(60)
        return steps(self, *arguments)

    monkeypatch.setattr(Slots, "steps", slow)
    slots = slot_model(path, count=1)
    futures = [slots.submit(prompt, _greedy(30)) for prompt in prompts([9, 50])]
    assert stepping.wait(60)
    closing = threading.Thread(target=slots.close)
    closing.start()
    go_on.set()
    closing.join(60)

    assert [future.cancelled() for future in futures] == [True, True]
    assert slots.submit([5], None).cancelled()


def test_a_cancelled_row_leaves_its_slot(pair: tuple[Any, str], monkeypatch: pytest.MonkeyPatch) -> None:
    model, path = pair
    stepping, cancelled = threading.Event(), threading.Event()
    counted = _count_steps(monkeypatch)
    steps = Slots.steps

    def gated(self: Slots, *arguments: Any) -> Any:
        stepping.set()
        assert cancelled.wait(60)
        return steps(self, *arguments)

    monkeypatch.setattr(Slots, "steps", gated)
    slots = slot_model(path, count=1, length=480)
    first = slots.submit(prompts([5])[0], _greedy(400))
    assert stepping.wait(60)
    first.cancel()
    cancelled.set()
    prompt = prompts([9])[0]
    assert slots.submit(prompt, _greedy(6)).result(60).tokens == alone(model, prompt, 6, eos_token_id=None)
    slots.close()
    assert counted == [8, 5], "of the first row, and of the second"


def test_a_prefix_is_computed_once(pair: tuple[Any, str], monkeypatch: pytest.MonkeyPatch) -> None:
    _, path = pair
    computed: list[int] = []
    prefix_of = Slots.prefix_of

    def counted(self: Slots, ids: Any) -> Any:
        computed.append(len(ids))
        return prefix_of(self, ids)

    monkeypatch.setattr(Slots, "prefix_of", counted)
    slots = slot_model(path, count=4)
    before, others = prompts([80])[0], prompts([70, 75], seed=5)
    alike = [[*before, number, number + 1] for number in range(10, 30)]
    _answered_together(slots, [others[0], others[0], others[1], others[1], *alike], [4] * 24, monkeypatch)
    slots.close()
    assert computed == [80], "two prompts that begin alike are not enough"


def test_few_steps_are_computed_beyond_the_end_of_rows(pair: tuple[Any, str], monkeypatch: pytest.MonkeyPatch) -> None:
    _, path = pair
    counted = _count_steps(monkeypatch)
    slots = slot_model(path, count=4)
    _answered_together(slots, prompts([5] * 4), [3, 5, 20, 4], monkeypatch)
    slots.close()
    assert sum(counted) == 19, "the first token comes from reading the prompt"
    assert max(counted) == device_slots.EVERY


def _answered_together(
    slots: SlotModel, asked: list[list[int]], limits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Have prompts answered that all wait when the first of them is read."""
    submitted = threading.Event()
    read = Slots.read

    def gated(self: Slots, *arguments: Any) -> Any:
        assert submitted.wait(60)
        return read(self, *arguments)

    monkeypatch.setattr(Slots, "read", gated)
    futures = [slots.submit([5], _greedy(1))]  # it ends with its first token, before the others are taken
    while slots.waiting:
        time.sleep(0.01)
    futures += [slots.submit(ids, _greedy(limit)) for ids, limit in zip(asked, limits, strict=True)]
    submitted.set()
    for future in futures:
        future.result(60)


def _count_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counted: list[int] = []
    steps: Callable[..., Any] = Slots.steps

    def counting(self: Slots, count: int, *arguments: Any) -> Any:
        counted.append(count)
        return steps(self, count, *arguments)

    monkeypatch.setattr(Slots, "steps", counting)
    return counted


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_beams": 4},
        {"repetition_penalty": 0},
        {"logits_processor": [len]},
        {"max_new_tokens": None},
        {"top_p": 2},
    ],
)
def test_what_slots_do_not_know_is_left_to_transformers(arguments: dict[str, Any]) -> None:
    settings_of({"max_new_tokens": 8, "num_beams": 1, "repetition_penalty": 1.0})
    with pytest.raises(Unfit):
        settings_of({"max_new_tokens": 8, "do_sample": True, **arguments})


def test_a_token_that_the_model_does_not_have_fails_its_row(pair: tuple[Any, str]) -> None:
    slots = slot_model(pair[1])
    with pytest.raises(ValueError, match=f"found the token {VOCABULARY}"):
        slots.submit([5, VOCABULARY], _greedy(4))
    assert len(slots.submit([5], _greedy(4)).result(60).tokens) == 4
    slots.close()
    assert model_module.torch.is_inference_mode_enabled() is False
