"""The best layout of a role in its pool, for the memory that other roles leave."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf

from rlflow.resources.demand import Demand
from rlflow.resources.layout import Layout
from rlflow.resources.memory.phases import cached_gib
from rlflow.resources.memory.state import Terms
from rlflow.resources.planner.hosts import HostSet
from rlflow.resources.planner.pools import PoolShape, RoleChoice, Shortage
from rlflow.resources.planner.prediction.role_memory import idle_terms
from rlflow.resources.planner.prediction.task_times import task_seconds
from rlflow.resources.planner.search.engine_layouts import EngineOption, engine_options
from rlflow.resources.planner.search.model_layouts import ModelOption, model_options
from rlflow.resources.workload import Task


class LayoutSearch:
    """The layouts of one role on some GPUs with one state of its model, beside any other roles.

    Options are examined in the order of their bounds, until none of these is below the best time.
    """

    def __init__(
        self, demand: Demand, tasks: Sequence[Task], base: Layout, shape: PoolShape, host_set: HostSet
    ) -> None:
        self.base = base
        self._demand, self._tasks, self._shape, self._host_set = demand, tasks, shape, host_set
        options = (engine_options if demand.job == "serve" else model_options)(demand, tasks, base, shape, host_set)
        timed: list[tuple[float, int, ModelOption | EngineOption]] = []
        self._shortages: list[Shortage] = []
        bounds = [inf]
        for index, option in enumerate(options):
            if isinstance(option, Shortage):
                self._shortages.append(option)
            else:
                bounds.append(sum((option.fastest or option).seconds.values()))
                timed.append((option.caution * bounds[-1], index, option))
        # Among equally fast options, the first has the least tensor and sequence parallelism.
        self._options = sorted(timed, key=lambda entry: entry[:2])
        self.least_seconds = min(bounds)
        """The least time of all nodes together, with as much memory as the role can use."""
        fastest = [option for _, _, option in timed if option.fastest is None]
        self.least_node_seconds: Mapping[str, float] = {
            task.node: min((option.seconds[task.node] for option in fastest), default=inf) for task in tasks
        }
        """The least time of each node; infinite where no degrees fit."""
        self._no_option = Shortage(demand.role, inf, f"its degrees do not fit {shape.num_gpus} GPUs")
        self._best: dict[tuple[float, bool], RoleChoice | Shortage] = {}
        self._idle: dict[bool, Terms] = {}
        self._staying: dict[tuple[Layout, float, int], RoleChoice] = {}

    def idle(self, *, sleeps: bool) -> Terms:
        """Return what the role holds on shared GPUs while others work."""
        if sleeps not in self._idle:
            layout = replace(self.base, sleeps=sleeps)
            self._idle[sleeps] = idle_terms(self._demand, layout, self._shape, self._host_set)
        return self._idle[sleeps]

    def best(self, available: float, *, is_shared: bool) -> RoleChoice | Shortage:
        """Return the fastest choice with ``available`` GiB on each GPU, or the shortage of the nearest one.

        An engine on shared GPUs takes no more than its samples need.
        """
        if (available, is_shared) not in self._best:
            self._best[available, is_shared] = self._find(available, is_shared=is_shared)
        return self._best[available, is_shared]

    def staying(self, choice: RoleChoice, tokens: int) -> RoleChoice:
        """Return a choice with at most so many tokens in a micro-batch, which holds its memory all the time."""
        tokens = min(tokens, choice.layout.micro_batch_tokens)
        key = (choice.layout, choice.kv_tokens, tokens)
        if key not in self._staying:
            self._staying[key] = self._find_staying(choice, tokens)
        return self._staying[key]

    def _find_staying(self, choice: RoleChoice, tokens: int) -> RoleChoice:
        demand, model = self._demand, self._demand.architecture
        layout = replace(choice.layout, sleeps=False, stays=True)
        if demand.job == "serve" or model is None:
            speed, kv_tokens = self._host_set.speed, choice.kv_tokens
            seconds = task_seconds(demand, self._tasks, layout, speed, kv_tokens=kv_tokens)
            return replace(choice, layout=layout, idle=choice.awake, seconds=seconds)
        kept_layers = layout.kept_layers if layout.gradient_checkpointing else None
        staying = ModelOption(demand, self._tasks, self._host_set, layout, kept_layers).with_tokens(tokens)
        cached = 0.0
        if demand.job == "train":
            used = staying.layout.micro_batch_tokens
            cached = cached_gib(model, staying.layout, demand.training, used, sharp=self._host_set.sharp)
        held = {**staying.awake, "cached": cached}
        return replace(staying, awake=held, idle=held)

    def _find(self, available: float, *, is_shared: bool) -> RoleChoice | Shortage:
        best: tuple[float, int, RoleChoice] | None = None
        shortages = list(self._shortages)
        for bound, index, option in self._options:
            if best is not None:
                if (bound, index) > best[:2]:
                    break
                if (option.caution * sum(option.seconds.values()), index) > best[:2]:
                    continue
            room = available
            if is_shared and isinstance(option, EngineOption):
                room = min(available, option.enough_gib)
            choice = option.choose(room)
            if isinstance(choice, Shortage):
                shortages.append(choice)
                continue
            seconds = option.caution * sum(choice.seconds.values())
            if best is None or (seconds, index) < best[:2]:
                best = seconds, index, choice
        return best[2] if best else min(shortages, key=lambda shortage: shortage.gib, default=self._no_option)
