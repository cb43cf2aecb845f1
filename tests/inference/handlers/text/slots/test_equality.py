"""Answers in slots are those of transformers' ``generate``, prompt by prompt, for each family."""

from __future__ import annotations

from typing import Any

import pytest

from tests.inference.handlers.text.slots.models import FAMILIES, alone, answers, made, prompts, slot_model

pytestmark = pytest.mark.thorough

_LENGTHS = (1, 2, 33, 70, 1, 64, 50, 9, 20, 150)
_LIMITS = (5, 20, 30, 20, 40, 16, 1, 30, 12, 42)


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    """Make a model of each family."""
    # A window ends what slots compute as transformers does; it has a test of its own.
    more = {"sliding_window": None} if request.param == "mistral" else {}
    return made(request.param, tmp_path_factory.mktemp("model") / request.param, **more)


@pytest.mark.parametrize("shares", [True, False])
def test_each_prompt_is_answered_as_if_it_were_alone(pair: tuple[Any, str], shares: bool) -> None:
    model, path = pair
    asked = prompts(_LENGTHS)
    expected = [alone(model, prompt, limit) for prompt, limit in zip(asked, _LIMITS, strict=True)]

    slots = slot_model(path, count=3, shares_prefixes=shares)
    found = answers(slots, asked, [{"max_new_tokens": limit} for limit in _LIMITS])
    slots.close()

    assert [answer.tokens for answer in found] == expected
    assert [answer.prompt_tokens for answer in found] == list(_LENGTHS)
    cut = [len(tokens) == limit and tokens[-1] != 2 for tokens, limit in zip(expected, _LIMITS, strict=True)]
    assert [answer.is_cut for answer in found] == cut


def test_prompts_that_begin_alike_get_the_same_answers(pair: tuple[Any, str]) -> None:
    model, path = pair
    before = prompts([90], seed=1)[0]
    asked = [*prompts([1, 12, 30, 2, 7, 3], before=before), *prompts([100]), before]
    expected = [alone(model, prompt, 8) for prompt in asked]

    slots = slot_model(path, count=4)
    found = answers(slots, asked, [{"max_new_tokens": 8}] * len(asked))
    slots.close()

    assert [answer.tokens for answer in found] == expected


def test_a_text_ends_with_the_first_of_its_ends(pair: tuple[Any, str]) -> None:
    model, path = pair
    asked = prompts([5, 17, 40])
    whole = [alone(model, prompt, 24, eos_token_id=None) for prompt in asked]
    ends = [whole[0][6], whole[1][11]]
    expected = [alone(model, prompt, 24, eos_token_id=ends) for prompt in asked]

    slots = slot_model(path)
    found = answers(slots, asked, [{"max_new_tokens": 24, "eos_token_id": ends}] * 3)
    slots.close()

    assert [answer.tokens for answer in found] == expected
    assert len(found[0].tokens) <= 7
    assert not found[0].is_cut
