"""From the hosts and GPUs of a plan to those that Ray has: what is wanted, what fits, what came of it."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlflow.compiler.plan import Plan
from rlflow.errors import PlacementError
from rlflow.resources.cluster import Cluster, Host
from rlflow.resources.layout import Bundle

_CLUSTER = "cluster"


@dataclass(frozen=True, kw_only=True)
class LiveHost:
    """A host as Ray knows it."""

    node_id: str
    """Ray's; another one after every start of Ray."""
    name: str
    hostname: str
    address: str
    port: int
    """Where Ray listens on it."""
    gpus: int
    free_gpus: int
    alive: bool
    simulated: bool = False
    """It is a process of this machine, and its GPUs are numbers."""

    def is_called(self, name: str) -> bool:
        return name in (self.name, self.hostname, self.address, self.node_id)


@dataclass(frozen=True)
class Bound:
    """What one bundle of Ray's group has got."""

    node_id: str
    gpu_id: str
    """As the host's driver counts."""
    device_name: str | None = None
    """As nvidia-smi calls it; None without one."""


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A plan's bundles in Ray."""

    group: Any
    """Ray's placement group."""
    bundle_indices: Mapping[Bundle, int]
    """In the group."""
    gpu_ids: Mapping[Bundle, str]
    """For CUDA_VISIBLE_DEVICES on the bundle's host."""
    hosts: Mapping[str, LiveHost]
    """By the plan's name of each."""

    @property
    def simulated(self) -> bool:
        return any(host.simulated for host in self.hosts.values())

    @property
    def addresses(self) -> Mapping[str, str]:
        """Of each host, by the plan's name."""
        return {name: host.address for name, host in self.hosts.items()}


def wanted_bundles(plan: Plan) -> tuple[Bundle, ...]:
    """Each GPU that the plan uses, once: by host in the plan's order, then by number."""
    order = {host.name: index for index, host in enumerate(plan.cluster.hosts)}
    used = {bundle for placement in plan.roles.values() for bundle in placement.bundles}
    return tuple(sorted(used, key=lambda bundle: (order[bundle.host], bundle.gpu)))


def wanted_gpus(wanted: Iterable[Bundle]) -> dict[str, int]:
    """How many the plan uses of each of its hosts."""
    counts: dict[str, int] = {}
    for bundle in wanted:
        counts[bundle.host] = counts.get(bundle.host, 0) + 1
    return counts


def spare_bundles(planned: Sequence[Host], wanted: Sequence[Bundle], hosts: Mapping[str, LiveHost]) -> list[Bundle]:
    """GPUs to reserve beside those wanted, since Ray gives out those with low numbers first: where the plan leaves one
    out below another that it uses, and the host has them free."""
    counts = wanted_gpus(wanted)
    spare: list[Bundle] = []
    for host in planned:
        last = max((bundle.gpu for bundle in wanted if bundle.host == host.name), default=-1)
        left_out = [bundle for gpu in host.usable if gpu < last and (bundle := Bundle(host.name, gpu)) not in wanted]
        if left_out and hosts[host.name].free_gpus >= counts[host.name] + len(left_out):
            spare += left_out
    return spare


def match_hosts(planned: Sequence[Host], wanted: Mapping[str, int], live: Sequence[LiveHost]) -> dict[str, LiveHost]:
    """Ray's host for each that is used. Names of a shape (host-0, host-1, ...) mean any host; others the one so called.

    Raises PlacementError for hosts that are missing or have too few GPUs. Their GPUs may still be taken.
    """
    alive = sorted((host for host in live if host.alive), key=in_order)
    found = _called(wanted, alive)
    if all(host.name == f"host-{index}" for index, host in enumerate(planned)):
        if any(name not in found or found[name].gpus < count for name, count in wanted.items()):
            found = _first_fit(wanted, alive, "free_gpus")
        if len(found) < len(wanted):
            # Those that have enough, for a message that says who has taken them.
            found = _first_fit(wanted, alive, "gpus")
    known = [f"{host.name} ({host.gpus} GPUs)" for host in alive]
    if missing := [name for name in wanted if name not in found]:
        asked = ", ".join(f"'{name}' ({wanted[name]} GPUs)" for name in missing)
        raise PlacementError(
            _CLUSTER,
            f"the plan uses {len(wanted)} hosts, and Ray has none for {asked}",
            known=known,
            fix="plan for the hosts that are there (cluster=auto), or start Ray on those that are missing",
        )
    if small := [name for name, count in wanted.items() if found[name].gpus < count]:
        raise PlacementError(
            _CLUSTER,
            f"the plan uses {wanted[small[0]]} GPUs of host '{small[0]}', and Ray has {found[small[0]].gpus} there",
            known=known,
            fix="plan for the GPUs that are there (cluster=auto), or start Ray with all of them",
        )
    return found


def check_free(wanted: Mapping[str, int], hosts: Mapping[str, LiveHost], holders: Mapping[str, Sequence[str]]) -> None:
    """Raises PlacementError for hosts with too few free GPUs; ``holders`` says by node id who has those taken."""
    facts = []
    for name, host in hosts.items():
        if host.free_gpus < wanted[name]:
            taken = f" (taken: {', '.join(holders[host.node_id])})" if host.node_id in holders else ""
            facts.append(f"the plan uses {wanted[name]} GPUs of '{host.name}' and {host.free_gpus} are free{taken}")
    if facts:
        raise PlacementError(
            _CLUSTER,
            _first_few(facts),
            fix="wait for them or stop what has them, or plan for those that are free (cluster=auto)",
        )


