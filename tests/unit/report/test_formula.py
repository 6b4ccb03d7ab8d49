"""``explain=true`` prints the loss of a recipe with the recipe's numbers."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

import rlflow
from rlflow.compiler.wire import wire
from rlflow.nodes.base import Formula, Node
from rlflow.nodes.policy_update import PolicyGradient, PolicyUpdate
from rlflow.nodes.policy_variants import CispoUpdate, GspoUpdate, ReinforceUpdate
from rlflow.report.formula import loss_lines
from rlflow.report.plan_text import render
from tests.conftest import SETS_OF_RECIPES
from tests.helpers import load

GROUP = "A = (r - mean of r in the group) / (std of r in the group + 0.0001)"
TOKENS = "loss of actor = mean over the tokens of a minibatch's responses of "


def lines(recipe: str, *overrides: str) -> list[str]:
    return loss_lines(wire(load(f"recipe={recipe}", *overrides)))


@pytest.mark.parametrize(
    ("recipe", "overrides", "expected"),
    [
        (
            "grpo_tiny",
            [],
            [
                TOKENS + "[-min(w A, clip(w, 0.8, 1.2) A) + 0.001 (exp(-d) - 1 + d)]",
                "w = p / p_old",
                "p_old = p by rollouts",
                "d = log(p / p_ref)",
                "p_ref = p by reference",
                GROUP,
                "r = exact",
            ],
        ),
        (
            "gspo_tiny",
            ["graph.update.dual_clip=3"],
            [
                "loss of actor = mean over a minibatch's responses of the mean over tokens of "
                "[min(-min(w A, clip(w, 0.9997, 1.0004) A), 3 |A|)]",
                "w = exp(mean over the response of log(p / p_old))",
                "p_old = p by old_logprobs",
                GROUP,
                "r = exact",
            ],
        ),
        (
            "dapo_tiny",
            ["graph.update.entropy_coef=0.01", "graph.update.skip_truncated=true"],
            [
                "loss of actor = mean over the tokens of a minibatch's finished responses of "
                "[-min(w A, clip(w, 0.8, 1.28) A) - 0.01 H]",
                "w = p / p_old",
                "p_old = p by rollouts",
                "H = entropy of the model at the token",
                "A = (r_shaped - mean of r_shaped in the group) / (std of r_shaped in the group + 0.0001)",
                "r_shaped = r_rewards - clip((tokens - 4) / 1, 0, 1)",
                "r_rewards = exact",
            ],
        ),
        (
            "ppo_tiny",
            ["graph.advantages.gamma=0.9", "graph.value_update.clip_eps=null"],
            [
                TOKENS + "[-min(w A, clip(w, 0.8, 1.2) A)]",
                "w = p / p_old",
                "p_old = p by rollouts",
                "A = (x - mean of x) / sqrt(variance of x + 1e-08) over all tokens",
                "x = sum over the tokens from t on of 0.855^(distance to t) delta",
                "delta = r_t + 0.9 next V - V",
                "r_t = (r at the last token, 0 before) - 0.001 d_old",
                "d_old = log(p_old / p_ref)",
                "p_ref = p by reference",
                "r = exact",
                "V = the critic's value before the token, before the update",
                "loss of critic = mean over the tokens of a minibatch's responses of [(v - R)^2 / 2]",
                "v = the critic's value",
                "R = x + V, the advantage before it is normalised plus V",
            ],
        ),
        (
            "rloo_tiny",
            [],
            [
                "loss of actor = mean over a minibatch's responses of the sum over tokens of [-A log p]",
                "A = r_penalized - mean of the other r_penalized in the group",
                "r_penalized = r_rewards - 0.001 KL",
                "r_rewards = exact",
                "KL = sum of d_old over the response",
                "d_old = log(p_old / p_ref)",
                "p_old = p by rollouts",
                "p_ref = p by reference",
            ],
        ),
        (
            "dr_grpo_tiny",
            [
                "+graph.old_logprobs={node: logprobs, role: actor}",
                "graph.update.correction={level: token, outside: mask, min_ratio: 0.5, max_ratio: 5}",
            ],
            [
                "loss of actor = mean over a minibatch's responses of the sum over tokens / 5 of "
                "[c (-min(w A, clip(w, 0.8, 1.2) A))]",
                "w = p / p_old",
                "p_old = p by old_logprobs",
                "c = (p_old / p by rollouts), 0 outside of 0.5 to 5",
                "A = r - mean of r in the group",
                "r = exact",
            ],
        ),
        (
            "dpo_tiny",
            ["graph.update.beta=0.2"],
            [
                "loss of actor = mean over a minibatch's pairs of [-log sigmoid(0.2 m)]",
                "m = d of the chosen response - d of the rejected one",
                "d = sum over the response of log(p / p_ref)",
                "p_ref = p by reference",
            ],
        ),
        ("sft_tiny", [], [TOKENS + "[-log p]"]),
    ],
)
def test_the_loss_of_a_recipe(recipe: str, overrides: list[str], expected: list[str]) -> None:
    assert lines(recipe, *overrides) == expected


@pytest.mark.parametrize("recipes", SETS_OF_RECIPES)
def test_every_recipe_has_one_for_each_trained_role(recipes: list[str]) -> None:
    graphs = {recipe: wire(load(f"recipe={recipe}")) for recipe in recipes}
    losses = {
        recipe: [line.split()[2] for line in loss_lines(graph) if line.startswith("loss of ")]
        for recipe, graph in graphs.items()
    }
    assert losses == {recipe: graph.trained_roles() for recipe, graph in graphs.items()}


def test_the_stated_formula_is_what_is_computed() -> None:
    """The surrogates' expressions, read as Python, on random numbers."""
    draw = np.random.default_rng(0)
    for node in (
        PolicyUpdate(clip_eps=0.1, clip_eps_high=0.3),
        PolicyUpdate(dual_clip=1.5),
        GspoUpdate(clip_eps=0.1, dual_clip=2.0),
        CispoUpdate(clip_eps=0.3, clip_eps_high=0.4),
        ReinforceUpdate(),
    ):
        assert isinstance(node, PolicyGradient)
        for _ in range(50):
            log_ratio, advantage, old = draw.normal(size=3)
            columns = {
                name: torch.tensor([value]) for name, value in (("old_logprobs", old), ("advantages", advantage))
            }
            ours, _ = node.surrogate(torch.tensor([old + log_ratio]), {**columns, "rows": torch.zeros(1).long()})
            said = node.surrogate_formula("A").expression
            for text, code in ((" log p", " * logp"), (" A", " * A"), (", * A", ", A"), ("|A|", "* abs(A)")):
                said = said.replace(text, code)
            names = {"w": np.exp(log_ratio), "A": advantage, "logp": old + log_ratio, "clip": np.clip, "min": min}
            assert float(ours) == pytest.approx(eval(said, names | {"abs": abs}), rel=1e-6), said


