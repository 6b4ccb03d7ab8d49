"""Objects in processes of their own, without GPUs, on the hosts where the data is that they read."""

import threading
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlflow.errors import EngineError, UserError
from rlflow.runtime.objects.host_shares import divide_by_host, join_outputs
from rlflow.runtime.objects.object_process import ObjectProcess
from rlflow.runtime.objects.ray_api import this_host, wait_all
from rlflow.runtime.objects.store_usage import StoreUsage, current_edge
from rlflow.runtime.ray.process import RemoteProcess, are_dead
from rlflow.runtime.ray.waits import Waits
from rlflow.runtime.ray.watchdog import Watchdog


class RemoteObjects:
    """Objects in processes of their own, whose results go into the object store of their host."""

    def __init__(self, store_usage: StoreUsage, waits: Waits, watchdog: Watchdog, simulated: bool) -> None:
        """Take the limits of calls and the watchdog; ``simulated`` hosts are all on this machine."""
        self._store_usage, self._waits, self._watchdog = store_usage, waits, watchdog
        self._simulated = simulated
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
                process = self._start(name, host)
                self._proxies[id(local), host] = local, _RemoteObject(local, process, self._waits)
            return self._proxies[id(local), host][1]

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

    def _start(self, name: str, host: str) -> RemoteProcess:
        affinity = NodeAffinitySchedulingStrategy(host, soft=False)
        options = {"num_cpus": 0, "max_restarts": 0, "scheduling_strategy": affinity}
        is_here, name = self._simulated or host == this_host(), f"the process of {name}"
        return RemoteProcess(ObjectProcess, options, name, host, is_here, self._watchdog, self._store_usage)

    def _host_name(self, host: str) -> str:
        return self._store_usage.host_names[host]

    def dead_processes(self) -> list[str]:
        """Return the names of the processes that have died or were ended."""
        with self._lock:
            processes = [proxy.process for _, proxy in self._proxies.values()]
        return [process.name for process, is_dead in zip(processes, are_dead(processes), strict=True) if is_dead]

    def end_all(self) -> None:
        """End all processes. Those that are needed again start anew."""
        with self._lock:
            for _, proxy in self._proxies.values():
                proxy.process.kill()
            self._proxies.clear()

    def __enter__(self) -> "RemoteObjects":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end_all()


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

    def __init__(self, local: Any, process: RemoteProcess, waits: Waits) -> None:
        """Load the object in the process, without waiting for it."""
        self.process = process
        self._waits = waits
        pickled = ray.cloudpickle.dumps(local)
        loading = waits.of("load_object")
        self._loading = [process.call(loading, "reuse_memory"), process.call(loading, "load_object", pickled)]

    def __getattr__(self, method: str) -> Any:
        return partial(self._call, method)

    def submit(self, method: str, named: Mapping[str, Any], *arguments: Any) -> "Future[Any]":
        """Call a method of the object, and return its future."""
        wait_all(self._loading)
        wait = self._waits.of(method, current_edge(), (*arguments, *named.values()))
        return self.process.call_and_put(wait, True, method, *arguments, **named)

    def _call(self, method: str, *arguments: Any, **named: Any) -> Any:
        return wait_all([self.submit(method, named, *arguments)])[0]
