"""The workers of a role as actors of Ray, each on the GPUs that the plan gives it."""

from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from itertools import chain
from pathlib import Path
from threading import Thread
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlflow.compiler.plan import Plan
from rlflow.engines.base import EngineSpec
from rlflow.engines.registry import engine_kind
from rlflow.errors import EngineError
from rlflow.recipe import Model
from rlflow.resources.layout import Bundle
from rlflow.runtime.engine_specs import gpu_transport, is_on_gpu, spec_of
from rlflow.runtime.objects.ray_api import this_host, wait_all
from rlflow.runtime.objects.store_usage import StoreUsage, current_edge
from rlflow.runtime.protocols import Workers
from rlflow.runtime.ray.cluster.binding import BoundPlan
from rlflow.runtime.ray.cluster.machine import PCI_ORDER
from rlflow.runtime.ray.process import RemoteProcess, are_dead
from rlflow.runtime.ray.waits import Waits
from rlflow.runtime.ray.watchdog import Watchdog
from rlflow.runtime.ray.worker import EngineWorker
from rlflow.runtime.weights.sync import sync_weights
from rlflow.system.processes import num_own_cpus, num_usable_cpus

# Calls that run in one worker at a time: some push weights while others load them.
_CONCURRENT_CALLS = 8
# A port that was free may be taken before an engine listens there; then another one is tried.
_PORT_ATTEMPTS = 3
# The longest wait for the other ranks of a failed start, which tell whether a port was taken.
_OTHER_RANKS_S = 2.0


