"""The workers of a role as actors of Ray."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import suppress
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
from rlflow.runtime.ray.cluster.binding import Placed
from rlflow.runtime.ray.cluster.hosts import lost
from rlflow.runtime.ray.cluster.machine import PCI_ORDER
from rlflow.runtime.ray.engine_specs import is_on_gpu, spec_of, weight_backend
from rlflow.runtime.ray.worker import EngineWorker

# That go on in one worker at a time: weights come while others are offered.
_CALLS = 8
# What micro-batches are copied into is used again: new memory for each takes longer than the copying.
ALLOCATION = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(256 << 20)}
_ASIDE = "aside"
# A port that was free may be taken until an engine listens there: so often others are tried.
_ATTEMPTS = 3
# How often it is asked whether hosts are still there, while engines are built.
_LOOK_S = 2.0


class Actors:
    """A role's workers, each where the plan has it."""

    def __init__(self, plan: Plan, role: str, model: Model, placed: Placed) -> None:
        self._plan, self._role, self._model, self._placed = plan, role, model, placed
        self.weight_backend = weight_backend(plan, role)
        """How weights come to it from GPU to GPU; None: through Ray's store."""
        self._engine = plan.recipe.roles[role].engine
        self._workers = plan.roles[role].workers
        self.met = False
        """Whether those that send weights from GPU to GPU know these engines."""
        self.actors: list[Any] = []
        """Ray's handles of EngineWorkers, by rank."""
        self._ended: dict[Any, str] = {}

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def num_gpus_each(self) -> int:
        return len(self._workers[0].bundles)

    @property
    def concurrent(self) -> bool:
        """Whether its engines take more prompts while they write."""
        return engine_kind(self._engine).concurrent

    def start(self) -> None:
        """New processes with new engines. Raises EngineError and UserErrors."""
        self.actors = [self._process(rank) for rank in range(len(self))]
        self._build(range(len(self)))

    def _process(self, rank: int) -> Any:
        # Who asks how it goes waits for none of its other calls.
        process = ray.remote(concurrency_groups={_ASIDE: 1})(EngineWorker)
        return process.options(**self._options(rank, self._workers[rank])).remote()

    def _build(self, ranks: Sequence[int]) -> None:
        for attempt in range(1, _ATTEMPTS + 1):
            # A host that has died since it was bound would leave them waiting for ever.
            self._wait_for([self.call(rank, "ready") for rank in ranks])
            address = f"{self.address}:{wait_all([self.call(0, 'meeting_port')])[0]}"
            calls = [self.call(rank, "build", self._engine, self._spec(rank, address)) for rank in ranks]
            try:
                self._wait_for(calls)
                break
            except EngineError:
                # Whoever came to another process's port may fail before the one who found it taken.
                wait(calls, timeout=_LOOK_S)
                taken = [call for call in calls if _port_is_taken(call)]
                if not taken:
                    raise
                if attempt == _ATTEMPTS:
                    wait_all(taken)
            self._renew(ranks)

    def _renew(self, ranks: Sequence[int]) -> None:
        """Processes without engines."""
        for rank in ranks:
            with suppress(RayError):
                ray.kill(self.actors[rank])
            self.actors[rank] = self._process(rank)

    def stop(self) -> None:
        for actor in self.actors:
            with suppress(RayError):  # of a Ray that has gone itself
                ray.kill(actor)
        self.actors = []

    def restart(self, ranks: Sequence[int]) -> None:
        """Replace the engines of these ranks by new ones in new processes; the others go on. Raises EngineError."""
        self._renew(ranks)
        self._build(ranks)
        self.met = False

    def dead(self) -> list[int]:
        """Return the ranks whose processes have died or been ended. A process that does not answer counts as alive."""
        answers = self.everywhere("ready")
        wait(answers, timeout=_LOOK_S)
        died = [answer.done() and answer.exception() is not None for answer in answers]
        return [rank for rank, actor in enumerate(self.actors) if died[rank] or actor in self._ended]

    @property
    def address(self) -> str:
        """The address of rank 0's host."""
        return self._placed.addresses[self._workers[0].bundles[0].host]

    def _wait_for(self, calls: "list[Future[Any]]") -> None:
        hosts = {bundle.host: self._placed.hosts[bundle.host] for worker in self._workers for bundle in worker.bundles}
        while wait(calls, timeout=_LOOK_S, return_when=FIRST_EXCEPTION).not_done:
            if any(call.done() and call.exception() for call in calls):
                break
            if gone := lost(hosts):
                raise EngineError(f"role {self._role}: lost {', '.join(host.name for host in gone)}.")
        wait_all(calls)

    def everywhere(self, method: str, *arguments: Any) -> "list[Future[Any]]":
        return [self.call(rank, method, *arguments) for rank in range(len(self))]

    def call(self, rank: int, method: str, *arguments: Any) -> "Future[Any]":
        return self.told(getattr(self.actors[rank], method).remote(*arguments), rank)

    def end(self, actor: Any, why: str) -> None:
        """The process of one, all calls of which fail with "worker 1 on host-0" and then ``why``."""
        self._ended[actor] = why
        with suppress(RayError):
            ray.kill(actor)

    @property
    def any_ended(self) -> bool:
        return any(actor in self._ended for actor in self.actors)

    def told(self, reference: Any, rank: int) -> "Future[Any]":
        """The result, or what went wrong in words of ours."""
        actor = self.actors[rank]
        return told(reference, self.name(rank), lambda: self._ended.get(actor))

    def name(self, rank: int) -> str:
        """For messages."""
        return f"role {self._role}: worker {rank} on {self._workers[rank].bundles[0].host}"

    def _spec(self, rank: int, address: str) -> EngineSpec:
        device = "cuda:0" if is_on_gpu(self._plan) else "cpu"
        return spec_of(self._plan, self._role, self._model, device=device, rank=rank, address=address)

    def _options(self, rank: int, worker: Worker) -> dict[str, Any]:
        """Without GPUs of its own in Ray's books: those of its bundles are reserved, and roles share them."""
        bundle = self._placed.bundle_indices[worker.bundles[0]]
        # Threads that wait spin long enough for the pauses within a step, and let other roles have the cores after it.
        variables = {**ALLOCATION, "OMP_NUM_THREADS": str(self._threads(worker)), "GOMP_SPINCOUNT": "10000"}
        if is_on_gpu(self._plan):
            # A cluster may be set to hide all GPUs from an actor that has none in Ray's books.
            variables["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
            variables |= PCI_ORDER
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(self._placed.gpu_ids[each] for each in worker.bundles)
        return {
            "num_cpus": 0,
            "num_gpus": 0,
            "max_concurrency": _CALLS,
            "max_restarts": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._placed.group, bundle),
            "runtime_env": {"env_vars": variables},
        }

    def _threads(self, worker: Worker) -> int:
        """The host's cores, shared by its GPUs. Simulated hosts are one machine."""
        host = self._placed.hosts[worker.bundles[0].host]
        sharing = [self._placed.hosts[bundle.host] for bundle in self._placed.bundle_indices]
        if self._placed.simulated:
            return max(1, (os.cpu_count() or 1) * len(worker.bundles) // len(sharing))
        cores = next(node["Resources"].get("CPU", 1) for node in ray.nodes() if node["NodeID"] == host.node_id)
        return max(1, int(cores) * len(worker.bundles) // sharing.count(host))


def aside(actor: Any, method: str) -> "Future[Any]":
    """A method that tells of the process, whatever else it is doing."""
    answer: Future[Any] = getattr(actor, method).options(concurrency_group=_ASIDE).remote().future()
    return answer


def told(reference: Any, who: str, ended: Callable[[], str | None] = lambda: None) -> "Future[Any]":
    """What Ray's reference stands for, or what went wrong with ``who`` in words of ours; ``ended`` says why its process
    has been ended, if it has."""
    told: Future[Any] = Future()

    def tell(answer: "Future[Any]") -> None:
        error = answer.exception()
        if error is None:
            told.set_result(answer.result())
        else:
            told.set_exception(_error(error, who, ended()))

    reference.future().add_done_callback(tell)
    return told


def _port_is_taken(call: "Future[Any]") -> bool:
    error = call.exception() if call.done() else None
    return any(words in str(error) for words in ("EADDRINUSE", "ddress already in use"))


def _error(error: BaseException, who: str, ended: str | None) -> BaseException:
    if isinstance(error, RayTaskError) and isinstance(error.cause, UserError | EngineError):
        return error.cause
    if isinstance(error, RayActorError):
        return EngineError(f"{who} {ended or f'died: {first_line(error)}'}.")
    cause = error.cause if isinstance(error, RayTaskError) else error
    return EngineError(f"{who}: {first_line(cause)}.")
