"""Rows that a reward cannot use, which are found before the first step."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

import rlflow
from rlflow.compiler.plan import Plan
from rlflow.errors import RecipeError
from rlflow.rewards.callables import RewardTerm
from rlflow.runtime.preflight import check_rows
from tests.helpers import load
from tests.unit.rewards import library_functions

RIGHT = {"prompt": "1+1", "answer": "2"}
FUNCTIONS = library_functions.__name__
JUDGE = {"url": "http://judge/v1", "model": "judge", "prompt": "{question} {response}"}
PLAN = rlflow.compile(load("recipe=grpo_tiny"), "1x1@cpu")


def plan_of(**terms: RewardTerm) -> Plan:
    """Return a plan whose rewards are the sum of these terms."""
    nodes = tuple(
        replace(node, operation=replace(node.operation, function=None, functions=terms))  # type: ignore[call-arg]
        if node.name == "rewards"
        else node
        for node in PLAN.graph.nodes
    )
    return replace(PLAN, graph=replace(PLAN.graph, nodes=nodes))


def refused(plan: Plan, rows: Sequence[Mapping[str, Any]], held_out: Any = None) -> str:
    with pytest.raises(RecipeError) as raised:
        check_rows(plan, rows, held_out or {})
    return str(raised.value)


@pytest.mark.parametrize(
    ("term", "row", "fact"),
    [
        (RewardTerm(function="exact"), {"prompt": "1"}, "'exact' found no 'answer' in the row (missing)"),
        (RewardTerm(function="exact"), {"answer": None}, "'exact' found no 'answer' in the row (None)"),
        (RewardTerm(function="exact"), {"answer": {"value": 1}}, "'exact' cannot use 'answer' of the row"),
        (RewardTerm(function="number"), {"answer": "two"}, "'number' found no number in the row's answer 'two'"),
        (RewardTerm(function="code"), {"answer": "2"}, "'code' cannot use 'tests' of the row (ValueError: the row has"),
        (RewardTerm(function="code"), {"tests": [{"stdin": "1"}]}, "expected input and output, or call, arguments"),
        (RewardTerm(function="code"), {"tests": "not JSON"}, "'code' cannot use 'tests' of the row (JSONDecodeError"),
        (RewardTerm(function="judge", options=JUDGE), {"answer": "2"}, "'judge' found no 'question' in the row (None)"),
        (RewardTerm(function=f"{FUNCTIONS}:trl_by_task", style="trl"), RIGHT, "found no 'task' in the row"),
        (RewardTerm(function=f"{FUNCTIONS}:trl_other_column", style="trl"), RIGHT, "found no 'ground_truths' in the"),
        (RewardTerm(function=f"{FUNCTIONS}:verl_score", style="verl"), {}, "found no 'ground_truth' in the row"),
        (RewardTerm(function=f"{FUNCTIONS}:verl_by_source", style="verl"), RIGHT, "found no 'data_source' in the row"),
        (RewardTerm(function=f"{FUNCTIONS}:openrlhf_tensor", style="openrlhf"), {}, "found no 'label' in the row"),
    ],
)
def test_the_row_is_named(term: RewardTerm, row: Mapping[str, Any], fact: str) -> None:
    usable = {
        **RIGHT,
        "question": "?",
        "task": "math",
        "ground_truths": "2",
        "data_source": "lengths",
        "tests": '[{"input": "1", "output": "1"}]',
    }
    message = refused(plan_of(part=term), [usable, usable, row])
    assert message.startswith("graph.rewards.functions.part: ")
    assert fact in message
    assert ": row 2 of 'train' of " in message
    assert check_rows(plan_of(part=term), [usable], {}) == []


@pytest.mark.parametrize(
    ("name", "where"), [("", "row 1 of 'test' of 'rows.jsonl', and 1 more"), ("hard", "evaluation set 'hard'")]
)
def test_held_out_rows_are_checked_too(name: str, where: str) -> None:
    data = replace(PLAN.recipe.data, source="rows.jsonl", eval_split="test")
    message = refused(PLAN, [RIGHT], {name: (data, [RIGHT, {"prompt": "1"}, {"prompt": "1"}])})
    assert message.startswith("graph.rewards.function")
    assert where in message


def test_rows_that_may_be_left_out_are_a_warning() -> None:
    plan = plan_of(part=RewardTerm(function="exact", on_failure="exclude"))
    [warning] = check_rows(plan, [RIGHT, {"prompt": "1"}], {})
    assert warning.startswith("graph.rewards.functions.part: 'exact' found no 'answer' in the row (missing): row 1 of ")


@pytest.mark.parametrize(("function", "style"), [("verl_short", "verl"), ("openrlhf_template", "openrlhf")])
def test_a_column_that_a_function_takes_and_does_not_read_may_be_missing(function: str, style: Any) -> None:
    term = RewardTerm(function=f"{FUNCTIONS}:{function}", style=style)
    assert check_rows(plan_of(part=term), [{"prompt": "1"}], {}) == []


def test_images_are_refused_before_a_conversation() -> None:
    row = {**RIGHT, "images": ("an image",)}
    assert check_rows(PLAN, [row], {}) == []
    plan = rlflow.compile(load("recipe=calculator_tiny"), "1x1@cpu")
    assert refused(plan, [{**RIGHT, "images": ()}, row]).startswith("graph.rollouts.node: rows of 'train' of ")
