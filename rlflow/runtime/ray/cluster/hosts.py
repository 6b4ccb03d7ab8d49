"""The hosts of a run: those of a Ray that runs, this machine, or simulated ones."""

import logging
import os
import signal
import socket
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
from rlflow.runtime.ray.cluster.binding import LiveHost
from rlflow.runtime.ray.cluster.private_ray import environment, private_ray

# For what answers at once when it lives.
_ANSWER_S = 2.0
_START_S = 120.0
# Of each simulated host: batches and weights pass through it.
_SIMULATED_STORE = 256_000_000
_SIMULATED = "rlflow-simulated"


@contextmanager
def connected(cluster: Cluster) -> Iterator[None]:
    """Ray for ``cluster``: the one that this process is in already, simulated hosts where the cluster has no GPUs, one
    that runs, or else one of this machine. What it starts it stops. Raises PlacementError where none can be had."""
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


@contextmanager
def simulated(cluster: Cluster, store_bytes: int = _SIMULATED_STORE) -> Iterator[Any]:
    """Hosts that are processes of this machine, with numbers in place of GPUs, and object stores of ``store_bytes``
    each. They listen on this machine alone. Gives Ray's own object for them."""
    import_ray()
    from ray._private.services import find_bootstrap_address
    from ray.cluster_utils import Cluster as Processes

    before = find_bootstrap_address(None)
    processes = Processes()
    # Ray would hold the hosts' numbers of GPUs against the real GPUs that this process may use.
    with _own_signals() as keep_signals, private_ray(), environment({"CUDA_VISIBLE_DEVICES": None}):
        try:
            for host in cluster.hosts:
                processes.add_node(
                    node_name=host.name,
                    num_gpus=host.gpus,
                    num_cpus=1,
                    object_store_memory=store_bytes,
                    labels={_SIMULATED: "true"},
                    # Nothing scales here and nobody reads the logs of workers: each is a process that takes its time.
                    include_dashboard=False,
                    include_log_monitor=False,
                    no_monitor=True,
                    wait=False,
                )
                if host is cluster.hosts[0]:
                    _set_address(before)
            keep_signals()
            with joined(processes.address):
                _wait_for(len(cluster.hosts))
                yield processes
        finally:
            # Ray forgets it on shutdown, whosever it is.
            now = find_bootstrap_address(None)
            own = processes.address
            processes.shutdown()
            _set_address(before if now == own else now)


def _set_address(address: str | None) -> None:
    """Of the Ray that others on this machine find, which is never one of simulated hosts."""
    from ray._common.utils import reset_ray_address
    from ray._private.utils import write_ray_address

    if address is None:
        reset_ray_address()
    else:
        write_ray_address(address)


@contextmanager
def joined(address: str) -> Iterator[None]:
    """Ray at ``address``, or a new one for ``local``."""
    ray = import_ray()
    options = {"include_dashboard": False} if address == "local" else {}
    with _own_signals() as keep_signals:
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **options)
        except (OSError, RuntimeError, ValueError, ray.exceptions.AuthenticationError) as error:
            raise PlacementError("cluster", f"Ray at '{address}' cannot be joined ({first_line(error)})") from None
        try:
            keep_signals()
            yield
        finally:
            ray.shutdown()


@contextmanager
def ray_errors(*others: type[Exception]) -> Iterator[None]:
    """Raises EngineError for what Ray raises when it fails itself, and for errors of ``others``."""
    import_ray()
    from ray.exceptions import RayError

    try:
        yield
    except (UserError, EngineError):
        raise
    except (RayError, *others) as error:
        raise EngineError(f"Ray failed: {first_line(error)}.") from error


