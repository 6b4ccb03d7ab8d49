"""The connection of a run to Ray: one that runs already, a private one on this machine, or simulated hosts.

A private Ray can only be used by its own run: it listens on this machine alone, and asks for a token that nobody else
has. Anyone who can reach a Ray may run programs as its user, and by default Ray listens on every network interface.
"""

import logging
import os
import secrets
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rlflow.errors import EngineError, PlacementError, UserError, first_line
from rlflow.resources.cluster import Cluster
from rlflow.runtime.objects.ray_api import import_ray
from rlflow.runtime.ray.cluster.hosts import SIMULATED_LABEL, is_reachable, live_hosts
from rlflow.runtime.ray.cluster.services import alive_hosts
from rlflow.system.compat.ray import (
    loopback_address,
    own_process_groups,
    publish_address,
    published_address,
    reload_token,
)
from rlflow.system.processes import descendants, kill

# Seconds in which simulated hosts must start.
_START_S = 120.0
# Ray's own limits are a minute and more: a host that does not answer is given up after 24 s at most, and one whose Ray
# has died after 4 s. A machine whose cores are all taken must not look like a lost host.
_HEALTH_CHECKS = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "4",
}
_BUSY = "run it again; on a machine with other work, Ray may take longer to start than it waits for itself"
# Bytes of each simulated host's object store, which batches and weights pass through.
_SIMULATED_STORE = 256_000_000
# The processes of a Ray inherit these variables from the one that starts it. Ray has one switch for its own address,
# named after the systems where it is off by default; gloo and NCCL would take the first interface that leads to other
# hosts.
_LOOPBACK = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}


@contextmanager
def connected(cluster: Cluster) -> Iterator[None]:
    """Connect to a Ray for ``cluster``, and stop on exit what was started here.

    It is the Ray that this process is connected to already; simulated hosts for a cluster without GPUs; a Ray that
    runs; or a private one on this machine. Raises PlacementError when Ray cannot be joined or started.
    """
    ray = import_ray()
    if ray.is_initialized():
        yield
    elif all(cluster.memory_gib(host) is None for host in cluster.hosts):
        with simulated(cluster):
            yield
    elif (address := running_ray()) is not None:
        with joined(address):
            yield
    else:
        with private_ray(), joined("local"):
            yield


