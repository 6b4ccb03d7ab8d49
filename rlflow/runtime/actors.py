"""The workers of a role as actors of Ray."""

import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlflow.compiler.plan import Plan
from rlflow.engines.base import EngineSpec, WeightBackend
from rlflow.engines.registry import engine_kind
from rlflow.errors import EngineError, UserError, first_line
from rlflow.recipe import Model
from rlflow.resources.placement import Worker
from rlflow.runtime.binding import Placed
from rlflow.runtime.gpu_weights import Receivers
from rlflow.runtime.proxies import RoleProxy, Turns, Workers, gathered
from rlflow.runtime.specs import is_on_gpu, spec_of, weight_backend
from rlflow.runtime.worker import EngineWorker

# Calls that wait in one worker: a prompt each for engines that write many at once.
_MAX_CALLS = 256


class RayWorkers:
    """A role's workers, each where the plan has it."""

    def __init__(self, plan: Plan, role: str, model: Model, placed: Placed) -> None:
        self._plan, self._role, self._model, self._placed = plan, role, model, placed
        self._engine = plan.recipe.roles[role].engine
        self._workers = plan.roles[role].workers
        self._actors: list[Any] = []

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def room(self) -> int | None:
        """Responses that each writes at once, where it takes more prompts while it writes."""
        return self._spec(0, "").max_num_seqs if engine_kind(self._engine).concurrent else None

    def start(self) -> "list[Future[None]]":
        """The processes; the futures end when their engines stand."""
        self._actors = [
            ray.remote(EngineWorker).options(**self._options(rank, worker)).remote()
            for rank, worker in enumerate(self._workers)
        ]
        address = self._meeting_address()
        return [self._call(rank, "build", self._engine, self._spec(rank, address)) for rank in range(len(self))]

    def stop(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []

    def restart(self) -> None:
        self.stop()
        gathered(self.start())

    def submit(self, rank: int, method: str, *arguments: Any) -> "Future[Any]":
        return self._call(rank, "call", method, *arguments)

    def copy_weights(self, source: Workers, version: int) -> float:
        """Returns the seconds of it that the slowest engine took to take them over."""
        assert isinstance(source, RayWorkers)
        if (backend := weight_backend(self._plan, self._role)) is not None:
            return self._copy_directly(source, backend, version)
        return self._copy_through_store(source, version)

    def _copy_directly(self, source: "RayWorkers", backend: WeightBackend, version: int) -> float:
        """From GPU to GPU, by vLLM's own ways."""
        began = time.perf_counter()
        receivers = Receivers(self._actors, len(self._workers[0].bundles))
        address = source._meeting_address()
        ranks = range(len(source))
        gathered([source._call(rank, "send_directly", backend, receivers, rank, address) for rank in ranks])
        gathered([self.submit(rank, "transferred", version) for rank in range(len(self))])
        return time.perf_counter() - began

    def _copy_through_store(self, source: "RayWorkers", version: int) -> float:
        """Bucket by bucket through Ray's store: one is taken over while the next is gathered."""
        gathered(source._everywhere("send_weights") + self._everywhere("expect_weights"))
        takes: list[Future[float]] = self._everywhere("take_weights", version)
        offers: list[Future[None]] = []
        try:
            while True:
                # Every rank gathers each bucket, and the first has it.
                buckets = [actor.next_bucket.options(num_returns=2).remote() for actor in source._actors]
                more = gathered([source._told(there, rank) for rank, (_, there) in enumerate(buckets)])[0]
                gathered(offers)
                failed = [take for take in takes if take.done() and take.exception()]
                if failed or not more:
                    break
                offers = self._everywhere("offer", buckets[0][0])
        except (EngineError, UserError) as error:
            self._everywhere("offer", str(error))
            raise
        if not failed:
            self._everywhere("offer", None)
        own: list[float] = gathered(takes)
        return max(own)

    def _meeting_address(self) -> str:
        """HOST:PORT on the host of rank 0."""
        host = self._placed.addresses[self._workers[0].bundles[0].host]
        return f"{host}:{gathered([self._call(0, 'meeting_port')])[0]}"

    def _everywhere(self, method: str, *arguments: Any) -> "list[Future[Any]]":
        return [self._call(rank, method, *arguments) for rank in range(len(self))]

    def _call(self, rank: int, method: str, *arguments: Any) -> "Future[Any]":
        return self._told(getattr(self._actors[rank], method).remote(*arguments), rank)

    def _told(self, reference: Any, rank: int) -> "Future[Any]":
        """The result, or what went wrong in words of ours."""
        told: Future[Any] = Future()

        def tell(answer: "Future[Any]") -> None:
            error = answer.exception()
            if error is None:
                told.set_result(answer.result())
            else:
                told.set_exception(self._error(error, rank))

        reference.future().add_done_callback(tell)
        return told

    def _error(self, error: BaseException, rank: int) -> BaseException:
        if isinstance(error, RayTaskError) and isinstance(error.cause, UserError | EngineError):
            return error.cause
        who = f"role {self._role}: worker {rank} on {self._workers[rank].bundles[0].host}"
        if isinstance(error, RayActorError):
            return EngineError(f"{who} died: {first_line(error)}.")
        cause = error.cause if isinstance(error, RayTaskError) else error
        return EngineError(f"{who}: {first_line(cause)}.")

    def _spec(self, rank: int, address: str) -> EngineSpec:
        device = "cuda:0" if is_on_gpu(self._plan) else "cpu"
        return spec_of(self._plan, self._role, self._model, device=device, rank=rank, address=address)

    def _options(self, rank: int, worker: Worker) -> dict[str, Any]:
        """Without GPUs of its own in Ray's books: those of its bundles are reserved, and roles share them."""
        bundle = self._placed.bundle_indices[worker.bundles[0]]
        variables = {"OMP_NUM_THREADS": str(self._threads(worker)), "GOMP_SPINCOUNT": "1500"}
        if is_on_gpu(self._plan):
            # Else Ray hides all GPUs from an actor that has none in its books.
            variables["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(self._placed.gpu_ids[each] for each in worker.bundles)
        return {
            "num_cpus": 0,
            "num_gpus": 0,
            "max_concurrency": _MAX_CALLS,
            "max_restarts": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._placed.group, bundle),
            "runtime_env": {"env_vars": variables},
        }

    def _threads(self, worker: Worker) -> int:
        """The processor's cores, shared by the GPUs of the machine; simulated hosts are one machine."""
        address = self._placed.addresses[worker.bundles[0].host]
        there = [each for each in self._placed.bundle_indices if self._placed.addresses[each.host] == address]
        return max(1, (os.cpu_count() or 1) * len(worker.bundles) // len(there))


@contextmanager
def start_engines(plan: Plan, models: Mapping[str, Model], placed: Placed) -> Iterator[Mapping[str, RoleProxy]]:
    """All engines of a plan, built at once, and stopped on exit. Raises EngineError and UserErrors."""
    workers = {name: RayWorkers(plan, name, models[role.model], placed) for name, role in plan.recipe.roles.items()}
    turns = Turns(workers, sharing(plan))
    with ExitStack() as running:
        building: list[Future[None]] = []
        for started in workers.values():
            running.callback(started.stop)
            building += started.start()
        gathered(building)
        yield {
            role: RoleProxy(role, started, plan.roles[role].layout, started.room, turns)
            for role, started in workers.items()
        }


def sharing(plan: Plan) -> dict[str, list[str]]:
    """For each role those that sleep while it works, since they are on its GPUs."""
    bundles = {role: set(placement.bundles) for role, placement in plan.roles.items()}
    return {
        role: [
            other for other in plan.roles if other != role and plan.roles[other].layout.sleeps and own & bundles[other]
        ]
        for role, own in bundles.items()
    }