def test_it_is_printed_on_demand() -> None:
    plan = rlflow.compile(load("recipe=grpo_tiny"))
    texts = []
    for explain in (False, True):
        console = Console(width=100)
        with console.capture() as printed:
            console.print(render(plan, explain=explain))
        texts.append(printed.get())
    assert "loss of actor" not in texts[0]
    assert "clip(w, 0.8, 1.2) A)" in " ".join(texts[1].split())


def test_a_node_of_ones_own_states_its_part() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Squared(PolicyUpdate, Node, kind="squared_update", unit="batch"):
        steepness: float = 3.0

        def surrogate_formula(self, advantage: str) -> Formula:
            return Formula(symbol="L", expression=f"({self.steepness:g} w - {advantage})^2", where={"w": "p / p_old"})

    assert lines("grpo_tiny", "graph.update.node=squared_update")[:2] == [
        TOKENS + "[(3 w - A)^2 + 0.001 (exp(-d) - 1 + d)]",
        "w = p / p_old",
    ]


def test_a_surrogate_that_is_overridden_alone_has_not_the_formula_of_its_base() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Other(PolicyUpdate, Node, kind="other_update", unit="batch"):
        def surrogate(self, logprobs: Any, columns: Any) -> Any:
            return -logprobs, {}

    assert lines("grpo_tiny", "graph.update.node=other_update")[0] == (
        TOKENS + "[other_update(w, A) + 0.001 (exp(-d) - 1 + d)]"
    )


def test_smoothed_labels() -> None:
    expected = "loss of actor = mean over a minibatch's pairs of [-0.9 log sigmoid(0.1 m) - 0.1 log sigmoid(0.1 (-m))]"
    assert lines("dpo_tiny", "graph.update.label_smoothing=0.1")[0] == expected


def test_a_node_without_a_formula_appears_by_name() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Unsaid(PolicyGradient, Node, kind="unsaid_update", unit="batch"):
        """Neither its surrogate nor its advantage has a formula."""

    override = "graph.advantages.node='tests.unit.runtime.test_step_not_finite:LeaveOneOut'"
    assert lines("dr_grpo_tiny", "graph.update.node=unsaid_update", "~graph.advantages.normalize", override)[0] == (
        "loss of actor = mean over a minibatch's responses of the sum over tokens / 5 of [unsaid_update(w, advantages)]"
    )
