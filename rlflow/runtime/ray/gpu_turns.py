"""Which of the roles that share GPUs uses them now, and what the others give up meanwhile."""

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from rlflow.runtime.objects.ray_api import wait_all
from rlflow.runtime.ray.role_proxy import Workers


class Turns:
    """The hand-over of shared GPUs from role to role.

    Before a role works, the roles beside it give their GPU memory up: those that sleep move or discard their state, and
    all others release what torch caches for them. Otherwise the next role finds the peak of the last one's work still
    reserved.
    """

    def __init__(
        self,
        workers: Mapping[str, Workers],
        beside: Mapping[str, Sequence[str]],
        sleepers: Collection[str] = (),
        replaced: Collection[str] = (),
    ) -> None:
        """``beside`` lists for each role the others on its GPUs. ``replaced`` are the roles whose weights a copy
        replaces before they first work."""
        self._workers = workers
        self._beside = beside
        self._sleepers = sleepers
        self._asleep: dict[str, Literal["wholly", "but for its weights"]] = {}
        self._cached = set(workers)
        """Roles that may hold memory in torch's cache, which building an engine fills too."""
        self._expired = set(replaced)
        self._handing: str | None = None

    def role_of(self, workers: Workers) -> str:
        """Return the role that has these workers."""
        return next(role for role, own in self._workers.items() if own is workers)

    def take(self, role: str) -> None:
        """Give the GPUs to a role that is about to work."""
        self._clear(role)
        if role in self._asleep:
            self._call(role, "wake")
            del self._asleep[role]
        self._cached.add(role)

    def rest(self, role: str) -> None:
        """Make a role give up the GPU memory that it does not need while others work."""
        if role in self._sleepers:
            if self._asleep.get(role) != "wholly":
                self._call(role, "sleep", role in self._expired)
                self._asleep[role] = "wholly"
        elif role in self._cached:
            self._call(role, "release_memory")
        self._cached.discard(role)

    def hand_on(self, role: str) -> None:
        """Prepare a role to send its weights, with nothing else of it on the GPUs if it sleeps."""
        self._clear(role)
        self._handing = role
        if role in self._sleepers and self._asleep.get(role) != "but for its weights":
            self._call(role, "wake", True)
            self._asleep[role] = "but for its weights"
        elif role in self._cached and self._beside[role]:
            self._call(role, "release_memory")
        # Of the weights that it gathers, and the buffer that it sends them in.
        self._cached.add(role)

    def take_over(self, role: str) -> None:
        """Prepare a role to receive weights, beside the role that sends them."""
        self._clear(role, but=self._handing)
        if self._asleep.get(role) == "wholly":
            self._call(role, "wake", True)
            self._asleep[role] = "but for its weights"
        self._cached.add(role)

    def renewed(self, role: str) -> None:
        """Note that the role has new weights, which are worth keeping."""
        self._expired.discard(role)

    def expire(self, role: str) -> None:
        """Note that a copy replaces the role's weights before it works again: it need not keep them."""
        self._expired.add(role)

    def _clear(self, role: str, but: str | None = None) -> None:
        for other in self._beside[role]:
            if other != but:
                self.rest(other)

    def _call(self, role: str, method: str, *arguments: object) -> None:
        workers = self._workers[role]
        wait_all([workers.submit(rank, method, *arguments) for rank in range(len(workers))])
