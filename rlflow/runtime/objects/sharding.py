"""The division of a batch's rows among ranks, so that all ranks finish at about the same time.

Dividing numbers into sets of nearly equal sums takes milliseconds. Shapes: B rows, K shares; N numbers, all positive,
into K sets.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Sequences
from rlflow.engines.causal_lm.micro_batches import prompt_numbers
from rlflow.resources.models.architecture import Architecture
from rlflow.resources.time.work import forward_work

Index = NDArray[np.int64]
Costs = NDArray[np.float64]

# Sums count as even when the largest exceeds its lower bound by no more than this share.
TOLERANCE = 1e-3
# Exchanges for each set, and the number of sets that the fullest one tries to exchange something with.
_EXCHANGES, _PARTNERS = 8, 8
# The most numbers that one exchange gives, or takes.
_LONGEST_RUN = 16


@dataclass(frozen=True)
class Cost:
    """The cost of a sequence of L tokens: ``token`` L + ``pair`` L^2, in any unit."""

    token: float = 1.0
    pair: float = 0.0


TOKENS = Cost()


def cost_of(model: Architecture | None) -> Cost:
    """Return the operations of a model's linear layers, and of its attention, where a token sees half of the others.

    For an unknown architecture only tokens count.
    """
    if model is None:
        return TOKENS
    work = forward_work(model)
    return Cost(token=work.dense_flops + work.expert_flops, pair=work.key_flops / 2)


def divide_rows(sequences: Sequences, count: int, cost: Cost = TOKENS) -> list[Index]:
    """Divide the rows into ``count`` shares, each in the order of the batch, so that the largest costs least.

    No share is empty when there are enough rows. The rollouts of a prompt stay together unless dividing them gains more
    than reading the prompt again costs. Rows of one unit count as one row.
    """
    prompts = prompt_numbers(sequences)
    first = np.arange(0, len(sequences), sequences.unit_size)
    costs = np.add.reduceat(row_costs(sequences, prompts, cost), first)
    prompts = prompts[first]
    prompt_costs = cost.token * sequences.prompt_ids.lengths[first].astype(np.float64)
    least, best = float("inf"), np.zeros(len(first), np.int64)
    for owners in _candidates(prompts, costs, count):
        largest = _largest_cost(owners, costs, count, prompts, prompt_costs)
        if largest < least:
            least, best = largest, owners
        if least <= (1 + TOLERANCE) * lower_bound(costs, count):
            break
    best = np.repeat(best, sequences.unit_size)[: len(sequences)]
    return [np.flatnonzero(best == share) for share in range(count)]


def row_costs(sequences: Sequences, prompts: Index, cost: Cost) -> Costs:
    """Return the cost of each row [B].

    The linear layers see a prompt once for all of its rows, which share that cost; attention sees it in each row.
    """
    shared = sequences.prompt_ids.lengths / np.bincount(prompts)[prompts]
    lengths = sequences.prompt_ids.lengths + sequences.response_ids.lengths
    return cost.token * (shared + sequences.response_ids.lengths) + cost.pair * lengths.astype(np.float64) ** 2


def _candidates(prompts: Index, costs: Costs, count: int) -> Iterator[Index]:
    """Yield assignments of rows to shares [B], from the cheapest in repeated prompts to the most even.

    First all rollouts of a prompt stay together, then all except those of about one prompt per share, then none.
    """
    totals = set_sums(prompts, costs, 0)
    if len(totals) >= count:
        yield balance(totals, count)[prompts]
    order = np.argsort(prompts, kind="stable")
    ends = np.cumsum(costs[order])
    owners = np.empty(len(costs), np.int64)
    owners[order] = ((ends - costs[order] / 2) * (count / ends[-1])).astype(np.int64).clip(max=count - 1)
    if len(np.unique(owners)) == count:
        yield improve(owners, costs, count)
    yield balance(costs, count)


def _largest_cost(owners: Index, costs: Costs, count: int, prompts: Index, prompt_costs: Costs) -> float:
    """Return the cost of the most expensive share. ``prompt_costs`` [B]: the cost of reading a row's prompt."""
    _, first, parts = np.unique(owners * (prompts.max() + 1) + prompts, return_index=True, return_inverse=True)
    # Each row's cost contains its part of reading the prompt. Where some rows of a prompt are in another share, the
    # parts of the rows here do not add up to one reading.
    present = np.bincount(parts) / np.bincount(prompts)[prompts[first]]
    missing = np.bincount(owners[first], weights=prompt_costs[first] * (1 - present), minlength=count)
    return float((set_sums(owners, costs, count) + missing).max())


def balance(costs: Costs, count: int) -> Index:
    """Return the set of each number [N]. No set is empty when there are enough numbers.

    Sets have equal counts, give or take one, unless that makes the sums uneven.
    """
    if count == 1:
        return np.zeros(len(costs), np.int64)
    differenced = _differenced(costs, count)
    if is_even(differenced, costs, count):
        return differenced
    start = min(differenced, _largest_first(costs, count), key=lambda owners: set_sums(owners, costs, count).max())
    return improve(start, costs, count)


