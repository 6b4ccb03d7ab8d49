"""Bytes on the edges of the graph, by hand, and against what an engine puts into the store."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rlflow.batch import Batch
from rlflow.compiler.edges import _output_bytes
from rlflow.compiler.lower import lower
from rlflow.compiler.wire import wire
from rlflow.engines.base import Sampling
from rlflow.engines.transformers import TransformersEngine
from rlflow.recipe import Recipe
from rlflow.resources.workload import Edge
from rlflow.runtime.objects import results, store
from rlflow.runtime.objects.store import Block
from tests.helpers import load, prompts, spec

LENGTHS = [
    "expect.prompt_tokens=100",
    "expect.response_tokens=[400]",
    "data.batch_size=256",
    "data.max_prompt_tokens=512",
]


def edges(*overrides: str) -> dict[str, Edge]:
    recipe: Recipe = load(*overrides)
    return {edge.name: edge for edge in lower(recipe, wire(recipe)).workload.edges}


def test_of_grpo() -> None:
    found = edges("recipe=grpo_7b", *LENGTHS)
    tokens = 256 * 8 * 400
    # Ids and logprobs of 4 bytes, a text of as many; of each sample a version, whether it ended, and its text's frame.
    assert found["rollouts"].bytes == tokens * 12 + 2048 * (4 + 1 + 15)
    assert found["reference"].bytes == tokens * 4
    assert found["rewards"].bytes == found["advantages"].bytes == 2048 * 4
    # Numbers a sample are with the controller.
    assert found["rollouts"].stored == found["rollouts"].bytes - 2048 * (4 + 1)
    assert found["rewards"].stored == 0
    # Once a prompt, whatever the group.
    assert found["prompts"].bytes == pytest.approx(256 * (100 * 8 + 64), rel=0.01)
    assert "update" not in found


def test_experts_of_tokens_are_stored_for_routing_replay() -> None:
    with_experts = ("recipe=gspo_30b_a3b", *LENGTHS, "graph.rollouts.group_size=8")
    found = edges(*with_experts)["rollouts"]
    without = edges(*with_experts, "roles.actor.routing_replay=false")["rollouts"]
    # 48 layers with 8 of 128 experts, for each token of prompts and responses.
    assert found.stored - without.stored == pytest.approx(2048 * 500 * 48 * 8, rel=1e-6)
    assert found.bytes - without.bytes == found.stored - without.stored


def test_images_are_stored_once_for_a_prompt() -> None:
    """Half of a prompt's tokens stand for images, and have no text: 4 bytes of an id, and 196 of a JPEG."""
    found = edges("recipe=grpo_7b", *LENGTHS, "expect.image_tokens=50")
    assert found["prompts"].bytes == pytest.approx(256 * (50 * 8 + 50 * 200 + 64), rel=0.01)
    assert found["rollouts"].bytes == edges("recipe=grpo_7b", *LENGTHS)["rollouts"].bytes


def test_as_many_bytes_as_an_engine_puts_into_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes are those of responses and of prompts in the store."""
    held: dict[int, Any] = {}

    def put(values: Any) -> Block:
        held[len(held)] = values
        return store.block_for(len(held) - 1, "host", len(values), values.dtype.str)

    monkeypatch.setattr(store, "fetch", held.__getitem__)
    monkeypatch.setattr(results, "put_array", put)

    def stored(of: Any) -> tuple[Any, int]:
        before = sum(values.nbytes for values in held.values())
        batch = results.put_batch(of)
        return batch, sum(values.nbytes for values in held.values()) - before

    sampling = Sampling(max_tokens=16, group_size=8)
    rows = tuple({"prompt": text, "answer": "115"} for text in ("1+2=", "45+70=", "125+300=") * 4)
    asked, of_prompts = stored(replace(prompts([4, 6, 8] * 4), rows=rows))
    out, of_rollouts = stored(TransformersEngine(spec("rollout")).generate(asked, sampling))
    lengths = out.response_ids.lengths.tolist()
    found = edges(
        "recipe=grpo_tiny",
        "data.batch_size=12",
        "graph.rollouts.group_size=8",
        "graph.rollouts.max_tokens=16",
        "expect.prompt_tokens=[4,6,8]",
        f"expect.response_tokens={lengths}",
    )
    assert of_rollouts == pytest.approx(found["rollouts"].stored, rel=0.05)
    assert of_prompts == pytest.approx(found["prompts"].stored, rel=0.25)
    assert sum(values.nbytes for values in held.values()) == of_prompts + of_rollouts


def test_prompts_are_stored_as_long_as_their_responses() -> None:
    found = edges("recipe=grpo_7b")
    assert found["prompts"].readers[0] == "rollouts"
    assert set(found["prompts"].readers) == {"rollouts", "advantages", "old_logprobs", "reference", "rewards", "update"}
    assert found["rewards"].readers == ("advantages",)
    assert (found["rollouts"].role, found["rewards"].role, found["prompts"].role) == ("rollout", None, None)


def test_values_for_each_token_stay_where_their_samples_are() -> None:
    found = edges("recipe=distill_7b_from_32b")
    assert (found["advantages"].role, found["advantages"].stored > 0) == ("rollout", True)


def test_of_supervised_training() -> None:
    found = edges("recipe=sft_tiny", "expect.prompt_tokens=[6]", "expect.response_tokens=[4]")
    assert found["examples"].bytes == 128 * (6 + 4) * 4
    assert found["examples"].readers == ("update",)


def test_a_token_that_is_a_character_is_a_byte_of_text() -> None:
    found = edges("recipe=grpo_tiny", "expect.prompt_tokens=[6]", "expect.response_tokens=[4]")
    assert found["rollouts"].stored == 1024 * (4 * (8 + 1) + 15)
    assert found["prompts"].stored == 128 * (6 * (4 + 1) + 64)


@dataclass(frozen=True, eq=False, kw_only=True)
class Own(Batch):
    """A batch as a user may write one."""

    any_float: "NDArray[np.floating[Any]]"
    plain: np.ndarray
    half: NDArray[np.float16]


def test_numbers_whose_size_is_not_said_have_eight_bytes() -> None:
    recipe = load("recipe=grpo_tiny")
    task = lower(recipe, wire(recipe)).workload.tasks[0]
    assert _output_bytes(Own, task, 1) == (0, task.samples * (8 + 8 + 2))
