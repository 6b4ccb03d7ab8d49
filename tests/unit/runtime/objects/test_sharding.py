"""Rows to ranks."""

from dataclasses import replace

import numpy as np
import pytest

from rlflow.batch import Packed, Sequences
from rlflow.engines.causal_lm.micro_batches import prompt_numbers
from rlflow.runtime.objects.sharding import Cost, Index, cost_of, divide_rows, row_costs, set_sums
from tests.helpers import ARCHITECTURE, keys, sequences


def batch(prompts: int, samples: int, seed: int = 0) -> Sequences:
    """Return rows with lengths as of reasoning models, alike within a prompt. All tokens are zero."""
    draw = np.random.default_rng(seed)
    spread = 0.8 * (0.7 * draw.normal(size=(prompts, 1)) + 0.7 * draw.normal(size=(prompts, samples)))
    response = np.exp(7 + spread).clip(1, 8192).astype(np.int64).ravel()
    prompt = np.repeat(draw.integers(50, 800, prompts), samples)
    return Sequences(keys=keys(prompts, samples), prompt_ids=blank(prompt), response_ids=blank(response))


def blank(lengths: Index) -> Packed:
    return Packed(np.zeros(lengths.sum(), np.int32), np.concatenate([[0], np.cumsum(lengths)]))


def owners_of(parts: list[Index]) -> Index:
    owners = np.empty(sum(map(len, parts)), np.int64)
    for share, rows in enumerate(parts):
        owners[rows] = share
    return owners


def over_mean(given: Sequences, parts: list[Index], cost: Cost) -> float:
    costs = row_costs(given, prompt_numbers(given), cost)
    return float(set_sums(owners_of(parts), costs, len(parts)).max() * len(parts) / costs.sum() - 1)


def readings(given: Sequences, parts: list[Index]) -> int:
    """Return how many prompts all ranks read together."""
    return sum(len(np.unique(given.keys[rows, 1])) for rows in parts)


def test_every_row_once_in_the_order_of_the_batch() -> None:
    parts = divide_rows(sequences([3, 2, 4, 1, 5], [[1, 2], [9], [4, 4, 4], [1], [2]]), 3)
    assert sorted(np.concatenate(parts).tolist()) == list(range(8))
    assert all((np.diff(part) > 0).all() for part in parts)


def test_the_rollouts_of_a_prompt_stay_together() -> None:
    """Tokens by prompt: 3 + 2 x 5 = 13, 3 + 2 x 1 = 5, 3 + 2 x 2 = 7; so 13 against 5 + 7."""
    parts = divide_rows(sequences([3, 3, 3], [[5, 5], [1, 1], [2, 2]]), 2)
    assert [part.tolist() for part in parts] == [[0, 1], [2, 3, 4, 5]]


def test_they_do_wherever_they_stand_in_the_batch() -> None:
    given = batch(64, 8)
    mixed = given.take(np.random.default_rng(0).permutation(len(given)))
    assert readings(mixed, divide_rows(mixed, 2)) == 64


def test_fewer_prompts_than_shares_are_cut() -> None:
    parts = divide_rows(sequences([2], [[6, 1, 1, 1]]), 2)
    assert [part.tolist() for part in parts] == [[0], [1, 2, 3]]


def test_fewer_rows_than_shares_leave_some_empty() -> None:
    assert sorted(part.tolist() for part in divide_rows(sequences([2], [[6]]), 3)) == [[], [], [0]]


def test_pairs_of_tokens_cost_too() -> None:
    """One row of 1 + 7 tokens has 64 pairs and 8 tokens; eight rows of 1 + 1 tokens have 32 pairs and 16 tokens."""
    given = sequences([1] * 9, [[7], *[[1]] * 8])
    tokens, pairs = divide_rows(given, 2), divide_rows(given, 2, Cost(token=0, pair=1))
    assert sorted(len(part) for part in tokens) == [3, 6]
    assert sorted(len(part) for part in pairs) == [1, 8]


def test_a_prompt_costs_once_where_its_rollouts_share_it() -> None:
    given = sequences([4, 6], [[2, 1], [3]])
    expected = [1 * (2 + 2) + 0.5 * 36, 1 * (2 + 1) + 0.5 * 25, 1 * (6 + 3) + 0.5 * 81]
    assert row_costs(given, prompt_numbers(given), Cost(1, 0.5)).tolist() == expected


def test_the_cost_of_a_model_is_its_operations() -> None:
    """A token: q, k, v and o of 4 and 2 heads of 32, three matrices of 16 x 32, in two layers, and the head of 13; a
    pair: half of the products of queries with keys and of their weights with values, in two layers."""
    layer = 16 * 32 * (4 + 2 + 2 + 4) + 3 * 16 * 32
    cost = cost_of(ARCHITECTURE)
    assert cost.token == pytest.approx(2 * (2 * layer + 13 * 16), rel=0.03), "norms count as well"
    assert cost.pair == 2 * 2 * (4 * 32)
    assert cost_of(None) == Cost(1, 0)


@pytest.mark.parametrize(
    ("prompts", "samples", "count", "most_readings"),
    [
        (8192, 1, 128, 8192),
        (1024, 8, 128, 1024 + 2 * 128),
        (512, 16, 128, 512 + 3 * 128),
        (256, 16, 8, 256 + 16),
        (256, 16, 100, 256 + 3 * 100),
    ],
)
def test_shares_are_even_and_few_prompts_are_divided(
    prompts: int, samples: int, count: int, most_readings: int
) -> None:
    given, cost = batch(prompts, samples), Cost(24576, 1)
    parts = divide_rows(given, count, cost)
    assert over_mean(given, parts, cost) <= 0.001
    assert readings(given, parts) <= most_readings


def test_reading_prompts_again_may_cost_more_than_it_saves() -> None:
    """Two prompts of 1000 tokens with responses of 1 and 9 each: together 1010 tokens in each share; each row by
    itself, half of them in each share would be 2 x 1000 + 10."""
    given = sequences([1000, 1000], [[1, 9], [1, 12]])
    assert readings(given, divide_rows(given, 2)) == 2


def test_rows_that_are_compared_stay_on_one_rank() -> None:
    """Rows alone would be 9 and 1 + 9 and 1."""
    given = replace(sequences([1, 1], [[9, 1], [9, 1]]), unit_size=2)
    assert [part.tolist() for part in divide_rows(given, 2)] == [[0, 1], [2, 3]]
    many = replace(batch(64, 2), unit_size=2)
    parts = divide_rows(many, 8)
    assert sorted(np.concatenate(parts).tolist()) == list(range(128))
    assert all((part[0::2] + 1 == part[1::2]).all() and not (part[0::2] % 2).any() for part in parts)
    # More ranks than pairs.
    assert sorted(map(len, divide_rows(given, 3))) == [0, 2, 2]
