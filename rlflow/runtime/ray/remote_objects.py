"""Objects in processes of their own, without GPUs, on the hosts where the data is that they read."""

import threading
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlflow.errors import EngineError, UserError
from rlflow.runtime.objects.host_shares import divide_by_host, join_outputs
from rlflow.runtime.objects.ray_api import this_host, wait_all
from rlflow.runtime.objects.results import ObjectProcess, StoreCalls
from rlflow.runtime.ray.role_workers import as_future


class RemoteObjects:
    """Objects in processes of their own, whose results go into the object store of their host."""

    def __init__(self, store_calls: StoreCalls) -> None:
        self._store_calls = store_calls
        self._proxies: dict[tuple[int, str], tuple[Any, _RemoteObject]] = {}
        # Parts of a generation are processed in several threads.
        self._lock = threading.Lock()

    def proxy_of(self, local: Any, host: str | None = None) -> Any:
        """Return a proxy with the methods of ``local`` on a host, by default this one. The first call starts it.

        Each call returns when it is done, and raises the UserErrors and EngineErrors of the method.
        """
        host = host or this_host()
        with self._lock:
            if (id(local), host) not in self._proxies:
                name = f"{type(local).__name__} on {self._host_name(host)}"
                self._proxies[id(local), host] = local, _RemoteObject(local, name, host, self._store_calls)
            return self._proxies[id(local), host][1]

    def on_every_host(self, node: Any) -> "DividedNode":
        """Return the node as it runs on every host, on the samples that lie there."""
        return DividedNode(node, self)

    def check_hosts(self, node: Any, hosts: Collection[str]) -> None:
        """Start a node on these hosts, and have it check each but this one, which has been checked.

        Raises UserErrors and EngineErrors with the name of the host.
        """
        proxies = {host: self.proxy_of(node, host) for host in hosts}
        checks = {host: proxy.submit("check_host", {}) for host, proxy in proxies.items() if host != this_host()}
        for host, check in checks.items():
            try:
                check.result()
            except UserError as error:
                error.fact = f"{self._host_name(host)}: {error.fact}"
                raise
            except EngineError as error:
                raise EngineError(f"{self._host_name(host)}: {error}") from error

    def _host_name(self, host: str) -> str:
        return self._store_calls.budget.limits[host].name

    def __enter__(self) -> "RemoteObjects":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._lock:
            for _, proxy in self._proxies.values():
                with suppress(RayError):  # Ray may be gone itself
                    ray.kill(proxy.actor)


class DividedNode:
    """A node that has a process on each host with samples, which processes only these."""

    def __init__(self, node: Any, objects: RemoteObjects) -> None:
        self._node, self._objects = node, objects

    def run(self, **inputs: Any) -> Any:
        """Run the node on all hosts at once. Its output is the same as that of one process."""
        shares = divide_by_host(inputs, self._node.unit)
        if not shares:
            return self._objects.proxy_of(self._node).run(**inputs)
        proxies = [self._objects.proxy_of(self._node, share.host) for share in shares]
        calls = [proxy.submit("run", share.inputs) for proxy, share in zip(proxies, shares, strict=True)]
        return join_outputs(shares, wait_all(calls))


class _RemoteObject:
    """A proxy of an object in another process."""

    def __init__(self, local: Any, name: str, host: str, store_calls: StoreCalls) -> None:
        """Start the process and load the object there, without waiting for either."""
        affinity = NodeAffinitySchedulingStrategy(host, soft=False)
        options = {"num_cpus": 0, "max_restarts": 0, "scheduling_strategy": affinity}
        self.actor = ray.remote(ObjectProcess).options(**options).remote()
        self._name = name
        self._store_calls = store_calls
        pickled = ray.cloudpickle.dumps(local)
        self._loading = [self._call_process("reuse_memory"), self._call_process("load_object", pickled)]

    def __getattr__(self, method: str) -> Any:
        return partial(self._call, method)

    def submit(self, method: str, named: Mapping[str, Any], *arguments: Any) -> "Future[Any]":
        """Call a method of the object, and return its future."""
        wait_all(self._loading)
        return self._store_calls.call(self._call_process, method, *arguments, named=named)

    def _call(self, method: str, *arguments: Any, **named: Any) -> Any:
        return wait_all([self.submit(method, named, *arguments)])[0]

    def _call_process(self, method: str, *arguments: Any, **named: Any) -> "Future[Any]":
        """Call a method of the process itself."""
        return as_future(getattr(self.actor, method).remote(*arguments, **named), f"the process of {self._name}")
