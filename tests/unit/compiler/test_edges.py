"""Bytes on the edges of the graph, by hand, and against the arrays of a batch of just those lengths."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import rlflow
from rlflow.batch import Batch, Packed, Rollouts
from rlflow.compiler.edges import _output_bytes
from rlflow.compiler.graph import wire
from rlflow.compiler.lower import lower
from rlflow.recipe import Recipe
from rlflow.resources.workload import Edge

LENGTHS = [
    "expect.prompt_tokens=100",
    "expect.response_tokens=[400]",
    "data.batch_size=256",
    "data.max_prompt_tokens=512",
]


def edges(*overrides: str) -> dict[str, Edge]:
    recipe: Recipe = rlflow.load([*overrides])
    return {edge.name: edge for edge in lower(recipe, wire(recipe)).workload.edges}


def test_of_grpo() -> None:
    found = edges("recipe=grpo_7b", *LENGTHS)
    tokens = 256 * 8 * 400
    # Ids, logprobs and versions of 4 bytes, a text of as many; of each sample whether it ended, and its text's frame.
    assert found["rollouts"].bytes == tokens * 16 + 2048 * (1 + 15)
    assert found["reference"].bytes == tokens * 4
    assert found["rewards"].bytes == found["advantages"].bytes == 2048 * 4
    # Numbers a sample are with the controller.
    assert found["rollouts"].stored == found["rollouts"].bytes - 2048
    assert found["rewards"].stored == 0
    # Once a prompt, whatever the group.
    assert found["prompts"].bytes == pytest.approx(256 * (100 * 8 + 64), rel=0.01)
    assert "update" not in found


def test_as_many_bytes_as_the_arrays_have() -> None:
    predicted = edges("recipe=grpo_7b", *LENGTHS)["rollouts"].bytes
    count, length = 2048, 400
    packed = {name: Packed.from_rows([np.zeros(length)] * count, "int32") for name in ("response_ids", "versions")}
    rollouts = Rollouts(
        keys=np.zeros((count, 3), np.int64),
        prompt_ids=Packed.from_rows([np.zeros(100)] * count, "int32"),
        logprobs=Packed.from_rows([np.zeros(length)] * count, "float32"),
        finished=np.ones(count, np.bool_),
        temperature=1.0,
        texts=("word" * length,) * count,
        rows=({},) * count,
        **packed,
    )
    columns = (rollouts.response_ids, rollouts.logprobs, rollouts.versions)
    held = sum(column.values.nbytes for column in columns) + sum(map(len, rollouts.texts)) + rollouts.finished.nbytes
    assert predicted == pytest.approx(held, rel=0.01)


def test_prompts_are_needed_as_long_as_what_was_written_to_them() -> None:
    found = edges("recipe=grpo_7b")
    assert found["prompts"].readers[0] == "rollouts"
    assert set(found["prompts"].readers) == {"rollouts", "advantages", "reference", "rewards", "update"}
    assert found["rewards"].readers == ("advantages",)
    assert (found["rollouts"].role, found["rewards"].role, found["prompts"].role) == ("rollout", None, None)


def test_of_supervised_training() -> None:
    found = edges("recipe=sft_tiny", "expect.prompt_tokens=[6]", "expect.response_tokens=[4]")
    assert found["examples"].bytes == 128 * (6 + 4) * 4
    assert found["examples"].readers == ("update",)


def test_a_token_that_is_a_character_is_a_byte_of_text() -> None:
    found = edges("recipe=grpo_tiny", "expect.prompt_tokens=[6]", "expect.response_tokens=[4]")
    assert found["rollouts"].stored == 1024 * (4 * (12 + 1) + 15)
    assert found["prompts"].stored == 128 * (6 * (4 + 1) + 64)


@dataclass(frozen=True, eq=False, kw_only=True)
class Own(Batch):
    """As a user may write one."""

    any_float: "NDArray[np.floating[Any]]"
    plain: np.ndarray
    half: NDArray[np.float16]


def test_numbers_whose_size_is_not_said_have_eight_bytes() -> None:
    recipe = rlflow.load(["recipe=grpo_tiny"])
    task = lower(recipe, wire(recipe)).workload.tasks[0]
    assert _output_bytes(Own, task, 1) == (0, task.samples * (8 + 8 + 2))
