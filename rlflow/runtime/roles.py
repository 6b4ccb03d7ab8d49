"""The roles of a plan as engines: proxies over actors of Ray."""

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

from rlflow.compiler.plan import Plan
from rlflow.recipe import Model
from rlflow.runtime.actors import Actors
from rlflow.runtime.binding import Placed
from rlflow.runtime.copies import directly, through_store
from rlflow.runtime.proxies import RoleProxy, Turns, Workers, gathered


class RayWorkers(Actors):
    """The workers of a role, as its proxy calls them."""

    def submit(self, rank: int, method: str, *arguments: Any) -> "Future[Any]":
        return self.call(rank, "call", method, *arguments)

    def copy_weights(self, source: Workers, version: int) -> float:
        """Returns the seconds of it that the slowest engine took to take them over."""
        assert isinstance(source, RayWorkers)
        if (backend := self.weight_backend) is not None:
            return directly(source, self, backend, version)
        return through_store(source, self, version)


@contextmanager
def start_engines(plan: Plan, models: Mapping[str, Model], placed: Placed) -> Iterator[Mapping[str, RoleProxy]]:
    """All engines of a plan, built at once, and stopped on exit. Raises EngineError and UserErrors."""
    workers = {name: RayWorkers(plan, name, models[role.model], placed) for name, role in plan.recipe.roles.items()}
    beside = sharing(plan)
    turns = Turns(workers, beside)
    with ThreadPoolExecutor(len(workers)) as pool, ExitStack() as running:
        for started in workers.values():
            running.callback(started.stop)
        apart = [role for role in workers if not beside[role] and not turns.sleeps(role)]
        starting = [pool.submit(workers[role].start) for role in apart]
        for role in sorted(workers.keys() - set(apart), key=lambda role: plan.recipe.roles[role].follows is None):
            # One after another, those that write first: vLLM measures what is free, and nobody else may change it.
            workers[role].start()
            turns.rest(role)
        gathered(starting)
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
