"""The hosts of the Ray that this process is connected to: their GPUs, and what uses them."""

import socket
from collections.abc import Mapping
from typing import Any

from rlflow.runtime.objects.ray_api import import_ray
from rlflow.runtime.ray.cluster.binding import LiveHost
from rlflow.system.compat.ray import control_state, free_resources

SIMULATED_LABEL = "rlflow-simulated"
# Seconds for what a live host answers at once.
_ANSWER_S = 2.0


def live_hosts() -> list[LiveHost]:
    """Return all hosts that Ray knows, including those that have died."""
    ray = import_ray()
    free = free_resources()
    return [
        LiveHost(
            node_id=node["NodeID"],
            name=node["NodeName"] if node["NodeName"] != node["NodeManagerAddress"] else node["NodeManagerHostname"],
            hostname=node["NodeManagerHostname"],
            address=node["NodeManagerAddress"],
            port=node["NodeManagerPort"],
            store_bytes=int(node["Resources"].get("object_store_memory", 0)),
            gpus=int(node["Resources"].get("GPU", 0)),
            free_gpus=int(free.get(node["NodeID"], {}).get("GPU", 0)),
            alive=node["Alive"],
            simulated=SIMULATED_LABEL in node["Labels"],
        )
        for node in ray.nodes()
    ]


def host_names(hosts: Mapping[str, LiveHost]) -> dict[str, str]:
    """Return the plan's name of each of its ``hosts``, and Ray's name of any other, by the ids of their Ray nodes."""
    names = {node["NodeID"]: node["NodeName"] for node in import_ray().nodes()}
    return names | {host.node_id: name for name, host in hosts.items()}


def lost_hosts(hosts: Mapping[str, LiveHost]) -> list[LiveHost]:
    """Return the hosts that have died, even if Ray has not noticed yet."""
    dead = {host.node_id for host in live_hosts() if not host.alive}
    return [host for host in hosts.values() if host.node_id in dead or not is_reachable(f"{host.address}:{host.port}")]


def gpu_users() -> dict[str, list[str]]:
    """Return who uses GPUs on each host, by node id, as far as Ray knows: actors, tasks and placement groups."""
    import_ray()
    from ray.core.generated.gcs_pb2 import ActorTableData, TaskEvents
    from ray.util import placement_group_table

    users: dict[str, list[str]] = {}
    ray_state = control_state()
    for content in ray_state.get_actor_table(None, "ALIVE"):
        actor = ActorTableData.FromString(content)
        if gpus := actor.required_resources.get("GPU", 0):
            user = f"{gpus:g} by actor '{actor.name or actor.class_name}' of job {actor.job_id.hex()}"
            users.setdefault(actor.address.node_id.hex(), []).append(user)
    for content in ray_state.get_task_events():
        task = TaskEvents.FromString(content)
        if gpus := _gpus_of_task(task):
            user = f"{gpus:g} by task '{task.task_info.name}' of job {task.job_id.hex()}"
            users.setdefault(task.state_updates.node_id.hex(), []).append(user)
    for group in placement_group_table().values():
        if group["state"] == "REMOVED":
            continue
        gpus_on_node: dict[str, float] = {}
        for index, node_id in group["bundles_to_node_id"].items():
            gpus_on_node[node_id] = gpus_on_node.get(node_id, 0) + group["bundles"][index].get("GPU", 0)
        user = f"placement group '{group['name'] or group['placement_group_id']}'"
        for node_id, count in gpus_on_node.items():
            if node_id and count:
                users.setdefault(node_id, []).append(f"{count:g} by {user}")
    return users


def _gpus_of_task(task: Any) -> float:
    """Return the GPUs of a running task, from Ray's TaskEvents; 0 for those of its actor or placement group."""
    from ray.core.generated.common_pb2 import TaskStatus, TaskType

    states = task.state_updates.state_ts_ns.keys()
    if (
        task.task_info.type != TaskType.NORMAL_TASK
        or task.task_info.placement_group_id
        or TaskStatus.RUNNING not in states
    ):
        return 0.0
    ended = {TaskStatus.FINISHED, TaskStatus.FAILED} & set(states)
    return 0.0 if ended else float(task.task_info.required_resources.get("GPU", 0))


def is_reachable(address: str) -> bool:
    """Return whether something listens at HOST:PORT."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S):
            return True
    except (OSError, ValueError):
        return False
