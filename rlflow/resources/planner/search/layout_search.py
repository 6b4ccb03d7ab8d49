"""The best layout of a role in its pool, for the memory that other roles leave."""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Protocol

from rlflow.resources.demand import Demand
from rlflow.resources.layout import Layout
from rlflow.resources.planner.confidence import TIME_ERROR
from rlflow.resources.planner.pools import Pool, RoleChoice, Shortage
from rlflow.resources.planner.prediction.role_memory import idle_terms
from rlflow.resources.planner.search.engine_layouts import engine_options
from rlflow.resources.planner.search.model_layouts import model_options
from rlflow.resources.workload import Task


class LayoutOption(Protocol):
    """Degrees that a role may have in its pool. The rest of its layout depends on the memory that is left."""

    @property
    def seconds(self) -> Mapping[str, float]:
        """Return the least time of each node, with as much memory as the role can use."""

    @property
    def bound(self) -> float:
        """Return at most the sum of ``seconds``: that of another option which is faster with enough memory."""

    @property
    def keeps_activations(self) -> bool:
        """Return whether the role is trained without gradient checkpointing."""

    def choose(self, available: float) -> RoleChoice | Shortage:
        """Return the choice with ``available`` GiB on each GPU."""


class LayoutSearch:
    """The layouts of one role in a pool, given what the pool's policy decides.

    Options are examined in the order of their bounds, until none of these is below the best time.
    """

    def __init__(self, demand: Demand, tasks: Sequence[Task], base: Layout, pool: Pool) -> None:
        idle = idle_terms(demand, base, pool)
        self.idle_gib = sum(idle.values())
        options = (engine_options if demand.job == "serve" else model_options)(demand, tasks, base, idle, pool)
        timed: list[tuple[float, int, LayoutOption]] = []
        self._shortages: list[Shortage] = []
        for index, option in enumerate(options):
            if isinstance(option, Shortage):
                self._shortages.append(option)
            else:
                timed.append((_cautious(option.bound, option), index, option))
        # Among equally fast options, the first has the least tensor and sequence parallelism.
        self._options = sorted(timed, key=lambda entry: entry[:2])
        self.least_seconds = min((option.bound for _, _, option in timed), default=inf)
        """The least time of all nodes together, with as much memory as the role can use."""
        self._no_option = Shortage(demand.role, inf, f"its degrees do not fit {pool.shape.num_gpus} GPUs")
        self._best: dict[float, RoleChoice | Shortage] = {}

    def best(self, available: float) -> RoleChoice | Shortage:
        """Return the fastest choice with ``available`` GiB on each GPU, or the shortage of the nearest one."""
        if available not in self._best:
            self._best[available] = self._find(available)
        return self._best[available]

    def _find(self, available: float) -> RoleChoice | Shortage:
        best: tuple[float, int, RoleChoice] | None = None
        shortages = list(self._shortages)
        for least, index, option in self._options:
            if best is not None and (least, index) > best[:2]:
                break
            if best is not None and (_cautious(sum(option.seconds.values()), option), index) > best[:2]:
                continue
            choice = option.choose(available)
            if isinstance(choice, Shortage):
                shortages.append(choice)
                continue
            seconds = _cautious(sum(choice.seconds.values()), option)
            if best is None or (seconds, index) < best[:2]:
                best = seconds, index, choice
        return best[2] if best else min(shortages, key=lambda shortage: shortage.gib, default=self._no_option)


def _cautious(seconds: float, option: LayoutOption) -> float:
    """Return the seconds, plus the error of predicted times where an update keeps all activations.

    Gradient checkpointing saves memory for certain, and costs time only as far as the prediction is right.
    """
    return seconds * (1 + TIME_ERROR * option.keeps_activations)