def check_bound(
    planned: Sequence[Host],
    wanted: Sequence[Bundle],
    reserved: Sequence[Bundle],
    hosts: Mapping[str, LiveHost],
    bound: Sequence[Bound],
) -> dict[Bundle, int]:
    """The index in ``bound`` of each wanted bundle: on its host, and with the GPU of its number where that is there.

    ``bound`` is what those ``reserved``, the wanted among them, have got. Raises PlacementError when one is on a host
    that is not the planned one, when two have one GPU, or for a GPU that the plan may not use.
    """
    names = {host.node_id: name for name, host in hosts.items()}
    places = [(names.get(each.node_id, each.node_id), each.gpu_id) for each in bound]
    wrong = [
        f"GPU {bundle.gpu} of '{bundle.host}' is on '{place[0]}'"
        for bundle, place in zip(reserved, places, strict=True)
        if bundle.host != place[0]
    ]
    several = sorted({place for place in places if places.count(place) > 1})
    wrong += [f"GPU {gpu} of '{host}' is given twice" for host, gpu in several]
    if wrong:
        raise PlacementError(_CLUSTER, f"Ray has not bound what is planned: {_first_few(wrong)}", fix="run it again")
    indices: dict[Bundle, int] = {}
    for name in hosts:
        by_id = {bound[index].gpu_id: index for index, bundle in enumerate(reserved) if bundle.host == name}
        here = [bundle for bundle in wanted if bundle.host == name]
        same = {bundle: by_id.pop(str(bundle.gpu)) for bundle in here if str(bundle.gpu) in by_id}
        rest = [by_id[gpu_id] for gpu_id in sorted(by_id, key=_natural)]
        indices |= same | dict(zip([bundle for bundle in here if bundle not in same], rest, strict=False))
    usable = {host.name: host.free for host in planned if host.free is not None}
    for bundle, index in indices.items():
        gpu = bound[index].gpu_id
        if bundle.host in usable and gpu.isdecimal() and int(gpu) not in (usable[bundle.host] or ()):
            raise PlacementError(
                _CLUSTER,
                f"Ray has given GPU {gpu} of '{hosts[bundle.host].name}', which the plan may not use",
                known=usable[bundle.host] or (),
                fix="start Ray on the host with CUDA_VISIBLE_DEVICES set to those that may be used",
            )
    return indices


def check_kinds(cluster: Cluster, hosts: Mapping[str, LiveHost], bound: Mapping[Bundle, Bound]) -> None:
    """Raises PlacementError for a GPU of another kind than the planned one, where both are known by name."""
    kinds = {host.name: host.gpu for host in cluster.hosts}
    for bundle, got in bound.items():
        planned = cluster.gpus[kinds[bundle.host]].device_name
        if None not in (planned, got.device_name) and planned != got.device_name and not hosts[bundle.host].simulated:
            raise PlacementError(
                _CLUSTER,
                f"the plan is for GPUs of the kind {kinds[bundle.host]} ({planned}), and GPU {got.gpu_id} of"
                f" '{hosts[bundle.host].name}' is {got.device_name}",
                fix="plan for the GPUs that are there (cluster=auto, or their kind as in cluster=2x8@h200)",
            )


def placement_record(plan: Plan, placed: Placed) -> dict[str, Any]:
    """``placement.json``: planned beside bound, for each worker of each role."""
    return {
        "simulated": placed.simulated,
        "hosts": {
            name: {"name": host.name, "node_id": host.node_id, "address": host.address, "gpus": host.gpus}
            for name, host in placed.hosts.items()
        },
        "roles": {
            role: [
                [
                    {
                        "planned": {"host": bundle.host, "gpu": bundle.gpu},
                        "bound": {"host": placed.hosts[bundle.host].name, "gpu": placed.gpu_ids[bundle]},
                    }
                    for bundle in worker.bundles
                ]
                for worker in placement.workers
            ]
            for role, placement in plan.roles.items()
        },
    }


def _called(wanted: Iterable[str], alive: Sequence[LiveHost]) -> dict[str, LiveHost]:
    """The host of each name, where there is one that no other name means."""
    found: dict[str, LiveHost] = {}
    for name in wanted:
        called = [host for host in alive if host.is_called(name) and host not in found.values()]
        if called:
            found[name] = called[0]
    return found


def _first_fit(wanted: Mapping[str, int], alive: Sequence[LiveHost], field: str) -> dict[str, LiveHost]:
    """The most wanted first, each on the smallest host that has enough: finds a host for all if there is a way."""
    left = list(alive)
    chosen: dict[str, LiveHost] = {}
    for name in sorted(wanted, key=lambda name: -wanted[name]):
        enough = [host for host in left if getattr(host, field) >= wanted[name]]
        if enough:
            chosen[name] = min(enough, key=lambda host: getattr(host, field))
            left.remove(chosen[name])
    return {name: chosen[name] for name in wanted if name in chosen}


def _first_few(facts: Sequence[str]) -> str:
    more = [f"and {len(facts) - 3} more"] if len(facts) > 3 else []
    return "; ".join([*facts[:3], *more])


def in_order(host: LiveHost) -> tuple[Any, ...]:
    """For sorting."""
    return (_natural(host.name), host.node_id)


def _natural(text: str) -> list[tuple[int, str]]:
    """For sorting: host-2 before host-10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", text)]