class RoleWorkers:
    """A role's workers, by rank."""

    def __init__(
        self,
        plan: Plan,
        role: str,
        model: Model,
        bound: BoundPlan,
        store_usage: StoreUsage,
        watchdog: Watchdog,
        journal: Path | None = None,
    ) -> None:
        """Prepare the workers; ``start`` starts them. ``journal`` is the folder for finished responses."""
        self._plan, self._role, self._model, self._bound, self._journal = plan, role, model, bound, journal
        self._store_usage = store_usage
        self._engine = plan.recipe.roles[role].engine
        self._workers = plan.roles[role].workers
        self._watchdog, self._waits = watchdog, Waits.from_plan(plan)
        self.gpu_transport = gpu_transport(plan, role)
        """How weights reach the role from GPU to GPU; None: through the object store."""
        self.receivers_connected = False
        """The engines are connected to the role that sends them weights from GPU to GPU."""
        self._records_calls = False
        self._processes: list[RemoteProcess] = []
        """The EngineWorkers, by rank; of an engine over several hosts the one on its first."""
        self._followers: dict[int, list[RemoteProcess]] = {}
        """The EngineWorkers on an engine's other hosts, by its rank."""

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def actors(self) -> list[Any]:
        """Return the Ray handles of the processes, by rank."""
        return [process.actor for process in self._processes]

    @property
    def concurrent(self) -> bool:
        """Return whether the engines accept more prompts while they generate."""
        return engine_kind(self._engine).concurrent

    @property
    def num_gpus_each(self) -> int:
        return len(self._workers[0].bundles)

    @property
    def address(self) -> str:
        """Return the address of rank 0's host."""
        return self._bound.addresses[self._workers[0].bundles[0].host]

    def name(self, rank: int) -> str:
        """Return the name of a worker for messages."""
        return f"role {self._role}: worker {rank} on {self._workers[rank].bundles[0].host}"

    def start(self) -> None:
        """Start the processes and build their engines. Raises EngineError and UserErrors."""
        self._processes = [self._new_process(rank) for rank in range(len(self))]
        self._start_followers(range(len(self)))
        self._build(range(len(self)))
        self.receivers_connected = False

    def stop(self) -> None:
        """End all processes."""
        for process in [*self._processes, *chain(*self._followers.values())]:
            process.kill()
        self._processes, self._followers = [], {}

    def restart(self, ranks: Sequence[int]) -> None:
        """Replace the engines of these ranks by new ones in new processes; the others keep running.

        Raises EngineError.
        """
        self._renew_processes(ranks)
        self._build(ranks)
        self.receivers_connected = False

    def dead_ranks(self) -> list[int]:
        """Return the ranks whose processes have died or been ended. A process that does not answer counts as alive."""
        return [rank for rank, is_dead in enumerate(are_dead(self._processes)) if is_dead]

    def end(self, rank: int, reason: str) -> None:
        """End the process of a rank. All its calls fail with the worker's name and ``reason``."""
        self._processes[rank].end(EngineError(f"{self.name(rank)} {reason}."))

    @property
    def any_ended(self) -> bool:
        """Return whether ``end`` was called for any of the current processes."""
        return any(process.end_error for process in self._processes)

    def submit(self, rank: int, method: str, *arguments: Any, wanted: bool = True) -> "Future[Any]":
        """Call a method of the engine; the result goes through the object store."""
        wait = self._waits.of(method, current_edge(), arguments, concurrent=self.concurrent)
        return self._processes[rank].call_and_put(wait, wanted, method, *arguments)

    def call(self, rank: int, method: str, *arguments: Any) -> "Future[Any]":
        """Call a method of the worker itself."""
        return self._processes[rank].call(self._waits.of(method, current_edge(), arguments), method, *arguments)

    def call_all(self, method: str, *arguments: Any) -> "list[Future[Any]]":
        return [self.call(rank, method, *arguments) for rank in range(len(self))]

    def sync_weights(self, source: Workers, version: int) -> None:
        """Sync the weights of ``source`` to all workers."""
        assert isinstance(source, RoleWorkers)
        sync_weights(source, self, version)

    def next_bucket(self, rank: int) -> "tuple[Any, Future[bool]]":
        """Have a rank gather its next bucket of weights; return Ray's reference to it, and whether there is one."""
        process = self._processes[rank]
        bucket, exists = process.actor.next_bucket.options(num_returns=2).remote()
        return bucket, process.watched(exists, self._waits.of("next_bucket"))

    def calls_in_progress(self, rank: int) -> "Future[list[str]]":
        """Return the methods that a rank's engine is in, whatever else the worker does."""
        return self._processes[rank].status("calls_in_progress")

    def _new_process(self, rank: int, host_rank: int = 0) -> RemoteProcess:
        bundle = self._gpus(rank)[host_rank][0]
        host = self._bound.hosts[bundle.host]
        is_here = self._bound.simulated or host.node_id == this_host()
        name = f"role {self._role}: worker {rank} on {bundle.host}"
        options = self._options(bundle)
        return RemoteProcess(EngineWorker, options, name, host.node_id, is_here, self._watchdog, self._store_usage)

    def _gpus(self, rank: int) -> list[tuple[Bundle, ...]]:
        """Return the GPUs of a rank on each of its hosts."""
        return self._workers[rank].on_hosts(self._plan.roles[self._role].layout)

    def _renew_processes(self, ranks: Sequence[int]) -> None:
        """Replace processes by new ones without engines."""
        for rank in ranks:
            for process in (self._processes[rank], *self._followers.pop(rank, ())):
                process.kill()
            self._processes[rank] = self._new_process(rank)
        self._start_followers(ranks)

    def _start_followers(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self._followers[rank] = [self._new_process(rank, host) for host in range(1, len(self._gpus(rank)))]

    def _follow(self, rank: int, address: str) -> None:
        """Have the other hosts of an engine start their part of it. All parts end with the first that does."""
        first, followers = self._processes[rank], self._followers[rank]

        def end(call: "Future[Any]") -> None:
            if self._processes[rank : rank + 1] == [first]:
                for part in (first, *followers):
                    part.end(EngineError(str(call.exception())))

        calls = [first.call(self._waits.of("stay"), "stay")] if followers else []
        for host_rank, follower in enumerate(followers, 1):
            spec = replace(self._spec(rank, address), host_rank=host_rank)
            calls.append(follower.call(self._waits.of("follow"), "follow", self._engine, spec))
        for call in calls:
            # Ray kills no process from the thread that calls back.
            call.add_done_callback(lambda call: Thread(target=end, args=[call], daemon=True).start())

    def record_calls(self) -> None:
        """Have all workers record the calls of their engines from now on, also new ones."""
        self._records_calls = True
        wait_all(self.call_all("record_calls"))

    def _build(self, ranks: Sequence[int]) -> None:
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            processes = [(self._processes[rank], *self._followers[rank]) for rank in ranks]
            wait_all(
                [
                    process.call(self._waits.of("prepare"), "prepare", self._variables(gpus))
                    for rank, parts in zip(ranks, processes, strict=True)
                    for process, gpus in zip(parts, self._gpus(rank), strict=True)
                ]
            )
            addresses = self._addresses(ranks)
            for rank in ranks:
                self._follow(rank, addresses[rank])
            calls = [self.call(rank, "build", self._engine, self._spec(rank, addresses[rank])) for rank in ranks]
            try:
                wait_all(calls)
                if self._records_calls:
                    wait_all([self.call(rank, "record_calls") for rank in ranks])
                break
            except EngineError:
                # A rank that came to another process's port may fail before the rank that finds its own port taken.
                wait(calls, timeout=_OTHER_RANKS_S)
                port_taken = [call for call in calls if _port_is_taken(call)]
                if not port_taken:
                    raise
                if attempt == _PORT_ATTEMPTS:
                    wait_all(port_taken)
            self._renew_processes(ranks)

    def _addresses(self, ranks: Sequence[int]) -> dict[int, str]:
        """Return where the workers of each rank meet: those of one engine, or else those of the whole role."""
        are_apart = self._plan.roles[self._role].layout.hosts_per_engine > 1
        meeting = {rank: rank if are_apart else 0 for rank in ranks}
        firsts = sorted(set(meeting.values()))
        ports = dict(zip(firsts, wait_all([self.call(rank, "free_port") for rank in firsts]), strict=True))
        hosts = {rank: self._bound.addresses[self._workers[rank].bundles[0].host] for rank in firsts}
        return {rank: f"{hosts[first]}:{ports[first]}" for rank, first in meeting.items()}

    def _spec(self, rank: int, address: str) -> EngineSpec:
        device = "cuda:0" if is_on_gpu(self._plan) else "cpu"
        plan, role, model = self._plan, self._role, self._model
        return spec_of(plan, role, model, device=device, journal=self._journal, rank=rank, address=address)

    def _options(self, first: Bundle) -> dict[str, Any]:
        """Return Ray's options for the actor.

        For Ray it has no GPUs of its own: those of its bundles are reserved already, and roles share them.
        """
        bundle = self._bound.bundle_indices[first]
        return {
            "num_cpus": 0,
            "num_gpus": 0,
            "max_concurrency": _CONCURRENT_CALLS,
            "max_restarts": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._bound.group, bundle),
        }

    def _variables(self, gpus: Sequence[Bundle]) -> dict[str, str]:
        """Return the environment variables of the process with these GPUs of a host."""
        # Waiting threads spin through the pauses within a step, and leave the cores to other roles after it.
        variables = {"OMP_NUM_THREADS": str(self._num_threads(gpus)), "GOMP_SPINCOUNT": "10000"}
        if is_on_gpu(self._plan):
            variables |= PCI_ORDER
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(self._bound.gpu_ids[bundle] for bundle in gpus)
        if self._plan.roles[self._role].layout.hosts_per_engine > 1:
            # vLLM's ranks on other hosts connect to this address.
            variables["VLLM_HOST_IP"] = self._bound.addresses[gpus[0].host]
        return variables

    def _num_threads(self, gpus: Sequence[Bundle]) -> int:
        """Return the part of a process with these GPUs of its host's cores.

        Simulated hosts share this machine's cores, and a process there has at most ``OMP_NUM_THREADS``, as without Ray.
        """
        host = self._bound.hosts[gpus[0].host]
        sharing = [self._bound.hosts[bundle.host] for bundle in self._bound.bundle_indices]
        if self._bound.simulated:
            return max(1, min(num_own_cpus(), num_usable_cpus() * len(gpus) // len(sharing)))
        cores = next(node["Resources"].get("CPU", 1) for node in ray.nodes() if node["NodeID"] == host.node_id)
        return max(1, int(cores) * len(gpus) // sharing.count(host))


def _port_is_taken(call: "Future[Any]") -> bool:
    error = call.exception() if call.done() else None
    return any(words in str(error) for words in ("EADDRINUSE", "ddress already in use"))
