"""The best layout of a role in its pool, for the memory that other roles leave."""

from collections.abc import Sequence
from math import inf

from rlflow.resources.demand import Demand
from rlflow.resources.layout import Layout
from rlflow.resources.planner.confidence import TIME_ERROR
from rlflow.resources.planner.pools import Pool, RoleChoice, Shortage
from rlflow.resources.planner.prediction.role_memory import idle_terms
from rlflow.resources.planner.search.engine_layouts import EngineOption, engine_options
from rlflow.resources.planner.search.model_layouts import ModelOption, model_options
from rlflow.resources.workload import Task


class LayoutSearch:
    """The layouts of one role in a pool, given what the pool's policy decides.

    Options are examined in the order of their bounds, until none of these is below the best time.
    """

    def __init__(self, demand: Demand, tasks: Sequence[Task], base: Layout, pool: Pool) -> None:
        idle = idle_terms(demand, base, pool)
        self.idle_gib = sum(idle.values())
        self.base = base
        self._demand = demand
        options = (engine_options if demand.job == "serve" else model_options)(demand, tasks, base, idle, pool)
        timed: list[tuple[float, int, ModelOption | EngineOption]] = []
        self._shortages: list[Shortage] = []
        bounds = [inf]
        for index, option in enumerate(options):
            if isinstance(option, Shortage):
                self._shortages.append(option)
            else:
                bounds.append(sum((option.fastest or option).seconds.values()))
                timed.append((self._cautious(bounds[-1], option.layout), index, option))
        # Among equally fast options, the first has the least tensor and sequence parallelism.
        self._options = sorted(timed, key=lambda entry: entry[:2])
        self.least_seconds = min(bounds)
        """The least time of all nodes together, with as much memory as the role can use."""
        fastest = [option.fastest or option for _, _, option in timed]
        self.least_node_seconds = {
            task.node: min((option.seconds[task.node] for option in fastest), default=inf) for task in tasks
        }
        """The least time of each node; infinite where no degrees fit."""
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
        for bound, index, option in self._options:
            if best is not None:
                if (bound, index) > best[:2]:
                    break
                if (self._cautious(sum(option.seconds.values()), option.layout), index) > best[:2]:
                    continue
            choice = option.choose(available)
            if isinstance(choice, Shortage):
                shortages.append(choice)
                continue
            seconds = self._cautious(sum(choice.seconds.values()), option.layout)
            if best is None or (seconds, index) < best[:2]:
                best = seconds, index, choice
        return best[2] if best else min(shortages, key=lambda shortage: shortage.gib, default=self._no_option)

    def _cautious(self, seconds: float, layout: Layout) -> float:
        """Return the seconds, plus the error of predicted times as far as an update keeps activations.

        Gradient checkpointing saves memory for certain, and costs time only as far as the prediction is right.
        """
        model = self._demand.architecture
        if self._demand.job != "train" or model is None:
            return seconds
        return seconds * (1 + TIME_ERROR * (1 - layout.recomputed_share(model.num_hidden_layers)))
