"""Examples that are longer than a limit are refused before an engine starts."""

from dataclasses import replace

import numpy as np
import pytest

import rlflow
from rlflow.batch import Packed
from rlflow.data.source import DataSource, make_pairs
from rlflow.errors import RecipeError
from rlflow.runtime.preflight import check_examples
from tests.helpers import load, prompts

LONG = ["models.policy.architecture.max_position_embeddings=100000"]


def check(prompt: int, response: int, *overrides: str) -> None:
    plan = rlflow.compile(load("recipe=sft_tiny", *overrides), "local")
    short = np.ones(2, np.int32)
    ids = [Packed.from_rows([short, np.ones(longest)], np.int32) for longest in (prompt, response)]
    data = DataSource(replace(plan.recipe.data, source="additions"), 0, [{}, {}], ids[0], ids[1], {"": prompts()})
    check_examples(plan, data)


def told(prompt: int, response: int, *overrides: str) -> str:
    with pytest.raises(RecipeError) as raised:
        check(prompt, response, *overrides)
    return str(raised.value)


def test_than_the_positions() -> None:
    assert told(10, 23) == (
        "data.split: the example of row 1 of 'train' of 'additions' has 33 tokens, more than the 32 positions of its "
        "model.\n  Fix: use a model with more, or remove such rows."
    )


def test_than_a_micro_batch() -> None:
    message = told(10, 60000, *LONG, "roles.actor.micro_batch_tokens=4096")
    assert "has 60010 tokens, more than the 4096" in message
    assert "tokens in a micro-batch of role actor" in message
    assert "Fix: roles.actor.micro_batch_tokens=60010, or remove such rows." in message


def test_examples_within_all_limits_pass() -> None:
    check(10, 60000, *LONG)
    check(10, 60000, *LONG, "expect.response_tokens=[10]")
    check(10, 4000, *LONG, "roles.actor.micro_batch_tokens=4096")


def check_pair(chosen: int, rejected: int, *overrides: str) -> None:
    """Check a pair whose prompt has ten tokens."""
    plan = rlflow.compile(load("recipe=dpo_tiny", *overrides), "local")
    ids = [Packed.from_rows([np.ones(2), np.ones(length)], np.int32) for length in (10, chosen, rejected)]
    source = replace(plan.recipe.data, source="additions")
    check_examples(plan, DataSource(source, 0, [{}, {}], ids[0], ids[1], {}, rejected_ids=ids[2]))


def test_a_pair() -> None:
    check_pair(22, 22)
    with pytest.raises(RecipeError) as raised:
        check_pair(5, 23)
    assert str(raised.value).startswith(
        "data.split: the longer sequence of row 1 of 'train' of 'additions' has 33 tokens, more than the 32 positions"
    )
    with pytest.raises(RecipeError) as raised:
        check_pair(20, 20, "roles.actor.micro_batch_tokens=59")
    assert str(raised.value) == (
        "data.split: the pair of row 1 of 'train' of 'additions' has 60 tokens, more than the 59 tokens in a micro-"
        "batch of role actor.\n  Fix: roles.actor.micro_batch_tokens=60, or remove such rows."
    )


def test_a_pair_that_is_held_out() -> None:
    plan = rlflow.compile(load("recipe=dpo_tiny"), "local")
    ids = Packed.from_rows([np.ones(2)], np.int32)
    held_out = make_pairs(np.zeros((1, 3), np.int64), ids, ids, Packed.from_rows([np.ones(31)], np.int32))
    source = replace(plan.recipe.data, source="additions")
    with pytest.raises(RecipeError, match=r"data\.eval_split: the longer sequence of row 0 of 'test' of 'addi"):
        check_examples(plan, DataSource(source, 0, [{}], ids, ids, {"": held_out}, rejected_ids=ids))
