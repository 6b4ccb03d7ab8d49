"""Recipes that train on pairs: their roles, their work, and what is refused."""

import pytest

import rlflow
from rlflow.compiler.lower import lower
from rlflow.compiler.wire import wire
from rlflow.errors import UserError
from rlflow.recipe import Recipe
from tests.helpers import load

LENGTHS = ["expect.prompt_tokens=100", "expect.response_tokens=[400]", "data.max_prompt_tokens=512"]


def loaded(name: str, *overrides: str) -> Recipe:
    return load(f"recipe={name}", *overrides)


def test_what_a_reward_model_is_asked() -> None:
    graph = wire(loaded("rm_7b"))
    assert graph.trained_roles() == ["reward"]
    assert graph.capabilities("reward") == {"Trains", "Evaluates"}
    assert graph.sources == {"pairs"}
    assert (graph.evaluation_metric, wire(loaded("grpo_tiny")).evaluation_metric) == ("accuracy", "reward")


@pytest.mark.parametrize(("name", "kinds"), [("dpo_7b", ["score", "update"]), ("rm_7b", ["update"])])
def test_the_work_of_a_step(name: str, kinds: list[str]) -> None:
    """Both responses to a prompt share it, and a pass has room for both."""
    recipe = loaded(name, *LENGTHS, "data.batch_size=64")
    workload = lower(recipe, wire(recipe)).workload
    assert [task.kind for task in workload.tasks] == kinds
    for task in workload.tasks:
        assert (task.samples, task.group_size, task.unit_size, task.longest) == (128, 2, 2, 2 * (512 + 400))
    edges = {edge.name: edge.bytes for edge in workload.edges}
    assert edges["pairs"] == pytest.approx(128 * (100 + 400) * 4, rel=0.01)


@pytest.mark.parametrize(
    ("name", "override", "message"),
    [
        (
            "dpo_7b",
            "roles.actor.micro_batch_tokens=1000",
            "roles.actor.micro_batch_tokens: 1000 tokens have no room for the longest pair, which has 1824: "
            "twice 512 in its prompt (data.max_prompt_tokens) and twice 400 in its response.\n"
            "  Free: 8 GPUs.\n  Fix: roles.actor.micro_batch_tokens=1824.",
        ),
        (
            "rm_7b",
            "roles.reward.engine=transformers",
            "roles.reward.engine: 'transformers' cannot do what graph.update needs, Evaluates and Trains; "
            "it can Follows, Generates, Scores, ScoresTop.\n"
            "  Known: deepspeed, fake, fsdp, torch.\n  Fix: one of the known engines.",
        ),
        (
            "dpo_7b",
            "graph.reference.rollouts=prompts",
            "graph.reference.rollouts: 'prompts' gives Prompts, 'logprobs' reads Sequences.\n"
            "  Fix: name a node that gives Sequences.",
        ),
        (
            "sft_tiny",
            "evaluation={every: 1, num_prompts: 1}",
            "evaluation: needs a node that generates, and a node that gives Rewards and reads its responses alone.\n"
            "  Fix: add rewards: {node: reward}, or evaluation=null.",
        ),
    ],
)
def test_what_is_refused(name: str, override: str, message: str) -> None:
    with pytest.raises(UserError) as raised:
        rlflow.compile(loaded(name, *([] if name == "sft_tiny" else LENGTHS), override), "1x8")
    assert str(raised.value) == message
