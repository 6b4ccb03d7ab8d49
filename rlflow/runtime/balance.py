"""Numbers into sets of nearly equal sums, in milliseconds.

Shapes: N numbers, all positive; K sets.
"""

from heapq import heapify, heappop, heappush, heapreplace

import numpy as np
from numpy.typing import NDArray

Index = NDArray[np.int64]
Costs = NDArray[np.float64]
Mask = NDArray[np.bool_]

# Sums are even where the largest is above the least that it could be by no more than this share.
NEAR = 1e-3
# Exchanges, for each set; and sets that the fullest one tries to exchange something with.
_EXCHANGES, _PARTNERS = 8, 8


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
    """Improves on ``owners`` until the sums are even or nothing helps: the fullest set gives a number to another, for
    one of that set's or for none."""
    owners = owners.copy()
    enough = (1 + NEAR) * least_possible(costs, count)
    for _ in range(_EXCHANGES * count):
        totals = sums(owners, costs, count)
        order = np.argsort(totals, kind="stable")
        fullest = order[-1]
        if totals[fullest] <= enough:
            break
        for other in order[: min(_PARTNERS, count - 1)]:
            pair = _exchange(owners == fullest, owners == other, costs, float(totals[fullest] - totals[other]))
            if pair is not None:
                owners[pair[0]], owners[pair[1]] = other, fullest
                break
        else:
            break
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
    owners = np.empty(len(costs), np.int64)
    heap = [(0.0, owner) for owner in range(count)]
    for at in np.argsort(-costs, kind="stable"):
        total, owners[at] = heap[0]
        heapreplace(heap, (total + costs[at], int(owners[at])))
    return owners


def _exchange(ours: Mask, theirs: Mask, costs: Costs, gap: float) -> tuple[Index, Index] | None:
    """A number of ``ours`` [N] and one or none of ``theirs``: their difference is the nearest to half of ``gap``, by
    which our sum is larger. None where that makes it hardly better."""
    given, taken = np.flatnonzero(ours), np.flatnonzero(theirs)
    taken = taken[np.argsort(costs[taken])]
    # To take none is to take a nought.
    numbers = np.concatenate([[0.0], costs[taken], [np.inf]])
    wanted = costs[given] - gap / 2
    right = np.searchsorted(numbers, wanted).clip(1)
    nearest = np.where(numbers[right] - wanted < wanted - numbers[right - 1], right, right - 1)
    off = np.abs(numbers[nearest] - wanted)
    best = int(off.argmin())
    if off[best] > (1 - NEAR) * gap / 2:
        return None
    return given[best : best + 1], taken[nearest[best] - 1 : nearest[best]] if nearest[best] else taken[:0]
