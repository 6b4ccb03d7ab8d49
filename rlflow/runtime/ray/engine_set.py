"""The roles of a plan as engines: proxies over actors of Ray."""

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

from rlflow.compiler.lower import role_architecture
from rlflow.compiler.plan import Plan
from rlflow.recipe import Model
from rlflow.runtime.generation.engine_group import summary
from rlflow.runtime.generation.partial_results import Listener
from rlflow.runtime.objects.budget import Budget, check_limits, store_limits
from rlflow.runtime.objects.ray_api import wait_all
from rlflow.runtime.objects.results import RemoteCall, StoreCalls
from rlflow.runtime.objects.sharding import Cost, cost_of
from rlflow.runtime.protocols import Engines, Held, StoreUse
from rlflow.runtime.ray.actors import Actors, aside
from rlflow.runtime.ray.cluster.binding import Placed
from rlflow.runtime.ray.engine_specs import is_on_gpu
from rlflow.runtime.ray.gpu_turns import Turns
from rlflow.runtime.ray.remote_objects import Hosting
from rlflow.runtime.ray.role_proxy import RoleProxy, Workers
from rlflow.runtime.ray.watchdog import Watch
from rlflow.runtime.weights.sync import directly, through_store


class RayWorkers(Actors):
    """The workers of a role, as its proxy calls them."""

    def __init__(self, plan: Plan, role: str, model: Model, placed: Placed, store_calls: StoreCalls) -> None:
        super().__init__(plan, role, model, placed)
        self.store_calls = store_calls
        # Others have no steps to be counted. Those that train meet in exchanges, which have limits of their own.
        self._watch = Watch(lambda actor: aside(actor, "steps"), self.end) if self.concurrent else None

    def submit(self, rank: int, method: str, *arguments: Any, wanted: bool = True) -> "Future[Any]":
        return self.store_calls.call(self.remote(rank), method, *arguments, wanted=wanted)

    def remote(self, rank: int) -> RemoteCall:
        """For the store_calls: calls any method of the worker itself."""
        watch, call = self._watch, partial(self.call, rank)
        return call if watch is None else lambda *arguments: watch.over(self.actors[rank], call(*arguments))

    def copy_weights(self, source: Workers, version: int) -> float:
        """Returns the seconds of it that the slowest engine took to take them over."""
        assert isinstance(source, RayWorkers)
        if (backend := self.weight_backend) is not None:
            return directly(source, self, backend, version)
        return through_store(source, self, version)


class RayEngines(Engines):
    """Proxies over actors, and over processes that hold what is neither an engine nor the controller's."""

    def __init__(
        self,
        engines: Mapping[str, RoleProxy],
        store_calls: StoreCalls,
        hosting: Hosting,
        directory: Path,
        turns: Turns,
        replaced: Collection[str],
    ) -> None:
        """``replaced`` are the roles to which every step copies all weights."""
        super().__init__(engines)
        self._directory = directory
        self._turns = turns
        self._replaced = replaced
        self._stored: Counter[str] = Counter()
        self._steps = 0
        self.store_calls = store_calls
        self._hosting = hosting

    def measured(self, step: int) -> dict[str, float]:
        """Also writes a line of each engine and second, and of each engine that failed, into ``engines.jsonl``."""
        metrics: dict[str, float] = {}
        for role, engine in self.items():
            if engine.writing is None:
                continue
            lines, failures = engine.writing.taken_lines(), engine.writing.taken_failures()
            told = [{name: value for name, value in line.items() if value is not None} for line in lines]
            told += [{"role": role, **failure} for failure in failures]
            with (self._directory / "engines.jsonl").open("a") as file:
                file.writelines(json.dumps({"step": step, **line}) + "\n" for line in told)
            of_role = {**summary(lines), "engines/replaced": len(failures)}
            metrics |= {f"{role}/{name}": value for name, value in of_role.items()}
        # Not what an evaluation before it has put.
        stored = {edge: size for edge, size in self.store_calls.budget.drain_edge_bytes().items() if "/" not in edge}
        self._stored.update(stored)
        self._steps += 1
        return metrics | {f"store/{edge}_bytes": size for edge, size in stored.items()}

    def store_use(self) -> StoreUse:
        return StoreUse(
            edges={edge: size / self._steps for edge, size in self._stored.items()},
            peaks=self.store_calls.budget.peaks,
        )

    def heard_by(self, listener: Listener, role: str) -> AbstractContextManager[None]:
        writing = self[role].writing
        return nullcontext() if writing is None else writing.heard_by(listener)

    def done_until_copied(self, role: str) -> None:
        if role in self._replaced:
            self._turns.expire(role)

    def hosted(self, held: Held) -> Held:
        return cast(Held, self._hosting.hosted(held))


@contextmanager
def start_engines(plan: Plan, models: Mapping[str, Model], placed: Placed, directory: Path) -> Iterator[RayEngines]:
    """All engines of a plan, built at once, and stopped on exit. Raises EngineError and UserErrors."""
    limits = store_limits()
    check_limits(plan, {name: limits[host.node_id] for name, host in placed.hosts.items()})
    store_calls = StoreCalls(Budget(limits))
    workers = {
        name: RayWorkers(plan, name, models[role.model], placed, store_calls)
        for name, role in plan.recipe.roles.items()
    }
    beside, sleepers, replaced = sharing(plan), sleeping(plan), replaced_whole(plan)
    turns = Turns(workers, beside, sleepers, replaced)
    with ThreadPoolExecutor(len(workers)) as pool, ExitStack() as running:
        running.enter_context(store_calls.running())
        hosting = running.enter_context(Hosting(store_calls))
        for started in workers.values():
            running.callback(started.stop)
        apart = [role for role in workers if sleepers.isdisjoint({role, *beside[role]})]
        starting = [pool.submit(workers[role].start) for role in apart]
        for role in sorted(workers.keys() - set(apart), key=lambda role: plan.recipe.roles[role].follows is None):
            # One after another, those that write first: vLLM measures what is free, and nobody else may change it.
            workers[role].start()
            turns.rest(role)
        wait_all(starting)
        engines = {
            role: RoleProxy(role, started, plan.roles[role].layout, started.concurrent, turns, _cost(plan, role))
            for role, started in workers.items()
        }
        yield RayEngines(engines, store_calls, hosting, directory, turns, replaced)


def _cost(plan: Plan, role: str) -> Cost:
    return cost_of(role_architecture(plan.recipe, plan.graph, role))


def sharing(plan: Plan) -> dict[str, list[str]]:
    """Return for each role the others that use one of its GPUs. On CPUs there is no memory to hand over."""
    bundles = {role: set(placement.bundles) if is_on_gpu(plan) else set() for role, placement in plan.roles.items()}
    return {role: [other for other in bundles if other != role and bundles[role] & bundles[other]] for role in bundles}


def sleeping(plan: Plan) -> set[str]:
    """Return the roles that sleep while others on their GPUs work."""
    return {role for role, beside in sharing(plan).items() if beside and plan.roles[role].layout.sleeps}


def replaced_whole(plan: Plan) -> set[str]:
    """Return the roles to which every step copies all weights. Copies of adapters leave the others as they are."""
    return {copy.target for copy in plan.workload.copies if plan.recipe.lora_of(copy.target) is None}
