"""Which rows of a batch go to which rank.

Shapes: B rows, K shares.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rlflow.batch import Sequences
from rlflow.engines.causal_lm.micro_batches import prompts_of
from rlflow.resources.models.architecture import Architecture
from rlflow.resources.time.work import work_of
from rlflow.runtime.data_plane.balance import NEAR, Costs, balanced, exchanged, least_possible, sums
from rlflow.runtime.data_plane.balance import Index as Index


@dataclass(frozen=True)
class Cost:
    """Of a sequence of L tokens: ``token`` L + ``pair`` L^2, in any unit."""

    token: float = 1.0
    pair: float = 0.0


TOKENS = Cost()


def cost_of(model: Architecture | None) -> Cost:
    """Operations of a model's linear layers, and of its attention, where a token meets half of the others in the mean.

    Tokens alone count for a model whose figures are not known.
    """
    if model is None:
        return TOKENS
    work = work_of(model)
    return Cost(token=work.dense_flops + work.expert_flops, pair=work.key_flops / 2)


def shares(sequences: Sequences, count: int, cost: Cost = TOKENS) -> list[Index]:
    """``count`` sets of rows, each in the order of the batch, such that the slowest rank computes as little as can be.
    None is empty where there are rows enough.

    The rollouts of a prompt stay together unless dividing them gains more than reading the prompt again costs. Rows
    that must be ``together`` are as one row.
    """
    prompts = prompts_of(sequences)
    first = np.arange(0, len(sequences), sequences.together)
    costs = np.add.reduceat(row_costs(sequences, prompts, cost), first)
    prompts = prompts[first]
    reading = cost.token * sequences.prompt_ids.lengths[first].astype(np.float64)
    least, best = float("inf"), np.zeros(len(first), np.int64)
    for owners in _ways(prompts, costs, count):
        slowest = _slowest(owners, costs, count, prompts, reading)
        if slowest < least:
            least, best = slowest, owners
        if least <= (1 + NEAR) * least_possible(costs, count):
            break
    best = np.repeat(best, sequences.together)[: len(sequences)]
    return [np.flatnonzero(best == share) for share in range(count)]


def row_costs(sequences: Sequences, prompts: Index, cost: Cost) -> Costs:
    """[B]: the linear layers see a prompt once for all of its rows, which share its cost; attention sees it in each."""
    shared = sequences.prompt_ids.lengths / np.bincount(prompts)[prompts]
    whole = sequences.prompt_ids.lengths + sequences.response_ids.lengths
    return cost.token * (shared + sequences.response_ids.lengths) + cost.pair * whole.astype(np.float64) ** 2


def _ways(prompts: Index, costs: Costs, count: int) -> Iterator[Index]:
    """[B]: the share of each row. First all rollouts of a prompt stay together, then all but those of about as many
    prompts as there are shares, then they go anywhere."""
    totals = sums(prompts, costs, 0)
    if len(totals) >= count:
        yield balanced(totals, count)[prompts]
    order = np.argsort(prompts, kind="stable")
    ends = np.cumsum(costs[order])
    owners = np.empty(len(costs), np.int64)
    owners[order] = ((ends - costs[order] / 2) * (count / ends[-1])).astype(np.int64).clip(max=count - 1)
    if len(np.unique(owners)) == count:
        yield exchanged(owners, costs, count)
    yield balanced(costs, count)


def _slowest(owners: Index, costs: Costs, count: int, prompts: Index, reading: Costs) -> float:
    """What the rank computes that computes most. ``reading`` [B] is what it costs to read a row's prompt."""
    _, first, parts = np.unique(owners * (prompts.max() + 1) + prompts, return_index=True, return_inverse=True)
    # Rows have their part of a reading each; where some of a prompt's rows are elsewhere, the others have too little.
    present = np.bincount(parts) / np.bincount(prompts)[prompts[first]]
    missing = np.bincount(owners[first], weights=reading[first] * (1 - present), minlength=count)
    return float((sums(owners, costs, count) + missing).max())