def running_ray() -> str | None:
    """Return HOST:PORT of a Ray to join: that of RAY_ADDRESS, as in a submitted job, or one that runs on this machine.

    Returns None when there is none. Raises PlacementError for a RAY_ADDRESS that cannot be joined.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    if address == "local":
        return None
    if address in ("", "auto"):
        note = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()) / "ray" / "ray_current_cluster"
        with suppress(OSError):
            address = note.read_text().strip()
            return address if is_reachable(address) else None
        return None
    if "://" in address:
        raise PlacementError(
            "cluster",
            f"RAY_ADDRESS is '{address}', which is for clients outside the cluster",
            fix="run on a host of the cluster with RAY_ADDRESS=auto, or by ray job submit",
        )
    if not is_reachable(address):
        raise PlacementError(
            "cluster",
            f"RAY_ADDRESS is '{address}', and nothing answers there",
            fix="HOST:PORT of Ray's head, or leave RAY_ADDRESS unset for a Ray on this machine",
        )
    return address


@contextmanager
def joined(address: str, own_nodes: Callable[[], list[Any]] = list) -> Iterator[None]:
    """Connect to Ray at ``address``, or to a new Ray for ``local``. ``own_nodes`` are those that were started here."""
    ray = import_ray()
    options = {"include_dashboard": False} if address == "local" else {}
    with keeping_signal_handler() as restore_handler:
        fix = _BUSY if address == "local" else "use the version and the token (RAY_AUTH_TOKEN) of that Ray"
        with own_process_groups(), _start_errors(f"Ray at '{address}' cannot be joined", fix=fix):
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **options)
        try:
            restore_handler()
            yield
        finally:
            nodes = [ray.get_runtime_context().worker.node] if address == "local" else own_nodes()
            agents = _end_silent_control(nodes)
            ray.shutdown()
            for pid in agents:
                kill(pid)


@contextmanager
def simulated(cluster: Cluster, store_bytes: int = _SIMULATED_STORE) -> Iterator[Any]:
    """Start hosts that are processes of this machine, with numbers in place of GPUs; yield Ray's object for them.

    Each has an object store of ``store_bytes``. They listen on this machine alone.
    """
    import_ray()
    from ray.cluster_utils import Cluster as Processes

    before = published_address()
    processes = Processes()
    # Ray would compare the hosts' numbers of GPUs with the real GPUs that this process may use.
    with keeping_signal_handler() as restore_handler, private_ray(), environment({"CUDA_VISIBLE_DEVICES": None}):
        try:
            for host in cluster.hosts:
                with own_process_groups(), _start_errors(f"host '{host.name}' cannot be simulated"):
                    processes.add_node(
                        node_name=host.name,
                        num_gpus=host.gpus,
                        num_cpus=1,
                        object_store_memory=store_bytes,
                        labels={SIMULATED_LABEL: "true"},
                        # Nothing scales here and nobody reads the logs of workers, and each of these takes a process.
                        include_dashboard=False,
                        include_log_monitor=False,
                        no_monitor=True,
                        wait=False,
                    )
                if host is cluster.hosts[0]:
                    publish_address(before)
            restore_handler()
            with joined(processes.address, processes.list_all_nodes):
                _wait_for_hosts(len(cluster.hosts))
                yield processes
        finally:
            # On shutdown Ray removes the published address, whosever it is.
            now = published_address()
            simulated_address = processes.address
            hosts = [raylet for node in processes.list_all_nodes() for raylet in node.all_processes.get("raylet", ())]
            workers = [pid for raylet in hosts for pid in descendants(raylet.process.pid)]
            processes.shutdown()
            for pid in workers:  # they end with their host, unless they are stopped
                kill(pid)
            publish_address(before if now == simulated_address else now)


@contextmanager
def _start_errors(fact: str, *, fix: str = _BUSY) -> Iterator[None]:
    """Raise PlacementError for a failure of Ray to start or to connect. Its errors are of all kinds, plain ones too."""
    try:
        yield
    except Exception as error:
        raise PlacementError("cluster", f"{fact} ({first_line(error)})", fix=fix) from None


@contextmanager
def private_ray() -> Iterator[None]:
    """Make every Ray that starts inside private to this process and to those that it starts."""
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    try:
        with loopback_address(), environment({**_LOOPBACK, **_HEALTH_CHECKS, **token}):
            reload_token()
            yield
    finally:
        reload_token()


@contextmanager
def environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables, and restore them on exit; None unsets a variable."""
    before = {name: os.environ.get(name) for name in values}
    _set_variables(values)
    try:
        yield
    finally:
        _set_variables(before)


@contextmanager
def ray_errors(*other_errors: type[Exception]) -> Iterator[None]:
    """Raise EngineError for the errors of Ray itself, and for errors of ``others``."""
    import_ray()
    from ray.exceptions import RayError

    try:
        yield
    except (UserError, EngineError):
        raise
    except (RayError, *other_errors) as error:
        raise EngineError(f"Ray failed: {first_line(error)}.") from error


def _wait_for_hosts(count: int) -> None:
    """Wait until so many hosts have joined. Raises PlacementError when they do not."""
    deadline = time.monotonic() + _START_S
    while (alive := sum(host.alive for host in live_hosts())) < count:
        if time.monotonic() > deadline:
            fact = f"{alive} of {count} simulated hosts have started in {_START_S:g} s"
            raise PlacementError(
                "cluster", fact, fix="a cluster with fewer hosts, or try again on a machine that is idle"
            )
        time.sleep(0.1)


def _end_silent_control(nodes: list[Any]) -> list[int]:
    """Kill the control service of these nodes if it does not answer, because leaving Ray would wait for it.

    Returns the processes that Ray then leaves behind when it stops: the agents of its hosts.
    """
    if not nodes or alive_hosts() is not None:
        return []
    started = [
        (name, service.process) for node in nodes for name, all_ in node.all_processes.items() for service in all_
    ]
    for name, process in started:
        if name == "gcs_server":
            process.kill()
    return [pid for name, process in started if name == "raylet" for pid in descendants(process.pid)]


def _set_variables(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextmanager
def keeping_signal_handler() -> Iterator[Callable[[], None]]:
    """Keep this process's handler of SIGTERM, which Ray replaces when it starts.

    The function that it yields restores the process's own handler at once, since a run has one for stopping with a
    checkpoint. Without an own handler Ray's stays until the exit, and ends Ray with the process.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    before = signal.getsignal(signal.SIGTERM)

    def restore_handler() -> None:
        if before not in (signal.SIG_DFL, signal.SIG_IGN):
            signal.signal(signal.SIGTERM, before)

    try:
        yield restore_handler
    finally:
        signal.signal(signal.SIGTERM, before)
