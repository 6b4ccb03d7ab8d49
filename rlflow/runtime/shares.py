"""Which rows of a batch go to which rank.

Shapes: B rows, K shares.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rlflow.batch import Sequences
from rlflow.resources.models.architecture import Architecture
from rlflow.resources.time.work import work_of
from rlflow.runtime.balance import Costs, balanced, exchanged, is_even, sums
from rlflow.runtime.balance import Index as Index


@dataclass(frozen=True)
class Cost:
    """Of a sequence of L tokens: ``token`` L + ``pair`` L^2, in any unit."""

    token: float = 1.0
    pair: float = 0.0


def cost_of(model: Architecture | None) -> Cost:
    """Operations of a model's linear layers, and of its attention, where a token meets half of the others in the mean.

    Tokens alone count for a model whose figures are not known.
    """
    if model is None:
        return Cost()
    work = work_of(model)
    return Cost(token=work.dense_flops + work.expert_flops, pair=work.key_flops / 2)


def shares(sequences: Sequences, count: int, cost: Cost = Cost()) -> list[Index]:
    """``count`` sets of rows, each in the order of the batch, of nearly equal cost. None is empty where there are rows
    enough.

    The rollouts of a prompt stay together as far as that costs no balance, since their rank reads the prompt once.
    """
    prompts = prompts_of(sequences)
    costs = row_costs(sequences, prompts, cost)
    tried = []
    for owners in _together(prompts, costs, count):
        tried.append(owners)
        if is_even(owners, costs, count):
            break
    else:
        again = cost.token * sequences.prompt_ids.lengths.astype(np.float64)
        tried.append(balanced(costs, count))
        owners = min(tried, key=lambda owners: _largest(owners, costs, count, prompts, again))
    return [np.flatnonzero(owners == share) for share in range(count)]


def prompts_of(sequences: Sequences) -> Index:
    """[B]: the number of each row's prompt, counted from 0 in the order of keys."""
    steps, prompts = sequences.keys[:, 0], sequences.keys[:, 1]
    # As one number, which sorts ten times as fast as two.
    both = (steps - steps.min()) * (prompts.max() + 1) + prompts
    return np.unique(both, return_inverse=True)[1]


def row_costs(sequences: Sequences, prompts: Index, cost: Cost) -> Costs:
    """[B]: the linear layers see a prompt once for all of its rows, which share its cost; attention sees it in each."""
    shared = sequences.prompt_ids.lengths / np.bincount(prompts)[prompts]
    whole = sequences.prompt_ids.lengths + sequences.response_ids.lengths
    return cost.token * (shared + sequences.response_ids.lengths) + cost.pair * whole.astype(np.float64) ** 2


def _together(prompts: Index, costs: Costs, count: int) -> Iterator[Index]:
    """All rollouts of a prompt in one share, then with as many prompts divided as there are shares, and a few more."""
    totals = sums(prompts, costs, 0)
    if len(totals) >= count:
        yield balanced(totals, count)[prompts]
    order = np.argsort(prompts, kind="stable")
    ends = np.cumsum(costs[order])
    owners = np.empty(len(costs), np.int64)
    owners[order] = ((ends - costs[order] / 2) * (count / ends[-1])).astype(np.int64).clip(max=count - 1)
    if len(np.unique(owners)) == count:
        yield exchanged(owners, costs, count)


def _largest(owners: Index, costs: Costs, count: int, prompts: Index, again: Costs) -> float:
    """What the slowest rank computes, where prompts are divided: ``again`` [B] is what it costs to read one once."""
    _, first, parts = np.unique(owners * (prompts.max() + 1) + prompts, return_index=True, return_inverse=True)
    present = np.bincount(parts) / np.bincount(prompts)[prompts[first]]
    read = np.bincount(owners[first], weights=again[first] * (1 - present), minlength=count)
    return float((sums(owners, costs, count) + read).max())