def running_ray() -> str | None:
    """HOST:PORT of a Ray to join: what RAY_ADDRESS says, as in a submitted job, or one that runs on this machine.

    None where there is none. Raises PlacementError for a RAY_ADDRESS that cannot be joined.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    if address == "local":
        return None
    if address in ("", "auto"):
        note = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()) / "ray" / "ray_current_cluster"
        with suppress(OSError):
            address = note.read_text().strip()
            return address if _answers(address) else None
        return None
    if "://" in address:
        raise PlacementError(
            "cluster",
            f"RAY_ADDRESS is '{address}', which is for clients outside the cluster",
            fix="run on a host of the cluster with RAY_ADDRESS=auto, or by ray job submit",
        )
    if not _answers(address):
        raise PlacementError(
            "cluster",
            f"RAY_ADDRESS is '{address}', and nothing answers there",
            fix="HOST:PORT of Ray's head, or leave RAY_ADDRESS unset for a Ray on this machine",
        )
    return address


def live_hosts() -> list[LiveHost]:
    """All hosts that Ray knows, those that have died too."""
    ray = import_ray()
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    return [
        LiveHost(
            node_id=node["NodeID"],
            name=node["NodeName"] if node["NodeName"] != node["NodeManagerAddress"] else node["NodeManagerHostname"],
            hostname=node["NodeManagerHostname"],
            address=node["NodeManagerAddress"],
            port=node["NodeManagerPort"],
            gpus=int(node["Resources"].get("GPU", 0)),
            free_gpus=int(free.get(node["NodeID"], {}).get("GPU", 0)),
            alive=node["Alive"],
            simulated=_SIMULATED in node["Labels"],
        )
        for node in ray.nodes()
    ]


def lost(hosts: Mapping[str, LiveHost]) -> list[LiveHost]:
    """Those that have died, also when Ray has not noticed yet."""
    dead = {host.node_id for host in live_hosts() if not host.alive}
    return [host for host in hosts.values() if host.node_id in dead or not _answers(f"{host.address}:{host.port}")]


def holders() -> dict[str, list[str]]:
    """By node id who has GPUs there, as far as Ray tells: actors, tasks and placement groups."""
    import_ray()
    from ray._private.state import state
    from ray.core.generated.gcs_pb2 import ActorTableData, TaskEvents
    from ray.util import placement_group_table

    found: dict[str, list[str]] = {}
    ray_state = state._connect_and_get_accessor()
    for content in ray_state.get_actor_table(None, "ALIVE"):
        actor = ActorTableData.FromString(content)
        if gpus := actor.required_resources.get("GPU", 0):
            who = f"{gpus:g} by actor '{actor.name or actor.class_name}' of job {actor.job_id.hex()}"
            found.setdefault(actor.address.node_id.hex(), []).append(who)
    for content in ray_state.get_task_events():
        task = TaskEvents.FromString(content)
        if gpus := _gpus_of(task):
            who = f"{gpus:g} by task '{task.task_info.name}' of job {task.job_id.hex()}"
            found.setdefault(task.state_updates.node_id.hex(), []).append(who)
    for group in placement_group_table().values():
        if group["state"] == "REMOVED":
            continue
        gpus_there: dict[str, float] = {}
        for index, node_id in group["bundles_to_node_id"].items():
            gpus_there[node_id] = gpus_there.get(node_id, 0) + group["bundles"][index].get("GPU", 0)
        who = f"placement group '{group['name'] or group['placement_group_id']}'"
        for node_id, count in gpus_there.items():
            if node_id and count:
                found.setdefault(node_id, []).append(f"{count:g} by {who}")
    return found


def _gpus_of(task: Any) -> float:
    """That a task, by Ray's TaskEvents, has now of its own: 0 for what it has of an actor or of a placement group."""
    from ray.core.generated.common_pb2 import TaskStatus, TaskType

    told = task.state_updates.state_ts_ns.keys()
    if (
        task.task_info.type != TaskType.NORMAL_TASK
        or task.task_info.placement_group_id
        or TaskStatus.RUNNING not in told
    ):
        return 0.0
    ended = {TaskStatus.FINISHED, TaskStatus.FAILED} & set(told)
    return 0.0 if ended else float(task.task_info.required_resources.get("GPU", 0))


def _wait_for(count: int) -> None:
    """Until so many hosts have joined. Raises PlacementError when they do not."""
    deadline = time.monotonic() + _START_S
    while (there := sum(host.alive for host in live_hosts())) < count:
        if time.monotonic() > deadline:
            raise PlacementError("cluster", f"{there} of {count} simulated hosts have started in {_START_S:g} s")
        time.sleep(0.1)


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S):
            return True
    except (OSError, ValueError):
        return False


@contextmanager
def _own_signals() -> Iterator[Callable[[], None]]:
    """Keep this process's handler of SIGTERM, which Ray replaces when it starts.

    The function that it gives puts back a handler of this process's own, which a run has for stopping with a
    checkpoint; Ray's own stays where there is none, and ends Ray with the process.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    before = signal.getsignal(signal.SIGTERM)

    def put_back() -> None:
        if before not in (signal.SIG_DFL, signal.SIG_IGN):
            signal.signal(signal.SIGTERM, before)

    try:
        yield put_back
    finally:
        signal.signal(signal.SIGTERM, before)
