"""``explain=true`` prints the loss of a recipe with the recipe's numbers."""

from collections.abc import Callable
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

TOKENS = "loss of actor = mean over the tokens of a minibatch's responses of "


def lines(recipe: str, *overrides: str) -> list[str]:
    return loss_lines(wire(load(f"recipe={recipe}", *overrides)))


def test_the_losses_of_recipes(cases: Callable[[str, Callable[..., str]], None]) -> None:
    cases("losses.txt", lambda *words: "\n".join(lines(*words)))


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

    override = "graph.advantages.node='tests.unit.runtime.test_graph_runner_not_finite:LeaveOneOut'"
    assert lines("dr_grpo_tiny", "graph.update.node=unsaid_update", "~graph.advantages.normalize", override)[0] == (
        "loss of actor = mean over a minibatch's responses of the sum over tokens / 5 of [unsaid_update(w, advantages)]"
    )
