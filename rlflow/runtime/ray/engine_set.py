"""All engines of a plan on Ray, and the objects beside them."""

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

from rlflow.compiler.models import role_architecture
from rlflow.compiler.plan import Plan
from rlflow.engines.journal import journal_folder
from rlflow.engines.memory import FULLEST
from rlflow.engines.times import Span
from rlflow.nodes.generate import Generate
from rlflow.recipe import Model
from rlflow.runtime.engine_specs import is_on_gpu
from rlflow.runtime.generation.engine_group import slow_engines, summarize_activity
from rlflow.runtime.objects.ray_api import wait_all
from rlflow.runtime.objects.sharding import cost_of
from rlflow.runtime.objects.store_usage import StoreUsage
from rlflow.runtime.protocols import Engines, Lost, StoreUse, Subscriber, T
from rlflow.runtime.ray.cluster.binding import BoundPlan
from rlflow.runtime.ray.cluster.hosts import host_names
from rlflow.runtime.ray.cluster.services import RayServices
from rlflow.runtime.ray.gpu_turns import GpuTurns, gpu_neighbors, replaced_roles, roles_in_order, sleeping_roles
from rlflow.runtime.ray.remote_objects import DividedNode, RemoteObjects
from rlflow.runtime.ray.role_proxy import RoleProxy
from rlflow.runtime.ray.role_workers import RoleWorkers
from rlflow.runtime.ray.waits import Waits
from rlflow.runtime.ray.watchdog import Watchdog
from rlflow.runtime.weights.sync import busy_ranks
from rlflow.system.text_files import append_lines


@contextmanager
def start_engines(plan: Plan, models: Mapping[str, Model], bound: BoundPlan, directory: Path) -> Iterator["RayEngines"]:
    """Start all engines of a plan at once, and stop them on exit. Raises EngineError and UserErrors."""
    store_usage = StoreUsage(host_names(bound.hosts))
    services = RayServices(bound.hosts)
    watchdog = Watchdog(services)
    objects = RemoteObjects(store_usage, Waits.from_plan(plan), watchdog, simulated=bound.simulated)
    journal = journal_folder(directory.absolute())
    workers = {
        name: RoleWorkers(plan, name, models[role.model], bound, store_usage, watchdog, journal)
        for name, role in plan.recipe.roles.items()
    }
    engines = RayEngines(plan, directory, workers, objects, store_usage, services, watchdog)
    hosts = _hosts_with_samples(plan, bound)
    divided = [node.operation for node in plan.graph.nodes if node.runs_on_every_host]
    with ThreadPoolExecutor(len(divided) or 1) as pool, ExitStack() as running:
        running.enter_context(watchdog.running())
        running.enter_context(objects)
        for role_workers in workers.values():
            running.callback(role_workers.stop)
        checking = [pool.submit(objects.check_hosts, node, hosts) for node in divided]
        engines.start(workers)
        wait_all(checking)
        yield engines


def _hosts_with_samples(plan: Plan, bound: BoundPlan) -> set[str]:
    """Return the hosts on which engines generate, by the ids of their Ray nodes."""
    roles = [str(node.role) for node in plan.graph.nodes if isinstance(node.operation, Generate)]
    workers = [worker for role in roles for worker in plan.roles[role].workers]
    return {bound.hosts[worker.bundles[0].host].node_id for worker in workers}


