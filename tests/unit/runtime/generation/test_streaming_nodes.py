"""Parts of a generation in random order, with engines that fail: all nodes give what they give for the whole batch."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.batch import Rewards, Rollouts
from rlflow.compiler.graph import Graph
from rlflow.nodes.advantages import GroupAdvantage, LeaveOneOutAdvantage
from rlflow.nodes.base import GraphNode, Node
from rlflow.nodes.dynamic_sampling import DynamicSampling
from rlflow.nodes.generate import Generate
from rlflow.nodes.reward_shaping import KlPenalty, OverlongPenalty
from rlflow.runtime.generation.streaming_nodes import StreamingNodes, merged
from rlflow.runtime.objects.store import StoredColumn, block_for
from tests.helpers import prompts, rollouts, sequences

PROMPTS, GROUP = 6, 3
JUDGED = {"rollouts": "rollouts", "rewards": "shaped"}


@dataclass(frozen=True, kw_only=True)
class MeanIds(Node, kind="mean_of_ids", unit="sample"):
    def run(self, rollouts: Rollouts) -> Rewards:
        return Rewards(values=np.array([rollouts.response_ids[row].mean() for row in range(len(rollouts))], np.float32))


def node(name: str, operation: Any, inputs: Mapping[str, str]) -> GraphNode:
    return GraphNode(name=name, operation=operation, role="rollout" if name == "rollouts" else None, inputs=inputs)


GENERATE = node("rollouts", Generate(max_tokens=9, group_size=GROUP), {"prompts": "prompts"})
REWARDS = node("rewards", MeanIds(), {"rollouts": "rollouts"})
NODES = (
    REWARDS,
    node("shaped", OverlongPenalty(max_tokens=9, buffer_tokens=9), {"rollouts": "rollouts", "rewards": "rewards"}),
    node("advantages", GroupAdvantage(), JUDGED),
    node("other", LeaveOneOutAdvantage(), JUDGED),
    node("sampling", DynamicSampling(), JUDGED),
)


def run(each: GraphNode, edges: Mapping[str, Any]) -> Any:
    operation: Any = each.operation
    return operation.run(**{name: edges[origin] for name, origin in each.inputs.items()})


def values(edges: Mapping[str, Any]) -> dict[str, bytes]:
    advantages = {name: edges[name].values for name in ("advantages", "other")}
    return {
        "rewards": edges["rewards"].values.tobytes(),
        "shaped": edges["shaped"].values.tobytes(),
        "sampling": edges["sampling"].chosen.tobytes(),
        **{name: each.run_values.tobytes() + each.run_lengths.tobytes() for name, each in advantages.items()},
    }


@dataclass(frozen=True, eq=False, kw_only=True)
class Counted(Rewards):
    differing: float


@dataclass(frozen=True, kw_only=True)
class Counting(Node, kind="rewards_with_a_count", unit="group"):
    def run(self, rollouts: Rollouts) -> Counted:
        raise NotImplementedError


def test_nodes_with_a_state_or_a_number_for_the_batch_do_not_stream() -> None:
    """Neither do those that read them."""
    counting = node("counted", Counting(), {"rollouts": "rollouts"})
    after_counting = node("shaped", OverlongPenalty(max_tokens=9, buffer_tokens=9), {**JUDGED, "rewards": "counted"})
    assert Graph(nodes=(GENERATE, counting, after_counting)).streaming_consumers(GENERATE) == ()
    stateful = node("penalized", KlPenalty(kl_coef=0.1, kl_target=1.0), {"rewards": "rewards", "kl": "rewards"})
    after = node("advantages", GroupAdvantage(), {"rollouts": "rollouts", "rewards": "penalized"})
    assert Graph(nodes=(GENERATE, *NODES)).streaming_consumers(GENERATE) == NODES
    assert Graph(nodes=(GENERATE, REWARDS, stateful, after)).streaming_consumers(GENERATE) == (REWARDS,)


@pytest.mark.slow
@given(seed=st.integers(0, 1000), events=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5)), max_size=20))
@settings(max_examples=20)
def test_random_parts_and_failures_change_no_bit(seed: int, events: list[tuple[int, int]]) -> None:
    """An event is some finished samples of an engine, or with 0 its failure. Each engine has responses of its own."""
    draw = np.random.default_rng(seed)
    lengths = tuple(map(tuple, draw.integers(1, 10, (PROMPTS, GROUP)).tolist()))
    made = Rollouts.concatenate([rollouts(sequences((2,) * PROMPTS, lengths, seed=rank)) for rank in range(3)])
    owner = draw.integers(0, 3, PROMPTS * GROUP)
    waiting = {rank: draw.permutation(np.flatnonzero(owner == rank)).tolist() for rank in range(3)}
    with StreamingNodes(GENERATE, NODES, run, prompts((2,) * PROMPTS)) as stream:
        for rank, count in events:
            if rank not in waiting:
                continue
            if count:
                rows, waiting[rank] = waiting[rank][:count], waiting[rank][count:]
                if rows:
                    stream.receive(rank, made.take(np.array(rows) + rank * PROMPTS * GROUP))
            elif len(waiting) > 1:
                del waiting[rank]
                stream.discard_engine(rank)
                waiting[min(waiting)] += np.flatnonzero(owner == rank).tolist()
                owner[owner == rank] = min(waiting)
        stream.end()
        whole = made.take(np.arange(PROMPTS * GROUP) + owner * PROMPTS * GROUP)
        edges: dict[str, Any] = {"rollouts": whole}
        for each in NODES:
            edges[each.name], _ = stream.output(each, edges)
    expected: dict[str, Any] = {"rollouts": whole}
    for each in NODES:
        expected[each.name] = run(each, expected)
    assert values(edges) == values(expected)


@dataclass(frozen=True, kw_only=True)
class Meeting(MeanIds, kind="mean_of_ids_of_two_hosts", unit="sample"):
    """Two parts must be worked on at the same time."""

    both = threading.Barrier(2)

    def run(self, rollouts: Rollouts) -> Rewards:
        self.both.wait(60)
        return Rewards(values=rollouts.keys[:, 1].astype(np.float32))


def test_hosts_work_side_by_side_and_each_on_one_part_after_another() -> None:
    """The hosts wait for each other, so the test fails after a minute otherwise."""
    made = rollouts(sequences((2,) * PROMPTS, ((1,) * GROUP,) * PROMPTS))
    judged = node("rewards", Meeting(), {"rollouts": "rollouts"})
    threads = []

    def run_in_thread(each: GraphNode, edges: Mapping[str, Any]) -> Any:
        threads.append(threading.get_ident())
        return run(each, edges)

    with StreamingNodes(GENERATE, (judged,), run_in_thread, prompts((2,) * PROMPTS)) as stream:
        for place, rows in enumerate(np.array_split(np.arange(PROMPTS * GROUP), 4)):
            lengths = np.ones(len(rows), np.int64)
            ids = StoredColumn.of(block_for(object(), "ab"[place % 2], len(rows), "<i4"), lengths)
            stream.receive(place % 2, replace(made.take(rows), response_ids=ids))
        stream.end()
        output, _ = stream.output(judged, {"rollouts": made})
    assert output.values.tolist() == made.keys[:, 1].tolist()
    assert len(threads) == 4
    assert len(set(threads)) == 2


def test_a_node_is_busy_while_any_host_is() -> None:
    assert merged([(7.0, 8.0), (0.0, 4.0), (1.0, 2.0), (3.0, 5.0)]) == [(0.0, 5.0), (7.0, 8.0)]
