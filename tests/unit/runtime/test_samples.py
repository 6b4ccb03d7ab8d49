"""Samples of a step that people read: the best, the worst and a random one, with what the run knows of them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlflow
from rlflow.batch import Packed, Repeated, Rewards, RolloutAdvantages, Sequences
from rlflow.batch.sample import Sample, SampleTurn
from rlflow.nodes.reward import SummedRewards
from rlflow.report.records import SampleLog, read_lines
from rlflow.runtime.samples import SampleReader, choose
from tests.helpers import conversations, load, rollouts, sequences

NAN = float("nan")


class Numbers:
    """Stands for the data source; the text of a token is its number."""

    def texts(self, given: Sequences) -> list[tuple[str, str]]:
        columns = (given.prompt_ids, given.response_ids)
        return [(f"{columns[0][row].tolist()}", f"{columns[1][row].tolist()}") for row in range(len(given))]


def read(rewards: Sequence[float], step: int = 0) -> dict[str, Sample]:
    """Return the samples of a step with two prompts and three responses to each."""
    data: Any = Numbers()
    reader = SampleReader(rlflow.compile(load("recipe=grpo_tiny"), "1x1@cpu").graph, data, seed=0)
    generated = rollouts(sequences((3, 2), ((1, 2, 3), (4, 5, 6))))
    lengths = generated.response_ids.lengths
    versions = Repeated(
        np.array([0, 0, 0, 0, 0, 0, 1], np.int32), np.array([1, 2, 3, 4, 5, 2, 4]), np.array([1] * 5 + [2])
    )
    finished = np.array([True] * 5 + [False])
    edges = {
        "rollouts": replace(generated, versions=versions, finished=finished),
        "rewards": SummedRewards(
            values=np.array(rewards, np.float32),
            parts={
                "exact": np.array([reward / 2 for reward in rewards], np.float32),
                "short": np.array([1, 1, 1, 1, 1, NAN], np.float32),
            },
            details={},
            reasons=np.array([""] * 6),
        ),
    }
    advantages = RolloutAdvantages(values=Repeated(np.array([0.5, -0.5, NAN, 1, 2, 3], np.float32), lengths))
    assert not reader.read(step, "rewards", edges["rewards"], edges), "only advantages complete the judgement"
    return {sample.choice: sample for sample in reader.read(step, "advantages", advantages, edges)}


def test_the_best_and_the_worst_of_a_step_have_their_texts_and_judgements() -> None:
    found = read([0.0, -1.0, NAN, 0.5, 1.0, 4.0], step=6)
    generated = rollouts(sequences((3, 2), ((1, 2, 3), (4, 5, 6))))
    best, worst = found["best"], found["worst"]
    assert best == Sample(
        choice="best",
        step=7,
        prompt_number=1,
        sample_number=2,
        prompt=str(generated.prompt_ids[5].tolist()),
        response=str(generated.response_ids[5].tolist()),
        length=6,
        finished=False,
        reward=4.0,
        reward_parts={"exact": 2.0, "short": None},
        advantage=3.0,
        oldest_version=0,
        newest_version=1,
    )
    assert (worst.prompt_number, worst.sample_number, worst.reward, worst.advantage) == (0, 1, -1.0, -0.5)
    assert found["random"].step == 7


def test_a_conversation_has_its_turns() -> None:
    """Three tokens, two of the environment, and one in the same segment; then one in another, for which it waited."""
    data: Any = Numbers()
    reader = SampleReader(rlflow.compile(load("recipe=grpo_tiny"), "1x1@cpu").graph, data, seed=0)
    generated = replace(
        conversations([[[3, 2, 1, 0, 4]]], [[0.0, 0.5, 1.0]]),
        response_segments=Repeated(np.array([0, 1], np.int32), np.array([6, 4]), np.array([2])),
        turn_seconds=Packed.from_rows([[0.1, 1.0, 0.0, 0.25, 2.0, 1.5]], np.float32),
    )
    advantages = RolloutAdvantages(values=Repeated(np.array([0], np.float32), generated.response_ids.lengths))
    edges = {"rollouts": generated, "rewards": Rewards(values=np.array([1.5], np.float32))}
    [sample] = reader.read(0, "advantages", advantages, edges)
    assert sample.turns == (
        SampleTurn("model", 0, 3, 0.0),
        SampleTurn("environment", 0, 2, None),
        SampleTurn("model", 0, 1, 0.5),
        SampleTurn("model", 1, 4, 1.0),
    )
    assert sample.turn_seconds == ((0.1, 1.0), (0.0, 0.25), (2.0, 1.5))


def test_a_response_without_tokens_is_never_a_sample() -> None:
    data: Any = Numbers()
    reader = SampleReader(rlflow.compile(load("recipe=grpo_tiny"), "1x1@cpu").graph, data, seed=0)
    generated = rollouts(sequences((3,), ((0, 2, 3),)))
    rewards = Rewards(values=np.array([-9, 0, 1], np.float32))
    advantages = RolloutAdvantages(values=Repeated(np.array([0, 1, 2], np.float32), generated.response_ids.lengths))
    found = reader.read(0, "advantages", advantages, {"rollouts": generated, "rewards": rewards})
    assert {sample.choice: sample.reward for sample in found if sample.choice != "random"} == {
        "best": 1.0,
        "worst": 0.0,
    }
    empty = np.array([0])
    edges = {"rollouts": generated.take(empty), "rewards": rewards.take(empty)}
    assert reader.read(0, "advantages", advantages.take(empty), edges) == []


def test_a_sample_without_a_reward_is_neither_best_nor_worst() -> None:
    assert set(choose(np.array([NAN, NAN]), [0])) == {"random"}
    assert set(choose(np.array([1.0, NAN, 1.0]), [0])) == {"random"}, "equal rewards have no best one"
    chosen = choose(np.array([NAN, 2.0, 1.0]), [0])
    assert (chosen["best"], chosen["worst"]) == (1, 2)


def test_random_samples_follow_from_the_seed_and_reach_every_row() -> None:
    drawn = [choose(np.full(4, NAN), [3, step])["random"] for step in range(64)]
    assert drawn == [choose(np.full(4, NAN), [3, step])["random"] for step in range(64)]
    assert set(drawn) == {0, 1, 2, 3}


@pytest.mark.parametrize("text", ["line\nbreak", "\u2028 and \x85", "\x1b[31m", "\u4e2d"])
def test_any_text_is_one_line_of_the_file(text: str, tmp_path: Path) -> None:
    sample = replace(read([0.0] * 6)["random"], response=text)
    plan: Any = None
    log = SampleLog()
    log.started(plan, tmp_path, 0)
    log.sampled([sample, replace(sample, step=2)])
    again = SampleLog()
    again.started(plan, tmp_path, 1)
    [line] = read_lines(tmp_path / "samples.jsonl")
    assert (line["step"], line["response"], line["advantage"]) == (1, text, sample.advantage)
    assert "\x1b" not in (tmp_path / "samples.jsonl").read_text()
