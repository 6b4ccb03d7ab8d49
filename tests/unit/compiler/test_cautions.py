"""Options that are legal and probably not meant are warnings of the plan."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

import rlflow
from rlflow.batch import Prompts, Rollouts
from rlflow.compiler.cautions import graph_warnings
from rlflow.compiler.wire import wire
from rlflow.engines.base import Generates
from rlflow.nodes.base import Node, NodeView
from tests.conftest import SETS_OF_RECIPES
from tests.helpers import load

BFLOAT16 = "models.policy.dtype=bfloat16"
NODE = "+graph.old_logprobs={node: logprobs, role: actor}"


def warned(recipe: str, *overrides: str) -> list[str]:
    loaded = load(f"recipe={recipe}", *overrides)
    return list(graph_warnings(loaded, wire(loaded)))


@pytest.mark.parametrize(
    ("recipe", "overrides", "expected"),
    [
        (
            "grpo_tiny",
            ["graph.update.kl_estimator=k1"],
            "graph.update.kl_estimator: in a loss the gradient of k1 is zero on average, so it does nothing; use k2 or "
            "k3",
        ),
        (
            "grpo_tiny",
            ["overlap.max_staleness=2"],
            "graph.update.correction: is missing, and tokens are up to 2 versions old, which slows learning; add "
            "old_logprobs: {node: logprobs, role: actor} and correction: {level: token, outside: bound, "
            "max_ratio: 2}",
        ),
        (
            "rloo_tiny",
            ["graph.update.num_minibatches=2"],
            "graph.update.num_minibatches: is 2, and this loss has no ratio: from the second optimizer step on it "
            "trains on responses of an older policy as if they were its own; use 1, or policy_update",
        ),
        (
            "remax_tiny",
            ["graph.update.num_epochs=3"],
            "graph.update.num_epochs: is 3, and this loss has no ratio: from the second optimizer step on it trains on "
            "responses of an older policy as if they were its own; use 1, or policy_update",
        ),
        (
            "grpo_internvl_8b",
            ["expect.image_tokens=0"],
            "expect.image_tokens: a model can see images, for which the plan counts no time",
        ),
        (
            "grpo_tiny_cluster",
            [BFLOAT16],
            "graph.update.old_logprobs: is missing, so clipping also acts on the numerical difference between "
            "deepspeed and vllm in bfloat16; add old_logprobs: {node: logprobs, role: actor}, and perhaps a correction",
        ),
        (
            "dr_grpo_tiny",
            [BFLOAT16],
            "graph.update.old_logprobs: is missing, so clipping also acts on the numerical difference between "
            "torch and transformers in bfloat16; add old_logprobs: {node: logprobs, role: actor}, and perhaps a "
            "correction",
        ),
        (
            "rloo_tiny",
            [BFLOAT16],
            "graph.update.correction: is missing, so responses of transformers count as if torch had sampled them, "
            "which is not exact in bfloat16; add old_logprobs: {node: logprobs, role: actor} and a correction",
        ),
    ],
)
def test_options_that_are_warned_of(recipe: str, overrides: list[str], expected: str) -> None:
    assert warned(recipe, *overrides) == [expected]


@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        ("grpo_tiny", []),
        ("grpo_tiny", ["graph.update.kl_estimator=k2"]),
        ("dr_grpo_tiny", [BFLOAT16, NODE]),
        ("gspo_tiny", [BFLOAT16]),
        ("dpo_tiny", [BFLOAT16]),
        ("sft_tiny", [BFLOAT16]),
        ("rloo_tiny", ["+graph.update.num_epochs=1"]),
    ],
)
def test_what_is_not(recipe: str, overrides: list[str]) -> None:
    assert warned(recipe, *overrides) == []


def test_warnings_are_the_plans() -> None:
    plan = rlflow.compile(load("recipe=rloo_tiny", "graph.update.num_minibatches=2"))
    assert plan.prediction.warnings == tuple(warned("rloo_tiny", "graph.update.num_minibatches=2"))


@pytest.mark.parametrize("recipes", SETS_OF_RECIPES)
def test_no_recipe_of_ours_warns_of_its_own_options(recipes: list[str]) -> None:
    """The only warnings are about the number of prompts that dynamic sampling is planned for."""
    warnings = {recipe: [line for line in warned(recipe) if "expect.rounds" not in line] for recipe in recipes}
    assert {recipe: lines for recipe, lines in warnings.items() if lines} == {}


def test_a_node_of_ones_own_warns_too() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Careful(Node, kind="careful_generate", unit="sample"):
        def cautions(self, setting: NodeView) -> Iterator[str]:
            yield f"engine: is {setting.engine} in {setting.dtype}"

        def run(self, engine: Generates, prompts: Prompts) -> Rollouts:
            raise NotImplementedError

    loaded: Any = load("recipe=grpo_tiny", "+graph.more={node: careful_generate, role: rollout}")
    loaded.graph["more_rewards"] = {"node": "reward", "function": "exact", "rollouts": "more"}
    loaded.graph["advantages"]["rewards"] = "more_rewards"
    assert list(graph_warnings(loaded, wire(loaded))) == ["graph.more.engine: is transformers in float32"]