class RayEngines(Engines):
    """A proxy for the engines of each role, and remote objects beside them."""

    def __init__(
        self,
        plan: Plan,
        directory: Path,
        workers: Mapping[str, RoleWorkers],
        remote_objects: RemoteObjects,
        store_usage: StoreUsage,
        services: RayServices,
        watchdog: Watchdog,
    ) -> None:
        """Stand for the ``workers`` of each role, which ``start`` starts."""
        self._plan, self._directory, self._workers = plan, directory, workers
        self._remote_objects, self.store_usage = remote_objects, store_usage
        self._services, self._watchdog = services, watchdog
        awake = {role for role, placement in plan.roles.items() if placement.layout.receives_awake}
        self._turns = GpuTurns(workers, gpu_neighbors(plan), sleeping_roles(plan), replaced_roles(plan), awake)
        for role, role_workers in workers.items():
            self._turns.stopped(role)
            self[role] = self._proxy(role, role_workers)
        self._replaced = replaced_roles(plan)
        self._stored: Counter[str] = Counter()
        self._num_steps = 0
        self._warnings: list[str] = []
        self._slow: set[tuple[str, int]] = set()
        """The engines that were slow in the last step."""

    def _proxy(self, role: str, workers: RoleWorkers) -> RoleProxy:
        recipe, graph = self._plan.recipe, self._plan.graph
        cost = cost_of(role_architecture(recipe, graph, role))
        is_frozen = role not in graph.trained_roles() and recipe.roles[role].follows is None
        layout = self._plan.roles[role].layout
        return RoleProxy(role, workers, layout, workers.concurrent, self._turns, cost, is_frozen=is_frozen)

    def start(self, roles: Collection[str]) -> None:
        """Start the workers of some roles, at the same time where that does not change what others measure."""

        def start(role: str) -> None:
            self._turns.make_room(role)
            self._workers[role].start()
            self._turns.started(role)

        declared, in_order = self._plan.recipe.roles, roles_in_order(self._plan)
        taking_turns = {role for role, neighbors in gpu_neighbors(self._plan).items() if neighbors}
        independent = [role for role in roles if role not in in_order]
        with ThreadPoolExecutor(len(roles) or 1) as pool:
            starting = [pool.submit(start, role) for role in independent]
            for role in sorted(set(roles) - set(independent), key=lambda role: declared[role].follows is None):
                # One after another, those that generate first: vLLM measures the free memory, which must not change.
                start(role)
                if role in taking_turns:
                    self._turns.release(role)
            wait_all(starting)

    def step_metrics(self, step: int) -> dict[str, float]:
        """Return the metrics of a step, and append the engines' activity and failures to ``engines.jsonl``."""
        metrics: dict[str, float] = {}
        for role, engine in self.items():
            failures = engine.take_failures()
            activity = engine.engine_group.take_activity() if engine.engine_group else []
            lines = [{name: value for name, value in line.items() if value is not None} for line in activity]
            lines += [{"role": role, **failure} for failure in failures]
            if lines:
                append_lines(self._directory / "engines.jsonl", [json.dumps({"step": step, **line}) for line in lines])
            if engine.engine_group is None:
                continue
            role_metrics = {**summarize_activity(activity), "engines/replaced": len(failures)}
            metrics |= {f"{role}/{name}": value for name, value in role_metrics.items()}
            self._note_slow(role, slow_engines(activity))
        # Edges with a slash are those of an evaluation before the step.
        stored = {edge: size for edge, size in self.store_usage.take_edge_bytes().items() if "/" not in edge}
        self._stored.update(stored)
        self._num_steps += 1
        if is_on_gpu(self._plan) and (shares := self._ask_workers("take_memory_share")):
            metrics[FULLEST] = max(shares.values())
        return metrics | {f"store/{edge}_bytes": size for edge, size in stored.items()}

    def find_lost(self) -> Lost:
        """Return what has been lost since the engines started. Raises EngineError if Ray itself has failed."""
        self._watchdog.check()
        dead = [workers.name(rank) for workers in self._workers.values() for rank in workers.dead_ranks()]
        processes = [*dead, *self._remote_objects.dead_processes()]
        return Lost(processes, self._services.lost_hosts(), not self._services.are_private)

    def restart_lost(self) -> None:
        for proxy in self.values():
            if proxy.engine_group is not None:
                # A generation ahead may still be in progress, whose samples nobody waits for any more.
                proxy.engine_group.wait_until_idle()
        self._remote_objects.end_all()
        trained, sleepers = self._plan.graph.trained_roles(), sleeping_roles(self._plan)
        stopped: list[str] = []
        for role, workers in self._workers.items():
            # A transfer from GPU to GPU that has lost its sender does not end.
            dead = workers.dead_ranks() if workers.gpu_transport is None else busy_ranks(workers)
            if role in trained or (dead and (role in sleepers or not workers.concurrent)):
                workers.stop()
                self._turns.stopped(role)
                stopped.append(role)
            elif dead:
                workers.restart(dead)
            workers.receivers_connected = False
        self.start(stopped)

    def _note_slow(self, role: str, factors: Mapping[int, float]) -> None:
        """Warn about engines that are slow now and were not in the step before."""
        for rank, factor in factors.items():
            if (role, rank) not in self._slow:
                name = self._workers[role].name(rank)
                self._warnings.append(f"{name} is {factor:.0f} times as slow as the role's other workers")
        self._slow = {engine for engine in self._slow if engine[0] != role} | {(role, rank) for rank in factors}

    def take_warnings(self) -> list[str]:
        warnings, self._warnings = self._warnings, []
        return warnings

    def record_calls(self) -> Callable[[], dict[str, list[Span]]]:
        for workers in self._workers.values():
            workers.record_calls()
        return lambda: self._ask_workers("take_calls")

    def peak_bytes(self) -> dict[str, dict[str, int]]:
        return self._ask_workers("peak_bytes")

    def _ask_workers(self, method: str) -> dict[str, Any]:
        """Return what a method of each worker returns. Workers that have died since their last work are left out."""
        calls = {
            f"{role}/{rank}": call
            for role, workers in self._workers.items()
            for rank, call in enumerate(workers.call_all(method))
        }
        wait(calls.values())
        return {name: call.result() for name, call in calls.items() if call.exception() is None}

    def store_use(self) -> StoreUse:
        return StoreUse(
            edges={edge: size / self._num_steps for edge, size in self._stored.items()},
            peaks=self.store_usage.peaks,
        )

    def stream_to(self, subscriber: Subscriber, role: str) -> AbstractContextManager[None]:
        group = self[role].engine_group
        return nullcontext() if group is None else group.subscribed(subscriber)

    def on_lost_weights(self, role: str, resync: Callable[[], None]) -> None:
        self[role].resync = resync

    def are_apart(self, role: str, other: str | None) -> bool:
        return other is None or set(self._plan.roles[role].bundles).isdisjoint(self._plan.roles[other].bundles)

    def mark_idle(self, role: str) -> None:
        if role in self._replaced:
            self._turns.weights_expired(role)

    def place_with_tokens(self, instance: T) -> T:
        return cast(T, self._remote_objects.proxy_of(instance))

    def place_with_samples(self, node: T) -> T:
        return cast(T, DividedNode(node, self._remote_objects))
