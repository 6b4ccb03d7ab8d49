"""The turns of roles that share GPUs: which role uses them now, and what memory the others give up meanwhile."""

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from threading import RLock
from typing import Any, Literal

from rlflow.compiler.plan import Plan
from rlflow.runtime.engine_specs import is_on_gpu
from rlflow.runtime.objects.ray_api import wait_all
from rlflow.runtime.protocols import Workers


class GpuTurns:
    """The hand-over of shared GPUs from role to role.

    Before a role works, the roles on its GPUs give up memory: those that sleep move or discard their state, and all
    others release what torch caches for them. Otherwise the next role finds the peak of the last one still reserved.
    """

    def __init__(
        self,
        workers: Mapping[str, Workers],
        neighbors: Mapping[str, Sequence[str]],
        sleepers: Collection[str] = (),
        replaced: Collection[str] = (),
        receive_awake: Collection[str] = (),
    ) -> None:
        """Start with all roles awake. ``neighbors`` lists for each role the others that it takes turns with.

        ``replaced`` are the roles whose weights a sync replaces before they first work. Beside those that
        ``receive_awake``, the role that sends weights keeps the memory that they went through.
        """
        self._workers = workers
        self._neighbors = neighbors
        self._sleepers = sleepers
        self._receive_awake = receive_awake
        self._asleep: dict[str, Literal["completely", "except weights"]] = {}
        self._cached = set(workers)
        """Roles that may hold memory in torch's cache, which building an engine fills too."""
        self._expired = set(replaced)
        self._sending: str | None = None
        # Roles on different GPUs work at the same time, and may have a neighbor in common.
        self._lock = RLock()

    def role_of(self, workers: Workers) -> str:
        """Return the role that has these workers."""
        return next(role for role, role_workers in self._workers.items() if role_workers is workers)

    def stopped(self, role: str) -> None:
        """Note that the processes of a role have ended, so that it has no memory to give up."""
        with self._lock:
            self._asleep[role] = "completely"
            self._cached.discard(role)

    def make_room(self, role: str) -> None:
        """Free the GPUs of a role whose processes are about to start."""
        with self._lock:
            self._free_gpus(role)

    def started(self, role: str) -> None:
        """Note that the engines of a role have been built, which are awake."""
        with self._lock:
            self._asleep.pop(role, None)
            self._cached.add(role)

    def take(self, role: str) -> None:
        """Give the GPUs to a role that is about to work."""
        with self._lock:
            self._free_gpus(role)
            self._wake(role)
            self._cached.add(role)

    def release(self, role: str) -> None:
        """Make a role give up the GPU memory that it does not need while others work."""
        with self._lock:
            wait_all(self._releases(role))

    def prepare_sender(self, role: str) -> None:
        """Prepare a role to send its weights, with nothing else of it on the GPUs if it sleeps."""
        with self._lock:
            self._free_gpus(role)
            self._sending = role
            if role in self._sleepers and self._asleep.get(role) != "except weights":
                self._call(role, "wake", True)
                self._asleep[role] = "except weights"
            elif role in self._cached and self._neighbors[role]:
                self._call(role, "release_memory")
            self._cached.discard(role)

    def prepare_receiver(self, role: str) -> None:
        """Prepare a role to receive weights, beside the role that sends them."""
        with self._lock:
            self._free_gpus(role, except_role=self._sending)
            if role in self._receive_awake:
                self._wake(role)
            else:
                if self._asleep.get(role) == "completely":
                    self._call(role, "wake", True)
                    self._asleep[role] = "except weights"
                if self._sending is not None:
                    # The weights that it gathers, and the buffer that it sends them in, go through the cache.
                    self._cached.add(self._sending)
            self._cached.add(role)

    def weights_loaded(self, role: str) -> None:
        """Note that the role has new weights, which it must keep."""
        self._expired.discard(role)

    def weights_expired(self, role: str) -> None:
        """Note that a sync replaces the role's weights before it works again, so that it may discard them."""
        self._expired.add(role)

    def _wake(self, role: str) -> None:
        if role in self._asleep:
            self._call(role, "wake")
            del self._asleep[role]

    def _free_gpus(self, role: str, except_role: str | None = None) -> None:
        # All give up their memory at the same time.
        others = [other for other in self._neighbors[role] if other != except_role]
        wait_all([call for other in others for call in self._releases(other)])

    def _releases(self, role: str) -> "list[Future[Any]]":
        """Start the calls by which a role gives up the memory that it does not need while others work."""
        calls: list[Future[Any]] = []
        if role in self._sleepers:
            if self._asleep.get(role) != "completely":
                calls = self._submit(role, "sleep", role in self._expired)
                self._asleep[role] = "completely"
        elif role in self._cached:
            calls = self._submit(role, "release_memory")
        self._cached.discard(role)
        return calls

    def _call(self, role: str, method: str, *arguments: object) -> None:
        wait_all(self._submit(role, method, *arguments))

    def _submit(self, role: str, method: str, *arguments: object) -> "list[Future[Any]]":
        workers = self._workers[role]
        return [workers.submit(rank, method, *arguments) for rank in range(len(workers))]


def gpu_neighbors(plan: Plan) -> dict[str, list[str]]:
    """Return for each role the others that it takes turns with on one of its GPUs.

    Roles that stay give up no memory, and on CPUs there is no GPU memory to give up.
    """
    shared = _roles_beside(plan)
    return {role: [] if plan.roles[role].layout.stays else beside for role, beside in shared.items()}


def roles_in_order(plan: Plan) -> set[str]:
    """Return the roles that start one after another: those that sleep, vLLM, and the roles on the same GPUs."""
    layouts = {role: placement.layout for role, placement in plan.roles.items()}
    waits = {role for role, layout in layouts.items() if layout.sleeps or layout.gpu_memory_utilization is not None}
    return {role for role, beside in _roles_beside(plan).items() if beside and waits & {role, *beside}}


def _roles_beside(plan: Plan) -> dict[str, list[str]]:
    """Return for each role the others on one of its GPUs; none on CPUs."""
    bundles = {role: set(placement.bundles) if is_on_gpu(plan) else set() for role, placement in plan.roles.items()}
    return {role: [other for other in bundles if other != role and bundles[role] & bundles[other]] for role in bundles}


def sleeping_roles(plan: Plan) -> set[str]:
    """Return the roles that sleep while others on their GPUs work."""
    return {role for role, neighbors in gpu_neighbors(plan).items() if neighbors and plan.roles[role].layout.sleeps}


def replaced_roles(plan: Plan) -> set[str]:
    """Return the roles that receive all weights in every step. Syncs of adapters leave the other weights."""
    return {sync.target for sync in plan.workload.weight_syncs if plan.recipe.lora_of(sync.target) is None}
