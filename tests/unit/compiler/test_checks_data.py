"""A sequence that is longer than one of the limits is refused before anything starts, and told which."""

import pytest

import rlflow
from rlflow.errors import PlacementError, RecipeError
from tests.helpers import load

GRPO = ["recipe=grpo_7b", "data.max_prompt_tokens=512"]


def refused(*overrides: str, cluster: str = "1x8") -> str:
    with pytest.raises((PlacementError, RecipeError)) as caught:
        rlflow.compile(load(*GRPO, *overrides), cluster)
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("role", ["actor", "reference"])
def test_than_a_micro_batch(role: str) -> None:
    told = refused("graph.rollouts.max_tokens=4096", f"roles.{role}.micro_batch_tokens=4000")
    assert told.startswith(
        f"roles.{role}.micro_batch_tokens: 4000 tokens have no room for the longest sequence, which has 4608"
    )
    assert "512 in its prompt (data.max_prompt_tokens) and 4096 in its response" in told
    assert f"Fix: roles.{role}.micro_batch_tokens=4608" in told
    told = refused("graph.rollouts.max_tokens=4096", f"roles.{role}.micro_batch_tokens=4000", cluster="local")
    assert "no room for the longest sequence" in told


def test_than_the_models_positions() -> None:
    told = refused("graph.rollouts.max_tokens=40000")
    assert "prompts of 512 and responses of 40000 tokens are longer than the model's 32768 positions" in told


@pytest.mark.slow
def test_than_the_room_for_keys_and_values() -> None:
    told = refused(
        "graph.rollouts.max_tokens=32000",
        "roles.rollout.gpu_memory_utilization=0.24",
        "roles.rollout.tensor_parallel_size=1",
        "roles.rollout.pipeline_parallel_size=1",
        cluster="1x8@a100_80gb",
    )
    assert "no KV cache room for 32512 tokens" in told


@pytest.mark.parametrize("cluster", ["local", "1x8"])
def test_a_micro_batch_holds_the_longest_sequence(cluster: str) -> None:
    for longest in (100, 3000, 20000):
        plan = rlflow.compile(load(*GRPO, f"graph.rollouts.max_tokens={longest}"), cluster)
        for role in ("actor", "reference"):
            assert plan.roles[role].layout.micro_batch_tokens >= 512 + longest


def test_what_only_positions_bound_is_left_to_the_data() -> None:
    """Supervised training without expected lengths: nothing says that the data has texts as long as that."""
    lengths = ["expect.prompt_tokens=auto", "expect.response_tokens=auto"]
    sft = ["recipe=sft_tiny", "models.policy.architecture.max_position_embeddings=32768", *lengths]
    for cluster in ("local", "1x1@a100_80gb"):
        pinned = rlflow.compile(load(*sft, "roles.actor.micro_batch_tokens=4096"), cluster)
        assert pinned.roles["actor"].layout.micro_batch_tokens == 4096
    free = rlflow.compile(load(*sft), "local")
    assert free.roles["actor"].layout.micro_batch_tokens == 2048
    expecting = rlflow.compile(load(*sft, "expect.response_tokens=[9000]"), "local")
    assert expecting.roles["actor"].layout.micro_batch_tokens > 9000
    # On a GPU, whose memory is counted, there is room for longer sequences.
    assert rlflow.compile(load(*sft), "1x1@a100_80gb").roles["actor"].layout.micro_batch_tokens >= 32768