def is_even(owners: Index, costs: Costs, count: int) -> bool:
    """Return whether the largest sum is nearly as small as possible."""
    return float(set_sums(owners, costs, count).max()) <= (1 + TOLERANCE) * lower_bound(costs, count)


def set_sums(owners: Index, costs: Costs, count: int) -> Costs:
    """Return the sum of each set [K]."""
    return np.bincount(owners, weights=costs, minlength=count).astype(np.float64)


def lower_bound(costs: Costs, count: int) -> float:
    """Return a lower bound of the largest sum.

    It is the largest of: the mean; the largest number; and for each j the sum of the j + 1 smallest of the j K + 1
    largest numbers, since some set has that many of them.
    """
    totals = np.concatenate([[0.0], np.cumsum(np.sort(costs)[::-1])])
    firsts = np.arange(0, len(costs), count)
    crowded = totals[firsts + 1] - totals[firsts - np.arange(len(firsts))]
    return max(float(totals[-1]) / count, float(crowded.max()))


def improve(owners: Index, costs: Costs, count: int) -> Index:
    """Exchange numbers between the fullest set and others until the sums are even or no exchange helps.

    Single numbers are tried first, and runs of several when single ones no longer help.
    """
    owners = owners.copy()
    enough = (1 + TOLERANCE) * lower_bound(costs, count)
    longest = 1
    for _ in range(_EXCHANGES * count):
        totals = set_sums(owners, costs, count)
        order = np.argsort(totals, kind="stable")
        fullest = order[-1]
        if totals[fullest] <= enough:
            break
        ours = np.flatnonzero(owners == fullest)
        for other in order[: min(_PARTNERS, count - 1)]:
            theirs = np.flatnonzero(owners == other)
            runs = _exchange(ours, theirs, costs, float(totals[fullest] - totals[other]), longest)
            if runs is not None:
                owners[runs[0]], owners[runs[1]] = other, fullest
                break
        else:
            if longest == _LONGEST_RUN:
                break
            longest = _LONGEST_RUN
    return owners


def _differenced(costs: Costs, count: int) -> Index:
    """Divide the numbers into sets of equal counts by differencing.

    This is the largest differencing method (Karmarkar and Karp 1982) in its balanced form for K sets (Michiels et al.
    2003). It starts with N / K partial solutions of one number per set. The two with the largest differences between
    their sums become one, the largest sum of the first joined to the smallest of the second, until one is left.
    """
    order = np.argsort(-costs, kind="stable")
    # The last partial solution is filled up with zeros.
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
    # Undo the joins, to find the set that each position of each partial solution has ended up in.
    sets = np.empty((len(solutions), count), np.int64)
    sets[-1] = np.arange(count)
    for both, first, second, by_size in reversed(joins):
        sets[first, by_size] = sets[both]
        sets[second] = sets[first, ::-1]
    owners = np.empty(members.size, np.int64)
    owners[members.ravel()] = sets[: len(members)].ravel()
    return owners[: len(costs)]


def _largest_first(costs: Costs, count: int) -> Index:
    """Assign each number, the largest first, to the set with the smallest sum so far (Graham 1969)."""
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
    """Return the numbers to give from ``ours`` and to take from ``theirs``; None when no exchange helps much.

    Both are runs of up to ``longest`` numbers of adjacent sizes. The difference of their sums is as close as possible
    to half of ``gap``, by which the sum of ``ours`` is larger.
    """
    ours, theirs = ours[np.argsort(costs[ours])], theirs[np.argsort(costs[theirs])]
    given, taken = _runs(costs[ours], longest), _runs(costs[theirs], longest)
    by_size = np.argsort(taken.sums)
    # The exchange may take nothing at all.
    sums = np.concatenate([[0.0], taken.sums[by_size], [np.inf]])
    wanted = given.sums - gap / 2
    above = np.searchsorted(sums, wanted).clip(1)
    nearest = np.where(sums[above] - wanted < wanted - sums[above - 1], above, above - 1)
    error = np.abs(sums[nearest] - wanted)
    best = int(error.argmin())
    if error[best] > (1 - TOLERANCE) * gap / 2:
        return None
    back = nearest[best] - 1
    return given.of(ours, best), taken.of(theirs, by_size[back]) if back >= 0 else theirs[:0]


class _Runs(NamedTuple):
    """Runs of adjacent numbers in a sorted array."""

    sums: Costs
    first: Index
    lengths: Index

    def of(self, members: Index, run: int) -> Index:
        return members[self.first[run] : self.first[run] + self.lengths[run]]


def _runs(costs: Costs, longest: int) -> _Runs:
    """Return all runs of 1 to ``longest`` numbers."""
    first = np.arange(len(costs))[:, None] + np.zeros(longest, np.int64)
    lengths = np.arange(1, longest + 1) + np.zeros_like(first)
    inside = first + lengths <= len(costs)
    first, lengths = first[inside], lengths[inside]
    ends = np.concatenate([[0.0], np.cumsum(costs)])
    return _Runs(ends[first + lengths] - ends[first], first, lengths)
