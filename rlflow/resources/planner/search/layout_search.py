"""The best layout of a role in its pool, for the memory that other roles leave."""

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from math import inf
from typing import Protocol

from rlflow.resources.demand import Demand
from rlflow.resources.planner.confidence import TIME_ERROR
from rlflow.resources.planner.pool import Pool, PoolPolicy, RoleChoice, Shortage, idle_terms
from rlflow.resources.planner.search.engine_layouts import engine_options
from rlflow.resources.planner.search.layouts import model_options
from rlflow.resources.workload import Task


class LayoutOption(Protocol):
    """Degrees that a role may have in its pool. The rest of its layout depends on the memory that is left."""

    @property
    def seconds(self) -> Mapping[str, float]:
        """Return the least time of each node, with as much memory as the role can use."""

    @property
    def bound(self) -> Mapping[str, float]:
        """Return times that are at most ``seconds``: those of another option that is faster with enough memory."""

    @property
    def keeps_activations(self) -> bool:
        """Return whether the role is trained without gradient checkpointing."""

    def least_seconds(self, available: float) -> Mapping[str, float] | None:
        """Return the least time of each node with at most ``available`` GiB on each GPU; None if that is too little."""

    def choose(self, available: float) -> RoleChoice | Shortage:
        """Return the choice with ``available`` GiB on each GPU."""


class LayoutSearch:
    """The layouts of one role in a pool under one policy.

    Options are examined in the order of their least times, until none of these is below the best time.
    """

    def __init__(self, demand: Demand, tasks: Sequence[Task], policy: PoolPolicy, pool: Pool) -> None:
        self.idle_gib = sum(idle_terms(demand, policy, pool).values())
        generates = demand.generates and not demand.trains
        found = (engine_options if generates else model_options)(demand, tasks, policy, pool)
        options: list[tuple[float, int, LayoutOption, bool]] = []
        self._shortages: list[tuple[float, int, Shortage]] = []
        for index, option in enumerate(found):
            if isinstance(option, Shortage):
                self._shortages.append((option.gib, index, option))
            else:
                options.append((_cautious(option.bound, option), index, option, False))
        # Among equally fast options, the first has the least tensor and sequence parallelism.
        self._options = sorted(options, key=lambda each: each[:2])
        self._no_way = Shortage(demand.role, inf, f"its degrees do not fit {pool.gpus} GPUs")
        self._best: dict[float, RoleChoice | Shortage] = {}
        self.seconds = {task.node: min((each[2].bound[task.node] for each in options), default=inf) for task in tasks}
        """The least time of each node, with as much memory as the role can use."""

    def best(self, available: float) -> RoleChoice | Shortage:
        """Return the fastest choice with ``available`` GiB on each GPU, or the shortage of the nearest one."""
        if available not in self._best:
            self._best[available] = self._find(available)
        return self._best[available]

    def _find(self, available: float) -> RoleChoice | Shortage:
        best: tuple[float, int, RoleChoice] | None = None
        shortages = list(self._shortages)
        heap = list(self._options)
        while heap:
            least, index, option, is_own = heappop(heap)
            if best is not None and (least, index) > best[:2]:
                break
            if best is not None and not is_own:
                heappush(heap, (_cautious(option.seconds, option), index, option, True))
                continue
            choice = option.choose(available)
            if isinstance(choice, Shortage):
                shortages.append((choice.gib, index, choice))
                continue
            seconds = _cautious(choice.seconds, option)
            if best is None or (seconds, index) < best[:2]:
                best = seconds, index, choice
        if best is not None:
            return best[2]
        return min(shortages, key=lambda each: each[:2])[2] if shortages else self._no_way

    def least_seconds(self, available: float, known: Mapping[str, float]) -> Mapping[str, float]:
        """Return the least time of each node with ``available`` GiB on each GPU, or the one that is ``known``."""
        least = known
        for _, _, option, _ in self._options:
            if _improves(option.bound, least) and _improves(option.seconds, least):
                found = option.least_seconds(available) or least
                least = {node: min(seconds, found[node]) for node, seconds in least.items()}
        return least


def _improves(seconds: Mapping[str, float], least: Mapping[str, float]) -> bool:
    return any(seconds[node] < value for node, value in least.items())


def _cautious(seconds: Mapping[str, float], option: LayoutOption) -> float:
    """Return the sum of seconds, plus the error of predicted times where an update keeps all activations.

    Gradient checkpointing saves memory for certain, and costs time only as far as the prediction is right.
    """
    return sum(seconds.values()) * (1 + TIME_ERROR * option.keeps_activations)
