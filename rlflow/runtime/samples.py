"""Samples of each step for people to read: what the model wrote, and how it was judged."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Advantages, Conversations, Rewards, RolloutAdvantages, Rollouts
from rlflow.batch.sample import Choice, Sample, SampleTurn
from rlflow.compiler.graph import Graph
from rlflow.data.source import DataSource
from rlflow.nodes.reward import SummedRewards
from rlflow.runtime.objects.store_usage import count_towards


class SampleReader:
    """A reader of a few samples from each step of a run: the best, the worst, and one drawn at random."""

    def __init__(self, graph: Graph, data: DataSource, seed: int) -> None:
        """Read samples that the nodes of ``graph`` generate and judge; ``data`` decodes their tokens."""
        self._data, self._seed = data, seed
        # The inputs of each node that reads rollouts, by its name; one of them computes the advantages.
        self._inputs = {node.name: node.inputs for node in graph.nodes if "rollouts" in node.inputs}

    def read(self, step: int, node: str, output: Any, edges: Mapping[str, Any]) -> list[Sample]:
        """Return the samples of a step if this output of a node is their advantages, else none.

        ``step`` counts from 0; ``edges`` holds the inputs of the node.
        """
        inputs = self._inputs.get(node, {})
        if not isinstance(output, Advantages) or not set(inputs.values()) <= edges.keys() or not len(output):
            return []
        rollouts: Rollouts = edges[inputs["rollouts"]]
        rewards: Rewards | None = edges[inputs["rewards"]] if "rewards" in inputs else None
        # A response without tokens has no version and no advantage to show.
        present = np.flatnonzero(rollouts.response_ids.lengths)
        if not len(present):
            return []
        values = np.full(len(rollouts), np.nan) if rewards is None else rewards.values
        chosen = choose(values[present], [self._seed, step])
        rows = present[list(chosen.values())]
        rollouts, advantages = rollouts.take(rows), output.take(rows)
        rewards = None if rewards is None else rewards.take(rows)
        with count_towards("samples"):
            texts = self._data.texts(rollouts.as_sequences())
            images = [()] * len(rows) if rollouts.images is None else self._data.thumbnails(rollouts.as_sequences())
        return [
            Sample(
                choice=choice,
                step=step + 1,
                prompt_number=int(rollouts.keys[row, 1]),
                sample_number=int(rollouts.keys[row, 2]),
                prompt=prompt,
                response=response,
                length=int(rollouts.response_ids.lengths[row]),
                finished=bool(rollouts.finished[row]),
                reward=None if rewards is None else _known(rewards.values[row]),
                reward_parts=_parts(rewards, row),
                advantage=_known(advantages.values[row][0]) if isinstance(advantages, RolloutAdvantages) else None,
                oldest_version=int(rollouts.versions[row].min()),
                newest_version=int(rollouts.versions[row].max()),
                images=images[row],
                turns=tuple(_turns(rollouts, row)),
                turn_seconds=_turn_seconds(rollouts, row),
            )
            for row, (choice, (prompt, response)) in enumerate(zip(chosen, texts, strict=True))
        ]


def _turns(rollouts: Rollouts, row: int) -> Iterator[SampleTurn]:
    """Yield the parts of a response that has several."""
    if not isinstance(rollouts, Conversations):
        return
    turns, rewards = rollouts.turn.take(np.array([row])), rollouts.turn_rewards[row]
    segments = None if rollouts.response_segments is None else rollouts.response_segments[row]
    ends = np.cumsum(turns.run_lengths).tolist()
    for turn, tokens, end in zip(turns.run_values.tolist(), turns.run_lengths.tolist(), ends, strict=True):
        if tokens:
            yield SampleTurn(
                role="environment" if turn < 0 else "model",
                segment=0 if segments is None else int(segments[end - 1]),
                tokens=tokens,
                reward=float(rewards[turn]) if 0 <= turn < len(rewards) else None,
            )


def _turn_seconds(rollouts: Rollouts, row: int) -> tuple[tuple[float, float], ...]:
    if not isinstance(rollouts, Conversations) or rollouts.turn_seconds is None:
        return ()
    seconds = rollouts.turn_seconds[row].astype(float).round(3).tolist()
    return tuple(zip(seconds[::2], seconds[1::2], strict=True))


def choose(rewards: NDArray[np.floating[Any]], seed: Sequence[int]) -> dict[Choice, int]:
    """Return the rows of the samples to read, given the rewards [B]: NaN for samples without one.

    No sample is best or worst where all known rewards are equal. ``seed`` determines the random sample.
    """
    chosen: dict[Choice, int] = {"random": int(np.random.default_rng(seed).integers(len(rewards)))}
    known = np.flatnonzero(~np.isnan(rewards))
    if len(known) and rewards[known].min() < rewards[known].max():
        chosen |= {"best": int(np.nanargmax(rewards)), "worst": int(np.nanargmin(rewards))}
    return chosen


def _parts(rewards: Rewards | None, row: int) -> dict[str, float | None]:
    parts = rewards.parts if isinstance(rewards, SummedRewards) else {}
    return {name: _known(values[row]) for name, values in parts.items()}


def _known(value: float) -> float | None:
    """Return the number, or None for NaN."""
    return None if np.isnan(value) else float(value)
