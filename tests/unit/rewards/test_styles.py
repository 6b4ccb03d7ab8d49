"""Functions written for TRL, verl and OpenRLHF: refused, or called as their library calls them.

The values are those that the libraries give, worked out from their sources: TRL 1.16, verl 0.7 (the reward managers
``naive`` and ``batch``) and OpenRLHF 0.9.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from rlflow.errors import RecipeError
from rlflow.nodes.reward import Reward, SummedRewards
from rlflow.rewards.base import Failure, Scored
from rlflow.rewards.callables import RewardTerm
from rlflow.rewards.fork_server import _call_batch
from rlflow.rewards.styles import JudgedResponse
from rlflow.runtime.step import metrics_of
from tests.helpers import rollouts, sequences
from tests.unit.rewards import library_functions as functions

ANSWERS: list[dict[str, Any]] = [{"prompt": "2+2", "answer": "4"}, {"prompt": "1+1", "answer": "2"}]
CHATS = [{"prompt": [{"role": "user", "content": "think"}]}] * 2
WITH_SYSTEM = [{"prompt": [{"role": role, "content": "think"}]} for role in ("system", "user")]
TASKS = [{"prompt": "2+2", "task": "math"}, {"prompt": "write", "task": "essay"}]
VERL = [
    {"data_source": "lengths", "reward_model": {"style": "rule", "ground_truth": "4"}, "extra_info": {"index": 7}},
    {"data_source": "others", "reward_model": {"style": "rule", "ground_truth": "2"}, "extra_info": {"index": 7}},
]
# The responses of the tests have the tokens 5, 6, 7 and 5, 6: the first one has ended.
LABELS = [
    {"rendered_prompt": "<|user|>2+2<|assistant|>", "special_tokens": {7: "<|end|>", 1: "<|pad|>"}, "label": "4"}
] * 2


def term(function: Callable[..., Any] | object, **fields: Any) -> RewardTerm:
    name = next(name for name, value in vars(functions).items() if value is function)
    return RewardTerm(function=f"{functions.__name__}:{name}", **fields)


def outcomes(term: RewardTerm, rows: Sequence[Mapping[str, Any]], texts: Sequence[str] = ("4", "12")) -> list[Any]:
    """Return what a worker of a pool answers."""
    loaded = term.load("reward")
    responses = [JudgedResponse(row, [5, 6, 7][: 3 - place], "stop") for place, row in enumerate(rows)]
    answer = _call_batch(loaded, texts, responses if loaded.reads_tokens else rows)
    assert isinstance(answer, list), answer
    return answer


@pytest.mark.parametrize(
    ("function", "rows", "expected"),
    [
        (functions.trl_column, ANSWERS, [1, 0]),
        (functions.trl_brief, ANSWERS, [-1, -2]),
        (functions.trl_brief, CHATS, [-1, -1]),
        (functions.trl_conversation, CHATS, [0, 0]),
        (functions.trl_by_task, TASKS, [1, None]),
        (functions.trl_tokens, ANSWERS, [3, 2]),
        (functions.trl_async, ANSWERS, [1, 2]),
        (functions.trl_metric, ANSWERS, [Scored(1, {"share_of_digits": 1})] * 2),
        (functions.trl_keyword_only, ANSWERS, [1, 2]),
        (functions.trl_nan, ANSWERS, [None, None]),
        (functions.trl_system_message, WITH_SYSTEM, [1, 0]),
        (functions.trl_object, ANSWERS, [0, 1]),
        (functions.trl_partial, ANSWERS, [0, 2]),
    ],
)
def test_a_function_for_trl(function: Any, rows: Any, expected: list[Any]) -> None:
    assert outcomes(term(function, style="trl"), rows) == expected


def test_a_completion_of_a_conversation_is_a_message() -> None:
    texts = ["<think>so</think>", "so"]
    assert outcomes(term(functions.trl_conversation, style="trl"), CHATS, texts) == [1, 0]


@pytest.mark.parametrize(
    ("function", "fields", "expected"),
    [
        (functions.verl_score, {}, [1, 0]),
        (functions.verl_dictionary, {}, [Scored(1, {"acc": 1}), Scored(1, {"acc": 1})]),
        (functions.verl_by_source, {}, [1, 7]),
        (functions.verl_options, {"options": {"bonus": 0.5}}, [1.5, 0.5]),
        (functions.verl_async, {}, [Scored(1, {}), Scored(2, {})]),
        (functions.verl_bool, {}, [1, 0]),
        (functions.verl_short, {}, [-1, -2]),
        (functions.verl_lists, {"style": "verl_batch"}, [1, 0]),
    ],
)
def test_a_function_for_verl(function: Any, fields: Any, expected: list[Any]) -> None:
    assert outcomes(term(function, **{"style": "verl", **fields}), VERL) == expected


def test_the_ground_truth_may_be_the_answer_of_the_row() -> None:
    assert outcomes(term(functions.verl_score, style="verl"), ANSWERS) == [1, 0]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (functions.openrlhf_tensor, [0, 0]),
        (functions.openrlhf_without_end, [1, 0]),
        (
            functions.openrlhf_dictionary,
            [Scored(1, {"accuracy": 1, "constant": 0.5}), Scored(0, {"accuracy": 0, "constant": 0.5})],
        ),
        (functions.openrlhf_template, [8, 2]),
    ],
)
def test_a_function_for_openrlhf(function: Any, expected: list[Any]) -> None:
    assert outcomes(term(function, style="openrlhf"), LABELS) == expected


@pytest.mark.parametrize(
    ("function", "fields", "expected"),
    [
        (functions.own_tokens, {}, [3, 2]),
        (functions.own_async, {"options": {"factor": 2.0}}, [2, 4]),
        (functions.own_none, {}, [1, None]),
        (
            functions.own_dictionary,
            {},
            [Scored(1, {"words": 1, "is_number": 1}), Scored(2, {"words": 1, "is_number": 1})],
        ),
    ],
)
def test_a_function_of_the_users_own(function: Any, fields: Any, expected: list[Any]) -> None:
    assert outcomes(term(function, **fields), ANSWERS) == expected


def test_a_dictionary_needs_a_score() -> None:
    [failure, _] = outcomes(term(functions.without_score), ANSWERS)
    assert failure == Failure("invalid", "returned a dictionary without 'score' (reward)")


@pytest.mark.parametrize(
    ("function", "fields", "message"),
    [
        (functions.trl_column, {}, "takes (completions, answer, **kwargs), as TRL calls it; expected (texts, rows)"),
        (functions.trl_brief, {}, "style: trl"),
        (functions.trl_keyword_only, {}, "style: trl"),
        (functions.trl_object, {}, "takes (completion_ids, **kwargs), as TRL calls it"),
        (functions.verl_score, {}, "style: verl}"),
        (functions.verl_lists, {}, "style: verl_batch}"),
        (functions.openrlhf_tensor, {}, "takes (queries, prompts, labels), as OpenRLHF calls it"),
        (functions.wrong_names, {}, "takes (answers, questions), expected (texts, rows), and options by name"),
        (functions.wrapped, {}, "takes (*args, **kwargs), expected (texts, rows)"),
        (functions.own_none, {"style": "trl"}, "takes (texts, rows), expected completion_ids or completions as in TRL"),
        (functions.verl_score, {"style": "openrlhf"}, "expected queries as in OpenRLHF"),
        (functions.trl_state, {"style": "trl"}, "reads 'trainer_state', and there is no trainer of TRL here"),
        (functions.trl_state_if_any, {"style": "trl"}, "reads 'trainer_state'"),
        (functions.trl_state_inside, {"style": "trl"}, "reads 'trainer_state'"),
        (functions.trl_state_in_a_part, {"style": "trl"}, "reads 'trainer_state'"),
        (functions.trl_environments, {"style": "trl"}, "needs 'environments', which it does not receive here"),
        (functions.verl_unknown, {"style": "verl"}, "needs 'tokenizer', which it does not receive here"),
        (functions.verl_score, {"style": "verl", "options": {"bonus": 1}}, "options.bonus: '"),
    ],
)
def test_a_function_that_would_be_called_in_another_way_is_refused(function: Any, fields: Any, message: str) -> None:
    with pytest.raises(RecipeError) as raised:
        term(function, **fields).load("reward")
    assert message in str(raised.value)


def test_a_reward_of_rlflow_has_no_style() -> None:
    with pytest.raises(RecipeError, match=r"^style: 'exact' is a reward of rlflow"):
        RewardTerm(function="exact", style="trl").load("reward")


def run(**terms: RewardTerm) -> SummedRewards:
    """Return the rewards of two responses, with the workers of a pool."""
    both = rollouts(sequences([2], [[1, 2]]), texts=["4", "12"])
    rewards = Reward(functions=terms).run(both)
    assert isinstance(rewards, SummedRewards)
    return rewards


def test_a_function_with_nothing_to_say_is_left_out_of_sums_and_means() -> None:
    rewards = run(some=term(functions.own_none, weight=2.0), all=term(functions.own_async))
    assert rewards.values.tolist() == [3, 2]
    metrics = metrics_of("r", rewards)
    assert (metrics["r/some/mean"], metrics["r/all/mean"], metrics["r/failed"]) == (1, 1.5, 0)


def test_a_response_that_no_function_judges_is_not_trained_on() -> None:
    rewards = run(some=term(functions.own_none), watched=term(functions.own_async, weight=0.0))
    assert np.array_equal(rewards.values, [1, np.nan], equal_nan=True)


def test_further_numbers_are_metrics() -> None:
    rewards = run(counts=term(functions.own_dictionary), judged=term(functions.own_async))
    metrics = metrics_of("r", rewards)
    assert (metrics["r/counts/words"], metrics["r/counts/mean"]) == (1, 1.5)


def test_parts_of_a_batch_may_have_different_numbers() -> None:
    counted, judged = run(all=term(functions.own_dictionary)), run(all=term(functions.own_async))
    both = SummedRewards.concatenate([judged, counted.take(np.array([1, 0]))])
    assert np.array_equal(both.details["all/words"], [np.nan, np.nan, 1, 1], equal_nan=True)
    assert metrics_of("r", both)["r/all/words"] == 1


def test_one_value_for_several_responses_is_a_failure() -> None:
    """A tensor of rewards would repeat it without a word (trl issue 6533)."""
    with pytest.raises(RecipeError, match="returned 1 values for 2 responses"):
        run(part=term(functions.trl_one_value, style="trl"))


def test_a_function_for_another_library_runs_in_a_pool() -> None:
    rewards = run(brief=term(functions.trl_brief, style="trl"), tokens=term(functions.own_tokens))
    assert rewards.parts["brief"].tolist() == [-1, -2]
    assert rewards.parts["tokens"].tolist() == [1, 2]
