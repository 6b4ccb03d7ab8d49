"""The services of Ray that a run depends on: whether its control service and its hosts still answer."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlflow.runtime.objects.ray_api import import_ray
from rlflow.runtime.ray.cluster.binding import LiveHost
from rlflow.runtime.ray.cluster.hosts import is_reachable

# Seconds for what a live service answers at once.
_ANSWER_S = 2.0
# Seconds without an answer after which the control service is given up. Nobody restarts a private one: if nothing
# listens at its address, it has died, else it is stopped, or has no CPU or disk at the moment. A shared one may come
# back, if it keeps its state in a database. After 60 s Ray itself would end this process.
_DEAD_PRIVATE_S, _SILENT_PRIVATE_S, _SHARED_S = 4.0, 20.0, 45.0
# Without an answer, a question that took so long shows that this process had no CPU itself, so nobody else is silent.
_OWN_DELAY_S = 5.0
# Seconds in which nothing accepts a connection on a host, after which the host is given up.
_HOST_S = 2.0
# Seconds in which it is decided whether a host is lost, and seconds between two looks meanwhile.
_DECISION_S, _POLL_S = 8.0, 0.25


@dataclass(frozen=True)
class Outage:
    """The parts of Ray that do not answer any more."""

    control: str | None = None
    """A description of the silence of Ray's control service, without which nothing else works; None if it answers."""
    hosts: Mapping[str, str] = field(default_factory=dict)
    """A description of the loss of each lost host, by the id of its Ray node."""


class RayServices:
    """The control service of the connected Ray, and the hosts of a run."""

    def __init__(self, hosts: Mapping[str, LiveHost]) -> None:
        """Watch the hosts that the run uses, by the plan's names."""
        self._hosts = hosts
        self._address: str = import_ray().get_runtime_context().gcs_address
        self.are_private = self._address.startswith("127.")
        """The services were started by this run, and end with it."""
        self._silent_since: dict[str, float] = {}
        """The time at which each silent service was first found so, by address."""

    def outage(self) -> Outage:
        """Return what has not answered for so long that it is given up."""
        asked_at = time.monotonic()
        alive = alive_hosts()
        if alive is None and time.monotonic() - asked_at > _OWN_DELAY_S:
            return Outage()
        silence = self._silence(self._address, is_silent=alive is None)
        if alive is None and silence > self._control_limit_s():
            return Outage(
                control=f"Ray's control service (GCS) at {self._address} has not answered for {silence:.0f} s"
            )
        lost = {}
        for host in self._hosts.values():
            address = _address(host)
            if alive is not None and not alive.get(host.node_id, False):
                lost[host.node_id] = f"Ray has given up {host.name} ({host.address})"
            elif (silence := self._silence(address, is_silent=not is_reachable(address))) > _HOST_S:
                lost[host.node_id] = f"{host.name} ({address}) has not answered for {silence:.0f} s"
        return Outage(hosts=lost)

    def control_answers(self) -> bool:
        """Return whether the control service answers. Takes a few seconds at most."""
        return alive_hosts() is not None

    def lost_hosts(self) -> list[str]:
        """Return the plan's names of the hosts that are lost, once each is known to be lost or not."""
        deadline = time.monotonic() + _DECISION_S
        while True:
            lost = self.outage().hosts
            is_open = any(
                _address(host) in self._silent_since for host in self._hosts.values() if host.node_id not in lost
            )
            if not is_open or time.monotonic() > deadline:
                return [name for name, host in self._hosts.items() if host.node_id in lost]
            time.sleep(_POLL_S)

    def _control_limit_s(self) -> float:
        """Return for how many seconds the control service, which is silent now, may be so."""
        if not self.are_private:
            return _SHARED_S
        return _SILENT_PRIVATE_S if is_reachable(self._address) else _DEAD_PRIVATE_S

    def _silence(self, address: str, *, is_silent: bool) -> float:
        """Return for how many seconds a service has been silent."""
        now = time.monotonic()
        if not is_silent:
            self._silent_since.pop(address, None)
            return 0.0
        return now - self._silent_since.setdefault(address, now)


def _address(host: LiveHost) -> str:
    return f"{host.address}:{host.port}"


def alive_hosts() -> dict[str, bool] | None:
    """Return whether each host is alive for Ray, by node id; None if its control service does not answer in time."""
    ray = import_ray()
    from ray.core.generated.gcs_pb2 import GcsNodeInfo

    client: Any = ray.get_runtime_context().worker.gcs_client
    try:
        nodes = client.get_all_node_info(timeout=_ANSWER_S)
    except ray.exceptions.RpcError:
        return None
    return {node_id.hex(): node.state == GcsNodeInfo.ALIVE for node_id, node in nodes.items()}
