"""Objects in processes of their own on this host, whose results go into its store."""

from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlflow.runtime.objects.ray_api import this_host, wait_all
from rlflow.runtime.objects.results import ObjectProcess, StoreCalls
from rlflow.runtime.ray.actors import ALLOCATION, told


class Hosting:
    """The processes, which are stopped on exit."""

    def __init__(self, store_calls: StoreCalls) -> None:
        self._handover = store_calls
        self._hosted: dict[int, tuple[Any, _Hosted]] = {}

    def hosted(self, held: Any) -> Any:
        """What has the methods of ``held``, in a process that is started the first time. Each call returns when it is
        done, and raises UserErrors and EngineErrors as they are."""
        if id(held) not in self._hosted:
            affinity = NodeAffinitySchedulingStrategy(this_host(), soft=False)
            runtime_env = {"env_vars": ALLOCATION}
            actor = (
                ray.remote(ObjectProcess)
                .options(num_cpus=0, max_restarts=0, scheduling_strategy=affinity, runtime_env=runtime_env)
                .remote()
            )
            proxy = _Hosted(actor, type(held).__name__, self._handover)
            self._hosted[id(held)] = (held, proxy)
            wait_all([proxy.tell("load_object", ray.cloudpickle.dumps(held))])
        return self._hosted[id(held)][1]

    def __enter__(self) -> "Hosting":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for _, proxy in self._hosted.values():
            with suppress(RayError):  # of a Ray that has gone itself
                ray.kill(proxy.actor)


class _Hosted:
    def __init__(self, actor: Any, name: str, store_calls: StoreCalls) -> None:
        self.actor = actor
        self._name = name
        self._handover = store_calls

    def __getattr__(self, method: str) -> Any:
        return partial(self._call, method)

    def _call(self, method: str, *arguments: Any, **named: Any) -> Any:
        return wait_all([self._handover.call(self.tell, method, *arguments, named=named)])[0]

    def tell(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Calls a method of the process itself."""
        return told(getattr(self.actor, method).remote(*arguments, **named), f"the process of {self._name}")
