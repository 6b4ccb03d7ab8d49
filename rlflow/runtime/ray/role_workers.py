"""The workers of a role as actors of Ray, each on the GPUs that the plan gives it."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlflow.compiler.plan import Plan
from rlflow.engines.base import EngineSpec
from rlflow.engines.registry import engine_kind
from rlflow.errors import EngineError, UserError, first_line
from rlflow.recipe import Model
from rlflow.resources.layout import Worker
from rlflow.runtime.objects.ray_api import wait_all
from rlflow.runtime.objects.results import RemoteCall, StoreCalls
from rlflow.runtime.ray.cluster.binding import BoundPlan
from rlflow.runtime.ray.cluster.hosts import lost_hosts
from rlflow.runtime.ray.cluster.machine import PCI_ORDER
from rlflow.runtime.ray.engine_specs import gpu_transport, is_on_gpu, spec_of
from rlflow.runtime.ray.role_proxy import Workers
from rlflow.runtime.ray.watchdog import Watchdog
from rlflow.runtime.ray.worker import EngineWorker
from rlflow.runtime.weights.sync import sync_weights

# Calls that run in one worker at a time: some push weights while others load them.
_CONCURRENT_CALLS = 8
# The concurrency group of calls about the process itself, which wait for none of its other calls.
_STATUS_GROUP = "status"
# A port that was free may be taken before an engine listens there; then another one is tried.
_PORT_ATTEMPTS = 3
# Seconds between two checks for lost hosts, while engines are built.
_POLL_S = 2.0


class RoleWorkers:
    """A role's workers, by rank."""

    def __init__(self, plan: Plan, role: str, model: Model, bound: BoundPlan, store_calls: StoreCalls) -> None:
        """Prepare the workers; ``start`` starts them."""
        self._plan, self._role, self._model, self._bound = plan, role, model, bound
        self._store_calls = store_calls
        self._engine = plan.recipe.roles[role].engine
        self._workers = plan.roles[role].workers
        self._end_reasons: dict[Any, str] = {}
        # Only concurrent engines count their steps. Trainers hang in collectives, which have time limits of their own.
        self._watchdog = Watchdog(self._progress, self._end_actor) if self.concurrent else None
        self.gpu_transport = gpu_transport(plan, role)
        """How weights reach the role from GPU to GPU; None: through the object store."""
        self.receivers_connected = False
        """The engines are connected to the role that sends them weights from GPU to GPU."""
        self.actors: list[Any] = []
        """The Ray handles of the EngineWorkers, by rank."""

    def __len__(self) -> int:
        return len(self._workers)

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
        self.actors = [self._new_process(rank) for rank in range(len(self))]
        self._build(range(len(self)))

    def stop(self) -> None:
        """End all processes."""
        for actor in self.actors:
            with suppress(RayError):  # Ray may be gone itself
                ray.kill(actor)
        self.actors = []

    def restart(self, ranks: Sequence[int]) -> None:
        """Replace the engines of these ranks by new ones in new processes; the others keep running.

        Raises EngineError.
        """
        self._renew_processes(ranks)
        self._build(ranks)
        self.receivers_connected = False

    def dead_ranks(self) -> list[int]:
        """Return the ranks whose processes have died or been ended. A process that does not answer counts as alive."""
        answers = self.call_all("ready")
        wait(answers, timeout=_POLL_S)
        died = [answer.done() and answer.exception() is not None for answer in answers]
        return [rank for rank, actor in enumerate(self.actors) if died[rank] or actor in self._end_reasons]

    def end(self, rank: int, reason: str) -> None:
        """End the process of a rank. All its calls fail with the worker's name and ``reason``."""
        self._end_actor(self.actors[rank], reason)

    @property
    def any_ended(self) -> bool:
        """Return whether ``end`` was called for any of the current processes."""
        return any(actor in self._end_reasons for actor in self.actors)

    def submit(self, rank: int, method: str, *arguments: Any, wanted: bool = True) -> "Future[Any]":
        """Call a method of the engine; the result goes through the object store."""
        return self._store_calls.call(self.remote(rank), method, *arguments, wanted=wanted)

    def remote(self, rank: int) -> RemoteCall:
        """Return a function that calls any method of the worker itself, under the watchdog's eye."""
        watchdog, call = self._watchdog, partial(self.call, rank)
        return call if watchdog is None else lambda *arguments: watchdog.watch(self.actors[rank], call(*arguments))

    def call(self, rank: int, method: str, *arguments: Any) -> "Future[Any]":
        """Call a method of the worker itself."""
        return self._future(getattr(self.actors[rank], method).remote(*arguments), rank)

    def call_all(self, method: str, *arguments: Any) -> "list[Future[Any]]":
        return [self.call(rank, method, *arguments) for rank in range(len(self))]

    def sync_weights(self, source: Workers, version: int) -> float:
        """Sync the weights of ``source`` to all workers, and return the seconds that this took them."""
        assert isinstance(source, RoleWorkers)
        return sync_weights(source, self, version)

    def next_bucket(self, rank: int) -> "tuple[Any, Future[bool]]":
        """Have a rank gather its next bucket of weights; return Ray's reference to it, and whether there is one."""
        bucket, exists = self.actors[rank].next_bucket.options(num_returns=2).remote()
        return bucket, self._future(exists, rank)

    def calls_in_progress(self, rank: int) -> "Future[list[str]]":
        """Return the methods that a rank's engine is in, whatever else the worker does."""
        return self._status(self.actors[rank], "calls_in_progress")

    def _future(self, reference: Any, rank: int) -> "Future[Any]":
        actor = self.actors[rank]
        return as_future(reference, self.name(rank), lambda: self._end_reasons.get(actor))

    def _progress(self, actor: Any) -> "Future[int]":
        return self._status(actor, "progress")

    def _status(self, actor: Any, method: str) -> "Future[Any]":
        answer: Future[Any] = getattr(actor, method).options(concurrency_group=_STATUS_GROUP).remote().future()
        return answer

    def _end_actor(self, actor: Any, reason: str) -> None:
        self._end_reasons[actor] = reason
        with suppress(RayError):
            ray.kill(actor)

    def _new_process(self, rank: int) -> Any:
        process = ray.remote(concurrency_groups={_STATUS_GROUP: 1})(EngineWorker)
        return process.options(**self._options(self._workers[rank])).remote()

    def _renew_processes(self, ranks: Sequence[int]) -> None:
        """Replace processes by new ones without engines."""
        for rank in ranks:
            with suppress(RayError):
                ray.kill(self.actors[rank])
            self.actors[rank] = self._new_process(rank)

    def _build(self, ranks: Sequence[int]) -> None:
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            # Workers on a host that has died since it was bound would never answer.
            self._wait_for([self.call(rank, "prepare", self._variables(self._workers[rank])) for rank in ranks])
            address = f"{self.address}:{wait_all([self.call(0, 'free_port')])[0]}"
            calls = [self.call(rank, "build", self._engine, self._spec(rank, address)) for rank in ranks]
            try:
                self._wait_for(calls)
                break
            except EngineError:
                # A rank that came to another process's port may fail before the rank that finds its own port taken.
                wait(calls, timeout=_POLL_S)
                port_taken = [call for call in calls if _port_is_taken(call)]
                if not port_taken:
                    raise
                if attempt == _PORT_ATTEMPTS:
                    wait_all(port_taken)
            self._renew_processes(ranks)

    def _wait_for(self, calls: "list[Future[Any]]") -> None:
        """Wait for all calls. Raises EngineError when one fails or a host is lost."""
        hosts = {bundle.host: self._bound.hosts[bundle.host] for worker in self._workers for bundle in worker.bundles}
        while wait(calls, timeout=_POLL_S, return_when=FIRST_EXCEPTION).not_done:
            if any(call.done() and call.exception() for call in calls):
                break
            if lost := lost_hosts(hosts):
                raise EngineError(f"role {self._role}: lost {', '.join(host.name for host in lost)}.")
        wait_all(calls)

    def _spec(self, rank: int, address: str) -> EngineSpec:
        device = "cuda:0" if is_on_gpu(self._plan) else "cpu"
        return spec_of(self._plan, self._role, self._model, device=device, rank=rank, address=address)

    def _options(self, worker: Worker) -> dict[str, Any]:
        """Return Ray's options for the actor.

        For Ray it has no GPUs of its own: those of its bundles are reserved already, and roles share them.
        """
        bundle = self._bound.bundle_indices[worker.bundles[0]]
        return {
            "num_cpus": 0,
            "num_gpus": 0,
            "max_concurrency": _CONCURRENT_CALLS,
            "max_restarts": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._bound.group, bundle),
        }

    def _variables(self, worker: Worker) -> dict[str, str]:
        """Return the environment variables of the worker."""
        # Waiting threads spin through the pauses within a step, and leave the cores to other roles after it.
        variables = {"OMP_NUM_THREADS": str(self._num_threads(worker)), "GOMP_SPINCOUNT": "10000"}
        if is_on_gpu(self._plan):
            variables |= PCI_ORDER
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(self._bound.gpu_ids[each] for each in worker.bundles)
        return variables

    def _num_threads(self, worker: Worker) -> int:
        """Return the worker's part of its host's cores. Simulated hosts share the cores of one machine."""
        host = self._bound.hosts[worker.bundles[0].host]
        sharing = [self._bound.hosts[bundle.host] for bundle in self._bound.bundle_indices]
        if self._bound.simulated:
            return max(1, (os.cpu_count() or 1) * len(worker.bundles) // len(sharing))
        cores = next(node["Resources"].get("CPU", 1) for node in ray.nodes() if node["NodeID"] == host.node_id)
        return max(1, int(cores) * len(worker.bundles) // sharing.count(host))


def as_future(reference: Any, name: str, end_reason: Callable[[], str | None] = lambda: None) -> "Future[Any]":
    """Return a future for one of Ray's references, whose failures are EngineErrors about the process ``name``.

    ``end_reason`` returns why the process was ended, if it was.
    """
    future: Future[Any] = Future()

    def complete(answer: "Future[Any]") -> None:
        error = answer.exception()
        if error is None:
            future.set_result(answer.result())
        else:
            future.set_exception(_as_engine_error(error, name, end_reason()))

    reference.future().add_done_callback(complete)
    return future


def _as_engine_error(error: BaseException, name: str, end_reason: str | None) -> BaseException:
    if isinstance(error, RayTaskError) and isinstance(error.cause, UserError | EngineError):
        return error.cause
    if isinstance(error, RayActorError):
        return EngineError(f"{name} {end_reason or f'died: {first_line(error)}'}.")
    cause = error.cause if isinstance(error, RayTaskError) else error
    return EngineError(f"{name}: {first_line(cause)}.")


def _port_is_taken(call: "Future[Any]") -> bool:
    error = call.exception() if call.done() else None
    return any(words in str(error) for words in ("EADDRINUSE", "ddress already in use"))
