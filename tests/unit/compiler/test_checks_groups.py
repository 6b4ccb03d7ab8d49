"""Nodes that compare responses to a prompt need several of them, and a greedy baseline is greedy."""

import pytest

import rlflow
from rlflow.errors import GraphError
from tests.helpers import load

COMPARES = "compares the responses to a prompt, but group_size is 1"


@pytest.mark.parametrize(
    ("recipe", "override", "message"),
    [
        ("grpo_tiny", "graph.rollouts.group_size=1", "graph.advantages: " + COMPARES),
        ("rloo_tiny", "graph.rollouts.group_size=1", "graph.advantages: " + COMPARES),
        (
            "reinforce_plus_plus_baseline_tiny",
            "graph.rollouts.group_size=1",
            "graph.advantages: " + COMPARES,
        ),
        (
            "ppo_tiny",
            "+graph.sampling={node: dynamic_sampling}",
            "graph.sampling: " + COMPARES,
        ),
        ("remax_tiny", "graph.greedy.group_size=4", "graph.greedy.group_size: is 4, but input 'greedy'"),
        ("remax_tiny", "graph.greedy.temperature=1", "graph.greedy.temperature: is 1.0, but input 'greedy'"),
    ],
)
def test_what_is_refused(recipe: str, override: str, message: str) -> None:
    with pytest.raises(GraphError) as raised:
        rlflow.compile(load(f"recipe={recipe}", override), "local")
    assert str(raised.value).startswith(message)


def test_pairs_are_nothing_else() -> None:
    fit = "+graph.fit={node: sft_update, role: actor}"
    with pytest.raises(GraphError, match=r"^graph\.fit: it reads examples, and other nodes read pairs"):
        rlflow.compile(load("recipe=dpo_tiny", fit), "local")
