"""Numbers into sets of nearly equal sums, in milliseconds.

Shapes: N numbers, all positive; K sets.

Which rows of a batch go to which rank.

Shapes: B rows, K shares.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Sequences
from rlflow.engines.causal_lm.micro_batches import prompts_of
from rlflow.resources.models.architecture import Architecture
from rlflow.resources.time.speed import work_of

Index = NDArray[np.int64]
Costs = NDArray[np.float64]

# Sums are even where the largest is above the least that it could be by no more than this share.
NEAR = 1e-3
# Exchanges, for each set; and sets that the fullest one tries to exchange something with.
_EXCHANGES, _PARTNERS = 8, 8
# The most numbers that are given, or taken, at once.
_AT_ONCE = 16


def balanced(costs: Costs, count: int) -> Index:
    """[N]: the set of each number. None is empty where there are numbers enough.

    Sets have equal counts, give or take one, unless these make the sums uneven.
    """
    if count == 1:
        return np.zeros(len(costs), np.int64)
    differenced = _differenced(costs, count)
    if is_even(differenced, costs, count):
        return differenced
    begun = min(differenced, _largest_first(costs, count), key=lambda owners: sums(owners, costs, count).max())
    return exchanged(begun, costs, count)


def is_even(owners: Index, costs: Costs, count: int) -> bool:
    """Whether the largest sum is nearly as small as it can be."""
    return float(sums(owners, costs, count).max()) <= (1 + NEAR) * least_possible(costs, count)


def sums(owners: Index, costs: Costs, count: int) -> Costs:
    """[K]"""
    return np.bincount(owners, weights=costs, minlength=count).astype(np.float64)


def least_possible(costs: Costs, count: int) -> float:
    """What the largest sum cannot be below: the mean, the largest number, and for each j what the j + 1 smallest of the
    j K + 1 largest numbers add up to, since some set has so many of these."""
    totals = np.concatenate([[0.0], np.cumsum(np.sort(costs)[::-1])])
    firsts = np.arange(0, len(costs), count)
    crowded = totals[firsts + 1] - totals[firsts - np.arange(len(firsts))]
    return max(float(totals[-1]) / count, float(crowded.max()))


def exchanged(owners: Index, costs: Costs, count: int) -> Index:
    """Improves on ``owners`` until the sums are even or nothing helps: the fullest set gives to another, and takes from
    it. First single numbers, and several where these help no more."""
    owners = owners.copy()
    enough = (1 + NEAR) * least_possible(costs, count)
    at_once = 1
    for _ in range(_EXCHANGES * count):
        totals = sums(owners, costs, count)
        order = np.argsort(totals, kind="stable")
        fullest = order[-1]
        if totals[fullest] <= enough:
            break
        ours = np.flatnonzero(owners == fullest)
        for other in order[: min(_PARTNERS, count - 1)]:
            theirs = np.flatnonzero(owners == other)
            runs = _exchange(ours, theirs, costs, float(totals[fullest] - totals[other]), at_once)
            if runs is not None:
                owners[runs[0]], owners[runs[1]] = other, fullest
                break
        else:
            if at_once == _AT_ONCE:
                break
            at_once = _AT_ONCE
    return owners


def _differenced(costs: Costs, count: int) -> Index:
    """In equal counts: the largest differencing method (Karmarkar and Karp 1982) in its balanced form for K sets
    (Michiels et al. 2003).

    It begins with N / K solutions of a number a set. The two whose sums are furthest apart become one, the largest sum
    of the one beside the smallest of the other, until one is left.
    """
    order = np.argsort(-costs, kind="stable")
    # The last solution is filled up with noughts.
    members = np.concatenate([order, np.full(-len(order) % count, len(costs))]).reshape(-1, count)
    solutions = list(np.append(costs, 0.0)[members])
    heap = [(solution[-1] - solution[0], at) for at, solution in enumerate(solutions)]
    heapify(heap)
    joins = []
    while len(heap) > 1:
        first, second = heappop(heap)[1], heappop(heap)[1]
        joined = solutions[first] + solutions[second][::-1]
        by_size = np.argsort(-joined, kind="stable")
        joins.append((len(solutions), first, second, by_size))
        solutions.append(joined[by_size])
        heappush(heap, (solutions[-1][-1] - solutions[-1][0], joins[-1][0]))
    # Backwards, which set each place of each solution has come to.
    sets = np.empty((len(solutions), count), np.int64)
    sets[-1] = np.arange(count)
    for both, first, second, by_size in reversed(joins):
        sets[first, by_size] = sets[both]
        sets[second] = sets[first, ::-1]
    owners = np.empty(members.size, np.int64)
    owners[members.ravel()] = sets[: len(members)].ravel()
    return owners[: len(costs)]


def _largest_first(costs: Costs, count: int) -> Index:
    """Each to the set with the smallest sum so far (Graham 1969)."""
    order = np.argsort(-costs, kind="stable")
    chosen = []
    heap = [(0.0, owner) for owner in range(count)]
    for cost in costs[order].tolist():
        total, owner = heap[0]
        chosen.append(owner)
        heapreplace(heap, (total + cost, owner))
    owners = np.empty(len(costs), np.int64)
    owners[order] = chosen
    return owners


def _exchange(ours: Index, theirs: Index, costs: Costs, gap: float, longest: int) -> tuple[Index, Index] | None:
    """What to give of ``ours`` and what to take of ``theirs``: runs of up to ``longest`` numbers that are neighbours by
    size, whose sums differ by the most nearly half of ``gap``, by which ours is larger. None where that hardly helps.
    """
    ours, theirs = ours[np.argsort(costs[ours])], theirs[np.argsort(costs[theirs])]
    given, taken = _runs(costs[ours], longest), _runs(costs[theirs], longest)
    by_size = np.argsort(taken.sums)
    # Nothing may be taken at all.
    numbers = np.concatenate([[0.0], taken.sums[by_size], [np.inf]])
    wanted = given.sums - gap / 2
    above = np.searchsorted(numbers, wanted).clip(1)
    nearest = np.where(numbers[above] - wanted < wanted - numbers[above - 1], above, above - 1)
    off = np.abs(numbers[nearest] - wanted)
    best = int(off.argmin())
    if off[best] > (1 - NEAR) * gap / 2:
        return None
    back = nearest[best] - 1
    return given.of(ours, best), taken.of(theirs, by_size[back]) if back >= 0 else theirs[:0]


class _Runs(NamedTuple):
    """Of neighbours in a sorted array."""

    sums: Costs
    first: Index
    lengths: Index

    def of(self, members: Index, run: int) -> Index:
        return members[self.first[run] : self.first[run] + self.lengths[run]]


def _runs(costs: Costs, longest: int) -> _Runs:
    """All of 1 to ``longest`` numbers."""
    first = np.arange(len(costs))[:, None] + np.zeros(longest, np.int64)
    lengths = np.arange(1, longest + 1) + np.zeros_like(first)
    inside = first + lengths <= len(costs)
    first, lengths = first[inside], lengths[inside]
    ends = np.concatenate([[0.0], np.cumsum(costs)])
    return _Runs(ends[first + lengths] - ends[first], first, lengths)


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
